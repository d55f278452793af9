"""The one redactor: takes secrets out of text before it is stored or shown.

It knows secrets by their shape: tokens of well-known services, passwords inside addresses, values after a
telling name. What has no shape is hidden by value before it comes here: in what a job reports by its host
(`remote.hiding`), in what it prints where its log is read (`store.logs`). Raw logs of a job stay as they are
on disk, byte for byte; what is made out of them (failures, events, documents) passes through here.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from remote.hiding import HIDDEN

_TOKENS = re.compile(
    r"(?a)\b(?:hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}|AIza[\w-]{30,}|wandb_v1_\w{16,}|rpa_[A-Z0-9]{16,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_ADDRESS = re.compile(r"(?a)(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?P<user>[^\s/:@]*):(?P<password>[^\s/@]+)@")
_BEARER = re.compile(r"(?ai)\b(?P<word>bearer|basic)\s+[A-Za-z0-9+/=._~-]{12,}")
# `HF_TOKEN=x`, `"api_key": "x"`, `password: x`; a bare number or a word of the trade is no secret
_NAME = (
    r"[\w.-]*(?:password|passwd|passphrase|secret|api_?key|access_?key|private_?key|auth_?token"
    r"|(?<!mask_)(?<!pad_)(?<!eos_)token)"
)
_NAMED = re.compile(
    rf"(?ai)(?P<name>\b{_NAME}['\"]?\s*[=:]\s*['\"]?)(?P<value>(?=[^\s'\",;]*[A-Za-z])[^\s'\",;]{{8,}})"
)
_SETTING = re.compile(rf"(?i){_NAME}")
_WORD_OF_THE_TRADE = re.compile(r"[^A-Za-z]*|<.*>|\[.*\]")  # a number; `</s>`, `[MASK]`
# `stop_token: END`, `image_token: <img>`: where only the word `token` tells, the value must look drawn by lot.
_TOKEN = re.compile(r"(?i).*(?<!auth_)(?<!access_)(?<!api_)token")
_DRAWN = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[^\s<>|]{12,}")

# What every secret of those shapes holds, in small letters: a line without any of it need not be searched closely.
# One pattern each and no alternatives in front: what begins with plain letters is found ten times as fast.
_SIGNS = tuple(
    re.compile(f"(?a){sign}")
    for sign in (
        *(r"hf_\w{8}", r"gh[pousr]_\w{16}", r"github_pat_\w{16}", r"glpat-[\w-]{16}", r"sk-[\w-]{16}", r"xox[abprs]-"),
        *(r"akia\w{12}", r"aiza[\w-]{30}", r"wandb_v1_\w{16}", r"rpa_\w{16}", r"eyj[\w-]{10}"),
        *(r"://[^\s/:@]*:[^\s/@]+@", r"bearer\s", r"basic\s"),
        *(rf"{word}['\"]?\s*[=:]" for word in ("pass(?:word|wd|phrase)", "secret", "key", "token")),
    )
)


def redact(text: str) -> str:
    """`text` without secrets."""
    text = _TOKENS.sub(HIDDEN, text)
    text = _ADDRESS.sub(rf"\g<scheme>\g<user>:{HIDDEN}@", text)
    text = _BEARER.sub(rf"\g<word> {HIDDEN}", text)
    return _NAMED.sub(rf"\g<name>{HIDDEN}", text)


def redact_lines(lines: list[str]) -> list[str]:
    """`redact` for each of many lines, at the cost of looking for a few words where there is nothing to hide."""
    lowered = "\n".join(lines).lower()
    signs = list(_signs(lowered))
    if not signs:
        return lines
    ends = list(accumulate(len(line.lower()) + 1 for line in lines))
    found = list(lines)
    for number in {bisect_right(ends, place) for place in signs}:
        found[number] = redact(lines[number])
    return found


def _signs(lowered: str) -> Iterator[int]:
    """Where something stands that may be a secret, in text of small letters."""
    for sign in _SIGNS:
        yield from (match.start() for match in sign.finditer(lowered))


def is_secret(name: str, value: str) -> bool:
    """Whether a setting of this name holds a secret: by its name, or by the shape of anything in its value."""
    says_so = _SETTING.fullmatch(name) is not None and _WORD_OF_THE_TRADE.fullmatch(value) is None
    if says_so and _TOKEN.fullmatch(name):
        says_so = name.isupper() or _DRAWN.fullmatch(value) is not None
    return says_so or redact(value) != value


def redact_tree(tree: Any) -> Any:
    """The same for every text inside mappings and lists."""
    if isinstance(tree, str):
        return redact(tree)
    if isinstance(tree, Mapping):
        return {name: redact_tree(item) for name, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [redact_tree(item) for item in tree]
    return tree
