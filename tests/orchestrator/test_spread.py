"""How processes are shared out over hosts: what cannot be is refused with its arithmetic, before anything is asked."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from orchestrator.actions.commands import train_commands
from orchestrator.actions.host_facts import GpuBusy, choose_gpus
from orchestrator.actions.meeting import Answer, Meeting, Offer, choose
from orchestrator.actions.spread import Node, refuse_other_number, refuse_uneven
from orchestrator.errors import HostError, UsageError
from orchestrator.workplace import Workplace
from remote.spec import DFlashSpec, RolesSpec
from tests.orchestrator.yard import Yard
from tests.remote.specs import tiny_spec

OFFER = Offer(29517, {"10.0.0.1": "ib0", "192.0.2.1": "eth0", "127.0.0.1": "lo"})
REFUSED, TIMED_OUT = Answer("Connection refused", None), Answer("timed out", None)
PLACE = Workplace("/srv/draftyard", "/venv/bin/python", "/root")


def shared(target: int, drafter: int) -> DFlashSpec:
    return replace(tiny_spec(life={"num_gpus": target + drafter}), roles=RolesSpec(target, drafter))


def test_processes_that_do_not_divide_are_refused_with_the_sum_and_what_would() -> None:
    with pytest.raises(UsageError) as told:
        refuse_uneven(shared(5, 3), ["a", "b", "c"])

    assert str(told.value) == (
        "5 target + 3 drafter = 8 processes, one on each GPU, and 8 / 3 hosts is no whole number; "
        "name 1, 2, 4 or 8 of them, or change roles"
    )
    refuse_uneven(shared(5, 3), ["a", "b"])


def test_a_host_that_is_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="--host b is named twice"):
        refuse_uneven(shared(1, 1), ["a", "b", "b"])


def test_gpus_that_are_named_are_one_for_each_process() -> None:
    with pytest.raises(UsageError, match=r"4 on each of 2 hosts; for host b 3 are named: 5, 6, 7"):
        refuse_other_number(shared(5, 3), "b", ("5", "6", "7"), 2)
    with pytest.raises(UsageError, match=r"= 8 processes, one on each GPU; for host b 3 are named"):
        refuse_other_number(shared(5, 3), "b", ("5", "6", "7"), 1)
    refuse_other_number(shared(5, 3), "b", (), 2)
    refuse_other_number(shared(1, 1), "b", ("5",), 2)


def test_a_host_with_too_few_gpus_for_its_share_is_refused_with_the_arithmetic() -> None:
    facts = {"gpus": [{"index": 0, "total_bytes": 80 * 2**30}]}

    with pytest.raises(GpuBusy) as told:
        choose_gpus(facts, (), shared(2, 2), host="b", num_gpus=2)

    assert "host b has 1 GPU; the recipe wants 4 (life.num_gpus), which is 2 on each of 2 hosts" in str(told.value)


def test_the_first_address_that_all_others_reach_is_taken_with_each_hosts_interface() -> None:
    answers = {
        "b": {"10.0.0.1": Answer(None, "ib1"), "192.0.2.1": Answer(None, "eth0"), "127.0.0.1": REFUSED},
        "c": {"10.0.0.1": TIMED_OUT, "192.0.2.1": Answer(None, "enp3s0"), "127.0.0.1": REFUSED},
    }

    met = choose("a", OFFER, answers)

    assert met == Meeting("192.0.2.1", 29517, ("eth0", "eth0", "enp3s0"))
    assert met.variables(2) == {"NCCL_SOCKET_IFNAME": "=enp3s0", "GLOO_SOCKET_IFNAME": "enp3s0"}


def test_hosts_that_reach_none_of_the_addresses_are_told_what_each_said() -> None:
    answers = {
        "b": {"10.0.0.1": REFUSED, "192.0.2.1": Answer("another machine answers there", "eth0"), "127.0.0.1": REFUSED}
    }

    with pytest.raises(HostError) as told:
        choose("a", OFFER, answers)

    assert (told.value.exit_code, told.value.reason) == (4, "unreachable")
    assert "no address of host a is reached by b at port 29517" in str(told.value)
    assert "  10.0.0.1 (ib0): b: Connection refused" in str(told.value)


def test_an_address_that_leads_to_the_first_host_from_elsewhere_tells_no_interface() -> None:
    offer = Offer(29500, {"10.0.0.1": "eth0", "203.0.113.7": None})
    met = choose("a", offer, {"b": {"10.0.0.1": TIMED_OUT, "203.0.113.7": Answer(None, "eth1")}})

    assert met.interfaces == (None, "eth1")
    assert met.variables(0) == {}


def test_each_host_starts_its_share_and_one_host_alone_needs_no_address() -> None:
    commands = train_commands(shared(5, 3))

    second = commands(Node(1, 2), Meeting("10.0.0.1", 29500, ("ib0", "ib0")))(PLACE, "/srv/runs/x")
    alone = commands(Node(), None)(PLACE, "/srv/runs/x")

    launcher = "/venv/bin/python -m torch.distributed.run"
    assert " ".join(second) == (
        f"{launcher} --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 4 "
        "-m remote.drafter train /srv/runs/x"
    )
    assert " ".join(alone) == f"{launcher} --standalone --nproc-per-node 8 -m remote.drafter train /srv/runs/x"


def test_a_recipe_that_says_colocated_is_told_how_that_is_written(yard: Yard) -> None:
    yard.edit(
        "roles.yaml",
        json.dumps(
            {"name": "roles", "why": "x", "base": {"roles": {"colocated": True}}, "branches": {"a": {"why": "x"}}}
        ),
    )

    assert yard.run("recipe", "check", "recipes/roles.yaml") == 2
    told = "no key 'colocated'; known: target, drafter, queue; without target processes each drafter has its target beside it: write target: 0"
    assert told in yard.err + yard.out


@pytest.mark.parametrize("verb", ["smoke", "deploy", "prepare"])
def test_a_verb_that_takes_one_host_takes_no_second_in_silence(yard: Yard, verb: str) -> None:
    assert yard.run(verb, "tiny", "--host", "local", "--host", "two") == 2
    assert "--host names 2 hosts: local, two; this takes one" in yard.err
