"""One follower per database: the lease that makes it one, and starting it on demand.

The lease is a kernel lock on runs.db.follow.lock: the kernel gives it back when its holder dies,
however it dies. The file says who took it last and which schema that one knows: an older follower does
not understand what newer code writes, and is replaced. Loads nothing heavy, so any verb and the screens may
ask; the follower itself is in `follow`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.errors import StoreError
from orchestrator.store.migrations import newest_version
from remote.processes import ATTEMPT_MARK, RUN_DIR_MARK, RUN_MARK, protected, read_stat, send

LEASE_WAIT_S = 2.0  # another process may hold the lock for an instant, only to see whether it is held
SAYS_S = 1.0  # between taking the lock and saying who has it
ENDS_S = 5.0  # an older follower has so long to end by itself; killed, it loses nothing
LOG_LIMIT_BYTES = 1024 * 1024


def lock_file(db: Path) -> Path:
    """Beside the database itself, by whatever link it is named; a circle of links is a name like another."""
    real = Path(os.path.realpath(db))
    return real.with_name(f"{real.name}.follow.lock")


def is_followed(db: Path) -> bool:
    """Whether a follower holds the lease. Costs microseconds."""
    try:
        descriptor = os.open(lock_file(db), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder_pid(db: Path) -> int | None:
    """Who holds the lease, by the kernel's list of locks; None where it has none, or names a process we cannot see."""
    try:
        inode = lock_file(db).stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    for words in (line.split() for line in locks):  # 1: FLOCK ADVISORY WRITE 4711 08:01:12345 0 EOF
        if len(words) > 5 and words[3] == "WRITE" and words[5].endswith(f":{inode}") and words[4] not in ("0", "-1"):
            return int(words[4])
    return None


def stopped_pid(db: Path) -> int | None:
    """The holder, where it is stopped (SIGSTOP, a terminal's Ctrl-Z; not for a tracer): it keeps the lease and does nothing."""
    pid = holder_pid(db)
    found = None if pid is None else read_stat(pid)
    return pid if found is not None and found.state == "T" else None


def older_holder(db: Path) -> int | None:
    """The holder where it knows only an older schema; one that does not say is of before they said.

    None also where nobody can tell who holds it, and where this very process or one that started it does.
    """
    deadline = time.monotonic() + SAYS_S
    while True:
        pid = holder_pid(db)
        if pid is None or pid in protected():
            return None
        schema = _schema_of(db, pid)
        if schema is not None or time.monotonic() > deadline:
            return pid if schema is None or schema < newest_version() else None
        time.sleep(0.05)


def _schema_of(db: Path, pid: int) -> int | None:
    """What this holder has written; what another one has left there says nothing of it."""
    try:
        words = lock_file(db).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    is_its_own = len(words) == 2 and words[0] == str(pid) and words[1].isdecimal()
    return int(words[1]) if is_its_own else None


def end_older(db: Path) -> None:
    """Ends the holder where it is a follower of an older draftyard. Raises StoreError where it is not ours to end."""
    pid = older_holder(db)
    found = None if pid is None else read_stat(pid)
    if pid is None or found is None or found.state == "T":  # of a stopped one its own line is said
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _is_follower(pid) or not send(pid, found.start_ticks, number):
            break
        deadline = time.monotonic() + ENDS_S
        while holder_pid(db) == pid and time.monotonic() < deadline:
            time.sleep(0.05)
        if holder_pid(db) != pid:
            return
    if holder_pid(db) == pid:
        told = f"process {pid} follows the runs of {db} and is older than this draftyard: it misses what is new"
        raise StoreError(f"{told}; end it (kill {pid}), then: draftyard follow")


def _is_follower(pid: int) -> bool:
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return False
    ours = any(Path(word).name in ("draftyard", "orchestrator.cli") for word in words)
    return "orchestrator.follow.follower" in words or (ours and "follow" in words)


@contextlib.contextmanager
def lease(db: Path, *, wait_s: float = LEASE_WAIT_S) -> Iterator[bool]:
    """Holds the follower's lease while inside; False when another process has it."""
    descriptor = os.open(lock_file(db), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        is_ours = _acquire(descriptor, wait_s)
        if is_ours:
            with contextlib.suppress(OSError):  # a full disk: it may be replaced by its like, no more
                os.pwrite(descriptor, f"{os.getpid():<12} {newest_version():<6}\n".encode(), 0)
        _has_arrived()
        yield is_ours
    finally:
        os.close(descriptor)  # gives the lock back


def _has_arrived() -> None:
    """Gives back the lock on its output that says, since `ensure_follower`, that a follower is on its way."""
    if sys.stderr is not None:  # closed: its number may be another file's
        with contextlib.suppress(OSError):
            fcntl.flock(sys.stderr.fileno(), fcntl.LOCK_UN)


def _acquire(descriptor: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def ensure_follower(db: Path, *, hosts_file: Path | None = None) -> bool:
    """Starts a follower unless one is there that knows as much; True when it started one. Raises StoreError, OSError.

    Call it after the run's row is written.

    A follower that is about to end gives its lease back first and looks once more, so a row written
    before this call is seen either by it or by the one started here. One that was started a moment ago takes some tenths of a
    second to have its lease, and looks after that: until then it holds a lock on the log that it was given as its output.
    """
    if is_followed(db):
        end_older(db)
        if is_followed(db):
            return False
    log = db.with_name(f"{db.name}.follow.log")
    with contextlib.suppress(FileNotFoundError):  # none yet, or another verb was first
        if log.stat().st_size > LOG_LIMIT_BYTES:
            log.unlink()
    argv = [sys.executable, "-P", "-m", "orchestrator.follow.follower", "--db", str(db.absolute())]
    if hosts_file is not None:
        argv += ["--hosts", str(hosts_file.absolute())]
    # A shell in between leaves at once, so the follower is nobody's child and leaves no zombie here.
    with log.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        subprocess.run(
            ["sh", "-c", '"$@" &', "sh", *argv],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            cwd=db.absolute().parent,
            env=environment(),
            start_new_session=True,
            check=True,
        )
    return True


def environment() -> dict[str, str]:
    """Ours, with this installation first on the path: the follower runs the code that started it.

    With `-P` nothing that lies in the folder where it starts is taken for a part of it.
    It is nobody's job: one that a job starts must not end with that job's run.
    """
    here = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    marks = dict.fromkeys((RUN_MARK, RUN_DIR_MARK, ATTEMPT_MARK), "")
    return {**os.environ, **marks, "PYTHONPATH": f"{here}{os.pathsep}{known}" if known else here}
