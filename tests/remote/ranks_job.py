"""The training job of one rank as the elastic launcher starts it, with what a test wants to go wrong.

`python -m torch.distributed.run ... tests/remote/ranks_job.py RUN_DIR WISHES`: wishes are JSON, {} for none.
    target_sleep_s, drafter_sleep_s    how much longer every capture, every step takes
    kill: [rank, n]                    that rank kills itself as it begins its n-th capture or step
    fail: [rank, n]                    it raises instead
    mute_rows: [row, ...]              of these rows nothing is learnt
    mute_odd: m                        nor of micro-batch m and every second one after it: all that one of two drafters has
    poison: [rank, n]                  that rank's hidden states are NaN in its n-th step
    spoil: rows | values | ids         what every target puts into the queue is not what its row wants; see `spoilt`
    early: n                           every target ends well after n batches
    num_nodes: n                       ranks lie as on so many hosts
    fused: rank                        that rank alone would take own kernels
    stop_at: [rank, n]                 that rank alone is told to stop in its n-th capture or step
    stop_loading: rank                 that rank alone is told to stop as it loads its target
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from remote.drafter import target_rank, workbench
from remote.drafter import train as training
from remote.drafter.__main__ import main
from remote.drafter.attention import Backend
from remote.drafter.blocks import Row
from remote.drafter.data import Batch, Dataset, HiddenStates
from remote.drafter.queue import Outbox
from remote.drafter.target import Target

RANK = int(os.environ["RANK"])
WISHES = json.loads(sys.argv[2])


def troubled(work: Any, sleep_s: float) -> Any:
    """The same function, slower, or fatal at its n-th call."""
    calls = 0

    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if WISHES.get("kill") == [RANK, calls]:
            os.kill(os.getpid(), signal.SIGKILL)
        if WISHES.get("fail") == [RANK, calls]:
            raise ValueError("the test wants this")
        if WISHES.get("stop_at") == [RANK, calls]:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(sleep_s)
        return work(*arguments, **named)

    return wrapped


def muted(packed: Any) -> Any:
    def wrapped(self: Dataset, row: int) -> Row:
        found = packed(self, row)
        if row in WISHES.get("mute_rows", []):
            found = dataclasses.replace(found, loss_mask_S=torch.zeros_like(found.loss_mask_S))
        return found

    return wrapped


def muted_odd(batch: Any) -> Any:
    """Leaves a file for each micro-batch that it mutes."""

    def wrapped(self: Dataset, position: int, *arguments: Any, **named: Any) -> Batch:
        found: Batch = batch(self, position, *arguments, **named)
        first = WISHES.get("mute_odd")
        if first is None or position < first or (position - first) % 2:
            return found
        (Path(sys.argv[1]) / f"muted-{position}-by-{RANK}").touch()
        (part,) = found.parts
        row = dataclasses.replace(part, loss_mask_S=torch.zeros_like(part.loss_mask_S))
        return dataclasses.replace(found, row=row, parts=(row,))

    return wrapped


def poisoned(run_step: Any) -> Any:
    def wrapped(step: int, micro_batches: Any, bench: Any) -> Any:
        if WISHES.get("poison") == [RANK, step]:
            micro_batches[0].features_SC.fill_(torch.nan)
        return run_step(step, micro_batches, bench)

    return wrapped


def spoilt(put: Any) -> Any:
    """Fewer rows than tokens; values that are not finite; a token that the vocabulary does not have."""

    def wrapped(self: Outbox, micro_batch: int, ids_S: torch.Tensor, states: HiddenStates) -> Any:
        match WISHES.get("spoil"):
            case "rows":
                states = HiddenStates(states.features_SC[:-1], states.teacher)
            case "values":
                states.teacher.fill_(torch.inf)
            case "ids":
                ids_S = ids_S.clone().index_fill_(0, torch.tensor([3]), 10**6)
        return put(self, micro_batch, ids_S, states)

    return wrapped


def cut_short(serve: Any) -> Any:
    def wrapped(job: Any, target: Any, dataset: Any, mine: range, **named: Any) -> Any:
        return serve(job, target, dataset, mine[: WISHES.get("early", len(mine))], **named)

    return wrapped


def converted(target_folder: Any) -> Any:
    """Leaves a file that says which rank looked for the target's folder, as the one that would convert it."""

    def wrapped(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.5)
        (Path(sys.argv[1]) / f"converted-by-{RANK}").touch()
        return target_folder(*arguments, **named)

    return wrapped


def after_it(load_target: Any) -> Any:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        assert (Path(sys.argv[1]) / "converted-by-0").exists()
        if WISHES.get("stop_loading") == RANK:
            os.kill(os.getpid(), signal.SIGTERM)
        return load_target(*arguments, **named)

    return wrapped


def choosing(choose: Any) -> Any:
    """As on a card whose checks pass, at one rank; at the others as it is."""

    def wrapped(*arguments: Any, **named: Any) -> Any:
        found = choose(*arguments, **named)
        if WISHES.get("fused") != RANK:
            return found
        reasons = found.reasons | {"attention": "triton: auto, passed", "kernels": "triton: auto, passed"}
        return dataclasses.replace(found, backend=Backend("triton", "passed"), is_fused=True, reasons=reasons)

    return wrapped


workbench.choose = choosing(workbench.choose)
training.target_folder = converted(training.target_folder)
training.load_target = after_it(training.load_target)
Target.capture = troubled(Target.capture, WISHES.get("target_sleep_s", 0.0))  # type: ignore[method-assign]
training.run_step = poisoned(troubled(training.run_step, WISHES.get("drafter_sleep_s", 0.0)))
Dataset.packed = muted(Dataset.packed)  # type: ignore[method-assign]
Dataset.batch = muted_odd(Dataset.batch)  # type: ignore[method-assign]
Dataset.batch_with = muted_odd(Dataset.batch_with)  # type: ignore[method-assign]
Outbox.put = spoilt(Outbox.put)  # type: ignore[method-assign]
target_rank.serve = cut_short(target_rank.serve)
if "num_nodes" in WISHES:
    os.environ["LOCAL_WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) // WISHES["num_nodes"])
sys.exit(main(["train", sys.argv[1]]))
