"""Each screen printed once, as text and as JSON: what a pipe gets."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.actions.places import Places
from orchestrator.errors import UsageError
from orchestrator.store.rows import Document
from orchestrator.verbs.frame import jsonable
from orchestrator.verbs.screen import NAMES
from tests.tui.world import Yard
from tests.tui.yard import DONE, LIVE, OOM
from tui.home import SCREENS
from tui.opening import run
from tui.run import TABS

Printed = Callable[..., str]
# Screen -> words of it, and what must hold of the same screen as JSON.
SHOWN: dict[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "runs": (("▌R? qwen27b/v6", "130k/240k"), lambda body: {LIVE, OOM} <= {run["id"] for run in body["runs"]}),
    "hosts": (("pve-a", "GPU 5", "84.3 of 95.0 GiB"), lambda body: "pve-a" in {host["name"] for host in body["hosts"]}),
    "smoke": (("fwd_bwd", "qwen27b/ddtree"), lambda body: "multi_doc" in {rung["rung"] for rung in body["evidence"]}),
    "launch": (("smollm2/", "overrides", "local"), lambda body: body["wish"]["recipe"] in {offer["recipe"] for offer in body["offers"]}),
    "overview": (("R running", "bottleneck", "would have ended"), lambda body: body["detail"]["run"]["step"] == 130_000),
    "curves": (("grad_norm", "step_s"), lambda body: "loss" in {row["name"] for row in body["detail"]["series"]}),
    "memory": (("backward", "GPU 5", "83.9"), lambda body: body["detail"]["peaks"][0]["gpu"] == 5),
    "log": (("NCCL ring of 3 is up", "following"), lambda body: "converted 851 tensors" in [line["text"] for line in body["log"]["lines"]]),
    "failure": (("GPU out of memory", "most that fits", "drafter_loss"), lambda body: body["detail"]["failures"][0]["kind"] == "gpu_oom"),
    "spec": (("num_steps", "captured_layers"), lambda body: body["detail"]["spec"]["drafter"]["block_size"] == 32),
    "files": (("step-00000400", "2.24"), lambda body: body["detail"]["checkpoints"][0]["step"] == 400),
}  # fmt: skip
OF = {"failure": OOM, "files": DONE}  # every other tab of the live one


@pytest.fixture
def printed(yard_places: Places, capsys: pytest.CaptureFixture[str]) -> Printed:
    def once(**settings: Any) -> str:
        assert run(yard_places.db, places=yard_places, once=True, size=(160, 60), **settings) == 0
        return capsys.readouterr().out

    return once


def told(printed: Printed, **settings: Any) -> Any:
    """What `--json` says, as it is read again."""
    bodies: list[str] = []
    printed(document=lambda **body: bodies.append(json.dumps(jsonable(body), allow_nan=False)), **settings)
    return json.loads(bodies[0])


def test_every_screen_can_be_named() -> None:
    assert (*SCREENS, *TABS) == NAMES
    assert SHOWN.keys() == set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_screen_is_printed_as_text_and_as_json(name: str, printed: Printed) -> None:
    words, holds = SHOWN[name]
    settings = {"screen": name, "runs": (OF.get(name, LIVE),) if name in TABS else ()}

    text = printed(**settings)
    body = told(printed, **settings)

    assert [word for word in words if word not in text] == [], text
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 60
    assert holds(body), body


@pytest.mark.slow
def test_a_run_that_is_named_is_printed_without_a_screens_name(printed: Printed) -> None:
    assert "bottleneck" in printed(runs=(LIVE[:5],))
    assert told(printed, runs=(LIVE,))["detail"]["run"]["id"] == LIVE


@pytest.mark.slow
def test_several_runs_are_printed_compared(printed: Printed) -> None:
    text = printed(runs=(LIVE, OOM))
    body = told(printed, runs=(LIVE, OOM))

    assert "Told differently" in text
    assert "qwen3.6-27b/ddtree" in text
    assert [detail["run"]["id"] for detail in body["compared"]] == [LIVE, OOM]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "screen", "words"),
    [
        ((), "log", "name it, as in draftyard watch @last --screen log"),
        ((LIVE, OOM), "log", "shows one run"),
        ((LIVE,), "hosts", f"leave {LIVE} out"),
        ((LIVE,) * 7, None, "at most 6 are compared"),
    ],
)
def test_a_screen_that_does_not_go_with_the_runs_is_refused(
    runs: tuple[str, ...], screen: str | None, words: str, filled_yard: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        run(filled_yard, runs=runs, screen=screen, once=True)


@pytest.mark.slow
def test_the_verb_prints_the_screen_that_it_was_asked_for(filled_yard: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "watch", "--db", str(filled_yard)]
    environ = {**os.environ, "LANG": "C.UTF-8", "COLUMNS": "100", "LINES": "30"}

    hosts = subprocess.run(
        [*command, "--screen", "hosts", "--once"], capture_output=True, text=True, env=environ, timeout=60
    )
    log = subprocess.run(
        [*command, LIVE, "--screen", "log", "--json"], capture_output=True, text=True, env=environ, timeout=60
    )

    assert (hosts.returncode, hosts.stderr) == (log.returncode, log.stderr) == (0, "")
    assert "GPU 5" in hosts.stdout
    assert json.loads(log.stdout)["log"]["run_id"] == LIVE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "screen"), [((LIVE, OOM), None), ((LIVE,), "spec"), ((), "runs"), ((), "hosts"), ((LIVE,), "log")]
)
def test_a_print_has_no_scroll_bar_and_says_what_it_leaves_out(
    runs: tuple[str, ...], screen: str | None, yard_places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lone `▃` stood at the right edge of the plain text, and nothing said that most of the table was cut."""

    def printed(lines: int) -> list[str]:
        assert run(yard_places.db, places=yard_places, once=True, runs=runs, screen=screen, size=(100, lines)) == 0
        text = capsys.readouterr().out
        return re.sub(r"\d\d:\d\d$", "", text, count=1, flags=re.MULTILINE).splitlines()  # the time of day

    cut, needed = printed(14), 14
    if (found := re.search(r"^ (\d+) lines? more: LINES=(\d+) prints", cut[-1])) is not None:
        needed = int(found[2])
        whole = printed(needed)

        assert int(found[1]) == needed - 14 > 0
        assert "more: LINES=" not in "".join(whole)
        assert cut[:-1] == whole[: len(cut) - 1]
    assert (found is None) == (screen == "log")  # its end is what it shows, and its beginning a key away
    assert [line for line in cut if re.search(r"[▁-█]$", line.rstrip()) and len(line.rstrip()) == 100] == []


@pytest.mark.slow
def test_what_no_print_has_room_for_is_left_out_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond the lines that a screen may have nothing was said, and a spec looked as if it were whole."""
    yard = Yard(tmp_path / "runs.db")
    settings = {f"key{number:04}": str(number) for number in range(5000)}
    with yard.store as store:
        yard.run("aaaawq7k", "smollm2/ce")
        store.keep_document("aaaawq7k", Document.SPEC, json.dumps({"entry": "script", "settings": settings}))

    assert run(yard.path, once=True, runs=("aaaawq7k",), screen="spec", size=(100, 30)) == 0

    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r" 4,9\d\d lines more; one print has 4,096 at most", last), last
