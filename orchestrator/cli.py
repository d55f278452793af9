"""The command `draftyard`: finds the verb, loads only it, and turns every ending into an exit code.

The verbs themselves live in `orchestrator.verbs`; what they do lives in `orchestrator.actions`.
The table below has each verb's line for `--help`, so that asking for help loads none of them.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from orchestrator.errors import DraftyardError, GateRefused, NotFinished, RecipeError
from orchestrator.interrupts import Interrupted, die_of, heard_as_interrupts
from orchestrator.lazy import loaded
from orchestrator.verbs.exits import EMPTY, EXIT_CODES, SCHEMA_VERSION, ClosedPipe
from orchestrator.verbs.group import VerbGroup
from orchestrator.verbs.plain import json_text, shown, with_long_words_cut, with_names_in_line
from orchestrator.verbs.program import speller

# verb -> (module of orchestrator.verbs, line in --help), in the order and the groups of the help page.
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "From a recipe to a run": {
        "recipe": ("recipes", "Check, show, explain and compare recipes."),
        "plan": ("recipes", "Predict memory and time without running."),
        "deploy": ("jobs", "Ship a recipe's tree to a host and verify it."),
        "prepare": ("jobs", "Make a recipe's answers and hidden states on a host."),
        "smoke": ("jobs", "Climb the smoke ladder: short, hard tests before a launch."),
        "evidence": ("history", "What passed where, for which fingerprint."),
        "launch": ("jobs", "Start a recipe's branch on a host."),
    },
    "While it runs, and after": {
        "watch": ("screen", "The terminal screen of every run."),
        "ls": ("history", "List runs."),
        "show": ("history", "Everything known about one run."),
        "logs": ("logs", "A run's output, live with -f."),
        "metrics": ("history", "A run's metrics as a table or JSON."),
        "plot": ("plot", "Curves of runs as a picture, PNG or SVG."),
        "compare": ("history", "Two or more runs side by side."),
        "diff": ("history", "What two runs were told differently."),
        "wait": ("life", "Wait until a run ends; its outcome is the exit code."),
        "stop": ("life", "Stop a run and free its GPUs."),
        "resume": ("jobs", "Start a new attempt from the last checkpoint."),
        "evaluate": ("jobs", "Measure a run's acceptance length on its host."),
        "export": ("jobs", "Write a run's drafter for public tools, or its metrics as CSV."),
    },
    "Keeping order": {
        "pull": ("files", "Bring a run's checkpoints here, verified."),
        "import": ("files", "Read in a run folder brought from elsewhere."),
        "tag": ("keeping", "Add or remove a run's tags."),
        "mark": ("keeping", "Set a run's final state by hand; logged for ever."),
        "note": ("keeping", "Write a run's note."),
        "rm": ("keeping", "Move runs to the bin."),
        "restore": ("keeping", "Take runs out of the bin."),
        "purge": ("keeping", "Forget binned runs for good."),
    },
    "Machines and settings": {
        "doctor": ("hosts", "Check this machine or a host; each fault with its repair."),
        "reap": ("hosts", "Find and end what outlived our own runs on a host."),
        "gc": ("hosts", "Remove old trees and run folders that nothing needs."),
        "hosts": ("hosts", "Known hosts and what was last seen on them."),
        "follow": ("follow", "The background follower, by hand."),
        "reset-term": ("files", "Put the terminal right after a screen was killed."),
        "config": ("hosts", "Settings and where they came from."),
    },
}


class Verbs(VerbGroup):
    """The verbs of the table, imported one file at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for verbs in GROUPS.values() for name in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for verbs in GROUPS.values():
            if cmd_name in verbs:
                command: click.Command = loaded(f"orchestrator.verbs.{verbs[cmd_name][0]}").VERBS[cmd_name]
                return command
        return None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in loaded("orchestrator.verbs.frame").common_words():
                raise
            told = f"{error.option_name} goes behind the verb: draftyard VERB {error.option_name}"
            raise click.UsageError(told, ctx) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The verbs' names, without loading one of them."""
        lines = {name: line for verbs in GROUPS.values() for name, (_, line) in verbs.items()}
        found = [CompletionItem(name, help=line) for name, line in lines.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in verbs.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl(list(EXIT_CODES.items()))
        with formatter.section("Examples"):
            for line in ("draftyard smoke smollm2 --host local", "draftyard launch smollm2 --host local --follow"):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
        with formatter.section("Completion"):
            formatter.write_text(
                'bash and zsh: eval "$(_DRAFTYARD_COMPLETE=bash_source draftyard)", with zsh_source for zsh'
            )
            formatter.write_text("fish: _DRAFTYARD_COMPLETE=fish_source draftyard | source")


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="draftyard", message="draftyard %(version)s")
@click.option("--db", metavar="FILE", help="The database (default: runs.db beside recipes/).")
def draftyard(db: str | None) -> None:
    """Ships, smoke-tests, launches, records and explains DFlash drafter training on remote GPU machines."""
    if db == "":
        raise click.BadParameter(EMPTY, param_hint="'--db'")


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: runs the command line and exits with its code."""
    _fill_closed_streams()
    _find_home()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # LANG=C must not turn a × into a crash
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with heard_as_interrupts() as came, _quiet_in_a_prompt():
            code = _run(arguments)
    except KeyboardInterrupt as error:  # it came before anything answers to it, or when all was said
        came, code = [error.number] if isinstance(error, Interrupted) else [], 130
    if came:
        die_of(came[0])
    sys.exit(code)


def _fill_closed_streams() -> None:
    """A stream that the shell closed (`>&-`) is a hole that the next file opened would fill: the database, say."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  (lives as long as we do)


def _find_home() -> None:
    """Where there is none in the environment, what is started here finds it too; an empty one would stand for /.

    One that begins with ~ is none: only a shell makes a folder of it, and none did.
    """
    home = os.environ.get("HOME")
    if not home or home.startswith("~"):
        os.environ.pop("HOME", None)
        with contextlib.suppress(RuntimeError):  # a user whom this machine does not know
            os.environ["HOME"] = str(Path.home())


def _quiet_in_a_prompt() -> contextlib.AbstractContextManager[object]:
    """What a completion prints stands in the line that a person is typing."""
    is_asked = os.environ.get("_DRAFTYARD_COMPLETE", "").endswith("_complete")
    return contextlib.redirect_stderr(io.StringIO()) if is_asked else contextlib.nullcontext()


def _run(arguments: list[str]) -> int:
    try:
        return _answer(arguments)
    except (ClosedPipe, BrokenPipeError):
        _forget_stdout()
        return 141
    except OSError as error:
        return _broken(error, arguments) if _is_verbose(arguments) else _refused_by_system(error, arguments)
    except Exception as error:  # noqa: BLE001  (a fault of our own: whatever it is, it may hold a secret)
        return _broken(error, arguments)


def _answer(arguments: list[str]) -> int:
    try:
        ended = draftyard.main(arguments, prog_name="draftyard", standalone_mode=False)
        sys.stdout.flush()
    except DraftyardError as error:
        return _fail(
            str(error) + (_causes(error) if _is_verbose(arguments) else ""),
            arguments,
            code=error.exit_code,
            facts=_facts(error),
        )
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        usage = f"\ntry: {error.ctx.command_path} --help" if isinstance(error, click.UsageError) and error.ctx else ""
        return _fail(error.format_message() + usage, arguments, code=2, facts={"reason": "usage"})
    except (KeyboardInterrupt, click.Abort):
        return 130
    return ended if isinstance(ended, int) else 0


def _forget_stdout() -> None:
    """What is still buffered must not complain at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused_by_system(error: OSError, arguments: Sequence[str]) -> int:
    """A file, or stdout itself, that the system will not read or write; -v shows where it was met."""
    message = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF):
        message, arguments = f"the output cannot be written: {error.strerror}", ()  # stdout is what is lost: no JSON
        message = "\n  ".join([message, *getattr(error, "__notes__", ())])  # what goes on all the same
        _forget_stdout()
    with contextlib.suppress(OSError):  # stdout may be lost all the same; the exit code still tells
        _fail(message, arguments, code=1, facts={"reason": DraftyardError.reason})
    return 1


def _broken(error: Exception, arguments: Sequence[str]) -> int:
    """What nobody foresaw, in one last line to report; -v shows the way there before it. Nothing with a secret's shape is in either."""
    hide = loaded("orchestrator.redact").redact
    way = loaded("traceback").extract_tb(error.__traceback__)
    if _is_verbose(arguments):
        with contextlib.suppress(OSError):
            click.echo(shown(hide("".join(loaded("traceback").format_exception(error)))), err=True, nl=False)
    ours = [frame for frame in way if Path(frame.filename).is_relative_to(Path(__file__).parent)] or way
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
    said = (str(error).splitlines() or ["no message"])[0]
    told = hide(f"draftyard broke at {where}: {type(error).__name__}: {said}; please report it")
    with contextlib.suppress(OSError):  # the exit code still tells
        _fail(told, arguments, code=1, facts={"reason": DraftyardError.reason})
    return 1


def _is_verbose(arguments: Sequence[str]) -> bool:
    return any(word == "--verbose" or (word.startswith("-v") and set(word[1:]) == {"v"}) for word in arguments)


def _causes(error: BaseException) -> str:
    """What lies behind an error, a line each, for those who asked with -v."""
    told, cause = "", error.__cause__
    while cause is not None:
        told += f"\n  because of {type(cause).__name__}: {cause}"
        cause = cause.__cause__
    return told


def _facts(error: DraftyardError) -> dict[str, Any]:
    facts: dict[str, Any] = {"reason": error.reason}
    if isinstance(error, RecipeError):
        facts["items"] = error.items
    if isinstance(error, GateRefused):
        facts["repair"] = error.repair
    return facts


def _fail(message: str, arguments: Sequence[str], *, code: int, facts: Mapping[str, Any]) -> int:
    """Says it, as JSON where --json is among the arguments; names that were typed stay in one line."""
    message = with_names_in_line(message, [*arguments, os.environ.get("PWD", "")])
    if "--json" in arguments:
        body = {"schema_version": SCHEMA_VERSION, "error": {"message": message, "exit_code": code, **facts}}
        click.echo(json_text(body, indent=2))
    else:
        message = with_long_words_cut(message, arguments)
        spelled = speller(name for verbs in GROUPS.values() for name in verbs)(message)
        with contextlib.suppress(OSError):  # the exit code still tells
            click.echo(shown(f"{'not finished' if code == NotFinished.exit_code else 'error'}: {spelled}"), err=True)
    return code


if __name__ == "__main__":
    main()
