"""What looking at a run needs of a host, and what it says where that is missing: the real script, over this machine's shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.errors import DraftyardError
from orchestrator.observe import observe
from orchestrator.shell import Completed
from orchestrator.shell.local import LocalShell
from remote.processes import Identity
from tests import container
from tests.remote.jobs import has_begun

TOOLS = ("date", "df", "find", "grep", "head", "stat")


class Sparse(LocalShell):
    """A host on which no other programs are found than `sh` and the ones named."""

    def __init__(self, folder: Path, kind: str, tools: tuple[str, ...]) -> None:
        super().__init__(folder)
        self.path = folder / "bin"
        self.path.mkdir()
        for tool in ("sh", *tools):
            program = shutil.which(tool if kind == "as installed" else "busybox")
            if program is None:
                pytest.skip(f"no {kind} here")
            (self.path / tool).symlink_to(program)

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        return super().run(["/usr/bin/env", f"PATH={self.path}", *argv], stdin=stdin, timeout_s=timeout_s)


def test_the_tools_that_look_at_a_run_are_named_for_a_person() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text(encoding="utf-8")

    named = re.search(r"runs are looked at with (.*?)[;)]", page, re.DOTALL)
    assert named is not None
    assert tuple(re.findall(r"`(\w+)`", named[1])) == TOOLS


@pytest.mark.parametrize("kind", ["as installed", "busybox"])
def test_a_run_is_seen_with_no_more_than_the_tools_that_are_named(kind: str, tmp_path: Path) -> None:
    attempt = tmp_path / "run" / "attempts" / "1"
    attempt.mkdir(parents=True)
    for name in ("claim", "exit.json", "events.rank0.jsonl", "stdout.log", "-n two words"):
        (attempt / name).write_text("{}\n")
    (attempt / "a folder").mkdir()

    seen = observe(Sparse(tmp_path, kind, TOOLS), str(tmp_path / "run"))

    assert seen.attempt == 1
    assert seen.exit == {}
    assert seen.disk_free_bytes is not None
    assert abs(seen.host_time_s - time.time()) < 60
    assert [file.name for file in seen.files] == sorted(path.name for path in attempt.iterdir() if path.is_file())
    assert seen.files[0].inode == (attempt / "-n two words").stat().st_ino


@pytest.mark.parametrize("missing", TOOLS)
def test_a_tool_that_is_missing_is_an_error_not_an_empty_answer(missing: str, tmp_path: Path) -> None:
    """A run whose files are not listed would seem to start for ever, one whose processes are not looked for to be gone."""
    host = Sparse(tmp_path, "as installed", tuple(tool for tool in TOOLS if tool != missing))

    with pytest.raises(DraftyardError, match=rf"cannot look at /nowhere: {missing} is not found on its PATH"):
        observe(host, "/nowhere")


class Anew(LocalShell):
    """A container of this machine's root that is started anew for each command."""

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        inside = ["unshare", "--pid", "--fork", "--mount-proc", *argv]
        return super().run(inside, stdin=stdin, timeout_s=timeout_s)


@pytest.mark.skipif(container.why_not() is not None, reason=str(container.why_not()))
def test_a_container_that_was_started_anew_is_told_from_a_job_that_was_killed(tmp_path: Path) -> None:
    own = Identity.of(os.getpid())
    assert own is not None
    claim = tmp_path / "attempts" / "1" / "claim"
    claim.parent.mkdir(parents=True)
    claim.write_text(f"supervisor {own.pid} {own.start_ticks} {own.boot_id}\n")

    here, anew = (observe(shell, str(tmp_path)) for shell in (LocalShell(), Anew()))

    assert (here.supervisor_alive, here.rebooted) == (True, False)
    assert (anew.supervisor_alive, anew.rebooted) == (False, True)
    assert anew.boot_id == own.boot_id


@pytest.mark.parametrize("kind", ["as installed", "busybox"])
def test_of_an_attempt_without_a_folder_only_its_own_processes_are_seen(kind: str, tmp_path: Path) -> None:
    """A process that attempt 1 left behind is no sign that attempt 2, not placed yet, has begun."""
    host, run_dir = Sparse(tmp_path, kind, TOOLS), str(tmp_path / "runs" / "away")
    marks = {"DRAFTYARD_RUN_DIR": run_dir, "DRAFTYARD_ATTEMPT": "1"}

    with subprocess.Popen(["sleep", "60"], env={**os.environ, **marks}) as left:
        has_begun(left)
        seen = [observe(host, run_dir, attempt=attempt).job_alive for attempt in (1, 2, 11, None)]
        left.kill()

    assert seen == [True, False, False, True]
