"""What a failure's page shows of a full card: other changes, shapes, frames, loops."""

from __future__ import annotations

import pytest

from orchestrator.verbs.held_page import TELLING, held_rows


def test_a_full_card_shows_shapes_and_who_held_it_line_by_line() -> None:
    facts = {
        "remedies": [{"word": "a", "text": "first"}, {"word": "b", "text": "half the rows"}],
        "tensors": [{"name": "logits", "shape": [24_576, 248_320], "dtype": "bfloat16", "function": "loss"}],
        "memory_held": [{"frame": "/w/loss.py:70 loss", "bytes": 3 * 2**30, "num_blocks": 2}],
        "memory_kept": {"chunks": {"bytes": 2**30, "num_blocks": 1, "repeats": 1, "frame": "/w/a.py:9 attend"}},
    }

    assert held_rows(facts) == [
        ("or", "half the rows"),
        ("shapes", "logits 24,576 x 248,320 bfloat16"),
        ("held", "3.00 GiB in 2 tensors, /w/loss.py:70 loss"),
        ("kept, chunks", "1.00 GiB in 1 tensor, /w/a.py:9 attend"),
    ]


@pytest.mark.parametrize("odd", [3, "x", None, [3, None], {"a": 3}, [{"shape": None}], [{"shape": 3}]])
def test_a_job_that_says_something_else_there_breaks_no_page(odd: object) -> None:
    assert all(isinstance(text, str) for _, text in held_rows(dict.fromkeys(TELLING, odd)))
