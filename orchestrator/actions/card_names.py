"""Cards by their usual names, for a plan of a machine that nobody has looked at yet: what torch was seen to report of each.

Only for `plan --gpu NAME`. A host's own card, and whatever runs, is measured on the card itself, as drivers differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from orchestrator.errors import UsageError
from orchestrator.nearest import nearest

# GiB of `total_memory` in torch's device properties, which out-of-memory errors name as total capacity: of what errors and
# properties in public issues show of that card, under drivers 525 to 580, the least (they differ by up to 0.2 GiB). What
# nvidia-smi calls the total is more, as the driver keeps some: 143,771 MiB (140.4 GiB) for 139.8 GiB of an H200.
# RTX 6000 Ada and A6000 hold 3 GiB less where ECC is turned on, as GDDR6 keeps the check bits in the same memory: 44.43 GiB
# of 46,068 MiB were seen of the first (DINGYANB/MTVCrafter, issue 21; 47.4 without). The second's is inferred from the A40,
# the same memory with ECC on. GeForce cards are taken as they are sold, with ECC off.
_TOTAL_GIB = {
    "B200": 178.35,
    "H200": 139.72,
    "RTX PRO 6000 Blackwell": 94.97,
    "H100 80GB": 79.1,
    "A100 80GB": 79.14,
    "A100 40GB": 39.39,
    "RTX 6000 Ada": 44.43,
    "RTX A6000": 44.35,
    "L40S": 44.39,
    "A40": 44.35,
    "RTX 5090": 31.36,
    "RTX 4090": 23.49,
    "RTX 3090": 23.5,
}
_INFERRED = {"RTX A6000": "A40"}  # sizes that nobody was seen to report with ECC on, and whose card has the same memory
_SHORT = {  # what people say where it can be one card alone
    "H100": "H100 80GB",
    "H200 141GB": "H200",
    "H200 NVL": "H200",
    "RTX PRO 6000": "RTX PRO 6000 Blackwell",
    "RTX 6000 Ada Generation": "RTX 6000 Ada",
    "A6000": "RTX A6000",
}
# Words of a model's full name that say how it is mounted, cooled or sold, and change nothing of its memory.
_BESIDE = re.compile(r"(?i)\b(nvidia|geforce|tesla|sxm\d?|pcie|hbm\d?e?|workstation|server|max-q|edition)\b|[\s_-]+")


# Compute capability 8.9 or more (Ada, Hopper, Blackwell), and less. Of other names nobody says.
_FLOAT8 = re.compile(r"\b(G?H(20|100|200|800)|G?B\d{3}|L(4|20|40S?)|RTX (PRO )?\d000 (Ada|Blackwell)|RTX [45]0\d\d)\b")
_NO_FLOAT8 = re.compile(r"\b(A(2|10G?|16|30|40|100|800)|RTX A\d{4}|RTX [23]0\d\d|V100S?|T4|P\d{1,3})\b")


class CardKind(TypedDict):
    """What a plan asks of cards beside their memory."""

    is_hopper: bool  # all have compute capability 9.0
    multiplies_float8: bool | None  # all do; None where that is not known of one, and of none that it does not


def kind_of(models: Sequence[str]) -> CardKind:
    """Of cards by their models, as nvidia-smi and torch write them."""
    if any(_NO_FLOAT8.search(model) for model in models):
        float8: bool | None = False
    else:
        float8 = True if models and all(_FLOAT8.search(model) for model in models) else None
    return CardKind(is_hopper=all(map(is_hopper, models)), multiplies_float8=float8)


def is_hopper(model: str) -> bool:
    """Whether a GPU of that model has compute capability 9.0."""
    return re.search(r"\bG?H(20|100|200|800)(?![0-9])", model) is not None


@dataclass(frozen=True)
class KnownCard:
    name: str
    total_bytes: int
    kind: CardKind

    @property
    def told(self) -> str:
        """Who says so, for a person."""
        like = _INFERRED.get(self.name)
        return (
            f"by the {like}'s size, which has the same memory: none was seen of its own"
            if like
            else "by its usual size"
        )


def known_card(word: str) -> KnownCard:
    """UsageError, in one line with those that are known, for a name that is none of theirs or fits several."""
    spelled = {_plain(name): name for name in _TOTAL_GIB} | {_plain(short): name for short, name in _SHORT.items()}
    name = spelled.get(_plain(word))
    if name is not None:
        return KnownCard(name, round(_TOTAL_GIB[name] * 2**30), kind_of([name]))
    said = " ".join(_words(word))
    begun = [each for each in _TOTAL_GIB if said and " ".join(_words(each)).startswith(f"{said} ")]
    if len(begun) > 1:
        raise UsageError(
            f"{word!r} is one of several cards: {', '.join(begun)}; say which, or its memory, such as 95GiB"
        )
    near = nearest(_plain(word), spelled)
    told = f"; did you mean {spelled[near]!r}?" if near is not None else ""
    raise UsageError(f"no card {word!r}; known: {', '.join(_TOTAL_GIB)}{told or '.'} Or give its memory, such as 95GiB")


def names() -> list[str]:
    return list(_TOTAL_GIB)


def _plain(name: str) -> str:
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    return _BESIDE.sub(" ", name).lower().split()
