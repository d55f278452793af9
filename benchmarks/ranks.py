"""Two cards that share a training: what travels between them, what of it is hidden, and what a second drafter brings.

    python -m benchmarks.ranks [--out FOLDER] [--budget SECONDS] [--small]

One command: it starts itself twice through torch's launcher, with torch, transformers and `remote/` alone. Parts, in order:

    transfer   hidden states of one batch from rank 1 to rank 0, as the queue sends them, nothing else running
    alone      a drafter's step on inputs that lie ready; the other rank waits
    queued     the same steps with hidden states from a target of random weights on rank 1, through the queue
    shared     both ranks as drafters, gradients added up; each has a batch, so a step has two

Each part prints a line and appends it to `ranks.jsonl`, so a run that is cut keeps what it has; a part that the budget
has no time left for is said to be left out. Target and drafter are of the 27B shape (the target cut to 8 layers, 2.6
billion parameters in them). Without two cards, or with --small, tiny shapes on gloo show that it works; they claim nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from remote.balance import Pace, Sides, sentence
from remote.drafter import synthetic, workbench
from remote.drafter.data import Batch, HiddenStates, batch_of
from remote.drafter.decoder import Decoder
from remote.drafter.measure import Meter, give_back
from remote.drafter.peers import Peers
from remote.drafter.queue import Arrived, Inbox, Outbox, Shape
from remote.drafter.ranks import Place, Ranks, joined
from remote.drafter.step import MicroBatch, anchor_slots, assemble, run_step
from remote.drafter.target import Target
from remote.drafter.workbench import Workbench
from remote.report import Reporter
from remote.roles import Roles
from remote.spec import DataSpec, DFlashSpec, DrafterSpec, LossSpec, RolesSpec, TargetSpec, TrainSpec

WARM_UP, QUEUE = 3, 4
TWO_DRAFTERS, PAIR = Roles(num_drafters=2), Roles(num_drafters=1, num_targets=1, queue_capacity=QUEUE)

LARGE = DFlashSpec(
    recipe="ranks",
    branch="27b",
    entry="dflash",
    target=TargetSpec("random", 5120, 8, 248_320, False, 5_142_000_000, 2, 2),
    drafter=DrafterSpec(5, 17_408, 32, 8, 128, [1, 2, 3, 4, 5], 32, 3, 1e6, 32_768, attention="triton"),
    data=DataSpec("", "", "", row_tokens=8000, max_anchors=1024, anchors_per="row", hidden_states="online"),
    roles=RolesSpec(target=1, queue=QUEUE),  # no drafter here has a target of its own, nor one that was asked ahead
    train=TrainSpec(num_steps=10_000, kernels="triton"),
    loss=LossSpec({"ce": 1.0, "kl": 0.15}, gamma=10.0),
)
SMALL = replace(
    LARGE,
    branch="small",
    target=TargetSpec("random", 48, 8, 260, False, 200_000, 2, 2),
    drafter=DrafterSpec(2, 64, 4, 2, 16, [1, 2, 3, 4, 5], 4, 3, 1e4, 2048),
    train=TrainSpec(num_steps=10_000),
    data=replace(LARGE.data, row_tokens=96, max_anchors=8),
)


@dataclass
class Bench:
    """One rank of this benchmark."""

    spec: DFlashSpec
    ranks: Ranks
    device: torch.device
    out: Path
    ends_s: float  # on the monotonic clock
    steps: int

    def row(self, part: str, **values: Any) -> None:
        """Prints and keeps a result; the first rank speaks."""
        if self.ranks.rank == 0:
            line = json.dumps({"part": part, "shape": self.spec.branch, **values})
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            with (self.out / "ranks.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")

    def together(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))

    def has_time(self, part: str, needed_s: float) -> bool:
        """The same answer on both ranks: the first one's clock counts."""
        (left_ms,) = self.ranks.from_first([round((self.ends_s - time.monotonic()) * 1000)])
        if left_ms / 1000 < needed_s:
            self.row(part, left_out=f"{left_ms / 1000:.0f} s left of the budget, about {needed_s:g} s needed")
            return False
        return True

    def workbench(self, peers: Peers) -> Workbench:
        choices = workbench.choose(self.spec, self.device)
        tables = synthetic.stand_in(self.spec, device=self.device, dtype=choices.dtype)
        return workbench.build(
            self.spec, choices, meter=Meter(self.device), embed=tables.embed, head_VH=tables.head_VH, peers=peers
        )

    def batch(self, dtype: torch.dtype) -> Batch:
        like = torch.empty(0, dtype=dtype, device=self.device)
        return synthetic.batch(self.spec, synthetic.worst_layout(self.spec), like=like, position=self.ranks.rank)


def transfer(bench: Bench) -> None:
    """Gigabytes a second of whole batches, in decimal units."""
    shape = Shape.of(bench.spec, workbench.choose(bench.spec, bench.device).dtype)
    count, order = WARM_UP + bench.steps, range(WARM_UP + bench.steps)
    arrived, _ = _through_queue(bench, shape, order, lambda: bench.batch(shape.dtype), lambda _: None)
    if bench.ranks.rank == 0:
        seconds = [one.transfer_s for one in arrived[WARM_UP:count]]
        middle_s = statistics.median(seconds)
        rate = {"gigabytes_per_s": shape.size_bytes / middle_s / 1e9, "transfer_ms": middle_s * 1000}
        bench.row("transfer", batch_bytes=shape.size_bytes, **rate, slowest_ms=max(seconds) * 1000)


def alone(bench: Bench) -> float | None:
    """Seconds of a step on ready inputs, on the first rank."""
    step_s = None
    if bench.ranks.rank == 0:
        own = bench.workbench(Peers())
        ready = _assembled(bench, own, bench.batch(own.head_VH.dtype))
        step_s = _seconds_a_step(bench, own, lambda: ready)
        bench.row("alone", **_speed(step_s, [ready]))
    bench.together()
    return step_s


def queued(bench: Bench, alone_s: float | None) -> None:
    """Steps fed through the queue, against those on ready inputs."""
    dtype = workbench.choose(bench.spec, bench.device).dtype
    shape, order = Shape.of(bench.spec, dtype), range(WARM_UP + bench.steps)
    if bench.ranks.rank == 1:
        target, text = _random_target(bench, dtype), bench.batch(dtype)
        _through_queue(bench, shape, order, partial(_computed, bench, target, text), lambda _: None)
        return
    own, text = bench.workbench(Peers()), bench.batch(dtype)
    starts: list[float] = []

    def train(one: Arrived) -> None:
        batch = batch_of(text.parts, text.keys, one.states)
        run_step(len(starts) + 1, [_assembled(bench, own, batch)], own)
        if bench.device.type == "cuda":
            torch.cuda.synchronize(bench.device)
        starts.append(time.perf_counter())

    arrived, waits_s = (all_of[WARM_UP:] for all_of in _through_queue(bench, shape, order, lambda: text, train))
    step_s = (starts[-1] - starts[WARM_UP - 1]) / bench.steps
    assert alone_s is not None
    moved_s, waited_s = statistics.median(one.transfer_s for one in arrived), statistics.median(waits_s)
    target_pace = Pace(
        *(statistics.mean(values) for values in zip(*((a.pace.busy_s, a.pace.wait_s) for a in arrived), strict=True))
    )
    told = sentence(Sides(1, 1, target_pace, Pace(alone_s, max(0.0, step_s - alone_s))), depth=QUEUE, capacity=QUEUE)
    bench.row(
        "queued",
        **_speed(step_s, [_assembled(bench, own, text)]),
        share_of_alone=alone_s / step_s,
        transfer_ms=moved_s * 1000,
        drafter_wait_ms=waited_s * 1000,
        transfer_hidden_share=max(0.0, 1 - waited_s / moved_s),
        target_busy_ms=target_pace.busy_s * 1000,
        told=told.replace(f"queue {QUEUE}/{QUEUE}; ", ""),
    )


def shared(bench: Bench, alone_s: float | None) -> None:
    """Two drafters, a batch each a step: how many times the work of one they do in the same time."""
    own = bench.workbench(bench.ranks.peers)
    ready = _assembled(bench, own, bench.batch(own.head_VH.dtype))
    bench.together()
    step_s = _seconds_a_step(bench, own, lambda: ready)
    bench.together()
    if alone_s is not None:
        bench.row("shared", **_speed(step_s, [ready, ready]), times_one=2 * alone_s / step_s)


def _through_queue(
    bench: Bench, shape: Shape, order: range, make: Callable[[], Batch], use: Callable[[Arrived], None]
) -> tuple[list[Arrived], list[float]]:
    """Rank 1 makes and sends, rank 0 takes and uses; what arrived, without its tensors, and how long each was waited for."""
    bench.together()
    arrived, waits_s = list[Arrived](), list[float]()
    if bench.ranks.rank == 1:
        outbox = Outbox(PAIR, shape)
        for number in order:
            batch = make()
            outbox.put(number, batch.row.input_ids_S, HiddenStates(batch.features_SC, batch.teacher))
        outbox.finish()
    else:
        inbox = Inbox(PAIR, shape, order, bench.device)
        for _ in order:
            asked_s = time.perf_counter()
            one = inbox.take()
            waits_s.append(time.perf_counter() - asked_s)
            use(one)
            arrived.append(replace(one, states=HiddenStates(torch.empty(0), torch.empty(0))))
        inbox.finish()
    bench.together()
    return arrived, waits_s


def _assembled(bench: Bench, own: Workbench, batch: Batch) -> MicroBatch:
    layout = synthetic.worst_layout(bench.spec)
    return assemble(batch, own, num_slots=anchor_slots(bench.spec.data, most_documents=len(layout)))


def _seconds_a_step(bench: Bench, own: Workbench, ready: Callable[[], MicroBatch]) -> float:
    """The median over the steps after a warm-up."""
    own.meter.seconds()
    found = []
    for step in range(1, WARM_UP + bench.steps + 1):
        run_step(step, [ready()], own)
        found.append(own.meter.seconds()["step"])
    return statistics.median(found[WARM_UP:])


def _speed(step_s: float, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    block_tokens = sum(micro_batch.num_block_tokens for micro_batch in micro_batches)
    context_tokens = sum(micro_batch.num_context_tokens for micro_batch in micro_batches)
    rates = {"block_tokens_per_s": block_tokens / step_s, "context_tokens_per_s": context_tokens / step_s}
    return {"step_ms": step_s * 1000, **rates}


def _computed(bench: Bench, target: Target, text: Batch) -> Batch:
    row = text.row
    states = target.capture(row.input_ids_S, row.document_S, row.position_S, layers=bench.spec.drafter.captured_layers)
    return batch_of(text.parts, text.keys, HiddenStates(*states))


def _random_target(bench: Bench, dtype: torch.dtype) -> Target:
    """A Qwen3 of the spec's shape with random weights, made on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    target, drafter = bench.spec.target, bench.spec.drafter
    config = Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=drafter.intermediate_size,
        num_hidden_layers=target.num_layers,
        num_attention_heads=drafter.num_heads,
        num_key_value_heads=drafter.num_kv_heads,
        head_dim=drafter.head_dim,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with bench.device:
            model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    head_VH = model.get_output_embeddings().weight.detach()
    return Target(target, "random", None, Decoder(model.model, config), head_VH, frozenset({2}), "random")


@contextmanager
def _cleared(bench: Bench) -> Iterator[None]:
    yield
    give_back(bench.device)


def measure(bench: Bench) -> None:
    """Every part that there is time for."""
    is_large = bench.spec is LARGE
    alone_s: float | None = None
    if bench.has_time("transfer", 15 if is_large else 0):
        with _cleared(bench):
            transfer(bench)
    if bench.has_time("alone", 30 if is_large else 0):
        with _cleared(bench):
            alone_s = alone(bench)
        if bench.has_time("queued", 60 if is_large else 0):
            with _cleared(bench):
                queued(bench, alone_s)
        if bench.has_time("shared", 30 if is_large else 0):
            with _cleared(bench):
                shared(bench, alone_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmark-ranks"), help="folder for ranks.jsonl")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no part is begun")
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that it works")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if "RANK" not in os.environ:
        words = sys.argv[1:] if arguments is None else list(arguments)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return subprocess.run([*launcher, "-m", "benchmarks.ranks", *words], check=False).returncode
    has_cards = torch.cuda.device_count() >= 2
    spec = LARGE if has_cards and not options.small else SMALL
    place = Place(
        *(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")),
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
    )
    device = torch.device("cuda", place.local_rank) if has_cards else torch.device("cpu")
    reporter = Reporter(options.out, writer=f"rank{place.rank}")
    with joined(place, TWO_DRAFTERS, device, reporter) as ranks:
        bench = Bench(
            spec, ranks, device, options.out, time.monotonic() + options.budget, steps=10 if spec is LARGE else 3
        )
        bench.row("machine", torch=torch.__version__, device=torch.cuda.get_device_name(device) if has_cards else "cpu")
        measure(bench)
        ranks.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
