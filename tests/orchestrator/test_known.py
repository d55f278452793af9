"""Secrets of a run as this side can tell them, and logs that are read without them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from orchestrator.actions.history import open_reader
from orchestrator.actions.places import find_places
from orchestrator.known import Known
from orchestrator.store.logs import LogFolder
from orchestrator.store.rows import Document
from orchestrator.store.writes import Store
from remote.hiding import spellings
from tests.orchestrator.runs import RUN, started


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """With a run on a host that has an env file, launched with `--env HUB`."""
    (tmp_path / "secret.env").write_text("DB_PW=from-the-file\n")
    (tmp_path / "hosts.yaml").write_text(f"hosts: {{local: {{env_file: {tmp_path}/secret.env}}}}\n")
    with Store(tmp_path / "runs.db") as store:
        launch = {"env": ["DB_PW", "HUB", "PLAIN"]}
        documents = {
            Document.LAUNCH: json.dumps(launch),
            Document.SPEC: json.dumps({"env": {"PLAIN": "of the recipe"}}),
        }
        started(store, documents=documents)
        yield store


def test_values_come_from_the_env_file_and_from_the_named_variables(store: Store, tmp_path: Path) -> None:
    known = Known(tmp_path / "hosts.yaml", {"HUB": "from-here", "PLAIN": "of the recipe", "HOME": "/home/x"})

    assert known.of(store.reader, RUN) == {"from-the-file", "from-here"}


@pytest.mark.parametrize("broken", ["hosts.yaml", "secret.env"])
def test_what_cannot_be_read_is_not_known_and_no_fault(store: Store, tmp_path: Path, broken: str) -> None:
    (tmp_path / broken).write_text("{")

    assert Known(tmp_path / "hosts.yaml", {"HUB": "from-here"}).of(store.reader, RUN) == {"from-here"}


def test_a_log_is_read_with_stars_wherever_a_read_begins_or_ends(tmp_path: Path) -> None:
    content = b"at s3cret-word, again s3cret-word"
    logs = LogFolder(tmp_path, lambda run_id: ["s3cret-word", "s3cret"] if run_id == RUN else [])
    logs.write(RUN, 1, "stdout", offset=0, content=content)
    logs.write("other234", 1, "stdout", offset=0, content=content)
    whole = content.replace(b"s3cret-word", b"*" * 11)

    for offset in range(len(content) + 2):
        for size in range(len(content) + 2):
            assert logs.read(RUN, 1, "stdout", offset=offset, size=size) == whole[offset : offset + size]
    assert logs.path(RUN, 1, "stdout").read_bytes() == content
    assert logs.read("other234", 1, "stdout", offset=0, size=99) == content


@pytest.mark.parametrize("known", [(), ("s3cret-word",)])
def test_what_a_host_told_of_places_is_read_with_stars_where_no_value_is_known(
    tmp_path: Path, known: tuple[str, ...]
) -> None:
    """To the end of their lines; of a value that is known here it alone is hidden."""
    content = b"at s3cret-word, then another-one or so\nplain\nlast s3cret-word"
    begins = [3, content.index(b"another"), len(content) - 11]
    spans = [[begin, content.index(b"\n", begin) if begin < 40 else len(content)] for begin in begins]
    logs = LogFolder(tmp_path, lambda _: known)
    logs.write(RUN, 1, "stdout", offset=0, content=content)
    logs.hide(RUN, 1, {"stdout": spans, "stderr": []})
    first = b"***********, then " if known else b"*" * 18
    whole = b"at " + first + b"*" * 17 + b"\nplain\nlast " + b"*" * 11

    for offset in range(len(content) + 2):
        for size in range(len(content) + 2):
            assert logs.read(RUN, 1, "stdout", offset=offset, size=size) == whole[offset : offset + size]
    assert logs.path(RUN, 1, "stdout").read_bytes() == content


def test_pieces_without_a_secret_cost_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spell, change = Mock(wraps=spellings), Mock(wraps=re.sub)
    monkeypatch.setattr("orchestrator.store.logs.spellings", spell)
    monkeypatch.setattr(re, "sub", change)
    logs = LogFolder(tmp_path, lambda run_id: ["a-secret-of-this-test", "another-of-this-test"])
    logs.write(RUN, 1, "stdout", offset=0, content=b"a line\n" * 100 + b"a-secret-of-this-test\n")

    pieces = [logs.read(RUN, 1, "stdout", offset=100 * n, size=100) for n in range(8)]

    assert b"".join(pieces).endswith(b"a line\n" + b"*" * 21 + b"\n")
    assert (spell.call_count, change.call_count) == (1, 1)


def test_a_reader_of_the_verbs_and_screens_hides_what_the_host_s_file_holds(store: Store, tmp_path: Path) -> None:
    store.logs.write(RUN, 1, "stdout", offset=0, content=b"with from-the-file\n")

    with open_reader(
        find_places(tmp_path, {"DRAFTYARD_HOSTS": f"{tmp_path}/hosts.yaml"}, db=tmp_path / "runs.db")
    ) as reader:
        assert reader.logs.read(RUN, 1, "stdout", offset=0, size=99) == b"with *************\n"
