"""Trees travel whole or not at all: over a real shell, with cuts, races, changes and damage on the way."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.actions.site import Site, paced, ship_told
from orchestrator.errors import DraftyardError, HostError
from orchestrator.host import LOCAL, Hosts
from orchestrator.parcel import Progress
from orchestrator.shell.connect import connect
from orchestrator.shell.local import LocalShell
from orchestrator.shell.ssh import SshShell
from orchestrator.shell.stream import Source, StreamShell
from orchestrator.ship import _IS_WHOLE, Patience, _error, ship
from orchestrator.tree import DiskFull, ShipError, Tree, bundled_tree, git_tree, left_out, with_remote
from orchestrator.workplace import Workplace, run_script, workplace
from remote.manifest import MARKER, Refused, check, link_stays_inside
from remote.trees import Store
from tests import delay, sshd


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(str(tmp_path / "it's a work dir"), sys.executable, str(tmp_path))


@pytest.fixture
def shell() -> StreamShell:
    return LocalShell()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A git repository with one committed file."""
    made = tmp_path / "project"
    made.mkdir()
    _git(made, "init", "-q")
    (made / "train.py").write_text("print('train')\n")
    _git(made, "add", "train.py")
    return made


def _git(folder: Path, *words: str) -> None:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", folder, *settings, *words], check=True, capture_output=True)


def names(tree: Tree) -> list[str]:
    return [entry.path for entry in tree.entries]


def there(path: str) -> dict[str, bytes]:
    root = Path(path)
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for file in root.rglob("*")
        if file.is_file() and not file.is_symlink() and file.name != MARKER
    }


# What a tree is --------------------------------------------------------------------------------------


def test_a_tree_is_what_git_sees(folder: Path) -> None:
    (folder / ".gitignore").write_text("*.bin\n!keep.bin\n/data/\n")
    (folder / "sub").mkdir()
    (folder / "sub" / ".gitignore").write_text("*.log\n")
    for name in ("new.py", "drop.bin", "keep.bin", "sub/a.log", "sub/a.py", "tracked.bin", "gone.py"):
        (folder / name).write_text(name)
    (folder / "data").mkdir()
    (folder / "data" / "big").write_text("x")
    _git(folder, "add", "-f", "tracked.bin", "gone.py")
    (folder / "gone.py").unlink()

    listed = names(git_tree(folder))

    assert listed == [".gitignore", "keep.bin", "new.py", "sub/.gitignore", "sub/a.py", "tracked.bin", "train.py"]


def test_a_subfolder_of_a_repository_is_a_tree_of_its_own(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "a.py").write_text("a")

    assert names(git_tree(folder / "sub")) == ["a.py"]


def test_the_hash_follows_content_mode_name_and_links_only(folder: Path) -> None:
    first = git_tree(folder).hash
    (folder / "train.py").touch()
    assert git_tree(folder).hash == first

    seen = {first}
    (folder / "train.py").chmod(0o755)
    seen.add(git_tree(folder).hash)
    (folder / "train.py").write_text("print('other')\n")
    seen.add(git_tree(folder).hash)
    (folder / "train.py").rename(folder / "train2.py")
    seen.add(git_tree(folder).hash)
    (folder / "link").symlink_to("train2.py")
    seen.add(git_tree(folder).hash)
    (folder / "link").unlink()
    (folder / "link").symlink_to("other")
    seen.add(git_tree(folder).hash)
    assert len(seen) == 6


def test_what_cannot_travel_is_named(folder: Path) -> None:
    (folder / "out").symlink_to("../outside")
    with pytest.raises(ShipError, match=r"out: a link that leaves the tree .*\(\.\./outside\)"):
        git_tree(folder)
    (folder / "out").unlink()
    (folder / "abs").symlink_to("/etc/passwd")
    with pytest.raises(ShipError, match="leaves the tree"):
        git_tree(folder)
    (folder / "abs").unlink()
    (folder / "inner").mkdir()
    _git(folder / "inner", "init", "-q")
    (folder / "inner" / "f").write_text("x")
    _git(folder / "inner", "add", "f")
    _git(folder / "inner", "commit", "-q", "-m", "x")
    with pytest.raises(ShipError, match="a git repository inside the tree"):
        git_tree(folder)


def test_a_name_or_a_link_with_a_line_of_its_own_makes_none_in_an_error(folder: Path) -> None:
    (folder / "out").symlink_to("/x\nfake: line\x1b[2J")
    with pytest.raises(ShipError) as told:
        git_tree(folder)
    assert r"('/x\nfake: line\x1b[2J')" in str(told.value)
    assert str(told.value).isprintable()
    (folder / "out").unlink()
    (folder / "in\nfake").symlink_to("/etc")
    with pytest.raises(ShipError) as told:
        git_tree(folder)
    assert str(told.value).isprintable()


@pytest.mark.parametrize("name", [MARKER, f"{MARKER}/inside/file", f"{MARKER}.17.tmp"])
def test_what_lies_where_a_tree_has_its_marker_is_refused_on_both_sides(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")

    with pytest.raises(ShipError, match=r"names that begin with \.draftyard-tree\.json are draftyard's own"):
        git_tree(folder)
    with pytest.raises(Refused, match="path"):
        check([[name, 0o644, 1, "0" * 64, None]])


@pytest.mark.slow
def test_a_git_that_does_not_answer_is_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a huge untracked tree; the time is turned down, not waited for."""
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")

    with pytest.raises(ShipError, match=r"git did not list the files within 0\.2 s; is there a huge folder"):
        git_tree(folder, limit_s=0.2)


@pytest.fixture(params=["no repository", "ignored by the repository around it"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of which git lists nothing: an example in an installed package, in a project's .venv or elsewhere."""
    if request.param != "no repository":
        _git(tmp_path, "init", "-q")
        (tmp_path / ".gitignore").write_text(".venv/\n")
    folder = tmp_path / ".venv" / "recipes" / "own"
    (folder / "sub" / "__pycache__").mkdir(parents=True)
    return folder


def test_a_folder_without_git_is_shipped_as_it_lies_without_hidden_and_compiled_files(plain: Path) -> None:
    for name in ("train.py", "sub/model.py", "sub/__pycache__/model.pyc", "old.pyc", ".env", "sub/.token"):
        (plain / name).write_text(name)
    (plain / ".venv" / "bin").mkdir(parents=True)
    (plain / ".venv" / "bin" / "python").write_text("x")
    (plain / "run.sh").write_text("#!/bin/sh\n")
    (plain / "run.sh").chmod(0o755)
    (plain / "same").symlink_to("sub")

    tree = git_tree(plain)

    assert [(entry.path, entry.mode, entry.link) for entry in tree.entries] == [
        ("run.sh", 0o755, None),
        ("same", 0o644, "sub"),
        ("sub/model.py", 0o644, None),
        ("train.py", 0o644, None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["many files", "much"])
def test_a_large_folder_without_git_is_refused_with_what_to_type(plain: Path, how: str) -> None:
    if how == "many files":
        for number in range(2001):
            (plain / f"f{number}").write_text("x")
    else:
        with (plain / "data").open("wb") as stream:
            stream.truncate(256 * 1024**2 + 1)

    with pytest.raises(
        ShipError, match=r"over 2,000 files or 256 MiB\n.*git init .*/own, and name the rest in its \.gitignore"
    ):
        git_tree(plain)


def test_a_folder_with_nothing_to_ship_is_said(plain: Path) -> None:
    with pytest.raises(ShipError, match="there is no file to ship"):
        git_tree(plain)
    with pytest.raises(ShipError, match="no such folder"):
        git_tree(plain / "absent")


def test_a_repository_that_git_will_not_read_is_no_folder_without_git(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: /nowhere\n")
    (tmp_path / "train.py").write_text("x")

    with pytest.raises(ShipError, match=r"git cannot list its files: .*/nowhere"):
        git_tree(tmp_path)


def test_a_file_that_a_command_names_and_git_ignores_is_left_out_and_said(folder: Path) -> None:
    (folder / ".gitignore").write_text("*.secret.py\ndata/\n")
    (folder / "data").mkdir()
    for name in ("a.secret.py", "data/rows.jsonl"):
        (folder / name).write_text("x")

    words = [
        "{python}",
        "./a.secret.py",
        "train.py",
        "--data",
        "data/rows.jsonl",
        "--steps",
        "5",
        "/bin/sh",
        "absent.py",
        "x" * 300,
        "a\0b",
        ".",
        "data/",
        "../project/data",
    ]

    assert left_out(git_tree(folder), folder, words) == ["a.secret.py", "data", "data/rows.jsonl"]


def test_the_bundled_tree_is_the_code_and_the_data_without_left_overs() -> None:
    listed = names(bundled_tree())

    assert "remote/supervise.py" in listed
    assert all(name.startswith(("remote/", "recipes/data/")) for name in listed)
    assert not [name for name in listed if "__pycache__" in name or name.endswith(".pyc")]


def test_data_beside_a_recipe_travels_with_the_trainer_in_place_of_bundled_files(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{}\n")
    (tmp_path / "smollm2.prompts.jsonl").write_text("mine\n")

    tree = bundled_tree(
        tmp_path, ("mine.jsonl", "smollm2.prompts.jsonl", "not-made-yet.jsonl", "/data/on/the/host.jsonl")
    )

    assert {"recipes/data/mine.jsonl", "recipes/data/smollm2.held_out.jsonl"} <= set(names(tree))
    assert "recipes/data/not-made-yet.jsonl" not in names(tree)
    (prompts,) = [entry for entry in tree.entries if entry.path.endswith("smollm2.prompts.jsonl")]
    assert prompts.size_bytes == len("mine\n")
    with pytest.raises(ShipError, match="leaves the recipe's data folder"):
        bundled_tree(tmp_path, ("../secrets.jsonl",))


def test_a_users_tree_gets_our_remote_beside_it_unless_it_has_its_own(folder: Path) -> None:
    both = with_remote(git_tree(folder))
    assert {"train.py", "remote/report.py", "remote/supervise.py"} <= set(names(both))

    (folder / "remote").mkdir()
    (folder / "remote" / "mine.py").write_text("")
    with pytest.raises(ShipError, match="rename yours"):
        with_remote(git_tree(folder))


# Shipping --------------------------------------------------------------------------------------------


def test_files_of_another_user_arrive_as_the_users_own(folder: Path, place: Workplace) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    os.chown(folder / "train.py", 12345, 12345)

    path = ship(git_tree(folder), LocalShell(), place).path

    assert {(file.stat().st_uid, file.stat().st_gid) for file in Path(path).iterdir()} == {(os.geteuid(), os.getegid())}


def test_everything_arrives_as_it_was(folder: Path, shell: StreamShell, place: Workplace) -> None:
    contents = {
        "empty": b"",
        "image.png": bytes(range(256)) * 10,
        "model.safetensors": os.urandom(3_000_000),
        "a name with\nnewline and 'quotes'": b"x",
        "é and 🙂/deep/er/file": b"unicode",
        "-rf": b"dash",
        "copy1": b"same" * 100,
        "copy2": b"same" * 100,
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "é and 🙂" / "up").symlink_to("../train.py")

    shipped = ship(git_tree(folder), shell, place)

    assert there(shipped.path) == {**contents, "run.sh": b"#!/bin/sh\n", "train.py": b"print('train')\n"}
    assert os.access(Path(shipped.path) / "run.sh", os.X_OK)
    assert not os.access(Path(shipped.path) / "train.py", os.X_OK)
    assert (Path(shipped.path) / "é and 🙂" / "up").readlink() == Path("../train.py")
    assert shipped.sent_files == len(contents) + 1  # two copies travel as one


def test_nothing_travels_when_nothing_changed(folder: Path, shell: StreamShell, place: Workplace) -> None:
    first, second = (ship(git_tree(folder), shell, place) for _ in range(2))

    assert (first.was_there, second.was_there) == (False, True)
    assert (second.sent_bytes, second.sent_files) == (0, 0)
    assert first.path == second.path


@pytest.mark.slow
def test_only_changed_content_travels(folder: Path, shell: StreamShell, place: Workplace) -> None:
    for number in range(50):
        (folder / f"f{number}").write_text(f"file {number}")
    ship(git_tree(folder), shell, place)

    (folder / "f7").write_text("changed")
    (folder / "f8").rename(folder / "moved")
    shipped = ship(git_tree(folder), shell, place)

    assert (shipped.sent_files, shipped.sent_bytes) == (1, len("changed"))
    assert there(shipped.path)["moved"] == b"file 8"
    assert "f8" not in there(shipped.path)


def test_content_that_was_spoiled_in_an_older_tree_is_sent_again(
    folder: Path, shell: StreamShell, place: Workplace
) -> None:
    old = ship(git_tree(folder), shell, place)
    (Path(old.path) / "train.py").write_text("a job wrote here")
    (folder / "new.py").write_text("n")

    shipped = ship(git_tree(folder), shell, place)

    assert there(shipped.path) == {"train.py": b"print('train')\n", "new.py": b"n"}


def test_a_tree_without_its_marker_is_not_taken_for_whole(folder: Path, shell: StreamShell, place: Workplace) -> None:
    tree = git_tree(folder)
    half = Path(place.tree_dir(tree.hash))
    half.mkdir(parents=True)
    (half / "train.py").write_text("")

    shipped = ship(tree, shell, place)

    assert there(shipped.path)["train.py"] == b"print('train')\n"


@pytest.mark.slow
def test_after_a_reboot_of_the_host_a_tree_is_checked_again(folder: Path, shell: StreamShell, place: Workplace) -> None:
    """A power cut shortly after the rename can leave empty files under the right names."""
    shipped = ship(git_tree(folder), shell, place)
    marker = Path(shipped.path) / MARKER
    body = json.loads(marker.read_text())

    marker.write_text(json.dumps({**body, "boot_id": "an earlier boot"}))
    assert ship(git_tree(folder), shell, place).was_there
    assert json.loads(marker.read_text())["boot_id"] == body["boot_id"]

    marker.write_text(json.dumps({**body, "boot_id": "an earlier boot"}))
    (Path(shipped.path) / "train.py").write_text("")
    again = ship(git_tree(folder), shell, place)
    assert not again.was_there
    assert there(again.path)["train.py"] == b"print('train')\n"


class CutShell(LocalShell):
    """A connection that is lost after so many bytes of input."""

    def __init__(self, after_bytes: int) -> None:
        super().__init__()
        self.left = after_bytes

    def stream(self, argv: list[str], *, source: Source, **options: Any) -> Any:
        outer = self

        class Short:
            def read(self, size: int) -> bytes:
                piece = source.stream.read(size)[: outer.left]
                outer.left -= len(piece)
                return piece

        ended = super().stream(argv, source=replace(source, stream=cast(Any, Short())), **options)
        if self.left <= 0:
            raise HostError("the connection was lost")
        return ended


@pytest.mark.slow
def test_cut_anywhere_nothing_looks_whole_and_the_next_ship_completes(
    folder: Path, place: Workplace, shell: StreamShell
) -> None:
    for number in range(30):
        (folder / f"f{number}").write_bytes(random.Random(number).randbytes(1000))
    (folder / "large").write_bytes(random.Random(1).randbytes(2_500_000))
    tree = git_tree(folder)

    for after in (1, 100, 3000, 20_000, 200_000, 1_200_000):
        with pytest.raises((HostError, ShipError)):
            ship(tree, CutShell(after), place)
        assert not Path(place.tree_dir(tree.hash)).exists()

    shipped = ship(tree, shell, place)
    assert there(shipped.path) == {entry.path: entry.source.read_bytes() for entry in tree.entries}
    assert shipped.sent_bytes < 1_500_000  # what had arrived of the large file was not sent again


@pytest.mark.slow
def test_two_clients_at_once_do_no_harm(folder: Path, place: Workplace) -> None:
    for number in range(200):
        (folder / f"f{number}").write_bytes(random.Random(number).randbytes(2000))
    (folder / "large").write_bytes(random.Random(1).randbytes(3_000_000))
    tree = git_tree(folder)
    paths: list[str] = []

    def go() -> None:
        paths.append(ship(tree, LocalShell(), place).path)

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert paths == [place.tree_dir(tree.hash)] * 4
    assert there(paths[0]) == {entry.path: entry.source.read_bytes() for entry in tree.entries}
    assert not list(Path(place.work_dir, "trees").glob(".staging*"))


@pytest.mark.slow
def test_two_clients_whose_trees_share_files_both_end_whole(tmp_path: Path, place: Workplace) -> None:
    """Started at one moment: each needs what the other may be sending."""
    shared = {f"f{number}": random.Random(number).randbytes(2000) for number in range(100)}
    trees = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        own = {f"{name}{number}": random.Random(f"{name}{number}").randbytes(2000) for number in range(100)}
        for file, content in {**shared, **own}.items():
            (tmp_path / name / file).write_bytes(content)
        trees.append(git_tree(tmp_path / name))
    barrier, done = threading.Barrier(2), {}

    def go(number: int) -> None:
        barrier.wait()
        done[number] = ship(trees[number], LocalShell(), place)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number, tree in enumerate(trees):
        assert there(done[number].path) == {entry.path: entry.source.read_bytes() for entry in tree.entries}
    assert 300 <= sum(shipped.sent_files for shipped in done.values()) <= 400  # what is shared went once, or twice


@pytest.mark.slow
def test_another_client_that_fell_silent_is_not_waited_for_for_ever(
    folder: Path, shell: StreamShell, place: Workplace
) -> None:
    (folder / "large").write_bytes(random.Random(1).randbytes(2_000_000))
    tree = git_tree(folder)
    sha = next(entry.sha256 for entry in tree.entries if entry.path == "large")

    with Store(Path(place.work_dir)).part(sha).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ShipError, match=rf"has brought nothing for 0\.7 s: pid {os.getpid()} for \d+ s"):
            ship(tree, shell, place, patience=Patience(busy_s=0.7))

    assert there(ship(tree, shell, place).path)["large"] == (folder / "large").read_bytes()


def _tick(tree: Path) -> None:
    """Until the file system's clock has gone on: what is written from now on is newer than the tree."""
    probe, marked_ns = tree.parent / "tick", (tree / MARKER).stat().st_ctime_ns
    while True:
        probe.touch()
        if probe.stat().st_ctime_ns > marked_ns:
            return probe.unlink()


def _written_over(tree: Path) -> None:
    (tree / "train.py").write_text("print('TRAIN')\n")  # as long as what was shipped


def _written_over_and_old(tree: Path) -> None:
    _written_over(tree)
    os.utime(tree / "train.py", (1, 1))


def _put_in_the_place(tree: Path) -> None:
    (tree / "new").write_text("print('TRAIN')\n")
    (tree / "new").replace(tree / "train.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [_written_over, _written_over_and_old, _put_in_the_place, lambda tree: (tree / "train.py").unlink()]
)
def test_a_tree_that_a_job_has_changed_is_made_anew(
    folder: Path, shell: StreamShell, place: Workplace, change: Callable[[Path], None]
) -> None:
    """Evidence never stands for shipped code that was written over; what the job has written stays aside for a day."""
    tree = git_tree(folder)
    there_before = Path(ship(tree, shell, place).path)
    _tick(there_before)
    change(there_before)

    shipped = ship(tree, shell, place)

    assert not shipped.was_there
    assert there(shipped.path) == {entry.path: entry.source.read_bytes() for entry in tree.entries}
    os.utime(Path(shipped.path) / MARKER)
    nobody = replace(place, python="/no/python")  # asked only where something was touched
    assert ship(tree, shell, nobody).was_there


@pytest.mark.slow
def test_what_is_written_while_a_shell_looks_is_noticed_the_next_time(
    folder: Path, shell: StreamShell, place: Workplace, tmp_path: Path
) -> None:
    tree = git_tree(folder)
    path, find = Path(ship(tree, shell, place).path), tmp_path / "find"
    find.write_text(f'#!/bin/sh\n/usr/bin/find "$@"\nsleep 0.1\necho changed > {shlex.quote(str(path))}/train.py\n')
    find.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    look = ["sh", "-c", f"({_IS_WHOLE})", "sh", f"{path}/{MARKER}"]
    assert subprocess.run(look, env=environment, capture_output=True).returncode == 0

    assert not ship(tree, shell, place).was_there
    assert list((path.parent / ".parts").iterdir()) == []


@pytest.mark.slow
def test_what_a_job_writes_beside_the_files_of_its_tree_stays(
    folder: Path, shell: StreamShell, place: Workplace
) -> None:
    tree = git_tree(folder)
    path = Path(ship(tree, shell, place).path)
    _tick(path)
    (path / "__pycache__").mkdir()
    (path / "results.txt").write_text("42")

    assert ship(tree, shell, place).was_there
    assert (path / "results.txt").read_text() == "42"


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_a_file_that_is_deleted_on_the_way_is_said_at_once(
    folder: Path, shell: StreamShell, place: Workplace, size: int
) -> None:
    (folder / "gone").write_bytes(random.Random(1).randbytes(size))
    tree = git_tree(folder)
    (folder / "gone").unlink()

    with pytest.raises(ShipError, match=r"gone changed while it was shipped \(No such file or directory\)"):
        ship(tree, shell, place)


@pytest.mark.parametrize("size", [10, 2_000_000])
@pytest.mark.parametrize(
    "put", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("train.py")], ids=["pipe", "folder", "link"]
)
def test_a_file_that_becomes_something_else_on_the_way_is_said_at_once(
    folder: Path, shell: StreamShell, place: Workplace, size: int, put: Callable[[Path], None]
) -> None:
    """To open a named pipe would wait for whoever writes into it, and a link may lead to what was never to be sent."""
    (folder / "was").write_bytes(random.Random(1).randbytes(size))
    tree = git_tree(folder)
    (folder / "was").unlink()
    put(folder / "was")

    with pytest.raises(ShipError, match=r"was changed while it was shipped \((no regular file|Too many levels.*)\)"):
        ship(tree, shell, place)


def test_a_file_that_changes_on_the_way_is_noticed(folder: Path, shell: StreamShell, place: Workplace) -> None:
    tree = git_tree(folder)
    (folder / "train.py").write_text("print('TRAIN')\n")

    with pytest.raises(ShipError, match=r"train\.py changed while it was shipped"):
        ship(tree, shell, place)

    assert not Path(place.tree_dir(tree.hash)).exists()
    assert there(ship(git_tree(folder), shell, place).path)["train.py"] == b"print('TRAIN')\n"


def test_progress_counts_every_byte_and_knows_the_rate(folder: Path, shell: StreamShell, place: Workplace) -> None:
    (folder / "large").write_bytes(os.urandom(5_000_000))
    told: list[Progress] = []

    ship(git_tree(folder), shell, place, on_progress=told.append)

    assert told[-1].sent_bytes == told[-1].total_bytes > 5_000_000
    assert [step.sent_bytes for step in told] == sorted(step.sent_bytes for step in told)
    assert all(step.bytes_per_s > 0 for step in told if step.sent_bytes)


def test_a_disk_that_is_full_over_there_is_said(folder: Path, shell: StreamShell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ShipError, match="Not a directory"):
        ship(git_tree(folder), shell, Workplace(f"{tmp_path}/file/work", sys.executable, str(tmp_path)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB and 300 files."""
    disk = tmp_path / "small"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=300", "none", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


HINT = r"  `draftyard gc gpu --older-than 0s` removes what nothing there needs: .*; ship again then"


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [1, 40])
def test_a_tree_that_would_fill_the_disk_over_there_is_refused_before_anything_is_sent(
    folder: Path, shell: StreamShell, small_disk: Path, num_files: int
) -> None:
    """Others save checkpoints there: 4 MiB are free, and what is to come would fit but for what stays free."""
    chance = random.Random(num_files)
    for number in range(num_files):
        (folder / f"f{number}").write_bytes(chance.randbytes(3900 * 1024 // num_files))
    (small_disk / "filler").write_bytes(bytes(4 * 1024**2))
    place, tree = Workplace(f"{small_disk}/work", sys.executable, "/"), git_tree(folder)
    told: list[str] = []

    with pytest.raises(DiskFull) as full:
        ship_told(Site(replace(LOCAL, name="gpu"), shell, place, {}), tree, told.append)

    assert re.fullmatch(
        rf"local: {small_disk}/work: too little room: 3.[89] MiB are still to be written there, 4.0 MiB are free "
        rf"and 0.4 MiB of the disk stay free for others(; \S+ \S+ too few)?\n{HINT}",
        str(full.value),
    )
    assert told == []
    assert [path for path in (small_disk / "work").rglob("*") if path.is_file()] == []
    (small_disk / "filler").unlink()
    assert there(ship(tree, shell, place).path) == {entry.path: entry.source.read_bytes() for entry in tree.entries}


def test_a_tree_of_what_lies_there_already_is_made_only_where_there_is_room_for_the_copies(
    folder: Path, shell: StreamShell, small_disk: Path
) -> None:
    (folder / "large").write_bytes(bytes(5 * 1024**2))
    place = Workplace(f"{small_disk}/work", sys.executable, "/")
    ship(git_tree(folder), shell, place)
    (folder / "large").rename(folder / "renamed")

    with pytest.raises(DiskFull, match="too little room"):
        ship(git_tree(folder), shell, place)


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [1, 40])
def test_a_disk_that_fills_up_over_there_leaves_nothing_that_looks_whole_and_the_next_ship_completes(
    folder: Path, shell: StreamShell, small_disk: Path, num_files: int
) -> None:
    """One large content goes on where the disk was full; small ones that had arrived are not sent again."""
    chance = random.Random(num_files)
    for number in range(num_files):
        (folder / f"f{number}").write_bytes(chance.randbytes(6 * 1024**2 // num_files))
    place, tree = Workplace(f"{small_disk}/work", sys.executable, "/"), git_tree(folder)

    def another_writes(_: str) -> None:
        """Once there was room, and before anything has come."""
        (small_disk / "filler").write_bytes(bytes(4 * 1024**2))

    with pytest.raises(ShipError) as full:
        ship_told(Site(replace(LOCAL, name="gpu"), shell, place, {}), tree, another_writes)
    assert re.fullmatch(
        rf"local: {small_disk}/work.*: No space left on device: [\d.]+ [KM]iB are still to be written there, [\d.]+ [KM]?i?B are free "
        rf"and 0.4 MiB of the disk stay free for others(; \S+ \S+ too few)?\n{HINT}",
        str(full.value),
    )
    assert not Path(place.tree_dir(tree.hash)).exists()
    (small_disk / "filler").unlink()
    shipped = ship(tree, shell, place)

    assert there(shipped.path) == {entry.path: entry.source.read_bytes() for entry in tree.entries}
    assert shipped.sent_bytes < 5 * 1024**2


def test_a_disk_that_takes_no_further_file_over_there_says_how_many(
    folder: Path, shell: StreamShell, small_disk: Path
) -> None:
    for number in range(400):
        (folder / f"f{number}").write_text(f"{number}")

    with pytest.raises(DiskFull, match=r"too little room: .* with room for \d+ of \d+ files$"):
        ship(git_tree(folder), shell, Workplace(f"{small_disk}/work", sys.executable, "/"))


def test_a_put_onto_a_full_disk_says_so_and_leaves_the_old_file(
    shell: StreamShell, small_disk: Path, tmp_path: Path
) -> None:
    (small_disk / "there").write_text("old")
    (tmp_path / "large").write_bytes(bytes(9 * 1024**2))

    with pytest.raises((DraftyardError, OSError), match="No space left on device"):
        shell.put(tmp_path / "large", f"{small_disk}/there")

    assert [(path.name, path.read_text()) for path in small_disk.iterdir()] == [("there", "old")]


def test_a_host_without_its_python_says_how_to_get_one(tmp_path: Path, shell: StreamShell) -> None:
    with pytest.raises(Exception, match=r"no python9 there\n.*apt-get install python3") as refused:
        workplace(shell, replace(LOCAL, python="python9"))

    assert getattr(refused.value, "reason", None) == "missing_dependency"


@pytest.mark.parametrize(("work_dir", "expected"), [("~/w", "{home}/w"), ("/abs/", "/abs"), (None, "{data}/draftyard")])
def test_the_work_folder_is_absolute_whatever_was_written(
    work_dir: str | None, expected: str, shell: StreamShell
) -> None:
    data = os.environ.get("XDG_DATA_HOME", f"{Path.home()}/.local/share")

    found = workplace(shell, replace(LOCAL, work_dir=work_dir)).work_dir

    assert found == expected.format(home=Path.home(), data=data)


# Over a real connection ------------------------------------------------------------------------------


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[StreamShell, Workplace]]:
    with sshd.running(tmp_path / "sshd") as server:
        host = replace(Hosts.load(None, server.config_file).find("box"), python=sys.executable)
        shell = connect(host)
        try:
            yield shell, workplace(shell, host)
        finally:
            shell.close()


@pytest.mark.slow
def test_over_ssh_the_same_arrives(folder: Path, far: tuple[StreamShell, Workplace]) -> None:
    shell, place = far
    (folder / "large").write_bytes(os.urandom(4_000_000))
    for number in range(100):
        (folder / f"f{number}").write_text(f"{number}" * 100)
    tree = git_tree(folder)

    shipped = ship(tree, shell, place)

    assert there(shipped.path) == {entry.path: entry.source.read_bytes() for entry in tree.entries}
    assert place.work_dir.endswith("/sshd/home/.local/share/draftyard")


@pytest.mark.slow
def test_whatever_is_done_to_a_tree_it_lies_there_as_it_lies_here(
    folder: Path, far: tuple[StreamShell, Workplace]
) -> None:
    """Rounds of random deeds: new, grown, cut, doubled, renamed and deleted files of every size that is handled in a way of its
    own, modes, links. The oracle is the folder itself."""
    (shell, place), chance = far, random.Random(4)
    sizes = [0, 1, 1000, 65_536, 1024**2 - 1, 1024**2, 1024**2 + 1, 3_000_000]
    for round_number in range(6):
        for number in range(6):
            file = folder / chance.choice(["a", "b/c", "b/d/e", "ü x", "'q'", "b/$y"])
            file.parent.mkdir(parents=True, exist_ok=True)
            deed = chance.choice(["new", "new", "same", "delete", "rename", "link"]) if round_number else "new"
            if deed == "delete" or file.is_symlink():
                file.unlink(missing_ok=True)
            elif deed == "rename" and file.exists():
                file.rename(file.with_name(f"{file.name}{number}"))
            elif deed == "link" and not file.exists():
                file.symlink_to("train.py" if file.parent == folder else "../train.py")
            else:
                size = chance.choice(sizes)
                content = chance.choice([chance.randbytes(size), bytes(size)])
                file.write_bytes((folder / "train.py").read_bytes() if deed == "same" else content)
                file.chmod(chance.choice([0o644, 0o755]))

        shipped = Path(ship(git_tree(folder), shell, place).path)

        assert _described(shipped) == _described(folder)


def _described(root: Path) -> dict[str, tuple[bool, str]]:
    """By path: whether it is a program, and its content's hash or where it leads."""
    found = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = (False, str(path.readlink()))
        elif path.is_file() and name != MARKER and not name.startswith(".git/"):
            found[name] = (os.access(path, os.X_OK), hashlib.sha256(path.read_bytes()).hexdigest())
    return found


@pytest.mark.slow
def test_over_ssh_an_unchanged_tree_of_300_files_is_known_in_a_fifth_of_a_second(
    folder: Path, far: tuple[StreamShell, Workplace]
) -> None:
    shell, place = far
    for number in range(300):
        (folder / f"f{number}.py").write_text(f"x = {number}\n" * 300)
    ship(git_tree(folder), shell, place)

    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert ship(git_tree(folder), shell, place).was_there
        times.append(time.perf_counter() - began)

    began = time.perf_counter()
    for _ in range(5):
        shell.run(["true"])
    assert min(times) < max(0.2, 3 * (time.perf_counter() - began))  # on a machine that is busy with something else


@pytest.fixture
def long_line(tmp_path: Path) -> Iterator[tuple[SshShell, Workplace, delay.Trips]]:
    trips = delay.Trips()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(sshd.running(tmp_path / "sshd"))
        port = stack.enter_context(delay.line(server.port, one_way_s=0.02, trips=trips))
        slow = replace(server, alias="far", port=port)
        server.config_file.write_text(slow.config())
        server.known_hosts.write_text(f"[{server.address}]:{port} {server.host_key}\n")
        host = replace(Hosts.load(None, server.config_file).find("far"), python=sys.executable)
        shell = connect(host)
        stack.callback(shell.close)
        assert isinstance(shell, SshShell)
        yield shell, workplace(shell, host), trips


def _trips(shell: SshShell, trips: delay.Trips, act: Callable[[], object]) -> int:
    """Round trips of one act, begun like any act while a screen or a follower is at work: with a session in reserve."""
    ends = time.monotonic() + 30
    while shell._link is None or shell._link._spare is None:
        assert time.monotonic() < ends
        time.sleep(0.01)
    trips.start()
    act()
    return trips.number


@pytest.mark.slow
def test_a_ship_costs_two_round_trips_and_one_where_nothing_changed(
    folder: Path, long_line: tuple[SshShell, Workplace, delay.Trips]
) -> None:
    """Counted and not timed. A question and its answer are one, what the host lacks is the other, however much it is."""
    shell, place, trips = long_line
    for number in range(300):
        (folder / f"f{number}.py").write_text(f"x = {number}\n" * 300)
    (folder / "large").write_bytes(os.urandom(1_500_000))  # fits into the window that sshd gives

    def act() -> object:
        return ship(git_tree(folder), shell, place)

    cold = _trips(shell, trips, act)
    same = _trips(shell, trips, act)
    (folder / "f7.py").write_text("y = 1\n")
    one = _trips(shell, trips, act)

    assert (cold, same, one) == (2, 1, 2)


# What the other end refuses --------------------------------------------------------------------------

SHA = "0" * 64


@pytest.mark.parametrize(
    "entries",
    [
        [["/etc/passwd", 0o644, 1, SHA, None]],
        [["../up", 0o644, 1, SHA, None]],
        [["a/../../up", 0o644, 1, SHA, None]],
        [["", 0o644, 1, SHA, None]],
        [["a\0b", 0o644, 1, SHA, None]],
        [["a", 0o644, 1, SHA, None], ["a", 0o644, 1, SHA, None]],
        [["a", 0o644, 1, SHA, None], ["a/b", 0o644, 1, SHA, None]],
        [["link", 0o644, 0, "", "a"], ["link/b", 0o644, 1, SHA, None]],
        [["link", 0o644, 0, "", "/etc"]],
        [["link", 0o644, 0, "", "../.."]],
        [["d/link", 0o644, 0, "", "../../x"]],
        [["s", 0o644, 0, "", "."], ["t", 0o644, 0, "", "s/.."]],
        [["./s", 0o644, 0, "", "."], ["t", 0o644, 0, "", "a"]],
        [["link", 0o644, 0, "", "link"]],
        [["link", 0o644, 0, "", "a\0b"]],
        [["a", 0o644, 1, "../../../evil", None]],
        [[MARKER, 0o644, 1, SHA, None]],
    ],
)
def test_a_manifest_that_leaves_its_folder_is_refused_on_the_host(
    entries: list[Any], shell: StreamShell, place: Workplace
) -> None:
    header = zlib.compress(json.dumps({"hash": SHA, "entries": entries}).encode())
    source = Source.of(len(header).to_bytes(4, "big") + header)

    answer = run_script(shell, place, "receive", ["make", place.work_dir], source=source)

    assert answer["error"].startswith("refused: ")
    assert not Path(place.work_dir, "trees").exists()


_names = st.sampled_from(["a", "b", "c", "d/a", "d/b", "d/e/a"])
_targets = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "..", "..", "."]), min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(_names, _targets, min_size=1, max_size=5))
def test_a_link_is_accepted_only_where_the_file_system_keeps_it_inside(links: dict[str, str]) -> None:
    """The oracle is a real tree of those links: where does the system find each of them to lead, if anywhere?"""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(os.path.realpath(folder)) / "tree"
        (tree / "d" / "e").mkdir(parents=True)
        for path, target in links.items():
            (tree / path).symlink_to(target)
        ends = {path: Path(os.path.realpath(tree / path)) for path in links}
        inside = {path for path, end in ends.items() if end == tree or tree in end.parents}
        somewhere = {path for path in inside if (tree / path).exists()}

    accepted = {path for path in links if link_stays_inside(path, links)}
    assert somewhere <= accepted <= inside


def test_links_that_leave_by_way_of_each_other_are_refused_on_both_sides(
    folder: Path, shell: StreamShell, place: Workplace
) -> None:
    links = {"s": ".", "t": "s/..", "u": "t/../secret"}
    for name, target in links.items():
        (folder / name).symlink_to(target)

    with pytest.raises(ShipError, match=r"/t: a link that leaves the tree or leads in a circle \(s/\.\.\)"):
        git_tree(folder)
    with pytest.raises(Refused, match=r"'t' -> 's/\.\.'"):
        check([[name, 0o644, 0, "", target] for name, target in links.items()])


def test_a_link_to_what_is_not_there_yet_stays_inside() -> None:
    assert link_stays_inside("d/link", {"d/link": "../checkpoints/last"})


def test_a_chain_of_links_that_doubles_at_every_step_is_judged_at_once() -> None:
    links = {f"l{step + 1}": f"l{step}/l{step}" for step in range(500)} | {"l0": "."}

    assert link_stays_inside("l3", links)
    assert not link_stays_inside("l500", links)


@given(st.lists(st.tuples(st.text(max_size=12), st.none() | st.text(max_size=12)), max_size=5))
def test_whatever_a_manifest_holds_the_check_accepts_only_paths_inside(rows: list[tuple[str, str | None]]) -> None:
    entries = [[path, 0o644, 0, SHA, link] for path, link in rows]
    try:
        check(entries)
    except Refused:
        return
    root = Path("/root/of/tree")
    for path, _ in rows:
        assert root in Path(os.path.normpath(root / path)).parents


@pytest.mark.slow
def test_a_small_file_costs_little_more_than_reading_and_writing_it(
    tmp_path: Path, shell: StreamShell, place: Workplace
) -> None:
    """100,000 of them in a minute. Work is counted and not time, beside writing and hashing the same files plainly."""
    folder, number = tmp_path / "many", 5_000
    before = _work_s()
    for inner in range(number):
        if inner % 1000 == 0:
            (folder / f"d{inner // 1000}").mkdir(parents=True)
        (folder / f"d{inner // 1000}" / f"f{inner}").write_text(f"{inner}")
    for path in folder.glob("*/*"):
        hashlib.sha256(path.read_bytes()).hexdigest()
    plain_s = _work_s() - before
    _git(folder, "init", "-q")
    before = _work_s()

    shipped = ship(git_tree(folder), shell, place)

    assert shipped.sent_files == number
    assert _work_s() - before < 5 * plain_s
    shutil.rmtree(folder)


def _work_s() -> float:
    """Seconds of processor time of this process and the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def test_a_shipping_that_takes_long_says_how_far_it_is_and_how_fast() -> None:
    told: list[str] = []
    now_s = 0.0
    say = paced(told.append, "shipping 9 files to gpu", clock=lambda: now_s)
    for now_s in (0.5, 1.9, 2.1, 3.0, 6.0, 7.2):
        say(Progress(int(now_s * 2**20), 100 * 2**20, 2.0**20))

    assert told == ["shipping 9 files to gpu", "  2.1 of 100.0 MiB, 1.0 MiB/s", "  7.2 of 100.0 MiB, 1.0 MiB/s"]


def test_what_is_there_already_is_not_said_to_be_shipped(folder: Path, place: Workplace) -> None:
    told: list[str] = []
    site = Site(LOCAL, LocalShell(), place, {})

    for _ in range(3):
        ship_told(site, git_tree(folder), told.append)

    assert told == ["shipping 1 file to local"]


def test_sizes_that_look_alike_say_what_is_lacking() -> None:
    disk = {"to_come_bytes": 2**31 + 1, "free_bytes": 2**31 + 2**28, "reserve_bytes": 2**28}

    told = str(_error("/srv: too little room", {**disk, "to_come_files": 1, "free_files": 9}))

    assert told.endswith(
        "2.00 GiB are still to be written there, 2.25 GiB are free and 0.25 GiB of the disk stay free for others; 1 B too few"
    )
