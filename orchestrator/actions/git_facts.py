"""What git says of a folder: provenance kept with a run. A folder outside git has none, and that is fine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 5.0  # a huge untracked tree or a sleeping disk must not hold a launch
MAX_PATCH_BYTES = 1_000_000


@dataclass(frozen=True)
class GitFacts:
    commit: str | None = None
    is_dirty: bool = False
    patch: str = ""  # uncommitted edits of tracked files below the folder


def git_facts(folder: Path) -> GitFacts:
    """Commit and uncommitted edits; nothing of it when git is absent, slow, or the folder is not in a work tree."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return GitFacts()
    status = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    patch = _git(folder, "diff", "HEAD", "--", ".") if status else ""
    return GitFacts(commit.strip(), bool(status), _bounded(patch or ""))


def _bounded(patch: str) -> str:
    """Whole lines up to the limit, and a last one that says what is missing: a patch cut in silence lies."""
    whole = patch.encode()
    if len(whole) <= MAX_PATCH_BYTES:
        return patch
    kept = whole[:MAX_PATCH_BYTES].rpartition(b"\n")[0]
    told = f"# cut here: {len(kept)} of {len(whole)} bytes of the uncommitted edits are kept\n"
    return kept.decode(errors="replace") + "\n" + told


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None
