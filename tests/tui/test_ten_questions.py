"""The ten questions of a person who trains drafters, each answered in at most three keys from home at 80x24."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import Input

from orchestrator.actions.places import BUNDLED, Places, find_places
from orchestrator.store.rows import Document
from orchestrator.store.writes import Store
from tests.tui.golden import opened, press, shown
from tests.tui.world import SPEC, Yard
from tests.tui.yard import LIVE, UNREACHABLE
from tui.app import Draftyard
from tui.plain import screen_text

pytestmark = pytest.mark.slow  # a whole app a test

MOST_KEYS = 3
# Question -> keys from home, and what must stand on the screen: each pattern on one line.
QUESTIONS = {
    "which run is worst off": ("s", [r"^▌R\? qwen27b/v6 .*host unreachable for 25m"]),
    "why did the last one die": (
        "exclamation_mark",
        [r"O qwen3.6-27b/ddtree", r"GPU out of memory +stage backward, step 181", r"Tried to allocate 11.15 GiB"],
    ),
    "what would fit": (
        "exclamation_mark",
        [r"most that fits +[\d,]+ anchors × block 32", r"checkpoint each layer +[\d.]+ GiB +least [\d.]+ s a step +same result", r"[\d,]+ anchors +[\d.]+ GiB .*result differs"],
    ),
    "is it learning": ("j enter", [r"loss  1.609 nats, mean .*accuracy  0.5704 mean", r"4.65 ┤⡇ .* 0.600 ┤", r"1.51 ┤.*⣤⣤⣤ "]),
    "which side is the bottleneck": (
        "j enter",
        [r"bottleneck +the trainer: hidden", r"states wait for it", r"queue .*20 of 20 batches"],
    ),
    "when will it end and why did that move": (
        "j enter",
        [r"ends in 1d15h Wed 06:11", r"1h21m later than its mean pace: forward \+44 ms a step"],
    ),
    "who holds the memory of GPU 5": ("2", [r"GPU 5 .*84.3 of 95.0 GiB .*qwen27b/ddtree h7kq2mxd"]),
    "what did it print before it stopped": (
        "exclamation_mark 4",
        [r"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 11.15 GiB"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_question_is_answered_in_three_keys(
    question: str, yard_places: Places, open_app: Callable[..., Draftyard]
) -> None:
    keys, answer = QUESTIONS[question]
    app = open_app(places=yard_places)

    async with opened(app, *keys.split(), size=(80, 24)):
        text = screen_text(app)

    assert len(keys.split()) <= MOST_KEYS
    assert len(text.splitlines()) == 24
    for pattern in answer:
        assert re.search(pattern, text, re.MULTILINE), f"{pattern}:\n{text}"


async def test_what_differs_between_two_runs_is_answered_in_three_keys(
    yard_copy: Path, open_app: Callable[..., Draftyard]
) -> None:
    """What they were told differently, value by value; that their branches have other names is no difference of a run."""
    told = {"recipe": "qwen27b", "branch": "v6", "drafter": {**SPEC["drafter"], "block_size": 16},
            "loss": {**SPEC["loss"], "gamma": 7.0}}  # fmt: skip
    with Store(yard_copy) as store:
        store.keep_document(UNREACHABLE, Document.SPEC, json.dumps({**SPEC, **told}))
        store.keep_document(LIVE, Document.SPEC, json.dumps(SPEC))
    app = open_app(yard_copy)

    async with opened(app, "space", "space", "c", size=(80, 24)):
        text = screen_text(app)

    for pattern in (
        r"● qwen27b/v6  b4tw9rne",
        r"▲ qwen27b/ddtree  h7kq2mxd",
        r"Told differently",
        r"^ drafter.block_size +16 +32 *$",
        r"^ loss.gamma +7 +10 *$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern}:\n{text}"
    assert "num_layers" not in text  # alike in both


@pytest.mark.parametrize("branch", ["ce", "dpace"])
async def test_whether_a_branch_may_be_launched_is_answered_in_two_keys(
    branch: str, tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    """Asks the real gate about the branch of the run under the cursor, on the host of that run: this machine, where nothing of
    it has been smoked. What the answer is about stands above it."""
    path = yard_of(tmp_path, branch, host="local")
    app = open_app(path, places=places_of(tmp_path, path))

    async with opened(app, size=(80, 24)) as pilot:
        await pilot.press("4", "enter")
        text = await shown(app, pilot, "Launch is refused")

    assert f"▌smollm2/{branch}" in text
    assert re.search(rf"Gate ─+ smollm2/{branch} on local", text), text
    assert re.search(r"· fwd +missing", text), text
    assert "climbs what is missing" in text


async def test_a_host_that_nobody_knows_answers_for_the_run_s_branch_there(
    tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    """Not for this machine, which was asked whatever the run's host was."""
    path = yard_of(tmp_path, "ce", host="gpubox")
    app = open_app(path, places=places_of(tmp_path, path))

    async with opened(app, size=(120, 24)) as pilot:
        await pilot.press("4", "enter")
        text = await shown(app, pilot, "smollm2/ce on gpubox", "no host 'gpubox'")

    assert "Launch is" not in text


def yard_of(folder: Path, branch: str, *, host: str) -> Path:
    """A yard with one run of the bundled small recipe."""
    yard = Yard(folder / "runs.db")
    with yard.store:
        yard.run("v3wq7kdx", f"smollm2/{branch}", host=host)
    return yard.path


def places_of(folder: Path, db: Path) -> Places:
    return find_places(folder, {"HOME": str(folder), "XDG_DATA_HOME": str(folder / "data")}, db=db)


async def test_launch_opens_on_the_branch_under_the_cursor(
    yard_places: Places, open_app: Callable[..., Draftyard]
) -> None:
    """Whichever run it is, though its branch stands anywhere in the list; asked again of one run, it opens on its branch again."""
    app = open_app(places=yard_places)

    async with opened(app, *"jjjjjj4", size=(80, 24)) as pilot:
        await shown(app, pilot, "qwen3-8b/ce on pve-b", "▌qwen3-8b/ce")
        await press(app, pilot, "k")
        other = await shown(app, pilot, "looks at the host")
        await press(app, pilot, "1", "4")
        await shown(app, pilot, "qwen3-8b/ce on pve-b", "▌qwen3-8b/ce")
        await press(app, pilot, "1", "j", "4")
        await shown(app, pilot, "qwen3-8b/dpace on pve-b")

    assert "qwen3-8b/ce on" not in other


async def test_what_would_fit_of_a_planned_branch_is_answered_before_anything_is_asked(
    filled_yard: Path, tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    """Against the card of the host as it was last seen."""
    (tmp_path / "recipes").mkdir()
    shutil.copytree(BUNDLED / "presets", tmp_path / "recipes" / "presets")
    shutil.copy(BUNDLED / "qwen3.6-27b.yaml", tmp_path / "recipes" / "a.yaml")
    (tmp_path / "hosts.yaml").write_text("hosts:\n  pve-a: {address: pve-a}\n")
    places = find_places(tmp_path, {"HOME": str(tmp_path)}, db=filled_yard)
    app = open_app(places=places)

    async with opened(app, "2", "4", size=(140, 40)) as pilot:
        await shown(app, pilot, "looks at the host")
        app.screen.query_one("#host", Input).value = "pve-a"
        app.screen.query_one("#overrides", Input).value = "data.max_anchors=7900"
        text = await shown(app, pilot, "does not fit")

    assert "What would fit" in text
    assert "anchors × block 16" in text
