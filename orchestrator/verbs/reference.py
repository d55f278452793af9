"""Writes docs/reference.md from the verbs themselves: `python -m orchestrator.verbs.reference docs/reference.md`.

A test holds the file against what this makes, so the page cannot fall behind the program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from orchestrator.cli import GROUPS, draftyard
from orchestrator.store.filter import __doc__ as filter_words
from orchestrator.verbs.exits import EXIT_CODES
from orchestrator.verbs.frame import Verb

INTRODUCTION = """\
# The verbs of draftyard

Made from the program itself (`python -m orchestrator.verbs.reference docs/reference.md`); a test holds it
against the program.

RUN is a full id, a unique beginning of one (4 characters or more), `@last` or `@failed`: the newest training,
as `ls` has it; the newest job of any kind only where there is none. RECIPE is a path, the name of a file in
`./recipes`, or a bundled recipe. Durations are written `90`, `90s` or `2h30m`, sizes
`95GiB` or `95GB` (different!).

Data goes to stdout, everything else to stderr. With `--json` stdout is one document with a `schema_version`,
or JSON Lines where a verb streams; times are RFC 3339 in UTC, sizes are integers in bytes, and a value that
is not a number is null beside a key `…_flag` that says `nan`, `inf` or `-inf`. Errors are JSON too, with the
same exit code. Tables are cut to the width of a terminal and never in a pipe; `NO_COLOR` is honoured.
"""

SETTINGS = """\
## Where things lie

| what | flag | environment | otherwise |
|---|---|---|---|
| database | `--db FILE` | `DRAFTYARD_DB` | `runs.db` beside `recipes/`, else `$XDG_DATA_HOME/draftyard/runs.db` |
| hosts | | `DRAFTYARD_HOSTS` | `hosts.yaml` beside `recipes/`, else `$XDG_CONFIG_HOME/draftyard/hosts.yaml` |
| host of a verb | `--host HOST` | `DRAFTYARD_HOST` | `local` |
| ssh | | | `~/.ssh/config` and what it includes, as `ssh` itself reads it |
| alerts | | `DRAFTYARD_WEBHOOK` | none are sent |

Between the environment and what is built in stand two files with the keys `db`, `hosts_file`, `host` and `keys` (of
the screens, by name: `keys: {runs.sort: z}`): the project's `draftyard.yaml` (looked for up to the git root), then `$XDG_CONFIG_HOME/draftyard/config.yaml`.
`draftyard config show --origin` prints what counts here and why.

`DRAFTYARD_WEBHOOK` is an http(s) address that gets one JSON object (`text`, `run`, `kind`, `state`, `reason`, `host`, `step`, `at_s`)
by POST for each ending, hang, loss that is no number, disk that fills up and fault of the follower. The follower reads it from the environment of the
verb that starts it; one that runs already keeps what it was started with. It is stored nowhere and in no message;
`user:password@` in it is sent as basic authorization.
"""

COMPLETION = """\
## Completion

    eval "$(_DRAFTYARD_COMPLETE=bash_source draftyard)"     # bash, in ~/.bashrc
    eval "$(_DRAFTYARD_COMPLETE=zsh_source draftyard)"      # zsh, in ~/.zshrc
    _DRAFTYARD_COMPLETE=fish_source draftyard | source      # fish, in config.fish

It knows verbs, options, recipes, hosts and runs from local state and never contacts a machine.
"""


def page() -> str:
    """The whole reference as Markdown."""
    parts = [INTRODUCTION, "## Exit codes\n", _code_table(list(EXIT_CODES)), SETTINGS]
    with click.Context(draftyard, info_name="draftyard") as root:
        listing = draftyard.get_command(root, "ls")
        assert isinstance(listing, Verb)
        parts += [_common_section(listing, root), COMPLETION, _filter_section()]
        for title, verbs in GROUPS.items():
            parts.append(f"## {title}\n")
            for name in verbs:
                command = draftyard.get_command(root, name)
                assert command is not None
                parts += _sections(command, name, root)
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _sections(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    with click.Context(command, info_name=name, parent=parent) as context:
        if isinstance(command, click.Group):
            for below in command.list_commands(context):
                found = command.get_command(context, below)
                assert found is not None
                yield from _sections(found, below, context)
            return
        assert isinstance(command, Verb)
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"### {context.command_path}\n"
        yield f"    {usage}\n"
        yield _paragraphs(command.help or "") + "\n"
        yield _options(command, context)
        yield "\n".join(f"    {example}" for example in command.examples) + "\n"
        yield "Exit codes: " + ", ".join(command.exits) + "\n"


def _options(command: Verb, context: click.Context) -> str:
    own = [option for option in command.params if isinstance(option, click.Option) and not _is_common(option)]
    return _option_table(own, context)


def _common_section(command: Verb, context: click.Context) -> str:
    common = [option for option in command.params if isinstance(option, click.Option) and _is_common(option)]
    return "## Options that every verb has\n\n" + _option_table(common, context)


def _option_table(options: list[click.Option], context: click.Context) -> str:
    records = [option.get_help_record(context) for option in options]
    rows = [f"| `{_escaped(record[0])}` | {_escaped(record[1])} |" for record in records if record is not None]
    return "\n".join(["| option | |", "|---|---|", *rows, ""]) if rows else ""


def _is_common(option: click.Parameter) -> bool:
    return bool(option.name and option.name.startswith("common_"))


def _filter_section() -> str:
    text = (filter_words or "").strip().partition("\n\n")[2].partition("\nIt runs nothing")[0]
    return f"## Filters of `ls`\n\n{text}\n"


def _code_table(codes: list[str]) -> str:
    return "\n".join(
        ["| code | meaning |", "|---|---|", *(f"| {code} | {_escaped(EXIT_CODES[code])} |" for code in codes), ""]
    )


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
