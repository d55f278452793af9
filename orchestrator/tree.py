"""Which files make a tree, and the one name they have together.

A tree is what git sees of a folder (tracked files and untracked ones that are not ignored), or the
bundled trainer. A folder that git knows nothing of, such as an example in an installed package, is
taken as it lies, without hidden files and up to a size. Its hash is the sha256 of its manifest: paths, modes (executable or not, as git has
them), content hashes, link targets. Nothing is sent here and nothing is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import remote
from orchestrator.errors import DraftyardError
from orchestrator.shell.stream import told
from remote.manifest import MARKER, is_own, link_stays_inside, open_file

GIT_LIMIT_S = 60.0
SMALL_BYTES = 256 * 1024
# No ignore rules say what of a folder without git is data, so a large one is a question and not shipped.
PLAIN_FILES, PLAIN_BYTES = 2_000, 256 * 1024**2


class ShipError(DraftyardError):
    """A tree that cannot travel, or a host that cannot take it."""

    reason = "ship"


class DiskFull(ShipError):
    """The host's disk took no more; says how much was still to come, and how much is free."""


@dataclass(frozen=True)
class Entry:
    """One file or link of a tree. `path` is relative, with forward slashes."""

    path: str
    mode: int  # 0o755 or 0o644
    size_bytes: int
    sha256: str  # empty for a link
    link: str | None
    source: Path  # where it lies on this machine

    def row(self) -> list[Any]:
        return [self.path, self.mode, self.size_bytes, self.sha256, self.link]


@dataclass(frozen=True)
class Tree:
    entries: tuple[Entry, ...]  # sorted by path
    is_bundled: bool = False

    @cached_property
    def hash(self) -> str:
        rows = json.dumps([entry.row() for entry in self.entries], ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(rows.encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)


def bundled_tree(own: Path | None = None, names: Sequence[str] = ()) -> Tree:
    """`remote/` and `recipes/data` of this installation: what the bundled trainer needs on a host.

    `own` is a recipe's data folder: files of `names` that lie there travel too, in place of bundled ones of that name.
    """
    code = Path(remote.__file__).parent
    data = code.parent / "recipes" / "data"
    files = {f"remote/{path}": code / path for path in _walk(code)}
    files |= {f"recipes/data/{path}": data / path for path in _walk(data)}
    files |= {
        f"recipes/data/{name}": own / name for name in _inside(names) if own is not None and (own / name).is_file()
    }
    return Tree(_entries(sorted(files.items())), is_bundled=True)


def _inside(names: Sequence[str]) -> list[str]:
    """The relative ones, which travel; an absolute path means a file on the host. ShipError where one leaves its folder."""
    for name in names:
        if ".." in PurePosixPath(name).parts:
            raise ShipError(
                f"the data file {name!r} leaves the recipe's data folder; put it there, or name an absolute path"
            )
    return [name for name in names if not PurePosixPath(name).is_absolute()]


def git_tree(folder: Path, *, limit_s: float = GIT_LIMIT_S) -> Tree:
    """What git sees of the folder; where it sees no file at all (no repository, or all of it ignored), the plain files.

    ShipError names what cannot travel, or a git that does not answer within `limit_s`.
    """
    if not folder.is_dir():
        raise ShipError(f"{folder}: no such folder")
    names = _git_files(folder, limit_s) if _is_in_repository(folder) else []
    return Tree(_entries([(name, folder / name) for name in names or _plain_files(folder)]))


def with_remote(tree: Tree) -> Tree:
    """The tree with our `remote/` beside the user's files: the supervisor and report.py come along."""
    own = [entry for entry in bundled_tree().entries if entry.path.startswith("remote/")]
    if any(entry.path.split("/")[0] == "remote" for entry in tree.entries):
        raise ShipError(
            "the folder to ship has a `remote` of its own; draftyard puts its supervisor there, rename yours"
        )
    return Tree(tuple(sorted([*tree.entries, *own], key=lambda entry: entry.path)))


def left_out(tree: Tree, folder: Path, words: Sequence[str]) -> list[str]:
    """Files and folders that words of a recipe name and git ignores: the job would miss them on the host. Sorted."""
    there = {entry.path for entry in tree.entries}
    there |= {str(parent) for path in there for parent in PurePosixPath(path).parents}
    named = {os.path.normpath(word) for word in words if word and "\0" not in word and not os.path.isabs(word)}  # noqa: PTH117  # text, not files
    return sorted(name for name in named - there if not name.startswith("..") and _holds_something(folder / name))


def _holds_something(path: Path) -> bool:
    """A file, or a folder with one in it: git sees no empty folder either."""
    try:
        return path.is_file() or (path.is_dir() and any(below.is_file() for below in path.rglob("*")))
    except OSError:  # a word that is no file name at all, such as one of 300 letters
        return False


def _walk(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if "__pycache__" not in path.parts and not path.is_dir() and not name.endswith((".pyc", ".tmp")):
            yield name


def _is_in_repository(folder: Path) -> bool:
    return any((place / ".git").exists() for place in (folder.absolute(), *folder.absolute().parents))


def _plain_files(folder: Path) -> list[str]:
    """Everything below the folder but hidden names (.git, .venv, .env) and compiled Python. ShipError when it is large or nothing."""
    names: list[str] = []
    size_bytes = 0
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        links = [name for name in folders if (Path(where) / name).is_symlink()]
        for name in [*links, *files]:
            if not name.startswith(".") and not name.endswith(".pyc"):
                path = Path(where) / name
                names.append(path.relative_to(folder).as_posix())
                size_bytes += path.lstat().st_size
        if len(names) > PLAIN_FILES or size_bytes > PLAIN_BYTES:
            raise ShipError(
                f"{folder}: not in a git repository and large: over {PLAIN_FILES:,} files or {PLAIN_BYTES // 1024**2} MiB\n"
                f"  git says which files belong to it: git init {shlex.quote(str(folder))}, and name the rest in its .gitignore"
            )
    if not names:
        raise ShipError(f"{folder}: there is no file to ship")
    return names


def _git_files(folder: Path, limit_s: float) -> list[str]:
    command = [
        "git",
        "-C",
        str(folder),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--deduplicate",
    ]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ShipError(
            f"{folder}: git did not list the files within {limit_s:g} s; is there a huge folder that .gitignore should name?"
        ) from error
    except FileNotFoundError as error:
        raise ShipError("no `git` on this machine; it says which files belong to the tree") from error
    if done.returncode:
        raise ShipError(f"{folder}: git cannot list its files: {told(done.stderr)}")
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    for name in names:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            raise ShipError(
                f"{named(folder / name)}: a git repository inside the tree; its files are not listed. Ignore it or make it plain files"
            )
    return [name for name in names if os.path.lexists(folder / name)]  # deleted but still tracked: gone


def _entries(files: list[tuple[str, Path]]) -> tuple[Entry, ...]:
    entries = tuple(_entry(name, path) for name, path in sorted(files))
    links = {entry.path: entry.link for entry in entries if entry.link is not None}
    for entry in entries:
        if entry.link is not None and not link_stays_inside(entry.path, links):
            raise ShipError(
                f"{named(entry.source)}: a link that leaves the tree or leads in a circle ({named(entry.link)}); "
                "copy what it points to, or ignore it"
            )
    return entries


def _entry(name: str, path: Path) -> Entry:
    if is_own(name):
        raise ShipError(f"{named(path)}: names that begin with {MARKER} are draftyard's own; rename it")
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(path)  # noqa: PTH115  # Path would tidy the text of the link
        return Entry(name, 0o644, 0, "", target, path)
    if not stat.S_ISREG(found.st_mode):
        raise ShipError(f"{named(path)}: neither a file nor a link; ignore it")
    mode = 0o755 if found.st_mode & 0o100 else 0o644
    # Small files in one read: the buffer that file_digest makes for each costs more than they do.
    is_small = found.st_size < SMALL_BYTES
    sha256 = digest_of_small(path) if is_small else sha256_of(path)
    return Entry(name, mode, found.st_size, sha256, None, path)


def named(path: Path | str) -> str:
    """A name or a link's target for a message: one line, whatever letters are in it."""
    return str(path) if str(path).isprintable() else repr(str(path))


def digest_of_small(path: Path) -> str:
    with open_file(path) as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def sha256_of(path: Path) -> str:
    with open_file(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
