"""What the machine itself says about how a job ended: memory limits hit, disk, shared memory.

Counters are read before the job starts and after it ended; only their difference means something.
Standard library only. Whatever cannot be read is None, never a guess.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Counters:
    cgroup_kills: int | None  # processes the kernel killed because of this cgroup's limit
    host_kills: int | None  # processes it killed on the whole machine


@dataclass(frozen=True)
class Cgroup:
    version: int
    folder: Path

    def counters(self) -> int | None:
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return _counter(self.folder / name, "oom_kill")

    def facts(self) -> dict[str, Any]:
        limit, peak = (
            ("memory.max", "memory.peak")
            if self.version == 2
            else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
        )
        limit_bytes = _number(self.folder / limit)
        if limit_bytes is not None and limit_bytes >= 1 << 60:  # v1 spells "no limit" as a huge number
            limit_bytes = None
        return {
            "version": self.version,
            "path": str(self.folder),
            "limit_bytes": limit_bytes,
            "peak_bytes": _number(self.folder / peak),
        }


def find_cgroup(root: Path = Path("/")) -> Cgroup | None:
    """The memory cgroup of this process. In a container the path it names may lie outside: then the mount's top."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return _existing(root / "sys/fs/cgroup/memory", path, 1, "memory.oom_control")
        if number == "0" and not controllers:
            found = _existing(root / "sys/fs/cgroup", path, 2, "memory.events")
            if found is not None:
                return found
    return None


def read_counters(cgroup: Cgroup | None, root: Path = Path("/")) -> Counters:
    return Counters(
        cgroup_kills=cgroup.counters() if cgroup else None, host_kills=_counter(root / "proc/vmstat", "oom_kill")
    )


def difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def disk_facts(folder: Path) -> dict[str, int] | None:
    """Free space and inodes for ordinary users where `folder` lies."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return {
        "free_bytes": found.f_bavail * found.f_frsize,
        "total_bytes": found.f_blocks * found.f_frsize,
        "free_inodes": found.f_favail,
        "total_inodes": found.f_files,
    }


def _existing(mount: Path, path: str, version: int, file: str) -> Cgroup | None:
    for folder in (mount / path.lstrip("/"), mount):
        if (folder / file).is_file():
            return Cgroup(version, folder)
    return None


def _counter(file: Path, name: str) -> int | None:
    try:
        found = re.search(rf"^{name} (\d+)$", file.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
