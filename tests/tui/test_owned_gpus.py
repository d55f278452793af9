"""A run owns the GPUs that its launch was promised, though its supervisor samples every card of the machine."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.actions.places import find_places
from orchestrator.store.rows import Document, State
from tests.tui.golden import opened, press, shown
from tests.tui.world import GIB, NOW_S, Writer, Yard, gpu_events
from tui.app import Draftyard
from tui.deeds import asking, deed_named, gpus_of
from tui.detail import RunDetail
from tui.hosts_lines import hosts_lines
from tui.memory import memory_tab_lines
from tui.overview import overview_lines
from tui.pieces import text_of
from tui.plain import screen_text
from tui.runs_rows import memory_fraction
from tui.snapshot import Ask, Room, Snapshot

FIRST, SECOND = "f5xn8ruq", "g6mf6hky"
HELD = {0: 1.0, 1: 1.0, 2: 92.0, 3: 1.0, 4: 1.0, 5: 40.0, 6: 41.0, 7: 1.0}  # GiB; 2 is a stranger's


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        for run_id, gpu in ((FIRST, "GPU-00000005"), (SECOND, "6")):  # by UUID, and by index as named
            launch = {Document.LAUNCH: json.dumps({"gpus": [gpu]})}
            yard.run(run_id, "mine/fast", host="gpubox", documents=launch)
            Writer(yard.store, run_id, name="supervisor").tell(gpu_events(HELD, ago_s=60, every_s=30))
            yard.state(run_id, State.RUNNING)
        foreign = [{"pid": 1, "user": "eva", "used_bytes": int(92 * GIB), "command": "python"}]
        gpus = [
            {"index": gpu, "uuid": f"GPU-{gpu:08x}", "total_bytes": 95 * GIB, "used_bytes": int(0.1 * GIB), "processes": foreign * (gpu == 2)}
            for gpu in HELD
        ]  # fmt: skip
        yard.store.host_seen("gpubox", address="ssh gpubox", clock_offset_s=0.0, facts={"gpus": gpus})
    room = Room(tmp_path / "runs.db")
    found = room.read(Ask(wants_hosts=True, run=FIRST), NOW_S)
    room.close()
    assert found is not None
    return found


@pytest.fixture
def detail(snapshot: Snapshot) -> RunDetail:
    assert snapshot.detail is not None
    return snapshot.detail


def test_the_hosts_screen_gives_each_card_to_the_run_it_is_promised_to(snapshot: Snapshot) -> None:
    lines = text_of(hosts_lines(snapshot, 120, ascii_only=False)).splitlines()

    owners = {line.split()[1]: line for line in lines if line.startswith("GPU ")}
    assert [gpu for gpu, line in owners.items() if "mine/fast" in line] == ["5", "6"]
    assert FIRST in owners["5"]
    assert [line.split("GPU ")[1] for line in lines if line.startswith("R") and FIRST in line] == ["5"]


def test_a_stranger_on_a_card_is_named_with_its_newest_memory(snapshot: Snapshot) -> None:
    text = text_of(hosts_lines(snapshot, 120, ascii_only=False))

    assert "92.0 GiB  pid 1, user eva" in text
    assert any(line.startswith("GPU 2") and " of 95.0" in line and "others" in line for line in text.splitlines())


def test_the_list_measures_memory_on_the_own_cards_alone(snapshot: Snapshot) -> None:
    fraction = memory_fraction(snapshot.numbers[FIRST])

    assert fraction == pytest.approx(40 / 95, abs=0.02)


@pytest.mark.parametrize("draw", [overview_lines, "memory"])
def test_a_run_shows_its_own_cards_alone(detail: RunDetail, draw: object) -> None:
    lines = (
        memory_tab_lines(detail, NOW_S, 100, 30, ascii_only=False)
        if draw == "memory"
        else overview_lines(detail, NOW_S, 100, 30, ascii_only=False)
    )

    text = text_of(lines)
    assert "GPU 5" in text
    assert not [gpu for gpu in HELD if gpu != 5 and f"GPU {gpu}" in text]


def test_the_question_before_a_stop_names_the_own_cards(detail: RunDetail) -> None:
    told = " ".join(asking(deed_named("stop"), detail.run, gpus_of(detail), {}))

    assert "on gpubox, GPU 5 " in told


def test_the_question_before_a_run_goes_to_the_bin_names_run_host_and_cards(detail: RunDetail) -> None:
    told = asking(deed_named("rm"), detail.run, gpus_of(detail), None)

    assert told[:2] == [f"rm mine/fast  {FIRST}", "on gpubox, GPU 5"]
    assert "restore" in told[2]


TWO_HOSTS = "t4wo5hst"
ON_FIRST, ON_SECOND = (
    {0: 1.0, 1: 30.0, 2: 1.0, 3: 7.0},
    {0: 1.0, 1: 2.0, 2: 1.0, 3: 88.0},
)  # GiB; own: 1 of gpu1, 3 of gpu2


@pytest.fixture
def over_two(tmp_path: Path) -> Snapshot:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        launch = {Document.LAUNCH: json.dumps({"gpus": ["1"], "more_gpus": {"gpu2": ["3"]}})}
        run = yard.run(TWO_HOSTS, "mine/wide", host="gpu1", more_hosts=("gpu2",), documents=launch)
        for name, held in (("supervisor", ON_FIRST), ("supervisor1", ON_SECOND)):
            Writer(yard.store, run, name=name).tell(gpu_events(held, ago_s=60, every_s=30))
        yard.state(run, State.RUNNING)
        for host in ("gpu1", "gpu2"):
            gpus = [
                {"index": gpu, "uuid": f"{host}-{gpu}", "total_bytes": 95 * GIB, "used_bytes": 0} for gpu in ON_FIRST
            ]
            yard.store.host_seen(host, address=f"ssh {host}", clock_offset_s=0.0, facts={"gpus": gpus})
    room = Room(tmp_path / "runs.db")
    found = room.read(Ask(wants_hosts=True, run=TWO_HOSTS), NOW_S)
    room.close()
    assert found is not None
    return found


def test_over_two_hosts_each_card_is_sampled_on_its_own_host(over_two: Snapshot) -> None:
    lines = text_of(hosts_lines(over_two, 120, ascii_only=False)).splitlines()

    second = next(place for place, line in enumerate(lines) if line.startswith("gpu2"))
    for part, own in ((lines[:second], ("1", "30.")), (lines[second:], ("3", "88."))):
        cards = {line.split()[1]: line for line in part if line.startswith("GPU ")}
        assert len(cards) == len(ON_FIRST)
        assert [gpu for gpu, line in cards.items() if "mine/wide" in line] == [own[0]]
        assert any(word.startswith(own[1][:2]) for word in cards[own[0]].split()), cards[own[0]]
        assert [line.split("GPU ")[1] for line in part if line.startswith("R")] == [own[0]]


def test_over_two_hosts_its_own_cards_are_named_with_their_host(over_two: Snapshot) -> None:
    detail = over_two.detail
    assert detail is not None
    pages = [
        memory_tab_lines(detail, NOW_S, 100, 30, ascii_only=False),
        overview_lines(detail, NOW_S, 100, 30, ascii_only=False),
    ]

    assert memory_fraction(over_two.numbers[TWO_HOSTS]) == pytest.approx(88 / 95, abs=0.02)  # of the fullest of both
    for text in map(text_of, pages):
        assert "gpu1 GPU 1 " in text
        assert "gpu2 GPU 3 " in text
        assert not {"GPU 0", "GPU 103", "gpu1 GPU 3", "gpu2 GPU 1"} & set(re.findall(r"(?:\w+ )?GPU \d+", text))
    assert asking(deed_named("stop"), detail.run, gpus_of(detail), {})[1] == "on gpu1 GPU 1 and gpu2 GPU 3"


@pytest.mark.slow
async def test_a_run_of_a_host_is_chosen_opened_and_acted_on(
    snapshot: Snapshot, tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    """j and k move over what can be acted on: the host, then each run there, however many cards stand between."""
    app = open_app(tmp_path / "runs.db", places=find_places(tmp_path, {"HOME": str(tmp_path)}, db=tmp_path / "runs.db"))
    order = [run.id for run in snapshot.live]
    async with opened(app, "2", size=(80, 14)) as pilot:
        assert app.chosen() is None
        assert "▸ gpubox" in screen_text(app)
        await press(app, pilot, "enter")
        assert app.screen.NAME == "hosts"  # type: ignore[attr-defined]
        for run_id in order:
            await press(app, pilot, "j")
            chosen = app.chosen()
            assert chosen is not None
            assert chosen[0].id == run_id
            assert re.search(rf"^ ▸ R  mine/fast  {run_id}", screen_text(app), re.MULTILINE)  # scrolled into sight
        assert chosen is not None
        assert chosen[1] == ({FIRST: 5, SECOND: 6}[order[-1]],)
        await press(app, pilot, "x")
        question = await shown(app, pilot, "stop mine/fast")
        await press(app, pilot, "n", "k", "enter")
        page = await shown(app, pilot, order[0], "1:overview")
        await press(app, pilot, "escape", "k")
        assert app.chosen() is None

    assert f"on gpubox, GPU {chosen[1][0]}" in question
    assert order[1] not in page
