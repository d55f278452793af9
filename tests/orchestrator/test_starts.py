"""The start of a run on the local side: who may start what, and what a start that breaks off leaves behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.actions.endings import outcome
from orchestrator.actions.host_facts import MissingDependency
from orchestrator.actions.wishes import can_stop
from orchestrator.errors import DraftyardError, GateRefused, HostError
from orchestrator.follow.lease import is_followed
from orchestrator.interrupts import Interrupted
from orchestrator.launcher import is_alive, this_process
from orchestrator.store.rows import RunRow, State
from orchestrator.store.writes import Store
from remote.wire import decode
from tests import warm
from tests.orchestrator.runs import RUN, again, new_run
from tests.orchestrator.yard import RECIPE, Yard

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
COLD = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "orchestrator.cli"]  # a group of its own


# ------------------------------------------------------------------------------ what is recorded


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "runs.db")
    store.create_run(new_run())
    return store


def stopped() -> DraftyardError:
    error = DraftyardError("asked to stop")
    error.reason = "stopped"
    return error


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (HostError("no route"), State.FAILED, "unreachable"),
        (MissingDependency("no torch"), State.FAILED, "missing_dependency"),
        (DraftyardError("no room"), State.FAILED, None),
        (KeyboardInterrupt(), State.STOPPED, "user"),
        (SystemExit(143), State.FAILED, None),
        (stopped(), State.STOPPED, "user"),
    ],
)
def test_what_breaks_off_before_the_spawn_is_an_ending_and_after_it_is_none(
    store: Store, error: BaseException, state: State, reason: str | None
) -> None:
    store.new_attempt(RUN)
    with pytest.raises(type(error)), outcome(store, RUN, attempt=1):
        raise error
    assert (store.reader.run(RUN).state, store.reader.run(RUN).reason) == (state, reason)

    store.new_attempt(RUN)
    said: list[str] = []
    with pytest.raises(type(error)) as caught:
        _break_off_after_the_spawn(store, error, said.append)

    assert store.reader.run(RUN).state == State.SETTING_UP
    assert f"whether run {RUN} has started is not known yet: draftyard wait {RUN}" in str(caught.value) + "".join(said)


def _break_off_after_the_spawn(store: Store, error: BaseException, tell: Callable[[str], None]) -> None:
    with outcome(store, RUN, attempt=2, tell=tell) as doubt:
        store.set_up(RUN, 2)
        doubt.may_live = True
        raise error


@pytest.mark.parametrize("may_live", [False, True])
def test_it_never_began_is_said_only_where_no_job_may_live(store: Store, may_live: bool) -> None:
    """The launch around an attempt learns of its end by the same error."""
    said: list[str] = []

    with pytest.raises(HostError):
        _cut_within_an_attempt(store, said.append, may_live=may_live)

    assert any("it never began" in line for line in said) is not may_live


def test_an_interrupted_resume_says_that_its_attempt_never_began(store: Store) -> None:
    store.new_attempt(RUN)
    attempt, said = again(store), list[str]()

    with pytest.raises(KeyboardInterrupt), outcome(store, RUN, attempt=attempt, tell=said.append):
        raise KeyboardInterrupt

    assert said == [
        f"attempt 2 never began; why is kept with run {RUN} (`draftyard show {RUN}`), and draftyard resume {RUN} tries again"
    ]


def _cut_within_an_attempt(store: Store, tell: Callable[[str], None], *, may_live: bool) -> None:
    with outcome(store, RUN, attempt=0, tell=tell):
        store.new_attempt(RUN)
        with outcome(store, RUN, attempt=1, tell=tell) as doubt:
            if may_live:
                store.set_up(RUN, 1)
                doubt.may_live = True
            raise HostError("the line was cut")


def test_a_loser_of_a_race_says_nothing_of_the_winners_attempt(store: Store) -> None:
    store.new_attempt(RUN)
    again(store)  # the other one's

    with pytest.raises(DraftyardError), outcome(store, RUN, attempt=1):
        raise DraftyardError("only a run that has ended")

    assert store.reader.run(RUN).state == State.PENDING


def test_a_refusal_is_told_even_when_the_run_was_stopped_meanwhile(store: Store) -> None:
    store.set_state(RUN, State.STOPPED, evidence="stopped before it was started")

    with pytest.raises(GateRefused), outcome(store, RUN, attempt=0):
        raise GateRefused("missing", "draftyard smoke tiny")


def test_a_launch_that_was_refused_keeps_every_line_of_why(store: Store) -> None:
    with pytest.raises(DraftyardError), outcome(store, RUN, attempt=0):
        raise DraftyardError("somebody holds memory:\n  GPU 2: pid 1, user eva")

    assert store.reader.run(RUN).evidence == "never started: somebody holds memory:\nGPU 2: pid 1, user eva"


@pytest.mark.slow
def test_the_last_word_of_a_launch_is_said_once_the_database_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.actions.endings.SAY_AGAIN_S", 0.2)
    store = Store(tmp_path / "runs.db", lock_wait_s=0.1)
    store.create_run(new_run())
    store.new_attempt(RUN)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    with pytest.raises(DraftyardError, match="no room"), outcome(store, RUN, attempt=1):
        raise DraftyardError("no room")
    assert store.reader.run(RUN).state == State.PENDING
    other.execute("COMMIT")

    deadline = time.monotonic() + PATIENCE_S
    while store.reader.run(RUN).state is not State.FAILED:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert store.reader.run(RUN).evidence == "never started: no room"


# ------------------------------------------------------------------------------ who is starting it


def test_a_launch_is_alive_gone_or_not_to_be_told() -> None:
    here = json.loads(this_process())

    assert is_alive(this_process()) is True
    assert is_alive(json.dumps({**here, "start_ticks": here["start_ticks"] + 1})) is False  # a later process, same pid
    assert is_alive(json.dumps({**here, "boot_id": "before the restart"})) is False
    assert is_alive(json.dumps({**here, "namespace": "pid:[1]"})) is None  # of another container
    assert is_alive("{}") is None
    assert is_alive(json.dumps({"launch": here["launch"]})) is None  # of a machine without /proc
    assert is_alive(None) is None


# ------------------------------------------------------------------------------ real processes that race


def _gate(yard: Yard, word: str) -> tuple[Path, Path]:
    """The host's interpreter waits before the first command that holds the word, so that nothing depends on how fast
    this machine is: the first file appears when it has come so far, and it goes on once the second one is there."""
    asked, go = yard.root / "asked", yard.root / "go"
    wait = f'n=0; until [ -e "{go}" ] || [ $((n += 1)) -gt 2000 ]; do sleep 0.05; done'
    _python(yard, f'  *"{word}"*) touch "{asked}"; {wait};;\n')
    return asked, go


def _python(yard: Yard, cases: str) -> None:
    """The host's interpreter, which first does what the case of a shell says that fits its words."""
    script = yard.root / "python"
    script.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\nexec {sys.executable} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    (yard.root / "hosts.yaml").write_text(f"hosts:\n  local: {{python: '{script}'}}\n", encoding="utf-8")


def _draftyard(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*_command(), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _command() -> list[str]:
    return [*warm.python("orchestrator"), "-m", "orchestrator.cli"]


def _wait(yard: Yard, reached: Callable[[RunRow], Any]) -> RunRow:
    deadline = time.monotonic() + PATIENCE_S
    with Store(yard.root / "runs.db") as store:
        while True:
            found = store.reader.runs("", kind=None)
            if found and reached(found[0]):
                return found[0]
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


def _first_it_does(yard: Yard, word: str, *commands: str) -> None:
    """The host's interpreter does all this before the first command that holds the word: a race, as it may come out."""
    done = yard.root / "did it first"
    lines = "".join(f"    (cd '{yard.root}' && {command}) </dev/null >>'{done}.log' 2>&1\n" for command in commands)
    check = f'  *"{word}"*) if mkdir "{done}" 2>/dev/null; then\n{lines}fi;;\n'
    _python(yard, check)


@pytest.mark.slow
def test_of_two_resumes_that_race_one_starts_and_one_is_refused_in_one_line(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "-b", "slow", "--force", "a test") == 0, yard.err
    run_id = yard.out.strip()
    assert yard.run("stop", run_id, "--now") == 0, yard.err
    # Both have read "ended" before either writes: neither gets past its first look at the host without the other.
    there = yard.root / "there"
    meet = f'  *"-c import sys"*) echo >>"{there}"; until [ "$(wc -l <"{there}")" -ge 2 ]; do sleep 0.05; done;;\n'
    _python(yard, meet)

    racers = [_draftyard("resume", run_id, "--json") for _ in range(2)]
    told = [racer.communicate(timeout=PATIENCE_S) for racer in racers]

    codes = [racer.returncode for racer in racers]
    assert sorted(codes) == [0, 1], told
    out, err = told[codes.index(1)]
    assert "only a run that has ended" in json.loads(out)["error"]["message"]
    assert "Traceback" not in err
    assert _wait(yard, lambda run: run.state == State.RUNNING).attempt == 2
    assert sorted(path.name for path in (yard.folder(run_id) / "attempts").iterdir()) == ["1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branch", "told"),
    [("slow", "in its attempt 2 .*only a run that has ended"), ("main", "had its attempt 2 meanwhile")],
)
def test_a_resume_takes_what_a_quicker_one_has_started_for_no_leftover(yard: Yard, branch: str, told: str) -> None:
    """The quicker one comes in just before the look at the host's processes, and is there, or through, by then."""
    assert yard.run("launch", "tiny", "-b", branch, "--force", "a test") == 0, yard.err
    run_id = yard.out.strip()
    assert yard.run("stop", run_id, "--now") == 0 if branch == "slow" else yard.run("wait", run_id) == 0, yard.err
    assert yard.run("mark", run_id, "stopped", "once more") == 0
    goes_on = ["--follow"] if branch == "main" else []
    _first_it_does(yard, " list ", shlex.join([*_command(), "resume", run_id, *goes_on]))

    assert yard.run("resume", run_id) == 1

    assert re.search(told, yard.err), yard.err
    assert "reap" not in yard.err
    assert len(yard.json("show", run_id)["attempts"]) == 2


@pytest.mark.slow
def test_reap_ends_no_attempt_that_began_while_it_looked(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "-b", "slow", "--force", "a test") == 0, yard.err
    run = _wait(yard, lambda run: run.state == State.RUNNING)
    assert yard.run("mark", run.id, "failed", "the box was said to be gone") == 0
    # Somebody else ends the leftovers and resumes, after this one has listed them and looked for the last time.
    others = [["reap", "--yes"], ["resume", run.id]]
    _first_it_does(yard, " end ", *(shlex.join([*_command(), *words]) for words in others))

    assert yard.run("reap", "--yes") == 0, yard.err

    run = _wait(yard, lambda run: run.state == State.RUNNING)
    step = run.step or 0
    assert run.attempt == 2
    assert _wait(yard, lambda run: (run.step or 0) > step + 5 or run.state.is_final).state == State.RUNNING


TWO_CARDS = """#!/bin/sh
case "$*" in
  *compute-apps*) ;;
  *driver_version*) for i in 0 1; do echo "$i, GPU-0000000$i-aaaa, RTX PRO 6000, 97887, 0, 0, 580.1"; done;;
  *) for i in 0 1; do echo "$i, GPU-0000000$i-aaaa, 0, 97887, 0"; done;;
esac
"""


@pytest.fixture
def two_cards(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two cards on which no process ever shows."""
    program = yard.root / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(TWO_CARDS, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.slow
@pytest.mark.usefixtures("two_cards")
def test_of_three_launches_that_race_for_two_cards_each_winner_has_its_own(yard: Yard) -> None:
    racers = [_draftyard("launch", "tiny", "-b", "slow", "--force", "a test", "--json") for _ in range(3)]
    told = [racer.communicate(timeout=PATIENCE_S) for racer in racers]

    codes = [racer.returncode for racer in racers]
    assert sorted(codes) == [0, 0, 1], told
    runs = [json.loads(out)["run"] for (out, _), code in zip(told, codes, strict=True) if code == 0]
    cards = [yard.json("show", run)["launch"]["gpus"] for run in runs]
    assert sorted(cards) == [["GPU-00000000-aaaa"], ["GPU-00000001-aaaa"]]
    refusal = json.loads(told[codes.index(1)][0])["error"]
    assert f"2 GPUs, 2 of them promised to runs {', '.join(sorted(runs))}" in refusal["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("two_cards")
def test_a_named_card_is_asked_for_again_by_a_resume(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "--gpus", "1", "--force", "a test", "--follow") == 0, yard.err
    held = yard.json("launch", "tiny", "-b", "slow", "--gpus", "1", "--force", "a test")["run"]
    first = next(run["id"] for run in yard.json("ls")["runs"] if run["id"] != held)
    assert yard.run("mark", first, "stopped", "once more") == 0

    assert yard.run("resume", first) == 1
    assert f"GPU 1 is promised to run {held}" in yard.err
    assert yard.run("stop", held, "--now") == 0
    assert yard.run("resume", first, "--follow") == 0, yard.err

    assert yard.json("show", first)["launch"]["gpus"] == ["GPU-00000001-aaaa"]


NIGHTLY = ("launch", "tiny", "--force", "a test", "--id", "nightly")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "stage"),
    [
        (signal.SIGINT, "--attempt"),  # the supervisor's interpreter is on its way
        (signal.SIGTERM, "--attempt"),
        (signal.SIGKILL, "--attempt"),
        (signal.SIGKILL, "train.py"),  # the job's is, and has told no event
    ],
)
def test_a_launch_that_is_ended_after_the_spawn_leaves_the_truth_to_the_folder(
    yard: Yard, number: signal.Signals, stage: str
) -> None:
    asked, go = _gate(yard, stage)
    launch = _draftyard(*NIGHTLY, "--follow")
    run = _wait(yard, lambda _: asked.exists())
    assert run.state == State.SETTING_UP

    launch.send_signal(number)
    _, err = launch.communicate(timeout=PATIENCE_S)

    assert launch.returncode == (130 if number == signal.SIGINT else -number)
    if number != signal.SIGKILL:
        assert f"whether run {run.id} has started is not known yet: draftyard wait {run.id}" in err
    assert not _wait(yard, lambda _: True).state.is_final
    assert yard.run(*NIGHTLY) == 0, yard.err  # as a script says it that heard no answer
    go.touch()
    assert yard.run("wait", run.id, "--timeout", f"{PATIENCE_S:g}s") == 0, yard.err
    _has_run_once(yard)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["-c import sys", " make ", "--place"], ids=["the row", "the ship", "the attempt"])
def test_a_launch_that_is_killed_before_the_spawn_is_said_at_once_and_starts_nothing_until_it_is_said_again(
    yard: Yard, stage: str
) -> None:
    asked, go = _gate(yard, stage)
    launch = _draftyard(*NIGHTLY)
    run = _wait(yard, lambda _: asked.exists())
    assert run.attempt == (1 if stage == "--place" else 0)

    launch.kill()
    launch.communicate(timeout=PATIENCE_S)

    assert yard.run("wait", run.id, "--timeout", f"{PATIENCE_S:g}s") == 10
    go.touch()
    assert "the launch was killed before it started the job" in yard.out
    assert not (yard.folder(run.id) / "attempts" / "1" / "supervisor.json").exists()
    assert yard.run(*NIGHTLY, "--follow") == 0, yard.err
    _has_run_once(yard)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("stage", ["-c import sys", "--place"], ids=["the row", "the attempt"])
def test_a_launch_that_is_told_to_end_before_the_spawn_says_what_became_of_its_row(
    yard: Yard, number: signal.Signals, stage: str
) -> None:
    """Ctrl-C, `kill`, `timeout` (which signals twice), a terminal that closes: one ending, and no follower has to find it."""
    asked, _ = _gate(yard, stage)
    launch = _draftyard(*NIGHTLY)
    run = _wait(yard, lambda _: asked.exists())

    launch.send_signal(number)
    if number != signal.SIGINT:
        launch.send_signal(number)
    _, err = launch.communicate(timeout=PATIENCE_S)

    assert launch.returncode == (130 if number == signal.SIGINT else -number)
    assert f"it never began; why is kept as run {run.id} (`draftyard show {run.id}`)" in err
    assert "Traceback" not in err
    ended = _wait(yard, lambda _: True)
    how = "" if number == signal.SIGINT else f" ({number.name})"
    assert (ended.state, ended.reason) == (State.STOPPED, "user")
    assert ended.evidence == f"interrupted before it started{how}"
    assert not (yard.folder(run.id) / "env").exists()


@pytest.mark.slow
def test_an_interrupt_as_an_attempts_row_is_written_is_that_attempts_end(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal is heard when SQLite's commit returns: the row is there, and nobody has its number yet."""
    assert yard.run("launch", "tiny", "--force", "a test", "--follow") == 0, yard.err
    first = yard.json("show", "@last")["run"]["id"]
    assert yard.run("mark", first, "stopped", "once more") == 0
    make = Store.new_attempt

    def interrupted(store: Store, *words: Any, **more: Any) -> int:
        make(store, *words, **more)
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(Store, "new_attempt", interrupted)
    assert yard.run("resume", first) != 0
    assert f"attempt 2 never began; why is kept with run {first} (`draftyard show {first}`)" in yard.err
    assert yard.run(*NIGHTLY) != 0
    assert "it never began; why is kept as run nightly" in yard.err
    monkeypatch.setattr(Store, "new_attempt", make)

    for run_id, attempt in ((first, 2), ("nightly", 1)):
        ended = yard.json("show", run_id)["run"]
        told = (ended["attempt"], ended["state"], ended["reason"], ended["evidence"])
        assert told == (attempt, "stopped", "user", "interrupted before it started (SIGTERM)")


@pytest.mark.slow
def test_an_interrupt_of_a_resume_that_lost_its_race_says_nothing_of_the_winners_attempt(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert yard.run("launch", "tiny", "--force", "a test", "--follow") == 0, yard.err
    first = yard.json("show", "@last")["run"]["id"]
    assert yard.run("mark", first, "stopped", "once more") == 0
    make = Store.new_attempt

    def overtaken(store: Store, run_id: str, **more: Any) -> int:
        make(store, run_id, **{**more, "launcher": this_process()})
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "new_attempt", overtaken)
    assert yard.run("resume", first) == 130
    monkeypatch.setattr(Store, "new_attempt", make)

    with Store(yard.root / "runs.db") as store:
        assert store.reader.run(first).state is State.PENDING
        store.set_state(first, State.FAILED, evidence="x")
    assert "never began" not in yard.err


@pytest.mark.slow
def test_a_resume_that_is_refused_does_not_say_that_it_starts(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "--force", "a test", "--follow") == 0, yard.err
    run_id = yard.json("show", "@last")["run"]["id"]
    assert yard.run("mark", run_id, "stopped", "once more") == 0
    assert yard.run("rm", run_id) == 0

    assert yard.run("resume", run_id) == 1
    assert "starting attempt" not in yard.err
    assert f"run {run_id} is in the bin" in yard.err
    assert yard.run("restore", run_id) == 0
    assert yard.run("resume", run_id, "--follow") == 0, yard.err
    assert f"starting attempt 2 of run {run_id}: its newest checkpoint is of step 5" in yard.err


@pytest.mark.slow
def test_a_hang_up_of_whoever_waits_says_that_the_run_goes_on(yard: Yard) -> None:
    launch = _draftyard("launch", "tiny", "-b", "slow", "--force", "a test", "--follow")
    run = _wait(yard, lambda run: run.state is State.RUNNING)
    reader = _draftyard("logs", run.id, "-f")
    assert reader.stdout is not None
    assert reader.stdout.readline().startswith("step ")

    for each in (launch, reader):
        each.send_signal(signal.SIGHUP)
    told = [each.communicate(timeout=PATIENCE_S)[1] for each in (launch, reader)]

    assert [each.returncode for each in (launch, reader)] == [-signal.SIGHUP] * 2
    assert f"wait {run.id}" in told[0]
    assert "the run goes on; come back with one of:" in told[0]
    assert f"logs {run.id} -f" in told[1]
    assert _wait(yard, lambda _: True).state is State.RUNNING


@pytest.mark.slow
def test_a_launch_whose_terminal_is_gone_ends_by_the_hang_up_all_the_same(yard: Yard) -> None:
    """Nothing can be said any more; the row tells."""
    asked, _ = _gate(yard, "-c import sys")
    with Path("/dev/full").open("w") as gone:
        launch = subprocess.Popen([*_command(), *NIGHTLY], stdout=gone, stderr=gone)
        _wait(yard, lambda _: asked.exists())

        launch.send_signal(signal.SIGHUP)

        assert launch.wait(timeout=PATIENCE_S) == -signal.SIGHUP
    assert _wait(yard, lambda _: True).evidence == "interrupted before it started (SIGHUP)"


LEFT = """
import os, signal, sys
from orchestrator import cli
from orchestrator.actions import life
from orchestrator.verbs import frame

plain = {{"ensure_follower": life.ensure_follower, "lines": frame.Terminal.lines}}
def at_once(*words, **more):
    if not sys.argv[1:]:
        sys.argv.append("sent")
        os.kill(os.getpid(), signal.{number})
    return plain["{where}"](*words, **more)

{patch} = at_once
cli.main(["launch", "tiny", "-b", "slow", "--force", "a test"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("where", ["ensure_follower", "lines"])
def test_a_signal_between_the_start_and_its_word_says_that_the_run_goes_on(
    yard: Yard, number: signal.Signals, where: str
) -> None:
    """While what was opened is closed and a follower is looked for, and as the id is printed."""
    patch = {"ensure_follower": "life.ensure_follower", "lines": "frame.Terminal.lines"}[where]
    code = LEFT.format(number=number.name, where=where, patch=patch)

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    run = _wait(yard, lambda run: run.state is State.RUNNING)  # somebody follows it
    assert done.returncode == (130 if number == signal.SIGINT else -number), done.stderr
    assert "goes on" in done.stderr
    assert f"draftyard watch {run.id}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",), ("--quiet",)])
def test_a_launch_whose_output_cannot_be_written_says_that_its_run_goes_on(yard: Yard, more: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        words = ["launch", "tiny", "-b", "slow", "--force", "a test", *more]
        done = subprocess.run([*_command(), *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    run = _wait(yard, lambda run: run.state is State.RUNNING)
    assert done.returncode == 1
    assert "error: the output cannot be written: No space left on device\n" in done.stderr
    assert f"  run {run.id}: it runs on local; draftyard watch {run.id}" in done.stderr


@pytest.mark.slow
def test_an_outcome_that_cannot_be_written_is_said_beside_it(yard: Yard) -> None:
    with Path("/dev/full").open("w") as full:
        words = ["launch", "tiny", "--force", "a test", "--follow"]
        done = subprocess.run([*_command(), *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    run = _wait(yard, lambda run: run.state is State.SUCCEEDED)
    assert done.returncode == 1
    assert f"  {run.id}  succeeded: " in done.stderr


@pytest.mark.slow
def test_nothing_breaks_off_because_a_warning_or_progress_cannot_be_written(yard: Yard) -> None:
    """The warning of --env, that of the gate, and the lines of whoever waits for longer than progress is silent."""
    words = [
        "tiny",
        "--force",
        "a test",
        "--env",
        "N=1",
        "--set",
        "settings.num_steps=60",
        "--set",
        "settings.sleep_s=0.05",
    ]
    with Path("/dev/full").open("w") as full:
        command = [*COLD, "launch", *words, "--follow", "--json"]  # a warm one flushes once more at its end
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, check=False)

    assert done.returncode == 0
    assert json.loads(done.stdout)["run"]["state"] == "succeeded"


def _has_run_once(yard: Yard) -> None:
    """One attempt, here and in its folder, that one job has told of."""
    assert [run["id"] for run in yard.json("ls")["runs"]] == ["nightly"]
    assert [attempt["state"] for attempt in yard.json("show", "nightly")["attempts"]] == ["succeeded"]
    (folder,) = (yard.folder("nightly") / "attempts").iterdir()
    told = [decode(line) for line in (folder / "events.rank0.jsonl").read_bytes().splitlines()]
    assert [event.kind for event in told].count("start") == 1
    assert [event.fields["step"] for event in told if event.kind == "metrics"] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_stop_asked_between_the_row_and_the_spawn_calls_the_start_off(yard: Yard) -> None:
    asked, go = _gate(yard, "--place")
    launch = _draftyard("launch", "tiny", "--force", "a test")
    run = _wait(yard, lambda _: asked.exists())

    assert yard.run("stop", run.id, "--no-wait") == 0, yard.err
    go.touch()
    _, err = launch.communicate(timeout=PATIENCE_S)
    assert yard.run("wait", run.id, "--timeout", f"{PATIENCE_S:g}s") == 13, yard.err

    assert launch.returncode == 1
    assert "was asked to stop" in err or "is stopping already" in err or "is stopped already" in err
    assert yard.json("show", run.id)["run"]["state"] == "stopped"
    assert not (yard.folder(run.id) / "attempts" / "1" / "supervisor.json").exists()


@pytest.mark.slow
def test_a_run_whose_job_lives_on_is_not_resumed(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "-b", "slow", "--force", "a test") == 0, yard.err
    run = _wait(yard, lambda run: run.state == State.RUNNING)
    assert yard.run("mark", run.id, "lost", "the box was said to be gone") == 0
    assert "lost: marked by hand: the box was said to be gone (it was running, and no host was asked)" in yard.out
    assert "nothing was stopped; what still lives there is listed and ended by draftyard reap local" in yard.err

    assert yard.run("resume", run.id) == 1

    assert "still has processes of an earlier attempt on host local: pid" in yard.err
    assert "draftyard reap local" in yard.err
    assert [found["run_id"] for found in yard.json("reap")["orphans"]][:1] == [run.id]  # named, not touched
    assert yard.run("reap", "--yes") == 0
    assert len(yard.json("show", run.id)["attempts"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("waits", [(), ("--no-wait",)])
def test_a_stop_that_calls_off_a_retry_says_so(yard: Yard, waits: tuple[str, ...]) -> None:
    with Store(yard.root / "runs.db") as store:
        for name in ("20260101-aaaa", "20260102-bbbb"):
            store.create_run(new_run(name))
            store.new_attempt(name)
            store.set_state(name, State.FAILED, reason="exit:3", evidence="exit status 3", wish="retry")
            assert can_stop(store.reader.run(name), store.reader.intents(name))

    assert yard.run("stop", "20260101-aaaa", *waits) == 0
    assert yard.out == "20260101-aaaa  its retry is called off; it stays failed exit:3: exit status 3\n"
    told = yard.json("stop", "20260102-bbbb", *waits)
    assert (told["run"]["state"], told["has_called_off_retry"]) == ("failed", True)

    assert yard.run("stop", "20260101-aaaa", *waits) == 1
    with Store(yard.root / "runs.db") as store:
        assert not can_stop(store.reader.run("20260101-aaaa"), store.reader.intents("20260101-aaaa"))


@pytest.mark.slow
def test_a_retry_that_is_called_off_while_its_start_is_under_way_starts_nothing(yard: Yard) -> None:
    retrying = RECIPE.replace("life: {grace_s: 5s}", "life: {grace_s: 5s, retries: 3, retry_on: [exit]}")
    yard.edit("tiny.yaml", retrying)
    assert yard.run("launch", "tiny", "-b", "broken", "--force", "a test") == 0, yard.err
    asked, go = _gate(yard, " list ")  # it looks for what outlived the earlier attempt
    run = _wait(yard, lambda run: run.state == State.FAILED and asked.exists())

    assert yard.run("stop", run.id) == 0, yard.err  # while that start still waits
    assert "its retry is called off; it stays failed" in yard.out
    go.touch()
    deadline = time.monotonic() + PATIENCE_S
    while is_followed(yard.root / "runs.db"):  # the follower stays until that start is through
        assert time.monotonic() < deadline
        time.sleep(0.1)

    assert len(yard.json("show", run.id)["attempts"]) == 1
    with Store(yard.root / "runs.db") as store:
        assert [wish.outcome for wish in store.reader.intents(run.id, only_open=False)] == ["called off by a stop"]


CLEANING = """\
import signal, sys, time
from pathlib import Path
told = []

def end(*_):
    told.append(1)
    if len(told) > 1:
        sys.exit(9)
    print("cleaning", flush=True)
    while not Path(GO).exists():
        time.sleep(0.05)
    print("done", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_second_ctrl_c_at_a_stop_never_cuts_the_clean_up_short(yard: Yard) -> None:
    """The wish is written before anybody waits; what carries it out hears no key of this terminal."""
    go = yard.root / "go"
    (yard.root / "recipes" / "job" / "train.py").write_text(f"GO = {str(go)!r}\n{CLEANING}")
    assert yard.run("launch", "tiny", "--force", "a test") == 0, yard.err
    run_id = yard.out.strip()
    said = yard.folder(run_id) / "attempts" / "1" / "stdout.log"
    _wait(yard, lambda _: said.exists() and b"up" in said.read_bytes())

    stop = subprocess.Popen([*COLD, "stop", run_id], stderr=subprocess.PIPE, text=True, start_new_session=True)
    _wait(yard, lambda _: b"cleaning" in said.read_bytes())
    while stop.poll() is None:  # at first it may be at work, then on its way out: a person presses again
        os.killpg(stop.pid, signal.SIGINT)
        time.sleep(0.05)
    go.touch()
    told = stop.communicate(timeout=PATIENCE_S)[1]

    assert stop.returncode in (130, -signal.SIGINT), told
    assert "goes on" not in told
    assert stop.returncode < 0 or "the run is being stopped all the same" in told
    assert yard.run("wait", run_id, "--timeout", f"{PATIENCE_S:g}s") == 13, yard.err
    assert said.read_bytes() == b"up\ncleaning\ndone\n"
    assert yard.json("show", run_id)["attempts"][0]["exit_code"] == 0
