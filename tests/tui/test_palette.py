"""The palette: every action there is, on every screen; what cannot be done says why."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.cli import GROUPS
from orchestrator.store.reads import Reader
from tests.tui.golden import opened, press, shown
from tests.tui.yard import DONE, LIVE
from tui.app import Draftyard
from tui.commands import ONLY_TYPED, commands
from tui.deeds import DEEDS
from tui.keys import all_bindings
from tui.keys_help import KeysHelp
from tui.palette import Command, Palette
from tui.plain import screen_text
from tui.runs import RunsScreen

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]
# Keys from where the one before ends -> a screen, a tab, or one with a dialogue's field open.
WALK = ("", "slash", "escape j enter", "2", "3", "4", "5", "6", "7", "escape space space c", "escape 2", "3", "4")


def meaning(name: str) -> tuple[str, str]:
    """Two keys of one screen may do the same; one of them is enough to have it."""
    return name.partition(".")[0], all_bindings()[name].action


def missing(listed: list[Command]) -> set[str]:
    """Every key of every screen but those of dialogues, and every deed, that is not among them."""
    found = {meaning(command.name) for command in listed if not command.name.startswith(("deed.", "verb."))}
    keys = {
        name
        for name in all_bindings()
        if not name.startswith(("confirm.", "help.", "palette.", "app.palette", "app.stop"))
    }
    deeds = {f"deed.{deed.name}" for deed in DEEDS} - {command.name for command in listed}
    return {name for name in keys if meaning(name) not in found} | deeds


def works(command: Command) -> bool:
    """Of a key: its widget has such an action."""
    if command.name.startswith(("deed.", "verb.")) or not hasattr(command.do, "args") or len(command.do.args) < 3:
        return callable(command.do)
    _, action, node = command.do.args
    return hasattr(node, f"action_{action.partition('(')[0]}")


@pytest.mark.parametrize("is_readonly", [False, True])
async def test_every_action_is_listed_on_every_screen_and_can_be_done_or_says_why(
    is_readonly: bool, yard_places: Places, open_app: Open
) -> None:
    app = open_app(places=yard_places, readonly=is_readonly)
    async with opened(app, size=(120, 40)) as pilot:
        for keys in WALK:
            await press(app, pilot, *keys.split())
            listed = commands(app)

            assert missing(listed) == set(), keys
            assert len({command.name for command in listed}) == len(listed), keys
            assert [command.name for command in listed if not command.why_not and not works(command)] == [], keys
            acting = [
                command
                for command in listed
                if command.name.startswith(
                    ("deed.", "app.follow", "app.edit", "launch.launch", "smoke.one", "hosts.orphans")
                )
            ]
            assert all(command.why_not for command in acting) or not is_readonly, keys


async def test_what_cannot_be_done_says_why_and_does_nothing(yard_places: Places, open_app: Open) -> None:
    app = open_app(places=yard_places)
    async with opened(app, "j", "colon") as pilot:
        assert isinstance(app.screen, Palette)
        nothing_typed = [command.name for command in app.screen._shown]
        await press(app, pilot, *"bin")
        told = await shown(app, pilot, "Move the run to the bin", "Not now: it is running: stop it first")
        await press(app, pilot, "enter")
        toast = " ".join(message.message for message in app._notifications)
        assert isinstance(app.screen, RunsScreen)

    assert "it is running: stop it first." in toast
    assert "bin: qwen27b" in told
    assert "deed.rm" in nothing_typed
    assert "log.wrap" not in nothing_typed  # of another screen: by its words alone
    assert nothing_typed.index("deed.rm") > nothing_typed.index("app.theme")  # below all that works


async def test_an_action_of_another_screen_is_found_and_screens_open_from_anywhere(
    yard_places: Places, open_app: Open
) -> None:
    app = open_app(places=yard_places)
    async with opened(app, "j", "colon") as pilot:
        await press(app, pilot, *"group ranks")
        await shown(app, pilot, "Group ranks", "Not now: it works in the log of a run")
        await press(app, pilot, "escape", "colon", *"open memory", "enter")
        on_run = await shown(app, pilot, "qwen27b/ddtree", "must fit")
        await press(app, pilot, "colon", *"open smoke", "enter")
        on_smoke = await shown(app, pilot, "fwd_bwd")

    assert LIVE in on_run
    assert "3:smoke" in on_smoke


@pytest.mark.parametrize("is_readonly", [True, False])
async def test_a_palette_that_only_looks_says_so_of_every_deed(
    is_readonly: bool, yard_places: Places, open_app: Open
) -> None:
    app = open_app(places=yard_places, readonly=is_readonly)
    async with opened(app, "j", "colon") as pilot:
        await press(app, pilot, *"stop the run")
        assert ("only looks" in screen_text(app)) == is_readonly


async def test_the_palette_does_what_its_words_say(yard_copy: Path, tmp_path: Path, open_app: Open) -> None:
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=yard_copy)
    app = open_app(yard_copy, places=places)
    async with opened(app, *("j" * 4), "colon") as pilot:
        await press(app, pilot, *"bin smollm2", "enter")
        question = await shown(app, pilot, "rm smollm2/demo")
        await pilot.press("y")
        await shown(app, pilot, "in the bin")

    assert f"rm smollm2/demo  {DONE}" in question
    assert "on local, step 400" in question
    with Reader(yard_copy) as reader:
        assert reader.run(DONE).removed_s is not None


async def test_every_verb_of_the_command_line_is_found_by_its_name(yard_places: Places, open_app: Open) -> None:
    """What is not done here is told as what to type, and the page says that it is the command line's alone."""
    page = (Path(__file__).parents[2] / "docs" / "screens.md").read_text(encoding="utf-8")
    alone = page.partition("The command line's alone are ")[2].partition(".")[0]
    app = open_app(places=yard_places)
    async with opened(app, "j"):
        listed = commands(app)
        for verb in (verb for group in GROUPS.values() for verb in group):
            assert [command for command in listed if verb in command.also.split()], verb

    assert set(re.findall(r"`([\w-]+)`", alone)) == set(ONLY_TYPED)
    assert not set(ONLY_TYPED) & {deed.name for deed in DEEDS}


async def test_a_deed_is_found_by_its_verb_and_what_stands_under_key_is_a_key(
    yard_places: Places, open_app: Open
) -> None:
    app = open_app(places=yard_places)
    async with opened(app, "j", "colon") as pilot:
        keys = {
            app.get_key_display(replace(binding, key=key, key_display=None))
            for binding in all_bindings().values()
            for key in binding.key.split(",")
        }
        await press(app, pilot, *"rm")
        assert isinstance(app.screen, Palette)
        found = [command.name for command in app.screen._shown]
        named = {key for command in commands(app) for key in command.key.split()}

    assert "deed.rm" in found
    assert named <= keys


async def test_what_the_command_line_alone_does_is_copied_with_the_runs_own_names(
    yard_places: Places, open_app: Open
) -> None:
    app = open_app(places=yard_places)
    async with opened(app, "j", "colon") as pilot:
        await press(app, pilot, *"tag")
        told = await shown(app, pilot, "Add or remove the run's tags", f"draftyard tag {LIVE} TAG")
        await press(app, pilot, "enter")
        copied = app.clipboard

    assert "Not now" not in told
    assert copied == f"draftyard tag {LIVE} TAG"


async def test_a_deed_names_its_run_whole_where_there_is_room(yard_places: Places, open_app: Open) -> None:
    app = open_app(places=yard_places)
    async with opened(app, "j", "colon", size=(100, 30)) as pilot:
        await press(app, pilot, *"evaluate")
        rows = screen_text(app)

    assert f"Measure the acceptance length of the newest checkpoint: qwen27b/ddtree {LIVE}" in rows


@pytest.mark.parametrize("keys", ["", "enter", "enter 2", "enter 4", "3"])
async def test_help_says_every_key_once_and_no_word_twice(keys: str, yard_places: Places, open_app: Open) -> None:
    app = open_app(places=yard_places)
    async with opened(app, "j", *keys.split(), "question_mark"):
        assert isinstance(app.screen, KeysHelp)
        rows = app.screen._keys
    named = [key for shown, _ in rows for key in shown.split()]

    assert len(named) == len(set(named)), rows
    assert len(rows) == len({words for _, words in rows}), rows
