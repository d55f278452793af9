"""What a screen tells to type outside is spelled as the shell at hand finds the program; what others wrote stays as it is."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.actions.places import Places
from orchestrator.cli import GROUPS
from orchestrator.store.rows import FailureRow, State
from orchestrator.store.writes import Store
from tests.tui.golden import opened, press, shown, walk
from tests.tui.test_launch import places_of
from tests.tui.world import NOW_S, Yard
from tui import outside
from tui.app import Draftyard
from tui.opening import run
from tui.plain import screen_text
from tui.runs_rows import trouble
from tui.snapshot import RunNumbers

pytestmark = pytest.mark.slow  # a whole app a test

PROGRAM = ".venv/bin/draftyard"
VERBS = "|".join(name for verbs in GROUPS.values() for name in verbs)
PLAIN = re.compile(
    rf"(?<![\w./~-])draftyard(?: |\s*\n\s*)(?:--\w|(?:{VERBS})\b)"
)  # as no shell here finds it; lines are broken anywhere


def spelled(text: str) -> str:
    return PLAIN.sub(lambda found: found[0].replace("draftyard", PROGRAM), text)


@pytest.fixture(autouse=True)
def _not_on_path() -> Iterator[None]:
    outside.spell_with(spelled)
    yield
    outside.spell_with(str)


async def test_no_screen_tells_a_command_that_the_shell_would_not_find(
    yard_places: Places, open_app: Callable[..., Draftyard]
) -> None:
    app = open_app(places=yard_places)
    plain: dict[str, list[str]] = {}
    commands = 0
    async with opened(app, size=(140, 60)) as pilot:
        async for name in walk(app, pilot):
            plain[name] = PLAIN.findall(screen_text(app))
            commands += screen_text(app).count(PROGRAM)

    assert {name: found for name, found in plain.items() if found} == {}
    assert commands >= 1  # that of the files


async def test_an_empty_yard_s_screens_say_what_works_here(tmp_path: Path, open_app: Callable[..., Draftyard]) -> None:
    with Store(tmp_path / "runs.db"):
        pass
    app = open_app(tmp_path / "runs.db")
    async with opened(app, size=(80, 24)) as pilot:
        for key, command in {"1": "smoke RECIPE", "2": "doctor HOST", "3": "smoke RECIPE"}.items():
            await press(app, pilot, key)
            text = " ".join((await shown(app, pilot, PROGRAM)).split())

            assert f"{PROGRAM} {command}" in text
            assert PLAIN.findall(text) == []


async def test_what_ended_a_launch_is_told_with_a_repair_that_works_here_and_a_job_s_words_as_they_are(
    tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    yard = Yard(tmp_path / "runs.db")
    evidence = "never started: box lacks gguf\n  repair: draftyard doctor box --fix"
    with yard.store as store:
        yard.run("aaaawq7k", "smollm2/ce")
        yard.state("aaaawq7k", State.FAILED, evidence=evidence)
        yard.run("bbbbwq7k", "smollm2/ce")
        hint = "draftyard logs bbbbwq7k has more"
        failure = FailureRow(
            "bbbbwq7k",
            1,
            "error",
            "draftyard launch was called",
            hint,
            "rank0",
            None,
            None,
            "draftyard ls",
            {},
            NOW_S,
            True,
        )
        store.replace_failures("bbbbwq7k", 1, [failure])
        yard.state("bbbbwq7k", State.FAILED, reason="exit:1")
    refused = open_app(yard.path, run="aaaawq7k", screen="failure")
    failed = open_app(yard.path, run="bbbbwq7k", screen="failure")
    async with opened(refused) as pilot:
        await shown(refused, pilot, f"repair: {PROGRAM} doctor box --fix")
    async with opened(failed) as pilot:
        text = await shown(failed, pilot, f"{PROGRAM} logs bbbbwq7k")

    assert "draftyard launch was called" in text
    assert f"{PROGRAM} launch" not in text
    assert f"{PROGRAM} ls" not in text


@pytest.mark.parametrize("screen", ["overview", "failure"])
async def test_what_a_person_wrote_of_a_run_stays_as_it_was_written(
    screen: str, tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    """A person's word over a run is its evidence, and a job's words stand in it: commands in them are nobody's repair."""
    yard = Yard(tmp_path / "runs.db")
    with yard.store as store:
        yard.run("aaaawq7k", "smollm2/ce")
        store.mark("aaaawq7k", State.LOST, why="their box said: draftyard launch tiny")
        yard.run("bbbbwq7k", "smollm2/ce")
        evidence = "never started: box says that draftyard launch is old\n  repair: draftyard doctor box --fix"
        yard.state("bbbbwq7k", State.FAILED, evidence=evidence)
        listed = [trouble(store.reader.run(name), RunNumbers(), NOW_S)[1] for name in ("aaaawq7k", "bbbbwq7k")]
    marked = open_app(yard.path, run="aaaawq7k", screen=screen)
    async with opened(marked) as pilot:
        text = await shown(marked, pilot, "their box said")

    assert "their box said: draftyard launch tiny" in " ".join(text.split())
    assert listed == [
        "lost: marked by hand: their box said: draftyard launch tiny (it was pending, and no host was asked)",
        f"never started: box says that draftyard launch is old; repair: {PROGRAM} doctor box --fix",
    ]


async def test_a_toast_and_a_copied_command_are_spelled_so(
    open_app: Callable[..., Draftyard], yard_places: Places
) -> None:
    app = open_app(places=yard_places)
    async with opened(app, size=(120, 40)) as pilot:
        app.notify("it is in the bin; draftyard restore k7f3 takes it out again")
        await shown(app, pilot, f"{PROGRAM} restore k7f3")
        await press(app, pilot, "colon", *"import", "enter")

        assert app.clipboard.startswith(f"{PROGRAM} import")


def test_a_document_is_for_programs_and_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(tmp_path / "runs.db"):
        pass
    told: list[str] = []

    run(tmp_path / "runs.db", document=lambda **body: told.append(repr(body)), spell=spelled)
    run(tmp_path / "runs.db", once=True, spell=spelled, places=places_of(tmp_path, tmp_path / "runs.db"))

    assert f"{PROGRAM} smoke RECIPE" in capsys.readouterr().out
    assert PROGRAM not in told[0]
