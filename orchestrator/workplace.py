"""Where we work on a host: absolute paths, the interpreter, and running our one-file scripts there.

The scripts of `remote/` that a bare host must run (receive, probe, processes, sweep, reach, hiding) are sent as text with the
command, each with the files of ours that it imports, so they run where nothing of ours lies yet.
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import remote
from orchestrator.errors import DraftyardError, UsageError
from orchestrator.host import Host
from orchestrator.shell.stream import Source, StreamShell, told
from remote.rundir import json_object

# Home, data folder, interpreter; a `~` means the home there.
_LOOK = """
p=$1; case $p in "~/"*) p="$HOME/${p#??}";; esac
printf '%s\\0' "$HOME" "${XDG_DATA_HOME:-$HOME/.local/share}" "$(command -v -- "$p")"
"""


# Without site-packages Python starts in 10 ms; the probe has to find torch in them.
_BARE = ("-E", "-s", "-S")
_FLAGS: dict[str, tuple[str, ...]] = {
    "receive": _BARE,
    "processes": _BARE,
    "sweep": _BARE,
    "probe": (),
    "reach": _BARE,
    "hiding": _BARE,
    "ready": (),
}
# How several files travel as one text: each module is made by hand before the one that imports it.
_PACKAGE = "import types\nsys.modules['remote'] = types.ModuleType('remote')\n"
_MODULE = "module = sys.modules[{name!r}] = types.ModuleType({name!r})\nexec({text!r}, module.__dict__)\n"
_MAIN = "exec({text!r})\n"


@dataclass(frozen=True)
class Workplace:
    """Paths on the host."""

    work_dir: str
    python: str
    home: str

    def run_dir(self, run_id: str) -> str:
        return f"{self.work_dir}/runs/{run_id}"

    def tree_dir(self, tree_hash: str) -> str:
        return f"{self.work_dir}/trees/{tree_hash}"


def workplace(shell: StreamShell, host: Host) -> Workplace:
    """One round trip; DraftyardError (missing_dependency) when the host has no such Python."""
    done = shell.run(["sh", "-c", _LOOK, "sh", host.python])
    home, data, python = [*done.stdout.decode("utf-8", "surrogateescape").split("\0"), "", "", ""][:3]
    if not python:
        raise missing_dependency(
            f"{shell.label}: no {host.python} there\n"
            "  install it (apt-get install python3 python3-venv), or name another with `python:` in hosts.yaml"
        )
    work_dir = host.work_dir or f"{data}/draftyard"
    if work_dir.startswith("~/"):
        work_dir = f"{home}/{work_dir[2:]}"
    if not work_dir.startswith("/"):
        raise UsageError(f"host {host.name}: work_dir is {work_dir!r}; it must be absolute or start with ~/")
    return Workplace(work_dir.rstrip("/"), python, home)


def missing_dependency(message: str) -> DraftyardError:
    error = DraftyardError(message)
    error.reason = "missing_dependency"
    return error


def run_script(
    shell: StreamShell,
    place: Workplace,
    name: str,
    arguments: Sequence[str],
    *,
    source: Source | None = None,
    timeout_s: float = 120.0,
    unless: Sequence[str] = (),
    hear: Callable[[bytes], object] | None = None,
) -> dict[str, Any]:
    """Runs `remote/<name>.py` over there and reads the JSON object in its last line; the time counts from the last byte moved.

    `unless` is a shell script and its arguments: where it succeeds, its output is the answer and Python is not started.
    `hear` is told every piece as it comes.
    """
    pieces: list[bytes] = []

    def take(piece: bytes) -> None:
        pieces.append(piece)
        if hear is not None:
            hear(piece)

    command = script_command(place, name, arguments)
    if unless:
        text, *values = unless
        command = ["sh", "-c", f'({text}) && exit; shift {len(values)}; exec "$@"', "sh", *values, *command]
    ended = shell.stream(
        command,
        source=source or Source.of(b""),
        sink=take,
        timeout_s=timeout_s,
        idle=True,
    )
    answer = json_object(b"".join(pieces).strip().rpartition(b"\n")[2])
    if answer is None:
        said = told(ended.stderr)
        if "Traceback (most recent call last)" in said:  # of a program without a file: nobody can look a line up in it
            said = f"{said.splitlines()[-1]} (a fault of draftyard's own; please report it)"
        raise DraftyardError(
            f"{shell.label}: remote/{name}.py ended with exit code {ended.exit_code}: {said or 'no answer'}"
        )
    return answer


def script_command(place: Workplace, name: str, arguments: Sequence[str]) -> list[str]:
    """The argv that runs `remote/<name>.py` over there, the file's text included."""
    return [place.python, *_FLAGS[name], "-c", _script(name), *arguments]


@contextmanager
def sense_in(shell: StreamShell, name: str, answer: dict[str, Any]) -> Iterator[None]:
    """A host's word of another shape is an error in one line."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DraftyardError(f"{shell.label}: remote/{name}.py gives no such answer: {str(answer)[:200]!a}") from error


def finite(value: Any) -> float:
    """A time that a host says; ValueError for one that is none."""
    if not math.isfinite(value):
        raise ValueError("a time that never comes")
    return float(value)


@lru_cache
def _script(name: str) -> str:
    """The file and those of ours that it imports, as one argument of plain letters: nothing to quote, a third of the size."""
    *beside, (_, text) = _with_imports(name)
    made = "".join(_MODULE.format(name=f"remote.{module}", text=source) for module, source in beside)
    packed = base64.b64encode(
        zlib.compress(f"{_PACKAGE if beside else ''}{made}{_MAIN.format(text=text)}".encode(), 9)
    ).decode()
    # The home folder it starts in must not lend it modules.
    return f"import sys;sys.path[:1]=[];import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"


def _with_imports(name: str) -> list[tuple[str, str]]:
    """(module, text) of a file of `remote/` and, before it, of each that it needs."""
    text = (Path(remote.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for needed in re.findall(r"^from remote\.(\w+) import", text, re.MULTILINE):
        found |= dict(_with_imports(needed))
    return [*found.items(), (name, text)]
