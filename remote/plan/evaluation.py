"""What the evaluation at the end of a training holds: the whole target is there again, to decode beside the drafter.

Masters, moments and whatever else only steps needed are given back by then (`remote.drafter.train`). It is an estimate, as a
recipe says neither how long held-out prompts are nor how wide the target's keys are: prompts as long as a row are taken, and
heads as the drafter's. Torch's own books bound it on a CPU (`tests/remote/test_plan_evaluation.py`); trainings tell their peak in it.

Of `remote.drafter`: `evaluate` and what it calls, walked through. B block size, K captured layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from remote.plan.memory import (
    PROCESS_BYTES,
    Component,
    context_bytes,
    libraries,
    positions,
    row_bytes,
    target_bytes,
    token_bytes,
    transformers,
)
from remote.plan.moments import passing_layer
from remote.plan.sizes import Sizes
from remote.plan.target import text_pass_bytes
from remote.spec import DFlashSpec

# As `remote.drafter.decode`, `tree`, `lossless` have them; a test compares.
CACHE_ROOM_TOKENS = 64  # of a text's cache, beyond its prompt and its answer
MARGINAL_ROWS, COMPARED_ROWS = (
    2048,
    256,
)  # whose logits are there at once: of drafts, of a text that differs from the plain one
THOUSAND_TOKENS = 1000


def evaluation_components(spec: DFlashSpec, at: Sizes) -> tuple[Component, ...]:
    """Its worst moment."""
    own_bytes = at.parameters * at.element_bytes
    base = (
        Component("Python and torch", 0 if at.is_cuda else PROCESS_BYTES, "their own heap"),
        transformers(at),
        Component("drafter weights", own_bytes, "masters and moments are given back by then"),
        Component("target model", target_bytes(spec, at), "loaded once more; embedding and head among it"),
    )
    worst = max(_moments(spec, at), key=lambda lines: sum(line.size_bytes for line in lines))
    return (*base, *worst, libraries(at, threads=1))


def path_bytes(spec: DFlashSpec, at: Sizes) -> int:
    """The most that a target which only its library runs takes beyond that, for each THOUSAND_TOKENS of text: a cache it has
    not, so that each path of a tree is read with the whole text before it. 0 where no tree is decoded."""
    return text_pass_bytes(spec, at, num_tokens=THOUSAND_TOKENS) * _tree_nodes(spec, at)


def _moments(spec: DFlashSpec, at: Sizes) -> Iterator[list[Component]]:
    prompt, text = spec.data.row_tokens, spec.data.row_tokens + spec.evaluate.max_new_tokens
    captured = [_features(at, prompt), _cache(spec, at, text)]
    yield [_cache(spec, at, text), _pass(spec, at, prompt)]
    yield [
        *captured,
        _own_cache(at, text),
        Component("a first draft", row_bytes(at, prompt, 3 * at.hidden), "3·S·H of its prompt"),
    ]
    yield [*captured, _own_cache(at, text), *_verified(spec, at, text)]
    yield [_pass(spec, at, text), _compared(at)]
    yield from _estimated(spec, at, text)
    if spec.evaluate.compare_untrained:
        fresh = Component("untrained drafter", at.parameters * at.element_bytes, "evaluate.compare_untrained")
        yield [fresh, Component("its weights drawn", 4 * at.largest_matrix, "the largest in float32")]
        yield [fresh, _features(at, text), _pass(spec, at, text)]
        yield [fresh, _features(at, text), _own_cache(at, text), _drafted(at, at.block_size - 1)]


def _verified(spec: DFlashSpec, at: Sizes, text: int) -> list[Component]:
    """Drafts and their tree, or chain, after the whole text: either's logits, and the attention of one layer with a mask."""
    read = 1 + (_tree_nodes(spec, at) or at.block_size - 1)
    scores = 2 * 4 * at.heads * read * (text + read)
    logits = Component("logits of a tree", read * at.vocab * at.element_bytes, f"{read:,} tokens, V each")
    drafts = _drafted(at, at.block_size - 1)
    return [
        max(logits, drafts, key=lambda line: line.size_bytes),
        Component(
            "attention of a tree",
            row_bytes(at, text + read, 2 * at.query_width) + scores,
            "keys, values and scores of a layer",
        ),
    ]


def _estimated(spec: DFlashSpec, at: Sizes, text: int) -> Iterator[list[Component]]:
    """Acceptance estimated from one pass over the text, with a block at every token of its answer."""
    features = _features(at, text)
    yield [features, _pass(spec, at, text)]
    blocks = spec.evaluate.max_new_tokens - at.block_size + 1
    if blocks < 1:
        return
    slots = blocks * (at.block_size - 1)
    drafted = replace(at, context_tokens=text, blocks=blocks, supervised_slots=slots)
    context = Component("context features", context_bytes(drafted, 3 * at.hidden), "3·S·H")
    around = positions(spec, drafted)
    yield [
        features,
        context,
        around,
        Component("one live layer", passing_layer(spec, drafted), "of a block at every token of an answer"),
    ]
    yield [
        features,
        context,
        around,
        Component("drafted blocks", token_bytes(drafted, 3 * at.hidden), "3·T·H"),
        _drafted(at, slots),
    ]


def _features(at: Sizes, num_tokens: int) -> Component:
    return Component(
        "captured features", row_bytes(at, num_tokens, (at.captured + 1) * at.hidden), "S·(K+1)·H of a text"
    )


def _pass(spec: DFlashSpec, at: Sizes, num_tokens: int) -> Component:
    why = f"captured layers, residual stream and MLP of {num_tokens:,} tokens"
    return Component("a pass of the target", text_pass_bytes(spec, at, num_tokens=num_tokens), why)


def _cache(spec: DFlashSpec, at: Sizes, text: int) -> Component:
    layers = spec.target.keep_layers or spec.target.num_layers
    size = layers * row_bytes(at, text + CACHE_ROOM_TOKENS, 2 * at.key_width)
    return Component(
        "the target's keys and values", size, f"{layers} layers of {text:,} tokens, each as wide as the drafter's"
    )


def _own_cache(at: Sizes, text: int) -> Component:
    """One layer's are copied as they grow."""
    return Component(
        "the drafter's keys and values", (at.layers + 1) * row_bytes(at, text, 2 * at.key_width), "2·S·G a layer"
    )


def _drafted(at: Sizes, slots: int) -> Component:
    """Logits in float32 and, while they are normed, a copy; on a CPU products of fewer bits are made with a wider head."""
    head = 4 * at.vocab * at.hidden if not at.is_cuda and at.element_bytes < 4 else 0
    rows = min(MARGINAL_ROWS, slots)
    return Component("logits of drafts", head + 2 * 4 * at.vocab * rows, f"float32, twice, {rows:,} slots at once")


def _compared(at: Sizes) -> Component:
    each = 4 if at.element_bytes == 4 else at.element_bytes + 4
    return Component("logits of a text", COMPARED_ROWS * at.vocab * each, "where it is not the plain one")


def _tree_nodes(spec: DFlashSpec, at: Sizes) -> int:
    """Of the widest tree that is decoded: every budget's on a card, elsewhere the smallest's."""
    budgets = spec.evaluate.tree_budgets
    return (max if at.is_cuda else min)(budgets, default=0)
