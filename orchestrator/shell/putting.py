"""One file to a host: written aside, checked there by its sha256, renamed; it goes on where a cut stopped it.

The part's name says which file goes where (target; device, inode, size and time of the local file), so a changed file
starts anew and clients with different files do not meet. What lies there already is hashed again before it is believed:
nothing takes the target's name before all of it fits. Of two clients that put to one name the last whole one wins.

The host needs `cat`, `chmod`, `dd`, `find`, `mkdir`, `mv`, `rm`, `sha256sum` and `wc`: coreutils and findutils, or busybox.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from orchestrator.errors import DraftyardError
from orchestrator.shell import Completed
from orchestrator.shell.stream import IDLE_S, PIECE_BYTES, Ended, Source, told

TRIES = 2  # a part that was spoilt is gone after the first
SUM_BYTES_PER_S = 50e6  # the slowest that a host hashes
_OTHER = 46  # exit code: what lies there is not what was sent

_THERE = '[ ! -f "$1" ] || wc -c < "$1"'
# Written from an offset and not appended: a receiver that outlived its connection writes the same bytes to the same place.
_FEED = """
part=$1
[ ! -d "$4" ] || { echo "a folder has this name there" >&2; exit 1; }
mkdir -p "$2" && umask 077 || exit 1
{ dd bs=1 seek="$3" count=0 conv=notrunc </dev/null 2>/dev/null && cat; } 1<>"$part" || { rm -f "$part"; exit 1; }
"""
# A client that sends the same file may be faster: then the target is right already, and the part a piece or nothing. Parts that nobody has written to for
# an hour are of clients that never came back.
_FINISH = f"""
part=$1; target=$2; due=$3
command -v sha256sum >/dev/null || {{ echo "no sha256sum there; install coreutils or busybox" >&2; exit 1; }}
fits() {{ [ -f "$1" ] && sum=$(sha256sum < "$1") && [ "${{sum%% *}}" = "$due" ]; }}
{{ fits "$part" && chmod "$4" "$part" && mv -f "$part" "$target"; }} || fits "$target" || {{ rm -f "$part"; exit {_OTHER}; }}
rm -f "$part"
find "$5" -maxdepth 1 -type f -name "$6" -mmin +60 -exec rm -f {{}} + 2>/dev/null || :
"""

Stream = Callable[..., Ended]


class _Hashed:
    """A file from an offset on, which reads like a stream; `digest` is of all of it once it has been read."""

    def __init__(self, stream: BinaryIO, size: int, have: int) -> None:
        self._stream, self.left, self.digest = stream, size, hashlib.sha256()
        stream.seek(0)
        while self.left > size - have:
            self.read(min(PIECE_BYTES, self.left - (size - have)))

    def read(self, size: int) -> bytes:
        wanted = min(size, self.left)
        # A file that shrank is filled up: the count was promised, and what was hashed is what was sent.
        piece = (self._stream.read(wanted) or bytes(wanted)) if wanted else b""
        self.left -= len(piece)
        self.digest.update(piece)
        return piece


def put(local: Path, remote: str, *, mode: int, label: str, run: Callable[..., Completed], stream: Stream) -> None:
    """Makes `remote` hold what `local` does. DraftyardError says why not."""
    folder = remote.rpartition("/")[0] or "/"
    with local.open("rb") as content:
        found = os.fstat(content.fileno())
        size, target = found.st_size, _short(remote)
        part = f"{folder}/.{target}-{_short(found.st_dev, found.st_ino, size, found.st_mtime_ns)}.put"
        for _ in range(TRIES):
            rest = _Hashed(content, size, _have(run(["sh", "-c", _THERE, "sh", part]), size))
            words, source = [part, folder, str(size - rest.left), remote], Source(cast(Any, rest), rest.left)
            fed = stream(["sh", "-c", _FEED, "sh", *words], source=source, sink=_nothing, timeout_s=IDLE_S, idle=True)
            words = [part, remote, rest.digest.hexdigest(), f"{mode:o}", folder, f".{target}-*.put"]
            ended: Ended | Completed = fed
            if not fed.exit_code:
                ended = run(["sh", "-c", _FINISH, "sh", *words], timeout_s=IDLE_S + size / SUM_BYTES_PER_S)
            if not ended.exit_code:
                return
            if ended.exit_code != _OTHER:
                break
    said = told(ended.stderr) or "what arrived there is not what was sent; nothing of it is in use, put it again"
    raise DraftyardError(f"{label}: cannot write {remote}: {said}")


def _nothing(_: bytes) -> None:
    """Takes output that nobody wants."""


def _have(done: Completed, size: int) -> int:
    """A host's word: anything that is no number up to the size means nothing."""
    text = done.stdout.decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() and len(text) < 20 and int(text) <= size else 0


def _short(*words: object) -> str:
    return hashlib.sha256("\0".join(map(str, words)).encode("utf-8", "surrogateescape")).hexdigest()[:16]
