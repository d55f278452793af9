"""Starts a job's part on each of its hosts, all or none: what has started is stopped where another one cannot start.

Nobody asked for that stop, so no wish is left in the store. The part that did not start is kept as ended, for its reason;
of that the run's verdict is made once the others have ended (`follow.nodes`), and the follower stops what is not reached
from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.actions.endings import Doubt, ending_of
from orchestrator.errors import DraftyardError
from orchestrator.follow.nodes import LONELY, LONELY_GRACE_S, End
from orchestrator.follow.status import Verdict
from orchestrator.launch import Part, start_all, stop
from orchestrator.store.rows import State
from orchestrator.store.writes import Store


@dataclass(frozen=True)
class HostPart:
    """A part and the name of its host."""

    host: str
    part: Part


def start_parts(store: Store, each: Sequence[HostPart], doubt: Doubt, *, before_spawn: Callable[[], object]) -> None:
    """Raises what `launch.start_all` raises; what it leaves, of a job on several hosts, is then being stopped."""
    begun: list[Part] = []
    try:
        start_all([item.part for item in each], before_spawn=before_spawn, after_spawn=begun.append)
    except BaseException as error:  # an interrupt as well: what has started would wait for the others
        if len(each) > 1 and doubt.may_live and len(begun) < len(each):
            fallen = each[len(begun)]
            doubt.broken_off = f"host {fallen.host} did not start"
            with suppress(DraftyardError):
                _keep_ends(store, each[len(begun) :], error)
            for item in each[: len(begun) + 1]:  # that one too: its supervisor may come up yet
                _stop(item.part)
            for item in each[len(begun) + 1 :]:
                _take_secrets(item.part)
        raise


def _keep_ends(store: Store, missing: Sequence[HostPart], error: BaseException) -> None:
    fallen, *never = missing
    state, reason, why = ending_of(error, otherwise="the launch broke off")
    echo = Verdict(State.STOPPED, None, f"not started, as host {fallen.host} did not start")
    verdicts = [Verdict(state, reason, f"did not start: {why}", time.time()), *(echo for _ in never)]
    for item, verdict in zip(missing, verdicts, strict=True):
        job = item.part.job
        store.end_node(job.run_id, job.node, job.attempt, End(job.node, item.host, verdict, {}, ()).dump())


def _stop(part: Part) -> None:
    """A host that does not answer now is left to the follower."""
    grace_s = min(part.job.grace_s, LONELY_GRACE_S)
    with suppress(DraftyardError):
        stop(part.shell, part.run_dir, attempt=part.job.attempt, grace_s=grace_s, why=LONELY)


def _take_secrets(part: Part) -> None:
    """No supervisor will come to take them away."""
    with suppress(DraftyardError):
        part.shell.run(["rm", "-f", f"{part.run_dir}/env"])
