"""Reading control groups of both versions from a made machine: found from the whole path or from a container's mount."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remote.evidence import Cgroup, Counters, difference, disk_facts, find_cgroup, read_counters

GIB = 1024**3


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A root with /proc/self/cgroup and the named files."""
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


EVENTS = "low 0\nhigh 3\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
UNLIMITED_V1 = str(2**63 - 4096)


def test_version_2_is_read_where_its_path_says(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/user.slice/run-r1.scope"
    files = {f"{folder}/memory.events": EVENTS, f"{folder}/memory.max": f"{64 * GIB}\n"}
    root = machine(tmp_path, "0::/user.slice/run-r1.scope\n", files | {f"{folder}/memory.peak": "123\n"})

    found = find_cgroup(root)

    assert found == Cgroup(2, root / folder)
    assert found.facts() == {
        "version": 2, "path": str(root / folder), "limit_bytes": 64 * GIB, "peak_bytes": 123
    }  # fmt: skip
    assert read_counters(found, root) == Counters(cgroup_kills=2, host_kills=None)


def test_version_1_is_read_where_its_path_says_and_its_huge_number_is_no_limit(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/lxc/200"
    files = {
        f"{folder}/memory.oom_control": CONTROL,
        f"{folder}/memory.limit_in_bytes": f"{UNLIMITED_V1}\n",
        f"{folder}/memory.max_usage_in_bytes": "77\n",
        "proc/vmstat": "pgfault 1\noom_kill 8\n",
    }
    root = machine(tmp_path, "5:cpu,cpuacct:/x\n4:memory,hugetlb:/lxc/200\n0::/\n", files)

    found = find_cgroup(root)

    assert found == Cgroup(1, root / folder)
    assert (found.facts()["limit_bytes"], found.facts()["peak_bytes"]) == (None, 77)
    assert read_counters(found, root) == Counters(cgroup_kills=5, host_kills=8)


@pytest.mark.parametrize(
    ("cgroup", "top", "file", "version"),
    [
        ("0::/docker/3f9a\n", "sys/fs/cgroup", "memory.events", 2),
        ("4:memory:/docker/3f9a\n", "sys/fs/cgroup/memory", "memory.oom_control", 1),
    ],
)
def test_in_a_container_the_path_lies_outside_and_the_mounts_top_is_its_own(
    tmp_path: Path, cgroup: str, top: str, file: str, version: int
) -> None:
    root = machine(tmp_path, cgroup, {f"{top}/{file}": "oom_kill 1\n"})

    found = find_cgroup(root)

    assert found == Cgroup(version, root / top)
    assert found.counters() == 1
    assert found.facts()["limit_bytes"] is None


@pytest.mark.parametrize("cgroup", ["", "0::/\n", "1:name=systemd:/x\n4:memory:/none\n", "no colons at all"])
def test_a_machine_that_tells_nothing_is_unknown_and_never_zero(tmp_path: Path, cgroup: str) -> None:
    root = machine(tmp_path, cgroup, {})

    assert find_cgroup(root) is None
    assert read_counters(None, root) == Counters(None, None)
    assert find_cgroup(tmp_path / "nothing") is None


@pytest.mark.parametrize("events", ["", "low 0\n", "oom_kill x\n", "oom_kill_x 3\n"])
def test_a_counter_that_an_older_kernel_lacks_is_unknown(tmp_path: Path, events: str) -> None:
    root = machine(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.events": events})

    assert read_counters(find_cgroup(root), root).cgroup_kills is None


def test_only_what_rose_while_the_job_ran_counts() -> None:
    assert difference(2, 3) == 1
    assert difference(None, 3) is difference(2, None) is None


def test_no_limit_of_version_2_is_a_word(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.events": EVENTS, "sys/fs/cgroup/memory.max": "max\n"}
    found = find_cgroup(machine(tmp_path, "0::/\n", files))

    assert found is not None
    assert found.facts()["limit_bytes"] is None


def test_the_free_space_is_what_the_system_says(tmp_path: Path) -> None:
    told, found = os.statvfs(tmp_path), disk_facts(tmp_path)

    assert found is not None
    assert found["total_bytes"] == told.f_blocks * told.f_frsize
    assert disk_facts(tmp_path / "none") is None
