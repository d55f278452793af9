"""The rung `ranks` starts two processes as a launch does, and says in one line what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from remote.drafter import ladder
from remote.drafter.job import Job
from remote.drafter.ranks import Place
from remote.drafter.ranks_rung import smallest
from remote.drafter.smoke import RungFailed
from remote.report import Reporter
from remote.spec import DFlashSpec, RolesSpec
from tests.remote.jobs import events, make_job, make_run, run_job
from tests.remote.specs import tiny_spec


def shared(target: int, drafter: int, **sections: dict[str, Any]) -> DFlashSpec:
    return tiny_spec(
        roles=vars(RolesSpec(target, drafter, 3)),
        life={"num_gpus": target + drafter},
        data={"hidden_states": "online" if target else "cached"},
        **{"train": {"accumulation": drafter}, **sections},
    )


def test_the_smallest_form_of_roles_has_two_processes_and_as_many_batches_as_drafters() -> None:
    found = [smallest(shared(*roles)) for roles in ((5, 3), (1, 1), (0, 4))]

    assert [(spec.roles.target, spec.roles.drafter, spec.train.accumulation) for spec in found] == [
        (1, 1, 1),
        (1, 1, 1),
        (0, 2, 2),
    ]


@pytest.mark.slow  # a ladder, a launcher and two processes
@pytest.mark.parametrize("roles", [(2, 1), (0, 4)], ids=["a target and a drafter", "two drafters"])
def test_two_processes_pass_with_what_one_of_them_measured(tmp_path: Path, roles: tuple[int, int]) -> None:
    run = make_run(tmp_path, shared(*roles))

    ended = run_job(run, "smoke", "ranks")

    (told,) = events(run, kind="rung")  # the ladder's own: only it knows how both have ended
    assert (ended.returncode, told.fields["passed"]) == (0, True), ended.stdout + ended.stderr
    assert {"loss", "step_s", "wait_s", "processes"} <= set(told.fields["values"])
    assert not events(run, writer="rung-ranks", kind="rung")
    (second,) = events(run, writer="rung-ranks-1", kind="start")
    assert second.fields["choices"]["role"] == ("rank 1 (target 0)" if roles[0] else "rank 1 (drafter 1)")


@pytest.mark.slow  # a ladder, a launcher and two processes
def test_a_step_that_goes_wrong_fails_the_rung_with_its_own_words(tmp_path: Path) -> None:
    run = make_run(tmp_path, shared(1, 1, optim={"lr": 1e38}))

    ended = run_job(run, "smoke", "ranks")

    (told,) = events(run, kind="rung")
    assert (ended.returncode, told.fields["passed"]) == (1, False), ended.stdout + ended.stderr
    assert "RungFailed" in told.fields["message"]
    assert not events(run, writer="rung-ranks", kind="rung")


class Launcher:
    """Both ranks one after the other in this process, each with a writer of its own; then a status of its own."""

    def __init__(self, job: Job, ends: Sequence[dict[str, float] | Exception | None], status: int) -> None:
        self.job, self.ends, self.status = job, ends, status

    def run(self, half: str) -> int:
        for rank, end in enumerate(self.ends):
            if end is not None:  # None: killed before it could say anything
                job = replace(self.job, reporter=Reporter(self.job.attempt.root, writer=f"rung-ranks-{rank}"))
                with mock.patch.object(ladder, "run_ranks", **ending(end)):
                    ladder.run_one(job, half, Place(rank, rank, 2, "localhost", 1))
        return self.status


def ending(end: dict[str, float] | Exception) -> dict[str, Any]:
    return {"side_effect": end} if isinstance(end, Exception) else {"return_value": end}


PASSED = {"loss": 1.5, "processes": 2.0}


@pytest.mark.parametrize(
    ("ends", "status", "passed", "message"),
    [
        ([PASSED, {}], 0, True, ""),
        (
            [PASSED, RuntimeError("while ending")],
            1,
            False,
            "ended badly after the first had passed: the launcher ended by exit status 1",
        ),
        ([PASSED, None], -9, False, "signal SIGKILL"),
        ([RungFailed("2 tensors differ"), {}], 1, False, "RungFailed: 2 tensors differ"),
        ([RungFailed("2 tensors differ"), RuntimeError("as well")], 1, False, "RungFailed: 2 tensors differ"),
        ([None, RuntimeError("the first is gone")], 1, False, "exit status 1 before the first could say why"),
        ([None, {}], 0, False, "before the first could say why"),
    ],
)
def test_of_two_processes_one_result_is_told_once_both_have_ended(
    tmp_path: Path, ends: list[Any], status: int, passed: bool, message: str
) -> None:
    job = make_job(tmp_path, shared(1, 1))

    found = ladder._climb_one(job, "ranks", Launcher(job, ends, status))  # type: ignore[arg-type]

    every = [
        told for name in ("rank0", "rung-ranks-0", "rung-ranks-1") for told in events(job.run, writer=name, kind="rung")
    ]
    (told,) = every
    assert (found, told.fields["passed"]) == (passed, passed)
    assert message in told.fields["message"]
    assert told.fields["values"] == (PASSED if ends[0] == PASSED else {})


def test_the_result_of_an_earlier_try_is_none_of_this_one(tmp_path: Path) -> None:
    job = make_job(tmp_path, shared(1, 1))
    assert ladder._climb_one(job, "ranks", Launcher(job, [PASSED, {}], 0))  # type: ignore[arg-type]

    assert not ladder._climb_one(job, "ranks", Launcher(job, [None, None], 0))  # type: ignore[arg-type]
