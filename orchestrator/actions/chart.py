"""How curves look in a picture: a panel per metric, a line per run, nothing told by colour alone.

The line is the mean of each bucket of steps and the band its smallest and largest value, so that no
spike is lost however many steps there are. Steps without a finite number leave a gap and a cross.
Colours are Okabe and Ito's, which colour-blind eyes tell apart (https://jfly.uni-koeln.de/color/); each
run has a dash of its own as well. It reads nothing and writes nothing.
"""

from __future__ import annotations

import importlib.util
import io
import math
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from typing import Any

from orchestrator.actions.log_text import inert
from orchestrator.errors import DraftyardError
from orchestrator.store.rows import CurvePoint, RunRow

DPI = 100
WIDTH_IN, PANEL_IN, FRAME_IN = 12.0, 3.4, 1.5  # inches: the picture, each panel, title and legend

LARGEST = 1e300  # what is beyond counts as infinite: the axis is computed in floats too
DASHES: Sequence[Any] = ("solid", (0, (7, 2)), (0, (2, 1.4)), (0, (7, 2, 2, 2)))


@dataclass(frozen=True)
class Curve:
    """One metric of one attempt of a run."""

    run: RunRow
    attempt: int
    is_newest: bool  # older attempts are drawn dim
    points: list[CurvePoint]


@dataclass(frozen=True)
class Panel:
    metric: str
    unit: str  # "" where nobody said one
    curves: list[Curve]


@dataclass(frozen=True)
class Ink:
    """The colours of one background."""

    paper: str
    text: str
    grid: str
    lines: Sequence[str]


LIGHT = Ink("#ffffff", "#1f2430", "#e3e6ec", ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"))
DARK = Ink("#15171c", "#d8dbe2", "#30343d", ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00"))


def render(panels: Sequence[Panel], *, form: str, is_dark: bool) -> tuple[bytes, int, int]:
    """The picture as PNG or SVG, and its width and height in pixels. Raises DraftyardError without the library."""
    library = _library()
    ink = DARK if is_dark else LIGHT
    with library.rc_context(_style(ink)), warnings.catch_warnings():
        # A name in a script that the font lacks becomes boxes; that is no news for stderr.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = draw(panels, ink)
        image = io.BytesIO()
        figure.savefig(image, format=form, dpi=DPI, metadata={"Date": None} if form == "svg" else None)
    width_in, height_in = figure.get_size_inches()
    return image.getvalue(), round(width_in * DPI), round(height_in * DPI)


def draw(panels: Sequence[Panel], ink: Ink) -> Any:
    """The same as a matplotlib Figure, without a window system and without global state."""
    _library()
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(WIDTH_IN, FRAME_IN + PANEL_IN * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    order = list(dict.fromkeys(curve.run.id for panel in panels for curve in panel.curves))
    keys: dict[str, Any] = {}
    for axes, panel in zip(all_axes, panels, strict=True):
        _panel(axes, panel, order, ink, keys)
    all_axes[-1].set_xlabel("step")
    figure.align_ylabels()
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    # The title is the legend's own: the layout keeps no room for a title and a legend above it.
    figure.legend(
        list(keys.values()), list(keys), loc="outside upper left", ncols=2 if len(keys) > 2 else 1, frameon=False,
        title=_title(panels), alignment="left", title_fontproperties={"weight": "bold", "size": 14},
    )  # fmt: skip
    return figure


def _library() -> Any:
    try:
        return importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        told = f"a plot needs matplotlib, which is not installed here; install it: {_install_command()}"
        raise DraftyardError(told) from error


def _install_command() -> str:
    """What the extra asks for, into this very interpreter: right for a clone, a wheel, and where no index knows draftyard."""
    asked = [
        line.split(";")[0].strip()
        for line in metadata.requires("draftyard") or []
        if "plot" in line.partition("extra")[2]
    ]
    pip = [sys.executable, "-m", "pip", "install"]
    uv = ["uv", "pip", "install", "--python", sys.executable]  # an environment that uv made has no pip
    return shlex.join([*(pip if importlib.util.find_spec("pip") else uv), *asked])


def _style(ink: Ink) -> dict[str, Any]:
    return {
        "figure.facecolor": ink.paper,
        "savefig.facecolor": ink.paper,
        "axes.facecolor": ink.paper,
        "text.color": ink.text,
        "axes.labelcolor": ink.text,
        "axes.edgecolor": ink.grid,
        "xtick.color": ink.text,
        "ytick.color": ink.text,
        "grid.color": ink.grid,
        "text.parse_math": False,  # a name may hold dollar signs
        "axes.formatter.useoffset": False,  # a corner that says +2.31 is read by nobody
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "draftyard",  # the same curves, the same file
    }


def _title(panels: Sequence[Panel]) -> str:
    runs = {curve.run.id: curve.run for panel in panels for curve in panel.curves}
    recipes = list(dict.fromkeys(run.recipe for run in runs.values()))
    if len(runs) == 1:
        run = next(iter(runs.values()))
        return inert(f"{run.recipe}, branch {run.branch}, run {run.id}")
    return inert(f"{len(runs)} runs of {', '.join(recipes[:3])}{', …' if len(recipes) > 3 else ''}")


def _panel(axes: Any, panel: Panel, order: Sequence[str], ink: Ink, keys: dict[str, Any]) -> None:
    """Draws a panel's curves; `keys` gathers what the legend has to explain, by its words."""
    scale = 2**30 if panel.unit == "bytes" or panel.metric.endswith("_bytes") else 1
    unit = "GiB" if scale > 1 else panel.unit
    axes.set_ylabel(_cut(inert(panel.metric)) + (f" ({unit})" if unit else ""))
    axes.margins(x=0.01)
    axes.grid(visible=True, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if panel.unit.endswith("/s"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == int(value) else f"{value:g}")
    for curve in panel.curves:
        place = order.index(curve.run.id)
        colour, dash = ink.lines[place % len(ink.lines)], DASHES[place % len(DASHES)]
        line = _curve(axes, curve, colour, dash, scale, keys, ink)
        if curve.is_newest:
            keys.setdefault(_label(curve.run), line)
    for words in [words for words in keys if words in _EXPLANATIONS]:
        keys[words] = keys.pop(words)  # behind the runs


BAND, NO_NUMBER, EARLIER = "smallest to largest value", "not a finite number", "earlier attempt"
_EXPLANATIONS = (BAND, NO_NUMBER, EARLIER)


def _curve(axes: Any, curve: Curve, colour: str, dash: Any, scale: float, keys: dict[str, Any], ink: Ink) -> Any:
    steps = [(point.first_step + point.last_step) / 2 for point in curve.points]
    means = [_finite(point.mean, scale) for point in curve.points]
    strength = 1.0 if curve.is_newest else 0.45
    (line,) = axes.plot(
        steps, means, color=colour, linestyle=dash, linewidth=1.7 if curve.is_newest else 1.1, alpha=strength,
        marker="o" if sum(map(math.isfinite, means)) == 1 else None, markersize=5,
        gid=f"{curve.run.id}.{curve.attempt}",
    )  # fmt: skip
    if not curve.is_newest:
        keys.setdefault(EARLIER, line)
    if any(point.num_values > 1 for point in curve.points):
        lows = [_finite(point.minimum, scale) for point in curve.points]
        highs = [_finite(point.maximum, scale) for point in curve.points]
        band = axes.fill_between(steps, lows, highs, step="mid", color=colour, alpha=0.25 * strength, linewidth=0.6)
        keys.setdefault(BAND, band)
    gaps = _gaps(curve.points)
    for first, last in gaps:
        axes.axvspan(first - 0.5, last + 0.5, color=colour, alpha=0.1, linewidth=0)
    if gaps:
        crosses = axes.plot(
            [(first + last) / 2 for first, last in gaps], [0.04] * len(gaps), transform=axes.get_xaxis_transform(),
            color=colour, linestyle="none", marker="x", markersize=7, markeredgewidth=1.8,
        )  # fmt: skip
        keys.setdefault(NO_NUMBER, crosses[0])
    return line


def _gaps(points: Sequence[CurvePoint]) -> list[tuple[int, int]]:
    """Stretches of neighbouring buckets that hold a value which cannot be drawn, as first and last step."""
    stretches = groupby(points, key=_has_gap)
    held = [list(members) for is_gap, members in stretches if is_gap]
    return [(members[0].first_step, members[-1].last_step) for members in held]


def _finite(value: float | None, scale: float) -> float:
    """NaN, which breaks the line, for everything that cannot be drawn."""
    return value / scale if value is not None and abs(value) < LARGEST else math.nan


def _has_gap(point: CurvePoint) -> bool:
    bounds = (point.minimum, point.maximum)
    return point.num_nan > 0 or any(value is not None and not abs(value) < LARGEST for value in bounds)


def _cut(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"


def _label(run: RunRow) -> str:
    return inert(f"{run.id}  {run.recipe} {run.branch} on {run.host}")
