"""`watch`: opens the terminal screen. Nothing of it is loaded before that."""

from __future__ import annotations

import sys

import click

from orchestrator.errors import UsageError
from orchestrator.lazy import lazy
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.words_typed import RUN

screens = lazy("tui.opening")  # its library loads for no other verb


# As the screens name themselves; a test holds the two together.
NAMES = ("runs", "hosts", "smoke", "launch", "overview", "curves", "memory", "log", "failure", "spec", "files")


@verb(
    "watch", exits=("0", "2", "5"),
    examples=["draftyard watch", "draftyard watch @last --once", "draftyard watch @failed --screen failure --once"],
)  # fmt: skip
@click.argument("selectors", nargs=-1, metavar="[RUN]...", type=RUN)
@click.option("--screen", type=click.Choice(NAMES), help="Open there; from `overview` on it is a tab of the one RUN.")
@click.option("--readonly", is_flag=True, help="Look only: no key stops, starts or changes anything.")
@click.option("--once", is_flag=True, help="Print one screen as plain text and end.")
@click.option("--ascii", "is_ascii", is_flag=True, help="Draw with ASCII characters only.")
@click.option("--no-mouse", is_flag=True, help="Leave the mouse to the terminal, so that text can be selected.")
@click.option(
    "--theme", type=click.Choice(["draftyard", "draftyard-light", "draftyard-16"]), help="Colours of the screen."
)
def watch(
    terminal: Terminal,
    selectors: tuple[str, ...],
    *,
    screen: str | None,
    readonly: bool,
    once: bool,
    is_ascii: bool,
    no_mouse: bool,
    theme: str | None,
) -> None:
    """Watch every run, one, or several compared, in the terminal. Leaving the screen leaves the runs going."""
    is_screen = terminal.can_draw and sys.stdin.isatty() and sys.stdout.isatty()
    if not (once or terminal.wants_json or is_screen):
        again = " ".join(["draftyard watch", *selectors, *(["--screen", screen] if screen else []), "--once"])
        needs = "for input and output" if terminal.can_draw else "that can be drawn on, and TERM is dumb"
        raise UsageError(f"the screen needs a terminal {needs}; {again} prints it once, as text")
    code = screens.run(
        terminal.places.db, places=terminal.places, runs=selectors, screen=screen, ascii=is_ascii, readonly=readonly,
        once=once, document=terminal.document if terminal.wants_json else None, theme=theme, mouse=not no_mouse,
        spell=terminal.spell,
    )  # fmt: skip
    raise click.exceptions.Exit(code)


VERBS = {"watch": watch}
