"""The hosts of one job with their doors open: which of them cannot work together, and which cards are whose."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.actions.host_facts import NoGpu
from orchestrator.actions.lots import Lot, company, opened, refuse_cardless, refuse_unlike
from orchestrator.actions.order import Order, Settled
from orchestrator.actions.site import Site
from orchestrator.actions.spread import Node
from orchestrator.errors import DraftyardError
from orchestrator.host import LOCAL
from orchestrator.store.rows import Document
from orchestrator.store.writes import Store
from orchestrator.workplace import Workplace
from remote.spec import RolesSpec
from tests.orchestrator.runs import RUN, new_run
from tests.orchestrator.test_starts import TWO_CARDS
from tests.remote.specs import tiny_spec

PLACE = Workplace("/srv/draftyard", "/venv/bin/python", "/root")


def lot(name: str, *, boot_id: str | None, cards: tuple[str | None, ...] = (), torch: str | None = "2.13.0") -> Lot:
    """A host as its probe told it; nothing here asks it anything."""
    gpus = [{"index": index, "uuid": uuid} for index, uuid in enumerate(cards)]
    facts = {"boot_id": boot_id, "gpus": gpus, "python": {"packages": {"torch": torch}}}
    host, unasked = replace(LOCAL, name=name), cast("Any", None)
    settled = Settled(Order("tiny"), tiny_spec(), host, tree=unasked, git=unasked, env={})
    return Lot(settled, Site(host, unasked, PLACE, facts))


OWN = lot("a", boot_id="one").settled


def test_two_entries_for_one_machine_with_cards_are_refused() -> None:
    pair = [
        lot("gpu", boot_id="one", cards=("GPU-a", "GPU-b")),
        lot("gpu.lan", boot_id="one", cards=("GPU-a", "GPU-b")),
    ]

    with pytest.raises(DraftyardError, match=r"hosts gpu and gpu\.lan are one machine"):
        refuse_unlike(pair)
    with pytest.raises(DraftyardError, match="are one machine"):  # an index says nothing of what is shared
        refuse_unlike([lot("a", boot_id="one", cards=(None,)), lot("b", boot_id="one", cards=(None,))])
    with pytest.raises(DraftyardError, match=r"hosts gpu and gpu\.lan are one machine"):  # none of them the first
        refuse_unlike([lot("a", boot_id="zero", cards=("GPU-z",)), *pair])


@pytest.mark.parametrize(
    "pair",
    [
        [lot("a", boot_id="one", cards=("GPU-a",)), lot("b", boot_id="two", cards=("GPU-b",))],
        [lot("a", boot_id="one", cards=("GPU-a",)), lot("b", boot_id="one", cards=("GPU-b",))],  # two containers
        [lot("a", boot_id="one"), lot("b", boot_id="one")],
        [lot("a", boot_id=None, cards=(None,)), lot("b", boot_id=None, cards=(None,))],
        [lot("a", boot_id="one", torch="2.13.0+cu130"), lot("b", boot_id="two", torch="2.13.0")],
        [lot("a", boot_id="one", torch=None), lot("b", boot_id="two")],
    ],
    ids=["two machines", "two containers", "no cards", "unknown", "two builds", "no torch told"],
)
def test_hosts_that_can_work_together_are_let_through(pair: list[Lot]) -> None:
    refuse_unlike(pair)


def test_hosts_of_two_versions_of_torch_are_refused_with_both_and_the_repair() -> None:
    with pytest.raises(DraftyardError) as told:
        refuse_unlike([lot("a", boot_id="one", torch="2.13.0+cu130"), lot("b", boot_id="two", torch="2.12.1")])

    assert str(told.value) == (
        "host a has torch 2.13.0+cu130 and host b torch 2.12.1; the processes of one job want the same\n"
        "  repair, on host b: /venv/bin/python -m pip install torch==2.13.0"
    )


def test_hosts_with_and_without_cards_are_refused() -> None:
    with pytest.raises(DraftyardError, match="host b has GPUs and host a has none"):
        refuse_unlike([lot("a", boot_id="one"), lot("b", boot_id="two", cards=("GPU-b",))])


def test_a_recipe_for_cards_is_refused_on_a_host_without_any_with_its_arithmetic() -> None:
    roles = RolesSpec(5, 3)
    spec = replace(tiny_spec(life={"num_gpus": 8}), roles=roles)
    each = [replace(lot("a", boot_id="one").settled, spec=spec, node=Node(0, 2)), replace(OWN, spec=spec)]
    bare, broken = (Lot(settled, lot("a", boot_id="one").site) for settled in each)
    facts = {**broken.site.facts, "gpu_error": "NVIDIA-SMI has failed\nmake sure"}
    broken = replace(broken, site=replace(broken.site, facts=facts))

    with pytest.raises(NoGpu) as told:
        refuse_cardless(bare)
    with pytest.raises(NoGpu, match=r"no GPU, as its driver fails: NVIDIA-SMI has failed; the recipe wants 5 target"):
        refuse_cardless(broken)

    assert str(told.value).splitlines()[0] == (
        "host a has no GPU; the recipe wants 5 target + 3 drafter = 8 processes, one on each GPU; 4 on each of 2 hosts"
    )
    assert "--set train.dtype=float32" in str(told.value)


def test_a_recipe_for_processors_and_one_with_a_card_are_let_through() -> None:
    on_processors = replace(OWN, spec=tiny_spec(train={"dtype": "float32"}))

    refuse_cardless(Lot(on_processors, lot("a", boot_id="one").site))
    refuse_cardless(lot("a", boot_id="one", cards=("GPU-a",)))


def test_a_job_on_processors_is_told_which_live_runs_it_shares_them_with(tmp_path: Path) -> None:
    """Nothing promises processors and memory to one run, as cards are."""
    plan = json.dumps({"driver_bytes": 3 * 2**29})
    with Store(tmp_path / "db") as store:
        for run_id, host in (("aaaaaaaa", "a"), ("bbbbbbbb", "a"), ("cccccccc", "b")):
            store.create_run(replace(new_run(id=run_id), host=host))
        store.keep_document("aaaaaaaa", Document.PLAN, plan)

        shared = company(lot("a", boot_id="one"), store.reader, run_id="bbbbbbbb")
        assert shared == (
            "host a has no GPU, and run aaaaaaaa (smollm2, branch v6; planned 1.50 GiB) is live there: they share its "
            "processors and memory, so each is slower, and what is measured of time meanwhile is of both"
        )
        both = company(lot("a", boot_id="one"), store.reader)
        assert "1.50 GiB), bbbbbbbb (smollm2, branch v6) are live there" in both
        assert company(lot("c", boot_id="one"), store.reader) == ""
        assert company(lot("a", boot_id="one", cards=("GPU-a",)), store.reader) == "", "cards are promised"


@pytest.mark.slow
def test_the_doors_of_such_hosts_are_not_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What launch, its rehearsal and resume all go through."""
    cards(tmp_path / "bin", monkeypatch)
    unasked = cast("Any", None)
    first, second = (
        Settled(
            Order("tiny"), tiny_spec(), replace(LOCAL, name=name, work_dir=str(tmp_path / name)), unasked, unasked, {}
        )
        for name in ("gpu", "gpu.lan")
    )

    with (
        pytest.raises(DraftyardError, match=r"hosts gpu and gpu\.lan are one machine"),
        opened(replace(first, others=(second,)), lambda _: None),
    ):
        pass


def cards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two cards on which no process ever shows."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(TWO_CARDS, encoding="utf-8")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_run_sees_its_own_cards_promised_on_its_other_hosts_alone(tmp_path: Path) -> None:
    seen: list[Mapping[str, str]] = []

    def choose(taken: Mapping[str, str]) -> tuple[str, ...]:
        seen.append(dict(taken))
        return ("GPU-a", "0")

    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run(RUN, host="gpu", more_hosts=("gpu.lan",)))
        for host in (None, "gpu.lan", None, "gpu.lan"):
            store.promise_gpus(RUN, choose, host=host)

    assert seen == [{}, {"GPU-a": RUN}, {"GPU-a": RUN}, {"GPU-a": RUN}]
