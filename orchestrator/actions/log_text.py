"""Raw log bytes to lines a person can read: a small terminal that only knows text.

Handles what training programs write: carriage returns (a progress bar is one live line), cursor-up
of nested bars, colours and other escape sequences (dropped), bytes that are not UTF-8 (replaced),
NUL and form feed, CRLF, and lines of a megabyte (cut with the number of characters left out). The
only line break is the newline byte, so the number of lines never depends on what is in them.
Reads nothing itself; the bytes come from the store.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from orchestrator.redact import redact_lines

LONGEST_LINE = 2000  # characters shown of one line

_PLAIN = bytes(range(0x20, 0x7F))  # a line of these alone, as most are, is shown as it stands

# CSI, OSC (ended by BEL or ST), other two-character escapes, a lone escape, and the controls that move.
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[P^_X][^\x1b]*(?:\x1b\\)?|\x1b[ -/]*[0-~]?|\r|\n"
)
_CURSOR_UP = re.compile(r"\x1b\[(\d*)A")
_STEERS = re.compile(r"\r|\x1b\[\d*[AK]")  # what _emulate obeys; every other sequence is just left out
_ERASE_LINE = re.compile(r"\x1b\[([012]?)K")  # 0 or none: from the cursor on; 1: up to it; 2: all
_RANK = re.compile(r"^\[?(?:rank|default)\s?(\d+)\]?[:\s]\s*")
# The first words of trouble; also what the log view's "next error" looks for.
_ERROR_FIRST = r"Traceback \(most recent call last\)|[\w.]*(?:Error|Exception)\b|\s*Killed\b"
_ERROR_WITHIN = r"CUDA out of memory|Segmentation fault|FATAL(?<!\wFATAL)\b"
ERRORS = f"^(?:{_ERROR_FIRST})|{_ERROR_WITHIN}"
# What a carriage return may not wipe away: an error printed between two states of a bar.
# It begins with a word of trouble; a bar that counts failures has the word somewhere in every state.
_TROUBLE_FIRST = re.compile(rf"{_ERROR_FIRST}|\s*[\w.]*Warning\b|\s*\[?(?:ERROR|WARNING|CRITICAL)\b")
_TROUBLE_WITHIN = re.compile(_ERROR_WITHIN)
_ERROR = re.compile(ERRORS)

# C0, DEL, C1, zero-width marks that hide text, and bidirectional overrides that reorder it.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


@dataclass(frozen=True)
class LogLine:
    start: int  # byte offset of the line in the file
    text: str
    num_times: int = 1  # the same line, said by several ranks in a row

    @property
    def is_error(self) -> bool:
        return bool(_ERROR.search(self.text))


def inert(text: str) -> str:
    """The text with every character that a terminal would obey replaced by a visible one."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda match: " " if match.group() in "\t\n\r" else "\N{REPLACEMENT CHARACTER}", text)


def clean_lines(raw: bytes, start: int = 0) -> list[LogLine]:
    """The lines of a piece of a log that begins at byte `start`, which is the beginning of a line."""
    pieces = _pieces(raw)
    starts = list(accumulate((len(piece) + 1 for piece in pieces), initial=start))
    sheet = _written(pieces)
    return [LogLine(starts[number], text) for number, text in zip(sheet.pieces, sheet.texts, strict=True)]


def shown_lines(raw: bytes, start: int = 0) -> list[LogLine]:
    """The same without what has the shape of a secret."""
    lines = clean_lines(raw, start)
    texts = redact_lines([line.text for line in lines])
    return [LogLine(line.start, text) for line, text in zip(lines, texts, strict=True)]


def clean_texts(raw: bytes) -> list[str]:
    """The texts of `clean_lines` alone, which costs a third of it."""
    return _written(_pieces(raw)).texts


@dataclass(frozen=True)
class _Sheet:
    """Rows as they are written; of each the number of the piece that began it."""

    texts: list[str] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)

    def put(self, row: int, text: str, piece: int) -> None:
        if row < len(self.texts):
            self.texts[row] = text
        else:
            self.texts.append(text)
            self.pieces.append(piece)


def _pieces(raw: bytes) -> list[bytes]:
    """What lies between newlines; the newline at the end begins nothing."""
    pieces = raw.split(b"\n")
    if pieces[-1] == b"":
        pieces.pop()
    return pieces


def _written(pieces: Sequence[bytes]) -> _Sheet:
    sheet, row = _Sheet(), 0
    for number, piece in enumerate(pieces):
        if len(piece) <= LONGEST_LINE and not piece.translate(None, _PLAIN):
            sheet.put(row, piece.decode("ascii"), number)
        else:
            text = piece.decode("utf-8", errors="replace").rstrip("\r")
            if _STEERS.search(text):
                row = _emulate(sheet, text, number, row)
            else:
                _put_steady(sheet, text, number, row)
        row += 1
    return sheet


def _emulate(sheet: _Sheet, text: str, piece: int, row: int) -> int:
    """One line with escapes or carriage returns, written at `row`; returns the row it ended on.

    Cursor-up rewrites lines already made; what follows a carriage return overwrites what stood before it, as
    every state of a bar does. A word of trouble is never overwritten, and wears nothing of the bar before it.
    """
    current, is_returned = "", False
    for token, is_sequence in _tokens(text):
        if not is_sequence:
            is_whole = is_returned and _is_trouble(token)
            current = token if is_whole else token + current[len(token) :] if is_returned else current + token
            is_returned = False
        elif token == "\r":
            if _is_trouble(current):
                sheet.put(row, _shown(current), piece)
                row, current = row + 1, ""
            is_returned = True
        elif erased := _ERASE_LINE.fullmatch(token):
            # Everything stands behind a cursor that has returned, and before one that has not.
            current = "" if erased[1] == "2" or is_returned == (erased[1] != "1") else current
        elif up := _CURSOR_UP.fullmatch(token):
            if current.strip():
                sheet.put(row, _shown(current), piece)
            row, current, is_returned = max(0, row - int(up.group(1) or 1)), "", False
    if current or row >= len(sheet.texts):
        sheet.put(row, _shown(current.rstrip()), piece)
    return row


def _put_steady(sheet: _Sheet, text: str, piece: int, row: int) -> None:
    """One line that moves nothing, its colours left out: what _emulate would make of it."""
    if "\x1b" not in text:
        sheet.put(row, _shown(text), piece)
        return
    current = _SEQUENCE.sub("", text)
    if current or row >= len(sheet.texts):
        sheet.put(row, _shown(current.rstrip()), piece)


def _is_trouble(text: str) -> bool:
    return bool(_TROUBLE_FIRST.match(text) or _TROUBLE_WITHIN.search(text))


def _tokens(text: str) -> list[tuple[str, bool]]:
    """Text and sequences in their order."""
    tokens, position = [], 0
    for match in _SEQUENCE.finditer(text):
        if match.start() > position:
            tokens.append((text[position : match.start()], False))
        tokens.append((match.group(), True))
        position = match.end()
    if position < len(text):
        tokens.append((text[position:], False))
    return tokens


def _shown(text: str) -> str:
    """Inert, tabs as blanks, at most LONGEST_LINE characters."""
    hidden = len(text) - LONGEST_LINE
    safe = inert(text[:LONGEST_LINE].rstrip("\r").expandtabs(4))
    return f"{safe}…(+{hidden:,})" if hidden > 0 else safe


def group_ranks(lines: Sequence[LogLine]) -> list[LogLine]:
    """Neighbouring lines that differ in their rank alone become one, with how often it was said."""
    grouped: list[LogLine] = []
    last_body: str | None = None
    for line in lines:
        body, num_prefixes = _RANK.subn("", line.text)
        if num_prefixes and body and body == last_body:
            newest = grouped[-1]
            grouped[-1] = LogLine(newest.start, newest.text, newest.num_times + 1)
        else:
            grouped.append(line)
        last_body = body if num_prefixes else None
    return grouped


def cut_to_lines(raw: bytes, start: int, *, at_file_start: bool) -> tuple[bytes, int]:
    """Drops the torn first line of a piece read from the middle of a file, unless it is all there is."""
    if at_file_start:
        return raw, start
    newline = raw.find(b"\n")
    if newline < 0 or newline == len(raw) - 1:
        return raw, start
    return raw[newline + 1 :], start + newline + 1
