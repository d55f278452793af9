"""Whatever a recipe, a person, a job or a host says reaches the terminal as text, never as a command."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.events import Paste

from orchestrator.actions.places import find_places
from orchestrator.store.rows import Document, FailureRow, State
from tests.tui.golden import opened, press, shown
from tests.tui.world import GIB, NOW_S, Writer, Yard
from tui import launch
from tui.app import Draftyard
from tui.ordering import Standing
from tui.plain import screen_text

pytestmark = pytest.mark.slow  # a whole app a test

Open = Callable[..., Draftyard]
EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb\x08\r\x00"
COMMANDS = {"\x1b", "\x07", "\x9b", "\u202e", "\x08", "\r", "\x00"}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose every text, and a host whose every fact, holds commands for a terminal."""
    yard = Yard(tmp_path / "runs.db")
    told = EVIL.replace("\x00", "")
    with yard.store:
        yard.run(
            "evil2345", f"{told}/{told}", host=told, num_steps=9, tags=(told,), why=told, git_commit=told,
            documents={
                Document.SPEC: json.dumps({"recipe": told, told: {told: told}, "why": told}),
                Document.LAUNCH: json.dumps({"gpus": [told], told: told}),
            },
        )  # fmt: skip
        Writer(yard.store, "evil2345").tell([
            ("metrics", NOW_S - 9, {"step": 1, "values": {"loss": 1.0, told: 2.0}}),
            ("stage", NOW_S - 8, {"name": told}),
            ("note", NOW_S - 8, {"text": told}),
            ("progress", NOW_S - 7, {"what": told, "done": 1, "total": 2, "unit": told}),
            ("checkpoint", NOW_S - 6, {"step": 1, "path": told, "size_bytes": 1, "is_best": False}),
            ("rung", NOW_S - 5, {"name": told, "passed": False, "values": {told: told}, "message": told}),
        ])  # fmt: skip
        yard.log("evil2345", told + "\nTraceback " + told + "\n")
        yard.store.replace_failures("evil2345", 1, [FailureRow(
            run_id="evil2345", attempt=1, kind=told, message=told, hint=told, source=told, stage=told, step=1,
            traceback=told, facts={told: told, "frames": [{told: told}]}, at_s=NOW_S, is_first_cause=True,
        )])  # fmt: skip
        yard.store.note("evil2345", told)
        yard.state("evil2345", State.FAILED, reason="exit:1", evidence=told)
        gpu = {
            "index": 0,
            "name": told,
            "total_bytes": GIB,
            "used_bytes": GIB,
            "processes": [{"pid": 7, "user": told, "used_bytes": GIB}],
        }
        yard.store.host_seen(told, address=told, facts={"gpus": [gpu], "torch": told, told: told})
        yard.store.host_unreachable(told, error=told)
    return yard.path


# From one screen to the next.
WALK = (
    "",
    "enter",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    "escape 2",
    "3",
    "1 space c",
    "question_mark",
    "escape colon",
    "escape y",
)


async def test_no_screen_lets_a_command_through(hostile: Path, open_app: Open) -> None:
    app = open_app(hostile)
    async with opened(app, size=(140, 40)) as pilot:
        for keys in WALK:
            await press(app, pilot, *keys.split())

            assert not set(screen_text(app)) & COMMANDS, keys
            assert not set(app.export_screenshot()) & (COMMANDS - {"\r"}), keys


async def test_what_an_action_says_is_text_not_markup(hostile: Path, open_app: Open) -> None:
    """A refusal may hold brackets, or whatever a host said."""
    app = open_app(hostile)
    async with opened(app, size=(140, 40)) as pilot:
        app.notify(f"[/oops] [1, 2] {EVIL}")
        text = await shown(app, pilot, "[/oops]")

    assert "[/oops] [1, 2] a" in text
    assert not set(text) & COMMANDS


async def test_what_is_pasted_into_a_field_is_inert(hostile: Path, open_app: Open) -> None:
    app = open_app(hostile)
    async with opened(app, "slash", size=(140, 40)) as pilot:
        app.screen.focused.post_message(Paste(f"recipe:{EVIL}"))  # type: ignore[union-attr]
        text = await shown(app, pilot, "recipe:a")

    assert "recipe:a" in text
    assert not set(text) & COMMANDS


async def test_the_question_of_a_stop_names_what_it_names_as_text(tmp_path: Path, open_app: Open) -> None:
    told = EVIL.replace("\x00", "")
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        documents = {Document.LAUNCH: json.dumps({"gpus": [told]})}
        yard.state(yard.run("evil3456", f"{told}/{told}", host=told, documents=documents), State.RUNNING, evidence=told)
    app = open_app(yard.path, places=find_places(tmp_path, {"HOME": str(tmp_path)}, db=yard.path))
    async with opened(app, "x", size=(140, 40)) as pilot:
        asked = await shown(app, pilot, "stop a", "after its grace")

        assert not set(asked) & COMMANDS
        assert not set(app.export_screenshot()) & (COMMANDS - {"\r"})


async def test_launch_says_files_faults_and_answers_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_app: Open
) -> None:
    """A recipe that holds such a branch, a file of such a name, and a gate that answers so."""
    told = EVIL.replace("\x00", "")
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "a.yaml").write_text(json.dumps({"name": "a", "base": {}, "branches": {told: {}}}))
    (recipes / f"{told}.yaml").write_text(f"{json.dumps(told)}: [\n")
    answer = Standing(False, rungs=((told, told, f"because {told}"),), gpus=(told,), fingerprint=told, caution=told)
    monkeypatch.setattr(launch, "standing", lambda *_: answer)
    yard = Yard(tmp_path / "runs.db")
    yard.store.close()
    app = open_app(yard.path, places=find_places(tmp_path, {"HOME": str(tmp_path)}, db=yard.path))
    said: list[str] = []
    async with opened(app, "4", "g", size=(140, 40)) as pilot:
        said.append(await shown(app, pilot, "a\ufffd]0;owned\ufffd\ufffd[2J", "cannot be read"))
        await press(app, pilot, "j")
        said.append(screen_text(app))
        await press(app, pilot, "j")
        await press(app, pilot, "enter")
        said.append(await shown(app, pilot, "because a"))
        picture = app.export_screenshot()

    assert not set("".join(said)) & COMMANDS
    assert not set(picture) & (COMMANDS - {"\r"})
