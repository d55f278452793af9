"""What the CUDA allocator held when it ran out of memory: a file for pytorch.org/memory_viz, and who held how much.

Recording is always on for trainings and rungs: an out-of-memory failure comes once in days, and a
snapshot taken without it has no stacks. It keeps the newest allocations in a ring, with Python's
frames only (some microseconds an allocation), so that neither time nor file grow with the run.

On a processor there is nothing of the kind: there the failure has no snapshot and none is missed.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from remote.rundir import write_json, write_whole

MAX_ENTRIES = 20_000  # allocations and frees in the ring; a step of the bundled trainer has some thousands
LIMIT_BYTES = 64 * 1024**2  # past some 500 MB the viewer opens nothing (pytorch #129674); this one is quick to fetch
MOST_FRAMES = 30  # in the summary file; a failure itself names the first few
NAMED_FRAMES = 5
NO_STACK = "(no Python stack: a backward pass in autograd's own thread, or before recording began)"
_LIBRARY = re.compile(r"site-packages|dist-packages|lib/python3|<frozen|<string>|\?\?")
_REFUSALS = (RuntimeError, AttributeError, TypeError, ValueError, KeyError, MemoryError, OSError)

Take = Callable[[], dict[str, Any]]


def record_allocations(device: torch.device) -> str | None:
    """Begins to keep who allocates what; why not, in one line, where this torch cannot."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_ENTRIES)
    except _REFUSALS as error:
        return f"no stacks in memory snapshots: {_line(error)}"
    return None


def snapshot_facts(
    error: BaseException, device: torch.device, folder: Path, name: str, take: Take | None = None
) -> dict[str, Any]:
    """Keeps a snapshot when `error` is the allocator's out-of-memory error; what a failure says of it.

    memory_snapshot   the file's name in `folder`, or null and then memory_snapshot_why
    memory_held       the frames that held most, {frame, bytes, num_blocks}; all in the .json beside it
    """
    if device.type != "cuda" or not isinstance(error, torch.OutOfMemoryError):
        return {}
    try:
        snapshot = (take or torch.cuda.memory._snapshot)()
        file, summary = folder / f"memory-{name}.pickle", summarise(snapshot)
        write_json(file.with_suffix(".json"), summary)
        held = summary["held"][:NAMED_FRAMES]
        content = bounded(snapshot)
        if content is None:
            return _none(f"even without its history it is larger than {LIMIT_BYTES} bytes", held)
        write_whole(file, content)
    except _REFUSALS as refused:
        return _none(_line(refused), [])
    return {"memory_snapshot": file.name, "memory_held": held}


def bounded(snapshot: dict[str, Any], limit_bytes: int = LIMIT_BYTES) -> bytes | None:
    """As the viewer reads it, with as much of the newest history as fits; None when the blocks alone do not."""
    traces: list[list[Any]] = snapshot.get("device_traces", [])
    while True:
        content = pickle.dumps({**snapshot, "device_traces": traces})
        if len(content) <= limit_bytes:
            return content
        if not any(traces):
            return None
        traces = [trace[(len(trace) + 1) // 2 :] for trace in traces]


def summarise(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Bytes in use by the innermost frame of the trainer's own code that allocated them, most first."""
    held: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    free = [0]
    for block in _blocks(snapshot):
        if block["state"] == "inactive":
            free.append(block["size"])
            continue
        of_frame = held[_frame(block.get("frames", []))]
        of_frame[0] += block["size"]
        of_frame[1] += 1
    ordered = sorted(held.items(), key=lambda item: -item[1][0])
    return {
        "held": [{"frame": name, "bytes": size, "num_blocks": count} for name, (size, count) in ordered[:MOST_FRAMES]],
        "num_frames": len(held),
        "held_bytes": sum(size for size, _ in held.values()),
        "reserved_bytes": sum(segment["total_size"] for segment in snapshot["segments"]),
        "free_bytes": sum(free),
        "largest_free_bytes": max(free),
        "num_entries": sum(len(trace) for trace in snapshot.get("device_traces", [])),
    }


def _blocks(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for segment in snapshot["segments"]:
        yield from segment["blocks"]


def _frame(frames: list[dict[str, Any]]) -> str:
    """Innermost first; the library's own say nothing about whose tensor it is, unless there are no others."""
    own = [frame for frame in frames if not _LIBRARY.search(frame["filename"])] or frames
    return f"{own[0]['filename']}:{own[0]['line']} {own[0]['name']}" if own else NO_STACK


def _none(why: str, held: list[dict[str, Any]]) -> dict[str, Any]:
    return {"memory_snapshot": None, "memory_snapshot_why": why, "memory_held": held}


def _line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
