"""What following a run needs at hand. No behaviour."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.follow.streams import Doubts
from orchestrator.store.reads import Reader
from orchestrator.store.writes import Store


@dataclass
class Desk:
    """What following needs: the two halves of the store, a clock, and what the last look doubted. One per host thread."""

    store: Store
    reader: Reader
    clock: Callable[[], float]
    doubts: Doubts = field(default_factory=Doubts)
    monotonic: Callable[[], float] = time.monotonic  # for waiting: nobody sets it back
    first_seen_s: dict[str, float] = field(default_factory=dict)  # on that clock, by run or attempt
    silent_since_s: dict[str, tuple[int, float]] = field(default_factory=dict)  # by attempt: its job's events, and when
    stops_left: set[str] = field(default_factory=set)  # stops of a run's several hosts that this follower wrote
    stops_refused: set[str] = field(default_factory=set)  # likewise stops that a host did not take
    wished_up_s: dict[str, float] = field(default_factory=dict)  # by stop: its host's uptime when it first lay there
    clock_offsets_s: dict[str, float] = field(default_factory=dict)  # by host, as last written
