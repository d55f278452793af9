"""A run's page as Markdown."""

from __future__ import annotations

from orchestrator.verbs.markdown import as_markdown
from orchestrator.verbs.table import heading, pairs
from tests.orchestrator.yard import Yard


def test_headings_are_headings_and_all_else_is_kept_to_the_letter() -> None:
    lines = [heading("k7f3 of __init__"), "why", "", heading("Failure: gpu_oom"), *pairs([("what", "a*b")]), "", "```"]

    assert as_markdown(lines) == [
        *["# k7f3 of \\_\\_init\\_\\_", "", "```text", "why", "```", ""],
        *["## Failure: gpu\\_oom", "", "````text", "what  a*b", "", "```", "````"],
    ]


def test_headings_without_a_body_make_no_empty_fence() -> None:
    assert as_markdown([heading("a"), "", heading("b")]) == ["# a", "", "", "## b"]


def test_show_prints_the_page_as_markdown(yard: Yard) -> None:
    assert yard.run("launch", "tiny", "-b", "oom", "--force", "to see it end", "--follow") == 12

    assert yard.run("show", "@failed", "--oom", "--markdown") == 0

    first, *rest = yard.out.splitlines()
    assert first.startswith("# ")
    assert "## Failure: host\\_oom" in rest
    assert rest.count("```text") == rest.count("```") == 2
    assert "\x1b" not in yard.out
