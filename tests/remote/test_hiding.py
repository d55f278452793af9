"""Secrets known by value: found however a text spells them, hidden in whatever a job reports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from remote.environment import job_environment
from remote.hiding import (
    HIDDEN,
    LOG_END_BYTES,
    MOST_SPANS,
    NAMES,
    secret_names,
    secrets_of,
    spans_in,
    spellings,
    without,
)
from remote.job import Job
from remote.report import Reporter
from remote.rundir import RunDir, write_json
from remote.wire import decode

PASSWORD = "a'9$ü@\\"


@pytest.mark.parametrize(
    "spell", [str, repr, json.dumps, lambda value: quote(value, safe=""), lambda value: f"{[value]}"]
)
def test_a_value_is_found_however_it_is_spelled(spell: object) -> None:
    secrets = secrets_of({NAMES: "PW OTHER", "PW": PASSWORD, "OTHER": "longer-than-" + PASSWORD})

    told = without({PASSWORD: ["x", f"for {spell(PASSWORD)}!", 3]}, secrets)  # type: ignore[operator]

    assert told[HIDDEN][::2] == ["x", 3]
    assert HIDDEN in told[HIDDEN][1]
    assert not any(spelled in told[HIDDEN][1] for spelled in spellings([PASSWORD]))


def test_where_secrets_stand_in_a_log_is_told_up_to_the_end_of_their_lines(tmp_path: Path) -> None:
    """By which no length of a value is told."""
    log, secrets = tmp_path / "log", secrets_of({NAMES: "PW", "PW": PASSWORD})
    spoken = f"one {PASSWORD} and {PASSWORD}\n".encode()
    log.write_bytes(b"first\n" + spoken + b"none\nlast " + PASSWORD.encode())

    os.mkfifo(tmp_path / "pipe")  # nobody would ever write into it

    spans = spans_in({"stdout": log, "stderr": tmp_path / "none", "other": tmp_path / "pipe"}, secrets)

    assert spans == {
        "stdout": [
            [10, 5 + len(spoken)],
            [15 + len(PASSWORD.encode()), 5 + len(spoken)],
            [16 + len(spoken), log.stat().st_size],
        ]
    }
    assert spans_in({"stdout": log}, None) == {}


def test_of_a_log_full_of_secrets_the_newest_end_is_told_in_bounded_words(tmp_path: Path) -> None:
    log, secrets = tmp_path / "log", secrets_of({NAMES: "PW", "PW": "secret-word"})
    line = b"a secret-word\n"
    log.write_bytes(line * (2 * LOG_END_BYTES // len(line)))

    (spans,) = spans_in({"stdout": log}, secrets).values()

    assert len(spans) == MOST_SPANS + 1
    assert spans[0][0] < log.stat().st_size - LOG_END_BYTES + 2 * len(line)
    assert spans[-1][1] == log.stat().st_size - 1


def test_short_values_and_absent_ones_hide_nothing() -> None:
    assert secrets_of({NAMES: "A B", "A": "short"}) is None
    assert without("short", None) == "short"


def test_the_recipes_own_environment_is_no_secret() -> None:
    assert secret_names({"A": "1", "B": "2", "C": "3"}, {"A": "1", "B": "other"}) == "B C"


def test_a_job_is_told_the_names_and_its_reporter_hides_the_values(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "r1")
    write_json(run.env_file, {"PLAIN": "plain-value", "PW": PASSWORD})
    write_json(run.spec_json, {"env": {"PLAIN": "plain-value"}})
    environment = job_environment(run, Job("r1", "script", 1, ["x"], "/tree"), inherited={NAMES: "HOME"})

    reporter = Reporter(tmp_path / "told", environment=environment)
    reporter.note(f"plain-value and {PASSWORD}")
    reporter.start(choices={"path": Path(f"/x/{PASSWORD}")})  # type: ignore[dict-item]  # text once it is written
    reporter.failure(ValueError(f"refused {[PASSWORD]}"))

    lines = (tmp_path / "told" / "events.rank0.jsonl").read_bytes().splitlines(keepends=True)
    assert environment[NAMES] == "PW"
    assert decode(lines[0]).fields["text"] == f"plain-value and {HIDDEN}"
    assert not any(spelled.encode() in line for line in lines for spelled in spellings([PASSWORD]))
    assert len(lines) == 3


def test_what_is_read_by_name_stays_though_a_value_is_part_of_it(tmp_path: Path) -> None:
    environment = {NAMES: "OUT_DIR MODE", "OUT_DIR": "checkpoints", "MODE": "accuracy"}
    reporter = Reporter(tmp_path, environment=environment)
    reporter.checkpoint(10, path="checkpoints/step-10", size_bytes=1)
    reporter.metrics(10, {"accuracy": 0.5, "accuracy_at": 0.25})
    reporter.rung("accuracy", passed=True, message="accuracy is fine")

    lines = (tmp_path / "events.rank0.jsonl").read_bytes().splitlines(keepends=True)
    checkpoint, metrics, rung = (decode(line).fields for line in lines)
    assert checkpoint["path"] == "checkpoints/step-10"
    assert metrics["values"] == {"accuracy": 0.5, "accuracy_at": 0.25}
    assert (rung["name"], rung["message"]) == ("accuracy", f"{HIDDEN} is fine")
