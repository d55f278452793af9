"""What drafters are worth, wherever a run is shown: the mean of real decoding with its interval, in words."""

import dataclasses
from pathlib import Path

import pytest

from orchestrator.store.acceptance import Decoded
from orchestrator.store.reads import Reader
from orchestrator.store.rows import EvaluationRow, State
from tests.tui.world import NOW_S
from tests.tui.yard import DONE, LIVE
from tui.chart import Look
from tui.checkpoints import checkpoint_lines
from tui.compare import compare_lines
from tui.detail import RunDetail, read_detail
from tui.overview import overview_lines
from tui.pieces import text_of
from tui.snapshot import CurvesAsk
from tui.worth import evaluation_lines, worth_rows


def detail_of(path: Path, run_id: str) -> RunDetail:
    with Reader(path) as reader:
        return read_detail(reader, reader.run(run_id), CurvesAsk(names=("loss",)))


def test_the_overview_says_it_in_its_head(filled_yard: Path) -> None:
    lines = text_of(overview_lines(detail_of(filled_yard, DONE), NOW_S, 78, 20, ascii_only=False)).splitlines()

    assert any("chain 1.71 [1.42, 2.03]  tree of 16 2.24 [1.93, 2.55]" in line for line in lines[:6])
    assert "accepts" not in text_of(overview_lines(detail_of(filled_yard, LIVE), NOW_S, 78, 20, ascii_only=False))


def test_the_files_say_an_evaluation_in_words(filled_yard: Path) -> None:
    text = text_of(checkpoint_lines(detail_of(filled_yard, DONE), NOW_S, 78))

    assert "Acceptance at step 400" in text
    assert "trained chain       1.71 [1.42, 2.03]   ×0.94 plain speed" in text
    assert "+0.71 [0.42, 1.03] over the untrained drafter" in text
    assert "without a drafter   5.90 tokens/s" in text  # in the column of the others
    assert "without a drafter" in text
    assert text.index("trained chain") < text.index("Estimated from the answers, not decoded")
    assert "8 prompts of held_out.jsonl" in text
    assert not any(raw in text for raw in ("tau", "_low", " low ", "coverage"))


def test_the_comparison_marks_what_was_measured_otherwise(filled_yard: Path) -> None:
    first = detail_of(filled_yard, DONE)
    chain = first.decoded["chain"]
    other = dataclasses.replace(chain, mean=3.0, protocol={**chain.protocol, "max_tokens": 256})
    second = dataclasses.replace(first, decoded={"chain": other})

    text = text_of(compare_lines([first, second], 100, Look()))

    assert "3.00 [1.42, 2.03]*" in text
    assert "1.71 [1.42, 2.03]*" not in text
    assert "measured with another max tokens: not to be compared" in text


def test_runs_measured_alike_bear_no_mark() -> None:
    seen = Decoded(1.5, None, None, 10, {"max_tokens": 32})

    assert worth_rows([{"chain": seen}, {}, {"chain": seen}]) == ([("chain", ["1.50", "–", "1.50"])], "")


def test_runs_are_measured_alike_where_only_one_was_compared_with_its_untrained_drafter() -> None:
    plain = Decoded(1.5, None, None, 10, {"max_tokens": 32})
    compared = dataclasses.replace(
        plain, protocol={**plain.protocol, "untrained_rounds": "replayed along the plain text"}
    )

    assert worth_rows([{"chain": plain}, {"chain": compared}]) == ([("chain", ["1.50", "1.50"])], "")


@pytest.mark.parametrize("word", ["replayed", "followed"])  # the second in rows of older trainers
def test_a_way_that_was_replayed_and_not_decoded_is_called_that(word: str, filled_yard: Path) -> None:
    way = {"method": "chain", "drafter": "untrained", "rounds": f"{word} along the plain text"}
    row = EvaluationRow("kxxxaaaa", 1, 400, way, {"acceptance_length": 1.0}, NOW_S)

    told = text_of(evaluation_lines([row], 78, run=detail_of(filled_yard, DONE).run, spec={}))
    assert "untrained chain, replayed  1.00" in told
    assert "replayed: rounds read off the plain text" in told


@pytest.mark.parametrize(
    ("state", "words"), [(State.RUNNING, "not measured yet"), (State.FAILED, "not measured")], ids=["begun", "ended"]
)
def test_an_evaluation_of_the_plain_row_alone_has_a_heading_and_names_what_is_not_measured(
    filled_yard: Path, state: State, words: str
) -> None:
    """Its lines stood right below the artifacts', and nothing said that the trained drafter has no number."""
    whole = detail_of(filled_yard, DONE)
    way = {"method": "plain", "device": "cuda", "num_prompts": 8}
    row = EvaluationRow(DONE, whole.run.attempt, 400, way, {"tokens_per_s": 12.5}, NOW_S)
    detail = dataclasses.replace(
        whole,
        run=dataclasses.replace(whole.run, state=state),
        spec={"evaluate": {"tree_budgets": [16], "compare_untrained": True}},
        evaluations=[row],
    )

    told = text_of(checkpoint_lines(detail, NOW_S, 100)).splitlines()
    at = next(index for index, line in enumerate(told) if "12.50 tokens/s" in line)
    assert told[at - 2].strip() == ""
    assert told[at - 1].startswith("Evaluation at step 400")
    assert told[at + 1].strip() == f"{words}: untrained chain, trained chain, trained tree of 16"
    assert "Acceptance" not in "\n".join(told)


def test_runs_of_one_branch_are_told_apart_by_their_ids(filled_yard: Path) -> None:
    first = detail_of(filled_yard, DONE)
    second = dataclasses.replace(first, run=dataclasses.replace(first.run, id="zz2mf6hk"))

    heads = [line for line in text_of(compare_lines([first, second], 100, Look())).splitlines() if "● " in line]

    assert any(f"● {DONE} demo" in line and "▲ zz2mf6hk demo" in line for line in heads)


def test_only_what_has_a_direction_has_a_best(filled_yard: Path) -> None:
    lines = text_of(compare_lines([detail_of(filled_yard, DONE)], 100, Look())).splitlines()
    told = {line.split()[0]: line for line in lines if line.startswith(("loss ", "lr ", "grad_norm ", "accuracy "))}

    measured = {name: line for name, line in told.items() if "●" not in line}
    assert "(" in measured["accuracy"]
    assert "(" not in measured["lr"]
    assert "(" not in measured["grad_norm"]
