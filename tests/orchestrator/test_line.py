"""A measured line against one whose length is known."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.actions.hosts import line_findings
from orchestrator.host import Hosts
from orchestrator.line import Line, measure
from orchestrator.observe import clock_s
from orchestrator.shell.connect import connect
from orchestrator.shell.local import LocalShell
from tests import delay, sshd

UP, DOWN = 4e6, 8e6  # bytes a second


@pytest.mark.slow
def test_a_line_of_known_length_is_measured(tmp_path: Path) -> None:
    with sshd.running(tmp_path / "sshd") as server, delay.line(server.port, one_way_s=0.05, rates=(UP, DOWN)) as port:
        server.known_hosts.write_text(f"[127.0.0.1]:{port} {server.host_key}\n")
        shell = connect(replace(Hosts.load(None, server.config_file).find("box"), port=port))
        line = measure(shell)
        shell.close()

    assert 0.1 <= line.round_trip_s < 5  # a busy machine adds its own
    assert abs(line.clock_offset_s) <= line.clock_error_s + 0.05  # both ends read the same clock
    assert UP / 10 < line.up_bytes_per_s < UP * 1.05
    assert DOWN / 10 < line.down_bytes_per_s < DOWN * 1.05


def test_this_machine_has_a_short_line_and_our_clock() -> None:
    line = measure(LocalShell())

    assert line.round_trip_s < 5
    assert abs(line.clock_offset_s) <= line.clock_error_s + 0.05


def test_a_clock_that_is_ahead_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    date = shutil.which("date")
    (tmp_path / "date").write_text(f"#!/bin/sh\nexec {date} -d '7 seconds' \"$@\"\n")
    (tmp_path / "date").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    line = measure(LocalShell())

    assert line.clock_offset_s is not None
    assert abs(line.clock_offset_s - 7) <= line.clock_error_s + 0.05
    assert any(item.name == "clock" and not item.is_good for item in line_findings(line))


def test_a_doctor_says_what_the_line_carries() -> None:
    line, clock = line_findings(Line(0.0214, 8.5 * 2**20, 20 * 2**20, -7.25, 0.01))

    assert line.is_good
    assert line.told == "21 ms there and back, 8.5 MiB/s up, 20.0 MiB/s down"
    assert not clock.is_good
    assert clock.told == "7.2 s behind this machine"


@pytest.mark.parametrize("there", ["date", "sh", "head"])
@pytest.mark.parametrize("program", ["exit 3", "echo a greeting", "echo NaN"])
def test_whatever_a_host_answers_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, program: str
) -> None:
    """A host whose tools are odd: each in turn is a script of ours, first on the PATH."""
    (tmp_path / there).write_text(f"#!/bin/bash\n{program}\n")
    (tmp_path / there).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    line = measure(LocalShell())
    findings = line_findings(line)

    assert any(there in item.told and not item.is_good for item in findings), findings
    assert all(item.is_good or item.repair for item in findings)
    measured = {"date": line.clock_offset_s, "sh": line.up_bytes_per_s, "head": line.down_bytes_per_s}
    assert measured[there] is None
    assert all(value is not None for name, value in measured.items() if name != there)


@pytest.mark.parametrize("text", ["", "NaN", "inf.5", "-3", "1e5", "Fri Jan 2", "17_0.5", "9" * 400])
def test_what_is_no_date_is_none(text: str) -> None:
    assert clock_s(text) is None


@pytest.mark.parametrize(("text", "seconds"), [("17.250000000", 17.25), ("17.N", 17.5), ("17.%N", 17.5), ("17", 17.5)])
def test_a_date_without_fractions_is_read_as_the_middle_of_its_second(text: str, seconds: float) -> None:
    assert clock_s(text) == seconds
