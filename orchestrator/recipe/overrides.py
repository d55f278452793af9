"""Overrides typed on a command line: `section.key=value`.

    override = path "=" value
    path     = key {"." key}         a key that holds a dot, an equals sign or a quote stands in double quotes
    value    = flow | plain
    flow     = text that starts with [ { " or ' and is read as YAML
    plain    = any other text, whole: commas, = @ % # * | & ! : have no meaning in it

A plain value is a number, true, false or null by the same rules as in a file; where the field is
text it is taken as typed, so `env.OMP_NUM_THREADS=1` needs no quotes.
"""

from __future__ import annotations

import re
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.recipe import strict_yaml
from orchestrator.recipe.fields import hint_at, is_optional, is_text
from orchestrator.recipe.layers import Layer
from orchestrator.recipe.strict_yaml import Path
from orchestrator.redact import is_secret
from remote.hiding import HIDDEN

_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"|([^."=\s]+)')


def override_layer(text: str, kind: type) -> Layer:
    """One layer with one value. Raises UsageError that repeats what was typed, but for a secret."""
    path, value = split_override(text)
    typed = f"{text.removesuffix(value)}{HIDDEN}" if is_secret(str(path[-1]), value) else text
    return Layer("--set", _nested(path, read_value(value, hint_at(kind, path), typed)), typed=f"--set {typed}")


def split_override(text: str) -> tuple[Path, str]:
    """`a."b.c"=d=e` -> (("a", "b.c"), "d=e")."""
    keys, at = [], 0
    while True:
        found = _KEY.match(text, at)
        if found is None:
            raise UsageError(f"--set {text}: expected section.key=value, such as loss.gamma=10")
        keys.append(re.sub(r"\\(.)", r"\1", found[1]) if found[1] is not None else found[2])
        at = found.end()
        if len(keys) > strict_yaml.MAX_DEPTH:
            raise UsageError(
                f"--set {text[:40]}...: goes deeper than {strict_yaml.MAX_DEPTH} sections, which no recipe does"
            )
        if text[at : at + 1] == "=":
            return tuple(keys), text[at + 1 :]
        if text[at : at + 1] != ".":
            raise UsageError(f"--set {text}: expected section.key=value, such as loss.gamma=10")
        at += 1


def read_value(text: str, due: Any, typed: str) -> Any:
    """`due` is the field's type, or None where no such field exists."""
    if text.startswith(("[", "{", '"', "'")):
        try:
            return strict_yaml.parse(text, f"--set {typed}").value
        except strict_yaml.YamlFaults as faults:
            hint = f"to mean the text itself, quote it: '{text}'" if not text.startswith("'") else "close the quote"
            raise UsageError(f"--set {typed}: {faults.faults[0].message}; {hint}") from faults
    value = strict_yaml.scalar(text)
    if due is not None and is_text(due) and not (value is None and text and is_optional(due)):
        return text
    return value


def format_path(path: Path) -> str:
    return ".".join(_format_key(str(key)) for key in path)


def _format_key(key: str) -> str:
    if _KEY.fullmatch(key) and not key.startswith('"'):
        return key
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def format_value(value: Any) -> str:
    if (
        isinstance(value, str)
        and value
        and not value.startswith(("[", "{", '"', "'"))
        and strict_yaml.scalar(value) == value
    ):
        return value
    if value is None or isinstance(value, (bool, int, float)):
        return strict_yaml.dump(value).strip()
    return strict_yaml.dump_flow(value)


def _nested(path: Path, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {str(key): value}
    assert isinstance(value, dict)
    return value
