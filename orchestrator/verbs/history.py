"""`ls`, `show`, `metrics`, `compare`, `diff`, `evidence`: what is known, printed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from orchestrator.actions import followed, history
from orchestrator.actions.again import words_of_run
from orchestrator.actions.history import Comparison, Measured
from orchestrator.actions.log_text import inert
from orchestrator.lazy import lazy
from orchestrator.store.rows import EvidenceRow, Kind, RunRow, SeriesRow
from orchestrator.units import duration, is_told_newest
from orchestrator.verbs import listing
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.program import words_of_others
from orchestrator.verbs.table import Cell, Column, heading, table, wrapped
from orchestrator.verbs.words import MEAN, ago, gib, metric, sparkline, state_and_step
from orchestrator.verbs.words_typed import METRIC, RECIPE_NAME, RUN, SORT, count

if TYPE_CHECKING:
    from orchestrator.actions import plans, rank_places, recipes, trying, unknown_words
    from orchestrator.verbs import fits_page, markdown, measured, page
else:
    plans = lazy("orchestrator.actions.plans")
    rank_places = lazy("orchestrator.actions.rank_places")
    recipes = lazy("orchestrator.actions.recipes")
    trying = lazy("orchestrator.actions.trying")
    unknown_words = lazy("orchestrator.actions.unknown_words")
    fits_page = lazy("orchestrator.verbs.fits_page")
    markdown = lazy("orchestrator.verbs.markdown")
    measured = lazy("orchestrator.verbs.measured")
    page = lazy("orchestrator.verbs.page")

KINDS = [*(str(kind) for kind in Kind), "all"]
NAME = Column("metric", gives_way=True, least=12)  # a name may be hundreds of characters long
MOST_SKETCHES = 200  # a run may have thousands of metrics; a sketch is three queries


@verb(
    "ls",
    examples=["draftyard ls", "draftyard ls 'status:failed since:7d loss<2.1' --sort -loss --json"],
    may_be_empty=["where"],
)
@click.argument("where", nargs=-1, metavar="[FILTER]…")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="train",
    show_default=True,
    help="Which jobs; script: those of smoke --script, as a recipe's own script is a train job.",
)
@click.option(
    "--sort",
    default="newest",
    show_default=True,
    metavar="NAME",
    type=SORT,
    help="A column or a metric, largest or newest first; -NAME the smallest or oldest, as -loss.",
)
@click.option("-n", "--tail", "limit", type=count(1), default=50, show_default=True, help="At most so many runs.")
@click.option(
    "--columns",
    default=",".join(listing.USUAL),
    metavar="NAME,…",
    help=f"Which columns: any of {', '.join(listing.COLUMNS)}, and every metric.",
)
@click.option("--removed", is_flag=True, help="Runs in the bin instead.")
def ls(
    terminal: Terminal, where: tuple[str, ...], *, kind: str, sort: str, limit: int, columns: str, removed: bool
) -> None:
    """List runs: live ones first, then by when their newest attempt was started, newest first.

    FILTER: words such as status:failed branch:ddtree host:pve* tag:x since:7d loss<2.1, joined by AND, OR, NOT.
    A metric is the mean of its newest 100 reports over all attempts, in columns, filters and --sort alike; nan where the newest is.
    """
    names = _column_names(terminal, columns)
    chosen = None if kind == "all" else kind
    runs = history.list_runs(terminal.places, " ".join(where), kind=chosen, sort=sort, limit=limit, removed=removed)
    listed = history.with_metrics(terminal.places, runs, listing.metrics_of(names))
    if terminal.wants_json:
        terminal.document(
            runs=[{**vars(item.run), "metrics": item.metrics, "acceptance": item.acceptance} for item in listed]
        )
        return
    if not listed:
        told = unknown_words.unknown_words(terminal.places, " ".join(where)) if where else []
        terminal.say("\n  ".join(["no runs pass this filter", *told]) if where else _none_yet(terminal, chosen))
        return
    terminal.lines(listing.lines(listed, names, width=terminal.width), is_ours=False)
    _say_if_unfollowed(terminal, runs)


@verb(
    "show",
    exits=("0", "2", "5"),
    examples=["draftyard show @last", "draftyard show @failed --oom --markdown", "draftyard show k7f3 --against 9hq2"],
)
@click.argument("selector", metavar="RUN", type=RUN)
@click.option(
    "--against",
    metavar="RUN",
    type=RUN,
    help="Hold its speed against this run (default: the newest earlier success of the same recipe).",
)
@click.option("--oom", is_flag=True, help="The failure alone: its whole traceback, every number found, what would fit.")
@click.option("--markdown", "as_markdown", is_flag=True, help="The same page as Markdown, to paste into a report.")
def show(terminal: Terminal, selector: str, *, against: str | None, oom: bool, as_markdown: bool) -> None:
    """Show everything known about one run: state and its evidence, metrics, memory, failure, checkpoints.

    RUN is an id, a unique beginning of one (4 characters or more), @last or @failed: the newest training, as `ls`
    has it; the newest job of any kind only where there is none.
    """
    found = history.show(terminal.places, selector, against=against)
    ran_out = found.run.reason in history.MEMORY_REASONS and (oom or terminal.wants_json)
    fits = plans.would_fit(terminal.places, found) if ran_out else None
    if terminal.wants_json:
        ranks = rank_places.rank_places(found.run, found.spec, {peak.rank for peak in found.peaks})
        terminal.document(
            **vars(found),
            ranks=ranks,
            fits=None if fits is None else fits_page.fits_document(fits, launch=found.launch),
        )
        return
    lines = page.run_page(found, width=terminal.width or 100, now_s=time.time(), only_failure=oom)
    if fits is not None:
        newer = trying.tried_instead(terminal.places, found.run)
        words = dataclasses.replace(words_of_run(found.run, found.launch), hosts=(found.run.host,))
        told = fits_page.fits_lines(fits, words, width=terminal.width, newer=newer, launch=found.launch)
        lines += ["", *told]
    terminal.lines(markdown.as_markdown(lines) if as_markdown else lines, theirs=words_of_others(found))
    _say_if_unfollowed(terminal, [found.run])


@verb(
    "metrics", exits=("0", "2", "5"), examples=["draftyard metrics @last", "draftyard metrics k7f3 loss streak --json"]
)
@click.argument("selector", metavar="RUN", type=RUN)
@click.argument("names", nargs=-1, metavar="[NAME]…", type=METRIC)
@click.option(
    "-n", "--tail", "last", type=count(1), help="Only the newest so many values of each metric that NAME is or fits."
)
def metrics(terminal: Terminal, selector: str, names: tuple[str, ...], last: int | None) -> None:
    """List a run's metrics, or every value of the metrics named; a NAME with * or ? lists those that it fits.

    With --json a value that is not a number is null and has a flag: "nan", "inf" or "-inf".
    """
    is_list = not names or history.has_pattern(terminal.places, selector, names)
    if is_list and last is not None:
        if not names:
            raise click.UsageError("-n wants to know of which metrics: name them, or '*' for all")
        names = tuple(row.name for row in history.series(terminal.places, selector, fitting=names)[1])
    elif is_list:
        run, known = history.series(terminal.places, selector, fitting=names)
        if terminal.wants_json:
            terminal.document(run=run.id, series=known)
        else:
            sketched = history.sketches(terminal.places, run.id, [row.name for row in known[:MOST_SKETCHES]])
            terminal.lines(series_table(known, sketched, width=terminal.width))
        return
    found = {name: history.values(terminal.places, selector, name, last=last) for name in names}
    if terminal.wants_json:
        terminal.document(values=found)
        return
    columns = [
        NAME,
        Column("attempt", is_number=True),
        Column("rank", is_number=True),
        Column("step", is_number=True),
    ]
    rows = [
        [name, str(value.attempt), str(value.rank), str(value.step), metric(name, value.value)]
        for name, values in found.items()
        for value in values
    ]
    terminal.lines(table([*columns, Column("value", is_number=True)], rows, width=terminal.width))


@verb("compare", exits=("0", "2", "5"), examples=["draftyard compare k7f3 9hq2", "draftyard compare @last k7f3 --json"])
@click.argument("selectors", nargs=-1, required=True, metavar="RUN RUN…", type=RUN)
def compare(terminal: Terminal, selectors: tuple[str, ...]) -> None:
    """Compare runs: what they were told differently first, what their drafters are worth, mean and best values,
    then why one is faster.

    The speed of every other run is held against that of the first.
    """
    _at_least_two(selectors)
    found = history.compare(terminal.places, selectors)
    if terminal.wants_json:
        terminal.document(**vars(found))
        return
    _say_if_doubled(terminal, found.runs)
    terminal.lines(_run_heads(found.runs))
    terminal.lines(["", *_differences(found, width=terminal.width)])
    columns = [NAME, *(Column(run.id, is_number=True) for run in found.runs)]
    worth = measured.worth(found.decoded, [run.id for run in found.runs], width=terminal.width)
    terminal.lines(["", *worth] if worth else [])
    told = measured.speeds(found.throughput, width=terminal.width)
    has_speeds = bool(told) and len(found.throughput) + 1 == len(found.runs)  # of a speed one number is enough
    shown = [item for item in found.metrics if item.name != "block_tokens_per_s" or not has_speeds]
    names = [item.name + "*" * bool(item.unlike) for item in shown]
    finals = [
        [name, *(metric(item.name, value) for value in item.finals)] for name, item in zip(names, shown, strict=True)
    ]
    terminal.lines(["", heading(f"Metrics, the {MEAN} of each run"), *table(columns, finals, width=terminal.width)])
    if set_ones := [item.name for item in shown if is_told_newest(item.name)]:
        terminal.lines(wrapped(f"{', '.join(set_ones)}: the newest, as it is set or only grows", terminal.width))
    if keys := list(dict.fromkeys(key for item in shown for key in item.unlike)):
        note = f"* made differently ({', '.join(keys)}): not to be held against one another"
        terminal.lines(wrapped(note, terminal.width))
    bests = [[name, *_spans(item)] for name, item in zip(names, shown, strict=True)]
    terminal.lines(["", heading("Smallest … largest"), *table(columns, bests, width=terminal.width)])
    terminal.lines(["", *told] if told else [])


@verb("diff", exits=("0", "2", "5"), examples=["draftyard diff k7f3 9hq2", "draftyard diff @last @failed --json"])
@click.argument("left", metavar="RUN", type=RUN)
@click.argument("right", metavar="RUN", type=RUN)
def diff(terminal: Terminal, left: str, right: str) -> None:
    """Show what two runs were told differently, every resolved default included."""
    found = history.compare(terminal.places, (left, right))
    if terminal.wants_json:
        terminal.document(runs=[run.id for run in found.runs], differences=found.differences)
        return
    _say_if_doubled(terminal, found.runs)
    terminal.lines(_run_heads(found.runs))
    terminal.lines(["", *_differences(found, width=terminal.width)])


@verb("evidence", examples=["draftyard evidence", "draftyard evidence smollm2 --json"])
@click.argument("recipe", required=False, metavar="[RECIPE]", type=RECIPE_NAME)
def evidence(terminal: Terminal, recipe: str | None) -> None:
    """List which rungs passed where, and for which fingerprint, newest first."""
    rows = history.evidence(terminal.places, recipe)
    if not rows and recipe is not None:
        recipes.load(terminal.places, recipe)  # a name that no recipe has is a slip
    if terminal.wants_json:
        terminal.document(evidence=rows)
        return
    if not rows:
        name = inert(recipe or "")
        of = f" for {name}" if name else ""
        terminal.say(f"no evidence{of} yet; `draftyard smoke {name or 'RECIPE'} --host HOST` makes it")
        return
    columns = [
        Column("rung"), Column("outcome"), Column("recipe", gives_way=True), Column("branch", gives_way=True),
        Column("host", gives_way=True), Column("fingerprint"), Column("run"), Column("when", is_number=True),
    ]  # fmt: skip
    terminal.lines(table(columns, [_evidence(row) for row in rows], width=terminal.width))


def series_table(
    rows: list[SeriesRow], sketched: Mapping[str, Sequence[float | None]], *, width: int | None
) -> list[str]:
    columns = [
        NAME,
        *(Column(name, is_number=True) for name in (MEAN, "last", "min", "max", "steps", "nan")),
        Column("over steps"),
    ]
    cells: list[list[str | Cell]] = [
        [
            row.name,
            "-" if is_told_newest(row.name) else metric(row.name, row.recent_mean),
            metric(row.name, row.last_value),
            metric(row.name, row.min_value),
            metric(row.name, row.max_value),
            f"{row.first_step}-{row.last_step}",
            Cell(str(row.num_nan), colour="red") if row.num_nan else "-",
            sparkline(sketched.get(row.name, ())),
        ]
        for row in rows
    ]
    return table(columns, cells, width=width)


def _say_if_unfollowed(terminal: Terminal, runs: Sequence[RunRow]) -> None:
    """What is shown of live runs stands still until somebody follows them again, and has room to write."""
    if (told := followed.unwritten(terminal.places, runs, now_s=time.time())) is not None:
        terminal.say(inert(told))
    silent_s = followed.unfollowed_s(terminal.places, runs, now_s=time.time())
    if silent_s is not None:
        told = f"nobody follows live runs, the newest word of them is {duration(silent_s)} old"
        stopped = followed.follower_pid(terminal.places)
        repair = "what they do is read again by: draftyard watch, or draftyard follow"
        if stopped is not None:
            repair = f"its follower is stopped, let it go on: kill -CONT {stopped}"
        terminal.say(f"{told}; {repair}")


def _none_yet(terminal: Terminal, kind: str | None) -> str:
    """What to do about an empty list: look at the other kinds, where there are some."""
    if not terminal.places.db.exists():
        return (
            f"no runs yet: {inert(str(terminal.places.db))} is not there; the first `draftyard smoke RECIPE` makes it"
        )
    num_others = 0 if kind is None else history.count_others(terminal.places, kind)
    if not num_others:
        return "no runs yet; `draftyard smoke RECIPE` is a beginning (smollm2 is bundled)"
    others = "1 run of another kind" if num_others == 1 else f"{num_others:,} runs of other kinds"
    told = f"no {kind} runs yet; there {'is' if num_others == 1 else 'are'} {others}: draftyard ls --kind all"
    script = "script is what `draftyard smoke --script` ran, a recipe's own job is train"
    return f"{told}\n  {script}" if kind == Kind.SCRIPT else told


def _column_names(terminal: Terminal, text: str) -> list[str]:
    """Columns and metrics as they were typed, each once."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise click.UsageError(f"--columns is empty; name some of {', '.join(listing.COLUMNS)}, or metrics")
    for name in listing.metrics_of([name for name in names if name not in listing.USUAL]):
        unknown_words.require_metric(terminal.places, name, listing.COLUMNS)
    return names


def _evidence(row: EvidenceRow) -> list[str | Cell]:
    outcome = Cell("passed", colour="green") if row.passed else Cell("failed", colour="red")
    mark = (row.fingerprint or "-")[:12]
    return [row.rung, outcome, row.recipe, row.branch, row.host, mark, row.run_id, ago(row.at_s, time.time())]


def _run_heads(runs: list[RunRow]) -> list[str]:
    return [f"{run.id}  {run.recipe} {run.branch} on {run.host}: {state_and_step(run)}" for run in runs]


def _say_if_doubled(terminal: Terminal, runs: Sequence[RunRow]) -> None:
    ids = [run.id for run in runs]
    for run_id in sorted({run_id for run_id in ids if ids.count(run_id) > 1}):
        terminal.say(f"note: run {run_id} stands beside itself")


def _differences(found: Comparison, *, width: int | None) -> list[str]:
    if not found.differences:
        return ["told the same"]
    columns = [Column("key"), *(Column(run.id, gives_way=True, least=8) for run in found.runs)]
    rows = [[item.key, *(_shown(item.key, value) for value in item.values)] for item in found.differences]
    return [heading("Told differently"), *table(columns, rows, width=width)]


def _spans(item: Measured) -> list[str]:
    spans = zip(item.minima, item.maxima, strict=True)
    return [f"{metric(item.name, low)} … {metric(item.name, high)}" if low is not None else "-" for low, high in spans]


def _shown(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return gib(value)
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _at_least_two(selectors: tuple[str, ...]) -> None:
    if len(selectors) < 2:
        raise click.UsageError("one run is given; a comparison needs at least two")


VERBS = {"ls": ls, "show": show, "metrics": metrics, "compare": compare, "diff": diff, "evidence": evidence}
