"""Every screen as plain text at two sizes, and as a picture for its colours."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets._toast import Toast

from orchestrator.actions.places import Places
from remote.spec import BUNDLED_RUNGS
from tests.tui.golden import IMAGES, SCREENS, matches, opened, picture, press, shown
from tests.tui.test_themes import contrast
from tests.tui.yard import LIVE, ORPHANED
from tui.app import Draftyard
from tui.frame import LEAST_HEIGHT, LEAST_WIDTH
from tui.once import rested
from tui.ordering import Standing, Wish
from tui.plain import screen_strips, screen_text
from tui.theme import INKS, THEMES

pytestmark = pytest.mark.slow  # a whole app a test

# Screen -> keys that lead there from the one before it.
KEYS = {
    "runs": "",
    "help": "question_mark",
    "palette": "escape colon",
    "runs-worst-off": "escape s",
    "stop": "o g j x",
    "run-overview": "n enter",
    "run-curves": "2",
    "run-curve-alone": "z L left",
    "run-memory": "3",
    "run-log": "4 slash n c c l enter",
    "run-files": "escape 7",
    "run-resumed": "escape j enter",
    "run-log-before": "4 left_square_bracket o",
    "run-failure": "escape exclamation_mark",
    "run-failure-log": "4",
    "run-memory-ended": "3",
    "run-spec": "6",
    "compare": "escape g space space c",
    "hosts": "escape escape 2",
    "orphans": "j j o",
    "smoke": "n 3",
    "launch": "1 g j j j 4 enter",
    "launch-refused": "k enter",
}
PICTURES = {
    "worst-off": "s",
    "stop": "o g j x",
    "watch": "n",
    "palette": "colon",
    "run": "escape enter",
    "curves": "2",
    "memory": "3",
    "log": "4 slash n c c l enter",
    "resumed": "escape escape j enter",
    "failure": "escape exclamation_mark",
    "spec": "6",
    "files": "escape g j j j j enter 7",
    "compare": "escape g space space c",
    "hosts": "escape escape 2",
    "smoke": "3",
    "launch": "1 g j j j 4 enter",
}
# What a thread brings a while after the last key.
LAST_TO_COME = {
    "launch": ("What would use the room", "Launch is allowed"),
    "launch-refused": ("What would use the room", "Launch is refused"),
    "orphans": ("end 1 process",),
}


@pytest.fixture
def _answering_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pve-a would say, which is no real host: the gate has evidence for one branch, of the other something has changed."""
    changed = "changed since: tree, spec.data.max_anchors"

    def standing(_: Places, wish: Wish) -> Standing:
        if wish.branch == "ddtree":
            return Standing(True, tuple((rung, "passed", "") for rung in BUNDLED_RUNGS), ("4",), "5d0c61f7be92a834")
        told = [(rung, "stale", changed) if rung.startswith("fwd") else (rung, "missing", "") for rung in BUNDLED_RUNGS]
        return Standing(False, tuple(told), ("4",), "c41be80f7792d356")

    monkeypatch.setattr("tui.launch.standing", standing)
    left = f"pid 31877, run {ORPHANED}, 6.4 GiB, python -m remote.drafter"
    monkeypatch.setattr("tui.hosts.orphans", lambda _places, _host: [left])


@pytest.mark.usefixtures("_answering_host")
@pytest.mark.parametrize("size", [(80, 24), (200, 60)], ids=["80x24", "200x60"])
async def test_every_screen_looks_as_it_did(
    size: tuple[int, int], yard_places: Places, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(places=yard_places)
    async with opened(app, size=size) as pilot:
        for name, keys in KEYS.items():
            await shown_after(app, pilot, name, keys)

            assert matches(SCREENS / f"{name}-{size[0]}x{size[1]}.txt", screen_text(app)), name


async def shown_after(app: Draftyard, pilot: Pilot[Any], name: str, keys: str) -> None:
    """The screen as it rests after these keys, without what is said in passing."""
    await press(app, pilot, *keys.split())
    if size_shows(app, name):
        await shown(app, pilot, *LAST_TO_COME.get(name, ()))
    await rested(app, pilot)
    app.clear_notifications()
    while any(screen.query(Toast) for screen in app.screen_stack):
        await pilot.pause(0.02)


def size_shows(app: Draftyard, name: str) -> bool:
    """At 24 lines the plan's last words lie below the pane."""
    return app.size.height > 24 or not name.startswith("launch")


async def test_ascii_keys_do_not_read_as_ctrl(open_app: Callable[..., Draftyard]) -> None:
    app = open_app(ascii_only=True)
    async with opened(app, "question_mark", size=(120, 60)):
        text = screen_text(app)

    assert "up k" in text
    assert "enter" in text


async def test_without_colour_nothing_has_one_nor_a_ground(
    monkeypatch: pytest.MonkeyPatch, open_app: Callable[..., Draftyard]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = open_app()
    async with opened(app, "space", "space", "c", size=(120, 40)) as pilot:
        await rested(app, pilot)
        strips = [
            strip for widget in app.screen.walk_children(Widget) for strip in widget.render_lines(widget.size.region)
        ]

    styles = [segment.style for strip in strips for segment in strip if segment.style is not None]
    assert styles
    assert {str(colour.name) for style in styles for colour in (style.color, style.bgcolor) if colour} <= {"default"}


async def test_an_empty_no_color_wishes_for_nothing(
    monkeypatch: pytest.MonkeyPatch, open_app: Callable[..., Draftyard]
) -> None:
    """As no-color.org has it: present and not empty."""
    monkeypatch.setenv("NO_COLOR", "")
    app = open_app()
    async with opened(app):
        strips = app.screen.query_one("#list").render_lines(app.screen.region)

    colours = {
        segment.style.color.name for strip in strips for segment in strip if segment.style and segment.style.color
    }
    assert len(colours) > 3
    assert not app.no_color


async def test_curves_are_told_apart_by_their_marks(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app, "space", "space", "c", size=(120, 40)) as pilot:
        await rested(app, pilot)
        text = screen_text(app)

    assert text.count("●") > 6
    assert text.count("▲") > 6


@pytest.mark.parametrize("name", ["draftyard", "draftyard-light"])
def test_whatever_must_be_read_stands_out_from_its_ground(name: str) -> None:
    """4.5:1, as WCAG 2.1 wants of text; what only decorates (rules, tracks, the span of a curve) is left out."""
    inks = INKS[name]
    weak = {
        (meaning, ground): round(ratio, 2)
        for meaning in set(inks.styles) - {"ground", "raised", "cursor", "line", "band", "cursor_ground", "match"}
        for ground in ("ground", "raised", "cursor")
        if (ratio := contrast(inks[meaning].color, inks[ground].color)) < 4.5  # type: ignore[arg-type]
    }

    assert weak == {}


def test_in_the_terminals_own_colours_what_is_read_most_has_its_default() -> None:
    """What sixteen unknown colours look like nobody can compute."""
    inks = INKS["draftyard-16"]

    assert {inks[meaning].color.name for meaning in ("text", "strong", "muted", "faint")} == {"default"}  # type: ignore[union-attr]


@pytest.mark.usefixtures("_answering_host")
async def test_the_pictures_of_the_documentation_are_what_the_screens_show(
    yard_places: Places, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(places=yard_places)
    async with opened(app, size=(140, 40)) as pilot:
        for name, keys in PICTURES.items():
            await shown_after(app, pilot, name, keys)

            assert matches(IMAGES / f"{name}.svg", picture(app)), name


async def test_the_narrowest_screen_still_names_each_run(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app, size=(LEAST_WIDTH, LEAST_HEIGHT)):
        text = screen_text(app)

    assert re.search(r"^▌R\? qwen27b/v6 .*running +25k/60k +11h15m", text, re.MULTILINE), text
    assert re.search(r"^ O  qwen3.6-27b.* GPU OOM", text, re.MULTILINE), text


@pytest.mark.parametrize("name", [theme.name for theme in THEMES])
def test_no_ink_has_the_colour_of_the_ground_below_it(name: str) -> None:
    """Nor that of the row under the cursor."""
    inks = INKS[name]
    grounds = {inks[ground].color for ground in ("ground", "raised", "cursor")} - {inks["text"].color}
    words = {
        inks[meaning].color for meaning in ("text", "strong", "muted", "faint", "live", "good", "bad", "warn", "odd")
    }

    assert not grounds & words


async def test_a_very_large_terminal_is_filled_from_edge_to_edge(open_app: Callable[..., Draftyard]) -> None:
    app = open_app(run=LIVE)
    async with opened(app, size=(400, 120)) as pilot:
        for keys, words in (("", "bottleneck"), ("2", "grad_norm"), ("escape space space c", "Told differently")):
            await press(app, pilot, *keys.split())
            await shown(app, pilot, words)
            strips = screen_strips(app)

            assert [strip.cell_length for strip in strips] == [400] * 120, keys
            assert strips[-1].text.rstrip().endswith("quit"), keys
            assert sum(bool(strip.text[300:].strip()) for strip in strips) > 10, keys
