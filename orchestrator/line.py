"""How good the way to a host is: round trip, rates, and how far its clock is from ours. For a doctor."""

from __future__ import annotations

import time
from dataclasses import dataclass

from orchestrator.observe import clock_s
from orchestrator.shell.stream import Source, StreamShell, shown, told

PROBE_BYTES = 4 * 1024**2
NUM_TRIES = 3


@dataclass(frozen=True)
class Line:
    """What could not be measured is None, and `faults` says what was seen instead, a line each."""

    round_trip_s: float  # of one command that does nothing
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    clock_offset_s: float | None  # positive: the host's clock is ahead
    clock_error_s: float  # the offset may be wrong by as much
    faults: tuple[str, ...] = ()


def measure(shell: StreamShell) -> Line:
    """Takes as long as 8 MiB take on the line; nothing is left on the host. Raises HostError where the line breaks."""
    faults: list[str] = []
    asked = [_ask_clock(shell) for _ in range(NUM_TRIES)]
    quickest = min(asked, key=lambda answer: answer.took_s)
    if quickest.offset_s is None:
        faults.append(f"`{' '.join(_CLOCK)}` said {quickest.said!r}; seconds since 1970 were expected")
    return Line(
        round_trip_s=quickest.took_s,
        up_bytes_per_s=_rate(shell, ["sh", "-c", "cat > /dev/null"], faults, sent=bytes(PROBE_BYTES)),
        down_bytes_per_s=_rate(shell, ["head", "-c", str(PROBE_BYTES), "/dev/zero"], faults, due=PROBE_BYTES),
        clock_offset_s=quickest.offset_s,
        clock_error_s=quickest.took_s / 2,
        faults=tuple(faults),
    )


_CLOCK = ["date", "+%s.%N"]


@dataclass(frozen=True)
class _Clock:
    took_s: float
    offset_s: float | None  # None: it did not say a time
    said: str


def _ask_clock(shell: StreamShell) -> _Clock:
    """The host's time is taken to be that of the middle of the question."""
    wall_s, began = time.time(), time.monotonic()
    answer = shell.run(_CLOCK, timeout_s=30)
    took_s = time.monotonic() - began
    there_s = None if answer.exit_code else clock_s(answer.stdout.decode("ascii", "replace").strip())
    offset_s = None if there_s is None else there_s - (wall_s + took_s / 2)
    return _Clock(took_s, offset_s, told(answer.stdout or answer.stderr, 60))


def _rate(shell: StreamShell, argv: list[str], faults: list[str], *, sent: bytes = b"", due: int = 0) -> float | None:
    """Bytes a second of a command that takes or gives PROBE_BYTES; None where it did not."""
    taken = 0

    def take(piece: bytes) -> None:
        nonlocal taken
        taken += len(piece)

    began = time.monotonic()
    ended = shell.stream(argv, source=Source.of(sent), sink=take, timeout_s=60, idle=True)
    took_s = max(1e-6, time.monotonic() - began)
    if not ended.exit_code and taken == due:
        return PROBE_BYTES / took_s
    seen = f"ended with {ended.exit_code}" if ended.exit_code else f"gave {taken:,} bytes of {due:,}"
    faults.append(f"`{shown(argv)}` {seen}: {told(ended.stderr, 200) or 'it said nothing'}".replace("\n", " "))
    return None
