"""What a recipe may say and yet hardly means: told wherever it is checked or used, never refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from orchestrator.given import read_given
from orchestrator.recipe import BUNDLED, Recipe, known_recipes, slug
from remote.spec import DFlashSpec, Spec, TrainSpec

_SCHEMA = re.compile(r"\A#[^\n]*\$schema=(\S+)")  # the line that editors read
_USUAL_CHECKPOINT_EVERY = TrainSpec(num_steps=1).checkpoint_every


def of_schedule(spec: Spec) -> list[tuple[str, str]]:
    """(dotted path, message) for each number of steps that no step of this training comes to."""
    if not isinstance(spec, DFlashSpec):
        return []
    train, num_steps = spec.train, spec.train.num_steps
    told = []
    if spec.optim.warmup_steps >= num_steps:
        told.append(("optim.warmup_steps", spec.optim.warmup_steps, "the rate never reaches optim.lr before it ends"))
    if train.checkpoint_every > num_steps and train.checkpoint_every != _USUAL_CHECKPOINT_EVERY:  # which nobody wrote
        told.append(("train.checkpoint_every", train.checkpoint_every, "the last step alone makes a checkpoint"))
    if train.log_every > num_steps:
        told.append(("train.log_every", train.log_every, "nothing is reported before the last step"))
    return [(path, f"is {value} of {num_steps} steps: {what}") for path, value, what in told]


def of_name(recipe: Recipe) -> list[str]:
    """A line with its place for the name of another recipe, as a copy keeps it."""
    own = recipe.path.stem
    others = known_recipes(recipe.path.parent.parent) if recipe.path.parent.name == "recipes" else known_recipes()
    if recipe.slug == slug(own) or recipe.name not in others:
        return []
    told = f"is {recipe.name}, which another recipe is: runs, evidence and filters of both say {recipe.name}"
    return [f"{recipe.file.where(('name',))}: name: {told}; write name: {own}"]


def of_schema(recipe: Recipe) -> list[str]:
    """The same for a schema that did not come along: the business of who writes a recipe, not of who launches it."""
    found = _SCHEMA.match(read_given(recipe.path).decode("utf-8", "replace"))
    if found is None or "://" in found[1] or (recipe.path.parent / found[1]).exists():
        return []
    folder = recipe.path.parent
    line = shlex.join(["cp", str(BUNDLED / Path(found[1]).name), str(folder)])
    told = f"there is no {found[1]} in {folder}, so editors complete and check nothing"
    return [f"{recipe.file.shown}:1:1: $schema: {told}; {line} brings it"]
