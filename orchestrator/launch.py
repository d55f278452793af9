"""Starts a job on a host, once, and reads the evidence of how it fares.

Start is idempotent by run id and attempt: whoever asks again (because the reply was lost) gets the
attempt that is there. What it starts is `remote.supervise`, detached, from the shipped tree; from
then on nothing here is needed for the job to go on. Stopping is a wish written into the attempt's
folder; only the supervisor signals processes, except for orphans, which `reap` ends by their marker.

It takes any Shell, decides no state and writes nothing on this side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import DraftyardError
from orchestrator.shell import Shell
from orchestrator.shell.stream import StreamShell, told
from orchestrator.workplace import Workplace, finite, run_script, sense_in
from remote import job as job_file
from remote.rundir import json_object

START_S = 20.0

# One command on the host waits for the supervisor's first file, so that a slow start costs no round trips.
_WAIT = """
n=0
while [ $n -lt "$2" ]; do
  [ -s "$1/supervisor.json" ] && exec cat "$1/supervisor.json"
  [ -s "$1/exit.json" ] && exit 45
  n=$((n + 1)); sleep 0.05
done
[ -f "$1/supervisor.log" ] && tail -c 2000 "$1/supervisor.log" >&2
exit 44
"""
_PLACE = 'cd "$1" && exec "$2" -m remote.supervise "$3" --place'
# Where systemd answers, a scope of its own: it kills what a login leaves behind (KillUserProcesses) unless that lives
# elsewhere. Should the scope not be granted, the supervisor is started plainly; its claim keeps that from being twice.
# A job that launches another run must not end it with its own, nor be seen alive by it (see RUN_MARK in
# remote/processes.py).
SPAWN_SUPERVISOR = """
log=$1; shift
export DRAFTYARD_RUN_ID= DRAFTYARD_RUN_DIR= DRAFTYARD_ATTEMPT=
exec >>"$log" 2>&1
[ "$(id -u)" = 0 ] && who=--system || who=--user
if command -v systemd-run >/dev/null && systemctl "$who" show-environment >/dev/null 2>&1; then
  systemd-run "$who" --scope --quiet --collect -- "$@" && exit
fi
exec "$@"
"""
_STOP = 'umask 077; mkdir -p "$1" && printf "%s\\n" "$2" > "$1/.stop.$$" && mv -f "$1/.stop.$$" "$1/stop.json"'


@dataclass(frozen=True)
class Job:
    """One attempt of a run, ready to start."""

    run_id: str
    kind: str  # train, smoke, prepare, evaluate, export, script
    attempt: int
    argv: tuple[str, ...]
    cwd: str  # the shipped tree on the host
    spec_json: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
    gpus: tuple[str, ...] = ()
    grace_s: float = 60.0
    max_duration_s: float | None = None
    memory_limit_bytes: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    node: int = 0  # this host's place among those of the job
    variables: Mapping[str, str] = field(default_factory=dict)  # for this host's processes; no secrets

    def file(self) -> job_file.Job:
        """What job.json says of it: everything but the secrets and the spec."""
        return job_file.Job(
            run_id=self.run_id,
            kind=self.kind,
            attempt=self.attempt,
            argv=list(self.argv),
            cwd=self.cwd,
            grace_s=self.grace_s,
            max_duration_s=self.max_duration_s,
            memory_limit_bytes=self.memory_limit_bytes,
            gpus=list(self.gpus),
            facts=dict(self.facts),
            node=self.node,
            variables=dict(self.variables),
        )


@dataclass(frozen=True)
class Started:
    run_dir: str
    supervisor: dict[str, Any]
    was_adopted: bool  # the attempt had been started before


@dataclass(frozen=True)
class Part:
    """What one host gets of a job."""

    shell: Shell
    place: Workplace
    job: Job

    @property
    def run_dir(self) -> str:
        return self.place.run_dir(self.job.run_id)


def start(
    shell: Shell,
    place: Workplace,
    job: Job,
    *,
    timeout_s: float = START_S,
    before_spawn: Callable[[], object] = lambda: None,
) -> Started:
    """Starts the attempt, or finds it started; DraftyardError holds what the supervisor said when it did not come up."""
    return start_all([Part(shell, place, job)], timeout_s=timeout_s, before_spawn=before_spawn)[0]


def start_all(
    parts: Sequence[Part],
    *,
    timeout_s: float = START_S,
    before_spawn: Callable[[], object] = lambda: None,
    after_spawn: Callable[[Part], object] = lambda part: None,
) -> list[Started]:
    """Starts an attempt on each of its hosts, in this order, or finds it started.

    `before_spawn` is called once everything is in place on all of them: until it returns nothing has been started, and
    if it raises nothing is. Afterwards supervisors may live, whatever is raised here; `after_spawn` is told each part
    that has come up.
    """
    placed: list[tuple[Part, bool]] = []
    try:
        for part in parts:
            placed.append((part, _place(part.shell, part.place, part.job, part.run_dir)))
        before_spawn()
    except BaseException:
        for part, is_claimed in placed:
            if not is_claimed:  # no supervisor will come to take the secrets away
                with suppress(DraftyardError):
                    part.shell.run(["rm", "-f", f"{part.run_dir}/env"])
        raise
    started = []
    for part, is_claimed in placed:
        started.append(_spawned(part, is_claimed, timeout_s))
        after_spawn(part)
    return started


def _spawned(part: Part, is_claimed: bool, timeout_s: float) -> Started:
    shell, place, job, run_dir = part.shell, part.place, part.job, part.run_dir
    attempt_dir = f"{run_dir}/attempts/{job.attempt}"
    if not is_claimed:
        supervise = [place.python, "-m", "remote.supervise", run_dir, "--attempt", str(job.attempt)]
        shell.spawn(["sh", "-c", SPAWN_SUPERVISOR, "sh", f"{attempt_dir}/supervisor.log", *supervise], cwd=job.cwd)
    looks = str(max(1, int(timeout_s / 0.05)))
    waited = shell.run(["sh", "-c", _WAIT, "sh", attempt_dir, looks], timeout_s=timeout_s + 30)
    if waited.exit_code == 45:  # it ended before the job began: exit.json says why, like any other ending
        return Started(run_dir, {}, is_claimed)
    if waited.exit_code:
        said = (
            told(waited.stderr)
            or f"it said nothing, so it was killed, or never ran: look at dmesg and at {attempt_dir}"
        )
        raise DraftyardError(f"the supervisor of run {job.run_id} did not come up within {timeout_s:g} s: {said}")
    return Started(run_dir, _answer(waited.stdout), is_claimed)


def _place(shell: Shell, place: Workplace, job: Job, run_dir: str) -> bool:
    """Writes what the attempt needs, secrets through stdin; True when the attempt was started before."""
    request = {
        "attempt": job.attempt,
        "env": dict(job.env),
        "spec": json.loads(job.spec_json) if job.spec_json else None,
        "job": job.file().dump(),
    }
    done = shell.run(["sh", "-c", _PLACE, "sh", job.cwd, place.python, run_dir], stdin=json.dumps(request).encode())
    if done.exit_code:
        said = told(done.stderr)
        raise DraftyardError(f"cannot write {run_dir}: {said}")
    answer = _answer(done.stdout, "is_claimed")
    if "shared_with" in answer:
        raise DraftyardError(
            f"{run_dir} is one folder for two hosts of run {job.run_id}: give each a work_dir of its own in hosts.yaml, "
            "on a disk of its own"
        )
    if answer.get("differs"):
        names = ", ".join(map(str, answer["differs"])) if isinstance(answer["differs"], list) else "answer"
        raise DraftyardError(
            f"another job of the id {job.run_id} has been started in {run_dir}: its {told(names.encode())} is not ours; "
            "give this one another --id, or the host another work_dir"
        )
    return bool(answer["is_claimed"])


def _answer(printed: bytes, *keys: str) -> dict[str, Any]:
    """The object that a supervisor printed, with these keys."""
    found = json_object(printed)
    if found is None or not found.keys() >= set(keys):
        raise DraftyardError(f"remote/supervise.py gives no such answer: {told(printed, 200)!a}")
    return found


def stop(shell: Shell, run_dir: str, *, attempt: int, grace_s: float, why: str | None = None) -> None:
    """Leaves the wish; the supervisor sees it within half a second. A later, shorter grace wins.

    `why`: "lonely" where nobody asked for it, but another host's part of the run has fallen.
    """
    folder = f"{run_dir}/attempts/{attempt}"
    wish = {"grace_s": grace_s} if why is None else {"grace_s": grace_s, "why": why}
    done = shell.run(["sh", "-c", _STOP, "sh", folder, json.dumps(wish)])
    if done.exit_code:
        raise DraftyardError(f"cannot write {folder}/stop.json: {told(done.stderr)}")


@dataclass(frozen=True)
class Orphan:
    """A process of one of our runs. It is an orphan when the run's supervisor is gone."""

    pid: int
    run_id: str
    attempt: str
    age_s: float
    rss_bytes: int
    command: str


def attempt_name(run_id: str, attempt: int | str) -> str:
    """One attempt, as `reap` takes it and remote/processes.py reads it."""
    return f"{run_id}/{attempt}"


def find_processes(shell: StreamShell, place: Workplace, *, run_ids: Collection[str] | None = None) -> list[Orphan]:
    """Every live process of these runs (none given: of any run of ours), by marker or by the log it writes, never by name."""
    answer = run_script(shell, place, "processes", ["list", place.work_dir, *(run_ids or ())])
    with sense_in(shell, "processes", answer):
        return [_orphan(found) for found in answer["processes"]]


def reap(shell: StreamShell, place: Workplace, *, names: Collection[str]) -> list[int]:
    """Ends every process of these runs and attempts (`attempt_name`); the pids of those that would not die.

    Without names nothing is done.
    """
    if not names:
        return []
    answer = run_script(shell, place, "processes", ["end", place.work_dir, *names])
    with sense_in(shell, "processes", answer):
        return [int(pid) for pid in answer["stubborn"]]


def probe(shell: StreamShell, place: Workplace) -> dict[str, Any]:
    """Facts about the host; needs nothing shipped."""
    return run_script(shell, place, "probe", [place.work_dir])


def _orphan(found: dict[str, Any]) -> Orphan:
    return Orphan(
        pid=int(found["pid"]),
        run_id=str(found["run_id"]),
        attempt=str(found["attempt"]),
        age_s=finite(found["age_s"]),
        rss_bytes=int(found["rss_bytes"]),
        command=str(found["command"]),
    )
