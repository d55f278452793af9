"""The page of a run at 80 columns: every section that a person decides by."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pytest

from orchestrator.actions import followed, history, throughput
from orchestrator.actions.life import _moment
from orchestrator.actions.places import Places, find_places
from orchestrator.actions.plans import plan_body
from orchestrator.actions.rank_places import rank_places
from orchestrator.errors import UsageError
from orchestrator.recipe import load_recipe
from orchestrator.store.rows import NO_SUPERVISOR, Document, FailureRow, State
from orchestrator.store.writes import Store
from orchestrator.verbs.history import series_table
from orchestrator.verbs.leads import next_steps
from orchestrator.verbs.page import run_page
from remote.plan import plan
from remote.spec import DFlashSpec, RolesSpec, dump
from remote.wire import Event
from tests.orchestrator.runs import again, batch, event, new_run, started, steps
from tui.snapshot import Ask, Room

PEAKS = {"load": 210_000_000, "forward": 300_000_000, "backward": 260_000_000, "step": 250_000_000}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")


def _spec() -> DFlashSpec:
    spec = load_recipe("smollm2").resolve("ce").spec
    assert isinstance(spec, DFlashSpec)
    return spec


def _documents() -> dict[Document, str]:
    predicted = plan_body(plan(_spec(), capacity_bytes=8 * 2**30, device="cpu"))
    return {Document.SPEC: dump(_spec()), Document.PLAN: json.dumps(predicted)}


def _protocol(**way: Any) -> dict[str, Any]:
    return {"prompts": "smollm2.held_out.jsonl", "num_prompts": 8, "temperature": 0.0, "dtype": "float32", **way}


def _decoded(mean: float, **more: Any) -> dict[str, Any]:
    counts = {"texts_equal": 7, "near_ties": 1, "mismatches": 0, "speed_up": 0.7}
    return {
        "acceptance_length": mean,
        "acceptance_length_low": mean - 0.19,
        "acceptance_length_high": mean + 0.2,
        **counts,
        **more,
    }


def _trained(places: Places) -> str:
    """A training run of the bundled recipe that has ended well."""
    with Store(places.db) as store:
        store.create_run(
            new_run("kxxxaaaa", branch="ce", documents=_documents(), num_steps=400, why="Plain cross-entropy.")
        )
        store.describe_run("kxxxaaaa", workdir="/data/draftyard", tree_hash="ab" * 32, fingerprint="f" * 16)
        store.new_attempt("kxxxaaaa")
        told = [
            event(401 + i, "memory", stage=stage, gpu=None, allocated_bytes=size)
            for i, (stage, size) in enumerate(PEAKS.items())
        ]
        told.append(
            event(410, "checkpoint", step=400, path="checkpoints/step-00000400", size_bytes=97_000_000, is_best=True)
        )
        way = _protocol(method="chain", drafter="trained")
        gain = {"over_untrained": 0.71, "over_untrained_low": 0.52, "over_untrained_high": 0.91}
        told.append(event(411, "evaluation", step=400, protocol=way, values=_decoded(1.71, **gain)))
        told.append(event(412, "evaluation", step=400, protocol={**way, "drafter": "untrained"}, values=_decoded(1.0)))
        numbers = {"loss": 2.31, "accuracy": 0.41, "streak": 1.6, "block_tokens_per_s": 1020.0, "step_s": 0.31}
        store.ingest(
            batch(
                [*steps(1, 399, **numbers), event(400, "metrics", step=400, values={"loss": math.nan}), *told],
                run_id="kxxxaaaa",
            )
        )
        store.set_state("kxxxaaaa", State.SUCCEEDED, evidence="exit status 0 and the job's final event")
    return "kxxxaaaa"


def _text(places: Places, selector: str, **options: Any) -> str:
    return click.unstyle("\n".join(run_page(history.show(places, selector), width=80, now_s=2000.0, **options)))


def test_the_page_of_a_trained_run_tells_what_it_is_worth(places: Places) -> None:
    text = _text(places, _trained(places))

    assert "succeeded, step 400 of 400" in text
    assert "exit status 0 and the job's final event" in text
    assert "trained chain over the untrained drafter: +0.71 tokens a round [0.52, 0.91]" in text
    assert "1.71 [1.52, 1.91]" in text
    assert "newest on local: /data/draftyard/runs/kxxxaaaa/checkpoints/step-00000400" in text
    assert "loss: 1 of 400 values are nan" in text
    assert "draftyard evaluate kxxxaaaa" in text


def test_each_acceptance_on_a_page_says_what_it_is(places: Places) -> None:
    run_id = _trained(places)
    with Store(places.db) as store:
        store.ingest(batch(steps(500, 501, acceptance_length=1.7), run_id=run_id, writer="rank1"))

    text = " ".join(_text(places, run_id).split())

    assert "acceptance_length: in training, where every draft follows the text's own tokens; decoded is below" in text


def test_a_run_in_the_bin_says_so_and_how_it_comes_out(places: Places) -> None:
    run_id = _trained(places)
    with Store(places.db) as store:
        store.remove(run_id)

    text = _text(places, run_id)

    assert re.search(r"^in the bin +since .*; no list shows it", text, re.M)
    assert f"draftyard restore {run_id}" in text
    assert "draftyard ls" not in text


def test_a_live_run_says_how_old_its_newest_word_is(places: Places) -> None:
    with Store(places.db) as store:
        started(store, "kliveaaa")
        store.ingest(batch(steps(1, 3), run_id="kliveaaa"))
        store.set_state("kliveaaa", State.RUNNING, evidence="its job has begun to report")

        text = _text(places, "kliveaaa")
        store.set_state("kliveaaa", State.RUNNING, evidence=NO_SUPERVISOR)

    assert re.search(r"^newest word +.*ago$", text, re.M)
    assert "because" not in text
    assert f"because      {NO_SUPERVISOR}\n" in _text(places, "kliveaaa")  # nothing else says so while it lives


def test_what_never_began_says_why_where_its_failure_is_asked_for(places: Places) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("kneveraa"))
        store.set_state("kneveraa", State.FAILED, evidence="never started: host local has no GPU 0")

    text = _text(places, "kneveraa", only_failure=True)

    assert "no failure is recorded for this run; it has failed: never started: host local has no GPU 0" in text


def test_a_trained_run_leads_to_the_one_it_can_be_compared_with(places: Places) -> None:
    with Store(places.db) as store:
        started(store, "kolderaa")
        store.ingest(batch(steps(1, 9, block_tokens_per_s=900.0, step_s=0.4), run_id="kolderaa"))
        store.set_state("kolderaa", State.SUCCEEDED, evidence="x")

    assert "draftyard compare kxxxaaaa kolderaa" in _text(places, _trained(places))


@pytest.mark.parametrize("word", ["replayed", "followed"])  # what older rows say
def test_a_way_that_was_replayed_and_not_decoded_is_called_that_within_80_columns(places: Places, word: str) -> None:
    run_id = _trained(places)
    speed = {"speed_up": 0.94, "speed_up_low": 0.91, "speed_up_high": 0.97}
    ways = [
        ({"method": "chain", "drafter": "trained"}, _decoded(1.71, **speed)),
        ({"method": "tree", "budget": 16, "drafter": "trained"}, _decoded(2.71, **speed)),
        (
            {"method": "chain", "drafter": "untrained", "rounds": f"{word} along the plain text"},
            {"acceptance_length": 1.0, "acceptance_length_low": 1.0, "acceptance_length_high": 1.0},
        ),
    ]
    with Store(places.db) as store:
        told = [
            event(413 + n, "evaluation", step=401, protocol=_protocol(**way), values=v)
            for n, (way, v) in enumerate(ways)
        ]
        store.ingest(batch(told, run_id=run_id))

    lines = _text(places, run_id).splitlines()

    table = lines[next(i for i, line in enumerate(lines) if line.startswith("way ")) :][:4]
    assert [line.partition("  ")[0] for line in table[1:]] == [
        "trained chain",
        "trained tree of 16",
        "untrained chain, replayed",
    ]
    assert max(map(len, table)) <= 80
    assert "replayed: rounds read off the plain text, which gives those of decoding" in " ".join(lines)


def test_the_page_sets_the_plan_against_what_was_measured(places: Places) -> None:
    text = _text(places, _trained(places))

    section = text.partition("Memory peaks")[2]
    forward = next(line for line in section.splitlines() if line.startswith("forward"))
    predicted = plan(_spec(), device="cpu").stage("forward").allocated_bytes
    assert f"{predicted / 2**30:.3f}" in forward
    assert f"{PEAKS['forward'] / 2**30:.3f}" in forward


def test_the_tables_of_the_page_fit_into_80_columns(places: Places) -> None:
    lines = _text(places, _trained(places)).splitlines()

    free_text = ("because", "measured on", "newest on", "folder", "hint", "what")
    assert [line for line in lines if len(line) > 80 and not line.startswith(free_text)] == []


def test_an_evaluation_whose_numbers_are_none_has_a_page(places: Places) -> None:
    run_id = _trained(places)
    odd = dict.fromkeys(("over_untrained", "acceptance_length", "mismatches", "near_ties", "texts_equal"), "many")
    with Store(places.db) as store:
        told = [event(413, "evaluation", step=400, protocol={"method": "odd"}, values=odd)]
        told.append(event(414, "evaluation", step=400, protocol={}, values={**odd, "acceptance_length": 1.5}))
        store.ingest(batch(told, run_id=run_id))

    assert "acceptance length" in _text(places, run_id)


def _failed_script(places: Places, *, num_checkpoints: int = 6) -> tuple[str, FailureRow]:
    """A script's run that raised, with more checkpoints than a page shows."""
    trace = 'Traceback (most recent call last):\n  File "/trees/ab12/train.py", line 27, in step\n    1 / 0\nZeroDivisionError: x\n'
    frame = {"file": "/trees/ab12/train.py", "line": 27, "function": "step", "source": "1 / 0"}
    with Store(places.db) as store:
        documents = {
            Document.SPEC: json.dumps({"entry": "script", "settings": {}}),
            Document.LAUNCH: json.dumps({"overrides": ["settings.lr=0.5"], "versions": {"torch": "2.6"}}),
        }
        store.create_run(new_run("kscriptt", recipe="tiny", branch="broken", documents=documents))
        store.new_attempt("kscriptt")
        saved = [
            event(n, "checkpoint", step=n, path=f"checkpoints/step-{n}", size_bytes=5, is_best=False)
            for n in range(1, num_checkpoints + 1)
        ]
        store.ingest(batch(saved, run_id="kscriptt"))
        store.set_state("kscriptt", State.FAILED, reason="host_oom", evidence="exit status 1")
        found = FailureRow(
            run_id="kscriptt", attempt=1, kind="exception", message="ZeroDivisionError: x", hint="", source="rank0",
            stage="training", step=3, traceback=trace, facts={"frame": frame, "requested_bytes": 2**27, "own_use_bytes": 2**31}, at_s=1.0, is_first_cause=True,
        )  # fmt: skip
    return "kscriptt", found


def test_a_failure_says_file_and_line_once_and_what_to_type_next(places: Places) -> None:
    run_id, failure = _failed_script(places)
    page = dataclasses.replace(history.show(places, run_id), failures=[failure])

    text = click.unstyle("\n".join(run_page(page, width=80, now_s=2000.0)))

    assert re.search(r"where +stage training, step 3, train.py:27, attempt 1", text)
    assert text.count("/trees/ab12/train.py") == 1
    assert re.search(r"\nrequested +0.12 GiB\nown use +2.00 GiB\n", text)
    assert "--oom" not in text  # nothing is predicted of a script
    assert "versions" not in text
    assert "Checkpoints, the newest 5 of 6" in text
    assert "  draftyard resume kscriptt    # the same values" in text
    assert "  draftyard launch tiny -b broken --host local --set settings.lr=0.5    # anew;" in text


@pytest.mark.parametrize(
    ("evidence", "gpus", "remark"),
    [
        ("never started: host local has no GPU 7; it has none", "", "anew, without --gpus"),
        ("never started: the disk is full", " --gpus 0,7", "anew"),
    ],
)
def test_a_launch_refused_for_a_gpu_that_is_not_there_is_offered_without_it(
    places: Places, evidence: str, gpus: str, remark: str
) -> None:
    named = json.dumps({"named_gpus": ["0", "7"]})
    with Store(places.db) as store:
        store.create_run(new_run("refused1", documents={**_documents(), Document.LAUNCH: named}))
        store.set_state("refused1", State.FAILED, evidence=evidence)

    offered = next_steps(history.show(places, "refused1"))[1:]

    assert offered == [
        f"  draftyard launch smollm2 -b v6 --host local{gpus}    # {remark}; --set KEY=VALUE changes a value"
    ]


def test_a_resume_is_offered_from_a_checkpoint_only_where_one_is_known(places: Places) -> None:
    run_id, _ = _failed_script(places)
    page = history.show(places, run_id)

    offered = [
        next(line for line in next_steps(each) if "draftyard resume" in line)
        for each in (page, dataclasses.replace(page, checkpoints=[]))
    ]

    assert offered == [
        f"  draftyard resume {run_id}    # the same values, from its newest checkpoint",
        f"  draftyard resume {run_id}    # the same values, from step 1: no checkpoint is known",
    ]


def test_a_launch_that_never_began_is_passed_over_and_leads_to_a_new_one(places: Places) -> None:
    began, _ = _failed_script(places)
    with Store(places.db) as store:
        store.create_run(new_run("kneveraa", recipe="tiny", branch="main"))
        store.set_state("kneveraa", State.FAILED, evidence="never started: no answer", attempt=0)

    text = _text(places, "kneveraa")

    assert [history.find(places, word).id for word in ("@last", "@failed")] == [began, began]
    assert [run.id for run in history.list_runs(places)] == ["kneveraa", began]
    assert "draftyard logs" not in text
    assert "  draftyard launch tiny -b main --host local    # anew;" in text


def test_a_run_over_several_hosts_leads_to_a_new_one_over_all_of_them(places: Places) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("kspreadd", recipe="tiny", branch="main", more_hosts=("two",)))
        store.set_state("kspreadd", State.FAILED, evidence="never started: no answer", attempt=0)

    assert "  draftyard launch tiny -b main --host local --host two    # anew;" in _text(places, "kspreadd")


def test_a_new_one_is_asked_for_everything_that_was_typed_for_the_first(places: Places) -> None:
    launch = {"overrides": ["settings.lr=0.07"], "named_gpus": ["5", "6"], "named_env": ["HF_TOKEN"], "env": ["A_FLAG"]}
    with Store(places.db) as store:
        store.create_run(new_run("knevagain", recipe="tiny", branch="main"))
        store.keep_document("knevagain", Document.LAUNCH, json.dumps(launch))
        store.set_state("knevagain", State.FAILED, evidence="never started: no answer", attempt=0)

    anew = "draftyard launch tiny -b main --host local --set settings.lr=0.07 --gpus 5,6 --env HF_TOKEN    # anew;"
    assert f"  {anew}" in _text(places, "knevagain")


def test_a_resume_is_offered_with_the_variables_that_it_takes_from_here(places: Places) -> None:
    with Store(places.db) as store:
        started(store, "knevagain", recipe="tiny", branch="main")
        store.keep_document("knevagain", Document.LAUNCH, json.dumps({"named_env": ["HF_TOKEN", "N"]}))
        store.set_state("knevagain", State.FAILED, evidence="exit status 3")

    due = "draftyard resume knevagain    # the same values, HF_TOKEN and N as set here, from step 1"
    assert f"  {due}" in _text(places, "knevagain")


def test_a_ladder_without_a_trainers_numbers_has_no_columns_for_them(places: Places) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("ksmokebb", kind="smoke"))
        store.new_attempt("ksmokebb")
        rungs = [event(1, "rung", name="quick", passed=True, values={"forward_s": 0.2}, message=""), event(40, "beat")]
        store.ingest(batch(rungs, run_id="ksmokebb", writer="rung-quick"))
        store.set_state("ksmokebb", State.SUCCEEDED, evidence="exit status 0")

    section = _text(places, "ksmokebb").partition("Smoke ladder")[2]

    assert section.splitlines()[1].split() == ["rung", "outcome", "time"]
    assert "with every start and load: 39 s" in section


def test_a_smoke_run_shows_its_ladder(places: Places) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("ksmokeaa", kind="smoke", documents=_documents()))
        store.new_attempt("ksmokeaa")
        values = {
            "loss": 10.8,
            "accuracy": 0.01,
            "streak": 0.0,
            "forward_s": 0.21,
            "forward_allocated_bytes": 300_000_000,
        }
        rungs = [
            event(1, "rung", name="fwd", passed=True, values=values, message=""),
            event(2, "rung", name="fwd_bwd", passed=False, values={}, message="MemoryError: 22.31 GiB asked for"),
        ]
        store.ingest(batch(rungs, run_id="ksmokeaa", writer="rung-fwd"))

    text = _text(places, "ksmokeaa")

    ladder = [line.split() for line in text.partition("Smoke ladder")[2].splitlines()]
    assert ["fwd", "passed", "0.2", "s", "0.28", "GiB", "10.8", "0.01", "0"] in ladder
    assert "fwd_bwd: MemoryError: 22.31 GiB asked for" in text


def test_a_failure_is_whole_with_hint_and_numbers(places: Places) -> None:
    run_id = _trained(places)
    traceback = (
        "Traceback (most recent call last):\n"
        + "".join(f'  File "x.py", line {n}\n' for n in range(400))
        + "MemoryError"
    )
    row = FailureRow(
        run_id, 1, "host_oom", "MemoryError", "Lower data.max_anchors.", "rank0", "backward", 7, traceback,
        {"asked_bytes": 2**34, "limit_bytes": 2**30}, None, True,
    )  # fmt: skip
    with Store(places.db) as store:
        store.replace_failures(
            run_id, 1, [row, dataclasses.replace(row, kind="exit", source="stderr", is_first_cause=False)]
        )

    text = _text(places, run_id)
    alone = _text(places, run_id, only_failure=True)

    assert "Failure: host_oom" in text
    assert "16.00 GiB" in text
    assert text.count('  File "x.py"') == 400
    assert "Metrics" not in alone
    assert "Failure: exit" in alone


@pytest.mark.parametrize(("entry", "offered"), [("dflash", True), ("script", False)])
def test_only_a_run_of_the_bundled_trainer_is_offered_for_evaluation(places: Places, entry: str, offered: bool) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("kscripta", documents={Document.SPEC: json.dumps({"entry": entry})}))
        store.new_attempt("kscripta")
        store.ingest(batch([event(1, "checkpoint", step=4, path="checkpoints/a", is_best=False)], run_id="kscripta"))
        store.set_state("kscripta", State.SUCCEEDED, evidence="exit status 0")

    text = _text(places, "kscripta")

    assert ("draftyard evaluate kscripta" in text) is offered
    assert ("draftyard export kscripta" in text) is offered


def test_the_page_counts_what_could_not_be_read_and_says_where_it_is(places: Places) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("koddaaaa", documents=_documents()))
        store.describe_run("koddaaaa", workdir="/data/draftyard")
        store.new_attempt("koddaaaa")
        told = [event(1, "dance", how="well"), event(2, "dance", how="badly"), event(3, "checkpoint", step="x")]
        store.ingest(batch(told, run_id="koddaaaa"))

    text = _text(places, "koddaaaa")

    assert "left out: 1 line that could not be read, 2 events of a kind unknown here" in text
    assert "see events.*.jsonl in local:/data/draftyard/runs/koddaaaa/attempts/" in text
    assert "the newest: rank0, " in text


def test_metrics_of_any_name_and_number_keep_to_the_width(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["Loss", "loss", "x" * 500, "eval/🙂", "eval/[a]", "is it?"]
    with Store(places.db) as store:
        store.create_run(new_run("knamesaa", documents=_documents()))
        store.new_attempt("knamesaa")
        store.ingest(batch(steps(1, 3, **dict.fromkeys(names, 1.0)), run_id="knamesaa"))

    rows = history.series(places, "knamesaa")[1]

    assert {row.name for row in rows} == set(names)
    assert max(len(click.unstyle(line)) for line in series_table(rows, {}, width=80)) <= 80
    assert [row.name for row in history.series(places, "knamesaa", fitting=["eval/[*"])[1]] == ["eval/[a]"]
    assert len([line for line in _text(places, "knamesaa").splitlines() if "xxxx" in line]) == 1
    assert history.has_pattern(places, "knamesaa", ["loss", "los?"])
    assert not history.has_pattern(places, "knamesaa", ["is it?"])
    with pytest.raises(UsageError, match="did you mean 'loss'"):
        history.series(places, "knamesaa", fitting=["los?x"])


def test_a_live_run_says_how_to_look_on_and_how_to_stop(places: Places) -> None:
    with Store(places.db) as store:
        store.create_run(new_run("kliveaaa", documents=_documents(), num_steps=400))
        store.new_attempt("kliveaaa")
        store.ingest(batch(steps(1, 100, loss=3.0, step_s=0.5), run_id="kliveaaa"))
        store.set_state("kliveaaa", State.RUNNING, evidence="the job has spoken")
        store.host_unreachable("local", error="no route")

    text = _text(places, "kliveaaa")

    assert "running, unreachable, step 100 of 400" in text
    assert "no route" in text
    assert "about 2 min 30 s" in text
    assert "draftyard stop kliveaaa" in text
    assert "gone for good: draftyard mark kliveaaa lost WHY" in " ".join(text.split())


def test_a_script_without_step_times_has_the_time_left_that_its_steps_took(places: Places) -> None:
    """The same on its page, in `wait`, in the list and on the screen."""
    with Store(places.db) as store:
        _live(store, "knevstep", steps(0, 10, loss=1.0))  # a second each
        left = [throughput.time_left_s(store.reader, store.reader.run("knevstep"))]
        left.append(_moment(store.reader, store.reader.run("knevstep")).time_left_s)
    with closing(Room(places.db, places)) as room:
        seen = room.read(Ask(run="knevstep", in_sight=(0, 10)), 1020.0)
    assert seen is not None
    assert seen.detail is not None

    left += [seen.numbers["knevstep"].eta_s, seen.detail.pace.eta_s, history.show(places, "knevstep").time_left_s]
    assert left == [pytest.approx(90.0)] * 5
    assert "time left about 1 min 30 s" in " ".join(_text(places, "knevstep").split())


def test_what_an_ended_attempt_was_at_ends_with_it(places: Places) -> None:
    with Store(places.db) as store:
        store.ingest(
            batch([event(99, "stage", name="training")], run_id=_live(store, "knevback", steps(0, 10, step_s=2.0)))
        )
        assert store.reader.run("knevback").stage == "training"
        assert throughput.time_left_s(store.reader, store.reader.run("knevback")) == pytest.approx(180.0)
        again(store, "knevback")
        store.set_state("knevback", State.RUNNING, evidence="supervisor and events are alive")
    text = _text(places, "knevback")

    assert "running, step 10 of 100\n" in text
    assert "time left" not in text


def test_a_run_just_resumed_is_given_time_for_its_follower_to_start(places: Places) -> None:
    """Its launch was long ago, its newest attempt was not."""
    now_s = [1000.0]
    with Store(places.db, clock=lambda: now_s[0]) as store:
        started(store, "knevback")
        now_s[0] = 2000.0
        again(store, "knevback")
        runs = [store.reader.run("knevback")]

    assert followed.unfollowed_s(places, runs, now_s=2003.0) is None
    assert followed.unfollowed_s(places, runs, now_s=2060.0) == pytest.approx(60.0)


def _live(store: Store, run_id: str, told: list[Event]) -> str:
    """One that runs and has told so much of its 100 steps."""
    started(store, run_id, num_steps=100)
    store.ingest(batch(told, run_id=run_id))
    store.set_state(run_id, State.RUNNING, evidence="supervisor and events are alive")
    return run_id


def test_a_run_that_stops_says_what_is_left_of_the_grace(places: Places) -> None:
    with Store(places.db, clock=lambda: 1000.0) as store:
        store.create_run(new_run("kstopaaa", documents=_documents()))
        store.new_attempt("kstopaaa")
        store.ask("kstopaaa", "stop", grace_s=30.0)
        store.set_state("kstopaaa", State.STOPPING, evidence="asked to stop")

    text = click.unstyle("\n".join(run_page(history.show(places, "kstopaaa"), width=80, now_s=1010.0)))

    assert "what still lives is killed in 20 s" in text


def test_peaks_of_several_ranks_name_rank_role_and_host_and_a_target_is_held_against_no_drafters_plan(
    places: Places,
) -> None:
    """4 ranks on two hosts, a drafter and a target on each: every host has a GPU 0."""
    spec = dataclasses.replace(_spec(), roles=RolesSpec(target=2, drafter=2))
    documents = _documents() | {Document.SPEC: dump(spec)}
    with Store(places.db) as store:
        store.create_run(new_run("kaaaaaaa", host="a", more_hosts=("b",), documents=documents))
        store.new_attempt("kaaaaaaa")
        for rank, size in enumerate((200_000_000, 900_000_000, 300_000_000, 800_000_000)):
            told = event(1, "memory", stage="forward", gpu=rank % 2, allocated_bytes=size)
            store.ingest(batch([told], run_id="kaaaaaaa", writer=f"rank{rank}"))

    found = history.show(places, "kaaaaaaa")

    lines = [click.unstyle(line).split() for line in run_page(found, width=120, now_s=2.0) if "rank" in line]
    assert [line[:8] for line in lines] == [
        ["forward", "rank", "2", "(drafter", "1),", "b", "GPU", "0"],
        ["forward", "rank", "1", "(target", "0),", "a", "GPU", "1"],
    ]
    assert len(lines[1]) == 9  # no plan beside it
    named = rank_places(found.run, found.spec, set())
    assert [(place.role, place.host) for place in named] == [
        ("drafter", "a"), ("target", "a"), ("drafter", "b"), ("target", "b"),
    ]  # fmt: skip


def test_a_smoke_run_of_a_recipe_with_roles_has_no_ranks(places: Places) -> None:
    spec = dataclasses.replace(_spec(), roles=RolesSpec(target=2, drafter=2))
    with Store(places.db) as store:
        store.create_run(new_run("kaaaaaaa", kind="smoke", documents={Document.SPEC: dump(spec)}))

    found = history.show(places, "kaaaaaaa")

    assert rank_places(found.run, found.spec, {0}) == []
