"""What of ours lies on this host, and taking away what is not needed any more.

    python3 - list WORK_DIR MIN_AGE_S              trees and runs: size, age, who needs them; old temporary files
    python3 - remove WORK_DIR MIN_AGE_S NAME ...   takes away trees/<hash>, runs/<id>, runs/<id>:<attempt> and from tmp
                                                   what may go

An attempt behind a run's name is the newest that its client knows, and knows to have ended: no exit.json is needed then.

Standard library only; sent together with processes.py. A tree may go when no run that could still need it
names it, no process of ours works in it and nobody shipped it lately; a run may go when its last attempt has ended or its
processes are gone, by its claim and by the marker that they carry, for a claim may be missing; temporary files of jobs may go when no run could need them, for a compiled kernel of long ago may
be a live job's. That is looked at again, here, at the moment of removal: what somebody else started
meanwhile stays. A folder is renamed before it is emptied, so that a half-removed one is never taken
for whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.processes import marked

MARKER = ".draftyard-tree.json"
TEMPORARY = "tmp"
LEFTOVERS = "leftovers"  # folders and parts of ships that were cut, trees that were set aside
LEFTOVER_AGE_S = 86_400.0  # they are not kept for longer than this, whatever is asked


@dataclass(frozen=True)
class Living:
    """Processes of ours by the marker in their environment: of which runs, and in which folders of `trees` they work."""

    runs: frozenset[str]
    trees: dict[str, set[str]]  # name -> runs

    @classmethod
    def of(cls, work_dir: Path) -> Living:
        processes = marked(runs_dir=f"{work_dir}/runs")
        trees: dict[str, set[str]] = {}
        for process in processes:
            for name in _below(work_dir / "trees", f"/proc/{process.pid}/cwd"):
                trees.setdefault(name, set()).add(process.run_id)
        return cls(frozenset(process.run_id for process in processes), trees)


def _below(parent: Path, link: str) -> list[str]:
    """The folder of `parent` that a link leads into, if it does."""
    try:
        inside = Path(link).resolve().relative_to(parent.resolve())
    except (OSError, ValueError):
        return []
    return list(inside.parts[:1])


def survey(work_dir: Path, min_age_s: float) -> dict[str, Any]:
    living = Living.of(work_dir)
    runs = [run_facts(folder, living.runs) for folder in _folders(work_dir / "runs")]
    trees = [tree_facts(folder, runs, living) for folder in _folders(work_dir / "trees")]
    old = _temporary(work_dir, min_age_s)
    return {
        "trees": trees,
        "runs": runs,
        "temporary": {
            "num_entries": len(old),
            "size_bytes": sum(map(_size, old)),
            "age_s": min(map(_newest_age_s, old), default=0.0),
            "in_use": [run["run_id"] for run in runs if is_needed(run)],
        },
        "leftover_bytes": sum(_size(path) for path in _leftovers(work_dir, living, min_age_s)),
    }


def run_facts(folder: Path, alive: Collection[str]) -> dict[str, Any]:
    return {
        "run_id": folder.name,
        "size_bytes": _size(folder),
        "checkpoint_bytes": _size(folder / "checkpoints"),
        "tree": _tree_of(folder),
        **run_state(folder, alive),
    }


def run_state(folder: Path, alive: Collection[str]) -> dict[str, Any]:
    """Whether it could still need anything: a few small files are looked at, none is walked through.

    `alive`: runs of which a process was seen.
    """
    attempts = sorted(
        (path for path in _folders(folder / "attempts") if path.name.isdecimal()), key=lambda p: int(p.name)
    )
    newest = attempts[-1] if attempts else None
    return {
        "age_s": _age_s(newest or folder),
        "has_ended": newest is not None and (newest / "exit.json").is_file(),
        "is_alive": folder.name in alive or (newest is not None and _is_alive(newest / "claim")),
    }


def _needed(work_dir: Path, living: Living) -> list[Path]:
    """Folders of runs that could still need something, now."""
    return [folder for folder in _folders(work_dir / "runs") if is_needed(run_state(folder, living.runs))]


def _tree_of(folder: Path) -> str:
    """The name of the tree that a run works in."""
    return Path(str((_json(folder / "job.json") or {}).get("cwd", ""))).name


def _reads(folder: Path) -> set[str]:
    """Runs whose files this one is given: by a link to their checkpoints, or as a path among its words."""
    words = [_text(folder / "job.json"), _text(folder / "spec.json"), os.path.realpath(folder / "checkpoints")]
    return {run_id for text in words for run_id in re.findall(r"/runs/([A-Za-z0-9][\w.-]*)", text)}


def tree_facts(folder: Path, runs: list[dict[str, Any]], living: Living) -> dict[str, Any]:
    users = [run["run_id"] for run in runs if run["tree"] == folder.name and is_needed(run)]
    return {
        "hash": folder.name,
        "size_bytes": _size(folder),
        "age_s": _age_s(folder / MARKER),
        "runs": [run["run_id"] for run in runs if run["tree"] == folder.name],
        "in_use": [*users, *sorted(living.trees.get(folder.name, set()) - set(users))],
    }


def is_needed(run: dict[str, Any]) -> bool:
    """Alive, or not ended and young enough to be just starting."""
    return bool(run["is_alive"]) or (not run["has_ended"] and run["age_s"] < 3600)


def remove(work_dir: Path, names: list[str], min_age_s: float) -> dict[str, Any]:
    """What went, and why the rest stayed."""
    removed, kept, freed = [], {}, 0
    living = Living.of(work_dir)  # what starts from now on is young
    for name in names:
        reason = _reason_to_keep(work_dir, name, min_age_s, living)
        if reason is None:
            going = _temporary(work_dir, min_age_s) if name == TEMPORARY else [work_dir / _folder_of(name)]
            freed += sum(map(_take_away, going))
            removed.append(name)
        else:
            kept[name] = reason
    gone = [_take_away(path) for path in _leftovers(work_dir, living, min_age_s)]
    removed += [LEFTOVERS] if gone else []
    freed += sum(gone)
    return {"removed": removed, "kept": kept, "freed_bytes": freed}


def _reason_to_keep(work_dir: Path, name: str, min_age_s: float, living: Living) -> str | None:
    if name == TEMPORARY:
        users = [run.name for run in _needed(work_dir, living)]
        return f"in use by {', '.join(users)}" if users else None
    found = re.fullmatch(r"(trees|runs)/([A-Za-z0-9][\w.-]*)(?::([0-9]{1,9}))?", name)
    if found is None:
        return "no name of a tree or a run"
    folder = work_dir / _folder_of(name)
    if not folder.is_dir() or folder.is_symlink():
        return "not there"
    needed = _needed(work_dir, living)
    if found[1] == "runs":
        readers = [run.name for run in needed if run != folder and folder.name in _reads(run)]
        own = _own_reason(folder, found[3], living) if folder in needed else None
        return f"its files are read by {', '.join(readers)}" if readers else own
    users = [run.name for run in needed if _tree_of(run) == folder.name]
    users += sorted(living.trees.get(folder.name, set()) - set(users))
    if users:
        return f"in use by {', '.join(users)}"
    age_s = _age_s(folder / MARKER)
    return f"shipped {age_s:.0f} s ago" if age_s < min_age_s else None


def _folder_of(name: str) -> str:
    return name.partition(":")[0]


def _own_reason(folder: Path, ended: str | None, living: Living) -> str | None:
    """Of a run that seems to be needed, when its client knows attempt `ended` to have ended, and of none after it."""
    if run_state(folder, living.runs)["is_alive"]:
        return "its processes are alive"
    begun = [int(path.name) for path in _folders(folder / "attempts") if path.name.isdecimal()]
    if ended is None or max(begun, default=0) > int(ended):
        return "it may be about to start"
    return None


def _take_away(folder: Path) -> int:
    size = _size(folder)
    aside = folder.with_name(f".going-{folder.name}-{os.getpid()}")
    try:
        folder.rename(aside)
    except OSError:
        return 0
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)  # another sweep may have been faster
    return size


def _temporary(work_dir: Path, min_age_s: float) -> list[Path]:
    """Our own entries of the jobs' folder for temporary files in which nothing has changed for so long."""
    try:
        entries = sorted((work_dir / TEMPORARY).iterdir())
    except OSError:
        return []
    owned = (path for path in entries if _owner(path) == os.getuid() and not path.name.startswith(".going-"))
    return [path for path in owned if _newest_age_s(path) >= min_age_s]


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def _newest_age_s(path: Path) -> float:
    """Since it or anything in it was changed last, links not followed."""
    walked = os.walk(path) if path.is_dir() and not path.is_symlink() else ()
    inside = (Path(parent, name) for parent, folders, files in walked for name in [*folders, *files])
    return min([_age_s(path), *map(_age_s, inside)])


def _leftovers(work_dir: Path, living: Living, min_age_s: float) -> list[Path]:
    """What cut ships and cut removals leave behind, and spoiled trees, once older than was asked or than a day: but none that
    a live job may work in, and none that a receiver is making."""
    trees, runs = work_dir / "trees", work_dir / "runs"
    found = [*trees.glob(".staging-*"), *trees.glob(".spoiled-*"), *trees.glob(".going-*"), *runs.glob(".going-*")]
    found += (work_dir / TEMPORARY).glob(".going-*")
    found += list((trees / ".parts").glob("*"))
    old = [path for path in found if _age_s(path) >= min(min_age_s, LEFTOVER_AGE_S) and not _is_being_made(path)]
    used = set(map(_tree_of, _needed(work_dir, living))) if old else set()
    aside = [path for path in old if path.name.removeprefix(".spoiled-").rpartition("-")[0] not in used]
    return [path for path in aside if path.parent.name != "trees" or path.name not in living.trees]


def _is_being_made(path: Path) -> bool:
    """Whether a receiver holds its lock; what cannot be locked, on some network disks a folder, is judged by its age."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return _age_s(path) <= LEFTOVER_AGE_S
    finally:
        os.close(descriptor)
    return False


def _is_alive(claim: Path) -> bool:
    """Whether one of the processes noted there lives: same start, same boot, no zombie."""
    try:
        lines = claim.read_text(encoding="ascii").splitlines()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return False
    for line in lines:
        words = line.split()
        if len(words) == 4 and words[3] == boot:
            stat = _text(Path(f"/proc/{words[1]}/stat")).rpartition(")")[2].split()
            if len(stat) > 19 and stat[19] == words[2] and stat[0] not in "ZX":
                return True
    return False


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _size(path: Path) -> int:
    """Bytes on the disk, links not followed."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size if path.exists() else 0
    total = 0
    for parent, _folders_there, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118  # a hundred thousand of them
            except OSError:
                continue
    return total


def _age_s(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.lstat().st_mtime)
    except OSError:
        return float("inf") if not path.parent.exists() else 0.0


def _json(path: Path) -> dict[str, Any] | None:
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def main(arguments: list[str]) -> int:
    verb, work_dir, *rest = arguments
    place = Path(work_dir)
    min_age_s = float(rest[0])
    answer = survey(place, min_age_s) if verb == "list" else remove(place, rest[1:], min_age_s)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
