"""Trials of attention kernels beside today's: each in a process of its own, checked, then timed.

python -m benchmarks.attention_trials [--budget SECONDS] [--only TEXT] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import attention_tma, step
from remote.drafter.blocks import build_blocks, sample_anchors
from remote.drafter.kernels import attention
from remote.drafter.kernels.launch import power_of_two, precision
from remote.drafter.visibility import FULL, Visibility, visible, window_meaning

BF16, F32 = torch.bfloat16, torch.float32
PAD = 128


class Problem:
    """Inputs and today's results for one case, token order of numbers beside today's."""

    def __init__(self, rule: str, tiny: bool) -> None:
        self.device = torch.device("cpu" if tiny else "cuda")
        dtype, dim = (torch.float32, 16) if tiny else (BF16, 128)
        heads, groups, size, count, context = (6, 2, 12, 9, 150) if tiny else (32, 8, 32, 1024, 8000)
        meaning = FULL if rule == "full" else window_meaning("specforge", 20 if tiny else 2048)
        row = step.packed_row((context,), 1000)
        drawn = sample_anchors(
            row, num_slots=count, max_anchors=count, per="row", generator=torch.Generator().manual_seed(1)
        )
        blocks = build_blocks(row, *drawn, block_size=size, mask_token_id=3).to(self.device)
        self.seen: Visibility = visible(meaning, blocks, context)
        self.size, self.groups, self.group, self.dim = size, groups, heads // groups, dim
        self.count, self.tokens, self.context = count, count * size, context
        generator = torch.Generator(self.device).manual_seed(7)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.empty(shape, device=self.device, dtype=dtype).normal_(0, scale, generator=generator)

        self.query = draw(self.tokens, heads, dim)
        self.key, self.value = draw(context, groups, dim), draw(context, groups, dim)
        self.block_key, self.block_value = draw(self.tokens, groups, dim), draw(self.tokens, groups, dim)
        self.grad_out = draw(self.tokens, heads, dim, scale=0.1)
        self.inputs = [self.query, self.key, self.value, self.block_key, self.block_value]
        self.ranges = attention.read_ranges(self.seen, attention.LARGE_TILES)
        self.out, self.log_sum_old = attention.forward_pass(self.inputs, self.ranges)
        self.delta_old, self.grad_query, self.grad_block_key, self.grad_block_value = attention.query_gradient_pass(
            self.inputs, self.ranges, self.out, self.log_sum_old, self.grad_out
        )
        self.grad_key, self.grad_value = attention.context_gradient_pass(
            self.inputs, self.ranges, self.log_sum_old, self.grad_out, self.delta_old
        )
        self.padded = -(-self.tokens // PAD) * PAD
        self.log_sum, self.delta = self.by_token(self.log_sum_old), self.by_token(self.delta_old)

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def by_token(self, old: Tensor) -> Tensor:
        """(G, N·PAD·SLOTS) -> (heads, padded tokens)."""
        slots, pad = power_of_two(self.size), power_of_two(self.group)
        taken = old.view(self.groups, self.count, pad, slots)[:, :, : self.group, : self.size]
        flat = taken.permute(0, 2, 1, 3).reshape(self.groups * self.group, self.tokens)
        return torch.nn.functional.pad(flat, (0, self.padded - self.tokens)).contiguous()

    def rows(self) -> int:
        return power_of_two(self.size) * power_of_two(self.group)

    def seen_by(self, keys: int) -> Tensor:
        tiles = attention.LARGE_TILES
        wide = attention.Tiles(tiles.forward, tiles.query, attention.Tile(64, keys, 1, 4))
        return attention.read_ranges(self.seen, wide).seen_by


def plain(tensor: Tensor, rows: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    flat = tensor.view(tensor.shape[0], -1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, tensor.shape[-1]])


def matrix(tensor: Tensor, rows: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    flat = tensor.view(tensor.shape[0], -1)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, tensor.shape[-1]], layout)


def vector(tensor: Tensor, rows: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    flat = tensor.view(-1)
    return TensorDescriptor(flat, list(flat.shape), [1], [rows], gl.NVMMASharedLayout(0, 32, 1))


Run = tuple[Callable[[], object], list[tuple[str, Tensor, Tensor]]]


def _group(p: Problem) -> dict[str, int]:
    return {"BLOCK": p.size, "GROUP": p.group, "KV_HEADS": p.groups, "DIM": p.dim}


def _slots(p: Problem) -> dict[str, int]:
    return {"SLOTS": power_of_two(p.size), "GROUP_PAD": power_of_two(p.group)}


def _tiles(p: Problem, rows: int) -> int:
    return -(-p.count * p.rows() // rows)


def _own_turns(p: Problem, keys: int, rows: int = 128) -> int:
    return -(-(rows // p.rows() * p.size) // keys)


def gluon_context(p: Problem, stages: int, rows: int = 64) -> Run:
    from benchmarks import attention_gluon

    seen_by = p.seen_by(128)
    grads = [torch.empty_like(p.key), torch.empty_like(p.value)]
    own = _group(p)

    def run() -> None:
        attention_gluon.context_gradient_kernel[(seen_by.shape[1] * p.groups,)](
            matrix(p.query, rows), matrix(p.key, 64), matrix(p.value, 64), vector(p.log_sum, rows), matrix(p.grad_out, rows),
            vector(p.delta, rows), p.ranges.start_T, p.ranges.end_T, *grads, seen_by, p.context, p.tokens, p.padded, p.scale,
            **own, ROWS=rows, STAGES=stages, num_warps=4,
        )  # fmt: skip

    return run, [("key", grads[0], p.grad_key), ("value", grads[1], p.grad_value)]


def gluon_query(p: Problem, keys: int, stages: int) -> Run:
    from benchmarks import attention_gluon

    grad = torch.empty_like(p.query)

    def run() -> None:
        attention_gluon.query_gradient_kernel[(_tiles(p, 128) * p.groups,)](
            p.query, *(matrix(each, keys) for each in p.inputs[1:]), p.ranges.start_T, p.ranges.end_T, p.log_sum, p.grad_out,
            p.delta, grad, p.count, p.padded, p.scale, **_group(p), **_slots(p), KEYS=keys, OWN=_own_turns(p, keys),
            STAGES=stages, CAUSAL=p.seen.causal, num_warps=4,
        )  # fmt: skip

    return run, [("query", grad, p.grad_query)]


def gluon_forward(p: Problem, keys: int, stages: int) -> Run:
    from benchmarks import attention_gluon

    out, log_sum = torch.empty_like(p.query), torch.zeros_like(p.log_sum)

    def run() -> None:
        attention_gluon.forward_kernel[(_tiles(p, 128) * p.groups,)](
            p.query, *(matrix(each, keys) for each in p.inputs[1:]), p.ranges.start_T, p.ranges.end_T, out, log_sum,
            p.count, p.padded, p.scale, **_group(p), **_slots(p), KEYS=keys, OWN=_own_turns(p, keys), STAGES=stages,
            CAUSAL=p.seen.causal, num_warps=4,
        )  # fmt: skip

    return run, [("out", out, p.out), ("log_sum", log_sum, p.log_sum)]


def own_gradient(p: Problem, warps: int) -> Run:
    delta, grads = torch.zeros_like(p.delta), [torch.empty_like(p.block_key), torch.empty_like(p.block_value)]
    rows = max(128 if p.dim == 128 else 16, p.rows())

    def run() -> None:
        attention_tma.own_gradient_kernel[(_tiles(p, rows) * p.groups,)](
            p.query, p.block_key, p.block_value, p.out, p.log_sum, p.grad_out, delta, *grads, p.count, p.padded, p.scale,
            **_group(p), **_slots(p), ROWS=rows, PRECISION=precision(p.query), CAUSAL=p.seen.causal, num_warps=warps,
        )  # fmt: skip

    return run, [
        ("delta", delta, p.delta),
        ("own key", grads[0], p.grad_block_key),
        ("own value", grads[1], p.grad_block_value),
    ]


def _keys_or(p: Problem, desc: bool, keys: int) -> list[Any]:
    return [plain(each, keys) if desc else each for each in (p.key, p.value)]


def tma_context(p: Problem, rows: int, keys: int, stages: int, warps: int, desc: bool = True, init: bool = True) -> Run:
    seen_by = p.seen_by(keys)
    grads = [torch.empty_like(p.key), torch.empty_like(p.value)]
    log_sum, delta = (each[:, : p.tokens].contiguous() for each in (p.log_sum, p.delta))

    def run() -> None:
        query, grad_out = (plain(each, rows) if desc else each for each in (p.query, p.grad_out))
        attention_tma.context_gradient_kernel[(seen_by.shape[1] * p.groups,)](
            query, *_keys_or(p, desc, keys), p.ranges.start_T, p.ranges.end_T, log_sum, grad_out, delta, *grads, seen_by,
            p.context, p.tokens, p.scale, **_group(p), ROWS=rows, KEYS=keys, STAGES=stages, PRECISION=precision(p.query),
            DESC=desc, WS=False, INIT=init, EARLY=False, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    return run, [("key", grads[0], p.grad_key), ("value", grads[1], p.grad_value)]


def tma_query(
    p: Problem, keys: int, stages: int, warps: int, desc: bool = True, qreg: bool = False, rows: int = 128
) -> Run:
    log_sum, delta = p.log_sum[:, : p.tokens].contiguous(), torch.empty_like(p.delta[:, : p.tokens].contiguous())
    grads = [torch.empty_like(each) for each in (p.query, p.block_key, p.block_value)]

    def run() -> None:
        attention_tma.query_gradient_kernel[(_tiles(p, rows) * p.groups,)](
            p.query, *_keys_or(p, desc, keys), p.block_key, p.block_value, p.ranges.start_T, p.ranges.end_T, p.out, log_sum,
            p.grad_out, delta, *grads, p.context, p.count, p.scale, **_group(p), **_slots(p), ROWS=rows, KEYS=keys,
            STAGES=stages, PRECISION=precision(p.query), CAUSAL=p.seen.causal, DESC=desc, QREG=qreg, WS=False,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    return run, [
        ("query", grads[0], p.grad_query),
        ("own key", grads[1], p.grad_block_key),
        ("delta", delta, p.delta[:, : p.tokens]),
    ]


def tma_forward(
    p: Problem, keys: int, stages: int, warps: int, desc: bool = True, qreg: bool = False, rows: int = 128
) -> Run:
    out, log_sum = torch.empty_like(p.query), torch.empty_like(p.log_sum[:, : p.tokens].contiguous())

    def run() -> None:
        attention_tma.forward_kernel[(_tiles(p, rows) * p.groups,)](
            p.query, *_keys_or(p, desc, keys), p.block_key, p.block_value, p.ranges.start_T, p.ranges.end_T, out, log_sum,
            p.context, p.count, p.scale, **_group(p), **_slots(p), ROWS=rows, KEYS=keys, STAGES=stages,
            PRECISION=precision(p.query), CAUSAL=p.seen.causal, DESC=desc, QREG=qreg, WS=False, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    return run, [("out", out, p.out), ("log_sum", log_sum, p.log_sum[:, : p.tokens])]


def today(p: Problem, part: str) -> Run:
    if part == "forward":
        return (lambda: attention.forward_pass(p.inputs, p.ranges)), []
    if part == "query":
        return (lambda: attention.query_gradient_pass(p.inputs, p.ranges, p.out, p.log_sum_old, p.grad_out)), []
    if part == "ranges":
        return (lambda: attention.read_ranges(p.seen, attention.LARGE_TILES)), []
    return (lambda: attention.context_gradient_pass(p.inputs, p.ranges, p.log_sum_old, p.grad_out, p.delta_old)), []


VARIANTS: dict[str, Callable[[Problem], Run]] = {
    "gluon context st3": lambda p: gluon_context(p, 3),
    "gluon query k64 st4": lambda p: gluon_query(p, 64, 4),
    "gluon forward k128 st3": lambda p: gluon_forward(p, 128, 3),
    "today forward": lambda p: today(p, "forward"),
    "today query": lambda p: today(p, "query"),
    "today context": lambda p: today(p, "context"),
    "own w8": lambda p: own_gradient(p, 8),
    "tma context 64x64 st2 w4": lambda p: tma_context(p, 64, 64, 2, 4),
    "tma query k64 st3 w8": lambda p: tma_query(p, 64, 3, 8),
    "tma forward k128 st2 w8": lambda p: tma_forward(p, 128, 2, 8),
    "gluon forward k64 st6": lambda p: gluon_forward(p, 64, 6),
    "gluon forward k128 st2": lambda p: gluon_forward(p, 128, 2),
    "gluon query k64 st6": lambda p: gluon_query(p, 64, 6),
    "gluon query k64 st2": lambda p: gluon_query(p, 64, 2),
    "gluon context st2": lambda p: gluon_context(p, 2),
    "gluon context st4": lambda p: gluon_context(p, 4),
    "tma forward k64 st3 w8": lambda p: tma_forward(p, 64, 3, 8),
    "tma query k64 st2 w8 qreg": lambda p: tma_query(p, 64, 2, 8, qreg=True),
    "tma context 64x64 st2 w4 no init": lambda p: tma_context(p, 64, 64, 2, 4, init=False),
    "tma context 64x64 st3 w4": lambda p: tma_context(p, 64, 64, 3, 4),
    "tma context 32x128 st3 w8": lambda p: tma_context(p, 32, 128, 3, 8),
    "tma context 64x128 st2 w8": lambda p: tma_context(p, 64, 128, 2, 8),
    "tma forward k64 st2 w4": lambda p: tma_forward(p, 64, 2, 4),
    "own w4": lambda p: own_gradient(p, 4),
    "today ranges": lambda p: today(p, "ranges"),
}
TINY: dict[str, Callable[[Problem], Run]] = {
    "today query": lambda p: today(p, "query"),
    "own w8": lambda p: own_gradient(p, 8),
    "tma context": lambda p: tma_context(p, 8, 16, 1, 4, desc=False),
    "tma context, no init": lambda p: tma_context(p, 16, 32, 1, 4, desc=False, init=False),
    "tma query": lambda p: tma_query(p, 16, 1, 4, desc=False, qreg=True),
    "tma forward": lambda p: tma_forward(p, 16, 1, 4, desc=False),
    "tma forward desc": lambda p: tma_forward(p, 16, 1, 4),
    "tma context desc": lambda p: tma_context(p, 8, 16, 1, 4),
}


def off(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def time_ms(run: Callable[[], object], count: int) -> list[float]:
    run()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]


def work(name: str, tiny: bool) -> None:
    """One variant under both rules; a JSON line each."""
    for rule in ("full", "window"):
        line: dict[str, object] = {"variant": name, "rule": rule}
        try:
            problem = Problem(rule, tiny)
            run, compared = (TINY if tiny else VARIANTS)[name](problem)
            run()
            if not tiny:
                torch.cuda.synchronize()
            line["off"] = {what: float(f"{off(ours, theirs):.2e}") for what, ours, theirs in compared}
            again = [ours.clone() for _, ours, _ in compared]
            run()
            line["same bits"] = all(torch.equal(a, ours) for a, (_, ours, _) in zip(again, compared, strict=True))
            if not tiny:
                times = sorted(time_ms(run, 12))
                line |= {"ms": round(times[len(times) // 2], 3), "least_ms": round(times[0], 3)}
        except Exception as error:  # noqa: BLE001 - the next variant is still of interest
            line["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps(line), flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", default=None)
    parser.add_argument("--limit", type=float, default=75.0, help="seconds for one variant")
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, options.tiny)
        return 0
    started = time.monotonic()
    for name in TINY if options.tiny else VARIANTS:
        if options.only not in name:
            continue
        if time.monotonic() - started > options.budget:
            print(json.dumps({"variant": name, "error": "the budget is spent"}), flush=True)
            continue
        command = [
            sys.executable,
            "-m",
            "benchmarks.attention_trials",
            "--worker",
            name,
            *(["--tiny"] if options.tiny else []),
        ]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, timeout=options.limit * (10 if options.tiny else 1), capture_output=True, text=True
            )
            printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
            print("\n".join(printed) or json.dumps({"variant": name, "error": done.stderr[-400:]}), flush=True)
        except subprocess.TimeoutExpired as error:
            shown = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else (error.stdout or "")
            print(shown.strip(), json.dumps({"variant": name, "error": f"hung for {options.limit:g} s"}), flush=True)
        print(f"# {name}: {time.monotonic() - began:.0f} s, {time.monotonic() - started:.0f} s in all", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
