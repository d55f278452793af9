"""The lines of the hosts screen: reachability, every GPU with its owner, disk, clock, and the runs there."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from orchestrator.store.rows import GpuSampleRow, HostRow, RunRow, card_of
from tui.moment import faded, is_of_now, last_seen
from tui.outside import to_type
from tui.overview import clock
from tui.pieces import BLANK, Line, Piece, broken, heading, memory_meaning, meter, wrapped
from tui.runs_rows import name_pieces
from tui.snapshot import Snapshot
from tui.wording import age, fit, gib, percent, short_count, state_letter

MARK: Piece = ("▸ ", "accent")
Place = tuple[str, str]  # what can be acted on: a host, and the id of a run there; empty for the host itself
NOWHERE: Place = ("", "")
NAME_WIDTH = 24  # cells of a host's name before a command


def places_in_order(snapshot: Snapshot) -> list[Place]:
    """Each host, then the live runs there, from top to bottom."""
    return [
        (host.name, run_id)
        for host in hosts_in_order(snapshot)
        for run_id in ("", *(run.id for run in snapshot.live if host.name in run.hosts))
    ]


def hosts_in_order(snapshot: Snapshot) -> list[HostRow]:
    """Those in trouble first, then the busiest."""
    num_live = {host.name: sum(host.name in run.hosts for run in snapshot.live) for host in snapshot.hosts}
    return sorted(snapshot.hosts, key=lambda host: (host.unreachable_since_s is None, -num_live[host.name], host.name))


def hosts_lines(
    snapshot: Snapshot, width: int, *, named: Sequence[str] = (), chosen: Place = NOWHERE, ascii_only: bool
) -> list[Line]:
    """The line that is chosen begins with MARK. `named`: hosts that settings name; who of them was never seen is told last."""
    never = never_seen(snapshot, named)
    if not snapshot.hosts and not never:
        command = to_type("draftyard doctor HOST")
        return broken(
            [("No host has been seen yet.", "muted"), (f" {command}", "text"), (" looks at one.", "muted")], width
        )
    lines: list[Line] = []
    for host in hosts_in_order(snapshot):
        runs = [run for run in snapshot.live if host.name in run.hosts]
        head = heading(host.name, width, host.address)
        if chosen == (host.name, ""):
            head = [MARK, *heading(host.name, width - 2, host.address)]
        told = _host_lines(host, runs, snapshot, width, ascii_only=ascii_only)
        told += _run_lines(host, runs, snapshot, chosen[1] if chosen[0] == host.name else "")
        lines += [*([BLANK] if lines else []), head, *told]
    return [*lines, *([BLANK] if lines and never else []), *_never_lines(never, width)]


def never_seen(snapshot: Snapshot, named: Iterable[str]) -> list[str]:
    seen = {host.name for host in snapshot.hosts}
    return [name for name in named if name not in seen]


def _never_lines(names: Sequence[str], width: int) -> list[Line]:
    """With the command that looks: this screen shows what was seen, and asks nobody."""
    if not names:
        return []
    room = min(max(map(cell_len, names)), NAME_WIDTH)
    lines: list[Line] = [heading("Never seen", width, "looked at by a launch, or by the command")]
    for name in names:
        lines += broken(
            [(fit(name, room), "text"), (to_type(f"  draftyard doctor {shlex.quote(name)}"), "muted")], width
        )
    return lines


def _host_lines(
    host: HostRow, runs: Sequence[RunRow], snapshot: Snapshot, width: int, *, ascii_only: bool
) -> list[Line]:
    sampled = snapshot.sampled.get(host.name, {})
    lines: list[Line] = [_reach(host, _heard_s(host, runs, sampled.values()), snapshot.at_s)]
    if host.unreachable_since_s is not None:
        lines += [part for row in (host.error or "").splitlines() for part in wrapped(row, width)]
    for gpu in host.facts.get("gpus") or ():
        owner = gpu_owner(gpu, runs, snapshot.promised.get(host.name, {}))
        sample = sampled.get(int(gpu.get("index", -1)))
        lines += _gpu_lines(host, gpu, (owner, sample), (snapshot.at_s, width), ascii_only=ascii_only)
    return lines


def _run_lines(host: HostRow, runs: Sequence[RunRow], snapshot: Snapshot, chosen: str) -> list[Line]:
    """Its live runs; `chosen`: the id of the one that keys act on."""
    lines: list[Line] = []
    for run in runs:
        letter = state_letter(run.state, run.reason, unreachable=run.unreachable_since_s is not None)
        step = f"  step {short_count(run.step)}" if run.step is not None else ""
        samples = snapshot.numbers[run.id].gpus if run.id in snapshot.numbers else ()
        cards = [card_of(run.hosts, sample.gpu) for sample in samples]
        gpus = [str(index) for on, index in cards if on == host.name]
        where = f"  GPU {' '.join(gpus)}" if gpus else ""
        mark = [MARK] if run.id == chosen else []
        lines.append([*mark, (fit(letter[0], 3), letter[1]), *name_pieces(run), (f"  {run.id}{step}{where}", "muted")])
    return lines or [[("no live run", "faint")]]


def _heard_s(host: HostRow, runs: Sequence[RunRow], samples: Iterable[GpuSampleRow]) -> float | None:
    """When it last told anything: somebody who looked, a run that is there alone, or a supervisor."""
    words = [run.last_event_s for run in runs if run.hosts == (host.name,)]
    told = [at_s for at_s in (host.seen_s, *words, *(sample.at_s for sample in samples)) if at_s is not None]
    return max(told, default=None)


def looked_s(host: HostRow) -> float | None:
    """When its facts were found, by this machine's clock; of facts that do not say it, when the host was last reached.

    Never later than that: a clock that runs ahead makes nothing newer.
    """
    there_s = host.facts.get("time_s")
    if not isinstance(there_s, int | float):
        return host.seen_s
    found_s = there_s - (host.clock_offset_s or 0.0)
    return found_s if host.seen_s is None else min(found_s, host.seen_s)


def _reach(host: HostRow, heard_s: float | None, now_s: float) -> Line:
    """Reachable or not, then disk, clock and versions. A host that nobody has asked for long is called neither."""
    if host.unreachable_since_s is not None:
        since = f"unreachable since {clock(host.unreachable_since_s, now_s)}"
        return [(since, "warn"), (f"  {last_seen(heard_s, now_s)}", "muted")]
    pieces: list[Piece] = [(last_seen(heard_s, now_s), "muted")]
    if heard_s is not None and is_of_now(heard_s, now_s):
        pieces = [("reachable", "good"), (f"  seen {age(now_s - heard_s)} ago", "muted")]
    free, at_s = disk_free_bytes(host.facts), looked_s(host)
    if free is not None:
        is_low, then = free < 50 * 2**30, "" if is_of_now(at_s, now_s) else f" {_ago(at_s, now_s)}"
        pieces.append((f"  disk {gib(free)} free{then}", "warn" if is_low else "muted"))
    offset = host.clock_offset_s
    if offset is not None:
        pieces.append((f"  clock {offset:+.1f} s", "warn" if abs(offset) > 5 else "muted"))
    driver = host.facts.get("driver")
    return [*pieces, (f"  driver {driver}", "muted")] if driver else pieces


def _ago(at_s: float | None, now_s: float) -> str:
    return f"{age(None if at_s is None else now_s - at_s)} ago"


def disk_free_bytes(facts: Mapping[str, Any]) -> float | None:
    """Free bytes where the work folder lies, by either shape of the facts."""
    disk = facts.get("disk")
    free = disk.get("free_bytes") if isinstance(disk, Mapping) else facts.get("disk_free_bytes")
    return float(free) if isinstance(free, int | float) else None


def gpu_owner(gpu: Mapping[str, Any], runs: Sequence[RunRow], promised: Mapping[str, str]) -> RunRow | None:
    """The live run that the card is promised to. What else holds its memory is somebody else's."""
    run_id = promised.get(str(gpu.get("uuid"))) or promised.get(str(gpu.get("index")))
    return next((run for run in runs if run.id == run_id), None)


def processes_to_name(gpu: Mapping[str, Any], is_ours: bool) -> list[Mapping[str, Any]]:
    """Who holds the memory, where the bar does not say it: of a GPU with one of our runs only when it shares."""
    processes = [item for item in gpu.get("processes") or [] if isinstance(item, Mapping)]
    return processes if len(processes) > (1 if is_ours else 0) else []


def _gpu_lines(
    host: HostRow,
    gpu: Mapping[str, Any],
    who: tuple[RunRow | None, GpuSampleRow | None],
    at: tuple[float, int],
    *,
    ascii_only: bool,
) -> list[Line]:
    """The card, and the processes to name there. `who`: its run, and what a supervisor saw of it last; `at`: the time, and the width."""
    owner, sample = who
    now_s, width = at
    looked = looked_s(host)
    used, total, utilisation, at_s = gpu.get("used_bytes"), gpu.get("total_bytes"), gpu.get("utilisation"), looked
    if sample is not None and (looked is None or sample.at_s >= looked):
        used, utilisation = sample.used_bytes if sample.used_bytes is not None else used, sample.utilisation
        at_s = sample.at_s
    is_now = host.unreachable_since_s is None and is_of_now(at_s, now_s)
    fraction = used / total if isinstance(used, int | float) and total else None
    head = f"GPU {gpu.get('index', '?')}  "
    numbers = f"  {gib(used, unit=False):>4} of {gib(total)}"
    told = fit(f"  busy {percent(utilisation):>4}" if is_now else f"  {_ago(at_s, now_s)}", 13)
    room = max(8, min(40, width - len(head) - len(numbers) - len(told) - 26))
    bar = meter(fraction, room, memory_meaning(fraction), ascii_only=ascii_only)
    pieces = _owner_pieces(gpu, owner, fraction, is_now=is_now)
    line: Line = [(head, "muted"), *bar, (numbers, "text"), (told, "muted"), *pieces]
    then = "" if is_of_now(looked, now_s) else f"  {_ago(looked, now_s)}"
    named = [_process_line(process, then) for process in processes_to_name(gpu, owner is not None)]
    return [*([line] if is_now else faded([line])), *(faded(named) if then or not is_now else named)]


def _owner_pieces(gpu: Mapping[str, Any], owner: RunRow | None, fraction: float | None, *, is_now: bool) -> list[Piece]:
    if owner is not None:
        return [(f"{owner.recipe}/{owner.branch}", "live"), (f" {owner.id[:8]}", "muted")]
    if gpu.get("processes"):
        return [("others", "text")]
    if fraction is not None and fraction > 0.02:
        return [("held from outside", "text")]
    return [("free" if is_now else "was free", "good")]


def _process_line(process: Mapping[str, Any], then: str) -> Line:
    """`then`: how long ago it was seen, where that is not now: a supervisor samples cards, and no processes."""
    who = f"pid {process.get('pid', '?')}, user {process.get('user') or '?'}"
    size = process.get("used_bytes")
    held = f"{gib(size)}  " if isinstance(size, int | float) else ""
    return [
        ("       └ ", "faint"),
        (held, "text"),
        (who, "muted"),
        (f"{then}  {process.get('command') or ''}", "faint"),
    ]
