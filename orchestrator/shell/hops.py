"""Machines inside a machine: a hop is a row, and its shell is the outer shell with a prefix.

Commands cross a hop framed once more (see framing.py), so nothing is quoted by hand, what the hop's
own program prints is told from the command's output, and an exit code of the command is never
mistaken for one of `pct`, `docker`, `lxc` or the inner `ssh`. Files go in and out as streams: a copy through
the hop's own push or pull would need room outside, and could be neither resumed nor checked on the way.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace

from orchestrator.errors import HostError
from orchestrator.host import Hop
from orchestrator.shell.framing import Unframe, command_line, drowned, end_command, frame, no_exit_code
from orchestrator.shell.posix import PosixFiles
from orchestrator.shell.stream import Ended, Sink, Source, StreamShell, TimedOut, timed_out, told

_SOCKETS = """
d=${XDG_RUNTIME_DIR:-/tmp}/draftyard-$(id -u)
mkdir -m 700 "$d" 2>/dev/null
[ -d "$d" ] && [ -O "$d" ] && [ ! -L "$d" ] && chmod 700 "$d" && printf %s "$d"
"""


@dataclass(frozen=True)
class Row:
    """What one kind of hop is made of. {name} and {sockets} are filled in."""

    program: str
    prefix: tuple[str, ...]
    status: tuple[str, ...] = ()
    running: str = ""  # in the output of status when commands can run there
    start: str = ""  # the command that repairs "not running"
    needs_root: bool = False
    sockets: bool = False  # wants a private folder on the outer machine, {sockets}
    joins_words: bool = False  # the program makes one line of the words, for a shell on the other side


_SSH_OPTIONS = (
    # A frozen machine is given up after four intervals, an error in under 45 s.
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=8", "-o", "ServerAliveCountMax=3"),
    # One connection for many commands: 0.1 to 0.5 s less for each.
    *("-o", "ControlMaster=auto", "-o", "ControlPersist=60", "-o", "ControlPath={sockets}/%C"),
)

ROWS = {
    "pct": Row(
        program="pct",
        prefix=("exec", "{name}", "--"),
        status=("status", "{name}"),
        running="running",
        start="pct start {name}",
        needs_root=True,
    ),
    "docker": Row(
        program="docker",
        prefix=("exec", "-i", "{name}"),
        status=("inspect", "-f", "{{.State.Status}}", "{name}"),
        running="running",
        start="docker start {name}",
    ),
    "lxc": Row(
        program="lxc",
        prefix=("exec", "{name}", "-T", "--"),
        status=("list", "^{name}$", "-c", "s", "-f", "csv"),
        running="RUNNING",
        start="lxc start {name}",
    ),
    "ssh": Row(
        program="ssh",
        prefix=("-T", *_SSH_OPTIONS, "--", "{name}"),
        joins_words=True,
        sockets=True,
    ),
}


class HopShell(PosixFiles):
    """The shell inside `hop`, entered from `outer`."""

    def __init__(self, outer: StreamShell, hop: Hop) -> None:
        self.label = f"{outer.label} {hop}"
        self._outer, self._hop, self._row = outer, hop, ROWS[hop.kind]
        self._lock = threading.Lock()
        self._program: tuple[str, ...] | None = None
        self._sockets = ""

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        made = frame(argv, stdin_bytes=source.size_bytes)
        if made.prefix:  # a command too long for one argument
            size = None if source.size_bytes is None else len(made.prefix) + source.size_bytes
            source = replace(source, size_bytes=size, head=made.prefix + source.head)
        errors: list[bytes] = []
        out, err = Unframe(made.nonce, sink), Unframe(made.nonce, errors.append)

        def take(piece: bytes) -> bool:
            out.feed(piece)
            return (
                out.end_words is not None or out.has_enough or out.is_drowned
            )  # the hop's own program may hold on for longer

        entered = [command_line(made.argv)] if self._row.joins_words else made.argv
        way_in = [*self._entry(), *self._prefix(), *entered]
        try:
            ended = self._outer.stream(way_in, source=source, sink=take, timeout_s=timeout_s, idle=idle)
        except TimedOut as error:
            self._end(out)
            raise timed_out(self.label, argv, timeout_s) from error
        err.feed(ended.stderr)
        out.flush()
        err.flush()
        if out.is_drowned:
            raise drowned(self.label, out)
        if out.start_words is None:
            raise self._not_entered(ended)
        if out.end_words is None and not out.has_enough:
            raise HostError(f"{self.label}: the way in was lost while a command ran; it may still be running there")
        if out.end_words is not None and out.exit_code is None:
            raise no_exit_code(self.label, out.end_words)
        return Ended(out.exit_code, b"".join(errors))

    def _end(self, out: Unframe) -> None:
        """The outer shell ended the hop's program; what that started inside may live on."""
        if out.start_words and out.start_words[0].isdecimal():
            with contextlib.suppress(HostError):
                self.run(end_command(int(out.start_words[0])), timeout_s=10)

    def close(self) -> None:
        self._outer.close()

    def _prefix(self) -> list[str]:
        return _filled(self._row.prefix, name=self._hop.name, sockets=self._sockets)

    def _entry(self) -> tuple[str, ...]:
        """The program that enters, with its full path and sudo where that is needed; looked up once."""
        with self._lock:
            if self._program is None:
                self._program = self._found()
            return self._program

    def _found(self) -> tuple[str, ...]:
        # A user's PATH has no /usr/sbin, where pct lies.
        look = f"PATH=$PATH:/usr/sbin:/snap/bin; command -v {self._row.program} || exit 44; id -u; id -un"
        done = self._outer.run(["sh", "-c", look])
        if done.exit_code:
            raise HostError(f"{self.label}: no `{self._row.program}` on {self._outer.label}")
        if self._row.sockets:
            made = self._outer.run(["sh", "-c", _SOCKETS])
            if made.exit_code:
                raise HostError(f"{self.label}: no private folder for sockets there: {told(made.stderr)}")
            self._sockets = made.stdout.decode().strip()
        path, number, login = done.stdout.decode("utf-8", "surrogateescape").split("\n")[:3]
        if not self._row.needs_root or number == "0":
            return (path,)
        allowed = self._outer.run(["sudo", "-n", path, *_filled(self._row.status, name=self._hop.name)])
        if allowed.exit_code and b"password" in allowed.stderr + allowed.stdout:
            raise HostError(
                f"{self.label}: `{self._row.program}` needs root there and sudo wants a password\n"
                f"  repair: echo '{login} ALL=(root) NOPASSWD: {path}' > /etc/sudoers.d/draftyard   (as root there)",
                reason="auth",
            )
        return ("sudo", "-n", path)

    def _not_entered(self, ended: Ended) -> HostError:
        said = told(ended.stderr, 500)
        if self._row.status:
            status = self._outer.run([*self._entry(), *_filled(self._row.status, name=self._hop.name)])
            text = told(status.stdout)
            if status.exit_code == 0 and self._row.running not in text:
                start = self._row.start.format(name=self._hop.name)
                return HostError(
                    f"{self.label}: it is not running ({text})\n  repair: {start}   (on {self._outer.label})",
                    reason="container_stopped",
                )
        return HostError(f"{self.label}: cannot enter (exit code {ended.exit_code}): {said or 'nothing was said'}")


def _filled(words: tuple[str, ...], **values: str) -> list[str]:
    filled = []
    for word in words:
        for key, value in values.items():
            word = word.replace(f"{{{key}}}", value)
        filled.append(word)
    return filled
