"""What each host of a job over several must have of its own, looked at before anything starts.

A work folder that no other host of the job has, the target where its recipe says it lies, converted where a conversion
is due (a rank among several cannot do that), and the files that a recipe names by an absolute path.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from orchestrator.actions.order import Settled, prepare_command
from orchestrator.actions.telling import Tell
from orchestrator.errors import DraftyardError
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, Kind, State
from orchestrator.workplace import run_script, sense_in
from remote.spec import DFlashSpec, parse

if TYPE_CHECKING:
    from orchestrator.actions.lots import Lot

# A mark of each host is put into its work folder, or the nearest one above that is there; whoever then finds another
# host's mark, and has as far to go from there, has that host's folder. It prints the rest of the way, or nothing where
# no mark can be put.
_WALK = 'd=$1; rest=; while [ ! -d "$d" ]; do rest=/${d##*/}$rest; d=${d%/*}; [ -n "$d" ] || d=/; done; '
_MARK = _WALK + '{ : >"$d/.$2.$3"; } 2>/dev/null && printf "%s\\n" "$rest"; exit 0'
_LOOK = _WALK + 'for mark in "$d/.$2".*; do [ -e "$mark" ] && printf "%s\\n" "${mark##*.}"; done; exit 0'
_TAKE = _WALK + 'rm -f "$d/.$2.$3"'


def refuse_shared_folders(lots: Sequence[Lot]) -> None:
    """Raises DraftyardError where two hosts have really one work folder: a share of the network, or one machine twice."""
    token, rests = f"draftyard-{secrets.token_hex(8)}", dict[int, str]()
    try:
        for number, lot in enumerate(lots):
            said = _asked(lot, _MARK, token, str(number))
            if said:
                rests[number] = said.strip("\n")
        for number, lot in enumerate(lots):
            for word in _asked(lot, _LOOK, token).split():
                other = int(word) if word.isdecimal() else number
                if other in rests and other != number and rests[other] == rests.get(number):
                    raise _shared(lots[min(number, other)], lots[max(number, other)])
    finally:
        for number, lot in enumerate(lots):
            with suppress(DraftyardError):
                _asked(lot, _TAKE, token, str(number))


def refuse_unready(lots: Sequence[Lot]) -> None:
    """Raises DraftyardError with every host that lacks something, and the command that makes it there."""
    faults = [fault for number, lot in enumerate(lots) for fault in _faults(lot, is_first=number == 0)]
    if faults:
        raise DraftyardError("each host of a job must have its target and data itself:\n" + "\n".join(faults))


def say_unprepared(reader: Reader, settled: Settled, tell: Tell) -> None:
    """A warning for each host on which, as far as the database knows, nobody has prepared what the job computes first."""
    spec = settled.spec
    if not isinstance(spec, DFlashSpec) or not settled.others:
        return
    name = spec.data.answers
    is_given = PurePosixPath(name).is_absolute() or f"recipes/data/{name}" in (
        entry.path for entry in settled.tree.entries
    )
    if is_given and spec.data.hidden_states == "online":
        return
    what = "hidden states" if is_given else "answers, which other cards may give otherwise,"
    for each in settled.each:
        if not _is_prepared(reader, spec, each.host.name):
            tell(
                f"warning: host {each.host.name}: no `prepare` of this branch is known there; its ranks make {what} first, "
                f"while the others wait\n  {prepare_command(each)}"
            )


def _is_prepared(reader: Reader, spec: DFlashSpec, host: str) -> bool:
    where = f"recipe:{spec.recipe} host:{host} status:{State.SUCCEEDED}"
    for run in reader.runs(where, kind=Kind.PREPARE, limit=20):
        with suppress(ValueError, TypeError, AttributeError):  # a spec of another version
            theirs = parse(reader.document(run.id, Document.SPEC) or "{}", run.id)
            if isinstance(theirs, DFlashSpec) and _prepared_by(theirs) == _prepared_by(spec):
                return True
    return False


def _prepared_by(spec: DFlashSpec) -> tuple[object, ...]:
    """What answers and hidden states are made of."""
    return (spec.target, spec.data.prompts, spec.data.answers, spec.data.row_tokens, spec.drafter.captured_layers)


def _faults(lot: Lot, *, is_first: bool) -> list[str]:
    spec, site = lot.settled.spec, lot.site
    if not isinstance(spec, DFlashSpec):
        return []
    files = [name for name in (spec.data.prompts, spec.data.answers) if PurePosixPath(name).is_absolute()]
    if spec.evaluate.at_end and is_first and PurePosixPath(spec.data.held_out).is_absolute():
        files.append(spec.data.held_out)
    wanted = (
        files[1:] if len(files) > 1 and files[0] == spec.data.prompts else files
    )  # with answers nobody reads prompts
    answer = run_script(site.shell, site.place, "ready", [site.place.work_dir, spec.target.source, *wanted])
    with sense_in(site.shell, "ready", answer):
        faults = [f"  host {lot.name}: {path} is not there" for path in map(str, answer["missing"])]
        if answer["target"] is not None:
            faults.append(f"  host {lot.name}: target.source: {answer['target']}")
        elif not answer["is_converted"] and not is_first:  # rank 0 converts it where it is
            name = spec.target.source.rpartition("/")[2]
            faults.append(f"  host {lot.name}: {name} is not converted there: {prepare_command(lot.settled)}")
    return faults


def _shared(first: Lot, second: Lot) -> DraftyardError:
    where = [f"{lot.name}:{lot.site.place.work_dir}" for lot in (first, second)]
    return DraftyardError(
        f"{where[0]} is one folder for two hosts of the job, as {where[1]} is the same: give each a work_dir of its own in "
        "hosts.yaml, on a disk of its own"
    )


def _asked(lot: Lot, script: str, *words: str) -> str:
    done = lot.site.shell.run(["sh", "-c", script, "sh", lot.site.place.work_dir, *words])
    return done.stdout.decode("utf-8", "replace")
