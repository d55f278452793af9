"""The products of a training step by themselves, on a card as warm as inside a step: every layout, setting and algorithm.

    python -m benchmarks.products [--what layouts settings algorithms rows] [--out FILE]

JSON lines. C (m × n) = A (m × k) · B (k × n); each operand lies by rows (r) or by columns (c), C last: "rcr" is what
`x @ weight.T` does. A card that is driven to its power limit is slower than one that has just begun, so every
measurement follows a tenth of a second of other products. `algorithms` asks cuBLASLt for all that it would
consider and times each; torch takes the first. What a whole step does is `benchmarks.account`'s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cublaslt
from benchmarks.account import say
from benchmarks.step_parts import clock
from remote.drafter.kernels import cross_entropy
from remote.drafter.kernels.launch import RowTile

WARM_UP_S, FILLER_MS, TIMED_MS = 2.0, 90.0, 50.0
T, M, S = 32_768, 31_700, 8_000  # block tokens, those that carry loss, context
H, F, Q, G, V = 5_120, 17_408, 4_096, 1_024, 248_320
LARGE = 4e12  # operations of a product whose algorithms are compared
ROW_TILES = ((256, 4, 3), (512, 4, 1), (512, 4, 2), (512, 4, 3), (512, 8, 2), (1024, 4, 1), (1024, 4, 2), (1024, 8, 2), (1024, 8, 3), (1024, 4, 3))  # fmt: skip
LAYOUTS = tuple(a + b + c for a in "rc" for b in "rc" for c in "rc")


@dataclass(frozen=True)
class Product:
    """One of the step's; `now` is the layout that it has there."""

    name: str
    m: int
    n: int
    k: int
    now: str
    is_float32: bool = False  # the result
    spread: int = 1  # A's rows lie so many times their width apart

    @property
    def operations(self) -> float:
        return 2.0 * self.m * self.n * self.k


PRODUCTS = (
    Product("gate, up", T, F, H, "rcr"),
    Product("down", T, H, F, "rcr"),
    Product("gate, up: weight", F, H, T, "crr"),
    Product("down: weight", H, F, T, "crr"),
    Product("down: input", T, F, H, "rrr"),
    Product("gate, up: input", T, H, F, "rrr"),
    Product("queries", T, Q, H, "rcr"),
    Product("output", T, H, Q, "rcr"),
    Product("queries: weight", Q, H, T, "crr"),
    Product("output: weight", H, Q, T, "crr"),
    Product("keys", T, G, H, "rcr"),
    Product("keys: input", T, H, G, "rrr"),
    Product("keys: weight", G, H, T, "crr"),
    Product("fc", S, H, 5 * H, "rcr"),
    Product("fc: weight", H, 5 * H, S, "crr"),
    Product("context keys", S, G, H, "rcr"),
    Product("context keys: weight", G, H, S, "crr"),
    Product("logits", 1643, V, H, "rcr", is_float32=True),
    Product("logits: hidden", 1643, H, V, "rrr"),
)
HEADS = (
    *(Product(f"logits of {m}", m, V, H, "rcr", is_float32=True) for m in (1536, 1612, 1664, 1674, 1792, 2048, 3328)),
    *(Product(f"target's logits of {m}", m, V, H, "rcr", is_float32=True) for m in (384, 400, 415, 430, 450, 512, 768, 1024)),
    *(Product(f"logits of {m}, 16 bits", m, V, H, "rcr") for m in (415, 1643)),
    *(Product(f"logits: hidden of {m}, rows apart", m, H, V, "rrr", spread=2) for m in (1612, 1643, 1664, 3328)),
)  # fmt: skip
SMALL_T = tuple(
    Product(f"8192: {name}", *size, now)
    for name, size, now in (
        ("gate, up", (8192, F, H), "rcr"), ("down", (8192, H, F), "rcr"), ("gate, up: weight", (F, H, 8192), "crr"),
        ("down: weight", (H, F, 8192), "crr"), ("queries", (8192, Q, H), "rcr"), ("keys", (8192, G, H), "rcr"),
        ("queries: weight", (Q, H, 8192), "crr"), ("keys: weight", (G, H, 8192), "crr"),
    )
)  # fmt: skip


class Warm:
    """Keeps the card at its limit between measurements."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.left, self.right = draw((T, H), device), draw((H, F), device)
        self.run(WARM_UP_S * 1e3)

    def run(self, ms: float) -> None:
        for _ in range(max(1, round(ms / 8))):  # 8 ms each
            self.left @ self.right

    def time(self, act: Callable[[], object], operations: float) -> float:
        """Milliseconds of one, the median of about `TIMED_MS`."""
        act()
        self.run(FILLER_MS)
        count = max(5, min(40, round(TIMED_MS / (operations / 700e9))))
        marks = clock(self.device)
        marks("start")
        for _ in range(count):
            act()
            marks("product")
        return statistics.median(marks.milliseconds("product"))


def draw(size: tuple[int, int], device: torch.device) -> Tensor:
    return torch.empty(size, device=device, dtype=torch.bfloat16).normal_()


def operands(product: Product, layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """A and B as they lie in `layout`."""
    left = draw((product.m, product.k), device) if layout[0] == "r" else draw((product.k, product.m), device).T
    right = draw((product.k, product.n), device) if layout[1] == "r" else draw((product.n, product.k), device).T
    if product.spread > 1:
        left = draw((product.m, product.k * product.spread), device)[:, : product.k]
    return left, right


def multiply(product: Product, layout: str, left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    """The product; by columns it is the transposed one by rows."""
    first, second = (left, right) if layout[2] == "r" else (right.T, left.T)
    if product.is_float32:
        return lambda: torch.mm(first, second, out_dtype=torch.float32)
    return lambda: torch.mm(first, second)


def layouts(warm: Warm, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every product in every layout; those of the head's sizes in their own."""
    for product in (*PRODUCTS, *HEADS, *SMALL_T):
        for layout in LAYOUTS if product in PRODUCTS and product.n != V else (product.now,):
            act = multiply(product, layout, *operands(product, layout, device))
            yield _line("layout", product, warm.time(act, product.operations), layout=layout, now=layout == product.now)


def settings(warm: Warm, device: torch.device, *, name: str = "") -> Iterator[dict[str, Any]]:
    """The products as they are, under torch's settings; `name` says what the process was started with."""
    matmul = torch.backends.cuda.matmul
    for library in ("cublas", "cublaslt"):
        for reduced in (True, False):
            torch.backends.cuda.preferred_blas_library(library)
            matmul.allow_bf16_reduced_precision_reduction = reduced
            if name and (library, reduced) not in (("cublas", True), ("cublaslt", True)):
                continue
            for product in PRODUCTS:
                act = multiply(product, product.now, *operands(product, product.now, device))
                ms = warm.time(act, product.operations)
                yield _line("setting", product, ms, library=library, reduced=reduced, started_with=name)
    torch.backends.cuda.preferred_blas_library("cublas")
    matmul.allow_bf16_reduced_precision_reduction = True


def algorithms(warm: Warm, device: torch.device) -> Iterator[dict[str, Any]]:
    """Each of cuBLASLt's own suggestions, in its order, with two sizes of workspace."""
    for workspace_mib in (32, 128):
        library = cublaslt.Library(device, workspace_bytes=workspace_mib * 1024**2)
        for product in (each for each in (*PRODUCTS, *SMALL_T) if each.operations > LARGE):
            left, right = operands(product, product.now, device)
            out = torch.empty(
                product.m, product.n, device=device, dtype=torch.float32 if product.is_float32 else torch.bfloat16
            )
            wanted = left.double()[:4] @ right.double()[:, :64]
            for rank, found in enumerate(library.suggestions(left, right, out)):
                if found.workspace_bytes <= 32 * 1024**2 and workspace_mib > 32:
                    continue  # timed already
                out.zero_()
                found.run()
                error = float((out[:4, :64].double() - wanted).norm() / wanted.norm())
                ms = warm.time(found.run, product.operations)
                yield _line("algorithm", product, ms, rank=rank, workspace=found.workspace_bytes, waves=found.waves, config=found.config(), error=error)  # fmt: skip


def rows(warm: Warm, device: torch.device) -> Iterator[dict[str, Any]]:
    """The loss's visits of a chunk's logits by tile; the slots of a block have teachers of their own, a step apart."""
    logits = torch.empty(1643, V, device=device).normal_()
    label = torch.arange(1643, device=device)
    for size, warps, stages in ROW_TILES:
        tile = RowTile(size, warps, stages)
        ms = warm.time(lambda tile=tile: cross_entropy.row_statistics(logits, label, tile=tile), 1e12)
        yield {"kind": "statistics", "tile": size, "warps": warps, "stages": stages, "ms": round(ms, 4)}
    read = cross_entropy.row_statistics(logits, label)
    taught = logits[:448]
    index = (torch.arange(1643, device=device) // 31 * 8 + torch.arange(1643, device=device) % 31).clamp(max=447)
    weight, out = torch.ones(1643, device=device), torch.empty_like(logits, dtype=torch.bfloat16)
    for order in (None, index.argsort(stable=True)):
        target = cross_entropy.TargetRows(taught, read.log_sum_M[:448], index, order)
        for size, warps in ((4096, 16), (4096, 8), (2048, 8), (8192, 16)):
            act = partial(
                cross_entropy.cross_entropy_gradient, logits, read.log_sum_M, label, weight,
                hard=1.0, soft=0.15, target=target, out_MV=out, tile=RowTile(size, warps),
            )  # fmt: skip
            ms = warm.time(act, 1e12)
            yield {
                "kind": "gradient",
                "is_ordered": order is not None,
                "tile": size,
                "warps": warps,
                "ms": round(ms, 4),
            }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", nargs="+", default=["layouts", "settings", "algorithms"])
    parser.add_argument("--out", type=Path, help="a file for the lines, beside standard output")
    parser.add_argument("--started-with", default="", help="what the environment sets, for the lines of `settings`")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("products are timed on a card; this machine has none")
    device = torch.device("cuda", 0)
    began_s, warm = time.monotonic(), Warm(device)
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "layouts": lambda: layouts(warm, device),
        "settings": lambda: settings(warm, device, name=options.started_with),
        "algorithms": lambda: algorithms(warm, device),
        "rows": lambda: rows(warm, device),
    }
    with Path(options.out or os.devnull).open("a", encoding="utf-8") as file:
        for part in options.what:
            for line in parts[part]():
                say(line, file)
            say({"kind": "took", "part": part, "s": round(time.monotonic() - began_s, 1), **_state()}, file)
    return 0


def _line(kind: str, product: Product, ms: float, **more: object) -> dict[str, Any]:
    size = {"product": product.name, "m": product.m, "n": product.n, "k": product.k}
    return {"kind": kind, **size, "ms": round(ms, 4), "tflop_s": round(product.operations / ms / 1e9, 1), **more}


def _state() -> dict[str, str]:
    """The card's clock and power as its own tool reads them, where that is installed."""
    asked = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except OSError:
        return {}
    return {"card": said.stdout.strip()}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
