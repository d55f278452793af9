"""A screen as plain text: for pipes and for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual._context import visible_screen_stack

if TYPE_CHECKING:
    from textual.app import App
    from textual.strip import Strip


def screen_text(app: App[Any]) -> str:
    """Every line of the screen, blanks at line ends left out, one newline at the end."""
    return "\n".join(strip.text.rstrip() for strip in screen_strips(app)).rstrip() + "\n"


def screen_strips(app: App[Any]) -> list[Strip]:
    """Every line of the screen with its styles, whatever lies over it included.

    As Textual's own screenshot has them; its picture, read back as text, took twenty times as long.
    """
    visible_screen_stack.set(app._background_screens)
    return app.screen._compositor.render_strips(app.size)
