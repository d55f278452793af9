"""What a screen has to say it says whole, where it is looked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store.reads import Reader
from orchestrator.store.rows import State
from tests.tui.golden import opened, press, shown
from tests.tui.world import Yard
from tests.tui.yard import LIVE, UNREACHABLE
from tui.app import Draftyard
from tui.deeds import asking, deed_named
from tui.keys_help import FILTER_EXAMPLES, help_lines
from tui.launch_lines import gate_lines, refused
from tui.once import rested
from tui.ordering import Standing, Wish
from tui.pieces import text_of
from tui.plain import screen_text

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]

CHANGED = """gpubox: THE HOST KEY HAS CHANGED; nothing was sent
  known: SHA256:uTvWxYz0123456789abcdefghijklmnopqrstuvwxyzABCD (ssh-ed25519), ~/.ssh/known_hosts:12
  shown: SHA256:aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456789abcdefghij (ssh-ed25519)
  repair: ssh-keygen -R 'gpubox' -f ~/.ssh/known_hosts"""


@pytest.fixture
def cut_off(tmp_path: Path) -> Path:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.run("k5xn8ruq", "mine/fast", host="gpubox", ago_s=900)
        yard.state("k5xn8ruq", State.RUNNING)
        yard.store.host_seen("gpubox", address="ssh gpubox", clock_offset_s=0.0, facts={})
        yard.store.host_unreachable("gpubox", error=CHANGED)
    return yard.path


@pytest.mark.parametrize("keys", ["2", "enter"])
async def test_a_changed_key_is_told_whole(cut_off: Path, open_app: Open, keys: str) -> None:
    async with opened(open_app(cut_off), keys, size=(80, 40)) as pilot:
        text = await shown(pilot.app, pilot, "THE HOST KEY HAS CHANGED")  # type: ignore[arg-type]

    words = "".join(text.split())
    assert all("".join(row.split()) in words for row in CHANGED.splitlines())


async def test_a_changed_key_is_named_in_the_list(cut_off: Path, open_app: Open) -> None:
    app = open_app(cut_off)
    async with opened(app, size=(140, 30)) as pilot:
        await shown(app, pilot, "mine/fast", "running     key changed")
        await press(app, pilot, "s")
        await shown(app, pilot, "host unreachable for", "THE HOST KEY HAS CHANGED")


async def test_a_faulty_filter_says_all_that_is_wrong_with_it(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "slash", *"loss<abc", "enter") as pilot:
        await rested(app, pilot)
        faulty = screen_text(app)
        await press(app, pilot, "escape")
        after = screen_text(app)

    assert "No run passes" not in faulty
    assert "abc" in faulty.split("filter ", 1)[1]
    assert "…" not in faulty.split("filter ", 1)[1].split("\n")[0]
    assert "filter 'loss" not in after


async def test_a_list_that_leaves_a_high_screen_empty_shows_its_run_below(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "j", size=(120, 40)) as pilot:
        text = await shown(app, pilot, "newest word", "ends in 1d15h")

    lines = text.splitlines()
    assert next(row for row, line in enumerate(lines) if "newest word" in line) > 14


@pytest.mark.parametrize("width", [56, 88, 92])
def test_help_cuts_no_word(width: int) -> None:
    told = "Baseline for curves and speed, and for whatever else is laid beside another run"
    lines = help_lines([("B", told)], width)

    words = text_of(lines).split()
    assert set(told.split()) <= set(words)
    assert set(" ".join(meaning for _, meaning in FILTER_EXAMPLES[:-1]).replace("…", "").split()) <= set(words)


async def test_the_baseline_bears_its_letter(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "B", "j") as pilot:
        await rested(app, pilot)
        lines = screen_text(app).splitlines()

    assert next(line for line in lines if UNREACHABLE in line).startswith("B")


async def test_the_baseline_is_taken_back_by_the_same_key(open_app: Open) -> None:
    app = open_app()
    async with opened(app, "B", "B", "j") as pilot:
        await rested(app, pilot)
        lines = screen_text(app).splitlines()

    assert app.baseline is None
    assert not next(line for line in lines if UNREACHABLE in line).startswith("B")


async def test_a_screen_that_only_looks_offers_no_deed(open_app: Open) -> None:
    app = open_app(readonly=True)
    async with opened(app, "j", size=(120, 30)) as pilot:
        footers = [screen_text(app).splitlines()[-1]]
        for key in ("3", "4"):
            await press(app, pilot, key)
            footers.append(screen_text(app).splitlines()[-1])

    assert not [line for line in footers if "x stop" in line or "run missing" in line or "^l" in line]


async def test_a_stop_of_what_has_ended_is_answered(open_app: Open, filled_yard: Path) -> None:
    app = open_app()
    async with opened(app, "G", "x", size=(120, 30)) as pilot:
        await shown(app, pilot, "nothing to stop")


@pytest.mark.parametrize(("entry", "saves"), [("dflash", True), ("script", False)])
def test_a_checkpoint_is_promised_of_the_bundled_trainer_alone(filled_yard: Path, entry: str, saves: bool) -> None:
    with Reader(filled_yard) as reader:
        run = reader.run(LIVE)

    told = asking(deed_named("stop"), run, (5,), {"entry": entry, "life": {"grace_s": 7.0}})[-1]

    assert ("checkpoint" in told) == saves
    assert "grace of 7 s" in told


def test_the_launch_form_names_tab_and_a_refusal_says_why() -> None:
    standing = Standing(False, (("fwd", "passed", ""), ("leak", "missing", "")))

    assert "tab goes on to host" in text_of(gate_lines(Wish("mine", "fast"), None, 78))
    assert refused(standing) == "leak missing; m climbs what is missing"
    assert refused(Standing(False, fault="host x cannot be reached")) == "host x cannot be reached"
