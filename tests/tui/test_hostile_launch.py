"""The launch screen under hostile input: one clear line each, never a traceback, and nothing is started by accident."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.events import Paste
from textual.pilot import Pilot
from textual.widgets import Input

from orchestrator.actions.places import BUNDLED
from orchestrator.store.writes import Store
from tests.tui.golden import opened, press, shown
from tests.tui.test_launch import own_recipe, places_of
from tui import launch
from tui.app import Draftyard
from tui.field import MOST_LETTERS
from tui.ordering import Standing
from tui.plain import screen_text

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]
ESCAPES = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb\x08"
PLAN = "must fit"  # of the recipe as it is
SIZE = (120, 30)

# What is pasted into a field -> words of the line that says what is wrong with it.
HOSTILE: dict[str, dict[str, str]] = {
    "overrides": {
        ESCAPES: "expected section.key=value",
        "train.seed=\x001": "which is text; expected a whole number",
        "train.seed=\ud8001": "which is text; expected a whole number",
        "訓練.种子=🚀🚀": "no key '訓練'",
        "train.see\u0301d=1": "did you mean 'seed'",
        "train.seed='1": "a quote is open in train.seed='1; close it",
        "a=b=c": "a: no key 'a'",
        "train.seed=1\noptim.lr=2\r\nq\n": "--set q: expected section.key=value",
        "''": "expected section.key=value",
        "loss.terms={ce: 1": "while parsing a flow node",
        f"train.seed={'9' * 3000}x": "3,001 letters",
        f"train.seed='{'a ' * 1500}": "a quote is open in train.seed='a a a",
    },
    "host": {
        ESCAPES: "no host 'a",
        "box\nq\nx": "no host 'box q x'",
        "\ud800": "no host",
        "-oProxyCommand=true": "no host '-oProxyCommand=true'",
        "h" * 3000: "3,000 letters",
    },
    "gpus": {ESCAPES: "is neither an index", "5\n\x00": "is neither an index", "9" * 3000: "3,000 letters"},
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever was begun, and every look at a host."""
    calls: list[str] = []
    monkeypatch.setattr(launch, "launch", lambda *_, **__: calls.append("launch") or "never234")
    monkeypatch.setattr(launch, "smoke", lambda *_, **__: calls.append("smoke"))
    monkeypatch.setattr(launch, "standing", lambda *_: calls.append("look") or Standing(False, fault="looked at"))
    return calls


@pytest.fixture
def yard(tmp_path: Path) -> Path:
    with Store(tmp_path / "runs.db"):
        pass
    own_recipe(tmp_path)
    return tmp_path


def app_of(folder: Path, open_app: Open, **settings: Any) -> Draftyard:
    return open_app(folder / "runs.db", places=places_of(folder, folder / "runs.db"), **settings)


async def pasted(app: Draftyard, pilot: Pilot[Any], name: str, text: str) -> Input:
    box = app.screen.query_one(f"#{name}", Input)
    box.focus()
    box.value = ""
    await pilot.pause()
    box.post_message(Paste(text))
    await pilot.pause()
    return box


@pytest.mark.parametrize("name", list(HOSTILE))
async def test_each_hostile_word_is_answered_in_a_line_and_starts_nothing(
    name: str, yard: Path, open_app: Open, started: list[str]
) -> None:
    app = app_of(yard, open_app)
    async with opened(app, "4", size=SIZE) as pilot:
        await shown(app, pilot, "mine/dpace", PLAN)
        for text, words in HOSTILE[name].items():
            before = app.screen.query_one(f"#{name}", Input).value
            await pasted(app, pilot, name, text)
            said = await _said(app, pilot, words)

            assert [sign for sign in said if ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0 or sign == "\u202e"] == []
            app.screen.query_one(f"#{name}", Input).value = before
            assert started == [], text
        await pasted(app, pilot, name, next(iter(HOSTILE[name])))
        await press(app, pilot, "ctrl+l")
        await shown(app, pilot, "Ask the gate first")

    assert "launch" not in started


async def _said(app: Draftyard, pilot: Pilot[Any], words: str) -> str:
    """The right half of the screen in one line, once it says so."""
    for _ in range(400):
        lines = (line.partition("│")[2].strip() for line in screen_text(app).splitlines())
        told = " ".join(filter(None, lines))
        if words in told or words.replace(" ", "") in told.replace(" ", ""):
            return told
        await pilot.pause(0.05)
    raise AssertionError(f"{words!r} never came:\n{screen_text(app)}")


@pytest.mark.parametrize("name", list(HOSTILE))
async def test_a_paste_of_a_whole_file_is_refused_at_once_and_changes_nothing(
    name: str, yard: Path, open_app: Open, started: list[str]
) -> None:
    """Each key behind 100,000 letters took 4 to 8 s."""
    app = app_of(yard, open_app)
    async with opened(app, "4", size=SIZE) as pilot:
        await shown(app, pilot, "mine/dpace", PLAN)
        box = await pasted(app, pilot, name, "x" * 100_000)
        await shown(app, pilot, "One line takes 4,000 letters at most")

        assert box.value == ""
        box.value = "y" * MOST_LETTERS
        await press(app, pilot, "z")
        assert box.value == "y" * MOST_LETTERS

    assert started == []


@pytest.mark.parametrize("how", ["vanishes", "breaks", "is another", "becomes a folder"])
async def test_a_recipe_that_changes_under_the_screen_is_said_in_a_line(
    how: str, yard: Path, open_app: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(launch, "launch", lambda *_, **__: begun.append("launch"))
    path = yard / "recipes" / "mine.yaml"
    app = app_of(yard, open_app)
    async with opened(app, "4", size=SIZE) as pilot:
        await shown(app, pilot, "▌mine/ce", PLAN)
        text = path.read_text()
        path.unlink()
        if how == "breaks":
            path.write_text("name: mine\n\tbranches: [")
        elif how == "is another":
            path.write_text(text.replace("\n  ce:", "\n  other:", 1))
        elif how == "becomes a folder":
            path.mkdir()
        box = app.screen.query_one("#overrides", Input)
        box.focus()
        box.value = "train.seed=8"
        words = {
            "vanishes": "no recipe 'mine'", "breaks": "mine.yaml", "is another": "no branch 'ce'", "becomes a folder": "mine",
        }[how]  # fmt: skip
        said = await _said(app, pilot, words)
        await press(app, pilot, "enter")
        await press(app, pilot, "ctrl+l")
        await press(app, pilot, "escape", "r")
        left = await shown(app, pilot, "esc back")

    assert "Traceback" not in said + left
    assert begun == []


@pytest.mark.parametrize("key", ["m", "ctrl+l"])
async def test_a_screen_that_only_looks_starts_nothing(
    key: str, yard: Path, open_app: Open, started: list[str]
) -> None:
    app = app_of(yard, open_app, readonly=True)
    async with opened(app, "4", size=SIZE) as pilot:
        await shown(app, pilot, "mine/dpace", PLAN)
        await press(app, pilot, key)
        await shown(app, pilot, "only looks")

    assert {"launch", "smoke"} & set(started) == set()


async def test_names_of_branches_recipes_and_hosts_are_text(yard: Path, open_app: Open, started: list[str]) -> None:
    text = (BUNDLED / "smollm2.yaml").read_text()
    evil = yard / "recipes" / "ev\x1b[31mil.yaml"
    branch = '"c\\e[2J\\x9b31me":'
    evil.write_text(
        text.replace("\n  ce:", f"\n  {branch}", 1).replace("default_branch: ce\n", "default_branch: dpace\n")
    )
    (yard / "hosts.yaml").write_text('"b\\e[2Jox": {address: nowhere.invalid}\n')
    app = app_of(yard, open_app)
    async with opened(app, "4", size=SIZE) as pilot:
        said = await shown(app, pilot, "mine/ce", "il cannot be read", "a branch name has letters")
        await press(app, pilot, "g", "enter")
        await press(app, pilot, "2")
        said += await shown(app, pilot, "esc back")

    assert [sign for sign in said if sign != "\n" and (ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0)] == []
    assert "launch" not in started
