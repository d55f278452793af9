"""Words of hosts, jobs and people on their way to a terminal: none of them may move the cursor or hide a line.

Colours are ours alone: of all escape sequences only those that `click.style` writes get through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from orchestrator.actions.log_text import inert

LONGEST_WORD = 200  # characters of one that an error repeats whole
SHOWN_OF_WORD = 60

_OURS = re.compile(r"(\x1b\[(?:0|1|2|3[0-7]|9[0-7])m|\n)")
_BREAKS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_HALVES = re.compile("[\ud800-\udfff]")  # bytes of a file name that were not UTF-8
_BEYOND_ASCII = re.compile("[\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]")


def shown(text: str) -> str:
    """The text as a terminal may have it, its line breaks and our colours kept."""
    parts = _OURS.split(text)
    parts[::2] = [_HALVES.sub("\N{REPLACEMENT CHARACTER}", inert(part)) for part in parts[::2]]
    return "".join(parts)


def with_names_in_line(message: str, words: Iterable[str]) -> str:
    """A message that may hold parts of these words: their line breaks and controls written as escapes.

    A message's own line breaks say something, and those of a name it repeats only tear it.
    """
    parts = {part for word in words for part in re.split("[=:/]", word) if _BREAKS.search(part) and not part.isspace()}
    for part in sorted(parts, key=len, reverse=True):
        message = message.replace(part, _BREAKS.sub(lambda match: repr(match.group())[1:-1], part))
    return message


def with_long_words_cut(message: str, words: Iterable[str]) -> str:
    """The same with each of these words, or part of one, that would fill a screen told by its beginning and its length."""
    parts = {part for word in words for part in (word, *re.split("[=:/]", word)) if len(part) > LONGEST_WORD}
    for part in sorted(parts, key=len, reverse=True):
        message = message.replace(part, f"{part[:SHOWN_OF_WORD]}... ({len(part):,} characters)")
    return message


def json_text(body: Any, *, indent: int | None = None) -> str:
    """JSON in which nothing acts on a terminal and nothing is lost: such characters are written as escapes."""
    text = json.dumps(body, indent=indent, ensure_ascii=False)
    return _BEYOND_ASCII.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
