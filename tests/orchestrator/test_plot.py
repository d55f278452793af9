"""`plot`: a picture that shows every value's extremes, tells the runs apart and survives odd numbers and names."""

from __future__ import annotations

import json
import math
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from orchestrator import cli
from orchestrator.actions import chart, plots
from orchestrator.actions.places import Places, find_places
from orchestrator.errors import RunNotFound, UsageError
from orchestrator.store.rows import Document, State
from orchestrator.store.writes import Store
from tests.orchestrator.runs import batch, event, new_run

pytestmark = pytest.mark.slow  # matplotlib takes a second to load, and each drawing a third

FIRST, SECOND = "kaaaaaaa", "kbbbbbbb"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


def _record(places: Places, run_id: str, *, entry: str = "dflash", **metrics: list[float]) -> None:
    with Store(places.db) as store:
        store.create_run(new_run(run_id, documents={Document.SPEC: json.dumps({"entry": entry})}))
        store.new_attempt(run_id)
        length = max(map(len, metrics.values()))
        told = [
            event(step, "metrics", step=step, values={name: values[step - 1] for name, values in metrics.items() if step <= len(values)})
            for step in range(1, length + 1)
        ]  # fmt: skip
        store.ingest(batch(told, run_id=run_id))


def _figure(places: Places, *words: str) -> Any:
    return chart.draw(plots.gather(places, words), chart.LIGHT)


def _texts(svg: Path) -> str:
    return " ".join(text for text in ElementTree.parse(svg).getroot().itertext())


def test_a_png_has_the_size_that_is_told(places: Places, tmp_path: Path) -> None:
    _record(places, FIRST, loss=[3.0, 2.0, 1.0])

    done = plots.plot(places, [FIRST, "loss"], to=tmp_path / "a.png")

    content = done.file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (done.width_px, done.height_px) == (1200, 490)


def test_an_svg_names_runs_metric_and_unit_as_text(places: Places, tmp_path: Path) -> None:
    _record(places, FIRST, loss=[3.0, 2.0], block_tokens_per_s=[6500.0, 6400.0])
    _record(places, SECOND, loss=[2.5, 1.5])

    done = plots.plot(places, [FIRST, SECOND, "loss", "block_tokens_per_s"], to=tmp_path / "a.svg", is_dark=True)

    root = ElementTree.parse(done.file).getroot()
    assert root.get("viewBox") == f"0 0 {done.width_px * 0.72:g} {done.height_px * 0.72:g}"
    told = _texts(done.file)
    for words in (FIRST, SECOND, "loss (nats)", "block_tokens_per_s (tokens/s)", "step", "2 runs of smollm2"):
        assert words in told


def test_what_the_loss_of_a_script_of_ones_own_is_in_is_not_said(places: Places) -> None:
    _record(places, FIRST, loss=[3.0, 2.0], step_s=[1.0, 1.0])
    _record(places, SECOND, entry="script", loss=[3.0, 2.0], step_s=[1.0, 1.0])

    told = [[panel.unit for panel in plots.gather(places, [run, "loss", "step_s"])] for run in (FIRST, SECOND)]
    beside = [panel.unit for panel in plots.gather(places, [FIRST, SECOND, "loss"])]

    assert told == [["nats", "s"], ["", "s"]]
    assert beside == [""]


def test_the_same_curves_make_the_same_file(places: Places, tmp_path: Path) -> None:
    _record(places, FIRST, loss=[3.0, 2.0])

    twice = [plots.plot(places, [FIRST], to=tmp_path / name).file.read_bytes() for name in ("a.svg", "b.svg")]

    assert twice[0] == twice[1]


def test_the_line_holds_the_values_and_each_run_has_its_colour_and_dash(places: Places) -> None:
    _record(places, FIRST, loss=[3.0, 2.0, 1.0])
    _record(places, SECOND, loss=[2.5, 1.5])

    lines = _figure(places, FIRST, SECOND, "loss").axes[0].lines

    assert list(lines[0].get_xdata()) == [1, 2, 3]
    assert list(lines[0].get_ydata()) == [3.0, 2.0, 1.0]
    assert list(lines[1].get_ydata()) == [2.5, 1.5]
    assert lines[0].get_color() != lines[1].get_color()
    assert lines[0].get_linestyle() != lines[1].get_linestyle()


def test_a_spike_of_one_step_is_in_the_band(places: Places) -> None:
    losses = [1.0] * 20_000
    losses[12_345] = 77.0
    _record(places, FIRST, loss=losses)

    axes = _figure(places, FIRST, "loss").axes[0]

    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == 77.0
    assert max(axes.lines[0].get_ydata()) < 77.0


def test_values_that_are_no_number_are_a_gap_with_a_cross(places: Places) -> None:
    _record(places, FIRST, loss=[3.0, math.nan, 2.0, math.inf, 1.0])

    figure = _figure(places, FIRST, "loss")

    line, crosses = figure.axes[0].lines
    assert [math.isnan(value) for value in line.get_ydata()] == [False, True, False, True, False]
    assert list(crosses.get_xdata()) == [2, 4]
    assert chart.NO_NUMBER in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "losses", [[2.0], [2.0] * 5, [math.nan] * 3, [math.inf, -math.inf], [1e308, -1e308], [5e-324, 0.0]]
)
@pytest.mark.parametrize("form", ["png", "svg"])
def test_odd_curves_are_drawn_all_the_same(places: Places, tmp_path: Path, losses: list[float], form: str) -> None:
    _record(places, FIRST, loss=losses)

    assert plots.plot(places, [FIRST], to=tmp_path / f"a.{form}").file.stat().st_size > 5_000


def test_odd_names_are_drawn_as_they_are(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "_eval/$x_{1}$ 損失 \x1b[31m%"
    _record(places, FIRST, **{name: [1.0, 2.0]})

    done = plots.plot(places, [FIRST, name], to=None)

    assert re.fullmatch(rf"{FIRST}-[A-Za-z0-9._-]+\.png", done.file.name)
    told = _texts(plots.plot(places, [FIRST, name], to=tmp_path / "a.svg").file)
    assert "$x_{1}$" in told


def test_an_earlier_attempt_stays_and_is_drawn_dim(places: Places) -> None:
    _record(places, FIRST, loss=[3.0, 2.0])
    with Store(places.db) as store:
        store.set_state(FIRST, State.FAILED, evidence="exit status 1")
        store.new_attempt(FIRST)
        store.ingest(batch([event(1, "metrics", step=2, values={"loss": 1.9})], run_id=FIRST, attempt=2))

    figure = _figure(places, FIRST, "loss")

    older, newest = figure.axes[0].lines
    assert (older.get_alpha(), newest.get_alpha()) == (0.45, 1.0)
    assert chart.EARLIER in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(("word", "told"), [("kbbb", "beginning of several ids"), ("kbb", "at least 4 characters")])
def test_a_beginning_of_a_run_that_is_not_enough_says_so(places: Places, word: str, told: str) -> None:
    for run_id in (FIRST, "kbbbbbbb", "kbbbcccc"):
        _record(places, run_id, loss=[1.0])

    with pytest.raises(RunNotFound, match=told):
        plots.plot(places, [FIRST, word], to=None)


def test_an_unknown_metric_is_answered_with_the_nearest_name(places: Places) -> None:
    _record(places, FIRST, loss=[1.0], accuracy=[0.5])

    with pytest.raises(
        UsageError, match="'acuracy' is neither a run nor a metric of kaaaaaaa; did you mean 'accuracy'"
    ):
        plots.gather(places, [FIRST, "acuracy"])
    with pytest.raises(RunNotFound):
        plots.gather(places, ["zzzz", "loss"])
    with pytest.raises(RunNotFound):
        plots.gather(places, [FIRST, "@failed"])


@pytest.mark.parametrize("to", ["a.pdf", "a"])
def test_another_format_is_refused(places: Places, tmp_path: Path, to: str) -> None:
    _record(places, FIRST, loss=[1.0])

    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        plots.plot(places, [FIRST], to=tmp_path / to)


def test_the_verb_prints_the_file_and_the_counts(
    places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _record(places, FIRST, loss=[1.0, math.nan])
    words = ["plot", FIRST, "loss", "-o", str(tmp_path / "a.png"), "--db", str(places.db)]

    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--json"])

    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert told["file"] == str(tmp_path / "a.png")
    assert told["curves"] == [{"metric": "loss", "run": FIRST, "attempt": 1, "num_values": 1, "num_nan": 1}]


def test_without_the_library_one_line_says_how_to_install_it(places: Places, tmp_path: Path) -> None:
    _record(places, FIRST, loss=[1.0])
    code = (
        "import sys; sys.modules['matplotlib'] = None\nfrom orchestrator import cli\n"
        f"cli.main(['plot', {FIRST!r}, '--db', {str(places.db)!r}])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    head, _, command = done.stderr.strip().rpartition("install it: ")
    assert head == "error: a plot needs matplotlib, which is not installed here; "
    assert shlex.split(command)[-1] == "matplotlib>=3.10"
    tried = subprocess.run(
        [*shlex.split(command), "--dry-run", "--no-index"], capture_output=True, text=True, check=False
    )
    assert tried.returncode == 0, tried.stderr  # as typed; here it is there already
