"""The ten questions of a person who trains drafters, each answered in at most three keys from home at 80x24."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import Input

from orchestrator.actions.places import BUNDLED, Places, find_places
from tests.tui.golden import opened, press, shown
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
        [r"most that fits +[\d,]+ anchors × block 32", r"checkpoint each layer +[\d.]+ GiB +×1\.[12]\d work +same result", r"1,024 anchors .*changes the result"],
    ),
    "is it learning": ("j enter", [r"loss  1.575 nats .*accuracy  0.5709", r"4.65 ┤⡇ .* 0.600 ┤", r"1.51 ┤.*⣤⣤⣤ "]),
    "which side is the bottleneck": (
        "j enter",
        [r"bottleneck +the trainer: hidden", r"states wait for it", r"queue .*20 of 20 batches"],
    ),
    "when will it end and why did that move": (
        "j enter",
        [r"ends in 1d15h Wed 06:11", r"1h21m later than its mean pace: forward \+44 ms a step"],
    ),
    "who holds the memory of GPU 5": ("2", [r"GPU 5 .*84.3 of 95.0 GiB .*qwen27b/ddtree h7kq2mxd"]),
    "what differs between these two runs": (
        "space space c",
        [r"● qwen27b/v6  b4tw9rne", r"▲ qwen27b/ddtree  h7kq2mxd", r"Told differently", r"^ branch +v6 +ddtree"],
    ),
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


@pytest.mark.slow
async def test_whether_a_branch_may_be_launched_is_answered_in_two_keys(
    filled_yard: Path, tmp_path: Path, open_app: Callable[..., Draftyard]
) -> None:
    """Asks the real gate about the real machine; nothing has been smoked for it, so the answer is no."""
    places = find_places(tmp_path, {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}, db=filled_yard)
    app = open_app(places=places)

    async with opened(app, "4", size=(80, 24)) as pilot:
        await shown(app, pilot, "looks at the host")
        await pilot.press("enter")
        text = await shown(app, pilot, "Launch is refused")

    assert "climbs what is missing" in text, text


async def test_launch_opens_on_the_branch_under_the_cursor(
    yard_places: Places, open_app: Callable[..., Draftyard]
) -> None:
    """Whichever run it is, though its branch stands anywhere in the list; coming back, what was chosen there stays."""
    app = open_app(places=yard_places)

    async with opened(app, *"jjjjjj4", size=(80, 24)) as pilot:
        await shown(app, pilot, "qwen3-8b/ce on local", "▌qwen3-8b/ce")
        await press(app, pilot, "k")
        other = await shown(app, pilot, "looks at the host")
        await press(app, pilot, "1", "4")
        assert "▌qwen3-8b/ce" not in screen_text(app)
        await press(app, pilot, "1", "j", "4")
        await shown(app, pilot, "qwen3-8b/dpace on local")

    assert "qwen3-8b/ce on local" not in other


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

    async with opened(app, "4", size=(140, 40)) as pilot:
        await shown(app, pilot, "looks at the host")
        app.screen.query_one("#host", Input).value = "pve-a"
        app.screen.query_one("#overrides", Input).value = "data.max_anchors=7900"
        text = await shown(app, pilot, "does not fit")

    assert "What would fit" in text
    assert "anchors × block 16" in text
