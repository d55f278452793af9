"""Files and detached processes on a host, made of commands that every POSIX machine has.

No SFTP: it needs a subsystem that rented machines leave out, it cannot pass a hop, and it is half
as fast. `tail`, `head`, `stat`, `sha256sum` over one command each do the same, of coreutils or of busybox; putting.py names its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from orchestrator.errors import DraftyardError
from orchestrator.shell import Completed, Stat
from orchestrator.shell.putting import put
from orchestrator.shell.stream import IDLE_S, PIECE_BYTES, Deadline, Ended, Sink, Source, told

_ABSENT = 44  # our scripts' exit code for "no such file"

# The exit code of `tail` counts, which a pipe would drop: a read that fails must not look like the end of the file.
# One that `head` has cut short fails too, so it counts only where fewer bytes came than were asked for.
_READ = '{ tail -c +"$2" "$1" || printf %s $? >&4; } | head -c "$3" >&3'
_RANGE = f'[ -f "$1" ] || exit {_ABSENT}; exec 3>&1; failed=$({{ {_READ}; }} 4>&1); exit ${{failed:-$?}}'
# It reads and hashes there while the bytes travel, in one session: a server may allow no second one.
_FETCH = f"""
exec 3>&1
sum=$(sha256sum <"$1" & hashing=$!; failed=$({{ {_READ}; }} 4>&1) || exit; [ -z "$failed" ] || [ "$failed" = 141 ] || exit "$failed"; wait $hashing) || exit
printf %s "$sum"
"""
_STAT = f'stat -c "%s %i %f %Y" "$1" 2>/dev/null || exit {_ABSENT}'
_IDENTITY = f'[ -f "$1" ] || exit {_ABSENT}; stat -L -c "%s %i %f %Y" "$1"'
_SUM = 'sha256sum < "$1"'
# setsid: another session, so that no hang-up of the connection reaches it; & and closed streams: we return at once,
# but not before the session is made (a terminal that closes would take the process with it).
SPAWN = """
cd "$1" || exit 1; shift
command -v setsid >/dev/null || exit 2
setsid "$@" </dev/null >/dev/null 2>&1 &
n=0
while [ $n -lt 200 ] && read -r _ _ _ _ _ session _ 2>/dev/null </proc/$!/stat; do
  [ "$session" = $! ] && break
  n=$((n + 1))
done
"""


class PosixFiles:
    """The file half of a Shell, over `stream`. The one who has the stream inherits it."""

    label: str

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        raise NotImplementedError

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
        pieces: list[bytes] = []
        ended = self.stream(argv, source=Source.of(stdin), sink=pieces.append, timeout_s=timeout_s)
        assert ended.exit_code is not None  # the sink took everything
        return Completed(ended.exit_code, b"".join(pieces), ended.stderr)

    def spawn(self, argv: list[str], *, cwd: str) -> None:
        done = self.run(["sh", "-c", SPAWN, "sh", cwd, *argv], timeout_s=30)
        if done.exit_code == 2:
            raise DraftyardError(f"{self.label}: no `setsid` there; install util-linux")
        if done.exit_code:
            raise DraftyardError(f"{self.label}: cannot start in {cwd}: {told(done.stderr)}")

    def put(self, local: Path, remote: str, *, mode: int = 0o644) -> None:
        put(local, remote, mode=mode, label=self.label, run=self.run, stream=self.stream)

    def get(self, remote: str, local: Path) -> None:
        found = self.run(["sh", "-c", _IDENTITY, "sh", remote])
        if found.exit_code == _ABSENT:
            raise FileNotFoundError(2, f"no such file on {self.label}", remote)
        size, inode, mode, modified = _numbers(found, f"{self.label}: {remote}")
        if local.is_file() and local.stat().st_size == size and self._is_same(remote, local):
            local.chmod(mode & 0o777)  # an earlier get brought it
            return
        # The name says which file the part is of: another file of that name starts anew.
        part = local.with_name(f".{local.name[:150]}.{inode}-{size}-{modified}.part")
        local.parent.mkdir(parents=True, exist_ok=True)
        with _alone(part) as stream:
            if _is_at(part, stream):
                self._fetch(remote, stream, part, size)
                part.chmod(mode & 0o777)
                part.replace(local)
                return
        self.get(remote, local)  # another get was at it, and is done

    def _is_same(self, remote: str, local: Path) -> bool:
        with local.open("rb") as stream:
            return self._sum(remote, local.stat().st_size) == hashlib.file_digest(stream, "sha256").hexdigest()

    def _sum(self, remote: str, size: int) -> str:
        done = self.run(["sh", "-c", _SUM, "sh", remote], timeout_s=IDLE_S + size / 50e6)
        return done.stdout[:64].decode("ascii", "replace")

    def _fetch(self, remote: str, stream: IO[bytes], part: Path, size: int) -> None:
        """Brings what is missing of the part; DraftyardError when its sha256 is not the one there."""
        digest = hashlib.sha256()
        stream.seek(0)
        while piece := stream.read(PIECE_BYTES * 4):
            digest.update(piece)
        missing, there = max(0, size - stream.tell()), b""

        def keep(piece: bytes) -> None:
            nonlocal missing, there
            content, rest = piece[:missing], piece[missing:]
            stream.write(content)
            digest.update(content)
            missing, there = missing - len(content), there + rest

        command = ["sh", "-c", _FETCH, "sh", remote, str(size - missing + 1), str(missing)]
        wait_s = IDLE_S + size / 50e6  # it may still be hashing when the last byte has come
        ended = self.stream(command, source=Source.of(b""), sink=keep, timeout_s=wait_s, idle=True)
        stream.flush()
        if ended.exit_code:
            raise DraftyardError(f"{self.label}: cannot read {remote}: {told(ended.stderr)}")
        if there[:64].decode("ascii", "replace") != digest.hexdigest():
            part.unlink()
            raise DraftyardError(f"{self.label}: {remote} changed while it was fetched; try again")

    def read_range(self, remote: str, offset: int, size: int) -> bytes:
        done = self.run(["sh", "-c", _RANGE, "sh", remote, str(offset + 1), str(size)], timeout_s=IDLE_S)
        if done.exit_code == _ABSENT:
            raise FileNotFoundError(2, f"no such file on {self.label}", remote)
        if done.exit_code and len(done.stdout) < size:
            raise DraftyardError(f"{self.label}: cannot read {remote}: {told(done.stderr)}")
        return done.stdout

    def stat(self, remote: str) -> Stat | None:
        done = self.run(["sh", "-c", _STAT, "sh", remote])
        if done.exit_code == _ABSENT:
            return None
        size, inode, mode, modified = _numbers(done, f"{self.label}: {remote}")
        kind = mode & 0o170000
        return Stat(size, inode, mode & 0o7777, float(modified), kind == 0o040000, kind == 0o120000)


@contextmanager
def _alone(part: Path) -> Iterator[IO[bytes]]:
    """The part, held against every other get of it; the kernel gives it back when its holder dies.

    It may be gone when another get has let go of it: that one had it whole. Waits while the other brings something.
    """
    with part.open("ab+") as stream:
        quiet, size = Deadline(IDLE_S), 0
        while not _is_held(stream):
            if part.exists() and part.stat().st_size != size:
                size = part.stat().st_size
                quiet.renew()
            if quiet.is_over:
                raise DraftyardError(
                    f"another pull holds {part} and has brought nothing for {IDLE_S:g} s; end it, or wait for it"
                )
            time.sleep(0.05)
        yield stream


def _is_at(path: Path, stream: IO[bytes]) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(stream.fileno()))


def _is_held(stream: IO[bytes]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _numbers(done: Completed, where: str) -> tuple[int, int, int, int]:
    """Size, inode, mode and time as `stat` prints them: a host's word, so anything else is an error."""
    try:
        size, inode, mode, modified = done.stdout.split()
        if len(max(size, inode, mode, modified, key=len)) > 20:  # no more digits in 64 bits
            raise ValueError("a number past 64 bits")
        return int(size), int(inode), int(mode, 16), int(modified)
    except ValueError as error:
        said = told(done.stderr or done.stdout, 200)
        raise DraftyardError(f"{where}: `stat` there answers {said!r}; four numbers are due") from error
