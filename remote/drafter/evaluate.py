"""Acceptance measured by really decoding held-out prompts: plain once, then drafted by chain and by tree.

The plain decode is made once and serves every drafter: as the clock, as the text that drafting must
reproduce, and as the answers of the offline estimates. A drafted text may differ by near ties alone, which are
counted and explained (`lossless`); any other is counted as a mismatch. The untrained drafter only says what training
was worth: its rounds are replayed along the plain text, which gives the same as decoding but for near ties, for a
fraction of the passes, and no clock. Each row is told when it is known, so that an end in the middle keeps those before.
Each distinct prompt counts once. Prompts whose plain text runs in circles, or is a single token that leaves
nothing to draft, are counted and left out everywhere.

Every row carries how it was measured; rows of different protocols are not comparable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from remote.drafter.answers import protocol_of
from remote.drafter.data import Chat
from remote.drafter.decode import Decoded, Setting, decode_chain, decode_plain, decode_tree, replay_chain
from remote.drafter.estimate import Estimates, estimate
from remote.drafter.export import load_exported
from remote.drafter.interval import Interval, bootstrap, bootstrap_sums, difference
from remote.drafter.library_decoder import LibraryDecoder
from remote.drafter.lossless import difference_from_plain
from remote.drafter.model import DFlashDrafter
from remote.drafter.target import Target
from remote.drafter.target_files import Progress, silent
from remote.drafter.workbench import Choices, fresh_drafter
from remote.spec import DFlashSpec

REPLAYED = "replayed along the plain text"  # how rounds were measured that no decoding made
_LONGEST_PERIOD = 8  # tokens of the n-gram that a degenerate text repeats


_T = TypeVar("_T")


@dataclass(frozen=True)
class EvaluationRow:
    """One way of decoding, or one set of estimates."""

    protocol: dict[str, Any]
    values: dict[str, Any]
    notes: tuple[str, ...] = ()  # every prompt left out, or every difference between a drafted text and the plain one


def _untold(row: EvaluationRow) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Evaluation:
    rows: tuple[EvaluationRow, ...]
    summary: str  # for a person

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of every row."""
        return tuple(note for row in self.rows for note in row.notes)


@dataclass(frozen=True)
class _Case:
    """One held-out prompt that counts, with the target's own text."""

    number: int  # its place among the distinct prompts of the file, from 1
    prompt: list[int]
    setting: Setting
    plain: Decoded


@dataclass(frozen=True)
class _Run:
    """One way of drafting for all cases."""

    drafter: str  # trained or untrained
    method: str  # chain or tree
    budget: int | None
    rounds: list[tuple[int, ...]]  # of each prompt: tokens that each of its rounds committed
    texts: list[Decoded] | None  # None where rounds were replayed along the plain text

    @property
    def lengths(self) -> list[float]:
        """Mean acceptance length of each prompt, in tokens with the bonus."""
        return [sum(accepted) / len(accepted) for accepted in self.rounds]

    @property
    def name(self) -> str:
        return _name(self.drafter, self.budget, is_replayed=self.texts is None)


@dataclass
class _Bench:
    """What every part of one evaluation uses."""

    target: Target
    spec: DFlashSpec
    progress: Progress
    num_duplicates: int = 0
    num_degenerate: int = 0
    num_undrafted: int = 0
    notes: list[str] = field(default_factory=list)  # of the row in the making
    rows: list[EvaluationRow] = field(default_factory=list)

    def tell(self, row: EvaluationRow, on_row: Callable[[EvaluationRow], None]) -> None:
        """The row with the notes that were made on the way to it."""
        self.rows.append(replace(row, notes=tuple(self.notes)))
        self.notes.clear()
        on_row(self.rows[-1])

    def telling(self, way: str, items: Sequence[_T]) -> Iterator[_T]:
        """The items, one text each, told as they are done: each way by itself, as a text costs each another time.

        The first word is said at once: what warms a way up before its first text can take long as well.
        """
        say = partial(self.progress, f"decoding: {way}", total=len(items), unit="texts")
        if items:
            say(done=0)
        return _each(items, say)


def _each(items: Sequence[_T], say: Callable[..., None]) -> Iterator[_T]:
    for done, item in enumerate(items, 1):
        yield item
        say(done=done)


def _name(drafter: str, budget: int | None, *, is_replayed: bool = False) -> str:
    """`trained chain`, `trained tree of 16 nodes`, `untrained chain, replayed`."""
    way = f"{drafter} chain" if budget is None else f"{drafter} tree of {budget} nodes"
    return f"{way}, replayed" if is_replayed else way


def evaluate(
    drafter: DFlashDrafter,
    target: Target,
    spec: DFlashSpec,
    *,
    prompts: Sequence[Chat],
    progress: Progress = silent,
    on_row: Callable[[EvaluationRow], None] = _untold,
) -> Evaluation:
    """Decodes the first `evaluate.num_prompts` distinct ones of `prompts` in every way, and estimates the rest.

    Trees are decoded for every budget on a GPU; on a processor, where a wide one costs minutes, for the smallest.
    With `evaluate.compare_untrained` a chain is also replayed with the same drafter before its first step.
    `on_row` hears of each row when it is known; a row is compared with those before it alone.
    """
    budgets = sorted(spec.evaluate.tree_budgets)
    decoded = budgets if target.device.type == "cuda" else budgets[:1]
    chats, num_duplicates = _distinct(prompts, spec.evaluate.num_prompts)
    bench = _Bench(target, spec, progress, num_duplicates=num_duplicates)
    cases = _plain_cases(bench, chats)
    bench.tell(_plain_row(bench, cases), on_row)
    runs = list[_Run]()
    if spec.evaluate.compare_untrained:
        runs.append(_replayed(bench, cases, before_training(drafter, spec)))
        bench.tell(_run_row(bench, cases, runs[-1], runs), on_row)
    for budget in (None, *decoded):
        runs.append(_run(bench, cases, drafter, ("trained", budget)))
        bench.tell(_run_row(bench, cases, runs[-1], runs), on_row)
    texts = [(case.prompt, case.plain) for case in cases]
    estimates = estimate(drafter, target, texts, budgets=budgets or [1], progress=progress)
    bench.tell(_offline_row(bench, cases, estimates), on_row)
    return Evaluation(tuple(bench.rows), _summary(bench, cases, runs))


def _distinct(prompts: Sequence[Chat], limit: int) -> tuple[list[Chat], int]:
    """The first `limit` prompts, each where it first stands, and how many were passed over on the way to the last.

    One decoded twice would make an interval look surer than it is.
    """
    first: dict[str, Chat] = {}
    num_duplicates = 0
    for chat in prompts:
        if len(first) == limit:
            break
        key = json.dumps(chat.messages)
        num_duplicates += key in first
        first.setdefault(key, chat)
    return list(first.values()), num_duplicates


def is_degenerate(ids: Sequence[int]) -> bool:
    """Whether the text ends in one n-gram (n ≤ 8) said again and again: over half of it and at least three times."""
    for period in range(1, _LONGEST_PERIOD + 1):
        run = 0
        while run + period < len(ids) and ids[-1 - run] == ids[-1 - run - period]:
            run += 1
        if run + period >= max(3 * period, len(ids) / 2, 12):
            return True
    return False


def _plain_cases(bench: _Bench, chats: Sequence[Chat]) -> list[_Case]:
    cases, told = list[_Case](), bench.telling("plain", chats)
    for chat in chats[:1]:
        decode_plain(bench.target, bench.target.prompt_ids(chat.messages), _warming(bench))
    for number, chat in enumerate(told, 1):
        choices = bench.spec.evaluate
        setting = Setting(choices.max_new_tokens, choices.temperature, seed=bench.spec.train.seed + number)
        prompt = bench.target.prompt_ids(chat.messages)
        plain = decode_plain(bench.target, prompt, setting)
        reason = None
        if is_degenerate(plain.ids):
            bench.num_degenerate += 1
            reason = "its text repeats itself"
        elif not plain.accepted:
            bench.num_undrafted += 1
            reason = "its text is one token, and nothing is drafted"
        if reason is not None:
            bench.notes.append(f"prompt {number} ({chat.family or chat.where}) is left out: {reason}")
        else:
            cases.append(_Case(number, prompt, setting, plain))
    return cases


def _warming(bench: _Bench) -> Setting:
    """Two rounds that count nowhere: the first ones load kernels and make room, and no way's clock should have that."""
    choices = bench.spec.evaluate
    return Setting(min(choices.max_new_tokens, bench.spec.drafter.block_size + 2), choices.temperature)


def _run(bench: _Bench, cases: Sequence[_Case], drafter: DFlashDrafter, way: tuple[str, int | None]) -> _Run:
    name, budget = way
    decode: Callable[..., Decoded] = decode_chain
    options: dict[str, Any] = {}
    if budget is not None:
        decode, options = decode_tree, {"budget": budget}
    texts, told = list[Decoded](), bench.telling(_name(name, budget), cases)
    for case in cases[:1]:
        decode(bench.target, drafter, case.prompt, _warming(bench), **options)
    for case in told:
        texts.append(decode(bench.target, drafter, case.prompt, case.setting, **options))
    rounds = [text.accepted for text in texts]
    return _Run(name, "chain" if budget is None else "tree", budget, rounds, texts)


def _replayed(bench: _Bench, cases: Sequence[_Case], drafter: DFlashDrafter) -> _Run:
    told = bench.telling(_name("untrained", None, is_replayed=True), cases)
    rounds = [replay_chain(bench.target, drafter, case.prompt, case.plain, case.setting) for case in told]
    return _Run("untrained", "chain", None, rounds, texts=None)


def before_training(drafter: DFlashDrafter, spec: DFlashSpec) -> DFlashDrafter:
    """The drafter as it was before its first step: freshly drawn, or the one that training went on from."""
    weight = next(drafter.parameters())  # drawn where training drew it: another device or dtype is another draw
    choices = Choices(weight.dtype, drafter.backend, drafter.is_fused, reasons={})
    fresh = fresh_drafter(spec, choices, device=weight.device)
    if spec.drafter.init_from is not None:
        load_exported(Path(spec.drafter.init_from), fresh, spec.target)
    return fresh


def _plain_row(bench: _Bench, cases: Sequence[_Case]) -> EvaluationRow:
    texts = [case.plain for case in cases]
    values = {"num_tokens": sum(len(text.ids) for text in texts)} | _tokens_per_s(texts).values("tokens_per_s")
    return EvaluationRow(_protocol(bench, cases, method="plain"), values)


def _run_row(bench: _Bench, cases: Sequence[_Case], run: _Run, runs: Sequence[_Run]) -> EvaluationRow:
    values: dict[str, Any] = bootstrap(run.lengths).values("acceptance_length")
    values |= {
        "acceptance_at": _acceptance_at(run.rounds, bench.spec.drafter.block_size),
        "num_rounds": sum(map(len, run.rounds)),
    }
    way: dict[str, Any] = {"method": run.method, "budget": run.budget, "drafter": run.drafter}
    if run.texts is None:
        return EvaluationRow(_protocol(bench, cases, **way, rounds=REPLAYED), values)
    values["num_tokens"] = sum(len(text.ids) for text in run.texts)
    values |= _tokens_per_s(run.texts).values("tokens_per_s") | _speed_up(cases, run.texts).values("speed_up")
    values |= _texts_against_plain(bench, cases, run)
    for other in runs:
        is_same_way = (run.method, run.budget) == (other.method, other.budget)
        if run.drafter == "trained" and other.drafter == "untrained" and is_same_way:
            values |= difference(run.lengths, other.lengths).values("over_untrained")
            way["untrained_rounds"] = REPLAYED if other.texts is None else "decoded"
        if run.method == "tree" and other.method == "chain" and run.drafter == other.drafter:
            values |= difference(run.lengths, other.lengths).values("over_chain")
    return EvaluationRow(_protocol(bench, cases, **way), values)


def _acceptance_at(rounds: Sequence[Sequence[int]], block_size: int) -> list[float]:
    """Share of rounds whose slot k was accepted, with all before it, k = 1 to B - 1."""
    every = [accepted for of_prompt in rounds for accepted in of_prompt]
    return [
        sum(accepted > slot for accepted in every) / len(every) if every else math.nan for slot in range(1, block_size)
    ]


def _texts_against_plain(bench: _Bench, cases: Sequence[_Case], run: _Run) -> dict[str, int]:
    """How many texts are the plain one, differ by near ties alone, or differ for no such reason; greedy only."""
    if run.texts is None or bench.spec.evaluate.temperature > 0:
        return {}
    counts = {"texts_equal": 0, "near_ties": 0, "mismatches": 0}
    for case, text in zip(cases, run.texts, strict=True):
        limit = case.setting.max_new_tokens
        plain, ids = case.plain.ids[:limit], text.ids[:limit]
        found = difference_from_plain(bench.target, case.prompt, plain=plain, text=ids, limit=limit)
        if found is None:
            counts["texts_equal"] += 1
            continue
        counts["near_ties" if found.is_near else "mismatches"] += 1
        bench.notes.append(f"prompt {case.number}, {run.name}: {found.words}")
    return counts


def _tokens_per_s(texts: Sequence[Decoded]) -> Interval:
    """Timed tokens of all texts by their seconds."""
    return bootstrap_sums(_timed(texts), lambda sums: sums[0] / sums[1])


def _speed_up(cases: Sequence[_Case], texts: Sequence[Decoded]) -> Interval:
    """Tokens a second by those of plain decoding; a prompt is drawn with both of its texts."""
    columns = [*_timed(texts), *_timed([case.plain for case in cases])]
    return bootstrap_sums(columns, lambda sums: (sums[0] / sums[1]) / (sums[2] / sums[3]))


def _timed(texts: Sequence[Decoded]) -> list[list[float]]:
    return [[text.num_timed_tokens for text in texts], [text.seconds for text in texts]]


def _offline_row(bench: _Bench, cases: Sequence[_Case], estimates: Estimates) -> EvaluationRow:
    values: dict[str, Any] = bootstrap(estimates.chain_tau).values("chain_tau")
    for budget, means in estimates.tree_tau.items():
        values |= bootstrap(means).values(f"tree_tau_{budget}")
        if budget == min(estimates.tree_tau):
            values |= difference(means, estimates.chain_tau).values("tree_over_chain")
    values |= {f"coverage_{width}": shares for width, shares in estimates.coverage.items()}
    return EvaluationRow(_protocol(bench, cases, method="offline", drafter="trained"), values)


def _protocol(bench: _Bench, cases: Sequence[_Case], **way: Any) -> dict[str, Any]:
    spec, target = bench.spec, bench.target
    choices = spec.evaluate
    made = protocol_of(target, temperature=choices.temperature, max_tokens=choices.max_new_tokens, seed=spec.train.seed)
    return asdict(made) | {
        **{name: value for name, value in way.items() if value is not None},
        "prompts": spec.data.held_out,
        "num_prompts": len(cases),
        "num_duplicates": bench.num_duplicates,
        "num_degenerate": bench.num_degenerate,
        "num_undrafted": bench.num_undrafted,
        "block_size": spec.drafter.block_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
    }


def _summary(bench: _Bench, cases: Sequence[_Case], runs: Sequence[_Run]) -> str:
    lines = [f"acceptance length over {len(cases)} held-out prompts, tokens a round (bootstrap 95 %):"]
    for run in runs:
        speed = f", {_speed_up(cases, run.texts)} times the speed of plain decoding" if run.texts is not None else ""
        lines.append(f"  {run.name}: {bootstrap(run.lengths)}{speed}")
    if bench.num_duplicates:
        lines.append(f"  {bench.num_duplicates} prompts dropped: they were there before")
    if bench.num_undrafted:
        lines.append(f"  {bench.num_undrafted} prompts left out: their texts are one token, and nothing is drafted")
    if bench.num_degenerate:
        lines.append(f"  {bench.num_degenerate} prompts left out: their texts repeat themselves")
    if isinstance(bench.target.decoder, LibraryDecoder):
        lines.append("  every pass of this target reads its whole text again: no speed here is a server's")
    if bench.target.device.type == "cpu":
        lines.append("  on a processor drafting may be slower than plain decoding; acceptance is the claim here")
    return "\n".join(lines)
