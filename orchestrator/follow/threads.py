"""The follower's threads: one per host with live runs, one per host with retries, and the pace of looking.

A thread that meets a fault on this side (a full disk, a locked database) says so in the log, ends, and is
replaced after a rest; one that meets a fault of this program leaves its traceback there. Trouble with one run
holds up no other.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orchestrator.errors import DraftyardError, HostError, RunNotFound
from orchestrator.follow import importing
from orchestrator.follow.complaints import Complaints
from orchestrator.follow.desk import Desk
from orchestrator.follow.machines import REASON as ANOTHER_MACHINE
from orchestrator.follow.nodes import views_on
from orchestrator.follow.notices import note_silence
from orchestrator.follow.one_run import Looked, look, settle_unstarted
from orchestrator.follow.secrets import LeftSecrets
from orchestrator.shell.stream import StreamShell
from orchestrator.store.reads import Reader, SecretsOf
from orchestrator.store.rows import IntentRow, RunRow, State
from orchestrator.store.writes import Store

# Between looks at a host: while news come from a young run, from an older one, and when none come. A look is
# one short command on the host; a wish of a user's ends the wait.
YOUNG_S, NEWS_S, QUIET_S = 0.4, 1.0, 5.0
YOUNG_AGE_S = 120.0
GLANCE_S = 0.25
ORDINARY = frozenset({"beat", "gpu"})  # events that are no news
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 15.0  # a host that is back is followed again within 30 s
AFTER_FAULT_S = 5.0

Connect = Callable[[str, Path | None], StreamShell]  # a host, and the hosts.yaml that its runs were launched with
Resume = Callable[[IntentRow], str]  # the wish for a retry -> how it went
Found = TypeVar("Found")
Asked = tuple[str, int, bool, float | None]


class Worker(threading.Thread):
    """A thread that a fault ends, to be replaced after a rest."""

    failed_at: float | None = None

    @property
    def is_wanted(self) -> bool:
        """At work, or resting after a fault; otherwise a new one may begin."""
        return self.is_alive() or (self.failed_at is not None and time.monotonic() - self.failed_at < AFTER_FAULT_S)

    def run(self) -> None:
        has_failed = True  # whatever ends it: a fault at every start would fill the log
        try:
            self.work()
            has_failed = False
        # no process to be had, a full disk here, a database that stays locked
        except (OSError, DraftyardError) as error:
            sys.stderr.write(f"{self.name}: {error}\n")
        finally:
            self.failed_at = time.monotonic() if has_failed else None

    def work(self) -> None:
        raise NotImplementedError


class HostThread(Worker):
    """Looks at every live run of one host, again and again, until none is left."""

    def __init__(
        self, db: Path, name: str, connect_to: Connect, ending: threading.Event, secrets_of: SecretsOf | None = None
    ) -> None:
        super().__init__(name=f"host {name}", daemon=True)
        self._db, self._host = db, name
        self._connect = connect_to
        self._ending = ending
        self._secrets_of = secrets_of
        self._shell: StreamShell | None = None
        self._kept: Path | None = None  # where its runs were launched: the name alone may be another machine elsewhere
        self._stranger: HostError | None = None  # found by the last pass: its runs live elsewhere
        self._backoff_s = 0.0
        self._pause_s = YOUNG_S
        self._complaints = Complaints()
        self._secrets = LeftSecrets(name)

    def work(self) -> None:
        try:
            self._follow()
        finally:
            self._drop_shell()

    def _follow(self) -> None:
        with Store(self._db) as store, Reader(self._db, secrets_of=self._secrets_of) as reader:
            desk = Desk(store, reader, time.time)
            followed: set[str] = set()
            while not self._ending.is_set():
                asked = _asked(reader, self._host)
                live = views_on(reader, self._host, reader.live_runs())
                ids = {run.id for run in live}
                if live or not followed:  # what is left at the end is left where the last ones ran
                    self._turn_to(reader.hosts_file_at(self._host), is_anew=followed.isdisjoint(ids))
                self._secrets.is_due |= not followed <= ids
                followed = ids
                if not live:
                    with contextlib.suppress(HostError):  # away: whoever follows this host next does it
                        self._take_secrets_away(desk)
                    break
                self._pass_over(desk, live)
                self._rest(desk, asked)

    def _pass_over(self, desk: Desk, live: list[RunRow]) -> None:
        started = self._of_the_host(desk, live)
        if not started:
            return  # nothing on the host to look at yet: it is not even asked
        had_news, self._stranger = False, None
        try:
            shell = self._connected()
            for run in started:
                had_news = self._look_at(desk, shell, run) or had_news
            if self._stranger is not None:
                raise self._stranger
            self._take_secrets_away(desk)
        except HostError as error:
            self._drop_shell()
            self._backoff_s = min(LAST_BACKOFF_S, max(FIRST_BACKOFF_S, self._backoff_s * 2))
            desk.store.host_unreachable(self._host, error=str(error))
            for run in live:
                note_silence(desk, run)
            return
        if self._backoff_s or any(run.unreachable_since_s is not None for run in live):
            desk.store.host_seen(self._host)
        self._complaints.store(desk)
        self._backoff_s = 0.0
        is_young = any(abs(time.time() - run.created_s) < YOUNG_AGE_S for run in live)
        self._pause_s = (YOUNG_S if is_young else NEWS_S) if had_news else min(QUIET_S, self._pause_s * 1.5)

    def _rest(self, desk: Desk, asked: set[Asked]) -> None:
        """The pause before the next look; a wish, a new run or a new start since the last one cuts it short.

        A host that did not answer is left alone for its time; what needs no host is settled meanwhile.
        """
        began, version = time.monotonic(), -1
        while time.monotonic() - began < (self._backoff_s or self._pause_s) and not self._ending.wait(GLANCE_S):
            newest = desk.reader.data_version()
            if newest == version:
                continue
            version = newest
            if self._backoff_s:
                self._of_the_host(desk, views_on(desk.reader, self._host, desk.reader.live_runs()))
            elif _asked(desk.reader, self._host) - asked:
                return

    def _of_the_host(self, desk: Desk, live: list[RunRow]) -> list[RunRow]:
        """Those of which the host can tell something; the others are settled. With none, it is not waited for."""
        started = [run for run in live if not self._is_unstarted(desk, run)]
        if not started:
            self._backoff_s = 0.0
        return started

    def _is_unstarted(self, desk: Desk, run: RunRow) -> bool:
        if run.host == importing.HOST:  # no host of that name is asked
            importing.settle(desk.store, run)
            return True
        if_unknown = run.workdir is None or run.attempt == 0
        return self._or_complain(desk, run, lambda: settle_unstarted(desk, run), if_unknown)

    def _look_at(self, desk: Desk, shell: StreamShell, run: RunRow) -> bool:
        """Whether anything new came."""
        try:
            looked = self._or_complain(desk, run, lambda: look(desk, shell, run), Looked())
        except HostError as error:
            if error.reason != ANOTHER_MACHINE:
                raise
            self._stranger = error  # others may have been launched on this one
            return False
        return looked.has_ended or bool(looked.caught.kinds - ORDINARY) or looked.caught.num_log_bytes > 0

    def _or_complain(self, desk: Desk, run: RunRow, act: Callable[[], Found], if_not: Found) -> Found:
        """Trouble with one run never stops the others: it is said, and tried again. A host that is away is no trouble."""
        try:
            return act()
        except HostError:
            raise
        except Exception as error:  # noqa: BLE001  the one place of this process that records what nobody foresaw
            self._complaints.add(desk, run.id, error)
            return if_not

    def _turn_to(self, kept: Path | None, *, is_anew: bool) -> None:
        """Leaves a connection that was made for other runs: of another hosts.yaml, or all ended, and the same one edited."""
        if is_anew or kept != self._kept:
            self._drop_shell()
            self._kept, self._secrets = kept, LeftSecrets(self._host)

    def _connected(self) -> StreamShell:
        if self._shell is None:
            self._shell = self._connect(self._host, self._kept)
        return self._shell

    def _take_secrets_away(self, desk: Desk) -> None:
        if self._host != importing.HOST:  # nobody is behind that name
            self._secrets.take_away(desk, self._connected)

    def _drop_shell(self) -> None:
        if self._shell is not None:
            with contextlib.suppress(HostError, OSError):
                self._shell.close()
        self._shell = None


def _asked(reader: Reader, host: str) -> set[Asked]:
    """The live runs of a host with the start they are at, and the graces of the stops that are wished."""
    wishes = {wish.run_id: wish.grace_s or 0.0 for wish in reader.intents() if wish.kind == "stop"}
    live = views_on(reader, host, reader.live_runs())
    return {(run.id, run.attempt, run.state is State.PENDING, wishes.get(run.id)) for run in live}


class RetryThread(Worker):
    """Carries out the retries wished on one host, one after the other.

    A start may take minutes; meanwhile the runs of that host are looked at and stopped by its HostThread. One that
    is called off meanwhile makes no attempt: the store refuses it.
    """

    def __init__(self, db: Path, host: str, resume: Resume, ending: threading.Event) -> None:
        super().__init__(name=f"retries on {host}", daemon=True)
        self._db, self._host = db, host
        self._resume = resume
        self._ending = ending

    def work(self) -> None:
        with Store(self._db) as store:
            while not self._ending.is_set() and (wishes := retries(store.reader).get(self._host)):
                store.finish_intent(wishes[0].id, outcome=self._resume(wishes[0]))


def retries(reader: Reader) -> dict[str, list[IntentRow]]:
    """Host -> open retry wishes of runs that have ended."""
    found: dict[str, list[IntentRow]] = {}
    for wish in reader.intents():
        with contextlib.suppress(RunNotFound):  # purged since
            run = reader.run(wish.run_id)
            if wish.kind == "retry" and run.state.is_final:
                found.setdefault(run.host, []).append(wish)
    return found
