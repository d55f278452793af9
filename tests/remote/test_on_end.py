"""The command that a recipe wants run on the host after the end: real commands, bounded in time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from remote.coherence import cross_field_errors
from remote.on_end import Ending, ending, run_on_end, wished
from remote.processes import read_stat
from remote.rundir import AttemptDir, RunDir, write_json
from remote.spec import ScriptSpec
from tests.remote.jobs import wait_for

HOW = Ending("r1", 2, "stopped", None)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    made = AttemptDir(tmp_path / "attempts" / "2")
    made.root.mkdir(parents=True)
    return made


@pytest.mark.parametrize(
    ("exit_file", "state", "code"),
    [
        ({"exit_code": 0, "signal": None, "reason": None}, "succeeded", 0),
        ({"exit_code": 3, "signal": None, "reason": None}, "failed", 3),
        ({"exit_code": None, "signal": 9, "reason": None}, "failed", 137),
        ({"exit_code": None, "signal": None, "reason": "start_failed"}, "failed", None),
        ({"exit_code": 0, "signal": None, "reason": "max_duration"}, "stopped", 0),
        ({"exit_code": None, "signal": 15, "reason": "user"}, "stopped", 143),
        ({"exit_code": 1, "signal": None, "reason": "lonely"}, "stopped", 1),
    ],
)
def test_how_it_ended_is_said_in_one_word(exit_file: dict[str, Any], state: str, code: int | None) -> None:
    found = ending("r1", 1, exit_file)

    assert (found.state, found.exit_code) == (state, code)


def test_a_run_that_never_started_has_no_exit_code(attempt: AttemptDir) -> None:
    command = ["/bin/sh", "-c", 'echo "[$DRAFTYARD_EXIT_CODE] $DRAFTYARD_ATTEMPT"']

    said = run_on_end(command, HOW, attempt, os.environ)

    assert said.startswith("life.on_end: /bin/sh ended with 0 after ")
    assert said.endswith("s: [] 2")


@pytest.mark.slow
def test_past_its_time_it_and_what_it_started_are_killed(attempt: AttemptDir, tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", f"echo busy; sleep 99 & echo $! > {tmp_path}/pid; sleep 60"]

    said = run_on_end(command, HOW, attempt, os.environ, limit_s=3.0)

    assert said == "life.on_end: /bin/sh was killed after 3 s: busy"
    below = int((tmp_path / "pid").read_text())
    wait_for(lambda: (found := read_stat(below)) is None or found.state in "ZX")


def test_a_command_that_is_not_there_is_one_line(attempt: AttemptDir) -> None:
    said = run_on_end(["no-such-program"], HOW, attempt, os.environ)

    assert said == "life.on_end: cannot start no-such-program: No such file or directory"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("train", ["a", "b"]), ("script", ["a", "b"]), ("smoke", []), ("evaluate", []), ("prepare", []), ("export", [])],
)
def test_only_a_training_or_a_script_ends_what_a_machine_was_rented_for(
    tmp_path: Path, kind: str, expected: list[str]
) -> None:
    run = RunDir(tmp_path)
    write_json(run.spec_json, {"life": {"on_end": ["a", "b"]}})

    assert wished(run, kind) == expected


@pytest.mark.parametrize("body", [{}, {"life": None}, {"life": {"on_end": "ls"}}, {"life": {}}])
def test_a_spec_without_it_wishes_nothing(tmp_path: Path, body: dict[str, Any]) -> None:
    run = RunDir(tmp_path)
    write_json(run.spec_json, body)

    assert wished(run, "train") == []
    assert wished(RunDir(tmp_path / "none"), "train") == []


def test_an_empty_program_is_refused_before_anything_runs() -> None:
    spec = ScriptSpec("r", "b", "script", ".", ["x"])
    bad = ScriptSpec("r", "b", "script", ".", ["x"], life=type(spec.life)(on_end=[" "]))

    assert cross_field_errors(spec) == []
    assert [path for path, _ in cross_field_errors(bad)] == ["life.on_end"]
