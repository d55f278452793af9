"""What may go from a host goes, and nothing that anybody needs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import cli, launch
from orchestrator.actions import sweeping
from orchestrator.actions.places import find_places
from orchestrator.errors import DraftyardError, StoreError
from orchestrator.launch import Job
from orchestrator.observe import observe
from orchestrator.shell.local import LocalShell
from orchestrator.ship import ship
from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from orchestrator.sweep import survey, sweep
from orchestrator.tree import Tree, bundled_tree
from orchestrator.workplace import Workplace, run_script
from remote import sweep as over_there
from remote.manifest import MARKER
from remote.processes import kill_run
from remote.trees import Staging
from remote.trees import Store as Store_there
from tests.orchestrator.runs import new_run, started
from tests.remote.jobs import wait_for

pytestmark = pytest.mark.slow  # real trees and processes

SHELL = LocalShell()


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(str(tmp_path / "work"), sys.executable, str(tmp_path))


@pytest.fixture
def job(place: Workplace) -> Iterator[Job]:
    """A job from the bundled tree, not yet started."""
    tree = ship(bundled_tree(), SHELL, place)
    run_id = f"run-{uuid.uuid4().hex[:10]}"
    yield Job(run_id, "script", 1, (sys.executable, "-c", "import time; time.sleep(60)"), tree.path)
    kill_run(run_id, None)


def older(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)


def another_tree(place: Workplace) -> Path:
    entries = bundled_tree().entries
    return Path(ship(Tree(entries[:3]), SHELL, place).path)


def test_trees_and_runs_are_listed_with_size_age_and_who_needs_them(place: Workplace, job: Job) -> None:
    started = launch.start(SHELL, place, job)
    spare = another_tree(place)

    found = survey(SHELL, place)

    used, unused = (
        next(tree for tree in found.trees if tree.hash == name) for name in (Path(job.cwd).name, spare.name)
    )
    assert (used.runs, used.in_use, unused.runs) == ((job.run_id,), (job.run_id,), ())
    assert used.size_bytes > 100_000
    assert unused.age_s < 60
    (run,) = found.runs
    assert (run.run_id, run.tree, run.is_alive, run.has_ended) == (job.run_id, used.hash, True, False)
    assert started.run_dir.endswith(run.name)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"cwd": ' * 100_000, "9" * 5000, '{"cwd": [1e999]}', "\ud800"])
def test_a_run_folder_whose_files_make_no_sense_is_listed(place: Workplace, text: str) -> None:
    folder = Path(place.work_dir) / "runs" / "odd"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(text, errors="surrogatepass")

    (run,) = survey(SHELL, place).runs

    assert run.run_id == "odd"


def test_a_tree_in_use_and_a_live_run_stay_whatever_is_asked(place: Workplace, job: Job) -> None:
    launch.start(SHELL, place, job)
    tree = f"trees/{Path(job.cwd).name}"

    swept = sweep(SHELL, place, [tree, f"runs/{job.run_id}"], min_age_s=0)

    assert swept.removed == ()
    assert swept.kept == {tree: f"in use by {job.run_id}", f"runs/{job.run_id}": "its processes are alive"}
    assert Path(job.cwd, "remote").is_dir()


@pytest.mark.parametrize("way", ["link", "argument"])
def test_a_run_whose_checkpoints_a_live_run_reads_stays(place: Workplace, tmp_path: Path, way: str) -> None:
    """An export or evaluation sees them by a link; a script is told their path."""
    ended, reader = Path(place.run_dir("ended")), Path(place.run_dir("reader"))
    for folder in (ended, reader):
        (folder / "attempts" / "1").mkdir(parents=True)
    (ended / "checkpoints").mkdir()
    (ended / "attempts" / "1" / "exit.json").write_text("{}")
    argument = f"{ended}/checkpoints/step-00000001" if way == "argument" else "x"
    (reader / "job.json").write_text(json.dumps({"cwd": "/t", "argv": ["python3", argument]}))
    if way == "link":
        (reader / "checkpoints").symlink_to(ended / "checkpoints")

    kept = sweep(SHELL, place, ["runs/ended"], min_age_s=0)
    (reader / "attempts" / "1" / "exit.json").write_text("{}")
    swept = sweep(SHELL, place, ["runs/ended"], min_age_s=0)

    assert kept.kept == {"runs/ended": "its files are read by reader"}
    assert swept.removed == ("runs/ended",)


def test_the_files_of_a_run_are_walked_through_once_when_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else lies there: sixty runs took as long as thousands."""
    names = [f"runs/r{number}" for number in range(6)]
    for name in [*names, "runs/kept"]:
        (tmp_path / name / "attempts" / "1").mkdir(parents=True)
        (tmp_path / name / "attempts" / "1" / "exit.json").write_text("{}")
    walked: list[str] = []
    monkeypatch.setattr(over_there, "_size", lambda path: walked.append(path.name) or 1)

    answer = over_there.remove(tmp_path, names, 0)

    assert answer == {"removed": names, "kept": {}, "freed_bytes": len(names)}
    assert sorted(walked) == [Path(name).name for name in names]


def test_an_unused_tree_goes_once_it_is_old_enough(place: Workplace) -> None:
    spare = another_tree(place)

    kept = sweep(SHELL, place, [f"trees/{spare.name}"])
    older(spare / MARKER, 7200)
    swept = sweep(SHELL, place, [f"trees/{spare.name}"])

    assert "shipped" in kept.kept[f"trees/{spare.name}"]
    assert swept.removed == (f"trees/{spare.name}",)
    assert swept.freed_bytes > 0
    assert not spare.exists()


def test_shipping_again_makes_a_tree_young(place: Workplace) -> None:
    spare = another_tree(place)
    older(spare / MARKER, 7200)

    assert another_tree(place) == spare

    assert sweep(SHELL, place, [f"trees/{spare.name}"]).removed == ()


@pytest.mark.slow
def test_an_ended_run_goes_and_then_its_tree_may_too(place: Workplace, job: Job) -> None:
    started = launch.start(SHELL, place, replace(job, argv=(sys.executable, "-c", "")))
    while observe(SHELL, started.run_dir).exit is None:
        time.sleep(0.05)
    older(Path(job.cwd) / MARKER, 7200)

    swept = sweep(SHELL, place, [f"runs/{job.run_id}", f"trees/{Path(job.cwd).name}"])

    assert len(swept.removed) == 2
    assert survey(SHELL, place).runs == survey(SHELL, place).trees == ()


@pytest.mark.parametrize(
    "name", ["", "trees/..", "trees/../../etc", "/etc", "runs/", "cache/x", "trees/.parts", "runs/a/b", "trees/absent"]
)
def test_nothing_outside_trees_and_runs_can_be_named(place: Workplace, name: str) -> None:
    another_tree(place)

    swept = sweep(SHELL, place, [name], min_age_s=0)

    assert swept.removed == ()
    assert swept.kept[name] in ("no name of a tree or a run", "not there")


def test_left_overs_of_cut_ships_go_after_a_day(place: Workplace) -> None:
    another_tree(place)
    trees = Path(place.work_dir, "trees")
    for name in (".staging-x-1", ".parts/abc.part", ".staging-y-2"):
        (trees / name).mkdir(parents=True)
        (trees / name / "f").write_text("x" * 5000)
    older(trees / ".staging-x-1", 90_000)
    older(trees / ".parts" / "abc.part", 90_000)

    assert survey(SHELL, place).leftover_bytes > 0
    sweep(SHELL, place, [])

    assert [(trees / name).exists() for name in (".staging-x-1", ".parts/abc.part", ".staging-y-2")] == [
        False,
        False,
        True,
    ]


def test_left_overs_go_at_once_when_asked_and_none_that_a_ship_is_making(place: Workplace, tmp_path: Path) -> None:
    """A disk that a cut ship has filled is to be had back now; another ship may be at work on it."""
    trees = Path(another_tree(place)).parent
    (trees / ".staging-x-1").mkdir()
    store = Store_there(Path(place.work_dir))
    cut, coming, whole = store.part("a" * 64), store.part("b" * 64), store.parts / ("c" * 64)
    for part in (trees / ".staging-x-1" / "f", cut, coming, whole):
        part.write_bytes(bytes(5000))

    with Staging(store, "y" * 64, []), coming.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert survey(SHELL, place, min_age_s=0).leftover_bytes > 15_000
        swept = sweep(SHELL, place, [], min_age_s=0)
        left = {path.name for path in (*trees.glob(".staging-*"), *store.parts.iterdir())}

    assert left == {f".staging-{'y' * 64}-{os.getpid()}", coming.name}
    assert (swept.removed, swept.kept) == (("leftovers",), {})
    assert swept.freed_bytes > 15_000
    sweep(SHELL, place, [], min_age_s=0)
    assert list(store.parts.iterdir()) == []


def test_gc_lists_left_overs_and_takes_them_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store = Store_there(tmp_path / "draftyard")
    store.part("a" * 64).write_bytes(bytes(2_000_000))
    monkeypatch.chdir(tmp_path)
    gc = ["gc", "local", "--db", "runs.db"]

    def said(*words: str) -> str:
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([*gc, *words])
        return "".join(capsys.readouterr())

    assert "leftovers of cut ships" in said("--older-than", "0s", "--no-input")
    assert "nothing older than 7 d" in said("--yes")
    assert list(store.parts.iterdir())

    assert "removed 1 item" in said("--older-than", "0s", "--yes")
    assert list(store.parts.iterdir()) == []


def test_a_spoiled_tree_stays_while_a_run_needs_a_tree_of_that_name(place: Workplace) -> None:
    """Set aside under a live job, it is the folder that this job works in."""
    trees, run = Path(place.work_dir, "trees"), Path(place.run_dir("live"))
    (run / "attempts" / "1").mkdir(parents=True)
    (run / "job.json").write_text(json.dumps({"cwd": str(trees / "abc")}))
    for name in (".spoiled-abc-17", ".spoiled-def-17"):
        (trees / name).mkdir(parents=True)
        older(trees / name, 90_000)

    sweep(SHELL, place, [])
    left = [path.name for path in trees.iterdir()]
    (run / "attempts" / "1" / "exit.json").write_text("{}")
    sweep(SHELL, place, [])

    assert left == [".spoiled-abc-17"]
    assert list(trees.iterdir()) == []


@pytest.mark.parametrize("lost", ["claim", "folder"])
def test_a_run_that_only_its_processes_tell_of_keeps_its_tree_until_they_are_reaped(
    place: Workplace, job: Job, lost: str
) -> None:
    """Its supervisor was killed and its claim is missing: the marker in the environment is all there is."""
    run = Path(launch.start(SHELL, place, job).run_dir)
    attempt, tree = run / "attempts" / "1", Path(job.cwd)
    supervisor = json.loads((attempt / "supervisor.json").read_text())
    os.kill(supervisor["pid"], signal.SIGKILL)
    wait_for(lambda: observe(SHELL, str(run)).supervisor_alive is False)
    aside = tree.rename(tree.with_name(f".spoiled-{tree.name}-1"))
    names = []
    if lost == "claim":
        (attempt / "claim").unlink()
        names = [f"runs/{job.run_id}"]
        older(attempt, 7200)
    else:
        shutil.rmtree(run)
    older(aside, 172_800)

    kept = sweep(SHELL, place, names, min_age_s=0)
    assert aside.is_dir()
    assert [item.run_id for item in launch.find_processes(SHELL, place)] == [job.run_id]
    assert launch.reap(SHELL, place, names=[launch.attempt_name(job.run_id, 1)]) == []
    swept = sweep(SHELL, place, names, min_age_s=0)

    assert kept.kept == dict.fromkeys(names, "its processes are alive")
    assert swept.removed == (*names, "leftovers")
    assert not aside.exists()


def test_old_temporary_files_go_while_no_run_lives_and_fresh_ones_stay(place: Workplace, tmp_path: Path) -> None:
    folder = Path(place.work_dir) / "tmp"
    for name in ("cache/old.so", "busy/old.so", "fresh.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(5000))
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("cache/old.so", "cache", "busy", "link"):
        older(folder / name, 9 * 86_400)  # what lies in `busy` is fresh

    found = survey(SHELL, place, min_age_s=7 * 86_400).temporary
    swept = sweep(SHELL, place, ["tmp"], min_age_s=7 * 86_400)

    assert (found.num_entries, found.in_use) == (2, ())
    assert found.size_bytes >= 5000
    assert 8 < found.age_s / 86_400 < 10
    assert swept.removed == ("tmp",)
    assert sorted(path.name for path in folder.iterdir()) == ["busy", "fresh.txt"]
    assert (tmp_path / "elsewhere").is_dir()


def test_an_empty_folder_and_a_folder_of_folders_among_temporary_files_go_too(place: Workplace) -> None:
    folder = Path(place.work_dir) / "tmp"
    for name in ("empty", "outer/inner"):
        (folder / name).mkdir(parents=True)
    for name in ("empty", "outer/inner", "outer"):
        older(folder / name, 9 * 86_400)

    found = survey(SHELL, place, min_age_s=7 * 86_400).temporary
    swept = sweep(SHELL, place, ["tmp"], min_age_s=7 * 86_400)

    assert (found.num_entries, swept.removed) == (2, ("tmp",))
    assert list(folder.iterdir()) == []


def test_a_fault_in_the_script_over_there_is_told_in_one_line(place: Workplace) -> None:
    with pytest.raises(DraftyardError) as caught:
        run_script(SHELL, place, "sweep", ["list", place.work_dir, "soon"])

    assert "\n" not in str(caught.value)
    assert "ValueError: could not convert string to float: 'soon' (a fault of draftyard's own" in str(caught.value)


def test_temporary_files_stay_while_a_run_lives(place: Workplace, job: Job) -> None:
    launch.start(SHELL, place, job)
    old = Path(place.work_dir) / "tmp" / "old"
    old.parent.mkdir(exist_ok=True)
    old.touch()
    older(old, 9 * 86_400)

    assert survey(SHELL, place).temporary.in_use == (job.run_id,)
    assert sweep(SHELL, place, ["tmp"]).kept == {"tmp": f"in use by {job.run_id}"}
    assert old.exists()


def an_ended_run_here(folder: Path, run_id: str) -> Path:
    attempt = folder / "draftyard" / "runs" / run_id / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "exit.json").write_text("{}")
    return attempt


def test_a_run_of_another_client_whose_id_begins_one_of_ours_is_told_as_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")
    with Store(places.db) as store:
        store.create_run(new_run("night4b"))
    for run_id in ("night4", "night4b"):
        an_ended_run_here(tmp_path, run_id)

    found = sweeping.collect(places, "local", older_than_s=0, with_runs=True, end=False)

    assert found.whose == {"night4": "another client's", "night4b": "smollm2 v6"}


def test_nothing_is_removed_before_the_database_has_said_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that a fault of the database ends would come too late."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "runs.db").write_bytes(b"no database" * 100)
    attempt = an_ended_run_here(tmp_path, "night4")

    with pytest.raises(StoreError):
        sweeping.collect(
            find_places(tmp_path, {}, db=tmp_path / "runs.db"), "local", older_than_s=0, with_runs=True, end=True
        )

    assert attempt.is_dir()


def a_run_without_an_end_here(folder: Path, run_id: str, *, attempt: int = 1) -> Path:
    """As a launch leaves it that was killed after everything lay there."""
    run_dir = folder / "draftyard" / "runs" / run_id
    (run_dir / "attempts" / str(attempt)).mkdir(parents=True)
    (run_dir / "env").write_text("{}")
    return run_dir


@pytest.mark.parametrize("state", [State.FAILED, State.LOST])
def test_a_run_that_has_ended_by_the_database_alone_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    places = find_places(tmp_path, {}, db=tmp_path / "runs.db")
    with Store(places.db) as store:
        store.set_state(started(store, "night4"), state, evidence="x")
        started(store, "going")
    folder, going = (a_run_without_an_end_here(tmp_path, run_id) for run_id in ("night4", "going"))

    found = sweeping.collect(places, "local", older_than_s=0, with_runs=True, end=True)

    assert [run.run_id for run in found.runs] == ["night4"]
    assert found.swept is not None
    assert (found.swept.removed, found.swept.kept) == (("runs/night4",), {})
    assert (folder.exists(), going.exists()) == (False, True)


def test_a_run_whose_next_attempt_the_database_does_not_know_stays(place: Workplace, tmp_path: Path) -> None:
    """It was resumed since, or is another database's run of that id."""
    folder = Path(place.run_dir("night4"))
    (folder / "attempts" / "2").mkdir(parents=True)

    kept = sweep(SHELL, place, ["runs/night4:1"], min_age_s=0)
    swept = sweep(SHELL, place, ["runs/night4:2"], min_age_s=0)

    assert kept.kept == {"runs/night4": "it may be about to start"}
    assert swept.removed == ("runs/night4",)


def test_a_live_run_stays_whatever_the_database_says(place: Workplace, job: Job) -> None:
    launch.start(SHELL, place, job)

    kept = sweep(SHELL, place, [f"runs/{job.run_id}:9"], min_age_s=0)

    assert kept.kept == {f"runs/{job.run_id}": "its processes are alive"}
