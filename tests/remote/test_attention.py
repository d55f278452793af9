"""Every backend against one query, one head, one key at a time in float64; memory that stays bounded."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from remote.drafter import attention_flex, attention_sdpa
from remote.drafter.attention import Backend, choose_backend, eager_attention
from remote.drafter.keys import KeyValues
from remote.drafter.visibility import Visibility, dense_mask, layer_rule, visible
from remote.spec import DrafterSpec
from tests.remote.cuda import needs_cuda
from tests.remote.packed import blocks_of, packed_row, relative_error
from tests.remote.specs import tiny_spec

CPU = torch.device("cpu")
RULES = ("full", "specforge", "automodel", "modelopt", "speculators")
UNFUSED = "ignore:flex_attention called without torch.compile:UserWarning"  # what a check on the CPU is


def drafter(rule: str = "full", *, block_size: int = 4) -> DrafterSpec:
    spec = replace(tiny_spec().drafter, block_size=block_size)
    if rule == "full":
        return spec
    return replace(spec, layer_types=["sliding", "full"], sliding_window=2 * block_size - 1, window_rule=rule)


def ranges(
    rule: str = "full", *, lengths: tuple[int, ...] = (30, 17, 1), num_slots: int = 13, block_size: int = 4
) -> Visibility:
    """Documents, padding, and two unused blocks."""
    row = packed_row(list(lengths), padding=3)
    blocks = blocks_of(row, num_slots=num_slots, max_anchors=num_slots - 2, block_size=block_size)
    return visible(layer_rule(drafter(rule, block_size=block_size), 0), blocks, len(row.input_ids_S))


def inputs(
    seen: Visibility, *, heads: int = 4, kv_heads: int = 2, dim: int = 8, dtype=torch.float64, device=CPU
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, context = seen.start_T.shape[0], seen.num_context
    sizes = [(tokens, heads), (context, kv_heads), (context, kv_heads), (tokens, kv_heads), (tokens, kv_heads)]
    return [
        torch.randn(*size, dim, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for size in sizes
    ]


def results(backend: Backend, seen: Visibility, tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of all five inputs, for one fixed upstream gradient."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = backend.plan(seen)(leaves[0], KeyValues(*leaves[1:]))
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def attention_by_loops(tensors: list[Tensor], seen: Visibility) -> Tensor:
    query, context_key, context_value, block_key, block_value = tensors
    key, value = torch.cat([context_key, block_key]), torch.cat([context_value, block_value])
    group, mask = query.shape[1] // key.shape[1], dense_mask(seen)
    out = torch.zeros_like(query)
    for t in range(query.shape[0]):
        columns = mask[t].nonzero().flatten().tolist()
        for h in range(query.shape[1]):
            score = [math.exp(float(query[t, h] @ key[c, h // group]) / math.sqrt(query.shape[2])) for c in columns]
            for c, weight in zip(columns, score, strict=True):
                out[t, h] += weight / sum(score) * value[c, h // group]
    return out


@pytest.mark.parametrize("rule", RULES)
def test_eager_equals_the_loops(rule: str) -> None:
    seen = ranges(rule)
    tensors = inputs(seen)

    with torch.no_grad():
        out = eager_attention(tensors[0], KeyValues(*tensors[1:]), seen)
        oracle = attention_by_loops(tensors, seen)

    assert relative_error(out, oracle) < 1e-13


@pytest.mark.parametrize("workspace_bytes", [1, 40_000, 1 << 40])
@pytest.mark.parametrize("rule", RULES)
def test_sdpa_equals_eager_with_gradients_however_it_is_chunked(rule: str, workspace_bytes: int) -> None:
    seen = ranges(rule)
    tensors = inputs(seen)

    for ours, oracle in zip(
        results(Backend("sdpa", "test", workspace_bytes), seen, tensors),
        results(Backend("eager", "test"), seen, tensors),
        strict=True,
    ):
        assert relative_error(ours, oracle) < 1e-13


@pytest.mark.slow
@pytest.mark.filterwarnings(UNFUSED)
@pytest.mark.parametrize("rule", RULES)
def test_flex_forward_equals_eager(rule: str) -> None:
    seen = ranges(rule, lengths=(150, 90, 1), num_slots=41, block_size=6)
    tensors = [tensor.detach() for tensor in inputs(seen, dim=16)]

    with torch.no_grad():
        out = Backend("flex", "test").plan(seen)(tensors[0], KeyValues(*tensors[1:]))
        oracle = eager_attention(tensors[0], KeyValues(*tensors[1:]), seen)

    assert relative_error(out, oracle) < 1e-13


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tile", [8, 16, 128])
def test_flex_tiles_expand_to_the_exact_mask(rule: str, tile: int) -> None:
    seen = ranges(rule, lengths=(60, 45, 1), num_slots=19, block_size=5)

    mask = attention_flex.block_mask(seen, tile)

    expanded = torch.zeros_like(dense_mask(seen))
    whole = _tiles(mask.full_kv_num_blocks, mask.full_kv_indices)
    for query_tile, key_tile in [*whole, *_tiles(mask.kv_num_blocks, mask.kv_indices)]:
        rows = torch.arange(query_tile * tile, min((query_tile + 1) * tile, expanded.shape[0]))
        columns = torch.arange(key_tile * tile, min((key_tile + 1) * tile, expanded.shape[1]))
        inside = mask.mask_mod(0, 0, rows[:, None], columns[None])
        assert not expanded[rows[:, None], columns].any(), "a tile is listed twice"
        assert inside.all() or (query_tile, key_tile) not in whole
        expanded[rows[:, None], columns] = inside
    assert torch.equal(expanded, dense_mask(seen))


def _tiles(count: Tensor, index: Tensor) -> list[tuple[int, int]]:
    return [(row, tile) for row in range(count.shape[-1]) for tile in index[0, 0, row, : count[0, 0, row]].tolist()]


@pytest.mark.slow
def test_sdpa_gradient_passes_gradcheck() -> None:
    seen = ranges("specforge", lengths=(7, 5), num_slots=4, block_size=2)
    tensors = inputs(seen, heads=2, kv_heads=1, dim=2)
    attend = Backend("sdpa", "test", workspace_bytes=1).plan(seen)

    assert torch.autograd.gradcheck(lambda query, *keys: attend(query, KeyValues(*keys)), tensors)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_rows_of_unused_blocks_are_finite_and_read_no_context(name: str) -> None:
    row = packed_row([1, 1], padding=2)
    blocks = blocks_of(row, num_slots=3, block_size=4)
    seen = visible(layer_rule(drafter(), 0), blocks, 4)
    tensors = inputs(seen)

    out, *grads = results(Backend(name, "test"), seen, tensors)

    assert torch.isfinite(out).all()
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[1].any()
    assert not grads[2].any()


def test_chunks_cover_all_rows_and_keep_the_budget() -> None:
    seen = ranges("full", lengths=(400, 300), num_slots=120)
    shape = attention_sdpa.HeadShape(num_heads=8, num_kv_heads=2, head_dim=16, element_bytes=2, fused=False)
    one_block = max(
        attention_sdpa.chunk_bytes(chunk, shape)
        for chunk in attention_sdpa.cut_chunks(seen, shape, workspace_bytes=1, launch_pairs=1 << 40)
    )

    chunks = attention_sdpa.cut_chunks(seen, shape, workspace_bytes=4 * one_block, launch_pairs=1 << 40)

    assert [chunk.rows[0] for chunk in chunks] == [0, *(chunk.rows[1] for chunk in chunks[:-1])]
    assert chunks[-1].rows[1] == 480
    assert 4 < len(chunks) < 120
    assert all(attention_sdpa.chunk_bytes(chunk, shape) <= 4 * one_block for chunk in chunks)


def test_chunks_keep_documents_apart_where_joining_would_waste_work() -> None:
    seen = ranges("full", lengths=(200, 200, 200), num_slots=62)
    shape = attention_sdpa.HeadShape(8, 2, 16, 2, fused=True)

    chunks = attention_sdpa.cut_chunks(seen, shape, workspace_bytes=1 << 40, launch_pairs=4000)

    assert len(chunks) < 30
    assert all(chunk.context[0] // 200 == max(chunk.context[0], chunk.context[1] - 1) // 200 for chunk in chunks)


def test_math_kernel_counts_float32_scores_of_every_head() -> None:
    """182 blocks of 16 over 8,032 keys, 32 heads: the fallback that once asked for 22 GiB is what is counted."""
    chunk = attention_sdpa.Chunk(rows=(0, 16), context=(0, 8000))
    fused = attention_sdpa.HeadShape(32, 8, 128, element_bytes=2, fused=True)

    extra = attention_sdpa.chunk_bytes(chunk, replace(fused, fused=False)) - attention_sdpa.chunk_bytes(chunk, fused)

    scores = 32 * 16 * 8016 * 4
    assert extra > attention_sdpa.MATH_SCORE_COPIES * scores


def test_sdpa_keeps_only_its_inputs_for_the_backward() -> None:
    seen = ranges("full", lengths=(300,), num_slots=60)
    tensors = inputs(seen)
    attend = Backend("sdpa", "test", workspace_bytes=1).plan(seen)
    kept: list[int] = []

    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.data_ptr()), x)[1], lambda x: x):
        attend(tensors[0], KeyValues(*tensors[1:]))

    assert sorted(kept) == sorted(tensor.data_ptr() for tensor in tensors)


def test_auto_on_a_cpu_is_sdpa_and_says_why() -> None:
    backend = choose_backend(drafter(), device=CPU, dtype=torch.float32)

    assert backend.name == "sdpa"
    assert "gradients need CUDA" in backend.reason
    assert backend.workspace_bytes == drafter().attention_workspace_bytes


@pytest.mark.parametrize(("name", "message"), [("flex", "gradients need CUDA"), ("triton", "Triton needs CUDA")])
def test_backend_that_cannot_work_here_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_backend(replace(drafter(), attention=name), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_backend_asked_for_is_taken(name: str) -> None:
    backend = choose_backend(replace(drafter(), attention=name), device=CPU, dtype=torch.float32)

    assert backend.name == name
    assert "asked for by the recipe" in backend.reason


def test_four_threads_share_one_plan() -> None:
    seen = ranges("specforge")
    tensors = inputs(seen)
    backend = Backend("sdpa", "test", 40_000)
    once, seen_by_thread = results(backend, seen, tensors), {}
    threads = [
        threading.Thread(target=lambda number=number: seen_by_thread.update({number: results(backend, seen, tensors)}))
        for number in range(4)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert len(seen_by_thread) == 4
    for each in seen_by_thread.values():
        assert all(torch.equal(ours, alone) for ours, alone in zip(each, once, strict=True))


# ---- on a card: flex, sdpa and eager, with gradients

CUDA = torch.device("cuda")


def on_cuda(seen: Visibility) -> Visibility:
    return replace(seen, start_T=seen.start_T.to(CUDA), end_T=seen.end_T.to(CUDA))


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float32, 1e-3)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["flex", "sdpa", "triton"])  # triton: its reference where float32 does not fit
def test_cuda_backends_equal_float64_with_gradients(name: str, rule: str, dtype: torch.dtype, tolerance: float) -> None:
    """Oracle: the eager backend in float64 on the same rounded inputs."""
    seen = on_cuda(ranges(rule, lengths=(300, 170, 1), num_slots=61, block_size=12))
    tensors = [tensor.detach() for tensor in inputs(seen, heads=8, kv_heads=2, dim=64, dtype=dtype, device=CUDA)]

    ours = results(Backend(name, "test"), seen, tensors)

    oracle = results(Backend("eager", "test"), seen, [tensor.double() for tensor in tensors])
    assert [relative_error(a, b) < tolerance for a, b in zip(ours, oracle, strict=True)] == [True] * 6


@needs_cuda
def test_sdpa_on_cuda_stays_in_its_workspace() -> None:
    """Shape of a known failure: 182 blocks over 8,032 keys with 32 heads of 128, gradients on."""
    seen = on_cuda(ranges("full", lengths=(8000,), num_slots=182, block_size=32))
    tensors = [
        tensor.detach() for tensor in inputs(seen, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, device=CUDA)
    ]
    workspace = 512 * 1024**2
    results(Backend("sdpa", "test", workspace), seen, tensors)  # libraries take their own memory at the first call
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    kept = results(Backend("sdpa", "test", workspace), seen, tensors)

    held = sum(tensor.numel() * 4 for tensor in kept)  # output, upstream and gradients, the context's in float32
    held += 3 * kept[0].numel() * 8  # the test's own float64 draw
    assert torch.cuda.max_memory_allocated() - before < workspace + 2 * held


FOUR_THREADS = """
import threading, torch
from tests.remote.test_attention import Backend, KeyValues, inputs, on_cuda, ranges, results
seen = on_cuda(ranges("full", lengths=(300, 170), num_slots=61, block_size=12))
tensors = [t.detach() for t in inputs(seen, heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16, device="cuda")]
barrier, done = threading.Barrier(4), []
def start():
    barrier.wait()
    done.append(results(Backend("flex", "test"), seen, tensors))
threads = [threading.Thread(target=start, daemon=True) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(timeout=50)
assert len(done) == 4, f"{len(done)} of 4 threads came back"
assert all(torch.equal(each[0], done[0][0]) for each in done)
"""


@needs_cuda
@pytest.mark.parametrize("start", range(20))
def test_four_threads_may_make_the_first_flex_call_at_once(start: int) -> None:
    """Without the lock this hangs in some of the starts (torch 2.11 on this kind of card); each must end in 60 s."""
    subprocess.run([sys.executable, "-c", FOUR_THREADS], check=True, timeout=60)
