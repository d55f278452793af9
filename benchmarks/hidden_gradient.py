"""What the hidden states' gradient in fp8 costs a training in quality: the same trainings with it and with the full head.

    python -m benchmarks.hidden_gradient SPEC.json --data FOLDER --cache FOLDER [--seeds 3] [--at-once 1] [--ways full fp8 …]
                                         [--no-decoding] [--budget SECONDS] [--out FILE]
    python -m benchmarks.hidden_gradient --page        (the tables of benchmarks/measured/hidden_gradient.json, for docs)

SPEC.json is a resolved branch (`python -m benchmarks.ladder --resolve`); its target is loaded for real. For each seed
the trainings are made from the same start over the same rows: with the full head, in fp8, in fp8 without the correction of what the
head's rounding does in every step, and with the full head in chunks of half the length, which rounds otherwise and is no
worse, so that one can see what rounding does to a training at all. On a processor, whose products are exact, fp8 is
rebuilt by the same code. Printed as JSON lines: the loss and acceptance of the last third of the steps; the acceptance by
decoding held-out prompts; at the start, the middle and the end of each training, how far the fp8 gradient and the full one are
from float64 on the rows of that step; and last, of each way, how its loss and acceptance differ from the full head's over
the seeds. A small drafter leaves most of a card idle: `--at-once` seeds train beside one another, each in its own process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from remote.drafter import workbench
from remote.drafter.coarse_head import CoarseHead
from remote.drafter.data import Dataset, read_chats
from remote.drafter.evaluate import evaluate
from remote.drafter.loss import drafter_loss
from remote.drafter.measure import Meter
from remote.drafter.metrics import metrics
from remote.drafter.prepare import load_rows
from remote.drafter.step import MicroBatch, anchor_slots, assemble, run_step
from remote.drafter.target import Target, load_target, tables
from remote.drafter.teacher import Expectation
from remote.drafter.workbench import Workbench
from remote.spec import DFlashSpec, load

UNCORRECTED, TWIN = "fp8, uncorrected", "full, other chunks"
TRAINED = ("full", "fp8", UNCORRECTED, TWIN)
MEASURED = Path(__file__).parent / "measured" / "hidden_gradient.json"
COMPARED = ("loss", "acceptance_length")  # nats, tokens a round as drafts follow the text


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--page"]:
        print(page(json.loads(MEASURED.read_text(encoding="utf-8"))), end="")
        return 0
    options = _options(arguments)
    _bench(options)  # converts and keeps what every seed reads
    ends_at_s = time.time() + options.budget
    with ProcessPoolExecutor(options.at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        seeds = {seed: pool.submit(_of_seed, options, ends_at_s, seed) for seed in range(options.seeds)}
    broken = {seed: error for seed, found in seeds.items() if (error := found.exception()) is not None}
    for seed, error in broken.items():  # it must not cost what the others found
        print(f"seed {seed} broke: {error!r}", file=sys.stderr)
    lines = [line for seed, found in seeds.items() if seed not in broken for line in found.result()]
    trained = [line for line in lines if line["kind"] == "trained"]
    if not trained:
        print("no seed was trained: there is no difference to tell", file=sys.stderr)
    for way in (way for way in options.ways if way != "full" and trained):
        for metric in COMPARED:
            found = _difference(*(_of_way(trained, each, metric) for each in (way, "full")))
            _tell(options.out, {"hidden_gradient": way, "kind": "difference", "of": metric, **found})
    return 1 if broken or not trained else 0


def page(measured: Mapping[str, Any]) -> str:
    """Of kept trials: what each way came to beside the full head, and how far gradients were from float64 on the way there."""
    told = [
        "| training | way | loss of the last third, nats | seeds above the full head's | acceptance as drafts follow the text | acceptance by decoding |",
        "|---|---|---|---|---|---|",
    ]
    for steps in sorted({line["steps"] for line in measured["trainings"]}):
        lines = [line for line in measured["trainings"] if line["steps"] == steps]
        for way in (way for way in TRAINED[1:] if any(line["hidden_gradient"] == way for line in lines)):
            ours, full = (_of_way(lines, each, "loss") for each in (way, "full"))
            above = sum(a > b for a, b in zip(ours, full, strict=True))
            cells = [_cell(lines, way, metric) for metric in (*COMPARED, "decoded_acceptance_length")]
            name = f"{steps:,} steps, {len(full)} seeds"
            told.append(f"| {name} | {way} | {cells[0]} | {above} of {len(full)} | {cells[1]} | {cells[2]} |")
    told += ["", "| training | step | fp8, % off | full head in bfloat16, % off |", "|---|---|---|---|"]
    for steps, step in sorted({(line["steps"], line["step"]) for line in measured["gradients"]}):
        lines = [line for line in measured["gradients"] if (line["steps"], line["step"]) == (steps, step)]
        spans = (sorted(100 * line[f"{way}_error"] for line in lines) for way in ("fp8", "full"))
        told.append(
            f"| {steps:,} steps | {step:,} | " + " | ".join(f"{span[0]:.2f} to {span[-1]:.2f}" for span in spans) + " |"
        )
    return "\n".join(told) + "\n"


def _cell(lines: Sequence[Mapping[str, Any]], way: str, metric: str) -> str:
    ours, full = (_of_way(lines, each, metric) for each in (way, "full"))
    if not full:
        return ""
    found = _difference(ours, full)
    mean, error = (round(found[name], 4) + 0.0 for name in ("mean", "standard_error"))  # no -0.0000
    return f"{statistics.mean(full):.3f}, {mean:+.4f} ± {error:.4f}"


def _of_way(lines: Iterable[Mapping[str, Any]], way: str, metric: str) -> list[float]:
    """By seed."""
    found = {line["seed"]: line[metric] for line in lines if line["hidden_gradient"] == way and metric in line}
    return [found[seed] for seed in sorted(found)]


def _of_seed(options: argparse.Namespace, ends_at_s: float, seed: int) -> list[dict[str, Any]]:
    """Its trainings, all of them or none; `ends_at_s` is by the wall's clock, which processes share."""
    if time.time() > ends_at_s:
        print(f"passed over, the budget of {options.budget:g} s is spent: seed {seed}", file=sys.stderr, flush=True)
        return []
    spec, target, dataset, device = _bench(options)
    prompts = None if options.no_decoding else options.data / spec.data.held_out
    lines = []
    for way in options.ways:
        for line in _train(way, _asking(spec, way, seed=seed), target, dataset, device, prompts):
            lines.append({"seed": seed, "hidden_gradient": way, **line})
            _tell(options.out, lines[-1])
    return lines


def _tell(out: Path | None, line: dict[str, Any]) -> None:
    text = json.dumps(line) + "\n"  # in one piece: other seeds write beside this one
    sys.stdout.write(text)
    sys.stdout.flush()
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text)


def _bench(options: argparse.Namespace) -> tuple[DFlashSpec, Target, Dataset, torch.device]:
    spec = load(options.spec)
    assert isinstance(spec, DFlashSpec), "the bundled trainer's recipes alone have this gradient"
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":  # as a training there would choose
        spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, dtype="auto"))
    choices = workbench.choose(_asking(spec, "full", seed=0), device)
    target = load_target(spec.target, cache=options.cache, device=device, dtype=choices.dtype)
    return spec, target, load_rows(spec, target, data_dir=options.data, cache=options.cache), device


def _difference(found: Sequence[float], full: Sequence[float]) -> dict[str, float]:
    """Of one way from the full head: the mean over the seeds, and how uncertain that is by their spread."""
    differences = [ours - theirs for ours, theirs in zip(found, full, strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else math.nan
    return {
        "mean": statistics.mean(differences),
        "standard_error": spread / math.sqrt(len(differences)),
        "seeds": len(full),
    }


def _asking(spec: DFlashSpec, way: str, *, seed: int) -> DFlashSpec:
    gradient: Any = "fp8" if way in ("fp8", UNCORRECTED) else "full"
    chunk_tokens = spec.loss.chunk_tokens // 2 if way == TWIN else spec.loss.chunk_tokens
    return dataclasses.replace(
        spec,
        loss=dataclasses.replace(spec.loss, hidden_gradient=gradient, chunk_tokens=chunk_tokens),
        train=dataclasses.replace(spec.train, seed=seed),
        evaluate=dataclasses.replace(spec.evaluate, tree_budgets=[], compare_untrained=False),
    )


def _train(
    way: str, spec: DFlashSpec, target: Target, dataset: Dataset, device: torch.device, prompts: Path | None
) -> Iterator[dict[str, Any]]:
    embedding_VH, head_VH = tables(target, outlive_it=False)
    embed: Callable[[Tensor], Tensor] = partial(F.embedding, weight=embedding_VH)
    is_rebuilt = device.type == "cpu" and spec.loss.hidden_gradient == "fp8"
    choices = workbench.choose(_asking(spec, "full", seed=spec.train.seed) if is_rebuilt else spec, device)
    bench = workbench.build(spec, choices, meter=Meter(device), embed=embed, head_VH=head_VH)
    if is_rebuilt:
        bench.drafter.is_fused = True
        bench = dataclasses.replace(bench, coarse_head=CoarseHead.of(head_VH))
    if way == UNCORRECTED:
        assert bench.coarse_head is not None
        bench = dataclasses.replace(bench, coarse_head=dataclasses.replace(bench.coarse_head, is_corrected=False))
    num_slots = anchor_slots(spec.data, most_documents=dataset.most_documents)
    last, began_s, sums = spec.train.num_steps, time.monotonic(), []
    batches = dataset.batches(range(last), num_rows=spec.train.rows_per_step)
    for step, batch in enumerate(batches, 1):
        micro_batch = assemble(batch, bench, num_slots=num_slots)
        if step in (1, last // 2, last):
            yield {"kind": "gradient", "step": step, **_errors(micro_batch, bench)}
        found = run_step(step, [micro_batch], bench).sums
        if step > last - last // 3:
            sums.append(found)
    told = metrics(sum(sums[1:], sums[0]))
    shown = {name: told[name] for name in ("loss", "accuracy", "acceptance_length")}
    yield {"kind": "trained", "steps": last, "s": round(time.monotonic() - began_s, 1), **shown, "why": "rebuilt on a processor" if is_rebuilt else choices.reasons["hidden gradient"]}  # fmt: skip
    if prompts is None:
        return
    for row in evaluate(bench.drafter, target, spec, prompts=read_chats(prompts)).rows:
        yield {"kind": "decoded", "protocol": row.protocol, **row.values}


def _errors(micro_batch: MicroBatch, bench: Workbench) -> dict[str, float]:
    """Relative errors of the gradient of these rows' hidden states against float64, by either way, and of the loss's mean
    entropy on what is right, which says how peaked the drafter is."""
    with torch.no_grad():
        hidden_MH = bench.shared(
            micro_batch.features_SC, bench.embed(micro_batch.blocks.distinct_ids), micro_batch.row, micro_batch.blocks,
            micro_batch.plan.index_M,
        )  # fmt: skip
    exact = _gradient(micro_batch, bench, hidden_MH.double(), coarse=None)
    ways = {"full": None, "fp8": CoarseHead.of(bench.head_VH)}
    found = {way: _gradient(micro_batch, bench, hidden_MH, coarse=coarse) for way, coarse in ways.items()}
    errors = {f"{way}_error": float((found[way].double() - exact).norm() / exact.norm()) for way in ways}
    return errors | {"fp8_cosine": float(F.cosine_similarity(found["fp8"].double().flatten(), exact.flatten(), dim=0))}


def _gradient(micro_batch: MicroBatch, bench: Workbench, hidden_MH: Tensor, *, coarse: CoarseHead | None) -> Tensor:
    leaf, teacher = hidden_MH.detach().requires_grad_(), micro_batch.teacher
    if leaf.dtype == torch.float64 and isinstance(teacher, Expectation):
        floats = (each.double() if each.is_floating_point() else each for each in teacher.tensors)
        teacher = Expectation(*floats)
    elif leaf.dtype == torch.float64 and isinstance(teacher, Tensor):
        teacher = teacher.double()
    sums = drafter_loss(
        leaf, micro_batch.blocks, head_VH=bench.head_VH.to(leaf.dtype), teacher=teacher, spec=bench.spec.loss,
        plan=micro_batch.plan, is_fused=leaf.dtype != torch.float64, coarse_head=coarse,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(sums.objective(), leaf)
    return gradient


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hidden_gradient", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("spec", type=Path, help="a resolved branch")
    parser.add_argument("--data", type=Path, required=True, help="folder of the recipe's JSONL files")
    parser.add_argument("--cache", type=Path, required=True, help="where hidden states and conversions are kept")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of either way")
    parser.add_argument("--at-once", type=int, default=1, help="seeds that train beside one another")
    parser.add_argument(
        "--ways", nargs="+", default=TRAINED, choices=TRAINED, help="trained from each seed; full must be one"
    )
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further seed begins")
    parser.add_argument(
        "--no-decoding", action="store_true", help="trainings alone: decoding takes longer than they do"
    )
    parser.add_argument("--out", type=Path, help="a file for the lines, beside standard output")
    options = parser.parse_args(arguments)
    if "full" not in options.ways:
        parser.error("--ways: full is what the others are held against; name it too")
    return options


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
