"""Run folders brought from elsewhere, made by a real supervisor and read in as if they had been followed."""

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import launch
from orchestrator.actions.bringing import passed_over
from orchestrator.actions.places import find_places
from orchestrator.errors import DraftyardError
from orchestrator.follow.follower import Follower, follow
from orchestrator.follow.importing import CUT_SHORT, HOST, import_folder, settle
from orchestrator.shell.local import LocalShell
from orchestrator.ship import ship
from orchestrator.store.rows import Document, State
from orchestrator.store.writes import Store
from orchestrator.tree import git_tree, with_remote
from orchestrator.workplace import Workplace
from remote.rundir import RunDir, read_json, write_json
from tests.orchestrator.runs import new_run

TREE = Path(__file__).resolve().parents[2]
PROGRAM = """
from remote.report import Reporter
with Reporter.from_environment().job() as reporter:
    for step in range(1, 21):
        reporter.metrics(step, {"loss": 1 / step})
        print("step", step)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one attempt ended and a second failed, started by hand on "another machine"."""
    folder = tmp_path_factory.mktemp("there") / "runs" / "20270101-far"
    programs = {1: PROGRAM, 2: "import missing_package"}
    for number, program in programs.items():
        job = {
            "run_id": "20270101-far",
            "kind": "train",
            "attempt": number,
            "cwd": str(TREE),
            "facts": {"branch": "v6"},
        }
        write_json(RunDir(folder).job_json, {**job, "argv": [sys.executable, "-c", program]})
        write_json(
            RunDir(folder).spec_json,
            {"recipe": "far", "train": {"num_steps": 20}, "tags": ["usb"], "why": "no network"},
        )
        RunDir(folder).attempt(number).root.mkdir(parents=True)
        argv = [sys.executable, "-m", "remote.supervise", str(folder), "--attempt", str(number)]
        subprocess.run(argv, cwd=TREE, check=True, timeout=180)
    return folder


def copy_of(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "usb" / "stick"))


@pytest.mark.slow
def test_a_folder_is_read_in_like_a_followed_run(made: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")

    run = import_folder(store, copy_of(made, tmp_path))

    assert (run.id, run.kind, run.recipe, run.branch, run.host) == ("20270101-far", "train", "far", "v6", "imported")
    assert (run.num_steps, run.tags, run.why) == (20, ("usb",), "no network")
    started_s = read_json(RunDir(made).attempt(1).supervisor_json)["started_s"]
    assert run.created_s == started_s  # not the moment of the import
    attempts = store.reader.attempts(run.id)
    assert [(row.state, row.reason) for row in attempts] == [
        (State.SUCCEEDED, None),
        (State.FAILED, "missing_dependency"),
    ]
    assert [value.step for value in store.reader.metric_values(run.id, "loss")] == list(range(1, 21))
    assert store.logs.read(run.id, 1, "stdout", offset=0, size=7) == b"step 1\n"
    assert store.reader.failures(run.id)[0].facts["install"] == "pip install missing-package"


@pytest.mark.slow
def test_what_is_no_file_is_passed_over_and_said(made: Path, tmp_path: Path) -> None:
    store, copy = Store(tmp_path / "runs.db"), copy_of(made, tmp_path)
    attempt = RunDir(copy).attempt(1).root
    (attempt / "events.rank0.jsonl").unlink()
    (attempt / "events.rank0.jsonl").symlink_to(tmp_path / "usb")
    (attempt / "stdout.log").unlink()
    os.mkfifo(attempt / "stdout.log")

    for _ in range(2):
        import_folder(store, copy)

    assert passed_over(find_places(tmp_path, {}, db=store.path), "20270101-far")[0].startswith(
        "attempt 1: events.rank0"
    )
    assert [row.text for row in store.reader.events("20270101-far", kinds=["bad_line"])] == [
        "attempt 1: events.rank0.jsonl is a link and was passed over; what it may hold is missing",
        "attempt 1: stdout.log is a named pipe and was passed over; what it may hold is missing",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.touch, "a file"),
        (os.mkfifo, "a named pipe"),
        (lambda path: path.symlink_to("1"), "a link"),
        (lambda path: path.symlink_to("/dev/zero"), "a link"),
    ],
    ids=["file", "pipe", "link", "device"],
)
def test_an_attempt_that_is_no_folder_is_passed_over_and_said(
    made: Path, tmp_path: Path, make: Callable[[Path], object], what: str
) -> None:
    store, copy = Store(tmp_path / "runs.db"), copy_of(made, tmp_path)
    make(copy / "attempts" / "3")

    for _ in range(2):
        run = import_folder(store, copy)

    assert (run.attempt, run.state) == (2, State.FAILED)
    assert [row.text for row in store.reader.events(run.id, kinds=["bad_line"])] == [
        f"attempts/3 is {what} and was passed over; what it may hold is missing"
    ]
    assert passed_over(find_places(tmp_path, {}, db=store.path), run.id) == [
        f"attempts/3 is {what} and was passed over; what it may hold is missing"
    ]


@pytest.mark.slow
def test_a_folder_without_a_real_attempt_is_refused(made: Path, tmp_path: Path) -> None:
    copy = copy_of(made, tmp_path)
    for number in ("1", "2"):
        (copy / "attempts" / number).rename(copy / "attempts" / f"no {number}")
        (copy / "attempts" / number).touch()

    with pytest.raises(DraftyardError, match="has no attempt: attempts/1 is the folder of the first; copy it whole"):
        import_folder(Store(tmp_path / "runs.db"), copy)


# One of everything that a job can say, on two ranks; a loss that is no number; a log without a last newline.
EVERYTHING = """
import sys
from remote.report import Reporter
other, reporter = Reporter.from_environment("rank1"), Reporter.from_environment("rank0")
other.metrics(1, {"loss": 2.0})
other.close()
with reporter.job():
    reporter.start(num_steps=20)
    reporter.stage("train")
    for step in range(1, 301):
        reporter.metrics(step, {"loss": float("nan") if step == 9 else 1 / step, "lr": 0.1})
    reporter.progress("prepare", done=3, total=9, unit="B")
    reporter.memory("train", gpu=0, allocated_bytes=1, reserved_bytes=2, driver_bytes=3)
    reporter.rung("fwd", passed=True, values={"loss": 1.0})
    reporter.checkpoint(10, path="checkpoints/10", size_bytes=7, is_best=True)
    reporter.checkpoint(20, path="checkpoints/20", size_bytes=7)
    reporter.checkpoint_removed(10, path="checkpoints/10")
    reporter.evaluation(20, protocol={"data": "x"}, values={"accepted": 2.5})
    reporter.note("nearly there")
    print("said", end="")
    sys.stderr.buffer.write(b"\\xff\\r50%")
    {ending}
"""
CARD = """#!/bin/sh
case "$*" in *memory.used*) echo "5, GPU-5555, 1024, 97887, 40";; esac
"""
# What is of whoever brought it in, not of the run: keys, the host and its folder, when it was asked for or read, and which
# states somebody saw on the way. A stream's identity is its file's number.
NOT_OF_THE_RUN = {
    "runs": {"host", "workdir", "created_s"},
    "attempts": {"created_s"},
    "streams": {"identity"},
    "events": {"at_s"},
    "metrics": {"series"},
    "rollups": {"series"},
}
LEFT_OUT = {
    "sqlite_sequence",
    "cursors",
    "hosts",
    "log_marks",
}  # of a database and its follower, of when a log was read


def rows_of(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Every table, sorted, without what is left out above and all keys."""
    database = sqlite3.connect(store.path)
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {}
    for name in sorted(set(names) - LEFT_OUT):
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({name})")]
        kept = [each for each in columns if each not in {"id", "key", "run_key"} | NOT_OF_THE_RUN.get(name, set())]
        kept += ["id"] * (name == "runs")
        where = {"events": "WHERE kind != 'state'", "documents": "WHERE name != 'machines'"}.get(name, "")
        found[name] = sorted(database.execute(f"SELECT {', '.join(kept)} FROM {name} {where}"), key=repr)
    database.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pass", "raise MemoryError('no room')"])
def test_a_run_that_is_imported_is_row_by_row_what_it_is_when_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(CARD)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    spec = {"recipe": "far", "branch": "v6", "train": {"num_steps": 20}, "tags": ["usb"], "why": "x"}
    place = Workplace(str(tmp_path / "there"), sys.executable, str(tmp_path))
    followed, imported = Store(tmp_path / "followed" / "runs.db"), Store(tmp_path / "imported" / "runs.db")
    documents = {Document.SPEC: json.dumps(spec, sort_keys=True), Document.LAUNCH: json.dumps({"gpus": ["GPU-5555"]})}
    asked = {"recipe": "far", "branch": "v6", "workdir": place.work_dir, "documents": documents, "num_steps": 20}
    followed.create_run(new_run("far", **asked, tags=("usb",), why="x"))
    script = EVERYTHING.replace("{ending}", ending)
    argv = (sys.executable, "-c", script)
    job = launch.Job("far", "train", followed.new_attempt("far"), argv, str(TREE), json.dumps(spec), gpus=("GPU-5555",))
    launch.start(LocalShell(), place, job)
    ending_event = threading.Event()
    assert follow(Follower(followed.path, connect_to=lambda *_: LocalShell(), ending=ending_event, idle_s=0.1))

    there = Path(place.run_dir("far"))
    import_folder(imported, Path(shutil.copytree(there, tmp_path / "usb" / "far")))

    assert followed.reader.run("far").state.is_final
    left, right = rows_of(followed), rows_of(imported)
    assert {name for name, rows in left.items() if rows} >= {
        "runs", "documents", "tags", "attempts", "streams", "series", "metrics", "rollups", "memory_peaks", "gpu_samples",
        "checkpoints", "rungs", "evaluations", "progress", "events",
    }  # fmt: skip
    differing = {name: (rows, right[name]) for name, rows in left.items() if right[name] != rows}
    assert not differing
    for stream in ("stdout", "stderr"):
        assert imported.logs.path("far", 1, stream).read_bytes() == followed.logs.path("far", 1, stream).read_bytes()


@pytest.mark.slow
def test_the_commands_of_the_page_run_a_shipped_tree_by_hand_and_bring_its_run_back(tmp_path: Path) -> None:
    """With nothing of the checkout in reach: what is run lies in the shipped tree."""
    work, disk, there = tmp_path / "work", tmp_path / "disk.tar", tmp_path / "there"
    place = Workplace(str(work), sys.executable, str(tmp_path))
    shipped = ship(with_remote(git_tree(TREE / "recipes" / "examples" / "own")), LocalShell(), place)
    page = (TREE / "docs" / "hosts.md").read_text().partition("## A machine that cannot be reached")[2]
    packing, running, bringing = [part.partition("```")[0] for part in page.split("```sh\n")[1:4]]
    programs = tmp_path / "bin"
    programs.mkdir()
    python = Path(sys.executable).resolve()  # without the packages of the checkout's environment
    for name, line in {
        "python3": f"{python} -s",
        "draftyard": f"cd {TREE}; exec {sys.executable} -m orchestrator.cli",
    }.items():
        (programs / name).write_text(f'#!/bin/sh\n{line if name == "draftyard" else "exec " + line} "$@"\n')
        (programs / name).chmod(0o755)
    plain = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "DRAFTYARD_DB": str(tmp_path / "runs.db")}

    for block in (packing, running, bringing):
        for old, new in {
            "~/.local/share/draftyard": work,
            "disk.tar": disk,
            "/data/draftyard": there,
            "/media/disk": there,
            "HASH": shipped.hash,
        }.items():
            block = block.replace(old, str(new))
        done = subprocess.run(
            ["sh", "-ec", block], cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr

    store = Store(tmp_path / "runs.db")
    run = store.reader.run("far-1")
    assert (run.recipe, run.branch, run.state, run.step, run.num_steps) == (
        "own-script",
        "fast",
        State.SUCCEEDED,
        30,
        30,
    )
    assert [value.step for value in store.reader.metric_values(run.id, "loss")] == list(range(1, 31))


def test_importing_again_changes_nothing_and_a_newer_copy_adds_what_is_new(made: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    folder = copy_of(made, tmp_path)
    whole = RunDir(folder).attempt(1)
    shutil.rmtree(RunDir(folder).attempt(2).root)
    events = whole.events("rank0").read_bytes()
    exit_file = whole.exit_json.read_bytes()
    whole.events("rank0").write_bytes(events[: len(events) // 2])  # copied while it ran
    whole.exit_json.unlink()
    assert import_folder(store, folder).state == State.LOST

    whole.events("rank0").write_bytes(events)
    whole.exit_json.write_bytes(exit_file)
    first = import_folder(store, folder)
    again = import_folder(store, folder)

    assert first.state == State.SUCCEEDED
    assert again == first
    assert [value.step for value in store.reader.metric_values(first.id, "loss")] == list(range(1, 21))


def test_a_copy_of_a_run_that_lives_is_told_as_that_and_settled_by_a_later_one(made: Path, tmp_path: Path) -> None:
    """It said that both were killed, of a run that lived on; nobody can know that of a copy."""
    store = Store(tmp_path / "runs.db")
    folder = copy_of(made, tmp_path)
    whole = RunDir(folder).attempt(1)
    shutil.rmtree(RunDir(folder).attempt(2).root)
    exit_file, events = whole.exit_json.read_bytes(), whole.events("rank0").read_bytes()
    whole.exit_json.unlink()
    whole.events("rank0").write_bytes(events[: len(events) // 2])

    copied = import_folder(store, folder)
    failures = store.reader.failures(copied.id)
    again = import_folder(store, folder)
    whole.events("rank0").write_bytes(events)
    with_last_word = import_folder(store, folder)
    whole.exit_json.write_bytes(exit_file)
    settled = import_folder(store, folder)

    assert (copied.state, copied.reason) == (State.LOST, None)
    assert copied.evidence == "not ended when it was copied; a newer copy, imported, says how it ended"
    assert failures == []
    assert again == copied
    assert with_last_word.state is settled.state is State.SUCCEEDED
    assert with_last_word.evidence == "the job's final event; no exit file was there when it was copied"
    assert settled.evidence == "exit status 0 and the job's final event"


@pytest.mark.slow
@pytest.mark.parametrize("has_last_word", [True, False])
@pytest.mark.parametrize("newer", ["exit 0", "exit 1", "another attempt", "nothing"])
def test_a_newer_copy_says_what_it_says_where_it_is_the_only_one(
    made: Path, tmp_path: Path, newer: str, has_last_word: bool
) -> None:
    """A run that failed stayed succeeded: its job had said so, and no exit file was there when it was first copied."""
    store, empty = Store(tmp_path / "runs.db"), Store(tmp_path / "empty" / "runs.db")
    folder = copy_of(made, tmp_path)
    first, second = RunDir(folder).attempt(1), RunDir(folder).attempt(2)
    exit_file, events = read_json(first.exit_json), first.events("rank0").read_bytes()
    first.exit_json.unlink()
    if not has_last_word:
        first.events("rank0").write_bytes(events[: len(events) // 2])
    shutil.move(second.root, tmp_path / "later")
    import_folder(store, folder)

    if newer.startswith("exit"):
        write_json(first.exit_json, {**exit_file, "exit_code": int(newer[-1])})
    elif newer == "another attempt":
        shutil.move(tmp_path / "later", second.root)
    run, alone = import_folder(store, folder), import_folder(empty, folder)

    told = [(row.number, row.state, row.reason, row.evidence) for row in store.reader.attempts(run.id)]
    assert told == [(row.number, row.state, row.reason, row.evidence) for row in empty.reader.attempts(run.id)]
    assert (run.state, run.reason, run.evidence) == (alone.state, alone.reason, alone.evidence)
    assert len(store.reader.failures(run.id)) == len(empty.reader.failures(run.id))
    before = len(store.reader.events(run.id))
    assert import_folder(store, folder) == run
    assert len(store.reader.events(run.id)) == before


def test_an_older_attempt_without_an_exit_file_was_killed_in_a_copy_as_well(made: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    folder = copy_of(made, tmp_path)
    attempt = RunDir(folder).attempt(1)
    attempt.exit_json.unlink()
    events = attempt.events("rank0").read_bytes()
    attempt.events("rank0").write_bytes(events[: len(events) // 2])

    run = import_folder(store, folder)

    assert "both were killed" in store.reader.attempts(run.id)[0].evidence


@pytest.mark.slow
@pytest.mark.parametrize("lost_bytes", [1, 40, 400])
def test_a_journal_cut_off_in_a_record_is_read_up_to_its_last_whole_one(
    made: Path, tmp_path: Path, lost_bytes: int
) -> None:
    """A disk that was pulled out too early; the exit file had been copied first."""
    store = Store(tmp_path / "runs.db")
    folder = copy_of(made, tmp_path)
    shutil.rmtree(RunDir(folder).attempt(2).root)
    journal = RunDir(folder).attempt(1).events("rank0")
    content = journal.read_bytes()
    journal.write_bytes(content[:-lost_bytes])
    num_whole = sum(b'"kind":"metrics"' in line.replace(b" ", b"") for line in content[:-lost_bytes].split(b"\n")[:-1])

    run = import_folder(store, folder)

    assert (run.state, run.reason) == (State.FAILED, "unmarked_exit")
    steps = [value.step for value in store.reader.metric_values(run.id, "loss")]
    assert steps == list(range(1, num_whole + 1))
    said = [event.text for event in store.reader.events(run.id, kinds=["bad_line"])]
    assert len(said) == 1
    assert "cut off" in said[0]


def test_a_record_spoiled_in_the_middle_costs_itself_alone_and_is_said(made: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    folder = copy_of(made, tmp_path)
    shutil.rmtree(RunDir(folder).attempt(2).root)
    journal = RunDir(folder).attempt(1).events("rank0")
    lines = journal.read_bytes().split(b"\n")
    at = next(number for number, line in enumerate(lines) if b'"step":7,' in line.replace(b" ", b""))
    lines[at] = lines[at][: len(lines[at]) // 2]
    journal.write_bytes(b"\n".join(lines))

    run = import_folder(store, folder)

    assert run.state == State.SUCCEEDED
    steps = [value.step for value in store.reader.metric_values(run.id, "loss")]
    assert steps == [step for step in range(1, 21) if step != 7]
    said = [event.text for event in store.reader.events(run.id, kinds=["bad_line", "gap"])]
    assert len(said) == 2


@pytest.mark.slow
def test_imports_of_one_folder_at_once_leave_one_run_with_everything_once(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made, tmp_path)
    log = RunDir(folder).attempt(1).stdout_log
    log.write_bytes(bytes(range(256)) * 60_000)  # several reads long
    words = [sys.executable, "-m", "orchestrator.cli", "import", str(folder), "--db", str(tmp_path / "runs.db")]

    running = [subprocess.Popen(words, cwd=TREE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in running]

    assert [code for *_, code in ended] == [0] * 4, ended
    store = Store(tmp_path / "runs.db")
    (run,) = store.reader.runs(kind=None)
    assert [row.number for row in store.reader.attempts(run.id)] == [1, 2]
    assert [value.step for value in store.reader.metric_values(run.id, "loss")] == list(range(1, 21))
    assert store.logs.path(run.id, 1, "stdout").read_bytes() == log.read_bytes()
    assert store.reader.events(run.id, kinds=["gap", "bad_line"]) == []


@pytest.mark.slow
def test_an_attempt_that_is_missing_in_the_folder_leaves_a_gap_in_the_numbers(made: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    folder = copy_of(made, tmp_path)
    RunDir(folder).attempt(2).root.rename(RunDir(folder).attempt(4).root)

    run = import_folder(store, folder)

    assert (run.attempt, run.state) == (4, State.FAILED)
    assert [(row.number, row.state) for row in store.reader.attempts(run.id)] == [
        (1, State.SUCCEEDED),
        (4, State.FAILED),
    ]


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")

    with pytest.raises(DraftyardError, match=r"no run folder: it has no whole job\.json"):
        import_folder(store, tmp_path)


def test_a_run_that_is_followed_here_is_not_imported(made: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    store.create_run(new_run("20270101-far", host="gpu"))

    with pytest.raises(DraftyardError, match="launched from here, on host gpu"):
        import_folder(store, made)


@pytest.mark.parametrize(
    "run_id", ["../../evil", "/tmp/evil", "..", "", "a/b", "UPPER", "a\nb", "x" * 65, "-rf", "a--b"]
)
def test_a_foreign_id_that_is_no_plain_name_is_refused_in_one_line(tmp_path: Path, run_id: str) -> None:
    folder = tmp_path / "usb"
    RunDir(folder).attempt(1).root.mkdir(parents=True)
    RunDir(folder).attempt(1).stdout_log.write_bytes(b"evil")
    write_json(RunDir(folder).job_json, {"run_id": run_id, "kind": "train"})
    store = Store(tmp_path / "yard" / "runs.db")

    with pytest.raises(DraftyardError, match="is no run id") as refused:
        import_folder(store, folder)

    assert len(str(refused.value).splitlines()) == 1
    assert store.reader.runs(kind=None) == []
    assert list(tmp_path.rglob("stdout.log")) == [RunDir(folder).attempt(1).stdout_log]


def sparse(tmp_path: Path, *, job: dict[str, Any] | None = None, spec: Any = None, exit_json: bytes = b"{}") -> Path:
    """A run folder with one attempt of which little is there."""
    folder = tmp_path / "usb"
    attempt = RunDir(folder).attempt(1)
    attempt.root.mkdir(parents=True)
    attempt.exit_json.write_bytes(exit_json)
    write_json(RunDir(folder).job_json, {"run_id": "far", "kind": "train"} | (job or {}))
    write_json(RunDir(folder).spec_json, {} if spec is None else spec)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": {"life": 5}},
        {"spec": {"life": None}},
        {"spec": {"life": {"retries": "many"}}},
        {"spec": {"tags": 5}},
        {"spec": {"train": {"num_steps": 10**40}}},
        {"spec": {"env": {"A": [1]}}},
        {"job": {"kind": "party"}},
        {"job": {"gpus": [5]}},
        {"job": {"gpus": "5"}},
    ],
    ids=str,
)
def test_a_folder_whose_files_say_what_no_run_of_ours_is_leaves_no_row(tmp_path: Path, changes: Any) -> None:
    store = Store(tmp_path / "runs.db")

    with pytest.raises(DraftyardError, match=r"(spec|job)\.json: "):
        import_folder(store, sparse(tmp_path, **changes))

    assert store.reader.runs(kind=None) == []


@pytest.mark.parametrize("number", ["0", "\N{SUPERSCRIPT TWO}", "9" * 25])
def test_a_folder_without_an_attempt_is_refused(tmp_path: Path, number: str) -> None:
    store = Store(tmp_path / "runs.db")
    folder = sparse(tmp_path)
    RunDir(folder).attempt(1).root.rename(folder / "attempts" / number)

    with pytest.raises(DraftyardError, match="has no attempt"):
        import_folder(store, folder)

    assert store.reader.runs(kind=None) == []


@pytest.mark.parametrize("name", ["job.json", "spec.json"])
def test_a_file_nested_without_end_is_no_whole_one(tmp_path: Path, name: str) -> None:
    folder = sparse(tmp_path)
    (folder / name).write_bytes(b"[" * 200_000)
    store = Store(tmp_path / "runs.db")

    if name == "job.json":
        with pytest.raises(DraftyardError, match=r"no whole job\.json"):
            import_folder(store, folder)
    else:
        assert import_folder(store, folder).state.is_final


@pytest.mark.parametrize("exit_json", [b'{"exit_code": 1, "ended_s": 1' + b"0" * 400 + b"}", b"[" * 200_000])
def test_a_run_brought_with_odd_files_and_names_has_ended(tmp_path: Path, exit_json: bytes) -> None:
    store = Store(tmp_path / "runs.db")
    folder = sparse(tmp_path, exit_json=exit_json)
    for name in (b"x\n\xc2\xb2 5 8180 y", b"events.\xff.jsonl"):
        Path(os.fsdecode(bytes(RunDir(folder).attempt(1).root / "n")[:-1] + name)).write_bytes(b"1")

    run = import_folder(store, folder)

    assert run.state.is_final
    assert [event.text for event in store.reader.events(run.id, kinds=["bad_line"])] == [
        "1 events file not read, 'events.\\udcff.jsonl' first: no Reporter takes such a writer"
    ]


def test_an_import_that_breaks_off_leaves_no_live_row_and_may_be_said_again(made: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    folder = copy_of(made, tmp_path)
    (store.logs.root / "20270101-far" / "1").mkdir(parents=True)
    (store.logs.root / "20270101-far" / "1" / "stdout.log").mkdir()  # so that the log cannot be kept

    with pytest.raises(DraftyardError):
        import_folder(store, folder)
    broken = store.reader.run("20270101-far")
    (store.logs.root / "20270101-far" / "1" / "stdout.log").rmdir()
    whole = import_folder(store, folder)

    assert (broken.state, broken.evidence) == (State.LOST, CUT_SHORT)
    assert (whole.attempt, whole.state) == (2, State.FAILED)
    assert len(store.reader.metric_values(whole.id, "loss")) == 20


@pytest.mark.slow
def test_the_follower_ends_what_a_killed_import_left_and_asks_no_host(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    store.create_run(new_run("far", host=HOST))
    asked: list[str] = []

    assert follow(Follower(store.path, connect_to=asked.append, ending=threading.Event(), idle_s=0.1))  # type: ignore[arg-type]

    assert (store.reader.run("far").state, asked) == (State.LOST, [])
    assert import_folder(store, sparse(tmp_path)).attempt == 1


def test_an_import_at_work_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    run = store.create_run(new_run("far", host=HOST))
    (store.logs.root / run.id).mkdir(parents=True)
    descriptor = os.open(store.logs.root / run.id, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    settle(store, run)
    meanwhile = store.reader.run(run.id).state
    os.close(descriptor)
    settle(store, run)

    assert (meanwhile, store.reader.run(run.id).state) == (State.PENDING, State.LOST)
