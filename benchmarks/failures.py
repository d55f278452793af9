"""How many texts of the failure corpus are told for what they are, group by group, beside public classifiers.

    python -m benchmarks.failures
    pip install gpualert==0.1.6; pip install --no-deps soup-cli==0.77.0        then again: with them beside ours

Best in an environment of their own, from the repository's root: ours needs no package.

The corpus is the test's own (tests/orchestrator/failure_corpus.py). Two questions, because others know
fewer words than we do: is it GPU out-of-memory or not, and is it memory of the GPU, of the host, or neither.
Our rules were written with these texts in sight, the others' were not; neither package holds a corpus of its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.failure import Findings, Told, causes, from_log
from tests.orchestrator import failure_corpus as corpus
from tests.orchestrator.failure_corpus import CORPUS, Case
from tests.orchestrator.failure_handled import HANDLED
from tests.orchestrator.failure_languages import LANGUAGES
from tests.orchestrator.failure_quotes import COATS, MORE_ALLOCATOR, MORE_DRIVER, OTHER_MEMORY, QUOTATIONS
from tests.orchestrator.failure_terminals import TERMINALS
from tests.orchestrator.failure_wrappers import WRAPPED_QUOTATIONS, WRAPPERS

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
    """GPUAlert's own function over the text as a log would hold it; None when it cannot be imported."""
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


def soup() -> Callable[[Case], str] | None:
    """soup-cli's word for a crash, by the text it would be given; it has one word for memory, the GPU's."""
    try:
        classify_crash = importlib.import_module("soup_cli.utils.crash").classify_crash
    except ImportError:
        return None

    def classify(case: Case) -> str:
        said = str(classify_crash(f"{case.raised}: {case.text}" if case.raised else case.text))
        return GPU if said == "oom" else NEITHER

    return classify


GROUPS: Mapping[str, Sequence[Case]] = {
    "GPU: the allocator's texts, torch 1.0 to 2.11": corpus.GPU_ALLOCATOR,
    "GPU: driver, cuBLAS, cuDNN, NCCL, Triton": corpus.GPU_DRIVER,
    "host: allocator, Python, kernel, cgroup, launcher": corpus.HOST,
    "shared memory and disks": corpus.SHARED_MEMORY_AND_DISKS,
    "the card itself: ECC, Xid, fallen off the bus": corpus.THE_CARD,
    "numbers: NaN and infinity": corpus.NUMBERS,
    "packages that are missing": corpus.PACKAGES,
    "echoes: what others say after one has died": corpus.ECHOES,
    "look-alikes and quoted failures": corpus.LOOK_ALIKES,
    "messages that quote an out-of-memory error": QUOTATIONS,
    "memory that is none of the card's: pinned, locked, a kernel's": OTHER_MEMORY,
    "GPU: more texts of the driver and of libraries": MORE_DRIVER,
    "GPU: more texts of allocators, and of wrappers": MORE_ALLOCATOR,
    "logs: boxes, colours, journals, groups, Ray": COATS,
    "GPU: behind the words of a pool, a launcher, a trainer": WRAPPERS,
    "such words about another job, day or machine": WRAPPED_QUOTATIONS,
    "handled and gone on from; a test's words; who else speaks": HANDLED,
    "other languages, labels of ranks and hosts, plain boxes, cuts": LANGUAGES,
    "more labels, what terminals swallow, a machine's words in a sentence": TERMINALS,
}


def score(classify: Callable[[Case], str], cases: Sequence[Case] = CORPUS) -> Score:
    answers = [(classify(case), due(case)) for case in cases]
    return Score(
        sum((said == GPU) == (right == GPU) for said, right in answers),
        sum(said == right for said, right in answers),
        len(answers),
    )


def table(classifiers: Mapping[str, Callable[[Case], str]]) -> list[str]:
    """Markdown: right answers to both questions by group, `GPU OOM or not` / `GPU, host or neither`."""
    lines = [f"| texts | number | {' | '.join(classifiers)} |", "|---|---|" + "---|" * len(classifiers)]
    for name, cases in {**GROUPS, "all": CORPUS}.items():
        scores = [score(classify, cases) for classify in classifiers.values()]
        lines.append(
            f"| {name} | {len(cases)} | {' | '.join(f'{each.gpu_or_not} / {each.family}' for each in scores)} |"
        )
    return lines


def main() -> int:
    others = {"gpualert 0.1.6": gpualert(), "soup-cli 0.77.0": soup()}
    classifiers = {"draftyard": ours} | {name: known for name, known in others.items() if known is not None}
    print("\n".join(table(classifiers)))
    for name in [name for name, known in others.items() if known is None]:
        print(f"{name} cannot be imported: pip install {name.replace(' ', '==')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
