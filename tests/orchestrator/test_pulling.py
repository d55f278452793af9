"""Checkpoints fetched from a host that may lie about the names of its files."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from orchestrator.actions.history import exported_path, show
from orchestrator.actions.places import find_places
from orchestrator.actions.pulling import pull, pull_artifacts
from orchestrator.errors import DraftyardError
from orchestrator.store.rows import Document, Kind, State
from orchestrator.store.writes import Store
from orchestrator.verbs.files import _pulled
from orchestrator.verbs.page import run_page
from tests.orchestrator.runs import RUN, batch, event, started

FIND = """#!/bin/sh
printf '%s\\0' "{line}"
"""


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The folder of the one checkpoint that the store knows of, on the host `local`."""
    folder = tmp_path / "work" / "runs" / RUN / "checkpoints" / "step-00000005"
    folder.mkdir(parents=True)
    with Store(tmp_path / "runs.db") as store:
        started(store, workdir=str(tmp_path / "work"))
        _tell(store, "checkpoints/step-00000005")
    return folder


def _tell(store: Store, path: str) -> None:
    store.ingest(batch([event(1, "checkpoint", step=5, path=path, size_bytes=4, is_best=False)]))


def _pull(tmp_path: Path, to: Path) -> int:
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")
    return pull(places, RUN, which="last", to=to, tell=lambda _: None)[0].num_files


def test_files_arrive_below_their_folder_and_none_can_become_somebody_else(there: Path, tmp_path: Path) -> None:
    (there / "inner").mkdir()
    (there / "inner" / "tool").write_bytes(b"#!/bin/sh")
    (there / "inner" / "tool").chmod(0o6755)

    assert _pull(tmp_path, tmp_path / "here") == 1

    fetched = tmp_path / "here" / RUN / there.name / "inner" / "tool"
    assert fetched.stat().st_mode & 0o7777 == 0o755


def _told_of(tmp_path: Path, *paths: str) -> Path:
    """The folder of a run whose checkpoints its script has named so."""
    with Store(tmp_path / "runs.db") as store:
        started(store, workdir=str(tmp_path / "work"))
        store.ingest(
            batch([event(i + 1, "checkpoint", step=i, path=path, size_bytes=4) for i, path in enumerate(paths)])
        )
    return tmp_path / "work" / "runs" / RUN


def _pulled_all(tmp_path: Path) -> dict[str, bytes]:
    places, here = find_places(tmp_path, {}, db=tmp_path / "runs.db"), tmp_path / "here"
    pull(places, RUN, which="all", to=here, tell=lambda _: None)
    return {str(path.relative_to(here / RUN)): path.read_bytes() for path in here.rglob("*") if path.is_file()}


def test_a_checkpoint_that_is_one_file_is_pulled(tmp_path: Path) -> None:
    run = _told_of(tmp_path, "checkpoints/step1.pt")
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step1.pt").write_bytes(b"one")

    assert _pulled_all(tmp_path) == {"step1.pt": b"one"}


def test_checkpoints_whose_paths_end_alike_stay_apart(tmp_path: Path) -> None:
    run = _told_of(tmp_path, "checkpoints/step-1/model", "out/step-2/model")
    for path in ("checkpoints/step-1/model", "out/step-2/model"):
        (run / path).mkdir(parents=True)
        (run / path / "weights").write_text(path)

    assert _pulled_all(tmp_path) == {
        "step-1/model/weights": b"checkpoints/step-1/model",
        "out/step-2/model/weights": b"out/step-2/model",
    }


def test_what_a_link_inside_a_checkpoint_leads_to_is_pulled_and_a_broken_one_is_said(
    there: Path, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "vocabulary").write_bytes(b"words")
    (there / "tokenizer").symlink_to(tmp_path / "shared")
    (there / "weights").symlink_to(tmp_path / "shared" / "vocabulary")

    assert _pulled_all(tmp_path) == {
        f"{there.name}/tokenizer/vocabulary": b"words",
        f"{there.name}/weights": b"words",
    }
    (there / "lost").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DraftyardError, match="lost is a link that leads nowhere"):
        _pulled_all(tmp_path)


def test_a_disk_that_fills_up_here_is_one_line_and_the_same_pull_goes_on(there: Path, tmp_path: Path) -> None:
    (there / "a").write_bytes(bytes(3 * 1024**2))
    (there / "b").write_bytes(bytes(3 * 1024**2))
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(small)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(
            DraftyardError, match=r"^cannot write .*/b: No space left on device\n.*the same pull goes on"
        ):
            _pull(tmp_path, small)
        assert [path.name for path in small.rglob("*") if path.is_file()] == ["a"]
        subprocess.run(["mount", "-o", "remount,size=16m", str(small)], check=True)

        assert _pull(tmp_path, small) == 2
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_second_pull_fetches_nothing_and_says_so(there: Path, tmp_path: Path) -> None:
    (there / "a").write_bytes(b"same")
    (there / "b").write_bytes(b"old")
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")

    def again() -> list[str]:
        return [_pulled(item) for item in pull(places, RUN, which="last", to=tmp_path / "here", tell=lambda _: None)]

    first, second = again(), again()
    (there / "b").write_bytes(b"new")
    third = again()

    folder = tmp_path / "here" / RUN / there.name
    assert first[0].startswith(f"{folder}  step 5, 2 files, ")
    assert "already" not in first[0]
    assert second == [f"{first[0]}; nothing had to be fetched: 2 of 2 files were there already"]
    assert third == [f"{first[0]}; 1 of 2 files were there already"]
    assert (folder / "b").read_bytes() == b"new"


def test_what_every_attempt_left_is_pulled_and_an_attempt_that_left_nothing_is_passed_over(
    there: Path, tmp_path: Path
) -> None:
    with Store(tmp_path / "runs.db") as store:
        for number in (2, 3):
            store.set_state(RUN, State.FAILED, evidence="out of memory")
            store.new_attempt(RUN, number=number)
    attempts = there.parent.parent / "attempts"
    for number, name in ((1, "memory-rank0.pickle"), (2, "inner/memory-rank0.json")):
        (attempts / str(number) / "artifacts" / name).parent.mkdir(parents=True)
        (attempts / str(number) / "artifacts" / name).write_text(f"of {number}")
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")

    pulled = [pull_artifacts(places, RUN, to=tmp_path / "here", tell=lambda _: None) for _ in range(2)]

    folder = tmp_path / "here" / RUN
    assert [(item.attempt, item.folder, item.num_files) for item in pulled[0]] == [
        (1, folder / "attempt-1", 1),
        (2, folder / "attempt-2", 1),
    ]
    assert (folder / "attempt-1" / "memory-rank0.pickle").read_text() == "of 1"
    assert (folder / "attempt-2" / "inner" / "memory-rank0.json").read_text() == "of 2"
    assert _pulled(pulled[1][0]).endswith(
        "artifacts of attempt 1, 1 file, 4 B; nothing had to be fetched: 1 of 1 file were there already"
    )


def test_a_run_that_left_nothing_says_so(there: Path, tmp_path: Path) -> None:
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")

    with pytest.raises(DraftyardError, match=f"run {RUN} left no artifacts on host local"):
        pull_artifacts(places, RUN, to=tmp_path / "here", tell=lambda _: None)


def test_the_drafter_of_an_export_is_pulled_and_its_page_says_how_to_fetch_and_load_it(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.db") as store:
        spec = {"target": {"source": "/models/big one"}, "drafter": {"block_size": 16}}
        documents = {Document.SPEC: json.dumps(spec)}
        started(store, kind=Kind.EXPORT, workdir=str(tmp_path / "work"), documents=documents)
        store.set_state(RUN, State.SUCCEEDED, evidence="x")
        run = store.reader.run(RUN)
    exported = tmp_path / "work" / "runs" / RUN / exported_path(run)
    exported.mkdir(parents=True)
    (exported / "config.json").write_text("{}")
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")

    (pulled,) = pull(places, RUN, which="last", to=tmp_path / "here", tell=lambda _: None)
    page = run_page(show(places, RUN), width=100, now_s=10.0)

    assert pulled.folder == tmp_path / "here" / RUN / "export"
    assert (pulled.folder / "config.json").read_text() == "{}"
    assert any(line.endswith(f"local:{exported}") for line in page)
    assert page[-4:] == [
        f"  draftyard pull {RUN}",
        "  pip install dflash    # where the drafter is to be loaded, with torch and transformers",
        f"""  python -c "from dflash import DFlashDraftModel; DFlashDraftModel.from_pretrained('pulled/{RUN}/export')\"""",
        "  vllm serve '/models/big one' --speculative-config "
        f"""'{{"method": "dflash", "model": "pulled/{RUN}/export", "num_speculative_tokens": 15}}'""",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../../evil", "{root}/evil", "a/../../evil", "..", "."])
def test_a_name_that_leads_out_of_the_folder_is_refused(
    there: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = tmp_path / "bin" / "find"
    liar.parent.mkdir()
    (there / "evil").write_bytes(b"evil")
    (there.parents[2] / "evil").write_bytes(b"evil")
    (there.parent / "evil").write_bytes(b"evil")
    liar.write_text(FIND.format(line=f"f 4 {name.format(root=tmp_path)}"), encoding="utf-8")
    liar.chmod(0o755)
    monkeypatch.setenv("PATH", f"{liar.parent}:/usr/bin:/bin")

    with pytest.raises(DraftyardError, match="is not below"):
        _pull(tmp_path, tmp_path / "to" / "here")

    assert not (tmp_path / "to").exists()


def test_a_checkpoint_whose_own_path_leads_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "work" / "runs" / RUN).mkdir(parents=True)
    with Store(tmp_path / "runs.db") as store:
        started(store, workdir=str(tmp_path / "work"))
        _tell(store, "checkpoints/step-00000005")
    with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as connection, connection:
        connection.execute("UPDATE checkpoints SET path = '..'")  # as an older draftyard took it

    with pytest.raises(DraftyardError, match="is not below"):
        _pull(tmp_path, tmp_path / "to" / "here")
