"""What stands around a traceback in a log: prefixes, colours, a drawn box, the margins of an exception group. Pure text."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Of either width; a title or a link ends with a bell or a string's end, and at the end of its line where it was cut.
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x9b[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]+[0-~]"
)
_PREFIX = re.compile(
    r"^(\[(?:rank|default)\d+\]:\s?|\[\d+,\d+\]<std(?:err|out)>:\s?|\[\d+\]:\s?|\([^()]*pid=\d+[^()]*\)\s)"
)
_DATED = r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?[+-]\d\d:?\d\d)"
_JOURNAL = re.compile(rf"^{_DATED} \S+ (?:kernel: (?:\[[ \d.]+\] )?|(?P<process>[\w./-]+\[\d+\]): ?)")
_CONTAINER = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z (?:(?:stdout|stderr) F )?")
_BOX = re.compile(r"^[╭┌][─ ]*Traceback \(most recent call last\)[─ ]*[╮┐]$")
BOXED_FRAME = re.compile(r"^│ (?P<file>[^:│]+\.py):(?P<line>\d{1,9}) in (?P<function>\S+) *│$")
_BOXED_SOURCE = re.compile(r"^│ ❱ +\d+ (?P<source>.*?) *│$")
_INSIDE = re.compile(r"^ +\| ?")
_BETWEEN = re.compile(r"^ +\+")
_HEADER = "Traceback (most recent call last):"


def without_colours(text: str) -> str:
    return _ESCAPE.sub("", text)


def split_prefix(line: str) -> tuple[str, str]:
    """What tells a line's process from others, "" where nothing does; and the line without it and without its date."""
    journal = _JOURNAL.match(line)
    if journal is not None:
        return journal["process"] or "", line[journal.end() :]
    dated = _CONTAINER.match(line)
    rest = line[dated.end() :] if dated is not None else line
    found = _PREFIX.match(rest)
    return (found[0].strip(), rest[found.end() :]) if found is not None else ("", rest)


def is_box(line: str) -> bool:
    """Whether a drawn traceback begins here: at the start of its line, so that no quotation does."""
    return _BOX.match(line) is not None


def boxed_source(lines: Sequence[str]) -> str:
    """The line of source that a drawn frame points at."""
    for line in lines:
        if BOXED_FRAME.match(line) or not line.startswith("│"):
            break
        if found := _BOXED_SOURCE.match(line):
            return found["source"].strip()
    return ""


def opened(lines: Sequence[str], at: int) -> tuple[int, list[str]]:
    """The line after the exception group that begins at `at`, and its lines as they would stand alone."""
    end, inside = at + 1, [_HEADER]
    while end < len(lines):
        if _BETWEEN.match(lines[end]):
            inside.append("")
        elif found := _INSIDE.match(lines[end]):
            inside.append(lines[end][found.end() :].removeprefix("Exception Group "))
        else:
            break
        end += 1
    return end, inside
