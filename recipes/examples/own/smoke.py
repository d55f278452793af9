"""A rung of your own: three steps, passed when the loss is finite. The exit status decides."""

import math

from train import settings, train

from remote.report import Reporter

if __name__ == "__main__":
    reporter = Reporter.from_environment()
    with reporter.job():
        reporter.start()
        loss = train(3, float(settings()["lr"]), reporter)
        if not math.isfinite(loss):
            raise SystemExit(f"the loss after three steps is {loss}")
