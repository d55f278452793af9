"""What the CUDA allocator held when it ran out of memory: a file for pytorch.org/memory_viz, and who held how much.

Recording is on for rungs, which take the worst batch, for the first steps of a training, and for all of them where the
recipe asks for it (`train.record_allocations`): it cost a short step 5 % (docs/benchmarks.md). It keeps the newest
allocations in a ring, with Python's frames only, so that neither memory nor file grow with the run. Without
it a failure has its numbers, its shapes and a snapshot of blocks, and says how to learn who made them.

On a processor there is nothing of the kind: there the failure has no snapshot and none is missed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from remote.drafter.held import NO_STACK, NOT_RECORDED, is_library, summarise
from remote.drafter.measure import memory_facts
from remote.report import Reporter
from remote.rundir import write_json, write_whole

# The cheapest that still names who made what is alive: a stack is taken once an allocation in any context but None
# ("state" takes as many as "alloc", and forgets those that a viewer shows), none at a free ("all"), and none of C++.
RECORDING: dict[str, Any] = {"context": "alloc", "stacks": "python"}
UNRECORDED = "who made them was not recorded: train.record_allocations=true records every step, as smoke rungs do"
ENDED = "who made the rest was not recorded, which ended after the first steps: train.record_allocations=true records every step"
MAX_ENTRIES = 20_000  # allocations and frees in the ring; a step of the bundled trainer has some thousands
LIMIT_BYTES = 64 * 1024**2  # past some 500 MB the viewer opens nothing (pytorch #129674); this one is quick to fetch
NAMED_FRAMES = 5
OWN_FRAMES, MOST_TENSORS = 3, 12  # of a traceback, innermost; tensors named with their shapes
_REFUSALS = (RuntimeError, AttributeError, TypeError, ValueError, KeyError, MemoryError, OSError)

Take = Callable[[], dict[str, Any]]


@dataclass
class _Recording:
    """Torch records for the whole process, and a snapshot does not say that it has ended: old blocks keep their stacks."""

    has_ended: bool = False


_RECORDING = _Recording()


def record_allocations(device: torch.device) -> str | None:
    """Begins to keep who allocates what; why not, in one line, where this torch cannot."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, **RECORDING)
    except _REFUSALS as error:
        return f"no stacks in memory snapshots: {_line(error)}"
    _RECORDING.has_ended = False
    return None


def stop_recording(device: torch.device) -> None:
    """Records nothing more from here on."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(enabled=None)
        _RECORDING.has_ended = True


def snapshot_facts(
    error: BaseException, device: torch.device, folder: Path | None, name: str, take: Take | None = None
) -> dict[str, Any]:
    """Keeps a snapshot when `error` is the allocator's out-of-memory error; what a failure says of it.

    memory_snapshot       the file's name in `folder`, or null and then memory_snapshot_why
    memory_held           the frames that held most, {frame, bytes, num_blocks}; all in the .json beside it
    memory_kept           what loops, the optimizer and the backward keep; see `held.summarise`
    memory_unrecorded     instead of both where nothing was recorded, beside them where recording had ended: how to have it
    tensors               shapes at hand where the error was raised
    expandable_segments   whether the allocator could grow its segments
    """
    if not isinstance(error, torch.OutOfMemoryError) or (take is None and device.type != "cuda"):
        return {}
    facts: dict[str, Any] = {"tensors": tensors_at(error)}
    try:
        snapshot = (take or torch.cuda.memory._snapshot)()
        summary = _without_backward(summarise(snapshot)) if _RECORDING.has_ended else summarise(snapshot)
        facts |= _who(summary) | {
            "memory_held_bytes": summary["held_bytes"],
            "expandable_segments": snapshot.get("allocator_settings", {}).get("expandable_segments"),
        }
        return facts | _kept_file(snapshot, summary, folder, name)
    except _REFUSALS as refused:
        return {"memory_held": []} | facts | _none(_line(refused))


def _who(summary: dict[str, Any]) -> dict[str, Any]:
    """Blocks without a stack say that of a backward pass, unless nothing was recorded when they were made."""
    stacks = [item for item in summary["held"] if item["frame"] not in (NO_STACK, NOT_RECORDED)]
    if not stacks and (summary["num_entries"] == 0 or _RECORDING.has_ended):
        return {"memory_held": [], "memory_kept": {}, "memory_unrecorded": UNRECORDED}
    if _RECORDING.has_ended:
        return {"memory_held": stacks[:NAMED_FRAMES], "memory_kept": summary["kept"], "memory_unrecorded": ENDED}
    return {"memory_held": summary["held"][:NAMED_FRAMES], "memory_kept": summary["kept"]}


def _without_backward(summary: dict[str, Any]) -> dict[str, Any]:
    """The same where recording had ended: a block without a stack is then as good as any, and says nothing of a backward."""
    held = [{**item, "frame": NOT_RECORDED} if item["frame"] == NO_STACK else item for item in summary["held"]]
    return {
        **summary,
        "held": held,
        "kept": {kind: kept for kind, kept in summary["kept"].items() if kind != "backward"},
    }


def _kept_file(snapshot: dict[str, Any], summary: dict[str, Any], folder: Path | None, name: str) -> dict[str, Any]:
    if folder is None:
        return _none("run by hand: there is no run folder to keep it in")
    file = folder / f"memory-{name}.pickle"
    write_json(file.with_suffix(".json"), summary)
    content = bounded(snapshot)
    if content is None:
        return _none(f"even without its history it is larger than {LIMIT_BYTES} bytes")
    write_whole(file, content)
    return {"memory_snapshot": file.name}


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


def tensors_at(error: BaseException) -> list[dict[str, Any]]:
    """Tensors that the innermost frames of the user's own code had at hand, largest first: name, shape, dtype, function.

    Shapes alone, never values. They say whether a size that was asked for is one of this frame's making.
    """
    frames, trace = [], error.__traceback__
    while trace is not None:
        if not is_library(trace.tb_frame.f_code.co_filename):
            frames.append(trace.tb_frame)
        trace = trace.tb_next
    seen: dict[int, tuple[int, dict[str, Any]]] = {}
    for frame in reversed(frames[-OWN_FRAMES:]):
        for name, value in list(frame.f_locals.items()):
            if isinstance(value, torch.Tensor) and id(value) not in seen:
                dtype, where = str(value.dtype).removeprefix("torch."), frame.f_code.co_name
                told = {"name": name, "shape": list(value.shape), "dtype": dtype, "function": where}
                seen[id(value)] = (value.numel() * value.element_size(), told)
    ordered = sorted(seen.values(), key=lambda item: -item[0])
    return [told for _, told in ordered[:MOST_TENSORS]]


def facts_of(
    error: BaseException, device: torch.device, folder: Path | None, name: str, take: Take | None = None
) -> dict[str, Any]:
    """Who held how much when `error` was raised. A card that no longer answers costs these facts, never the error."""
    try:
        facts: dict[str, Any] = dict(memory_facts(device))
    except (AssertionError, *_REFUSALS) as refused:  # torch asserts that it was built for the device it is asked of
        return {"memory_facts_why": _line(refused)}
    return facts | snapshot_facts(error, device, folder, name, take)


@contextmanager
def failures_explained(reporter: Reporter, *, take: Take | None = None) -> Iterator[None]:
    """For a script of the user's own: what the bundled trainer keeps of a failure, kept of theirs as well.

        with reporter.job(), failures_explained(reporter):
            train()

    Begins to record who allocates what. An exception goes on, whole, once it has been reported.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    told = record_allocations(device)
    if told is not None:
        reporter.note(told)
    try:
        yield
    except Exception as error:
        reporter.failure(error, facts=facts_of(error, device, reporter.artifacts, reporter.writer, take))
        raise


def _none(why: str) -> dict[str, Any]:
    return {"memory_snapshot": None, "memory_snapshot_why": why}


def _line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
