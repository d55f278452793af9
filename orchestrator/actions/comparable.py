"""Which numbers of runs may be held against one another: by a metric's name and the specs of the runs that told it.

Knows of what the bundled trainer makes its metrics (`remote.drafter.metrics`, `remote.drafter.loss_chunk`). A script's own
metric is taken for the same in all of its runs. How well a drafter decodes is compared in `store.acceptance`, not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.actions.history import spec_differences
from remote.spec import LossSpec

BLOCK_SIZE = "drafter.block_size"
_IDLE = ("chunk_tokens", "hidden_gradient")  # how a sum is computed, not what is summed
_COUNTS = re.compile(r"accuracy|topk_[0-9]+|streak|acceptance_length|entropy_right")  # over all slots of a block
_COUNTS_OF_A_SLOT = re.compile(r"accuracy_at(_[0-9]+)?")  # the same slot in a block of any size


def unlike(name: str, specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys by which the metric is another quantity in these runs; none where it may be compared.

    A sum goes by everything that weighs it, a term of it not by coefficients; what counts as right is the label's business,
    and of how many slots a mean is taken, or up to which a streak can go, the block's.
    """
    is_sum, is_count = name in ("loss", "grad_norm") or name.startswith("loss_"), bool(_COUNTS.fullmatch(name))
    if not is_sum and not is_count and not _COUNTS_OF_A_SLOT.fullmatch(name):
        return []
    if len({spec.get("entry") for spec in specs}) > 1:
        return ["entry"]  # somebody's own loss is in nobody knows what
    keys = _differing(specs)
    if is_count:
        return [key for key in keys if key in ("loss.label", BLOCK_SIZE)]
    if not is_sum:
        return [key for key in keys if key == "loss.label"]
    return [key for key in keys if not (name.startswith("loss_") and key.startswith("loss.terms."))]


def _differing(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every key by which losses are made differently; what no run of them weighs by is none."""
    made = [_acting(spec) for spec in specs]
    decays = {spec["loss"].get("decay") for spec in made}
    idle = {"loss.gamma"} if "exponential" not in decays else set()
    idle |= {"loss.dpace_alpha"} if "dpace" not in decays else set()
    return [item.key for item in spec_differences(made) if item.key not in idle]


def _acting(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What acts of a spec, with the defaults of keys that an older one does not know, without terms that are not used."""
    told = spec.get("loss")
    loss: dict[str, Any] = {} if told is None else {**asdict(LossSpec()), **told}
    loss = {key: value for key, value in loss.items() if key not in _IDLE}
    if "terms" in loss:
        loss["terms"] = {term: coefficient for term, coefficient in (loss["terms"] or {}).items() if coefficient}
    return {"loss": loss, "drafter": {"block_size": (spec.get("drafter") or {}).get("block_size")}}
