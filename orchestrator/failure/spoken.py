"""Whose words a message holds: the error's own, those of an error it carries, or somebody else's that it quotes.

An error of the card's memory begins with its words, after the name of its class or what a wrapper put before it. The same
words further on are a quotation: of yesterday's run, of a server's answer, of a file's name. Pure text.
"""

from __future__ import annotations

import re

# What may stand before an error's own words: C++'s `what():`, class names, a library's or an operator's name, a place.
_CLASS = r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Failed|OutOfMemory)(?:\([\w.]+\))?"
HEAD = rf"\A\s*(?:what\(\):\s+)?(?:{_CLASS}: ?)*"

# An exception of these speaks of another process, or of what no longer matters, whatever words it holds.
ELSEWHERE = (
    r"Connect\w*(Error|Refused|Reset|Timeout)|Timeout|HTTP|Http|Rpc|(^|\.)API(Status|Connection|Response)?Error|CommError"
    r"|InternalServer|ServerError|ClientError|CalledProcessError|Warning$|BrokenPipe|BrokenProcessPool|DistNetworkError"
    r"|DistStoreError|ChildFailedError|SignalException"
)

# A wrapper of the same process says what it did and failed in, then the whole text: `step 41 failed: CUDA out of memory. ...`
_WRAPPED = re.compile(
    rf"{HEAD}(?P<before>[^'\"`:;\n]{{1,80}}\b(?:failed|raised|error)(?: (?:with|on) [\w: ]{{1,20}})?): (?:{_CLASS}: ?)?"
    r"(?P<own>(?:CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate [^\n]*GPU \d(?s:.*))"
)
_QUOTES = re.compile(
    r"(?i)\b(last|yesterday|previous\w*|earlier|before|old|ago|note|was|were|saw|seen|said|says|run \w+|resum\w*|https?"
    r"|requests?|server|service|worker|peer|remote|rank|node|host|process|child|ssh)\b|/"
)

# A process, a thread or a compiler hands on the error of another part of the same job, with its traceback or its line.
_CARRIES = re.compile(
    rf"(?m)^[ \t]*(?:{_CLASS}: )?(Caught \w+ in |-- Process \d+ terminated with the following error|backend='\w+' raised|ray::\S+"
    r"|traceback\s*: Traceback)"
)
_RAISED = re.compile(
    r"^\s*(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failed|Exit)\w*)(?::\s?(?P<text>.*))?$"
)


def own_words(message: str) -> str:
    """The message without what a wrapper of the same process put before an allocator's whole text."""
    found = _WRAPPED.match(message)
    if found is None or _QUOTES.search(found["before"]):
        return message
    return found["own"]


def carries(kind: str, message: str) -> bool:
    """Whether a message hands on the error of another part of the same job."""
    return kind.rpartition(".")[2] == "RemoteTraceback" or _CARRIES.search(message) is not None


def carried(kind: str, message: str) -> tuple[str, str] | None:
    """Class and text of the error that a message hands on; None where it hands on none."""
    if not carries(kind, message):
        return None
    lines = message.splitlines()
    start = next((at for at, line in enumerate(lines) if _CARRIES.match(line)), 0)
    raised = [(at, found) for at, line in enumerate(lines) if at > start and (found := _RAISED.match(line))]
    if not raised:
        return None
    at, found = raised[-1]
    return found["kind"], "\n".join([found["text"] or "", *lines[at + 1 :]])
