"""Trials of attention kernels beside today's: each in a process of its own, checked, then timed.

python -m benchmarks.attention_trials [--budget SECONDS] [--only TEXT]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks import step
from remote.drafter.blocks import build_blocks, sample_anchors
from remote.drafter.kernels import attention, attention_hopper
from remote.drafter.kernels.attention import Tile
from remote.drafter.kernels.launch import power_of_two
from remote.drafter.keys import KeyValues
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


Run = tuple[Callable[[], object], list[tuple[str, Tensor, Tensor]]]
HOPPER = attention.HOPPER_TILES


def ranges_of(p: Problem, **tiles: Tile) -> attention.Ranges:
    return attention.read_ranges(p.seen, replace(HOPPER, **tiles))


def numbers(p: Problem) -> tuple[Tensor, Tensor]:
    return p.log_sum[:, : p.tokens].contiguous(), p.delta[:, : p.tokens].contiguous()


def forward(p: Problem, keys: int, stages: int) -> Run:
    ranges, got = ranges_of(p, forward=Tile(128, keys, stages, 4)), []

    def run() -> None:
        got[:] = attention.forward_pass(p.inputs, ranges)

    run()
    return run, [("out", got[0], p.out), ("log_sum", got[1], numbers(p)[0])]


def own(p: Problem, warps: int, stages: int) -> Run:
    ranges, got, (log_sum, delta) = ranges_of(p), [], numbers(p)
    shape = attention.Shape.of(p.inputs, ranges)
    constants = attention_hopper.own_constants(shape) | {"num_warps": warps, "num_stages": stages}
    found = attention_hopper.own_constants
    attention_hopper.own_constants = lambda _shape: constants

    def run() -> None:
        got[:] = attention_hopper.own_gradient_pass(p.inputs, ranges, shape, p.out, log_sum, p.grad_out)

    run()
    del found
    return run, [("delta", got[0], delta), ("key", got[1], p.grad_block_key), ("value", got[2], p.grad_block_value)]


def query(p: Problem, keys: int, stages: int) -> Run:
    ranges, got, (log_sum, _) = ranges_of(p, query=Tile(128, keys, stages, 4)), [], numbers(p)

    def run() -> None:
        got[:] = attention.query_gradient_pass(p.inputs, ranges, p.out, log_sum, p.grad_out)

    run()
    return run, [
        ("query", got[1], p.grad_query),
        ("key", got[2], p.grad_block_key),
        ("value", got[3], p.grad_block_value),
    ]


def context(p: Problem, rows: int, stages: int) -> Run:
    ranges, got, (log_sum, delta) = ranges_of(p, context=Tile(rows, 128, stages, 4)), [], numbers(p)

    def run() -> None:
        got[:] = attention.context_gradient_pass(p.inputs, ranges, log_sum, p.grad_out, delta)

    run()
    return run, [("key", got[0], p.grad_key), ("value", got[1], p.grad_value)]


def whole(p: Problem, tiles: attention.Tiles) -> Run:
    """Forward and backward as a layer calls them."""
    attend, got = attention.plan(p.seen, tiles=tiles), []
    inputs = [each.clone().requires_grad_() for each in p.inputs]

    def run() -> None:
        out = attend(inputs[0], KeyValues(*inputs[1:]))
        got[:] = [out, *torch.autograd.grad(out, inputs, p.grad_out)]

    run()
    known = (p.out, p.grad_query, p.grad_key, p.grad_value, p.grad_block_key, p.grad_block_value)
    return run, [(f"{index}", ours, theirs) for index, (ours, theirs) in enumerate(zip(got, known, strict=True))]


VARIANTS: dict[str, Callable[[Problem], Run]] = {
    "whole, Hopper": lambda p: whole(p, HOPPER),
    "whole, large tiles": lambda p: whole(p, attention.LARGE_TILES),
    "own w4 s1": lambda p: own(p, 4, 1),
    "own w4 s2": lambda p: own(p, 4, 2),
    "own w2 s1": lambda p: own(p, 2, 1),
    "own w8 s1": lambda p: own(p, 8, 1),
    "own w4 s3": lambda p: own(p, 4, 3),
    "forward k128 st3": lambda p: forward(p, 128, 3),
    "query with own, k64 st4": lambda p: query(p, 64, 4),
    "context r64 st3": lambda p: context(p, 64, 3),
    "query with own, k64 st2": lambda p: query(p, 64, 2),
    "query with own, k64 st3": lambda p: query(p, 64, 3),
    "query with own, k32 st6": lambda p: query(p, 32, 6),
    "context r32 st4": lambda p: context(p, 32, 4),
    "forward k128 st2": lambda p: forward(p, 128, 2),
    "forward k64 st4": lambda p: forward(p, 64, 4),
}

# rule, documents, blocks, tokens of a block, heads, key/value heads, head size, dtype
CHECKS = (
    ("full", (300, 170, 1), 61, 12, 32, 8, 128, BF16),
    ("specforge", (300, 170, 1), 61, 32, 32, 8, 128, BF16),
    ("modelopt", (300, 170, 1), 61, 12, 32, 8, 128, BF16),
    ("speculators", (300, 170, 1), 61, 24, 32, 8, 128, BF16),
    ("automodel", (1000, 500), 61, 16, 6, 2, 128, BF16),
    ("specforge", (40, 23), 9, 7, 3, 3, 128, BF16),
    ("full", (2000, 900), 100, 64, 14, 7, 64, BF16),
    ("full", (900, 700), 200, 16, 8, 8, 64, torch.float16),
    ("full", (1, 1), 3, 8, 32, 4, 128, BF16),
    ("specforge", (700,), 50, 2, 32, 1, 128, BF16),
)


def check(index: int) -> dict[str, object]:
    """Output and gradients against the reference in float64, each tensor's worst error; and the same bits twice."""
    rule, lengths, count, size, heads, groups, dim, dtype = CHECKS[index]
    row = step.packed_row(lengths, 1000)
    drawn = sample_anchors(
        row, num_slots=count, max_anchors=count, per="row", generator=torch.Generator().manual_seed(1)
    )
    blocks = build_blocks(row, *drawn, block_size=size, mask_token_id=3).to("cuda")
    seen = visible(FULL if rule == "full" else window_meaning(rule, max(70, size)), blocks, sum(lengths))
    generator = torch.Generator("cuda").manual_seed(5)
    sizes = [(count * size, heads, dim), *[(sum(lengths), groups, dim)] * 2, *[(count * size, groups, dim)] * 2]
    drawn_inputs = [torch.randn(each, generator=generator, device="cuda").to(dtype) for each in sizes]
    grad_out = torch.randn(sizes[0], generator=generator, device="cuda").to(dtype)

    def results(inputs: Sequence[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [each.clone().requires_grad_() for each in inputs]
        out = attend(inputs[0], KeyValues(*inputs[1:]))
        return [out.detach(), *torch.autograd.grad(out, inputs, grad_out.to(out.dtype), allow_unused=True)]  # type: ignore[list-item]

    ours, again = (results(drawn_inputs, attention.plan(seen)) for _ in range(2))
    oracle = results(
        [each.double() for each in drawn_inputs], lambda q, keys: attention.attention_reference(q, keys, seen)
    )
    used = attention.tiles_for(drawn_inputs[0]).is_hopper
    errors = [
        float("nan") if theirs is None else off64(mine, theirs) for mine, theirs in zip(ours, oracle, strict=True)
    ]
    return {
        "check": [str(each) for each in CHECKS[index]], "hopper": used, "off": [f"{each:.1e}" for each in errors],
        "same bits": all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)),
    }  # fmt: skip


def off64(ours: Tensor, theirs: Tensor) -> float:
    norm = float(theirs.norm())
    return float((ours.double() - theirs).norm()) / (norm if norm else 1.0)


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
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def work(name: str) -> None:
    """One variant under both rules, or one check; a JSON line each."""
    for rule in ("check",) if name.startswith("check") else ("full", "window"):
        line: dict[str, object] = {"variant": name, "rule": rule}
        try:
            line |= check(int(name.split()[1])) if rule == "check" else timed(name, rule)
        except Exception as error:  # noqa: BLE001 - the next variant is still of interest
            line["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps(line), flush=True)


def timed(name: str, rule: str) -> dict[str, object]:
    run, compared = VARIANTS[name](Problem(rule, False))
    torch.cuda.synchronize()
    times = sorted(time_ms(run, 12))
    found = {what: float(f"{off(ours, theirs):.2e}") for what, ours, theirs in compared}
    return {"off": found, "ms": round(times[len(times) // 2], 3), "least_ms": round(times[0], 3)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--worker", default=None)
    parser.add_argument("--limit", type=float, default=75.0, help="seconds for one variant")
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker)
        return 0
    started = time.monotonic()
    for name in (*list(VARIANTS)[:2], *(f"check {index}" for index in range(len(CHECKS))), *list(VARIANTS)[2:]):
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
        ]
        began = time.monotonic()
        try:
            done = subprocess.run(command, timeout=options.limit, capture_output=True, text=True)
            printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
            print("\n".join(printed) or json.dumps({"variant": name, "error": done.stderr[-400:]}), flush=True)
        except subprocess.TimeoutExpired as error:
            shown = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else (error.stdout or "")
            print(shown.strip(), json.dumps({"variant": name, "error": f"hung for {options.limit:g} s"}), flush=True)
        print(f"# {name}: {time.monotonic() - began:.0f} s, {time.monotonic() - started:.0f} s in all", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
