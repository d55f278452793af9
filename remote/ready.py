"""What a host has of its own for a job over several: the target, converted or not, and files that are not shipped.

    python3 - WORK_DIR SOURCE [PATH...]   prints target (null, or what is wrong), is_converted, missing (of the paths)

Standard library only: it is sent as text, and asks nothing of torch. It reads names and sizes and changes nothing; whether
the weights are those of the recipe is seen when they are loaded.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

MARKER = "draftyard-target.json"  # as `remote.drafter.target_files` has it; a test compares


def found(work_dir: Path, source: str, paths: list[str]) -> dict[str, Any]:
    try:
        fault, is_converted = _target(work_dir, source)
    except RuntimeError:  # so says expanduser
        fault, is_converted = f"{source}: this host has no user of that name; write the whole path", True
    except OSError as error:
        fault, is_converted = f"{error.filename} cannot be read there ({error.strerror})", True
    return {"target": fault, "is_converted": is_converted, "missing": [path for path in paths if not _is_file(path)]}


def _target(work_dir: Path, source: str) -> tuple[str | None, bool]:
    """What is wrong with the target, and whether nothing of it is left to convert. Raises OSError, RuntimeError."""
    path, fault = _packaged(source) if source.startswith("package:") else (Path(source).expanduser(), None)
    if path is None:
        return fault, True
    if path.suffix == ".gguf":
        fault = None if path.is_file() else f"{path} is no file there"
        return fault, any(_is_whole(folder, path.name) for folder in (work_dir / "cache" / "targets").glob("*"))
    return fault or _folder_fault(path), True


def _folder_fault(folder: Path) -> str | None:
    """What keeps the trainer from taking it for a target, by its names alone. Raises OSError."""
    if not (folder / "config.json").is_file():
        return f"{folder} is no Hugging Face folder there (it would hold a config.json)"
    if not any(path.suffix == ".safetensors" for path in folder.iterdir()):
        told = f"{folder} holds no .safetensors file there, and weights are read from nothing else"
        return f"{told}; save_pretrained of transformers writes them"
    lacking = [name for name in _parts(folder) if not (folder / name).is_file()]
    return f"{folder} lacks {len(lacking)} files of its weights there, {lacking[0]} first" if lacking else None


def _parts(folder: Path) -> list[str]:
    """Files that the index of the weights names; none where there is no index, or it says something else.

    Nor beside a model.safetensors, which is taken before any index (transformers, modeling_utils.py).
    """
    if (folder / "model.safetensors").is_file():
        return []
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return sorted({name for name in index["weight_map"].values() if isinstance(name, str)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:
        return False


def _packaged(source: str) -> tuple[Path | None, str | None]:
    distribution, _, name = source.removeprefix("package:").partition("/")
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        return None, f"the package {distribution} is not installed there"
    held = next((Path(str(file.locate())) for file in files if file.name == name), None)
    return held, None if held else f"the package {distribution} holds no file {name}"


def _is_whole(folder: Path, name: str) -> bool:
    """Made from a file of that name, and what the trainer takes for whole before it reads the bytes; a test compares."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = marker["files"]
        sizes = [(folder / each).stat().st_size if (folder / each).is_file() else None for each in files]
        is_told = marker["source"] == name and isinstance(marker["source_sha256"], str)
        return is_told and bool(files) and None not in sizes and sizes == [facts["size"] for facts in files.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def main(arguments: list[str]) -> int:
    work_dir, source, *paths = arguments
    sys.stdout.write(json.dumps(found(Path(work_dir), source, paths)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
