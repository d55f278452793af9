"""Colours by meaning: one palette safe for colour-blind eyes, a light one, one of the terminal's own 16.

Whatever must be read has a contrast of 4.5:1 or more to every ground it may stand on; a test computes it.
Screens ask for an ink by its meaning (`live`, `good`, `bad`, ...), never for a colour. The hues of
the first two are those of Okabe and Ito (2008), lightened or darkened for their ground; states stay apart for eyes that
tell no red from green, which a test computes as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.style import Style
from textual.theme import Theme

# Layers of a chart with several runs, in the order they are given out.
SERIES = ("series_1", "series_2", "series_3", "series_4", "series_5", "series_6")
# What tells them apart where no colour does, in their legends and along their curves.
MARKS = dict(zip(SERIES, "●▲■◆+○", strict=True))

_DARK = {
    "ground": "#0e1217", "raised": "#161c24", "cursor": "#1f2a37", "line": "#2b3542",
    "text": "#cdd5df", "strong": "#f2f5f8", "muted": "#9aa7b6", "faint": "#8593a4",
    "live": "#56b4e9", "good": "#3fbf95", "bad": "#ee7a45", "warn": "#e8b33a", "odd": "#cc79a7", "accent": "#56b4e9",
    "band": "#2f5f80", "series_1": "#56b4e9", "series_2": "#e69f00", "series_3": "#3fbf95",
    "series_4": "#cc79a7", "series_5": "#f0e442", "series_6": "#ee7a45",
}  # fmt: skip
_LIGHT = {
    "ground": "#fafafa", "raised": "#f0f2f4", "cursor": "#dfe8f1", "line": "#cfd6dd",
    "text": "#2a323c", "strong": "#0b0f14", "muted": "#47525e", "faint": "#5a6674",
    "live": "#006bab", "good": "#00694f", "bad": "#851500", "warn": "#8a5700", "odd": "#8f4772", "accent": "#006bab",
    "band": "#a9cbe2", "series_1": "#006bab", "series_2": "#8a5a00", "series_3": "#00694f",
    "series_4": "#8f4772", "series_5": "#655f00", "series_6": "#851500",
}  # fmt: skip
_SIXTEEN = {
    "ground": "default", "raised": "default", "cursor": "default", "line": "bright_black",
    "text": "default", "strong": "default", "muted": "default", "faint": "default",
    "live": "bright_cyan", "good": "green", "bad": "bright_red", "warn": "yellow", "odd": "magenta", "accent": "bright_cyan",
    "band": "blue", "series_1": "bright_cyan", "series_2": "yellow", "series_3": "green",
    "series_4": "magenta", "series_5": "bright_yellow", "series_6": "bright_red",
}  # fmt: skip


@dataclass(frozen=True)
class Inks:
    """Rich styles by meaning."""

    styles: Mapping[str, Style] = field(default_factory=dict)

    def __getitem__(self, meaning: str) -> Style:
        return self.styles[meaning]


def _inks(palette: Mapping[str, str]) -> Inks:
    grounds = {
        # Where no colour is left for a ground of its own, the row under the cursor is bold beside its mark.
        "cursor_ground": Style(bgcolor=palette["cursor"], bold=palette["cursor"] == palette["ground"] or None),
        "match": Style(color="black" if palette["ground"] == "default" else palette["ground"], bgcolor=palette["warn"]),
    }
    weights = {"strong": Style(color=palette["strong"], bold=True), "key": Style(color=palette["accent"], bold=True)}
    return Inks({name: Style(color=value) for name, value in palette.items()} | grounds | weights)


INKS = {"draftyard": _inks(_DARK), "draftyard-light": _inks(_LIGHT), "draftyard-16": _inks(_SIXTEEN)}


def _theme(name: str, palette: Mapping[str, str], *, dark: bool, ansi: bool = False) -> Theme:
    css = {key: _css_colour(value) for key, value in palette.items()}
    named = {"ansi-background": "ansi_black", "ansi-foreground": "ansi_white"} if ansi else {}
    return Theme(
        name=name,
        primary=css["accent"],
        secondary=css["muted"],
        accent=css["accent"],
        warning=css["warn"],
        error=css["bad"],
        success=css["good"],
        foreground=css["text"],
        background=css["ground"],
        surface=css["ground"],
        panel=css["raised"],
        dark=dark,
        ansi=ansi,
        variables=named
        | {f"yard-{key.replace('_', '-')}": value for key, value in css.items()}
        | {"scrollbar": css["line"], "scrollbar-background": css["ground"], "scrollbar-hover": css["faint"],
           "scrollbar-active": css["muted"], "scrollbar-corner-color": css["ground"],
           "scrollbar-background-hover": css["ground"], "scrollbar-background-active": css["ground"]},
    )  # fmt: skip


def _css_colour(colour: str) -> str:
    return colour if colour.startswith("#") else f"ansi_{colour}"


THEMES = (
    _theme("draftyard", _DARK, dark=True),
    _theme("draftyard-light", _LIGHT, dark=False),
    _theme("draftyard-16", _SIXTEEN, dark=True, ansi=True),
)
