"""Fits a straight line by gradient descent, and says so step by step.

A stand-in for a training script of your own: read the settings, report, leave the rest as it is.
"""

import os
import random
import time
from pathlib import Path

from remote import spec
from remote.report import Reporter


def settings() -> dict[str, str]:
    """The recipe's `settings`, or these when the script is run by hand."""
    run_dir = os.environ.get("DRAFTYARD_RUN_DIR")
    own = spec.load(Path(run_dir) / "spec.json").settings if run_dir else {}
    return {"steps": "40", "lr": "0.05", **own}


def train(steps: int, lr: float, reporter: Reporter) -> float:
    numbers, slope = random.Random(0), 0.0
    loss = float("inf")
    for step in range(1, steps + 1):
        started = time.monotonic()
        x = numbers.uniform(-1, 1)
        loss = (slope * x - 3.0 * x) ** 2
        slope -= lr * 2 * x * (slope * x - 3.0 * x)
        reporter.metrics(step, {"loss": loss, "step_s": time.monotonic() - started})
    return loss


if __name__ == "__main__":
    reporter = Reporter.from_environment()
    with reporter.job():
        chosen = settings()
        steps = int(chosen["steps"])
        reporter.start(num_steps=steps)  # progress and time left come from it
        train(steps, float(chosen["lr"]), reporter)
