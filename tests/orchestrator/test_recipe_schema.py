"""The JSON Schema that editors complete and check recipes with."""

import gc
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.recipe import BUNDLED, fields, strict_yaml
from orchestrator.recipe.fields import hints, meaning_at, names_at
from orchestrator.recipe.schema import json_schema, schema_text
from remote.spec import LOSS_TERMS, DFlashSpec, ScriptSpec

KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def fits(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """The keywords our schema uses, by their meaning in the standard; a keyword it does not know fails the test."""
    known = {
        "$schema",
        "$defs",
        "$ref",
        "title",
        "description",
        "type",
        "anyOf",
        "enum",
        "pattern",
        "properties",
        "required",
    }
    assert set(schema) <= known | {"additionalProperties", "items", "minProperties", "propertyNames"}
    if "$ref" in schema:
        return fits(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema and not any(fits(option, value, root) for option in schema["anyOf"]):
        return False
    if "type" in schema and not (
        isinstance(value, KINDS[schema["type"]]) and (schema["type"] == "boolean" or not isinstance(value, bool))
    ):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, list):
        return all(fits(schema.get("items", {}), item, root) for item in value)
    return not isinstance(value, dict) or fits_object(schema, value, root)


def fits_object(schema: dict[str, Any], value: dict[str, Any], root: dict[str, Any]) -> bool:
    own, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not set(schema.get("required", ())) <= set(value) or len(value) < schema.get("minProperties", 0):
        return False
    if not all(fits(schema.get("propertyNames", {}), key, root) for key in value):
        return False
    if rest is False and not set(value) <= set(own):
        return False
    return all(
        fits(own[key] if key in own else rest if isinstance(rest, dict) else {}, child, root)
        for key, child in value.items()
    )


@pytest.mark.parametrize("path", sorted(BUNDLED.glob("*.yaml")), ids=lambda path: path.stem)
def test_bundled_recipes_fit_the_schema(path: Path) -> None:
    schema = json_schema()

    assert fits(schema, strict_yaml.parse(path.read_bytes()).value, schema)


@pytest.mark.parametrize(
    "body",
    [
        {"los": {}},
        {"loss": {"gama": 1}},
        {"loss": {"decay": "dpaice"}},
        {"train": {"num_steps": "4"}},
        {"life": {"memory_limit_bytes": "2G"}},
        {"life": {"grace_s": "soon"}},
        {"env": {"A": 1}},
        {"tags": "a"},
    ],
)
def test_a_wrong_field_does_not_fit(body: dict[str, Any]) -> None:
    schema = json_schema()

    assert fits(schema, {"name": "x", "base": {"entry": "dflash"}, "branches": {"a": {}}}, schema)
    assert not fits(schema, {"name": "x", "base": {"entry": "dflash"}, "branches": {"a": body}}, schema)


def test_units_may_be_written_out_where_a_field_has_one() -> None:
    schema = json_schema()

    for value in ("2h30m", "90s", 90, 1.5):
        assert fits(
            schema,
            {"name": "x", "base": {"entry": "dflash", "life": {"grace_s": value}}, "branches": {"a": None}},
            schema,
        )


@pytest.mark.parametrize(("kind", "entry"), [(DFlashSpec, "dflash"), (ScriptSpec, "script")])
def test_every_field_of_the_spec_is_in_the_schema(kind: type, entry: str) -> None:
    properties = json_schema()["$defs"][f"{entry}_fields"]["properties"]

    assert set(properties) == {*names_at(kind, ()), "preset"}
    assert set(properties["life"]["properties"]) == set(hints(hints(kind)["life"]))
    assert properties["life"]["properties"]["grace_s"]["description"].endswith(
        "between the polite signal and the kill. It must not be negative."
    )


@pytest.mark.parametrize("kind", [DFlashSpec, ScriptSpec])
def test_every_key_of_the_spec_has_a_meaning_of_a_sentence(kind: type) -> None:
    told = {path: meaning_at(kind, path) for path in all_keys(kind)}

    assert len(told) > 20
    assert {path: text for path, text in told.items() if not re.match(r"[A-Za-z].{14,}[.:,;].*$", text)} == {}
    assert not [path for path, text in told.items() if len(text) > 220]  # one sentence, not a page


def test_every_term_of_the_loss_has_a_meaning_of_its_own() -> None:
    told = {term: meaning_at(DFlashSpec, ("loss", "terms", term)) for term in LOSS_TERMS}

    assert told == {term: LOSS_TERMS[term] for term in told}
    terms = json_schema()["$defs"]["dflash_fields"]["properties"]["loss"]["properties"]["terms"]
    assert {term: terms["properties"][term]["description"] for term in LOSS_TERMS} == told


def all_keys(kind: type, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    own = [(*path, name) for name in names_at(kind, path)]
    return own + [below for at in own for below in all_keys(kind, at)]


def test_the_schema_file_beside_the_recipes_is_the_derived_one_and_every_recipe_names_it() -> None:
    text = (BUNDLED / "recipe.schema.json").read_text(encoding="utf-8")

    assert text == schema_text(), "python -m orchestrator.recipe.schema > recipes/recipe.schema.json"
    for path in BUNDLED.glob("*.yaml"):
        assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=recipe.schema.json\n")


def test_threads_that_ask_for_the_first_meaning_at_once_all_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The screens ask from two: a collection in the midst of a syntax tree lets another thread begin its own."""
    fields._declarations.cache_clear()
    begin, told = threading.Barrier(4), []
    monkeypatch.setattr(gc, "callbacks", [*gc.callbacks, lambda *_: time.sleep(0.0001)])
    threshold = gc.get_threshold()

    def ask(depth: int) -> None:
        if depth:
            ask(depth - 1)
        else:
            begin.wait()
            told.append(fields.declarations())

    threads = [threading.Thread(target=ask, args=(5 * number,)) for number in range(4)]
    gc.set_threshold(20)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    finally:
        gc.set_threshold(*threshold)

    assert len(told) == 4
