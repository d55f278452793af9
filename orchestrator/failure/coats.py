"""What stands around a traceback in a log: prefixes, labels, colours, a drawn box, the margins of an exception group. Pure text."""

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
# Of whole lines as `srun -l`, pdsh and DeepSpeed's runner label them, by task, rank or host: with a number, no class, and a
# blank behind it, which an empty line may have lost; `grep -r` puts none between a file's name and its line.
_LABEL = re.compile(r"^ {0,5}(?P<label>(?!\d{4}-)(?=[a-z.-]*\d)[a-z0-9][\w.-]{0,63}):(?: |$)")
_ENDED = re.compile(
    r"^(?:srun: error: \S+: tasks? (?P<tasks>[\d,-]+): |pdsh@\S+: (?P<host>\S+): (?:ssh |mcmd )?exited with exit code )"
)
# With signs of boxes, and as rich draws it where the stream takes ASCII alone.
_BOX = re.compile(
    r"^(?:[╭┌][─ ]*Traceback \(most recent call last\)[─ ]*[╮┐]|\+[- ]*Traceback \(most recent call last\)[- ]*\+)$"
)
BOX_SIDES, BOX_ENDS = ("│", "|"), ("╰", "└", "+-")
BOXED_FRAME = re.compile(r"^[│|] (?P<file>[^:│|]+\.py):(?P<line>\d{1,9}) in (?P<function>\S+) *[│|]$")
_BOXED_SOURCE = re.compile(r"^[│|] (?:❱|\\u2771|[?>]) +\d+ (?P<source>.*?) *[│|]$")
_INSIDE = re.compile(r"^ +\| ?")
_BETWEEN = re.compile(r"^ +\+")
_HEADER = "Traceback (most recent call last):"


def without_colours(text: str) -> str:
    return _ESCAPE.sub("", text)


def lines_of(text: str) -> list[str]:
    """As a terminal breaks them; `str.splitlines` breaks a line of source at a form feed or U+0085 too."""
    lines = re.split(r"\r\n|\n|\r", text)
    return lines[:-1] if lines[-1] == "" else lines


def labels_of(lines: Sequence[str]) -> frozenset[str]:
    """Labels that stand before each line of a traceback: before its first one, and before the frame that comes next."""
    if not any("Traceback (" in line and not line.startswith("Traceback") for line in lines):
        return frozenset()
    begun: set[str] = set()
    found: set[str] = set()
    for line in lines:
        dated = _CONTAINER.match(line)
        label, rest = _labelled(line[dated.end() :] if dated is not None else line)
        if rest.startswith(_HEADER) or is_box(rest):
            begun.add(label)
        elif label in begun:
            begun.remove(label)
            if rest.lstrip().startswith('File "') or rest.startswith(BOX_SIDES):
                found.add(label)
    return frozenset(found - {""})


def told_labels(lines: Sequence[str], labels: frozenset[str]) -> frozenset[str]:
    """Those of `labels` whose launcher says that they ended: theirs are processes' for sure, and no words of one job's."""
    told = [found for line in lines if (found := _ENDED.match(line))] if labels else []
    hosts = {found["host"] for found in told}
    has_tasks = any(found["tasks"] for found in told)
    return frozenset(label for label in labels if label in hosts or (has_tasks and label.isdecimal()))


def _labelled(line: str) -> tuple[str, str]:
    found = _LABEL.match(line)
    return ("", line) if found is None else (found["label"], line[found.end() :])


def split_prefix(line: str, labels: frozenset[str] = frozenset()) -> tuple[str, str]:
    """What tells a line's process from others, "" where nothing does; and the line without it and without its date."""
    journal = _JOURNAL.match(line)
    if journal is not None:
        return journal["process"] or "", line[journal.end() :]
    dated = _CONTAINER.match(line)
    rest = line[dated.end() :] if dated is not None else line
    found = _PREFIX.match(rest)
    if found is not None:
        return found[0].strip(), rest[found.end() :]
    label, own = _labelled(rest) if labels else ("", rest)
    return (label, own) if label in labels else ("", rest)


def is_box(line: str) -> bool:
    """Whether a drawn traceback begins here: at the start of its line, so that no quotation does."""
    return _BOX.match(line) is not None


def boxed_source(lines: Sequence[str]) -> str:
    """The line of source that a drawn frame points at."""
    for line in lines:
        if BOXED_FRAME.match(line) or not line.startswith(BOX_SIDES):
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
