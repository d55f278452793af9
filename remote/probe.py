"""Facts about this host, as one JSON object: what a doctor reads, what a launch checks, what a gate remembers.

    python3 - WORK_DIR < probe.py

Standard library only and nothing beside it: it is sent as text to a host that has nothing of ours.
torch is found, not imported (that alone takes seconds), unless the driver seems too old for it; packages are read from the names of their
dist-info folders. Only nvidia-smi may be slow: it gets a minute, and "no answer" is told apart from
"no GPU". Whatever cannot be read is null. Nothing is changed, and nothing is judged here.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import platform
import pwd
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

MIB = 1024**2
NVIDIA_LIMIT_S = 60.0  # over 30 s have been seen in containers
TORCH_LIMIT_S = 60.0
GIVE_UP_S = 1.0
# CUDA -> driver for Linux: NVIDIA, CUDA Compatibility, minor version table
OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}
GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "driver_version")
SAMPLE_FIELDS = ("index", "uuid", "memory.used", "memory.total", "utilization.gpu")
HOLDER_FIELDS = ("gpu_uuid", "pid", "used_memory")
NODES = ("nvidiactl", "nvidia-uvm", "nvidia0")


def facts(work_dir: str) -> dict[str, Any]:
    """Everything, each under its name; under 2 s where nvidia-smi answers at once."""
    return {
        "time_s": time.time(),
        "python": python_facts(),
        **cuda_facts(gpu_facts()),
        "nvidia_nodes": node_facts(),
        "disk": disk_facts(work_dir),
        "shm_free_bytes": _free_bytes("/dev/shm"),
        "memory": memory_facts(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "boot_id": _text("/proc/sys/kernel/random/boot_id"),
        "uptime_s": float((_text("/proc/uptime") or "0").split()[0]),
        "system": {
            "name": platform.node(),
            "kernel": platform.release(),
            "os": _os_name(),
            "machine": platform.machine(),
        },
        "container": container_kind(),
        "user": _user(),
        "path": os.environ.get("PATH"),
        "lang": os.environ.get("LANG"),
        "session": session_facts(),
        "tools": {name: shutil.which(name) for name in ("uv", "git", "rsync", "setsid", "systemd-run", "nvidia-smi")},
    }


# Python ----------------------------------------------------------------------------------------------


def python_facts() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "is_venv": sys.prefix != sys.base_prefix,
        "is_managed": is_managed(),
        "packages": packages(),
    }


def is_managed() -> bool:
    """Whether pip refuses to install here, as the system's own Python of Debian 12 or Fedora does (PEP 668)."""
    is_venv = sys.prefix != sys.base_prefix
    return not is_venv and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").is_file()


def packages() -> dict[str, str]:
    """Distribution -> version, from the names of dist-info folders: 5 ms where reading each METADATA takes 200."""
    found: dict[str, str] = {}
    for folder in sys.path:
        for name in _listed(folder or "."):
            match = re.fullmatch(r"(.+)-([^-]+)\.(?:dist|egg)-info", name)
            if match:
                found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2])
    return found


def torch_cuda() -> str | None:
    """The CUDA version torch was built for; null without torch and for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = _text(str(Path(spec.origin).with_name("version.py"))) or ""
    found = re.search(r"^cuda[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def cuda_facts(cards: dict[str, Any]) -> dict[str, Any]:
    """The cards' facts, and torch's word where the driver alone would speak against it: a package of forward
    compatibility lends it a newer libcuda, which nvidia-smi does not tell."""
    cuda = torch_cuda()
    is_doubtful = bool(cards["gpus"]) and oldest_driver(cuda or "", cards["driver"] or "") is not None
    return {**cards, "torch_cuda": cuda, "cuda_available": cuda_available() if is_doubtful else None}


def oldest_driver(cuda: str, driver: str) -> int | None:
    """The driver that such a CUDA wants, where this one is older; None where it will do, or a version says nothing."""
    oldest, version = OLDEST_DRIVERS.get(cuda.partition(".")[0]), driver.partition(".")[0]
    return oldest if oldest is not None and version.isdecimal() and int(version) < oldest else None


def cuda_available(limit_s: float = TORCH_LIMIT_S) -> bool | None:
    """What torch says itself, in seconds; None where it does not answer."""
    asking = [sys.executable, "-W", "ignore", "-c", "import torch; print(torch.cuda.is_available())"]
    try:
        done = subprocess.run(asking, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {b"True": True, b"False": False}.get(done.stdout.strip())


# GPUs ------------------------------------------------------------------------------------------------


def gpu_facts(limit_s: float = NVIDIA_LIMIT_S) -> dict[str, Any]:
    """gpus in the order of nvidia-smi (PCI bus), each with who holds memory of it; driver; gpu_error."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"gpus": [], "driver": None, "gpu_error": None}
    try:
        # Both at once: each of them may take half a minute.
        asked = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for command in (
                query_command(program, "gpu", GPU_FIELDS),
                query_command(program, "compute-apps", HOLDER_FIELDS),
            )
        ]
    except OSError as error:
        return {"gpus": [], "driver": None, "gpu_error": f"nvidia-smi: {error.strerror}"}
    ends, printed = time.monotonic() + limit_s, []
    for process in asked:
        try:
            printed.append(process.communicate(timeout=max(0.1, ends - time.monotonic()))[0].decode("utf-8", "replace"))
        except subprocess.TimeoutExpired:
            for other in asked:
                give_up(other)
            return {"gpus": [], "driver": None, "gpu_error": f"nvidia-smi gave no answer in {limit_s:.0f} s"}
    gpus = parse_gpus(printed[0], printed[1])
    is_bad = asked[0].returncode != 0 or (not gpus and bool(printed[0].strip()))
    driver = next((gpu["driver"] for gpu in gpus), None)
    return {"gpus": gpus, "driver": driver, "gpu_error": printed[0].strip()[:500] if is_bad else None}


def give_up(process: subprocess.Popen[bytes]) -> None:
    """Kills it and takes its status if that comes at once. One that hangs in the driver dies only when that lets go."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GIVE_UP_S)
    if process.stdout is not None:
        process.stdout.close()


def query_command(program: str, what: str, fields: tuple[str, ...]) -> list[str]:
    return [program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]


def parse_gpus(listed: str, holders: str) -> list[dict[str, Any]]:
    """One object per whole line; a card that fell off the bus prints an error line and is left out."""
    gpus = []
    for words in _rows(listed, len(GPU_FIELDS)):
        if words[0].isdigit():
            gpus.append(
                {
                    "index": int(words[0]),
                    "uuid": words[1],
                    "name": words[2],
                    "total_bytes": _scaled(words[3], MIB),
                    "used_bytes": _scaled(words[4], MIB),
                    "utilisation": _share(words[5]),
                    "driver": words[6],
                    "processes": [_holder(row) for row in _rows(holders, len(HOLDER_FIELDS)) if row[0] == words[1]],
                }
            )
    return gpus


def parse_samples(text: str) -> list[dict[str, Any]]:
    """{index, uuid, used_bytes, total_bytes, utilisation} of every whole line of a SAMPLE_FIELDS query."""
    return [
        {
            "index": int(words[0]),
            "uuid": words[1],
            "used_bytes": _scaled(words[2], MIB),
            "total_bytes": _scaled(words[3], MIB),
            "utilisation": _share(words[4]),
        }
        for words in _rows(text, len(SAMPLE_FIELDS))
        if words[0].isdigit()
    ]


def read_holders(text: str) -> list[tuple[str, int, int | None]]:
    """(UUID of the card, pid, bytes) of every whole line of a HOLDER_FIELDS query that names a pid."""
    rows = _rows(text, len(HOLDER_FIELDS))
    return [(row[0], int(row[1]), _scaled(row[2], MIB)) for row in rows if row[1].isdigit()]


def _holder(words: list[str]) -> dict[str, Any]:
    """Who holds memory of a GPU. The driver numbers processes outside a container too: such a pid is not ours to see."""
    pid = int(words[1]) if words[1].isdigit() else None
    folder = Path(f"/proc/{pid}")
    is_outside = pid is None or not folder.is_dir()
    user = command = age_s = None
    if not is_outside:
        user, command, age_s = _owner(folder), _command(folder), _age_s(folder)
    return {
        "pid": pid,
        "used_bytes": _scaled(words[2], MIB),
        "user": user,
        "command": "outside this container" if is_outside else command,
        "age_s": age_s,
        "is_outside": is_outside,
    }


def node_facts() -> dict[str, Any] | None:
    """Device nodes a job needs, where the driver is loaded: a container may lack them after a reboot of its host."""
    drivers = _text("/proc/devices") or ""
    majors = {name: int(number) for number, name in re.findall(r"^\s*(\d+) (nvidia\S*)$", drivers, re.MULTILINE)}
    if not majors:
        return None
    found: dict[str, Any] = {}
    for name in NODES:
        wanted = (
            majors.get("nvidia-uvm") if name == "nvidia-uvm" else majors.get("nvidia", majors.get("nvidia-frontend"))
        )
        try:
            node = os.stat(f"/dev/{name}")  # noqa: PTH116  # a device node, not a file
            is_device = stat.S_ISCHR(node.st_mode)
            found[name] = {"is_there": is_device, "major": os.major(node.st_rdev), "driver_major": wanted}
        except OSError:
            found[name] = {"is_there": False, "major": None, "driver_major": wanted}
    return found


# The machine -----------------------------------------------------------------------------------------


def disk_facts(work_dir: str) -> dict[str, Any]:
    """Where the work folder lies, or will lie: the nearest folder that is there."""
    place = Path(work_dir)
    while not place.is_dir() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    return {
        "path": str(place),
        "free_bytes": found.f_bavail * found.f_frsize,
        "total_bytes": found.f_blocks * found.f_frsize,
        "free_inodes": found.f_favail,
        "total_inodes": found.f_files,
        "is_writable": os.access(place, os.W_OK | os.X_OK),
    }


def memory_facts() -> dict[str, int | None]:
    """MemAvailable, not MemFree: the page cache is not in the way of a job."""
    numbers = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text("/proc/meminfo") or "", re.MULTILINE))
    return {
        "total_bytes": _scaled(numbers.get("MemTotal", ""), 1024),
        "available_bytes": _scaled(numbers.get("MemAvailable", ""), 1024),
    }


def container_kind() -> str | None:
    """lxc, docker, podman, ...; null on a machine of its own and where nobody says."""
    environment = _text("/proc/1/environ") or ""
    found = re.search(r"(?:^|\0)container=([\w.-]+)", environment)
    if found:
        return found[1]
    return "docker" if Path("/.dockerenv").exists() else "podman" if Path("/run/.containerenv").exists() else None


def session_facts() -> dict[str, bool | None]:
    """Whether a process outlives its login: systemd may kill it unless the user lingers."""
    if not Path("/run/systemd/system").is_dir():
        return {"systemd": False, "linger": None, "kill_user_processes": None}
    return {
        "systemd": True,
        "linger": Path(f"/var/lib/systemd/linger/{_user()}").exists(),
        "kill_user_processes": kills_user_processes(Path("/etc/systemd")),
    }


def kills_user_processes(folder: Path) -> bool:
    """logind's setting; the last word of the drop-ins wins, the default is no."""
    files = [folder / "logind.conf", *sorted((folder / "logind.conf.d").glob("*.conf"))]
    text = "\n".join(_text(str(file)) or "" for file in files)
    said = re.findall(r"^\s*KillUserProcesses\s*=\s*(\w+)", text, re.MULTILINE)
    return bool(said) and said[-1].lower() in ("yes", "true", "1", "on")


def _rows(text: str, num_fields: int) -> list[list[str]]:
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == num_fields]


def _scaled(word: str, unit: int) -> int | None:
    return int(word) * unit if word.isdigit() else None


def _share(percent: str) -> float | None:
    """nvidia-smi tells utilisation in percent; here it is 0 to 1."""
    return int(percent) / 100 if percent.isdigit() else None


def _owner(folder: Path) -> str | None:
    try:
        number = folder.stat().st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _command(folder: Path) -> str | None:
    words = _text(str(folder / "cmdline"))
    return " ".join(words.rstrip("\0").split("\0"))[:200] if words else None


def _age_s(folder: Path) -> float | None:
    words = (_text(str(folder / "stat")) or "").rpartition(")")[2].split()
    if len(words) < 20:
        return None
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)  # /proc/uptime is a container's own, start ticks are not
    return max(0.0, uptime_s - int(words[19]) / os.sysconf("SC_CLK_TCK"))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as containers have it
        return str(os.getuid())


def _os_name() -> str | None:
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', _text("/etc/os-release") or "", re.MULTILINE)
    return found[1] if found else None


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  # names are all that is wanted
    except OSError:
        return []


def _free_bytes(folder: str) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip("\n")
    except OSError:
        return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts(sys.argv[1])) + "\n")
