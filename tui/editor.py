"""The person's own editor on the file a screen is about: the log in sight, else the recipe.

The screen leaves the terminal to it and comes back when it ends. Where the file lies is asked in the
reading thread; a file on a host is not fetched.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orchestrator.actions.places import Places
from orchestrator.errors import DraftyardError
from orchestrator.store.rows import Document, RunRow
from tui.detail import read_document
from tui.log_page import LogPage
from tui.ordering import actions
from tui.snapshot import Room

Finding = Callable[[Room], Path]


def recipe_file(places: Places, recipe: str) -> Finding:
    """The recipe as it lies here. The finding raises RecipeError where there is none."""
    return lambda _room: Path(actions("recipes").load(places, recipe).path)


def recipe_of(places: Places, run: RunRow) -> Finding:
    """The recipe that the run was launched with, not whatever has its name now. The finding raises RecipeError."""

    def find(room: Room) -> Path:
        launch = read_document(room.reader, run.id, Document.LAUNCH) or {}
        return Path(actions("recipes").of_run(places, run, launch).path)

    return find


def log_file(page: LogPage) -> Finding:
    """The log as it was brought here, raw."""
    return lambda room: room.reader.logs.path(page.run_id, page.attempt, page.stream)


def editor(environ: Mapping[str, str]) -> list[str]:
    """The words of VISUAL, else of EDITOR, else vi. Raises DraftyardError for words that no shell would read."""
    name = next((name for name in ("VISUAL", "EDITOR") if environ.get(name, "").strip()), None)
    try:
        words = shlex.split(environ[name]) if name else ["vi"]
    except ValueError as error:
        raise DraftyardError(f"{name} is {environ[name or '']!r}: {str(error).lower()}") from error
    if not words or not words[0]:
        raise DraftyardError(f"{name} is {environ[name or '']!r}; it names no editor")
    return words


def edit(path: Path, words: Sequence[str]) -> None:
    """Runs the editor until it ends. Raises DraftyardError where it cannot be started."""
    try:
        subprocess.run([*words, str(path)], check=False)
    except (OSError, ValueError) as error:  # ValueError: a byte that no path may hold
        told = f"the editor {words[0]} cannot be started: {getattr(error, 'strerror', error)}; EDITOR names another"
        raise DraftyardError(told) from error
