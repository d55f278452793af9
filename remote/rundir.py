"""RunDir: the name of every file in a run's folder, and how files appear whole.

    <root>/spec.json                         what runs (in)
    <root>/job.json                          run id, kind of job, argv of the job (in)
    <root>/env                               secrets and settings for the job, mode 0600 (in)
    <root>/attempts/<n>/events.<writer>.jsonl   append only, one writer each
                        stdout.log, stderr.log  raw bytes, for people
                        supervisor.json         pid, start ticks, boot id
                        exit.json               written once, whole
                        stop.json               a wish to stop, with grace
                        artifacts/              files the job leaves (snapshots, exports)
    <root>/checkpoints/step-<8 digits>/      shared by attempts; whole when it exists

Names only: it starts nothing and reads no meaning out of the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.wire import bounded, whole_text

DEEPEST = 64  # levels of what a file of ours holds, as of a recipe's
LARGEST_BYTES = 16 * 2**20  # of one; what is larger is none of ours, and not whole
_WRITER = re.compile(r"(?!(?:stdout|stderr)\Z)[A-Za-z0-9_-]{1,64}")  # those two are the logs beside the events
_EVENTS = re.compile(r"events\.(?P<writer>[^.]*)\.jsonl(?P<rotated>[.-][A-Za-z0-9._-]+)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_ATTEMPT = re.compile(r"[1-9][0-9]{0,8}")


def has_control(name: str) -> bool:
    """Whether it holds a line break or another control character, which would forge a line wherever it is printed."""
    return _CONTROL.search(name) is not None


def check_writer(writer: str) -> None:
    """Raises ValueError where events under this name would not be read."""
    if _WRITER.fullmatch(writer) is None:
        due = "up to 64 letters, digits, - and _, and neither stdout nor stderr"
        raise ValueError(f"the name of the writer is {writer!r}; it must be {due}, such as eval-en")


def writer_of(name: str) -> tuple[str, bool] | None:
    """Writer, and whether the file was rotated away, of a file's name; None where it holds no events."""
    found = _EVENTS.fullmatch(name)
    if found is None or _WRITER.fullmatch(found["writer"]) is None:
        return None
    return found["writer"], found["rotated"] is not None


@dataclass(frozen=True)
class AttemptDir:
    root: Path

    @property
    def number(self) -> int:
        return int(self.root.name)

    @property
    def stdout_log(self) -> Path:
        return self.root / "stdout.log"

    @property
    def stderr_log(self) -> Path:
        return self.root / "stderr.log"

    @property
    def supervisor_json(self) -> Path:
        return self.root / "supervisor.json"

    @property
    def exit_json(self) -> Path:
        return self.root / "exit.json"

    @property
    def stop_json(self) -> Path:
        return self.root / "stop.json"

    @property
    def on_end_log(self) -> Path:
        return self.root / "on_end.log"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    def events(self, writer: str) -> Path:
        return self.root / f"events.{writer}.jsonl"


@dataclass(frozen=True)
class RunDir:
    root: Path

    @property
    def spec_json(self) -> Path:
        return self.root / "spec.json"

    @property
    def job_json(self) -> Path:
        return self.root / "job.json"

    @property
    def env_file(self) -> Path:
        return self.root / "env"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.root / "attempts" / str(number))

    def attempts(self) -> list[AttemptDir]:
        """Every attempt, oldest first."""
        folder = self.root / "attempts"
        numbers = sorted(int(entry.name) for entry in folder.glob("*") if _ATTEMPT.fullmatch(entry.name))
        return [self.attempt(number) for number in numbers]

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def whole_checkpoints(self) -> list[Path]:
        """Checkpoints that appeared whole, oldest first; a half-written one has another name."""
        named = self.checkpoints.glob("step-????????")
        return sorted(path for path in named if path.name[5:].isdecimal() and path.is_dir())


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Writes beside the target, syncs, renames: a reader sees the old file or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """Of a file's bytes, whatever its size."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(4 * 1024**2):
            digest.update(piece)
    return digest.hexdigest()


def write_json(path: Path, body: dict[str, Any], mode: int = 0o644) -> None:
    write_whole(path, (json.dumps(body, indent=1, sort_keys=True) + "\n").encode(), mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file, or None when it is absent or not whole."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as stream:
            return json_object(stream.read(LARGEST_BYTES))
    except OSError:
        return None


def json_object(text: bytes) -> dict[str, Any] | None:
    """The object that `text` is, or None when it is not whole or nested deeper than `DEEPEST`.

    A whole number that no database holds becomes infinity, half a surrogate pair a question mark.
    """
    try:
        body = bounded(json.loads(text), DEEPEST)
    except (ValueError, RecursionError):
        return None
    return whole_text(body) if isinstance(body, dict) else None
