"""A tree -> a content-addressed, verified copy of it on a host; only what is missing travels.

`remote/receive.py` is the other end: it says what it lacks, checks what it gets, and renames the
tree into place, so a cut leaves nothing that looks whole and two clients at once do no harm. Small
contents travel together and compressed, large ones alone and resumable.

It does not decide what belongs to a tree, and it deletes nothing on this side.
"""

from __future__ import annotations

import base64
import contextlib
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from orchestrator.shell.stream import IDLE_S, PIECE_BYTES, Deadline, Source, StreamShell, told
from orchestrator.tree import Entry, ShipError, Tree, sha256_of
from orchestrator.workplace import Workplace, run_script
from remote.arriving import QUIET_S
from remote.manifest import MARKER

PACK_UP_TO_BYTES = 1024**2
SPOOL_BYTES = 64 * 1024**2  # a larger pack is kept in a temporary file
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
class Progress:
    sent_bytes: int
    total_bytes: int
    bytes_per_s: float
    waits_for: str = ""  # who is sending the same content just now: a process on the host


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
    answer = _wanted(errand)
    was_there = answer.is_whole
    while num_rounds < ROUNDS:
        if answer.busy:
            answer = _waited(errand, answer)
        if answer.is_whole:
            return Shipped(place.tree_dir(tree.hash), tree.hash, sent_bytes, sent_files, was_there)
        parcel = _Parcel(tree, answer.missing, on_progress)
        with contextlib.closing(parcel):
            answer = _give(errand, Source(cast(Any, parcel), parcel.total_bytes))
        if not answer.busy:
            num_rounds += 1
            sent_bytes, sent_files = sent_bytes + parcel.content_bytes, sent_files + parcel.num_contents
            _raise_if_changed(tree, answer)
    raise ShipError(f"{shell.label}: the tree is still not whole after {ROUNDS} tries: {answer.refused}")


@dataclass(frozen=True)
class _Errand:
    """Which tree goes where, and who is told."""

    tree: Tree
    shell: StreamShell
    place: Workplace
    on_progress: Callable[[Progress], None] | None
    patience: Patience


def _waited(errand: _Errand, answer: Answer) -> Answer:
    """What is missing once nobody else sends it; ShipError when another client holds it and brings nothing."""
    tree, patience = errand.tree, errand.patience
    quiet, sizes = Deadline(patience.busy_s), {entry.sha256: entry.size_bytes for entry in tree.entries}
    large = {sha for sha, _ in answer.missing if sizes[sha] > PACK_UP_TO_BYTES}  # others are not waited for
    question = _header(tree, {entry.sha256: entry for entry in tree.entries if entry.sha256 in large}.values())
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
        before, answer = answer, _ask(errand, "look", question)
        if answer.missing != before.missing:
            quiet.renew()
        if not answer.busy:
            answer = _wanted(errand)
    return answer


def _wanted(errand: _Errand) -> Answer:
    """What of the tree is missing there; a tree that only has to be put together is, by this question."""
    tree = errand.tree
    unless = [_IS_WHOLE, f"{errand.place.tree_dir(tree.hash)}/{MARKER}"]
    return _ask(errand, "want", _header(tree, tree.entries), unless=unless)


def _ask(errand: _Errand, verb: str, header: bytes, *, unless: Sequence[str] = ()) -> Answer:
    """A small header goes as an argument: sshd takes no input in the first round trip."""
    text = base64.b64encode(header).decode()
    if len(text) <= ARGUMENT_BYTES:
        return _received(errand, [verb, errand.place.work_dir, text], Source.of(b""), unless=unless)
    return _received(errand, [verb, errand.place.work_dir], Source.of(header), unless=unless)


def _give(errand: _Errand, parcel: Source) -> Answer:
    return _received(errand, ["take", errand.place.work_dir], parcel)


def _received(errand: _Errand, words: Sequence[str], source: Source, *, unless: Sequence[str] = ()) -> Answer:
    """Runs the other end."""
    shell = errand.shell
    answer = run_script(shell, errand.place, "receive", words, source=source, timeout_s=IDLE_S, unless=unless)
    return _read(shell, errand.tree, answer)


def _read(shell: StreamShell, tree: Tree, answer: dict[str, Any]) -> Answer:
    """The host's word, parsed: it can ask for content of this tree only, and for no more of it than there is."""
    if "error" in answer:
        raise ShipError(f"{shell.label}: {told(str(answer['error']).encode('utf-8', 'replace'))}")
    sizes = {entry.sha256: entry.size_bytes for entry in tree.entries if entry.link is None}
    match answer:
        case {"whole": bool(is_whole), "missing": list(missing)} if all(_is_wanted(item, sizes) for item in missing):
            refused, busy = (
                told(str(answer.get(name, "")).encode("utf-8", "replace"), 300) for name in ("refused", "busy")
            )
            return Answer(is_whole, tuple((sha, have) for sha, have in missing), refused, busy)
    raise ShipError(f"{shell.label}: an answer that no receiver gives: {str(answer)[:200]!a}")


def _is_wanted(item: object, sizes: dict[str, int]) -> bool:
    match item:
        case [str(sha), int(have)] if not isinstance(have, bool):
            return 0 <= have <= sizes.get(sha, -1)
    return False


def _raise_if_changed(tree: Tree, answer: Answer) -> None:
    for entry in tree.entries if answer.refused else ():
        if entry.sha256 == answer.refused:
            with _source(entry):
                is_same = sha256_of(entry.source) == entry.sha256
            if not is_same:
                raise _changed(entry)


def _changed(entry: Entry, why: str = "") -> ShipError:
    return ShipError(f"{entry.source} changed while it was shipped{why}; nothing of it is in use there, start again")


@contextlib.contextmanager
def _source(entry: Entry) -> Iterator[None]:
    """Reading it may fail: it may have been deleted since it was listed."""
    try:
        yield
    except OSError as error:
        raise _changed(entry, f" ({error.strerror})") from error


def _header(tree: Tree, entries: Iterable[Entry], **more: Any) -> bytes:
    body = {"hash": tree.hash, "entries": [entry.row() for entry in entries], **more}
    packed = zlib.compress(json.dumps(body).encode(), 1)
    return len(packed).to_bytes(4, "big") + packed


class _Parcel:
    """The content a host lacks, as one stream: header, small contents packed, large ones as they are.

    Reads like a file, so that a shell can send it at constant memory; tells how far it is.
    """

    def __init__(
        self, tree: Tree, missing: Sequence[tuple[str, int]], on_progress: Callable[[Progress], None] | None
    ) -> None:
        by_sha = {entry.sha256: entry for entry in tree.entries if entry.link is None}
        wanted = [(by_sha[sha], have) for sha, have in missing]
        small = [entry for entry, _ in wanted if entry.size_bytes <= PACK_UP_TO_BYTES]
        large = [(entry, have) for entry, have in wanted if entry.size_bytes > PACK_UP_TO_BYTES]
        pack, rows = [[e.sha256, e.size_bytes] for e in small], [[e.sha256, e.size_bytes, have] for e, have in large]
        self._head = _packed(_header(tree, tree.entries, pack=pack, large=rows), small)
        large_bytes = sum(entry.size_bytes - have for entry, have in large)
        self.content_bytes = sum(entry.size_bytes for entry in small) + large_bytes
        self.num_contents = len(wanted)
        self.total_bytes = self._head.tell() + large_bytes
        self._head.seek(0)
        self._pieces = self._stream(large)
        self._on_progress, self._sent, self._began = on_progress, 0, time.monotonic()

    def read(self, _size: int) -> bytes:
        piece = next(self._pieces, b"")
        self._sent += len(piece)
        if self._on_progress is not None:
            rate = self._sent / max(1e-9, time.monotonic() - self._began)
            self._on_progress(Progress(self._sent, self.total_bytes, rate))
        return piece

    def close(self) -> None:
        self._head.close()

    def _stream(self, large: list[tuple[Entry, int]]) -> Iterator[bytes]:
        while piece := self._head.read(PIECE_BYTES):
            yield piece
        for entry, have in large:
            left = entry.size_bytes - have
            with _source(entry):
                stream = entry.source.open("rb")
            with stream:
                stream.seek(have)
                while left:
                    # A file that shrank is filled up: its hash will not match, and the other end says so.
                    with _source(entry):
                        piece = stream.read(min(PIECE_BYTES, left)) or bytes(min(PIECE_BYTES, left))
                    left -= len(piece)
                    yield piece


def _packed(header: bytes, small: list[Entry]) -> IO[bytes]:
    """The header and one zlib stream with every small content, each exactly as long as the manifest says."""
    head = cast(IO[bytes], tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES))  # noqa: SIM115  # the parcel closes it
    with contextlib.ExitStack() as on_fault:
        on_fault.enter_context(head)
        head.write(header)
        pack = zlib.compressobj(1)
        for entry in small:
            with _source(entry):
                content = entry.source.read_bytes()[: entry.size_bytes].ljust(entry.size_bytes, b"\0")
            head.write(pack.compress(content))
        head.write(pack.flush())
        on_fault.pop_all()
    return head
