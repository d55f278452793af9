"""Moments have one name in every document, whichever verb prints it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.store import rows
from orchestrator.verbs.jsonable import MOMENTS
from tests.orchestrator.yard import Yard

SPANS = {"clock_offset_s", "duration_s", "grace_s"}  # fields in seconds that are no moments


def test_every_moment_of_a_row_has_its_name_in_a_document() -> None:
    kinds = [kind for kind in vars(rows).values() if dataclasses.is_dataclass(kind)]
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}

    assert {name for name in fields if name.endswith("_s")} - SPANS <= set(MOMENTS)


def test_no_two_moments_share_a_name_and_none_looks_like_seconds() -> None:
    assert len(set(MOMENTS.values())) == len(MOMENTS)
    assert not [name for name in MOMENTS.values() if name.endswith("_s")]


@pytest.mark.slow  # loads the screen's library
def test_the_screen_as_a_document_says_a_run_in_the_words_of_the_list(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "--force", "a test", "--follow") == 0, yard.err

    (listed,) = yard.json("ls")["runs"]
    shown, of_one = yard.json("watch"), yard.json("watch", listed["id"])

    assert shown["schema_version"] == 1
    (run,) = shown["runs"]
    assert run == {name: listed[name] for name in run}
    assert run["created_at"].endswith("+00:00")
    assert of_one["detail"]["run"] == run
    assert not {*_names(shown), *_names(of_one)} & set(MOMENTS)


def _names(body: Any) -> Iterator[str]:
    if isinstance(body, dict):
        for name, value in body.items():
            yield name
            yield from _names(value)
    elif isinstance(body, list):
        for value in body:
            yield from _names(value)
