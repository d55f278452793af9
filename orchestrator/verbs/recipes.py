"""`recipe list|check|show|explain|diff` and `plan`: what a recipe says, before anything runs."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import TYPE_CHECKING, Any

import click

from orchestrator.errors import RecipeError
from orchestrator.lazy import lazy
from orchestrator.nearest import listed
from orchestrator.units import counted
from orchestrator.verbs.frame import Terminal, verb
from orchestrator.verbs.group import VerbGroup
from orchestrator.verbs.table import Cell, Column, pairs, table
from orchestrator.verbs.words_typed import BRANCH_NAME, CARD, HOST, RECIPE

if TYPE_CHECKING:
    from orchestrator.actions import plans, recipes
    from orchestrator.actions.card_names import KnownCard
    from orchestrator.recipe import Difference, Explained, layers
    from orchestrator.recipe import overrides as spelling
    from orchestrator.verbs import plan_page
else:
    layers = lazy("orchestrator.recipe.layers")
    spelling = lazy("orchestrator.recipe.overrides")
    plans = lazy("orchestrator.actions.plans")
    recipes = lazy("orchestrator.actions.recipes")
    plan_page = lazy("orchestrator.verbs.plan_page")

BRANCH = click.option(
    "-b", "--branch", metavar="BRANCH", type=BRANCH_NAME, help="A branch of the recipe (default: its default branch)."
)
OVERRIDES = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one value; repeatable."
)


@click.group("recipe", cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
def recipe() -> None:
    """The recipe language: list, check, show, explain, compare."""


@verb("list", examples=["draftyard recipe list", "draftyard recipe list --json"])
def list_recipes(terminal: Terminal) -> None:
    """List the recipes that a name finds, the project's and the bundled ones, with their branches."""
    found = recipes.known(terminal.places)
    if terminal.wants_json:
        terminal.document(recipes=found)
        return
    rows = []
    for item in found:
        for branch in item.branches:
            mark = "(default) " if branch.name == item.default_branch else ""
            rows.append((item.name, branch.name, f"{mark}{branch.why}"))
        rows += [(item.name, "-", "its file is at fault")] if item.faults else []
    columns = [Column("recipe"), Column("branch"), Column("what for", gives_way=True, least=12)]
    terminal.lines(table(columns, rows, width=terminal.width), is_ours=False)
    for item in found:
        if item.faults:
            terminal.say(f"warning: {item.faults[0]}")


@verb("check", examples=["draftyard recipe check recipes/", "draftyard recipe check smollm2 mine.yaml --json"])
@click.argument("paths", nargs=-1, required=True, metavar="PATH…", type=RECIPE)
def check(terminal: Terminal, paths: tuple[str, ...]) -> None:
    """Check recipe files, or every recipe of a folder, with all their branches.

    Files that are named and are not here (data, a script's own programs) are warnings: the recipe is right, but a
    launch from here would be refused, or fail at once. So is what is hardly meant: the name of another recipe in a copy
    of it, a warm-up longer than the training.
    """
    found = recipes.check(terminal.places, paths)
    faults = [fault for checked in found for fault in checked.faults]
    if terminal.wants_json:
        terminal.document(recipes=found)
        if faults:
            raise click.exceptions.Exit(RecipeError.exit_code)
        return
    terminal.lines(
        f"{checked.path}: {counted(len(checked.branches), 'branch', 'branches')}, "
        f"{counted(len(checked.warnings), 'warning') if checked.warnings else 'all good'}"
        for checked in found
        if not checked.faults
    )
    for warning in (line for checked in found for line in checked.warnings):
        terminal.say(f"warning: {warning}")
    if faults:
        raise RecipeError(faults)


@verb(
    "show", examples=["draftyard recipe show smollm2", "draftyard recipe show qwen3.6-27b -b ddtree --set loss.gamma=8"]
)
@click.argument("recipe_word", metavar="RECIPE", type=RECIPE)
@BRANCH
@OVERRIDES
def show(terminal: Terminal, recipe_word: str, branch: str | None, overrides: tuple[str, ...]) -> None:
    """Show every resolved value of a branch, defaults included."""
    found, resolved = recipes.resolve(terminal.places, recipe_word, branch=branch, overrides=overrides)
    if terminal.wants_json:
        terminal.document(
            recipe=found.name, path=found.path, branches=list(found.branches.values()), spec=resolved.spec
        )
        return
    terminal.lines([f"{found.name}, branch {resolved.spec.branch}: {resolved.spec.why or found.why}", ""])
    values = layers.leaves(dataclasses.asdict(resolved.spec))
    terminal.lines(
        pairs(
            [(spelling.format_path(path), _shown(value)) for path, value in values if path[0] not in ("why", "recipe")]
        )
    )
    others = [name for name in found.branches if name != resolved.spec.branch]
    terminal.say(f"\nother branches: {listed(resolved.spec.branch, others)}" if others else "")


@verb(
    "explain",
    examples=["draftyard recipe explain smollm2 optim.lr", "draftyard recipe explain qwen3.6-27b loss -b ddtree"],
)
@click.argument("recipe_word", metavar="RECIPE", type=RECIPE)
@click.argument("key", metavar="KEY")
@BRANCH
@OVERRIDES
def explain(terminal: Terminal, recipe_word: str, key: str, branch: str | None, overrides: tuple[str, ...]) -> None:
    """Say what a key, or every key of a section, means and where its value came from."""
    found = recipes.explain(terminal.places, recipe_word, key, branch=branch, overrides=overrides)
    if terminal.wants_json:
        terminal.document(keys=found)
        return
    for item in found:
        terminal.lines(_explained(item, width=terminal.width))


@verb("diff", examples=["draftyard recipe diff qwen3.6-27b:v6 :ddtree", "draftyard recipe diff smollm2 mine.yaml:main"])
@click.argument("left", metavar="A", type=RECIPE)
@click.argument("right", metavar="B", type=RECIPE)
@click.option("--effects", is_flag=True, help="Also what the differences do to memory and time, from the plan.")
def diff(terminal: Terminal, left: str, right: str, effects: bool) -> None:
    """Compare two recipes or branches: RECIPE, RECIPE:BRANCH, or :BRANCH of the first recipe."""
    found = recipes.compare(terminal.places, left, right)
    told = plans.effects(terminal.places, found, tell=terminal.say) if effects else []
    if terminal.wants_json:
        terminal.document(differences=found.differences, **({"effects": told} if effects else {}))
        return
    names = [f"{side.spec.recipe}:{side.spec.branch}" for side in (found.left, found.right)]
    columns = [Column("key"), Column(names[0], gives_way=True), Column(names[1], gives_way=True)]
    terminal.lines(table(columns, [_difference(item) for item in found.differences], width=terminal.width))
    if not found.differences:
        terminal.say("no differences")
    if effects:
        rows = [
            [effect.name, plan_page.effect_text(effect, effect.left), plan_page.effect_text(effect, effect.right)]
            for effect in told
        ]
        terminal.lines(["", *table([Column("effect"), *columns[1:]], rows, width=terminal.width)])


@verb(
    "plan",
    examples=[
        "draftyard plan smollm2",
        "draftyard plan qwen3.6-27b -b ddtree --gpu 95GiB --json",
        "draftyard plan qwen3.6-27b -b ddtree --gpu H200",
    ],
)
@click.argument("recipe_word", metavar="RECIPE", type=RECIPE)
@BRANCH
@OVERRIDES
@click.option(
    "--gpu", type=CARD, metavar="CARD", help="The card: its memory, such as 95GiB, or its name, such as H200."
)
@click.option("--host", metavar="HOST", type=HOST, help="Take the card of a host, as it was last seen.")
def plan(
    terminal: Terminal,
    recipe_word: str,
    branch: str | None,
    overrides: tuple[str, ...],
    *,
    gpu: KnownCard | int | None,
    host: str | None,
) -> None:
    """Predict the memory of a training step, line by line, from the recipe alone, and its time. Nothing runs.

    The time is that of the newest training or smoke run of the same shape, where there is one (with --host: on that
    host); else a guess: the least that its arithmetic takes at an H200's best rate, whatever the card. It is of the
    steps alone. What smoke runs and trainings of the same shape took beyond their plan is a line of its own, and must
    fit as well.
    """
    found = plans.plan_memory(
        terminal.places,
        recipe_word,
        branch=branch,
        overrides=overrides,
        capacity_bytes=gpu if isinstance(gpu, int) else None,
        gpu=None if isinstance(gpu, int) else gpu,
        host=host,
        tell=terminal.say,
    )
    if terminal.wants_json:
        terminal.document(**plan_page.plan_document(found))
    else:
        terminal.lines(plan_page.plan_page(found, width=terminal.width))


for command in (list_recipes, check, show, explain, diff):
    recipe.add_command(command)


def _explained(item: Explained, *, width: int | None) -> list[str]:
    meaning = f"{item.meaning} ({item.due})"
    lines = [f"{item.key} = {_shown(item.value)}"]
    lines += [f"  {line}" for line in ([meaning] if width is None else textwrap.wrap(meaning, max(width - 2, 40)))]
    if not item.origins:
        return [*lines, click.style("  not set in this branch", bold=True)]
    for origin in item.origins[:-1]:
        lines.append(f"  {origin.layer:<18} {_shown(origin.value):<14} {origin.where}")
    last = item.origins[-1]
    return [*lines, click.style(f"  {last.layer:<18} {_shown(last.value):<14} {last.where}  <- this one", bold=True)]


def _difference(item: Difference) -> list[str | Cell]:
    return [Cell(item.key, is_dim=item.is_cosmetic), _shown(item.left), _shown(item.right)]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return (
        json.dumps(value) if isinstance(value, (list, dict)) else spelling.format_value(value) if value != "" else '""'
    )


VERBS = {"recipe": recipe, "plan": plan}
