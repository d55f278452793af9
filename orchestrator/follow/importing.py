"""Reads in a run folder that was brought from elsewhere, exactly as a followed run would have been.

For machines that cannot be reached: the shipped tree ran there by hand, and its run folder came on a
disk. Importing the same folder again, or a newer copy of it, adds what is new and doubles nothing.
Nothing in the folder is executed; liveness cannot be asked of a copy, so without an exit file or a last word the run
counts as lost, not ended when it was copied, until a newer copy says more. So does one whose import was cut short: nobody follows a copy, so no row of one stays live.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from orchestrator.errors import DraftyardError
from orchestrator.follow.desk import Desk
from orchestrator.follow.notices import notice
from orchestrator.follow.one_run import bring_in_whole, conclude
from orchestrator.follow.status import NO_EXIT_FILE, NOT_ENDED
from orchestrator.observe import Evidence, observe
from orchestrator.shell.local import LocalShell
from orchestrator.store.faults import told_plainly
from orchestrator.store.rows import IMPORTED, Document, Kind, NewRun, RunRow, State
from orchestrator.store.run_id import check_run_id
from orchestrator.store.writes import Store
from remote.hiding import left_places
from remote.rundir import RunDir, read_json, writer_of
from remote.spec import ENTRIES
from remote.wire import LATEST_S

HOST = IMPORTED
Tell = Callable[[str, int], None]
_KINDS_OF_FILES = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}
PASSED_OVER = "passed_over"  # of an event: the name of what was not read
CUT_SHORT = "its folder was not read to the end; import it again"


def import_folder(store: Store, folder: Path, *, tell: Tell = lambda text, size_bytes: None) -> RunRow:
    """The run of `folder`, stored; `tell` hears what comes next, and how many bytes of events and logs that are.

    Raises DraftyardError when it is no run folder or its run is followed here.
    """
    source = RunDir(folder.resolve())
    job = read_json(source.job_json)
    if job is None or not isinstance(job.get("run_id"), str):
        raise DraftyardError(f"{folder} is no run folder: it has no whole job.json with a run_id")
    row = _row(source, job)
    numbers = [attempt.number for attempt in source.attempts() if stat.S_ISDIR(attempt.root.lstat().st_mode)]
    seen = {}
    for number in numbers:
        tell(f"looking at attempt {number} of {numbers[-1]}", 0)
        seen[number] = _seen(source, number, is_newest=number == max(numbers))
    if not seen:
        raise DraftyardError(f"{folder} has no attempt: attempts/1 is the folder of the first; copy it whole")
    new = replace(row, created_s=_began_s(seen[min(seen)]))
    with _alone(store.logs.root / new.id):
        run = store.create_run(new)
        if run.host != HOST:
            raise DraftyardError(
                f"run {run.id} was launched from here, on host {run.host}; it is followed, not imported"
            )
        store.describe_run(run.id, workdir=str(source.root))  # a newer copy may lie elsewhere
        try:
            _import_attempts(store, source, run, seen, tell)
            _say_no_folders(store, source, run.id)
        finally:
            store.set_state(run.id, State.LOST, evidence=CUT_SHORT)  # where it has not ended by now
        return store.reader.run(run.id)


def settle(store: Store, run: RunRow) -> None:
    """Ends an imported run that no import works on: the process that read it in was killed."""
    with contextlib.suppress(BlockingIOError), _alone(store.logs.root / run.id, waits=False):
        store.set_state(run.id, State.LOST, evidence=CUT_SHORT)


@contextlib.contextmanager
def _alone(logs: Path, *, waits: bool = True) -> Iterator[None]:
    """No other import of the same run; the kernel gives the lock back, however its holder ends.

    BlockingIOError where one is at work and it does not wait.
    """
    with told_plainly(logs):
        logs.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(logs, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _row(source: RunDir, job: dict[str, Any]) -> NewRun:
    """What the folder says of its run. Raises DraftyardError where a file says what no run of ours is."""
    kind = str(job.get("kind") or Kind.SCRIPT)
    if kind not in list(Kind):
        raise DraftyardError(f"{source.job_json}: kind is {kind[:64]!a}; expected one of {', '.join(Kind)}")
    spec = read_json(source.spec_json) or {}
    for name in spec:
        if not _is_known_shape(name, spec[name]):
            raise DraftyardError(f"{source.spec_json}: {name} is nothing that a spec holds there; copy the folder anew")
    facts, train = _object(job.get("facts")), _object(spec.get("train"))
    steps = train.get("num_steps")
    return NewRun(
        id=check_run_id(str(job["run_id"])),
        kind=kind,
        recipe=str(spec.get("recipe") or facts.get("recipe") or "unknown"),
        branch=str(spec.get("branch") or facts.get("branch") or "unknown"),
        host=HOST,
        documents={Document.SPEC: json.dumps(spec), Document.LAUNCH: json.dumps({"gpus": _gpus(source, job)})},
        workdir=str(source.root),
        num_steps=steps if isinstance(steps, int) and kind == Kind.TRAIN else None,
        tree_hash=None if facts.get("tree") is None else str(facts["tree"]),
        tags=tuple(str(tag) for tag in spec.get("tags") or ()),
        why=str(spec.get("why") or ""),
    )


def _began_s(seen: Evidence) -> float | None:
    """When its first attempt was started, by that host's clock: the moment of the import says nothing of the run."""
    said = (_object(found).get("started_s") for found in (seen.supervisor, seen.exit))
    return next((float(at_s) for at_s in said if isinstance(at_s, int | float) and 0 < at_s <= LATEST_S), None)


def _gpus(source: RunDir, job: dict[str, Any]) -> list[str]:
    """The cards that the job was given. Raises DraftyardError where the file names none that could be."""
    gpus = job.get("gpus") or []
    if not isinstance(gpus, list) or not all(isinstance(gpu, str) for gpu in gpus):
        raise DraftyardError(f"{source.job_json}: gpus is no list of indices and UUIDs; copy the folder anew")
    return gpus


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_known_shape(name: str, value: Any) -> bool:
    """Whether a spec of some entry may hold it; a key that none knows may hold anything, as no one reads it."""
    due = [hints[name] for hints in map(get_type_hints, ENTRIES.values()) if name in hints]
    return not due or any(_fits(kind, value) for kind in due)


def _fits(due: Any, value: Any) -> bool:
    """Whether `value` is of the type `due`; keys may be missing or new, and of a closed set any word will do."""
    origin, parts = get_origin(due), get_args(due)
    if is_dataclass(due):
        inner = get_type_hints(due)
        return isinstance(value, dict) and all(_fits(inner.get(key, Any), item) for key, item in value.items())
    if origin in (Union, UnionType):
        return any(_fits(part, value) for part in parts)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(parts[1], item) for item in value.values())
    if origin is list:
        return isinstance(value, list) and all(_fits(parts[0], item) for item in value)
    if due is float:
        return type(value) in (int, float)
    return due not in (str, int, bool, type(None)) or type(value) is due


def _import_attempts(store: Store, source: RunDir, run: RunRow, seen: dict[int, Evidence], tell: Tell) -> None:
    desk = Desk(store, store.reader, time.time)
    if run.attempt == 0 and run.state.is_final:
        store.mark(run.id, State.PENDING, why="its folder was imported again")
    for number, evidence in seen.items():
        tell(f"reading attempt {number} of {max(seen)}", sum(file.size_bytes for file in evidence.files))
        if store.reader.run(run.id).attempt < number:
            store.new_attempt(run.id, number=number)  # the one before was judged, so it has ended
        _import_attempt(desk, source, run.id, number, evidence)


def _import_attempt(desk: Desk, source: RunDir, run_id: str, number: int, seen: Evidence) -> None:
    run = desk.reader.run(run_id)
    bring_in_whole(desk, LocalShell(), replace(run, attempt=number), seen, str(source.root))
    notice(desk, replace(run, attempt=number), seen)
    _say_passed_over(desk, source, run_id, number)
    if run.attempt != number:
        return  # an older attempt of a folder imported before
    if _is_to_be_judged_anew(desk, run, seen):
        desk.store.mark(run.id, State.RUNNING, why="a newer copy of its folder was imported")
    conclude(desk, desk.reader.run(run.id), seen)


def _is_to_be_judged_anew(desk: Desk, run: RunRow, seen: Evidence) -> bool:
    """Whether this copy proves more of the newest attempt than the one before: its exit file, or that another attempt came
    after it; without either the job's last word counts, where none was there.
    """
    if run.evidence == CUT_SHORT or (run.state is State.LOST and seen.exit is not None):
        return True
    was_not_ended = run.evidence == NOT_ENDED
    if not was_not_ended and NO_EXIT_FILE not in run.evidence:
        return False
    has_ended = seen.exit is not None or not seen.is_copy
    return has_ended or (was_not_ended and desk.reader.attempts(run.id)[-1].final_outcome is not None)


def _say_no_folders(store: Store, source: RunDir, run_id: str) -> None:
    """What bears the name of an attempt and is no folder."""
    modes = {f"attempts/{attempt.number}": attempt.root.lstat().st_mode for attempt in source.attempts()}
    _say_each(store, run_id, {name: (name, mode) for name, mode in modes.items() if not stat.S_ISDIR(mode)})


def _say_passed_over(desk: Desk, source: RunDir, run_id: str, number: int) -> None:
    """What bears the name of events or a log and is no file: read by nobody, as it may lead out or never end."""
    found = {}
    for path in sorted(source.attempt(number).root.iterdir()):
        is_due = writer_of(path.name) is not None or path.name in ("stdout.log", "stderr.log")
        mode = path.lstat().st_mode
        if is_due and not stat.S_ISREG(mode):
            found[f"attempt {number}: {path.name}"] = path.name, mode
    _say_each(desk.store, run_id, found)


def _say_each(store: Store, run_id: str, found: Mapping[str, tuple[str, int]]) -> None:
    """Once each; what is said -> its name and mode."""
    said = {row.text for row in store.reader.events(run_id, kinds=["bad_line"])}
    for told, (name, mode) in found.items():
        what = _KINDS_OF_FILES.get(stat.S_IFMT(mode), "a device")
        text = f"{told} is {what} and was passed over; what it may hold is missing"
        if text not in said:
            store.add_event(run_id, "bad_line", text, {PASSED_OVER: name})


def _seen(source: RunDir, number: int, *, is_newest: bool) -> Evidence:
    """A copy lives nowhere, and neither this machine's boot nor its disk says anything about it. That an attempt came
    after another one says that this one had ended.
    """
    seen = observe(LocalShell(), str(source.root), attempt=number)
    seen = replace(seen, supervisor_alive=False, job_alive=False, rebooted=False, is_claimed=True, disk_free_bytes=None)
    hidden = left_places(source, number) if seen.exit is None else None
    return replace(seen, is_copy=is_newest, hidden=hidden)
