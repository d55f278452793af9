"""The numbers inside an out-of-memory text, in bytes: every generation of PyTorch's, and the host's.

1. `(GPU 0; 11.93 GiB total capacity; 4.00 GiB already allocated; 7.33 GiB free; 179.00 KiB cached)`
2. the same with `reserved in total by PyTorch` and advice about max_split_size_mb
3. `GPU 0 has a total capacty of … of which … is free.` with the process list; the typo is PyTorch's own
4. `… Including non-PyTorch memory, this process has … memory in use.`
5. with a limit set on the process (`… allowed; …`), several other processes, private pools

Names of facts end in `_bytes`. It does not decide whether a text is an out-of-memory error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.units import LARGEST_BYTES

# Of the card, or of what the process may take: slack below this is in every allocator, and a card with no more is full.
PIECES_SHARE = 0.02
FOREIGN_SHARE = 0.05  # of the card: what others hold below this is a display or a context, and no cause
ROUNDING_BYTES = 16 * 1024**2  # of a difference of three sizes in GiB, each with two decimals
_UNIT_BYTES = {
    "bytes": 1,
    "byte": 1,
    "b": 1,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
}

# No number of a card or a host has more digits than these: a longer one is no number here, and left out.
_WHOLE = r"\d{1,18}(?!\d)"
_SIZE = r"((?<!\d)\d[\d,]{0,23}(?:\.\d{1,12})?)(?![\d.,])\s*(bytes?|[KMGT]iB|[KMG]B|B)\b"

# fact -> pattern around one size; the first that matches counts
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("requested_bytes", rf"[Tt]ried to allocate {_SIZE}"),
    ("requested_bytes", rf"Unable to allocate {_SIZE}"),
    ("requested_bytes", rf"Out of memory allocating {_SIZE}"),
    ("requested_bytes", rf"trying to allocate {_SIZE}"),
    ("requested_bytes", rf"Failed to CUDA calloc {_SIZE}"),
    ("total_bytes", rf"{_SIZE} total capaci?ty"),
    ("total_bytes", rf"total capaci?ty of {_SIZE}"),
    ("free_bytes", rf"of which {_SIZE} is free"),
    ("free_bytes", rf"[;,(] ?{_SIZE} free"),
    ("own_use_bytes", rf"this process has {_SIZE} memory in use"),
    ("allowed_bytes", rf"[;,.] ?{_SIZE} allowed"),
    ("private_pool_bytes", rf"with {_SIZE} allocated in private pools"),
    ("allocated_bytes", rf"{_SIZE} is allocated by PyTorch"),
    ("allocated_bytes", rf"{_SIZE} already allocated"),
    ("allocated_bytes", rf"allocated so far: {_SIZE}"),
    ("idle_reserved_bytes", rf"{_SIZE} is reserved by PyTorch but unallocated"),
    ("reserved_bytes", rf"{_SIZE} reserved in total by PyTorch"),
    ("reserved_bytes", rf"{_SIZE} cached"),
    ("limit_bytes", rf"limit set to: {_SIZE}"),
    # the backend that allocates through the driver's own pools
    ("requested_bytes", rf"Requested +: {_SIZE}"),
    ("allocated_bytes", rf"Currently allocated +: {_SIZE}"),
    ("total_bytes", rf"Device limit +: {_SIZE}"),
    ("free_bytes", rf"Free \(according to CUDA\) *: {_SIZE}"),
    ("allowed_bytes", rf"user-supplied memory fraction\)\s+: {_SIZE}"),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _PATTERNS)

_GPU = re.compile(rf"\bGPU ({_WHOLE})(?:;| has a total)")
_PROCESS = re.compile(rf"Process ({_WHOLE}) has {_SIZE} memory in use")
_KERNEL = re.compile(rf"Kill(?:ed)? process (?P<pid>{_WHOLE}) \((?P<name>[^)]*)\)(?:.*?anon-rss:(?P<rss>{_WHOLE})kB)?")
_SHARED_MEMORY = re.compile(rf"Required: ({_WHOLE}), Hardware limit: ({_WHOLE})")


def size_bytes(number: str, unit: str) -> int:
    """`11.93`, `GiB` -> bytes. PyTorch rounds to two decimals, so the last digits are not exact."""
    return round(float(number.replace(",", "")) * _UNIT_BYTES[unit.lower()])


def numbers(text: str) -> dict[str, Any]:
    """Every number found: sizes, the GPU's index, other processes on the card."""
    facts: dict[str, Any] = {}
    for name, pattern in _COMPILED:
        found = pattern.search(text)
        if found is not None and name not in facts and (size := size_bytes(found[1], found[2])) <= LARGEST_BYTES:
            facts[name] = size
    gpu = _GPU.search(text)
    if gpu is not None:
        facts["gpu"] = int(gpu[1])
    others = [{"pid": int(pid), "used_bytes": size_bytes(number, unit)} for pid, number, unit in _PROCESS.findall(text)]
    if others:
        facts["other_processes"] = others
    return facts | _kernel_numbers(text) | _kernel_resource(text)


def _kernel_numbers(text: str) -> dict[str, Any]:
    """The kernel's own line about a process it killed."""
    found = _KERNEL.search(text)
    if found is None:
        return {}
    facts: dict[str, Any] = {"killed_pid": int(found["pid"]), "killed_name": found["name"]}
    if found["rss"] is not None:
        facts["killed_rss_bytes"] = int(found["rss"]) * 1024
    return facts


def _kernel_resource(text: str) -> dict[str, Any]:
    """Shared memory of a GPU kernel, which is no VRAM."""
    found = _SHARED_MEMORY.search(text)
    return {} if found is None else {"required_shared_bytes": int(found[1]), "limit_shared_bytes": int(found[2])}


def shortage(facts: Mapping[str, Any]) -> str | None:
    """What kind of shortage the numbers show: larger_than_card, fragmentation, other_process, process_limit, full."""
    requested, total = facts.get("requested_bytes"), facts.get("total_bytes")
    if requested is None:
        return None
    if total is not None and requested > total:
        return "larger_than_card"
    free, is_limited = facts.get("free_bytes", 0), facts.get("allowed_bytes") is not None
    if pieces_bytes(facts) >= max(requested, PIECES_SHARE * _capacity_bytes(facts)):
        return "fragmentation"
    if is_limited and free >= requested:
        return "process_limit"
    others = others_bytes(facts)
    is_foreign = others >= FOREIGN_SHARE * (total or 0)
    if others and is_foreign and free + others >= requested:
        return "other_process"
    return "full"


def pieces_bytes(facts: Mapping[str, Any]) -> int:
    """What is reserved and unused, with what is free on the card, which is no room for a process at its limit."""
    free = 0 if facts.get("allowed_bytes") is not None else int(facts.get("free_bytes", 0))
    return idle_bytes(facts) + free


def _capacity_bytes(facts: Mapping[str, Any]) -> int:
    """What the process may take, or the card; 0 where the text names neither."""
    return min((int(facts[name]) for name in ("allowed_bytes", "total_bytes") if name in facts), default=0)


def others_bytes(facts: Mapping[str, Any]) -> int:
    """What other processes hold of the card: as listed, or what is left of it where a container hides them."""
    listed = sum(int(process["used_bytes"]) for process in facts.get("other_processes", []))
    sizes = [facts.get(name) for name in ("total_bytes", "free_bytes", "own_use_bytes")]
    if None in sizes:
        return listed
    total, free, own = (int(size) for size in sizes if size is not None)
    hidden = total - free - own
    return max(listed, hidden) if hidden > ROUNDING_BYTES else listed


def idle_bytes(facts: Mapping[str, Any]) -> int:
    """Reserved by the allocator and not in use; older texts say only the two sums."""
    if "idle_reserved_bytes" in facts:
        return int(facts["idle_reserved_bytes"])
    if "reserved_bytes" in facts and "allocated_bytes" in facts:
        return max(0, int(facts["reserved_bytes"]) - int(facts["allocated_bytes"]))
    return 0
