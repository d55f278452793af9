"""What only the machine knows once a job is over: stand-ins for dmesg and nvidia-smi, a made /proc, real processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote import aftermath
from remote.aftermath import KernelLog, Scope, card_holders, gpu_health, left_behind, of_cards
from remote.processes import marked, read_stat
from tests.remote.jobs import has_begun, wait_for

BEFORE = "0, GPU-a, 00000000:17:00.0, 0\n1, GPU-b, 00000000:31:00.0, [N/A]\n"


class Programs:
    """A folder first on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def prints(self, name: str, text: str, code: int = 0) -> None:
        (self.folder / f"{name}.text").write_text(text)
        self.runs(name, f'cat "{self.folder}/{name}.text"; exit {code}')

    def runs(self, name: str, script: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return Programs(tmp_path / "bin")


# The kernel's log ------------------------------------------------------------------------------------


def test_the_kernels_lines_since_the_start_that_tell_of_gpus_and_memory_are_kept(programs: Programs) -> None:
    old = "[   10.000000] NVRM: Xid (PCI:0000:17:00): 79, an old fault\n"
    programs.prints("dmesg", old)
    log = KernelLog()
    new = "[   11.500000] usb 1-1: new device\n[   12.000000] NVRM: Xid (PCI:0000:31:00): 48, pid=3, DBE\n"
    programs.prints("dmesg", f"{old}{new}[   12.000001] Out of memory: Killed process 7 (python)\n")

    assert log.lines() == [
        "NVRM: Xid (PCI:0000:31:00): 48, pid=3, DBE",
        "Out of memory: Killed process 7 (python)",
    ]


def test_a_storm_of_lines_keeps_how_it_began_and_how_it_ended(programs: Programs) -> None:
    programs.prints("dmesg", "")
    log = KernelLog()
    programs.prints("dmesg", "".join(f"[  {n}.000000] NVRM: Xid {n} {'x' * 900}\n" for n in range(1, 2001)))

    kept = log.lines()

    assert kept is not None
    assert (kept[0][:12], kept[15], kept[-1][:14]) == ("NVRM: Xid 1 ", "(1970 lines left out)", "NVRM: Xid 2000")
    assert sum(map(len, kept)) < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("script", ["echo 'read kernel buffer failed: Operation not permitted' >&2; exit 1", "sleep 9"])
def test_a_log_that_may_not_be_read_or_does_not_come_is_unknown(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(aftermath, "KERNEL_LIMIT_S", 0.3)
    programs.runs("dmesg", script)

    assert KernelLog().lines() is None


# The cards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "code", "expected"),
    [
        (BEFORE, 0, {"said": [], "gone": [], "ecc_uncorrected": {}}),
        (BEFORE.replace("00.0, 0", "00.0, 3"), 0, {"said": [], "gone": [], "ecc_uncorrected": {"GPU-a": [0, 3]}}),
        (
            "Unable to determine the device handle for GPU0000:17:00.0: GPU is lost. Reboot\n1, GPU-b, 00000000:31:00.0, [N/A]\n",
            15,
            {
                "said": ["Unable to determine the device handle for GPU0000:17:00.0: GPU is lost. Reboot"],
                "gone": ["GPU-a"],
            },
        ),
        (
            BEFORE.replace("00.0, 0", "00.0, [GPU is lost]"),
            0,
            {"said": ["0, GPU-a, 00000000:17:00.0, [GPU is lost]"], "gone": ["GPU-a"]},
        ),
        ("No devices were found\n", 6, {"said": ["No devices were found"], "gone": ["GPU-a", "GPU-b"]}),
    ],
)
def test_what_nvidia_smi_says_of_the_cards_and_did_not_say_before(
    programs: Programs, now: str, code: int, expected: dict[str, Any]
) -> None:
    programs.prints("nvidia-smi", now, code)

    found = gpu_health(BEFORE, [])

    assert found is not None
    assert found["exit_code"] == code
    assert {name: found[name] for name in expected} == expected


def test_another_jobs_card_is_no_evidence(programs: Programs) -> None:
    programs.prints("nvidia-smi", "Unable to determine the device handle for GPU0000:17:00.0: GPU is lost\n", 15)
    lost = ["NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus", "NVRM: loading"]

    neighbour, own = gpu_health(BEFORE, ["GPU-b"]), gpu_health(BEFORE, ["0"])

    assert neighbour is not None
    assert own is not None
    assert (neighbour["said"], neighbour["gone"]) == ([], ["GPU-b"])
    assert own["said"] != []
    assert of_cards(lost, neighbour) == ["NVRM: loading"]
    assert of_cards(lost, own) == of_cards(lost, None) == lost


def test_a_card_that_was_lost_before_the_job_is_not_its_fault(programs: Programs) -> None:
    lost = "0, GPU-a, 00000000:17:00.0, [GPU is lost]\n"
    programs.prints("nvidia-smi", lost)

    found = gpu_health(lost, [])

    assert found is not None
    assert (found["said"], found["gone"]) == ([], [])


@pytest.mark.slow
def test_an_nvidia_smi_that_hangs_is_given_up(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aftermath, "NVIDIA_LIMIT_S", 0.3)
    programs.runs("nvidia-smi", "sleep 9")

    found = gpu_health(BEFORE, [])

    assert found is not None
    assert found["exit_code"] is None


# Processes -------------------------------------------------------------------------------------------


def proc(folder: Path, paths: dict[str, str]) -> Path:
    for pid, path in paths.items():
        (folder / pid).mkdir(parents=True)
        (folder / pid / "cgroup").write_text(f"4:memory:/other\n1:name=systemd:{path}\n0::/\n")
    return folder


def test_the_scope_of_the_job_shows_who_came_into_it(tmp_path: Path) -> None:
    made = proc(tmp_path / "proc", {"self": "/run-r1.scope", str(os.getpid()): "/run-r1.scope", "700": "/user.slice"})
    scope = Scope(made)
    proc(made, {"901": "/run-r1.scope", "902": "/run-r1.scope/deeper", "903": "/run-r1.scope2"})

    assert scope.others() == {901, 902}


@pytest.mark.parametrize("own", ["/", "/user.slice/session-1.scope"])
def test_a_control_group_shared_with_strangers_accuses_nobody(tmp_path: Path, own: str) -> None:
    made = proc(tmp_path / "proc", {"self": own, str(os.getpid()): own, "700": own})
    scope = Scope(made)
    proc(made, {"901": own})

    assert scope.others() == set()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        has_begun(process)
        yield process
        process.kill()


def test_who_holds_a_card_and_was_started_while_the_job_ran_is_left_behind(
    programs: Programs, stranger: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    programs.prints("nvidia-smi", f"GPU-a, {stranger.pid}, 300\nGPU-a, 1, 20\nGPU-b, 99999999, 4\n")
    nobody = Scope(proc(tmp_path / "proc", {"self": "/"}))

    began = read_stat(stranger.pid).start_ticks  # the very tick: a job and what it starts may share one

    def left(gpus: list[str]) -> list[dict[str, Any]]:
        return left_behind(nobody, card_holders(), gpus=gpus, before=BEFORE, since_ticks=began)

    (found,) = left([])
    assert (found["pid"], found["command"], found["gpu"]) == (stranger.pid, "sleep 60", "GPU-a")
    assert found["used_bytes"] == 300 * 2**20
    assert [process["pid"] for process in left(["GPU-a"])] == [stranger.pid]
    assert [(process["pid"], process["command"]) for process in left(["1"])] == [(99999999, None)]
    assert left_behind(nobody, card_holders(), gpus=["GPU-a"], before=BEFORE, since_ticks=began + 1) == []


def test_a_process_of_another_run_is_nobodys_rest(programs: Programs, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], env={"DRAFTYARD_RUN_ID": "another"}) as neighbour:
        holders = [("GPU-a", neighbour.pid, 7)]
        nobody = Scope(proc(tmp_path / "proc", {"self": "/"}))
        wait_for(lambda: any(process.pid == neighbour.pid for process in marked()))

        found = left_behind(nobody, holders, gpus=[], before=BEFORE, since_ticks=0)
        neighbour.kill()

    assert found == []


def test_an_nvidia_smi_that_was_silent_is_not_asked_again(programs: Programs) -> None:
    programs.runs("nvidia-smi", f"touch {programs.folder}/asked")

    found = gpu_health(BEFORE, [], is_silent=True)

    assert found is not None
    assert found["exit_code"] is None
    assert not (programs.folder / "asked").exists()
