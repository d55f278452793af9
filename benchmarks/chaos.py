"""Exactly once, under everything that can happen to a link, a file and a follower.

    python -m benchmarks.chaos                 1,000,000 records, 200 cuts, 50 kills
    python -m benchmarks.chaos --records 50000 --cuts 40 --kills 8

One process writes events as a job does, and meanwhile truncates its file in the middle of a record
and writes the rest again, rotates it, and leaves records half-written for a while. Another follows
it over a link that is cut at random bytes, and is killed with SIGKILL again and again. At the end
every record must be in the database: exact count, exact order, none twice. Fewer cuts than asked for
are a failure too: then less was shown than the line at the end says.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

from orchestrator.errors import HostError
from orchestrator.follow.streams import AttemptPlace, Doubts, catch_up
from orchestrator.observe import EventFile
from orchestrator.shell.local import LocalShell
from orchestrator.store.rows import Document, NewRun
from orchestrator.store.writes import Store
from remote.wire import Event, encode

RUN = "chaos"
NOTE_EVERY = 100  # these records are notes, whose order the database keeps by itself
CURRENT = "events.rank0.jsonl"


@dataclass(frozen=True)
class Plan:
    records: int = 1_000_000
    cuts: int = 200
    kills: int = 50
    truncations: int = 100
    rotations: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Report:
    records: int
    cuts: int
    kills: int
    truncations: int
    rotations: int
    seconds: float


class CutLink(LocalShell):
    """Reads as far as chance lets it: short answers, and a lost link at a random byte."""

    def __init__(self, cuts: ctypes.c_int, chance: random.Random, *, piece_bytes: int) -> None:
        super().__init__()
        self._cuts, self._chance, self._piece_bytes = cuts, chance, piece_bytes

    def read_range(self, remote: str, offset: int, size: int) -> bytes:
        if self._cuts.value > 0 and self._chance.random() < 0.3:
            self._cuts.value -= 1
            raise HostError("the link was cut")
        return super().read_range(remote, offset, min(size, self._chance.randint(2, self._piece_bytes)))


def record(seq: int) -> bytes:
    if seq % NOTE_EVERY == 0:
        return encode(Event(seq, "note", 1000.0 + seq, float(seq), {"text": f"record {seq}"}))
    return encode(Event(seq, "metrics", 1000.0 + seq, float(seq), {"step": seq, "values": {"loss": seq / 7}}))


def write_all(folder: Path, plan: Plan) -> None:
    """The job: appends, and at random records does to its file what disks and people do."""
    chance = random.Random(plan.seed)
    marks = chance.sample(range(2, plan.records), plan.truncations + plan.rotations)
    truncate_at, rotate_at = set(marks[: plan.truncations]), set(marks[plan.truncations :])
    path = folder / CURRENT
    num_rotated, burst = 0, b""
    for seq in range(1, plan.records + 1):
        burst += record(seq)
        if seq in truncate_at:
            _append(path, burst)
            _truncate_and_repair(path, chance)
            burst = b""
        elif seq in rotate_at:
            _append(path, burst)
            num_rotated += 1
            path.rename(folder / f"{CURRENT}.{num_rotated}")
            burst = b""
        elif len(burst) > 64 * 1024:
            cut = chance.randint(0, len(burst))  # a torn last line for a moment
            _append(path, burst[:cut])
            time.sleep(0.001)
            _append(path, burst[cut:])
            burst = b""
    _append(path, burst)


def _append(path: Path, content: bytes) -> None:
    with path.open("ab", buffering=0) as stream:
        stream.write(content)


def _truncate_and_repair(path: Path, chance: random.Random) -> None:
    """The end of the file is lost, mid-record; sooner or later the same bytes are there again."""
    size = path.stat().st_size
    keep = max(0, size - chance.randint(1, 2000))
    with path.open("rb") as stream:
        stream.seek(keep)
        lost = stream.read()
    with path.open("r+b") as stream:
        stream.truncate(keep)
    time.sleep(chance.choice([0.0, 0.02]))
    _append(path, lost)


def follow_all(db: Path, folder: Path, cuts: ctypes.c_int, seed: int, piece_bytes: int) -> None:
    """The follower of one life: goes on where the database says, until the last record is there or it is killed."""
    link = CutLink(cuts, random.Random(seed), piece_bytes=piece_bytes)
    doubts = Doubts()
    with Store(db) as store:
        while True:
            try:
                catch_up(store, link, AttemptPlace(RUN, 1, str(folder)), list(_listing(folder)), doubts)
            except HostError:
                continue
            time.sleep(0.005)


def _listing(folder: Path) -> Iterator[EventFile]:
    for path in folder.iterdir():
        try:
            found = path.stat()
        except FileNotFoundError:  # rotated away meanwhile
            continue
        yield EventFile(path.name, found.st_size, found.st_ino)


@contextmanager
def _alive(process: multiprocessing.Process) -> Iterator[None]:
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def run(folder: Path, plan: Plan, tell: Callable[[str], object] = lambda text: None) -> Report:
    """Writes, follows, kills, and checks; AssertionError when a record is lost, doubled or out of order, or a cut was not made.

    `tell` hears of each kill.
    """
    context = multiprocessing.get_context("fork")
    attempt, db = folder / "attempt", folder / "runs.db"
    attempt.mkdir()
    with Store(db) as store:
        documents = {Document.SPEC: "{}"}
        store.create_run(NewRun(RUN, "train", "chaos", "full", "local", documents))
        store.new_attempt(RUN)
    # No lock: one follower lives at a time, and one that is killed with the lock in its hand would stop all after it.
    cuts = RawValue(ctypes.c_int, plan.cuts)
    # A record has over 100 bytes: eight reads or more to a cut, of which 0.3 are cut, so that all cuts are used up.
    piece_bytes = max(4096, plan.records * 100 // max(1, plan.cuts) // 4)
    chance = random.Random(plan.seed + 1)
    began = time.monotonic()
    with _alive(context.Process(target=write_all, args=(attempt, plan))):
        for life in range(plan.kills + 1):
            follower = context.Process(target=follow_all, args=(db, attempt, cuts, plan.seed + life, piece_bytes))
            with _alive(follower):
                due = plan.records if life == plan.kills else plan.records * (life + 1) // (plan.kills + 2)
                _wait_for(db, due, chance)
            made = f"{plan.cuts - cuts.value} of {plan.cuts} cuts, {min(life + 1, plan.kills)} of {plan.kills} kills"
            tell(f"{time.monotonic() - began:.0f} s: {due:,} of {plan.records:,} records stored, {made}")
    tell("every record is looked at")
    seconds = time.monotonic() - began
    check(db, plan)
    assert cuts.value == 0, f"{cuts.value} of {plan.cuts} cuts were not made: fewer cuts, or more records"
    return Report(plan.records, plan.cuts - cuts.value, plan.kills, plan.truncations, plan.rotations, seconds)


def _wait_for(db: Path, due: int, chance: random.Random, *, patience_s: float = 600.0) -> None:
    """Until so many records are stored, and then for an instant more, so that the kill falls anywhere."""
    deadline = time.monotonic() + patience_s
    with Store(db) as store:
        while store.position(RUN, 1, "rank0").last_seq < due:
            assert time.monotonic() < deadline, f"stuck at {store.position(RUN, 1, 'rank0')}"
            time.sleep(0.01)
    time.sleep(chance.random() * 0.02)


def check(db: Path, plan: Plan) -> None:
    """Every record once, in order, with its own value."""
    numbers = range(1, plan.records + 1)
    with Store(db) as store:
        reader = store.reader
        values = reader.metric_values(RUN, "loss")
        notes = [row.text for row in reader.events(RUN, kinds=["note"])]
        oddities = [row.text for row in reader.events(RUN, kinds=["gap"])]
    assert oddities == [], oddities[:3]
    assert [value.step for value in values] == [seq for seq in numbers if seq % NOTE_EVERY]
    assert all(value.value == value.step / 7 for value in values)
    assert notes == [f"record {seq}" for seq in numbers if seq % NOTE_EVERY == 0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0])
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    plan = Plan(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), plan, lambda text: print(text, file=sys.stderr, flush=True))
    print(
        f"{report.records:,} records, {report.cuts} cuts, {report.kills} kills, {report.truncations} truncations, "
        f"{report.rotations} rotations: each stored once, in order, in {report.seconds:.1f} s "
        f"({report.records / report.seconds:,.0f} records/s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
