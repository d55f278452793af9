"""Secrets that lie on a host where no supervisor lives to take them away.

What a launch that was killed left for a job that never came, on each of the run's hosts: such a run is settled without
asking a host, so that is done apart, at once where the host answers, else when it is next followed. And what a killed
supervisor left: the host tells by it where secrets stand in the logs, as the exit file would have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.errors import DraftyardError, HostError
from orchestrator.follow.desk import Desk
from orchestrator.follow.ending import hide
from orchestrator.launcher import LAUNCH_KILLED
from orchestrator.observe import Evidence
from orchestrator.shell.stream import StreamShell
from orchestrator.store.logs import STREAMS, name_of_log
from orchestrator.store.rows import RunRow, State
from orchestrator.workplace import Workplace, run_script

MOST_AT_ONCE = 500  # of the newest: they travel in one command

# Folder and attempt, in turn. What a supervisor has claimed is a job's: it may be another database's run of that id.
_TAKE_AWAY = """
while [ $# -gt 0 ]; do
  [ -e "$1/attempts/$2/claim" ] || rm -f "$1/env"
  shift 2
done
"""


def taken(desk: Desk, shell: StreamShell, run: RunRow, folder: str, seen: Evidence) -> dict[str, Any] | None:
    """Where secrets stand in the logs of an attempt without an exit file. They are taken away when that is kept here, and before
    the end is written, as a resume brings new ones: whoever is killed in between leaves enough for the next look. None where
    nobody can tell. Raises HostError when the host does not answer.
    """
    hidden = _told(shell, run, folder, seen)
    if hidden is None:  # taken away before, or there were none
        kept = desk.store.logs.places(run.id, run.attempt)
        found = {stream: kept[name] for stream in STREAMS if (name := name_of_log(stream, run.node)) in kept}
        return found or None
    try:
        hide(desk, run, replace(seen, hidden=hidden))
    except OSError:  # a full disk here; `gc` takes them away with the folder
        return hidden
    shell.run(["rm", "-f", f"{folder}/env"])
    return hidden


def _told(shell: StreamShell, run: RunRow, folder: str, seen: Evidence) -> dict[str, Any] | None:
    """By the host; None where no secrets lie there."""
    place = Workplace(str(run.workdir), str((seen.supervisor or {}).get("python") or "python3"), "")
    try:
        hidden = run_script(shell, place, "hiding", [folder, str(run.attempt)]).get("hidden")
    except HostError:
        raise
    except DraftyardError:  # no Python there any more; what it could not tell it could not take away
        shell.run(["rm", "-f", f"{folder}/env"])
        return None
    return hidden if isinstance(hidden, dict) else None


@dataclass
class LeftSecrets:
    """Of one host; remembers what it has taken away. `is_due`: a run there may have been settled since."""

    host: str
    is_due: bool = True
    _done: set[tuple[str, int]] = field(default_factory=set)

    def take_away(self, desk: Desk, connected: Callable[[], StreamShell]) -> None:
        """Asks the host only where there may be some. Raises HostError when it does not answer."""
        if not self.is_due:
            return
        killed = [run for run in desk.reader.runs("state:failed", kind=None) if run.evidence == LAUNCH_KILLED]
        ours = [run for run in killed if self.host in run.hosts and (run.id, run.attempt) not in self._done]
        words: list[str] = []
        for run in ours[:MOST_AT_ONCE]:
            folder = self._folder(desk, run)
            # Read once more, right before: a resume writes its row long before it writes new secrets.
            if folder is not None and desk.reader.run(run.id).state is State.FAILED:
                words += [folder, str(run.attempt)]
        if words:
            connected().run(["sh", "-c", _TAKE_AWAY, "sh", *words])
        self._done |= {(run.id, run.attempt) for run in ours}
        self.is_due = False

    def _folder(self, desk: Desk, run: RunRow) -> str | None:
        """None where the launch was killed before it could write anything."""
        nodes = {node.host: node.workdir for node in desk.reader.nodes(run.id)}
        workdir = nodes.get(self.host) if run.more_hosts else run.workdir
        return f"{workdir}/runs/{run.id}" if workdir and run.attempt > 0 else None
