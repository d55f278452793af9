"""Compiles every kernel for a card that is not here and prints its resources as JSON, one kernel a line.

    python -m tests.remote.kernel_builds CAPABILITY [attention | hopper | others]...        (90: H200; 120: RTX PRO 6000)

Needs Triton, whose wheel brings the compiler, and no CUDA. Run it with TRITON_INTERPRET=0: tests choose the interpreter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource  # private: no public name compiles Gluon without a card

from remote.drafter.kernels import (
    adamw,
    attention,
    attention_hopper,
    attention_hopper_backward,
    attention_hopper_forward,
    column_sums,
    cross_entropy,
    exact_rows,
    norm,
    swiglu,
)
from remote.drafter.kernels.attention_backward import (
    context_gradient_kernel,
    own_gradient_kernel,
    query_gradient_kernel,
)
from remote.drafter.kernels.attention_forward import forward_kernel

POINTERS = {"log_sum_ptr": "*fp32", "delta_ptr": "*fp32", "start_ptr": "*i32", "end_ptr": "*i32", "seen_by_ptr": "*i32"}
FLOATS = ("scale", "eps", "hard", "soft")
FLOATS += ("decay", "step_size", "correction", "beta1", "rest1", "beta2", "rest2")  # of an update


def build(
    kernel: Any,
    constants: dict[str, Any],
    *,
    capability: int,
    pointers: dict[str, str] | None = None,
    copied: dict[str, str] | None = None,
) -> Any:
    """The compiled kernel; pointers are aligned and bf16 unless named otherwise. `copied`: types of what Gluon copies."""
    constants = dict(constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif copied and name in copied:
            signature[name] = copied[name]
        elif name.endswith("_ptr"):
            signature[name] = (POINTERS | (pointers or {})).get(name, "*bf16")
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
            if name == "count":  # of a weight's numbers
                attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source_of = GluonASTSource if copied else ASTSource
    source = source_of(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def builds(capability: int, part: str = "all") -> Iterator[tuple[str, Any]]:
    """At the shapes of drafters for 8B and 27B targets: 32 heads of 128 over 8, blocks of 32, width 5120, 248,320 tokens."""
    if part in ("all", "attention"):
        yield from _attention_builds(capability)
    if part in ("all", "hopper") and capability == 90:
        yield from _hopper_builds()
    if part in ("all", "others"):
        yield from _row_builds(capability)
        yield from _body_builds(capability)
        yield from _update_builds(capability)


def _attention_builds(capability: int) -> Iterator[tuple[str, Any]]:
    tiles = attention.LARGE_TILES if capability == 90 else attention.SMALL_TILES
    shape = attention.Shape(1024 * 32, 8000, 32, 8, 4, 128, "tf32")
    yield from _row_tile_builds(capability, shape, tiles, {"CAUSAL": False})
    context = shape.constants(tiles.context, is_whole=False)
    yield "attention context gradient", build(context_gradient_kernel, context, capability=capability)
    if (
        capability != 90
    ):  # as odd as they are taken: padded slots, and as many heads on a key as leave a product 16 long
        odd = attention.Shape(61 * 7, 471, 7, 1, 8, 128, "tf32")
        yield from _row_tile_builds(capability, odd, tiles, {"CAUSAL": True})


def _row_tile_builds(
    capability: int, shape: attention.Shape, tiles: attention.Tiles, whole: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    forward = shape.constants(tiles.forward, is_whole=True) | whole
    yield "attention forward", build(forward_kernel, forward, capability=capability)
    query = shape.constants(tiles.query, is_whole=True) | whole
    yield "attention query gradient", build(query_gradient_kernel, query, capability=capability)


def _hopper_builds() -> Iterator[tuple[str, Any]]:
    """Also as odd as they are taken: padded slots and heads, narrow heads."""
    for shape, whole in (
        (attention.Shape(1024 * 32, 8000, 32, 8, 4, 128, "tf32"), {"CAUSAL": False}),
        (attention.Shape(61 * 12, 471, 12, 2, 7, 64, "tf32"), {"CAUSAL": True}),
    ):
        yield from _hopper_builds_of(shape, whole)


def _hopper_builds_of(shape: attention.Shape, whole: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    tiles = attention.HOPPER_TILES
    own = attention_hopper.own_constants(shape) | whole
    yield "own gradients", build(own_gradient_kernel, own, capability=90)
    for name, kernel, tile in (
        ("Hopper forward", attention_hopper_forward.forward_kernel, tiles.forward),
        ("Hopper query gradient", attention_hopper_backward.query_gradient_kernel, tiles.query),
    ):
        copied = dict.fromkeys(("keys", "values", "block_keys", "block_values"), _copied(tile.keys, shape.head_dim))
        yield name, build(kernel, attention_hopper.constants(shape, tile) | whole, capability=90, copied=copied)
    rows = tiles.context.rows
    copied = dict.fromkeys(("keys", "values"), _copied(attention_hopper.CONTEXT_KEYS // 2, shape.head_dim))
    copied |= dict.fromkeys(("queries", "grads"), _copied(rows, shape.head_dim))
    copied |= dict.fromkeys(("log_sums", "deltas"), f"tensordesc<fp32[{rows}],{gl.NVMMASharedLayout(0, 32, 1)!r}>")
    context = attention_hopper.context_constants(shape, tiles.context)
    kernel = attention_hopper_backward.context_gradient_kernel
    yield "Hopper context gradient", build(kernel, context, capability=90, copied=copied)


def _copied(rows: int, width: int) -> str:
    return f"tensordesc<bf16[{rows}, {width}],{gl.NVMMASharedLayout(128, 16, 2)!r}>"


def _row_builds(capability: int) -> Iterator[tuple[str, Any]]:
    statistics, gradient = (
        cross_entropy.row_constants(248_320, tile) for tile in (cross_entropy.STATISTICS, cross_entropy.GRADIENT)
    )
    numbers = dict.fromkeys(("logits_ptr", "target_ptr", "weight_ptr", "entropy_ptr", "scale_ptr"), "*fp32")
    numbers |= dict.fromkeys(("label_logit_ptr", "target_log_sum_ptr", "soft_ce_ptr", "best_p_ptr"), "*fp32")
    numbers |= dict.fromkeys(
        ("label_ptr", "best_ptr", "likeliest_ptr", "rank_ptr", "target_row_ptr", "order_ptr"), "*i64"
    )
    gradient |= {"OUT_WIDTH": 2 * 248_320, "IN_PLACE": True}
    with_target = {
        "HAS_TARGET": True,
        "HAS_ORDER": True,
        "HAS_BEST": False,
        "HAS_OUT": True,
        "IS_COARSE": False,
        **gradient,
    }
    with_best = with_target | {"HAS_TARGET": False, "HAS_ORDER": False, "HAS_BEST": True}
    for name, kernel, constants in (
        ("row statistics", cross_entropy._statistics_kernel, {"HAS_LABEL": True, "NUM_LIKELIEST": 4, **statistics}),
        ("cross-entropy gradient", cross_entropy._cross_entropy_kernel, with_target),
        ("cross-entropy gradient, taught ahead", cross_entropy._cross_entropy_kernel, with_best),
        ("entropy gradient", cross_entropy._entropy_kernel, gradient),
    ):
        yield name, build(kernel, constants, capability=capability, pointers=numbers)
    coarse = with_best | {"IS_COARSE": True, "OUT_WIDTH": 4 * 248_320}
    in_fp8 = numbers | {"out_ptr": "*fp8e4nv"}
    yield "cross-entropy gradient in fp8", build(cross_entropy._cross_entropy_kernel, coarse, capability=capability, pointers=in_fp8)  # fmt: skip
    numbers = dict.fromkeys(("product_ptr", "scale_ptr", "coefficient_ptr", "other_ptr", "other_scale_ptr"), "*fp32")
    exact = {"WIDTH": 5120, "NUM_TOKENS": 6, "TILE": exact_rows.TILE, "HAS_OTHER": True, "num_warps": exact_rows.WARPS}
    numbers |= {"token_ptr": "*i64"}
    yield "exact rows", build(exact_rows._exact_rows_kernel, exact, capability=capability, pointers=numbers)
    sums = {"WIDTH": 248_320, "APART": 4 * 248_320, "ROWS": column_sums.ROWS, "TILE": column_sums.TILE}
    numbers = {"total_ptr": "*fp32", "weight_ptr": "*fp32", "rows_ptr": "*fp8e4nv"}
    yield "column sums", build(column_sums._column_sums_kernel, sums | {"num_warps": column_sums.WARPS}, capability=capability, pointers=numbers)  # fmt: skip


def _body_builds(capability: int) -> Iterator[tuple[str, Any]]:
    sums = dict.fromkeys(("scale_ptr", "partial_ptr", "shared_ptr"), "*fp32")
    width = {"WIDTH": 5120, "TILE": 8192}
    heads = {"SPREAD": 1, "HEADS": 32, "HEADS_PAD": 32, "HALF": 64}
    first = heads | {"SPREAD": 32}  # of the first layer, whose mask slots share a row
    inner = {"WIDTH": 17_408}
    for name, kernel, constants in (
        ("norm", norm._norm_kernel, width | {"num_warps": norm.NORM_WARPS}),
        ("norm gradient", norm._norm_gradient_kernel, width | {"num_warps": norm.NORM_WALK.warps}),
        ("heads", norm._head_kernel, heads | {"num_warps": norm.HEAD_WARPS}),
        ("heads gradient", norm._head_gradient_kernel, heads | {"num_warps": norm.HEAD_WALK.warps}),
        ("heads, spread", norm._head_kernel, first | {"num_warps": norm.HEAD_WARPS}),
        ("heads gradient, spread", norm._head_gradient_kernel, first | {"num_warps": norm.HEAD_WALK.warps}),
        ("swiglu", swiglu._swiglu_kernel, inner | swiglu.PRODUCT.constants(17_408)),
        ("swiglu gradient", swiglu._swiglu_gradient_kernel, inner | swiglu.GRADIENT.constants(17_408)),
    ):
        yield name, build(kernel, constants, capability=capability, pointers=sums)


def _update_builds(capability: int) -> Iterator[tuple[str, Any]]:
    numbers = dict.fromkeys(
        ("moved_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "divisor_ptr", "closed_ptr", "partial_ptr"), "*fp32"
    )
    squares = {"TILE": adamw.SQUARES.size, "SPAN": adamw.SPAN * adamw.SQUARES.size, "num_warps": adamw.SQUARES.warps}
    step = {"TILE": adamw.STEP.size, "HAS_DIVISOR": True, "HAS_MASTER": True, "num_warps": adamw.STEP.warps}
    for name, kernel, constants in (
        ("squares of gradients", adamw._square_kernel, squares), ("AdamW", adamw._step_kernel, step)
    ):  # fmt: skip
        yield name, build(kernel, constants, capability=capability, pointers=numbers)


def main(capability: int, *parts: str) -> None:
    for part in parts or ("all",):
        for name, built in builds(capability, part):
            sys.stdout.write(json.dumps({"kernel": name, "shared_bytes": built.metadata.shared}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
