"""What stands around a traceback in a log: prefixes, labels, colours, a drawn box, the margins of an exception group. Pure text."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What a terminal shows nothing of: a sequence of either width, one sign by itself, a string (a title, a link, a picture) to its
# end. One that was cut takes its line, but no traceback that begins in it; eight-bit ones without an end are wrong letters.
_BEGINS = r"(?:  \+ Exception Group |[╭┌+][-─ ]*)?Traceback \(most recent"
_SEQUENCE = r"[0-?]*[ -/]*[@-~]"
_ENDED_STRING = r"[^\x07\x1b\x90\x98\x9c-\x9f\n]*(?:\x07|\x1b\\|\x9c)"  # no other begins in it: each sign is read once
_SWALLOWED = re.compile(  # one set of signs first, by which a text without any is passed over five times as fast
    r"[\x00-\x08\x0e-\x1b\x7f\x90\x98\x9b\x9d-\x9f\ufeff]"
    rf"(?:(?<=\x1b)(?:\[{_SEQUENCE}|k{_ENDED_STRING}|[\]PX^_](?:{_ENDED_STRING}|(?:(?!{_BEGINS})[^\x07\x1b\x9c\n])*)|[ -/]*[0-~])"
    rf"|(?<=\x9b){_SEQUENCE}|(?<=[\x90\x98\x9d-\x9f]){_ENDED_STRING}|(?<=[\x00-\x08\x0e-\x1a\x7f\ufeff]))"
)
_CTIME = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}"
_PREFIX = re.compile(
    r"^(?:\[(?:rank|default)\d+\]:\s?|\[\d+\]:\s?|\((?=[^()]*pid=\d)[^()]*\)\s"
    rf"|(?P<time>{_CTIME})?(?:(?:\[[^\[\]\s]{{1,80}}\]){{1,2}}|(?(time)|(?!)))<std(?:err|out)>:\s?)"
    r"(?:\[(?:rank|default)\d+\]:\s?){0,2}"  # a launcher's for the process, torch's own for a rank's last error
)
_DATED = r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?[+-]\d\d:?\d\d)"
_JOURNAL = re.compile(rf"^{_DATED} \S+ (?:kernel: (?:\[[ \d.]+\] )?|(?P<process>[\w./-]+\[\d+\]): ?)")
_CONTAINER = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z (?:(?:stdout|stderr) F )?")
# Of whole lines as launchers label them, by task, rank, host or pod: a name with a number in it before `:` or `  |`, a word
# and a number before `:`, or one of both in brackets; no date and no clock, though one may stand before it or behind it;
# and a blank behind (`[trainer0]:` needs none), which an empty line may have lost: `grep -r` puts none behind a file's name.
_DATE = r"(?:(?:\[?(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) )?"
_NO_CLOCK = r"(?!\d{4}-\d\d|\d{7,}\b|\d+\.\d+\]|\d+:\d)"
# What a program counts itself is no launcher's, and neither is a day.
_WORD = r"(?i:rank|task|node|host|worker|process|proc|gpu|device|replica|pod|container|trainer)"
_NO_COUNT = r"(?!(?i:step|epoch|iter\w*|batch|sample|prompt|line|row|doc|run|log|test|case|id|v|yesterday|today)[_ ]?\d+(?![\w.-]))"
_LABEL = re.compile(
    rf"^{_DATE} {{0,5}}(?P<label>{_NO_CLOCK}{_NO_COUNT}(?:(?=[A-Za-z._-]*\d)[A-Za-z0-9][\w.-]{{0,63}}(?=:|(?<=[A-Za-z]\d)\t|(?<=[A-Za-z]\d\d)\t| {{1,64}}\|)|{_WORD} \d{{1,6}}(?=:))"
    rf"|\[{_NO_CLOCK}{_NO_COUNT}(?:(?=[^\]\d]*\d)|(?=pod/))(?:{_WORD}:? )?[A-Za-z0-9][\w./:-]{{0,95}}\])(?::| {{1,64}}\|)?(?: {_DATE}|\t|$|(?<=\]:))"
)
_ENDED = re.compile(
    r"^(?:srun: error: \S+: tasks? (?P<tasks>[\d,-]+): |pdsh@\S+: (?P<host>\S+): (?:ssh |mcmd )?exited with exit code )"
    r"|^(?P<service>\S+) exited with code [1-9]"
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
_GROUP = f"  + Exception Group {_HEADER}"


def as_shown(text: str) -> str:
    """What a terminal would show of it: no colours, titles, modes, bells."""
    return _SWALLOWED.sub("", text)


def lines_of(text: str) -> list[str]:
    """As a terminal breaks them; `str.splitlines` breaks a line of source at a form feed or U+0085 too."""
    lines = re.split(r"\r\n|\n|\r", text)
    return lines[:-1] if lines[-1] == "" else lines


def labels_of(lines: Sequence[str]) -> frozenset[str]:
    """Labels that stand before each line of a traceback: before its first one, and before the frame that comes next."""
    if not any("Traceback (" in line and not line.startswith("Traceback") for line in lines):
        return frozenset()
    begun: set[tuple[str, str]] = set()
    found: set[str] = set()
    for line in lines:
        if not begun and "Traceback (" not in line:
            continue
        dated = _CONTAINER.match(line)
        label, rest = _labelled(line[dated.end() :] if dated is not None else line)
        mark, rest = _marked(rest)
        if rest.startswith((_HEADER, _GROUP)) or is_box(rest):
            begun.add((label, mark))
        elif (label, mark) in begun:
            begun.remove((label, mark))
            if rest.lstrip(" |").startswith('File "') or rest.startswith(BOX_SIDES):
                found.add(label)
    return frozenset(found - {""})


def told_labels(lines: Sequence[str], labels: frozenset[str]) -> frozenset[str]:
    """Those of `labels` whose launcher says that they ended: theirs are processes' for sure, and no words of one job's."""
    told = [found for line in lines if (found := _ENDED.match(line))] if labels else []
    names = {found["host"] or found["service"] for found in told}
    has_tasks = any(found["tasks"] for found in told)
    return frozenset(label for label in labels if label in names or (has_tasks and label.isdecimal()))


def _labelled(line: str) -> tuple[str, str]:
    found = _LABEL.match(line)
    return ("", line) if found is None else (found["label"], line[found.end() :])


def split_prefix(line: str, labels: frozenset[str] = frozenset()) -> tuple[str, str, str]:
    """A label, what else tells a line's process from others, each "" where there is none; the line without both and its date."""
    journal = _JOURNAL.match(line)
    if journal is not None:
        mark, own = _marked(line[journal.end() :])
        return "", f"{journal['process'] or ''} {mark}".strip(), own
    dated = _CONTAINER.match(line)
    rest = line[dated.end() :] if dated is not None else line
    mark, own = _marked(rest)
    if mark or not labels:
        return "", mark, own
    label, own = _labelled(rest)
    return (label, *_marked(own)) if label in labels else ("", "", rest)


def _marked(line: str) -> tuple[str, str]:
    found = _PREFIX.match(line)
    if found is None:
        return "", line
    return found[0].removeprefix(found["time"] or "").strip(), line[found.end() :]


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
