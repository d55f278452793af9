"""Progress on stderr: one live line on a terminal, plain lines elsewhere, nothing under --quiet.

It appears after two seconds: what is quicker than that needs no bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from orchestrator.actions.log_text import inert
from orchestrator.units import duration
from orchestrator.verbs.frame import Terminal
from orchestrator.verbs.table import cut
from orchestrator.verbs.words import grace_left, number

if TYPE_CHECKING:
    from orchestrator.actions.life import Moment
    from orchestrator.store.rows import ProgressRow

SILENT_S = 2.0
PLAIN_LINE_EVERY_S = 10.0
BAR_WIDTH = 20
FEWEST_UNITS = 5  # of a part whose time left is told: fewer (of loading, of a conversion) are unlike each other
LATE_S = 5.0  # reports of a remote host come in bundles: no wait shorter than this means that a unit takes long


class Progress:
    """`show` a text as often as you like; it decides what a person sees of it."""

    def __init__(self, terminal: Terminal, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_live = sys.stderr.isatty() and terminal.has_colour
        self._is_quiet = terminal.is_quiet
        self._width = terminal.width or 100
        self._clock = clock
        self._began_s = clock()
        self._last_s = self._began_s - PLAIN_LINE_EVERY_S
        self._last_stage = self._last_news = ""
        self._is_drawn = False
        self._pace: _Pace | None = None

    def show(self, text: str, *, stage: str = "", news: str | None = None) -> None:
        """`stage`: a new one is always worth a plain line. `news`: what of the text makes it another one, by default all."""
        now_s = self._clock()
        if self._is_quiet or now_s - self._began_s < SILENT_S:
            return
        text = inert(text)
        news = text if news is None else news
        if self._is_live:
            _draw(cut(text, self._width - 1))
            self._is_drawn = True
        elif stage != self._last_stage or (news != self._last_news and now_s - self._last_s >= PLAIN_LINE_EVERY_S):
            with suppress(OSError):  # as `_draw`
                click.echo(text, err=True)
            self._last_s, self._last_stage, self._last_news = now_s, stage, news

    def moment(self, moment: Moment) -> None:
        """A run as it stands."""
        left_s, now_s = None, self._clock()
        if (row := moment.progress) is not None:
            if self._pace is None or not self._pace.is_of(row):
                self._pace = _Pace(row, now_s)
            left_s = self._pace.left_s(row, now_s)
        stage = moment.run.stage or str(moment.run.state)
        self.show(moment_text(moment, left_s), stage=stage, news=moment_text(moment))  # a countdown is no news

    def end(self) -> None:
        """Leaves a clean line for whatever comes next."""
        if self._is_drawn:
            _draw("")
            self._is_drawn = False


def _draw(text: str) -> None:
    """In place of the line that stands there. What is waited for does not break off for want of somebody who watches."""
    with suppress(OSError):
        click.echo(f"\r\x1b[2K{text}", err=True, nl=False, color=True)


class _Pace:
    """How fast the work goes that a job tells of beside its steps, from the first report of it that was seen here.

    A unit's time is the host's, from report to report: when it was looked at here says nothing of when it began. What has
    gone by since the newest report is counted by our own clock, as the host's may be another.
    """

    def __init__(self, row: ProgressRow, now_s: float) -> None:
        self._first, self._newest = row, row
        self._seen_s = now_s  # our clock at the newest report
        self._num_newest = 0.0  # units that the newest report brought

    def is_of(self, row: ProgressRow) -> bool:
        first, newest = self._first, self._newest
        is_same = (row.attempt, row.what, row.unit) == (first.attempt, first.what, first.unit)
        return is_same and row.done >= newest.done

    def left_s(self, row: ProgressRow, now_s: float) -> float | None:
        """Seconds from now to its last unit; None before a pace is known, and once a unit takes twice as long."""
        if row.done > self._newest.done:
            self._num_newest = row.done - self._newest.done
            self._newest, self._seen_s = row, now_s
        num_seen, seen_s = self._newest.done - self._first.done, self._newest.at_s - self._first.at_s
        if row.total is None or row.total < FEWEST_UNITS or num_seen <= 0 or seen_s <= 0 or row.done >= row.total:
            return None
        unit_s, waited_s = seen_s / num_seen, now_s - self._seen_s
        if waited_s > max(2 * unit_s * self._num_newest, LATE_S):
            return None
        left_s = unit_s * (row.total - row.done) - waited_s
        return left_s if left_s > 0 else None


def moment_text(moment: Moment, part_left_s: float | None = None) -> str:
    """`training  213/400 [#####     ]  left 1 min 05 s  mean loss 2.314  1,020 block tokens/s`, means of the newest reports."""
    run = moment.run
    where = run.stage or str(run.state).replace("_", " ")
    if moment.kill_in_s is not None:
        where = f"stopping{', ' + run.stage if run.stage else ''}: {grace_left(moment.kill_in_s)} unless it ends before"
    if run.unreachable_since_s is not None:
        where += ", host unreachable"
    if moment.kill_in_s is not None:
        return where
    row = moment.progress
    # While it trains, the steps are the progress; in every other stage it is what the job last said.
    if row is not None and row.total and row.done < row.total and (run.step is None or run.stage != "training"):
        left = "" if part_left_s is None else f"  left {duration(part_left_s)}"
        return f"{where}  {row.what} {bar(row.done, row.total)} {number(row.done)}/{number(row.total)} {row.unit}{left}"
    if run.step is None or not run.num_steps or (run.step >= run.num_steps and run.stage not in (None, "training")):
        return where
    return "  ".join([f"{where}  {run.step}/{run.num_steps} {bar(run.step, run.num_steps)}", *_numbers(moment)])


def bar(done: float, total: float | None) -> str:
    share = min(max(done / total, 0.0), 1.0) if total else 0.0
    filled = round(share * BAR_WIDTH)
    return f"[{'#' * filled}{' ' * (BAR_WIDTH - filled)}]"


def _numbers(moment: Moment) -> list[str]:
    recent, told = moment.recent, list[str]()
    if moment.time_left_s is not None:
        told.append(f"left {duration(moment.time_left_s)}")  # first: a narrow terminal cuts the end
    told += [f"mean {name} {number(recent[name])}" for name in ("loss", "streak") if name in recent]
    if "block_tokens_per_s" in recent:
        told.append(f"{number(recent['block_tokens_per_s'])} block tokens/s")
    return told
