"""The cause behind an out-of-memory error of the card, where evidence names one. Pure functions.

A size alone proves nothing: a cause wants two witnesses that agree. Witnesses are the text's numbers, the stack the error
was raised in, the shapes at hand there, and what the allocator's snapshot says is alive and which loop kept it
(`remote.drafter.held`). Detectors stand in the order of their certainty; the first that fires is the cause. What is not
witnessed has no cause, only the kind of shortage that the numbers show.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from orchestrator.failure.oom_text import FOREIGN_SHARE, idle_bytes, others_bytes, pieces_bytes
from orchestrator.units import format_size

MIB = 1024**2
LARGE_SHARE = 0.25  # of what is alive: from here on something that is kept is what fills the card
RECOMPUTED_SHARE = 0.05  # of what is alive: below this something is recomputed, and hardly the layers
WIDE = 30_000  # a last dimension from here on may be a vocabulary's
ROUNDING_BYTES = 2 * MIB  # the allocator asks in steps of this
WORKSPACE_BYTES = 32 * MIB  # of cuBLAS on cards from Hopper on; `remote.plan.memory` counts the same
_WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Remedy:
    """One thing to change: a word for programs, a sentence for people."""

    word: str
    text: str


@dataclass(frozen=True)
class Cause:
    name: str
    text: str  # one sentence: what happened, with the numbers that show it
    remedies: tuple[Remedy, ...]  # the likeliest first

    @property
    def hint(self) -> str:
        return f"{self.text}: {self.remedies[0].text}"


@dataclass(frozen=True)
class Scene:
    """What the detectors look at."""

    facts: Mapping[str, Any]  # of the error's text, and of the job's as `job_facts.checked` has them
    traceback: str = ""
    stage: str | None = None
    step: int | None = None

    @property
    def source(self) -> str:
        frame = self.facts.get("frame")
        return str(frame.get("source", "")) if isinstance(frame, Mapping) else ""

    @property
    def requested(self) -> int:
        return self.size("requested_bytes")

    @property
    def alive(self) -> int:
        """Bytes of tensors when it ended, as the snapshot or the text counts them."""
        return self.size("memory_held_bytes") or self.size("allocated_bytes")

    @property
    def capacity(self) -> int:
        """The card, or what the process may take of it."""
        sizes = [self.size(name) for name in ("allowed_bytes", "total_bytes", "capacity_bytes")]
        return min((size for size in sizes if size), default=0)

    def size(self, name: str) -> int:
        value = self.facts.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def kept(self, kind: str) -> Mapping[str, Any]:
        kinds = self.facts.get("memory_kept")
        found = kinds.get(kind) if isinstance(kinds, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def keeps_much(self, kind: str, share: float = LARGE_SHARE) -> bool:
        return bool(self.alive) and int(self.kept(kind).get("bytes", 0)) >= share * self.alive

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of the tensors at hand where it was raised."""
        found = self.facts.get("tensors")
        for item in found if isinstance(found, Sequence) else ():
            if isinstance(item, Mapping) and isinstance(item.get("shape"), Sequence):
                yield str(item.get("name")), tuple(int(n) for n in item["shape"]), str(item.get("dtype"))

    def asks_for(self, size_bytes: int) -> bool:
        """Whether the size that was asked for is this one, as the text rounds it."""
        slack = max(ROUNDING_BYTES, self.requested // 200)
        return size_bytes > 0 and abs(self.requested - size_bytes) <= slack


def cause_of(scene: Scene) -> Cause | None:
    """The first detector that has its witnesses; None where none has."""
    return next((found for detect in DETECTORS if (found := detect(scene)) is not None), None)


# ------------------------------------------------------------------- from the stack it was raised in

_COMPILING = re.compile(
    r"torch/_inductor/(select_algorithm|autotune_process|runtime/(benchmarking|triton_heuristics|coordinate_descent))"
    r"|torch/_inductor/.*(do_bench|autotune_to_one_config)|triton/(testing|runtime/autotuner)\.py"
)


def _compile_workspace(scene: Scene) -> Cause | None:
    if not _COMPILING.search(scene.traceback):
        return None
    text = f"compiling tried kernels beside what was alive, and asked for {format_size(scene.requested)}"
    return Cause(
        "compile_workspace",
        text,
        (
            Remedy("no_autotune", "compile without mode=max-autotune, or before the card is full"),
            Remedy("halve_batch", _HALVE),
        ),
    )


def _math_fallback(scene: Scene) -> Cause | None:
    """Attention that did not go through a fused kernel, which asks for little more than its output.

    With shapes at hand, the size asked for must be one that only the math kernel makes: scores in full, keys and values
    expanded to the queries' heads, or anything up-cast to float32. Without, a large part of the card at once.
    """
    if "scaled_dot_product_attention" not in scene.source and not re.search(
        r"return .*scaled_dot_product_attention\(|sdpa_attention\.py", scene.traceback
    ):
        return None
    shapes = [(shape, dtype) for _, shape, dtype in scene.tensors() if len(shape) == 4 and dtype in _WIDTHS]
    made = next((told for size, told in _math_sizes(shapes, scene.asks_for) if scene.asks_for(size)), None)
    total = scene.capacity
    if made is None and (shapes or not total or scene.requested < total / 10):
        return None
    what = made or "a large part of the card at once"
    text = f"attention fell back to PyTorch's math kernel: the {format_size(scene.requested)} are {what}"
    return Cause(
        "math_fallback",
        text,
        (
            Remedy(
                "fused_attention",
                "drop enable_gqa or the boolean mask, or choose flex; torch.nn.attention.sdpa_kernel says why the fused ones refuse",
            ),
            Remedy("chunk_attention", "attend in chunks of queries, each under torch.utils.checkpoint"),
        ),
    )


def _math_sizes(
    shapes: Sequence[tuple[tuple[int, ...], str]], is_asked: Callable[[int], bool]
) -> Iterator[tuple[int, str]]:
    """Sizes that only the math kernel asks for, of every pair of queries and keys (batch, heads, tokens, width) at hand."""
    for queries, dtype in shapes:
        for keys, _ in shapes:
            if queries[0] != keys[0] or queries[3] != keys[3] or queries[1] % keys[1]:
                continue
            width, expanded = _WIDTHS[dtype], keys[0] * queries[1] * keys[2] * keys[3]
            if is_asked(prod(queries) * width):  # a fused kernel's output: of this size everything may be
                continue
            for scores_width in {width, 4}:
                yield prod(queries[:3]) * keys[2] * scores_width, "scores of every query and key"
            if queries[1] != keys[1]:
                for key_width in {width, 4}:
                    cast = " in float32" if key_width > width else ""
                    yield expanded * key_width, f"keys and values expanded from {keys[1]} to {queries[1]} heads{cast}"
            if width < 4:
                yield expanded * 4, "keys and values up-cast to float32"
                yield prod(queries) * 4, "queries up-cast to float32"
                yield prod(keys) * 4, "keys and values up-cast to float32"


def _library_workspace(scene: Scene) -> Cause | None:
    """Of the driver's own error it is known only where this process is seen to have filled the card itself."""
    level, reserved = scene.facts.get("level"), scene.size("reserved_bytes")
    fills_card = level in ("driver", "handle") and bool(scene.capacity) and reserved > scene.capacity / 2
    if level != "library" and not fills_card and not _asks_for_workspace(scene):
        return None
    return Cause(
        "library_workspace",
        "cuBLAS, cuDNN or the driver found no room for its handle and workspace, which lie outside of PyTorch's own memory",
        (Remedy("leave_room", "leave a GiB free: torch.cuda.set_per_process_memory_fraction, or a smaller step"),),
    )


def _asks_for_workspace(scene: Scene) -> bool:
    """cuBLAS's own 32 MiB, asked for through PyTorch by a product of matrices that are all smaller."""
    sizes = [prod(shape) * _WIDTHS.get(dtype, 8) for _, shape, dtype in scene.tensors()]
    is_product = re.search(r"\bmatmul|\bb?mm\(|linear\(|einsum\(|[\w)\]] @ [\w(]", scene.source) is not None
    of_product = [size for size in sizes if size < scene.requested / 2]
    return scene.requested == WORKSPACE_BYTES and is_product and len(of_product) >= 2


# ------------------------------------------------------------------------------- from the numbers


def _other_process(scene: Scene) -> Cause | None:
    others, total = others_bytes(scene.facts), scene.size("total_bytes")
    if scene.facts.get("shortage") != "other_process" or others < FOREIGN_SHARE * total:
        return None
    named = [
        f"process {item['pid']} {format_size(int(item['used_bytes']))}"
        for item in scene.facts.get("other_processes") or ()
    ]
    who = f" ({', '.join(named)})" if named else ""
    return Cause(
        "other_process",
        f"other processes hold {format_size(others)} of the card{who}",
        (
            Remedy(
                "free_card", "free the card or choose another; draftyard reap ends only what is left of your own runs"
            ),
        ),
    )


def _fragmentation(scene: Scene) -> Cause | None:
    if scene.facts.get("shortage") != "fragmentation":
        return None
    idle, free = idle_bytes(scene.facts), pieces_bytes(scene.facts) - idle_bytes(scene.facts)
    beside = f", and {format_size(free)} are free beside them" if free else ""
    asked = format_size(scene.requested)
    text = f"{format_size(idle)} are reserved and unused, but in pieces{beside}; {asked} were asked for in one"
    grow = Remedy("expandable_segments", "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    even = Remedy("even_sizes", "pad to a few sizes, or empty the cache once after the largest")
    return Cause("fragmentation", text, (even,) if scene.facts.get("expandable_segments") is True else (grow, even))


# ------------------------------------------------------------------- from what is alive, and why


def _optimizer_state(scene: Scene) -> Cause | None:
    """Moments are made in the first step, when the memory of forward and backward seemed to fit."""
    makes_state = "_init_group" in scene.traceback and "torch/optim/" in scene.traceback
    own = scene.stage == "load" and "remote/drafter/optim.py" in scene.traceback
    if not makes_state and not own:
        return None
    when = "before the first step" if own else "in the first step, after a forward and a backward that fitted"
    held = int(scene.kept("optimizer").get("bytes", 0))
    so_far = f"; {format_size(held)} of it were there" if held else ""
    return Cause(
        "optimizer_state",
        f"the optimizer made its moments {when}, and they did not fit{so_far}",
        (
            Remedy(
                "smaller_state",
                "an optimizer with less state: moments in bfloat16 or 8 bits, Adafactor, or sharded ones",
            ),
            Remedy("fewer_parameters", "train fewer parameters"),
        ),
    )


def _full_logits(scene: Scene) -> Cause | None:
    """Two or more tensors as wide as a vocabulary and of one number of rows, with the one that was asked for."""
    wide = [(name, shape, dtype) for name, shape, dtype in scene.tensors() if _is_wide(shape) and dtype in _WIDTHS]
    if not wide:
        return None
    counts: dict[int, list[tuple[str, int]]] = {}
    for name, shape, dtype in wide:
        counts.setdefault(prod(shape), []).append((name, prod(shape) * _WIDTHS[dtype]))
    elements, alike = max(counts.items(), key=lambda item: sum(size for _, size in item[1]))
    asked = any(scene.asks_for(elements * width) for width in (2, 4, 8))
    total = sum(size for _, size in alike) + (scene.requested if asked else 0)
    names = ", ".join(name for name, _ in alike)
    if not _OF_LOGITS.search(f"{names} {scene.source}"):  # a wide layer's own activations come in pairs as well
        return None
    if len(alike) + asked < 2 or total < LARGE_SHARE * (scene.alive + scene.requested):
        return None
    text = f"whole logits are alive together: {names} of {format_size(alike[0][1])} each" + (
        f", and a copy of {format_size(scene.requested)} asked for" if asked else ""
    )
    return Cause(
        "full_logits",
        text,
        (
            Remedy("chunk_logits", "take the loss in chunks of rows, its gradient made inside the chunk"),
            Remedy("halve_batch", _HALVE),
        ),
    )


_OF_LOGITS = re.compile(r"logit|softmax|cross_entropy|kl_div|logsumexp|teacher|student|prob|lm_head", re.IGNORECASE)


def _is_wide(shape: tuple[int, ...]) -> bool:
    return 2 <= len(shape) <= 3 and shape[-1] >= WIDE


def _leak(scene: Scene) -> Cause | None:
    kept = scene.kept("steps")
    if not scene.keeps_much("steps"):
        return None
    text = f"{_kept_text(kept)} are from {kept.get('repeats')} steps of the training loop and still alive"
    return Cause(
        "kept_over_steps",
        text,
        (Remedy("detach", "keep numbers, not tensors with a graph: .item() or .detach() on what is remembered"),),
    )


def _kept_chunks(scene: Scene) -> Cause | None:
    kept = scene.kept("chunks")
    if not scene.keeps_much("chunks"):
        return None
    text = f"{_kept_text(kept)}: every one of {kept.get('repeats')} chunks is kept for the backward"
    return Cause(
        "kept_chunks",
        text,
        (
            Remedy(
                "checkpoint_chunks",
                "put the loop's body under torch.utils.checkpoint, or take its gradient in the loop",
            ),
            Remedy("halve_batch", _HALVE),
        ),
    )


def _backward(scene: Scene) -> Cause | None:
    if scene.stage != "backward" and not re.search(r"\.backward\(|autograd\.grad\(", scene.source):
        return None
    return Cause(
        "backward",
        f"the forward fitted and the backward did not: it asked for {format_size(scene.requested)} beside what was kept for it",
        (_checkpoint_layers(), Remedy("halve_batch", _HALVE))
        if scene.keeps_much("layers")
        else (Remedy("halve_batch", _HALVE), _checkpoint_layers()),
    )


def _layer_activations(scene: Scene) -> Cause | None:
    if not scene.keeps_much("layers"):
        return None
    text = f"{_kept_text(scene.kept('layers'))} are what the layers keep for the backward"
    return Cause("layer_activations", text, (_checkpoint_layers(), Remedy("halve_batch", _HALVE)))


def _too_many_tokens(scene: Scene) -> Cause | None:
    """Each layer is recomputed already, so what is left grows with the tokens of a step."""
    if not scene.keeps_much("checkpointed", RECOMPUTED_SHARE) or scene.keeps_much("layers"):
        return None
    text = f"the layers are recomputed already ({format_size(int(scene.kept('checkpointed')['bytes']))} of them alive), and the tokens of a step do not fit"
    return Cause(
        "too_many_tokens", text, (Remedy("fewer_tokens", "fewer anchors, a smaller block or fewer rows a step"),)
    )


def _process_limit(scene: Scene) -> Cause | None:
    if scene.facts.get("shortage") != "process_limit":
        return None
    text = f"the process may take {format_size(scene.size('allowed_bytes'))} and reached that, not the card's end"
    return Cause("process_limit", text, (Remedy("raise_limit", "raise the cap, or make the step smaller"),))


def _kept_text(kept: Mapping[str, Any]) -> str:
    return f"{format_size(int(kept.get('bytes', 0)))} in {kept.get('num_blocks')} tensors made at {kept.get('frame')}"


def _checkpoint_layers() -> Remedy:
    return Remedy("checkpoint_layers", "recompute each layer in the backward (torch.utils.checkpoint)")


_HALVE = "half the rows at once, accumulated over two backwards"

DETECTORS: tuple[Callable[[Scene], Cause | None], ...] = (
    _compile_workspace,
    _math_fallback,
    _library_workspace,
    _other_process,
    _fragmentation,
    _optimizer_state,
    _full_logits,
    _leak,
    _kept_chunks,
    _too_many_tokens,
    _backward,
    _layer_activations,
    _process_limit,
)
