"""The yard of the screens' golden files: eight runs that between them show every state worth drawing."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.actions.places import find_places
from orchestrator.actions.plans import plan_body, plan_memory
from orchestrator.store.rows import Document, FailureRow, State
from remote.spec import dump
from tests.tui.world import GIB, NOW_S, PLAN, TRACEBACK, Writer, Yard, gpu_events, steps

LIVE, UNREACHABLE, OOM, DONE, RESUMED, STOPPED = "h7kq2mxd", "b4tw9rne", "c8vj3pzs", "a2mf6hky", "d5xn8ruq", "e9gc4wtb"
HOUR_S, DAY_S = 3600.0, 86_400.0


def fill(path: Path) -> None:
    yard = Yard(path)
    with yard.store:
        _finished(yard)
        _stopped(yard)
        _out_of_memory(yard)
        _resumed(yard)
        _unreachable(yard)
        _smoke(yard)
        _older(yard)
        _live(yard)
        _hosts(yard)


def _live(yard: Yard) -> None:
    run = yard.run(
        LIVE, "qwen27b/ddtree", host="pve-a", ago_s=2 * DAY_S, num_steps=240_000, fingerprint="9c1fd20a7be34518",
        why="wider blocks for the tree decoder", tags=("wide", "paper"), tree_hash="4f1c88de02", git_commit="8d2e51f", git_dirty=True,
        documents={Document.PLAN: json.dumps(PLAN), Document.LAUNCH: json.dumps({"gpus": ["5", "6", "7"], "torch": "2.11.0", "driver": "580.65"})},
    )  # fmt: skip
    begin_s = NOW_S - 1.9 * DAY_S
    rank0, supervisor = Writer(yard.store, run), Writer(yard.store, run, name="supervisor")
    rank0.tell([("stage", begin_s, {"name": "training"})])
    rank0.tell(steps(0, 126_000, 100, begin_s=begin_s, step_s=1.26, seed=1))
    slow_s = begin_s + 126_100 * 1.26  # the disk of the hidden states has become slow
    rank0.tell(steps(126_100, 130_000, 100, begin_s=slow_s, step_s=1.26, seed=9, wait_s=0.12))
    rank0.tell(
        [
            ("memory", begin_s + 60 + size, {"stage": stage, "gpu": 5, "allocated_bytes": int(size * GIB),
                                      "reserved_bytes": int((size + 1.3) * GIB), "driver_bytes": int((size + 2.1) * GIB)})
            for stage, size in (("load", 53.5), ("forward", 71.2), ("backward", 82.6), ("step", 84.0))
        ]
    )  # fmt: skip
    rank0.tell(
        [
            (
                "checkpoint",
                NOW_S - 600,
                {"step": 129_500, "path": "checkpoints/step-00129500", "size_bytes": int(20.7 * GIB), "is_best": True},
            )
        ]
    )
    supervisor.tell(
        [("gpu", begin_s, {"samples": []}), *gpu_events({5: 84.6, 6: 84.1, 7: 91.8}, ago_s=2400, every_s=30)]
    )
    yard.state(run, State.RUNNING, ago_s=0, evidence="beat 2 s ago, pid 4242 since boot 7f3a")
    bar = "".join(f"\r step {n}/240000 {n * 100 // 240000:3d}%|#####     | loss 1.61" for n in range(129_990, 130_001))
    yard.log(
        run,
        "loading qwen27b\nconverted 851 tensors\n"
        + "".join(f"[rank{r}]: NCCL ring of 3 is up\n" for r in range(3))
        + bar,
    )


def _unreachable(yard: Yard) -> None:
    launch = {Document.LAUNCH: json.dumps({"gpus": ["0"]})}
    run = yard.run(UNREACHABLE, "qwen27b/v6", host="pve-b", ago_s=9 * HOUR_S, num_steps=60_000, documents=launch)
    Writer(yard.store, run).tell(steps(0, 25_000, 50, begin_s=NOW_S - 8.9 * HOUR_S, step_s=1.2, seed=2, floor=1.7))
    until_silent = gpu_events({0: 61.0}, ago_s=1800, every_s=30)[:11]  # the last is 1500 s old
    supervisor = Writer(yard.store, run, name="supervisor")
    supervisor.tell([("gpu", NOW_S - 8.9 * HOUR_S, {"samples": []}), *until_silent])
    yard.state(run, State.RUNNING, evidence="last beat before the host went silent")
    with yard.at(NOW_S - 1500):
        yard.store.host_unreachable("pve-b", error="ssh: connect to host pve-b port 22: no route to host")


def _out_of_memory(yard: Yard) -> None:
    """A bundled branch with too many anchors, its spec and plan as `launch` keeps them."""
    overrides = ["data.max_anchors=2048"]
    made = plan_memory(
        find_places(yard.path.parent, {"HOME": str(yard.path.parent)}, db=yard.path),
        "qwen3.6-27b", branch="ddtree", overrides=overrides, capacity_bytes=int(94.97 * GIB),
    )  # fmt: skip
    run = yard.run(
        OOM, "qwen3.6-27b/ddtree", host="pve-a", ago_s=3 * DAY_S, num_steps=40_000,
        documents={
            Document.SPEC: dump(made.spec),
            Document.PLAN: json.dumps(plan_body(made.plan)),
            Document.LAUNCH: json.dumps({"gpus": ["5"], "overrides": overrides, "versions": {"torch": "2.11.0"}}),
        },
    )  # fmt: skip
    begin_s = NOW_S - 3 * DAY_S + 120
    Writer(yard.store, run).tell(steps(0, 180, 1, begin_s=begin_s, step_s=1.3, seed=3))
    yard.log(run, "loading qwen27b\nstep 180 loss 4.21\n")
    yard.log(run, TRACEBACK, stream="stderr")
    facts = {
        "requested_bytes": int(11.15 * GIB), "own_use_bytes": int(85.66 * GIB), "free_bytes": int(9.31 * GIB), "total_bytes": int(94.97 * GIB),
        "frame": "remote/drafter/attention.py:88 sdpa_gathered", "shape": [182, 32, 8032, 128],
        "cause": "keys expanded from 8 to 32 heads before the product", "memory_snapshot": "memory-rank0.pickle",
    }  # fmt: skip
    failure = FailureRow(
        run_id=run, attempt=1, kind="gpu_oom", message="asked for 11.15 GiB with 9.31 GiB free on GPU 5 (94.97 GiB)",
        hint="Attention expanded its keys to every head.", source="rank0",
        stage="backward", step=181, traceback=TRACEBACK, facts=facts, at_s=begin_s + 240, is_first_cause=True,
    )  # fmt: skip
    yard.store.replace_failures(run, 1, [failure])
    yard.state(
        run, State.FAILED, ago_s=3 * DAY_S - 400, reason="gpu_oom", evidence="exit file: code 1; traceback in stderr"
    )


def _finished(yard: Yard) -> None:
    run = yard.run(DONE, "smollm2/demo", host="local", ago_s=4 * DAY_S, num_steps=400, tags=("demo",))
    begin_s = NOW_S - 4 * DAY_S + 30
    rank0 = Writer(yard.store, run)
    rank0.tell(steps(0, 400, 1, begin_s=begin_s, step_s=0.3, seed=4, floor=0.8))
    rank0.tell(
        [
            (
                "checkpoint",
                begin_s + 125,
                {"step": 400, "path": "checkpoints/step-00000400", "size_bytes": 41_000_000, "is_best": True},
            )
        ]
    )
    _evaluated(rank0, begin_s + 190)
    yard.state(run, State.SUCCEEDED, ago_s=4 * DAY_S - 220, evidence="exit file: code 0; the job said succeeded")


def _evaluated(rank0: Writer, at_s: float) -> None:
    """As `evaluate` reports it: one row a way of decoding."""
    ways = (
        ({"method": "plain"}, {"tokens_per_s": 5.9, "num_tokens": 256}),
        (
            {"method": "chain", "drafter": "trained"},
            {"acceptance_length": 1.71, "acceptance_length_low": 1.42, "acceptance_length_high": 2.03, "speed_up": 0.94,
             "over_untrained": 0.71, "over_untrained_low": 0.42, "over_untrained_high": 1.03, "mismatches": 0},
        ),
        (
            {"method": "tree", "budget": 16, "drafter": "trained"},
            {"acceptance_length": 2.24, "acceptance_length_low": 1.93, "acceptance_length_high": 2.55, "speed_up": 1.31, "mismatches": 0},
        ),
        (
            {"method": "offline", "drafter": "trained"},
            {"chain_tau": 1.97, "chain_tau_low": 1.38, "chain_tau_high": 2.71, "tree_tau_16": 2.54, "coverage_2": [0.56, 0.51, 0.62]},
        ),
    )  # fmt: skip
    how = {"prompts": "held_out.jsonl", "num_prompts": 8, "temperature": 0.0, "max_tokens": 32, "dtype": "float32", "device": "cpu"}  # fmt: skip
    rank0.tell(
        [("evaluation", at_s, {"step": 400, "protocol": {**how, **way}, "values": values}) for way, values in ways]
    )


def _stopped(yard: Yard) -> None:
    run = yard.run(STOPPED, "qwen27b/ddtree-narrow", host="pve-a", ago_s=6 * DAY_S, num_steps=240_000)
    Writer(yard.store, run).tell(steps(0, 9000, 50, begin_s=NOW_S - 6 * DAY_S + 100, step_s=1.1, seed=5, floor=1.9))
    yard.state(
        run, State.STOPPED, ago_s=6 * DAY_S - 10_000, reason="user", evidence="stopped on request; GPU memory is back"
    )


def _resumed(yard: Yard) -> None:
    run = yard.run(RESUMED, "qwen3-8b/long-rows", host="pve-b", ago_s=30 * HOUR_S, num_steps=8000)
    Writer(yard.store, run).tell(steps(0, 3000, 10, begin_s=NOW_S - 29 * HOUR_S, step_s=4.0, seed=6))
    yard.state(run, State.LOST, ago_s=25 * HOUR_S, reason="reboot", evidence="another boot id; no exit file")
    with yard.at(NOW_S - 20 * HOUR_S):
        yard.store.new_attempt(run)
    Writer(yard.store, run, attempt=2).tell(steps(2949, 8000, 10, begin_s=NOW_S - 19 * HOUR_S, step_s=4.0, seed=7))
    yard.state(run, State.SUCCEEDED, ago_s=13 * HOUR_S, evidence="exit file: code 0; the job said succeeded")


def _older(yard: Yard) -> None:
    """Runs of the weeks before: what most of a list is."""
    told = (
        ("f2rc5vye", "qwen3-8b/ce", "pve-b", 40, State.SUCCEEDED, None, 0.42),
        ("g6xt8nkb", "qwen3-8b/dpace", "pve-b", 64, State.SUCCEEDED, None, 0.44),
        ("k3pw4jds", "qwen27b/ddtree", "pve-a", 90, State.FAILED, "nonfinite", 1.26),
        ("m8yb2hqc", "qwen27b/v6", "pve-b", 130, State.SUCCEEDED, None, 0.31),
        ("n5uf7gzt", "smollm2/ce_kl", "local", 150, State.SUCCEEDED, None, 0.3),
        ("p9ea3wrk", "smollm2/ce", "local", 151, State.FAILED, "exit:2", 0.3),
        ("q4td6mxv", "smollm2/dpace", "local", 152, State.SUCCEEDED, None, 0.31),
        ("r7ks9cfn", "own-script/fast", "pve-b", 200, State.LOST, "reboot", 0.9),
    )
    for number, (run_id, name, host, days, state, reason, step_s) in enumerate(told):
        num_steps = 400 if host == "local" else 20_000
        last = num_steps if state is State.SUCCEEDED else num_steps // (3 + number)
        run = yard.run(run_id, name, host=host, ago_s=days * DAY_S / 6, num_steps=num_steps)
        begin_s = NOW_S - days * DAY_S / 6 + 60
        every = max(1, num_steps // 200)
        Writer(yard.store, run).tell(
            steps(0, last, every, begin_s=begin_s, step_s=step_s, seed=20 + number, floor=0.9 + number / 9)
        )
        yard.state(run, state, ago_s=days * DAY_S / 6 - 60 - last * step_s, reason=reason, evidence="exit file")


def _smoke(yard: Yard) -> None:
    whole = [("fwd", 18.2), ("fwd_bwd", 84.0), ("multi_doc", 84.9), ("leak", 84.9), ("checkpoint", 85.2)]
    _climb(yard, "s3kd8vnq", "qwen27b/ddtree", whole, ago_s=2.1 * DAY_S, fingerprint="9c1fd20a7be34518")
    _climb(yard, "s4we2rtk", "qwen27b/v6", whole[:2], ago_s=12 * HOUR_S, fingerprint="27aa03be9d1c4f60")
    _climb(yard, "s5mz7qpd", "qwen27b/v6", whole[2:], ago_s=9.5 * HOUR_S, fingerprint="a0514c77e2b98d31")
    small = [(rung, 2.1) for rung, _ in whole]
    _climb(yard, "s6ny4hbx", "smollm2/demo", small[:2], ago_s=5 * DAY_S, fingerprint="e1b7720c5f3a9d42", failed="leak")


# As the rungs of the trainer name what they measure.
_TIMED = {"fwd": "forward_s", "leak": "probe_s", "checkpoint": "load_s"}
_SHARES = (("load", 0.64), ("forward", 0.93), ("backward", 1.0), ("step", 0.86))


def _climb(
    yard: Yard,
    run_id: str,
    name: str,
    rungs: list[tuple[str, float]],
    *,
    ago_s: float,
    fingerprint: str,
    failed: str = "",
) -> None:
    host = "local" if name.startswith("smollm2") else "pve-b" if name.endswith("v6") else "pve-a"
    plan = {} if host == "local" else {Document.PLAN: json.dumps(PLAN)}
    run = yard.run(run_id, name, kind="smoke", host=host, ago_s=ago_s, fingerprint=fingerprint, documents=plan)
    at_s = NOW_S - ago_s
    told = []
    for number, (rung, peak) in enumerate(rungs):
        values = {
            "loss": 10.4 - number / 10, "accuracy": 0.01, _TIMED.get(rung, "step_s"): 1.27,
            **{f"{stage}_{kind}_bytes": int(peak * share * less * GIB) for stage, share in _SHARES[: 2 if rung == "fwd" else 4]
               for kind, less in (("allocated", 0.98), ("reserved", 1.0))},
        }  # fmt: skip
        told.append(("rung", at_s + number * 15, {"name": rung, "passed": True, "values": values, "message": ""}))
    if failed:
        words = "a token of document 2 changes the output of document 1 by 0.031"
        told.append(
            ("rung", at_s + 90, {"name": failed, "passed": False, "values": {"difference": 0.031}, "message": words})
        )
    Writer(yard.store, run).tell(told)
    state, reason = (State.FAILED, "exit:1") if failed else (State.SUCCEEDED, None)
    yard.state(run, state, ago_s=ago_s - 120, reason=reason, evidence=f"exit file: code {int(bool(failed))}")


def _hosts(yard: Yard) -> None:
    gpus = [
        {"index": gpu, "uuid": f"GPU-{gpu:08x}", "name": "RTX PRO 6000 Blackwell", "total_bytes": int(94.97 * GIB),
         "used_bytes": int(used * GIB), "utilisation": busy}
        for gpu, used, busy in ((0, 52.1, 0.4), (1, 52.1, 0.41), (2, 52.0, 0.38), (3, 52.1, 0.4), (4, 52.1, 0.42), (5, 84.6, 0.97), (6, 84.1, 0.98), (7, 91.8, 0.96))
    ]  # fmt: skip
    with yard.at(NOW_S - 12):
        yard.store.host_seen(
            "pve-a", address="ssh pve-a, pct exec 200", clock_offset_s=0.04,
            facts={"gpus": gpus, "disk_free_bytes": 812 * GIB, "disk_total_bytes": 1800 * GIB, "torch": "2.11.0", "driver": "580.65", "python": "3.12.4"},
        )  # fmt: skip
        yard.store.host_seen(
            "local",
            address="this machine",
            clock_offset_s=0.0,
            facts={"gpus": [], "torch": "2.13.0", "python": "3.11.2"},
        )
