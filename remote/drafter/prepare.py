"""The job `prepare`: the target answers the prompts, and its hidden states over the answers are kept.

Answers come from the recipe's data folder where the ones lying there were made as the recipe says (or
are a user's own rows, which say nothing), else from `<work>/cache/answers`, where this job leaves what
it makes, resumable and whole. `load_rows` is what training calls: it makes whatever is still missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from remote.drafter.answers import Answer, AnswerFile, Protocol, answer_chats, answer_line, protocol_of
from remote.drafter.data import Chat, Dataset, HiddenSource, lines_of, read_chats, row_of, tokenise
from remote.drafter.hidden import OnlineHidden, cached_hidden, forecast_bytes
from remote.drafter.target import Target
from remote.drafter.target_files import Progress, silent
from remote.drafter.turns import taking_turns
from remote.plan.sizes import is_taught_ahead
from remote.spec import DFlashSpec


@dataclass(frozen=True)
class Prepared:
    """What `prepare` left on the host."""

    answers: Path
    summary: str  # one line for a person
    hidden_bytes: int  # what the hidden states take on disk; 0 where training computes them itself


def prepare(spec: DFlashSpec, target: Target, *, data_dir: Path, cache: Path, progress: Progress = silent) -> Prepared:
    """Makes every answer and every hidden state that is missing. Errors: see `load_rows`."""
    dataset = load_rows(spec, target, data_dir=data_dir, cache=cache, progress=progress)
    is_cached = spec.data.hidden_states == "cached"
    layers = spec.drafter.captured_layers
    return Prepared(
        answers=answers_path(spec, target, data_dir=data_dir, cache=cache),
        summary=dataset.summary(),
        hidden_bytes=forecast_bytes(dataset.documents, target, layers, is_taught_ahead=is_taught_ahead(spec))
        if is_cached
        else 0,
    )


def load_rows(
    spec: DFlashSpec,
    target: Target,
    *,
    data_dir: Path,
    cache: Path,
    progress: Progress = silent,
    has_states: bool = True,
) -> Dataset:
    """The training rows of a recipe; `data_dir` holds its JSONL files, `cache` is `<work>/cache`.

    Without `has_states` the rows are tokens alone, and nothing of the target outlives the call.

    ValueError, one line: a wrong row (file, line, reason), a damaged shard, no room on the disk.
    """
    chats = read_chats(answers_path(spec, target, data_dir=data_dir, cache=cache, progress=progress))
    documents = tokenise(chats, target, row_tokens=spec.data.row_tokens)
    layers = spec.drafter.captured_layers
    hidden: HiddenSource | None = OnlineHidden(target, documents, layers) if has_states else None
    if has_states and spec.data.hidden_states == "cached":
        hidden = cached_hidden(
            documents, target, layers, cache=cache, progress=progress, is_taught_ahead=is_taught_ahead(spec)
        )
    return Dataset(documents, hidden, row_tokens=spec.data.row_tokens, seed=spec.train.seed)


def answers_path(spec: DFlashSpec, target: Target, *, data_dir: Path, cache: Path, progress: Progress = silent) -> Path:
    """The file with the target's own answers: the recipe's, else the one in the cache, made now if need be."""
    data, protocol = spec.data, _protocol(spec, target)
    shipped = _shipped(spec, protocol, data_dir)
    if shipped is not None:
        return shipped
    prompts = read_chats(data_dir / data.prompts)
    kept = _kept(protocol, target, prompts, cache)
    if kept.is_file():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    waiting = partial(progress, "waiting for another job that makes these answers", done=0, total=1, unit="job")
    with taking_turns(kept.with_suffix(".lock"), waiting):
        if not kept.is_file():
            _answer_all(prompts, target, protocol, into=AnswerFile(kept), report=(data.answer_batch, progress))
    return kept


def found_answers(spec: DFlashSpec, target: Target, *, data_dir: Path, cache: Path) -> Path | None:
    """The same file where there is one; makes nothing."""
    protocol = _protocol(spec, target)
    shipped = _shipped(spec, protocol, data_dir)
    if shipped is not None or not (data_dir / spec.data.prompts).is_file():
        return shipped
    kept = _kept(protocol, target, read_chats(data_dir / spec.data.prompts), cache)
    return kept if kept.is_file() else None


def _protocol(spec: DFlashSpec, target: Target) -> Protocol:
    data = spec.data
    return protocol_of(target, temperature=data.answer_temperature, max_tokens=data.answer_tokens, seed=spec.train.seed)


def _shipped(spec: DFlashSpec, protocol: Protocol, data_dir: Path) -> Path | None:
    """The recipe's own file, where it was made as the recipe says."""
    path = data_dir / spec.data.answers
    return path if path.is_file() and _is_of(path, protocol) else None


def _kept(protocol: Protocol, target: Target, prompts: Sequence[Chat], cache: Path) -> Path:
    return cache / "answers" / f"{_name(protocol, target, prompts)}.jsonl"


def _is_of(path: Path, protocol: Protocol) -> bool:
    """Whether every row was answered this way; a row that does not say how is a user's own and is taken."""
    expected = asdict(protocol)
    rows = [row_of(line, where) for where, line in lines_of(path) if '"protocol"' in line]
    return all(row.get("protocol", expected) == expected for row in rows if isinstance(row, dict))


def _answer_all(
    prompts: Sequence[Chat], target: Target, protocol: Protocol, *, into: AnswerFile, report: tuple[int, Progress]
) -> None:
    batch, progress = report
    missing = [chat for chat in prompts if not into.has(chat)]
    done = len(prompts) - len(missing)

    def on_done(index: int, answer: Answer) -> None:
        nonlocal done
        into.add(missing[index], answer_line(target, missing[index], answer, protocol))
        done += 1
        progress("answering prompts", done=done, total=len(prompts), unit="prompts")

    progress("answering prompts", done=done, total=len(prompts), unit="prompts")
    answer_chats(target, missing, protocol, batch=batch, on_done=on_done)
    into.finish(prompts)


def _name(protocol: Protocol, target: Target, prompts: Sequence[Chat]) -> str:
    facts = [asdict(protocol), target.identity, [list(chat.messages) for chat in prompts]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
