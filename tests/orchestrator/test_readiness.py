"""What each host of a job must have itself: a work folder, its target, files that are not shipped."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.actions.lots import Lot
from orchestrator.actions.order import Order, Settled
from orchestrator.actions.readiness import refuse_shared_folders, refuse_unready, say_unprepared
from orchestrator.actions.site import Site
from orchestrator.actions.spread import Node
from orchestrator.errors import DraftyardError
from orchestrator.host import LOCAL
from orchestrator.shell.local import LocalShell
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, State
from orchestrator.store.writes import Store
from orchestrator.tree import Tree
from orchestrator.workplace import Workplace
from remote.spec import DFlashSpec, dump
from tests.orchestrator.runs import RUN, new_run
from tests.remote.specs import tiny_spec


def lot(name: str, work_dir: Path, spec: DFlashSpec | None = None) -> Lot:
    host, order = replace(LOCAL, name=name), Order("tiny", overrides=("train.seed=3",))
    settled = Settled(order, spec or tiny_spec(), host, tree=Tree(()), git=cast("Any", None), env={})
    place = Workplace(str(work_dir), sys.executable, "/root")
    return Lot(settled, Site(host, LocalShell(), place, {}))


@pytest.mark.parametrize("way", ["the same path", "by a link", "not there yet", "not there yet, by a link"])
def test_one_folder_for_two_hosts_is_refused_whatever_leads_there(tmp_path: Path, way: str) -> None:
    there, link = tmp_path / "disk", tmp_path / "link"
    there.mkdir()
    link.symlink_to(there)
    below = Path("not/yet") if "yet" in way else Path()
    second = link if "link" in way else there

    with pytest.raises(DraftyardError, match=r"one folder for two hosts of the job.*work_dir of its own"):
        refuse_shared_folders([lot("a", there / below), lot("b", tmp_path / "other"), lot("c", second / below)])

    assert list(tmp_path.rglob(".draftyard-*")) == []


def test_folders_apart_are_let_through_though_one_disk_holds_them(tmp_path: Path) -> None:
    refuse_shared_folders([lot("a", tmp_path / "a"), lot("b", tmp_path / "b"), lot("c", tmp_path / "a" / "b")])

    assert list(tmp_path.iterdir()) == []


def test_a_host_without_its_target_or_files_is_refused_with_what_to_type(tmp_path: Path) -> None:
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    spec = tiny_spec(target={"source": str(gguf)}, data={"answers": "/nowhere/answers.jsonl"})

    with pytest.raises(DraftyardError) as told:
        refuse_unready([lot("one", tmp_path / "a", spec), lot("two", tmp_path / "b", spec)])

    assert str(told.value).splitlines()[1:] == [
        "  host one: /nowhere/answers.jsonl is not there",
        "  host two: /nowhere/answers.jsonl is not there",
        "  host two: x.gguf is not converted there: draftyard prepare tiny -b ce --host two --set train.seed=3",
    ]


def test_a_host_that_nobody_prepared_is_warned_of_until_somebody_has(tmp_path: Path) -> None:
    spec = tiny_spec(data={"answers": "/data/answers.jsonl", "hidden_states": "cached"})
    settled = lot("one", tmp_path, spec).settled
    both = replace(settled, others=(replace(settled, host=replace(LOCAL, name="two"), node=Node(1, 2)),))
    said: list[str] = []
    with Store(tmp_path / "runs.db") as store:
        documents = {Document.SPEC: dump(replace(spec, train=replace(spec.train, num_steps=7)))}
        store.create_run(new_run(RUN, kind="prepare", recipe=spec.recipe, host="one", documents=documents))
        store.set_state(RUN, State.SUCCEEDED, evidence="x")

    with Reader(tmp_path / "runs.db") as reader:
        say_unprepared(reader, both, said.append)
        say_unprepared(reader, settled, said.append)  # a job on one host makes what it lacks

    assert len(said) == 1
    assert said[0].startswith(
        "warning: host two: no `prepare` of this branch is known there; its ranks make hidden states"
    )
    assert said[0].endswith("draftyard prepare tiny -b ce --host two --set train.seed=3")
