"""Which runs a person's words mean: an id or its beginning, @last, @failed, a filter with a kind. SQL and its values."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.errors import RunNotFound
from orchestrator.store import queries
from orchestrator.store.connection import ReadConnection
from orchestrator.store.filter import compile_filter

MIN_PREFIX = 4

_NEWEST = {"@last": "1", "@failed": "state = 'failed'"}


def run_row(database: ReadConnection, selector: str) -> Any:
    """The columns of the one run that a selector means. Raises RunNotFound."""
    if database.is_absent:
        raise RunNotFound(
            f"there is no database at {database.path}, so no run {selector}; --db FILE or DRAFTYARD_DB names another"
        )
    if selector.startswith("@"):
        return _newest(database, selector)
    found = database.all(f"SELECT {queries.RUN_COLUMNS} FROM runs r WHERE r.id = ?", (selector,))
    return found[0] if found else _by_prefix(database, selector)


def run_key(database: ReadConnection, run_id: str) -> int:
    """By full id alone. Raises RunNotFound."""
    rows = database.all("SELECT key FROM runs WHERE id = ?", (run_id,))
    if not rows:
        raise RunNotFound(f"no run has the id {run_id!r}")
    return int(rows[0][0])


def condition(where: str, kind: str | None, *, removed: bool) -> tuple[str, tuple[Any, ...]]:
    """Of runs that pass the filter, of that kind unless the filter names one, in the bin or not. Raises FilterError."""
    compiled = compile_filter(where, now_s=time.time())
    bin_sql = f"r.removed_s IS {'NOT ' if removed else ''}NULL"
    if kind is None or "r.kind" in compiled.sql:
        return f"{bin_sql} AND {compiled.sql}", compiled.parameters
    return f"{bin_sql} AND r.kind = ? AND {compiled.sql}", (kind, *compiled.parameters)


def _newest(database: ReadConnection, selector: str) -> Any:
    """The newest run that trains, or, where there is none, the newest job of any kind.

    One that never began comes after all that did: a slip in a launch does not change what @last means.
    """
    if selector not in _NEWEST:
        raise RunNotFound(f"{selector!r} names no run; known are {', '.join(_NEWEST)}, a run id, or its beginning")
    newest = queries.NEWEST.format(condition=_NEWEST[selector], is_live=queries.IS_LIVE.replace("r.", ""))
    rows = database.all(f"SELECT {queries.RUN_COLUMNS} FROM runs r WHERE r.key = ({newest})")
    if not rows:
        raise RunNotFound(f"{selector}: there is no {'failed ' if selector == '@failed' else ''}run yet")
    return rows[0]


def _by_prefix(database: ReadConnection, selector: str) -> Any:
    signed = {"latest": "@last", "newest": "@last"}.get(selector.lower(), f"@{selector.lower()}")
    hint = f"; did you mean {signed!r}?" if signed in _NEWEST else ""
    if len(selector) < MIN_PREFIX:
        raise RunNotFound(f"no run has the id {selector!r}; a beginning needs at least {MIN_PREFIX} characters")
    sql = f"SELECT {queries.RUN_COLUMNS} FROM runs r WHERE substr(r.id, 1, ?) = ? ORDER BY r.created_s DESC LIMIT 6"
    found = database.all(sql, (len(selector), selector))
    if not found:
        raise RunNotFound(f"no run's id begins with {selector!r}{hint or '; `draftyard ls --kind all` lists them'}")
    if len(found) > 1:
        names = ", ".join(row[0] for row in found[:5]) + (", …" if len(found) > 5 else "")
        raise RunNotFound(f"{selector!r} is the beginning of several ids: {names}")
    return found[0]
