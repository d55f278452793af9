"""Transfers that are cut, machines that freeze, keys that change in between: over a real sshd, with files of real size."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.actions import pulling
from orchestrator.actions.places import find_places
from orchestrator.errors import DraftyardError, HostError
from orchestrator.host import Host, Hosts
from orchestrator.parcel import Progress
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import StreamShell
from orchestrator.ship import ship
from orchestrator.store.writes import Store
from orchestrator.tree import git_tree
from orchestrator.workplace import workplace
from tests import sshd
from tests.orchestrator.runs import RUN, batch, event, started
from tests.orchestrator.yard import Yard
from tests.sshd import Server

pytestmark = pytest.mark.slow  # many megabytes, many cuts, real waits

MIB = 1024**2
LIMIT_S = 45


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with sshd.running(tmp_path / "sshd") as running:
        yield running


def host_of(server: Server) -> Host:
    return replace(Hosts.load(None, server.config_file).find(server.alias), python=sys.executable)


@contextmanager
def reached(server: Server) -> Iterator[StreamShell]:
    shell = connect(host_of(server))
    try:
        yield shell
    finally:
        shell.close()


# Cuts ------------------------------------------------------------------------------------------------


def test_a_large_tree_cut_on_the_way_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    with (folder / "weights").open("wb") as stream:
        stream.truncate(200_000_000)
        stream.write(b"not only zeros")
    tree = git_tree(folder)

    def cutting(after: int) -> Callable[[Progress], None]:
        left = [after]

        def cut(progress: Progress) -> None:
            if left and progress.sent_bytes > left[0]:
                left.clear()
                server.cut()

        return cut

    with reached(server) as shell:
        place = workplace(shell, host_of(server))
        for after in (60_000_000, 50_000_000):
            with pytest.raises(HostError, match="lost"):
                ship(tree, shell, place, on_progress=cutting(after))
            assert not Path(place.tree_dir(tree.hash)).exists()
        shipped = ship(tree, shell, place)

    there = Path(shipped.path, "weights")
    assert there.stat().st_size == 200_000_000
    assert there.read_bytes()[:20] == b"not only zeros" + bytes(6)
    assert shipped.sent_bytes < 120_000_000  # of 200 million; what had arrived twice was not sent again


def test_a_put_cut_on_the_way_leaves_the_old_file_and_the_next_one_completes(server: Server, tmp_path: Path) -> None:
    there, large = server.home / "there", tmp_path / "large"
    there.write_text("old")
    with large.open("wb") as stream:
        stream.truncate(1024 * MIB)

    with reached(server) as shell:
        cutter = _cut_after(server, server.home, 8 * MIB)
        with pytest.raises(HostError, match="lost"):
            shell.put(large, str(there))
        cutter.join()
        assert there.read_text() == "old"

        large.write_text("new")
        shell.put(large, str(there))

    assert there.read_text() == "new"
    left = {path.name for path in server.home.iterdir()} - {"there"}
    assert all(name.endswith(".put") for name in left)  # of the file that it was, to go on from for an hour


def test_a_get_cut_on_the_way_leaves_the_old_file_and_the_next_one_brings_only_the_rest(
    server: Server, tmp_path: Path
) -> None:
    there, here = server.home / "there", tmp_path / "here"
    with there.open("wb") as stream:
        stream.truncate(200 * MIB)
        stream.write(b"not only zeros")
    here.write_text("old")

    with reached(server) as shell:
        parts = _cut_after(server, here.parent, 40 * MIB)
        with pytest.raises(HostError, match="lost"):
            shell.get(str(there), here)
        parts.join()
        assert here.read_text() == "old"
        [part] = tmp_path.glob(".here.*.part")
        had = part.stat().st_size

        read = _counted(shell)
        shell.get(str(there), here)

    assert here.read_bytes() == there.read_bytes()
    assert had >= 40 * MIB
    assert sum(read) < 201 * MIB - had
    assert not list(tmp_path.glob(".here.*"))


def _cut_after(server: Server, folder: Path, size: int) -> threading.Thread:
    """Cuts every connection once a file of so many bytes lies in the folder, whatever it is called yet."""

    def watch() -> None:
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            with contextlib.suppress(FileNotFoundError):  # it got its name meanwhile
                if any(path.stat().st_size >= size for path in folder.iterdir()):
                    server.cut()
                    return
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def _counted(shell: StreamShell) -> list[int]:
    """The sizes of all pieces that the shell brings from now on."""
    read: list[int] = []
    plain = shell.stream

    def stream(argv: list[str], *, sink: Callable[[bytes], object], **more: object) -> object:
        def count(piece: bytes) -> object:
            read.append(len(piece))
            return sink(piece)

        return plain(argv, sink=count, **more)  # type: ignore[arg-type]

    shell.stream = stream  # type: ignore[method-assign,assignment]
    return read


def test_a_pull_cut_on_the_way_goes_on_and_brings_no_file_twice(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = server.home / "work" / "runs" / RUN / "checkpoints" / "step-00000005"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"part-{number}").write_bytes(os.urandom(MIB) * 60)
    with Store(tmp_path / "runs.db") as store:
        started(store, workdir=str(server.home / "work"))
        store.ingest(
            batch([event(1, "checkpoint", step=5, path=f"checkpoints/{folder.name}", size_bytes=4, is_best=False)])
        )
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")
    monkeypatch.setattr(pulling, "find_host", lambda *_: host_of(server))

    def pull() -> None:
        pulling.pull(places, RUN, which="last", to=tmp_path / "pulled", tell=lambda _: None)

    (tmp_path / "pulled").mkdir()
    cutter = _cut_once(server, tmp_path / "pulled", "part-1")
    with pytest.raises(HostError):
        pull()
    cutter.join()
    first = tmp_path / "pulled" / RUN / folder.name / "part-0"
    inode = first.stat().st_ino
    pull()

    assert {path.name: path.read_bytes() for path in first.parent.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert first.stat().st_ino == inode  # whole already: compared, and not fetched again


def _cut_once(server: Server, folder: Path, name: str) -> threading.Thread:
    """Cuts every connection once a part of this file lies below the folder."""

    def watch() -> None:
        ends = time.monotonic() + 60
        while time.monotonic() < ends and not list(folder.rglob(f".{name}.*.part")):
            time.sleep(0.002)
        server.cut()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_two_clients_over_two_connections_ship_at_once(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for number in range(200):
        (folder / f"f{number}").write_bytes(os.urandom(2000))
    (folder / "large").write_bytes(os.urandom(20 * MIB))
    tree = git_tree(folder)

    def go(_: int) -> str:
        with reached(server) as shell:
            return ship(tree, shell, workplace(shell, host_of(server))).path

    with ThreadPoolExecutor(2) as two:
        first, second = two.map(go, range(2))

    assert first == second
    for entry in tree.entries:
        assert Path(first, entry.path).read_bytes() == entry.source.read_bytes()


@pytest.fixture
def behind(server: Server, tmp_path: Path) -> Iterator[Host]:
    """A machine that is reached through the server."""
    with sshd.running(tmp_path / "behind", alias="behind") as target:
        config = tmp_path / "both_config"
        config.write_text(server.config() + target.config(f"ProxyJump {server.alias}"))
        yield Hosts.load(None, config).find("behind")


# Asleep --------------------------------------------------------------------------------------------


def test_after_the_lid_was_closed_the_follower_catches_up_and_no_step_is_doubled(
    yard: Yard, server: Server, tmp_path: Path
) -> None:
    """The follower is stopped for a while, and meanwhile its connection dies."""
    entry = server.hosts_yaml(work_dir=str(tmp_path / "there"), python=sys.executable)
    (yard.root / "hosts.yaml").write_text(entry, encoding="utf-8")
    words = ["--set", "settings.num_steps=80", "--set", "settings.sleep_s=0.05", "--force", "only its life counts"]
    assert yard.run("launch", "tiny", "--host", server.alias, *words) == 0, yard.err
    follower = _follower_of(yard)

    os.kill(follower, signal.SIGSTOP)
    server.cut()
    time.sleep(2.0)
    os.kill(follower, signal.SIGCONT)
    began = time.monotonic()

    assert yard.run("wait", "@last", "--timeout", "60s") == 0, yard.err
    assert time.monotonic() - began < 30
    values = yard.json("metrics", "@last", "loss")["values"]["loss"]
    assert [item["step"] for item in values] == list(range(1, 81))


def test_a_host_that_was_away_for_long_is_followed_again_within_30_seconds(
    yard: Yard, server: Server, tmp_path: Path
) -> None:
    """Its sshd is stopped and the connection dies, for longer than the pauses between attempts take to grow."""
    entry = server.hosts_yaml(work_dir=str(tmp_path / "there"), python=sys.executable)
    (yard.root / "hosts.yaml").write_text(entry, encoding="utf-8")
    words = ["--set", "settings.num_steps=100000", "--set", "settings.sleep_s=0.05", "--force", "only its life counts"]
    assert yard.run("launch", "tiny", "--host", server.alias, *words) == 0, yard.err
    _eventually(lambda: (yard.json("show", "@last")["run"]["step"] or 0) > 3)

    server.freeze()
    server.cut()
    try:
        time.sleep(60.0)
        away = yard.json("show", "@last")["run"]
        server.freeze(stopped=False)
        began = time.monotonic()
        while (back := yard.json("show", "@last")["run"])["unreachable_since"] or back["step"] <= away["step"]:
            assert time.monotonic() - began < 30
            time.sleep(0.2)
    finally:
        server.freeze(stopped=False)
        yard.run("stop", "@last", "--now")
        assert yard.run("wait", "@last", "--timeout", "60s") == 13

    assert away["state"] == "running"
    assert away["unreachable_since"] is not None
    steps = [item["step"] for item in yard.json("metrics", "@last", "loss")["values"]["loss"]]
    assert steps == list(range(1, steps[-1] + 1))


def _follower_of(yard: Yard) -> int:
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"orchestrator.follow.follower" in words and os.fsencode(yard.root / "runs.db") in words:
                    return int(process.name)
        time.sleep(0.05)
    raise AssertionError("no follower came")


# Frozen ----------------------------------------------------------------------------------------------


def test_a_frozen_machine_ends_every_kind_of_call_in_under_45_seconds(
    server: Server, behind: Host, tmp_path: Path
) -> None:
    """Those that begin afterwards, those that are half-way, and those to a machine behind it. Its kernel goes on
    acknowledging every byte.

    Holds `pulse.check` in `Conversation._loop`, by which whoever waits for a command asks whether the server answers, and
    `OPEN_S`, the time of all tries to open. How many answers may be missed is test_pulse's.
    """
    for place in (server.home / "huge", tmp_path / "huge"):
        with place.open("wb") as stream:
            stream.truncate(1024 * MIB)  # far from done after a second; looking at more costs both sides seconds
    there = str(server.home / "huge")
    during: dict[str, Callable[[StreamShell], object]] = {
        "run": lambda shell: shell.run(["sleep", "300"], timeout_s=400),
        "put": lambda shell: shell.put(tmp_path / "huge", f"{server.home}/copy"),
        "get": lambda shell: shell.get(there, tmp_path / "copy"),
    }
    before: dict[str, Callable[[StreamShell], object]] = {
        "run": lambda shell: shell.run(["true"], timeout_s=400),
        "put": lambda shell: shell.put(tmp_path / "small", f"{server.home}/small"),
        "get": lambda shell: shell.get(there, tmp_path / "late"),
        "read_range": lambda shell: shell.read_range(there, 0, 100),
        "stat": lambda shell: shell.stat(there),
        "spawn": lambda shell: shell.spawn(["true"], cwd="/"),
    }
    (tmp_path / "small").write_text("small")
    shells = {name: connect(host_of(server)) for name in [*(f"{n}, half-way" for n in during), *before]}
    shells["run behind it"] = connect(behind)
    with ThreadPoolExecutor(len(shells) + 2) as all_at_once:
        waits = {
            name: all_at_once.submit(_error, act, shells[name])
            for name, act in ((f"{n}, half-way", act) for n, act in during.items())
        }
        time.sleep(1.0)
        server.freeze()
        for name, act in before.items():
            waits[name] = all_at_once.submit(_error, act, shells[name])
        waits["run behind it"] = all_at_once.submit(_error, before["run"], shells["run behind it"])
        waits["open behind it"] = all_at_once.submit(_error, lambda _: connect(behind), None)
        waits["open"] = all_at_once.submit(_error, lambda _: connect(host_of(server)), None)
        _, late = wait_for(waits.values(), timeout=LIMIT_S)
        server.freeze(stopped=False)
        if late:  # they would wait for minutes yet
            server.cut()
    for shell in shells.values():
        shell.close()

    assert [name for name, wait in waits.items() if wait in late] == []
    assert [wait.result() for wait in waits.values()] == ["HostError"] * len(waits)


def _error(act: Callable[[StreamShell], object], shell: StreamShell) -> str:
    """What a call ends with."""
    try:
        act(shell)
    except HostError:
        return "HostError"
    except DraftyardError as error:
        return str(error)
    return "nothing"


# Another key -----------------------------------------------------------------------------------------


def test_a_key_that_changes_during_a_session_stops_the_reconnect_and_every_later_one(server: Server) -> None:
    with reached(server) as shell:
        assert shell.run(["true"]).exit_code == 0
        old = server.host_key
        for name in ("host_ed25519", "host_ed25519.pub"):
            (server.folder / name).unlink()
        sshd.make_key(server.folder / "host_ed25519")
        server.process.send_signal(signal.SIGHUP)  # it starts itself anew, on the same port
        server.cut()
        assert server.host_key != old

        for _ in range(2):
            with pytest.raises(HostError, match="THE HOST KEY HAS CHANGED; nothing was sent") as refused:
                _after_the_restart(lambda: shell.run(["touch", f"{server.home}/was-here"]))
            assert refused.value.reason == "host_key_changed"

    assert not (server.home / "was-here").exists()


def _after_the_restart(act: Callable[[], object]) -> object:
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        try:
            return act()
        except HostError as error:
            if error.reason != "unreachable":
                raise
            time.sleep(0.1)
    raise AssertionError("the server did not come back")


def _eventually(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.05)
