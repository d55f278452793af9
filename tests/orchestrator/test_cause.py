"""Causes of an out-of-memory error: each detector with what it is for, and with what only looks like it."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.failure import Failure, Findings, Told, causes
from orchestrator.failure.cause import DETECTORS, Scene, cause_of

GIB, MIB = 1024**3, 1024**2
OOM = "torch.OutOfMemoryError"


def text(
    asked: str, *, free: str = "512.00 MiB", own: str = "94.30 GiB", more: str = "", idle: str = "300.00 MiB"
) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 94.97 GiB of which {free} is free.{more}"
        f" Including non-PyTorch memory, this process has {own} memory in use. Of the allocated memory 90.00 GiB is allocated"
        f" by PyTorch, and {idle} is reserved by PyTorch but unallocated."
    )


def trace(*frames: tuple[str, int, str, str]) -> str:
    lines = [f'  File "{file}", line {line}, in {name}\n    {source}' for file, line, name, source in frames]
    return "\n".join(["Traceback (most recent call last):", *lines, f"{OOM}: {text('2.00 GiB')}", ""])


TRAIN = ("/w/train.py", 40, "main", "step(batch)")
ADAM = "/v/lib/python3.12/site-packages/torch/optim/adam.py"
NO_KEPT: dict[str, Any] = {}


def failed(message: str, *frames: tuple[str, int, str, str], kind: str = OOM, **more: Any) -> Failure:
    facts = more.pop("facts", {})
    told = trace(TRAIN, *frames).replace(text("2.00 GiB"), message)
    fields = {"failure": kind, "message": f"{kind}: {message}", "traceback": told, "facts": facts, **more}
    return causes(Findings(told=[Told("rank0", 1.0, fields)]))[0]


def kept(kind: str, size: int, *, repeats: int = 16, alive: int = 90 * GIB) -> dict[str, Any]:
    held = {"bytes": size, "num_blocks": repeats, "repeats": repeats, "frame": "/w/model.py:9 attend"}
    return {"memory_kept": {kind: held}, "memory_held_bytes": alive}


def tensor(name: str, *shape: int, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": dtype, "function": "attend"}


SDPA = ("/w/model.py", 9, "attend", "out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)")
QKV = [tensor("q", 182, 32, 768, 128), tensor("k", 182, 8, 8032, 128), tensor("v", 182, 8, 8032, 128)]
LOSS = ("/w/loss.py", 20, "kl", "log_q = F.log_softmax(student_logits.float(), -1)")
LOGITS = [tensor("student_logits", 24_576, 248_320), tensor("teacher_logits", 24_576, 248_320)]
MLP = [tensor("gate", 24_576, 248_320), tensor("up", 24_576, 248_320)]
PRODUCT = ("/w/model.py", 30, "forward", "return left @ right")


def seen(message: str = text("2.00 GiB"), *frames: tuple[str, int, str, str], **more: Any) -> Failure:
    return failed(message, *frames, **more)


# As it was recorded on an H200 whose every GiB a loop had filled: the output of the first product, 512 KiB, found no room.
FULL_CARD = failed(
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 3.12 MiB is free."
    " Including non-PyTorch memory, this process has 139.79 GiB memory in use. Of the allocated memory 139.27 GiB is"
    " allocated by PyTorch, and 16.00 MiB is reserved by PyTorch but unallocated.",
    ("/w/oom_programs.py", 187, "library_workspace", "product = left @ right"),
    facts={
        "allocated_bytes": 149535326208,
        "reserved_bytes": 149552103424,
        "capacity_bytes": 150109880320,
        "tensors": [tensor("left", 512, 512), tensor("right", 512, 512)],
        "memory_held_bytes": 149535326208,
        "expandable_segments": True,
    },
)


RIGHT: dict[str, tuple[str, Failure]] = {
    "the first user's K and V, expanded to 32 heads in float32": (
        "math_fallback",
        seen(text("22.31 GiB"), SDPA, facts={"tensors": QKV}),
    ),
    "the same in bfloat16": ("math_fallback", seen(text("11.15 GiB"), SDPA, facts={"tensors": QKV})),
    "scores of every query and key": (
        "math_fallback",
        seen(text("64.00 GiB"), SDPA, facts={"tensors": [tensor("q", 1, 32, 32_768, 128), tensor("k", 1, 32, 16_384, 128)]}),
    ),
    "a large part of the card, no shapes known": ("math_fallback", seen(text("45.64 GiB"), SDPA)),
    "sixteen chunks kept": ("kept_chunks", seen(facts=kept("chunks", 40 * GIB))),
    "logits of student and teacher, and a float copy": (
        "full_logits",
        seen(text("22.73 GiB"), LOSS, facts={"tensors": LOGITS, "memory_held_bytes": 60 * GIB}),
    ),
    "moments of torch's own optimizer": (
        "optimizer_state",
        seen(text("2.00 GiB"), (ADAM, 160, "_init_group", "state['exp_avg'] = torch.zeros_like("), step=1),
    ),
    "moments of the bundled one": (
        "optimizer_state",
        seen(text("2.00 GiB"), ("/w/remote/drafter/optim.py", 174, "_slot", "moments = {"), stage="load"),
    ),
    "somebody else on the card": (
        "other_process",
        seen(text("2.00 GiB", own="20.00 GiB", more=" Process 4711 has 74.40 GiB memory in use.")),
    ),
    "somebody else whom a container hides": ("other_process", seen(text("2.00 GiB", own="20.00 GiB"))),
    "pieces": ("fragmentation", seen(text("2.00 GiB", idle="9.00 GiB"))),
    "autotuning beside a full card": (
        "compile_workspace",
        seen(text("2.00 GiB"), ("/v/site-packages/torch/_inductor/runtime/benchmarking.py", 3, "benchmark_gpu", "fn()")),
    ),
    "cuBLAS has no handle": (
        "library_workspace",
        seen("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", PRODUCT, kind="RuntimeError"),
    ),
    "the driver, on a card that this process fills": (
        "library_workspace",
        seen("CUDA error: out of memory", PRODUCT, kind="torch.AcceleratorError", facts={"reserved_bytes": 90 * GIB, "capacity_bytes": 95 * GIB}),
    ),
    "cuBLAS's workspace through the allocator": (
        "library_workspace",
        seen(text("32.00 MiB", free="1.00 MiB", idle="0 bytes"), PRODUCT, facts={"tensors": [tensor("left", 64, 64), tensor("right", 64, 64)]}),
    ),
    "outputs of ten steps remembered": ("kept_over_steps", seen(facts=kept("steps", 60 * GIB, repeats=10))),
    "a backward after a forward that fitted": ("backward", seen(text("2.00 GiB"), ("/w/train.py", 44, "step", "loss.backward()"))),
    "the trainer's backward": ("backward", seen(stage="backward")),
    "layers kept": ("layer_activations", seen(facts=kept("layers", 40 * GIB, repeats=6))),
    "layers recomputed already": ("too_many_tokens", seen(facts=kept("checkpointed", 10 * GIB), stage="backward")),
    "a limit set on the process": (
        "process_limit",
        seen(text("2.00 GiB", free="60.00 GiB", own="32.00 GiB", more=" 33.00 GiB allowed;")),
    ),
}  # fmt: skip

LOOK_ALIKES: dict[str, tuple[str, Failure]] = {
    "a fused kernel's own output, as large as K and V expanded": (
        "math_fallback",
        seen(text("11.15 GiB"), SDPA, facts={"tensors": [tensor("q", 182, 32, 8032, 128), *QKV[1:]]}),
    ),
    "a size that no shape at hand makes": ("math_fallback", seen(text("30.00 GiB"), SDPA, facts={"tensors": QKV})),
    "little asked for in attention": ("math_fallback", seen(text("20.00 MiB"), SDPA)),
    "attention in a comment of the log": ("math_fallback", seen(text("45.64 GiB"), ("/w/a.py", 1, "f", "y = x * 2"))),
    "a few small chunks": ("kept_chunks", seen(facts=kept("chunks", 2 * GIB))),
    "chunks without a snapshot": ("kept_chunks", seen()),
    "gate and up of a wide layer": (
        "full_logits",
        seen(text("22.73 GiB"), ("/w/m.py", 3, "mlp", "h = F.silu(gate) * up"), facts={"tensors": MLP, "memory_held_bytes": 60 * GIB}),
    ),
    "one tensor of logits": ("full_logits", seen(text("2.00 GiB"), LOSS, facts={"tensors": LOGITS[:1], "memory_held_bytes": 60 * GIB})),
    "logits that are a small part": (
        "full_logits",
        seen(text("2.00 GiB"), LOSS, facts={"tensors": [tensor("student_logits", 64, 248_320), tensor("teacher_logits", 64, 248_320)], "memory_held_bytes": 60 * GIB}),
    ),
    "an optimizer's temporaries in a later step": (
        "optimizer_state",
        seen(text("2.00 GiB"), (ADAM, 560, "_multi_tensor_adam", "exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)"), step=7),
    ),
    "a desktop on the card": (
        "other_process",
        seen(text("600.00 MiB", free="512.00 MiB", own="94.10 GiB", more=" Process 12 has 350.00 MiB memory in use.")),
    ),
    "others that leave too little anyway": (
        "other_process",
        seen(text("40.00 GiB", own="70.00 GiB", more=" Process 4711 has 24.00 GiB memory in use.")),
    ),
    "sixteen of 140000 MiB left over, and no others: a card that is simply full": ("fragmentation", FULL_CARD),
    "the same, whose sizes are rounded to 10 MiB": ("other_process", FULL_CARD),
    "its product's own output": ("library_workspace", FULL_CARD),
    "pieces that would not be enough": ("fragmentation", seen(text("2.00 GiB", idle="1.00 GiB"))),
    "compiled code that allocates what it computes": (
        "compile_workspace",
        seen(text("2.00 GiB"), ("/v/site-packages/torch/_inductor/output_code.py", 584, "__call__", "return self.current_callable(inputs)")),
    ),
    "the driver, on a card that others fill": (
        "library_workspace",
        seen("CUDA error: out of memory", PRODUCT, kind="torch.AcceleratorError", facts={"reserved_bytes": 2 * GIB, "capacity_bytes": 95 * GIB}),
    ),
    "32 MiB that a product itself makes": (
        "library_workspace",
        seen(text("32.00 MiB", free="1.00 MiB", idle="0 bytes"), PRODUCT, facts={"tensors": [tensor("left", 4096, 4096), tensor("right", 4096, 4096)]}),
    ),
    "layers recomputed, and others kept for all that": (
        "too_many_tokens",
        seen(facts={"memory_held_bytes": 90 * GIB, "memory_kept": {
            **kept("checkpointed", 10 * GIB)["memory_kept"], **kept("layers", 40 * GIB)["memory_kept"]}}),
    ),
    "one small layer recomputed, and chunks kept": (
        "too_many_tokens",
        seen(facts={"memory_held_bytes": 90 * GIB, "memory_kept": {
            **kept("checkpointed", 1 * GIB)["memory_kept"], **kept("chunks", 40 * GIB)["memory_kept"]}}),
    ),
    "a recomputation whose blocks are a hundredth of what is alive": (
        "too_many_tokens",
        seen(facts=kept("checkpointed", 1 * GIB, repeats=1)),
    ),
    "a forward inside the training step": ("backward", seen(text("2.00 GiB"), ("/w/train.py", 43, "step", "loss = model(batch)"))),
    "layers that are a small part": ("layer_activations", seen(facts=kept("layers", 2 * GIB))),
    "a loop over steps that keeps little": ("kept_over_steps", seen(facts=kept("steps", 1 * GIB))),
    "a limit, and a card that is full as well": (
        "process_limit",
        seen(text("2.00 GiB", free="1.00 GiB", own="93.00 GiB", more=" 94.00 GiB allowed;")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_cause_is_named_and_comes_with_something_to_change(name: str) -> None:
    cause, found = RIGHT[name]

    assert (found.kind, found.facts.get("cause")) == ("gpu_oom", cause), found
    assert found.facts["remedies"]
    assert found.facts["remedies"][0]["text"] in found.hint


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_only_looks_like_a_cause_is_not_called_it(name: str) -> None:
    cause, found = LOOK_ALIKES[name]

    assert found.kind == "gpu_oom"
    assert found.facts.get("cause") != cause, found


def test_every_detector_has_both_kinds_of_input() -> None:
    names = {cause for cause, _ in RIGHT.values()}

    assert {cause for cause, _ in LOOK_ALIKES.values()} == names
    assert len(names) == len(DETECTORS)


def test_a_card_that_is_simply_full_is_called_full_and_nobody_is_told_to_mend_its_pieces() -> None:
    assert (FULL_CARD.facts["shortage"], FULL_CARD.facts.get("cause")) == ("full", None), FULL_CARD


@pytest.mark.parametrize(
    ("asked", "idle", "more", "told"),
    [
        ("1.50 GiB", "2.80 GiB", "", "fragmentation"),
        ("2.00 MiB", "16.00 MiB", "", "full"),
        ("2.00 MiB", "16.00 MiB", " 8.00 GiB allowed;", "process_limit"),
        ("1.50 GiB", "2.80 GiB", " 8.00 GiB allowed;", "fragmentation"),
        ("20.00 MiB", "120.00 MiB", " 8.00 GiB allowed;", "process_limit"),
    ],
)
def test_pieces_explain_a_shortage_where_they_are_enough_and_a_part_that_counts(
    asked: str, idle: str, more: str, told: str
) -> None:
    free, own = ("80.00 GiB", "14.97 GiB") if "allowed" in more else ("1.00 MiB", "94.97 GiB")

    assert seen(text(asked, free=free, own=own, idle=idle, more=more)).facts["shortage"] == told


def test_where_segments_grow_already_nobody_is_told_to_let_them() -> None:
    message = text("2.00 GiB", idle="9.00 GiB")

    off, on = (seen(message, facts={"expandable_segments": known}) for known in (False, True))

    assert off.facts["remedies"][0]["word"] == "expandable_segments"
    assert [item["word"] for item in on.facts["remedies"]] == ["even_sizes"]


def test_the_jobs_own_environment_says_whether_segments_grow_where_no_snapshot_does() -> None:
    """The supervisor lets them grow in every job, so that is known of one that reports nothing as well."""
    stderr = trace(TRAIN).replace(text("2.00 GiB"), text("2.00 GiB", idle="9.00 GiB"))

    found = {grows: causes(Findings(stderr=stderr, grows_segments=grows))[0] for grows in (True, False, None)}

    assert [item["word"] for item in found[True].facts["remedies"]] == ["even_sizes"]
    assert {found[grows].facts["remedies"][0]["word"] for grows in (False, None)} == {"expandable_segments"}
    assert "expandable_segments" not in found[True].hint


def test_a_display_beside_a_full_card_is_not_told_to_be_freed() -> None:
    message = text("20.00 MiB", free="10.00 MiB", own="94.50 GiB", more=" Process 9 has 410.00 MiB memory in use.")

    assert seen(message).facts["shortage"] == "full"
    assert "another process" not in seen(message).hint


def test_pieces_are_told_apart_from_what_is_free_on_the_card() -> None:
    """3.00 GiB are free and 2.00 asked for: how large the pieces are is not known, and not said."""
    message = text("2.00 GiB", free="3.00 GiB", own="91.97 GiB", idle="0.50 GiB")

    assert "0.50 GiB are reserved and unused, but in pieces, and 3.00 GiB are free beside them" in seen(message).hint


def test_evidence_of_another_shape_costs_the_cause_and_nothing_else() -> None:
    odd: list[dict[str, Any]] = [
        {"memory_kept": 3, "tensors": "x", "memory_held_bytes": "many", "frame": 7},
        {"memory_kept": {"chunks": None}, "tensors": [None, {"shape": None}], "requested_bytes": True},
        {},
    ]

    assert [cause_of(Scene(facts)) for facts in odd] == [None, None, None]
