"""What is said about steps: metrics by the names of `remote.wire`, and one line for a person.

A window gathers the steps since the last log line as sums, so ratios are right whatever `log_every`
is. Reading a window is the one place where a training waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from remote.drafter.job import Job
from remote.drafter.loss import LossSums
from remote.drafter.metrics import Metrics, metrics
from remote.drafter.optim import NonFiniteError
from remote.drafter.step import ON_PEER, MicroBatch, StepResult
from remote.drafter.workbench import Workbench
from remote.roles import Roles


@dataclass
class Window:
    """Steps that ran since the last log line, not yet waited for."""

    sums: LossSums | None = None
    grad_norm: Tensor | None = None  # of the newest step
    num_steps: int = 0
    num_block_tokens: int = 0
    num_context_tokens: int = 0
    keys: dict[int, list[tuple[tuple[int, int], ...]]] = field(default_factory=dict)  # step -> its micro-batches' rows

    def add(self, step: int, result: StepResult, micro_batches: Sequence[MicroBatch]) -> None:
        self.sums = result.sums if self.sums is None else self.sums + result.sums
        self.grad_norm = result.grad_norm
        self.num_steps += 1
        self.num_block_tokens += sum(micro_batch.num_block_tokens for micro_batch in micro_batches)
        self.num_context_tokens += sum(micro_batch.num_context_tokens for micro_batch in micro_batches)
        self.keys[step] = [micro_batch.keys for micro_batch in micro_batches]


def log_step(job: Job, step: int, window: Window, bench: Workbench, queued: Metrics) -> Metrics:
    """Reports the window of all ranks as the metrics of its newest step, prints a line, returns them.

    `queued` is what the feed has to tell. What the ranks have in common is told by the first of them alone.
    """
    assert window.sums is not None, "a window is read after its first step"
    assert window.grad_norm is not None
    learnt: Metrics = metrics(window.sums, over_ranks=bench.peers.sum)
    learnt |= {"grad_norm": window.grad_norm.item(), "lr": bench.optimizer.lr(step)}
    own = _times(window, bench) | queued
    if bench.device.type == "cuda":
        own["allocation_retries"] = torch.cuda.memory_stats(bench.device)["num_alloc_retries"]
    if not bench.peers.is_first:
        job.reporter.metrics(step, own)
        return learnt | own
    job.reporter.metrics(step, learnt | own)
    job.log(_line(step, bench.spec.train.num_steps, learnt | own))
    return learnt | own


def stop_at_non_finite(job: Job, window: Window, bench: Workbench) -> None:
    """NonFiniteError, reported with step, term and rows, when the latch has closed."""
    found = bench.optimizer.latch.read()
    if found is None:
        return
    micro_batches = window.keys.get(found.step, [])
    if found.micro_batch is not None:
        micro_batches = micro_batches[found.micro_batch : found.micro_batch + 1]
    rows = [key for keys in micro_batches for key in keys]
    where = "in the step's gradient" if found.micro_batch is None else f"in micro-batch {found.micro_batch + 1}"
    place = f" {where} ({', '.join(f'row {row} of epoch {epoch}' for epoch, row in rows)})"
    term = found.term
    if term.startswith(ON_PEER):
        rank = peers_rank(term, job.ranks.roles)
        term, rows = f"loss on {job.ranks.roles.name(rank)}", []
        place = f" (`draftyard logs RUN --rank {rank}` names the rows)"
    error = NonFiniteError(
        f"step {found.step}: {term} is not finite{place}; no weight has moved since step {found.step - 1}"
    )
    facts = {"term": term, "micro_batch": found.micro_batch, "rows": rows}
    job.reporter.failure(error, stage="training", step=found.step, facts=facts)
    raise error


def peers_rank(term: str, roles: Roles) -> int:
    """Of the drafter whose loss closed another one's latch under that name."""
    return roles.drafters[int(term.removeprefix(ON_PEER))]


def _times(window: Window, bench: Workbench) -> Metrics:
    """Seconds a step by part, and tokens a second of all ranks; a checkpoint between two lines is not the steps' time."""
    seconds = bench.meter.seconds()
    total_s = seconds["step"] - seconds.get("checkpoint", 0.0)
    parts = {f"{part}_s": seconds.get(part, 0.0) for part in ("wait", "forward", "backward", "optimizer")}
    times: Metrics = {name: value / window.num_steps for name, value in (parts | {"step_s": total_s}).items()}
    tokens = torch.tensor([window.num_block_tokens, window.num_context_tokens])
    block_tokens, context_tokens = bench.peers.sum(tokens).tolist()
    return times | {
        "block_tokens_per_s": block_tokens / total_s,
        "context_tokens_per_s": context_tokens / total_s,
    }


def _line(step: int, num_steps: int, values: Metrics) -> str:
    shown = [f"step {step}/{num_steps}", f"loss {values['loss']:.4f}"]
    shown += [f"{name} {values[name]:.3f}" for name in ("accuracy", "streak") if name in values]
    return "  ".join(
        [*shown, f"grad norm {values['grad_norm']:.3g}", f"lr {values['lr']:.2e}", f"{values['step_s']:.3f} s"]
    )
