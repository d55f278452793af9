"""The tables as sqlmodel sees them, for `writes` alone.

The schema's truth is the migrations' SQL; a test compares both column by column. Constructing one of
these validates nothing (sqlmodel does not, for tables), so `writes` fills them from typed dataclasses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlmodel import Field, SQLModel

from orchestrator.redact import redact, redact_tree
from orchestrator.store.rows import FailureRow, NewRun, State

RUN_KEY = "runs.key"
HERE = "draftyard"  # the writer of events that are written on this side


class RunTable(SQLModel, table=True):
    __tablename__ = "runs"
    key: int | None = Field(default=None, primary_key=True)
    id: str = Field(unique=True)
    kind: str
    recipe: str
    branch: str
    host: str
    state: str
    reason: str | None = None
    evidence: str
    created_s: float
    started_s: float | None = None
    ended_s: float | None = None
    attempt: int = 0
    step: int | None = None
    num_steps: int | None = None
    stage: str | None = None
    unreachable_since_s: float | None = None
    last_event_s: float | None = None
    workdir: str | None = None
    tree_hash: str | None = None
    git_commit: str | None = None
    git_dirty: bool = False
    fingerprint: str | None = None
    parent_run: str | None = None
    forced_reason: str | None = None
    note: str = ""
    why: str = ""
    removed_s: float | None = None


class DocumentTable(SQLModel, table=True):
    __tablename__ = "documents"
    id: int | None = Field(default=None, primary_key=True)
    run_key: int = Field(foreign_key=RUN_KEY)
    name: str
    text: str


class TagTable(SQLModel, table=True):
    __tablename__ = "tags"
    run_key: int = Field(foreign_key=RUN_KEY, primary_key=True)
    tag: str = Field(primary_key=True)


class AttemptTable(SQLModel, table=True):
    __tablename__ = "attempts"
    run_key: int = Field(foreign_key=RUN_KEY, primary_key=True)
    number: int = Field(primary_key=True)
    state: str
    reason: str | None = None
    evidence: str = ""
    created_s: float
    started_s: float | None = None
    ended_s: float | None = None
    first_mono_s: float | None = None
    last_mono_s: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    pid: int | None = None
    boot_id: str | None = None
    start_ticks: int | None = None
    last_event_s: float | None = None
    last_job_event_s: float | None = None
    last_step_s: float | None = None
    final_outcome: str | None = None


class FailureTable(SQLModel, table=True):
    __tablename__ = "failures"
    id: int | None = Field(default=None, primary_key=True)
    run_key: int = Field(foreign_key=RUN_KEY)
    attempt: int
    kind: str
    message: str
    hint: str
    source: str
    stage: str | None = None
    step: int | None = None
    traceback: str
    facts_json: str
    at_s: float | None = None
    is_first_cause: bool


class EventTable(SQLModel, table=True):
    __tablename__ = "events"
    id: int | None = Field(default=None, primary_key=True)
    run_key: int | None = Field(default=None, foreign_key=RUN_KEY)
    attempt: int | None = None
    writer: str
    kind: str
    text: str
    fields_json: str = "{}"
    at_s: float


class HostTable(SQLModel, table=True):
    __tablename__ = "hosts"
    name: str = Field(primary_key=True)
    address: str
    facts_json: str = "{}"
    seen_s: float | None = None
    unreachable_since_s: float | None = None
    error: str | None = None
    clock_offset_s: float | None = None


class IntentTable(SQLModel, table=True):
    __tablename__ = "intents"
    id: int | None = Field(default=None, primary_key=True)
    run_key: int = Field(foreign_key=RUN_KEY)
    kind: str
    grace_s: float | None = None
    asked_s: float
    done_s: float | None = None
    outcome: str | None = None


class NodeTable(SQLModel, table=True):
    __tablename__ = "nodes"
    run_key: int = Field(foreign_key=RUN_KEY, primary_key=True)
    number: int = Field(primary_key=True)
    host: str
    workdir: str | None = None
    unreachable_since_s: float | None = None
    ended_attempt: int | None = None
    end_json: str | None = None


TABLES = (
    RunTable,
    NodeTable,
    DocumentTable,
    TagTable,
    AttemptTable,
    FailureTable,
    EventTable,
    HostTable,
    IntentTable,
)


def run_of(new: NewRun, now_s: float) -> RunTable:
    return RunTable(
        id=new.id,
        kind=new.kind,
        recipe=new.recipe,
        branch=new.branch,
        host=new.host,
        state=State.PENDING,
        evidence="asked for, not started yet",
        created_s=now_s,
        workdir=new.workdir,
        num_steps=new.num_steps,
        tree_hash=new.tree_hash,
        git_commit=new.git_commit,
        git_dirty=new.git_dirty,
        fingerprint=new.fingerprint,
        parent_run=new.parent_run,
        forced_reason=None if new.forced_reason is None else redact(new.forced_reason),
        why=redact(new.why),
    )


def nodes_of(key: int, new: NewRun) -> list[NodeTable]:
    """A row for each of several hosts, the first one included; none where there is one."""
    hosts = (new.host, *new.more_hosts) if new.more_hosts else ()
    return [NodeTable(run_key=key, number=number, host=host) for number, host in enumerate(hosts)]


def event_of(run: RunTable | None, kind: str, text: str, fields: Mapping[str, Any], at_s: float) -> EventTable:
    key, attempt = (None, None) if run is None else (run.key, run.attempt or None)
    told = json.dumps(redact_tree(fields))
    return EventTable(
        run_key=key, attempt=attempt, writer=HERE, kind=kind, text=redact(text), fields_json=told, at_s=at_s
    )


def failure_of(key: int, row: FailureRow) -> FailureTable:
    return FailureTable(
        run_key=key,
        attempt=row.attempt,
        kind=row.kind,
        message=row.message,
        hint=row.hint,
        source=row.source,
        stage=row.stage,
        step=row.step,
        traceback=row.traceback,
        facts_json=json.dumps(dict(row.facts)),
        at_s=row.at_s,
        is_first_cause=row.is_first_cause,
    )
