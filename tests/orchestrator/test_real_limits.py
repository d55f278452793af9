"""A control group's memory limit that the kernel enforces for real, from the kill to the run's page.

Where this user may not make a control group (no root, a container that may only read them) these tests are skipped:
what the kernel then says is read from recorded files in tests/remote/test_evidence.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator import launch
from orchestrator.follow.follower import Follower, follow
from orchestrator.shell.local import LocalShell
from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from orchestrator.workplace import Workplace
from remote.rundir import RunDir, read_json
from tests.orchestrator.runs import life, new_run

pytestmark = pytest.mark.slow  # real supervisors

TREE = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 192 * 2**20
PATIENCE_S = 90.0

# What a host's interpreter does here before it becomes a supervisor; everything else stays outside.
ENTER = """\
#!/bin/sh
case "$*" in *--attempt*) echo $$ >"{group}/cgroup.procs" || exit 7;; esac
exec {python} "$@"
"""
# All of it is written to, so that the kernel has to find it.
HOARD = "held = b'x' * (600 * 2**20)"
PARENT = f"import subprocess, sys; sys.exit(128 - subprocess.run([sys.executable, '-c', {HOARD!r}]).returncode)"


@dataclass(frozen=True)
class Group:
    version: int
    folder: Path


def _makings() -> Iterator[tuple[int, Path, str, tuple[str, ...]]]:
    """Where a group may be made: its version, the folder above it, the file of its limit, files that would let it swap."""
    top = Path("/sys/fs/cgroup")
    yield 1, top / "memory", "memory.limit_in_bytes", ("memory.memsw.limit_in_bytes",)
    with contextlib.suppress(OSError):
        if "memory" in (top / "cgroup.subtree_control").read_text().split():
            yield 2, top, "memory.max", ("memory.swap.max",)


def _is_named_as_seen(version: int, above: Path) -> bool:
    """False in a container whose own group lies elsewhere below this folder than the kernel says."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if (version == 1 and "memory" in controllers.split(",")) or (version == 2 and not controllers):
            return (above / path.lstrip("/")).is_dir()
    return False


@pytest.fixture
def group() -> Iterator[Group]:
    why = "no control group here limits memory"
    for version, above, limit, swaps in _makings():
        if not _is_named_as_seen(version, above):
            why = f"a container whose own group lies elsewhere below {above} than the kernel says"
            continue
        folder = above / f"draftyard-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            why = f"{above}: {error.strerror}"
            continue
        (folder / limit).write_text(str(LIMIT_BYTES))
        for file in swaps:  # not there where nothing can swap
            with contextlib.suppress(OSError):
                (folder / file).write_text(str(LIMIT_BYTES if version == 1 else 0))
        yield Group(version, folder)
        _remove(folder)
        return
    pytest.skip(f"no control group of its own can be made: {why}")


def _remove(folder: Path) -> None:
    """Once the last process of the run has gone, a moment after its exit file."""
    deadline_s = time.monotonic() + PATIENCE_S
    while folder.exists():
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        assert time.monotonic() < deadline_s, (folder / "cgroup.procs").read_text()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("program", "exit_code", "signal"), [(HOARD, None, 9), (PARENT, 137, None)], ids=["the job", "a process of the job"]
)
def test_what_a_control_groups_limit_kills_has_that_for_its_reason(
    tmp_path: Path, group: Group, program: str, exit_code: int | None, signal: int | None
) -> None:
    python = tmp_path / "python"
    python.write_text(ENTER.format(group=group.folder, python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    place = Workplace(str(tmp_path / "work"), str(python), str(tmp_path))
    job = launch.Job("limited", "train", 1, (sys.executable, "-c", program), str(TREE), spec_json="{}")

    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run("limited", workdir=place.work_dir, documents=life()))
        store.new_attempt("limited")
        launch.start(LocalShell(), place, job, timeout_s=PATIENCE_S)
        follow(Follower(store.path, lambda name, kept: LocalShell(), threading.Event(), idle_s=0.1))
        run = store.reader.run("limited")

    assert (run.state, run.reason) == (State.FAILED, "cgroup_oom"), run.evidence
    told = read_json(RunDir(Path(place.run_dir("limited"))).attempt(1).exit_json)
    assert told is not None
    assert (told["exit_code"], told["signal"]) == (exit_code, signal)
    assert told["oom_kill_delta"] == 1
    assert told["host_oom_kill_delta"] >= 1  # the machine's own counter counts them too
    assert (told["cgroup"]["version"], told["cgroup"]["path"]) == (group.version, str(group.folder))
    assert told["cgroup"]["limit_bytes"] == LIMIT_BYTES
    assert told["cgroup"]["peak_bytes"] > 0.9 * LIMIT_BYTES
