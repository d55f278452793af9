"""Files brought from a run's host: checkpoints and what a job left, verified, continued where a pull was cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.actions.history import exported_path, open_reader
from orchestrator.actions.order import find_host, where_launched
from orchestrator.actions.places import Places
from orchestrator.errors import DraftyardError
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import StreamShell, told
from orchestrator.store.rows import CheckpointRow, Kind, RunRow, State
from orchestrator.units import format_size


@dataclass(frozen=True)
class Pulled:
    step: int | None  # of a checkpoint
    attempt: int | None  # whose artifacts they are; None beside no step: the drafter that an export wrote
    folder: Path
    num_files: int
    size_bytes: int
    num_there: int = 0  # files that an earlier pull had brought, compared again and not fetched


def pull(places: Places, selector: str, *, which: str, to: Path, tell: Callable[[str], None]) -> list[Pulled]:
    """Copies checkpoints of a run, or an export's drafter, below `to`; the transport checks every file."""
    with open_reader(places) as reader:
        run = reader.run(selector)
        chosen = _exported(run) if run.kind == Kind.EXPORT else _chosen(run, reader.checkpoints(run.id), which)
    with _connected(places, run) as shell:
        return [_checkpoint(shell, run, step, path, to=to, tell=tell) for step, path in chosen]


def pull_artifacts(places: Places, selector: str, *, to: Path, tell: Callable[[str], None]) -> list[Pulled]:
    """The same for what each attempt left beside its checkpoints: snapshots of a full memory, answers, an export."""
    with open_reader(places) as reader:
        run = reader.run(selector)
        numbers = [row.number for row in reader.attempts(run.id)]
    with _connected(places, run) as shell:
        found = [_artifacts(shell, run, number, to=to, tell=tell) for number in numbers]
    if not any(found):
        raise DraftyardError(
            f"run {run.id} left no artifacts on host {run.host}; its checkpoints: draftyard pull {run.id}"
        )
    return [item for item in found if item is not None]


@contextmanager
def _connected(places: Places, run: RunRow) -> Iterator[StreamShell]:
    shell = connect(find_host(where_launched(places, run), run.host))
    try:
        yield shell
    finally:
        shell.close()


def _exported(run: RunRow) -> list[tuple[int | None, str]]:
    if run.state is not State.SUCCEEDED:
        raise DraftyardError(
            f"run {run.id} is an export that is {run.state}; only one that has succeeded wrote a drafter"
        )
    return [(None, exported_path(run))]


def _chosen(run: RunRow, known: list[CheckpointRow], which: str) -> list[tuple[int | None, str]]:
    newest = list({row.step: row for row in known}.values())  # a resumed attempt wrote a step again
    best = [row for row in newest if row.is_best]
    found = {"last": newest[-1:], "best": best[-1:], "all": newest}[which]
    if not found:
        told = "no checkpoint is marked best; --checkpoints last takes the newest" if newest else "it has no checkpoint"
        raise DraftyardError(f"run {run.id}: {told}")
    return [(row.step, row.path) for row in found]


def _checkpoint(
    shell: StreamShell, run: RunRow, step: int | None, path: str, *, to: Path, tell: Callable[[str], None]
) -> Pulled:
    files = _listed(shell, run, path)
    if files is None:
        told = f"host {run.host} has no {_theirs(run, path)} any more"
        has_folder = shell.stat(_theirs(run, "").rstrip("/")) is not None
        why = "retention keeps only the newest" if has_folder else "the run's folder is gone (gc --runs, or by hand)"
        raise DraftyardError(f"{told}; {why}")
    folder = _inside(to / run.id, to / run.id / _place_of(step, path), run.host)
    return Pulled(step, None, folder, *_fetched(shell, _theirs(run, path), files, folder, tell))


def _place_of(step: int | None, path: str) -> PurePosixPath:
    """Where it goes, below its run: an export by its name, a checkpoint by its path without the folder of most of them."""
    place = PurePosixPath(path)
    if step is None:
        return PurePosixPath(place.name)
    place = place.relative_to("/") if place.is_absolute() else place
    return place.relative_to("checkpoints") if place.parts[:1] == ("checkpoints",) and place.parts[1:] else place


def _artifacts(shell: StreamShell, run: RunRow, number: int, *, to: Path, tell: Callable[[str], None]) -> Pulled | None:
    path, folder = f"attempts/{number}/artifacts", to / run.id / f"attempt-{number}"
    files = _listed(shell, run, path)
    return Pulled(None, number, folder, *_fetched(shell, _theirs(run, path), files, folder, tell)) if files else None


def _theirs(run: RunRow, path: str) -> str:
    return str(PurePosixPath(run.workdir or "/") / "runs" / run.id / path)


def _fetched(
    shell: StreamShell, theirs: str, files: list[tuple[int, str]], folder: Path, tell: Callable[[str], None]
) -> tuple[int, int, int]:
    """Brings the files into `folder`: how many they are, their bytes, and how many were there already."""
    num_there = 0
    # Every name is looked at before anything is fetched.
    for size, name, target in [(size, name, _target(folder, name, shell.label)) for size, name in files]:
        before = _identity(target)
        tell(f"{name or folder.name}: {format_size(size)}" + ("" if before is None else ", compared with the one here"))
        _get(shell, f"{theirs}/{name}" if name else theirs, target)
        num_there += _identity(target) == before
    return len(files), sum(size for size, _ in files), num_there


def _identity(target: Path) -> tuple[int, int] | None:
    """A file that is fetched takes the place of the old one; None where there is none."""
    if not target.is_file():
        return None
    found = target.stat()
    return found.st_ino, found.st_mtime_ns


def _get(shell: StreamShell, theirs: str, target: Path) -> None:
    try:
        shell.get(theirs, target)
    except FileNotFoundError as error:
        raise DraftyardError(
            f"{shell.label}: {theirs} is gone; retention may have removed the checkpoint, pull again"
        ) from error
    except OSError as error:
        raise DraftyardError(
            f"cannot write {target}: {error.strerror}\n  what is whole stays; the same pull goes on from there"
        ) from error


def _listed(shell: StreamShell, run: RunRow, path: str) -> list[tuple[int, str]] | None:
    """Size and name of every file below, by name, links followed; an empty name is the path itself, one file.

    None where there is no such path.
    """
    wanted = ["(", "-type", "f", "-o", "-type", "l", ")"]
    done = shell.run(["find", "-L", _theirs(run, path), *wanted, "-printf", "%y %s %P\\0"])
    found = []
    for line in filter(None, done.stdout.decode("utf-8", "surrogateescape").split("\0")):
        kind, size, name = [*line.split(" ", 2), "", ""][:3]
        if kind == "l":  # with -L, only what leads nowhere is left of links
            raise DraftyardError(f"host {run.host}: {path}/{name} is a link that leads nowhere; remove it there")
        if not (kind == "f" and size.isascii() and size.isdecimal() and len(size) < 20):
            raise DraftyardError(f"host {run.host} lists a file as {line[:200]!a}; a size and a name are due")
        found.append((int(size), name))
    if done.exit_code and found:
        raise DraftyardError(f"host {run.host}: {path} cannot be listed whole: {told(done.stderr)}")
    return None if done.exit_code else sorted(found, key=lambda item: item[1])


def _target(folder: Path, name: str, host: str) -> Path:
    return _inside(folder, folder / name, host) if name else folder


def _inside(folder: Path, target: Path, host: str) -> Path:
    """The target, strictly below the folder once links are followed: its name is the host's word, not ours."""
    if folder.resolve() not in target.resolve().parents:
        raise DraftyardError(f"host {host} names {str(target)!a}, which is not below {folder}; nothing was fetched")
    return target
