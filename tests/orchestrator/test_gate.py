"""The gate: a launch wants every rung passed for exactly what would run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator import gate
from orchestrator.actions.jobs import wanted_rungs
from orchestrator.recipe import load_recipe
from orchestrator.recipe.layers import dotted, leaves
from remote.spec import UNTESTED, LifeSpec, ScriptSpec, SmokeSpec, Spec
from tests.remote.specs import tiny_spec

HOST = gate.HostFacts(torch="2.13.0", cuda="13.0", driver="580.1", gpus=(("RTX PRO 6000", 95 * 2**30),))
SPEC = ScriptSpec(
    recipe="own",
    branch="main",
    entry="script",
    folder="job",
    command=["{python}", "train.py"],
    smoke=SmokeSpec(rungs=["fwd", "fwd_bwd"]),
    env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    settings={"width": "8"},
)


@dataclasses.dataclass(frozen=True)
class Row:
    rung: str
    passed: bool
    fingerprint: str | None
    fingerprint_parts: Mapping[str, str]
    message: str = ""
    run_id: str = "k7f3mnpq"


def _row(rung: str, mark: gate.Fingerprint, *, passed: bool = True, message: str = "") -> Row:
    return Row(rung, passed, mark.value, mark.parts, message)


def _mark(spec: Spec = SPEC, *, tree: str = "t1", host: gate.HostFacts = HOST, **env: str) -> gate.Fingerprint:
    return gate.fingerprint(spec, tree_hash=tree, host=host, env=env)


def test_every_required_rung_passed_for_this_fingerprint_allows() -> None:
    mark = _mark()

    found = gate.verdict(["fwd", "fwd_bwd"], [_row("fwd", mark), _row("fwd_bwd", mark)], mark)

    assert found.is_allowed
    assert found.unmet == ()


def test_forward_alone_never_unlocks_a_launch() -> None:
    mark = _mark()

    found = gate.verdict(["fwd", "fwd_bwd"], [_row("fwd", mark)], mark)

    assert not found.is_allowed
    assert [(rung.rung, rung.standing) for rung in found.unmet] == [("fwd_bwd", gate.Standing.MISSING)]


def test_a_failed_rung_is_told_with_its_own_words() -> None:
    mark = _mark()

    found = gate.verdict(["fwd_bwd"], [_row("fwd_bwd", mark, passed=False, message="asked for 22.31 GiB")], mark)

    assert gate.explain(found.unmet) == [
        "fwd_bwd: failed for exactly this: asked for 22.31 GiB; all of it: draftyard show k7f3mnpq --oom"
    ]


def test_the_newest_evidence_of_a_fingerprint_decides() -> None:
    mark = _mark()
    newest_first = [_row("fwd", mark), _row("fwd", mark, passed=False)]

    found = gate.verdict(["fwd"], newest_first, mark)

    assert found.is_allowed


def test_a_recipe_without_rungs_asks_for_no_evidence() -> None:
    assert gate.verdict([], [], _mark()).is_allowed


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (_mark(tree="t2"), "the shipped tree"),
        (_mark(dataclasses.replace(SPEC, settings={"width": "16"})), 'spec.settings.width "8" -> "16"'),
        (_mark(dataclasses.replace(SPEC, life=LifeSpec(num_gpus=3))), "spec.life.num_gpus 1 -> 3"),
        (_mark(HF_HOME="/big/hf"), "environment variable HF_HOME"),
        (_mark(host=dataclasses.replace(HOST, torch="2.11.0")), "torch 2.13.0 -> 2.11.0"),
        (_mark(host=dataclasses.replace(HOST, cuda="12.8")), "cuda 13.0 -> 12.8"),
        (_mark(host=dataclasses.replace(HOST, driver="575.2")), "driver 580.1 -> 575.2"),
        (_mark(host=dataclasses.replace(HOST, gpus=(("RTX PRO 6000", 94 * 2**30),))), "gpu RTX PRO 6000"),
        (_mark(dataclasses.replace(SPEC, env={})), "allocator expandable_segments:True -> default"),
    ],
)
def test_changing_any_part_refuses_and_names_it(changed: gate.Fingerprint, told: str) -> None:
    found = gate.verdict(["fwd"], [_row("fwd", _mark())], changed)

    assert found.unmet[0].standing is gate.Standing.STALE
    assert told in gate.explain(found.unmet)[0]


def test_rungs_that_stand_alike_are_told_in_one_line() -> None:
    mark, stale = _mark(), _mark(tree="t0")

    found = gate.verdict(["fwd", "leak", "fwd_bwd"], [_row("fwd", stale), _row("fwd_bwd", stale)], mark)

    assert gate.explain(found.unmet) == [
        "fwd, fwd_bwd: tested for something else; changed since: the shipped tree",
        "leak: missing; never tested for this recipe and branch",
    ]


def test_cosmetic_fields_change_nothing() -> None:
    told_otherwise = dataclasses.replace(SPEC, why="another sentence", tags=["x"])

    assert _mark(told_otherwise).value == _mark().value


def test_what_no_rung_reads_changes_nothing_and_every_other_value_does() -> None:
    spec = tiny_spec()
    untested = tuple(f"{path}." for path in UNTESTED.split())
    all_paths = {dotted(path) for path, _ in leaves(dataclasses.asdict(spec))}

    parts = {name.removeprefix("spec.") for name in _mark(spec).parts if name.startswith("spec.")}

    left_out = {path for path in all_paths if f"{path}.".startswith(untested)}
    assert all(any(f"{path}.".startswith(one) for path in all_paths) for one in untested)
    assert parts == all_paths - left_out - {"why", "tags", "env"}


@pytest.mark.parametrize(
    ("sections", "is_same"),
    [
        ({"train": {"num_steps": 9999}}, True),
        ({"train": {"checkpoint_every": 10, "log_every": 5, "keep_last": 4}}, True),
        ({"train": {"record_allocations": True}}, True),
        ({"evaluate": {"at_end": False, "tree_budgets": [8]}}, True),
        ({"life": {"retries": 3, "max_duration_s": 60.0}}, True),
        ({"smoke": {"rungs": ["fwd", "fwd_bwd"]}}, True),
        ({"train": {"rows_per_step": 2}}, False),
        ({"train": {"seed": 1}}, False),
        ({"optim": {"warmup_steps": 10}}, False),  # the rungs climb the warm-up
        ({"optim": {"schedule": "linear"}}, False),
        ({"smoke": {"timed_steps": 5}}, False),
        ({"life": {"num_gpus": 2}}, False),
    ],
)
def test_evidence_stays_for_what_no_rung_reads_and_for_nothing_else(sections: Any, is_same: bool) -> None:
    found = gate.verdict(["fwd_bwd"], [_row("fwd_bwd", _mark(tiny_spec()))], _mark(tiny_spec(**sections)))

    assert found.is_allowed is is_same


def test_where_the_rung_on_real_rows_is_wanted_how_its_answers_are_made_counts() -> None:
    def mark(rungs: list[str], **data: Any) -> str:
        return _mark(tiny_spec(smoke={"rungs": rungs}, data=data)).value

    for changed in ({"answer_temperature": 0.7}, {"answer_tokens": 9}):
        assert mark(["fwd_bwd"]) == mark(["fwd_bwd"], **changed)
        assert mark(["fwd_bwd", "real"]) != mark(["fwd_bwd", "real"], **changed)
    assert mark(["fwd_bwd", "real"]) == mark(["fwd_bwd", "real"], answer_batch=1)


def test_the_rung_on_real_rows_is_wanted_where_it_is_named_and_never_instead_of_another() -> None:
    assert "real" not in gate.required_rungs(tiny_spec())
    assert "ranks" not in gate.required_rungs(tiny_spec())
    assert gate.required_rungs(tiny_spec(roles={"target": 1}))[-1] == "ranks"
    assert gate.required_rungs(tiny_spec(smoke={"rungs": ["real"]})) == ("real", *gate.FLOOR)
    assert wanted_rungs(tiny_spec(), ["real"]) == ("real",)


def test_a_script_that_is_a_rung_may_read_all_but_how_the_run_ends() -> None:
    scripts = SmokeSpec(rungs=["own"], scripts={"own": "own.py"})
    spec = dataclasses.replace(tiny_spec(), smoke=scripts)

    longer = dataclasses.replace(spec, train=dataclasses.replace(spec.train, num_steps=9999))
    patient = dataclasses.replace(spec, life=LifeSpec(retries=3))

    assert _mark(longer).value != _mark(spec).value
    assert _mark(patient).value == _mark(spec).value


def test_the_order_of_gpus_and_their_number_change_nothing() -> None:
    one, two = ("A", 2**30), ("B", 2**31)

    left = _mark(host=dataclasses.replace(HOST, gpus=(one, two)))
    right = _mark(host=dataclasses.replace(HOST, gpus=(two, one, two)))

    assert left.value == right.value


def test_no_value_of_the_environment_lies_in_the_parts() -> None:
    mark = _mark(HF_TOKEN="hf_canary_value")

    assert "hf_canary_value" not in str(dict(mark.parts))
    assert mark.parts["env.HF_TOKEN"]


@pytest.mark.parametrize("rungs", [[], ["fwd"], ["leak", "fwd"]])
def test_no_recipe_of_the_bundled_trainer_gets_below_the_floor(rungs: list[str]) -> None:
    spec = dataclasses.replace(load_recipe("smollm2").resolve("ce").spec, smoke=SmokeSpec(rungs=rungs))

    wanted = gate.required_rungs(spec)

    assert set(wanted) == {*rungs, "fwd_bwd", "multi_doc", "leak", "checkpoint"}
    assert wanted_rungs(spec, ()) == wanted  # the repairing command climbs what the launch wants


def test_a_memory_cap_is_part_of_what_was_tested() -> None:
    free = gate.fingerprint(SPEC, tree_hash="t", host=HOST)
    capped = gate.fingerprint(SPEC, tree_hash="t", host=HOST, cap_bytes=2**30)

    assert "cap" not in free.parts
    for passed in (True, False):
        row = Row("fwd", passed, capped.value, capped.parts)
        assert gate.verdict(["fwd"], [row], free).rungs[0].standing is gate.Standing.STALE
    assert "cap 1.00 GiB -> absent" in gate.explain(gate.verdict(["fwd"], [row], free).rungs)[0]


def test_a_script_of_ones_own_wants_the_rungs_it_names() -> None:
    smoke = SmokeSpec(rungs=["quick"], scripts={"quick": "quick.py"})
    script = ScriptSpec(recipe="own", branch="main", entry="script", folder=".", command=["true"], smoke=smoke)

    assert gate.required_rungs(script) == ("quick",)
