"""The recipes that come with the project: they load, say why, and hold the published numbers."""

import json
from pathlib import Path

import pytest

from orchestrator.recipe import BUNDLED, load_recipe
from remote.plan import plan
from remote.spec import DFlashSpec, RolesSpec, ScriptSpec, Spec, num_drafter_parameters
from tests.remote.specs import published_layers

NAMES = sorted(path.stem for path in BUNDLED.glob("*.yaml"))
DFLASH = [name for name in NAMES if name != "own-script"]


def resolve(name: str, branch: str | None = None) -> DFlashSpec:
    spec: Spec = load_recipe(name).resolve(branch).spec
    assert isinstance(spec, DFlashSpec)
    return spec


def test_the_bundle_is_these_four() -> None:
    assert NAMES == ["own-script", "qwen3-8b", "qwen3.6-27b", "smollm2"]


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_recipe_loads_and_every_branch_says_why(name: str) -> None:
    recipe = load_recipe(name)

    assert recipe.name == name
    assert recipe.why.endswith(".")
    for branch in recipe.branches.values():
        assert branch.why.endswith("."), branch.name


@pytest.mark.parametrize(
    ("name", "branch", "parameters"),
    [("smollm2", "ce", 8_076_928), ("qwen3-8b", "ce", 1_048_626_432), ("qwen3.6-27b", "ddtree", 1_730_213_120)],
)
def test_a_drafter_has_the_published_number_of_parameters(name: str, branch: str, parameters: int) -> None:
    spec = resolve(name, branch)

    assert num_drafter_parameters(spec.target, spec.drafter) == parameters


@pytest.mark.parametrize("name", DFLASH)
def test_captured_layers_are_spread_evenly(name: str) -> None:
    spec = resolve(name)

    assert spec.drafter.captured_layers == published_layers(spec.target.num_layers, len(spec.drafter.captured_layers))


def test_the_small_target_has_the_parameters_its_shape_gives() -> None:
    target = resolve("smollm2").target
    hidden, kv, inner = 576, 3 * 64, 1536
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden

    assert target.num_parameters == 49_152 * hidden + 30 * layer + hidden


def test_the_branches_of_the_large_recipe_are_the_first_users() -> None:
    v6, ddtree, ddtree_24 = (resolve("qwen3.6-27b", name) for name in ("v6", "ddtree", "ddtree-24"))

    assert (v6.data.max_anchors, v6.drafter.block_size) == (512, 16)
    assert (ddtree.data.max_anchors, ddtree.drafter.block_size, ddtree_24.drafter.block_size) == (1024, 32, 24)
    assert ddtree.loss.terms == {"ce": 1.0, "kl": 0.15, "cap": 0.05}
    assert (ddtree.loss.gamma, ddtree.loss.streak_beta > 0) == (10.0, True)
    assert ddtree.drafter.layer_types == ["sliding"] * 4 + ["full"]
    assert ddtree.data.noise.kind == "gaussian"
    assert ddtree.env == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_MODULE_LOADING": "LAZY"}


def test_the_branch_with_roles_is_the_first_users_division_on_as_many_rows_and_fits_their_cards() -> None:
    alone, shared = resolve("qwen3.6-27b", "ddtree"), resolve("qwen3.6-27b", "ddtree-8gpu")

    assert shared.roles == RolesSpec(target=5, drafter=3, queue=20)
    assert shared.train.accumulation * shared.train.num_steps == pytest.approx(alone.train.num_steps, rel=1e-4)
    assert shared.optim.warmup_steps == pytest.approx(0.04 * shared.train.num_steps, rel=0.01)
    assert plan(shared, capacity_bytes=95 * 2**30, device="cuda").verdict == "fits"


def test_the_demos_data_files_are_shipped() -> None:
    data = resolve("smollm2").data

    for name in (data.prompts, data.answers, data.held_out):
        lines = (BUNDLED / "data" / name).read_text(encoding="utf-8").splitlines()
        assert lines
        assert isinstance(json.loads(lines[0]), dict)


def test_the_example_script_is_a_folder_with_its_command_and_rung() -> None:
    spec = load_recipe("own-script").resolve("slow").spec

    assert isinstance(spec, ScriptSpec)
    folder = BUNDLED / spec.folder
    assert all((folder / Path(name)).is_file() for name in (spec.command[1], *spec.smoke.scripts.values()))
    assert set(spec.smoke.scripts) == set(spec.smoke.rungs)
