"""Every screen in every theme: its colours alone, all that must be read readable; ASCII where that was asked for."""

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import pytest
from rich.color import Color
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from orchestrator.actions.places import Places
from tests.tui.golden import EVERY_SCREEN, on_top, opened, walk
from tui.app import Draftyard
from tui.plain import screen_strips, screen_text
from tui.theme import INKS, THEMES

NAMES = [theme.name for theme in THEMES]
DECORATION = set("─━│╭╮╰╯┤┼╸╺┄┊╎▏▌▁▂▃▄▅▆▇█▔ ") | {chr(sign) for sign in range(0x2800, 0x2900)}  # rules, bars, curves


def light(colour: Color) -> float:
    """Relative luminance as WCAG 2.1 defines it, 0 to 1."""
    shares = [part / 255 for part in colour.get_truecolor(DEFAULT_TERMINAL_THEME)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Color, other: Color) -> float:
    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def pieces(app: Draftyard) -> Iterator[tuple[str, Style]]:
    """Whatever stands on the screen."""
    for strip in on_top(app):
        for text, style, _ in strip:
            yield text, style or Style.null()


@pytest.mark.slow
@pytest.mark.parametrize("theme", NAMES)
async def test_every_screen_keeps_to_the_colours_of_its_theme_and_can_be_read(
    theme: str, yard_places: Places, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(places=yard_places)
    app.theme = theme
    known = {colour for style in INKS[theme].styles.values() for colour in colours(style)}
    seen: dict[str, int] = {}
    async with opened(app, size=(140, 40)) as pilot:
        async for name in walk(app, pilot):
            told = list(pieces(app))
            seen[name] = len(told)

            assert {(text, str(style)) for text, style in told if not colours(style) <= known} == set(), name
            assert {(text, str(style)) for text, style in told if is_weak(text, style)} == set(), name

    assert seen.keys() == EVERY_SCREEN.keys()
    assert min(seen.values()) > 10


def colours(style: Style) -> set[object]:
    """Whatever they are called."""
    return {(colour.type, colour.number, colour.triplet) for colour in (style.color, style.bgcolor) if colour}


def is_weak(text: str, style: Style) -> bool:
    """Under 4.5:1, as WCAG 2.1 wants of text. What the terminal's own colours are nobody can compute."""
    if (
        set(text) <= DECORATION
        or style.color is None
        or style.bgcolor is None
        or style.bgcolor.is_default
        or style.reverse
    ):
        return False
    return contrast(style.color, style.bgcolor) < 4.5


@pytest.mark.slow
async def test_every_screen_in_ascii_is_ascii(yard_places: Places, open_app: Callable[..., Draftyard]) -> None:
    """With whatever lies over them; nothing is left without a likeness, and each sign takes the cells it took."""
    app = open_app(places=yard_places, ascii_only=True)
    async with opened(app, size=(140, 40)) as pilot:
        async for name in walk(app, pilot):
            text = screen_text(app)

            assert text.isascii(), name
            assert text.replace("\n", "").isprintable(), name
            assert "?" not in re.sub(r"R\?|\? +(f1 +)?[hH]elp|'\?", "", text), name
            assert {len(strip.text) for strip in screen_strips(app)} == {140}, name


SEEN_BY = {  # linear red, green and blue, as Machado, Oliveira and Fernandes (2009) have them at severity 1
    "everybody": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}
FAR_APART = 12.0  # by CIE 1976; 2.3 is what an eye can just tell


@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize("theme", ["draftyard", "draftyard-light"])
def test_states_stay_apart_for_eyes_that_tell_no_red_from_green(theme: str, eyes: str) -> None:
    inks = INKS[theme]
    seen = {word: lab(linear(inks[word].color), SEEN_BY[eyes]) for word in ("live", "good", "bad", "warn", "odd")}
    near = {(one, other) for one, other in combinations(seen, 2) if math.dist(seen[one], seen[other]) < FAR_APART}

    assert near == set()


def linear(colour: Color | None) -> list[float]:
    assert colour is not None
    shares = [part / 255 for part in colour.get_truecolor(DEFAULT_TERMINAL_THEME)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares]


def lab(rgb: Sequence[float], eyes: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """CIE L*a*b* of what those eyes see, D65."""
    red, green, blue = (min(1.0, max(0.0, sum(map(operator.mul, row, rgb)))) for row in eyes)
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116
        for part in (
            (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
            0.2126 * red + 0.7152 * green + 0.0722 * blue,
            (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)
