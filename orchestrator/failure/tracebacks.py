"""A log's text -> the tracebacks in it and the lines by which the system itself speaks. Pure text, no judgement.

A traceback counts where it begins its line, after the prefix that a launcher, a journal or a container's log puts before
each (`coats` takes those off, and colours, boxes and the margins of groups): a log may quote yesterday's failure, and
that is no evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.failure.coats import (
    BOX_ENDS,
    BOXED_FRAME,
    as_shown,
    boxed_source,
    is_box,
    labels_of,
    lines_of,
    opened,
    split_prefix,
    told_labels,
)
from orchestrator.failure.spoken import announces_quotation, carries
from orchestrator.failure.texts import EXCEPTION, KILLED_ELSEWHERE, meaning

MESSAGE_LINES = 400  # of an exception's message in a log: it may hold a traceback of its own

_TRACEBACK = "Traceback (most recent call last):"
_GROUP = "  + Exception Group Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:\([\w.]+\))?)(?::\s?(?P<message>.*))?$")
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d|\[?\d\d:\d\d:\d\d|(DEBUG|INFO|WARNING|ERROR)\b|\[\d{4}-)")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<function>.+)$')
_REMOTE = re.compile(r"^(?:ray\.exceptions\.\w+(?:\(\w+\))?: ray::|(?:\w+\.)+_?RemoteTraceback:\s*$)")
_MARGIN = re.compile(r"^\s*\| ")  # of a group
_LIBRARY = re.compile(r"(site-packages|dist-packages|lib/python3|<frozen|<string>)")

# Lines by which the system itself speaks, outside of any traceback; each must stand at the start of its line.
_SYSTEM = re.compile(
    rf"^((?:Killed|{KILLED_ELSEWHERE})|Bus error.*|.* Killed +python.*|(?:/\S+: )?line \d+: +\d+ (?:Killed|Bus error).*"
    rf"|\S+ ?: \w+ \d+ ?: +\d+ (?:{KILLED_ELSEWHERE}) +\S.*|srun: error: \S+: tasks? [\d,-]+: Out Of Memory\s*"
    r"|(?:zsh:|\[\d+\] +[+-] +\d+) killed {2,}\S.*|fish: .* terminated by signal SIGKILL\b.*"
    r"|ERROR: Unexpected bus error.*|slurmstepd: error: Detected \d+ oom.?kill.*"
    r"|\S+:\d+:\d+ \[\d+\](?: \S+:\d+)? NCCL WARN .*(?:out of memory|CUDA calloc|shared memory|posix_fallocate|shm).*"
    r"|\[[ \d.]+\] .*(?:Out of memory: Kill|Memory cgroup out of memory|invoked oom-killer|NVRM: Xid).*"
    r"|(?:Memory cgroup out of memory|Out of memory): Kill.*|NVRM: Xid.*|\s*what\(\):\s+.*"
    r"|Unable to determine the device handle.*"
    r"|(?:\S+/)?python\S*: (?:No module named|can't open file|Error while finding module).*)$"
)


# What stands between the traceback of a part and that of the launcher that waited for it: the rest of a message, lines whose
# writer is a launcher (torchrun's of torch 1 and 2, DeepSpeed's), what C++ says of an end. A date or a level alone says
# nothing of who wrote a line: those are mostly the job's own, which went on.
_LAUNCHER = re.compile(
    r"^(?!.*\b(?:will restart|[Rr]estarting)\b)(\s*$|(?!\s+\[?(?:\d\d:\d\d|\d{4}-|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b))\s"
    r"|[EWIF]\d{4} \d\d:\d\d:[\d.]+ +\d+ (?:\S*/)?torch/(?:distributed|multiprocessing)/"
    r"|(?:\[\d{4}-\d\d-\d\d [\d:,.]+\] )?(?:(?:DEBUG|INFO|WARNING|ERROR):)?torch\.(?:distributed|multiprocessing)[\w.]*: ?"
    r"|\[\d{4}-\d\d-\d\d [\d:,.]+\] \[[A-Z]+\] \[(?:launch|runner)\.py:\d+"
    r"|\[[EWIF](?:\d{4} [\d:.]+)? ?\w+\.(?:cpp|cc|cu|hpp|h):\d+\]|terminate called|Exception raised from |frame #\d+: |srun: error: "
    r"|CUDA kernel errors might|For debugging consider|Compile with `TORCH|Search for `cuda)"
)
_BAR = re.compile(
    r"^[^\n|]*\d+%\|"
)  # of progress: its last drawing comes after the traceback, two are a job that went on


# A traceback that its process goes on after: Python's own words for one that nobody could catch, asyncio's, logging's.
_IGNORED = re.compile(
    r"^(?:Exception ignored (?:in|while)\b|Task exception was never retrieved|Future exception was never retrieved|--- Logging error ---)"
)
# A bar of progress that was drawn by hand, with nothing between it and what comes next.
_DRAWN = re.compile(r"\d%\||\dit ")


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
    follows: bool = False  # another of its process, with nothing but a launcher's lines between the two
    is_ignored: bool = False  # its process went on after it, as the line before says
    is_labelled: bool = False  # a label alone says that it is another process's: a job may write such a one itself


def blocks(text: str) -> Iterator[Block]:
    """In the order in which they begin; processes are told apart by the prefix of their lines."""
    lines: dict[str, list[tuple[int, str]]] = {}
    all_lines = lines_of(as_shown(text))
    labels = labels_of(all_lines)
    told, unsure = told_labels(all_lines, labels), set[str]()
    for number, line in enumerate(all_lines):
        label, prefix, rest = split_prefix(line, labels)
        if label:
            prefix = f"{label} {prefix}".strip()
            if label not in told:
                unsure.add(prefix)
        bar = rest.rstrip().removesuffix(_TRACEBACK)
        is_behind = len(bar) < len(rest.rstrip()) and bar.endswith("]") and _DRAWN.search(bar)
        parts = [bar, _TRACEBACK] if is_behind else [rest]
        lines.setdefault(prefix, []).extend((number, part) for part in parts)
    found_blocks = [item for prefix, own in lines.items() for item in _own_blocks(prefix, own)]
    ends = [(last, block.raised[-1]) for _, last, block in found_blocks if not block.prefix]
    announced = {last + 1 for last, raised in ends if announces_quotation(raised.kind, raised.text)}
    for number, _, block in sorted(found_blocks, key=lambda item: item[0]):
        if not (block.prefix in unsure and number in announced):
            yield replace(block, is_labelled=block.prefix in unsure)


def _own_blocks(prefix: str, lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, int, Block]]:
    """With the numbers of its first line and its last."""
    at, texts = 0, [text for _, text in lines]
    before: int | None = None  # the line after the traceback before this one
    while at < len(lines):
        number, line = lines[at]
        read = _reader_of(line)
        if read is not None:
            end, raised = read(texts, at)
            if raised:
                follows = before is not None and _is_launchers(texts[before:at])
                ignored = any(_IGNORED.match(text) for text in texts[max(0, at - 2) : at])
                yield (
                    number,
                    lines[end - 1][0],
                    Block(prefix, tuple(raised), "\n".join(texts[at:end]), follows=follows, is_ignored=ignored),
                )
                before = end - raised[-1].text.count("\n")  # what goes on unindented may be the program that does
            at = max(end, at + 1)
            continue
        if _SYSTEM.match(line):
            yield number, number, Block(prefix, (Raised("", line.strip()),), line, is_system=True)
        at += 1


def _is_launchers(lines: Sequence[str]) -> bool:
    bars = sum(_BAR.match(line) is not None for line in lines)
    return bars <= 1 and all(_LAUNCHER.match(line) or _BAR.match(line) for line in lines)


def _reader_of(line: str) -> Callable[[Sequence[str], int], tuple[int, list[Raised]]] | None:
    """What reads on from a line that begins a traceback, in any of its forms; None for any other line."""
    if line.startswith(_TRACEBACK):
        return _read_traceback
    if line.startswith(_GROUP):
        return _read_group
    if _REMOTE.match(line):
        return _read_remote
    return _read_box if is_box(line) else None


def _read_remote(lines: Sequence[str], at: int) -> tuple[int, list[Raised]]:
    """The line after a chain that begins with an error of another process, which has no traceback of this one.

    Such a line alone is a log's: only a chain that goes on from it counts.
    """
    found = _EXCEPTION.match(lines[at])
    near = range(at + 1, min(at + MESSAGE_LINES, len(lines)))
    chained = next((index for index in near if lines[index].startswith(_CHAINED)), None)
    if found is None or chained is None:
        return at + 1, []
    begins = (index for index in range(chained, min(chained + 4, len(lines))) if lines[index].startswith(_TRACEBACK))
    header = next(begins, None)
    if header is None:
        return at + 1, []
    end, raised = _read_traceback(lines, header)
    text = "\n".join([found["message"] or "", *lines[at + 1 : chained]])
    return end, [Raised(found["kind"], text.rstrip()), *raised]


def _read_group(lines: Sequence[str], at: int) -> tuple[int, list[Raised]]:
    """The line after an exception group, and what is in it: first what its parts raised, last the group itself."""
    end, inside = opened(lines, at)
    found = [raised for *_, block in _own_blocks("", list(enumerate(inside))) for raised in block.raised]
    return end, [*found[1:], *found[:1]]


def _read_box(lines: Sequence[str], at: int) -> tuple[int, list[Raised]]:
    """The line after a traceback drawn in a box, whose message is broken where the console ended."""
    end = next((index for index in range(at + 1, len(lines)) if lines[index].startswith(BOX_ENDS)), len(lines)) + 1
    found = _EXCEPTION.match(lines[end]) if end < len(lines) else None
    if found is None:
        return at + 1, []
    message, end = [found["message"] or ""], end + 1
    while end < len(lines) and _belongs_to_message(lines[end]) and not is_box(lines[end]):
        message.append(lines[end])
        end += 1
    return end, [Raised(found["kind"], " ".join(line.strip() for line in message))]


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
        while at < len(lines) and (_belongs_to_message(lines[at]) or _is_quoted(lines[at], found["kind"], message)):
            if len(message) < MESSAGE_LINES:
                message.append(lines[at])
            at += 1
        raised.append(Raised(found["kind"], "\n".join(message)))
        following = [index for index in range(at, min(at + 6, len(lines))) if lines[index].startswith(_TRACEBACK)]
        if not following or not any(lines[index].startswith(_CHAINED) for index in range(at, following[0])):
            break
        at = following[0]
    return at, raised


def _is_quoted(line: str, kind: str, message: Sequence[str]) -> bool:
    """Whether a traceback is only the end of a message that announces it, and is not handed on by one that does that."""
    return (
        line.startswith(_TRACEBACK)
        and message[-1].rstrip().endswith(":")
        and not carries(kind, "\n".join((*message, line)))
    )


def _belongs_to_message(line: str) -> bool:
    return bool(line.strip()) and not line.startswith((_TRACEBACK, *_CHAINED)) and not _LOG_LINE.match(line)


def root_of_chain(text: str) -> Raised | None:
    """The first exception of a chained traceback that a rule knows: what came of handling it is a consequence."""
    start = text.find(_TRACEBACK)
    if start < 0:
        return None
    _, raised = _read_traceback(lines_of(text[start:]), 0)
    known = [item for item in raised if meaning(item.kind, item.text).kind != EXCEPTION]
    return known[0] if known else None


def innermost_frame(text: str) -> dict[str, Any]:
    """The innermost frame of the user's own code: file, line, function and the source line."""
    lines = lines_of(text)
    for index in range(len(lines) - 1, -1, -1):
        found = _FRAME.match(_MARGIN.sub("", lines[index]))
        if found is not None and not _LIBRARY.search(found["file"]):
            source = _MARGIN.sub("", lines[index + 1]).strip() if index + 1 < len(lines) else ""
            frame = {"file": found["file"], "line": int(found["line"]), "function": found["function"], "source": source}
            return {"frame": frame}
        boxed = BOXED_FRAME.match(lines[index])
        if boxed is not None and not _LIBRARY.search(boxed["file"]):
            source = boxed_source(lines[index + 1 :])
            return {"frame": {**boxed.groupdict(), "line": int(boxed["line"]), "source": source}}
    return {}


def pins_memory(text: str) -> bool:
    """Whether the innermost frame of all asks for pinned memory, which is the host's."""
    lines = lines_of(text)
    last = max((index for index, line in enumerate(lines) if _FRAME.match(line)), default=None)
    return last is not None and any("pin_memory" in line for line in lines[last : last + 2])


def first_line(text: str) -> str:
    """The first line that holds a word: torchrun begins with a ruled one."""
    return next((line.strip() for line in text.splitlines() if re.search(r"\w", line)), "")
