"""`plot`: curves as a picture in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.lazy import lazy
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.words_typed import RUN, RUN_OR_METRIC, TypedPath

if TYPE_CHECKING:
    from orchestrator.actions import files, plots
else:
    files = lazy("orchestrator.actions.files")
    plots = lazy("orchestrator.actions.plots")


@verb(
    "plot",
    exits=("0", "1", "2", "5"),
    examples=["draftyard plot @last loss accuracy", "draftyard plot k7f3 9hq2 loss -o loss.svg --dark"],
)
@click.argument("selector", metavar="RUN", type=RUN)
@click.argument("words", nargs=-1, metavar="[RUN]… [METRIC]…", type=RUN_OR_METRIC)
@click.option("-o", "--output", type=TypedPath(dir_okay=False), metavar="FILE", help="A .png or .svg.")
@click.option("--dark", "is_dark", is_flag=True, help="Light on dark.")
def plot(terminal: Terminal, selector: str, words: tuple[str, ...], *, output: Path | None, is_dark: bool) -> None:
    """Draw metrics of runs over their steps into a picture: a panel per metric, a line per run.

    Without METRIC it is the loss; without -o the file is named after run and metric. The line is the mean of each
    bucket of steps, the band its smallest and largest value; steps without a finite number are a gap with a cross.
    """
    was_there = output is not None and files.is_there(output)
    done = plots.plot(terminal.places, (selector, *words), to=output, is_dark=is_dark)
    if was_there:
        terminal.say(f"it took the place of the {output} that was there")
    if not terminal.wants_json:
        terminal.lines([str(done.file)])
        return
    curves = [
        {
            "metric": panel.metric,
            "run": curve.run.id,
            "attempt": curve.attempt,
            "num_values": sum(point.num_values for point in curve.points),
            "num_nan": sum(point.num_nan for point in curve.points),
        }
        for panel in done.panels
        for curve in panel.curves
    ]
    terminal.document(file=done.file, width_px=done.width_px, height_px=done.height_px, curves=curves)


VERBS = {"plot": plot}
