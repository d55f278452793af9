"""The words a person types for recipes, branches, runs, hosts, durations, sizes and cards; each completes itself.

What completes them is in `completion`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from orchestrator.errors import UsageError
from orchestrator.lazy import lazy
from orchestrator.units import parse_bytes, parse_duration
from orchestrator.verbs.exits import EMPTY
from orchestrator.verbs.frame import places_of

if TYPE_CHECKING:
    from orchestrator.actions import card_names
    from orchestrator.actions.card_names import KnownCard
    from orchestrator.verbs import completion
else:
    card_names = lazy("orchestrator.actions.card_names")
    completion = lazy("orchestrator.verbs.completion")  # it needs more than most verbs


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


class CompletedWord(click.ParamType[str]):
    """A word with a list of likely values; any other word is taken too, the action judges it."""

    def __init__(self, name: str, *, may_be_path: bool = False) -> None:
        self.name, self.may_be_path = name, may_be_path

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        words = completion.words(self.name, places_of(ctx), first=_first_word(ctx))
        return [CompletionItem(word, help=told) for word, told in words if word.startswith(incomplete)]


def _first_word(ctx: click.Context) -> str | None:
    """The run or recipe typed before the word that is completed; click leaves it unread behind an open option."""
    named = (ctx.params.get(name) for name in ("selector", "recipe", "recipe_word"))
    return next((str(word) for word in [*named, *ctx.args] if word), None)


class TypedPath(click.Path):
    """A path as a Path; of an empty word it does not make the working folder, as click's own does."""

    def __init__(self, *, exists: bool = False, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(exists=exists, file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(EMPTY, param, ctx)
        if not self.file_okay and Path(value).is_file():
            self.fail(f"{value} is a file; a folder was expected", param, ctx)
        return super().convert(value, param, ctx)


class Duration(click.ParamType[float]):
    """`90`, `90s`, `2h30m` as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Size(click.ParamType[int]):
    """`95GiB` or `95GB` (different) as bytes; a bare `95G` or `95` is refused."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        is_bare = str(value).isdecimal()
        if is_bare and int(value):
            self.fail(f"is {value} bytes; write the unit, such as {value}GiB", param, ctx)
        try:
            size_bytes = int(value) if is_bare else parse_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size_bytes <= 0:
            self.fail(f"is {value}; nothing fits into that; write a size such as 95GiB", param, ctx)
        return size_bytes


class OneCard(click.ParamType["KnownCard | int"]):
    """A card by its memory, such as `95GiB`, in bytes, or by its name, such as `H200`."""

    name = "card"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> KnownCard | int:
        text = str(value)
        if text.isdigit() and (near := f"RTX {text}") in card_names.names():
            self.fail(f"is {text} bytes; did you mean {near!r}?", param, ctx)
        if isinstance(value, int) or text[:1].isdigit():
            return SIZE.convert(value, param, ctx)
        try:
            return card_names.known_card(text)
        except UsageError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in card_names.names() if name.lower().startswith(incomplete.lower())]


class Since(click.ParamType[float]):
    """`10m` ago, or a date or time (UTC unless it has an offset), as seconds since the epoch."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value)
        try:
            return time.time() - parse_duration(text)
        except ValueError:
            pass
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"is {text!r}; write 10m, 2h, 2026-01-31 or 2026-01-31T09:30", param, ctx)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def count(least: int) -> click.IntRange:
    """A number of things; a billion is beyond every list and every log, and within what the database counts."""
    return click.IntRange(min=least, max=10**9)


RECIPE = CompletedWord("recipe", may_be_path=True)
RECIPE_NAME = CompletedWord("recipe")
RUN = CompletedWord("run")
BRANCH_NAME = CompletedWord("branch")
METRIC = CompletedWord("metric")
RUN_OR_METRIC = CompletedWord("run_or_metric")
SORT = CompletedWord("sort")
HOST = CompletedWord("host")
DURATION = Duration()
SIZE = Size()
CARD = OneCard()


def gpu_names(text: str | None) -> tuple[str, ...]:
    """The names that --gpus LIST gives; none where it was not said. Raises UsageError for an empty one among them."""
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(
            f"--gpus {text!r} holds an empty name; give indices or UUIDs with a comma between, such as 0,1"
        )
    return names


def _one_host(_: click.Context, __: click.Parameter, named: tuple[str, ...]) -> str | None:
    """Of several the last would be taken without a word."""
    if len(named) > 1:
        raise click.UsageError(
            f"--host names {len(named)} hosts: {', '.join(named)}; this takes one, and launch alone several"
        )
    return named[0] if named else None


HOST_OPTION: Decorator = click.option(
    "--host",
    metavar="HOST",
    type=HOST,
    multiple=True,
    callback=_one_host,
    help="Where (default: the setting `host`, else local).",
)
HOSTS_OPTION: Decorator = click.option(
    "--host",
    metavar="HOST",
    type=HOST,
    multiple=True,
    help="Where (default: the setting `host`, else local); repeatable: the processes of `roles` are shared out evenly.",
)
