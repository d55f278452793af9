"""What the spec leaves open is decided once, with a reason that the start of every job tells."""

from __future__ import annotations

import pytest
import torch

from remote.drafter.workbench import choose
from remote.spec import NoiseSpec
from tests.remote.specs import tiny_spec

CPU = torch.device("cpu")


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
