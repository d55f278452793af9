"""What reaching a host costs, beside rsync and plain ssh on the same machine.

    python -m benchmarks.hosts                     300 files, 500 MB, 100,000 files, 200,000 records; some minutes
    python -m benchmarks.hosts --quick             the form CI runs: small sizes, seconds
    python -m benchmarks.hosts --only large command --repeats 9

The host is an sshd of its own on loopback; the long line holds every byte back for half of `--round-trip-ms`
each way (`ways`). Ours goes over an open connection, as it does in use. The tools run twice: over a new
connection, as they are mostly called, and over one that OpenSSH keeps (ControlMaster). The three take turns,
wall times are medians, and every copy starts with reading the folder. rsync and ssh use OpenSSH's first
cipher, ours asks for AES-GCM; nothing is set for either.

Needs rsync, ssh, sshd and git. Everything lies in one temporary folder (TMPDIR) that is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.ways import Act, Made, Way, call, race, two_ways
from orchestrator.errors import HostError
from orchestrator.follow.streams import AttemptPlace, Doubts, catch_up
from orchestrator.follow.threads import YOUNG_S
from orchestrator.launch import Job, start
from orchestrator.observe import EventFile, observe
from orchestrator.shell.stream import StreamShell
from orchestrator.ship import ship
from orchestrator.store.rows import Document, NewRun
from orchestrator.store.writes import Store
from orchestrator.tree import git_tree, with_remote
from remote.wire import Event, encode
from tests import sshd

STEP = """
from remote.report import Reporter
reporter = Reporter.from_environment()
with reporter.job():
    reporter.metrics(1, {"loss": 1.0})
    print("step 1", flush=True)
"""
RECORDS_PER_S = 20_000  # the goal for ingest
MOST_S = 1800  # a full run takes some minutes on a quiet machine; one that hangs ends here


@dataclass(frozen=True)
class Sizes:
    files: int = 300
    large_mb: int = 500
    many: int = 100_000  # files of the last ship; 0 leaves it out
    records: int = 200_000
    repeats: int = 5
    round_trip_ms: int = 40


QUICK = Sizes(large_mb=16, many=2_000, records=20_000, repeats=2)


@dataclass(frozen=True)
class Row:
    """One line of the table: medians in seconds."""

    what: str
    goal: str
    ours_s: float
    fresh_s: float  # rsync or ssh over a connection of its own
    kept_s: float  # the same over one that OpenSSH keeps open
    is_reached: bool | None  # None: no goal was set

    def line(self) -> str:
        reached = {True: "yes", False: "no", None: ""}[self.is_reached]
        times = " | ".join(f"{seconds:.3f}" for seconds in (self.ours_s, self.fresh_s, self.kept_s))
        ratios = " | ".join(f"{self.ours_s / seconds:.2f}" for seconds in (self.fresh_s, self.kept_s))
        return f"| {self.what} | {times} | {ratios} | {self.goal} | {reached} |"


HEAD = """\
| what | draftyard, s | rsync or ssh, new connection, s | the same, kept connection, s | ours / new | ours / kept | goal | reached |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Yard:
    folder: Path
    sizes: Sizes
    server: sshd.Server
    near: Way
    far: Way


def measure(folder: Path, sizes: Sizes, parts: Iterable[str]) -> Iterator[Row]:
    """Sets up the host below `folder` and yields one row after the other, of these parts of PARTS."""
    with two_ways(folder, round_trip_ms=sizes.round_trip_ms) as (server, near, far):
        yard = Yard(folder, sizes, server, near, far)
        for part in parts:
            yield from PARTS[part](yard)


# Setting up --------------------------------------------------------------------------------------


def _repository(folder: Path) -> Path:
    folder.mkdir()
    call(["git", "init", "-q", str(folder)])
    return folder


def _small_files(folder: Path, number: int) -> None:
    for count in range(number):
        place = folder / f"d{count // 100}"
        place.mkdir(exist_ok=True)
        (place / f"f{count}.py").write_text(f"x = {count}\n" * 300)


def _one_large(yard: Yard) -> Path:
    folder, chance = _repository(yard.folder / "large"), random.Random(0)
    with (folder / "weights").open("wb") as stream:
        for _ in range(yard.sizes.large_mb):
            stream.write(chance.randbytes(1_000_000))
    return folder


def _many(yard: Yard) -> Path:
    folder = _repository(yard.folder / "many")
    for number in range(yard.sizes.many):
        place = folder / f"d{number // 1000}"
        place.mkdir(exist_ok=True)
        (place / f"f{number}").write_text(f"{number}\n" * 20)
    return folder


# Shipping ----------------------------------------------------------------------------------------


def _ship_small(yard: Yard) -> Iterator[Row]:
    """300 files over the long line: all of them, none, one."""
    folder = _repository(yard.folder / "small")
    _small_files(folder, yard.sizes.files)
    targets = _targets(yard, "small")
    what = f"ship {yard.sizes.files} files over {yard.sizes.round_trip_ms} ms"
    times = race(yard.sizes.repeats, *_cold_acts(yard.far, folder, lambda: next(targets)))
    yield Row(f"{what}, cold", "half of rsync, new connection", *times, is_reached=times[0] < times[1] / 2)

    acts = [made() for made in _cold_acts(yard.far, folder, lambda: next(targets))]
    for act in acts:  # from now on everything is there
        act()
    times = race(yard.sizes.repeats, *((lambda act=act: act) for act in acts))
    yield Row(f"{what}, nothing changed", "under 0.2 s", *times, is_reached=times[0] < 0.2)

    lengths = itertools.count(301)

    def changed(act: Act) -> Made:
        def made() -> Act:
            (folder / "d0" / "f0.py").write_text("y = 1\n" * next(lengths))  # rsync looks at the length
            return act

        return made

    times = race(yard.sizes.repeats, *(changed(act) for act in acts))
    yield Row(f"{what}, one changed", "under 0.3 s", *times, is_reached=times[0] < 0.3)


def _cold_acts(way: Way, folder: Path, target: Callable[[], Path]) -> tuple[Made, Made, Made]:
    """Copying the folder to a place where nothing of it is: ours, and rsync over either connection."""

    def ours() -> Act:
        place = replace(way.place, work_dir=str(target()))
        return lambda: ship(git_tree(folder), way.shell, place)

    def rsync(kept: bool) -> Act:
        there = target()
        return lambda: way.rsync(folder, there, kept=kept)

    return ours, lambda: rsync(False), lambda: rsync(True)


def _ship_large(yard: Yard) -> Iterator[Row]:
    yield _ship_cold(yard, f"{yard.sizes.large_mb} MB", _one_large(yard))


def _ship_many(yard: Yard) -> Iterator[Row]:
    if yard.sizes.many:
        yield _ship_cold(yard, f"{yard.sizes.many:,} files", _many(yard))


def _ship_cold(yard: Yard, what: str, folder: Path) -> Row:
    """The folder to a place that has nothing, on loopback."""
    targets = _targets(yard, folder.name)
    is_many = folder.name == "many"

    def clean() -> Path:
        target = next(targets)
        shutil.rmtree(target.parent, ignore_errors=True)  # the last turn's copy
        target.parent.mkdir()
        return target

    times = race(1 if is_many else yard.sizes.repeats, *_cold_acts(yard.near, folder, clean))
    shutil.rmtree(folder)
    shutil.rmtree(next(targets).parent, ignore_errors=True)
    limit_s = 60 * yard.sizes.many / 100_000
    if is_many:
        return Row(f"ship {what}, cold", f"under {limit_s:g} s", *times, is_reached=times[0] < limit_s)
    return Row(f"ship {what}, cold", "within 5 % of rsync", *times, is_reached=times[0] <= 1.05 * times[1])


def _targets(yard: Yard, name: str) -> Iterator[Path]:
    (yard.folder / f"{name}-there").mkdir()
    return (yard.folder / f"{name}-there" / str(number) for number in itertools.count())


# Commands and connections ------------------------------------------------------------------------


def _command(yard: Yard) -> Iterator[Row]:
    for way, goal in ((yard.near, "under 10 ms"), (yard.far, "")):
        ours, fresh, kept = race(
            4 * yard.sizes.repeats,
            lambda way=way: lambda: way.shell.run(["true"]),
            lambda way=way: lambda: way.run("true", kept=False),
            lambda way=way: lambda: way.run("true", kept=True),
        )
        yield Row(f"a command, {_line(yard, way)}", goal, ours, fresh, kept, ours < 0.01 if goal else None)


def _reconnect(yard: Yard) -> Iterator[Row]:
    """Every connection is cut; until the next command has its answer."""
    for way in (yard.near, yard.far):

        def cut(first: Act, again: Act) -> Made:
            def made() -> Act:
                first()
                yard.server.cut()
                return again

            return made

        def ours(way: Way = way) -> object:
            return _insist(lambda: way.shell.run(["true"]))

        def ssh(kept: bool, way: Way = way) -> Act:
            return lambda: way.run("true", kept=kept)

        times = race(yard.sizes.repeats, cut(ours, ours), cut(ssh(False), ssh(False)), cut(ssh(True), ssh(True)))
        yield Row(f"reconnect and a command, {_line(yard, way)}", "", *times, is_reached=None)


def _line(yard: Yard, way: Way) -> str:
    return "loopback" if way is yard.near else f"{yard.sizes.round_trip_ms} ms"


def _insist(act: Act) -> object:
    """As the follower does: an error is a lost connection, and the next call opens another."""
    while True:
        with contextlib.suppress(HostError):
            return act()


# Records and runs --------------------------------------------------------------------------------


def _ingest(yard: Yard) -> Iterator[Row]:
    """Records on the host into the database here; the tools bring the same bytes and read nothing."""
    way, number = yard.near, yard.sizes.records
    attempt = yard.folder / "attempt"
    attempt.mkdir()
    file = attempt / "events.rank0.jsonl"
    with file.open("wb") as stream:
        for seq in range(1, number + 1):
            stream.write(encode(Event(seq, "metrics", seq, seq, {"step": seq, "values": {"loss": seq / 7}})))
    listed = [EventFile(file.name, file.stat().st_size, file.stat().st_ino)]
    runs = (f"ingest-{count}" for count in itertools.count())

    with _store(yard.folder / "ingest.db") as store:

        def ours() -> Act:
            place = AttemptPlace(_new_run(store, next(runs)), 1, str(attempt))
            return lambda: _until_complete(store, way.shell, place, listed)

        def cat(kept: bool) -> Act:
            return lambda: way.run("cat", str(file), kept=kept)

        times = race(max(1, yard.sizes.repeats // 2), ours, lambda: cat(False), lambda: cat(True))
    what = f"ingest {number:,} records (beside it: `cat` of the same bytes)"
    yield Row(what, f"{RECORDS_PER_S:,} records/s", *times, is_reached=number / times[0] >= RECORDS_PER_S)


def _until_complete(store: Store, shell: StreamShell, place: AttemptPlace, files: list[EventFile]) -> None:
    doubts = Doubts()
    while not catch_up(store, shell, place, files, doubts).is_complete:
        pass


@contextlib.contextmanager
def _store(db: Path) -> Iterator[Store]:
    with Store(db) as store:
        yield store


def _new_run(store: Store, run_id: str) -> str:
    store.create_run(NewRun(run_id, "script", "hosts", "one", "near", {Document.SPEC: "{}"}))
    store.new_attempt(run_id)
    return run_id


def _first_step(yard: Yard) -> Iterator[Row]:
    """From an unchanged tree to the first step in the database; the tools copy, start, and see the first line."""
    folder = _repository(yard.folder / "job")
    (folder / "step.py").write_text(STEP)
    runs = (f"step-{count}" for count in itertools.count())
    with _store(yard.folder / "steps.db") as store:
        for way in (yard.near, yard.far):
            target = yard.folder / f"job-{way.name}"
            shipped = ship(with_remote(git_tree(folder)), way.shell, way.place)
            way.rsync(Path(shipped.path), target, kept=True)

            def ours(way: Way = way) -> Act:
                run_id = _new_run(store, next(runs))
                return lambda: _launch(store, way, folder, run_id)

            def plain(kept: bool, way: Way = way, target: Path = target, source: str = shipped.path) -> Act:
                def act() -> None:
                    way.rsync(Path(source), target, kept=kept)
                    way.run(f"cd {target} && exec {sys.executable} step.py", kept=kept)

                return act

            times = race(yard.sizes.repeats, ours, lambda plain=plain: plain(False), lambda plain=plain: plain(True))
            _until_all_ended(way, store)
            what = f"launch to first step, {_line(yard, way)} (beside it: rsync, then the bare script)"
            yield Row(what, "", *times, is_reached=None)


def _launch(store: Store, way: Way, folder: Path, run_id: str) -> None:
    tree = ship(with_remote(git_tree(folder)), way.shell, way.place)
    started = start(way.shell, way.place, Job(run_id, "script", 1, (sys.executable, "step.py"), tree.path))
    place, doubts = AttemptPlace(run_id, 1, f"{started.run_dir}/attempts/1"), Doubts()
    while not store.reader.metric_values(run_id, "loss"):
        catch_up(store, way.shell, place, observe(way.shell, started.run_dir).files, doubts)
        if not store.reader.metric_values(run_id, "loss"):
            time.sleep(YOUNG_S)  # the follower's pace with a young run


def _until_all_ended(way: Way, store: Store) -> None:
    """So that no supervisor writes into a folder that is being removed."""
    for run in Path(way.place.work_dir, "runs").iterdir():
        ends = time.monotonic() + 30
        while observe(way.shell, str(run)).exit is None and time.monotonic() < ends:
            time.sleep(0.05)


PARTS: dict[str, Callable[[Yard], Iterator[Row]]] = {
    "small": _ship_small,
    "large": _ship_large,
    "many": _ship_many,
    "command": _command,
    "reconnect": _reconnect,
    "ingest": _ingest,
    "step": _first_step,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes; every other flag still counts")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these rows")
    for name in vars(Sizes()):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{getattr(Sizes(), name):,} by default")
    given = vars(parser.parse_args())
    base, parts = QUICK if given.pop("quick") else Sizes(), given.pop("only")
    sizes = replace(base, **{name: value for name, value in given.items() if value is not None})
    lacking = [program for program in ("rsync", "ssh", "git") if not shutil.which(program)]
    if lacking:
        parser.error(f"no {', '.join(lacking)} on this machine; they are what is compared with")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the folder and the server go away then too
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done within {MOST_S} s"))
    signal.alarm(MOST_S)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        for row in measure(Path(folder), sizes, parts):
            print(row.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
