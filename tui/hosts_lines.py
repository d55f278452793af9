"""The lines of the hosts screen: reachability, every GPU with its owner, disk, clock, and the runs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.store.rows import GpuSampleRow, HostRow, RunRow, card_of
from tui.overview import clock
from tui.pieces import BLANK, Line, Piece, heading, memory_meaning, meter, wrapped
from tui.runs_rows import name_pieces
from tui.snapshot import Snapshot
from tui.wording import age, busy, fit, gib, short_count, state_letter


def hosts_in_order(snapshot: Snapshot) -> list[HostRow]:
    """Those in trouble first, then the busiest."""
    num_live = {host.name: sum(host.name in run.hosts for run in snapshot.live) for host in snapshot.hosts}
    return sorted(snapshot.hosts, key=lambda host: (host.unreachable_since_s is None, -num_live[host.name], host.name))


def hosts_lines(snapshot: Snapshot, width: int, *, chosen: str = "", ascii_only: bool) -> list[Line]:
    if not snapshot.hosts:
        return [
            [("No host has been seen yet. ", "muted"), ("draftyard doctor HOST", "text"), (" looks at one.", "muted")]
        ]
    lines: list[Line] = []
    for host in hosts_in_order(snapshot):
        runs = [run for run in snapshot.live if host.name in run.hosts]
        head = heading(host.name, width, host.address)
        if host.name == chosen:
            head = [("▸ ", "accent"), *heading(host.name, width - 2, host.address)]
        told = _host_lines(host, runs, snapshot, width, ascii_only=ascii_only)
        lines += [*([BLANK] if lines else []), head, *told]
    return lines


def _host_lines(
    host: HostRow, runs: Sequence[RunRow], snapshot: Snapshot, width: int, *, ascii_only: bool
) -> list[Line]:
    lines: list[Line] = [_standing(host, snapshot.at_s)]
    if host.unreachable_since_s is not None:
        lines += [part for row in (host.error or "").splitlines() for part in wrapped(row, width)]
    sampled = snapshot.sampled.get(host.name, {})
    for gpu in host.facts.get("gpus") or ():
        owner = gpu_owner(gpu, runs, snapshot.promised.get(host.name, {}))
        sample = sampled.get(int(gpu.get("index", -1)))
        lines.append(_gpu_line(gpu, owner, sample, width, ascii_only=ascii_only))
        lines += [_process_line(process) for process in processes_to_name(gpu, owner is not None)]
    for run in runs:
        letter = state_letter(run.state, run.reason, unreachable=run.unreachable_since_s is not None)
        step = f"  step {short_count(run.step)}" if run.step is not None else ""
        samples = snapshot.numbers[run.id].gpus if run.id in snapshot.numbers else ()
        cards = [card_of(run.hosts, sample.gpu) for sample in samples]
        gpus = [str(index) for on, index in cards if on == host.name]
        where = f"  GPU {' '.join(gpus)}" if gpus else ""
        lines.append([(fit(letter[0], 3), letter[1]), *name_pieces(run), (f"  {run.id}{step}{where}", "muted")])
    if not runs:
        lines.append([("no live run", "faint")])
    return lines


def _standing(host: HostRow, now_s: float) -> Line:
    """Reachable or not, then disk, clock and versions."""
    if host.unreachable_since_s is not None:
        return [(f"unreachable since {clock(host.unreachable_since_s, now_s)}", "warn")]
    pieces: list[Piece] = [
        ("reachable", "good"),
        (f"  seen {age(now_s - host.seen_s)} ago" if host.seen_s else "", "muted"),
    ]
    free = disk_free_bytes(host.facts)
    if free is not None:
        pieces.append((f"  disk {gib(free)} free", "warn" if free < 50 * 2**30 else "muted"))
    offset = host.clock_offset_s
    if offset is not None:
        pieces.append((f"  clock {offset:+.1f} s", "warn" if abs(offset) > 5 else "muted"))
    driver = host.facts.get("driver")
    return [*pieces, (f"  driver {driver}", "muted")] if driver else pieces


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


def _gpu_line(
    gpu: Mapping[str, Any], owner: RunRow | None, sample: GpuSampleRow | None, width: int, *, ascii_only: bool
) -> Line:
    used, total, utilisation = gpu.get("used_bytes"), gpu.get("total_bytes"), gpu.get("utilisation")
    if sample is not None:  # a supervisor's sample is newer than the last look at the host
        used, utilisation = sample.used_bytes if sample.used_bytes is not None else used, sample.utilisation
    fraction = used / total if isinstance(used, int | float) and total else None
    head = f"GPU {gpu.get('index', '?')}  "
    numbers = f"  {gib(used, unit=False):>4} of {gib(total)}"
    told = f"  busy {busy(utilisation):>4}  "
    who: list[Piece] = _owner_pieces(gpu, owner, fraction)
    room = max(8, min(40, width - len(head) - len(numbers) - len(told) - 26))
    bar = meter(fraction, room, memory_meaning(fraction), ascii_only=ascii_only)
    return [(head, "muted"), *bar, (numbers, "text"), (told, "muted"), *who]


def _owner_pieces(gpu: Mapping[str, Any], owner: RunRow | None, fraction: float | None) -> list[Piece]:
    if owner is not None:
        return [(f"{owner.recipe}/{owner.branch}", "live"), (f" {owner.id[:8]}", "muted")]
    if gpu.get("processes"):
        return [("others", "text")]
    if fraction is not None and fraction > 0.02:
        return [("held from outside", "text")]
    return [("free", "good")]


def _process_line(process: Mapping[str, Any]) -> Line:
    who = f"pid {process.get('pid', '?')}, user {process.get('user') or '?'}"
    size = process.get("used_bytes")
    held = f"{gib(size)}  " if isinstance(size, int | float) else ""
    return [("       └ ", "faint"), (held, "text"), (who, "muted"), (f"  {process.get('command') or ''}", "faint")]
