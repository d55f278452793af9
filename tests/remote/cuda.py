"""What a test that needs a CUDA card says, and one that runs kernels without it, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here: the tests marked gpu run on it")

Test = TypeVar("Test", bound=Callable[..., None])


def needs_cuda(test: Test) -> Test:
    """Marks the test `gpu` and skips it without a card. Warnings of torch's own compiler are no failures there."""
    for mark in (
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
        pytest.mark.filterwarnings("default"),
    ):
        test = mark(test)
    return test


@contextmanager
def never_waiting() -> Iterator[None]:
    """Any wait for the device in here is an error. Torch's warning that this mode is new comes once a process: it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
