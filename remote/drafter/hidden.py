"""Hidden states of every document: computed once by the target and kept on disk, or computed when asked for.

The cache is a folder `<work>/cache/hidden/<hash of target, layers, tokens>` of safetensors shards, and, where a loss has
asked for it, of the target's expectation of each, in files of their own: what one branch needs another need not. Beside
each file lies a small JSON file with its sha256, written after it: one without does not exist,
so a stopped job goes on with the next shard. What the folder will take is said, and the disk looked at,
before the first byte is written. A shard is checked once in every process that reads it.

It does not know rows, packing or training.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from remote.drafter.data import Document, HiddenStates
from remote.drafter.target import Target
from remote.drafter.target_files import Progress, silent
from remote.drafter.teacher import expect
from remote.drafter.tensor_file import write_tensors
from remote.drafter.turns import taking_turns
from remote.plan.sizes import expectation_bytes
from remote.report import UserFault
from remote.rundir import read_json, sha256_of, write_json

SHARD_TOKENS = 2048  # about 5 s of work on two CPU cores, twice that with the expectation; 126 MB at hidden size 5120 and 5 layers in bfloat16
LAST_HIDDEN, EXPECTATION = "last_hidden", ("rest", "entropy", "best_p", "best")  # names in the files
EXPECTATION_VERSION = 1  # raised with what `teacher.expect` makes: the folder's name knows the target alone
_SPARE_BYTES = 256 * 1024**2  # left free on the disk


@dataclass(frozen=True)
class OnlineHidden:
    """The target runs whenever a document is asked for."""

    target: Target
    documents: Sequence[Document]
    layers: Sequence[int]

    def document(self, index: int) -> HiddenStates:
        return _capture(self.target, [self.documents[index]], self.layers)


@dataclass(frozen=True)
class CachedHidden:
    """Reads documents out of the shards of a folder that `fill` has completed."""

    folder: Path
    spans: Sequence[tuple[int, int]]  # of each document: its shard, its first token there
    lengths: Sequence[int]
    is_taught_ahead: bool = False
    _open: dict[tuple[int, Path], Any] = field(default_factory=dict, compare=False)

    def document(self, index: int) -> HiddenStates:
        shard, start = self.spans[index]
        stop = start + self.lengths[index]
        hidden = self._reader(shard_path(self.folder, shard))
        if self.is_taught_ahead:
            expected = self._reader(expected_path(self.folder, shard))
            teacher = [expected.get_slice(name) for name in EXPECTATION]
        else:
            teacher = [hidden.get_slice(LAST_HIDDEN)]
        parts = [hidden.get_slice("features"), *teacher]
        return HiddenStates.of([part[start:stop] for part in parts])

    def _reader(self, path: Path) -> Any:
        # Opened per process: a worker that was forked must not share the parent's handles.
        key = (os.getpid(), path)
        if key not in self._open:
            check_shard(path)
            self._open[key] = safe_open(path, framework="pt")
        return self._open[key]


def forecast_bytes(
    documents: Sequence[Document], target: Target, layers: Sequence[int], *, is_taught_ahead: bool
) -> int:
    """What the cache will take: (K + 1) · H numbers a token, and with the target's expectation H in float32 and three more."""
    num_tokens, hidden_size = sum(len(document.ids) for document in documents), target.spec.hidden_size
    states = (len(layers) + 1) * hidden_size * target.dtype.itemsize
    return num_tokens * (states + is_taught_ahead * expectation_bytes(hidden_size))


def cached_hidden(
    documents: Sequence[Document], target: Target, layers: Sequence[int], *, cache: Path, progress: Progress = silent,
    is_taught_ahead: bool = False,
) -> CachedHidden:  # fmt: skip
    """The cache of these documents under `<work>/cache`, completed first where shards are missing or damaged.

    ValueError: the disk has no room for it.
    """
    folder = cache / "hidden" / _folder_name(documents, target, layers)
    shards = _shards(documents)
    folder.mkdir(parents=True, exist_ok=True)
    waiting = partial(
        progress, "waiting for another job that computes these hidden states", done=0, total=1, unit="job"
    )
    with taking_turns(folder / "lock", waiting):
        wanted = range(len(shards))
        bare = {number for number in wanted if not _is_sound(shard_path(folder, number))}
        untaught = {n for n in wanted if is_taught_ahead and not _is_sound(expected_path(folder, n))}
        missing = sorted(bare | untaught)
        if missing:
            states, both = (forecast_bytes(documents, target, layers, is_taught_ahead=each) for each in (False, True))
            _check_room(folder, (states * len(bare) + (both - states) * len(untaught)) // len(shards))
        for count, number in enumerate(missing):
            done = len(shards) - len(missing) + count
            progress("computing hidden states", done=done, total=len(shards), unit="shards")
            if number in bare:
                _fill(folder, number, [documents[index] for index in shards[number]], target, layers)
            if number in untaught:
                _fill_expected(folder, number, target)
        if missing:
            progress("computing hidden states", done=len(shards), total=len(shards), unit="shards")
    return CachedHidden(folder, _spans(shards, documents), [len(d.ids) for d in documents], is_taught_ahead)


def _fill(folder: Path, number: int, members: Sequence[Document], target: Target, layers: Sequence[int]) -> None:
    states = _capture(target, members, layers)
    _write_shard(shard_path(folder, number), dict(zip(("features", LAST_HIDDEN), states.tensors, strict=True)))


def _fill_expected(folder: Path, number: int, target: Target) -> None:
    """Of the last hidden states that lie there: another branch may have made them."""
    with safe_open(shard_path(folder, number), framework="pt") as shard:
        found = expect(shard.get_tensor(LAST_HIDDEN), target.head_VH)
    tensors = {name: tensor.cpu() for name, tensor in zip(EXPECTATION, found.tensors, strict=True)}
    _write_shard(expected_path(folder, number), tensors)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def expected_path(folder: Path, number: int) -> Path:
    """Of what this version's arithmetic makes: another one's is not found, and made anew."""
    return folder / f"expected-v{EXPECTATION_VERSION}-{number:05d}.safetensors"


def check_shard(path: Path) -> None:
    """ValueError, one line, when a shard is missing or is not what was written."""
    facts = read_json(path.with_suffix(".json"))
    if facts is None or not path.is_file():
        raise UserFault(f"{path}: a shard of hidden states is missing; run prepare again, it makes what is missing")
    if sha256_of(path) != facts.get("sha256"):
        raise UserFault(
            f"{path}: this shard of hidden states is damaged (sha256 differs); run prepare again to remake it"
        )


def _is_sound(path: Path) -> bool:
    try:
        check_shard(path)
    except ValueError:
        return False
    return True


def _write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    aside = path.with_suffix(".tmp")
    try:
        write_tensors(aside, tensors)
    except OSError:
        aside.unlink(missing_ok=True)  # what it takes may be all the room there is
        raise
    aside.replace(path)
    write_json(path.with_suffix(".json"), {"sha256": sha256_of(path), "tokens": len(next(iter(tensors.values())))})


def _capture(target: Target, documents: Sequence[Document], layers: Sequence[int]) -> HiddenStates:
    ids_S = torch.tensor([token for document in documents for token in document.ids])
    document_S = torch.cat([torch.full((len(d.ids),), number) for number, d in enumerate(documents)])
    position_S = torch.cat([torch.arange(len(document.ids)) for document in documents])
    features_SC, last_hidden_SH = target.capture(ids_S, document_S, position_S, layers=layers)
    return HiddenStates(features_SC.cpu(), last_hidden_SH.cpu())


def _shards(documents: Sequence[Document]) -> list[list[int]]:
    """Consecutive documents until a shard holds SHARD_TOKENS."""
    shards: list[list[int]] = []
    num_tokens = SHARD_TOKENS
    for index, document in enumerate(documents):
        if num_tokens >= SHARD_TOKENS:
            shards.append([])
            num_tokens = 0
        shards[-1].append(index)
        num_tokens += len(document.ids)
    return shards


def _spans(shards: list[list[int]], documents: Sequence[Document]) -> list[tuple[int, int]]:
    spans = []
    for number, members in enumerate(shards):
        start = 0
        for index in members:
            spans.append((number, start))
            start += len(documents[index].ids)
    return spans


def _folder_name(documents: Sequence[Document], target: Target, layers: Sequence[int]) -> str:
    digest = hashlib.sha256(json.dumps([target.identity, list(layers)]).encode())
    for document in documents:
        digest.update(json.dumps(document.ids).encode())
    return digest.hexdigest()[:24]


def _check_room(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes + _SPARE_BYTES > free_bytes:
        raise UserFault(
            f"the hidden states take {needed_bytes / 1024**3:.2f} GiB and {folder} has {free_bytes / 1024**3:.2f} GiB free; "
            "free some, or set data.hidden_states: online"
        )
