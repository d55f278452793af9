"""What the bundled trainer's jobs find set and a script of the user's own does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote.environment import job_environment
from remote.job import Job
from remote.rundir import RunDir, write_json

BUNDLED = ["python3", "-m", "remote.drafter", "train", "/runs/x"]
BY_RANKS = ["python3", "-m", "torch.distributed.run", "--nproc-per-node", "2", *BUNDLED[1:]]
OWN = ["python3", "train.py"]


@pytest.mark.parametrize(
    ("argv", "own", "expected"),
    [
        (BUNDLED, {}, "1"),
        (BY_RANKS, {}, "1"),
        (BUNDLED, {"HF_HUB_OFFLINE": "0"}, "0"),  # whoever sets it means it
        (OWN, {}, None),  # it may load its data from a hub
    ],
)
def test_the_bundled_trainer_asks_no_hub_and_a_script_of_the_users_own_may(
    tmp_path: Path, argv: list[str], own: dict[str, str], expected: str | None
) -> None:
    run = RunDir(tmp_path / "runs" / "x")
    write_json(run.env_file, own)

    found = job_environment(run, Job("x", "train", 1, argv, cwd="/tree"), inherited={})

    assert found.get("HF_HUB_OFFLINE") == expected
