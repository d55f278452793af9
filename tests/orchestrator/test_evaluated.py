"""The page of an evaluation whose ways are told one by one: what it says of those that are not known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import click
import pytest

from orchestrator.actions.history import RunPage
from orchestrator.store.rows import EvaluationRow, State
from orchestrator.verbs.measured import evaluations

PLAIN = {"method": "plain"}
UNTRAINED = {"method": "chain", "drafter": "untrained", "rounds": "replayed along the plain text"}
TRAINED = {"method": "chain", "drafter": "trained"}
TREE = {"method": "tree", "drafter": "trained", "budget": 16}
WHOLE_SPEC = {"evaluate": {"tree_budgets": [32, 16], "compare_untrained": True}}


def row(way: dict[str, Any], *, device: str = "cuda") -> EvaluationRow:
    values = {"tokens_per_s": 12.5} if way is PLAIN else {"acceptance_length": 1.5, "speed_up": 1.1}
    protocol = {"num_prompts": 8, "prompts": "held_out.jsonl", "device": device, **way}
    return EvaluationRow(run_id="x", attempt=1, step=5, at_s=0.0, protocol=protocol, values=values)


def lines(rows: list[EvaluationRow], *, spec: Any = WHOLE_SPEC, state: State = State.FAILED) -> list[str]:
    page = SimpleNamespace(evaluations=rows, spec=spec, run=SimpleNamespace(state=state, attempt=1))
    return [click.unstyle(line) for line in evaluations(cast("RunPage", page), 80)]


def test_where_nothing_was_drafted_yet_no_heading_tells_of_acceptance() -> None:
    told = lines([row(PLAIN)])

    assert told[:2] == ["Evaluation at step 5", "without a drafter: 12.50 tokens/s"]
    assert "Acceptance" not in "\n".join(told)


@pytest.mark.parametrize(
    ("ways", "device", "missing"),
    [
        ([PLAIN], "cuda", "untrained chain, trained chain, trained tree of 16, trained tree of 32"),
        ([PLAIN], "cpu", "untrained chain, trained chain, trained tree of 16"),
        ([PLAIN, UNTRAINED], "cuda", "trained chain, trained tree of 16, trained tree of 32"),
        ([PLAIN, UNTRAINED, TRAINED], "cpu", "trained tree of 16"),
        ([PLAIN, UNTRAINED, TRAINED, TREE], "cpu", None),
    ],
)
def test_the_ways_that_the_spec_asks_for_and_nobody_measured_are_named(
    ways: list[dict[str, Any]], device: str, missing: str | None
) -> None:
    """With the untrained drafter's number alone, the trained one's seemed to be that."""
    rows = [row(way, device=device) for way in ways]

    for state, words in ((State.FAILED, "not measured"), (State.RUNNING, "not measured yet")):
        told = " ".join(lines(rows, state=state))
        assert (f" {words}: {missing} measured on 8 prompts" in told) if missing else ("not measured" not in told)


@pytest.mark.parametrize("spec", [{}, {"evaluate": None}, {"evaluate": {"tree_budgets": "many"}}, {"evaluate": 5}])
def test_a_spec_that_says_nothing_of_trees_names_none(spec: Any) -> None:
    assert "tree of" not in " ".join(lines([row(PLAIN), row(TRAINED)], spec=spec))


def test_what_a_script_measured_in_its_own_way_lacks_nothing() -> None:
    """Its spec may have the section all the same: whoever decodes without a drafter first is the bundled trainer."""
    assert "not measured" not in " ".join(lines([row({"prompts": "own"})]))
