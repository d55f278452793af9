"""The yard of the screens' golden files: eight runs that between them show every state worth drawing.

What is told of them is told as a follower would have written it: events and states at the time they happened, evidence in
its words, causes as they are found. Where a run's end is old, so is everything it reported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.actions.places import find_places
from orchestrator.actions.plans import plan_body, plan_memory
from orchestrator.failure import Failure, Findings, Told, causes
from orchestrator.store.rows import Document, FailureRow, State
from remote.spec import dump
from tests.tui.world import GIB, NOW_S, OOM_TEXT, PLAN, SPEC, TRACEBACK, Writer, Yard, gpu_events, steps

LIVE, UNREACHABLE, OOM, DONE, RESUMED, STOPPED = "h7kq2mxd", "b4tw9rne", "c8vj3pzs", "a2mf6hky", "d5xn8ruq", "e9gc4wtb"
ORPHANED = "k3pw4jds"  # its supervisor ended, a process of it lives on
HOUR_S, DAY_S = 3600.0, 86_400.0
SUCCEEDED = "exit status 0 and the job's final event"
REBOOTED = "the host was restarted 3 min 12 s ago (another boot id), the run was not there any more"
SILENT_S = 1500.0  # since pve-b was heard of

# How the others differ from `SPEC`, which is that of the live run: section -> field -> value.
V6 = {"drafter": {"block_size": 16}, "data": {"max_anchors": 512}, "loss": {"gamma": 7.0, "terms": {"ce": 1.0}}}
WIDE_V6 = {**V6, "data": {"max_anchors": 2048}}
SMALL = {**V6, "data": {"max_anchors": 32, "row_tokens": 512}}
NARROW = {"drafter": {"block_size": 24}}
LONG_ROWS = {"data": {"row_tokens": 32_000, "max_anchors": 1024}, "loss": {"terms": {"ce": 1.0}}}


def fill(path: Path) -> None:
    settings = path.parent / ".config" / "draftyard"  # of whoever has this folder as home
    settings.mkdir(parents=True)
    (settings / "hosts.yaml").write_text("hosts:\n  pve-a: {address: pve-a}\n  pve-b: {address: pve-b}\n")
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


def spec_of(name: str, num_steps: int, changes: Mapping[str, Mapping[str, Any]], why: str = "") -> dict[Document, str]:
    recipe, branch = name.split("/")
    spec: dict[str, Any] = {**SPEC, "recipe": recipe, "branch": branch, "why": why or SPEC["why"]}
    for section, fields in {**changes, "train": {**changes.get("train", {}), "num_steps": num_steps}}.items():
        spec[section] = {**spec[section], **fields}
    return {Document.SPEC: json.dumps(spec)}


def tell(yard: Yard, writer: Writer, told: Sequence[tuple[str, float, Mapping[str, Any]]]) -> None:
    """The first when it happened, as with it the run moves; the rest when the last of them did."""
    for some in (told[:1], told[1:]):
        if some:
            with yard.at(max(at_s for _, at_s, _ in some)):
                writer.tell(some)


def sampled(yard: Yard, run: str, gpus: Mapping[int, float], *, from_ago_s: float, until_ago_s: float = 0.0) -> None:
    """By the supervisor, over the last 40 minutes of this time; of what came before that it began."""
    since_s = min(from_ago_s, until_ago_s + 2400)
    supervisor = Writer(yard.store, run, name="supervisor")
    begun = [("gpu", NOW_S - from_ago_s, {"samples": []})]
    tell(yard, supervisor, [*begun, *gpu_events(gpus, ago_s=since_s, every_s=30, until_ago_s=until_ago_s)])


def _live(yard: Yard) -> None:
    run = yard.run(
        LIVE, "qwen27b/ddtree", host="pve-a", ago_s=2 * DAY_S, num_steps=240_000, fingerprint="9c1fd20a7be34518",
        why="wider blocks for the tree decoder", tags=("wide", "paper"), tree_hash="4f1c88de02", git_commit="8d2e51f", git_dirty=True,
        documents={Document.PLAN: json.dumps(PLAN), Document.LAUNCH: json.dumps({"gpus": ["5", "6", "7"], "torch": "2.11.0", "driver": "580.65"})},
    )  # fmt: skip
    # The cards have become slow: forward takes 0.12 s longer. Its newest report is 2 s old.
    slow_s = NOW_S - 2 - 3900 * (1.26 + 0.12)
    begin_s = slow_s - 126_100 * 1.26
    sampled(yard, run, {5: 84.6, 6: 84.1, 7: 91.8}, from_ago_s=NOW_S - begin_s + 60)
    rank0 = Writer(yard.store, run)
    tell(yard, rank0, [("stage", begin_s, {"name": "training"})])
    rank0.tell(steps(0, 126_000, 100, begin_s=begin_s, step_s=1.26, seed=1))
    rank0.tell(steps(126_100, 130_000, 100, begin_s=slow_s, step_s=1.26, seed=9, slower_s=0.12))
    rank0.tell(
        [
            ("memory", begin_s + 60 + size, {"stage": stage, "gpu": 5, "allocated_bytes": int(size * GIB),
                                      "reserved_bytes": int((size + 1.3) * GIB), "driver_bytes": int((size + 2.1) * GIB)})
            for stage, size in (("load", 66.1), ("forward", 77.9), ("backward", 82.6), ("step", 84.0))
        ]
    )  # fmt: skip
    for step, is_best in ((128_000, False), (129_000, True), (129_500, True)):
        saved = {
            "step": step, "path": f"checkpoints/step-{step:08}", "size_bytes": int(20.7 * GIB), "is_best": is_best
        }  # fmt: skip
        tell(yard, rank0, [("checkpoint", slow_s + (step - 126_100) * 1.38 + 9, saved)])
    yard.log(run, _live_log())


def _live_log() -> str:
    """The newest lines of its training, by the numbers it reported."""
    ring = "".join(f"[rank{rank}]: NCCL ring of 3 is up\n" for rank in range(3))
    lines = [
        "loading qwen27b",
        "converted 851 tensors",
        *ring.splitlines(),
        "27.68 GiB of weights, masters and moments",
    ]
    for event in steps(126_100, 130_000, 100, begin_s=0.0, step_s=1.26, seed=9, slower_s=0.12):
        step, values = event[2]["step"], event[2]["values"]
        lines.append(
            f"step {step}/240000  loss {values['loss']:.4f}  accuracy {values['accuracy']:.3f}  streak {values['streak']:.3f}  "
            f"grad norm {values['grad_norm']:.3g}  lr {values['lr']:.2e}  {values['step_s']:.3f} s"
        )
        if step in (128_000, 129_000, 129_500):
            lines.append(f"[rank0]: checkpoint of step {step}: checkpoints/step-{step:08}")
        if step == 129_600:
            lines.append("[rank2]: NCCL WARN a link of GPU 7 answered late; the ring is made again")
            lines += ring.splitlines()
    return "\n".join(lines) + "\n"


def _unreachable(yard: Yard) -> None:
    run = yard.run(
        UNREACHABLE, "qwen27b/v6", host="pve-b", ago_s=9 * HOUR_S, num_steps=60_000, fingerprint="a0514c77e2b98d31",
        forced_reason="comments alone have changed since fwd and fwd_bwd", why="the baseline that ddtree is measured against",
        documents={
            Document.LAUNCH: json.dumps({"gpus": ["0"]}),
            **spec_of("qwen27b/v6", 60_000, WIDE_V6, "the baseline that ddtree is measured against"),
        },
    )  # fmt: skip
    begin_s = NOW_S - SILENT_S - 8 - 25_000 * 1.2
    with yard.at(NOW_S - SILENT_S - 12):
        gpus = [_gpu(0, 61.2, 0.91), _gpu(1, 0.5, 0.0)]
        facts = {"gpus": gpus, "disk_free_bytes": 1340 * GIB, "torch": "2.11.0", "driver": "580.65", "python": "3.12.4"}
        yard.store.host_seen("pve-b", address="ssh pve-b, pct exec 200", clock_offset_s=0.02, facts=facts)
    sampled(yard, run, {0: 61.0}, from_ago_s=NOW_S - begin_s + 60, until_ago_s=SILENT_S)
    tell(yard, Writer(yard.store, run), steps(0, 25_000, 50, begin_s=begin_s, step_s=1.2, seed=2, floor=1.7))
    with yard.at(NOW_S - SILENT_S):
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
    sampled(yard, run, {5: 84.2}, from_ago_s=3 * DAY_S - 60, until_ago_s=3 * DAY_S - 390)
    tell(yard, Writer(yard.store, run), steps(0, 180, 1, begin_s=begin_s, step_s=1.3, seed=3))
    yard.log(run, "loading qwen27b\nstep 180 loss 4.21\n")
    yard.log(run, TRACEBACK, stream="stderr")
    tensors = [
        {"name": name, "shape": [182, heads, tokens, 128], "dtype": "bfloat16", "function": "sdpa_gathered"}
        for name, heads, tokens in (("query", 32, 32), ("key", 8, 8032), ("value", 8, 8032))
    ]
    fields = {
        "failure": "torch.OutOfMemoryError", "message": f"torch.OutOfMemoryError: {OOM_TEXT}", "stage": "backward", "step": 181,
        "traceback": TRACEBACK, "facts": {"tensors": tensors, "memory_snapshot": "memory-rank0.pickle"},
    }  # fmt: skip
    found = causes(Findings(told=[Told("rank0", begin_s + 240, fields)], stderr=TRACEBACK, exit_file={"exit_code": 1}))
    yard.store.replace_failures(run, 1, [_row_of(run, item, place) for place, item in enumerate(found)])
    told = f"exit status 1 in the exit file; {found[0].message}"
    yard.state(run, State.FAILED, ago_s=3 * DAY_S - 400, reason=found[0].reason, evidence=told)


def _row_of(run: str, found: Failure, place: int, *, attempt: int = 1) -> FailureRow:
    return FailureRow(
        run_id=run, attempt=attempt, kind=found.kind, message=found.message, hint=found.hint, source=found.source,
        stage=found.stage, step=found.step, traceback=found.traceback, facts=found.facts, at_s=found.at_s, is_first_cause=place == 0,
    )  # fmt: skip


def _finished(yard: Yard) -> None:
    run = yard.run(
        DONE, "smollm2/demo", host="local", ago_s=4 * DAY_S, num_steps=400, tags=("demo",), why="the tour of the README",
        documents=spec_of("smollm2/demo", 400, SMALL, "the tour of the README"),
    )  # fmt: skip
    begin_s = NOW_S - 4 * DAY_S + 30
    rank0 = Writer(yard.store, run)
    tell(yard, rank0, steps(0, 400, 1, begin_s=begin_s, step_s=0.3, seed=4, floor=0.8, tokens=(512, 512)))
    saved = {"step": 400, "path": "checkpoints/step-00000400", "size_bytes": 41_000_000, "is_best": True}
    tell(yard, rank0, [("checkpoint", begin_s + 125, saved)])
    _evaluated(yard, rank0, begin_s + 190)
    yard.state(run, State.SUCCEEDED, ago_s=4 * DAY_S - 225, evidence=SUCCEEDED)


def _evaluated(yard: Yard, rank0: Writer, at_s: float) -> None:
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
    told = [("evaluation", at_s, {"step": 400, "protocol": {**how, **way}, "values": values}) for way, values in ways]
    tell(yard, rank0, told)


def _stopped(yard: Yard) -> None:
    run = yard.run(
        STOPPED, "qwen27b/ddtree-narrow", host="pve-a", ago_s=6 * DAY_S, num_steps=240_000, why="do the last eight slots pay?",
        documents={
            Document.LAUNCH: json.dumps({"gpus": ["6"]}),
            **spec_of("qwen27b/ddtree-narrow", 240_000, NARROW, "do the last eight slots pay?"),
        },
    )  # fmt: skip
    begin_s = NOW_S - 6 * DAY_S + 100
    sampled(yard, run, {6: 71.3}, from_ago_s=6 * DAY_S - 40, until_ago_s=6 * DAY_S - 10_000)
    tell(yard, Writer(yard.store, run), steps(0, 9000, 50, begin_s=begin_s, step_s=1.1, seed=5, floor=1.9))
    told = "the job saved its work and stopped when told to; no process is left; GPU 6 is back at 0.45 GiB"
    yard.state(run, State.STOPPED, ago_s=6 * DAY_S - 10_060, reason="user", evidence=told)


def _resumed(yard: Yard) -> None:
    """Its first attempt went down with its host and left a warning; the second went on from the checkpoint before."""
    run = yard.run(
        RESUMED, "qwen3-8b/long-rows", host="pve-b", ago_s=30 * HOUR_S, num_steps=8000, why="rows as long as the answers",
        documents={
            Document.LAUNCH: json.dumps({"gpus": ["1"]}),
            **spec_of("qwen3-8b/long-rows", 8000, LONG_ROWS, "rows as long as the answers"),
        },
    )  # fmt: skip
    begin_s = NOW_S - 29.9 * HOUR_S
    sampled(yard, run, {1: 58.4}, from_ago_s=29.95 * HOUR_S, until_ago_s=NOW_S - begin_s - 12_000)
    tell(
        yard, Writer(yard.store, run), steps(0, 3000, 10, begin_s=begin_s, step_s=4.0, seed=6, tokens=(32_768, 32_000))
    )
    yard.log(run, "".join(f"step {step}/8000  loss 2.7\n" for step in range(2960, 3001, 10)))
    yard.log(run, "UserWarning: row 48211 took 31 s to read: the disk answers slowly\n", stream="stderr")
    down_s = NOW_S - begin_s - 12_000 - 60
    yard.state(run, State.LOST, ago_s=down_s, reason="reboot", evidence=REBOOTED)
    with yard.at(NOW_S - down_s + 240):
        yard.store.new_attempt(run)
    again_s = NOW_S - down_s + 540
    tell(
        yard,
        Writer(yard.store, run, attempt=2),
        steps(2950, 8000, 10, begin_s=again_s, step_s=4.0, seed=7, tokens=(32_768, 32_000)),
    )
    resumed = "resumed after step 2949 from checkpoints/step-00002949\nstep 8000/8000  loss 2.3\n"
    yard.log(run, resumed, attempt=2)
    yard.state(run, State.SUCCEEDED, ago_s=NOW_S - again_s - 5050 * 4.0 - 90, evidence=SUCCEEDED)


def _older(yard: Yard) -> None:
    """Runs of the weeks before: what most of a list is."""
    not_finite = "exit status 1 in the exit file; the loss is nan at step 4,000"
    orphaned = "; these processes would not die: [31877]; GPU 3 still holds 20.80 GiB more than before the job"
    told = (
        ("f2rc5vye", "qwen3-8b/ce", "pve-b", 40, State.SUCCEEDED, None, 0.42, SUCCEEDED),
        ("g6xt8nkb", "qwen3-8b/dpace", "pve-b", 64, State.SUCCEEDED, None, 0.44, SUCCEEDED),
        (ORPHANED, "qwen27b/ddtree", "pve-a", 90, State.FAILED, "nonfinite", 1.26, not_finite + orphaned),
        ("m8yb2hqc", "qwen27b/v6", "pve-b", 130, State.SUCCEEDED, None, 0.31, SUCCEEDED),
        ("n5uf7gzt", "smollm2/ce_kl", "local", 150, State.SUCCEEDED, None, 0.3, SUCCEEDED),
        ("p9ea3wrk", "smollm2/ce", "local", 151, State.FAILED, "exit:2", 0.3, "exit status 2 in the exit file"),
        ("q4td6mxv", "smollm2/dpace", "local", 152, State.SUCCEEDED, None, 0.31, SUCCEEDED),
        ("r7ks9cfn", "own-script/fast", "pve-b", 200, State.LOST, "reboot", 0.9, REBOOTED),
    )
    for number, (run_id, name, host, days, state, reason, step_s, evidence) in enumerate(told):
        num_steps = 400 if host == "local" else 20_000
        last = num_steps if state is State.SUCCEEDED else num_steps // (3 + number)
        changes = {} if name.endswith("ddtree") else SMALL if host == "local" else V6
        documents = spec_of(name, num_steps, changes, "an ablation")
        run = yard.run(run_id, name, host=host, ago_s=days * DAY_S / 6, num_steps=num_steps, documents=documents)
        begin_s = NOW_S - days * DAY_S / 6 + 60
        every = max(1, num_steps // 200)
        floor, tokens = (
            0.9 + number / 9,
            (512, 512) if host == "local" else (32_768 if name.endswith("ddtree") else 8192, 8000),
        )
        tell(
            yard,
            Writer(yard.store, run),
            steps(0, last, every, begin_s=begin_s, step_s=step_s, seed=20 + number, floor=floor, tokens=tokens),
        )
        yard.state(run, state, ago_s=days * DAY_S / 6 - 90 - last * step_s, reason=reason, evidence=evidence)


def _smoke(yard: Yard) -> None:
    whole = [("fwd", 18.2), ("fwd_bwd", 84.0), ("multi_doc", 84.9), ("leak", 84.9), ("checkpoint", 85.2)]
    _climb(yard, "s3kd8vnq", "qwen27b/ddtree", whole, ago_s=2.1 * DAY_S, fingerprint="9c1fd20a7be34518")
    _climb(yard, "s4we2rtk", "qwen27b/v6", whole[:2], ago_s=12 * HOUR_S, fingerprint="27aa03be9d1c4f60")
    _climb(yard, "s5mz7qpd", "qwen27b/v6", whole[2:], ago_s=9.5 * HOUR_S, fingerprint="a0514c77e2b98d31")
    bundled = [("fwd", 18.9), ("fwd_bwd", 48.9), ("multi_doc", 49.3), ("leak", 49.3), ("checkpoint", 49.4)]
    _climb(yard, "s2hb6wmc", "qwen3.6-27b/ddtree", bundled, ago_s=3.1 * DAY_S, fingerprint="5d0c61f7be92a834")
    small = [(rung, 2.1) for rung, _ in whole]
    _climb(
        yard, "s6ny4hbx", "smollm2/ce_kl_cap", small[:2], ago_s=5 * DAY_S, fingerprint="e1b7720c5f3a9d42", failed="leak"
    )


# As the rungs of the trainer name what they measure.
_TIMED = {"fwd": ("forward_s", 0.41), "leak": ("probe_s", 3.94), "checkpoint": ("load_s", 0.92)}
_SHARES = (("load", 0.79), ("forward", 0.93), ("backward", 1.0), ("step", 0.86))


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
    plan = {Document.PLAN: json.dumps(PLAN)} if name.startswith("qwen27b") else {}
    step_s = 0.2 if host == "local" else 1.26
    run = yard.run(run_id, name, kind="smoke", host=host, ago_s=ago_s, fingerprint=fingerprint, documents=plan)
    at_s = NOW_S - ago_s
    told = []
    for number, (rung, peak) in enumerate(rungs):
        timed, took_s = _TIMED.get(rung, ("step_s", step_s + 0.01 * number))
        values = {
            "loss": 10.4 - number / 10, "accuracy": 0.01, timed: took_s,
            **{f"{stage}_{kind}_bytes": int(peak * share * less * GIB) for stage, share in _SHARES[: 2 if rung == "fwd" else 4]
               for kind, less in (("allocated", 0.98), ("reserved", 1.0))},
        }  # fmt: skip
        told.append(("rung", at_s + number * 15, {"name": rung, "passed": True, "values": values, "message": ""}))
    if failed:
        words = "a token of document 2 changes the output of document 1 by 0.031"
        told.append(
            ("rung", at_s + 90, {"name": failed, "passed": False, "values": {"difference": 0.031}, "message": words})
        )
    tell(yard, Writer(yard.store, run), told)
    state, reason = (State.FAILED, "exit:1") if failed else (State.SUCCEEDED, None)
    evidence = f"exit status 1 in the exit file; rung {failed} failed" if failed else SUCCEEDED
    yard.state(run, state, ago_s=ago_s - 120, reason=reason, evidence=evidence)


def _hosts(yard: Yard) -> None:
    """pve-a as 12 s ago: a stranger's server on three cards, what an ended run left on one, one free, ours on three."""
    serving = {"user": "vllm", "command": "python3 -m vllm.entrypoints.openai.api_server", "age_s": 11 * DAY_S}
    left = {"pid": 31877, "user": "root", "command": "python -m remote.drafter", "age_s": 14.9 * DAY_S}
    gpus = [
        *(_gpu(gpu, 52.1, 0.4, {**serving, "pid": 2114 + gpu, "used_bytes": int(51.6 * GIB)}) for gpu in range(3)),
        _gpu(3, 21.3, 0.0, {**left, "used_bytes": int(20.8 * GIB)}),
        _gpu(4, 0.5, 0.0),
        *(_gpu(gpu, used, 0.97, {"pid": 4242 + gpu, "user": "root", "command": "python -m remote.drafter", "used_bytes": int((used - 0.5) * GIB)})
          for gpu, used in ((5, 84.6), (6, 84.1), (7, 91.8))),
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


def _gpu(index: int, used_gib: float, busy: float, *processes: Mapping[str, Any]) -> dict[str, Any]:
    """A card as a look at its host finds it."""
    return {
        "index": index, "uuid": f"GPU-{index:08x}", "name": "RTX PRO 6000 Blackwell", "total_bytes": int(94.97 * GIB),
        "used_bytes": int(used_gib * GIB), "utilisation": busy, "processes": list(processes),
    }  # fmt: skip
