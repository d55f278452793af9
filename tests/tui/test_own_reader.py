"""A search in a log reads beside the screen: with a reader of its own, as one that gives way is its own thread's alone."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import known
from orchestrator.actions.places import find_places
from tests.tui.golden import opened, press, shown
from tests.tui.world import NOW_S, Yard
from tui.app import Draftyard
from tui.snapshot import Ask, Room

RUN = "logs2345"


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    made = Yard(tmp_path / "runs.db")
    made.run(RUN, "long/log", ago_s=100.0)
    made.log(RUN, "".join(f"step {number}\n" for number in range(400)) + "the needle\n" + "after\n" * 400)
    return made


async def test_a_reader_that_gives_way_refuses_a_second_thread(yard: Yard) -> None:
    """SQLite holds the connection while it waits for Python's lock, which the other thread would hold: both for ever."""
    with contextlib.closing(Room(yard.path, give_way=lambda left_s: left_s)) as room:
        room.read(Ask(run=RUN), NOW_S)
        reader = room.reader

        with pytest.raises(AssertionError, match="its own thread"):
            await asyncio.to_thread(reader.run, RUN)
        assert reader.run(RUN).id == RUN


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["needle", "the ne+dle", "n.edle|needle"])
async def test_a_search_asks_for_secrets_with_a_reader_of_its_own(
    typed: str, yard: Yard, open_app: Callable[..., Draftyard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "AGE_S", 0.0)  # every piece of a log is a question to the database
    places = find_places(yard.path.parent, {"HOME": str(yard.path.parent)}, db=yard.path)
    app = open_app(yard.path, places=places, run=RUN, readonly=True)
    async with opened(app, "4", "home", "slash", size=(80, 24)) as pilot:
        app.screen.query_one("#search").value = typed  # type: ignore[attr-defined]
        await press(app, pilot, "enter")
        text = await shown(app, pilot, "the needle")

    assert app.crash is None
    assert "step 1 " not in text
