"""What the check at start runs is what training calls, and which of its kernels a Hopper card then takes.

On a processor and without Triton, where all of them compute by the plain formulas: what is broken here is the only error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from remote.drafter import self_check
from remote.drafter.attention import choose_backend
from remote.drafter.kernels import attention, body, gluon, launch
from remote.drafter.keys import KeyValues, MadeFrom
from tests.remote.cuda import CPU
from tests.remote.specs import tiny_spec
from tests.remote.test_self_check import SPEC, attending, break_it, scaled, trials_of


@pytest.fixture(autouse=True)
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_installed", False)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the choice of kernels goes."""
    monkeypatch.setattr(launch, "obstacle", lambda **_: None)
    monkeypatch.setattr(gluon, "can_launch", lambda device: True)


HOPPER_SPEC = tiny_spec(drafter={"head_dim": 64, "block_size": 4})


def unless_for_all_cards(broken: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: (right if named["for_all_cards"] else broken)(*arguments, **named)


@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
def test_where_the_kernels_for_hopper_cards_are_off_those_for_all_cards_are_checked_and_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = partial(self_check.check_attention, HOPPER_SPEC, CPU, torch.float16)
    passed, right = check(), attention.plan
    assert (passed.is_passed, passed.backend) == (True, "triton")
    assert passed.reason.startswith("those for Hopper cards: error ")

    monkeypatch.setattr(attention, "plan", unless_for_all_cards(attending(scaled)(right), right))
    fallen = check()
    assert (fallen.is_passed, fallen.backend) == (True, "triton-any-card")
    assert fallen.reason.startswith("those for Hopper cards: their check failed here: error 5")
    assert "; those for all cards: error " in fallen.reason
    backend = choose_backend(HOPPER_SPEC.drafter, device=CPU, dtype=torch.float16, check=check)
    assert (backend.name, backend.reason) == ("triton-any-card", f"auto: draftyard's own kernels, {fallen.reason}")

    monkeypatch.setattr(attention, "plan", attending(scaled)(right))
    out = check()
    assert not out.is_passed
    assert out.reason.count("their check failed here: error 5") == 2


@pytest.mark.usefixtures("on_hopper")
def test_kernels_for_all_cards_that_cannot_take_the_place_of_others_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_spec(drafter={"head_dim": 64, "num_heads": 16, "num_kv_heads": 1, "block_size": 4})
    assert self_check.check_attention(spec, CPU, torch.float16).is_passed

    monkeypatch.setattr(attention, "plan", attending(scaled)(attention.plan))

    told = self_check.check_attention(spec, CPU, torch.float16)
    assert not told.is_passed
    assert "; those for all cards: 16 query heads share a key, above 8" in told.reason


def test_what_is_checked_is_what_training_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of the first layer, whose mask slots share a row; queries and keys that the backward makes once more."""
    size, spreads, made = SPEC.drafter.block_size, set[tuple[int, int]](), list[bool]()

    def watch_heads(rotated: Callable[..., Any]) -> Callable[..., Any]:
        def watched(heads: Tensor, weight: Tensor, eps: float, at: Any, spread: int = 1) -> Any:
            spreads.add((heads.shape[1], spread))
            return rotated(heads, weight, eps, at, spread)

        return watched

    def watch_plan(plan: Callable[..., Any]) -> Callable[..., Any]:
        def watched(seen: Any, **named: Any) -> Any:
            def attend(query: Tensor, keys: KeyValues, made_from: MadeFrom) -> Tensor:
                again = made_from.make(made_from.query, made_from.block_key)
                made.append(torch.equal(again[0], query) and torch.equal(again[1], keys.block_key_TGD))
                assert not torch.equal(made_from.query, query)
                assert seen.block_size == size
                return plan(seen, **named)(query, keys, made_from)

            return attend

        return watched

    break_it(monkeypatch, body, "head_norm_rotate", watch_heads)
    break_it(monkeypatch, attention, "plan", watch_plan)

    assert self_check.judge(trials_of(SPEC, torch.float32), CPU, torch.float32).is_passed
    heads = {SPEC.drafter.num_heads, SPEC.drafter.num_kv_heads}
    assert spreads == {(count, spread) for count in heads for spread in (1, size)}
    assert made == [True] * 2, "one of each rule"
