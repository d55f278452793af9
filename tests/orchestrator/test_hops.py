"""Hops: what is run on the machine outside, row by row, and what a person is told when the way in is shut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import HostError
from orchestrator.host import Hop
from orchestrator.launch import find_processes, reap
from orchestrator.shell.hops import ROWS, HopShell
from orchestrator.shell.local import LocalShell
from orchestrator.workplace import Workplace
from remote.processes import ATTEMPT_MARK, RUN_DIR_MARK, RUN_MARK
from tests import container
from tests.remote.jobs import wait_for

NO_CONTAINER = container.why_not()


@dataclass
class Outside(LocalShell):
    """This machine with stand-in programs first on the PATH of the commands that look for them."""

    folder: Path
    seen: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def stream(self, argv: list[str], **options: Any) -> Any:
        self.seen.append(argv)
        return super().stream(["env", f"PATH={self.folder}:/usr/bin:/bin", *argv], **options)


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path / "bin")


@pytest.mark.parametrize(
    ("hop", "prefix"),
    [
        (Hop("docker", "trainer"), ["exec", "-i", "trainer", "sh", "-c"]),
        (Hop("lxc", "gpu-ct"), ["exec", "gpu-ct", "-T", "--", "sh", "-c"]),
        (Hop("pct", "200"), ["exec", "200", "--", "sh", "-c"]),
    ],
    ids=str,
)
def test_a_command_goes_in_as_words_of_its_own(outside: Outside, hop: Hop, prefix: list[str]) -> None:
    name = ROWS[hop.kind].program
    program(outside.folder, name, f'shift {len(prefix) - 2}; exec "$@"')

    done = HopShell(outside, hop).run(["printf", "%s|", "a b", "$x '\"\n", ""], stdin=b"")

    assert done.stdout == b"a b|$x '\"\n||"
    assert outside.seen[-1][: len(prefix) + 1] == [f"{outside.folder}/{name}", *prefix]


def test_an_inner_ssh_gets_one_line_for_its_shell_and_never_a_prompt(outside: Outside) -> None:
    program(outside.folder, "ssh", 'for last; do :; done; exec sh -c "$last"')

    done = HopShell(outside, Hop("ssh", "inner")).run(["printf", "%s|", "a  b", "$x '\"\n", "*"], stdin=b"")

    called = outside.seen[-1]
    assert done.stdout == b"a  b|$x '\"\n|*|"
    assert called[called.index("--") + 1] == "inner"
    assert called[called.index("inner") + 1].startswith("exec sh -c ")
    assert {"BatchMode=yes", "ConnectTimeout=15"} <= set(called)


def test_sudo_is_used_only_where_root_is_needed_and_not_given(outside: Outside) -> None:
    program(outside.folder, "pct", 'shift 3; exec "$@"')
    program(outside.folder, "id", '[ "$1" = -u ] && echo 1000 || echo trainer')
    program(outside.folder, "sudo", 'shift; exec "$@"')

    HopShell(outside, Hop("pct", "200")).run(["true"])

    assert outside.seen[-1][:3] == ["sudo", "-n", f"{outside.folder}/pct"]


def test_a_sudo_that_wants_a_password_names_the_rule_to_add(outside: Outside) -> None:
    program(outside.folder, "pct", 'shift 3; exec "$@"')
    program(outside.folder, "id", '[ "$1" = -u ] && echo 1000 || echo trainer')
    program(outside.folder, "sudo", "echo 'sudo: a password is required' >&2; exit 1")

    with pytest.raises(HostError, match="sudo wants a password") as refused:
        HopShell(outside, Hop("pct", "200")).run(["true"])

    assert f"trainer ALL=(root) NOPASSWD: {outside.folder}/pct" in str(refused.value)
    assert refused.value.reason == "auth"


def test_a_program_that_is_not_there_is_named(outside: Outside) -> None:
    with pytest.raises(HostError, match=r"no `docker` on local"):
        HopShell(outside, Hop("docker", "x")).run(["true"])


@pytest.mark.parametrize(
    ("kind", "name", "state", "repair"),
    [
        ("pct", "200", "status: stopped", "pct start 200"),
        ("docker", "trainer", "exited", "docker start trainer"),
        ("lxc", "gpu", "STOPPED", "lxc start gpu"),
    ],
)
def test_a_container_that_is_down_is_said_with_the_command_that_starts_it(
    outside: Outside, kind: str, name: str, state: str, repair: str
) -> None:
    program(outside.folder, kind, f'[ "$1" = exec ] && {{ echo "not running" >&2; exit 255; }}; echo "{state}"')

    with pytest.raises(HostError, match="it is not running") as refused:
        HopShell(outside, Hop(kind, name)).run(["true"])

    assert (refused.value.reason, refused.value.exit_code) == ("container_stopped", 4)  # as of any host that is down
    assert f"repair: {repair}" in str(refused.value)


def test_a_way_in_that_fails_otherwise_shows_what_was_said(outside: Outside) -> None:
    program(
        outside.folder,
        "docker",
        '[ "$1" = exec ] && { echo "permission denied: docker.sock" >&2; exit 1; }; echo running',
    )

    with pytest.raises(HostError, match=r"cannot enter \(exit code 1\): permission denied: docker\.sock"):
        HopShell(outside, Hop("docker", "x")).run(["true"])


@pytest.mark.parametrize("lost", [0, 1, 255])
def test_an_exit_code_survives_a_program_that_loses_it(outside: Outside, lost: int) -> None:
    """Known of several container tools; the command's own word is what counts."""
    program(outside.folder, "lxc", f'shift 4; "$@"; exit {lost}')

    assert HopShell(outside, Hop("lxc", "x")).run(["sh", "-c", "exit 37"]).exit_code == 37


def test_what_the_program_itself_prints_is_not_the_commands_output(outside: Outside) -> None:
    program(
        outside.folder, "docker", 'shift 3; echo WARNING; echo warning >&2; "$@"; r=$?; echo bye; echo bye >&2; exit $r'
    )

    done = HopShell(outside, Hop("docker", "x")).run(["sh", "-c", "echo out; echo err >&2"])

    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")


@pytest.mark.slow
def test_input_behind_a_long_command_is_whole_where_head_reads_ahead(outside: Outside) -> None:
    """As busybox's does: it took the command's own input along with the script."""
    program(outside.folder, "docker", 'shift 3; exec "$@"')
    program(outside.folder, "head", 'cat > "$0.all"; exec /usr/bin/head "$@" < "$0.all"')

    done = HopShell(outside, Hop("docker", "x")).run(["sh", "-c", "cat", "sh", *["x" * 60_000] * 2], stdin=b"input")

    assert done.stdout == b"input"


@pytest.mark.slow
def test_a_way_in_that_breaks_during_the_command_is_no_exit_code(outside: Outside) -> None:
    program(outside.folder, "docker", 'shift 3; "$@" & sleep 2; exit 0')

    with pytest.raises(HostError, match="the way in was lost while a command ran"):
        HopShell(outside, Hop("docker", "x")).run(["sleep", "20"])


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[tuple[container.Container, Outside]]:
    if NO_CONTAINER:
        pytest.skip(NO_CONTAINER)
    with container.running(tmp_path / "ct") as running:
        yield running, Outside(running.bin)


def test_inside_is_another_root_host_name_and_process_space(inside: tuple[container.Container, Outside]) -> None:
    running, outside = inside
    shell = HopShell(outside, Hop("pct", "200"))

    assert shell.run(["hostname"]).stdout == b"ct200\n"
    assert int(shell.run(["sh", "-c", "echo $$"]).stdout) < 1000
    shell.run(["touch", "/tmp/inside"])
    assert not Path("/tmp/inside").exists()
    assert Path(f"/proc/{running.init_pid}/root/tmp/inside").exists()


def test_commands_inside_have_a_home_and_find_what_lies_in_usr_local(
    inside: tuple[container.Container, Outside],
) -> None:
    _, outside = inside

    seen = HopShell(outside, Hop("pct", "200")).run(["sh", "-c", 'echo "$HOME $PATH"']).stdout.decode()

    assert seen.startswith("/root ")
    assert "/usr/local/bin" in seen.split()[1].split(":")


@pytest.mark.slow
def test_processes_inside_a_container_are_found_by_their_marker_and_ended_from_outside(
    inside: tuple[container.Container, Outside],
) -> None:
    _, outside = inside
    shell, place = HopShell(outside, Hop("pct", "200")), Workplace("/var/tmp/work", "/usr/bin/python3", "/root")
    for run_id in ("left", "neighbour"):
        marks = {RUN_MARK: run_id, ATTEMPT_MARK: "1", RUN_DIR_MARK: f"{place.work_dir}/runs/{run_id}"}
        shell.spawn(["env", *(f"{name}={value}" for name, value in marks.items()), "sleep", "300"], cwd="/")
    wait_for(lambda: len(find_processes(shell, place)) == 2)

    assert [found.command for found in find_processes(shell, place, run_ids=["left"])] == ["sleep 300"]
    assert reap(shell, place, names=["left"]) == []
    assert [found.run_id for found in find_processes(shell, place)] == ["neighbour"]
    assert reap(shell, place, names=["neighbour"]) == []


def test_a_container_that_stops_and_starts_again_is_used_again(inside: tuple[container.Container, Outside]) -> None:
    running, outside = inside
    shell = HopShell(outside, Hop("pct", "200"))
    shell.run(["true"])

    running.set_state("stopped")
    with contextlib.suppress(HostError):
        shell.run(["true"])
    running.set_state("running")

    assert shell.run(["echo", "again"]).stdout == b"again\n"
