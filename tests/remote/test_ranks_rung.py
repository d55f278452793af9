"""The rung `ranks` starts two processes as a launch does, and says in one line what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remote.drafter.ranks_rung import smallest
from remote.spec import DFlashSpec, RolesSpec
from tests.remote.jobs import events, make_run, run_job
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

    (told,) = events(run, writer="rung-ranks", kind="rung")
    assert (ended.returncode, told.fields["passed"]) == (0, True), ended.stdout + ended.stderr
    assert {"loss", "step_s", "wait_s", "processes"} <= set(told.fields["values"])
    assert not events(run, kind="rung")  # the ladder itself had nothing to say
    (second,) = events(run, writer="rung-ranks-1", kind="start")
    assert second.fields["choices"]["role"] == ("rank 1 (target 0)" if roles[0] else "rank 1 (drafter 1)")


@pytest.mark.slow  # a ladder, a launcher and two processes
def test_a_step_that_goes_wrong_fails_the_rung_with_its_own_words(tmp_path: Path) -> None:
    run = make_run(tmp_path, shared(1, 1, optim={"lr": 1e38}))

    ended = run_job(run, "smoke", "ranks")

    (told,) = events(run, writer="rung-ranks", kind="rung")
    assert (ended.returncode, told.fields["passed"]) == (1, False), ended.stdout + ended.stderr
    assert "RungFailed" in told.fields["message"]
    assert not events(run, kind="rung")
