"""What a recipe may say and yet hardly means: told, never refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from orchestrator.actions import doubts, jobs, recipes
from orchestrator.actions.order import Order, settle
from orchestrator.actions.places import find_places
from orchestrator.errors import UsageError
from orchestrator.recipe import BUNDLED, load_recipe
from remote.spec import DFlashSpec


def _copied(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The bundled recipe as somebody copies and edits it."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    text = (BUNDLED / "smollm2.yaml").read_text(encoding="utf-8")
    for old, new in changes:
        assert re.search(old, text)
        text = re.sub(old, new, text)
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return folder / "mine.yaml"


def _warnings(tmp_path: Path, path: Path) -> str:
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")
    (checked,) = recipes.check(places, [str(path)])
    assert not checked.faults
    return "\n".join(checked.warnings)


def test_a_copy_that_keeps_the_name_of_another_recipe_is_told(tmp_path: Path) -> None:
    told = _warnings(tmp_path, _copied(tmp_path))

    assert "mine.yaml:2:7: name: is smollm2, which another recipe is: runs, evidence and filters of both say" in told
    assert "write name: mine" in told


def test_a_name_of_its_own_is_anybodys_to_choose(tmp_path: Path) -> None:
    assert "name:" not in _warnings(tmp_path, _copied(tmp_path, ("name: smollm2", "name: of a night")))


def test_a_schema_that_did_not_come_along_with_a_copy_is_told_with_the_command_that_brings_it(tmp_path: Path) -> None:
    path = _copied(tmp_path)

    told = _warnings(tmp_path, path)

    assert f"mine.yaml:1:1: $schema: there is no recipe.schema.json in {path.parent}" in told
    assert f"cp {BUNDLED / 'recipe.schema.json'} {path.parent}" in told
    (path.parent / "recipe.schema.json").write_text("{}", encoding="utf-8")
    assert "$schema" not in _warnings(tmp_path, path)


def test_a_schedule_that_cannot_happen_is_told_where_it_was_written(tmp_path: Path) -> None:
    changes = (("num_steps: .*", "num_steps: 60"), ("warmup_steps: .*", "warmup_steps: 500"))

    told = _warnings(tmp_path, _copied(tmp_path, *changes))

    assert re.search(
        r"mine.yaml:\d+:\d+: optim.warmup_steps: is 500 of 60 steps: the rate never reaches optim.lr", told
    )


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("train", {"num_steps": 60, "checkpoint_every": 1000}, "train.checkpoint_every: is 1000 of 60 steps"),
        ("train", {"num_steps": 60, "checkpoint_every": 60, "log_every": 100}, "train.log_every: is 100 of 60 steps"),
        ("train", {"num_steps": 60, "checkpoint_every": 60}, ""),
    ],
)
def test_what_comes_round_after_the_last_step_alone_is_told(section: str, change: dict[str, int], words: str) -> None:
    spec = load_recipe("smollm2").resolve("ce").spec
    assert isinstance(spec, DFlashSpec)
    optim = dataclasses.replace(spec.optim, warmup_steps=0)
    spec = dataclasses.replace(spec, optim=optim, **{section: dataclasses.replace(getattr(spec, section), **change)})

    told = [f"{path}: {message}" for path, message in doubts.of_schedule(spec)]

    assert [line.startswith(words) for line in told] == ([True] if words else [])


@pytest.mark.parametrize("path", sorted(BUNDLED.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_bundled_recipe_is_doubted(tmp_path: Path, path: Path) -> None:
    told = _warnings(tmp_path, path)

    assert not [line for line in told.splitlines() if "name:" in line or "steps:" in line or "$schema" in line]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("optim.learning_rate", "did you mean 'optim.lr'?"),
        ("learning_rate", "did you mean 'optim.lr'?"),
        ("lr", "did you mean 'optim.lr'?"),
        ("train.batch_size", "did you mean 'train.rows_per_step'?"),
        ("gamma", "did you mean 'loss.gamma'?"),
    ],
)
def test_a_key_under_its_usual_name_leads_to_the_one_here(key: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe("smollm2").resolve("ce").explain(key)

    assert words in str(caught.value)


def test_a_key_under_its_usual_name_in_a_file_leads_to_the_one_here(tmp_path: Path) -> None:
    path = _copied(tmp_path, ("  lr:", "  learning_rate:"))

    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")
    (checked,) = recipes.check(places, [str(path)])

    assert any("learning_rate" in line and "did you mean 'optim.lr'?" in line for line in checked.faults)


def test_a_launch_is_told_of_what_its_recipe_hardly_means(tmp_path: Path) -> None:
    _copied(tmp_path)
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")

    told = settle(
        dataclasses.replace(places, recipes=tmp_path / "recipes"), Order("mine", overrides=("train.num_steps=9",))
    ).doubts

    assert [
        re.search(word, line) is not None for word, line in zip(("name: is", "warmup", "checkpoint"), told, strict=True)
    ] == [True] * 3


def test_a_prepare_without_the_prompts_that_it_reads_is_refused(tmp_path: Path) -> None:
    """It was started, with a warning that it could not end well."""
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")

    with pytest.raises(UsageError, match=r"data.prompts: .* is neither in"):
        jobs.prepare(places, Order("qwen3.6-27b"))

    assert not places.db.exists()
