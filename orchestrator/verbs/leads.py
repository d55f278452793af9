"""The last section of a run's page: what a person may type now; and what a training came to, in two lines."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.actions.again import command_line, no_such_gpu, words_of_run
from orchestrator.actions.history import MEMORY_REASONS, RunPage, exported_path
from orchestrator.actions.log_text import inert
from orchestrator.store.rows import IMPORTED, Reason, RunRow, State
from orchestrator.verbs.measured import decoded_mean, newest_evaluations
from orchestrator.verbs.table import heading


def place_of(run: RunRow) -> str:
    """Its folder and where that lies: HOST:FOLDER, of an imported run a folder here."""
    return inert(run.folder or "") if run.host == IMPORTED else f"{run.host}:{run.folder}"


def newest_checkpoint(page: RunPage) -> str:
    """Where it lies: `on HOST: /path`, of an imported run a path here."""
    root = f"{page.run.folder}/" if page.run.folder else ""
    on_host = "" if page.run.host == IMPORTED else f" on {page.run.host}"
    return f"{on_host}: {root}{page.checkpoints[-1].path}"


def in_short(page: RunPage) -> list[str]:
    """What the trained drafter brings by decoding and where its newest checkpoint lies; nothing where none was decoded."""
    rows = {
        (row.protocol.get("drafter"), row.protocol.get("method")): row
        for row in reversed(newest_evaluations(page))  # of several trees the first one, the smallest
    }
    chain, tree = rows.get(("trained", "chain")), rows.get(("trained", "tree"))
    brought = None if chain is None else decoded_mean(chain)
    if chain is None or brought is None:
        return []
    mean, _, interval = brought.partition(" ")
    told = f"the drafter brings {mean} tokens a round {interval}".rstrip()
    if tree is not None and (grown := decoded_mean(tree)) is not None:
        told += f", as a tree of {tree.protocol.get('budget', '?')} {grown}"
    if ("untrained", "chain") in rows and (bare := decoded_mean(rows["untrained", "chain"])) is not None:
        told += f"; untrained {bare.split()[0]}"
    lines = [told]
    if page.checkpoints:
        lines.append(f"its checkpoint, of step {page.checkpoints[-1].step},{newest_checkpoint(page)}")
    return lines


def next_steps(page: RunPage) -> list[str]:
    """What a person may type now, as lines of their own."""
    run = page.run
    if run.removed_s is not None:
        commands = [f"draftyard restore {run.id}    # out of the bin", f"draftyard logs {run.id}"]
    elif run.host == IMPORTED:
        commands = _of_imported(page)
    elif not run.state.is_final:
        commands = [f"draftyard logs {run.id} -f", f"draftyard watch {run.id}", f"draftyard stop {run.id}"]
    elif run.state is State.SUCCEEDED:
        commands = _of_success(page)
    else:
        commands = _of_failure(page)
    return [heading("Next"), *(f"  {command}" for command in commands)]


def can_be_decoded(page: RunPage) -> bool:
    """Whether `evaluate` and `export` take it: a script's checkpoints are its own business, an imported run has no host."""
    is_ours = page.spec.get("entry") == "dflash" and page.run.kind == "train" and page.run.host != IMPORTED
    return bool(page.checkpoints) and is_ours


def _of_success(page: RunPage) -> list[str]:
    run = page.run
    logs = f"draftyard logs {run.id}"
    match run.kind:
        case "train":
            named = " loss" if any(row.name == "loss" for row in page.series) else ""
            metrics = [f"draftyard metrics {run.id}{named}"] if page.series else []
            commands = [f"draftyard watch {run.id}", f"draftyard show {run.id}    # this page", *metrics, logs]
            return [*commands, *_comparing(page), *_with_checkpoint(page), *_another(page), "draftyard ls"]
        case "export":
            return [f"draftyard pull {run.id}", *_loading(f"pulled/{run.id}/export", page.spec)]
        case "prepare":
            words = words_of_run(run, page.launch)
            answers = f"draftyard pull {run.id} --artifacts    # the answers"
            return [command_line("smoke", words), command_line("launch", words), answers, logs]
        case "smoke":
            return [command_line("launch", words_of_run(run, page.launch)), logs]
        case "evaluate" if run.parent_run:
            return [f"draftyard show {run.parent_run}", f"draftyard export {run.parent_run}", logs]
    return [logs]


def _of_failure(page: RunPage) -> list[str]:
    """Of a run that was stopped as well, or is lost."""
    run = page.run
    has_begun = run.attempt > 0
    commands = [f"draftyard logs {run.id}"] if has_begun else []
    if run.reason in MEMORY_REASONS and page.spec.get("entry") == "dflash":  # of a script nothing is predicted
        commands = [f"draftyard show {run.id} --oom    # what would fit", *commands]
    if has_begun and run.kind == "train":
        start = "its newest checkpoint" if page.checkpoints else "step 1: no checkpoint is known"
        given = " and ".join(inert(name) for name in words_of_run(run, page.launch).env)
        values = f"the same values, {given} as set here" if given else "the same values"
        commands.append(f"draftyard resume {run.id}    # {values}, from {start}")
    if run.reason == Reason.MISSING_DEPENDENCY and not has_begun:  # until then the same launch fails again
        commands += [shlex.join(["draftyard", "doctor", inert(host), "--fix"]) for host in run.hosts]
    return [*commands, *_with_checkpoint(page), *_anew(page)]


def _with_checkpoint(page: RunPage) -> list[str]:
    run, commands = page.run, list[str]()
    if can_be_decoded(page):
        commands += [f"draftyard evaluate {run.id}", f"draftyard export {run.id}"]
    if page.checkpoints and run.kind == "train":
        commands.append(f"draftyard pull {run.id}    # its newest checkpoint, verified")
    return commands


def _another(page: RunPage) -> list[str]:
    words = replace(words_of_run(page.run, page.launch), branch="BRANCH")
    branches = f"{shlex.join(['draftyard', 'recipe', 'show', inert(page.run.recipe)])}    # names its branches"
    return [branches, f"{command_line('launch', words)}    # the next experiment"]


def _comparing(page: RunPage) -> list[str]:
    """With the run that its speed is held against: the newest earlier success of its recipe, where there is one."""
    there = None if page.throughput is None else page.throughput.there
    return [] if there is None else [f"draftyard compare {page.run.id} {there.run_id}"]


def _of_imported(page: RunPage) -> list[str]:
    """What needs no host: nobody knows one that has it."""
    run = page.run
    commands = [f"draftyard watch {run.id}", f"draftyard logs {run.id}"]
    commands += [f"draftyard metrics {run.id}"] if page.series else []
    if run.state is State.SUCCEEDED and run.kind == "export":
        commands += _loading(f"{place_of(run)}/{exported_path(run)}", page.spec)
    if page.checkpoints and run.kind == "train" and page.spec.get("entry") == "dflash":
        where = f"{run.folder}/{page.checkpoints[-1].path}"
        commands.append(f"# its checkpoint is {inert(where)}; to use it, type evaluate or export where it was launched")
    if run.state is not State.SUCCEEDED:
        again = shlex.join(["draftyard", "import", inert(run.folder or "FOLDER")])
        commands.append(f"{again}    # again, once a newer copy lies there")
    return commands


def _anew(page: RunPage) -> list[str]:
    """The command that started it, for who wants to change something first."""
    run, verb = page.run, {"train": "launch", "smoke": "smoke", "prepare": "prepare"}.get(page.run.kind)
    if run.kind in ("evaluate", "export") and run.parent_run:
        return [f"draftyard {run.kind} {run.parent_run}    # anew"]
    if verb is None:
        return []
    words, remark = words_of_run(run, page.launch), "anew"
    if run.attempt == 0 and any(no_such_gpu(word) in (run.evidence or "") for word in words.gpus):
        words, remark = replace(words, gpus=()), "anew, without --gpus"  # the same would be refused again
    line, key = command_line(verb, words), _key_at_fault(page)
    if key is not None:
        kept = [word for word in words.overrides if not word.startswith(f"{key}=")]
        line = command_line(verb, replace(words, overrides=(*kept, f"{key}=VALUE")))
        return [f"{line}    # anew, with another value: with this one it fails again"]
    return [f"{line}    # {remark}; --set KEY=VALUE changes a value"]


def _key_at_fault(page: RunPage) -> str | None:
    """The value of the recipe that the failure's message begins with, `target.source is …`; None where it is of no value."""
    for failure in page.failures[:1]:
        found = re.match(r"(\w+(?:\.\w+)+) is ", failure.message)
        value: Any = page.spec
        for name in found[1].split(".") if found else ():
            value = value.get(name) if isinstance(value, Mapping) else None
        if found and failure.attempt == page.run.attempt and value is not None:
            return found[1]
    return None


def _loading(folder: str, spec: Mapping[str, Any]) -> list[str]:
    """What loads a pulled drafter: z-lab's package; a server, where the target is a folder that servers read."""
    lines = ["pip install dflash    # where the drafter is to be loaded, with torch and transformers"]
    lines += [f"""python -c "from dflash import DFlashDraftModel; DFlashDraftModel.from_pretrained('{folder}')\""""]
    match spec:
        case {"target": {"source": str(source)}, "drafter": {"block_size": int(size)}} if ":" not in source:
            config = json.dumps({"method": "dflash", "model": folder, "num_speculative_tokens": size - 1})
            lines.append(shlex.join(["vllm", "serve", inert(source), "--speculative-config", config]))
    return lines
