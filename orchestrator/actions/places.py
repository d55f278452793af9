"""Where things lie on this side: the database, the list of hosts, the recipes, the settings.

Resolved once, from the working directory and the environment, and handed to every action. Nothing
here is created; asking for a place touches no disk beyond looking.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import UsageError, one_line
from orchestrator.given import odd_kind
from orchestrator.lazy import lazy
from orchestrator.nearest import nearest

if TYPE_CHECKING:
    from orchestrator.actions import settings_file
else:
    settings_file = lazy("orchestrator.actions.settings_file")  # reading YAML costs more than `ls` does

BUNDLED = Path(__file__).resolve().parents[2] / "recipes"


@dataclass(frozen=True)
class Setting:
    name: str
    value: str
    origin: str  # the flag, the variable or the rule that decided it


@dataclass(frozen=True)
class Places:
    db: Path  # runs.db; logs/<run>/ lies beside it
    hosts_file: Path
    host: str  # what verbs take when no --host is given
    recipes: Path | None  # the project's recipes folder, where there is one
    bundled: Path  # the recipes that come with draftyard
    origins: Mapping[str, str]  # place -> which rule decided it
    keys: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # name of a screen's key -> (key, file:line:col)

    @property
    def tree(self) -> Path:
        """The folder that holds `remote/`: what is shipped for the bundled trainer."""
        return self.bundled.parent

    def own_keys(self, known: Sequence[str]) -> dict[str, str]:
        """The settings' keys by name. Raises UsageError for a name that is not among those `known`."""
        wrong = [
            f"{where}: no key of the screens is named {name!r}; did you mean {nearest(name, known) or known[0]!r}?"
            for name, (_, where) in self.keys.items()
            if name not in known
        ]
        if wrong:
            raise UsageError("\n".join(map(one_line, wrong)))
        return {name: key for name, (key, _) in self.keys.items()}

    def settings(self) -> list[Setting]:
        """Every place with what decided it, as `config show --origin` prints it."""
        found = [Setting(name, str(getattr(self, name)), origin) for name, origin in self.origins.items()]
        project = str(self.recipes) if self.recipes else "none"
        return [
            *found,
            *(Setting(f"keys.{name}", key, where) for name, (key, where) in self.keys.items()),
            Setting("logs", str(self.db.parent / "logs"), "beside the database"),
            Setting("recipes", project, "nearest folder upwards" if self.recipes else "no recipes/ up to the git root"),
            Setting("bundled_recipes", str(self.bundled), "built-in"),
        ]


def find_places(cwd: Path, environ: Mapping[str, str], *, db: Path | None = None) -> Places:
    """Flags before environment before project file before user file before built-in.

    Raises UsageError for a fault in a settings file, for a database that is no file, and for logs that lie beside a link to it.
    """
    home = Path(environ.get("HOME") or Path.home())
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "draftyard"
    shared = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "draftyard"
    recipes = _upwards(cwd, "recipes")
    project = recipes.parent if recipes is not None and recipes.is_dir() else None
    written = _settings([_upwards(cwd, "draftyard.yaml"), config / "config.yaml"])
    beside = "beside recipes/"
    decided = {
        "db": _first(
            (str(db) if db else None, "--db"),
            (environ.get("DRAFTYARD_DB"), "DRAFTYARD_DB"),
            written.get("db"),
            (str(project / "runs.db"), beside) if project else (str(shared / "runs.db"), "built-in"),
        ),
        "hosts_file": _first(
            (environ.get("DRAFTYARD_HOSTS"), "DRAFTYARD_HOSTS"),
            written.get("hosts_file"),
            (str(project / "hosts.yaml"), beside) if project else (str(config / "hosts.yaml"), "built-in"),
        ),
        "host": _first((environ.get("DRAFTYARD_HOST"), "DRAFTYARD_HOST"), written.get("host"), ("local", "built-in")),
    }
    return Places(
        db=_database(decided["db"][0]),
        hosts_file=Path(decided["hosts_file"][0]).absolute(),
        host=decided["host"][0],
        recipes=recipes if project else None,
        bundled=BUNDLED,
        origins={name: origin for name, (_, origin) in decided.items()},
        keys={name.removeprefix("keys."): said for name, said in written.items() if name.startswith("keys.")},
    )


def _database(named: str) -> Path:
    """The file itself: logs lie beside it, not beside a link to it. Raises UsageError where they still do.

    A pipe or a folder is refused here, before anything opens it: a pipe would be waited for.
    """
    if seen := odd_kind(Path(named)):
        raise UsageError(f"{named} is {seen}; a database file was expected: --db or DRAFTYARD_DB names another")
    real = Path(os.path.realpath(named))
    left, logs = Path(named).absolute().parent / "logs", real.parent / "logs"
    try:
        are_left = not logs.exists() and any(left.glob("*/*/std*.log"))
    except OSError as error:  # of a name that no file can have, say
        told = f"{named} cannot be used ({error.strerror}): --db or DRAFTYARD_DB names another"
        raise UsageError(told) from error
    if are_left:
        raise UsageError(
            f"{named} is a link to {real}, and logs lie beside the link; they belong beside the database: "
            f"once no follower is at work, mv {shlex.quote(str(left))} {shlex.quote(str(logs))}"
        )
    return real


def _first(*candidates: tuple[str | None, str] | None) -> tuple[str, str]:
    """The first that is said at all."""
    return next((value, origin) for value, origin in filter(None, candidates) if value)


def _settings(files: Sequence[Path | None]) -> dict[str, tuple[str, str]]:
    """What the files say, the first one to say it wins."""
    found: dict[str, tuple[str, str]] = {}
    for file in files:
        if file is not None and file.exists():
            found = {**settings_file.read_settings(file), **found}
    return found


def _upwards(cwd: Path, name: str) -> Path | None:
    """The nearest one from here to the git root; outside git only here."""
    folders = [cwd, *cwd.parents]
    root = next((place for place, folder in enumerate(folders) if (folder / ".git").exists()), 0)
    return next((folder / name for folder in folders[: root + 1] if (folder / name).exists()), None)
