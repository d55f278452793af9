"""How an argv crosses shells unharmed, and how its output is told from everything else that is printed.

A command line is three words of plain letters: `sh -c 'eval "$(printf %b "$1")"' sh ENCODED`. Every
byte that any shell could read as its own (POSIX, csh, fish, a hop's joined command line) is spelled
as an octal escape, so one encoding passes through any number of shells.

The script inside prints a start mark on both streams, runs the argv as a child, and prints an end
mark with the exit code. What rc files and banners print lies before the start mark and is dropped;
without a start mark the command never ran; without an end mark nobody knows how it ended. So an
exit code of 255 of the command is never mistaken for one of `ssh`, and a grandchild that keeps the
streams open does not hold us.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.errors import HostError
from orchestrator.shell.stream import told

MAX_NOISE_BYTES = 1024**2  # before the start mark: what rc files and banners print
MAX_ENCODED_BYTES = 100_000  # the kernel refuses one argument of 131,072 bytes (MAX_ARG_STRLEN)

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_/.,:+=@ -")

# Byte by byte: some `head` reads ahead and takes what follows the script, which is the command's own input.
_FROM_STDIN = (
    '[ -t 0 ] && { stty raw -echo; printf "%s%s ready>\\n" "<" "$2"; }; eval "$(dd bs=1 count="$1" 2>/dev/null)"'
)
# A container entered without a login shell has no HOME.
_HOME = '[ -n "$HOME" ] || { HOME=$(getent passwd "$(id -u)" | cut -d: -f6); export HOME; }'
# Appended, never put in front: such a container has no /usr/local/bin in its PATH either.
_MORE_PATH = 'PATH="$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$HOME/.local/bin"; export PATH'


@dataclass(frozen=True)
class Frame:
    """One command made ready to cross: `argv` starts it anywhere, `prefix` goes first on its stdin."""

    argv: list[str]
    prefix: bytes
    nonce: str


def frame(argv: list[str], *, stdin_bytes: int | None) -> Frame:
    """`stdin_bytes` counts what will be sent: on a terminal there is no end of file, only a count. None: the command knows it."""
    nonce = secrets.token_hex(12)
    script = _script(argv, nonce, stdin_bytes).encode("utf-8", "surrogateescape")
    encoded = encode(script)
    if len(encoded) <= MAX_ENCODED_BYTES:
        return Frame(["sh", "-c", 'eval "$(printf %b "$1")"', "sh", encoded], b"", nonce)
    return Frame(["sh", "-c", _FROM_STDIN, "sh", str(len(script)), nonce], script, nonce)


def check_argv(argv: list[str]) -> None:
    """ValueError for what no exec can carry; raised before anything is sent."""
    if not argv or not argv[0]:
        raise ValueError("the command is empty")
    if argv[0].startswith("-"):
        raise ValueError(f"the command starts with a dash: {argv[0]!r}")
    for word in argv:
        if "\0" in word:
            raise ValueError(f"a NUL byte cannot be in an argument: {word!r}")


def end_command(pid: int) -> list[str]:
    """Ends what a frame runs: its process group, or where it leads none, its children and itself."""
    children = f"$(cat /proc/{pid}/task/{pid}/children)"
    return ["sh", "-c", f"kill -s TERM -- -{pid} 2>/dev/null || kill -s TERM {children} {pid}"]


def encode(script: bytes) -> str:
    """Plain letters stay, every other byte becomes `\\0ooo`, as printf's %b reads it."""
    return "".join(chr(byte) if byte in _PLAIN else f"\\0{byte:03o}" for byte in script)


def command_line(argv: list[str]) -> str:
    """The argv as one line for a login shell: words without special letters, the rest in single quotes."""
    return "exec " + " ".join(word if re.fullmatch(r"[\w/.,:+=@-]+", word) else f"'{word}'" for word in argv)


def _script(argv: list[str], nonce: str, stdin_bytes: int | None) -> str:
    check_argv(argv)
    command = f"go() (exec {' '.join(shlex.quote(word) for word in argv)})"  # said once, as it may be long
    fed = "go" if stdin_bytes is None else f"if [ -t 0 ]; then head -c {stdin_bytes} | go; else go; fi"
    return (
        f"if [ -t 1 ]; then stty raw -echo; t=tty; else t=pipe; printf '<%s start>\\n' {nonce} >&2; fi\n"
        f"printf '<%s start %s %s>\\n' {nonce} $$ $t\n"
        f"{_HOME}\n{_MORE_PATH}\n"
        f"{command}\n{fed}\n"
        "r=$?\n"
        f"[ $t = tty ] || printf '<%s end>\\n' {nonce} >&2\n"
        f"printf '<%s end %s>\\n' {nonce} $r"
    )


class Unframe:
    """Takes the bytes of one stream as they come and passes on what lies between the marks."""

    def __init__(self, nonce: str, sink: Callable[[bytes], object]) -> None:
        self._start = f"<{nonce} start".encode()
        self._end = f"<{nonce} end".encode()
        self._ready = f"<{nonce} ready>".encode()
        self._sink = sink
        self._held = b""
        self.has_enough = False  # the sink wants no more
        self.start_words: list[str] | None = None
        self.end_words: list[str] | None = None

    @property
    def noise(self) -> bytes:
        """What was printed while no start mark has come."""
        return self._held if self.start_words is None else b""

    @property
    def is_drowned(self) -> bool:
        """More was printed than anything prints before a command starts; it may never end."""
        return len(self.noise) > MAX_NOISE_BYTES

    @property
    def exit_code(self) -> int | None:
        """Of the end mark; None where it has none that a process can have."""
        words = self.end_words or [""]
        return int(words[0]) if re.fullmatch("[0-9]{1,3}", words[0]) and int(words[0]) < 256 else None

    @property
    def is_ready(self) -> bool:
        """A terminal said that input may come."""
        return self._ready in self.noise

    def feed(self, piece: bytes) -> None:
        if self.end_words is not None:
            return
        self._held += piece
        if self.start_words is None:
            self.start_words = self._take(self._start)
        if self.start_words is not None:
            self._pass_on()

    def flush(self) -> None:
        """The stream is over: what was held back because it looked like a mark is the command's own."""
        if self.start_words is not None and self.end_words is None and self._held:
            self._give(self._held)
            self._held = b""

    def _pass_on(self) -> None:
        at = self._held.find(self._end)
        if at >= 0:
            body, self._held = self._held[:at], self._held[at:]
            self._give(body)
            self.end_words = self._take(self._end)
            return
        keep = _overlap(self._held, self._end)
        body, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._give(body)

    def _give(self, body: bytes) -> None:
        if body and self._sink(body) is True:
            self.has_enough = True

    def _take(self, mark: bytes) -> list[str] | None:
        """The words of a whole mark, which is removed with all before it; None while it is not whole."""
        at = self._held.find(mark)
        close = self._held.find(b">\n", at) if at >= 0 else -1
        if close < 0:
            return None
        words = self._held[at + len(mark) : close].decode("ascii", "replace").split()
        self._held = self._held[close + 2 :]
        return words


def drowned(label: str, stream: Unframe) -> HostError:
    began = told(stream.noise[:200])
    return HostError(
        f"{label}: prints more than {MAX_NOISE_BYTES // 1024**2} MiB before a command starts: a login file or a forced "
        f"command there; it begins: {began}"
    )


def no_exit_code(label: str, said: list[str]) -> HostError:
    return HostError(f"{label}: a command there ended with {' '.join(said)[:100]!a}; a code of 0 to 255 is due")


def _overlap(held: bytes, mark: bytes) -> int:
    """How many last bytes of `held` could be the beginning of `mark`."""
    at = held.rfind(mark[:1], max(0, len(held) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(held[at:]):
            return len(held) - at
        at = held.rfind(mark[:1], max(0, len(held) - len(mark) + 1), at)
    return 0
