"""`smoke --try N`: the suggestions of an out-of-memory page, tried on the real host `local`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import pytest

from orchestrator.actions.history import open_reader as reader_of
from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import plan_body
from orchestrator.actions.recipes import resolve
from orchestrator.actions.rungs import planned_rung
from orchestrator.actions.shortfall import GROW
from orchestrator.actions.trying import Trial, trial
from orchestrator.errors import UsageError
from orchestrator.store.rows import Document, FailureRow, State
from orchestrator.store.writes import Store
from orchestrator.verbs.plan_page import typed
from remote.allocator import DEFAULT, NAMES
from remote.plan import plan
from remote.spec import DFlashSpec, dump
from tests.orchestrator.runs import new_run
from tests.orchestrator.yard import Yard

RECIPE = """\
name: small
why: The bundled trainer at a width that any processor trains in a second.
base:
  entry: dflash
  target:
    source: /nowhere
    hidden_size: 32
    num_layers: 4
    vocab_size: 96
    tied_embeddings: true
    num_parameters: 40000
    eos_token_id: 2
    pad_token_id: 2
  drafter:
    num_layers: 4
    intermediate_size: 64
    num_heads: 4
    num_kv_heads: 2
    head_dim: 16
    captured_layers: [0, 1, 2]
    block_size: 8
    mask_token_id: 3
    rope_theta: 10000.0
    max_position_embeddings: 4096
    attention: sdpa
  data: {prompts: p.jsonl, answers: a.jsonl, held_out: h.jsonl, row_tokens: 512, max_anchors: 32, anchors_per: row}
  train: {num_steps: 4, dtype: float32}
branches:
  narrow: {why: Fits anywhere.}
  wide: {why: Asks for a few hundred MiB more., data: {max_anchors: 400}}
"""
RAN_OUT = "oom2345x"
NEWER = "night-with-more"


@pytest.fixture
def places(yard: Yard) -> Places:
    yard.edit("small.yaml", RECIPE)
    return find_places(yard.root, {"HOME": str(yard.root), "XDG_CONFIG_HOME": str(yard.root / "config")})


def ran_out(
    places: Places,
    *,
    share: float = 0.975,
    overrides: Sequence[str] = ("train.seed=7",),
    allocated_bytes: int = 0,
    run_id: str = RAN_OUT,
    stage: str = "forward",
    in_pieces: bool = False,
) -> None:
    """A training of the branch `wide` as it ends where the process was allowed this share of what its plan wants."""
    spec = resolve(places, "small", branch="wide", overrides=overrides)[1].spec
    assert isinstance(spec, DFlashSpec)
    made = plan(spec, device="cpu", capacity_bytes=64 * 2**30)
    documents = {
        Document.SPEC: dump(spec),
        Document.PLAN: json.dumps(plan_body(made)),
        Document.LAUNCH: json.dumps({"gpus": [], "overrides": list(overrides), "env": [NAMES[0]]}),
    }
    facts = {
        "limit_bytes": round(made.driver_bytes * share),
        "requested_bytes": 1024,
        "allocated_bytes": allocated_bytes,
    }
    if in_pieces:
        facts |= {"cause": "fragmentation", "remedies": [{"word": GROW, "text": "set it"}]}
    failure = FailureRow(
        run_id=run_id, attempt=1, kind="host_oom", message="can't allocate memory", hint="", source="rank0",
        stage=stage, step=1, traceback="", facts=facts, at_s=1.0, is_first_cause=True,
    )  # fmt: skip
    with Store(places.db) as store:
        store.create_run(new_run(run_id, recipe="small", branch="wide", documents=documents))
        store.new_attempt(run_id)
        store.replace_failures(run_id, 1, [failure])
        store.set_state(run_id, State.FAILED, reason="host_oom", evidence="exit file: code 1")


@pytest.mark.slow
def test_the_first_suggestion_is_climbed_with_the_runs_own_values(yard: Yard, places: Places) -> None:
    ran_out(places)
    page = yard.json("show", RAN_OUT)["fits"]["planned"]["switches"]
    assert yard.run("show", RAN_OUT, "--oom") == 0
    assert f"1 {page[0]['name']}" in yard.out
    assert "draftyard smoke small -b wide --host local --try 1" in yard.out

    assert yard.run("smoke", "small", "-b", "wide", "fwd", "--try", "1") == 0, yard.out + yard.err

    assert f"suggestion 1 of run {RAN_OUT}: {page[0]['name']}" in yard.err
    run = yard.json("ls", "--kind", "smoke")["runs"][0]
    tried = yard.json("show", run["id"])
    assert tried["launch"]["overrides"] == ["train.seed=7", *page[0]["overrides"]]
    for override in page[0]["overrides"]:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        assert str(tried["spec"][section][name]) == value


@pytest.mark.slow
def test_an_older_run_is_not_told_to_try_what_a_newer_one_is_offered(yard: Yard, places: Places) -> None:
    ran_out(places)
    ran_out(places, run_id=NEWER)
    first = yard.json("show", RAN_OUT)["fits"]["planned"]["switches"][0]
    sets = " ".join(f"--set {override}" for override in ("train.seed=7", *first["overrides"]))

    assert yard.run("show", RAN_OUT, "--oom") == 0
    assert "--try 1" not in yard.out
    assert f"draftyard smoke small -b wide --host local {sets}    #" in yard.out
    assert f"--try takes those of run {NEWER}, a newer one" in yard.out
    assert yard.run("show", NEWER, "--oom") == 0
    assert "draftyard smoke small -b wide --host local --try 1    #" in yard.out


@pytest.mark.slow
def test_the_allocators_setting_is_climbed_where_memory_lay_in_pieces(yard: Yard, places: Places) -> None:
    """It is set behind the host's own file, which may be what had unset it, and before what a person types."""
    ran_out(places, in_pieces=True)
    assert yard.run("show", RAN_OUT, "--oom") == 0
    assert "1 segments that grow" in yard.out
    assert "draftyard smoke small -b wide --host local --try 1    # the rungs with it" in yard.out

    assert yard.run("smoke", "small", "-b", "wide", "fwd", "--try", "1") == 0, yard.out + yard.err

    typed = f"--set train.seed=7 --env {NAMES[0]}={DEFAULT}"
    assert f"suggestion 1 of run {RAN_OUT}: segments that grow; the same by hand: {typed}" in yard.err
    assert "a value on the command line is seen" not in yard.err
    run = yard.json("ls", "--kind", "smoke")["runs"][0]
    tried = yard.json("show", run["id"])
    assert tried["launch"]["overrides"] == ["train.seed=7"]
    assert tried["launch"]["named_env"] == [NAMES[0]]
    with reader_of(places) as reader:
        assert json.loads(reader.document(run["id"], Document.FINGERPRINT))["allocator"] == DEFAULT


@pytest.mark.slow
def test_behind_the_setting_the_changes_of_a_plan_have_the_numbers_of_the_page(yard: Yard, places: Places) -> None:
    ran_out(places, in_pieces=True)
    first = yard.json("show", RAN_OUT)["fits"]["planned"]["switches"][0]

    assert yard.run("show", RAN_OUT, "--oom") == 0
    assert f"2 {first['name']}" in yard.out
    assert yard.run("smoke", "small", "-b", "wide", "--try", "9") == 2

    assert f"--try 9: the page of run {RAN_OUT} offers 1 segments that grow; 2 {first['name']}" in yard.err


def test_what_is_offered_fits_what_the_process_was_allowed(yard: Yard, places: Places) -> None:
    ran_out(places)
    limit = yard.json("show", RAN_OUT)["failures"][0]["facts"]["limit_bytes"]

    planned = yard.json("show", RAN_OUT)["fits"]["planned"]

    assert planned["plan"]["capacity_bytes"] == limit < 64 * 2**30
    assert planned["switches"]
    assert all(item["driver_bytes"] <= limit for item in planned["switches"])


def test_a_number_that_the_page_does_not_offer_names_those_it_does(yard: Yard, places: Places) -> None:
    ran_out(places)
    offered = yard.json("show", RAN_OUT)["fits"]["planned"]["switches"]

    assert yard.run("smoke", "small", "-b", "wide", "--try", "9") == 2

    assert f"--try 9: the page of run {RAN_OUT} offers 1 {offered[0]['name']}" in yard.err


def test_a_branch_that_never_ran_out_has_nothing_to_try(yard: Yard, places: Places) -> None:
    ran_out(places)

    assert yard.run("smoke", "small", "-b", "narrow", "--try", "1") == 5

    assert "no run of recipe small, branch narrow, ran out of memory" in yard.err
    assert yard.run("smoke", "small", "-b", "wide", "--try", "0") == 2
    assert yard.run("smoke", "small", "-b", "wide", "--try", "1", "--script", "-") == 2


@pytest.mark.slow
def test_a_stage_that_no_plan_speaks_of_is_offered_no_change(yard: Yard, places: Places) -> None:
    ran_out(places, stage="target")

    assert yard.run("show", RAN_OUT, "--oom") == 0
    assert "it ran out while the whole target was loaded or computed hidden states, of which its plan says" in yard.out
    assert "--try" not in yard.out
    assert yard.run("smoke", "small", "-b", "wide", "--try", "1") == 2
    assert "no change of a step would help" in yard.err


@pytest.mark.slow
def test_a_script_of_ones_own_is_told_that_it_has_no_plan(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "-b", "oom", "--force", "to see it end", "--follow") == 12

    assert yard.run("smoke", "tiny", "-b", "oom", "--try", "1") == 2

    assert "a script of its own has no plan" in yard.err


def test_a_script_of_ones_own_has_the_allocators_setting_where_memory_lay_in_pieces(yard: Yard, places: Places) -> None:
    spec = resolve(places, "tiny", branch="oom")[1].spec
    facts = {
        "cause": "fragmentation",
        "remedies": [{"word": GROW, "text": "set it"}, {"word": "even_sizes", "text": "pad"}],
    }
    failure = FailureRow(
        run_id=RAN_OUT, attempt=1, kind="gpu_oom", message="CUDA out of memory", hint="", source="rank0",
        stage=None, step=None, traceback="", facts=facts, at_s=1.0, is_first_cause=True,
    )  # fmt: skip
    with Store(places.db) as store:
        documents = {Document.SPEC: dump(spec), Document.LAUNCH: json.dumps({"env": []})}
        store.create_run(new_run(RAN_OUT, recipe="tiny", branch="oom", documents=documents))
        store.new_attempt(RAN_OUT)
        store.replace_failures(RAN_OUT, 1, [failure])
        store.set_state(RAN_OUT, State.FAILED, reason="gpu_oom", evidence="exit file: code 1")

    found = trial(places, "tiny", branch="oom", number=1)
    page = yard.run("show", RAN_OUT, "--oom"), yard.out
    offered = yard.json("show", RAN_OUT)["fits"]

    assert page[0] == 0
    assert f"1 segments that grow\n  --env {NAMES[1]}={DEFAULT}\n" in page[1]
    assert "draftyard smoke tiny -b oom --host local --try 1    # the rungs with it\n" in page[1]
    assert offered["setting"] == {"name": found.name, "env": {NAMES[1]: DEFAULT}}
    assert offered["planned"] is None
    assert (found.name, found.env, found.overrides) == ("segments that grow", {NAMES[1]: DEFAULT}, ())
    with pytest.raises(UsageError, match=r"offers 1 segments that grow$"):
        trial(places, "tiny", branch="oom", number=2)


def test_what_is_printed_to_type_by_hand_is_one_word_a_value_to_a_shell() -> None:
    values = ("data.path=a b", "data.names=[a, 'b']", "train.seed=7")

    by_hand = Trial(RAN_OUT, 1, "a change", values, {"CONF": "a b:True"}, None).typed
    page = "\n".join(typed("--set", values, 40))

    assert shlex.split(by_hand) == [*(word for value in values for word in ("--set", value)), "--env", "CONF=a b:True"]
    assert shlex.split(page) == [word for value in values for word in ("--set", value)]
    assert "--set train.seed=7" in page


def test_the_page_names_the_stage_of_the_plan_that_was_exceeded_and_its_largest_line(
    yard: Yard, places: Places
) -> None:
    ran_out(places, allocated_bytes=8 * 2**30)
    body = yard.json("show", RAN_OUT)["fits"]["exceeded"]
    assert yard.run("show", RAN_OUT, "--oom") == 0

    assert (body["stage"], body["needed_bytes"]) == ("forward", 8 * 2**30 + 1024)
    assert 0 < body["component_bytes"] < body["planned_bytes"] < body["needed_bytes"]
    line = next(line for line in yard.out.splitlines() if line.startswith("exceeded: forward was planned with"))
    assert body["component"] in line


def test_a_stage_that_kept_its_plan_is_not_called_exceeded(yard: Yard, places: Places) -> None:
    ran_out(places, allocated_bytes=1024)

    assert yard.json("show", RAN_OUT)["fits"]["exceeded"] is None


@pytest.mark.parametrize(
    ("climbed", "planned"),
    [
        (("fwd", "fwd_bwd", "multi_doc", "leak", "checkpoint"), "fwd_bwd"),
        (("checkpoint", "multi_doc", "fwd"), "multi_doc"),
        (("leak", "fwd", "own.py"), "fwd"),
        (("leak",), "leak"),
        (("real",), "fwd_bwd"),
        (("checkpoint",), None),
        (("ranks", "own.py"), None),
    ],
)
def test_a_smoke_run_is_planned_as_the_largest_rung_that_it_climbs(
    climbed: tuple[str, ...], planned: str | None
) -> None:
    """The rung `checkpoint` has a small drafter of its own, so its peaks say nothing of the recipe's."""
    assert planned_rung(climbed) == planned


@pytest.mark.slow
def test_a_forward_alone_is_measured_against_the_plan_of_a_forward_alone(yard: Yard, places: Places) -> None:
    assert yard.run("smoke", "small", "-b", "wide", "fwd") == 0, yard.err

    run = yard.json("ls", "--kind", "smoke")["runs"][0]
    spec = resolve(places, "small", branch="wide")[1].spec
    assert isinstance(spec, DFlashSpec)
    made = plan(spec, device="cpu", rung="fwd")
    kept = yard.json("show", run["id"])["plan"]["stages"]
    assert {stage["name"]: stage["allocated_bytes"] for stage in kept} == {
        stage.name: stage.allocated_bytes for stage in made.stages
    }
    assert (
        made.stage("forward").allocated_bytes
        < plan(spec, device="cpu", rung="fwd_bwd").stage("forward").allocated_bytes
    )
