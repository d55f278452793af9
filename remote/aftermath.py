"""What only others can tell once a job is over: the kernel's log, nvidia-smi, processes that are not marked as ours.

Evidence, kept small: nothing here judges a card or ends a process. Standard library only. Whatever
cannot be read is None, never an empty list.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote.probe import HOLDER_FIELDS, query_command, read_holders
from remote.processes import age_s, command_line, marked, pids, protected, read_stat
from remote.sampler import HEALTH_FIELDS, ask

KERNEL_LIMIT_S = 2.0
NVIDIA_LIMIT_S = 20.0
FIRST_LINES = LAST_LINES = 15  # a card that failed may fill the log: how it began and how it ended are kept
LINE_CHARS = 300
MOST_PROCESSES = 20

_STAMPED = re.compile(r"^\[ *(\d+\.\d+)\] (.*)$")
_TELLING = re.compile(
    r"NVRM|\bXid\b|nvidia.*(fallen off|lost)|\boom\b|oom[-_]kill|Out of memory|out of memory", re.IGNORECASE
)
_PCI = re.compile(r"(?<![0-9A-Fa-f])([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\b")


class KernelLog:
    """The kernel's lines since this was made, told by the kernel's own clock, which no other clock keeps pace with."""

    def __init__(self) -> None:
        self._program = shutil.which("dmesg")
        stamped = self._read()
        self._since = None if stamped is None else max((at for at, _ in stamped), default=0.0)

    def lines(self) -> list[str] | None:
        """Those that name a GPU's driver or memory that ran out; None where this user may not read the log."""
        stamped = self._read()
        if stamped is None or self._since is None:
            return None
        return shortened(text for at, text in stamped if at > self._since and _TELLING.search(text))

    def _read(self) -> list[tuple[float, str]] | None:
        answer = ask([self._program], KERNEL_LIMIT_S) if self._program else None
        if answer is None or answer.exit_code != 0:
            return None
        found = [_STAMPED.match(line) for line in answer.text.splitlines()]
        return [(float(match[1]), match[2]) for match in found if match]


@dataclass(frozen=True)
class _Card:
    index: str
    uuid: str
    pci: tuple[int, ...]
    ecc: int | None  # uncorrectable errors since the driver was loaded


def gpu_health(before: str | None, gpus: list[str], *, is_silent: bool = False) -> dict[str, Any] | None:
    """What nvidia-smi says of the job's cards (`gpus`: index or UUID; empty: all) and did not say `before` the job.

    exit_code (null: it gave no answer), said (lines that are no healthy card's), gone (UUIDs no longer listed),
    ecc_uncorrected (UUID -> count before and after, where it rose), pci (the addresses of the job's cards).
    One that `is_silent` is not asked: it has just failed to answer, and the end of a job would wait for it again.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    answer = None if is_silent else ask(query_command(program, "gpu", HEALTH_FIELDS), NVIDIA_LIMIT_S)
    if answer is None:
        return {"exit_code": None, "said": [f"no answer in {NVIDIA_LIMIT_S:.0f} s"], "gone": [], "ecc_uncorrected": {}}
    known = {card.uuid: card for card in _cards(before or "") if not gpus or card.index in gpus or card.uuid in gpus}
    now = {card.uuid: card for card in _cards(answer.text)}
    addresses = {card.pci for card in known.values()}
    old = set((before or "").splitlines())
    healthy = {line for line in answer.text.splitlines() if _card(line)}
    said = (line for line in answer.text.splitlines() if line.strip() and line not in old | healthy)
    return {
        "exit_code": answer.exit_code,
        "said": shortened(line for line in said if is_of(line, addresses)),
        "gone": sorted(set(known) - set(now)),
        "ecc_uncorrected": {
            uuid: [card.ecc, now[uuid].ecc] for uuid, card in known.items() if uuid in now and _rose(card, now[uuid])
        },
        "pci": sorted(":".join(f"{part:02x}" for part in address) for address in addresses),
    }


def of_cards(lines: list[str] | None, health: dict[str, Any] | None) -> list[str] | None:
    """The kernel's lines without those that name another card than the job's, where its cards are known."""
    named = [tuple(int(part, 16) for part in address.split(":")) for address in (health or {}).get("pci", [])]
    return None if lines is None else [line for line in lines if is_of(line, set(named))]


def is_of(line: str, addresses: set[tuple[int, ...]]) -> bool:
    """False for a line that names PCI addresses, none of them among these (none known: any may be)."""
    named = {tuple(int(part, 16) for part in match) for match in _PCI.findall(line)}
    return not named or not addresses or bool(named & addresses)


def _cards(text: str) -> list[_Card]:
    return [card for card in map(_card, text.splitlines()) if card is not None]


def _card(line: str) -> _Card | None:
    words = [word.strip() for word in line.split(",")]
    address = _PCI.search(line)
    if len(words) != len(HEALTH_FIELDS) or not words[0].isdigit() or address is None:
        return None
    if not (words[3].isdigit() or words[3] in ("[N/A]", "N/A", "[Not Supported]")):
        return None  # "[GPU is lost]", "[Unknown Error]", "ERR!"
    pci = tuple(int(part, 16) for part in address.groups())
    return _Card(words[0], words[1], pci, int(words[3]) if words[3].isdigit() else None)


def _rose(before: _Card, after: _Card) -> bool:
    return before.ecc is not None and after.ecc is not None and after.ecc > before.ecc


Holder = tuple[str, int, "int | None"]  # UUID of the card, pid, bytes

# Processes -------------------------------------------------------------------------------------------


class Scope:
    """The control group of this process, where it is the job's own: a scope that holds nobody else at the start."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        path = _cgroup_path(proc / "self")
        is_own = path not in (None, "/") and not self._members(path) - protected()
        self._path = path if is_own else None

    def others(self) -> set[int]:
        """Who lives in it or below, but this process and its ancestors; none where it is shared with strangers."""
        return self._members(self._path) - protected() if self._path else set()

    def _members(self, path: str | None) -> set[int]:
        found = ((pid, _cgroup_path(self._proc / str(pid))) for pid in pids(self._proc))
        return {pid for pid, where in found if where is not None and (where == path or where.startswith(f"{path}/"))}


def left_behind(
    scope: Scope, holders: list[Holder], *, gpus: list[str], before: str | None, since_ticks: int
) -> list[dict[str, Any]]:
    """Processes that the job seems to have left and that are not marked as a run's, as a container's are not.

    A holder of a card counts when it was started `since_ticks`, of its own clock: two ages are never read at once.

    pid, command (null: outside this container), age_s, gpu (UUID of the card it holds; null: it is in the job's
    control group) and used_bytes.
    """
    found = [_left(pid, None, None) for pid in sorted(scope.others())]
    own_cards = {card.uuid for card in _cards(before or "") if card.index in gpus} | set(gpus)
    of_runs = {process.pid for process in marked()} if holders else set()
    for uuid, pid, used_bytes in holders:
        if pid in of_runs or (gpus and uuid not in own_cards):
            continue
        holder = _left(pid, uuid, used_bytes)
        # One that cannot be seen may be anybody's: only on a card that was this job's alone is it suspected.
        began = read_stat(pid)
        is_suspected = uuid in own_cards if holder["age_s"] is None or not began else began.start_ticks >= since_ticks
        if is_suspected:
            found.append(holder)
    return found[:MOST_PROCESSES]


def card_holders() -> list[Holder]:
    """Who holds memory of a card, as nvidia-smi says; empty where it says nothing."""
    program = shutil.which("nvidia-smi")
    answer = ask(query_command(program, "compute-apps", HOLDER_FIELDS), NVIDIA_LIMIT_S) if program else None
    return [] if answer is None or answer.exit_code != 0 else read_holders(answer.text)


def _left(pid: int, gpu: str | None, used_bytes: int | None) -> dict[str, Any]:
    return {
        "pid": pid,
        "command": command_line(pid) or None,
        "age_s": age_s(pid),
        "gpu": gpu,
        "used_bytes": used_bytes,
    }


def _cgroup_path(process: Path) -> str | None:
    """Where systemd put it: the unified hierarchy, or systemd's own one on older machines."""
    try:
        lines = (process / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    named = [line.partition(":")[2].partition(":")[::2] for line in lines]
    paths = [path for controllers, path in named if controllers in ("", "name=systemd") and path != "/"]
    return paths[0] if paths else "/"


def shortened(lines: Iterable[str]) -> list[str]:
    """The first and the last of them, each cut: an exit file stays small."""
    kept = [line.strip()[:LINE_CHARS] for line in lines]
    if len(kept) <= FIRST_LINES + LAST_LINES:
        return kept
    left_out = len(kept) - FIRST_LINES - LAST_LINES
    return [*kept[:FIRST_LINES], f"({left_out} lines left out)", *kept[-LAST_LINES:]]
