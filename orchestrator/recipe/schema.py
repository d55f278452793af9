"""The JSON Schema of a recipe file, derived from the spec's dataclasses, for editors.

It describes one file's shape: sections may be partial, because layers complete one another. What a
whole branch needs, and what holds across fields, only loading the recipe can tell.

    python -m orchestrator.recipe.schema > recipes/recipe.schema.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, Literal, get_args, get_origin

from orchestrator.recipe import fields, strict_yaml
from remote.spec import ENTRIES, LOSS_TERMS

DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)?(ms|[dhms])([0-9]+(\.[0-9]+)?(ms|[hms]))*$"
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?([KMGT]i?)?B$"


def json_schema() -> dict[str, Any]:
    """Draft 2020-12; unknown keys are refused everywhere."""
    sections = {f"{entry}_fields": _section(kind) for entry, kind in ENTRIES.items()}
    preset = {"preset": {"type": "string", "description": "a file of presets/ laid under base"}}
    extends = {"extends": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}}
    for name in [*sections]:
        body = sections[name]
        sections[name.replace("fields", "branch")] = body | {"properties": body["properties"] | preset | extends}
        sections[name] = body | {"properties": body["properties"] | preset, "required": ["entry"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "draftyard recipe",
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "base", "branches"],
        "properties": {
            "name": {"type": "string"},
            "why": {"type": "string", "description": "one sentence: what this recipe is for"},
            "default_branch": {"type": "string", "description": "left out: the first branch"},
            "base": {"anyOf": [_reference(f"{entry}_fields") for entry in ENTRIES]},
            "branches": {
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"pattern": "^[A-Za-z0-9._-]+$"},
                "additionalProperties": {
                    "anyOf": [{"type": "null"}, *(_reference(f"{entry}_branch") for entry in ENTRIES)]
                },
            },
        },
        "$defs": sections,
    }


def schema_text() -> str:
    """The schema as the file beside the bundled recipes holds it."""
    return json.dumps(json_schema(), indent=1) + "\n"


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def _section(entry: type, path: strict_yaml.Path = ()) -> dict[str, Any]:
    """The section at `path` of a job's fields, every key with what it means."""
    properties = {}
    for name in fields.names_at(entry, path):
        at = (*path, name)
        properties[name] = _type(entry, at, fields.hint_at(entry, at)) | {"description": fields.meaning_at(entry, at)}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _type(entry: type, path: strict_yaml.Path, due: Any) -> dict[str, Any]:
    name = str(path[-1])
    if fields.is_optional(due):
        return {"anyOf": [_type(entry, path, fields.without_none(due)), {"type": "null"}]}
    simple = {int: "integer", float: "number", bool: "boolean", str: "string"}
    if due in simple:
        return _with_unit({"type": simple[due]}, name)
    if get_origin(due) is Literal:
        return {"enum": list(get_args(due))}
    if get_origin(due) is list:
        return {"type": "array", "items": _type(entry, (*path, 0), get_args(due)[0])}
    if get_origin(due) is dict:
        return _free_map(entry, path, get_args(due)[1])
    assert dataclasses.is_dataclass(due)
    return _section(entry, path)


def _free_map(entry: type, path: strict_yaml.Path, due: Any) -> dict[str, Any]:
    """A null takes a key away; names that are known beforehand have their meaning."""
    value = {"anyOf": [_type(entry, (*path, "*"), due), {"type": "null"}]}
    known = LOSS_TERMS if path == ("loss", "terms") else ()
    named = {name: value | {"description": fields.meaning_at(entry, (*path, name))} for name in known}
    return {"type": "object", "additionalProperties": value} | ({"properties": named} if named else {})


def _with_unit(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Fields whose name ends in a unit also take the unit written out."""
    pattern = {"_s": DURATION_PATTERN, "_bytes": SIZE_PATTERN}
    for ending, form in pattern.items():
        if name.endswith(ending) and schema["type"] in ("integer", "number"):
            return {"anyOf": [schema, {"type": "string", "pattern": form}]}
    return schema


if __name__ == "__main__":
    sys.stdout.write(schema_text())
