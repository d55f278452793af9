"""From an order to a run, on the real host `local`, with the real follower."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from orchestrator.nearest import listed
from orchestrator.recipe import known_recipes
from remote.rundir import RunDir
from remote.spec import DrafterSpec, LifeSpec, TargetSpec
from tests import sshd
from tests.orchestrator.yard import RECIPE, Yard, end
from tests.remote.conftest import make_tiny_folder
from tests.remote.jobs import ANSWERS, tiny_job_spec, write_data

pytestmark = pytest.mark.slow  # real runs

ROOT = Path(__file__).resolve().parents[2]


def _smoked(yard: Yard) -> None:
    assert yard.run("smoke", "tiny") == 0, yard.out + yard.err


@pytest.fixture(params=["local", "box"])
def host(request: pytest.FixtureRequest, yard: Yard, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A host's name and its work folder: this machine, or one behind a real OpenSSH server whose key is known beforehand."""
    if request.param == "local":
        yield "local", str(yard.root / "data" / "draftyard")
        return
    work_dir = str(tmp_path / "there")
    with sshd.running(tmp_path / "sshd", alias="box") as server:
        hosts = server.hosts_yaml(python=sys.executable, work_dir=work_dir)
        (yard.root / "hosts.yaml").write_text(hosts, encoding="utf-8")
        yield "box", work_dir
        end(yard)  # while the host still answers


@pytest.mark.slow
def test_the_whole_way_deploy_smoke_launch_show_logs(yard: Yard, host: tuple[str, str]) -> None:
    """The same here and over SSH with strict host keys: every step, every line and every value arrive."""
    at = ("--host", host[0])
    assert yard.json("deploy", "tiny", *at)["deployed"]["was_there"] is False
    assert yard.json("deploy", "tiny", *at)["deployed"]["sent_files"] == 0
    assert yard.run("smoke", "tiny", *at) == 0, yard.out + yard.err
    assert "quick" in yard.out
    assert "passed" in yard.out

    assert yard.run("launch", "tiny", *at, "--follow") == 0, yard.err

    page = yard.json("show", "@last")
    assert (page["run"]["state"], page["run"]["step"]) == ("succeeded", 5)
    assert (page["run"]["host"], page["run"]["workdir"]) == host
    assert page["spec"]["settings"]["num_steps"] == "5"
    assert page["run"]["fingerprint"]
    assert [item["step"] for item in page["checkpoints"]] == [5]
    assert yard.run("logs", "@last") == 0
    assert yard.out.splitlines() == [f"step {step}" for step in range(1, 6)]
    values = yard.json("metrics", "@last", "loss")["values"]["loss"]
    assert [item["step"] for item in values] == [1, 2, 3, 4, 5]
    assert [item["value"] for item in values] == [2.0, None, pytest.approx(2 / 3), 0.5, 0.4]
    assert values[1]["value_flag"] == "nan"
    assert yard.json("doctor", host[0], code=yard.run("doctor", host[0]))["findings"][0]["is_good"]


def test_prepare_makes_the_answers_on_its_host_and_keeps_them_with_the_run(yard: Yard, tmp_path: Path) -> None:
    """With the bundled trainer and a target of six layers."""
    target = TargetSpec(str(make_tiny_folder(tmp_path / "target")), 48, 6, 260, True, 151_536, 2, 0)
    drafter = DrafterSpec(2, 64, 4, 2, 16, [1, 2, 4], 4, 3, 1e4, 2048)
    spec = tiny_job_spec(target, drafter, data={"hidden_states": "online", "answer_tokens": 4})
    base = {key: value for key, value in asdict(spec).items() if key not in ("recipe", "branch", "why", "tags")}
    yard.edit("asked.yaml", json.dumps({"name": "asked", "why": "x", "base": base, "branches": {"main": {"why": "x"}}}))
    data = write_data(yard.root / "recipes" / "data")
    (data / ANSWERS).unlink()

    assert yard.run("prepare", "asked", "--host", "local") == 0, yard.out + yard.err

    page = yard.json("show", yard.json("ls", "kind:prepare", "--kind", "all")["runs"][0]["id"])
    run, attempt = page["run"], RunDir(yard.folder(page["run"]["id"])).attempt(1)
    assert (run["kind"], run["state"], run["host"]) == ("prepare", "succeeded", "local")
    (made,) = (yard.root / "data" / "draftyard" / "cache" / "answers").glob("*.jsonl")
    assert (attempt.artifacts / ANSWERS).read_bytes() == made.read_bytes()
    rows = [json.loads(line)["messages"] for line in made.read_text().splitlines()]
    assert rows, "what was answered with nothing is left out; of a random target that is some"
    assert {asked["content"] for asked, _ in rows} <= {f"count {number}" for number in range(8)}
    assert {answer["role"] for _, answer in rows} == {"assistant"}


def test_a_launch_without_evidence_is_refused_with_the_one_repairing_command(yard: Yard) -> None:
    assert yard.run("launch", "tiny") == 3

    assert "quick: missing" in yard.err
    assert "repair: draftyard smoke tiny -b main --host local" in yard.err
    assert yard.json("ls", "--kind", "all")["runs"] == []


@pytest.mark.slow
def test_what_the_recipe_names_and_git_ignores_is_said_before_anything_is_sent(yard: Yard) -> None:
    job = yard.root / "recipes" / "job"
    (job / "prompts").mkdir()
    for name in ("secret.json", "data.bin", "prompts/a.jsonl", "also.txt", "unnamed.bin"):
        (job / name).write_text("{}", encoding="utf-8")
    (job / ".gitignore").write_text("*.json\n*.bin\nprompts/\n", encoding="utf-8")
    yard.edit(
        "tiny.yaml",
        RECIPE.replace('"train.py"]', '"train.py", "--config=secret.json", also.txt, absent.bin]').replace(
            'sleep_s: "0"}', 'sleep_s: "0", data: data.bin, prompts: prompts/}', 1
        ),
    )

    for words in (("deploy", "tiny"), ("launch", "tiny"), ("launch", "tiny", "--dry-run")):
        yard.run(*words)
        said = [line for line in yard.err.splitlines() if "git ignores" in line]
        assert [line.split()[4].strip(",") for line in said] == ["data.bin", "prompts", "secret.json"], words
        assert "git add -f data.bin" in said[0]


@pytest.mark.slow
def test_the_repairing_command_repairs(yard: Yard) -> None:
    refused = yard.json("launch", "tiny", "-b", "main", "--set", "settings.num_steps=2", code=3)
    repair = refused["error"]["repair"].split()

    assert repair[0] == "draftyard"
    assert yard.run(*repair[1:]) == 0
    assert yard.run("launch", "tiny", "--set", "settings.num_steps=2", "--follow") == 0


@pytest.mark.slow
def test_what_has_passed_is_not_climbed_again_unless_it_is_asked_for(yard: Yard) -> None:
    _smoked(yard)

    assert yard.json("smoke", "tiny")["skipped"] is True
    assert yard.run("smoke", "tiny", "--set", "why=again") == 0
    assert "next: draftyard launch tiny --host local --set why=again    (--again" in yard.err
    assert len(yard.json("ls", "--kind", "smoke")["runs"]) == 1
    assert yard.run("smoke", "tiny", "--again") == 0
    assert len(yard.json("ls", "--kind", "smoke")["runs"]) == 2


@pytest.mark.slow
def test_an_edit_after_the_smoke_refuses_and_names_what_changed(yard: Yard) -> None:
    _smoked(yard)
    (yard.root / "recipes" / "job" / "quick.py").write_text("print('edited')\n", encoding="utf-8")

    assert yard.run("launch", "tiny") == 3

    assert "changed since: the shipped tree" in yard.err


@pytest.mark.slow
def test_a_cosmetic_edit_changes_nothing(yard: Yard) -> None:
    _smoked(yard)
    yard.edit("tiny.yaml", RECIPE.replace("The shortest job there is.", "Said otherwise."))

    assert yard.run("launch", "tiny", "--follow") == 0, yard.err


@pytest.mark.slow
def test_a_failed_rung_refuses_in_its_own_words_and_force_is_kept_for_ever(yard: Yard) -> None:
    (yard.root / "recipes" / "job" / "quick.py").write_text("raise ValueError('too slow')\n", encoding="utf-8")
    assert yard.run("smoke", "tiny") == 10
    assert "ValueError: too slow" in yard.out

    assert yard.run("launch", "tiny") == 3
    assert "quick: failed for exactly this" in yard.err
    assert "too slow" in yard.err

    assert yard.run("launch", "tiny", "--force", "the rung is wrong", "--follow") == 0
    assert "forced past the gate" in yard.err
    assert yard.json("show", "@last")["run"]["forced_reason"] == "the rung is wrong"
    assert yard.run("launch", "tiny", "--force", " ") == 2


OOM = """\
import sys
print("step 1", flush=True)
sys.stderr.write('''Traceback (most recent call last):
  File "/srv/job/train.py", line 88, in forward
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 45.64 GiB. GPU 0 has a total capacity of 94.97 GiB of which 20.10 GiB is free.
''')
sys.exit(1)
"""


@pytest.mark.slow
def test_the_first_users_story_ends_before_the_launch(yard: Yard) -> None:
    """Forward passes, forward and backward does not fit: the launch is refused and leads to the page that explains it."""
    yard.edit(
        "tiny.yaml",
        RECIPE.replace("rungs: [quick]", "rungs: [fwd, fwd_bwd]").replace(
            "scripts: {quick: quick.py}", "scripts: {fwd: quick.py, fwd_bwd: oom.py}"
        ),
    )
    (yard.root / "recipes" / "job" / "oom.py").write_text(OOM, encoding="utf-8")
    assert yard.run("smoke", "tiny") != 0

    assert yard.run("launch", "tiny") == 3

    (link,) = set(re.findall(r"draftyard show \w+ --oom", yard.err))
    assert "fwd: passed" not in yard.err
    assert "fwd_bwd: failed for exactly this" in yard.err
    assert yard.run(*shlex.split(link)[1:]) == 0
    assert "45.64 GiB" in yard.out
    assert "math kernel" in yard.out
    assert "scaled_dot_product_attention(query" in yard.out, "the traceback is whole"


def test_a_rehearsal_writes_nothing(yard: Yard) -> None:
    told = yard.json("launch", "tiny", "--dry-run", code=3)

    assert told["allowed"] is False
    assert told["rehearsal"]["verdict"]["rungs"][0]["standing"] == "missing"
    assert yard.run("launch", "tiny", "--dry-run") == 3
    assert "repair: draftyard smoke tiny -b main --host local" in yard.err
    assert yard.run("launch", "tiny", "--dry-run", "--force", "a test") == 0
    assert "shut, and forced" in yard.out
    assert not (yard.root / "runs.db").exists()


def test_a_recipe_without_rungs_says_that_nothing_was_tested(yard: Yard) -> None:
    yard.edit("tiny.yaml", RECIPE.replace("rungs: [quick]", "rungs: []"))

    assert yard.run("launch", "tiny", "--dry-run") == 0

    assert "open: the recipe names no rungs (smoke.rungs): nothing of it was tested" in yard.out


def test_a_tag_that_no_filter_finds_is_refused_at_the_launch_too(yard: Yard) -> None:
    for word in ("two words", "a,b"):
        assert yard.run("launch", "tiny", "--tag", word) == 2
        assert "a tag is one word without commas" in yard.err

    assert not (yard.root / "runs.db").exists()


@pytest.fixture
def contacted(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once anybody has asked `ssh` for the way to the host `box`, as every contact with one does."""
    mark, ssh = yard.root / "contacted", yard.root / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$@" >>{shlex.quote(str(mark))}\nexit 255\n', encoding="utf-8")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    (yard.root / "hosts.yaml").write_text("hosts: {box: {address: 127.0.0.1, port: 9}}\n", encoding="utf-8")
    return mark


VERBS_OF_A_RECIPE = ("deploy", "smoke", "launch", "prepare", "plan")
WRONG_WORDS = {
    "recipe": (["smollm", "--host", "box"], "no recipe 'smollm'; known: {recipes}; did you mean 'smollm2'?"),
    "branch": (
        ["tiny", "-b", "mian", "--host", "box"],
        "recipes/tiny.yaml: branches: no branch 'mian'; known: main, slow, broken, oom; did you mean 'main'?",
    ),
    "key": (
        ["tiny", "--set", "life.grace=1", "--host", "box"],
        "life.grace: no key 'grace'; known: {life}; did you mean 'grace_s'?",
    ),
    "host": (["smollm2", "--host", "bxo"], "no host 'bxo'; known: local, box; did you mean 'box'?"),
}


@pytest.mark.parametrize("kind", WRONG_WORDS)
def test_a_wrong_word_is_told_in_one_line_and_no_host_is_contacted(yard: Yard, contacted: Path, kind: str) -> None:
    """What was seen, what is known and the nearest, alike whatever the word is for."""
    words, told = WRONG_WORDS[kind]
    recipes = listed("smollm", known_recipes(yard.root))
    told = told.format(recipes=recipes, life=listed("grace", [field.name for field in fields(LifeSpec)]))

    for verb in VERBS_OF_A_RECIPE:
        assert yard.run(verb, *words) == 2
        (line,) = yard.err.splitlines()
        assert line.startswith("error: ")
        assert line.endswith(told), verb

    assert not contacted.exists()
    assert not (yard.root / "runs.db").exists()


def test_a_wrong_rung_is_told_in_one_line_and_no_host_is_contacted(yard: Yard, contacted: Path) -> None:
    assert yard.run("smoke", "tiny", "quik", "--host", "box") == 2
    assert yard.err == "error: no rung 'quik'; known: quick; did you mean 'quick'?\n"
    assert not contacted.exists()
    assert not (yard.root / "runs.db").exists()

    assert yard.run("smoke", "tiny", "quick", "--host", "box") == 4
    assert contacted.exists(), "the right word contacts it, so a contact would have been seen"


def test_a_host_that_does_not_answer_is_exit_4_and_the_row_says_so(yard: Yard) -> None:
    (yard.root / "hosts.yaml").write_text(
        "hosts:\n  dark: {address: 127.0.0.1, port: 9, user: nobody}\n", encoding="utf-8"
    )

    assert yard.run("launch", "tiny", "--host", "dark") == 4

    row = yard.json("show", "@last")["run"]
    assert (row["state"], row["reason"]) == ("failed", "unreachable")
    assert yard.json("doctor", "dark", code=4)["findings"][0]["name"] == "reach"


def test_a_missing_dependency_is_named_with_the_command_that_installs_it(yard: Yard) -> None:
    bare = yard.root / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    (yard.root / "hosts.yaml").write_text(f"hosts:\n  local: {{python: '{bare}/bin/python'}}\n", encoding="utf-8")

    assert yard.run("launch", "smollm2") == 1

    assert "torch is not installed" in yard.err
    assert f"{bare}/bin/python" in yard.err
    assert "-m pip install 'torch>=" in yard.err
    row = yard.json("show", "@last")["run"]
    assert (row["state"], row["reason"]) == ("failed", "missing_dependency")


@pytest.mark.slow
def test_a_run_that_breaks_is_shown_with_its_whole_traceback(yard: Yard) -> None:
    assert yard.run("smoke", "tiny", "-b", "broken") == 0
    assert yard.run("launch", "tiny", "-b", "broken", "--follow") == 10

    assert yard.run("show", "@failed") == 0
    assert "ZeroDivisionError: division by zero" in yard.out
    assert 'File "' in yard.out
    assert "train.py" in yard.out
    assert yard.run("show", "@failed", "--oom") == 0
    assert "ZeroDivisionError" in yard.out


@pytest.mark.slow
def test_out_of_host_memory_has_an_exit_code_of_its_own(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "-b", "oom", "--force", "a test", "--follow") == 12

    page = yard.json("show", "@failed")
    assert page["run"]["reason"] == "host_oom"
    (failure,) = page["failures"]
    assert failure["facts"]["limit_bytes"] == 512 * 2**20
    assert 0 < failure["facts"]["peak_bytes"] < 512 * 2**20  # in use when it asked: what was refused was never filled
    assert failure["facts"]["frame"]["source"].startswith("hoard = bytearray(2 * limit)")
    assert failure["traceback"].startswith("Traceback (most recent call last):\n")
    assert failure["traceback"].rstrip().endswith("\nMemoryError")
    assert yard.run("show", "@failed", "--oom") == 0
    assert failure["traceback"].rstrip() in yard.out, "the traceback is whole"
    assert re.search(r"^limit +0\.50 GiB$", yard.out, re.MULTILINE)
    assert re.search(r"^peak +[\d.]+ MiB$", yard.out, re.MULTILINE)
    assert f"train.py:{failure['facts']['frame']['line']}, attempt 1" in yard.out
    assert "life.memory_limit_bytes" in yard.out


@pytest.mark.slow
def test_the_bundled_example_of_a_script_of_ones_own_passes_its_rung_and_trains(yard: Yard) -> None:
    assert len((ROOT / "recipes" / "examples" / "own" / "train.py").read_text().splitlines()) <= 30
    assert yard.run("smoke", "own-script", "-b", "fast") == 0, yard.out + yard.err
    assert yard.run("launch", "own-script", "-b", "fast", "--follow") == 0, yard.out + yard.err

    page = yard.json("show", "@last")
    assert (page["run"]["recipe"], page["run"]["branch"], page["run"]["state"]) == ("own-script", "fast", "succeeded")
    assert (page["run"]["step"], page["run"]["num_steps"]) == (40, 40)
    (climbed,) = yard.json("evidence", "own-script")["evidence"]
    assert (climbed["rung"], climbed["branch"], climbed["passed"]) == ("three_steps", "fast", True)
    losses = yard.json("metrics", "@last", "loss")["values"]["loss"]
    assert [item["step"] for item in losses] == list(range(1, 41))
    assert losses[-1]["value"] < losses[0]["value"] / 10


@pytest.mark.slow
def test_stop_ends_a_run_and_wait_says_13(yard: Yard) -> None:
    run_id = yard.json("launch", "tiny", "-b", "slow", "--force", "a test")["run"]
    assert yard.run("wait", run_id, "--timeout", "0.2s") == 6
    assert yard.json("wait", run_id, "--timeout", "0.2s", code=6)["error"]["reason"] == "not_finished"

    assert yard.run("stop", run_id) == 0

    assert "stopped" in yard.out
    assert yard.run("wait", run_id) == 13
    assert yard.run("logs", run_id, "-f", "-n", "1") == 13
    assert yard.run("stop", run_id) == 1


@pytest.mark.slow
def test_resume_makes_a_second_attempt_with_the_same_tree(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "--force", "a test", "--follow") == 0
    assert yard.run("resume", "@last") == 1
    assert "has succeeded; nothing of it is left to do" in yard.err
    assert yard.run("mark", "@last", "stopped", "once more") == 0
    (yard.root / "recipes" / "job" / "train.py").write_text("raise SystemExit(3)\n", encoding="utf-8")

    assert yard.run("resume", "@last", "--follow") == 0, yard.err

    attempts = yard.json("show", "@last")["attempts"]
    assert [item["number"] for item in attempts] == [1, 2]


@pytest.mark.slow
def test_a_resume_whose_checkpoints_are_gone_is_refused_and_not_begun_anew(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "--force", "a test", "--follow") == 0
    run = yard.json("show", "@last")["run"]
    assert yard.run("mark", run["id"], "stopped", "once more") == 0
    shutil.rmtree(Path(run["workdir"]) / "runs" / run["id"] / "checkpoints")

    assert yard.run("resume", run["id"]) == 1

    assert "has none of the 1 checkpoints" in yard.err
    assert yard.json("show", run["id"])["run"]["attempt"] == 1


@pytest.mark.slow
def test_a_script_of_ones_own_is_run_beside_the_tree_and_kept(yard: Yard) -> None:
    script = yard.root / "check.py"
    script.write_text("import remote.wire\nprint('from the tree')\nhoard = bytearray(40_000_000)\n", encoding="utf-8")

    assert yard.run("smoke", "tiny", "--script", str(script)) == 0, yard.err

    page = yard.json("show", yard.json("ls", "--kind", "script")["runs"][0]["id"])
    assert page["rungs"][0]["rung"] == "check"
    assert page["rungs"][0]["values"]["peak_bytes"] > 40_000_000
    assert yard.run("logs", page["run"]["id"]) == 0
    assert "from the tree" in yard.out


@pytest.mark.slow
def test_no_secret_is_kept_or_shown(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_1234567890")

    assert yard.run("launch", "tiny", "--env", "HF_TOKEN", "--force", "a test", "--follow") == 0
    assert yard.run("show", "@last", "--json") == 0

    assert "hf_canary" not in yard.out + yard.err
    kept = [path for path in yard.root.rglob("*") if path.is_file() and b"hf_canary" in path.read_bytes()]
    assert all(path.name == "env" and path.stat().st_mode & 0o077 == 0 for path in kept), kept


@pytest.mark.slow
def test_ctrl_c_while_following_leaves_the_run_going_and_says_how_to_come_back(yard: Yard) -> None:
    command = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "launch",
        "tiny",
        "-b",
        "slow",
        "--force",
        "a test",
        "--follow",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as follower:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = yard.json("ls")["runs"] if (yard.root / "runs.db").exists() else []
            if found and found[0]["state"] == "running":
                break
            time.sleep(0.1)
        follower.send_signal(signal.SIGINT)
        _, told = follower.communicate(timeout=120)

    assert follower.returncode == 130
    assert f"draftyard logs {found[0]['id']} -f" in told
    assert yard.json("show", found[0]["id"])["run"]["state"] == "running"


@pytest.mark.slow
def test_metrics_are_exported_as_csv_and_json_lines(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "--force", "a test", "--follow") == 0

    assert yard.run("export", "@last", "--metrics", "csv") == 0
    rows = yard.out.splitlines()
    assert rows[0] == "run,metric,attempt,rank,step,value"
    assert rows[2].endswith(",2,nan")
    assert yard.run("export", "@last", "--metrics", "jsonl", "--to", "values.jsonl") == 0
    lines = (yard.root / "values.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[1])["value_flag"] == "nan"


@pytest.mark.slow
def test_checkpoints_are_pulled_whole_and_a_run_can_be_marked(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "--force", "a test", "--follow") == 0

    pulled = yard.json("pull", "@last", "--to", "here")["checkpoints"]

    assert [(item["step"], item["num_files"], item["size_bytes"]) for item in pulled] == [(5, 1, 25_600)]
    assert (yard.root / pulled[0]["folder"] / "weights.bin").read_bytes() == bytes(range(256)) * 100
    assert yard.run("pull", "@last", "--checkpoints", "best") == 1
    assert "no checkpoint is marked best" in yard.err
    assert yard.json("reap", "--yes")["orphans"] == []
    copy = shutil.copytree(yard.folder(pulled[0]["folder"].split("/")[1]), yard.root / "from a disk")
    assert yard.run("import", str(copy), "--db", "other.db") == 0
    assert yard.json("show", "@last", "--db", "other.db")["run"]["step"] == 5
    marked = yard.json("mark", "@last", "failed", "the loss was of the wrong data")["run"]
    assert (marked["state"], marked["reason"]) == ("failed", "user")
    assert "the loss was of the wrong data" in marked["evidence"]


@pytest.mark.slow
def test_reap_lists_a_real_orphan_and_leaves_it_alone_unless_told_to_end_it(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "-b", "slow", "--force", "a test") == 0
    run_id = yard.out.strip()
    attempt = yard.folder(run_id) / "attempts" / "1"
    _wait_for(lambda: (yard.json("show", run_id)["run"]["step"] or 0) > 0)
    supervisor = json.loads((attempt / "supervisor.json").read_text())
    os.kill(supervisor["pid"], signal.SIGKILL)
    assert yard.run("reap", "--yes") == 0  # the run is live: nobody's orphan
    assert _is_alive(supervisor["job_pid"])
    assert yard.run("mark", run_id, "failed", "its supervisor is gone") == 0

    listed = yard.json("reap")
    assert yard.run("reap", "--no-input") == 0

    assert [(item["run_id"], item["pid"]) for item in listed["orphans"]] == [(run_id, supervisor["job_pid"])]
    assert listed["were_ended"] is False
    assert f"{supervisor['job_pid']}" in yard.out
    assert "left alone; --yes ends them" in yard.err
    assert _is_alive(supervisor["job_pid"])
    assert yard.json("reap", "--yes")["were_ended"] is True
    _wait_for(lambda: not _is_alive(supervisor["job_pid"]))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_launch_said_again_with_the_same_id_finds_the_run_it_has_started(yard: Yard) -> None:
    words = ("launch", "tiny", "-b", "slow", "--force", "a test", "--id", "nightly-0614")
    assert yard.run(*words) == 0
    assert yard.out.strip() == "nightly-0614"

    assert yard.run(*words) == 0
    assert yard.out.strip() == "nightly-0614"
    assert "was launched before and is" in yard.err
    assert [run["id"] for run in yard.json("ls")["runs"]] == ["nightly-0614"]
    assert len(yard.json("show", "nightly-0614")["attempts"]) == 1

    assert yard.run(*words, "--set", "settings.num_steps=7") == 2
    assert "another --id" in yard.err
    assert yard.run("stop", "nightly-0614", "--now") == 0
    assert yard.run("wait", "nightly-0614", "--timeout", "60s") == 13
    assert yard.run(*words) == 1
    assert "draftyard resume nightly-0614" in yard.err
    assert yard.run("launch", "tiny", "--id", "No Name") == 2
    assert "--id 'No Name' is no run id" in yard.err


@pytest.mark.slow
def test_of_launches_with_one_id_at_once_one_starts_and_a_failed_one_is_tried_again(yard: Yard) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "launch", "tiny", "--force", "a test", "--id", "once"]
    assert yard.run(*command[3:], "--host", "nowhere.invalid") in (2, 4)  # a host that is away, or unknown
    (yard.root / "hosts.yaml").write_text("hosts: {gone: {address: 127.0.0.1, port: 9}}\n")
    assert yard.run(*command[3:], "--host", "gone") == 4

    assert yard.run(*command[3:], "--host", "gone", "-b", "slow") == 2  # another order is not what was tried

    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    ended = [(*process.communicate(timeout=180), process.returncode) for process in running]

    assert [(code, out.strip()) for out, _, code in ended] == [(0, b"once")] * 3, ended
    assert len(yard.json("show", "once")["attempts"]) == 1
    assert yard.run("wait", "once", "--timeout", "60s") == 0


@pytest.mark.slow
def test_two_runs_of_one_recipe_keep_their_logs_apart(yard: Yard) -> None:
    for steps in ("2", "3"):
        assert yard.run("launch", "tiny", "--set", f"settings.num_steps={steps}", "--force", "a test", "--follow") == 0
    newest, first = (run["id"] for run in yard.json("ls")["runs"])

    for run_id, num_steps in ((first, 2), (newest, 3)):
        assert yard.run("logs", run_id) == 0
        assert yard.out.splitlines() == [f"step {step}" for step in range(1, num_steps + 1)]


@pytest.mark.slow
def test_evidence_lists_what_passed_where(yard: Yard) -> None:
    _smoked(yard)

    rows = yard.json("evidence", "tiny")["evidence"]

    assert [(row["rung"], row["passed"], row["host"]) for row in rows] == [("quick", True, "local")]
    assert rows[0]["fingerprint"]


def test_doctor_looks_at_this_machine_and_at_local(yard: Yard) -> None:
    told = yard.json("doctor", code=yard.run("doctor"))

    names = [item["name"] for item in told["findings"]]
    assert names[:2] == ["reach", "Python"]
    assert all(item["repair"] for item in told["findings"] if not item["is_good"])
    assert yard.json("hosts")["hosts"][0]["seen"]["seen_at"]


@pytest.mark.slow
def test_gc_takes_the_tree_that_nothing_needs_and_keeps_the_one_a_run_needs(yard: Yard) -> None:
    assert yard.run("smoke", "tiny") == 0, yard.err
    assert yard.run("launch", "tiny", "--follow") == 0, yard.err
    assert yard.json("gc")["trees"] == []  # nothing is older than seven days

    assert yard.run("gc", "--older-than", "0s", "--no-input") == 0, yard.err
    assert yard.run("gc", "--older-than", "0s", "--runs", "--no-input") == 0, yard.err
    assert re.search(r"runs/\w+ .* tiny main, \d.* of checkpoints not pulled", yard.out), yard.out
    assert yard.run("gc", "--older-than", "0s", "--runs", "--no-input", "--db", "other.db") == 0, yard.err
    assert "another client's" in yard.out
    listed = yard.json("gc", "--older-than", "0s", "--runs", "--yes")

    assert {run["run_id"] for run in listed["runs"]} == {run["id"] for run in yard.json("ls", "--kind", "all")["runs"]}
    assert not list((yard.root / "data" / "draftyard" / "runs").glob("*"))
    assert yard.run("pull", "@last") == 1
    assert "the run's folder is gone (gc --runs, or by hand)" in yard.err


@pytest.mark.parametrize("names", [",", "0,", ",1", " "])
def test_an_empty_name_of_a_gpu_is_refused(yard: Yard, names: str) -> None:
    assert yard.run("launch", "tiny", "--gpus", names, "--force", "a test") == 2

    assert f"--gpus {names!r} holds an empty name" in yard.err
