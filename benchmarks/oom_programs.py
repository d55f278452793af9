"""Small programs that each run out of memory for one known cause, and the same with one thing changed.

    python -m benchmarks.oom_programs NAME --limit BYTES [--remedy WORD] [--stand-in]

Each is what a script of a user's own looks like: it reports through `remote.report` and has its failures explained. All
shapes follow from the limit, so that a card's gigabytes and a stand-in's megabytes tell the same story. `rung-NAME` is a
rung of the bundled trainer on a stand-in; on a card the trainer itself is run. `hold` is a foreign process.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.oom_card import GIB, MIB, SmallCard, counting
from remote.drafter.job import Job
from remote.drafter.measure import Meter
from remote.drafter.smoke import run_rung
from remote.drafter.snapshot import failures_explained
from remote.report import Reporter
from remote.rundir import RunDir
from remote.spec import DFlashSpec, load

HALVE = "halve_batch"


@dataclass(frozen=True)
class Place:
    """Where a program runs, and how much it may take."""

    device: torch.device
    limit_bytes: int
    remedy: str | None

    def share(self, part: float, bytes_each: int) -> int:
        """How many of so many bytes are this part of the limit."""
        return max(1, round(part * self.limit_bytes / bytes_each))

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, learnt: bool = False) -> Tensor:
        made = torch.empty(shape, device=self.device, dtype=dtype).normal_(0.0, 0.02)
        return made.requires_grad_() if learnt else made


# ------------------------------------------------------------------------- four of the first user


def attention_chunks(at: Place) -> None:
    """Attention in sixteen chunks of queries, to save memory; each chunk's expanded keys and values wait for the backward."""
    heads, groups, width, rows = 16, 4, 64, 8
    tokens = at.share(0.08, 2 * heads * width * 2)
    keys, values = (at.random(heads // groups, tokens, width, learnt=True) for _ in range(2))
    queries = at.random(heads, 16 * rows, width, learnt=True)

    def attend(chunk: Tensor) -> Tensor:
        wide_keys = keys.repeat_interleave(groups, 0)
        wide_values = values.repeat_interleave(groups, 0)
        return (chunk @ wide_keys.transpose(1, 2)).softmax(-1) @ wide_values

    outputs = []
    for start in range(0, queries.shape[1], rows):
        chunk = queries[:, start : start + rows]
        if at.remedy == "checkpoint_chunks":
            outputs.append(checkpoint(attend, chunk, use_reentrant=False))
        else:
            outputs.append(attend(chunk))
    torch.cat(outputs, 1).float().square().mean().backward()


def math_fallback(at: Place) -> None:
    """Grouped heads and a boolean mask: the fused kernels refuse one or the other, the math kernel takes both."""
    heads, kv_heads, width, rows = 32, 8, 128, 16
    tokens = at.share(0.09, kv_heads * width * 2)
    query = at.random(1, heads, rows, width)
    key, value = (at.random(1, kv_heads, tokens, width) for _ in range(2))
    mask = None if at.remedy == "fused_attention" else torch.ones(rows, tokens, dtype=torch.bool, device=at.device)
    fused = [SDPBackend.FLASH_ATTENTION]
    # cuDNN's kernel, which may take both, is left out: older cards and versions have none.
    refused = [*fused, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if at.device.type == "cpu":  # whose flash kernel takes a mask
        refused = [SDPBackend.MATH]
    with torch.no_grad(), sdpa_kernel(fused if mask is None else refused):
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def full_logits(at: Place) -> None:
    """A student's and a teacher's logits of every position at once, and both in float32 for the divergence."""
    vocab, hidden = 65_536, 32
    rows = at.share(0.2, vocab * 2) // 8 * 8
    head = at.random(vocab, hidden)
    student, teacher = at.random(rows, hidden, learnt=True), at.random(rows, hidden)

    def divergence(student: Tensor, teacher: Tensor) -> Tensor:
        student_logits, teacher_logits = student @ head.T, teacher @ head.T
        log_q = F.log_softmax(student_logits.float(), -1)
        log_p = F.log_softmax(teacher_logits.float(), -1)
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True)

    if at.remedy == "chunk_logits":
        for one, other in zip(student.split(rows // 8), teacher.split(rows // 8), strict=True):
            divergence(one, other).backward()
        return
    divergence(student, teacher).backward()


def backward(at: Place) -> None:
    """A forward that fits, as a test of the forward alone had shown, and gradients of what it kept that do not."""
    width, inner = 64, 4096
    rows = at.share(0.37, inner * 2) // 2 * 2
    up, down = at.random(inner, width, learnt=True), at.random(width, inner, learnt=True)
    inputs = at.random(rows, width)
    parts = inputs.split(rows // 2) if at.remedy == HALVE else (inputs,)
    for part in parts:
        loss = F.linear(F.gelu(F.linear(part, up)), down).float().square().mean()
        loss.backward()


# ------------------------------------------------------------------------------------------ others


def optimizer_state(at: Place) -> None:
    """Weights, forward and backward fit; AdamW's two moments, made in its first step, do not."""
    side = at.share(0.04, 4 * 1024)
    weights = [at.random(side, 1024, dtype=torch.float32, learnt=True) for _ in range(8)]
    if at.remedy == "smaller_state":
        optimizer: torch.optim.Optimizer = torch.optim.Adafactor(weights, foreach=False)
    else:
        optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.square().mean().backward()
    optimizer.step()


def kept_over_steps(at: Place) -> None:
    """The output of every step is remembered for a mean at the end, whole and with its graph."""
    width, inner = 64, 2048
    rows = at.share(0.08, inner * 2)
    weight = at.random(inner, width, learnt=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    remembered: list[Tensor | float] = []
    for _step in range(16):
        inputs = at.random(rows, width)
        hidden = torch.tanh(F.linear(inputs, weight))
        hidden.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        remembered.append(hidden.detach().mean().item() if at.remedy == "detach" else hidden)


def fragmentation(at: Place) -> None:
    """Seven large buffers in a first batch, seven of two thirds in the second, and then one that no hole is large enough for."""
    large = at.share(0.125, 1)
    first = [torch.empty(large, dtype=torch.uint8, device=at.device) for _ in range(7)]
    first.clear()
    second = [torch.empty(large * 6 // 10, dtype=torch.uint8, device=at.device) for _ in range(7)]
    longer = torch.empty(large * 3 // 2, dtype=torch.uint8, device=at.device)
    longer.fill_(len(second))


def process_limit(at: Place) -> None:
    """A table, and then another: nothing is kept in vain, the limit set on the process is just too low."""
    limit_bytes = at.limit_bytes
    table = torch.zeros(limit_bytes // 2, dtype=torch.uint8, device=at.device)
    other = torch.zeros(limit_bytes * 5 // 8, dtype=torch.uint8, device=at.device)
    table[0] = other[0]


def other_process(at: Place) -> None:
    """As much as the limit, on a card of which somebody else holds nearly all."""
    first = torch.zeros(at.limit_bytes // 2, dtype=torch.uint8, device=at.device)
    second = torch.zeros(at.limit_bytes // 2, dtype=torch.uint8, device=at.device)
    first[0] = second[0]


def library_workspace(at: Place) -> None:
    """The card is filled to the last megabytes, and then comes the first product, for which cuBLAS wants a handle.

    The product's own output is made before: otherwise that is what finds no room, in a card that is simply full.
    """
    left, right, product = (at.random(512, 512) for _ in range(3))
    filled = _fill(at.device, leave_bytes=2 * GIB if at.remedy == "leave_room" else MIB)
    torch.mm(left, right, out=product)
    torch.cuda.synchronize(at.device)
    filled[0][:1] = product[:1, :1].cpu().isfinite().item()


def _fill(device: torch.device, *, leave_bytes: int) -> list[Tensor]:
    """All of the card but so much, in ever smaller pieces: the allocator takes them from the driver in steps of its own."""
    filled: list[Tensor] = []
    for piece_bytes in (8 * GIB, GIB, 128 * MIB, 20 * MIB, MIB):
        with contextlib.suppress(torch.OutOfMemoryError):
            while torch.cuda.mem_get_info(device)[0] - leave_bytes > 2 * piece_bytes:
                filled.append(torch.empty(piece_bytes, dtype=torch.uint8, device=device))
    return filled


PROGRAMS: dict[str, Callable[[Place], None]] = {
    "attention_chunks": attention_chunks,
    "math_fallback": math_fallback,
    "full_logits": full_logits,
    "backward": backward,
    "optimizer_state": optimizer_state,
    "kept_over_steps": kept_over_steps,
    "fragmentation": fragmentation,
    "process_limit": process_limit,
    "other_process": other_process,
    "library_workspace": library_workspace,
}
WHOLE_CARD = ("other_process", "library_workspace")  # these are given no limit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oom_programs")
    parser.add_argument("name")
    parser.add_argument("--limit", type=int, required=True, metavar="BYTES")
    parser.add_argument("--remedy")
    parser.add_argument("--stand-in", action="store_true", help="on the CPU, against a limit that is counted")
    options = parser.parse_args(arguments)
    if options.name == "hold":
        return hold(options.limit)
    reporter = Reporter.from_environment()
    limit_bytes = 2 * options.limit if options.remedy == "raise_limit" else options.limit
    if options.stand_in:
        card = SmallCard(limit_bytes, is_process_limit=options.name == "process_limit")
        with reporter.job(), failures_explained(reporter, take=card.snapshot), counting(card):
            _program(options.name, Place(torch.device("cpu"), options.limit, options.remedy), reporter)
        return 0
    device = torch.device("cuda", 0)
    with reporter.job(), failures_explained(reporter):
        if options.name not in WHOLE_CARD:
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)
        _program(options.name, Place(device, options.limit, options.remedy), reporter)
        torch.cuda.synchronize(device)
    return 0


def hold(leave_bytes: int) -> int:
    """A foreign process: takes all of the card but so much, says so, and holds it until its stdin ends."""
    free_bytes, _ = torch.cuda.mem_get_info(0)
    held = torch.empty(max(1, free_bytes - leave_bytes), dtype=torch.uint8, device="cuda")
    sys.stdout.write(f"holding {held.nbytes} bytes\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()
    return 0


def _program(name: str, at: Place, reporter: Reporter) -> None:
    if name.startswith("rung-"):
        _rung(name.removeprefix("rung-"), at, reporter)
    else:
        PROGRAMS[name](at)


def _rung(name: str, at: Place, reporter: Reporter) -> None:
    """A rung of the bundled trainer, here: on a stand-in the spec's changes are the remedy."""
    assert reporter.artifacts is not None, "a rung runs in a run's folder"
    attempt = reporter.artifacts.parent
    run = RunDir(attempt.parent.parent)
    spec = load(run.spec_json)
    assert isinstance(spec, DFlashSpec)
    job = Job(spec, run, run.attempt(1), run.root, run.root, at.device, reporter)
    run_rung(job, name, Meter(at.device))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
