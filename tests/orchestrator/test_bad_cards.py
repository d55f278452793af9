"""Cards that are not what was asked for: a cap above one, a busy one, one off the bus, one that nobody knows. One line each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from orchestrator.actions.caps import OWN_CAP, refuse_cap_of_scripts
from orchestrator.actions.card_names import kind_of, known_card, names
from orchestrator.actions.places import find_places
from orchestrator.actions.plans import plan_memory
from orchestrator.errors import UsageError
from tests.orchestrator.test_trying import RECIPE as SMALL
from tests.orchestrator.yard import Yard

ONE_CARD = """#!/bin/sh
case "$*" in
  *compute-apps*) {holders};;
  *driver_version*) echo "0, GPU-00000000-aaaa, RTX PRO 6000, 97887, {used}, 0, 580.1";;
  *) echo "0, GPU-00000000-aaaa, {used}, 97887, 0";;
esac
"""
# As nvidia-smi of drivers 535 to 580 says it, on stdout, before it ends with status 15.
LOST = """#!/bin/sh
echo "Unable to determine the device handle for GPU0: 0000:65:00.0: GPU is lost.  Reboot the system to recover this GPU"
exit 15
"""
NO_DRIVER = """#!/bin/sh
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
exit 9
"""


@pytest.fixture
def nvidia_smi(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine's nvidia-smi is made."""
    program = yard.root / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def install(program: Path, text: str) -> None:
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)


def error_of(yard: Yard) -> str:
    return next(line for line in yard.err.splitlines() if line.startswith("error: "))


@pytest.mark.slow
def test_a_cap_above_the_card_is_refused_with_both_sizes(yard: Yard, nvidia_smi: Path) -> None:
    install(nvidia_smi, ONE_CARD.format(holders=":", used=0))
    yard.edit("small.yaml", SMALL)

    assert yard.run("smoke", "small", "fwd", "--cap", "200GiB") == 2

    assert error_of(yard) == (
        "error: --cap is 200.00 GiB, and the GPU of host local has 95.59 GiB; a cap stands for a smaller card: give less,"
        " or leave it out"
    )
    assert yard.json("ls", "--kind", "all")["runs"] == []


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a card here")
def test_a_cap_where_the_driver_has_a_card_and_torch_sees_none_ends_the_job_in_one_line(
    yard: Yard, nvidia_smi: Path
) -> None:
    install(nvidia_smi, ONE_CARD.format(holders=":", used=0))
    yard.edit("small.yaml", SMALL)

    assert yard.run("smoke", "small", "fwd", "--cap", "90GiB") == 10

    assert "torch sees no GPU here" in yard.out + yard.err


def test_a_cap_on_a_host_without_a_card_is_refused_and_makes_no_run(yard: Yard, nvidia_smi: Path) -> None:
    install(nvidia_smi, NO_DRIVER)
    yard.edit("small.yaml", SMALL)

    assert yard.run("smoke", "small", "fwd", "--cap", "2GiB") == 2

    assert error_of(yard) == (
        "error: --cap is 2.00 GiB of a GPU's memory, and host local has no GPU: leave it out;"
        " life.memory_limit_bytes limits what a process allocates on such a host"
    )
    assert yard.json("ls", "--kind", "all")["runs"] == []


def test_a_cap_that_reaches_scripts_alone_is_refused_and_makes_no_run(yard: Yard) -> None:
    script = yard.root / "own.py"
    script.write_text("print(1)")

    for words, named in (((), "script rung quick"), (("--script", str(script)), "script rung own.py")):
        assert yard.run("smoke", "tiny", *words, "--cap", "2GiB") == 2
        assert error_of(yard) == f"error: --cap does not reach {named}: {OWN_CAP}"
    assert yard.json("ls", "--kind", "all")["runs"] == []


def test_a_cap_is_said_to_pass_over_the_scripts_among_the_rungs() -> None:
    said: list[str] = []

    refuse_cap_of_scripts(2**31, ("fwd", "data", "fwd_bwd", "tokens"), {"data": "d.py", "tokens": "t.py"}, said.append)
    refuse_cap_of_scripts(None, ("data",), {"data": "d.py"}, said.append)
    refuse_cap_of_scripts(2**31, ("fwd",), {"data": "d.py"}, said.append)

    assert said == [f"warning: --cap does not reach script rungs data, tokens: {OWN_CAP}"]


@pytest.mark.slow
def test_a_busy_card_is_refused_with_who_holds_how_much(yard: Yard, nvidia_smi: Path) -> None:
    install(nvidia_smi, ONE_CARD.format(holders=f'echo "GPU-00000000-aaaa, {os.getpid()}, 40960"', used=40960))

    assert yard.run("smoke", "tiny") == 1

    assert f"pid {os.getpid()}" in yard.err
    assert "40.00 GiB" in yard.err


@pytest.mark.slow
@pytest.mark.parametrize(("text", "said"), [(LOST, "GPU is lost"), (NO_DRIVER, "couldn't communicate")])
def test_a_driver_that_no_longer_answers_is_told_in_its_own_words(
    yard: Yard, nvidia_smi: Path, text: str, said: str
) -> None:
    install(nvidia_smi, text)

    assert yard.run("doctor", "local") == 1

    assert any(said in line for line in (yard.out + yard.err).splitlines())


@pytest.mark.slow
def test_a_driver_that_has_lost_its_card_is_no_host_without_one(yard: Yard, nvidia_smi: Path) -> None:
    """Neither a smoke run nor a plan speaks of processors there."""
    install(nvidia_smi, LOST)
    lost = "Unable to determine the device handle for GPU0: 0000:65:00.0: GPU is lost.  Reboot the system to recover this GPU"

    assert yard.run("smoke", "qwen3-8b", "fwd") == 1
    assert error_of(yard).startswith(
        f"error: host local tells of no GPU, as its driver fails: {lost}; the recipe wants 1 GPU"
    )
    assert "draftyard doctor local" in yard.err
    assert yard.run("doctor", "local") == 1
    assert yard.run("plan", "qwen3-8b", "--host", "local") == 2
    assert error_of(yard) == (
        f"error: host local told of no GPU when it was last seen, as its driver fails: {lost}; give --gpu 95GiB"
    )
    assert yard.run("plan", "smollm2", "--host", "local") == 0, "a recipe for processors asks no card"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("H300", "no card 'H300'; known: B200, H200, {more}; did you mean 'H200'? Or give its memory, such as 95GiB"),
        ("MI300X", "no card 'MI300X'; known: B200, H200, {more}. Or give its memory, such as 95GiB"),
        (
            "A10",
            "no card 'A10'; known: B200, H200, {more}; did you mean 'A40'? Or give its memory, such as 95GiB",
        ),
        ("A100", "'A100' is one of several cards: A100 80GB, A100 40GB; say which, or its memory, such as 95GiB"),
        ("95", "is 95 bytes; write the unit, such as 95GiB"),
        ("4090", "is 4090 bytes; did you mean 'RTX 4090'?"),
        ("95GB5", "is '95GB5'; write a size such as 512MiB, 95GiB or 2GB"),
    ],
)
def test_a_plan_for_a_card_that_nobody_knows_names_those_that_are_known(yard: Yard, word: str, told: str) -> None:
    assert yard.run("plan", "smollm2", "--gpu", word) == 2

    more = ", ".join(names()[2:])
    assert error_of(yard).removeprefix("error: ") == f"Invalid value for '--gpu': {told.format(more=more)}"


@pytest.mark.parametrize(
    "word", ["H200", "h200", "NVIDIA H200", "rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "a100-80gb"]
)
def test_a_plan_for_a_card_by_its_name_takes_what_torch_reports_of_it(yard: Yard, word: str) -> None:
    card = known_card(word)

    body = yard.json("plan", "smollm2", "--gpu", word)

    assert body["plan"]["capacity_bytes"] == card.total_bytes
    assert body["capacity_from"] == f"--gpu {card.name}, by its usual size"
    assert body["plan"]["sizes"]["is_hopper"] is card.kind["is_hopper"] is card.name.startswith("H")
    assert all(known_card(name) == known_card(name.lower().replace(" ", "-")) for name in names())


def test_a_card_whose_memory_keeps_its_own_check_bits_is_planned_with_them() -> None:
    """Seen of an RTX 6000 Ada of 46,068 MiB: a total capacity of 44.43 GiB. Its ECC can be turned on; whether it is, no name says."""
    for word, most_gib in (
        ("RTX 6000 Ada", 44.43),
        ("RTX 6000 Ada Generation", 44.43),
        ("A6000", 44.43),
        ("RTX 4090", 23.49),
    ):
        assert known_card(word).total_bytes <= round(most_gib * 2**30)

    assert known_card("A6000").told == "by the A40's size, which has the same memory: none was seen of its own"
    assert known_card("A40").told == "by its usual size"
    assert known_card("NVIDIA H200 NVL") == known_card("H200")
    with pytest.raises(UsageError):
        known_card("H100 NVL")  # of 94 GB


def test_a_plan_for_the_card_of_a_host_that_nobody_knows_names_the_nearest(yard: Yard) -> None:
    for size in ((), ("--gpu", "95GiB")):
        assert yard.run("plan", "smollm2", "--host", "locl", *size) == 2
        assert error_of(yard) == "error: no host 'locl'; known: local; did you mean 'local'?"


def test_a_plan_for_the_card_of_a_host_that_nobody_has_looked_at_says_how_to_look(yard: Yard) -> None:
    assert yard.run("plan", "smollm2", "--host", "local") == 2

    assert error_of(yard) == (
        "error: host local has not been looked at yet; draftyard doctor local does, or give --gpu 95GiB"
    )


@pytest.mark.parametrize(
    ("models", "told"),
    [
        (["NVIDIA H200"], True),
        (["NVIDIA GH200 480GB"], True),
        (["NVIDIA L40S"], True),
        (["NVIDIA RTX 6000 Ada Generation"], True),
        (["NVIDIA RTX PRO 6000 Blackwell Server Edition"], True),
        (["NVIDIA GeForce RTX 4090"], True),
        (["NVIDIA B200"], True),
        (["NVIDIA A100-SXM4-80GB"], False),
        (["NVIDIA A10G"], False),
        (["NVIDIA RTX A6000"], False),
        (["NVIDIA GeForce RTX 3090"], False),
        (["Tesla V100-SXM2-32GB"], False),
        (["Tesla T4"], False),
        (["NVIDIA H200", "NVIDIA A100 80GB PCIe"], False),
        (["NVIDIA H200", "Some Card"], None),
        (["Quadro RTX 6000"], None),
        ([], None),
    ],
)
def test_which_cards_multiply_float8_is_told_by_their_models(models: list[str], told: bool | None) -> None:
    assert kind_of(models)["multiplies_float8"] is told


@pytest.mark.parametrize(("card", "asked", "has_head"), [("A100 80GB", "auto", False), ("H200", "auto", True), ("A100 80GB", "fp8", True)])  # fmt: skip
def test_a_card_that_is_known_not_to_multiply_float8_is_planned_with_the_full_head(
    tmp_path: Path, card: str, asked: str, has_head: bool
) -> None:
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")
    found = plan_memory(places, "qwen3.6-27b", gpu=known_card(card), overrides=[f"loss.hidden_gradient={asked}"])

    names = {line.name for line in found.plan.stage("load").components if line.size_bytes}
    assert ("head in fp8" in names) is has_head
    refuses = any("refuses to start; take auto or full" in text for text in found.plan.not_modelled)
    assert refuses is (asked == "fp8")
    assert not any("older than Ada" in text for text in found.plan.not_modelled)
    assert not any("hidden_gradient=auto" in text for use in found.uses for text in use.overrides)
