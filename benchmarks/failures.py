"""How many texts of the failure corpus are told for what they are, beside public classifiers.

    python -m benchmarks.failures
    pip install gpualert==0.1.6        then again: with it beside ours

The corpus is the test's own (tests/orchestrator/failure_corpus.py). Two questions, because others know
fewer words than we do: is it GPU out-of-memory or not, and is it memory of the GPU, of the host, or neither.
Our rules were written with these texts in sight, the others' were not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.failure import Findings, Told, causes, from_log
from tests.orchestrator.failure_corpus import CORPUS, Case

GPU, HOST, NEITHER = "gpu", "host", "neither"
FAMILY = {"gpu_oom": GPU, "host_oom": HOST, "cgroup_oom": HOST}


@dataclass(frozen=True)
class Score:
    gpu_or_not: int
    family: int
    of: int


def due(case: Case) -> str:
    return FAMILY.get(case.kind or "", NEITHER)


def ours(case: Case) -> str:
    if case.raised:
        fields = {"failure": case.raised, "message": f"{case.raised}: {case.text}"}
        found = causes(Findings(told=[Told("rank0", 0.0, fields)]))
    else:
        found = from_log(case.text, "stderr")
    return FAMILY.get(found[0].kind, NEITHER) if found else NEITHER


def gpualert() -> Callable[[Case], str] | None:
    """GPUAlert's own function over the text as a log would hold it; None when it is not installed."""
    try:
        parse = importlib.import_module("gpualert.parse_errors").parse_errors
    except ImportError:
        return None

    def classify(case: Case) -> str:
        said = str(parse("", f"{case.raised}: {case.text}" if case.raised else case.text))
        if said.startswith("GPU out-of-memory"):
            return GPU
        return HOST if said.startswith(("System out-of-memory", "Process killed by OS")) else NEITHER

    return classify


def score(classify: Callable[[Case], str]) -> Score:
    answers = [(classify(case), due(case)) for case in CORPUS]
    return Score(
        sum((said == GPU) == (right == GPU) for said, right in answers),
        sum(said == right for said, right in answers),
        len(answers),
    )


def main() -> int:
    others = gpualert()
    classifiers: Mapping[str, Callable[[Case], str]] = {"draftyard": ours, **({"gpualert": others} if others else {})}
    print(f"{'':12} {'GPU OOM or not':>16} {'GPU, host, neither':>20}")
    for name, classify in classifiers.items():
        found = score(classify)
        print(f"{name:12} {found.gpu_or_not:>10} / {found.of} {found.family:>14} / {found.of}")
    if others is None:
        print("gpualert is not installed: pip install gpualert==0.1.6")
    return 0


if __name__ == "__main__":
    sys.exit(main())
