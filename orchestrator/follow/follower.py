"""The background follower: one process per database, started on demand, gone when nothing is live.

    python -m orchestrator.follow.follower --db runs.db

It alone writes facts that come from hosts. A kernel lock on runs.db.follow.lock makes it one: the
kernel gives the lock back when its holder dies, however it dies. Each host has a thread of its own,
so a dead host holds up nobody. It may be killed at any moment: the truth is on the hosts and how far
it was read is in the database, so the next one goes on where this one was cut off.
What is done at one look at one run is in `one_run`, the threads and their pace in `threads`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import DraftyardError, HostError, StoreError
from orchestrator.follow.alerts import AlertThread, Post, webhook
from orchestrator.follow.lease import environment, lease, lock_file
from orchestrator.follow.nodes import live_hosts
from orchestrator.follow.threads import AFTER_FAULT_S, Connect, HostThread, Resume, RetryThread, retries
from orchestrator.host import hosts_of
from orchestrator.known import Known
from orchestrator.launcher import RETRY
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import StreamShell
from orchestrator.store.faults import told_plainly
from orchestrator.store.reads import Reader, SecretsOf
from orchestrator.store.rows import IntentRow
from orchestrator.store.writes import Store

IDLE_S = 3.0  # with nothing live for so long, it ends
RESUME_TIMEOUT_S = 600.0
MAX_FAULTS = 120


@dataclass(frozen=True)
class Follower:
    """Keeps one thread per host with live runs, carries out retries, sends alerts."""

    db: Path
    connect_to: Connect
    ending: threading.Event
    idle_s: float = IDLE_S
    resume: Resume | None = None
    post: Post | None = None
    secrets_of: SecretsOf | None = None

    def run(self) -> None:
        """Until nothing has been live for `idle_s`, `ending` is set, or the database is another file or gone.

        The caller holds the lease.
        """
        threads: dict[str, HostThread] = {}
        retrying: dict[str, RetryThread] = {}
        over = threading.Event()  # however this ends, no thread of it works on without the lease
        try:
            with Reader(self.db) as reader, self._alerts():
                idle_since, files = time.monotonic(), _files(self.db)
                while not self.ending.is_set() and _files(self.db) == files:
                    self._look_after_hosts(reader, threads, over)
                    self._retry(reader, retrying, over)
                    if any(thread.is_wanted for thread in [*threads.values(), *retrying.values()]):
                        idle_since = time.monotonic()
                    elif time.monotonic() - idle_since > self.idle_s:
                        return
                    self.ending.wait(0.2)
        finally:
            over.set()
            for thread in threads.values():
                thread.join()  # facts from hosts are written under the lease alone; a look's own time limits end it

    def _look_after_hosts(self, reader: Reader, threads: dict[str, HostThread], over: threading.Event) -> None:
        for host in live_hosts(reader):
            if host not in threads or not threads[host].is_wanted:
                threads[host] = HostThread(self.db, host, self.connect_to, over, self.secrets_of)
                threads[host].start()

    def _retry(self, reader: Reader, retrying: dict[str, RetryThread], over: threading.Event) -> None:
        """A thread for each host with retries. What a retry needs (secrets, hosts) is the verb's business."""
        if self.resume is None:
            return
        for host in retries(reader):
            if host not in retrying or not retrying[host].is_wanted:
                retrying[host] = RetryThread(self.db, host, self.resume, over)
                retrying[host].start()

    @contextlib.contextmanager
    def _alerts(self) -> Iterator[None]:
        """Alerts are sent while inside, and those still unsent once more at the end."""
        if self.post is None:
            yield
            return
        done = threading.Event()
        thread = AlertThread(self.db, self.post, done)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=15.0)


def _files(db: Path) -> list[tuple[int, int] | None]:
    """Which files the database and its lease are: in the place of a removed one another follower may be at work."""
    found: list[tuple[int, int] | None] = []
    for path in (db, lock_file(db)):
        try:
            seen = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((seen.st_dev, seen.st_ino))
    return found


def follow(follower: Follower) -> bool:
    """Follows every live run of the database until nothing is live. False when another follower is there.

    A fault on this side that may pass, such as a full disk, is waited out for ten minutes, then raised; any other
    StoreError is raised at once.
    """
    num_faults = 0
    while True:
        try:
            done = _follow_until_idle(follower)
        except StoreError as error:
            if not error.is_passing:
                raise
            sys.stderr.write(f"{error}\n")
            num_faults += 1
            if num_faults > MAX_FAULTS or follower.ending.wait(AFTER_FAULT_S):
                raise
        else:
            if done is not None:
                return done
            num_faults = 0


def _follow_until_idle(follower: Follower) -> bool | None:
    """None when a run went live just as the lease was given back."""
    Store(follower.db).close()  # creates or migrates it
    with contextlib.ExitStack() as stack:
        with told_plainly(lock_file(follower.db)):
            is_ours = stack.enter_context(lease(follower.db))
        if not is_ours:
            return False
        follower.run()
    # The lease is free now: whoever wrote a row while we still held it relies on this look.
    with Reader(follower.db) as reader:
        return True if follower.ending.is_set() or not reader.live_runs() else None


def connector(hosts_file: Path | None) -> Connect:
    """Finds a host by name at each connection, so that an edited hosts.yaml counts from then on.

    In the hosts.yaml that its runs were launched with, `kept`: this follower may come of another folder.
    """

    def connect_to(name: str, kept: Path | None) -> StreamShell:
        try:
            return connect(hosts_of([name], kept=kept, here=hosts_file).find(name))
        except HostError:
            raise
        except DraftyardError as error:  # an unknown name or a fault in hosts.yaml: a person may repair it
            raise HostError(str(error)) from error

    return connect_to


def resume_by_verb(db: Path, hosts_file: Path) -> Resume:
    """Resumes as a person would who knows the same hosts: `draftyard resume RUN`."""

    def resume(wish: IntentRow) -> str:
        words = ["resume", wish.run_id, "--no-input", "--db", str(db.absolute())]
        argv = [sys.executable, "-P", "-m", "orchestrator.cli", *words]
        # A file and a session of its own: if this process dies, a start that is under way goes on, and may speak.
        with tempfile.TemporaryFile() as told:
            try:
                done = subprocess.run(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=told,
                    env={**environment(), "DRAFTYARD_HOSTS": str(hosts_file.absolute()), RETRY: str(wish.id)},
                    timeout=RESUME_TIMEOUT_S,
                    start_new_session=True,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"`draftyard resume` took longer than {RESUME_TIMEOUT_S:g} s"
            told.seek(0)
            said = told.read().decode("utf-8", "replace").strip().splitlines()
        return (
            "a new attempt was started" if done.returncode == 0 else (said or ["no word"])[-1].removeprefix("error: ")
        )

    return resume


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.follow.follower", description=__doc__.splitlines()[0])
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--hosts", type=Path, help="hosts.yaml for runs that kept none; by default beside the database")
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds with nothing live before it ends")
    options = parser.parse_args(arguments)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: ending.set())
    hosts_file = options.hosts or options.db.absolute().parent / "hosts.yaml"
    address = os.environ.get("DRAFTYARD_WEBHOOK")
    follower = Follower(
        options.db,
        connector(hosts_file),
        ending,
        idle_s=options.idle,
        resume=resume_by_verb(options.db, hosts_file),
        post=webhook(address) if address else None,
        secrets_of=Known(hosts_file).of,
    )
    follow(follower)
    return 0


def _as_process() -> int:
    try:
        return main()
    except DraftyardError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_as_process())
