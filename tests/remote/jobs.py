"""A run folder as launch makes it, with a tiny target and a handful of rows, for tests that start jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from remote.drafter.job import Job
from remote.report import Reporter
from remote.rundir import RunDir
from remote.spec import DataSpec, DFlashSpec, DrafterSpec, EvaluateSpec, TargetSpec, TrainSpec, dump
from remote.wire import Event, decode
from tests import warm

TREE = Path(__file__).resolve().parents[2]
ANSWERS = "tiny.answers.jsonl"


def tiny_job_spec(target: TargetSpec, drafter: DrafterSpec, **sections: dict[str, Any]) -> DFlashSpec:
    """A training of a few steps on the tiny target of conftest; `train={"num_steps": 9}` changes fields."""
    spec = DFlashSpec(
        recipe="tiny",
        branch="ce",
        entry="dflash",
        target=target,
        drafter=drafter,
        data=DataSpec(
            prompts="tiny.prompts.jsonl",
            answers=ANSWERS,
            held_out="tiny.prompts.jsonl",
            row_tokens=96,
            max_anchors=6,
            anchors_per="row",
        ),
        train=TrainSpec(num_steps=4, num_threads=1),
        evaluate=EvaluateSpec(at_end=False),
    )
    return replace(spec, **{name: replace(getattr(spec, name), **fields) for name, fields in sections.items()})


def write_data(folder: Path, num_rows: int = 8) -> Path:
    """Chats long enough that two fill a row of 96 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    turns = [
        [{"role": "user", "content": f"count {n}"}, {"role": "assistant", "content": "abcd" * 3 + str(n)}]
        for n in range(num_rows)
    ]
    (folder / ANSWERS).write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns), encoding="utf-8")
    prompts = "".join(json.dumps({"messages": turn[:1]}) + "\n" for turn in turns)
    (folder / "tiny.prompts.jsonl").write_text(prompts, encoding="utf-8")
    return folder


def make_run(root: Path, spec: DFlashSpec) -> RunDir:
    """`<root>/runs/tiny` with its spec and data beside `runs`."""
    write_data(root / "data")
    run = RunDir(root / "runs" / "tiny")
    run.root.mkdir(parents=True, exist_ok=True)
    run.spec_json.write_text(dump(spec), encoding="utf-8")
    return run


def make_job(root: Path, spec: DFlashSpec, *, attempt: int = 1) -> Job:
    run = make_run(root, spec)
    folder = run.attempt(attempt)
    return Job(
        spec=spec,
        run=run,
        attempt=folder,
        cache=root / "cache",
        data_dir=root / "data",
        device=torch.device("cpu"),
        reporter=Reporter(folder.root),
    )


def start_job(
    run: RunDir, *words: str, attempt: int = 1, python: Sequence[str] = (sys.executable,)
) -> subprocess.Popen[str]:
    """`python -m remote.drafter WORDS[0] RUN_DIR WORDS[1:]`, as the supervisor starts it. What a warm one starts is warm."""
    work_dir = run.root.parent.parent
    environment = os.environ | {
        "DRAFTYARD_ATTEMPT": str(attempt),
        "DRAFTYARD_WORK_DIR": str(work_dir),
        "DRAFTYARD_DATA_DIR": str(work_dir / "data"),
    }
    if tuple(python) != (sys.executable,):
        environment["WARM_PYTHON"] = warm.executable("remote.drafter", work_dir)
    command = [*python, "-m", "remote.drafter", words[0], str(run.root), *words[1:]]
    return subprocess.Popen(
        command,
        cwd=TREE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_job(run: RunDir, *words: str, attempt: int = 1, is_warm: bool = True) -> subprocess.CompletedProcess[str]:
    """The same, to its end; in a process that had loaded its libraries, unless its memory is what the test looks at."""
    with start_job(
        run, *words, attempt=attempt, python=warm.python("remote.drafter") if is_warm else (sys.executable,)
    ) as process:
        output, errors = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def wait_for(is_so: Callable[[], bool], *, timeout_s: float = 120.0) -> None:
    """Looks until it is so; a test that waits longer has failed."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)


def has_begun(process: subprocess.Popen[Any]) -> None:
    """Waits until it has words and environment of its own: Popen returns while the kernel still lays them out."""
    for name in ("cmdline", "environ"):
        wait_for(
            lambda name=name: process.poll() is not None or Path(f"/proc/{process.pid}/{name}").read_bytes() != b""
        )  # type: ignore[misc]


def events(run: RunDir, *, attempt: int = 1, writer: str = "rank0", kind: str | None = None) -> list[Event]:
    """Whole lines of a writer's file, none while it is not there."""
    path = run.attempt(attempt).events(writer)
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    every = [decode(line) for line in lines if line.endswith(b"\n")]
    return [event for event in every if kind is None or event.kind == kind]
