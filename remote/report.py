"""What a training script calls to report steps, memory, checkpoints and failures.

Standard library only; it needs `wire.py`, `rundir.py` and `hiding.py` beside it in a folder named `remote`
and nothing else. In a shipped tree that folder is there; elsewhere four copied files are enough:

    from remote.report import Reporter

    reporter = Reporter.from_environment()
    with reporter.job():
        reporter.start(num_steps=100)
        for step in range(1, 101):
            reporter.metrics(step, {"loss": train_one_step()})

The promise: every event is one whole line, appended by one `os.write` to a file that has this one
writer, with a seq that grows by one and goes on after a restart of the same writer. A full disk
never stops the training: what could not be written is counted and said in a note once there is
room again. Lines are not synced to the disk one by one; a power cut may cost the newest ones.

What the job was given in secret (`hiding`) is in no event. It does not read meaning out of an exception,
it never prints, and it is not for signal handlers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remote.hiding import secrets_of, told
from remote.rundir import AttemptDir, RunDir, check_writer, has_control
from remote.wire import Event, WireError, decode, encode

Value = float | Sequence[float]  # a list becomes name_1 .. name_n when it is stored


class UserFault(ValueError):
    """A mistake of the person who asked (data, settings, a file that is not there): one line, which needs no traceback.

    `Reporter` keeps it without one; a script that raises it inside `job` may print the line and exit with status 1.
    """


class Reporter:
    """Appends this process's events to `attempts/<n>/events.<writer>.jsonl`."""

    def __init__(
        self, attempt_root: Path, *, writer: str = "rank0", environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment`: where the secrets of the job stand; that of this process by default.

        Raises ValueError for a `writer` whose events would not be read (`rundir.check_writer`).
        """
        check_writer(writer)
        self.writer = writer
        self.artifacts: Path | None = AttemptDir(
            attempt_root
        ).artifacts  # files the job leaves; None where it has no run
        self._run_root: Path | None = attempt_root.absolute().parent.parent
        self._secrets = secrets_of(os.environ if environment is None else environment)
        self._path = AttemptDir(attempt_root).events(writer)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._open(self._path)

    @classmethod
    def from_environment(cls, writer: str | None = None) -> Reporter:
        """The reporter of the run this process belongs to; run by hand, it reports to nowhere.

        The writer is `rank<RANK>`, so that the same script is right under torchrun.
        """
        name = writer or f"rank{os.environ.get('RANK', '0')}"
        run_dir = os.environ.get("DRAFTYARD_RUN_DIR")
        if run_dir is None:
            return cls._nowhere(name)
        attempt = RunDir(Path(run_dir)).attempt(int(os.environ.get("DRAFTYARD_ATTEMPT", "1")))
        return cls(attempt.root, writer=name)

    @classmethod
    def _nowhere(cls, writer: str) -> Reporter:
        check_writer(writer)  # by hand as in a run, so that a mistake shows before it costs one
        reporter = cls.__new__(cls)
        reporter.writer, reporter.artifacts = writer, None
        reporter._run_root = reporter._secrets = None
        reporter._open(Path(os.devnull))
        return reporter

    def _open(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._seq, self._torn = _continue_after(path)
        self._lock = threading.Lock()
        self._num_lost = 0
        self._lost_reason = ""
        self._is_final = False
        self._told: BaseException | None = None

    # What a job says, in the order it usually says it -------------------------------------------

    def start(
        self,
        *,
        versions: Mapping[str, str] | None = None,
        devices: Sequence[Mapping[str, Any]] = (),
        choices: Mapping[str, str] | None = None,
        num_steps: int | None = None,
    ) -> None:
        """The job speaks: facts about it, and every choice it made with the reason.

        `num_steps`: the step it will end at, where the recipe does not say; progress and time left come from it.
        """
        self._emit(
            "start",
            pid=os.getpid(),
            writer=self.writer,
            versions=dict(versions or {"python": sys.version.split()[0]}),
            devices=list(devices),
            choices=dict(choices or {}),
            num_steps=num_steps,
        )

    def stage(self, name: str) -> None:
        """What the job does from now on: loading, training, evaluating, ..."""
        self._emit("stage", name=name)

    def progress(self, what: str, *, done: float, total: float | None, unit: str) -> None:
        """How far a long piece of work outside the step loop is."""
        self._emit("progress", what=what, done=done, total=total, unit=unit)

    def metrics(self, step: int, values: Mapping[str, Value]) -> None:
        """Numbers of one step, by the names of `wire.METRIC_UNITS` or names of the script's own."""
        self._emit("metrics", step=step, values=dict(values))

    def memory(
        self,
        stage: str,
        *,
        allocated_bytes: int | None,
        gpu: int | None = None,
        reserved_bytes: int | None = None,
        driver_bytes: int | None = None,
    ) -> None:
        """Peaks of one stage; without a GPU, `allocated_bytes` is the process's peak in RAM."""
        self._emit(
            "memory",
            stage=stage,
            gpu=gpu,
            allocated_bytes=allocated_bytes,
            reserved_bytes=reserved_bytes,
            driver_bytes=driver_bytes,
        )

    def rung(self, name: str, *, passed: bool, values: Mapping[str, Any] | None = None, message: str = "") -> None:
        """The result of one step of the smoke ladder."""
        self._emit("rung", name=name, passed=passed, values=dict(values or {}), message=message)

    def checkpoint(self, step: int, *, path: str | Path, size_bytes: int, is_best: bool = False) -> None:
        """A checkpoint exists, whole. `path`: below the run's folder, relative to it or absolute; kept relative.

        Raises UserFault for one elsewhere, which `resume` and `pull` would not find.
        """
        self._emit("checkpoint", step=step, path=self._below_run(path), size_bytes=size_bytes, is_best=is_best)

    def checkpoint_removed(self, step: int, *, path: str | Path) -> None:
        """The checkpoint reported with this `path` is gone: rotated away, or found torn."""
        self._emit("checkpoint_removed", step=step, path=self._below_run(path))

    def evaluation(self, step: int, *, protocol: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Acceptance length and its kin, with how they were measured."""
        self._emit("evaluation", step=step, protocol=dict(protocol), values=dict(values))

    def beat(self) -> None:
        """The supervisor is still here."""
        self._emit("beat", pid=os.getpid())

    def gpu(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """What the GPUs of the machine hold, as the supervisor sees them: index, uuid, used_bytes, total_bytes, utilisation."""
        self._emit("gpu", samples=list(samples))

    def note(self, text: str) -> None:
        """One line for a person."""
        self._emit("note", text=text)

    def failure(
        self,
        exception: BaseException,
        *,
        stage: str | None = None,
        step: int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Keeps an exception with its whole traceback, causes and notes included, uncut.

        The kind is the name of its class; what it means is decided by whoever reads it. Said once:
        the same exception passing `job` later is not said again.
        """
        if exception is self._told:
            return
        self._told = exception
        kind, is_users = type(exception), isinstance(exception, UserFault)
        self._emit(
            "failure",
            failure=f"{kind.__module__}.{kind.__qualname__}",
            message=str(exception) if is_users else "".join(traceback.format_exception_only(exception)).strip(),
            stage=stage,
            step=step,
            traceback="" if is_users else "".join(traceback.format_exception(exception)),
            facts=dict(facts or {}),
        )

    def final(self, outcome: str, *, exit_code: int = 0) -> None:
        """The job's last word: succeeded, failed or stopped. Only the first one counts."""
        if not self._is_final:
            self._is_final = True
            self._emit("final", outcome=outcome, exit_code=exit_code)

    @contextmanager
    def job(self) -> Iterator[Reporter]:
        """Ends the block with a final event; an escaping exception becomes a failure and goes on.

        It goes on so that the interpreter prints it to stderr and exits with a status other than 0.
        """
        try:
            yield self
        except SystemExit as exit_request:
            code = _exit_code(exit_request)
            self.final("succeeded" if code == 0 else "failed", exit_code=code)
            raise
        except KeyboardInterrupt:
            self.final("stopped", exit_code=130)
            raise
        except BaseException as exception:
            self.failure(exception)
            self.final("failed", exit_code=1)
            raise
        else:
            self.final("succeeded")
        finally:
            self.close()

    def close(self) -> None:
        """Gives the file back; events after it are dropped."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _below_run(self, path: str | Path) -> str:
        """The path relative to the run's folder, as it is spelled where it can be, else with every link followed."""
        if self._run_root is None:  # by hand: there is no run
            return str(path)
        for root, target in (
            (self._run_root, Path(path)),
            (self._run_root.resolve(), (self._run_root / path).resolve()),
        ):
            found = target.relative_to(root) if target.is_relative_to(root) else target
            is_below = not found.is_absolute() and found.parts and ".." not in found.parts
            if is_below and not has_control(found.as_posix()):
                return found.as_posix()
        raise UserFault(
            f"checkpoint {str(path)!r} is not below the run's folder {self._run_root}, where resume and pull look for it, "
            "or has a line break or the like in its name; "
            "save below $DRAFTYARD_RUN_DIR/checkpoints/ and tell that path"
        )

    # One line, one write ------------------------------------------------------------------------

    def _emit(self, kind: str, **fields: Any) -> None:
        with self._lock:
            if self._descriptor < 0:
                return
            if self._num_lost and self._append("note", {"text": self._loss_note()}):
                self._num_lost = 0
            if not self._append(kind, fields):
                self._num_lost += 1

    def _append(self, kind: str, fields: dict[str, Any]) -> bool:
        """Whether the whole line reached the file."""
        line = self._line(kind, fields)
        if self._torn:  # a half-written line gets its end, so that it cannot swallow this one
            line = b"\n" + line
        try:
            num_written = os.write(self._descriptor, line)
        except OSError as error:
            self._lost_reason = error.strerror or type(error).__name__
            return False
        self._torn = self._torn if num_written == 0 else not line[:num_written].endswith(b"\n")
        if num_written < len(line):
            self._lost_reason = f"only {num_written} of {len(line)} bytes were taken"
            return False
        self._seq += 1
        return True

    def _line(self, kind: str, fields: dict[str, Any]) -> bytes:
        event = Event(self._seq + 1, kind, time.time(), time.monotonic(), told(fields, self._secrets))
        try:
            return encode(event)
        except TypeError:  # a tensor, a numpy scalar, a path: spelled as a number or as text
            plain = told(_plain(fields), self._secrets)
            return encode(Event(event.seq, kind, event.wall_s, event.monotonic_s, plain))

    def _loss_note(self) -> str:
        return f"{self._num_lost} events before this one could not be written: {self._lost_reason}"


def _continue_after(path: Path) -> tuple[int, bool]:
    """The last seq in the file, and whether its last line is torn. The newest whole line is looked for from the end."""
    size = path.stat().st_size if path.is_file() else 0
    window = min(size, 64 * 1024)
    with path.open("rb") as stream:
        while size:
            stream.seek(size - window)
            tail = stream.read(window)
            is_torn = not tail.endswith(b"\n")
            for line in reversed(tail.split(b"\n")):
                try:
                    return decode(line).seq, is_torn
                except WireError:
                    continue
            if window == size:
                return 0, is_torn
            window = min(size, window * 4)
    return 0, False


def _exit_code(exit_request: SystemExit) -> int:
    if exit_request.code is None:
        return 0
    return exit_request.code if isinstance(exit_request.code, int) else 1


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: numbers stay numbers, what is no number becomes its text."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # a tensor or a numpy value
        return _plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value)
