"""The kernels that `benchmarks.tiles` times: what each is launched on, and the grid of its settings, the standing one first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from benchmarks import step
from remote.drafter.blocks import build_blocks, sample_anchors
from remote.drafter.kernels import adamw, attention, cross_entropy, norm, swiglu
from remote.drafter.kernels.attention import Ranges, Tile, Tiles
from remote.drafter.kernels.cross_entropy import TargetRows
from remote.drafter.kernels.launch import RowTile
from remote.drafter.kernels.norm import Walk
from remote.drafter.rope import rotary
from remote.drafter.visibility import FULL, Visibility, visible

EPS = 1e-6
Setting = dict[str, int]


@dataclass(frozen=True)
class Trial:
    """A kernel that can be launched with any of `settings`; `run` takes one as keywords and gives what was computed."""

    name: str
    settings: tuple[Setting, ...]  # the standing one first
    run: Callable[..., Sequence[Tensor]]

    def cut(self, count: int) -> Trial:
        return replace(self, settings=self.settings[:count])


@dataclass(frozen=True)
class Sizes:
    """Of the tensors that the kernels are launched on."""

    case: step.Case
    shape: step.Shape
    num_logit_rows: int
    device: torch.device

    def draw(self, *size: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        drawn = torch.empty(size, device=self.device, dtype=dtype or self.shape.dtype)
        return drawn.normal_(0, scale, generator=torch.Generator(self.device).manual_seed(len(size)))

    @property
    def num_tokens(self) -> int:
        return self.case.num_anchors * self.case.block_size


def trials(device: torch.device) -> list[Callable[[], Trial]]:
    """In the order of what they cost a step; each makes its tensors when called, so that only one kernel's are alive."""
    sizes = Sizes(step.CASES[0], step.LARGE, 1664, device)
    if device.type == "cpu":
        sizes = Sizes(step.Case("tiny", (50,), 4, 4), step.SMALL, 5, device)
    makers = (
        forward, query_gradient, context_gradient, statistics, partial(cross_entropy_gradient, is_in_place=True),
        cross_entropy_gradient,
        swiglu_product, swiglu_gradient, norm_rows, norm_gradient, heads, heads_gradient, update,
    )  # fmt: skip
    drafter = replace(sizes.shape.drafter, block_size=sizes.case.block_size)
    if attention.tiles_for(attention.Case.of(drafter, device=device, dtype=sizes.shape.dtype)).is_hopper:
        of_attention = (forward, query_gradient, context_gradient)
        makers = (*(partial(make, tiles=attention.HOPPER_TILES) for make in of_attention), *makers)
    return [lambda make=make: make(sizes) for make in makers]  # type: ignore[misc]


# ---- attention


def forward(sizes: Sizes, *, tiles: Tiles = attention.LARGE_TILES) -> Trial:
    inputs, ranges, _ = _attention(sizes, tiles)

    def run(**setting: int) -> Sequence[Tensor]:
        return attention.forward_pass(inputs, ranges(tiles.context.keys, forward=Tile(**setting)))

    grid = _grid(rows=(128,), keys=(64, 128, 32), stages=(3, 2, 4), warps=(8, 4))
    if tiles.is_hopper:
        grid = _grid(rows=(128,), keys=(128, 64), stages=(2, 3, 4, 6), warps=(4,))
    return Trial(_named("attention forward", tiles), _standing(tiles.forward, grid), run)


def query_gradient(sizes: Sizes, *, tiles: Tiles = attention.LARGE_TILES) -> Trial:
    inputs, ranges, grad_out = _attention(sizes, tiles)
    known = ranges(tiles.context.keys)
    out, log_sum = attention.forward_pass(inputs, known)

    def run(**setting: int) -> Sequence[Tensor]:
        tiled = replace(known, tiles=replace(known.tiles, query=Tile(**setting)))
        return attention.query_gradient_pass(inputs, tiled, out, log_sum, grad_out)

    grid = _grid(rows=(128,), keys=(64, 32, 128), stages=(2, 1, 3), warps=(8, 4))
    if tiles.is_hopper:
        grid = _grid(rows=(128,), keys=(64, 32), stages=(2, 3, 4, 6), warps=(4,))
    return Trial(_named("attention query gradient", tiles), _standing(tiles.query, grid), run)


def context_gradient(sizes: Sizes, *, tiles: Tiles = attention.LARGE_TILES) -> Trial:
    inputs, ranges, grad_out = _attention(sizes, tiles)
    known = ranges(tiles.context.keys)
    out, log_sum = attention.forward_pass(inputs, known)
    delta, *_ = attention.query_gradient_pass(inputs, known, out, log_sum, grad_out)

    def run(**setting: int) -> Sequence[Tensor]:
        tiled = ranges(setting["keys"], context=Tile(**setting))
        return attention.context_gradient_pass(inputs, tiled, log_sum, grad_out, delta)

    grid = _grid(rows=(64, 32, 128), keys=(128, 64), stages=(2, 1, 3), warps=(8, 4))
    if tiles.is_hopper:
        grid = _grid(rows=(64, 32), keys=(tiles.context.keys,), stages=(2, 3, 4), warps=(4,))
    return Trial(_named("attention context gradient", tiles), _standing(tiles.context, grid), run)


def _named(kernel: str, tiles: Tiles) -> str:
    return f"{kernel}, Hopper" if tiles.is_hopper else kernel


def _attention(sizes: Sizes, tiles: Tiles) -> tuple[list[Tensor], Callable[..., Ranges], Tensor]:
    """The five inputs, the ranges by the width of a context tile and other tiles, and the gradient of the output."""
    drafter, seen = sizes.shape.drafter, _visibility(sizes)
    heads, size = (drafter.num_heads, drafter.num_kv_heads), drafter.head_dim
    context, tokens = seen.num_context, sizes.num_tokens
    inputs = [sizes.draw(tokens, heads[0], size)]
    inputs += [sizes.draw(length, heads[1], size) for length in (context, context, tokens, tokens)]

    @cache
    def of_width(keys: int) -> Ranges:
        return attention.read_ranges(seen, replace(tiles, context=replace(tiles.context, keys=keys)))

    def ranges(keys: int, **others: Tile) -> Ranges:
        made = of_width(keys)
        return replace(made, tiles=replace(made.tiles, **others))

    return inputs, ranges, sizes.draw(tokens, heads[0], size, scale=0.1)


def _visibility(sizes: Sizes) -> Visibility:
    case, row = sizes.case, step.packed_row(sizes.case.lengths, 1000)
    count, generator = case.num_anchors, torch.Generator().manual_seed(1)
    drawn = sample_anchors(row, num_slots=count, max_anchors=count, per="row", generator=generator)
    blocks = build_blocks(row, *drawn, block_size=case.block_size, mask_token_id=3).to(sizes.device)
    return visible(FULL, blocks, sum(case.lengths))


# ---- rows of logits


def statistics(sizes: Sizes) -> Trial:
    logits, label, _ = _logits(sizes)

    def run(**setting: int) -> Sequence[Tensor]:
        read = cross_entropy.row_statistics(logits, label, tile=RowTile(**setting))
        assert read.rank_M is not None
        return read.log_sum_M, read.entropy_M, read.best_M, read.rank_M

    return Trial("row statistics", _standing(cross_entropy.STATISTICS, _row_grid()), run)


def cross_entropy_gradient(sizes: Sizes, *, is_in_place: bool = False) -> Trial:
    """In the logits' place, each launch begins with fresh ones, whose copy every setting's time holds alike."""
    logits, label, target = _logits(sizes)
    read, used = cross_entropy.row_statistics(logits, label), torch.empty_like(logits) if is_in_place else logits
    weight, dtype = torch.ones_like(read.log_sum_M), sizes.shape.dtype
    out = cross_entropy.in_their_place(used, dtype) if is_in_place else torch.empty_like(logits, dtype=dtype)

    def run(**setting: int) -> Sequence[Tensor]:
        if is_in_place:
            used.copy_(logits)
        soft = cross_entropy.cross_entropy_gradient(
            used, read.log_sum_M, label, weight, hard=1.0, soft=step.KL, target=target, out_MV=out,
            tile=RowTile(**setting),
        )  # fmt: skip
        assert soft is not None
        return out, soft

    name = "cross-entropy in place, copy" if is_in_place else "cross-entropy gradient"
    return Trial(name, _standing(cross_entropy.GRADIENT, _row_grid()), run)


def _logits(sizes: Sizes) -> tuple[Tensor, Tensor, TargetRows]:
    """As many rows as a chunk has, four to a row of the target."""
    count, vocab, device = sizes.num_logit_rows, sizes.shape.target.vocab_size, sizes.device
    logits, taught = (sizes.draw(rows, vocab, dtype=torch.float32, scale=3.0) for rows in (count, -(-count // 4)))
    index = torch.arange(count, device=device)
    return logits, index * 7 % vocab, TargetRows(taught, taught.logsumexp(-1), index // 4)


def _row_grid() -> Iterator[Setting]:
    return _grid(size=(2048, 1024, 4096), warps=(8, 4, 16), stages=(4, 1, 2))


# ---- elementwise operations of the body


def swiglu_product(sizes: Sizes) -> Trial:
    gate, up = (sizes.draw(sizes.num_tokens, sizes.shape.drafter.intermediate_size) for _ in range(2))

    def run(**setting: int) -> Sequence[Tensor]:
        return (swiglu.product(gate, up, RowTile(**setting)),)

    return Trial("swiglu product", _standing(swiglu.PRODUCT, _wide_grid()), run)


def swiglu_gradient(sizes: Sizes) -> Trial:
    """It writes over its inputs: each launch begins with fresh ones, whose copy every setting's time holds alike."""
    drawn = [sizes.draw(sizes.num_tokens, sizes.shape.drafter.intermediate_size) for _ in range(3)]
    used = [torch.empty_like(each) for each in drawn]

    def run(**setting: int) -> Sequence[Tensor]:
        for tensor, fresh in zip(used, drawn, strict=True):
            tensor.copy_(fresh)
        swiglu.differentiate(*used, RowTile(**setting))
        return used

    return Trial("swiglu gradient, with copies", _standing(swiglu.GRADIENT, _wide_grid()), run)


def norm_rows(sizes: Sizes) -> Trial:
    x, weight = _normed(sizes)

    def run(**setting: int) -> Sequence[Tensor]:
        return norm.norm_rows(x, weight, EPS, **setting)

    return Trial("norm", _standing({"warps": norm.NORM_WARPS}, _grid(warps=(4, 8, 16))), run)


def norm_gradient(sizes: Sizes) -> Trial:
    x, weight = _normed(sizes)
    _, scale = norm.norm_rows(x, weight, EPS)
    grad_out = sizes.draw(*x.shape)

    def run(**setting: int) -> Sequence[Tensor]:
        return norm.norm_gradients(grad_out, x, weight, scale, walk=Walk(**setting))

    return Trial("norm gradient", _standing(norm.NORM_WALK, _walk_grid()), run)


def heads(sizes: Sizes) -> Trial:
    inputs = _heads(sizes)

    def run(**setting: int) -> Sequence[Tensor]:
        return (norm.rotated(*inputs, EPS, **setting),)

    return Trial("heads", _standing({"warps": norm.HEAD_WARPS}, _grid(warps=(1, 2, 4, 8))), run)


def heads_gradient(sizes: Sizes) -> Trial:
    inputs = _heads(sizes)
    grad_out = sizes.draw(*inputs[0].shape)

    def run(**setting: int) -> Sequence[Tensor]:
        return norm.rotated_gradients(grad_out, *inputs, EPS, walk=Walk(**setting))

    return Trial("heads gradient", _standing(norm.HEAD_WALK, _walk_grid()), run)


def update(sizes: Sizes) -> Trial:
    """Of one matrix of the MLP. At a learning rate of 0: the moments move on with every launch, the weights stay."""
    shape = sizes.shape.drafter.intermediate_size, sizes.shape.target.hidden_size
    weight, grad = sizes.draw(*shape), sizes.draw(*shape)
    moments = (torch.zeros(shape, device=sizes.device) for _ in range(2))
    stored, is_open = adamw.Stored(weight, weight.float(), *moments), torch.zeros((), device=sizes.device)
    rates = adamw.Rates(step=1, lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)

    def run(**setting: int) -> Sequence[Tensor]:
        adamw.adamw_step(grad, stored, rates, divisor=is_open + 1, is_closed=is_open, tile=RowTile(**setting))
        return (stored.weight,)

    grid = _grid(size=(1024, 512, 2048, 4096), warps=(4, 8), stages=(1,))
    return Trial("AdamW", _standing(adamw.STEP, grid), run)


def _normed(sizes: Sizes) -> tuple[Tensor, Tensor]:
    width = sizes.shape.target.hidden_size
    return sizes.draw(sizes.num_tokens, width), 1 + sizes.draw(width, scale=0.1)


def _heads(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    drafter = sizes.shape.drafter
    position = torch.arange(sizes.num_tokens, device=sizes.device) % 8000
    at = rotary(position, head_dim=drafter.head_dim, theta=drafter.rope_theta, dtype=sizes.shape.dtype)
    x = sizes.draw(sizes.num_tokens, drafter.num_heads, drafter.head_dim)
    return x, 1 + sizes.draw(drafter.head_dim, scale=0.1), at.cos.contiguous(), at.sin.contiguous()


def _wide_grid() -> Iterator[Setting]:
    return _grid(size=(1024, 2048, 512, 4096), warps=(4, 8), stages=(1,))


def _walk_grid() -> Iterator[Setting]:
    return _grid(warps=(4, 8, 16), programs=(2, 4, 8, 16))


def _grid(**values: tuple[int, ...]) -> Iterator[Setting]:
    return (dict(zip(values, each, strict=True)) for each in product(*values.values()))


def _standing(first: Tile | RowTile | Walk | Setting, grid: Iterator[Setting]) -> tuple[Setting, ...]:
    standing = first if isinstance(first, dict) else asdict(first)
    return standing, *(setting for setting in grid if setting != standing)
