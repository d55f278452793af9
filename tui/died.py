"""Which run died last: what the key for it leads to, known before the key is pressed.

Over ten thousand runs to find it takes as long as reading the list, so it is asked for where a run may have died.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.store.reads import Reader
from orchestrator.store.rows import RunRow, State
from tui.runs_rows import never_started
from tui.snapshot import Room, Snapshot

DEAD = f"status:{State.FAILED},{State.LOST}"
AGAIN_S = 10.0  # a run that ended long ago may have been marked, or brought from elsewhere, meanwhile
MOST_REFUSED = 20  # launches in a row that were refused, before all that died are read


class LastDeath:
    def __init__(self) -> None:
        self.run: RunRow | None = None  # of all there are, listed or not
        self.is_known = False  # before the first answer nobody can tell
        self._known: tuple[tuple[object, ...], float] = ((), 0.0)  # for which runs that was found out, and when

    def reads(self, snapshot: Snapshot, kind: str | None) -> Callable[[Room], object] | None:
        """What the reading thread does to find it out anew; None where it is known."""
        known = (kind, snapshot.num_runs, tuple(run.id for run in snapshot.live))
        if known == self._known[0] and snapshot.at_s - self._known[1] < AGAIN_S:
            return None

        def read(room: Room) -> None:
            self.run, self.is_known = died_last(room.reader, kind), True
            self._known = (known, snapshot.at_s)

        return read

    def forget(self) -> None:
        """It is found out anew with the next reading."""
        self._known = ((), 0.0)


def died_last(reader: Reader, kind: str | None) -> RunRow | None:
    """Of every run of that kind (None: of any) the one that failed or was lost last, by when it ended.

    A launch that was refused has not died: it is that one where nothing has.
    """
    found: list[RunRow] = []
    for limit in (MOST_REFUSED, None):
        found = reader.runs(DEAD, kind=kind, sort="ended", limit=limit)
        died = next((run for run in found if not never_started(run)), None)
        if died is not None or len(found) != limit:
            return died or next(iter(found), None)
    return next(iter(found), None)
