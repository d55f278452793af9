"""Who holds the memory of an allocator's snapshot: by frame, and by the loop that kept it.

A snapshot knows file, line and function of each block's Python stack, innermost first. Where the source lies beside it,
the loops around those lines say what sums of sizes cannot: that one line ran once a chunk, once a layer or once a
training step, and that all of its tensors are still alive. Pure but for reading those sources; standard library only.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

MOST_FRAMES = 30  # in the summary file; a failure itself names the first few
NO_STACK = "(no Python stack: a backward pass in autograd's own thread, or before recording began)"
NOT_RECORDED = "(no Python stack: made before recording began, or after it had ended)"
REPEATED = 3  # blocks of one size from one stack: from here on a loop has kept them
_MAX_SOURCE_BYTES = 2 * 1024**2
_LIBRARY = re.compile(r"site-packages|dist-packages|lib/python3|<frozen|<string>|\?\?")
_OPTIMIZER = re.compile(r"torch/optim/|remote/drafter/optim\.py$")
_CHECKPOINT = "torch/utils/checkpoint.py"
_CONTAINER, _MODULE = "torch/nn/modules/container.py", "torch/nn/modules/module.py"
_TRAINS = frozenset({"backward", "zero_grad", "step"})
_MAKES = frozenset(f"{word}{like}" for word in ("empty", "zeros", "ones", "full") for like in ("", "_like"))
_CALLED_BESIDE = frozenset({"append", "range", "len", "int", "min", "max", "round"})  # these make no tensor

_BY_LOOPS = frozenset({"chunks", "layers", "steps", "buffers"})

Frame = Mapping[str, Any]  # filename, line, name


@dataclass
class _Kept:
    """Blocks that one kind of place keeps."""

    size_bytes: int = 0
    num_blocks: int = 0
    repeats: int = 0  # most blocks of one size from one stack
    frame: str = ""  # of the place that keeps most at once
    most_bytes: int = 0


def summarise(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes in use by the innermost frame of the user's own code that allocated them, most first; and what kept them.

    kept: kind -> bytes, num_blocks, repeats, frame. Kinds: `chunks`, `layers`, `steps` (one line of a loop, a call of a
    module in a loop, a line of the training loop itself; blocks of one size, REPEATED or more), `buffers` (a loop's line
    that does nothing but make them: no graph keeps these), `checkpointed`, `optimizer`, `backward` (no Python stack).
    """
    held: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    alike: dict[tuple[int, tuple[tuple[str, int], ...]], list[Mapping[str, Any]]] = defaultdict(list)
    free = [0]
    for block in _blocks(snapshot):
        if block["state"] == "inactive":
            free.append(block["size"])
            continue
        frames = block.get("frames", [])
        of_frame = held[frame_name(frames)]
        of_frame[0] += block["size"]
        of_frame[1] += 1
        alike[block["size"], tuple((frame["filename"], frame["line"]) for frame in frames)].append(block)
    ordered = sorted(held.items(), key=lambda item: -item[1][0])
    return {
        "held": [{"frame": name, "bytes": size, "num_blocks": count} for name, (size, count) in ordered[:MOST_FRAMES]],
        "kept": _kept(list(alike.values())),
        "num_frames": len(held),
        "held_bytes": sum(size for size, _ in held.values()),
        "reserved_bytes": sum(segment["total_size"] for segment in snapshot["segments"]),
        "free_bytes": sum(free),
        "largest_free_bytes": max(free),
        "num_entries": sum(len(trace) for trace in snapshot.get("device_traces", [])),
    }


def frame_name(frames: Sequence[Frame]) -> str:
    """Innermost first; the library's own say nothing about whose tensor it is, unless there are no others."""
    own = [frame for frame in frames if not is_library(frame["filename"])] or frames
    return f"{own[0]['filename']}:{own[0]['line']} {own[0]['name']}" if own else NO_STACK


def is_library(file: str) -> bool:
    return bool(_LIBRARY.search(file))


def keeper(frames: Sequence[Frame]) -> str | None:
    """What kind of place a stack is, by the first loop around it from the inside out; None where there is no loop."""
    if not frames:
        return "backward"
    files = [frame["filename"] for frame in frames]
    if any(_OPTIMIZER.search(file) for file in files):
        return "optimizer"
    if any(file.endswith(_CHECKPOINT) for file in files):
        return "checkpointed"
    calls_module, is_innermost = False, True
    for frame in frames:
        file = frame["filename"]
        if file.endswith(_CONTAINER):
            return "layers"
        if is_library(file):
            calls_module = calls_module or file.endswith(_MODULE)
            continue
        loop = _loop_around(file, int(frame["line"]))
        if loop is not None:
            if loop == "trains" or calls_module:
                return "steps" if loop == "trains" else "layers"
            return "buffers" if is_innermost and _only_makes(file, int(frame["line"])) else "chunks"
        is_innermost = False
    return None


def _kept(alike: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of groups of blocks, each of one size and one stack."""
    found: dict[str, _Kept] = defaultdict(_Kept)
    for group in alike:
        kind = keeper(group[0].get("frames", []))
        if kind is None or (kind in _BY_LOOPS and len(group) < REPEATED):
            continue
        kept, size_bytes = found[kind], sum(block["size"] for block in group)
        kept.size_bytes += size_bytes
        kept.num_blocks += len(group)
        kept.repeats = max(kept.repeats, len(group))
        if size_bytes > kept.most_bytes:
            kept.most_bytes, kept.frame = size_bytes, frame_name(group[0].get("frames", []))
    return {
        kind: {"bytes": kept.size_bytes, "num_blocks": kept.num_blocks, "repeats": kept.repeats, "frame": kept.frame}
        for kind, kept in sorted(found.items(), key=lambda item: -item[1].size_bytes)
    }


def _blocks(snapshot: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for segment in snapshot["segments"]:
        yield from segment["blocks"]


def _loop_around(file: str, line: int) -> str | None:
    """`loop`, or `trains` where its body takes an optimizer's step; None where the line's own function has none around it."""
    inside = [loop for loop in _loops(file) if loop[0] <= line <= loop[1]]
    if not inside:
        return None
    first, last, trains = min(inside, key=lambda loop: loop[1] - loop[0])
    within = [each for each in _functions(file) if first <= each[0] and each[1] <= last and each[0] <= line <= each[1]]
    return None if within else "trains" if trains else "loop"  # a function made inside a loop is not in it


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    path = Path(file)
    try:
        if path.stat().st_size > _MAX_SOURCE_BYTES:
            return None
        return ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=64)
def _loops(file: str) -> tuple[tuple[int, int, bool], ...]:
    """First and last line of each loop's body, and whether it trains."""
    tree = _tree(file)
    found = []
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, (ast.For, ast.While)):
            found.append((node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno, _trains(node)))
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
            found.append((node.lineno, node.end_lineno or node.lineno, False))
    return tuple(found)


@lru_cache(maxsize=64)
def _functions(file: str) -> tuple[tuple[int, int], ...]:
    tree = _tree(file)
    return tuple(
        (node.lineno, node.end_lineno or node.lineno)
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def _trains(loop: ast.For | ast.While) -> bool:
    calls = (node.func for statement in loop.body for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr in _TRAINS for called in calls)


def _only_makes(file: str, line: int) -> bool:
    """Whether the line's statement makes tensors from sizes alone, as `held.append(torch.empty(n))`, and computes none."""
    tree = _tree(file)
    around = [
        node
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return False
    nodes = list(ast.walk(max(around, key=lambda node: (node.lineno, node.col_offset))))
    calls = {_called(node) for node in nodes if isinstance(node, ast.Call)}
    operands = [each for node in nodes if isinstance(node, ast.BinOp) for each in (node.left, node.right)]
    computes = any(isinstance(each, ast.Call) and _called(each) in _MAKES for each in operands)
    computes = computes or any(isinstance(node, ast.MatMult) for node in nodes)
    return bool(calls & _MAKES) and calls <= _MAKES | _CALLED_BESIDE and not computes


def _called(call: ast.Call) -> str:
    """The last part of a function's name; empty for one without a name."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
