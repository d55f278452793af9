"""job.json: what a supervisor needs to know of one job. Written by launch, read on the host."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from remote.rundir import RunDir, read_json


@dataclass(frozen=True)
class Job:
    run_id: str
    kind: str  # train, smoke, evaluate, prepare, export, script
    attempt: int
    argv: list[str]
    cwd: str  # the shipped tree
    grace_s: float = 60.0  # between the polite signal and the kill
    max_duration_s: float | None = None
    memory_limit_bytes: int | None = None  # set on the job's processes where there is no GPU; see `limits`
    gpus: list[str] = field(default_factory=list)  # index or UUID; empty: all
    data_dir: str | None = None
    facts: dict[str, str] = field(default_factory=dict)  # for a person: tree hash, recipe, branch
    node: int = 0  # this host's place among those of the job
    variables: dict[str, str] = field(default_factory=dict)  # of this host alone, no secrets: what the job finds set

    def dump(self) -> dict[str, Any]:
        return asdict(self)


def read_job(run: RunDir) -> Job:
    """ValueError names what is wrong with job.json; keys that a newer launch may write are left aside."""
    body = read_json(run.job_json)
    if body is None:
        raise ValueError(f"{run.job_json}: absent or not JSON")
    try:
        return Job(**{name: body[name] for name in Job.__dataclass_fields__ if name in body})
    except TypeError as error:
        raise ValueError(f"{run.job_json}: {error}") from error
