"""Text before it is YAML: encoding, characters, places in it, and what a plain word means.

`1e-4` and `1_000` are numbers, `no`, `on` and `12:30` are text, `010` is ten (YAML 1.2). It parses nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import one_line

MAX_BYTES = 1024 * 1024

BOOL_WORDS = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
NULL_WORDS = re.compile(r"(?:~|null|Null|NULL|)\Z")
INT_WORDS = re.compile(r"(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
FLOAT_WORDS = re.compile(
    r"(?:[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Position:
    """Line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Fault:
    """`path` is dotted and empty where the fault is in the text as a whole."""

    position: Position
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.position}: {self.path + ': ' if self.path else ''}{self.message}"


class YamlFaults(ValueError):
    """Every fault found in one text, in its order."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(one_line(str(fault)) for fault in faults))
        self.faults = faults


@dataclass(frozen=True)
class Document:
    """The value, the position of each value and of each key, by path."""

    file: str
    value: Any
    values: dict[Path, Position] = field(default_factory=dict)
    keys: dict[Path, Position] = field(default_factory=dict)

    def locate(self, path: Path) -> Position:
        """Where the value at `path` stands; for an absent one, where its nearest parent stands."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.values:
                return self.values[path[:length]]
        return Position(self.file, 1, 1)


def decode(content: bytes, file: str) -> str:
    if len(content) > MAX_BYTES:
        raise fault(file, 1, 1, f"the file has {len(content)} bytes; at most {MAX_BYTES} are read")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or content[:2].count(0) == 1:
        raise fault(file, 1, 1, "the file is UTF-16; save it as UTF-8")
    if content.startswith(b"\xef\xbb\xbf"):
        raise fault(file, 1, 1, "the file starts with a byte order mark; save it as UTF-8 without one")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, len(before.rpartition(b"\n")[2].decode("utf-8")) + 1
        raise fault(
            file, line, column, f"byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error


_UNPRINTABLE = re.compile("[^\x09\x0a\x0d\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def check_characters(text: str, file: str) -> None:
    found = _UNPRINTABLE.search(text) or re.search("\r", text)
    if found is None:
        return
    before = text[: found.start()]
    line, column = before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1
    if found[0] == "\r":
        raise fault(file, line, column, "the line ends in CR; save the file with LF line ends")
    raise fault(
        file, line, column, f"the character U+{ord(found[0]):04X} is not allowed; write it as an escape in quotes"
    )


def fault(file: str, line: int, column: int, message: str) -> YamlFaults:
    return YamlFaults([Fault(Position(file, line, column), "", message)])


def scalar(text: str) -> Any:
    """What a plain (unquoted) scalar means: a number, true or false, null, else the text itself."""
    if NULL_WORDS.match(text):
        return None
    if BOOL_WORDS.match(text):
        return text.lower() == "true"
    if INT_WORDS.match(text):
        return read_int(text) if len(text) <= LONGEST_NUMBER else text
    if FLOAT_WORDS.match(text):
        return read_float(text)
    return text


LONGEST_NUMBER = 400  # digits; a longer one is no number that a field takes, and is refused as text


def read_int(text: str) -> int:
    digits = text.replace("_", "")
    if digits.startswith("0o"):
        return int(digits[2:], 8)
    return int(digits, 16) if digits.startswith("0x") else int(digits, 10)


def read_float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
