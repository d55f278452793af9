"""What a drafter is worth: the acceptance length that real decoding measured, for the columns of a list.

The metric of that name is of one training batch each and noisy; an evaluation decodes held-out prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.store.reads import Reader

# A run's own evaluations and those of `evaluate` jobs that looked at it, oldest first.
_DECODED = """
    SELECT seen.id AS run_id, e.step, e.protocol_json AS protocol, e.values_json AS "values"
    FROM (SELECT id, key FROM runs WHERE id IN (SELECT value FROM json_each(?1))
        UNION ALL SELECT parent_run, key FROM runs
        WHERE kind = 'evaluate' AND parent_run IN (SELECT value FROM json_each(?1))) seen
    JOIN evaluations e ON e.run_key = seen.key ORDER BY e.at_s, e.id"""


Way = str  # how it was decoded: `chain`, `tree of 16`


@dataclass(frozen=True)
class Decoded:
    """One way of decoding with a run's trained drafter, as it was measured last."""

    mean: float  # tokens a round
    low: float | None  # of the 95 % interval over prompts
    high: float | None
    step: int | None
    protocol: Mapping[str, Any]  # how it was measured, without what names the drafter


def decoded_ways(reader: Reader, run_ids: Sequence[str]) -> dict[str, dict[Way, Decoded]]:
    """Run id -> way -> what it is worth; without the runs that never decoded. A script need not say how it did."""
    found: dict[str, dict[Way, Decoded]] = {}
    for row in reader.database.all(_DECODED, (json.dumps(list(run_ids)),)):
        protocol, values = json.loads(row["protocol"]), json.loads(row["values"])
        mean = _number(values, "acceptance_length")
        if mean is None or protocol.get("drafter", "trained") != "trained":
            continue
        low, high = _number(values, "acceptance_length_low"), _number(values, "acceptance_length_high")
        told = {name: value for name, value in protocol.items() if name not in ("drafter", "num_degenerate")}
        found.setdefault(row["run_id"], {})[_way(protocol)] = Decoded(mean, low, high, row["step"], told)
    return found


def decoded_acceptance(reader: Reader, run_ids: Sequence[str]) -> dict[str, float]:
    """Run id -> tokens a round, as the trained drafter last decoded in a chain; without the runs that never did."""
    return {run_id: ways["chain"].mean for run_id, ways in decoded_ways(reader, run_ids).items() if "chain" in ways}


def _way(protocol: Mapping[str, Any]) -> Way:
    method = str(protocol.get("method", "chain"))
    return f"{method} of {protocol['budget']}" if protocol.get("budget") else method


def _number(values: Any, name: str) -> float | None:
    value = values.get(name) if isinstance(values, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
