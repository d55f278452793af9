"""A training over several GPUs: each rank's waiting, queue and memory, through the events that ranks write."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.actions.places import find_places
from orchestrator.actions.throughput import roles_told
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, FailureRow, State
from tests.tui.golden import opened, press, shown
from tests.tui.world import GIB, NOW_S, SPEC, Writer, Yard, steps
from tui.app import Draftyard
from tui.detail import RunDetail, read_detail
from tui.failure import failure_lines
from tui.memory import peak_lines
from tui.overview import overview_lines
from tui.pieces import text_of, width_of
from tui.plain import screen_text
from tui.ranks import rank_lines, rank_peak_lines
from tui.snapshot import CurvesAsk

RUN = "r4nk2wde"
ROLES = {"target": 2, "drafter": 2, "queue": 20}
BEGAN_S = NOW_S - 3600.0
# rank -> (seconds a step or batch, of it waiting, batches in its queue, GiB at most in the backward or forward pass)
TOLD = {0: (2.0, 0.02, 20.0, 84.0), 1: (2.1, 0.01, 19.0, 91.5), 2: (1.0, 0.6, None, 61.0), 3: (1.1, 0.7, None, 61.2)}


def fill(path: Path) -> None:
    yard = Yard(path)
    with yard.store:
        spec = {**SPEC, "entry": "dflash", "roles": ROLES, "train": {**SPEC["train"], "accumulation": 2}}  # type: ignore[dict-item]
        run = yard.run(RUN, "qwen27b/roles", num_steps=1000, documents={Document.SPEC: json.dumps(spec)})
        for rank, (step_s, wait_s, depth, size) in TOLD.items():
            queue = (
                {} if depth is None else {"queue_depth": depth, "queue_capacity": 20.0, "transfer_bytes_per_s": 3e11}
            )
            values = {"step_s": step_s, "wait_s": wait_s, **queue}
            own = [("metrics", BEGAN_S + step, {"step": step, "values": values}) for step in range(1, 51)]
            stages = ("load", "backward") if depth is not None else ("load", "forward")
            peaks = [
                ("memory", BEGAN_S + 60 + number, {"stage": stage, "gpu": rank, "allocated_bytes": int((size - 4) * share * GIB),
                 "reserved_bytes": int((size - 2) * share * GIB), "driver_bytes": int(size * share * GIB)})
                for number, (stage, share) in enumerate(zip(stages, (0.5, 1.0), strict=True))
            ]  # fmt: skip
            Writer(yard.store, run, name=f"rank{rank}").tell([*own, *peaks])
        yard.state(run, State.RUNNING, evidence="beat 2 s ago")


@pytest.fixture
def roles_db(tmp_path: Path) -> Path:
    fill(tmp_path / "runs.db")
    return tmp_path / "runs.db"


def detail_of(path: Path, run_id: str = RUN) -> RunDetail:
    with contextlib.closing(Reader(path)) as reader:
        return read_detail(reader, reader.run(run_id), CurvesAsk(names=("loss",)))


def test_every_rank_says_how_long_it_waits_how_full_its_queue_is_and_what_it_held(roles_db: Path) -> None:
    detail = detail_of(roles_db)

    rows = text_of(rank_lines(detail.ranks, detail.roles_told, 100, ascii_only=False)).splitlines()[-4:]

    for row, told in zip(
        rows,
        ("0 drafter 2.00 s 1% 20/20 84.0 GiB backward, GPU 0", "1 drafter 2.10 s 0% 19/20 91.5 GiB backward, GPU 1",
         "2 target 1.00 s 60% 61.0 GiB forward, GPU 2", "3 target 1.10 s 64% 61.2 GiB forward, GPU 3"),
        strict=True,
    ):  # fmt: skip
        assert " ".join(row.replace("━", "").replace("╸", "").split()) == told


@pytest.mark.slow
def test_the_side_that_is_waited_for_is_told_in_the_sentence_of_show(roles_db: Path) -> None:
    with contextlib.closing(Reader(roles_db)) as reader:
        sentence = roles_told(reader, reader.run(RUN))
    assert sentence is not None
    assert sentence.startswith("drafter-bound: queue 20/20, hidden states travel at 300 GB/s; ")

    text = " ".join(text_of(overview_lines(detail_of(roles_db), NOW_S, 80, 40, ascii_only=False)).split())

    assert sentence in text


def test_the_memory_tab_tells_every_ranks_largest_peak_and_the_stages_of_the_fullest(roles_db: Path) -> None:
    lines = text_of(peak_lines(detail_of(roles_db), 78)).splitlines()

    every = [" ".join(line.split()) for line in lines if line[:1].isdigit()]
    assert every[1] == "1 drafter 87.5 89.5 91.5 backward, GPU 1"
    assert len(every) == len(TOLD)
    stages = [line for line in lines if "GPU 1" in line and not line[:1].isdigit()]
    assert len(stages) == 2  # load and backward of rank 1, which held most
    assert "61.0" not in "\n".join(line for line in lines if not line[:1].isdigit())


def test_over_two_hosts_each_has_drafters_and_targets_of_its_own(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        spec = {
            **SPEC,
            "entry": "dflash",
            "roles": {"target": 4, "drafter": 4, "queue": 8},
            "train": {"accumulation": 4},
        }
        documents = {Document.SPEC: json.dumps(spec)}
        run = yard.run(RUN, "qwen27b/roles", host="pve-a", more_hosts=("pve-b",), documents=documents)
        for rank in range(8):
            told = (
                {"step_s": 0.9, "wait_s": 0.0, "queue_depth": 8.0} if rank % 4 < 2 else {"step_s": 0.3, "wait_s": 0.1}
            )
            own = [("metrics", BEGAN_S + step, {"step": step, "values": told}) for step in range(1, 11)]
            peak = {"stage": "backward", "gpu": rank % 4, "driver_bytes": (60 + rank) * GIB}
            Writer(yard.store, run, name=f"rank{rank}").tell([*own, ("memory", BEGAN_S + 60, peak)])
        failure = FailureRow(
            run_id=run, attempt=1, kind="gpu_oom", message="asked for 11 GiB", hint="", source="rank6",
            stage="backward", step=3, traceback="", facts={}, at_s=NOW_S, is_first_cause=True,
        )  # fmt: skip
        yard.store.replace_failures(run, 1, [failure])
    detail = detail_of(tmp_path / "runs.db")

    rows = text_of(rank_lines(detail.ranks, detail.roles_told, 100, ascii_only=False)).splitlines()[-8:]

    role = ["drafter", "drafter", "target", "target"] * 2
    assert [row.split()[:2] for row in rows] == [[str(rank), role[rank]] for rank in range(8)]
    # A GPU 0 there is on each of the two: what a rank held at most says on which.
    places = [f"pve-{'a' if rank < 4 else 'b'} GPU {rank % 4}" for rank in range(8)]
    assert [row.rsplit(", ", 1)[1] for row in rows] == places
    memory = text_of(peak_lines(detail, 78))
    assert "rank 7 on pve-b, by stage, GiB" in memory
    assert all(f"backward, {place}" in memory for place in places)
    assert "told by rank6 on pve-b" in text_of(failure_lines(detail, 78))
    assert "a target rank 200 ms and a drafter rank 900 ms" in detail.roles_told


def test_one_process_has_no_ranks(filled_yard: Path) -> None:
    detail = detail_of(filled_yard, "h7kq2mxd")

    assert detail.ranks == ()
    assert rank_lines(detail.ranks, detail.roles_told, 80, ascii_only=False) == []


def test_ranks_of_an_older_attempt_are_not_told_as_those_of_now(tmp_path: Path) -> None:
    fill(tmp_path / "runs.db")
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.store.set_state(RUN, State.LOST, reason="reboot", evidence="")
        yard.store.new_attempt(RUN)
        Writer(yard.store, RUN, attempt=2).tell(steps(50, 60, 1, begin_s=NOW_S - 60, step_s=1.0, seed=1))

    assert detail_of(tmp_path / "runs.db").ranks == ()


@pytest.mark.parametrize("host", ["", "a-host-with-a-long-name"])
@pytest.mark.parametrize("width", [58, 68, 78, 138])
def test_lines_of_ranks_keep_to_the_screen_and_lose_no_card(width: int, host: str, roles_db: Path) -> None:
    """A host's name is cut first, then the stage."""
    detail = detail_of(roles_db)
    ranks = [dataclasses.replace(rank, host=host) for rank in detail.ranks]

    lines = [*rank_lines(ranks, detail.roles_told, width, ascii_only=False), *rank_peak_lines(ranks, width)]
    rows = [text_of([line]) for line in lines if text_of([line])[:1].isdigit()]

    assert max(width_of(line) for line in lines) <= width
    assert [row.rstrip()[-5:] for row in rows] == [f"GPU {rank}" for rank in range(4)] * 2
    assert all(size in "\n".join(rows) for size in ("20/20", "84.0 GiB", "61.2 GiB"))
    if width >= 78:
        stages = ["backward", "backward", "forward", "forward"] * 2
        assert all(stage in row for stage, row in zip(stages, rows, strict=True))


@pytest.mark.slow
async def test_the_overview_shows_the_ranks(roles_db: Path, open_app: Callable[..., Draftyard]) -> None:
    app = open_app(roles_db)
    async with opened(app, "enter", size=(100, 40)) as pilot:
        overview = screen_text(app)
        await press(app, pilot, "3")
        memory = screen_text(app)

    assert "drafter-bound: queue 20/20" in overview
    assert "3 target" in overview
    assert "Every rank at its most" in memory


@pytest.mark.slow
async def test_a_run_over_two_hosts_names_both_and_stands_on_each(
    tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.run(RUN, "qwen27b/roles", host="pve-a", more_hosts=("pve-b",), num_steps=1000)
        yard.state(RUN, State.RUNNING, evidence="beat 2 s ago")
        for host in ("pve-a", "pve-b"):
            yard.store.host_seen(host, address=f"ssh {host}", facts={"gpus": []}, clock_offset_s=0.0)
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=yard.path)
    app = open_app(yard.path, places=places)
    async with opened(app, size=(220, 40)) as pilot:
        listed = screen_text(app)
        await press(app, pilot, "enter")
        overview = screen_text(app)
        await press(app, pilot, "escape", "2")
        hosts = screen_text(app)
        await press(app, pilot, "1", "x")
        question = await shown(app, pilot, "stop qwen27b/roles")

    assert "pve-a+1" in listed
    assert "host         pve-a and pve-b" in overview
    assert hosts.count(RUN) == 2
    assert "on pve-a and pve-b" in question
