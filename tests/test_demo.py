"""`make demo` as a user runs it, and every draftyard command of the README, on the real target model.

Takes both cores for some minutes, hence `alone`. What the demo has made is there for the rest: the converted target, the hidden
states, and the evidence of the ladder it has climbed.
"""

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from remote.rundir import RunDir
from remote.wire import Event, decode
from tests import sshd

ROOT = Path(__file__).resolve().parent.parent
DRAFTYARD = [sys.executable, "-m", "orchestrator.cli"]
README_COMMANDS = [
    line.split("#")[0].strip()
    for line in re.findall(r"^    (draftyard .*)$", (ROOT / "README.md").read_text(), flags=re.M)
]
README_COMMANDS.sort(key=lambda line: " stop " in line)  # last: the others are about a run that has succeeded

# What each of them must print, by the words that it begins with: what the README says that it shows.
SHOWS = {
    "doctor": r"^ok +reach +answers",
    "plan": r"^must fit .* GiB",
    "recipe list": r"^smollm2 +ce_kl +\S",
    "recipe show": r"^optim\.lr +\S",
    "recipe explain": r"smollm2\.yaml:\d+:\d+ +<- this one$",
    "deploy": r"^tree \w{16}, verified; ",
    "smoke": r"^checkpoint +passed|^every rung has passed",  # over SSH they were climbed just before
    "launch": r"^\w{8}$",
    "watch": "smollm2",
    "ls": r"^\w{8} +\w[\w ]* +smollm2 +ce +local ",
    "show": r"^state +\S",
    "logs": r"^step 8/8 ",
    "wait": r"^\w{8} +succeeded: ",
    "stop": r"^\w{8} +stopped: ",
    "export": r"^exported +local:(?P<folder>/.+/export)$",
}

PROMISED_S = {"rungs": 60, "conversion": 60, "hidden states": 90, "training": 120, "decoding": 90, "whole": 480}
# How a job tells of what a second demo finds made; the first one's words are looked for too, so that none of them is stale.
CONVERTING, COMPUTING = "converting the target", "computing hidden states"
ALL_PASSED = "every rung has passed"
SLOWER = 5  # the promises are of two quiet cores; docs/benchmarks.md has what was measured there

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(2700)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def environment(place: Path) -> Iterator[Mapping[str, str]]:
    """A user's own: nothing of the developer's data, threads as the recipe says. No run outlives the tests."""
    dropped = ("OMP_NUM_THREADS", "DRAFTYARD_DB")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    own = kept | {
        "XDG_DATA_HOME": str(place / "data"),
        "XDG_CONFIG_HOME": str(place / "config"),
        "DRAFTYARD_DB": str(place / "runs.db"),
        "PYTHONPATH": str(ROOT),
    }
    yield own
    for run in json.loads(said([*DRAFTYARD, "ls", "--kind", "all", "--json"], own, ROOT))["runs"]:
        if run["state"] in ("pending", "setting_up", "running"):
            said([*DRAFTYARD, "stop", run["id"], "--now"], own, ROOT)


def said(words: list[str], environment: Mapping[str, str], cwd: Path, timeout_s: float = 600) -> str:
    """What it prints, without what it says beside that on stderr; its exit code is 0."""
    done = subprocess.run(
        words, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def evaluations(page: dict[str, Any], **wanted: str) -> list[dict[str, Any]]:
    rows = page["evaluations"]
    return [row["values"] for row in rows if all(row["protocol"].get(key) == value for key, value in wanted.items())]


def refused_texts(rows: list[dict[str, Any]], num_prompts: int) -> list[dict[str, Any]]:
    """The decoded rows whose texts are not all the plain ones, near ties apart, or that left a prompt out."""

    def is_whole(values: dict[str, Any], protocol: dict[str, Any]) -> bool:
        num_good = values["texts_equal"] + values["near_ties"]
        return values["mismatches"] == 0 and num_good == num_prompts == protocol["num_prompts"]

    return [row for row in rows if "texts_equal" in row["values"] and not is_whole(row["values"], row["protocol"])]


def events_of(run: dict[str, Any]) -> list[Event]:
    path = RunDir(Path(run["workdir"]) / "runs" / run["id"]).attempt(1).events("rank0")
    return [decode(line) for line in path.read_bytes().splitlines()]


def progress_of(run: dict[str, Any]) -> set[str]:
    """What the job said that it was at."""
    return {str(event.fields["what"]) for event in events_of(run) if event.kind == "progress"}


def runs_of(environment: Mapping[str, str], *words: str) -> list[str]:
    found = json.loads(said([*DRAFTYARD, "ls", *words, "--json"], environment, ROOT))["runs"]
    return [run["id"] for run in found]


def phases(run: dict[str, Any], smoke: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part of the demo, as the jobs told them."""
    told = events_of(run)

    def begun(kind: str, **fields: str) -> float:
        return next(e for e in told if e.kind == kind and fields.items() <= e.fields.items()).monotonic_s

    loading, hidden = begun("stage", name="loading"), begun("progress", what=COMPUTING)
    training, evaluating = begun("stage", name="training"), begun("stage", name="evaluating")
    return {
        "rungs": (
            datetime.fromisoformat(smoke["ended_at"]) - datetime.fromisoformat(smoke["started_at"])
        ).total_seconds(),
        "conversion": hidden - loading,
        "hidden states": training - hidden,
        "training": evaluating - training,
        "decoding": told[-1].monotonic_s - evaluating,
    }


def against_promise(name: str, took_s: float) -> str:
    """`decoding 113.2 s, 1.26 times the 90 s promised to two quiet cores`: what is over its promise is never rounded into it."""
    promised_s = PROMISED_S[name]
    over = f"{took_s / promised_s:.2f} times the" if took_s > promised_s else "of"
    return f"{name} {took_s:.1f} s, {over} {promised_s} s promised to two quiet cores"


def test_make_demo_teaches_a_drafter_within_five_times_its_promise(
    place: Path, environment: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The claim: acceptance length, really decoded, at least 0.4 tokens over the untrained drafter's, intervals apart.

    The untrained drafter's rounds are replayed along the plain text; that this is what decoding gives but for near ties, `test_decode`
    holds.
    """
    started, load_before = time.monotonic(), os.getloadavg()[0]

    printed = said(["make", "demo"], environment, ROOT, timeout_s=SLOWER * PROMISED_S["whole"])

    seconds = time.monotonic() - started
    page = json.loads(said([*DRAFTYARD, "show", "@last", "--json"], environment, ROOT))
    (trained,) = evaluations(page, method="chain", drafter="trained")
    (untrained,) = evaluations(page, method="chain", drafter="untrained")
    assert page["run"]["state"] == "succeeded"
    assert trained["acceptance_length"] >= untrained["acceptance_length"] + 0.4
    assert trained["acceptance_length_low"] > untrained["acceptance_length_high"]
    decoded = {row["protocol"]["method"] for row in page["evaluations"] if "texts_equal" in row["values"]}
    assert decoded >= {"chain", "tree"}
    assert refused_texts(page["evaluations"], 8) == [], "each text is the plain one, near ties counted"
    assert {CONVERTING, COMPUTING} <= progress_of(page["run"])
    assert ALL_PASSED not in printed
    *_, smoke = json.loads(said([*DRAFTYARD, "ls", "kind:smoke", "--kind", "all", "--json"], environment, ROOT))["runs"]
    run = page["run"]
    took = phases(run, smoke) | {"whole": seconds}
    with capsys.disabled():
        told = "".join(f"\n  {against_promise(name, took[name])}" for name in took)
        load = f"load {load_before:.1f} before and {os.getloadavg()[0]:.1f} after; some 2 is the demo's own"
        sys.stdout.write(f"\nthe demo took, at a {load}:{told}\n")
    assert [name for name in took if took[name] > SLOWER * PROMISED_S[name]] == []
    assert f"newest on local: {run['workdir']}/runs/{run['id']}/checkpoints/step-00000700" in printed
    ending = printed[printed.index("\nNext\n") :]
    program = "draftyard" if shutil.which("draftyard") else ".venv/bin/draftyard"  # as a shell here finds it
    for command in (f"watch {run['id']}", f"show {run['id']}", "ls"):
        assert f"\n  {program} {command}" in ending
    said_last = [line for line in ending.rstrip().splitlines() if not line.startswith("make[")]  # of a make within make
    *_, brought, lies, _, _ = said_last  # on the screen when it ends, above a word on the shell
    assert brought.startswith(f"the drafter brings {trained['acceptance_length']:.2f} tokens a round [")
    assert brought.endswith(f"; untrained {untrained['acceptance_length']:.2f}")
    assert lies == f"its checkpoint, of step 700, on local: {run['workdir']}/runs/{run['id']}/checkpoints/step-00000700"


def test_a_second_demo_starts_in_seconds_and_ctrl_c_leaves_its_run_going(
    environment: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is set up, copied, smoked, converted or computed again; the key is typed at a terminal, so make gets it too.

    Shown by what it did, not by the clock: on a slow machine its imports take longer than all of that does on a quick one.
    """
    started, runs_before = time.monotonic(), runs_of(environment)
    assert len(runs_of(environment, "kind:smoke", "--kind", "all")) == 1

    printed, exit_code = on_a_terminal(["make", "demo"], environment, ROOT, once=b"training", keys=b"\x03")

    page = json.loads(said([*DRAFTYARD, "show", "@last", "--json"], environment, ROOT))
    run_id = page["run"]["id"]
    said([*DRAFTYARD, "stop", run_id], environment, ROOT)
    took_s = time.monotonic() - started
    with capsys.disabled():
        sys.stdout.write(f"\nthe second demo took {took_s:.0f} s to its first steps and the stop of its run\n")
    assert run_id not in runs_before
    assert ALL_PASSED in printed
    assert len(runs_of(environment, "kind:smoke", "--kind", "all")) == 1
    assert not {CONVERTING, COMPUTING} & progress_of(page["run"])
    assert "1 of 4, torch" not in printed
    assert "every file was there already" in printed
    assert exit_code != 0
    assert "Traceback" not in printed
    assert "***" not in printed  # what make says of an error
    assert f"draftyard wait {run_id}" in printed
    assert page["run"]["state"] == "running"


@pytest.fixture(scope="module")
def project(place: Path, environment: Mapping[str, str]) -> Path:
    """A user's project whose recipe `smollm2` is the bundled one with few steps and no decoding at the end."""
    folder = place / "project"
    (folder / "recipes").mkdir(parents=True)
    text = (ROOT / "recipes" / "smollm2.yaml").read_text()
    text = re.sub(r"num_steps: \d+", "num_steps: 8", text).replace("  evaluate:\n", "  evaluate:\n    at_end: false\n")
    (folder / "recipes" / "smollm2.yaml").write_text(text)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def test_the_bundled_trainer_goes_the_same_way_over_ssh(
    place: Path, project: Path, environment: Mapping[str, str]
) -> None:
    """A real OpenSSH server, its key known beforehand; the host's work folder has the target of the demo already.

    Runs of its own database: the demo's follower may still be there, and knows the hosts of where it was started.
    """
    environment = {**environment, "DRAFTYARD_DB": str(place / "ssh.db")}
    with sshd.running(place / "sshd", alias="box") as server:
        (project / "hosts.yaml").write_text(
            server.hosts_yaml(python=sys.executable, work_dir=str(place / "data" / "draftyard"))
        )
        for words in (["deploy"], ["smoke"], ["launch", "--follow"]):
            said([*DRAFTYARD, words[0], "smollm2", "--host", "box", *words[1:]], environment, project)
        page = json.loads(said([*DRAFTYARD, "show", "@last", "--json"], environment, project))
        steps = json.loads(said([*DRAFTYARD, "metrics", "@last", "loss", "--json"], environment, project))
        steps = steps["values"]["loss"]

    assert (page["run"]["host"], page["run"]["state"]) == ("box", "succeeded")
    assert [value["step"] for value in steps] == list(range(1, 9))
    assert page["checkpoints"]


@pytest.mark.parametrize("command", README_COMMANDS)
def test_each_command_of_the_readme_does_what_it_says(
    command: str, project: Path, environment: Mapping[str, str]
) -> None:
    words = [*DRAFTYARD, *shlex.split(command)[1:]]

    shows = shown_by(command)

    if words[3] == "watch":
        _, exit_code = on_a_terminal(words, environment, project, once=shows.encode(), keys=b"q")
        assert exit_code == 0
        return
    if words[3] == "stop":  # the newest run has ended: there must be something to stop
        said([*DRAFTYARD, "launch", "smollm2", "-b", "ce", "--host", "local"], environment, project)

    printed = said(words, environment, project)

    found = re.search(shows, printed, flags=re.M)
    assert found, printed[-3000:]
    if words[3] == "export":
        assert {"config.json", "model.safetensors"} <= {path.name for path in Path(found["folder"]).iterdir()}


def shown_by(command: str) -> str:
    (shows,) = [shows for words, shows in SHOWS.items() if command.startswith(f"draftyard {words}")]
    return shows


def on_a_terminal(
    words: list[str], environment: Mapping[str, str], cwd: Path, *, once: bytes, keys: bytes
) -> tuple[str, int]:
    """What a terminal of 120 by 40 shows until the program ends, and its exit code; `keys` are typed once `once` is seen."""
    pid, ours = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe(words[0], words, {**environment, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"})
    shown, typed, deadline = b"", False, time.monotonic() + 240
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the program closed its side
                break
            if not piece:
                break
            shown += piece
        if not typed and re.search(once, shown):
            os.write(ours, keys)
            typed = True
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(ours)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert typed, shown[-2000:]
    return shown.decode(errors="replace"), exit_code
