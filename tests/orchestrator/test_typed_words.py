"""What a person types beside the mark, or waits for by another name, is answered with the word that was meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from orchestrator.units import parse_bytes
from tests.orchestrator.runs import batch, event, started
from tests.orchestrator.yard import Yard

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "meant"), [("95GBi", "95GiB"), ("95Gi", "95GiB"), ("1.5ibm", "1.5MiB"), ("95GX", None), ("95bytes", None)]
)
def test_a_unit_beside_the_mark_is_answered_with_the_one_that_was_meant(text: str, meant: str | None) -> None:
    with pytest.raises(ValueError, match="is unknown; known units are") as refused:
        parse_bytes(text)

    assert str(refused.value).endswith(f"; did you mean '{meant}'?" if meant else "TB")


@pytest.mark.parametrize(
    ("words", "group", "near"), [(["config", "shwo"], "config", "show"), (["recipe", "chekc"], "recipe", "check")]
)
def test_a_verb_of_a_group_is_answered_as_one_of_all_is(yard: Yard, words: list[str], group: str, near: str) -> None:
    assert yard.run(*words) == 2
    assert yard.err.splitlines()[0] == f"error: no verb {words[1]!r} of {group}; did you mean {near!r}?"

    assert yard.run(group, "xyzzy") == 2
    assert yard.err.startswith(f"error: no verb 'xyzzy' of {group}; the verbs are ")


@pytest.mark.parametrize("option", ["--json", "-q", "--no-color"])
def test_an_option_of_every_verb_before_the_verb_is_said_to_go_behind_it(yard: Yard, option: str) -> None:
    assert yard.run(option, "ls") == 2
    told = f"{option} goes behind the verb: draftyard VERB {option}"
    assert told in yard.err + yard.out

    assert yard.run("--jsn", "ls") == 2
    assert "No such option" in yard.err


def test_a_file_in_place_of_a_run_folder_is_said_to_be_one(yard: Yard) -> None:
    (yard.root / "run.csv").write_text("x")

    assert yard.run("import", "run.csv") == 2

    assert "run.csv is a file; a folder was expected" in yard.err


def test_a_run_without_tags_says_so(yard: Yard) -> None:
    with Store(yard.root / "runs.db") as store:
        started(store, "aaaaaaaa")
        store.set_state("aaaaaaaa", State.FAILED, evidence="x")

    assert yard.run("tag", "aaaa") == 0
    assert (yard.out, yard.err) == ("", "run aaaaaaaa has no tags\n")


@pytest.mark.slow
def test_whoever_waits_for_the_last_run_is_told_its_id_first_and_on_the_way_back(yard: Yard) -> None:
    """By the time somebody comes back, @last may be another run."""
    assert yard.run("launch", "tiny", "-b", "slow", "--force", "a test") == 0, yard.err
    run_id = yard.out.strip()
    command = [sys.executable, "-m", "orchestrator.cli", "wait", "@last"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        first = waiting.stderr.readline()

        waiting.send_signal(signal.SIGINT)
        rest = waiting.communicate(timeout=60)[1]

    assert first == f"waiting for run {run_id}\n"
    assert f"draftyard wait {run_id}" in rest
    assert "@last" not in rest


@pytest.mark.slow
def test_a_ladder_that_was_climbed_leads_to_the_launch(yard: Yard) -> None:
    assert yard.run("smoke", "tiny", "--set", "settings.num_steps=7") == 0, yard.err

    assert yard.err.splitlines()[-1] == "next: draftyard launch tiny -b main --host local --set settings.num_steps=7"


@pytest.mark.slow
def test_a_resume_says_which_attempt_it_starts_and_from_where(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "-b", "broken", "--force", "a test", "--follow") == 10, yard.err
    run_id = yard.json("ls")["runs"][0]["id"]

    assert yard.run("resume", run_id) == 0, yard.err
    assert f"starting attempt 2 of run {run_id}: no checkpoint of it is known" in yard.err
    assert "attempt 2 runs on local; " in yard.err

    assert yard.run("wait", run_id) == 10
    with Store(yard.root / "runs.db") as store:
        told = event(90, "checkpoint", step=27, path="checkpoints/step-00000027", size_bytes=4, is_best=False)
        store.ingest(batch([told], run_id=run_id, attempt=2, writer="rank7"))
    (yard.folder(run_id) / "checkpoints" / "step-00000027").mkdir(parents=True)

    assert yard.run("resume", run_id) == 0, yard.err
    assert f"starting attempt 3 of run {run_id}: its newest checkpoint is of step 27" in yard.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("status", "ls or show"),
        ("run", "launch"),
        ("train", "launch"),
        ("tail", "logs"),
        ("kill", "stop"),
        ("ps", "ls"),
    ],
)
def test_a_verb_as_other_tools_have_it_is_answered_with_the_one_here(yard: Yard, typed: str, meant: str) -> None:
    assert yard.run(typed) == 2

    assert yard.err.splitlines()[0] == f"error: no verb {typed!r}; here it is {meant}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["resume", "k7f3", "--set", "optim.lr=1e-4"], "a resume keeps the run's values"),
        (["resume", "k7f3", "--set", "optim.lr=1e-4"], "draftyard launch RECIPE --set optim.lr=1e-4"),
        (["resume", "k7f3", "-b", "ce"], "a resume keeps the run's values"),
        (["plot", "k7f3", "--to", "a.png"], "-o FILE names the picture"),
        (["resume", "k7f3", "--foo"], "No such option"),
    ],
)
def test_an_option_that_another_verb_has_is_answered_with_what_this_one_does(
    yard: Yard, words: list[str], told: str
) -> None:
    assert yard.run(*words) == 2

    assert told in yard.err


@pytest.mark.parametrize("word", ["last", "failed", "newest"])
def test_a_selector_without_its_sign_is_answered_with_the_one_that_has_it(yard: Yard, word: str) -> None:
    with Store(yard.root / "runs.db") as store:
        started(store)

    assert yard.run("show", word) == 5

    assert f"did you mean '@{'failed' if word == 'failed' else 'last'}'?" in yard.err


def test_no_memory_is_no_card(yard: Yard) -> None:
    assert yard.run("plan", "smollm2", "--gpu", "0") == 2

    assert "is 0; nothing fits into that" in yard.err
    assert "0GiB" not in yard.err


@pytest.mark.parametrize(("kind", "told"), [("train", "it has no checkpoint"), ("export", "wrote a drafter")])
def test_a_run_that_has_nothing_to_pull_ends_it_as_it_ends_an_export(yard: Yard, kind: str, told: str) -> None:
    """Exit 1: no word was wrong."""
    with Store(yard.root / "runs.db") as store:
        started(store, "kbareaaa", kind=kind)
        store.set_state("kbareaaa", State.STOPPED, evidence="as asked")

    assert yard.run("pull", "kbareaaa") == 1
    assert told in yard.err


def test_metrics_that_take_the_place_of_a_file_say_so(yard: Yard) -> None:
    with Store(yard.root / "runs.db") as store:
        started(store, "kfileaaa")
        store.ingest(batch([event(1, "metrics", step=1, values={"loss": 2.0})], run_id="kfileaaa"))
    words = ("export", "kfileaaa", "--metrics", "csv", "--to", "m.csv")

    assert yard.run(*words) == 0
    assert "took the place" not in yard.err
    assert yard.run(*words) == 0
    assert "it took the place of the m.csv that was there" in yard.err


def test_all_recipes_are_listed_with_their_branches(yard: Yard) -> None:
    """Those of the project and the bundled ones; a broken one with its first fault."""
    yard.edit("wrong.yaml", "name: wrong\nbase: {entry: nothing}\n")

    assert yard.run("recipe", "list") == 0
    lines = [line.split() for line in yard.out.splitlines()]
    assert ["tiny", "main", "(default)", "The", "shortest", "job", "there", "is."] in lines
    assert ["qwen3.6-27b", "ddtree"] in [line[:2] for line in lines]
    assert any(line[:2] == ["wrong", "-"] for line in lines)
    assert "wrong.yaml:" in yard.err
    found = {item["name"]: item for item in yard.json("recipe", "list")["recipes"]}
    assert [branch["name"] for branch in found["tiny"]["branches"]] == ["main", "slow", "broken", "oom"]
    assert found["tiny"]["default_branch"] == "main"
    assert found["wrong"]["faults"]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("slow", "it is a branch: own-script -b slow or tiny -b slow"),
        ("tiny:slow", "a branch is named with -b: tiny -b slow"),
        ("xyzzy", "all branches: draftyard recipe list"),
    ],
)
def test_a_branch_in_place_of_a_recipe_is_said_to_be_one(yard: Yard, word: str, hint: str) -> None:
    assert yard.run("plan", word) == 2

    assert yard.err.startswith(f"error: no recipe {word!r}; known: ")
    assert yard.err.rstrip().endswith(hint)


def test_an_empty_list_of_scripts_says_what_a_script_is(yard: Yard) -> None:
    with Store(yard.root / "runs.db") as store:
        started(store, "aaaaaaaa")

    assert yard.run("ls", "--kind", "script") == 0
    assert "script is what `draftyard smoke --script` ran, a recipe's own job is train" in " ".join(yard.err.split())


def test_a_folder_beside_the_recipes_names_the_folder_that_holds_them(yard: Yard) -> None:
    (yard.root / "empty").mkdir()

    assert yard.run("recipe", "check", ".") == 2
    assert yard.err.rstrip().endswith("recipes are files named *.yaml; did you mean 'recipes'?")
    assert yard.run("recipe", "check", "empty") == 2
    assert yard.err.rstrip().endswith("recipes are files named *.yaml")
