"""Starts one attempt of a job in its own session, watches it, stops it, and writes how it ended.

    python -m remote.supervise RUN_DIR --attempt N       runs the attempt (started detached by launch)
    python -m remote.supervise RUN_DIR --place < JSON    writes spec.json, job.json and the env file
    python -m remote.supervise RUN_DIR --status          prints what is known, as JSON

One attempt is started once: the claim file is locked while its supervisor lives, and once its
supervisor has written into it no second one ever starts the job, whatever became of the first.

exit.json appears whole, once, after the last process of the attempt is gone:
    exit_code, signal       of the job's first process; both null when it never started
    reason                  null (it ended by itself), "user" (stop.json), "lonely" (stop.json, because
                            another host's part has fallen), "signal" (the supervisor was told to
                            end), "max_duration", "start_failed"
    started_s, ended_s      seconds since the epoch; duration_s from the monotonic clock
    killed, stubborn        how many processes had to be killed; which would not die
    oom_kill_delta          kills by the cgroup's memory limit while it ran; host_oom_kill_delta: on
                            the whole machine; null where the kernel does not tell
    peak_bytes              the most RAM that one of the job's processes held
    memory_limit_bytes      what each of them was allowed to allocate; null where no limit was set
    cgroup, disk, shm       limits and what was free at the end
    gpus_before, gpus       what the job's GPUs held before it was started, and what each GPU holds when theirs is
                            back, or 30 s after its last process; null: nvidia-smi is not there or did not answer
    kernel                  lines of the kernel's log since the start that tell of a GPU or of memory; null unless
                            the job failed by itself and the log may be read
    gpu_health              what nvidia-smi says of the job's cards and did not say before; null as above
    left                    processes that the job seems to have left, but that are not marked as its own
    hidden                  of stdout and stderr: where in the newest end secrets stand, first byte and end of line
    message                 one line for a person, where there is one to say

The first line of a stop is polite: SIGTERM to the job's process group, then the grace, then SIGKILL
for everything that carries the run's marker or descends from the job. It does not look into what the job writes.
Last of all, exit.json written, it runs `life.on_end`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from remote.aftermath import KernelLog, Scope, card_holders, gpu_health, left_behind, of_cards
from remote.claim import Claim
from remote.environment import cannot_start, job_environment, temporary_folder
from remote.evidence import Cgroup, Counters, difference, disk_facts, find_cgroup, read_counters
from remote.hiding import secrets_of, spans_in, told
from remote.job import Job, read_job
from remote.limits import allocation_limit, limit_allocations
from remote.on_end import ending, run_on_end, wished
from remote.placing import place, status
from remote.polite import ask_to_end
from remote.processes import Identity, boot_id, kill_all, of_attempt, reap_children, send
from remote.report import Reporter
from remote.rundir import AttemptDir, RunDir, read_json, write_json
from remote.sampler import GpuSampler

ALREADY_CLAIMED = 71
BEAT_S = 10.0
LOOK_S = 0.5  # how soon stop.json is seen
LONGEST_GRACE_S = 30 * 86400.0  # a wish for more is no time, and the recipe's grace counts
LEFTOVER_GRACE_S = 5.0  # for processes that outlive the job's first one, which ended by itself
RESERVE_BYTES = 64 * 1024  # given back at the end, so that exit.json fits on a full disk
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Wish:
    """Somebody wants the job to end."""

    reason: str
    grace_s: float
    message: str


class Supervisor:
    """One attempt, from claim to exit.json."""

    def __init__(self, run: RunDir, attempt: AttemptDir, job: Job) -> None:
        self._run, self._attempt, self._job = run, attempt, job
        self._environment = job_environment(run, job, inherited=dict(os.environ))
        writer = f"supervisor{job.node or ''}"  # each of a run over several hosts writes a stream of its own
        self._reporter = Reporter(attempt.root, writer=writer, environment=self._environment)
        self._cgroup: Cgroup | None = find_cgroup()
        self._before: Counters = read_counters(self._cgroup)
        self._process: subprocess.Popen[bytes] | None = None
        self._sampler = GpuSampler(self._reporter)
        self._kernel, self._scope = KernelLog(), Scope()
        self._status: int | None = None  # wait status of the job's first process
        self._peak_bytes: int | None = None
        self._limit_bytes = allocation_limit(job)
        self._signalled: int | None = None
        self._wish: Wish | None = None
        self._kill_at: float | None = None
        self._asked: set[tuple[int, int]] = set()  # pid and start ticks of what has had the polite signal
        self._started_s, self._started = time.time(), time.monotonic()
        self._next_beat = 0.0

    def run(self, claim: Claim) -> int:
        self._reserve()
        wake = self._catch_signals()
        self._wish = self._wish_from_file()
        message = None if self._wish else self._start(claim)
        while self._process is not None and self._status is None:
            self._turn(wake)
        killed, stubborn = self._end_tree()
        body = self._exit_file(killed, stubborn, message)
        self._write_exit(body)
        self._run_on_end(body)
        self._reporter.close()
        return 0

    # Start ---------------------------------------------------------------------------------------

    def _not_started(self, message: str) -> str:
        self._write_supervisor(None)
        return message

    def _start(self, claim: Claim) -> str | None:
        """Starts the job; what went wrong, if it could not."""
        if self._job.gpus:
            self._write_supervisor(None)  # whoever waits for us sees us, however slow nvidia-smi is
            self._sampler.first(self._job.gpus)
        try:
            self._process = self._popen()
        except (OSError, ValueError) as error:
            return self._not_started(cannot_start(error, self._job.argv, self._environment))
        identity = Identity.of(self._process.pid)
        if identity is not None:
            claim.note_job(identity)
        self._write_supervisor(identity)
        return None

    def _popen(self) -> subprocess.Popen[bytes]:
        limit_bytes, temporary = self._limit_bytes, temporary_folder(self._run)
        if temporary is not None:
            temporary.mkdir(parents=True, exist_ok=True)
        with self._attempt.stdout_log.open("ab") as stdout, self._attempt.stderr_log.open("ab") as stderr:
            return subprocess.Popen(
                self._job.argv,
                cwd=self._job.cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=None if limit_bytes is None else partial(limit_allocations, limit_bytes),
            )

    def _write_supervisor(self, job: Identity | None) -> None:
        own = Identity.of(os.getpid())
        assert own is not None
        body = {
            "pid": own.pid,
            "start_ticks": own.start_ticks,
            "boot_id": own.boot_id,
            "job_pid": job.pid if job else None,
            "job_start_ticks": job.start_ticks if job else None,
            "started_s": self._started_s,
            "host": socket.gethostname(),
            "python": sys.executable,
            "argv": self._job.argv,
        }
        write_json(self._attempt.supervisor_json, body)

    def _reserve(self) -> None:
        with contextlib.suppress(OSError), self._reserve_file.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, RESERVE_BYTES)

    @property
    def _reserve_file(self) -> Path:
        return self._attempt.root / ".reserve"

    def _catch_signals(self) -> int:
        """A pipe that a child's end or a signal makes readable; the loop sleeps on it."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return reader

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signalled = number

    # Watch ---------------------------------------------------------------------------------------

    def _turn(self, wake: int) -> None:
        now = time.monotonic()
        self._beat(now)
        self._sampler.turn(now)
        self._reap()
        self._obey(now)
        if self._status is None and select.select([wake], [], [], LOOK_S)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        self._reap()

    def _beat(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._reporter.beat()

    def _reap(self) -> None:
        """Takes every ended child: the job, the GPU sampler, and orphans of the job that came to us."""
        for ended in reap_children():
            exit_code = os.waitstatus_to_exitcode(ended.wait_status)
            if self._process is not None and ended.pid == self._process.pid:
                self._status = ended.wait_status
                self._process.returncode = exit_code
            elif self._sampler.take(ended.pid, exit_code):
                continue
            self._peak_bytes = max(self._peak_bytes or 0, ended.peak_bytes)

    # Stop ----------------------------------------------------------------------------------------

    def _obey(self, now: float) -> None:
        had_none = self._wish is None
        self._hear(now)
        if had_none and self._wish is not None:
            told = f"{self._wish.message}: polite signal sent, the rest is killed in {self._wish.grace_s:g} s"
            self._reporter.note(told)
        if self._wish is not None:
            assert self._process is not None
            self._asked |= ask_to_end(self._job, self._process.pid, self._asked)
        if self._kill_at is not None and now >= self._kill_at:
            self._signal_group(signal.SIGKILL)

    def _hear(self, now: float) -> None:
        """The newest wish counts; it may come sooner than an earlier one, never later."""
        wish = self._newest_wish(now)
        if wish is not None and wish.reason == "lonely" and self._wish is not None:
            wish = replace(self._wish, grace_s=wish.grace_s)  # what came first is why it ends
        if wish is not None and wish != self._wish:
            self._wish, kill_at = wish, now + wish.grace_s
            self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _newest_wish(self, now: float) -> Wish | None:
        from_file = self._wish_from_file()
        if from_file is not None:
            return from_file
        if self._wish is not None:
            return self._wish
        if self._signalled is not None:
            name = signal.Signals(self._signalled).name
            return Wish("signal", self._job.grace_s, f"the supervisor received {name}")
        limit_s = self._job.max_duration_s
        if limit_s is not None and now - self._started >= limit_s:
            return Wish("max_duration", self._job.grace_s, f"max_duration of {limit_s:g} s is over")
        return None

    def _wish_from_file(self) -> Wish | None:
        if not self._attempt.stop_json.is_file():
            return None
        body = read_json(self._attempt.stop_json) or {}
        grace = body.get("grace_s", self._job.grace_s)
        is_time = isinstance(grace, (int, float)) and 0 <= grace <= LONGEST_GRACE_S
        is_lonely = body.get("why") == "lonely"
        reason, text = ("lonely", "another host's part has ended") if is_lonely else ("user", "asked to stop")
        return Wish(reason, float(grace) if is_time else self._job.grace_s, text)

    def _signal_group(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _end_tree(self) -> tuple[int, list[int]]:
        """The first process is gone; its children are asked once, those that stay are killed: after the grace of a stop,
        which a shell around a trainer does not live to see, else after a moment."""
        self._sampler.stop()
        moment = time.monotonic() + LEFTOVER_GRACE_S
        find = partial(of_attempt, self._job.run_id, str(self._attempt.number), str(self._run.root.parent))
        left = find()
        for process in left:
            if (process.pid, process.start_ticks) not in self._asked:
                send(process.pid, process.start_ticks, signal.SIGTERM)
        while left and time.monotonic() < (moment if self._kill_at is None else self._kill_at):
            time.sleep(0.1)
            self._reap()
            self._beat(time.monotonic())
            if self._kill_at is not None:
                self._hear(time.monotonic())
            left = find()
        return kill_all(find, reap=True)

    # End -----------------------------------------------------------------------------------------

    def _exit_file(self, killed: int, stubborn: list[int], message: str | None) -> dict[str, Any]:
        after = read_counters(self._cgroup)
        code = os.waitstatus_to_exitcode(self._status) if self._status is not None else None
        reason = self._wish.reason if self._wish else "start_failed" if message else None
        has_failed, held = reason is None and code != 0, self._sampler.last()
        return {
            "exit_code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "reason": reason,
            "started_s": self._started_s,
            "ended_s": time.time(),
            "duration_s": time.monotonic() - self._started,
            "killed": killed,
            "stubborn": stubborn,
            "oom_kill_delta": difference(self._before.cgroup_kills, after.cgroup_kills),
            "host_oom_kill_delta": difference(self._before.host_kills, after.host_kills),
            "peak_bytes": self._peak_bytes,
            "memory_limit_bytes": self._limit_bytes,
            "cgroup": self._cgroup.facts() if self._cgroup else None,
            "disk": disk_facts(self._attempt.root),
            "shm": disk_facts(Path("/dev/shm")),
            "gpus_before": self._sampler.used_before,
            "gpus": held,
            **(self._fault_facts(is_silent=held is None) if has_failed else {"kernel": None, "gpu_health": None}),
            "left": self._left(is_silent=held is None),
            "boot_id": boot_id(),
            "message": message or (self._wish.message if self._wish else None),
        }

    def _fault_facts(self, *, is_silent: bool) -> dict[str, Any]:
        """What the machine knows of a fault that the job could not say."""
        health = gpu_health(self._sampler.before, self._job.gpus, is_silent=is_silent)
        return {"kernel": of_cards(self._kernel.lines(), health), "gpu_health": health}

    def _left(self, *, is_silent: bool) -> list[dict[str, Any]]:
        """Said and kept, never ended: only what carries the run's marker or descends from its job is ours to end."""
        own = Identity.of(os.getpid())
        assert own is not None
        left = left_behind(
            self._scope,
            [] if is_silent else card_holders(),
            gpus=self._job.gpus,
            before=self._sampler.before,
            since_ticks=own.start_ticks,
        )
        for process in left:
            what = process["command"] or "outside this container"
            where = f"holds GPU {process['gpu']}" if process["gpu"] else "lives in the job's control group"
            self._reporter.note(
                f"left behind: process {process['pid']} ({what}) {where}; it is not marked as this run's, so it was "
                "not ended: see what started it (a container?) and end it there"
            )
        return left

    def _write_exit(self, body: dict[str, Any]) -> None:
        self._reserve_file.unlink(missing_ok=True)
        self._run.env_file.unlink(missing_ok=True)  # secrets do not outlive the job that needs them
        self._reporter.beat()
        secrets = secrets_of(self._environment)
        hidden = spans_in({"stdout": self._attempt.stdout_log, "stderr": self._attempt.stderr_log}, secrets)
        write_json(self._attempt.exit_json, {**told(body, secrets), "hidden": hidden})

    def _run_on_end(self, body: dict[str, Any]) -> None:
        command = wished(self._run, self._job.kind)
        if command:
            how = ending(self._job.run_id, self._attempt.number, body)
            self._reporter.note(run_on_end(command, how, self._attempt, self._environment))


def supervise(run: RunDir, number: int) -> int:
    """Exit code 0 when the attempt ran to an exit.json, 71 when it is or was somebody else's."""
    attempt = run.attempt(number)
    claim = Claim(attempt)
    if not claim.take():
        sys.stderr.write(f"attempt {number} of {run.root} is claimed already\n")
        return ALREADY_CLAIMED
    with contextlib.suppress(PermissionError):  # already the first of its session when started by hand
        os.setsid()
    # Orphans of the job come to us instead of to init: seen, ended and reaped.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(0o022)
    return Supervisor(run, attempt, replace(read_job(run), attempt=number)).run(claim)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="remote.supervise", description="Runs one attempt of a job, records its end.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--status", action="store_true", help="print what is known, as JSON")
    parser.add_argument("--place", action="store_true", help="write spec, job and env from JSON on stdin")
    chosen = parser.parse_args(arguments)
    run = RunDir(chosen.run_dir.absolute())
    if chosen.status or chosen.place:
        answer = status(run) if chosen.status else place(run, json.load(sys.stdin))
        sys.stdout.write(json.dumps(answer) + "\n")
        return 0
    return supervise(run, chosen.attempt)


if __name__ == "__main__":
    sys.exit(main())
