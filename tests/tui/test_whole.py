"""Said whole and said once: the numbers of a run over all its attempts, causes of any length, one of anything."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.actions import history
from orchestrator.actions.places import Places, find_places
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, FailureRow, State
from tests.tui.golden import SCREENS, opened, press, shown
from tests.tui.world import NOW_S, SPEC, Writer, Yard, gpu_events, steps
from tests.tui.yard import LIVE, OOM, RESUMED
from tui.app import Draftyard
from tui.chart import Look
from tui.compare import compare_lines
from tui.detail import RunDetail, read_detail
from tui.overview import overview_lines
from tui.pieces import text_of
from tui.plain import screen_text
from tui.snapshot import Ask, CurvesAsk, Room
from tui.wording import rate, value

ONE = "k2nq7wde"
KEYS_ARE_NO_COUNTS = re.compile(r"\b1 (runs|hosts)  2 ")  # the key 1 of the list, before its name
ONE_OF_MANY = re.compile(
    r"(?<![.,\d])\b1 (?!ms\b|is\b|was\b|has\b|this\b|less\b|pass\b|loss\b|process\b|class\b|across\b)\w+s\b"
)


def detail_of(path: Path, run_id: str) -> RunDetail:
    with contextlib.closing(Reader(path)) as reader:
        return read_detail(reader, reader.run(run_id), CurvesAsk(names=("loss",)))


@pytest.mark.slow
def test_a_runs_numbers_are_those_of_show_over_all_its_attempts(yard_places: Places) -> None:
    with contextlib.closing(Reader(yard_places.db)) as reader:
        ids = [run.id for run in reader.runs(kind=None)]

    for run_id in ids:
        assert list(detail_of(yard_places.db, run_id).series) == history.show(yard_places, run_id).series

    loss = next(row for row in detail_of(yard_places.db, RESUMED).series if row.name == "loss")
    assert loss.first_step == 0  # not where the second attempt went on


def test_a_metric_has_one_number_on_every_screen(yard_places: Places) -> None:
    """The one that `ls`, its filters and the first column of `show` have: the mean of the newest reports. What the overview puts
    in the place of its block tokens a second is told below.
    """
    names = ("loss", "block_tokens_per_s")
    room = Room(yard_places.db)
    snapshot = room.read(Ask(run=LIVE, curves=CurvesAsk(names=names)), NOW_S)
    room.close()
    assert snapshot is not None
    detail, numbers = snapshot.detail, snapshot.numbers[LIVE].latest
    assert detail is not None
    shown = {row.name: row for row in history.show(yard_places, LIVE).series}
    text = text_of(overview_lines(detail, NOW_S, 138, 40, ascii_only=False))

    for name in names:
        curve, mean = detail.curve(name), shown[name].recent_mean
        assert mean != shown[name].last_value
        assert curve is not None
        assert numbers[name] == curve.newest == mean
        assert curve.unit.endswith("mean")
    assert f"loss  {value(shown['loss'].recent_mean)} nats, mean" in text
    assert re.search(rf"block +{rate(shown['block_tokens_per_s'].recent_mean)} tokens/s", text)


def test_the_overview_has_the_speed_of_show_and_not_a_second_one(yard_places: Places) -> None:
    """All tokens over all seconds, as the sentence beside the baseline has it; the mean of the rates is another number."""
    page = history.show(yard_places, LIVE)
    assert page.throughput is not None
    mean = next(row.recent_mean for row in page.series if row.name == "block_tokens_per_s")
    assert rate(mean) != rate(page.throughput.here.block_tokens_per_s)
    room = Room(yard_places.db)
    for baseline in (None, OOM, RESUMED):
        curves = CurvesAsk(names=("loss", "block_tokens_per_s"))
        snapshot = room.read(Ask(run=LIVE, curves=curves, wants_against=True, baseline=baseline), NOW_S)
        assert snapshot is not None
        assert snapshot.detail is not None
        text = text_of(overview_lines(snapshot.detail, NOW_S, 138, 40, ascii_only=False))

        assert re.search(rf"block +{rate(page.throughput.here.block_tokens_per_s)} tokens/s", text)
        assert f"block_tokens_per_s  {value(page.throughput.here.block_tokens_per_s)} tokens/s" in text
    room.close()


def test_what_is_set_or_only_grows_is_no_mean(filled_yard: Path) -> None:
    with contextlib.closing(Reader(filled_yard)) as reader:
        detail = read_detail(reader, reader.run(LIVE), CurvesAsk(names=("lr",)))
        rates = [told.value for told in reader.metric_values(LIVE, "lr", last=100)]
    curve, row = detail.curve("lr"), next(row for row in detail.series if row.name == "lr")

    assert curve is not None
    assert curve.newest == row.last_value == row.recent_mean != pytest.approx(sum(rates) / len(rates))
    assert "mean" not in curve.unit


def test_compare_draws_every_metric_that_two_runs_report(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "runs.db")
    own = [f"own_{number:02}" for number in range(30)]
    with yard.store:
        for run_id, names in (("k2nq7wde", ["reward", *own]), ("m2nq7wde", ["reward", *own, "alone"])):
            values = dict.fromkeys(["loss", *names], 0.25)
            Writer(yard.store, yard.run(run_id, f"a/{run_id}")).tell(
                [("metrics", NOW_S, {"step": step, "values": values}) for step in range(9)]
            )
    ask = Ask(wants_list=False, compared=("k2nq7wde", "m2nq7wde"), curves=CurvesAsk(buckets=60))
    room = Room(yard.path)
    snapshot = room.read(ask, NOW_S)
    room.close()
    assert snapshot is not None
    text = text_of(compare_lines(snapshot.compared, 150, Look()))
    charts = {name for name in ("loss", "reward", "alone", *own) if re.search(rf"(^|   ){name}  ●", text, re.MULTILINE)}

    assert len(charts) == 24
    assert "loss" in charts
    assert "alone" not in charts
    assert "8 metrics more" in text


def test_a_comparison_tells_the_one_number_of_each_metric_as_a_list_does(filled_yard: Path) -> None:
    """It told the last value, which is noise; the newest mean is what the list, the overview and the curves say."""
    details = [detail_of(filled_yard, run_id) for run_id in (LIVE, RESUMED)]

    text = text_of(compare_lines(details, 150, Look()))
    table = text[text.index("Measured ") :]

    assert "mean of the last 100, best in brackets" in table.splitlines()[0]
    for name in ("loss", "grad_norm", "lr"):
        row = next(line for line in table.splitlines() if line.startswith(name))
        told = [value(detail.means[name]) for detail in details]
        assert [word for word in row.split()[1:] if word[0] != "(" and word != "nats"] == told, row


@pytest.mark.slow
async def test_the_curves_say_that_their_numbers_are_means(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app, "j", "enter", "2", size=(140, 40)) as pilot:
        text = await shown(app, pilot, "grad_norm")

    assert re.search(r"loss  1\.609 nats, mean ", text), text
    assert re.search(r"accuracy  [\d.]+ mean ", text)
    assert "lr  2.61e-04" in text


@pytest.mark.slow
async def test_marks_beyond_those_that_are_compared_are_said(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app, *["space"] * 8, "c", size=(140, 40)) as pilot:
        await shown(app, pilot, "8 are marked: the first 6 of the list are compared", "compare 6 runs")


def test_compare_has_the_best_of_all_attempts(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        run = yard.run(ONE, "a/b")
        Writer(yard.store, run).tell(
            [("metrics", NOW_S, {"step": step, "values": {"loss": 0.25}}) for step in range(9)]
        )
        yard.store.set_state(run, State.LOST, reason="reboot", evidence="")
        yard.store.new_attempt(run)
        Writer(yard.store, run, attempt=2).tell(
            [("metrics", NOW_S, {"step": step, "values": {"loss": 0.75}}) for step in range(9, 12)]
        )

    text = text_of(compare_lines([detail_of(yard.path, ONE)], 100, Look()))

    assert re.search(r"^loss +0.375 \(0.25\)", text, re.MULTILINE), text


LONG = "torch.OutOfMemoryError: " + " ".join(f"word{number}" for number in range(60)) + " the.end"


@pytest.mark.slow
@pytest.mark.parametrize("size", [(60, 24), (80, 24)])
async def test_a_long_cause_is_read_whole_one_key_from_the_list(
    size: tuple[int, int], yard_copy: Path, open_app: Callable[..., Draftyard]
) -> None:
    yard = Yard(yard_copy)
    with yard.store:
        failure = FailureRow(
            run_id=OOM, attempt=1, kind="gpu_oom", message=LONG, hint="", source="rank0", stage="backward", step=181,
            traceback="", facts={}, at_s=NOW_S, is_first_cause=True,
        )  # fmt: skip
        yard.store.replace_failures(OOM, 1, [failure])
    app = open_app(yard_copy)
    async with opened(app, "s", size=size) as pilot:
        while app.screen.query_one("#list").cursor_key != OOM:  # type: ignore[attr-defined]
            await press(app, pilot, "j")
        await press(app, pilot, "enter")
        text = screen_text(app)

    assert LONG in " ".join(text.split())


@pytest.mark.slow
async def test_a_long_fault_of_the_database_is_read_whole_at_eighty_columns(
    yard_copy: Path, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(yard_copy)
    async with opened(app, size=(80, 24)) as pilot:
        yard_copy.rename(yard_copy.with_name("elsewhere.db"))
        yard_copy.write_bytes(b"no database" * 100)
        await press(app, pilot, "r")
        text = screen_text(app)
        yard_copy.unlink()
        yard_copy.with_name("elsewhere.db").rename(yard_copy)
        await press(app, pilot, "r")
        after = screen_text(app)

    assert "DRAFTYARD_DB names another file" in " ".join(text.split())
    assert "qwen27b/ddtree" in text
    assert "DRAFTYARD_DB" not in after


def fill_with_one_of_each(path: Path) -> None:
    yard = Yard(path)
    with yard.store:
        spec = {**SPEC, "entry": "script", "recipe": "own", "branch": "one"}
        run = yard.run(
            ONE, "own/one", num_steps=1, fingerprint="9c1f",
            documents={Document.SPEC: json.dumps(spec), Document.LAUNCH: json.dumps({"gpus": ["0"]})},
        )  # fmt: skip
        rank0 = Writer(yard.store, run)
        rank0.tell(steps(0, 1, 1, begin_s=NOW_S - 60, step_s=1.0, seed=1))
        rank0.tell(
            [
                ("metrics", NOW_S - 50, {"step": 1, "values": {"loss": "nan", "queue_depth": 1, "queue_capacity": 1}}),
                ("rung", NOW_S - 45, {"name": "fwd", "passed": True, "values": {}, "message": ""}),
                ("checkpoint", NOW_S - 40, {"step": 1, "path": "checkpoints/step-1", "size_bytes": 1, "is_best": True}),
                ("evaluation", NOW_S - 30, {"step": 1, "protocol": {"num_prompts": 1, "method": "chain", "max_tokens": 1},
                                            "values": {"acceptance_length": 1, "mismatches": 1}}),
                ("stage", NOW_S - 20, {"name": "converting"}),
                ("progress", NOW_S - 10, {"what": "converting", "done": 1, "total": 1, "unit": "tensors"}),
                ("memory", NOW_S - 9, {"stage": "step", "gpu": 0, "allocated_bytes": 2**30}),
            ]
        )  # fmt: skip
        Writer(yard.store, run, name="supervisor").tell(gpu_events({0: 1.0}, ago_s=60, every_s=30))
        yard.log(run, "1\n")
        yard.state(run, State.RUNNING, evidence="beat 1 s ago")


# From one screen to the next.
WALK = ("", "s", "o a", "a enter", "2", "3", "4", "5", "6", "7", "escape 2", "3", "1 space c", "x", "n colon")


@pytest.mark.slow
async def test_one_of_anything_is_not_told_as_many(tmp_path: Path, open_app: Callable[..., Draftyard]) -> None:
    fill_with_one_of_each(tmp_path / "runs.db")
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db")
    app = open_app(tmp_path / "runs.db", places=places)
    async with opened(app, size=(140, 50)) as pilot:
        for keys in WALK:
            await press(app, pilot, *keys.split())
            text = KEYS_ARE_NO_COUNTS.sub("", screen_text(app))

            assert ONE_OF_MANY.findall(text) == [], text
            assert "nats" not in text  # nobody has said what this script's loss is in


def test_no_golden_screen_tells_one_as_many() -> None:
    told = {
        path.name: ONE_OF_MANY.search(KEYS_ARE_NO_COUNTS.sub("", path.read_text())) for path in SCREENS.glob("*.txt")
    }

    assert {name: found.group() for name, found in told.items() if found} == {}
