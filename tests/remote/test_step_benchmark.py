"""The benchmark of a step: its count of the least work, and a whole tiny run where little is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import account, products, step
from benchmarks.least_work import least_work
from benchmarks.step_parts import clock, profiled
from tests.remote.cuda import CPU, CUDA, needs_cuda

ROOT = Path(__file__).resolve().parents[2]
LOCAL_SIDE = (
    "transformers",
    "safetensors",
    "sqlmodel",
    "textual",
    "fabric",
    "paramiko",
    "pydantic",
    "click",
    "yaml",
    "matplotlib",
)
PARTS = {"body": 102.1 + 204.1 + 6.7, "attention": 38.5, "head": 2 * 80.4}  # TFLOP, counted by hand
TARGETS_LOGITS = 20.1  # of every position that a slot reads, once


@pytest.mark.parametrize("is_taught_ahead", [False, True])
def test_least_work_of_ddtree_is_what_was_counted(is_taught_ahead: bool) -> None:
    """Anchors are random: a few labels lie beyond the row."""
    case = step.CASES[0]
    row = step.packed_row(case.lengths, 1000)
    shape = step.Bench.__new__(step.Bench)
    shape.row, shape.case, shape.variant, shape.drafter = row, case, step.FUSED, step.LARGE.drafter
    made, plan = shape.blocks(1)

    work = least_work(
        step.LARGE.target, step.LARGE.drafter, made, plan, num_context=8000, is_taught_ahead=is_taught_ahead
    )

    counted = PARTS | {"head": PARTS["head"] + (0.0 if is_taught_ahead else TARGETS_LOGITS)}
    assert {part: getattr(work, part) / 1e12 for part in PARTS} == pytest.approx(counted, rel=0.01)


def test_a_profile_counts_products_by_shape() -> None:
    left, right = torch.randn(40, 50), torch.randn(50, 60)

    profile = profiled(lambda: [left @ right for _ in range(3)], CPU)

    product = next(each for each in profile.products if each.name == "mm 40×50 50×60")
    assert product.calls == 3
    assert product.tflop_s == pytest.approx(3 * 2 * 40 * 50 * 60 / product.ms / 1e9)
    assert [each.ms for each in profile.kernels] == sorted((each.ms for each in profile.kernels), reverse=True)
    assert any(each.name == "aten::mm" and each.calls == 3 for each in profile.kernels)


def test_what_a_budget_is_for_comes_first_and_a_text_names_rows_by_their_words() -> None:
    def rows(text: str) -> list[tuple[str, str]]:
        return [(case.name, variant.name) for case, variant in step._chosen(step.CASES, text)]

    first = [(case, variant.name) for case, variant in step.FIRST_ROWS]
    assert rows("")[: len(first)] == first
    assert len(set(rows(""))) == len(rows(""))
    assert rows("4096x") == first[-2:]
    assert rows("the first user") == [(case, step.FIRST_USER.name) for case in step.SMALLER]


def traced(kind: str, name: str, ts: float, dur: float, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "args": args}


def test_an_account_adds_up_to_the_step_and_names_parts_shapes_and_gaps() -> None:
    """Two steps on the host, whose kernels end later; the second one's kernels overlap once and wait once."""
    sizes = {"Input Dims": [[3, 4], [4, 5]], "Input Strides": [[4, 1], [1, 4]]}
    trace = {
        "traceEvents": [
            traced("user_annotation", "account step 0", 0, 10),
            traced("user_annotation", "account step 1", 10, 10),
            traced("user_annotation", "account part forward", 14, 0),
            traced("cpu_op", "aten::mm", 11, 2, **{"External id": 7}, **sizes),
            traced("cuda_runtime", "launch", 5, 1, correlation=1),
            traced("cuda_driver", "launch", 12, 1, correlation=2),
            traced("cuda_driver", "launch", 16, 1, correlation=3),
            traced("kernel", "last of the first", 20, 10, correlation=1, grid=[1, 1, 1]),
            traced("kernel", "product", 25, 15, correlation=2, grid=[2, 1, 1], **{"External id": 7}),
            traced("gpu_memcpy", "copy", 47, 3, correlation=3),
        ]
    }

    before, now = account.read_trace(trace)
    found = account.account(before, now)

    assert (found.span_ms, found.kernels_ms, found.gaps_ms, found.overlap_ms) == (0.02, 0.018, 0.007, 0.005)
    assert found.span_ms == pytest.approx(found.kernels_ms + found.gaps_ms - found.overlap_ms)
    said = list(account.lines("ddtree", found))
    product = next(line for line in said if line["kind"] == "kernel" and line["kernel"] == "product")
    assert (product["part"], product["op"], product["shapes"]) == ("forward", "aten::mm", "[3, 4] [4, 5]T")
    gap = next(line for line in said if line["kind"] == "gap before")
    assert (gap["kernel"], gap["part"], gap["ms"]) == ("copy", "after the last part", 0.007)


@pytest.mark.parametrize("layout", products.LAYOUTS)
def test_a_product_is_the_same_in_every_layout(layout: str) -> None:
    small = products.Product("small", 8, 6, 4, layout)

    left, right = products.operands(small, layout, CPU)
    out = products.multiply(small, layout, left, right)()

    expected = left.float() @ right.float()
    assert torch.allclose((out if layout[2] == "r" else out.T).float(), expected, atol=0.1)
    by_columns = [tensor.stride(0) == 1 for tensor in (left, right)]
    assert by_columns == [place == "c" for place in layout[:2]]


@needs_cuda
def test_on_a_card_each_part_has_its_own_peak_and_kernels() -> None:
    mib = 2**20
    marks = clock(CUDA, with_peaks=True)
    kept = []
    marks("start")

    kept.append(torch.empty(64 * mib, dtype=torch.uint8, device=CUDA))
    del kept[:]
    marks("first")
    kept.append(torch.empty(32 * mib, dtype=torch.uint8, device=CUDA))
    marks("second")
    square = torch.ones(1024, 1024, device=CUDA)
    profile = profiled(lambda: [square @ square for _ in range(3)], CUDA)

    start, first, second = (marks.peaks[part] for part in ("start", "first", "second"))
    assert (first.highest - start.left) * 1024 == pytest.approx(64)
    assert (second.highest - start.left) * 1024 == pytest.approx(32)
    assert (first.left - start.left, (second.left - start.left) * 1024) == pytest.approx((0, 32))
    assert sum(each.calls for each in profile.kernels) >= 3
    assert profile.products[0].name == "mm 1024×1024 1024×1024"
    assert profile.attention_ms == 0


@pytest.mark.slow  # one case by every variant that runs on a CPU, in a process of its own
@pytest.mark.timeout(900)  # torch's compiler: 20 s of processor time, and minutes where others want it too
def test_a_tiny_run_writes_its_pages_without_the_local_side(tmp_path: Path) -> None:
    code = "import os, runpy, sys\nos.environ['TRITON_INTERPRET'] = '0'\n"
    code += f"sys.modules.update(dict.fromkeys({LOCAL_SIDE!r}))\n"  # importing one of them fails now
    code += f"sys.argv[1:] = ['--small', '--only', 'ddtree', '--out', {str(tmp_path)!r}]\n"
    code += "runpy.run_module('benchmarks.step', run_name='__main__')"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert len(rows) == 10
    assert "first user" in rows[1]["variant"]
    assert all(row["step_ms"] > 0 for row in rows)
    page = (tmp_path / "step.md").read_text()
    assert all(f"| {row['case']} | {row['variant']} |" in page for row in rows)
    assert "to be won" in page
    assert rows[0]["kernels"]
    assert all(f"| `{each['name']}` | {each['calls']} |" in page for each in rows[0]["kernels"])
    assert all(f"| {each['name']} | {each['calls']} |" in page for each in rows[0]["products"])
    assert not rows[1]["kernels"]  # of the fused variant alone
    assert (tmp_path / "step.svg").read_text().count("<rect") == 1 + 2 * len(rows)
