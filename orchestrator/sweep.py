"""What of ours lies on a host, and taking away what is not needed: the local side of `gc`.

`remote/sweep.py` looks and removes over there; it looks again at the moment of removal, so that a
tree somebody has just shipped or a run that has just started stays, whatever was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.shell.stream import StreamShell
from orchestrator.workplace import Workplace, finite, run_script, sense_in

MIN_AGE_S = 3600.0  # a tree shipped so lately may be waiting for its job to start


@dataclass(frozen=True)
class TreeThere:
    hash: str
    size_bytes: int
    age_s: float  # since it was shipped or asked for last
    runs: tuple[str, ...]  # run folders that name it
    in_use: tuple[str, ...]  # those of them that still need it

    @property
    def name(self) -> str:
        return f"trees/{self.hash}"


@dataclass(frozen=True)
class RunThere:
    run_id: str
    size_bytes: int
    checkpoint_bytes: int
    age_s: float
    tree: str
    has_ended: bool
    is_alive: bool

    @property
    def name(self) -> str:
        return f"runs/{self.run_id}"


@dataclass(frozen=True)
class TemporaryThere:
    """Old entries of the jobs' folder for temporary files, together."""

    num_entries: int
    size_bytes: int
    age_s: float  # since anything in them was changed
    in_use: tuple[str, ...]  # runs that may still need them

    name = "tmp"


@dataclass(frozen=True)
class Survey:
    trees: tuple[TreeThere, ...]
    runs: tuple[RunThere, ...]
    temporary: TemporaryThere
    leftover_bytes: int  # of ships that were cut so long ago, or a day; every sweep takes them away as `leftovers`


@dataclass(frozen=True)
class Swept:
    removed: tuple[str, ...]
    kept: dict[str, str]  # name -> why it stayed
    freed_bytes: int


def survey(shell: StreamShell, place: Workplace, *, min_age_s: float = MIN_AGE_S) -> Survey:
    """Everything of ours in the work folder there, except caches; of temporary files those that are older."""
    answer = run_script(shell, place, "sweep", ["list", place.work_dir, str(min_age_s)])
    with sense_in(shell, "sweep", answer):
        return Survey(
            trees=tuple(_tree(found) for found in answer["trees"]),
            runs=tuple(_run(found) for found in answer["runs"]),
            temporary=_temporary(answer["temporary"]),
            leftover_bytes=int(answer["leftover_bytes"]),
        )


def sweep(shell: StreamShell, place: Workplace, names: Sequence[str], *, min_age_s: float = MIN_AGE_S) -> Swept:
    """Removes these trees and runs (by `name`), where nothing needs them.

    `runs/<id>:<attempt>` says that this attempt has ended and was the newest, where the folder itself may not tell.
    """
    answer = run_script(shell, place, "sweep", ["remove", place.work_dir, str(min_age_s), *names], timeout_s=600)
    with sense_in(shell, "sweep", answer):
        kept = {str(name).partition(":")[0]: str(why) for name, why in dict(answer["kept"]).items()}
        removed = tuple(str(name).partition(":")[0] for name in answer["removed"])
        return Swept(removed, kept, int(answer["freed_bytes"]))


def _tree(found: dict[str, Any]) -> TreeThere:
    return TreeThere(
        hash=str(found["hash"]),
        size_bytes=int(found["size_bytes"]),
        age_s=finite(found["age_s"]),
        runs=tuple(map(str, found["runs"])),
        in_use=tuple(map(str, found["in_use"])),
    )


def _temporary(found: dict[str, Any]) -> TemporaryThere:
    return TemporaryThere(
        num_entries=int(found["num_entries"]),
        size_bytes=int(found["size_bytes"]),
        age_s=finite(found["age_s"]),
        in_use=tuple(map(str, found["in_use"])),
    )


def _run(found: dict[str, Any]) -> RunThere:
    return RunThere(
        run_id=str(found["run_id"]),
        size_bytes=int(found["size_bytes"]),
        checkpoint_bytes=int(found["checkpoint_bytes"]),
        age_s=finite(found["age_s"]),
        tree=str(found["tree"]),
        has_ended=bool(found["has_ended"]),
        is_alive=bool(found["is_alive"]),
    )
