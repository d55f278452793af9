"""Values that nobody is told: what a job was given in secret, taken out of whatever it reports.

Such values have no shape to know them by, so they are known by value: the supervisor names their variables to the
job, and the reporters of both look them up in their own environment. What the job prints is not touched.

    python3 - RUN_DIR ATTEMPT    where they stand in the logs of an attempt whose supervisor was killed

does what such a supervisor would have done: tells it as JSON, then takes the env file away.

By names, kinds and paths a reader finds, counts and decides: these stay as they are, or a checkpoint would be looked for
where none is.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from remote.rundir import RunDir, read_json

NAMES = "DRAFTYARD_SECRETS"  # names of variables, a blank between two
HIDDEN = "[hidden]"
READ_AS_IT_IS = frozenset({"failure", "name", "outcome", "path", "reason", "stage", "unit", "writer"})
FILLED_FREELY = frozenset({"choices", "facts", "protocol"})  # by a script, which may have put anything into their names
LOG_END_BYTES = 2**20  # of a log that is looked through; its reader takes less for the cause of an ending
MOST_SPANS = 20_000  # of a log, a line of 52 bytes each; of more the older ones are one with what stands between them
SHORTEST_VALUE = 6  # characters; a shorter value would blank out ordinary words


def secret_names(given: Mapping[str, str], plain: Mapping[str, Any]) -> str:
    """For NAMES: what was given to the job beyond the `plain` environment of its recipe, which everybody may read."""
    return " ".join(sorted(name for name, value in given.items() if plain.get(name) != value))


def secrets_of(environment: Mapping[str, str]) -> re.Pattern[str] | None:
    """What finds the values of the named variables in a text; None where there is nothing to hide."""
    spelled = spellings(environment.get(name, "") for name in environment.get(NAMES, "").split())
    return re.compile("|".join(map(re.escape, spelled))) if spelled else None


def spellings(values: Iterable[str]) -> list[str]:
    """Each way in which a value may stand in a text, the longest first: as it is, as Python or JSON quotes it, in an address."""
    found = {
        spelled
        for value in values
        if len(value) >= SHORTEST_VALUE
        for spelled in (
            *(value, repr(value)[1:-1], quote(value, safe=""), quote_plus(value)),
            *(json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]),
        )
    }
    return sorted(found, key=lambda spelled: (-len(spelled), spelled))


def told(fields: Mapping[str, Any], secrets: re.Pattern[str] | None) -> dict[str, Any]:
    """Of an event or an exit file: READ_AS_IT_IS stays, and the names in all that is not FILLED_FREELY."""
    return {
        name: item if name in READ_AS_IT_IS else without(item, secrets, names_too=name in FILLED_FREELY)
        for name, item in fields.items()
    }


def without(tree: Any, secrets: re.Pattern[str] | None, *, names_too: bool = True) -> Any:
    """The same with every secret hidden in each text inside mappings and lists."""
    if secrets is None:
        return tree
    if isinstance(tree, str):
        return secrets.sub(HIDDEN, tree)
    if isinstance(tree, Mapping):
        items = {name: without(item, secrets, names_too=names_too) for name, item in tree.items()}
        return {without(name, secrets): item for name, item in items.items()} if names_too else items
    if isinstance(tree, (list, tuple)):
        return [without(item, secrets, names_too=names_too) for item in tree]
    return tree


def spans_in(logs: Mapping[str, Path], secrets: re.Pattern[str] | None) -> dict[str, list[list[int]]]:
    """Where in the newest end of each log a secret stands: first byte, and the byte after its line, as a length would tell of
    the value. Whoever reads that log elsewhere knows by it what to leave out, also where the values are not known. More
    than MOST_SPANS: the first one is all the older ones.
    """
    if secrets is None:
        return {}
    pattern = re.compile(secrets.pattern.encode(errors="surrogateescape"))
    return {name: spans for name, log in logs.items() if (spans := _spans(log, pattern))}


def _spans(log: Path, secrets: re.Pattern[bytes]) -> list[list[int]]:
    try:
        with os.fdopen(os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return []
            begin = max(0, stream.seek(0, os.SEEK_END) - LOG_END_BYTES)
            stream.seek(begin)
            content = stream.read(LOG_END_BYTES)
    except OSError:  # none was made
        return []
    found: list[list[int]] = []
    for match in secrets.finditer(content):
        line_end = content.find(b"\n", match.end())
        found.append([begin + match.start(), begin + (len(content) if line_end < 0 else line_end)])
    older, newest = found[:-MOST_SPANS], found[-MOST_SPANS:]
    return [[older[0][0], older[-1][1]], *newest] if older else newest


def left_places(run: RunDir, number: int) -> dict[str, list[list[int]]] | None:
    """`spans_in` of an attempt by the env file that lies in its run's folder; None where none does."""
    left = read_json(run.env_file)
    if left is None:
        return None
    given = {str(name): str(value) for name, value in left.items()}
    plain = (read_json(run.spec_json) or {}).get("env")
    names = secret_names(given, plain if isinstance(plain, dict) else {})
    logs = {"stdout": run.attempt(number).stdout_log, "stderr": run.attempt(number).stderr_log}
    return spans_in(logs, secrets_of({**given, NAMES: names}))


def main(arguments: list[str]) -> int:
    run = RunDir(Path(arguments[0]))
    sys.stdout.write(json.dumps({"hidden": left_places(run, int(arguments[1]))}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
