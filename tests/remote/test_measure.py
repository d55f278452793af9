"""Peaks on a processor: of the stage itself, of memory that is the process's own."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from remote.drafter.measure import Meter, give_back, memory_facts
from remote.drafter.target import load_target, tables
from remote.report import Reporter
from remote.rundir import AttemptDir
from remote.wire import decode

MIB = 1024**2
CPU = torch.device("cpu")


def peak(meter: Meter, stage: str) -> int:
    found = meter.peaks[stage].allocated_bytes
    if found is None:
        pytest.skip("this kernel does not let a process reset its peak")
    return found


@pytest.mark.slow
def test_a_peak_is_that_of_its_stage_and_not_of_the_one_before() -> None:
    meter = Meter(CPU)

    with meter.part("load"):
        large = torch.ones(96 * MIB)
        del large
    with meter.part("forward"):
        small = torch.ones(32 * MIB)

    assert small.numel() == 32 * MIB
    assert peak(meter, "load") - peak(meter, "forward") == pytest.approx(256 * MIB, rel=0.1)


@pytest.mark.slow
def test_a_larger_peak_replaces_the_smaller_one_and_a_smaller_one_is_not_said(tmp_path: Path) -> None:
    """A rung's batch may be smaller than the largest of the training: the number that counts is the most so far."""
    meter, reporter = Meter(CPU), Reporter(tmp_path)

    def step(num_mib: int) -> None:
        with meter.part("forward"):
            held = torch.ones(num_mib * MIB)
            del held
        meter.say_peaks(reporter)

    for num_mib in (32, 96, 32):  # times four: more than the allocator keeps of what earlier tests gave back
        step(num_mib)

    lines = AttemptDir(tmp_path).events("rank0").read_bytes().splitlines()
    said = [decode(line).fields["allocated_bytes"] for line in lines]
    first, second = said  # the third step held less and is not said
    assert second - first == pytest.approx(256 * MIB, rel=0.1)
    assert meter.peak_values()["forward_allocated_bytes"] == second


@pytest.mark.slow
def test_pages_of_a_mapped_file_are_no_memory_of_the_stage(tmp_path: Path) -> None:
    """Shards of hidden states and weights are read that way; the kernel takes such pages back when it needs them."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(128 * MIB))
    meter = Meter(CPU)

    with meter.part("load"):
        pass
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped, meter.part("forward"):
        assert sum(mapped[at] for at in range(0, len(mapped), 4096)) == 0

    assert abs(peak(meter, "forward") - peak(meter, "load")) < 8 * MIB


def test_small_blocks_that_were_freed_go_back_to_the_system() -> None:
    blocks = [torch.ones(4096) for _ in range(8192)]  # 16 KiB each: from the heap, which shrinks from its end only
    stopper = blocks[-1]
    meter = Meter(CPU)
    with meter.part("load"):
        pass
    del blocks

    give_back(CPU)

    with meter.part("forward"):
        pass
    assert stopper.numel() == 4096
    assert peak(meter, "load") - peak(meter, "forward") > 100 * MIB


def test_tables_that_outlive_the_target_keep_nothing_of_its_file(tmp_path: Path, tiny_target_spec) -> None:
    target = load_target(tiny_target_spec, cache=tmp_path, device="cpu", dtype=torch.float32)
    embedding_VH, head_VH = tables(target, outlive_it=True)

    assert torch.equal(embedding_VH, target.decoder.embedding.weight)
    assert embedding_VH.data_ptr() == head_VH.data_ptr()
    assert embedding_VH.data_ptr() != target.head_VH.data_ptr()
    assert tables(target, outlive_it=False)[0].data_ptr() == target.head_VH.data_ptr()


def test_a_failure_on_a_processor_says_the_peak_and_the_limit_as_numbers() -> None:
    facts = memory_facts(CPU)

    assert set(facts) == {"resident_bytes", "data_bytes", "peak_bytes", "limit_bytes"}
    assert facts["peak_bytes"] >= facts["resident_bytes"] > 0
    assert facts["limit_bytes"] is None
