"""What was given with `launch --env` is given to every later job of the run too, and its values are kept nowhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.actions import jobs
from orchestrator.actions.places import find_places
from orchestrator.errors import UsageError
from orchestrator.recipe import load_recipe
from orchestrator.store.rows import Document, RunRow, State
from orchestrator.store.writes import Store
from remote.spec import dump
from tests.orchestrator.runs import started
from tests.orchestrator.yard import RECIPE, Yard

PATIENCE_S = 120.0
TELLS = """\
import os, sys
print("given", os.environ.get("TOK"), os.environ.get("N"), flush=True)
sys.exit(3)
"""
LAUNCH = ("launch", "tiny", "--force", "a test", "--follow", "--env", "TOK", "--env", "N=30")


@pytest.fixture
def told(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> Yard:
    """A run whose script told what it was given, and failed."""
    (yard.root / "recipes" / "job" / "train.py").write_text(TELLS)
    monkeypatch.setenv("TOK", "one-canary")
    assert yard.run(*LAUNCH) == 10, yard.err
    return yard


@pytest.mark.slow
def test_a_resume_gives_the_variables_of_the_launch_again(told: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOK", "two-canary")
    monkeypatch.setenv("N", "31")

    assert told.run("resume", "@last", "--follow") == 10, told.err

    (log,) = told.root.glob("data/draftyard/runs/*/attempts/2/stdout.log")
    assert log.read_text() == "given two-canary 31\n"
    for words in (("show", "@last"), ("show", "@last", "--json")):
        assert told.run(*words) == 0
        assert "canary" not in told.out
    kept = [path.name for path in told.root.rglob("*") if path.is_file() and b"two-canary" in path.read_bytes()]
    assert set(kept) == {"stdout.log"}
    monkeypatch.setenv("TOK", "three-canary")  # another shell, or another day
    assert told.run("logs", "@last") == 0
    assert told.out == f"given {'*' * len('two-canary 31')}\n"


@pytest.mark.slow
def test_a_resume_without_them_is_refused_in_one_line_that_names_them(
    told: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = told.json("show", "@last")["run"]["id"]
    for missing, names in (({"N"}, "N"), ({"N", "TOK"}, "N and TOK")):
        for name in missing:
            monkeypatch.delenv(name, raising=False)

        assert told.run("resume", run_id) == 2

        due = " ".join(f"{name}=VALUE" for name in sorted(missing))
        assert told.err.splitlines()[-1] == (
            f"error: run {run_id} was launched with --env for {names}, not set here, and values are kept nowhere: "
            f"export first, or type {due} draftyard resume {run_id}"
        )
    assert told.json("show", run_id)["run"]["attempt"] == 1


@pytest.mark.parametrize("verb", ["resume", "evaluate", "export"])
def test_each_later_job_wants_the_variables_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Before any host is asked; with them it comes as far as that."""
    do: Callable[..., object] = getattr(jobs, verb)
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")
    spec = load_recipe("smollm2").resolve("ce").spec
    documents = {Document.SPEC: dump(spec), Document.LAUNCH: json.dumps({"named_env": ["HF_TOKEN"]})}
    with Store(places.db) as store:
        started(store, "kxxxaaaa", host="local", documents=documents)
        store.describe_run("kxxxaaaa", workdir=str(tmp_path), tree_hash="0" * 64, fingerprint="f")
        store.set_state("kxxxaaaa", State.FAILED, evidence="x")
    settled = []
    monkeypatch.setattr(jobs, "send", lambda places, asked, *_, **__: settled.append(asked))
    monkeypatch.setattr(jobs, "resend", lambda places, asked, *_, **__: settled.append(asked))
    monkeypatch.setattr("orchestrator.store.reads.Reader.checkpoints", lambda *_: [type("At", (), {"step": 5})])
    monkeypatch.delenv("HF_TOKEN", raising=False)

    with pytest.raises(UsageError, match=f"HF_TOKEN, not set here, .* HF_TOKEN=VALUE draftyard {verb} kxxxaaaa$"):
        do(places, "kxxxaaaa")
    monkeypatch.setenv("HF_TOKEN", "")
    do(places, "kxxxaaaa")

    assert [(dict(asked.order.env), asked.env["HF_TOKEN"]) for asked in settled] == [({"HF_TOKEN": ""}, "")]


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--env", "TOK"), ("--env", "TOK", "--env", "N=30")], ids=["known", "typed out"])
def test_a_retry_of_the_followers_own_has_them_or_says_that_it_has_not(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    yard.edit("tiny.yaml", RECIPE.replace("life: {grace_s: 5s}", "life: {grace_s: 5s, retries: 1, retry_on: [exit]}"))
    (yard.root / "recipes" / "job" / "train.py").write_text(TELLS)
    monkeypatch.setenv("TOK", "one-canary")
    monkeypatch.delenv("N", raising=False)
    is_typed_out = "N=30" in words

    assert yard.run("launch", "tiny", "--force", "a test", *words) == 0, yard.err
    with Store(yard.root / "runs.db") as store:
        run = _once(store, lambda run: run.state.is_final and (is_typed_out or run.attempt == 2))
        run = _once(store, lambda run: not store.reader.intents(run.id))
        told = [event.text for event in store.reader.events(run.id, kinds=["note"])]
        attempts = store.reader.attempts(run.id)

    logs = yard.root.glob("data/draftyard/runs/*/attempts/*/stdout.log")
    if is_typed_out:
        assert len(attempts) == 1
        due = f"run {run.id} was launched with --env for N, not set here, and values are kept nowhere"
        (note,) = (line for line in told if line.startswith(f"the retry did not begin: {due}"))
        assert str(run.evidence).endswith(f"; {note}")
    else:
        assert [log.read_text() for log in logs] == ["given one-canary None\n"] * 2


def _once(store: Store, holds: Callable[[RunRow], bool]) -> RunRow:
    deadline = time.monotonic() + PATIENCE_S
    while not holds(run := store.reader.runs()[0]):
        assert time.monotonic() < deadline, run
        time.sleep(0.1)
    return run
