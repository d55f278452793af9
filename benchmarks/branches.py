"""The branches of recipes/smollm2.yaml on one budget: acceptance length against step, by chain and by tree.

    python -m benchmarks.branches resolve FOLDER [--set a.b=c ...]   specs of every branch (needs the local side)
    python -m benchmarks.branches run FOLDER [--prompts N]           trains and evaluates them (needs remote/ and torch)
    python -m benchmarks.branches plot FOLDER IMAGE.svg              the table in Markdown, the plot beside it (matplotlib)

`run` trains each branch with the same seed, rows and steps, keeps a checkpoint at every third of the way and decodes
held-out prompts with each. `results.json` is written anew after every checkpoint, so a run that is cut keeps what it
has. The untrained drafter, the same for all, is the row of step 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

BRANCHES = ("ce", "ce_kl", "ce_kl_cap", "dpace")
NUM_POINTS = 3  # checkpoints evaluated a branch
TREE_BUDGET = 32


def resolve(folder: Path, overrides: list[str]) -> None:
    """Writes one spec a branch, as `draftyard launch` would resolve it."""
    recipe_room = importlib.import_module("orchestrator.recipe")  # only here: `run` has no local side
    schema = importlib.import_module("remote.spec")
    recipe = recipe_room.load_recipe(Path(__file__).parents[1] / "recipes" / "smollm2.yaml")
    folder.mkdir(parents=True, exist_ok=True)
    for branch in BRANCHES:
        spec = recipe.resolve(branch, overrides=overrides).spec
        (folder / f"{branch}.spec.json").write_text(schema.dump(spec))


def run(folder: Path, *, num_prompts: int) -> None:
    """Trains and evaluates every branch that `resolve` left in the folder."""
    import torch

    from remote.drafter.target import load_target

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    results: dict[str, Any] = {"torch": torch.__version__, "device": _device_name(device), "rows": []}
    target = None
    for branch in BRANCHES:
        spec = _spec(folder, branch, num_prompts)
        started = time.monotonic()
        run_dir = _train(folder, branch, spec)
        train_s = time.monotonic() - started
        choices = importlib.import_module("remote.drafter.workbench").choose(spec, device)
        target = target or load_target(spec.target, cache=folder / "cache", device=device, dtype=choices.dtype)
        for step, drafter in _drafters(run_dir, spec, choices, device):
            if step == 0 and branch != BRANCHES[0]:
                continue  # before its first step a drafter knows nothing of its loss: one seed, one drafter
            rows = _acceptance(spec, drafter, target)
            results["rows"] += [{"branch": branch, "step": step, "train_s": train_s, **row} for row in rows]
            (folder / "results.json").write_text(json.dumps(results, indent=1))
            _say(f"{branch} step {step}: " + ", ".join(f"{row['method']} {row['mean']:.2f}" for row in rows))


def _spec(folder: Path, branch: str, num_prompts: int) -> Any:
    spec = importlib.import_module("remote.spec").load(folder / f"{branch}.spec.json")
    steps = spec.train.num_steps
    return replace(
        spec,
        train=replace(spec.train, checkpoint_every=-(-steps // NUM_POINTS), keep_last=NUM_POINTS + 1),
        evaluate=replace(spec.evaluate, at_end=False, num_prompts=num_prompts, tree_budgets=[TREE_BUDGET]),
    )


def _train(folder: Path, branch: str, spec: Any) -> Path:
    from remote.drafter.__main__ import main
    from remote.rundir import RunDir
    from remote.spec import dump

    run_dir = RunDir(folder / "runs" / branch)
    run_dir.root.mkdir(parents=True, exist_ok=True)
    run_dir.spec_json.write_text(dump(spec))
    if main(["train", str(run_dir.root)]) != 0:
        sys.exit(f"the training of {branch} failed")
    return run_dir.root


def _drafters(run_root: Path, spec: Any, choices: Any, device: Any) -> Any:
    """(step, drafter) before training and at every checkpoint."""
    from remote.drafter import checkpoint, workbench
    from remote.rundir import RunDir

    yield 0, workbench.fresh_drafter(spec, choices, device=device)
    for path in RunDir(run_root).whole_checkpoints():
        drafter = workbench.fresh_drafter(spec, choices, device=device)
        position = checkpoint.load(path, model=drafter, spec=spec)
        yield position.step, drafter


def _acceptance(spec: Any, drafter: Any, target: Any) -> list[dict[str, Any]]:
    from remote.drafter.data import read_chats
    from remote.drafter.evaluate import evaluate

    spec = replace(spec, evaluate=replace(spec.evaluate, compare_untrained=False))
    prompts = read_chats(Path(__file__).parents[1] / "recipes" / "data" / spec.data.held_out)
    evaluation = evaluate(drafter, target, spec, prompts=_every_family(prompts))
    return [
        {
            "method": row.protocol["method"],
            "mean": row.values["acceptance_length"],
            "low": row.values["acceptance_length_low"],
            "high": row.values["acceptance_length_high"],
            "num_prompts": row.protocol["num_prompts"],
            "texts_equal": row.values.get("texts_equal"),
            "near_ties": row.values.get("near_ties"),
            "mismatches": row.values.get("mismatches"),
        }
        for row in evaluation.rows
        if row.protocol["method"] in ("chain", "tree")
    ]


def _every_family(prompts: list[Any]) -> list[Any]:
    """The prompts with the families taken in turns, so that the first few cover them all."""
    families: dict[str, list[Any]] = {}
    for chat in prompts:
        families.setdefault(chat.family or "", []).append(chat)
    longest = max(map(len, families.values()))
    return [chats[i] for i in range(longest) for chats in families.values() if i < len(chats)]


def plot(folder: Path, image: Path) -> None:
    """The table on stdout; the curves as an image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = json.loads((folder / "results.json").read_text())
    rows = results["rows"]
    print(f"{results['device']}, torch {results['torch']}\n")
    print("| branch | step | chain: tokens a round [95 %] | tree of 32 nodes [95 %] |\n|---|---|---|---|")
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    colours = dict(zip(BRANCHES, ("#0072b2", "#e69f00", "#009e73", "#cc79a7"), strict=True))  # Okabe and Ito
    for branch in BRANCHES:
        known = [row | {"branch": branch} for row in rows if row["branch"] == branch or row["step"] == 0]
        steps = sorted({row["step"] for row in known})
        for axis, method in zip(axes, ("chain", "tree"), strict=True):
            line = [next(row for row in known if (row["step"], row["method"]) == (s, method)) for s in steps]
            axis.plot(steps, [r["mean"] for r in line], color=colours[branch], label=branch, marker="o", markersize=3)
            axis.fill_between(
                steps, [r["low"] for r in line], [r["high"] for r in line], color=colours[branch], alpha=0.08, lw=0
            )
        for step in steps:
            cells = [
                next(row for row in known if (row["step"], row["method"]) == (step, method))
                for method in ("chain", "tree")
            ]
            print(
                f"| {branch} | {step} | "
                + " | ".join(f"{c['mean']:.2f} [{c['low']:.2f}, {c['high']:.2f}]" for c in cells)
                + " |"
            )
    for axis, title in zip(axes, ("chain", f"tree of {TREE_BUDGET} nodes"), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes[0].set_ylabel("acceptance length (tokens)")
    axes[1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(image)


def _device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.branches", description=__doc__.split("\n")[0])
    parser.add_argument("step", choices=["resolve", "run", "plot"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("image", type=Path, nargs="?")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--prompts", type=int, default=24)
    options = parser.parse_args()
    match options.step:
        case "resolve":
            resolve(options.folder, options.overrides)
        case "run":
            run(options.folder, num_prompts=options.prompts)
        case "plot":
            plot(options.folder, options.image)


if __name__ == "__main__":
    main()
