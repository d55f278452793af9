"""Checkpoints on real folders: whole or absent, bit-equal on resume, refused by name, safe formats only."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from remote.drafter import checkpoint
from remote.drafter.checkpoint import CheckpointError, CorruptCheckpoint, Position
from remote.drafter.optim import DrafterOptimizer
from remote.processes import Identity
from remote.rundir import RunDir
from remote.spec import DFlashSpec, OptimSpec
from tests.remote.disks import disk_that_takes
from tests.remote.specs import tiny_spec

pytestmark = pytest.mark.slow  # real files, real kills


def make(width: int = 8, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, DrafterOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 2)).to(dtype)
    return model, DrafterOptimizer(model.named_parameters(), OptimSpec(lr=1e-2), num_steps=10)


def train(model: nn.Module, optimizer: DrafterOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.update(step)
        losses.append(loss.item())
    return losses


def saved(folder: Path, spec: DFlashSpec | None = None, width: int = 8) -> Path:
    model, optimizer = make(width)
    train(model, optimizer, range(1, 4))
    checkpoint.save(folder, Position(3, 12, 0.5), model=model, optimizer=optimizer, spec=spec or tiny_spec())
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resume_goes_on_bit_for_bit_as_the_uninterrupted_run(tmp_path: Path, dtype: torch.dtype) -> None:
    uninterrupted = train(*make(dtype=dtype), range(1, 9))
    model, optimizer = make(dtype=dtype)
    before = train(model, optimizer, range(1, 5))
    checkpoint.save(tmp_path / "step-00000004", Position(4, 16), model=model, optimizer=optimizer, spec=tiny_spec())

    other_model, other_optimizer = make(dtype=dtype)
    train(other_model, other_optimizer, range(5, 7))
    position = checkpoint.load(
        tmp_path / "step-00000004", model=other_model, optimizer=other_optimizer, spec=tiny_spec()
    )
    after = train(other_model, other_optimizer, range(5, 9))

    assert position == Position(4, 16, None)
    assert before + after == uninterrupted


def test_torchs_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step-00000003")
    drawn = torch.rand(3)
    model, optimizer = make()
    torch.manual_seed(99)

    checkpoint.load(folder, model=model, optimizer=optimizer)

    assert torch.equal(torch.rand(3), drawn)


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step-00000003")

    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "exp_avg.safetensors",
        "exp_avg_sq.safetensors",
        "model.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    assert json.loads((folder / "state.json").read_text())["step"] == 3


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"drafter": {"mask_token_id": 5}}, "drafter.mask_token_id was 3, is now 5"),
        ({"drafter": {"captured_layers": [0, 2]}}, r"drafter.captured_layers was \[0, 1, 2\], is now \[0, 2\]"),
        ({"drafter": {"block_size": 8}}, "drafter.block_size was 4, is now 8"),
        ({"loss": {"gamma": 4.0}}, "loss.gamma was 7.0, is now 4.0"),
        ({"drafter": {"rope_theta": 5.0}}, "drafter.rope_theta was 10000.0, is now 5.0"),
    ],
)
def test_a_changed_setting_that_gives_the_weights_their_meaning_is_refused_by_name(
    tmp_path: Path, changed: dict[str, dict[str, object]], named: str
) -> None:
    folder = saved(tmp_path / "step-00000003")
    model, optimizer = make()

    with pytest.raises(CheckpointError, match=named):
        checkpoint.load(folder, model=model, optimizer=optimizer, spec=tiny_spec(**changed))


def test_how_attention_is_computed_and_the_learning_rate_may_change(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step-00000003")
    model, optimizer = make()
    spec = tiny_spec(drafter={"attention": "eager"}, optim={"lr": 1.0})

    assert checkpoint.load(folder, model=model, optimizer=optimizer, spec=spec).step == 3


def test_other_shapes_are_refused_in_one_line_and_change_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step-00000003", width=12)
    model, optimizer = make()
    before = [weight.clone() for weight in model.parameters()]

    with pytest.raises(CheckpointError, match=r"tensor 0\.bias has shape \[12\]; this recipe needs \[8\]") as caught:
        checkpoint.load(folder, model=model, optimizer=optimizer)

    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_moments_of_another_type_are_refused_in_one_line_and_change_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step-00000003")
    model, _ = make()
    other = DrafterOptimizer(model.named_parameters(), OptimSpec(lr=1e-2, moment_dtype="bfloat16"), num_steps=10)
    before = [weight.clone() for weight in model.parameters()]

    with pytest.raises(
        CheckpointError, match=r"tensor exp_avg/0\.bias is float32; this recipe needs bfloat16"
    ) as caught:
        checkpoint.load(folder, model=model, optimizer=other)

    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["model.safetensors", "exp_avg.safetensors", "rng.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_file_is_one_clear_line_and_changes_nothing(tmp_path: Path, name: str, damage: str) -> None:
    folder = saved(tmp_path / "step-00000003")
    content = (folder / name).read_bytes()
    middle = len(content) // 2
    if damage == "flip":
        (folder / name).write_bytes(content[:middle] + bytes([content[middle] ^ 0x80]) + content[middle + 1 :])
    elif damage == "cut":
        (folder / name).write_bytes(content[:middle])
    else:
        (folder / name).unlink()
    model, optimizer = make()
    before = [weight.clone() for weight in model.parameters()]

    with pytest.raises(CheckpointError, match=r"corrupt|missing|no checkpoint") as caught:
        checkpoint.load(folder, model=model, optimizer=optimizer)

    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_save_that_fails_leaves_no_folder_and_the_older_one_as_it_was(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step-00000003")
    before = (folder / "state.json").read_bytes()
    model, optimizer = make()
    model.register_buffer("bad", torch.zeros(2, dtype=torch.int8).to_sparse())

    with pytest.raises((ValueError, RuntimeError)):
        checkpoint.save(folder, Position(3, 12), model=model, optimizer=optimizer, spec=tiny_spec())

    assert (folder / "state.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


KILLED = """\
import sys, torch
from pathlib import Path
from torch import nn
from tests.remote.specs import tiny_spec  # first: it chooses Triton's interpreter
from remote.drafter import checkpoint
from remote.drafter.checkpoint import Position
model = nn.Linear(2000, 500)
print("ready", flush=True)
for step in range(1, 10_000):
    checkpoint.save(Path(sys.argv[1]) / f"step-{step:08d}", Position(step, step), model=model, optimizer=None, spec=tiny_spec())
"""


@pytest.mark.slow
def test_whatever_a_kill_leaves_under_a_checkpoints_name_is_whole(tmp_path: Path) -> None:
    checkpoints = RunDir(tmp_path).checkpoints
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(checkpoints)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    deadline_s = time.monotonic() + 120
    while len(list(checkpoints.glob("step-*"))) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()

    found = RunDir(tmp_path).whole_checkpoints()
    assert len(found) >= 3
    for folder in found:
        assert checkpoint.load(folder, model=nn.Linear(2000, 500)).step == int(folder.name.removeprefix("step-"))


def test_pruning_keeps_the_last_ones_and_the_best(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    model, optimizer = make()
    for step, length in enumerate([3.5, 3.0, 2.0, None, 1.2, 1.1], start=1):
        position = Position(step, step, acceptance_length=length)
        checkpoint.save(run.checkpoint(step), position, model=model, optimizer=optimizer, spec=tiny_spec())
    (run.checkpoint(1) / "state.json").write_text("{")  # a corrupt one is nobody's best and stops nothing

    removed = checkpoint.prune(run.whole_checkpoints(), saved=run.checkpoint(6), keep_last=2)

    assert [path.name[-1] for path in removed] == ["1", "3", "4"]
    assert [path.name[-1] for path in run.whole_checkpoints()] == ["2", "5", "6"]
    assert len(list(run.checkpoints.iterdir())) == 3


def run_with(tmp_path: Path, steps: dict[int, float]) -> RunDir:
    """A run with a checkpoint at each step, of that acceptance length."""
    run = RunDir(tmp_path)
    model, optimizer = make()
    for step, length in steps.items():
        position = Position(step, step, acceptance_length=length)
        checkpoint.save(run.checkpoint(step), position, model=model, optimizer=optimizer, spec=tiny_spec())
    return run


def test_a_torn_newer_checkpoint_goes_before_the_one_just_saved(tmp_path: Path) -> None:
    """Resumed after step 2, because 8 is torn: 3 is the newest that anybody can go on from."""
    run = run_with(tmp_path, {1: 3.0, 2: 2.0, 3: 2.5, 8: 3.5})
    flipped = bytearray((run.checkpoint(8) / "model.safetensors").read_bytes())
    flipped[-1] ^= 1
    (run.checkpoint(8) / "model.safetensors").write_bytes(flipped)

    removed = checkpoint.prune(run.whole_checkpoints(), saved=run.checkpoint(3), keep_last=1)

    assert [path.name[-1] for path in removed] == ["2", "8"]
    assert [path.name[-1] for path in run.whole_checkpoints()] == ["1", "3"]


@pytest.mark.parametrize("name", ["model.safetensors", "exp_avg.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_torn_older_checkpoint_takes_no_healthy_ones_place(tmp_path: Path, name: str, damage: str) -> None:
    run = run_with(tmp_path, {1: 2.5, 2: 2.0, 3: 3.0, 4: 2.2})
    torn = run.checkpoint(3) / name
    if damage == "cut":
        torn.write_bytes(torn.read_bytes()[:-5])
    else:
        torn.unlink()

    checkpoint.prune(sorted(run.checkpoints.iterdir()), saved=run.checkpoint(4), keep_last=2)

    assert sorted(path.name[-1] for path in run.checkpoints.iterdir()) == ["1", "2", "4"]


def test_the_best_accepts_most_whatever_its_loss_and_of_equals_it_is_the_newest(tmp_path: Path) -> None:
    """Under dpace or a streak weight a better drafter moves weight to harder slots, and its loss may rise."""
    run = RunDir(tmp_path)
    model, optimizer = make()
    for step, (loss, length) in enumerate([(0.5, 1.4), (0.9, 2.0), (0.7, 1.9), (0.9, 2.0)], start=1):
        position = Position(step, step, loss, length)
        checkpoint.save(run.checkpoint(step), position, model=model, optimizer=optimizer, spec=tiny_spec())

    assert checkpoint.best_of(run.whole_checkpoints()) == run.checkpoint(4)


def test_a_checkpoint_from_before_acceptance_was_kept_loads_and_is_nobodys_best(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step-00000003")
    state = json.loads((folder / "state.json").read_text())
    del state["acceptance_length"]
    (folder / "state.json").write_text(json.dumps(state))
    model, optimizer = make()

    assert checkpoint.load(folder, model=model, optimizer=optimizer) == Position(3, 12, 0.5)
    assert checkpoint.best_of([folder]) is None


@pytest.mark.parametrize("at", ["rename", "rmtree"])
def test_an_old_checkpoint_that_the_system_does_not_let_go_is_told_and_the_next_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """As a network disk does while another program has a file of it open."""
    run = run_with(tmp_path, {1: 2.5, 2: 2.0, 3: 3.0, 4: 2.2})
    owner: Any = Path if at == "rename" else shutil
    let_go = getattr(owner, at)

    def holds_the_first(path: Path, *rest: Any) -> Any:
        if "step-00000001" in path.name:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return let_go(path, *rest)

    monkeypatch.setattr(owner, at, holds_the_first)
    told: list[str] = []

    removed = checkpoint.prune(run.whole_checkpoints(), saved=run.checkpoint(4), keep_last=1, tell=told.append)

    assert [path.name[-1] for path in removed] == (["2"] if at == "rename" else ["1", "2"])
    (line,) = told
    assert line.startswith("the old checkpoint step-00000001 could not be removed: [Errno 16]")
    assert {path.name[-1] for path in run.whole_checkpoints()} == ({"1", "3", "4"} if at == "rename" else {"3", "4"})


def test_what_is_saved_after_only_torn_ones_stays(tmp_path: Path) -> None:
    run = run_with(tmp_path, {2: 2.0, 5: 3.0, 6: 2.5})
    for step in (5, 6):
        (run.checkpoint(step) / "model.safetensors").write_bytes(b"torn")

    checkpoint.prune(run.whole_checkpoints(), saved=run.checkpoint(2), keep_last=1)

    assert [path.name[-1] for path in run.whole_checkpoints()] == ["2"]


def test_a_disk_that_fills_up_is_an_os_error_that_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    model, optimizer = make(width=4000)

    with disk_that_takes(4096), pytest.raises(OSError, match=r"File too large: .*\.safetensors") as caught:
        checkpoint.save(tmp_path / "step-00000003", Position(3, 12), model=model, optimizer=optimizer, spec=tiny_spec())

    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -1),
        ("step", "3"),
        ("step", True),
        ("step", 1.5),
        ("rows_seen", None),
        ("rows_seen", -4),
        ("mean_loss", float("nan")),
        ("mean_loss", float("inf")),
        ("mean_loss", "low"),
        ("acceptance_length", "long"),
        ("files", []),
        ("files", {"model.safetensors": 3}),
        ("files", {"../model.safetensors": "0"}),
        ("contract", None),
    ],
)
def test_a_wrong_value_in_the_state_is_one_line_with_file_and_key(tmp_path: Path, key: str, value: object) -> None:
    folder = saved(tmp_path / "step-00000003")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {key: value}))
    model, optimizer = make()

    with pytest.raises(CorruptCheckpoint, match=rf"state\.json is corrupt: {key} is ") as caught:
        checkpoint.load(folder, model=model, optimizer=optimizer, spec=tiny_spec())

    assert "\n" not in str(caught.value)
    assert checkpoint.best_of([folder]) is None


@pytest.mark.parametrize(
    "states", [{}, {"cpu": torch.zeros(7, dtype=torch.uint8)}, {"cpu": torch.zeros(5056, dtype=torch.int64)}]
)
def test_a_generators_state_of_another_shape_is_refused_and_changes_nothing(
    tmp_path: Path, states: dict[str, torch.Tensor]
) -> None:
    folder = saved(tmp_path / "step-00000003")
    save_file(states or {"other": torch.zeros(1)}, folder / "rng.safetensors")
    state = json.loads((folder / "state.json").read_text())
    state["files"]["rng.safetensors"] = hashlib.sha256((folder / "rng.safetensors").read_bytes()).hexdigest()
    (folder / "state.json").write_text(json.dumps(state))
    model, optimizer = make()
    before = [weight.clone() for weight in model.parameters()]

    with pytest.raises(CorruptCheckpoint, match=r"rng\.safetensors is corrupt: cpu "):
        checkpoint.load(folder, model=model, optimizer=optimizer, spec=tiny_spec())

    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def owner_of(pid: int, *, later_ticks: int = 0) -> str:
    """As a leftover names its process; `later_ticks`: one of the same pid that began so much before the live one."""
    found = Identity.of(pid)
    assert found is not None
    return f"{pid}-{found.start_ticks - later_ticks}-{found.boot_id[:8]}"


def test_what_a_process_left_half_written_is_swept_once_it_is_gone(tmp_path: Path) -> None:
    run = run_with(tmp_path, {2: 2.0})
    with subprocess.Popen(["sleep", "60"]) as going:
        gone = owner_of(going.pid)
        going.kill()
    mine, theirs, moved = (run.checkpoints / f".step-{step:08d}.{owner}.{end}" for step, owner, end in (
        (3, owner_of(os.getpid()), "tmp"), (4, gone, "tmp"), (5, gone, "old")))  # fmt: skip
    for folder in (mine, theirs):
        folder.mkdir()
    run.checkpoint(2).rename(moved)  # killed between the two renames of a save over an older folder

    checkpoint.sweep(run.checkpoints)

    assert sorted(path.name for path in run.checkpoints.iterdir()) == [mine.name, "step-00000005"]


@pytest.mark.parametrize("owner", ["earlier", "bare pid"])
def test_a_pid_that_came_again_keeps_no_leftover(tmp_path: Path, owner: str) -> None:
    """In a container that was started again the job often has the pid it had before."""
    run = run_with(tmp_path, {2: 2.0})
    named = owner_of(os.getpid(), later_ticks=500) if owner == "earlier" else str(os.getpid())
    (run.checkpoints / f".step-00000003.{named}.tmp").mkdir()

    checkpoint.sweep(run.checkpoints)

    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("damage", ["cut", "flip", None])
def test_a_folder_moved_aside_comes_back_where_its_new_one_is_not_whole(tmp_path: Path, damage: str | None) -> None:
    run = run_with(tmp_path, {2: 2.0})
    aside = run.checkpoints / f".step-00000002.{owner_of(os.getpid(), later_ticks=500)}.old"
    run.checkpoint(2).rename(aside)
    run_with(tmp_path, {2: 2.5})
    file = run.checkpoint(2) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-5], "flip": content[:-1] + bytes([content[-1] ^ 1]), None: content}[damage])

    checkpoint.sweep(run.checkpoints)

    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]
    assert checkpoint.position_of(run.checkpoint(2)).acceptance_length == (2.5 if damage is None else 2.0)
    assert checkpoint.load(run.checkpoint(2), model=make()[0]).step == 2


def test_the_older_one_stands_again_when_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, {2: 2.0})
    rename = Path.rename

    def refuses_the_new(path: Path, other: Path) -> Path:
        if path.name.endswith(".tmp"):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", refuses_the_new)

    with pytest.raises(OSError, match="busy"):
        run_with(tmp_path, {2: 2.5})

    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]
    assert checkpoint.position_of(run.checkpoint(2)).acceptance_length == 2.0


def test_a_checkpoint_of_another_format_is_not_torn_and_ends_no_pruning(tmp_path: Path) -> None:
    run = run_with(tmp_path, {1: 3.0, 2: 2.0, 3: 2.5})
    state = json.loads((run.checkpoint(2) / "state.json").read_text())
    (run.checkpoint(2) / "state.json").write_text(json.dumps(state | {"format_version": 2}))

    checkpoint.prune(run.whole_checkpoints(), saved=run.checkpoint(3), keep_last=2)

    assert {"2", "3"} <= {path.name[-1] for path in run.whole_checkpoints()}
