"""Whether draftyard's own kernels compute on this very card what the plain path computes: asked once, at start.

Small inputs at the recipe's own widths, dtypes and options, so that what training calls is compiled here (and one norm
more, the narrow one before the MLP). Each value and each gradient is held by itself against the plain path in float64;
granted is what a dtype rounds, or PLAIN_TIMES what the plain path itself is off there, LIMIT at the most. It chooses
nothing: `attention` and `workbench` do, and say what was seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from remote.drafter import attention_sdpa
from remote.drafter.blocks import Blocks, Row, build_blocks, sample_anchors
from remote.drafter.coarse_head import CoarseHead
from remote.drafter.kernels import adamw, attention, body, launch
from remote.drafter.kernels.adamw import Rates, Stored
from remote.drafter.keys import KeyValues, MadeFrom
from remote.drafter.loss import drafter_loss
from remote.drafter.rope import Rotary, rotary
from remote.drafter.teacher import expect
from remote.drafter.visibility import layer_rule, visible
from remote.plan.sizes import is_taught_ahead
from remote.spec import DFlashSpec, LossSpec, OptimSpec

DOCUMENTS, NUM_BLOCKS = (150, 90), 11  # tokens of the row the check attends to; an odd number of blocks
NUM_TOKENS, NUM_OUTPUTS = 48, 32  # of the check of norms and products
SPREAD_BLOCKS = 5  # whose mask slots share a row, as in the first layer
LOSS_WIDTH, LOSS_BLOCKS, LOSS_CHUNK_TOKENS = 64, 4, 64
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.01, torch.float32: 1e-4}
PLAIN_TIMES = 3.0
MADE = 2.0  # exact in every dtype: what attention's queries and block keys are made with
LIMIT = 0.1  # a plain path that is off by more proves nothing about ours
# Of the update: rates at which each term weighs in each result; none of them is compiled.
RATES = Rates(step=3, lr=1.0, beta1=0.6, beta2=0.7, eps=1e-8, weight_decay=0.3)
DIVISOR = 2.0  # of the gradient, where the recipe clips
FLOOR = 0.25  # of the squared moment: no number moves so far that the others no longer weigh

# As the log calls them: the fastest that the card has, and those that every card has.
OWN_KERNELS, OWN_KERNELS_OF_ALL_CARDS = "triton", "triton-any-card"

Function = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Verdict:
    """Whether the kernels may be taken. `reason` has the number that was seen, or what stands in the way."""

    is_passed: bool
    reason: str
    backend: str = OWN_KERNELS  # which of them, of attention


class Trial(NamedTuple):
    """One function of ours, the plain one, and the tensors both take."""

    ours: Function
    plain: Function
    tensors: Sequence[Tensor]
    has_gradients: bool = True  # of all tensors
    exact: Function | None = None  # in float64, where the plain one knows none


def check_attention(spec: DFlashSpec, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Of `drafter.attention: triton`, under every rule that a layer of the drafter has.

    Where the kernels for Hopper cards are off, those for all cards are checked in their place.
    """
    obstacle = launch.obstacle(device=device, dtype=dtype)
    if obstacle is not None:
        return Verdict(False, obstacle)
    case, told = attention.Case.of(spec.drafter, device=device, dtype=dtype), list[str]()
    for backend in (OWN_KERNELS, OWN_KERNELS_OF_ALL_CARDS):
        for_all_cards = backend == OWN_KERNELS_OF_ALL_CARDS
        tiles = attention.tiles_for(case, for_all_cards=for_all_cards)
        obstacle = attention.misfit(case, tiles)
        trials = attention_trials(spec, device, dtype, for_all_cards=for_all_cards)
        verdict = Verdict(False, obstacle) if obstacle else judge(trials, device, dtype)
        told.append(f"those for {'Hopper' if tiles.is_hopper else 'all'} cards: {verdict.reason}")
        if verdict.is_passed or not tiles.is_hopper:
            break
    return Verdict(verdict.is_passed, "; ".join(told), backend)


def check_kernels(spec: DFlashSpec, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Of `train.kernels: triton`: norms, heads, SwiGLU, the loss over the whole vocabulary, the update."""
    obstacle = launch.obstacle(device=device, dtype=dtype)
    return Verdict(False, obstacle) if obstacle else judge(kernel_trials(spec, device, dtype), device, dtype)


def check_hidden_gradient(spec: DFlashSpec, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Of `loss.hidden_gradient: fp8`: the loss over the whole vocabulary, with the gradient that it makes."""
    return judge((_loss_trial(spec, _Drawing(device, dtype), device, is_coarse=True) for _ in range(1)), device, dtype)


def attention_trials(
    spec: DFlashSpec, device: torch.device, dtype: torch.dtype, *, for_all_cards: bool = False
) -> Iterator[Trial]:
    drafter, blocks = spec.drafter, _blocks(spec, NUM_BLOCKS, device)
    num_context, num_tokens = sum(DOCUMENTS), NUM_BLOCKS * spec.drafter.block_size
    lengths = (num_context, num_context, num_tokens, num_tokens)
    draw = _Drawing(device, dtype)
    tensors = [draw(num_tokens, drafter.num_heads, drafter.head_dim, scale=1 / MADE)]
    scales = (1.0, 1.0, 1 / MADE, 1.0)
    for length, scale in zip(lengths, scales, strict=True):
        tensors.append(draw(length, drafter.num_kv_heads, drafter.head_dim, scale=scale))
    for rule in dict.fromkeys(layer_rule(drafter, index) for index in range(drafter.num_layers)):
        seen = visible(rule, blocks, num_context)
        plain = attention_sdpa.plan(seen, workspace_bytes=drafter.attention_workspace_bytes)
        ours = attention.plan(seen, for_all_cards=for_all_cards)
        yield Trial(partial(_attended, ours), partial(_attended, plain), tensors)


def kernel_trials(spec: DFlashSpec, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    hidden, drafter, draw = spec.target.hidden_size, spec.drafter, _Drawing(device, dtype)
    tokens, norm = draw(NUM_TOKENS, hidden), draw(hidden, scale=0.1, mean=1.0)
    matrices = [draw(NUM_OUTPUTS, hidden, scale=hidden**-0.5) for _ in range(2)]
    for name, tensors in (("rms_norm", [tokens, norm]), ("norm_linears", [tokens, norm, *matrices])):
        yield Trial(_normed(body.FUSED, name, drafter.rms_norm_eps), _normed(body.TORCH, name, drafter.rms_norm_eps), tensors)  # fmt: skip
    yield from _head_trials(spec, draw, device)
    inner = drafter.intermediate_size
    mlp = [draw(inner, NUM_OUTPUTS, scale=NUM_OUTPUTS**-0.5) for _ in range(2)] + [
        draw(NUM_OUTPUTS, inner, scale=inner**-0.5)
    ]
    mlp = [draw(NUM_TOKENS, NUM_OUTPUTS), draw(NUM_OUTPUTS, scale=0.1, mean=1.0), *mlp]
    yield Trial(_mlp(body.FUSED, drafter.rms_norm_eps), _mlp(body.TORCH, drafter.rms_norm_eps), mlp)
    yield _loss_trial(spec, draw, device)
    yield _update_trial(spec.optim, draw)


def _head_trials(spec: DFlashSpec, draw: _Drawing, device: torch.device) -> Iterator[Trial]:
    """With a row for each token, and as the first layer has them: mask slots share one."""
    drafter, size = spec.drafter, spec.drafter.block_size
    for num_heads in {drafter.num_heads, drafter.num_kv_heads}:
        for num_rows, num_tokens, spread in ((NUM_TOKENS, NUM_TOKENS, 1), (SPREAD_BLOCKS + 1, SPREAD_BLOCKS * size, size)):  # fmt: skip
            angles = torch.arange(num_tokens, device=device)
            at = partial(rotary, angles, head_dim=drafter.head_dim, theta=drafter.rope_theta)
            heads = [draw(num_rows, num_heads, drafter.head_dim), draw(drafter.head_dim, scale=0.1, mean=1.0)]
            ours, plain = (_rotated(each, at, drafter.rms_norm_eps, spread) for each in (body.FUSED, body.TORCH))
            yield Trial(ours, plain, heads)


def errors(trial: Trial) -> list[tuple[float, float]]:
    """The relative error of each value and gradient against float64: ours, and the plain path's."""
    exact = _results(trial, trial.exact or trial.plain, [tensor.double() for tensor in trial.tensors])
    ours, plain = (_results(trial, function, trial.tensors) for function in (trial.ours, trial.plain))
    return list(zip(_errors(ours, exact), _errors(plain, exact), strict=True))


def judge(trials: Iterable[Trial], device: torch.device, dtype: torch.dtype) -> Verdict:
    """The worst result of all trials against what is granted it; whatever a trial raises is a check that failed."""
    worst, allowed = 0.0, TOLERANCE[dtype]
    try:
        for ours, plain in (pair for trial in trials for pair in errors(trial)):
            granted = max(TOLERANCE[dtype], min(LIMIT, PLAIN_TIMES * plain))
            if not ours / granted <= worst / allowed:  # so written, NaN is the worst
                worst, allowed = ours, granted
            if not ours <= granted:
                break
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises, the plain path is there
        return Verdict(False, f"their check failed here: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    finally:
        _leave_nothing(device)
    seen = f"error {worst:.1e} against float64 on this device, {allowed:.1e} is allowed"
    return Verdict(worst <= allowed, seen if worst <= allowed else f"their check failed here: {seen}")


def _results(trial: Trial, function: Function, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Values, and the gradients of all tensors for fixed gradients of the values."""
    if not trial.has_gradients:
        return list(function(*(tensor.clone() for tensor in tensors)))
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    values = function(*(leaf * 1 for leaf in leaves))  # no leaf goes in: a kernel may overwrite what it was given
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(value.shape, generator=generator).to(value) for value in values]
    return [value.detach() for value in values] + list(torch.autograd.grad(values, leaves, upstream))


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [
        float((one.double() - other).norm() / other.norm().clamp_min(1e-30))  # NaN stays NaN
        for one, other in zip(found, exact, strict=True)
    ]


def _attended(attend: Callable[..., Tensor], query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """With queries and block keys that the backward makes once more, as a layer's."""
    context_key, context_value, block_key, block_value = tensors
    made_query, made_key = _made(query, block_key)
    keys = KeyValues(context_key, context_value, made_key, block_value)
    return [attend(made_query, keys, MadeFrom(query, block_key, _made))]


def _made(query: Tensor, block_key: Tensor) -> tuple[Tensor, Tensor]:
    return MADE * query, MADE * block_key


def _normed(operations: body.BodyOperations, name: str, eps: float) -> Function:
    def function(tokens: Tensor, norm: Tensor, *matrices: Tensor) -> list[Tensor]:
        found = getattr(operations, name)(tokens, norm, eps, *matrices)
        return list(found) if matrices else [found]

    return function


def _rotated(operations: body.BodyOperations, at: Callable[..., Rotary], eps: float, spread: int) -> Function:
    return lambda heads, norm: [operations.head_norm_rotate(heads, norm, eps, at(dtype=heads.dtype), spread)]


def _mlp(operations: body.BodyOperations, eps: float) -> Function:
    return lambda tokens, norm, *matrices: [operations.norm_mlp(tokens, norm, eps, *matrices)]


def _update_trial(optim: OptimSpec, draw: _Drawing) -> Trial:
    """One update of one tensor; master, moments and divisor are there, and of the dtype, as the recipe has them."""
    kept = _Kept(
        has_master=draw.dtype != torch.float32 and optim.master_dtype == "float32",
        moments=torch.float32 if optim.moment_dtype == "float32" else torch.bfloat16,
        divisor=DIVISOR if optim.clip_norm > 0 else None,
    )
    ours = partial(_updated, kept, adamw.adamw_step, adamw.global_norm)
    plain = partial(_updated, kept, adamw.adamw_step_reference, adamw.global_norm_reference)
    tensors = [draw(NUM_TOKENS, NUM_OUTPUTS) for _ in range(5)]
    return Trial(ours, plain, tensors, has_gradients=False, exact=partial(_updated_exactly, kept))


class _Kept(NamedTuple):
    """What the recipe's AdamW has of a tensor beside its weight."""

    has_master: bool
    moments: torch.dtype
    divisor: float | None


def _updated(kept: _Kept, move: Callable[..., None], norm: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """How far one update moves what it moves and the weight, the moments after it, the gradient's norm.

    A master has numbers of its own, so that a weight that is read for it, or not written after it, is far off.
    """
    grad, weight, master, first, second = tensors
    stored = Stored(
        weight.clone(),
        master.to(torch.float32, copy=True) if kept.has_master else None,
        first.to(kept.moments, copy=True),
        (second.square() + FLOOR).to(kept.moments),
    )
    before, size = stored.moved.clone(), norm([grad])
    divisor = None if kept.divisor is None else torch.full_like(size, kept.divisor)
    move(grad, stored, RATES, divisor=divisor, is_closed=torch.zeros_like(size))
    moves = [each.double() - before.double() for each in (stored.moved, stored.weight)]
    return [*moves, stored.exp_avg, stored.exp_avg_sq, size]


def _updated_exactly(kept: _Kept, *tensors: Tensor) -> list[Tensor]:
    """The same by the textbook: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2."""
    grad, weight, master, first, second = tensors
    before, divided = master if kept.has_master else weight, grad / (kept.divisor or 1.0)
    exp_avg = RATES.beta1 * first + (1 - RATES.beta1) * divided
    exp_avg_sq = RATES.beta2 * (second.square() + FLOOR) + (1 - RATES.beta2) * divided.square()
    mean, spread = exp_avg / (1 - RATES.beta1**RATES.step), exp_avg_sq / (1 - RATES.beta2**RATES.step)
    move = -RATES.lr * (RATES.weight_decay * before + mean / (spread.sqrt() + RATES.eps))
    return [move, move, exp_avg, exp_avg_sq, torch.linalg.vector_norm(grad)]


def _loss_trial(spec: DFlashSpec, draw: _Drawing, device: torch.device, *, is_coarse: bool = False) -> Trial:
    """A few narrow tokens over the whole vocabulary, every second one right: cap learns from no other.

    Metrics are not compared: a tie may fall either way.
    """
    blocks, loss = _blocks(spec, LOSS_BLOCKS, device), replace(spec.loss, chunk_tokens=LOSS_CHUNK_TOKENS)
    head, teacher = draw(spec.target.vocab_size, LOSS_WIDTH, scale=0.3), draw(sum(DOCUMENTS), LOSS_WIDTH)

    def function(is_fused: bool, spec: LossSpec, hidden: Tensor) -> list[Tensor]:
        table, known = head.to(hidden), teacher.to(hidden)
        taught = expect(known, table) if is_ahead and is_fused else known  # the plain side has nothing of it
        coarse = CoarseHead.of(table) if is_coarse and is_fused else None
        sums = drafter_loss(
            hidden, blocks, head_VH=table, teacher=taught, spec=spec, is_fused=is_fused, coarse_head=coarse
        )
        return [sums.objective()]

    is_ahead = is_taught_ahead(spec)
    drawn = draw(LOSS_BLOCKS * spec.drafter.block_size, LOSS_WIDTH)
    by_teacher = spec.loss.label == "teacher_argmax"
    right = teacher[blocks.teacher_T] if by_teacher else head[blocks.label_T.clamp(min=0)]
    hidden = torch.where((blocks.slot_T % 2 == 1)[:, None], right, drawn)
    return Trial(partial(function, True, loss), partial(function, False, loss), [hidden])


def _blocks(spec: DFlashSpec, num_blocks: int, device: torch.device) -> Blocks:
    """Blocks of a packed row of two documents, on the device."""
    size, vocab = sum(DOCUMENTS), spec.target.vocab_size
    row = Row(
        input_ids_S=torch.arange(size) % vocab,
        document_S=torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS)),
        position_S=torch.cat([torch.arange(length) for length in DOCUMENTS]),
        loss_mask_S=torch.ones(size, dtype=torch.bool),
    )
    generator = torch.Generator().manual_seed(0)
    anchors = sample_anchors(row, num_slots=num_blocks, max_anchors=num_blocks, per="row", generator=generator)
    made = build_blocks(row, *anchors, block_size=spec.drafter.block_size, mask_token_id=spec.drafter.mask_token_id)
    return made.to(device)


class _Drawing:
    """Normal numbers on a device, from a generator of its own: training's randomness is not touched."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self.dtype = dtype

    def __call__(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        drawn = torch.empty(shape, device=self._generator.device)
        return drawn.normal_(mean, scale, generator=self._generator).to(self.dtype)


def _leave_nothing(device: torch.device) -> None:
    """Neither cached memory nor library workspaces: the next peak is training's own."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
