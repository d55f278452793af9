"""What every verb has: the common options, examples and exit codes in its help, one way to print.

A verb is a function whose first argument is a Terminal. Data goes to stdout, everything else to
stderr; with --json stdout is one document (or JSON Lines where the verb streams).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from orchestrator.actions.places import Places, find_places
from orchestrator.errors import UsageError
from orchestrator.verbs.exits import EMPTY, EXIT_CODES, SCHEMA_VERSION, ClosedPipe
from orchestrator.verbs.jsonable import jsonable
from orchestrator.verbs.plain import json_text, shown
from orchestrator.verbs.program import sparing, speller

_KEEPS = "a resume keeps the run's values; another training is started by "
# What a verb says of an option that others have; {} is the word behind it.
INSTEAD = {
    ("resume", "--set"): f"{_KEEPS}draftyard launch RECIPE --set {{}}",
    ("resume", "-b"): f"{_KEEPS}draftyard launch RECIPE -b {{}}",
    ("resume", "--branch"): f"{_KEEPS}draftyard launch RECIPE -b {{}}",
    ("resume", "--host"): "a resume goes on where the run's checkpoints lie",
    ("plot", "--to"): "-o FILE names the picture: -o {}",
}


@dataclass(frozen=True)
class Terminal:
    """Where a verb speaks, and what the person asked for with the common options."""

    places: Places
    wants_json: bool
    has_colour: bool
    may_ask: bool  # a question is allowed: a person is there and --no-input was not given
    is_quiet: bool
    verbosity: int
    width: int | None  # None: stdout is not a terminal, nothing is cut
    spell: Callable[[str], str] = str  # commands as they are typed in this shell
    can_draw: bool = True  # what moves the cursor is understood: not in an editor's shell

    def document(self, **body: Any) -> None:
        """One JSON document with its schema version."""
        click.echo(json_text({"schema_version": SCHEMA_VERSION, **jsonable(body)}, indent=2))

    def record(self, **body: Any) -> None:
        """One line of JSON Lines."""
        click.echo(json_text({"schema_version": SCHEMA_VERSION, **jsonable(body)}))

    def lines(self, lines: Iterable[str], *, theirs: Iterable[str] = (), is_ours: bool = True) -> None:
        """Commands in them are spelled as they are typed here, but for what others have written: `theirs`, or all of it."""
        spell = sparing(self.spell, theirs) if is_ours else str
        for line in lines:
            click.echo(shown(spell(line)), color=self.has_colour)

    def say(self, text: str) -> None:
        """A word beside the data, on stderr; nothing under --quiet. Nothing breaks off for want of somebody who hears it."""
        if not self.is_quiet:
            self._whisper(text)

    def detail(self, text: str) -> None:
        """A word for those who asked for more with -v."""
        if self.verbosity:
            self._whisper(text)

    def _whisper(self, text: str) -> None:
        with suppress(OSError):  # stderr is full or gone
            click.echo(shown(self.spell(text)), err=True, color=self.has_colour)

    def confirm(self, question: str, *, yes: bool) -> None:
        """Asks before something that cannot be undone; without a person to ask it is an error."""
        if yes:
            return
        if not self.may_ask:
            raise UsageError(f"{question} Say --yes: no question can be asked here.")
        if not click.confirm(question, err=True):
            raise UsageError("nothing was changed")


class Verb(click.Command):
    """A command with the common options, whose help ends in examples and exit codes."""

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        exits: Sequence[str] = ("0", "1", "2"),
        may_be_empty: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples, self.exits, self.may_be_empty = tuple(examples), tuple(exits), frozenset(may_be_empty)
        self.params += _common_options()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses, then refuses words that can only be a slip: empty ones, and text that is not UTF-8."""
        typed = tuple(args)  # click takes them out one by one
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise self._meant(error, typed, ctx) from error
        if not ctx.resilient_parsing:
            for parameter in self.get_params(ctx):
                for word in _words_of(ctx.params.get(parameter.name or "")):
                    self._check(word, parameter, ctx)
        return rest

    def _meant(self, error: click.NoSuchOption, args: Sequence[str], ctx: click.Context) -> click.UsageError:
        """Of an option that another verb has, what this one does instead."""
        told = INSTEAD.get((self.name or "", error.option_name))
        if told is None:
            return error
        place = next((place for place, word in enumerate(args) if word.startswith(error.option_name)), len(args))
        value = next(iter(args[place + 1 : place + 2]), "VALUE")
        return click.UsageError(f"no option {error.option_name}: {told.format(shlex.quote(value))}", ctx)

    def _check(self, word: str, parameter: click.Parameter, ctx: click.Context) -> None:
        if not word and parameter.name not in self.may_be_empty:
            raise click.BadParameter(EMPTY, ctx, parameter)
        # The name of a file may be any bytes; Python holds those that are no text as lone surrogates.
        if not _is_file(parameter) and any("\ud800" <= mark <= "\udfff" for mark in word):
            raise click.BadParameter(f"{shown(word)!r} is not UTF-8 text", ctx, parameter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")
        with formatter.section("Exit codes"):
            formatter.write_dl([(code, EXIT_CODES[code]) for code in self.exits])

    def invoke(self, ctx: click.Context) -> Any:
        ctx.params = {
            "terminal": terminal_of(ctx),
            **{k: v for k, v in ctx.params.items() if not k.startswith("common_")},
        }
        try:
            told = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise ClosedPipe from error  # click would make an exit code 1 of it
        return told


def _words_of(value: Any) -> list[str]:
    """What was typed for a parameter; an empty path has been refused before it became one."""
    words = value if isinstance(value, tuple) else (value,)
    return [str(word) for word in words if isinstance(word, (str, Path))]


def _is_file(parameter: click.Parameter) -> bool:
    return (
        isinstance(parameter.type, click.Path)
        or parameter.metavar == "FILE"
        or getattr(parameter.type, "may_be_path", False)
    )


def verb(
    name: str, *, examples: Sequence[str], exits: Sequence[str] = ("0", "1", "2"), **kwargs: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a function `f(terminal, …)` a verb; its docstring is the help."""
    return click.command(
        name,
        cls=Verb,
        examples=examples,
        exits=exits,
        context_settings={"help_option_names": ["-h", "--help"]},
        **kwargs,
    )


def terminal_of(ctx: click.Context) -> Terminal:
    """The Terminal of a command's common options; the environment is read here and nowhere below."""
    given = ctx.params
    environ = os.environ
    is_tty = sys.stdout.isatty()
    return Terminal(
        places=places_of(ctx),
        wants_json=bool(given.get("common_json")),
        has_colour=_has_colour(given.get("common_color"), environ, is_tty=is_tty),
        may_ask=sys.stdin.isatty() and not given.get("common_no_input") and not environ.get("CI"),
        is_quiet=bool(given.get("common_quiet")),
        verbosity=int(given.get("common_verbose") or 0),
        width=_width(environ) if is_tty else None,
        spell=speller(_verbs(ctx)),
        can_draw=environ.get("TERM") != "dumb",
    )


def _verbs(ctx: click.Context) -> list[str]:
    root = ctx.find_root()
    return root.command.list_commands(root) if isinstance(root.command, click.Group) else []


def places_of(ctx: click.Context) -> Places:
    """The places for this command line; also asked by completion, before anything is invoked."""
    db = ctx.params.get("common_db") or ctx.find_root().params.get("db")
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("the working directory has been removed; cd to a folder that is there") from error
    return find_places(here, os.environ, db=Path(db) if db else None)


def _common_options() -> list[click.Parameter]:
    return [
        click.Option(["--json", "common_json"], is_flag=True, help="Print JSON with a schema_version."),
        click.Option(
            ["--color", "common_color"],
            type=click.Choice(["auto", "always", "never"]),
            help="Colours; auto by default.",
        ),
        click.Option(["--no-color", "common_color"], flag_value="never", help="The same as --color never."),
        click.Option(["--no-input", "common_no_input"], is_flag=True, help="Never ask; a question becomes an error."),
        click.Option(["--db", "common_db"], metavar="FILE", help="The database (default: runs.db beside recipes/)."),
        click.Option(["-q", "--quiet", "common_quiet"], is_flag=True, help="Only data and errors."),
        click.Option(
            ["-v", "--verbose", "common_verbose"],
            count=True,
            help="Say which settings count, and the cause behind an error.",
        ),
    ]


def common_words() -> set[str]:
    """The options that every verb has, as they are typed."""
    return {word for option in _common_options() for word in option.opts}


def _has_colour(asked: str | None, environ: Mapping[str, str], *, is_tty: bool) -> bool:
    if asked in ("always", "never"):
        return asked == "always"
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    if environ.get("FORCE_COLOR") or environ.get("CLICOLOR_FORCE"):
        return True
    return is_tty


def _width(environ: Mapping[str, str]) -> int:
    columns = environ.get("COLUMNS", "")
    if re.fullmatch(r"[1-9][0-9]{0,5}", columns):
        return int(columns)
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80
