"""A yard to look at: a real database filled through the Store with runs of every kind and fate.

Deterministic: a fixed clock, seeded numbers. Built once a session; tests that write take a copy.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.store.ingest import StreamBatch, StreamPosition
from orchestrator.store.rows import Document, NewRun, State
from orchestrator.store.writes import Store
from remote.wire import Event

NOW_S = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
GIB = 1024**3

# As torch prints it, with a size that only the math kernel asks for: keys of 8 heads expanded to 32, in bfloat16.
OOM_TEXT = (
    "CUDA out of memory. Tried to allocate 11.15 GiB. GPU 0 has a total capacity of 94.97 GiB of which 9.31 GiB is free. "
    "Including non-PyTorch memory, this process has 85.66 GiB memory in use. Of the allocated memory 84.02 GiB is allocated "
    "by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated."
)
TRACEBACK = f"""Traceback (most recent call last):
  File "/srv/work/trees/4f1c/remote/drafter/train.py", line 214, in step
    sums = drafter_loss(hidden_TH, blocks, head_VH=target.head_VH)
  File "/srv/work/trees/4f1c/remote/drafter/attention.py", line 88, in sdpa_gathered
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
torch.OutOfMemoryError: {OOM_TEXT}
"""

_LOADED = {"target head and embeddings": 4.7, "target layers": 45.6, "drafter weights": 3.2, "optimizer state": 12.9}
_STAGES = {
    "load": _LOADED,
    "forward": {**_LOADED, "kept activations": 9.1, "one layer at work": 1.9, "logits chunk": 0.97},
    "backward": {
        **_LOADED,
        "gradients": 3.2,
        "kept activations": 9.1,
        "one layer at work": 3.3,
        "logits chunk": 0.97,
        "inputs": 0.2,
    },
    "step": {**_LOADED, "gradients": 3.2, "optimizer temporaries": 0.6},
}
# In the shape of `orchestrator.actions.plans.plan_body`; a test holds the two together.
PLAN = {
    "device": "cuda", "dtype": "bfloat16", "capacity_bytes": 95 * GIB, "verdict": "tight", "peak_stage": "backward",
    "slack_bytes": int(1.7 * GIB), "context_bytes": int(0.6 * GIB), "driver_bytes": int(86.27 * GIB),
    "stages": [
        {
            "name": stage, "allocated_bytes": int(sum(sizes.values()) * GIB), "measured_bytes": None, "num_measured": 0,
            "components": [{"name": name, "size_bytes": int(size * GIB), "why": ""} for name, size in sizes.items()],
        }
        for stage, sizes in _STAGES.items()
    ],
}  # fmt: skip

SPEC = {
    "recipe": "qwen27b", "branch": "ddtree", "entry": "dflash", "why": "wider blocks for the tree decoder",
    "drafter": {"num_layers": 5, "block_size": 32, "captured_layers": [1, 16, 31, 46, 61], "sliding_window": None},
    "data": {"row_tokens": 8000, "max_anchors": 1024, "anchors_per": "row"},
    "loss": {"terms": {"ce": 1.0, "kl": 0.15}, "gamma": 10.0, "decay": "exponential"},
    "train": {"num_steps": 240_000, "dtype": "bfloat16", "seed": 7},
}  # fmt: skip


class Writer:
    """One events file of one run, as a job would have written it."""

    def __init__(self, store: Store, run_id: str, *, attempt: int = 1, name: str = "rank0") -> None:
        self._store, self._run_id, self._attempt, self._name = store, run_id, attempt, name
        self._seq = 0

    def skip_to(self, seq: int) -> None:
        """Goes on after what an earlier writer of the same file has told."""
        self._seq = seq

    def tell(self, told: Sequence[tuple[str, float, Mapping[str, Any]]]) -> None:
        """(kind, wall seconds, fields) of each event."""
        events = []
        for kind, wall_s, fields in told:
            self._seq += 1
            events.append(Event(self._seq, kind, wall_s, wall_s - NOW_S + 1e6, dict(fields)))
        self._store.ingest(
            StreamBatch(self._run_id, self._attempt, self._name, events, offset_bytes=self._seq, identity="1:1")
        )


class Yard:
    """Fills one database."""

    def __init__(self, path: Path) -> None:
        self.now_s = NOW_S
        self.path = path
        self.store = Store(path, clock=lambda: self.now_s)

    @contextmanager
    def at(self, now_s: float) -> Iterator[None]:
        before, self.now_s = self.now_s, now_s
        yield
        self.now_s = before

    def run(
        self, run_id: str, name: str, *, host: str = "pve-a", kind: str = "train", ago_s: float = 3600.0, **facts: Any
    ) -> str:
        """A run with its first attempt, created `ago_s` ago."""
        recipe, branch = name.split("/", 1)
        documents = facts.pop("documents", {})
        with self.at(NOW_S - ago_s):
            spec = {**SPEC, "recipe": recipe, "branch": branch}
            self.store.create_run(
                NewRun(
                    id=run_id, kind=kind, recipe=recipe, branch=branch, host=host,
                    documents={Document.SPEC: json.dumps(spec), **documents}, workdir="/srv/work", **facts,
                )
            )  # fmt: skip
            self.store.new_attempt(run_id)
        return run_id

    def state(
        self, run_id: str, state: State, *, ago_s: float = 0.0, reason: str | None = None, evidence: str = ""
    ) -> None:
        with self.at(NOW_S - ago_s):
            self.store.set_state(
                run_id, state, reason=reason, evidence=evidence, ended_s=NOW_S - ago_s if state.is_final else None
            )

    def log(self, run_id: str, text: str | bytes, *, stream: str = "stdout", attempt: int = 1) -> None:
        content = text.encode() if isinstance(text, str) else text
        self.store.keep_log(run_id, attempt, stream, content=content, read_from=StreamPosition(identity="1:1"))


def steps(
    first: int,
    last: int,
    every: int,
    *,
    begin_s: float,
    step_s: float,
    seed: int,
    floor: float = 1.4,
    slower_s: float = 0.0,
    tokens: tuple[int, int] = (32_768, 8000),
) -> list[tuple[str, float, Mapping[str, Any]]]:
    """Metrics events of a run that learns: loss falls as a power of the step, the rest follows.

    `slower_s`: of each forward. `tokens` of a step: of blocks, of context.
    """
    noise = random.Random(seed)
    told = []
    for step in range(first, last + 1, every):
        loss = floor + 3.2 * (1 + step / 900) ** -0.55 + noise.gauss(0, 0.04)
        worked_s = step_s * (1 + noise.gauss(0, 0.02))
        took_s = worked_s + slower_s
        values = {
            "loss": loss,
            "accuracy": _share(0.86 - 0.18 * loss + noise.gauss(0, 0.006)),
            "streak": max(0.2, 6.2 - 1.25 * loss + noise.gauss(0, 0.05)),
            "lr": 6e-4 * min(1.0, step / 2000) * 0.5 * (1 + math.cos(math.pi * min(step, 240_000) / 240_000)),
            "grad_norm": 0.4 + 1.5 * loss / 5 + abs(noise.gauss(0, 0.08)),
            "step_s": took_s,
            "wait_s": worked_s * 0.04,
            "forward_s": worked_s * 0.29 + slower_s,
            "backward_s": worked_s * 0.52,
            "optimizer_s": worked_s * 0.11,
            "block_tokens_per_s": tokens[0] / took_s,
            "context_tokens_per_s": tokens[1] / took_s,
            "queue_depth": 20.0,
            "queue_capacity": 20.0,
        }
        told.append(("metrics", begin_s + (step - first) * (step_s + slower_s), {"step": step, "values": values}))
    return told


def _share(near: float, *, least: float = 0.08) -> float:
    """The same where it is no small share; below, it nears 0 and never gets there."""
    return near if near > least else least * math.exp(near / least - 1)


def gpu_events(
    gpus: Mapping[int, float], *, ago_s: float, every_s: float, total_gib: float = 94.97, until_ago_s: float = 0.0
) -> list[Any]:
    """Samples of the supervisor: GPU index -> GiB in use; from `ago_s` to `until_ago_s` before now."""
    noise = random.Random(3)
    told = []
    for number in range(int((ago_s - until_ago_s) // every_s) + 1):
        at_s = NOW_S - ago_s + number * every_s
        samples = [
            {
                "index": gpu, "uuid": f"GPU-{gpu:08x}", "used_bytes": int((used + noise.uniform(-0.6, 0.6)) * GIB),
                "total_bytes": int(total_gib * GIB), "utilisation": min(1.0, 0.9 + noise.uniform(0, 0.09)),
            }
            for gpu, used in gpus.items()
        ]  # fmt: skip
        told.append(("gpu", at_s, {"samples": samples}))
    return told
