"""A project of its own in a temporary folder, with a tiny script recipe: what the command line is tested on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli

RECIPE = """\
name: tiny
why: A job of twenty milliseconds.
base:
  entry: script
  folder: job
  command: ["{python}", "train.py"]
  settings: {num_steps: "5", sleep_s: "0"}
  smoke:
    rungs: [quick]
    scripts: {quick: quick.py}
  life: {grace_s: 5s}
branches:
  main: {why: The shortest job there is.}
  slow: {why: Runs until it is stopped., settings: {num_steps: "100000", sleep_s: "0.05"}}
  broken: {why: Divides by zero at step 3., settings: {break_at: "3"}}
  oom: {why: Asks for more memory than it may., settings: {allocate: "1"}, life: {memory_limit_bytes: 512MiB}}
"""

TRAIN = """\
import json, os, pathlib, resource, time
from remote.report import Reporter

settings = json.loads((pathlib.Path(os.environ["DRAFTYARD_RUN_DIR"]) / "spec.json").read_text())["settings"]
reporter = Reporter.from_environment()
with reporter.job():
    reporter.start()
    reporter.stage("training")
    for step in range(1, int(settings["num_steps"]) + 1):
        if step == int(settings.get("break_at", 0)):
            1 / 0
        if settings.get("allocate"):
            limit = int(os.environ["DRAFTYARD_MEMORY_LIMIT_BYTES"])
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            hoard = bytearray(2 * limit)  # refused at once: nothing is ever filled
        reporter.metrics(step, {"loss": 2.0 / step if step != 2 else float("nan")})
        print(f"step {step}", flush=True)
        time.sleep(float(settings["sleep_s"]))
    folder = pathlib.Path(os.environ["DRAFTYARD_RUN_DIR"]) / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 100)
    reporter.checkpoint(step, path=f"checkpoints/{folder.name}", size_bytes=25_600, is_best=False)
"""

QUICK = """\
import sys
print("quick enough")
"""


class Yard:
    """The project, and the command line in it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys
        self.out = self.err = ""

    def run(self, *words: str) -> int:
        """The exit code; what was said is in `out` and `err`."""
        self._capsys.readouterr()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        for number, handler in before.items():  # a follower hears them until its process ends
            signal.signal(number, handler)
        self.out, self.err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    def json(self, *words: str, code: int = 0) -> Any:
        """The one document that the verb prints with --json."""
        assert self.run(*words, "--json") == code, self.out + self.err
        return json.loads(self.out)

    def edit(self, name: str, text: str) -> None:
        (self.root / "recipes" / name).write_text(text, encoding="utf-8")

    def folder(self, run_id: str) -> Path:
        return self.root / "data" / "draftyard" / "runs" / run_id


def end(yard: Yard) -> None:
    """Stops what still runs, so that no job outlives its test; the follower then goes home by itself."""
    if not (yard.root / "runs.db").exists():
        return
    for run in yard.json("ls", "--kind", "all")["runs"]:
        if run["state"] in ("pending", "setting_up", "running", "stopping"):
            yard.run("stop", run["id"], "--now")
