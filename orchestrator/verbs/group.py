"""A group of verbs whose unknown words are answered in one way, at the top (`draftyard`) and below (`recipe`, `config`)."""

from __future__ import annotations

import click

from orchestrator.nearest import nearest

# What other tools call it: the verbs here.
OTHERWISE = {
    "status": "ls or show", "list": "ls", "ps": "ls", "jobs": "ls", "info": "show", "describe": "show",
    "run": "launch", "train": "launch", "start": "launch", "submit": "launch", "test": "smoke",
    "tail": "logs", "log": "logs", "top": "watch", "ui": "watch", "eval": "evaluate",
    "kill": "stop", "cancel": "stop", "download": "pull", "fetch": "pull", "delete": "rm", "remove": "rm",
    "restart": "resume", "continue": "resume", "recipes": "recipe list",
}  # fmt: skip


class VerbGroup(click.Group):
    """Raises UsageError with the verb that was meant, or with all there are."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        word = args[0]
        if word not in known and not word.startswith("-") and not ctx.resilient_parsing:
            near, otherwise = nearest(word, known), OTHERWISE.get(word) if ctx.parent is None else None
            hint = f"did you mean {near!r}?" if near else f"the verbs are {', '.join(known)}"
            hint = f"here it is {otherwise}" if otherwise else hint
            of = f" of {self.name}" if ctx.parent is not None else ""
            raise click.UsageError(f"no verb {word!r}{of}; {hint}", ctx)
        return super().resolve_command(ctx, args)
