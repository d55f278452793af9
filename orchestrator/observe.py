"""Reads, in one short command, everything a host can testify about an attempt.

A shell script, mostly of built-ins (no Python start there: 20 ms less a poll), prints records; here
they become an Evidence. It judges nothing: `follow` and `failure` do.
"""

from __future__ import annotations

import hashlib
import re
import stat
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import DraftyardError
from orchestrator.shell import Shell
from orchestrator.shell.stream import told
from remote.rundir import json_object

_SEPARATOR = b"\x1e"  # JSON escapes it, so no file of ours contains it
# A slash on either side of the name, which no name holds: one with a line break in it matches nowhere.
_FILE = re.compile(r"^(?P<size>[0-9]+) (?P<inode>[0-9]+) (?P<mode>[0-9a-f]+) \./(?P<name>[^/\n]+)/$", re.MULTILINE)

_OBSERVE = r"""
r=$1; a=$2
for tool in date df find grep head stat; do
  command -v $tool >/dev/null || { echo "$tool is not found on its PATH" >&2; exit 127; }
done
rec() { printf '\036%s\n' "$1"; }
say() { IFS= read -r line 2>/dev/null <"$1" && printf '%s\n' "$line"; }
rec host; say /proc/sys/kernel/random/boot_id; say /proc/uptime; date +%s.%N
rec machine; say /etc/machine-id || say /proc/sys/kernel/hostname
rec init; say /proc/1/stat
# Away, perhaps for a moment only, or not placed yet: do its processes live? They name folder and attempt.
gone() {
  for environ in $(grep -lszxFe "DRAFTYARD_RUN_DIR=$r" /proc/[0-9]*/environ); do
    [ -z "$a" ] || grep -qszxFe "DRAFTYARD_ATTEMPT=$a" "$environ" && { rec marked; break; }
  done
  exit 0
}
[ -d "$r" ] || gone
rec disk; df -Pk "$r"
if [ -z "$a" ]; then
  for d in "$r"/attempts/*; do
    n=${d##*/}
    case $n in *[!0-9]* | 0*) continue ;; esac
    [ "$n" -gt "${a:-0}" ] 2>/dev/null && a=$n
  done
fi
[ -n "$a" ] && [ -d "$r/attempts/$a" ] || gone
cd "$r/attempts/$a" || exit 1
rec attempt; printf '%s\n' "$a"
if [ -f claim ]; then
  rec claim; head -c 4096 claim
  while read -r who pid rest; do
    rec "stat $who"; say "/proc/$pid/stat"
  done < claim
fi
[ -f exit.json ] && { rec exit; head -c 4194304 exit.json; }
[ -f supervisor.json ] && { rec supervisor; head -c 65536 supervisor.json; }
rec files; find . ! -name . -prune ! -name '.*' -exec stat -c '%s %i %f %n/' -- {} + 2>/dev/null
rec end
"""


@dataclass(frozen=True)
class EventFile:
    name: str
    size_bytes: int
    inode: int


@dataclass(frozen=True)
class Evidence:
    attempt: int | None  # None: no such run folder, or no attempt in it
    boot_id: str
    uptime_s: float
    host_time_s: float  # 0: it said none
    disk_free_bytes: int | None
    machine: str = ""  # what the machine's id, or where it has none its name, comes to; empty: it said neither
    is_claimed: bool = False  # a supervisor took the attempt, whatever became of it
    supervisor: dict[str, Any] | None = None  # supervisor.json
    supervisor_alive: bool = False  # same pid, start ticks and boot; not a zombie
    job_alive: bool = False  # likewise the job's first process; where the folder is gone, any process of the attempt
    rebooted: bool = False  # the host, or the container that it is, has started anew since the attempt began
    exit: dict[str, Any] | None = None  # exit.json
    hidden: dict[str, Any] | None = (
        None  # without an exit file: where its host found secrets in the logs, told last of all
    )
    is_copy: bool = False  # of a folder that was brought from elsewhere, where its processes may live on
    files: tuple[EventFile, ...] = ()  # every file of the attempt

    @classmethod
    def nothing(cls) -> Evidence:
        """Of a folder that could not be looked into."""
        return cls(attempt=None, boot_id="", uptime_s=0.0, host_time_s=0.0, disk_free_bytes=None)

    def last_words(self) -> dict[str, Any]:
        """Of its supervisor; where that was killed, what its host could still tell in its place."""
        return self.exit or ({"hidden": self.hidden} if self.hidden else {})

    def file(self, name: str) -> EventFile | None:
        return next((file for file in self.files if file.name == name), None)


def observe(shell: Shell, run_dir: str, *, attempt: int | None = None) -> Evidence:
    """The newest attempt unless one is named. HostError when the host cannot be asked."""
    number = "" if attempt is None else str(attempt)
    done = shell.run(["sh", "-c", _OBSERVE, "sh", run_dir, number], timeout_s=60)
    if done.exit_code:
        raise DraftyardError(f"cannot look at {run_dir}: {told(done.stderr)}")
    return parse(done.stdout)


def clock_s(text: str) -> float | None:
    """What `date +%s.%N` said. One without %N (busybox) says whole seconds: half of one more is right on average. None for no date at all."""
    whole, _, part = text.partition(".")
    if not re.fullmatch(r"\d{1,12}", whole, re.ASCII):
        return None
    return float(text) if re.fullmatch(r"\d+", part, re.ASCII) else float(whole) + 0.5


def parse(printed: bytes) -> Evidence:
    """The evidence in the script's output; a record that is cut or not whole counts as absent."""
    records: dict[str, bytes] = {}
    for record in printed.split(_SEPARATOR)[1:]:
        name, _, body = record.partition(b"\n")
        records[name.decode("ascii", "replace")] = body
    boot, uptime, clock = [*records.get("host", b"").decode("ascii", "replace").split("\n"), "", "", ""][:3]
    common: dict[str, Any] = {
        "boot_id": boot,
        "uptime_s": _float(uptime),
        "host_time_s": clock_s(clock.strip()) or 0.0,
        "machine": _machine(records.get("machine", b"").strip()),
        "disk_free_bytes": _free_bytes(records.get("disk", b"")),
    }
    attempt = _number(records.get("attempt", b"").strip())
    if attempt is None:
        return Evidence(attempt=None, job_alive="marked" in records, **common)
    claims = _claims(records.get("claim", b""))
    # A container that is started anew has the boot id of before, and a first process that is younger than the run.
    first_ticks = _start_ticks(records.get("init", b""))
    return Evidence(
        attempt=attempt,
        is_claimed=bool(claims),
        supervisor=json_object(records.get("supervisor", b"")),
        supervisor_alive=_is_alive(claims.get("supervisor"), records.get("stat supervisor", b""), boot),
        job_alive=_is_alive(claims.get("job"), records.get("stat job", b""), boot),
        rebooted=any(
            claim[1] != boot or (first_ticks is not None and first_ticks > claim[0]) for claim in claims.values()
        ),
        exit=json_object(records.get("exit", b"")),
        files=_files(records.get("files", b"")),
        **common,
    )


def _machine(said: bytes) -> str:
    """The id itself is to be kept to its machine (machine-id(5)). Some images ship without one that is set yet."""
    return "" if said in (b"", b"uninitialized") else hashlib.sha256(said).hexdigest()[:16]


def _claims(body: bytes) -> dict[str, tuple[int, str]]:
    """who -> (start ticks, boot id), from whole lines only."""
    claims = {}
    for line in body.decode("ascii", "replace").splitlines():
        words = line.split()
        ticks = _number(words[2]) if len(words) == 4 else None
        if ticks is not None:
            claims[words[0]] = (ticks, words[3])
    return claims


def _is_alive(claim: tuple[int, str] | None, stat: bytes, boot: str) -> bool:
    if claim is None or claim[1] != boot:
        return False
    return _stat_words(stat)[:1] not in ([b"Z"], [b"X"]) and _start_ticks(stat) == claim[0]


def _start_ticks(stat: bytes) -> int | None:
    """Of a process, since the machine's start; None where nobody can tell."""
    words = _stat_words(stat)
    return _number(words[19]) if len(words) > 19 else None


def _stat_words(stat: bytes) -> list[bytes]:
    """What follows its name, which may hold anything."""
    return stat[stat.rfind(b")") + 2 :].split()


def _is_regular(mode: str) -> bool:
    """A folder, a pipe, a link to a device of an events file's name is none: reading it would never end."""
    return re.fullmatch(r"[0-9a-f]{1,8}", mode) is not None and stat.S_ISREG(int(mode, 16))


def _files(body: bytes) -> tuple[EventFile, ...]:
    files = []
    for words in _FILE.finditer(body.decode("utf-8", "surrogateescape")):
        size, inode = _number(words["size"]), _number(words["inode"])
        if size is not None and inode is not None and _is_regular(words["mode"]):
            files.append(EventFile(words["name"], size, inode))
    return tuple(sorted(files, key=lambda file: file.name))


def _free_bytes(body: bytes) -> int | None:
    """`df -Pk`: a heading, then one line whose fourth word is the free KiB."""
    words = body.decode("utf-8", "replace").split("\n")[-2:-1]
    columns = words[0].split() if words else []
    free = _number(columns[3]) if len(columns) >= 6 else None
    return None if free is None else free * 1024


def _number(text: str | bytes) -> int | None:
    """A whole number in plain digits, as a database holds it; None for anything else."""
    digits = text.decode("ascii", "replace") if isinstance(text, bytes) else text
    return int(digits) if re.fullmatch(r"[0-9]{1,18}", digits) else None


def _float(text: str) -> float:
    found = re.match(r"[0-9]{1,12}(\.[0-9]{1,12})?(?=\s|$)", text)
    return float(found[0]) if found else 0.0
