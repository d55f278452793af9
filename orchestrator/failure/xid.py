"""Xids, the numbered messages of NVIDIA's driver in the kernel's log: which tell of a card that failed, and of whose.

The sets follow the immediate action in NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors): what asks for a reset
of the card, for a reboot or for support is a fault of the card. Numbers that the catalogue does not know are one too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from remote.aftermath import is_of

_LINE = re.compile(r"Xid \((?:PCI:)?(?P<pci>[^)]*)\): (?P<xid>\d{1,9})(?!\d)")

# "Restart the application": it did what no program may (13 and 31 are an illegal address), or one channel of an engine
# was ended. 43 and 45 are the driver cleaning up after that. 94 is an ECC error contained to the process it hit, which
# then says so itself.
_PROGRAM = frozenset({8, 11, 13, 31, 32, 43, 45, 68, 69, 80, 94})
_ENGINES = frozenset(
    {39, 40, 41, 65, 70, 71, 72, 73, 76, 77, *range(82, 87), 88, 89, *range(96, 106), *range(126, 136), 139}
)
# "Ignore": rows remapped in time (63), many corrected errors (92), a word on another Xid (154), test messages.
_NEWS = frozenset({63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 147, 148, 152, 153, 154, 157, *range(160, 166)})

# What a program says that its card let down; whatever else it says, it ended by itself.
_OF_A_CARD = re.compile(r"cuda|nccl|cublas|cudnn|cusolver|cufft|nvml|gpu|triton|accelerator", re.IGNORECASE)


def facts(text: str) -> dict[str, Any]:
    """Number and PCI address that a line names; empty where it names none."""
    found = _LINE.search(text)
    return {"pci": found["pci"], "xid": int(found["xid"])} if found else {}


def is_fault(number: int) -> bool:
    return number not in _PROGRAM | _ENGINES | _NEWS


def is_of_the_job(line: str, exit_file: Mapping[str, Any]) -> bool:
    """Whether a line may be about one of the job's cards: unless it names others only. Where those are not known, it may."""
    health = exit_file.get("gpu_health")
    known = health.get("pci") if isinstance(health, Mapping) else None
    cards = {_address(card) for card in known if isinstance(card, str)} if isinstance(known, list) else set()
    return is_of(line, cards)


def leaves_room(messages: Iterable[str]) -> bool:
    """Whether a fault of the card may be behind how a program ended: it said nothing at all, or something of CUDA."""
    said = list(messages)
    return not said or any(_OF_A_CARD.search(message) for message in said)


def _address(text: str) -> tuple[int, ...]:
    """Domain, bus and device, as the exit file has them."""
    try:
        return tuple(int(part, 16) for part in text.split(".")[0].split(":")[:3])
    except ValueError:
        return ()
