"""The attention kernels against eager attention in float64, values and gradients, in Triton's interpreter and on a card."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from remote.drafter.attention import Backend
from remote.drafter.kernels import attention, attention_hopper, gluon
from remote.drafter.kernels.attention import Case, Shape, Tile, Tiles
from remote.drafter.visibility import Visibility, dense_mask, layer_rule, visible
from remote.own_attention import power_of_two
from tests.remote.cuda import CPU, CUDA, in_interpreter, needs_cuda
from tests.remote.packed import blocks_of, packed_row, relative_error
from tests.remote.test_attention import RULES, drafter, inputs, on_cuda, ranges, results

TILES = {
    "one block a tile": Tiles(Tile(8, 16, 1, 4), Tile(8, 16, 1, 4), Tile(8, 32, 1, 4)),
    "four blocks a tile, half a block backwards": Tiles(Tile(64, 8, 1, 4), Tile(64, 16, 1, 4), Tile(8, 8, 1, 4)),
}
EAGER = Backend("eager", "oracle")


class Kernels:
    """A backend with tiles of the test's own."""

    def __init__(self, tiles: Tiles | None) -> None:
        self.tiles = tiles

    def plan(self, seen: Visibility):
        return attention.plan(seen, tiles=self.tiles)


def errors(seen: Visibility, tiles: Tiles | None, **shape) -> list[float]:
    """Of the output and the five gradients, against float64 on the same rounded inputs."""
    tensors = [tensor.detach() for tensor in inputs(seen, **shape)]
    ours = results(Kernels(tiles), seen, tensors)
    oracle = results(EAGER, seen, [tensor.double() for tensor in tensors])
    return [relative_error(a, b) for a, b in zip(ours, oracle, strict=True)]


FLOAT = {"dim": 16, "dtype": torch.float32}


@pytest.mark.slow  # the interpreter takes about a second a case
@in_interpreter
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("rule", RULES)
def test_kernels_equal_float64_under_every_rule(rule: str, tiles: str) -> None:
    """Three documents, padding, unused blocks; three query heads a group, which is no power of two."""
    assert max(errors(ranges(rule), TILES[tiles], heads=6, kv_heads=2, **FLOAT)) < 1e-6


@pytest.mark.slow
@in_interpreter
@pytest.mark.parametrize(("block_size", "heads", "kv_heads"), [(2, 2, 2), (3, 4, 1), (6, 2, 1), (7, 3, 3)])
def test_odd_blocks_and_groups_equal_float64(block_size: int, heads: int, kv_heads: int) -> None:
    seen = ranges("specforge", lengths=(40, 23), num_slots=9, block_size=block_size)

    assert max(errors(seen, TILES["one block a tile"], heads=heads, kv_heads=kv_heads, **FLOAT)) < 1e-6


@pytest.mark.slow
@in_interpreter
def test_the_tiles_of_a_card_equal_float64() -> None:
    seen = ranges("full", lengths=(200, 130), num_slots=19, block_size=12)

    assert max(errors(seen, attention.LARGE_TILES, heads=4, kv_heads=1, **FLOAT)) < 1e-6
    assert max(errors(seen, attention.SMALL_TILES, heads=4, kv_heads=1, **FLOAT)) < 1e-6


@pytest.mark.slow
@in_interpreter
def test_rows_without_context_read_none_in_the_kernels() -> None:
    """Documents of one token: every block stands on its own, and unused ones too."""
    row = packed_row([1, 1], padding=2)
    seen = visible(layer_rule(drafter(), 0), blocks_of(row, num_slots=3, block_size=4), 4)
    tensors = [tensor.detach() for tensor in inputs(seen, **FLOAT)]

    out, *grads = results(Kernels(TILES["one block a tile"]), seen, tensors)

    assert all(torch.isfinite(tensor).all() for tensor in (out, *grads))
    assert not grads[1].any()
    assert not grads[2].any()


@pytest.mark.slow
@in_interpreter
def test_half_precision_stays_within_its_rounding() -> None:
    """float16: the interpreter multiplies bfloat16 as the integers it is stored in; the card's tests take bfloat16."""
    seen = ranges("speculators", lengths=(60, 30), num_slots=9, block_size=8)

    assert max(errors(seen, TILES["one block a tile"], dim=32, dtype=torch.float16)) < 0.001


@pytest.mark.slow
@in_interpreter
def test_kernels_give_the_same_bits_twice() -> None:
    seen = ranges("specforge")
    tensors = [tensor.detach() for tensor in inputs(seen, **FLOAT)]
    kernels = Kernels(TILES["one block a tile"])

    once, again = results(kernels, seen, tensors), results(kernels, seen, tensors)

    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.slow
@in_interpreter
@pytest.mark.parametrize(("rule", "block_size", "heads"), [("specforge", 4, 6), ("full", 7, 2)])
def test_gradients_of_own_keys_alone_equal_float64(rule: str, block_size: int, heads: int) -> None:
    """The one kernel beside those for Hopper cards that the interpreter can run."""
    seen = ranges(rule, block_size=block_size)
    tensors = [tensor.detach() for tensor in inputs(seen, heads=heads, kv_heads=2, **FLOAT)]
    ranges_of_tiles = attention.read_ranges(seen, TILES["one block a tile"])
    shape = Shape.of(tensors, ranges_of_tiles)
    out, log_sum = attention.forward_pass(tensors, ranges_of_tiles)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    by_block = log_sum.view(2, shape.num_blocks, power_of_two(shape.group), power_of_two(block_size))
    by_token = by_block[:, :, : shape.group, :block_size].transpose(1, 2).reshape(heads, -1).contiguous()

    delta, *grads = attention_hopper.own_gradient_pass(
        tensors, ranges_of_tiles, shape, out, by_token, upstream.to(out.dtype)
    )

    oracle = results(EAGER, seen, [tensor.double() for tensor in tensors])
    assert relative_error(delta, (oracle[0] * upstream).sum(-1).T) < 1e-6
    assert relative_error(grads[0], oracle[4]) < 1e-6
    assert relative_error(grads[1], oracle[5]) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_reference_equals_eager_with_gradients(rule: str) -> None:
    """Float64 takes the reference everywhere."""
    seen = ranges(rule)
    tensors = inputs(seen)

    for ours, oracle in zip(results(Kernels(None), seen, tensors), results(EAGER, seen, tensors), strict=True):
        assert relative_error(ours, oracle) < 1e-13


@pytest.mark.parametrize("keys", [4, 16, 64])
@pytest.mark.parametrize("rule", RULES)
def test_ranges_of_context_tiles_are_those_of_the_mask(rule: str, keys: int) -> None:
    """Every block that sees some of a tile is listed; those called whole see all of it, in every slot."""
    seen = ranges(rule, lengths=(60, 45, 1), num_slots=19, block_size=5)
    tiles = replace(TILES["one block a tile"], context=Tile(8, keys, 1, 4))
    mask = dense_mask(seen)[:, : seen.num_context].view(-1, 5, seen.num_context)

    listed = attention.read_ranges(seen, tiles).seen_by

    num_whole = 0
    for tile, (begin, whole, tail, finish) in enumerate(listed.T.tolist()):
        part = mask[:, :, tile * keys : (tile + 1) * keys]
        sees = part.any(2).any(1).nonzero().flatten().tolist()
        assert all(begin <= block < finish for block in sees)
        assert bool(part[whole:tail].all())
        num_whole += max(0, tail - whole)
    assert num_whole > 0 or keys == 64 or rule != "full"


@pytest.mark.parametrize(("block_size", "is_hopper"), [(4, True), (12, True), (32, True), (2, False), (7, False), (30, False)])  # fmt: skip
def test_what_a_hopper_card_takes_is_said_by_the_recipe_alone(
    monkeypatch: pytest.MonkeyPatch, block_size: int, is_hopper: bool
) -> None:
    """Not by a step's count of tokens: whatever the check at start ran is what every step runs."""
    monkeypatch.setattr(gluon, "can_launch", lambda device: True)
    case = Case(block_size, 4, 128, CPU, torch.bfloat16)

    assert attention.tiles_for(case).is_hopper is is_hopper
    assert not attention.tiles_for(case, for_all_cards=True).is_hopper
    assert not attention.tiles_for(replace(case, dtype=torch.float32)).is_hopper
    assert not attention.tiles_for(replace(case, head_dim=32)).is_hopper


@pytest.mark.parametrize(("group", "fits"), [(1, True), (7, True), (8, True), (9, False), (32, False)])
def test_groups_that_leave_a_tile_too_few_tokens_are_an_obstacle_but_on_hopper_cards(group: int, fits: bool) -> None:
    """A product's sum over 8 own tokens or fewer does not compile: `tl.dot` wants 16."""
    case = Case(4, group, 128, CPU, torch.bfloat16)

    for tiles in (attention.LARGE_TILES, attention.SMALL_TILES):
        told = attention.misfit(case, tiles)
        assert (
            told is None
            if fits
            else told == (f"{group} query heads share a key, above 8: a tile would own fewer than 16 tokens")
        )
    assert attention.misfit(case, attention.HOPPER_TILES) is None


def test_tiles_that_the_hopper_kernels_would_hang_on_are_not_launched() -> None:
    """Or compute something else with."""
    seen = ranges("full", lengths=(200, 130), num_slots=19, block_size=7)
    right = attention.HOPPER_TILES
    ranges_of_tiles = attention.read_ranges(seen, right)
    tensors = [tensor.detach() for tensor in inputs(seen, heads=2, kv_heads=2, dim=64, dtype=torch.float16)]

    def launch(call, shape: Shape, **tiles: Tile) -> None:
        tiled = replace(ranges_of_tiles, tiles=replace(right, **tiles))
        call(tensors, tiled, shape, *(tensors[0] for _ in range(3)))

    shape = Shape(19 * 7, 330, 7, 2, 1, 64, "tf32")
    with pytest.raises(AssertionError, match="wait for ever"):
        attention_hopper.forward_pass(tensors, replace(ranges_of_tiles, tiles=replace(right, forward=Tile(128, 64, 3, 4))), shape)  # fmt: skip
    with pytest.raises(AssertionError, match="64 rows each"):
        launch(attention_hopper.query_gradient_pass, shape, query=Tile(64, 64, 4, 4))
    with pytest.raises(AssertionError, match="whole blocks"):
        launch(attention_hopper.query_gradient_pass, replace(shape, block_size=130))
    with pytest.raises(AssertionError, match="seen_by"):
        launch(attention_hopper.context_gradient_pass, shape, context=Tile(64, 64, 3, 4))
    with pytest.raises(AssertionError, match="a whole copy"):
        launch(attention_hopper.context_gradient_pass, shape)


# ---- on a card

BIG = {"heads": 32, "kv_heads": 8, "dim": 128, "device": CUDA}


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float32, 1e-4)])
@pytest.mark.parametrize("block_size", [12, 32])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_on_cuda_equal_float64(rule: str, block_size: int, dtype: torch.dtype, tolerance: float) -> None:
    """float32 has half the tile: its numbers fill the shared memory twice as fast."""
    seen = on_cuda(ranges(rule, lengths=(300, 170, 1), num_slots=61, block_size=block_size))
    tiles = None if dtype == torch.bfloat16 else Tiles(Tile(64, 16, 1, 4), Tile(64, 16, 1, 4), Tile(32, 32, 1, 4))

    assert max(errors(seen, tiles, dtype=dtype, **BIG)) < tolerance


@needs_cuda
@pytest.mark.parametrize("rule", RULES)
def test_large_tiles_on_cuda_equal_float64(rule: str) -> None:
    """Where `attention_hopper` takes their place, too."""
    seen = on_cuda(ranges(rule, lengths=(300, 170, 1), num_slots=61, block_size=12))

    assert max(errors(seen, attention.LARGE_TILES, dtype=torch.bfloat16, **BIG)) < 0.01


DOCUMENTS = (300, 170, 1)


@needs_cuda
@pytest.mark.parametrize("for_all_cards", [False, True])
@pytest.mark.parametrize(
    ("rule", "lengths", "num_slots", "block_size", "heads", "kv_heads", "dim"),
    [
        ("specforge", DOCUMENTS, 61, 7, 3, 3, 128),
        ("specforge", (40, 23), 9, 7, 3, 3, 128),
        ("specforge", DOCUMENTS, 61, 7, 8, 1, 128),
        ("full", DOCUMENTS, 61, 15, 32, 8, 64),
        ("full", DOCUMENTS, 61, 6, 4, 4, 64),
        ("full", DOCUMENTS, 61, 32, 14, 7, 64),
        ("full", DOCUMENTS, 61, 8, 32, 4, 128),
        ("speculators", DOCUMENTS, 61, 24, 32, 8, 128),
        ("automodel", (1000, 500), 61, 16, 6, 2, 128),
        ("full", (2000, 900), 40, 64, 14, 7, 64),
        ("full", (900, 700), 200, 16, 8, 8, 64),
        ("specforge", (700,), 50, 4, 32, 1, 128),
        ("full", (1, 1), 3, 8, 32, 4, 128),  # nothing to see but the own block
    ],
)
def test_odd_groups_on_cuda_equal_float64(
    rule: str, lengths: tuple[int, ...], num_slots: int, block_size: int, heads: int, kv_heads: int, dim: int,
    for_all_cards: bool,
) -> None:  # fmt: skip
    """By the kernels that a training takes there, and by those that it takes where these are off."""
    seen = on_cuda(ranges(rule, lengths=lengths, num_slots=num_slots, block_size=block_size))
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "device": CUDA}
    case = Case(block_size, heads // kv_heads, dim, CUDA, torch.bfloat16)
    tiles = attention.tiles_for(case, for_all_cards=for_all_cards)

    is_hopper = torch.cuda.get_device_capability() == gluon.CAPABILITY and block_size % 4 == 0 and not for_all_cards
    assert tiles.is_hopper is is_hopper
    if heads // kv_heads > 8 and not is_hopper:
        assert "query heads share a key" in str(attention.misfit(case, tiles))
        return
    assert attention.misfit(case, tiles) is None
    assert max(errors(seen, tiles, dtype=torch.bfloat16, **shape)) < 0.01
    assert max(errors(seen, tiles, dtype=torch.float16, **shape)) < 0.002


@needs_cuda
def test_four_threads_may_make_the_first_kernel_call_at_once() -> None:
    seen = on_cuda(ranges("full", lengths=(300, 170), num_slots=61, block_size=24))
    tensors = [tensor.detach() for tensor in inputs(seen, dtype=torch.bfloat16, **BIG)]
    barrier, done = threading.Barrier(4), []

    def start() -> None:
        barrier.wait()
        done.append(results(Kernels(None), seen, tensors))

    threads = [threading.Thread(target=start, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)

    assert len(done) == 4
    assert all(torch.equal(a, b) for each in done for a, b in zip(each, done[0], strict=True))
