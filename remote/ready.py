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
    missing = [path for path in paths if not Path(path).is_file()]
    path, fault = _packaged(source) if source.startswith("package:") else (Path(source).expanduser(), None)
    is_converted = True
    if path is not None and path.suffix == ".gguf":
        fault = None if path.is_file() else f"{path} is no file there"
        is_converted = any(_is_whole(folder, path.name) for folder in (work_dir / "cache" / "targets").glob("*"))
    elif path is not None and not (path / "config.json").is_file():
        fault = f"{path} is no Hugging Face folder there (it would hold a config.json)"
    return {"target": fault, "is_converted": is_converted, "missing": missing}


def _packaged(source: str) -> tuple[Path | None, str | None]:
    distribution, _, name = source.removeprefix("package:").partition("/")
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        return None, f"the package {distribution} is not installed there"
    held = next((Path(str(file.locate())) for file in files if file.name == name), None)
    return held, None if held else f"the package {distribution} holds no file {name}"


def _is_whole(folder: Path, name: str) -> bool:
    """Made from a file of that name, and marked when it was whole."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return marker["source"] == name and all(
            (folder / each).stat().st_size == facts["size"] for each, facts in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def main(arguments: list[str]) -> int:
    work_dir, source, *paths = arguments
    sys.stdout.write(json.dumps(found(Path(work_dir), source, paths)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
