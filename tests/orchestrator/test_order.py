"""The command that repairs a refusal, as it is printed and kept."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from orchestrator.actions.again import command_line
from orchestrator.actions.order import Order, find_host, repair_command, settle, settle_stored, words_of
from orchestrator.actions.places import find_places
from orchestrator.actions.recipes import lacking_data
from orchestrator.errors import DraftyardError, UsageError
from orchestrator.recipe import BUNDLED, load_recipe
from orchestrator.store.rows import Document
from orchestrator.store.writes import Store
from remote.spec import DFlashSpec
from tests.orchestrator.runs import started
from tests.orchestrator.yard import RECIPE, Yard

BUNDLED_RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2.yaml"


def test_the_repair_names_the_variables_of_the_job_and_never_their_values() -> None:
    spec = load_recipe("smollm2").resolve("ce").spec
    order = Order("smollm2", host="gpu", gpus=("1",), env={"HF_TOKEN": "hf_canary", "A_FLAG": "1"})

    told = repair_command(order, spec)

    assert told.endswith(" -b ce --host gpu --gpus 1 --env A_FLAG --env HF_TOKEN")
    assert "hf_canary" not in told
    assert "--env" not in repair_command(dataclasses.replace(order, env={}), spec)


def test_what_to_type_next_orders_the_same_on_every_host() -> None:
    """Another value than was smoked would train the wrong thing for days."""
    order = Order("smollm2", more_hosts=("two",), overrides=("loss.gamma=8",), gpus=("5", "6"), env={"HF_TOKEN": "s"})

    told = command_line("launch", words_of(order))

    assert told == "draftyard launch smollm2 --host local --host two --set loss.gamma=8 --gpus 5,6 --env HF_TOKEN"


def test_a_host_that_another_folders_runs_have_is_unknown_here_and_its_folder_is_told(tmp_path: Path) -> None:
    """`reap gpu`, say, which the end of such a run advises."""
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")
    theirs = tmp_path / "an other" / "hosts.yaml"
    theirs.parent.mkdir()
    theirs.write_text("hosts: {gpu: }")
    with pytest.raises(UsageError, match="no host 'gpu'; known: local; a host is an alias in") as before:
        find_host(places, "gpu")
    with Store(places.db) as store:
        started(store, host="gpu", documents={Document.SPEC: "{}", Document.HOSTS_FILE: str(theirs)})

    with pytest.raises(UsageError, match="no host 'gpu'; known: local; a host is an alias in") as told:
        find_host(places, "gpu")

    lead = f"  its runs here have it from another folder: DRAFTYARD_HOSTS='{theirs}' draftyard …"
    assert str(told.value) == f"{before.value}\n{lead}"


@pytest.mark.parametrize(
    "text", ["{}", "[]", "no json", '{"spec_version": 99}', '{"spec_version": 1, "entry": "dflash"}']
)
def test_a_stored_spec_of_another_version_is_said_in_one_line(tmp_path: Path, text: str) -> None:
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")
    with Store(places.db) as store:
        started(store, "kxxxaaaa", documents={Document.SPEC: text})
        run = store.reader.run("kxxxaaaa")

    with pytest.raises(
        DraftyardError, match=r"the stored spec of run kxxxaaaa cannot be read: .*; launch it anew"
    ) as told:
        settle_stored(places, run, verb="resume")

    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"held_out": "nope.jsonl"}, ["data.held_out: 'nope.jsonl'"]),
        ({"prompts": "nope.jsonl"}, []),  # the answers are there
        ({"prompts": "no.jsonl", "answers": "none.jsonl"}, ["data.prompts: 'no.jsonl'"]),
        ({"answers": "none.jsonl"}, []),  # the target gives them
        ({"held_out": "/data/there.jsonl"}, []),
    ],
)
def test_data_that_nobody_has_is_missed_before_a_training_and_not_at_its_end(
    changed: dict[str, str], told: list[str]
) -> None:
    spec = load_recipe("smollm2").resolve("ce").spec
    assert isinstance(spec, DFlashSpec)
    spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, **changed))

    lines = lacking_data(spec, Path("/project/recipes"))

    assert [f"{path}: {line.partition(' is neither')[0]}" for path, line in lines] == told


def test_without_an_evaluation_at_the_end_no_held_out_prompts_are_missed() -> None:
    spec = load_recipe("smollm2").resolve("ce", ["data.held_out=nope.jsonl", "evaluate.at_end=false"]).spec
    assert isinstance(spec, DFlashSpec)

    assert lacking_data(spec, Path("/project/recipes")) == []


def test_a_settled_order_knows_the_file_of_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    text = BUNDLED_RECIPE.read_bytes()
    (tmp_path / "recipes" / "smollm2.yaml").write_bytes(text)
    places = find_places(tmp_path, {"HOME": str(tmp_path)})

    settled = settle(places, Order("smollm2"))

    file = str(tmp_path / "recipes" / "smollm2.yaml")
    assert settled.recipe == {"recipe_file": file, "recipe_hash": hashlib.sha256(text).hexdigest()}


@pytest.mark.parametrize("words", [("launch", "tiny", "--dry-run"), ("launch", "tiny"), ("smoke", "tiny")])
def test_a_program_that_is_not_shipped_is_named_before_anything_is(yard: Yard, words: tuple[str, ...]) -> None:
    """Word for word what `recipe check` says of it, by those who would start a job of it."""
    yard.edit("tiny.yaml", RECIPE.replace('"train.py"]', '"trian.py"]'))
    assert yard.run("recipe", "check", "tiny") == 0
    told = yard.err.partition("warning: ")[2].partition(" command: ")[2].splitlines()[0]
    assert "'trian.py' is not in " in told
    (yard.root / "hosts.yaml").write_text("hosts: {box: {address: 127.0.0.1, port: 9}}\n", encoding="utf-8")

    assert yard.run(*words, "--host", "box") == 4, "not even a host that can be reached is needed"

    assert yard.err.count(f"warning: command: {told}\n") == 1


def test_an_env_file_that_is_not_there_is_told_with_the_line_that_names_it(yard: Yard) -> None:
    file = yard.root / "hosts.yaml"
    file.write_text("hosts:\n  local:\n    env_file: /nowhere/a.env\n", encoding="utf-8")

    assert yard.run("launch", "tiny", "--dry-run") == 2

    told = "env file /nowhere/a.env: No such file or directory; write KEY=VALUE lines there, or correct its path at "
    assert f"{told}{file}:3:5\n" in yard.err


def test_a_slip_in_an_entry_that_is_not_used_is_a_warning(yard: Yard) -> None:
    file = yard.root / "hosts.yaml"
    file.write_text("hosts:\n  bad: {adress: x}\n", encoding="utf-8")
    told = f"{file}:2:9: hosts.bad.adress: no key 'adress'; "

    assert yard.run("launch", "tiny", "--dry-run") == 3, "nothing of it was smoked; no more is wrong"
    assert yard.err.count(f"warning: {told}") == 1
    assert yard.run("hosts") == 0
    assert f"warning: {told}" in yard.err
    (line,) = [line for line in yard.out.splitlines() if line.startswith("bad ")]
    assert "entry at fault" in line, "no address that it would be reached at"
    assert [host["faults"] for host in yard.json("hosts")["hosts"]][-1][0].startswith(told)
    assert yard.run("launch", "tiny", "--dry-run", "--host", "bad") == 2
    assert f"error: {told}" in yard.err


def test_data_that_a_bundled_recipe_lacks_does_not_go_into_draftyards_own_folder() -> None:
    spec = load_recipe("smollm2").resolve("ce", ["data.held_out=nope.jsonl"]).spec

    ((_, ours),) = lacking_data(spec, BUNDLED)
    ((_, theirs),) = lacking_data(spec, Path("/project/recipes"))

    assert f"copy the recipe (cp {BUNDLED / 'smollm2.yaml'} recipes/) and put it into recipes/data" in ours
    assert "put it there" in theirs
