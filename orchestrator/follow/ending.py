"""The last word on an attempt: its cause, what its cards still hold, whether another attempt is wished.

Of a run over several hosts each host's part ends by itself, and the run with the last of them; see `nodes`.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.errors import StoreError
from orchestrator.failure import UNEXPLAINED, Failure, Findings, Told, causes
from orchestrator.follow import nodes
from orchestrator.follow.complaints import Complaints
from orchestrator.follow.desk import Desk
from orchestrator.follow.status import Rules, Verdict, proof
from orchestrator.follow.streams import AttemptPlace, torn_bytes, unread_names
from orchestrator.observe import Evidence
from orchestrator.redact import redact, redact_tree
from orchestrator.store.logs import STREAMS, name_of_log
from orchestrator.store.rows import Document, FailureRow, Kind, RunRow, State
from orchestrator.units import counted
from remote.allocator import grows_segments
from remote.hiding import HIDDEN
from remote.rundir import writer_of

LOG_TAIL_BYTES = 512 * 1024
LIFE = ("start_timeout_s", "stall_factor", "grace_s", "retries", "retry_on")  # what the recipe's life decides here


def rules_of(desk: Desk, run: RunRow) -> Rules:
    spec = json.loads(desk.reader.document(run.id, Document.SPEC) or "{}")
    life = spec.get("life") or {}
    known = {name: life[name] for name in LIFE if name in life}
    return Rules(is_script=spec.get("entry") == "script" or run.kind == "script", **known)


def writers(seen: Evidence) -> tuple[str, ...]:
    """Whose events lie in this host's folder."""
    return tuple(named[0] for file in seen.files if (named := writer_of(file.name)) is not None)


def end_part(desk: Desk, run: RunRow, seen: Evidence, verdict: Verdict) -> None:
    """Keeps how the run has ended on this host; with the last of them the run has ended."""
    _hide(desk, run, seen)
    end = nodes.End(run.node, run.host, verdict, seen.last_words(), writers(seen), _proof(desk, run, seen, verdict))
    desk.store.end_node(run.id, run.node, run.attempt, end.dump())
    _say_torn(desk, run, seen)
    conclude_all(desk, run)


def conclude_all(desk: Desk, run: RunRow) -> None:
    ends = nodes.all_ended(desk.reader, run)
    if ends is None:
        return
    is_asked = any(wish.kind == "stop" for wish in desk.reader.intents(run.id))
    verdict, chosen = nodes.whole(ends, nodes.last_words(desk.reader, run), stop_was_asked=is_asked)
    view = replace(run, host=chosen.host, node=chosen.number)
    seen = replace(Evidence.nothing(), exit=dict(chosen.exit))
    end_with_cause(desk, view, seen, verdict, may_retry=True)


def end_with_cause(desk: Desk, run: RunRow, seen: Evidence, verdict: Verdict, *, may_retry: bool = False) -> None:
    """The last word on the attempt, unless it had ended already or a newer one was made meanwhile.

    Only a store that cannot be written holds it back: a run without its cause has ended all the same.
    """
    _hide(desk, run, seen)
    first = _explained(desk, run, seen, is_stop=verdict.state is State.STOPPED) if verdict.needs_cause else None
    reason, evidence = verdict.reason, verdict.evidence
    if first is not None:
        if first.reason is not None and verdict.state is not State.STOPPED:
            reason = first.reason
        evidence = f"{evidence}; {redact(first.message)}"
    held = "" if run.more_hosts else _proof(desk, run, seen, verdict)  # else each part has said it
    if held:
        evidence = f"{evidence}; {held}"
    has_ended = desk.store.set_state(
        run.id,
        verdict.state,
        reason=reason,
        evidence=evidence,
        ended_s=verdict.ended_s,
        attempt=run.attempt,
        wish="retry" if may_retry and _wants_retry(desk, run, verdict.state, reason) else None,
    )
    if has_ended:
        _say_torn(desk, run, seen)


def hide(desk: Desk, run: RunRow, seen: Evidence) -> None:
    """Whoever reads the logs here need not know a value to be kept from it. Raises OSError where that cannot be written."""
    told = seen.last_words()
    if "hidden" in told:
        places = {name_of_log(stream, run.node): _spans(told, stream) for stream in STREAMS}
        desk.store.logs.hide(run.id, run.attempt, places)


def _hide(desk: Desk, run: RunRow, seen: Evidence) -> None:
    with contextlib.suppress(OSError):  # a full disk here holds up no end
        hide(desk, run, seen)


def _explained(desk: Desk, run: RunRow, seen: Evidence, *, is_stop: bool) -> Failure | None:
    """Keeps why it ended so; the first cause. A job wrote that evidence: a fault over it is told, and stands for the cause."""
    try:
        failures = causes(_findings(desk, run, seen.last_words()))
        return _kept(desk, run, failures, is_stop=is_stop)
    except (StoreError, sqlite3.Error):  # the verdict wants the store as well: both at the next look
        raise
    except Exception as error:  # noqa: BLE001  nobody foresaw it, and the verdict stands without
        Complaints().add(desk, run.id, error)
        message = f"the cause could not be told: {type(error).__name__}: {error}".splitlines()[0]
        hint = "a fault of draftyard's own: its traceback is among the run's events; the log holds what the job said"
        return _kept(desk, run, [Failure(UNEXPLAINED, message, hint, "follower")], is_stop=is_stop)


def _kept(desk: Desk, run: RunRow, failures: Sequence[Failure], *, is_stop: bool) -> Failure | None:
    """The first of those that are kept. What nothing explains is no news of a run that was told to end."""
    kept = [item for item in failures if not (is_stop and item.kind == UNEXPLAINED)]
    if kept:
        desk.store.replace_failures(run.id, run.attempt, [_failure_row(run, item, i) for i, item in enumerate(kept)])
    return kept[0] if kept else None


def _say_torn(desk: Desk, run: RunRow, seen: Evidence) -> None:
    """A record cut off by a kill, a full disk or a disk pulled out too early."""
    for writer, size in torn_bytes(desk.store, AttemptPlace(run.id, run.attempt, ""), seen.files).items():
        text = f"the last record of {writer} is cut off after {size} bytes; what it said is lost"
        desk.store.add_event(run.id, "bad_line", text)
    unread = unread_names(seen.files)
    if unread:
        text = f"{counted(len(unread), 'events file')} not read, {unread[0]!a} first: no Reporter takes such a writer"
        desk.store.add_event(run.id, "bad_line", text)


def _proof(desk: Desk, run: RunRow, seen: Evidence, verdict: Verdict) -> str:
    """Memory is back when the driver says so, not when a process is gone: it may hang in the driver, or leave a child."""
    own = desk.reader.gpus_by_host(run.id).get(run.host, ())
    return proof(seen.exit, own, is_stop=verdict.state is State.STOPPED)


def _wants_retry(desk: Desk, run: RunRow, state: State, reason: str | None) -> bool:
    """The recipe's own wish: so many more attempts, for these reasons (`exit` also means exit:3)."""
    if state not in (State.FAILED, State.LOST) or run.kind != Kind.TRAIN:  # in a reboot it is lost
        return False
    rules = rules_of(desk, run)
    word = (reason or "").split(":")[0]
    return run.attempt <= rules.retries and word in rules.retry_on


def _findings(desk: Desk, run: RunRow, exit_file: Mapping[str, Any]) -> Findings:
    told = [
        Told(writer=row.writer, at_s=row.at_s, fields=row.fields)
        for row in desk.reader.events(run.id, kinds=["failure"])
        if row.attempt == run.attempt
    ]
    spec = json.loads(desk.reader.document(run.id, Document.SPEC) or "{}")
    return Findings(
        told=told,
        stderr=_tail(desk, run, "stderr", exit_file),
        stdout=_tail(desk, run, "stdout", exit_file),
        exit_file=exit_file,
        grows_segments=grows_segments(spec.get("env") or {}),
    )


def _tail(desk: Desk, run: RunRow, stream: str, exit_file: Mapping[str, Any]) -> str:
    """Its newest end, without the secrets that are known here, and without those that its host saw in it."""
    logs, name = desk.reader.logs, name_of_log(stream, run.node)
    start = max(0, logs.size_bytes(run.id, run.attempt, name) - LOG_TAIL_BYTES)
    content = logs.read(run.id, run.attempt, name, offset=start, size=LOG_TAIL_BYTES)
    for begin, end in reversed(_merged(_spans(exit_file, stream))):  # from the end: what is put in has another length
        if end > start:
            content = content[: max(0, begin - start)] + HIDDEN.encode() + content[end - start :]
    return content.decode("utf-8", "replace")


def _spans(exit_file: Mapping[str, Any], stream: str) -> list[tuple[int, int]]:
    """First bytes and ends, rising; of an exit file that a supervisor wrote whole, or of one from anywhere."""
    hidden = exit_file.get("hidden")
    told = hidden.get(stream) if isinstance(hidden, dict) else None
    spans = [span for span in told if isinstance(span, list) and len(span) == 2] if isinstance(told, list) else []
    return sorted((a, b) for a, b in spans if isinstance(a, int) and isinstance(b, int) and 0 <= a < b)


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of one line share their end."""
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        if found and begin < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _failure_row(run: RunRow, found: Failure, place: int) -> FailureRow:
    return FailureRow(
        run_id=run.id,
        attempt=run.attempt,
        kind=found.kind,
        message=redact(found.message),
        hint=found.hint,
        source=found.source,
        stage=found.stage,
        step=found.step,
        traceback=redact(found.traceback),
        facts=redact_tree(found.facts),
        at_s=found.at_s,
        is_first_cause=place == 0,
    )
