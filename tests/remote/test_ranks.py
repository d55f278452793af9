"""Several ranks train as one: real processes, started by torch's elastic launcher, on gloo.

The oracle is the training of one process with the same rows in each step. All of these are slow: starting the launcher
and importing torch and transformers in each rank takes seconds of every core there is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.units import parse_duration
from remote.drafter import __main__ as trainer
from remote.drafter.job import StopWish
from remote.drafter.ranks import Place, Ranks, joined
from remote.job import Job
from remote.report import Reporter, UserFault
from remote.roles import Roles
from remote.rundir import RunDir, read_json, write_json
from remote.spec import DFlashSpec, RolesSpec
from tests import warm
from tests.remote.jobs import TREE, events, make_job, make_run, tiny_job_spec, wait_for
from tests.remote.test_train import losses, train

NUM_STEPS = 20
TOLERANCE = (
    1e-3 if torch.cuda.is_available() else 1e-5
)  # one process runs on the CPU, and a card adds up in another order
ENDED_S = 30.0  # issue and page: within it a rank that is gone has ended every other one
TARGET_TELLS = ("step_s", "forward_s", "wait_s", "context_tokens_per_s")
DRAFTER_TELLS = ("step_s", "wait_s", "block_tokens_per_s", "context_tokens_per_s", "transfer_bytes_per_s")
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def spec_of(target: Any, drafter: Any, *, roles: RolesSpec, num_steps: int = NUM_STEPS, **sections: Any) -> DFlashSpec:
    """Two micro-batches a step, so that two drafters can share it; hidden states are computed as they are needed."""
    return tiny_job_spec(
        target,
        drafter,
        train={"num_steps": num_steps, "accumulation": 2, "checkpoint_every": 1000, "dtype": "float32"},
        data={"hidden_states": "online"},
        optim={"lr": 3e-3},
        roles=vars(roles),
        life={"num_gpus": roles.target + roles.drafter},
        **sections,
    )


@dataclass(frozen=True)
class Ended:
    """What became of a launch."""

    run: RunDir
    status: int
    output: str
    seconds: float

    def final(self, rank: int) -> str | None:
        told = events(self.run, writer=f"rank{rank}", kind="final")
        return told[0].fields["outcome"] if told else None

    def failure(self, rank: int) -> str:
        told = events(self.run, writer=f"rank{rank}", kind="failure")
        return str(told[0].fields["message"]) if told else ""

    def notes(self, rank: int) -> str:
        return "\n".join(event.fields["text"] for event in events(self.run, writer=f"rank{rank}", kind="note"))

    def last_word_s(self, rank: int) -> float:
        """When it said the last thing that it said, by this machine's clock."""
        return events(self.run, writer=f"rank{rank}")[-1].monotonic_s

    def values(self, rank: int, name: str) -> list[float]:
        told = events(self.run, writer=f"rank{rank}", kind="metrics")
        return [event.fields["values"][name] for event in told if name in event.fields["values"]]


def launch(root: Path, spec: DFlashSpec, *, attempt: int = 1, **wishes: Any) -> Ended:
    """The job on as many ranks as it has roles, to its end."""
    run, started_s = make_run(root, spec), time.monotonic()
    num_ranks, script = spec.roles.target + spec.roles.drafter, TREE / "tests" / "remote" / "ranks_job.py"
    rank = [*warm.python("remote.drafter"), str(script), str(run.root), json.dumps(wishes)]
    command = [*warm.python("remote.drafter"), *LAUNCHER, str(num_ranks), "--no-python", *rank]
    environment = os.environ | {
        "DRAFTYARD_ATTEMPT": str(attempt),
        "DRAFTYARD_WORK_DIR": str(root),
        "DRAFTYARD_DATA_DIR": str(root / "data"),
        "PYTHONPATH": str(TREE),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280, check=False)
    return Ended(run, done.returncode, done.stdout + done.stderr, time.monotonic() - started_s)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny_target_spec, tiny_drafter_spec) -> dict[int, float]:
    """The losses of one process."""
    job = make_job(tmp_path_factory.mktemp("alone"), spec_of(tiny_target_spec, tiny_drafter_spec, roles=RolesSpec()))
    assert train(job, StopWish()) == "succeeded"
    return losses(job.run)


@pytest.mark.parametrize(("own", "expected"), [(None, "32"), ("8", "8")])
def test_a_rank_asks_its_card_for_queues_that_no_two_streams_share(
    monkeypatch: pytest.MonkeyPatch, own: str | None, expected: str
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "1", "8", "4", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", own or "")
    if own is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")

    place = trainer._place()

    assert place is not None
    assert (place.rank, place.num_nodes) == (1, 2)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == expected


def test_another_number_of_processes_than_roles_is_refused_with_the_sum(tmp_path: Path) -> None:
    place, roles = Place(0, 0, 8, "localhost", 1), Roles(num_drafters=3, num_targets=4)

    with (
        pytest.raises(UserFault, match=r"8 processes were started; roles want 4 target \+ 3 drafter = 7"),
        joined(place, roles, torch.device("cpu"), Reporter(tmp_path)),
    ):
        pass


@dataclass(frozen=True)
class Told(Ranks):
    """One rank, and the checkpoints that were whole when it began to save and when it had."""

    run: RunDir | None = None
    saves: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def saving(self) -> Iterator[None]:
        assert self.run is not None
        before = len(self.run.whole_checkpoints())
        yield
        self.saves.append((before, len(self.run.whole_checkpoints())))


@pytest.mark.slow  # a training
def test_the_watch_is_told_of_every_checkpoint_from_its_beginning_to_its_end(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=RolesSpec(), num_steps=4)
    job = make_job(tmp_path, replace(spec, train=replace(spec.train, checkpoint_every=2)))
    ranks = Told(run=job.run)

    assert train(replace(job, ranks=ranks), StopWish()) == "succeeded"

    assert ranks.saves == [(0, 1), (1, 2)]


@pytest.mark.slow  # two to four processes
@pytest.mark.parametrize(
    ("roles", "num_nodes"),
    [
        (RolesSpec(target=1, drafter=1, queue=2), 1),
        (RolesSpec(target=2, drafter=1, queue=3), 1),
        (RolesSpec(target=1, drafter=2, queue=1), 1),
        (RolesSpec(target=2, drafter=2, queue=2), 2),
    ],
    ids=["1+1", "2+1", "1+2", "2+2 as on two hosts"],
)
def test_ranks_train_to_the_losses_of_one_process(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, alone, roles: RolesSpec, num_nodes: int
) -> None:
    ended = launch(tmp_path, spec_of(tiny_target_spec, tiny_drafter_spec, roles=roles), num_nodes=num_nodes)

    ranks = Roles(roles.drafter, roles.target, num_nodes=num_nodes)
    assert ended.status == 0, ended.output
    assert losses(ended.run) == pytest.approx(alone, rel=TOLERANCE)
    assert [path.name for path in ended.run.root.glob("converted-by-*")] == ["converted-by-0"]
    assert f"\n{ranks.name(0)}: step {NUM_STEPS}/{NUM_STEPS}  loss " in ended.output
    for rank in range(ranks.num_ranks):
        assert ended.final(rank) == "succeeded"
        assert f"{ranks.name(rank)}: " in ended.output  # how `logs --rank` knows its lines
        assert events(ended.run, writer=f"rank{rank}", kind="memory")
        told = DRAFTER_TELLS if ranks.is_drafter(rank) else TARGET_TELLS
        assert {name: min(ended.values(rank, name)) > 0 for name in told} == dict.fromkeys(told, True)
    for rank in ranks.drafters:
        assert 0 <= min(ended.values(rank, "queue_depth")) <= max(ended.values(rank, "queue_depth")) <= roles.queue
        assert set(ended.values(rank, "queue_capacity")) == {roles.queue}


@pytest.mark.slow  # three processes
def test_a_rank_whose_rows_teach_nothing_takes_part_with_zero_weight(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    """Some micro-batches of either drafter have no anchor, then all of the second one's: the others weigh alone, and
    nobody skips a collective."""
    found, muted = {}, {}
    for roles in (RolesSpec(), RolesSpec(drafter=2)):
        spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=roles, num_steps=6)
        ended = launch(tmp_path / str(roles.drafter), spec, mute_rows=[0, 2], mute_odd=7)
        assert ended.status == 0, ended.output
        found[roles.drafter] = losses(ended.run)
        muted[roles.drafter] = sorted(path.name for path in ended.run.root.glob("muted-*"))

    assert found[2] == pytest.approx(found[1], rel=TOLERANCE)
    assert muted[2] == ["muted-11-by-1", "muted-7-by-1", "muted-9-by-1"]
    assert [name.replace("by-1", "by-0") for name in muted[2]] == muted[1]


@pytest.mark.slow  # two processes
def test_a_number_that_is_not_finite_on_one_drafter_ends_both_after_the_same_step(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=RolesSpec(drafter=2), num_steps=400)

    ended = launch(tmp_path, spec, poison=[1, 3])

    assert ended.status != 0
    assert [ended.final(rank) for rank in (0, 1)] == ["failed", "failed"]
    assert re.search(r"step 3: loss_ce is not finite in micro-batch 1 \(row \d of epoch \d\)", ended.failure(1))
    assert ended.failure(0).endswith(
        "NonFiniteError: step 3: loss on rank 1 (drafter 1) is not finite (`draftyard logs RUN --rank 1` names the rows); "
        "no weight has moved since step 2"
    )
    assert list(losses(ended.run)) == [1, 2, 3]


@pytest.mark.slow  # two processes
@pytest.mark.parametrize(
    ("wishes", "culprit", "words"),
    [
        ({"spoil": "rows"}, 1, "micro-batch 0: tokens, features and last hidden states are 96, [95, 144, float32]"),
        ({"spoil": "values"}, 0, "micro-batch 0 from rank 1 (target 0): 16 of 32 sampled hidden states are not finite"),
        ({"spoil": "ids"}, 0, "micro-batch 0 from rank 1 (target 0): token 1000000; the vocabulary runs from 0 to 259"),
        ({"early": 3}, 0, "micro-batch 3 from rank 1 (target 0) was granted, and that rank ended before it"),
    ],
    ids=[
        "rows that are not its tokens",
        "values that are not finite",
        "a token out of range",
        "a stream that ends early",
    ],
)
def test_what_must_not_cross_the_border_ends_every_rank_with_the_same_words(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, wishes: dict[str, Any], culprit: int, words: str
) -> None:
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=RolesSpec(target=1, drafter=1), num_steps=400)

    ended = launch(tmp_path, spec, **wishes)

    assert ended.status != 0
    assert [ended.final(rank) for rank in (0, 1)] == ["failed", "failed"]
    assert words in ended.failure(culprit)
    told = ended.failure(culprit).removeprefix("remote.drafter.queue.")
    assert ended.failure(1 - culprit).endswith(f"RankLost: {Roles(1, 1).name(culprit)} failed: {told}")
    assert list(losses(ended.run)) == ([1] if "early" in wishes else [])  # what came before it has been trained on


@pytest.mark.slow  # two processes
@pytest.mark.parametrize(
    ("accumulation", "checkpointing"), [(2, "reentrant"), (4, "non_reentrant")], ids=["one each", "two each"]
)
def test_drafters_that_read_from_disk_divide_by_the_sums_of_all_of_them(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, accumulation: int, checkpointing: str
) -> None:
    """D-PACE and CAP divide by what the drafter itself says: on no rank is that known before the forward."""
    found = {}
    for roles in (RolesSpec(), RolesSpec(drafter=2)):
        spec = spec_of(
            tiny_target_spec,
            tiny_drafter_spec,
            roles=roles,
            num_steps=8,
            loss={"terms": {"ce": 1.0, "kl": 0.15, "cap": 0.05}, "decay": "dpace"},
        )
        train_spec = replace(spec.train, accumulation=accumulation, activation_checkpointing=checkpointing)
        spec = replace(spec, train=train_spec, data=replace(spec.data, hidden_states="cached"))
        if roles.drafter == 1:
            job = make_job(tmp_path / "alone", spec)
            assert train(job, StopWish()) == "succeeded"
            found[1] = losses(job.run)
        else:
            ended = launch(tmp_path / "shared", spec)
            assert ended.status == 0, ended.output
            found[2] = losses(ended.run)

    assert found[2] == pytest.approx(found[1], rel=TOLERANCE)


@pytest.mark.slow  # two or three processes
@pytest.mark.parametrize(
    ("num_drafters", "victim"), [(1, 0), (2, 1), (2, 2)], ids=["drafter", "one of two drafters", "target"]
)
def test_a_killed_rank_ends_every_other_with_its_name(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, num_drafters: int, victim: int
) -> None:
    roles = RolesSpec(target=1, drafter=num_drafters)
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=roles, num_steps=400)

    ended = launch(tmp_path, spec, kill=[victim, 5])

    assert ended.status != 0
    assert ended.final(victim) is None
    told = f"{Roles(num_drafters, 1).name(victim)} is gone without a word"
    for survivor in {0, 1, num_drafters} - {victim}:
        assert ended.final(survivor) == "failed"
        assert told in ended.failure(survivor)
        assert ended.last_word_s(survivor) - ended.last_word_s(victim) < ENDED_S


@pytest.mark.slow  # three processes
def test_drafters_take_what_each_of_them_can_and_say_who_cannot(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=RolesSpec(target=1, drafter=2), num_steps=2)

    ended = launch(tmp_path, spec, fused=0)

    assert ended.status == 0, ended.output
    (first,), (second,) = (events(ended.run, writer=f"rank{rank}", kind="start") for rank in (0, 1))
    chosen = first.fields["choices"]
    assert chosen["kernels"].startswith("torch: auto, as rank 1 (drafter 1) takes it")
    assert chosen["attention"].startswith("sdpa: auto, as rank 1 (drafter 1) takes it")
    assert second.fields["choices"]["kernels"] == "torch: auto, Triton needs CUDA and the device is cpu"


@pytest.mark.slow  # three processes
def test_a_rank_that_fails_is_the_cause_that_every_rank_names(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=RolesSpec(target=1, drafter=2), num_steps=400)

    ended = launch(tmp_path, spec, fail=[1, 3])

    assert ended.status != 0
    assert "the test wants this" in ended.failure(1)
    assert all("rank 1 (drafter 1) failed: ValueError: the test wants this" in ended.failure(rank) for rank in (0, 2))


@pytest.mark.slow  # two processes
@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"drafter_sleep_s": 0.8}, "drafter-bound: queue 2/2, hidden states travel at "),
        ({"target_sleep_s": 0.5}, "target-bound: queue [01]/2, hidden states travel at "),
    ],
    ids=["slow drafter", "slow target"],
)
def test_the_slower_side_is_named_with_the_ratio_that_would_balance(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, wishes: dict[str, float], words: str
) -> None:
    """Of two processes no other division is possible, so what is told is the ratio of their seconds a batch."""
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=RolesSpec(target=1, drafter=1), num_steps=8)

    ended = launch(tmp_path, spec, **wishes)

    assert ended.status == 0, ended.output
    told = next(line for line in ended.notes(0).splitlines() if re.search(words, line))
    found = re.search(
        r"a batch takes a target rank ([\d.]+ m?s) and a drafter rank ([\d.]+ m?s); "
        r"the balance is ([\d.e+-]+) target ranks for each drafter, these are 1 and 1$",
        told,
    )
    assert found is not None, told
    target_s, drafter_s = parse_duration(found[1]), parse_duration(found[2])
    assert float(found[3]) == pytest.approx(target_s / drafter_s, rel=0.07)  # two digits of it are told
    assert target_s >= wishes.get("target_sleep_s", 0.0)
    # The first batch counts for neither side: of its steps a drafter has slept in all but one before a batch that counts.
    num_slept, num_counted = spec.train.num_steps - 1, spec.train.num_steps * spec.train.accumulation - 1
    assert drafter_s >= wishes.get("drafter_sleep_s", 0.0) * num_slept / num_counted


@pytest.mark.slow  # three processes, twice
def test_a_stop_that_one_rank_hears_ends_all_after_the_same_step_and_a_resume_goes_on(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec, alone
) -> None:
    roles = RolesSpec(target=1, drafter=2, queue=3)
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=roles)

    first = launch(tmp_path, spec, stop_at=[1, 7])
    second = launch(tmp_path, spec, attempt=2)

    assert first.status == 0, first.output
    assert second.status == 0, second.output
    assert list(losses(first.run)) == list(range(1, 8))
    assert "dropped" in first.notes(0) + first.notes(1) + first.notes(2)
    assert losses(first.run) | losses(second.run, attempt=2) == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.slow  # two processes
def test_a_stop_that_only_a_target_hears_ends_all_with_the_step_of_its_next_batch(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    """As on a host that has no drafter: its ranks alone are told."""
    roles = RolesSpec(target=1, drafter=1, queue=2)
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=roles, num_steps=100_000)

    ended = launch(tmp_path, spec, stop_at=[1, 9])

    assert ended.status == 0, ended.output
    assert [ended.final(rank) for rank in (0, 1)] == ["stopped", "stopped"]
    last = max(losses(ended.run))
    assert last <= 9 / spec.train.accumulation + 1
    assert [path.name for path in ended.run.whole_checkpoints()] == [f"step-{last:08}"]


@pytest.mark.slow  # two processes
def test_a_stop_while_a_rank_still_loads_is_a_stop_of_every_rank_and_no_failure(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    spec = spec_of(tiny_target_spec, tiny_drafter_spec, roles=RolesSpec(target=1, drafter=1), num_steps=400)

    ended = launch(tmp_path, spec, stop_loading=1)

    assert ended.status == 0, ended.output
    assert [ended.final(rank) for rank in (0, 1)] == ["stopped", "stopped"]
    assert [ended.failure(rank) for rank in (0, 1)] == ["", ""]


@pytest.mark.slow  # a supervisor, its launcher and two ranks
def test_a_stop_reaches_the_ranks_with_the_whole_grace_of_the_run(
    tmp_path: Path, tiny_target_spec, tiny_drafter_spec
) -> None:
    roles = RolesSpec(target=1, drafter=1)
    run = make_run(tmp_path, spec_of(tiny_target_spec, tiny_drafter_spec, roles=roles, num_steps=100_000))
    rank = [*warm.python("remote.drafter"), "-m", "remote.drafter", "train", str(run.root)]
    argv = [sys.executable, *LAUNCHER, "2", "--no-python", *rank]  # whose children are told: it is no warm one
    job = Job(run.root.name, "train", 1, argv, str(TREE), grace_s=120, data_dir=str(tmp_path / "data"))
    write_json(run.job_json, job.dump())
    words = [sys.executable, "-m", "remote.supervise", str(run.root)]
    with subprocess.Popen(words, cwd=TREE, start_new_session=True) as supervisor:
        try:
            wait_for(lambda: supervisor.poll() is not None or len(losses(run)) > 2, timeout_s=300)
            write_json(run.attempt(1).stop_json, {"grace_s": 120})
            supervisor.wait(timeout=150)
        finally:  # a test that failed waits for no job of 100,000 steps
            if supervisor.poll() is None:
                write_json(run.attempt(1).stop_json, {"grace_s": 0})

    ended = read_json(run.attempt(1).exit_json) or {}
    assert (ended["reason"], ended["exit_code"], ended["killed"]) == ("user", 0, 0)
    assert events(run, kind="final")[0].fields["outcome"] == "stopped"
    assert len(run.whole_checkpoints()) == 1
