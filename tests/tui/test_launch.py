"""Launch takes what the run under the cursor was told, or says that it cannot; it looks again when asked, and hears the newest answer."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from orchestrator.actions.places import BUNDLED, Places, find_places
from orchestrator.store.rows import Document
from tests.tui.golden import opened, press, shown
from tests.tui.world import Yard
from tui import launch
from tui.app import Draftyard
from tui.ordering import Planned, Standing
from tui.plain import screen_text
from tui.table import Table

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]


@pytest.fixture
def places(filled_yard: Path, tmp_path: Path) -> Places:
    return places_of(tmp_path, filled_yard)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Held shut by the test; opened at its end whatever happened."""
    held = threading.Event()
    yield held
    held.set()


def places_of(folder: Path, db: Path) -> Places:
    return find_places(folder, {"HOME": str(folder), "XDG_DATA_HOME": str(folder / "data")}, db=db)


def own_recipe(folder: Path, *, branch: str = "dpace") -> Path:
    """A project's recipe `mine`: the bundled small one, its branch `dpace` called `branch`."""
    (folder / "recipes").mkdir(exist_ok=True)
    shutil.copytree(BUNDLED / "presets", folder / "recipes" / "presets", dirs_exist_ok=True)
    path = folder / "recipes" / "mine.yaml"
    path.write_text((BUNDLED / "smollm2.yaml").read_text().replace("  dpace:", f"  {branch}:", 1))
    return path


def offered(app: Draftyard) -> list[str]:
    return list(app.screen.query_one("#offers", Table)._keys)


def a_run(folder: Path, name: str, launched: dict[str, Any], **facts: Any) -> Path:
    """A yard with that run alone."""
    yard = Yard(folder / "runs.db")
    with yard.store:
        yard.run("v3wq7kdx", name, documents={Document.LAUNCH: json.dumps(launched)}, **facts)
    return yard.path


async def test_the_branch_host_and_gpus_are_those_of_the_run(tmp_path: Path, open_app: Open) -> None:
    path = a_run(tmp_path, "smollm2/dpace", {"named_gpus": ["5", "6"], "gpus": ["5", "6"]}, host="gpubox")
    app = open_app(path, places=places_of(tmp_path, path))
    async with opened(app, "4", size=(100, 30)) as pilot:
        text = await shown(app, pilot, "smollm2/dpace on gpubox", "▌smollm2/dpace")
        gpus = app.screen.query_one("#gpus", Input).value

    assert "on local" not in text
    assert gpus == "5 6"


@pytest.mark.parametrize("branch", ["dpace", "gone"])
async def test_the_overrides_are_the_run_s_own_whatever_was_typed_for_another(
    branch: str, tmp_path: Path, open_app: Open
) -> None:
    """None where it had none or its branch is not offered; asked again of one run, it begins with what that was told."""
    yard = Yard(tmp_path / "runs.db")
    told = {Document.LAUNCH: json.dumps({"overrides": ["train.seed=7", "optim.lr=0.1"]})}
    with yard.store:
        yard.run("aaaawq7k", "smollm2/ce", documents=told, ago_s=60)
        yard.run("bbbbwq7k", f"smollm2/{branch}", host="gpubox", ago_s=600)
    app = open_app(yard.path, places=places_of(tmp_path, yard.path))
    async with opened(app, "4", size=(140, 30)) as pilot:
        await shown(app, pilot, "▌smollm2/ce", "train.seed=7 optim.lr=0.1")
        overrides = app.screen.query_one("#overrides", Input)
        overrides.value = "optim.lr=0.5"
        await press(app, pilot, "k", "1", "4")
        await shown(app, pilot, "▌smollm2/ce", "train.seed=7 optim.lr=0.1")
        overrides.value = "optim.lr=0.5"
        await press(app, pilot, "1", "j", "4")
        other = "smollm2/gone is not offered here" if branch == "gone" else "smollm2/dpace on gpubox"
        await shown(app, pilot, other)
        assert overrides.value == ""
        await press(app, pilot, "1", "k", "4")
        await shown(app, pilot, "▌smollm2/ce", "train.seed=7 optim.lr=0.1")


async def test_an_override_with_a_blank_is_one_however_often_it_is_told_on(
    tmp_path: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fell apart at the blank, and the plan refused its second half. A quote that is still open asks nobody."""
    asked = []
    monkeypatch.setattr(launch, "standing", lambda _, wish: asked.append(wish) or Standing(False, fault="seen"))
    monkeypatch.setattr(launch, "planned", lambda *_: Planned({}, note="planned"))
    told = ("data.cache=/data/my rows", "train.seed=7")
    path = a_run(tmp_path, "smollm2/dpace", {"overrides": told})
    app = open_app(path, places=places_of(tmp_path, path))
    async with opened(app, "4", size=(140, 30)) as pilot:
        await shown(app, pilot, "'data.cache=/data/my rows' train.seed=7", "planned")
        await press(app, pilot, "enter")
        await shown(app, pilot, "seen")
        app.screen.query_one("#overrides", Input).value += " own.note='half"
        open_quote = await shown(app, pilot, "close it")
        await press(app, pilot, "enter", "ctrl+l")
        await shown(app, pilot, "close it")

    assert [wish.overrides for wish in asked] == [told]
    assert "Nothing is chosen" not in open_quote


async def test_a_gate_that_is_asked_at_once_is_asked_of_what_the_run_was_told(
    tmp_path: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both keys in one go: the second waits until the recipe has been found."""
    asked = []
    monkeypatch.setattr(launch, "standing", lambda _, wish: asked.append(wish) or Standing(False, fault="seen"))
    path = a_run(tmp_path, "smollm2/dpace", {"named_gpus": ["5"]}, host="gpubox")
    app = open_app(path, places=places_of(tmp_path, path))
    async with opened(app, size=(100, 30)) as pilot:
        await pilot.press("4", "enter")
        await shown(app, pilot, "seen")

    assert [(wish.recipe, wish.branch, wish.host, wish.gpus) for wish in asked] == [
        ("smollm2", "dpace", "gpubox", ("5",))
    ]


async def test_a_gate_is_asked_once_the_recipe_is_found_however_long_that_takes(
    tmp_path: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no row was chosen yet the key was taken by the list, and lost."""
    asked, are_read, found = [], threading.Event(), launch.offers
    monkeypatch.setattr(launch, "standing", lambda _, wish: asked.append(wish) or Standing(False, fault="seen"))
    path = a_run(tmp_path, "smollm2/dpace", {"named_gpus": ["5"]}, host="gpubox")
    app = open_app(path, places=places_of(tmp_path, path))
    async with opened(app, size=(100, 30)) as pilot:
        monkeypatch.setattr(launch, "offers", lambda places: found(places) if are_read.wait(60) else [])
        await pilot.press("4", "enter")
        await pilot.pause()
        assert asked == []
        are_read.set()
        await shown(app, pilot, "seen")

    assert [(wish.branch, wish.host, wish.gpus) for wish in asked] == [("dpace", "gpubox", ("5",))]


@pytest.mark.parametrize(
    ("name", "launched", "facts", "why"),
    [
        ("qwen27b/ddtree", {}, {}, "no recipe 'qwen27b'"),
        ("smollm2/gone", {}, {}, "its recipe has the branches"),
        ("smollm2/ce", {"recipe_file": "ELSEWHERE"}, {}, "lies in none of the recipe folders"),
        ("smollm2/ce", {}, {"more_hosts": ("two",)}, "it ran on pve-a and two"),
    ],
    ids=["no recipe", "no branch", "another file of that name", "several hosts"],
)
async def test_a_branch_that_is_not_offered_is_said_and_none_is_chosen(
    name: str, launched: dict[str, Any], facts: dict[str, Any], why: str,
    tmp_path: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked = []
    monkeypatch.setattr(launch, "standing", lambda _, wish: asked.append(wish) or Standing(True))
    if "recipe_file" in launched:
        (tmp_path / "elsewhere").mkdir()
        launched = {"recipe_file": str(shutil.copy(BUNDLED / "smollm2.yaml", tmp_path / "elsewhere"))}
    path = a_run(tmp_path, name, launched, **facts)
    app = open_app(path, places=places_of(tmp_path, path))
    async with opened(app, "4", size=(140, 30)) as pilot:
        told = await shown(app, pilot, f"{name} is not offered here", "own-script/slow")
        await press(app, pilot, "enter", "m", "ctrl+l")
        after = await shown(app, pilot, "No branch is chosen")
        await press(app, pilot, "j")
        await shown(app, pilot, "own-script/slow on local", "▌own-script/slow")

    assert why in " ".join(
        " ".join(line.rpartition("│")[2] for line in told.splitlines()).split()
    )  # wherever its lines break
    assert "▌" not in told
    assert " on local" not in after
    assert asked == []


async def test_a_branch_that_has_come_meanwhile_is_found_when_asked_anew(tmp_path: Path, open_app: Open) -> None:
    path = a_run(tmp_path, "smollm2/brand_new", {})
    own_recipe(tmp_path)
    app = open_app(path, places=places_of(tmp_path, path))
    async with opened(app, "4", size=(100, 30)) as pilot:
        await shown(app, pilot, "smollm2/brand_new is not offered here")
        own_recipe(tmp_path, branch="brand_new").rename(tmp_path / "recipes" / "smollm2.yaml")
        await pilot.press("r")
        await shown(app, pilot, "smollm2/brand_new on pve-a", "▌smollm2/brand_new")


@pytest.mark.parametrize("keys", ["1 2 4", "r"])
async def test_recipes_and_the_plan_are_made_anew(
    keys: str, filled_yard: Path, tmp_path: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_recipe(tmp_path)
    planned: list[Any] = []
    monkeypatch.setattr(launch, "planned", lambda _, wish: planned.append(wish) or Planned({}, note="planned"))
    app = open_app(places=places_of(tmp_path, filled_yard))
    async with opened(app, "2", "4", size=(100, 30)) as pilot:
        await shown(app, pilot, "mine/dpace", "planned")
        own_recipe(tmp_path, branch="brand_new")
        num_planned = len(planned)
        await press(app, pilot, *keys.split())
        await shown(app, pilot, "mine/brand_new", "planned")

        assert "mine/dpace" not in offered(app)
        assert len(planned) > num_planned


async def test_what_the_gate_said_of_an_older_recipe_is_forgotten(
    places: Places, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "standing", lambda *_: Standing(True))
    app = open_app(places=places)
    async with opened(app, "2", "4", size=(100, 30)) as pilot:
        await shown(app, pilot, "looks at the host")
        await pilot.press("enter")
        await shown(app, pilot, "Launch is allowed")
        await pilot.press("r")
        await shown(app, pilot, "looks at the host")


async def test_twenty_letters_are_planned_once(places: Places, open_app: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment after the last of them; so are rows that the cursor only passes."""
    planned: list[Any] = []
    monkeypatch.setattr(launch, "planned", lambda _, wish: planned.append(wish) or Planned({}, note="planned"))
    monkeypatch.setattr(launch, "PAUSE_S", 1.0)  # no two letters are so far apart, on however slow a machine
    app = open_app(places=places)
    async with opened(app, "2", "4", size=(100, 30)) as pilot:
        await shown(app, pilot, "planned")
        planned.clear()
        await pilot.press("j", "j", "j", "tab", "tab", "tab")
        box = app.screen.query_one("#overrides", Input)
        for number in range(20):
            box.insert_text_at_cursor("x")
            await pilot.pause()
            assert box.value == "x" * (number + 1)
        await shown(app, pilot, "planned")
        await pilot.pause(1.2)

    assert [wish.overrides for wish in planned] == [("x" * 20,)]


async def test_a_late_answer_of_the_gate_does_not_take_the_place_of_the_newest(
    gate: threading.Event, places: Places, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    asked: list[str] = []

    def standing(_: Places, wish: Any) -> Standing:
        asked.append(wish.branch)
        if len(asked) == 1:
            gate.wait(100.0)
            ended.set()
        return Standing(False, fault=f"the answer of {wish.branch}")

    monkeypatch.setattr(launch, "standing", standing)
    app = open_app(places=places)
    async with opened(app, "2", "4", size=(100, 30)) as pilot:
        await shown(app, pilot, "own-script/slow on local", "looks at the host")
        await pilot.press("enter")
        await shown(app, pilot, "looking at the host")
        await press(app, pilot, "j", "enter")
        await shown(app, pilot, "the answer of fast")
        gate.set()
        while not ended.is_set():
            await pilot.pause(0.02)
        await pilot.pause(0.2)
        late = screen_text(app)

    assert asked == ["slow", "fast"]
    assert "the answer of fast" in late


async def test_a_look_goes_on_until_the_newest_has_answered(
    gate: threading.Event, places: Places, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one's end is not the end of it."""
    first, both = threading.Event(), []

    def standing(_: Places, wish: Any) -> Standing:
        both.append(wish)
        (first if len(both) == 1 else gate).wait(100.0)
        return Standing(False, fault="answered")

    monkeypatch.setattr(launch, "standing", standing)
    app = open_app(places=places)
    async with opened(app, "2", "4", size=(100, 30)) as pilot:
        await shown(app, pilot, "looks at the host")
        await press(app, pilot, "enter", "j", "enter")
        while len(both) < 2:
            await pilot.pause(0.02)
        first.set()
        await pilot.pause(0.3)
        between = screen_text(app)
        gate.set()
        after = await shown(app, pilot, "answered")

    assert "looking at the host" in between
    assert "looking at the host" not in after


async def test_an_answer_about_a_host_that_is_asked_no_more_asks_nobody(
    gate: threading.Event, places: Places, open_app: Open
) -> None:
    """As of what ended runs left behind on a slow host, when another has been looked at since."""
    said, ended = [], threading.Event()
    app = open_app(places=places)

    def slow() -> None:
        gate.wait(100.0)
        app.call_from_thread(said.append, "slow")
        ended.set()

    async with opened(app, "2") as pilot:
        app.do_beside(slow, group="orphans")
        await pilot.pause()
        app.do_beside(lambda: app.call_from_thread(said.append, "newest"), group="orphans")
        while not said:
            await pilot.pause(0.02)
        gate.set()
        while not ended.is_set():
            await pilot.pause(0.02)

    assert said == ["newest"]
