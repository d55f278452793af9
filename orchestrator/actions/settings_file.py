"""A settings file, the project's draftyard.yaml or the user's config.yaml: four keys, all optional.

    db: ~/runs/mine.db            relative paths count from the file
    hosts_file: hosts.yaml
    host: gpu                     what verbs take when no --host is given
    keys: {runs.sort: z}          keys of the screens, by the names that `watch` knows them by

Loaded by `places` only where such a file exists, because reading YAML costs more than most verbs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import UsageError, one_line
from orchestrator.given import read_given
from orchestrator.nearest import unknown
from orchestrator.recipe.strict_yaml import YamlFaults, parse

KEYS = ("db", "hosts_file", "host", "keys")


def read_settings(path: Path) -> dict[str, tuple[str, str]]:
    """Key -> (value, file:line:col), a screen's key as `keys.NAME`. UsageError names every fault with its place."""
    try:
        document = parse(read_given(path), str(path))
    except YamlFaults as faults:
        raise UsageError(str(faults)) from faults
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    body = {} if document.value is None else document.value
    if not isinstance(body, dict):
        raise UsageError(f"{document.locate(())}: expected keys and values; known keys are {', '.join(KEYS)}")
    found: dict[str, tuple[str, str]] = {}
    wrong = []
    for key, value in body.items():
        where = str(document.locate((key,)))
        if key not in KEYS:
            wrong.append(f"{where}: {unknown('key', key, KEYS)}")
        elif key == "keys":
            named = _named_keys(value, document.locate)
            wrong += [f"{where}: keys: is {value!r}; names and keys are due"] if named is None else []
            found |= named or {}
        elif not isinstance(value, str) or not value:
            wrong.append(f"{where}: {key}: is {value!r}; it must be text")
        else:
            found[key] = (value if key == "host" else str(path.parent / Path(value).expanduser()), where)
    if wrong:
        raise UsageError("\n".join(map(one_line, wrong)))
    return found


def _named_keys(value: object, locate: Callable[[tuple[str, ...]], object]) -> dict[str, tuple[str, str]] | None:
    """None where it is no mapping of text to text."""
    if not isinstance(value, dict) or not all(isinstance(key, str) and key for key in value.values()):
        return None
    return {f"keys.{name}": (key, str(locate(("keys", name)))) for name, key in value.items()}
