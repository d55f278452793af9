"""A log's text -> the tracebacks in it and the lines by which the system itself speaks. Pure text, no judgement.

A traceback counts where it begins its line (after the prefix a launcher puts before each rank's): a log may quote
yesterday's failure, and that is no evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.failure.texts import EXCEPTION, meaning

MESSAGE_LINES = 40  # of an exception's message in a log

_PREFIX = re.compile(r"^(\[(?:rank|default)\d+\]:\s?|\[\d+\]:\s?|\([^()]*pid=\d+[^()]*\)\s)")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?::\s?(?P<message>.*))?$")
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d|\[?\d\d:\d\d:\d\d|(DEBUG|INFO|WARNING|ERROR)\b|\[\d{4}-)")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<function>.+)$')
_LIBRARY = re.compile(r"(site-packages|dist-packages|lib/python3|<frozen|<string>)")

# Lines by which the system itself speaks, outside of any traceback; each must stand at the start of its line.
_SYSTEM = re.compile(
    r"^(Killed|Bus error.*|.* Killed +python.*|(?:/\S+: )?line \d+: +\d+ (?:Killed|Bus error).*"
    r"|ERROR: Unexpected bus error.*|slurmstepd: error: Detected \d+ oom.?kill.*"
    r"|\S+:\d+:\d+ \[\d+\](?: \S+:\d+)? NCCL WARN .*(?:out of memory|CUDA calloc|shared memory|posix_fallocate|shm).*"
    r"|\[[ \d.]+\] .*(?:Out of memory: Kill|Memory cgroup out of memory|invoked oom-killer|NVRM: Xid).*"
    r"|(?:Memory cgroup out of memory|Out of memory): Kill.*|NVRM: Xid.*|\s*what\(\):\s+.*"
    r"|Unable to determine the device handle.*"
    r"|(?:\S+/)?python\S*: (?:No module named|can't open file|Error while finding module).*)$"
)


@dataclass(frozen=True)
class Raised:
    kind: str  # class name, "" for a line of the system's
    text: str  # the message, or the line

    @property
    def line(self) -> str:
        first = first_line(self.text)
        return f"{self.kind}: {first}" if self.kind and first else self.kind or first


@dataclass(frozen=True)
class Block:
    """A traceback, or one line of the system's, with the exceptions in it, root first."""

    prefix: str
    raised: tuple[Raised, ...]
    text: str
    is_system: bool = False


def blocks(text: str) -> Iterator[Block]:
    """In the order in which they begin; processes are told apart by the prefix of their lines."""
    lines: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(text.splitlines()):
        found = _PREFIX.match(line)
        prefix = found[0] if found else ""
        lines.setdefault(prefix.strip(), []).append((number, line[len(prefix) :]))
    found_blocks = [item for prefix, own in lines.items() for item in _own_blocks(prefix, own)]
    for _, block in sorted(found_blocks, key=lambda item: item[0]):
        yield block


def _own_blocks(prefix: str, lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, Block]]:
    at = 0
    while at < len(lines):
        number, line = lines[at]
        if line.startswith(_TRACEBACK):
            end, raised = _read_traceback([text for _, text in lines], at)
            if raised:
                yield number, Block(prefix, tuple(raised), "\n".join(text for _, text in lines[at:end]))
            at = max(end, at + 1)
            continue
        if _SYSTEM.match(line):
            yield number, Block(prefix, (Raised("", line.strip()),), line, is_system=True)
        at += 1


def _read_traceback(lines: Sequence[str], at: int) -> tuple[int, list[Raised]]:
    """The line after a traceback (and those chained to it), and the exceptions in it, root first."""
    raised: list[Raised] = []
    while at < len(lines) and lines[at].startswith(_TRACEBACK):
        at += 1
        while at < len(lines) and (lines[at][:1].isspace() or not lines[at]) and not lines[at].startswith(_TRACEBACK):
            at += 1
        found = _EXCEPTION.match(lines[at]) if at < len(lines) else None
        if found is None:
            break
        message = [found["message"] or ""]
        at += 1
        while at < len(lines) and _belongs_to_message(lines[at]):
            if len(message) < MESSAGE_LINES:
                message.append(lines[at])
            at += 1
        raised.append(Raised(found["kind"], "\n".join(message)))
        following = [index for index in range(at, min(at + 6, len(lines))) if lines[index].startswith(_TRACEBACK)]
        if not following or not any(lines[index].startswith(_CHAINED) for index in range(at, following[0])):
            break
        at = following[0]
    return at, raised


def _belongs_to_message(line: str) -> bool:
    return bool(line.strip()) and not line.startswith((_TRACEBACK, *_CHAINED)) and not _LOG_LINE.match(line)


def root_of_chain(text: str) -> Raised | None:
    """The first exception of a chained traceback that a rule knows: what came of handling it is a consequence."""
    start = text.find(_TRACEBACK)
    if start < 0:
        return None
    _, raised = _read_traceback(text[start:].splitlines(), 0)
    known = [item for item in raised if meaning(item.kind, item.text).kind != EXCEPTION]
    return known[0] if known else None


def innermost_frame(text: str) -> dict[str, Any]:
    """The innermost frame of the user's own code: file, line, function and the source line."""
    lines = text.splitlines()
    for index in range(len(lines) - 1, -1, -1):
        found = _FRAME.match(lines[index])
        if found is not None and not _LIBRARY.search(found["file"]):
            source = lines[index + 1].strip() if index + 1 < len(lines) else ""
            frame = {"file": found["file"], "line": int(found["line"]), "function": found["function"], "source": source}
            return {"frame": frame}
    return {}


def first_line(text: str) -> str:
    """The first line that holds a word: torchrun begins with a ruled one."""
    return next((line.strip() for line in text.splitlines() if re.search(r"\w", line)), "")
