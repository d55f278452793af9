"""Whose words a message holds: the error's own, those of an error it carries, or somebody else's that it quotes.

An error of the card's memory begins with its words, and one of the system's with its number, after the name of its class or
what a wrapper put before it. The same further on is a quotation: of yesterday's run, of a server's answer, of a file's name.
Pure text.
"""

from __future__ import annotations

import re

from orchestrator.failure.coats import lines_of

# What may stand before an error's own words: C++'s `what():`, class names, a library's or an operator's name, a place.
_CLASS = r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Failed|OutOfMemory)(?:\([\w.]+\))?"
HEAD = rf"\A\s*(?:what\(\):\s+)?(?:{_CLASS}(?:: ?|\(['\"]))*"

# An exception of these speaks of another process, or of what no longer matters, whatever words it holds.
_ANSWERED = (  # by another machine
    r"Connect\w*(Error|Refused|Reset|Timeout)|Timeout|HTTP|Http|Rpc|(^|\.)API(Status|Connection|Response)?Error|CommError"
    r"|InternalServer|ServerError|ClientError"
)
ELSEWHERE = (
    rf"{_ANSWERED}|CalledProcessError|Warning$|BrokenPipe|BrokenProcessPool|DistNetworkError|DistStoreError|ChildFailedError"
    r"|SignalException"
)

# A wrapper of the same job says which part of it failed, or what it did, then the whole text:
# `worker 3 failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate ...`
_WRAPPED = re.compile(
    rf"\A(?P<before>[^'\"`\n]{{1,160}}?(?:: |\] |\braised ))(?:(?P<kind>{_CLASS})(?:: ?|\(['\"]))*"
    r"(?P<own>(?:CUDA|HIP|XPU|NPU) (?:out of memory\. Tried to allocate [^\n]*GPU \d|(?P<short>out of memory\.|error: out of memory\s*$))(?s:.*))",
    re.MULTILINE,
)
_PART = r"(?:worker|rank|process|child|actor|replica|device|gpu|stage|thread|shard|epoch|batch|step|trial) ?#?\d+"
_START = rf"\A\s*(?:{_CLASS}: ?)*"
_FAILED = re.compile(  # a part and what became of it, or the parts alone: `[rank 3] step 41: `; two words make a kind of error
    rf"(?i)\b(fail(s|ed|ure)|raised|crashed|died|aborted)\b|({_START}|[:\]] )(\w+ ){{0,2}}(error|exception)\b"
    rf"|{_START}(\[\w+\] )*\W*{_PART}([\]),:]* (on |of |in )?[\[(]?{_PART})*\W*\Z"
)
_QUOTES = re.compile(  # another day, job or machine; a path; what was expected, did not happen, or is looked up
    r"(?i)\b(last|yesterday|previous\w*|earlier|before|old|ago|note|was|were|saw|seen|said|says|read|replied|known|found"
    r"|(in|from|of|see) (\w+ )?logs?|jobs?|run \w+|resum\w*|again|https?|requests?|server|service|peer|remote|node|host|client"
    r"|ssh|not?|never|none|without|unknown|cannot|\w+n't|expect\w*|should|match\w*|handlers?|pattern\w*|tests?|tables?|parse\w*"
    r"|lines?)\b|/|\d{4}-\d\d-\d\d"
)
_OWN_PLACE = re.compile(
    r"\b(?:in|at) /[^\s:]+\.py(?::\d+)?\b|\bon (?:this |the )?(?:node|host)(?= (?:failed|raised|died|crashed)\b)"
)
# Of a program alone, whatever words of a machine's they hold: they tell what a test saw, or a value that was not understood.
ONLY_TELLS = re.compile(
    r"(^|\.)(Assertion|Key|Value|Type|Index|Lookup|Attribute|Name|Syntax|NotImplemented)Error$"
    r"|^re\.error$|PatternError$|JSONDecodeError$|^_pytest\.|^unittest\."
)
_NO_WRAPPER = re.compile(
    rf"{ELSEWHERE}|RankLost|WayLost|{ONLY_TELLS.pattern}"
)  # nobody hands an error on in one of these

OF_SYSTEM = r"(?:OS|IO|Environment)Error"  # how a class of a system's errors ends
_NUMBERED = re.compile(
    rf"\A(?P<before>|[^'\"`\n]{{1,160}}?(?:: |\] |\braised ))(?P<kind>[\w.]*{OF_SYSTEM}): (?P<own>\[Errno \d+\](?s:.*))"
)
_RUST = re.compile(r"\(os error (?P<number>\d{1,4})\)\W*\Z")
_BY_SYSTEM = re.compile(rf"(?:\A|: )(?:I/?O [Ee]rror|[\w.]*{OF_SYSTEM})\Z")
_PATH = re.compile(r"(?<![\w/])[~.]{0,2}/[^\s:]+|\bI/O\b")

# Before a machine's own words (a full disk, no memory, a kill, a lost card), which stand anywhere in an error's sentence: it
# reports another day's, or what another said. What a system's error says, and what failed or could not be done, is its own.
_OF_ANOTHER = re.compile(
    r"(?i)(?<![\w/.-])(yesterday|last (night|week|month|time|lines?|words?)|ago|(old|previous|earlier) (run|job|log)s?|https?|notes? (of|says?)|replied|answered|sa(ys?|id|w)|seen"
    r"|(\w+'s|from the|see the) (logs?|table)|logs? (has|holds|ends|shows)|handlers?|patterns?|tests? \w+ed|of \d{4}-\d\d-\d\d)\b(?![/.]\w)"
    r"|\b(was|were|read|found|known|expect\w*)\W*\Z"
)
_DID_NOT = re.compile(
    r"(?i)\b(fail(s|ed|ure)?|crashed|died|aborted|cannot|can't|(could|did|was) not|couldn't|unable to)\b"
)
_REPORTED = re.compile(
    r"(?i)\b(yesterday|replied|answered|sa(ys?|id|w)|ago|last (night|week|month|time)|of \d{4}-\d\d-\d\d)\b"
)
_NAMED = re.compile(rf"\b{_CLASS}|\[Errno \d+\]")
_SENTENCE = re.compile(r"(?<!:)\n")
_MOST_BEFORE = 400  # characters

# A process, a thread or a compiler hands on the error of another part of the same job, with its traceback or its line.
_CARRIES = re.compile(
    rf"(?m)^[ \t]*(?:{_CLASS}: )?(Caught \w+ in |-- Process \d+ terminated with the following error|backend='\w+' raised"
    r"|(?:The actor died because of an error raised in its creation task, )?ray::\S+|\[Rank [\d,]+ Error Snippet\]:"
    r"|On WorkerInfo\(id=\d+, name=[^)\n]*\):|traceback\s*: Traceback)"
)
_RAISED = re.compile(
    r"^\s*(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failed|Exit)\w*)(?::\s?(?P<text>.*))?$"
)


def own_words(kind: str, message: str) -> tuple[str, str]:
    """Class and message without what a wrapper of the same job put before an allocator's whole text, or before a class and
    what the driver or a cut text says; a system's error, a library's in Rust too, as one that begins with its number."""
    if (numbered := _numbered(kind, message)) is not None:
        return numbered
    found = None if _NO_WRAPPER.search(kind) else _WRAPPED.match(message)
    if found is None or (found["short"] and not found["kind"]):
        return kind, message
    return (found["kind"] or kind, found["own"]) if _tells_failure(found["before"]) else (kind, message)


def _tells_failure(before: str) -> bool:
    """Of a part of this job, and quotes nothing."""
    own = _OWN_PLACE.sub("", before)
    return _FAILED.search(own) is not None and _QUOTES.search(own) is None


def announces_quotation(kind: str, message: str) -> bool:
    """Whether what is printed below a message is none of a part's that failed, but quoted."""
    return message.rstrip().endswith(":") and (_NO_WRAPPER.search(kind) is not None or not _tells_failure(message))


def _numbered(kind: str, message: str) -> tuple[str, str] | None:
    """None where an error begins with its number as it is, has none, or only quotes one."""
    if _NO_WRAPPER.search(kind):
        return None
    if (rust := _RUST.search(message)) is not None:
        before = message[: rust.start()].rpartition(": ")[0]
        by_system = re.search(rf"{OF_SYSTEM}$", kind) or _BY_SYSTEM.search(before)
        quotes = _QUOTES.search(_PATH.sub("", before))
        return ("OSError", f"[Errno {rust['number']}] {message}") if by_system and not quotes else None
    found = _NUMBERED.match(message)
    if found is None:
        return None
    has_class_alone = re.fullmatch(rf"(?:{_CLASS}: ?)*", found["before"])
    is_own = has_class_alone or _tells_failure(found["before"])
    return (found["kind"], found["own"]) if is_own else None


def is_of_another(kind: str, before: str) -> bool:
    """Whether a machine's words in an error of class `kind` are those of another day, job or machine, by what stands before them."""
    if kind.endswith("CalledProcessError"):  # before it stands a command of this job's own
        return False
    if re.search(_ANSWERED, kind):
        return True
    sentence = _NAMED.sub("", _PATH.sub("", _OWN_PLACE.sub("", _SENTENCE.split(before[-_MOST_BEFORE:])[-1])))
    is_own = re.search(rf"{OF_SYSTEM}$", kind) or _DID_NOT.search(sentence)
    if _REPORTED.search(sentence):
        return True
    return not is_own and _OF_ANOTHER.search(sentence) is not None


def carries(kind: str, message: str) -> bool:
    """Whether a message hands on the error of another part of the same job."""
    return kind.endswith("RemoteTraceback") or _CARRIES.search(message) is not None


def carried(kind: str, message: str) -> list[tuple[str, str]]:
    """Class and text of each error that a message hands on, the last one first: of one part, or one of several."""
    if not carries(kind, message):
        return []
    lines = lines_of(message)
    start = next((at for at, line in enumerate(lines) if _CARRIES.match(line)), 0)
    raised = [(at, found) for at, line in enumerate(lines) if at > start and (found := _RAISED.match(line))]
    ends = [*(at for at, _ in raised[1:]), len(lines)]
    told = [
        (found["kind"], "\n".join([found["text"] or "", *lines[at + 1 : end]]))
        for (at, found), end in zip(raised, ends, strict=False)
    ]
    return told[::-1]
