"""Fits a straight line by gradient descent, and says so step by step: a stand-in for a training script of your own."""

import json
import os
import random
import time
from pathlib import Path

from remote.report import Reporter


def settings() -> dict[str, str]:  # the recipe's; by hand there is none, and these count
    spec = Path(os.environ.get("DRAFTYARD_RUN_DIR", ""), "spec.json")
    return {"steps": "40", "lr": "0.05"} | (json.loads(spec.read_text())["settings"] if spec.is_file() else {})


def train(steps: int, lr: float, reporter: Reporter) -> float:
    numbers, slope, loss = random.Random(0), 0.0, float("inf")
    for step in range(1, steps + 1):
        started, x = time.monotonic(), numbers.uniform(-1, 1)
        loss, slope = ((slope - 3.0) * x) ** 2, slope - lr * 2 * x * x * (slope - 3.0)
        reporter.metrics(step, {"loss": loss, "step_s": time.monotonic() - started})
    return loss


if __name__ == "__main__":
    with (reporter := Reporter.from_environment()).job():
        chosen = settings()
        reporter.start(num_steps=int(chosen["steps"]))  # progress and time left come from it
        train(int(chosen["steps"]), float(chosen["lr"]), reporter)
