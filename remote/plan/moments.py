"""The worst moments of a training step, found by walking through it: what is alive together, and when.

Four stages, as the trainer measures them: load, forward (with the loss), backward, step. The smoke rungs `fwd` and
`leak` run forward without gradients: nothing is kept for a backward, and one layer or one loss chunk is the worst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from remote.plan.kernels import attention_of, has_fused_kernels
from remote.plan.memory import (
    Component,
    around_layers,
    attention_workspace,
    context_bytes,
    head_workspace,
    inputs,
    is_checkpointed,
    kept_components,
    libraries,
    live_layer,
    load_components,
    loss_gradients,
    mlp_activations,
    optimizer_temporaries,
    passed_rows,
    ranks_components,
    row_bytes,
    step_components,
    token_bytes,
    transformers,
)
from remote.plan.sizes import Sizes
from remote.spec import DFlashSpec

STAGES = ("load", "forward", "backward", "step")
FORWARD_ONLY = ("fwd", "leak")  # rungs without gradients

_TEMPORARIES = "backward temporaries"
SCALE_ROWS = 4096  # rows of the loss gradient scaled at once, in float32


def stage_components(spec: DFlashSpec, at: Sizes, *, rung: str | None) -> dict[str, list[Component]]:
    """The worst moment of each stage that the rung has; None: a training."""
    if rung is None:
        own = replace(spec, train=replace(spec.train, accumulation=spec.train.accumulation // spec.roles.drafter))
        stages = stage_components(own, at, rung="fwd_bwd")
        return {
            name: [
                lines[0],
                transformers(at),
                *lines[1:],
                *ranks_components(spec, at, lines, is_training=name != "load"),
            ]
            for name, lines in stages.items()
        }
    stages = {"load": load_components(spec, at)}
    if rung in FORWARD_ONLY:
        return stages | {"forward": forward_only_components(spec, at, rung=rung)}
    return stages | {
        "forward": forward_components(spec, at),
        "backward": backward_components(spec, at),
        "step": update_components(spec, at),
    }


def forward_components(spec: DFlashSpec, at: Sizes) -> list[Component]:
    """The worst moment of the forward: a chunk of the loss, or attention in the last layer."""
    return max(_forward_moments(spec, at), key=lambda lines: sum(line.size_bytes for line in lines))


def backward_components(spec: DFlashSpec, at: Sizes) -> list[Component]:
    """The worst moment of the backward, found by walking through it from the last layer to the first."""
    return max(_backward_moments(spec, at), key=lambda lines: sum(line.size_bytes for line in lines))


def update_components(spec: DFlashSpec, at: Sizes) -> list[Component]:
    """The optimizer's update: every gradient is there, one tensor at a time is moved."""
    lines = [*load_components(spec, at), inputs(spec, at)]
    lines.append(Component("gradients", at.parameters * at.element_bytes, "one per parameter"))
    lines.append(
        Component("optimizer temporaries", optimizer_temporaries(spec, at), "float32 copies of the largest weight")
    )
    return [*lines, libraries(at, threads=2)]


def forward_only_components(spec: DFlashSpec, at: Sizes, *, rung: str) -> list[Component]:
    """One forward without gradients; the leak probe holds changed copies of its inputs as well."""
    base = [line for line in step_components(spec, at) if line.name != "gradients"]
    layer = [
        Component("context features", context_bytes(at, at.hidden), "S·H"),
        Component("one live layer", passing_layer(spec, at), "its operations, nothing of them kept"),
    ]
    if rung == "leak":  # the probe compares hidden states, without a loss
        copies = 2 * context_bytes(at, at.captured * at.hidden) + 3 * token_bytes(at, at.hidden)
        layer.append(Component("changed inputs", copies, "hidden states and embeddings replaced by noise"))
    loss = [
        Component("last hidden states of the drafter", row_bytes(at, at.supervised_slots, at.hidden), "M·H"),
        Component(
            "head workspace", head_workspace(spec, at, with_gradient=False), "float32 logits, one chunk of the loss"
        ),
    ]
    worst = max(layer, loss, key=lambda lines: sum(line.size_bytes for line in lines))
    return [*base, *worst]


def _forward_moments(spec: DFlashSpec, at: Sizes) -> Iterator[list[Component]]:
    base = step_components(spec, at)
    base[-1] = libraries(at, threads=2)  # from the second step on; measured: 0.03 GiB on an H200
    yield [
        *base,
        *kept_components(spec, at),
        Component(
            "last hidden states of the drafter",
            row_bytes(at, at.supervised_slots, at.hidden),
            "M·H, until the loss has read them",
        ),
        Component("gradients made by the loss", loss_gradients(spec, at), "M·H a denominator, kept for the backward"),
        Component("head workspace", head_workspace(spec, at), "float32 logits and their copies, one chunk of the loss"),
    ]
    kept = kept_components(spec, at, layers=at.layers)
    attention = attention_workspace(spec, at, backward=False)
    if is_checkpointed(spec):
        # The last layer's own output, counted in what is kept, is not there yet.
        context = context_bytes(at, 2 * at.key_width)
        passing = max(
            attention + token_bytes(at, at.hidden + 3 * at.query_width),
            row_bytes(at, at.supervised_slots, at.hidden + 3 * at.inner) + context,
            token_bytes(at, 3 * at.inner) + context if at.layers > 1 else 0,  # the one before, the last input not there
        )
        yield [*base, *kept, Component("one live layer", passing, "its operations, nothing of them kept")]
        return
    yield [
        *base,
        *_given_back(kept, mlp_activations(at, spec, is_last=True)),
        Component("attention workspace", attention, "one chunk, before the MLP of the last layer"),
    ]
    if has_fused_kernels(spec, at):
        product = row_bytes(at, at.supervised_slots, at.inner + at.hidden)
        yield [*base, *kept, Component("one live layer", product, "the last MLP's product")]


def _backward_moments(spec: DFlashSpec, at: Sizes) -> Iterator[list[Component]]:
    base = [line for line in step_components(spec, at) if line.name != "gradients"]
    base[-1] = libraries(at, threads=2)
    loss = (
        loss_gradients(spec, at)
        + row_bytes(at, at.supervised_slots, at.hidden)
        + 4 * 4 * min(SCALE_ROWS, at.supervised_slots) * at.hidden
    )
    yield [
        *base,
        *kept_components(spec, at),
        _gradients(spec, at, layers=0),
        Component("loss temporaries", loss, "gradients made by the loss, scaled into M·H"),
    ]
    incoming = 1 if has_fused_kernels(spec, at) else 2
    attention = attention_workspace(spec, at, backward=True) + incoming * token_bytes(at, at.hidden)
    for layer in reversed(range(at.layers)):
        kept = kept_components(spec, at, layers=layer + (0 if is_checkpointed(spec) else 1))
        done = at.layers - 1 - layer
        is_last = layer == at.layers - 1
        alive = live_layer(at, spec, layer=layer) if is_checkpointed(spec) else 0
        live = Component("one live layer", alive, "recomputed by the backward")
        for part, size, why in _mlp_temporaries(spec, at, is_last=is_last):
            yield [*base, *kept, live, _gradients(spec, at, layers=done, part=part), Component(_TEMPORARIES, size, why)]
        freed = mlp_activations(at, spec, is_last=is_last)
        if is_last or attention_of(spec, at) != "triton":
            freed += row_bytes(at, passed_rows(at, is_last=is_last), at.query_width)
        left = _given_back([*kept, live], freed)
        work = Component(_TEMPORARIES, attention, "of attention: gradients and one chunk's workspace")
        yield [*base, *left, _gradients(spec, at, layers=done, part="attention"), work]
    last = Component(_TEMPORARIES, context_bytes(at, 3 * at.hidden), "of the context features, 3·S·H")
    yield [*base, *kept_components(spec, at, layers=0)[:1], _gradients(spec, at, layers=at.layers), last]


def _mlp_temporaries(spec: DFlashSpec, at: Sizes, *, is_last: bool) -> Iterator[tuple[str, int, str]]:
    """The worst moments of an MLP's backward: which weight gradients are there, bytes, what they are.

    The fused one overwrites gate and up: beside them it holds their product, later only what is as wide as a token.
    """
    token, inner = (row_bytes(at, passed_rows(at, is_last=is_last), width) for width in (at.hidden, at.inner))
    if has_fused_kernels(spec, at):
        recomputed = token if is_checkpointed(spec) else 0  # the layer's output once more, as it is computed again
        yield "mlp", inner + token + recomputed, "of the MLP: T·I + T·H"
        yield "attention", 3 * token, "of the MLP: 3·T·H"
    else:
        yield "mlp", 2 * inner + 2 * token, "of the MLP: 2·T·I + 2·T·H"


def _given_back(lines: list[Component], freed: int) -> list[Component]:
    """The lines after the MLP of the layer at hand has gone: out of the live layer, or out of what is kept."""
    names = [line.name for line in lines if line.size_bytes >= freed]
    where = "one live layer" if "one live layer" in names else "activations kept"
    return [replace(line, size_bytes=line.size_bytes - freed) if line.name == where else line for line in lines]


def _gradients(spec: DFlashSpec, at: Sizes, *, layers: int, part: str = "") -> Component:
    """Weight gradients that exist once `layers` layers are done and a part of the next; all, when accumulating."""
    per_layer = (at.parameters - around_layers(at)) // at.layers
    begun = {"": 0, "mlp": at.hidden * at.inner, "attention": 3 * at.hidden * at.inner}[part]
    count = layers * per_layer + begun + (around_layers(at) if layers == at.layers else 0)
    if spec.train.accumulation > 1:
        count = at.parameters + at.largest_matrix
    return Component("gradients", count * at.element_bytes, "one per parameter, as the backward makes them")


def passing_layer(spec: DFlashSpec, at: Sizes) -> int:
    """Embeddings, residual stream and the context's keys and values, and attention's or the MLP's operations."""
    held = token_bytes(at, 2 * at.hidden) + context_bytes(at, 2 * at.key_width)
    attention = token_bytes(at, at.hidden + 2 * at.query_width + 2 * at.key_width)
    attention += attention_workspace(spec, at, backward=False)
    return held + max(attention, token_bytes(at, 2 * at.hidden + 3 * at.inner))
