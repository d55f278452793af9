"""The page of one run as text: what `show` prints. Sections appear when they have something to say."""

from __future__ import annotations

from typing import Any

import click

from orchestrator.actions.history import RunPage, exported_path
from orchestrator.actions.log_text import inert
from orchestrator.actions.wishes import kill_in_s
from orchestrator.store.rows import IMPORTED, NO_SUPERVISOR, FailureRow, Kind, NodeRow, RunRow, State
from orchestrator.units import duration, is_told_newest, spoken
from orchestrator.verbs.held_page import TELLING, held_rows
from orchestrator.verbs.leads import can_be_decoded, newest_checkpoint, next_steps, place_of
from orchestrator.verbs.measured import decoded_mean, evaluations, fact, ladder, memory, newest_evaluations, speed
from orchestrator.verbs.table import Column, heading, pairs, table, wrapped
from orchestrator.verbs.words import MEAN, ago, clock, gib, grace_left, metric, number, state_and_step

_TRAINED = "acceptance_length: in training, where every draft follows the text's own tokens; "
_BEST = "best: most tokens accepted since the one before"  # as `remote.drafter.checkpoint.best_of` has it


def run_page(page: RunPage, *, width: int, now_s: float, only_failure: bool = False) -> list[str]:
    """Every section, or the failure alone with its whole traceback and numbers."""
    head = _head(page.run)
    if only_failure:
        told = [line for failure in page.failures for line in _failure(failure, is_whole=True)]
        return [*head, "", *(told or [_no_failure(page.run)])]
    sections = [
        _state(page, now_s),
        _failures(page),
        ladder(page, width) if page.rungs else [],
        _metrics(page, width),
        [*speed([page.throughput] if page.throughput else [], width=width), *_no_speed(page)],
        evaluations(page, width),
        [] if page.rungs else memory(page, width),
        _checkpoints(page),
        _attempts(page, width),
        _provenance(page),
        next_steps(page),
    ]
    return [*head, *(line for section in sections if section for line in ["", *section])]


def _no_failure(run: RunRow) -> str:
    """A job that never began has none; why it did not is the run's."""
    why = f"; it has failed: {inert(run.evidence or '-')}" if run.state is State.FAILED else ""
    return f"no failure is recorded for this run{why}"


def _head(run: RunRow) -> list[str]:
    title = heading(f"{run.id}  {run.recipe}, branch {run.branch}, on {' and '.join(run.hosts)}")
    is_of_branch = run.kind in (Kind.TRAIN, Kind.SMOKE)  # what a branch is for says nothing of an export of it
    return [title, *([inert(run.why)] if run.why and is_of_branch else [])]


def _state(page: RunPage, now_s: float) -> list[str]:
    run = page.run
    items = [("state", state_and_step(run) + (f", {run.stage}" if run.stage and not run.state.is_final else ""))]
    is_well = run.state is State.RUNNING and run.reason is None and run.evidence != NO_SUPERVISOR
    if not is_well or page.intents:  # that it has begun is no reason
        items.append(("because", run.evidence or "-"))
    if run.removed_s is not None:
        items.append(("in the bin", f"since {clock(run.removed_s)}; no list shows it"))
    if run.last_event_s is not None and not run.state.is_final:
        items.append(("newest word", ago(run.last_event_s, now_s)))
    if run.unreachable_since_s is not None and not run.state.is_final:
        since = f"since {clock(run.unreachable_since_s)}; the run itself may well go on"
        items.append(("unreachable", f"{since}; gone for good: draftyard mark {run.id} lost WHY"))
        items += [("", inert(line)) for line in page.silence.splitlines()]
    items += [(f"node {node.number}", _node(node, run)) for node in page.nodes]
    step = page.launch.get("checkpoint_step")
    of = f" of run {run.parent_run}" + ("" if step is None else f", step {step}") if run.parent_run else ""
    items.append(("kind", f"{run.kind}{of}"))
    items.append(("launched", f"{clock(run.created_s)} ({ago(run.created_s, now_s)})"))
    if run.started_s is not None:
        items.append(
            ("lasted", _lasted(page)) if run.state.is_final else ("runs for", duration(max(now_s - run.started_s, 0)))
        )
    if page.time_left_s is not None:
        items.append(("time left", f"about {duration(page.time_left_s)}"))
    items += [("wish", f"{intent.kind}, asked {ago(intent.asked_s, now_s)}") for intent in page.intents]
    left_s = kill_in_s(run, page.intents, page.spec, now_s)
    if left_s is not None:
        items.append(("grace", f"what still lives is {grace_left(left_s)}"))
    items += [
        ("progress", f"{row.what}: {number(row.done)} of {number(row.total)} {row.unit}")
        for row in _live_progress(page)
    ]
    optional = (("forced", run.forced_reason), ("tags", ", ".join(run.tags)), ("note", run.note))
    return pairs(items + [(name, text) for name, text in optional if text]) + _unread(page)


def _node(node: NodeRow, run: RunRow) -> str:
    """A host of several: how the newest attempt's part on it has ended, or that it cannot be asked."""
    if node.ended_attempt == run.attempt and node.end:
        return f"{node.host}: {node.end['verdict']['state']}, {inert(node.end['verdict']['evidence'])}"
    if node.unreachable_since_s is not None:
        return f"{node.host}: unreachable since {clock(node.unreachable_since_s)}"
    return f"{node.host}: goes on" if not run.state.is_final else node.host


def _unread(page: RunPage) -> list[str]:
    """What the job wrote and nobody could read: never silently dropped."""
    lines = sum(attempt.num_bad_lines for attempt in page.attempts)
    unknown = sum(attempt.num_unknown_events for attempt in page.attempts)
    told = [f"{lines:,} {'line' if lines == 1 else 'lines'} that could not be read"] if lines else []
    told += [f"{unknown:,} {'event' if unknown == 1 else 'events'} of a kind unknown here"] if unknown else []
    oddities = [item for item in page.events if item.kind in ("bad_line", "unknown")]
    newest = [f"the newest: {inert(oddities[-1].writer)}, {inert(oddities[-1].text)}"] if oddities else []
    if not told:  # a record that was cut off, or what an import passed over
        return [click.style(f"left out: {inert(item.text)}", fg="yellow") for item in oddities]
    run = page.run
    where = f"{place_of(run)}/attempts/" if run.folder else "its folder's attempts/"
    return [click.style(f"left out: {', '.join(told)}; see events.*.jsonl in {where}", fg="yellow"), *newest]


def _lasted(page: RunPage) -> str:
    """All attempts together, by the host's monotonic clock where it is known: wall clocks jump."""
    run, known_s = page.run, [item.duration_s for item in page.attempts if item.duration_s is not None]
    if known_s:
        in_attempts = f" in {len(known_s)} attempts" if len(known_s) > 1 else ""
        return f"{duration(sum(known_s))}{in_attempts}"
    return duration(max((run.ended_s or 0) - (run.started_s or 0), 0)) if run.started_s else "-"


def _failures(page: RunPage) -> list[str]:
    """The first cause of the newest failed attempt in full; `--oom` has the echoes."""
    if not page.failures or page.failures[0].attempt != page.run.attempt:
        return []
    lines = _failure(page.failures[0], is_whole=True)
    if len(page.failures) > 1:
        lines.append(f"{len(page.failures) - 1} more recorded: draftyard show {page.run.id} --oom")
    return lines


def _failure(failure: FailureRow, *, is_whole: bool) -> list[str]:
    where = [f"stage {failure.stage}"] if failure.stage else []
    where += [f"step {failure.step}"] if failure.step is not None else []
    facts = dict(failure.facts)
    match facts.get("frame"):
        case {"file": str(file), "line": int(line)} if (
            failure.traceback
        ):  # which has the whole path and the source line
            where.append(f"{file.rpartition('/')[2]}:{line}")
            del facts["frame"]
    items = [
        ("what", failure.message),
        ("hint", failure.hint),
        ("where", ", ".join([*where, f"attempt {failure.attempt}"])),
    ]
    plain = ((spoken(name), fact(name, value)) for name, value in facts.items() if name not in TELLING)
    items += [("told by", failure.source), *held_rows(facts), *plain]
    lines = [heading(f"Failure: {failure.kind}"), *pairs([(name, text) for name, text in items if text])]
    return lines + (
        ["", *map(inert, failure.traceback.rstrip().splitlines())] if is_whole and failure.traceback else []
    )


def _metrics(page: RunPage, width: int) -> list[str]:
    if not page.series:
        return []
    columns = [
        Column("metric", gives_way=True, least=12),
        *(Column(name, is_number=True) for name in (MEAN, "last", "min", "max", "at step")),
    ]
    shown = [row for row in page.series if row.name != "block_tokens_per_s" or page.throughput is None][:14]
    rows: list[list[str]] = [
        [
            row.name,
            "-" if is_told_newest(row.name) else metric(row.name, row.recent_mean),
            metric(row.name, row.last_value),
            metric(row.name, row.min_value),
            metric(row.name, row.max_value),
            str(row.last_step),
        ]
        for row in shown
    ]
    nans = [f"{row.name}: {row.num_nan} of {row.num_values} values are nan" for row in page.series if row.num_nan]
    more = len(page.series) - len(shown)
    rest = [f"{more} more: draftyard metrics {page.run.id}"] if more else []
    in_training = any(row.name == "acceptance_length" for row in shown)
    beware = wrapped(_TRAINED + _decoded(page), width) if in_training else []
    return [heading("Metrics"), *table(columns, rows, width=width), *nans, *beware, *rest]


def _decoded(page: RunPage) -> str:
    """Where the acceptance that counts stands, or how it is come by."""
    if any(decoded_mean(row) is not None for row in newest_evaluations(page)):
        return "decoded is below"
    can_be = can_be_decoded(page) and page.run.state.is_final
    return f"not decoded yet: draftyard evaluate {page.run.id}" if can_be else "nothing is decoded yet"


def _no_speed(page: RunPage) -> list[str]:
    return [click.style(inert(page.no_throughput), fg="yellow")] if page.no_throughput else []


def _checkpoints(page: RunPage) -> list[str]:
    if not page.checkpoints:
        return []
    rows = [
        (f"step {row.step}", f"{gib(row.size_bytes)}{'  best' if row.is_best else ''}") for row in page.checkpoints[-5:]
    ]
    best = [_BEST] if page.spec.get("entry") == "dflash" and any(row.is_best for row in page.checkpoints[-5:]) else []
    of = f", the newest {len(rows)} of {len(page.checkpoints)}" if len(rows) < len(page.checkpoints) else ""
    return [heading(f"Checkpoints{of}"), *pairs(rows), *best, f"newest{newest_checkpoint(page)}"]


def _attempts(page: RunPage, width: int) -> list[str]:
    if len(page.attempts) < 2:
        return []
    columns = [
        Column("attempt", is_number=True),
        Column("state"),
        Column("steps"),
        Column("lasted", is_number=True),
        Column("because", gives_way=True),
    ]
    rows = [
        [
            str(row.number),
            str(row.state),
            "none" if row.last_step is None else f"{row.first_step} … {row.last_step}",
            duration(row.duration_s),
            row.evidence,
        ]
        for row in page.attempts
    ]
    return [heading("Attempts"), *table(columns, rows, width=width)]


def _provenance(page: RunPage) -> list[str]:
    run = page.run
    git = (run.git_commit or "")[:12] + (" with uncommitted edits" if run.git_dirty else "")
    items = [("tree", (run.tree_hash or "")[:16]), ("git", git), ("fingerprint", run.fingerprint or "")]
    if run.kind == "export" and run.state is State.SUCCEEDED:
        items.append(("exported", f"{place_of(run)}/{exported_path(run)}"))
    items.append(("imported from" if run.host == IMPORTED else "folder", place_of(run) if run.folder else ""))
    untold = ["checkpoint_step"]  # stands on top
    untold += [] if page.spec.get("entry") == "dflash" else ["versions"]  # of libraries that a script may not use
    items += [(spoken(name), fact(name, value)) for name, value in page.launch.items() if name not in untold]
    told = pairs([(name, text) for name, text in items if text and text != "-"])
    return [heading("Provenance"), *told] if told else []


def _live_progress(page: RunPage) -> list[Any]:
    if page.run.state.is_final:
        return []
    newest = [row for row in page.progress if row.attempt == page.run.attempt][:1]
    return [row for row in newest if row.total is None or row.done < row.total]
