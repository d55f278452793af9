"""Which processes are ours, whether they live, and how a whole tree of them is ended.

A process is known by (pid, start ticks, boot id): a pid alone is reused. A run's processes are found
by DRAFTYARD_RUN_ID in their environment, wherever they have moved to: another group, another
session, re-parented to init. One that has emptied its environment is still known by its descent while
the supervisor lives, which inherits every orphan of its job, and afterwards by an output of the attempt
that it holds open for writing. Never by name, never by who opened the GPU. Pid 0, pid 1, this process
and its ancestors are out of reach whatever their environment says.

Needs only the standard library and nothing beside it, so it is also sent to a host as one text:
`python3 - list|end WORK_DIR [RUN_ID[/ATTEMPT] ...] < processes.py`. Reads /proc, so Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

RUN_MARK = "DRAFTYARD_RUN_ID"  # empty: started by a job, but a run of its own
ATTEMPT_MARK = "DRAFTYARD_ATTEMPT"
RUN_DIR_MARK = "DRAFTYARD_RUN_DIR"
ROUND_S = 0.05
KILL_S = 10.0  # a process that is still there so long after SIGKILL hangs in the kernel


@dataclass(frozen=True)
class Identity:
    """One process and no later one of the same pid."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        found = read_stat(pid)
        return None if found is None else cls(pid, found.start_ticks, boot_id())

    @property
    def is_alive(self) -> bool:
        """A zombie is dead; in a container whose first process reaps nobody it stays for ever."""
        found = read_stat(self.pid)
        return (
            found is not None
            and found.state not in "ZX"
            and found.start_ticks == self.start_ticks
            and boot_id() == self.boot_id
        )


@dataclass(frozen=True)
class Stat:
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int
    rss_bytes: int


@dataclass(frozen=True)
class Marked:
    """A live process of a run: one that carries our marker, or is known to be the run's without it."""

    pid: int
    start_ticks: int
    parent: int
    run_id: str
    attempt: str
    age_s: float
    rss_bytes: int
    command: str


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_stat(pid: int) -> Stat | None:
    """/proc/PID/stat, whose second field may hold blanks and brackets; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    words = text[text.rfind(")") + 2 :].split()
    if len(words) < 22:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return Stat(words[0], int(words[1]), int(words[2]), int(words[3]), int(words[19]), int(words[21]) * page)


def marked(run_ids: set[str] | None = None, attempt: str | None = None, *, runs_dir: str | None = None) -> list[Marked]:
    """Every live process with the marker (of these runs, of this attempt), oldest first. A few ms per 500 processes.

    With `runs_dir`, not those that name a run folder elsewhere: another database may have given the same id.
    """
    spared = protected()
    uptime_s = _uptime_s()
    found = []
    for pid in pids():
        if pid not in spared:
            process = _marked(pid, uptime_s, runs_dir)
            if process is None or (run_ids is not None and process.run_id not in run_ids):
                continue
            if attempt in (None, process.attempt):
                found.append(process)
    return sorted(found, key=lambda process: process.start_ticks)


def offspring(run_id: str, attempt: str) -> list[Marked]:
    """What descends from this process, the supervisor of that attempt, in another session than its own: its job's.

    A job begins a session, and nothing comes back into an older one; what the supervisor itself starts stays in its.
    What carries another run's marker, or an empty one, was launched by the job as a run of its own.
    """
    stats = {pid: stat for pid in pids() if (stat := read_stat(pid)) is not None}
    found: list[int] = []
    parents = {os.getpid()}
    while parents:
        born = {pid for pid, stat in stats.items() if stat.parent in parents and pid not in found}
        parents = {pid for pid in born if _marks(pid).get(RUN_MARK, run_id) == run_id}
        found += parents
    own = os.getsid(0)
    return [
        _known(pid, stats[pid], run_id, attempt)
        for pid in found
        if stats[pid].session != own and stats[pid].state not in "ZX"
    ]


def writers(work_dir: str) -> list[Marked]:
    """What holds an output of an attempt below `work_dir` open for writing: given by the supervisor, handed on by its job."""
    output = re.compile(re.escape(os.path.realpath(work_dir)) + r"/runs/([^/]+)/attempts/(\d+)/std(?:out|err)\.log")
    found, spared = [], protected()
    for pid in pids():
        named = None if pid in spared else _writes(pid, output)
        stat = read_stat(pid) if named else None
        if named and stat and stat.state not in "ZX":
            found.append(_known(pid, stat, named[1], named[2]))
    return found


def _writes(pid: int, output: re.Pattern[str]) -> re.Match[str] | None:
    """The first of its files that is such an output and open for writing; a reader of a log is nobody's orphan."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # gone, or another user's
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            found = output.fullmatch(os.readlink(entry))  # noqa: PTH115  # a name that may hold anything
            if found:
                flags = (
                    Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text(encoding="ascii").split("flags:")[1].split()[0]
                )
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    return found
    return None


def protected() -> set[int]:
    """What is never signalled: the kernel, init, ourselves and everybody we descend from."""
    spared, pid = {0, 1}, os.getpid()
    while pid > 1 and pid not in spared:
        spared.add(pid)
        found = read_stat(pid)
        pid = found.parent if found else 0
    return spared


def send(pid: int, start_ticks: int, number: int) -> bool:
    """Signals this very process and no other that took its pid; False when it is gone or out of reach."""
    if pid in protected():
        return False
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):  # gone, or a kernel before 5.3
        return _send_plainly(pid, start_ticks, number)
    try:
        found = read_stat(pid)  # after the handle is open, the pid cannot change hands unnoticed
        if found is None or found.start_ticks != start_ticks:
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def members(*, group: int | None = None, parent: int | None = None) -> set[tuple[int, int]]:
    """Pid and start ticks of each process of a group, or that a process has started."""
    stats = {pid: stat for pid in pids() if (stat := read_stat(pid)) is not None}
    return {
        (pid, stat.start_ticks)
        for pid, stat in stats.items()
        if group in (None, stat.group) and parent in (None, stat.parent)
    }


def of_attempt(run_id: str, attempt: str, runs_dir: str) -> list[Marked]:
    """For its supervisor: what carries the marker, or descends from the job; each once."""
    return _each_once([*offspring(run_id, attempt), *marked({run_id}, attempt, runs_dir=runs_dir)])


def kill_run(run_id: str, attempt: str | None, *, work_dir: str | None = None) -> tuple[int, list[int]]:
    """SIGKILL to all that carry the marker (with `work_dir`, or are known by what they write there), again until none
    is left; how many were killed, and which would not die."""
    runs_dir = None if work_dir is None else f"{work_dir}/runs"

    def left() -> list[Marked]:
        known = [] if work_dir is None else writers(work_dir)
        own = [item for item in known if item.run_id == run_id and attempt in (None, item.attempt)]
        return _each_once([*own, *marked({run_id}, attempt, runs_dir=runs_dir)])

    return kill_all(left)


def _each_once(found: list[Marked]) -> list[Marked]:
    """By pid, the last that was said of it, oldest first: a second signal means "at once" to many programs."""
    return sorted({item.pid: item for item in found}.values(), key=lambda item: item.start_ticks)


def kill_all(find: Callable[[], list[Marked]], *, reap: bool = False) -> tuple[int, list[int]]:
    """SIGKILL to what is found, again until nothing is; how many were killed, and which would not die.

    With `reap`, the caller is their parent (or subreaper) and takes their exit status.
    """
    killed: set[tuple[int, int]] = set()
    ends = time.monotonic() + KILL_S
    while True:
        left = [process for process in find() if Identity.of(process.pid)]
        for process in left:
            if send(process.pid, process.start_ticks, signal.SIGKILL):
                killed.add((process.pid, process.start_ticks))
        if reap:
            reap_children()
        if not left:
            return len(killed), []
        if time.monotonic() > ends:
            return len(killed), sorted({process.pid for process in left})
        time.sleep(ROUND_S)


@dataclass(frozen=True)
class Ended:
    """A child that has ended."""

    pid: int
    wait_status: int
    peak_bytes: int  # the most RAM it held, or one of those it had waited for


def reap_children() -> list[Ended]:
    """Every child that has ended meanwhile."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append(Ended(pid, status, used.ru_maxrss * 1024))
    return ended


def pids(proc: Path = Path("/proc")) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]


def _marked(pid: int, uptime_s: float, runs_dir: str | None) -> Marked | None:
    marks = _marks(pid)
    run_id = marks.get(RUN_MARK)
    stat = read_stat(pid) if run_id else None
    if not run_id or stat is None or stat.state in "ZX":
        return None
    elsewhere = runs_dir is not None and RUN_DIR_MARK in marks
    if elsewhere and os.path.realpath(marks[RUN_DIR_MARK]) != os.path.realpath(f"{runs_dir}/{run_id}"):
        return None
    return _known(pid, stat, run_id, marks.get(ATTEMPT_MARK, ""), uptime_s)


def _marks(pid: int) -> dict[str, str]:
    """The environment of a process that carries the marker; nothing of any other."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return {}
    if RUN_MARK.encode() not in environment:
        return {}
    return dict(os.fsdecode(item).partition("=")[::2] for item in environment.split(b"\0"))


def _known(pid: int, stat: Stat, run_id: str, attempt: str, uptime_s: float | None = None) -> Marked:
    return Marked(
        pid=pid,
        start_ticks=stat.start_ticks,
        parent=stat.parent,
        run_id=run_id,
        attempt=attempt,
        age_s=_age_s(stat, _uptime_s() if uptime_s is None else uptime_s),
        rss_bytes=stat.rss_bytes,
        command=command_line(pid),
    )


def age_s(pid: int) -> float | None:
    """Seconds since it was started; None when there is no such process."""
    found = read_stat(pid)
    return None if found is None or found.state in "ZX" else _age_s(found, _uptime_s())


def _age_s(stat: Stat, uptime_s: float) -> float:
    return max(0.0, uptime_s - stat.start_ticks / os.sysconf("SC_CLK_TCK"))


def _uptime_s() -> float:
    """The clock that start ticks are of. /proc/uptime is a container's own (lxcfs), and theirs is the machine's."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode("utf-8", "replace") for word in words)[:300]


def _send_plainly(pid: int, start_ticks: int, number: int) -> bool:
    found = read_stat(pid)
    if found is None or found.start_ticks != start_ticks:
        return False
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def _kill_stopped_supervisors(run: Path, attempt: str) -> None:
    """One that works sees by itself that its job is gone; a stopped one (SIGSTOP) would never tell.

    One that a tracer holds for a moment goes on.
    """
    for claim in run.glob(f"attempts/{attempt}/claim"):
        for words in map(str.split, claim.read_text(encoding="utf-8", errors="replace").splitlines()):
            if (
                len(words) != 4
                or words[0] != "supervisor"
                or not (words[1] + words[2]).isascii()
                or words[3] != boot_id()
            ):
                continue
            found = read_stat(int(words[1])) if words[1].isdigit() else None
            if found is not None and found.state == "T" and str(found.start_ticks) == words[2]:
                send(int(words[1]), found.start_ticks, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """`list` (nothing named: every run of ours) or `end`, then runs, with /ATTEMPT where no other is meant; answers in JSON."""
    verb, work_dir, named = arguments[0], arguments[1], arguments[2:]
    known = _each_once([*writers(work_dir), *marked(runs_dir=f"{work_dir}/runs")])
    found = [item for item in known if not named or {item.run_id, f"{item.run_id}/{item.attempt}"} & set(named)]
    stubborn: list[int] = []
    if verb == "end":
        for run_id, slash, attempt in (word.partition("/") for word in named):
            stubborn += kill_run(run_id, attempt if slash else None, work_dir=work_dir)[1]
            _kill_stopped_supervisors(Path(work_dir, "runs", run_id), attempt if slash else "*")
    body = {"processes": [asdict(process) for process in found], "stubborn": stubborn, "boot_id": boot_id()}
    sys.stdout.write(json.dumps(body) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
