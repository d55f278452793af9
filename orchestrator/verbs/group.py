"""A group of verbs whose unknown words are answered in one way, at the top (`draftyard`) and below (`recipe`, `config`)."""

from __future__ import annotations

import click

from orchestrator.nearest import nearest


class VerbGroup(click.Group):
    """Raises UsageError with the verb that was meant, or with all there are."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        word = args[0]
        if word not in known and not word.startswith("-") and not ctx.resilient_parsing:
            near = nearest(word, known)
            hint = f"did you mean {near!r}?" if near else f"the verbs are {', '.join(known)}"
            of = f" of {self.name}" if ctx.parent is not None else ""
            raise click.UsageError(f"no verb {word!r}{of}; {hint}", ctx)
        return super().resolve_command(ctx, args)
