"""The gate: what was tested, bound to what would run, and whether a launch may pass.

A fingerprint is the set of facts that decide whether a passed rung still says anything: the shipped
tree, the resolved spec without what no rung reads, the environment, the versions of torch, CUDA and
the driver, the GPUs, the allocator setting. Its parts are kept beside the evidence, so that a refusal
can name what changed. There is no clock: evidence does not age, it stops matching.

Pure functions over values. It reads no database, reaches no host and decides nothing about repair
commands beyond spelling the one that makes the missing evidence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orchestrator.units import format_size
from remote.spec import COSMETIC, RANKS_RUNG, READ_BY_REAL, REAL_RUNG, UNTESTED, DFlashSpec, Spec

# A backward pass, documents kept apart, nothing seen ahead, a checkpoint that reads back: no recipe may waive them.
FLOOR = ("fwd_bwd", "multi_doc", "leak", "checkpoint")
UNTESTED_RECIPE = "the recipe names no rungs (smoke.rungs): nothing of it was tested"
ALLOCATOR_KEYS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Standing(StrEnum):
    """How one required rung stands against the fingerprint of what would be launched."""

    PASSED = "passed"
    FAILED = "failed"
    STALE = "stale"  # tested, but something else
    MISSING = "missing"


@dataclass(frozen=True)
class HostFacts:
    """What of a host belongs to a fingerprint; None where the host has none."""

    torch: str | None
    cuda: str | None
    driver: str | None
    gpus: tuple[tuple[str, int], ...] = ()  # (model, memory in bytes), one entry per GPU the job may use


@dataclass(frozen=True)
class Fingerprint:
    parts: Mapping[str, str]

    @property
    def value(self) -> str:
        """16 hexadecimal digits that name the parts."""
        text = json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Change:
    part: str
    before: str | None  # None: the part was not there
    after: str | None


@dataclass(frozen=True)
class RungStanding:
    rung: str
    standing: Standing
    changes: tuple[Change, ...] = ()  # of the newest evidence, when stale
    message: str = ""  # why it failed, as the rung said it
    run_id: str = ""  # where it failed


@dataclass(frozen=True)
class Verdict:
    fingerprint: str
    rungs: tuple[RungStanding, ...]

    @property
    def is_allowed(self) -> bool:
        return all(rung.standing is Standing.PASSED for rung in self.rungs)

    @property
    def unmet(self) -> tuple[RungStanding, ...]:
        return tuple(rung for rung in self.rungs if rung.standing is not Standing.PASSED)


class Evidence(Protocol):
    """What the verdict reads of an evidence row (`store.rows.EvidenceRow` has more)."""

    @property
    def rung(self) -> str: ...
    @property
    def passed(self) -> bool: ...
    @property
    def fingerprint(self) -> str | None: ...
    @property
    def fingerprint_parts(self) -> Mapping[str, str]: ...
    @property
    def message(self) -> str: ...
    @property
    def run_id(self) -> str: ...


def fingerprint(
    spec: Spec,
    *,
    tree_hash: str,
    host: HostFacts,
    env: Mapping[str, str] | None = None,
    cap_bytes: int | None = None,
) -> Fingerprint:
    """The parts of what would run; `env` is the job's environment beyond the recipe's own, `cap_bytes` a smaller card's memory.

    Values of environment variables are kept as digests: a secret must not lie in the database.
    """
    merged = {**(env or {}), **spec.env}
    parts = {
        "tree": tree_hash,
        "torch": host.torch or "none",
        "cuda": host.cuda or "none",
        "driver": host.driver or "none",
    }
    parts["allocator"] = next((merged[key] for key in ALLOCATOR_KEYS if key in merged), "default")
    parts["gpu"] = ", ".join(f"{name} {size} bytes" for name, size in sorted(set(host.gpus))) or "none"
    parts.update({f"env.{key}": _digest(value) for key, value in sorted(merged.items())})
    if cap_bytes is not None:
        parts["cap"] = f"{cap_bytes} bytes"
    parts.update(_spec_parts(spec))
    return Fingerprint(parts)


def required_rungs(spec: Spec) -> tuple[str, ...]:
    """What a launch of it wants passed: the recipe's rungs, for the bundled trainer never less than the floor, and with
    several processes a rung that starts two."""
    floor = FLOOR if isinstance(spec, DFlashSpec) else ()
    is_shared = isinstance(spec, DFlashSpec) and spec.roles.target + spec.roles.drafter > 1
    return tuple(dict.fromkeys([*spec.smoke.rungs, *floor, *([RANKS_RUNG] if is_shared else [])]))


def verdict(required: Sequence[str], evidence: Iterable[Evidence], wanted: Fingerprint) -> Verdict:
    """Stands each required rung against evidence given newest first."""
    rows = list(evidence)
    return Verdict(
        wanted.value, tuple(_standing(rung, [row for row in rows if row.rung == rung], wanted) for rung in required)
    )


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    """What differs between two fingerprints, in the order of `after`."""
    names = [*after, *(name for name in before if name not in after)]
    return tuple(
        Change(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
    )


def explain(rungs: Sequence[RungStanding]) -> list[str]:
    """One line for the rungs that stand alike, in their order; what changed, where that is the reason."""
    alike: dict[str, list[str]] = {}
    for rung in rungs:
        alike.setdefault(_told(rung), []).append(rung.rung)
    return [f"{', '.join(names)}: {told}" for told, names in alike.items()]


def _told(rung: RungStanding) -> str:
    match rung.standing:
        case Standing.PASSED:
            return "passed for exactly this"
        case Standing.FAILED:
            told = "failed for exactly this" + (f": {rung.message}" if rung.message else "")
            return f"{told}; all of it: draftyard show {rung.run_id} --oom"
        case Standing.STALE:
            return f"tested for something else; changed since: {_change_list(rung.changes)}"
        case Standing.MISSING:
            return "missing; never tested for this recipe and branch"


def _standing(rung: str, rows: Sequence[Evidence], wanted: Fingerprint) -> RungStanding:
    same = next((row for row in rows if row.fingerprint == wanted.value), None)
    if same is not None:
        if same.passed:
            return RungStanding(rung, Standing.PASSED)
        return RungStanding(rung, Standing.FAILED, message=same.message, run_id=same.run_id)
    if not rows:
        return RungStanding(rung, Standing.MISSING)
    return RungStanding(rung, Standing.STALE, changes=changes(rows[0].fingerprint_parts, wanted.parts))


def _change_list(found: Sequence[Change], limit: int = 4) -> str:
    told = [_change(change) for change in found[:limit]]
    if len(found) > limit:
        told.append(f"and {len(found) - limit} more")
    return "; ".join(told)


def _change(change: Change) -> str:
    if change.part == "tree":
        return "the shipped tree"
    if change.part.startswith("env."):
        return f"environment variable {change.part[4:]}"
    return f"{change.part} {_size(change.before)} -> {_size(change.after)}"


def _size(value: str | None) -> str:
    """`4294967296 bytes` as people say it."""
    return re.sub(r"\d+(?= bytes)", lambda found: format_size(int(found[0])), value or "absent").replace(" bytes", "")


def _spec_parts(spec: Spec) -> dict[str, str]:
    tree = {key: value for key, value in dataclasses.asdict(spec).items() if key not in (*COSMETIC, "env")}
    untested = _untested(spec)
    parts = {f"spec.{path}": text for path, text in sorted(_leaves(tree))}
    return {name: text for name, text in parts.items() if not f"{name}.".startswith(untested)}


def _untested(spec: Spec) -> tuple[str, ...]:
    """What no rung reads. A script that is a rung may read any value, but neither how a run ends nor its neighbours.

    Where the rung `real` is wanted, how its answers are made is read.
    """
    sections = ("life.", "smoke.") if spec.smoke.scripts else ("",)
    read = READ_BY_REAL.split() if REAL_RUNG in spec.smoke.rungs else []
    return tuple(f"spec.{path}." for path in UNTESTED.split() if path.startswith(sections) and path not in read)


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, sort_keys=True)


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:12]
