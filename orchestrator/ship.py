"""A tree -> a content-addressed, verified copy of it on a host; only what is missing travels.

`remote/receive.py` is the other end: it says what it lacks, checks what it gets, and renames the
tree into place, so a cut leaves nothing that looks whole and two clients at once do no harm. Small
contents travel together and compressed, large ones alone and resumable. Question, answer and content
are one command there: over a long line every further command would be a round trip more.

It does not decide what belongs to a tree, and it deletes nothing on this side.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from orchestrator.parcel import PACK_UP_TO_BYTES, Parcel, Progress, changed, header, source_of
from orchestrator.shell.stream import IDLE_S, Deadline, Source, StreamShell, told
from orchestrator.tree import DiskFull, Entry, ShipError, Tree, sha256_of
from orchestrator.units import format_size
from orchestrator.workplace import Workplace, run_script
from remote.arriving import QUIET_S
from remote.manifest import MARKER
from remote.rundir import json_object

# A tree whose marker was written in this boot of the host, and in which nothing was touched since, is whole; Python is
# not even started for that answer. The touch tells `gc` that somebody is about to use it. A file's mtime can be set, its
# ctime cannot; a folder's ctime is newer than its marker once it was renamed into place. Where `find` does not know
# -cnewer, the receiver looks. The time is taken before looking: what is written meanwhile is newer.
_IS_WHOLE = (
    'read -r boot < /proc/sys/kernel/random/boot_id && head -c 64 "$1" 2>/dev/null | grep -qF "$boot"'
    """ && look="${1%/*}/../.parts/look.$$" && trap 'rm -f "$look"' EXIT && touch "$look" """
    r""" && touched=$(find "${1%/*}" \( -type d -newer "$1" -o ! -type d -cnewer "$1" \) ! -path "$1" 2>&1)"""
    """ && [ -z "$touched" ] && touch -c -r "$look" "$1" && echo '{"whole": true, "missing": []}'"""
)
ARGUMENT_BYTES = 40_000  # it is quoted once more by every hop
MOST = 2**64  # bytes or files that a file system counts
ROUNDS = 4  # another client may take a part while we look


@dataclass(frozen=True)
class Patience:
    """With another client that sends the same large content: it is waited for, and what it brought is used.

    So is the receiver of a connection that was cut: it ends by itself when nothing has come for QUIET_S.
    """

    busy_s: float = QUIET_S + 20.0  # so long may it bring nothing new
    pause_s: float = 0.5  # between two looks


PATIENCE = Patience()


@dataclass(frozen=True)
class Shipped:
    path: str  # on the host
    hash: str
    sent_bytes: int  # content that travelled, before compression
    sent_files: int
    was_there: bool


@dataclass(frozen=True)
class Answer:
    """What `remote/receive.py` says of a tree."""

    is_whole: bool
    missing: tuple[tuple[str, int], ...]  # sha256, how many bytes are there already
    refused: str = ""  # a sha256 that was not right, or why it would not take something
    busy: str = ""  # who is sending the same content


def ship(
    tree: Tree,
    shell: StreamShell,
    place: Workplace,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    patience: Patience = PATIENCE,
) -> Shipped:
    """Makes the host have the tree, whole and checked; ShipError says what stands in the way."""
    errand = _Errand(tree, shell, place, on_progress, patience)
    sent_bytes = sent_files = num_rounds = 0
    refused, quiet = "", Deadline(patience.busy_s)
    while num_rounds < ROUNDS:
        talk = _Talk(errand)
        answer = talk.outcome()
        if answer.busy:
            _wait(errand, answer, quiet)
            continue
        quiet.renew()
        num_rounds += 1
        if talk.parcel is not None:
            sent_bytes, sent_files = sent_bytes + talk.parcel.content_bytes, sent_files + talk.parcel.num_contents
        if answer.is_whole:
            return Shipped(place.tree_dir(tree.hash), tree.hash, sent_bytes, sent_files, was_there=sent_files == 0)
        refused = answer.refused
        _raise_if_changed(tree, answer)
    raise ShipError(f"{shell.label}: the tree is still not whole after {ROUNDS} tries: {refused}")


@dataclass(frozen=True)
class _Errand:
    """Which tree goes where, and who is told."""

    tree: Tree
    shell: StreamShell
    place: Workplace
    on_progress: Callable[[Progress], None] | None
    patience: Patience


class _Talk:
    """One command over there: it says what it lacks of the tree, is sent that, and says whether the tree is whole.

    A tree that is there, or only has to be put together, is whole by the question alone, and nothing is sent.
    """

    def __init__(self, errand: _Errand) -> None:
        self._errand = errand
        self._said: list[bytes] = []
        self._answered = threading.Event()
        self.parcel: Parcel | None = None  # what is sent, once the answer says what is missing

    def outcome(self) -> Answer:
        tree, place = self._errand.tree, self._errand.place
        unless = [_IS_WHOLE, f"{place.tree_dir(tree.hash)}/{MARKER}"]
        words, head = _asked(self._errand, "make", tree.entries)
        source = Source(cast(Any, self), None, head=head, after=self._answered)
        return _received(self._errand, words, source, unless=unless, hear=self._hear)

    def read(self, size: int) -> bytes:
        return b"" if self.parcel is None else self.parcel.read(size)

    def _hear(self, piece: bytes) -> None:
        if self.parcel is None:
            self._said.append(piece)
        if self.parcel is not None or b"\n" not in piece:
            return
        first = json_object(b"".join(self._said).partition(b"\n")[0])
        if first is None or "error" in first:  # the last word says it
            return
        answer = _read(self._errand.shell, self._errand.tree, first)
        if answer.missing and not answer.busy:
            self.parcel = Parcel(self._errand.tree, answer.missing, self._errand.on_progress)
            self._answered.set()


def _wait(errand: _Errand, answer: Answer, quiet: Deadline) -> None:
    """Until nobody else sends what is missing; ShipError when another client holds it and brings nothing."""
    tree, patience = errand.tree, errand.patience
    sizes = {entry.sha256: entry.size_bytes for entry in tree.entries}
    large = {sha for sha, _ in answer.missing if sizes[sha] > PACK_UP_TO_BYTES}  # others are not waited for
    words, head = _asked(
        errand, "look", {entry.sha256: entry for entry in tree.entries if entry.sha256 in large}.values()
    )
    while answer.busy:
        if errand.on_progress is not None:
            total = sum(sizes[sha] for sha, _ in answer.missing)
            errand.on_progress(Progress(sum(have for _, have in answer.missing), total, 0.0, waits_for=answer.busy))
        if quiet.is_over:
            raise ShipError(
                f"{errand.shell.label}: another client is sending the same content and has brought nothing for {patience.busy_s:g} s: "
                f"{answer.busy}\n  a receiver ends by itself {QUIET_S:g} s after the last byte; end that process there, or try again later"
            )
        time.sleep(patience.pause_s)
        before, answer = answer, _received(errand, words, Source.of(head))
        if answer.missing != before.missing:
            quiet.renew()


def _asked(errand: _Errand, verb: str, entries: Iterable[Entry]) -> tuple[list[str], bytes]:
    """The words for the other end, and its stdin: a small question is an argument, as sshd takes no input in the first round trip."""
    question = header(hash=errand.tree.hash, entries=[entry.row() for entry in entries])
    text = base64.b64encode(question).decode()
    if len(text) <= ARGUMENT_BYTES:
        return [verb, errand.place.work_dir, text], b""
    return [verb, errand.place.work_dir], question


def _received(errand: _Errand, words: Sequence[str], source: Source, **more: Any) -> Answer:
    """Runs the other end."""
    answer = run_script(errand.shell, errand.place, "receive", words, source=source, timeout_s=IDLE_S, **more)
    return _read(errand.shell, errand.tree, answer)


def _read(shell: StreamShell, tree: Tree, answer: dict[str, Any]) -> Answer:
    """The host's word, parsed: it can ask for content of this tree only, and for no more of it than there is."""
    if "error" in answer:
        raise _error(f"{shell.label}: {told(str(answer['error']).encode('utf-8', 'replace'))}", answer.get("disk"))
    sizes = {entry.sha256: entry.size_bytes for entry in tree.entries if entry.link is None}
    match answer:
        case {"whole": bool(is_whole), "missing": list(missing)} if all(_is_wanted(item, sizes) for item in missing):
            refused, busy = (
                told(str(answer.get(name, "")).encode("utf-8", "replace"), 300) for name in ("refused", "busy")
            )
            return Answer(is_whole, tuple((sha, have) for sha, have in missing), refused, busy)
    raise ShipError(f"{shell.label}: an answer that no receiver gives: {str(answer)[:200]!a}")


def _error(said: str, disk: object) -> ShipError:
    """With the sums where the disk there is full."""
    match disk:
        case {
            "to_come_bytes": int(to_come),
            "free_bytes": int(free),
            "reserve_bytes": int(kept),
            "to_come_files": int(num_to_come),
            "free_files": int(num_free),
        } if all(0 <= number <= MOST for number in (to_come, free, kept, num_to_come, num_free)):
            said += (
                f": {format_size(to_come)} are still to be written there, {format_size(free)} are free "
                f"and {format_size(kept)} of the disk stay free for others"
            )
            if (short := to_come + kept - free) > 0:  # rounded, the sizes may look as if there were room
                said += f"; {format_size(short)} too few"
            return DiskFull(
                said if num_free >= num_to_come else f"{said}, with room for {num_free} of {num_to_come} files"
            )
    return ShipError(said)


def _is_wanted(item: object, sizes: dict[str, int]) -> bool:
    match item:
        case [str(sha), int(have)] if not isinstance(have, bool):
            return 0 <= have <= sizes.get(sha, -1)
    return False


def _raise_if_changed(tree: Tree, answer: Answer) -> None:
    for entry in tree.entries if answer.refused else ():
        if entry.sha256 == answer.refused:
            with source_of(entry):
                is_same = sha256_of(entry.source) == entry.sha256
            if not is_same:
                raise changed(entry)
