"""What the spec leaves open is decided once, with a reason that the start of every job tells."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from remote.drafter import coarse_head
from remote.drafter.attention import Backend
from remote.drafter.kernels import launch
from remote.drafter.ranks import Ranks
from remote.drafter.self_check import Verdict
from remote.drafter.workbench import UNASKED, Check, Checks, Choices, agree, choose
from remote.report import UserFault
from remote.roles import Roles
from remote.spec import NoiseSpec
from tests.remote.specs import tiny_spec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FOUND: Check = lambda *_: Verdict(True, "error 1e-3")  # noqa: E731 - a check that passes


@pytest.mark.parametrize(
    ("noise", "told"),
    [
        (NoiseSpec(), "none"),
        (NoiseSpec("gaussian", 0.0), "none"),
        (NoiseSpec("gaussian", 0.05), "gaussian on the captured hidden states, standard deviation 0.05"),
        (NoiseSpec("uniform", 0.1), "uniform on the captured hidden states, half width 0.1"),
    ],
)
def test_the_noise_on_hidden_states_is_recorded(noise: NoiseSpec, told: str) -> None:
    assert choose(tiny_spec(data={"noise": noise}), CPU).reasons["noise"] == told


@pytest.mark.parametrize(
    ("asked", "dtype", "told"),
    [
        ("auto", torch.float32, "auto: float32 on cpu"),
        ("float32", torch.float32, "float32: asked for by the recipe"),
        ("bfloat16", torch.bfloat16, "bfloat16: asked for by the recipe"),
    ],
)
def test_a_processor_trains_in_float32_unless_the_recipe_says_otherwise(
    asked: str, dtype: torch.dtype, told: str
) -> None:
    found = choose(tiny_spec(train={"dtype": asked}), CPU)

    assert (found.dtype, found.reasons["dtype"]) == (dtype, told)
    assert ("float32 themselves" in found.reasons["masters"]) is (dtype == torch.float32)


OWN = Choices(
    torch.bfloat16, Backend("triton", "passed"), True, {"attention": "triton: passed", "kernels": "triton: passed"}
)
FLEX = replace(OWN, backend=Backend("flex", "refused"), is_fused=False)
DRAFTERS, WITH_A_TARGET = Roles(num_drafters=2), Roles(num_drafters=2, num_targets=1)


@dataclass(frozen=True)
class Meeting(Ranks):
    """A rank that hears what each of all says: its own word, and what is written here for the others."""

    said: tuple[Choices, ...] = ()

    def of_all(self, numbers: list[int]) -> list[list[int]]:
        heard: list[list[int]] = []
        for each in self.said:
            agree(each, Hearing(said=heard))
        return heard


@dataclass(frozen=True)
class Hearing(Ranks):
    """Writes down what a rank says."""

    said: list[list[int]] = None  # type: ignore[assignment]

    def of_all(self, numbers: list[int]) -> list[list[int]]:
        self.said.append(numbers)
        return [numbers]


def test_drafters_agree_on_what_each_can_take_and_name_who_cannot() -> None:
    first, second = (agree(each, Meeting(rank, DRAFTERS, said=(OWN, FLEX))) for rank, each in enumerate((OWN, FLEX)))

    assert (first.backend.name, first.is_fused) == (second.backend.name, second.is_fused) == ("flex", False)
    assert first.reasons["kernels"].startswith("torch: auto, as rank 1 (drafter 1) takes it, whose log says why")
    assert first.reasons["attention"].startswith("flex: auto, as rank 1 (drafter 1) takes it")
    assert second == FLEX, "it keeps its own reasons"


def test_drafters_of_which_one_takes_the_kernels_for_all_cards_all_take_these() -> None:
    fallen = replace(OWN, backend=Backend("triton-any-card", "those for Hopper cards are off"))

    found = agree(OWN, Meeting(0, DRAFTERS, said=(OWN, fallen)))

    assert (found.backend.name, found.is_fused) == ("triton-any-card", True)
    assert found.reasons["attention"].startswith("triton-any-card: auto, as rank 1 (drafter 1) takes it")


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        ({}, "full: by the recipe"),
        ({"hidden_gradient": "auto"}, "full: auto, fp8 is out (products of float8 need CUDA, the device is cpu)"),
        (
            {"hidden_gradient": "auto", "terms": {"kl": 1.0}},
            "full: auto, fp8 is out (it needs at least as much of ce as of soft terms; here are 0 and 1)",
        ),
    ],
)
def test_where_the_hidden_gradient_is_made_in_full_the_log_says_why(loss: dict, told: str) -> None:
    found = choose(tiny_spec(loss=loss), CPU)

    assert (found.is_coarse, found.reasons["hidden gradient"]) == (False, told)


@pytest.mark.parametrize(
    ("asked", "settings", "is_right", "told"),
    [
        ("auto", {}, True, "fp8: auto, error 1e-3; the label and the likeliest tokens in full"),
        ("fp8", {}, True, "fp8: by the recipe, error 1e-3; the label and the likeliest tokens in full"),
        ("auto", {}, False, "full: auto, fp8 is out (error 1e-3)"),
        ("fp8", {}, False, None),
        ("auto", {"kernels": "torch"}, True, "full: auto, fp8 is out (it is a part of draftyard's own kernels; train.kernels is torch)"),
        ("full", {}, True, "full: by the recipe"),
    ],
)  # fmt: skip
def test_a_card_that_multiplies_float8_makes_the_hidden_gradient_as_the_recipe_and_the_check_say(
    monkeypatch: pytest.MonkeyPatch, asked: str, settings: dict, is_right: bool, told: str | None
) -> None:
    _multiplies(monkeypatch)
    spec = tiny_spec(loss={"hidden_gradient": asked}, train=settings)
    checks = Checks(FOUND, FOUND, lambda *_: Verdict(is_right, "error 1e-3"))

    if told is None:
        with pytest.raises(UserFault, match="cannot train here: error 1e-3; take auto or full"):
            choose(spec, CUDA, checks=checks)
        return
    found = choose(spec, CUDA, checks=checks)

    assert (found.is_coarse, found.reasons["hidden gradient"]) == (told.startswith("fp8"), told)


def test_where_own_kernels_fail_their_check_the_hidden_gradient_is_made_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _multiplies(monkeypatch)
    checks = Checks(FOUND, lambda *_: Verdict(False, "off"), FOUND)

    found = choose(tiny_spec(loss={"hidden_gradient": "auto"}), CUDA, checks=checks)

    assert (found.is_fused, found.is_coarse) == (False, False)
    assert "own kernels, which are out" in found.reasons["hidden gradient"]


@pytest.mark.parametrize("kernels", ["auto", "triton"])
@pytest.mark.parametrize("asked", ["auto", "fp8"])
def test_a_rank_that_runs_the_target_alone_is_refused_no_hidden_gradient(
    monkeypatch: pytest.MonkeyPatch, asked: str, kernels: str
) -> None:
    _multiplies(monkeypatch)

    found = choose(tiny_spec(loss={"hidden_gradient": asked}, train={"kernels": kernels}), CUDA, checks=UNASKED)

    assert not found.is_coarse


def _multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a card were there on which everything runs."""
    for module in (coarse_head, launch):
        monkeypatch.setattr(module, "obstacle", lambda *_, **__: None)


def test_drafters_of_which_one_cannot_multiply_float8_all_make_the_hidden_gradient_in_full() -> None:
    coarse = replace(OWN, is_coarse=True, reasons=OWN.reasons | {"hidden gradient": "fp8: auto"})

    found = agree(coarse, Meeting(0, DRAFTERS, said=(coarse, OWN)))

    assert not found.is_coarse
    assert found.reasons["hidden gradient"].startswith("full: auto, as rank 1 (drafter 1) takes it")
    assert agree(coarse, Meeting(0, DRAFTERS, said=(coarse, coarse))).is_coarse


def test_what_cannot_be_made_in_fp8_is_refused() -> None:
    told = "loss.hidden_gradient is fp8, which cannot train here: products of float8 need CUDA, the device is cpu; take auto or full"
    with pytest.raises(UserFault, match=told):
        choose(tiny_spec(loss={"hidden_gradient": "fp8"}), CPU)


def test_what_a_target_rank_cannot_take_keeps_no_drafter_from_it() -> None:
    said = (OWN, OWN, FLEX)

    assert agree(OWN, Meeting(0, WITH_A_TARGET, said=said)) == OWN
    assert agree(FLEX, Meeting(2, WITH_A_TARGET, said=said)) == FLEX


def test_a_rank_with_another_dtype_is_refused_with_its_name() -> None:
    said = (OWN, OWN, replace(FLEX, dtype=torch.float32))

    with pytest.raises(UserFault, match=r"rank 2 \(target 0\) float32: name train.dtype"):
        agree(OWN, Meeting(0, WITH_A_TARGET, said=said))


def test_a_rank_alone_keeps_what_it_chose() -> None:
    assert agree(OWN, Ranks()) == OWN
