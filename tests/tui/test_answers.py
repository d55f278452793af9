"""What is asked of the recipe about a run: where its values came from, and what would fit instead."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import plan_body, plan_memory
from orchestrator.actions.recipes import identity, load
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, FailureRow, RunRow, State
from orchestrator.verbs.plan_page import plan_page
from remote.spec import dump
from tests.tui.world import GIB, NOW_S, Writer, Yard, steps
from tests.tui.yard import OOM
from tui.answers import Answers, answers_of
from tui.detail import RunDetail, read_detail
from tui.editor import recipe_of
from tui.failure import failure_lines
from tui.ordering import advised
from tui.pieces import text_of, width_of
from tui.snapshot import Ask, CurvesAsk, Room
from tui.spec import spec_lines
from tui.wording import gib

pytestmark = pytest.mark.slow  # a whole app a test

RECIPE = """name: mine
why: a recipe of the test
base:
  entry: dflash
  preset: smollm2-135m
  data: {prompts: p.jsonl, answers: a.jsonl, held_out: h.jsonl, anchors_per: row, row_tokens: 512, max_anchors: 32}
  train: {num_steps: 100, dtype: bfloat16}
branches:
  plain: {why: nothing else}
  deep:
    why: deeper
    drafter:
      block_size: 24
    data:
      max_anchors: 256
"""
OVERRIDES = ("train.seed=7",)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(RECIPE)
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


def launched(
    places: Places,
    run_id: str,
    word: str,
    branch: str,
    *,
    capacity_gib: int,
    overrides: tuple[str, ...],
    recipe: str = "",
    launch: Mapping[str, Any] | None = None,
) -> None:
    """A run as `launch` writes one: the resolved spec, the plan against the card, what it was told."""
    made = plan_memory(places, word, branch=branch, overrides=overrides, capacity_bytes=capacity_gib * GIB)
    yard = Yard(places.db)
    documents = {
        Document.SPEC: dump(made.spec),
        Document.PLAN: json.dumps(plan_body(made.plan)),
        Document.LAUNCH: json.dumps(launch or {"gpus": ["5"], "overrides": list(overrides)}),
    }
    with yard.store:
        yard.run(run_id, f"{recipe or word}/{branch}", documents=documents, num_steps=100)
        Writer(yard.store, run_id).tell(steps(0, 20, 1, begin_s=NOW_S - 900, step_s=1.0, seed=1))


def ran_out(
    places: Places, run_id: str, *, reason: str = "gpu_oom", more: Mapping[str, Any] | None = None, **facts: float
) -> None:
    yard = Yard(places.db)
    sizes = {f"{name}_bytes": int(size * GIB) for name, size in facts.items()}
    failure = FailureRow(
        run_id=run_id, attempt=1, kind=reason, message="CUDA out of memory", hint="", source="rank0", stage="forward",
        step=21, traceback="", facts={**sizes, **(more or {})}, at_s=NOW_S, is_first_cause=True,
    )  # fmt: skip
    with yard.store:
        yard.store.replace_failures(run_id, 1, [failure])
        yard.state(run_id, State.FAILED, reason=reason, evidence="exit file: code 1")


def in_pieces(places: Places, run_id: str, *, grows: bool = False) -> None:
    """Memory was there, but in pieces."""
    words = [] if grows else [{"word": "expandable_segments", "text": "set it"}]
    facts = {"cause": "fragmentation", "remedies": [*words, {"word": "even_sizes", "text": "pad"}]}
    ran_out(places, run_id, more=facts)


def told(places: Places, run_id: str) -> tuple[RunDetail, RunRow]:
    room = Room(places.db, places)
    snapshot = room.read(Ask(wants_list=False, run=run_id, wants_answers=True), NOW_S)
    room.close()
    assert snapshot is not None
    assert snapshot.detail is not None
    return snapshot.detail, snapshot.detail.run


def line_of(text: str, *words: str) -> str:
    return next((line for line in text.splitlines() if all(word in line for word in words)), "")


def test_every_value_says_the_layer_and_the_line_that_decided_it(places: Places) -> None:
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=OVERRIDES)

    text = text_of(spec_lines(told(places, "orig2345")[0], 120))

    assert "mine.yaml:15  branch deep" in line_of(text, "max_anchors ", "256")
    assert "mine.yaml:6  base" in line_of(text, "row_tokens", "512")
    assert "smollm2-135m.yaml" in line_of(text, "hidden_size", "preset")
    assert "--set" in line_of(text, "seed ", "7")
    assert "default" in line_of(text, "keep_last")


def test_the_difference_from_the_base_is_shown_first(places: Places) -> None:
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=OVERRIDES)

    text = text_of(spec_lines(told(places, "orig2345")[0], 120))
    first = text.split("\n\n")[0]

    assert "Different from base" in first
    assert "32 → 256" in line_of(first, "data.max_anchors")
    assert "0 → 7" in line_of(first, "train.seed")
    assert "row_tokens" not in first


def test_a_branch_without_changes_says_so(places: Places) -> None:
    launched(places, "orig2345", "mine", "plain", capacity_gib=95, overrides=())

    assert "nothing but the branch's name" in text_of(spec_lines(told(places, "orig2345")[0], 120))


def test_a_recipe_edited_since_is_said_and_the_run_keeps_its_value(places: Places, tmp_path: Path) -> None:
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=OVERRIDES)
    (tmp_path / "recipes" / "mine.yaml").write_text(RECIPE.replace("row_tokens: 512", "row_tokens: 640"))

    text = text_of(spec_lines(told(places, "orig2345")[0], 120))

    assert "mine.yaml:6  base" in line_of(text, "row_tokens", "512")
    assert "ran with 512; the recipe says 640 now" in text


def test_another_file_of_that_name_is_not_taken_for_the_recipe(places: Places, tmp_path: Path) -> None:
    """It lies where the name leads, and is called something else."""
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=())
    (tmp_path / "recipes" / "mine.yaml").write_text(RECIPE.replace("name: mine", "name: theirs"))

    answers = told(places, "orig2345")[0].answers

    assert "mine.yaml is another file of that name: its recipe is called theirs" in answers.fault
    assert not answers.told


def test_a_file_that_says_otherwise_may_be_another(places: Places, tmp_path: Path) -> None:
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=OVERRIDES)
    assert not told(places, "orig2345")[0].answers.doubt
    (tmp_path / "recipes" / "mine.yaml").write_text(RECIPE.replace("row_tokens: 512", "row_tokens: 640"))

    text = " ".join(text_of(spec_lines(told(places, "orig2345")[0], 120)).split())

    assert "says 1 value differently: it was edited since, or another file of that name was launched" in text


def test_the_file_that_a_launch_kept_is_asked_and_no_other(places: Places, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text(RECIPE.replace("row_tokens: 512", "row_tokens: 640"))
    launch = {"overrides": [], **identity(load(places, str(elsewhere)))}
    launched(places, "orig2345", str(elsewhere), "deep", capacity_gib=95, overrides=(), recipe="mine", launch=launch)

    found = told(places, "orig2345")[0].answers

    assert found.told["data.row_tokens"].now == 640
    assert "elsewhere.yaml" in found.told["data.row_tokens"].where
    assert not found.doubt


def test_the_editor_opens_the_recipe_that_was_launched(places: Places, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text(RECIPE)
    launch = {"overrides": [], **identity(load(places, str(elsewhere)))}
    launched(places, "orig2345", str(elsewhere), "deep", capacity_gib=95, overrides=(), recipe="mine", launch=launch)
    room = Room(places.db, places)

    assert recipe_of(places, room.reader.run("orig2345"))(room) == elsewhere
    room.close()


def test_a_file_that_moved_is_known_by_its_content(places: Places, tmp_path: Path) -> None:
    elsewhere, here = tmp_path / "elsewhere.yaml", tmp_path / "recipes" / "mine.yaml"
    elsewhere.write_text(RECIPE)
    launch = {"overrides": [], **identity(load(places, str(elsewhere)))}
    launched(places, "orig2345", str(elsewhere), "deep", capacity_gib=95, overrides=(), recipe="mine", launch=launch)
    elsewhere.unlink()
    assert told(places, "orig2345")[0].answers.told

    here.write_text(f"{RECIPE}# something else")

    fault = told(places, "orig2345")[0].answers.fault
    assert f"is another file of that name: the run was launched from {elsewhere}, which is gone" in fault


def test_what_would_fit_needs_no_recipe(places: Places, tmp_path: Path) -> None:
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=OVERRIDES)
    ran_out(places, "orig2345", requested=2.0, free=1.0, total=5.0, own_use=4.0)
    (tmp_path / "recipes" / "mine.yaml").unlink()

    answers = told(places, "orig2345")[0].answers

    assert "no recipe 'mine'" in answers.fault
    assert answers.fits is not None
    assert answers.fits.changes


def test_a_host_that_ran_out_is_not_told_of_the_card(places: Places) -> None:
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=OVERRIDES)
    ran_out(places, "orig2345", reason="host_oom")

    assert told(places, "orig2345")[0].answers.fits is None


def test_the_verb_says_what_would_fit_as_the_screen_does(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=OVERRIDES)
    ran_out(places, "orig2345", requested=2.0, free=1.0, total=5.0, own_use=4.0)
    fits = told(places, "orig2345")[0].answers.fits
    assert fits is not None

    body = json.loads(_shown(capsys, "orig2345", "--json", places=places))["fits"]
    page = _shown(capsys, "orig2345", "--oom", places=places)

    assert [item["driver_bytes"] for item in body["planned"]["switches"]] == [item.peak_bytes for item in fits.changes]
    assert body["short_bytes"] > 0
    assert fits.changes[0].name in page
    assert "more than its plan said" in page
    assert "draftyard show orig2345 --oom    # what would fit" in _shown(capsys, "orig2345", places=places)


def _shown(capsys: pytest.CaptureFixture[str], *words: str, places: Places) -> str:
    with pytest.raises(SystemExit):
        cli.main(["show", *words, "--db", str(places.db)])
    return capsys.readouterr().out


def test_a_recipe_that_is_gone_leaves_the_values(places: Places, tmp_path: Path) -> None:
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=OVERRIDES)
    (tmp_path / "recipes" / "mine.yaml").unlink()

    text = text_of(spec_lines(told(places, "orig2345")[0], 120))

    assert "no recipe 'mine'" in text
    assert "256" in line_of(text, "max_anchors")


@pytest.mark.slow
@pytest.mark.parametrize("width", [58, 78, 120, 198])
def test_no_line_of_the_spec_is_wider_than_its_pane(places: Places, width: int) -> None:
    launched(places, "orig2345", "qwen3.6-27b", "ddtree", capacity_gib=95, overrides=OVERRIDES)

    assert max(width_of(line) for line in spec_lines(told(places, "orig2345")[0], width)) <= width


def test_one_anchor_is_counted_as_one(places: Places) -> None:
    made = plan_memory(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=95 * GIB)
    assert made.largest is not None
    one = dataclasses.replace(made, largest=dataclasses.replace(made.largest, max_anchors=1))

    assert advised(one).largest == "1 anchor × block 32"
    assert any("1 anchor x block 32" in line for line in plan_page(one, width=None))


def test_a_run_that_ran_out_of_memory_says_what_would_fit(places: Places) -> None:
    launched(places, "orig2345", "qwen3.6-27b", "ddtree", capacity_gib=95, overrides=("data.max_anchors=2048",))
    ran_out(places, "orig2345", requested=11.15, free=9.31, total=94.97, own_use=85.66)
    detail = told(places, "orig2345")[0]

    text = text_of(failure_lines(detail, 78))

    made = plan_memory(
        places, "qwen3.6-27b", branch="ddtree", overrides=["data.max_anchors=2048"],
        capacity_bytes=95 * GIB - detail.answers.short_bytes,
    )  # fmt: skip
    assert made.largest is not None
    assert f"{made.largest.max_anchors:,} anchors × block 32" in text
    for switch in made.switches:
        line = next(line for line in text.splitlines() if line.partition("  ")[2].startswith(switch.name))
        assert f"{switch.plan.driver_bytes / GIB:.1f} GiB" in line
        assert switch.overrides[0] in text


def test_what_the_plan_was_short_of_is_taken_off_the_card(places: Places) -> None:
    """The run needed 97 GiB: whatever is offered must leave room for what the plan had not said."""
    launched(places, "orig2345", "qwen3.6-27b", "ddtree", capacity_gib=95, overrides=())
    ran_out(places, "orig2345", requested=3.0, free=1.0, total=95.0, own_use=94.0)
    detail = told(places, "orig2345")[0]

    text = text_of(failure_lines(detail, 100))

    planned = plan_memory(places, "qwen3.6-27b", branch="ddtree", capacity_bytes=95 * GIB).plan.driver_bytes / GIB
    assert planned < 95
    assert detail.answers.short_bytes / GIB == pytest.approx(97 - planned, abs=0.1)
    assert f"{97 - planned:.1f} GiB more than the plan said" in text
    assert detail.answers.fits is not None
    assert all(item.peak_bytes < (planned - 2) * GIB for item in detail.answers.fits.changes)


def test_the_part_of_the_plan_that_was_exceeded_is_said_as_show_says_it(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(places, "orig2345", "qwen3.6-27b", "ddtree", capacity_gib=95, overrides=())
    ran_out(places, "orig2345", allocated=83.0, requested=11.0, free=1.0, total=95.0, own_use=86.0)
    detail = told(places, "orig2345")[0]
    over = detail.answers.exceeded
    assert over is not None

    text = " ".join(text_of(failure_lines(detail, 78)).split())
    shown = " ".join(_shown(capsys, "orig2345", "--oom", places=places).split())

    sizes = (over.planned_bytes, over.component_bytes, over.needed_bytes)
    on_screen = [gib(size) for size in sizes]
    printed = [f"{size / GIB:.2f} GiB" for size in sizes]  # a place more
    sentence = "forward was planned with {} allocated, {} of it {part}; it needed {}"
    assert sentence.format(*on_screen, part=over.component) in text
    assert f"exceeded: {sentence.format(*printed, part=over.component)}" in shown
    assert text.index("was planned with") < text.index("What would")
    assert f"planned, {gib(detail.answers.short_bytes)} kept free" in text


def test_a_run_that_did_not_run_out_of_memory_is_not_planned_again(places: Places) -> None:
    launched(places, "orig2345", "mine", "deep", capacity_gib=95, overrides=())

    assert told(places, "orig2345")[0].answers.fits is None


def test_a_run_from_elsewhere_has_its_values_and_says_what_is_missing(tmp_path: Path, places: Places) -> None:
    yard = Yard(places.db)
    with yard.store:
        yard.run("else2345", "theirs/branch", documents={Document.SPEC: '{"recipe": "theirs"}'})
    with Reader(places.db) as reader:
        detail = read_detail(reader, reader.run("else2345"), CurvesAsk())

    assert answers_of(None, detail) == Answers()
    assert "no recipe 'theirs'" in answers_of(places, detail).fault


def test_a_bad_end_that_nothing_explains_shows_its_last_words(filled_yard: Path) -> None:
    words = "step 10\nCUDA error: device-side assert triggered"
    failure = FailureRow(
        run_id=OOM, attempt=1, kind="unexplained", message="exit status 1: CUDA error: device-side assert triggered",
        hint="nothing known says why", source="stderr", stage=None, step=None, traceback=words, facts={}, at_s=NOW_S,
        is_first_cause=True,
    )  # fmt: skip
    with Reader(filled_yard) as reader:
        detail = read_detail(reader, reader.run(OOM), CurvesAsk())

    text = text_of(failure_lines(dataclasses.replace(detail, failures=(failure,)), 78))

    assert text.startswith("Ended badly, and nothing known says why")
    assert "exit status 1: CUDA error" in text
    assert "Last words" in text
    assert "Traceback" not in text
    assert "Nothing failed" not in text


def test_the_allocators_setting_has_its_number_and_the_changes_those_behind_it(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    """`smoke --try 1` takes it, by the words of the page that `show --oom` prints."""
    launched(places, "oom23456", "mine", "deep", capacity_gib=2, overrides=OVERRIDES)
    in_pieces(places, "oom23456")
    detail, _ = told(places, "oom23456")

    text = text_of(failure_lines(detail, 100))
    with pytest.raises(SystemExit):
        cli.main(["show", "oom23456", "--oom", "--db", str(places.db)])
    page = capsys.readouterr().out

    first, second = (" ".join(line.split()) for line in text.splitlines() if line.startswith(("1 ", "2 ")))
    assert first == "1 segments that grow"
    assert f"\n{first}\n" in page
    assert f"\n{' '.join(second.split()[:3])}" in page  # the first change of the plan
    assert "--env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
    said, told_there = (" ".join(part.split()) for part in (text, page))
    for words in (
        "it ran out of pieces that were large enough; the first thing to try is a setting of the allocator",
        "draftyard smoke mine -b deep --host pve-a --try 1 # the rungs with it; N for the Nth",
    ):
        assert words in said
        assert words in told_there


def test_where_segments_grow_already_no_number_is_told_for_it(places: Places) -> None:
    launched(places, "oom23456", "mine", "deep", capacity_gib=2, overrides=())
    in_pieces(places, "oom23456", grows=True)

    text = text_of(failure_lines(told(places, "oom23456")[0], 100))

    assert "its segments grow already" in " ".join(text.split())
    assert "--try" not in text


def test_a_script_that_ran_out_of_pieces_has_the_setting_alone(places: Places) -> None:
    yard = Yard(places.db)
    with yard.store:
        documents = {Document.SPEC: json.dumps({"entry": "script"}), Document.LAUNCH: json.dumps({})}
        yard.run("own23456", "own/main", documents=documents)
    in_pieces(places, "own23456")

    text = text_of(failure_lines(told(places, "own23456")[0], 100))

    assert "1  segments that grow" in text
    assert "draftyard smoke own -b main --host pve-a --try 1" in " ".join(text.split())
