"""Checkpoints: a folder that is whole when it exists, in safetensors and JSON only.

    step-00000400/  model.safetensors      the drafter's weights, by their names
                    master.safetensors, exp_avg.safetensors, ...  the optimizer's tensors, one file a kind
                    rng.safetensors        torch's generators
                    state.json             step, rows seen, losses, the contract, a sha256 for each file

Nothing here is pickled and nothing pickled is read, so a checkpoint from elsewhere can hold wrong
numbers but no code. The contract names what the weights mean (mask token, captured layers, block
size, ...): weights trained under another contract load without a complaint from any tensor and
are worthless, so a difference is refused by name. It does not decide when to save or what is best.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from remote.drafter.aside import beside, leftovers, swap, sync_folder
from remote.drafter.optim import DrafterOptimizer
from remote.drafter.tensor_file import write_tensors
from remote.report import UserFault
from remote.rundir import sha256_of, write_json
from remote.spec import DFlashSpec

Result = TypeVar("Result")

FORMAT_VERSION = 1
_MODEL, _RNG, _STATE, _SUFFIX = "model.safetensors", "rng.safetensors", "state.json", ".safetensors"

# How a drafter computes, not what its weights mean: free to change between save and resume.
_FREE_DRAFTER_FIELDS = {"attention", "attention_workspace_bytes", "init_from"}


class CheckpointError(UserFault):
    """A checkpoint that cannot be used; one line that says why and what to do."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint that is not what was saved; an older one may be."""


@dataclass(frozen=True)
class Position:
    """How far a run is. The row of a micro-batch follows from `rows_seen` and the seed alone."""

    step: int
    rows_seen: int
    mean_loss: float | None = None  # this and the next: means over the steps since the checkpoint before
    acceptance_length: float | None = None  # tokens, streak + 1; decides which checkpoint is best


def contract(spec: DFlashSpec) -> dict[str, Any]:
    """What a checkpoint's weights mean, as dotted names and values."""
    drafter = {key: value for key, value in dataclasses.asdict(spec.drafter).items() if key not in _FREE_DRAFTER_FIELDS}
    meaning = {f"drafter.{key}": value for key, value in drafter.items()}
    meaning["target.hidden_size"] = spec.target.hidden_size
    meaning["target.num_layers"] = spec.target.keep_layers or spec.target.num_layers
    meaning["loss.gamma"] = spec.loss.gamma
    return meaning


def save(
    folder: Path, position: Position, *, model: nn.Module, optimizer: DrafterOptimizer | None, spec: DFlashSpec
) -> int:
    """Makes `folder` appear whole and returns its size in bytes; an older folder of that name is replaced."""
    aside = beside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        parts = {_MODEL: model.state_dict(), _RNG: _rng_state()}
        parts |= {kind + _SUFFIX: tensors for kind, tensors in _kinds(optimizer).items()}
        files = _together(lambda name: _write_tensors(aside / name, parts[name]), parts)
        state = {"format_version": FORMAT_VERSION, "files": files, "contract": contract(spec)}
        write_json(aside / _STATE, state | dataclasses.asdict(position))
        size_bytes = sum(path.stat().st_size for path in aside.iterdir())
        sync_folder(aside)
        swap(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    return size_bytes


def load(
    folder: Path, *, model: nn.Module, optimizer: DrafterOptimizer | None = None, spec: DFlashSpec | None = None
) -> Position:
    """Fills model, optimizer and torch's generators; CheckpointError leaves all of them as they were.

    With `spec` given the checkpoint must have been made under the same contract. Without an
    optimizer only the weights are read: for evaluation and export.
    """
    state = _read_state(folder)
    if spec is not None:
        _refuse_other_contract(folder, state["contract"], contract(spec))
    kinds = list(_kinds(optimizer))
    names = [_MODEL, *([_RNG, *(kind + _SUFFIX for kind in kinds)] if optimizer is not None else [])]
    parts = _together(lambda name: _read_tensors(folder, name, state), names)
    _refuse_other_shapes(folder, parts[_MODEL], model.state_dict())
    if optimizer is not None:
        moments = {f"{kind}/{name}": tensor for kind in kinds for name, tensor in parts[kind + _SUFFIX].items()}
        _refuse_other_shapes(folder, moments, optimizer.state())
        _refuse_other_types(folder, moments, optimizer.state())
        _refuse_other_generators(folder, parts[_RNG])
        optimizer.load_state(moments)
        _set_rng_state(parts[_RNG])
    model.load_state_dict(parts[_MODEL])
    return _position(state)


def position_of(folder: Path) -> Position:
    """How far the checkpoint is, without reading a tensor."""
    return _position(_read_state(folder))


def best_of(folders: list[Path]) -> Path | None:
    """The checkpoint whose steps since the one before accepted most, of equals the newest; None when none says.

    Not the one of the lowest loss: weights that depend on the drafter (dpace, streak) make losses of two checkpoints
    means of different things, and a better drafter's may be higher. Corrupt ones say nothing.
    """
    known = []
    for folder in folders:
        with contextlib.suppress(CheckpointError, OSError):
            length = position_of(folder).acceptance_length
            known += [] if length is None else [(length, folder)]
    return max(known)[1] if known else None


def prune(
    folders: list[Path], *, saved: Path, keep_last: int, tell: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Removes all but the newest `keep_last` and the best of these checkpoints (oldest first); returns the removed.

    One that the system does not let go is told and stays: the new one is saved, and no run ends over an old one.

    `saved` is the one just saved. What lies after it was passed over as corrupt by the resume before it, and goes,
    as does whatever is torn: neither may cost a healthy one its place.
    """
    sound = [folder for folder in folders if folder.name <= saved.name and not _is_torn(folder)]
    kept = {*sound[-keep_last:], best_of(sound)}
    removed = []
    for folder in folders:
        if folder in kept:
            continue
        doomed = beside(folder)
        try:
            folder.rename(doomed)  # gone at once; a crash while deleting leaves no half checkpoint under its name
            removed.append(folder)
            shutil.rmtree(doomed)
        except OSError as error:
            tell(f"the old checkpoint {folder.name} could not be removed: {error}")
    return removed


def sweep(checkpoints: Path) -> None:
    """Clears what processes that are gone left half done among the run's checkpoints.

    A folder moved aside for one that never came, or came broken, takes its name again.
    """
    for left in leftovers(checkpoints):
        if left.was_moved and not _is_whole(left.folder):
            shutil.rmtree(left.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                left.path.rename(left.folder)
        else:
            shutil.rmtree(left.path, ignore_errors=True)


# Files ------------------------------------------------------------------------------------------


def _kinds(optimizer: DrafterOptimizer | None) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by kind (master, exp_avg, ...), then by weight."""
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, tensor in (optimizer.state() if optimizer is not None else {}).items():
        kind, _, weight = name.partition("/")
        kinds.setdefault(kind, {})[weight] = tensor
    return kinds


def _together(work: Callable[[str], Result], names: Iterable[str]) -> dict[str, Result]:
    """`work` for every file at once: hashing 24 GB of a large drafter one after the other takes a quarter minute."""
    ordered = list(names)
    with ThreadPoolExecutor(max_workers=len(ordered)) as pool:
        return dict(zip(ordered, pool.map(work, ordered), strict=True))


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of what was written."""
    write_tensors(path, tensors)
    return sha256_of(path)


def _read_tensors(folder: Path, name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    path, expected = folder / name, state["files"].get(name)
    if expected is None or not path.is_file():
        raise CorruptCheckpoint(f"{folder}: {name} is missing; use an older checkpoint")
    if sha256_of(path) != expected:
        raise CorruptCheckpoint(
            f"{path} is corrupt: its sha256 is not the one it was saved with; use an older checkpoint"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CorruptCheckpoint(f"{path} is no safetensors file: {error}") from error


def _is_torn(folder: Path) -> bool:
    """Whether a file is missing or cut off. Sums are not compared: reading 24 GB at every save would cost minutes."""
    try:
        for name in _read_state(folder)["files"]:
            with safe_open(folder / name, framework="pt"):  # compares the header with the file's length
                pass
    except (CorruptCheckpoint, OSError, SafetensorError):
        return True
    except CheckpointError:  # of another format: not ours to judge
        return False
    return False


def _is_whole(folder: Path) -> bool:
    """Whether every file is what was saved, by its sum; reads all of it."""
    try:
        sums = _read_state(folder)["files"]
        return all(sha256_of(folder / name) == sha for name, sha in sums.items())
    except (CorruptCheckpoint, OSError):
        return False
    except CheckpointError:  # of another format: not ours to judge
        return True


def _position(state: Mapping[str, Any]) -> Position:
    return Position(state["step"], state["rows_seen"], state["mean_loss"], state.get("acceptance_length"))


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / _STATE
    if not path.is_file():
        raise CorruptCheckpoint(f"{folder} is no checkpoint: it has no {_STATE}")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is corrupt: {error}; use an older checkpoint") from error
    if not isinstance(state, dict) or state.get("format_version") != FORMAT_VERSION:
        seen = state.get("format_version") if isinstance(state, dict) else state
        raise CheckpointError(
            f"{path}: format version {seen!r}, this code reads {FORMAT_VERSION}; update the older side"
        )
    missing = {"step", "rows_seen", "mean_loss", "files", "contract"} - set(state)
    if missing:
        raise CorruptCheckpoint(f"{path} is corrupt: it has no {sorted(missing)[0]}; use an older checkpoint")
    for key, (expected, is_right) in _STATE_VALUES.items():
        if not is_right(state.get(key)):
            raise CorruptCheckpoint(
                f"{path} is corrupt: {key} is {str(state.get(key))[:80]!r}, not {expected}; use an older checkpoint"
            )
    return state


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_mean(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def _is_sums(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(sha, str) and Path(name).name == name for name, sha in value.items()
    )


_STATE_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": ("a whole number from 0", _is_count),
    "rows_seen": ("a whole number from 0", _is_count),
    "mean_loss": ("a finite number or null", _is_mean),
    "acceptance_length": ("a finite number or null", _is_mean),  # absent in checkpoints of an older release
    "files": ("file names with their sha256", _is_sums),
    "contract": ("names with their values", lambda value: isinstance(value, dict)),
}


def _refuse_other_contract(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    changed = [name for name in sorted(wanted.keys() | saved.keys()) if saved.get(name) != wanted.get(name)]
    if changed:
        listed = "; ".join(f"{name} was {saved.get(name)}, is now {wanted.get(name)}" for name in changed)
        raise CheckpointError(
            f"{folder} was trained with other settings: {listed}; launch a new run instead of resuming"
        )


def _refuse_other_shapes(folder: Path, found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name in sorted(own.keys() | found.keys()):
        if name not in found:
            raise CheckpointError(f"{folder}: tensor {name} is missing")
        if name not in own:
            raise CheckpointError(f"{folder}: tensor {name} is unknown to this recipe")
        if found[name].shape != own[name].shape:
            seen, expected = list(found[name].shape), list(own[name].shape)
            raise CheckpointError(f"{folder}: tensor {name} has shape {seen}; this recipe needs {expected}")


def _refuse_other_types(folder: Path, found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name in sorted(own):
        if found[name].dtype != own[name].dtype:
            seen, expected = (str(each[name].dtype).removeprefix("torch.") for each in (found, own))
            raise CheckpointError(
                f"{folder}: tensor {name} is {seen}; this recipe needs {expected}: resume with the optim settings it was "
                "trained with, or launch a new run"
            )


# Generators -------------------------------------------------------------------------------------


def _rng_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _refuse_other_generators(folder: Path, found: Mapping[str, Tensor]) -> None:
    """A generator takes its state unchecked in part, so it is looked at before anything is loaded."""
    for name, own in _rng_state().items():
        seen = found.get(name)
        if seen is None and name != "cpu":
            continue  # saved on a host with fewer cards
        if seen is None or seen.dtype != own.dtype or seen.shape != own.shape:
            what = (
                "is missing" if seen is None else f"has {seen.numel()} values of {seen.dtype}, not {own.numel()} bytes"
            )
            raise CorruptCheckpoint(f"{folder / _RNG} is corrupt: {name} {what}; use an older checkpoint")


def _set_rng_state(states: Mapping[str, Tensor]) -> None:
    """A host with fewer GPUs takes the states it has a device for: nothing here draws from the others."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)
