"""The filter language of `ls`, against a plain Python reading of the same runs."""

import fnmatch
import json
import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.store.filter import FilterError, compile_filter, point_in_time_s
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, RunRow, State
from orchestrator.store.writes import Store
from orchestrator.verbs.words_typed import Since
from tests.orchestrator.runs import batch, event, new_run

NOW_S = 1_800_000_000.0
DAY_S = 86_400.0

# id, recipe, branch, host, state, reason, loss, tags, days ago
RUNS = [
    ("20270101-aaaa", "qwen3-8b", "v6", "pve1", "failed", "gpu_oom", 2.5, ("old",), 20),
    ("20270105-bbbb", "qwen3-8b", "ddtree", "pve2", "succeeded", None, 1.9, ("best", "paper run"), 9),
    ("20270110-cccc", "smollm2", "demo", "local", "failed", "exit:3", float("nan"), (), 3),
    ("20270112-dddd", "smollm2", "ddtree[x]", "local", "stopped", "signal:15", 2.05, ("best",), 1),
    ("20270113-eeee", "smollm2", "demo", "gpu", "pending", None, None, (), 0),
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    now = NOW_S
    path = tmp_path_factory.mktemp("filter") / "runs.db"
    store = Store(path, clock=lambda: now)
    for run_id, recipe, branch, host, state, reason, loss, tags, days in RUNS:
        now = NOW_S - days * DAY_S - 60
        settings = {"lr": f"0.{days % 5 + 1}", "seed": "007", "on": "true", "size": "8GiB"}
        spec = {
            Document.SPEC: f'{{"optim": {{"lr": 1e-{days % 5 + 1}, "name": "adamw"}}, "evaluate": {{"at_end": true}},'
            f' "settings": {json.dumps(settings)}}}'
        }
        store.create_run(new_run(run_id, recipe=recipe, branch=branch, host=host, tags=tags, documents=spec))
        store.new_attempt(run_id)
        if loss is not None:
            store.ingest(batch([event(1, "metrics", step=7, values={"loss": loss, "a.b": 1.0})], run_id=run_id))
        if state != "pending":
            store.set_state(run_id, State(state), reason=reason, evidence="x")
    store.note("20270112-dddd", "look at Slot 3")
    store.close()
    return Reader(path)


def test_the_name_that_is_shown_finds_its_runs(reader: Reader) -> None:
    assert found(reader, "smollm2/demo") == "ce"
    assert found(reader, "M2/dD") == "d"


def found(reader: Reader, text: str) -> str:
    """The last letters of the ids that pass, oldest first."""
    condition = compile_filter(text, now_s=NOW_S)
    rows = reader.database.all(f"SELECT id FROM runs r WHERE {condition.sql} ORDER BY id", condition.parameters)
    return "".join(row["id"][-1] for row in rows)


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("", "abcde"),
        ("   ", "abcde"),
        ("status:failed", "ac"),
        ("status:failed,stopped", "acd"),
        ("state:succeeded", "b"),
        ("status:fail*", "ac"),
        ("branch:ddtree", "b"),
        ("branch:ddtree*", "bd"),
        ("branch:ddtree[x]", "d"),
        ("host:pve*", "ab"),
        ("host:pve?", "ab"),
        ("recipe:smollm2 status:failed", "c"),
        ("recipe:smollm2 AND status:failed", "c"),
        ("status:failed OR status:stopped", "acd"),
        ("status:failed OR tag:best recipe:smollm2", "acd"),
        ("(status:failed OR tag:best) recipe:smollm2", "cd"),
        ("NOT status:failed", "bde"),
        ("NOT NOT status:failed", "ac"),
        ("NOT (status:failed OR status:stopped)", "be"),
        ("tag:best", "bd"),
        ('tag:"paper run"', "b"),
        ("NOT tag:best", "ace"),
        ("reason:gpu_oom", "a"),
        ("reason:exit", "c"),
        ("reason:exit:3", "c"),
        ("NOT reason:gpu_oom", "bcde"),
        ("loss<2.1", "bd"),
        ("loss<=1.9", "b"),
        ("loss>2", "ad"),
        ("loss!=1.9", "ad"),
        ("loss=nan", "c"),
        ("loss!=nan", "abd"),
        ("loss<inf", "abd"),
        ('"a.b"=1', "abcd"),
        ("step>=7", "abcd"),
        ("attempt=1", "abcde"),
        ("since:7d", "cde"),
        ("since:36h", "de"),
        ("until:7d", "ab"),
        ("since:2027-01-01", "bcde"),
        ("until:2020-01-01T00:00:00+02:00", ""),
        ("optim.lr<1e-3", "bc"),  # lr is 1e-(days % 5 + 1)
        ("optim.name=adam*", "abcde"),
        ("optim.name!=sgd", "abcde"),
        ("evaluate.at_end=true", "abcde"),
        ("no.such=1", ""),
        ("no.such!=1", ""),
        ("settings.lr=0.5", "b"),  # lr is "0.(days % 5 + 1)"
        ("settings.lr=.50", "b"),
        ("settings.lr!=0.5", "acde"),
        ("settings.lr<0.2", "ae"),
        ("settings.lr>1000", ""),
        ("settings.lr=0.*", "abcde"),
        ("settings.seed=007", "abcde"),
        ("settings.seed!=008", "abcde"),
        ("settings.size>4", ""),
        ("settings.size=8GiB", "abcde"),
        ("settings.on=true", "abcde"),
        ("settings.on!=false", "abcde"),
        ("NOT settings.lr<0.2", "bcd"),
        ("kind:train", "abcde"),
        ("20270105", "b"),
        ("QWEN", "ab"),
        ("slot", "d"),
        ("paper", "b"),
        ('"Slot 3"', "d"),
        ("note:slot", "d"),
        ("status=failed", "ac"),
        ("status!=failed", "bde"),
    ],
)
def test_a_filter_finds_its_runs(reader: Reader, text: str, letters: str) -> None:
    assert found(reader, text) == letters


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("status:faild", r"column 1, 'status:faild': 'faild' is not one of pending, .*did you mean 'failed'"),
        ("recipe:x hots:y", r"column 10, 'hots:y': 'hots' is not a field; known are .*did you mean 'host'"),
        ("loss:2", r"a metric is compared: loss<2\.1"),
        ("loss<low", r"'low' is not a number"),
        ("loss<", r"a value is due after '<'"),
        ("tag:", r"a value is due after ':'"),
        ("status:failed OR", r"column 15, 'OR': a term is due after it"),
        ("NOT", r"a term is due after it"),
        ("AND tag:x", r"a term is due here"),
        ("(status:failed", r"this bracket is never closed"),
        ("(", r"a term is due"),
        ("status:failed)", r"column 14, '\)': a closing bracket without its opening one"),
        ("()", r"a term is due here"),
        ('note:"two words', r"quotation mark at column 6 is never closed"),
        ("since:yesterday", r"'yesterday' is not a time; write an age"),
        ("loss<nan", r"nan is neither larger nor smaller"),
        ("optim.name<adamw", r"'adamw' is not a number"),
        ("a..b=1", r"is not a path into the spec"),
        (" ".join(["x"] * 201), r"column 401, 'x': is beyond the 200 words and alternatives"),
        (f"a host:{','.join('a' * 2000)}", r"column 3, 'host:a,.*: has 4,004 characters"),
        (" ".join(["host:a,b,c,d,e,f"] * 40), r"is beyond the 200 words"),
        ("NOT " * 190 + "x", r"column 33, 'NOT': is nested in more than 8"),
        ("NOT (" * 11 + "x" + ")" * 11, r"is nested in more than 8"),
        ("x" * 60_000, r"^filter 'x{120}\.\.\.', column 1, 'x{120}\.\.\.': has 60,000 characters"),
    ],
)
def test_a_filter_that_cannot_be_read_says_where_and_what_is_due(text: str, message: str) -> None:
    with pytest.raises(FilterError, match=message) as caught:
        compile_filter(text, now_s=NOW_S)
    assert caught.value.exit_code == 2


# --------------------------------------------------------------------------------- properties

words = st.sampled_from(["failed", "stopped", "succeeded", "pending", "fail*", "*"])
terms = st.one_of(
    words.map(lambda word: ("status", word)),
    st.sampled_from(["v6", "ddtree", "demo", "d*", "?6"]).map(lambda word: ("branch", word)),
    st.sampled_from(["best", "old", "b*", "none"]).map(lambda word: ("tag", word)),
    st.sampled_from(["pve1", "pve*", "local"]).map(lambda word: ("host", word)),
)
trees = st.recursive(
    terms,
    lambda inner: st.one_of(
        st.tuples(st.just("NOT"), inner),
        st.tuples(st.just("AND"), inner, inner),
        st.tuples(st.just("OR"), inner, inner),
    ),
    max_leaves=8,
)


def write(tree: tuple) -> str:  # type: ignore[type-arg]
    match tree:
        case ("NOT", inner):
            return f"NOT ({write(inner)})"
        case ("AND", left, right):
            return f"({write(left)}) ({write(right)})"
        case ("OR", left, right):
            return f"({write(left)} OR ({write(right)}))"
        case (name, word):
            return f"{name}:{word}"
    raise AssertionError(tree)


def holds(tree: tuple, run: RunRow) -> bool:  # type: ignore[type-arg]
    match tree:
        case ("NOT", inner):
            return not holds(inner, run)
        case ("AND", left, right):
            return holds(left, run) and holds(right, run)
        case ("OR", left, right):
            return holds(left, run) or holds(right, run)
        case ("tag", word):
            return any(fnmatch.fnmatchcase(tag, word) for tag in run.tags)
        case (name, word):
            return fnmatch.fnmatchcase({"status": run.state, "branch": run.branch, "host": run.host}[name], word)
    raise AssertionError(tree)


@given(trees)
def test_any_nesting_means_what_it_says(reader: Reader, tree: tuple) -> None:  # type: ignore[type-arg]
    expected = {run.id for run in reader.runs() if holds(tree, run)}

    assert {run.id for run in reader.runs(write(tree))} == expected


@given(st.text(alphabet="abcloss:<>=!()\"* .,0129d-NOTANDR'%;", max_size=40))
def test_any_text_is_a_filter_or_a_plain_error(reader: Reader, text: str) -> None:
    try:
        runs = reader.runs(text)
    except FilterError:
        assume(True)
    else:
        assert len(runs) <= len(RUNS)


def test_values_travel_as_parameters_never_as_sql(reader: Reader) -> None:
    hostile = "x'); DROP TABLE runs; --"

    assert reader.runs(f'recipe:"{hostile}" OR note:"{hostile}" OR "{hostile}"') == []
    assert compile_filter(f'tag:"{hostile}"', now_s=0).parameters == (hostile,)
    assert len(reader.runs()) == 5


# ----------------------------------------------------------------------------- order and pages


def ids(runs: list[RunRow]) -> str:
    return "".join(run.id[-1] for run in runs)


def test_runs_are_sorted_paged_and_counted(reader: Reader) -> None:
    assert ids(reader.runs()) == "edcba"
    assert ids(reader.runs(sort="-created")) == "abcde"
    assert ids(reader.runs(sort="-loss"))[:3] == "bda"  # smallest first; without a value last
    assert ids(reader.runs(sort="loss"))[:3] == "adb"
    assert ids(reader.runs(limit=2, offset=1)) == "dc"
    assert reader.count_runs("status:failed") == 2
    assert reader.count_runs(kind="smoke") == 0
    assert reader.count_runs("kind:train", kind="smoke") == 5


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_an_hour_that_clocks_show_twice_is_one_moment_everywhere(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """02:30 comes twice in Berlin on that night; without an offset it is UTC, with one it is what it says."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for read in (lambda text: point_in_time_s(text, now_s=NOW_S), lambda text: Since().convert(text, None, None)):
            assert read("2026-10-25T02:30") == 1792895400.0
            assert read("2026-10-25T02:30+02:00") == read("2026-10-25T02:30") - 2 * 3600
            assert read("2026-10-25T02:30+01:00") == read("2026-10-25T02:30+02:00") + 3600
            assert read("2026-10-26") - read("2026-10-25") == DAY_S
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_path_of_runs_db_with_odd_characters_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "a b?c#d%20é"
    Store(folder / "runs.db").close()

    assert Reader(folder / "runs.db").runs() == []


def test_the_largest_filters_that_are_read_are_answered(tmp_path: Path) -> None:
    Store(tmp_path / "runs.db").close()
    with Reader(tmp_path / "runs.db") as reader:
        for text in (
            "NOT " * 8 + "x",
            "(y OR z a " * 8 + "loss<1" + ")" * 8,
            "NOT (" * 4 + "tag:x" + ")" * 4,
            "y" * 1000,
        ):
            assert reader.runs(text) == []
        assert reader.runs(f"host:{','.join('a' * 199)}") == []
