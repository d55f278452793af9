"""`doctor --fix`: what the bundled trainer needs, installed on a host in the versions that it was tested with.

The versions are those of constraints.txt, which travel as text. Of torch they are a range: which build of it comes is for
the driver, the index and uv to say. It decides nothing about drivers, and changes no Python outside a virtual environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.actions.host_facts import TARGET_PACKAGES, TRAINER_PACKAGES, lacks, lacks_for_targets
from orchestrator.actions.installing import WITHOUT_DEPENDENCIES, constraints
from orchestrator.actions.order import find_host
from orchestrator.actions.places import Places
from orchestrator.actions.site import Site, open_site
from orchestrator.errors import DraftyardError
from orchestrator.shell.stream import StreamShell

ALL_PACKAGES = (*TRAINER_PACKAGES, *TARGET_PACKAGES)
INSTALL_S = 1800.0  # torch alone is gigabytes
INSTALL_LINES = 12  # the last ones of an installation that failed: pip gives the cause before the advice

_INSTALL = """
exec 2>&1
set -e
python=$1; base=$2; folder=$3; pinned=$(mktemp); trap 'rm -f "$pinned"' EXIT
printf '%s' "$4" > "$pinned"
shift 4
if command -v uv >/dev/null 2>&1; then
  [ -z "$folder" ] || uv venv --python "$base" "$folder"
  uv pip install --python "$python" --constraint "$pinned" "$@"
else
  [ -z "$folder" ] || "$base" -m venv "$folder"
  "$python" -m pip install --no-input --constraint "$pinned" "$@"
fi
"""
# What is there is imported as well: an installer's yes says nothing of a library that a wheel does not find.
_VERSIONS = """
import importlib, importlib.metadata, importlib.util, sys
alone = sys.argv[1].split()
for name in sys.argv[2:]:
    module = name.replace("-", "_")
    if name not in alone:
        importlib.import_module(module)
    elif importlib.util.find_spec(module) is None:
        raise ImportError(f"there is no {module}")
print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in sys.argv[2:]))
"""
IMPORT_S = 300.0  # a torch that nobody has imported yet, from a slow disk


@dataclass(frozen=True)
class Fixed:
    """What was done and is there now, a line each; with the interpreter that has it."""

    lines: list[str]
    python: str


def fix(places: Places, name: str) -> Fixed:
    """Installs what the bundled trainer needs on the host: into its own venv, else into a new one in the work folder.

    With uv where the host has it, else with venv and pip.
    """
    with open_site(find_host(places, name)) as site:
        return fix_site(site, hosts_file=places.hosts_file)


def fix_site(site: Site, *, hosts_file: Path) -> Fixed:
    """The same on a host with its door open."""
    name, python = site.host.name, site.place.python
    missing = [*lacks(site.facts, None, python=python), *lacks_for_targets(site.facts, python=python)]
    packages = [lack.package for lack in missing if lack.package]
    by_hand = [f"{name}: {lack.name} {lack.seen}; {lack.repair}" for lack in missing if not lack.package]
    if not packages:
        return Fixed(by_hand or [f"{name}: nothing is missing"], python)
    if (site.facts.get("python") or {}).get("is_venv"):
        _install(site.shell, [python], packages)
        there = _versions(site.shell, python, [lack.name for lack in missing if lack.package])
        return Fixed([f"{name}: installed {there} with {python}", *by_hand], python)
    folder = f"{site.place.work_dir}/venv"
    made = f"{folder}/bin/python"
    _install(site.shell, [made, python, folder], ALL_PACKAGES)
    lines = [
        f"{name}: made {folder} with {_versions(site.shell, made, ALL_PACKAGES)}",
        f"{name}: set `python: {made}` for it in {hosts_file}",
        *by_hand,
    ]
    return Fixed(lines, made)


def _install(shell: StreamShell, pythons: Sequence[str], packages: Sequence[str]) -> None:
    """`pythons`: the interpreter that gets them; where it is to be made first, also its base and its folder."""
    alone = [name for name in packages if name in WITHOUT_DEPENDENCIES]
    plain = [name for name in packages if name not in alone]
    if plain:
        _run_install(shell, pythons, plain)
    if alone:
        _run_install(shell, pythons[:1] if plain else pythons, ["--no-deps", *alone])


def _run_install(shell: StreamShell, pythons: Sequence[str], packages: Sequence[str]) -> None:
    python, base, folder = [*pythons, "", ""][:3]
    words = [python, base, folder, constraints(), *packages]
    done = shell.run(["sh", "-c", _INSTALL, "sh", *words], timeout_s=INSTALL_S)
    if done.exit_code:
        said = done.stdout.decode("utf-8", "replace").strip().splitlines()[-INSTALL_LINES:]
        raise DraftyardError("the installation failed:\n  " + "\n  ".join(said))


def _versions(shell: StreamShell, python: str, names: Sequence[str]) -> str:
    """What that Python has of them now; DraftyardError where the installer said yes and one cannot be imported."""
    alone = " ".join(WITHOUT_DEPENDENCIES)  # their own imports are what was left out
    done = shell.run([python, "-W", "ignore", "-c", _VERSIONS, alone, *names], timeout_s=IMPORT_S)
    if done.exit_code:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DraftyardError(f"installed, but not all of it can be imported: {said[-1] if said else 'no answer'}")
    return done.stdout.decode("utf-8", "replace").strip()
