"""A page as Markdown, to be pasted into a report: its headings as headings, all else to the letter in fences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import click

from orchestrator.verbs.table import heading


def as_markdown(lines: Sequence[str]) -> list[str]:
    """The first heading is the document's; colours are left out."""
    told: list[str] = []
    for is_heading, group in groupby(lines, key=_is_heading):
        texts = [click.unstyle(line) for line in group]
        if is_heading:
            told += [f"{'##' if told else '#'} {_plain(text)}" for text in texts]
        else:
            told += _fenced(texts)
        told.append("")
    return told[:-1]


def _is_heading(line: str) -> bool:
    text = click.unstyle(line)
    return bool(text) and line == heading(text)


def _fenced(texts: Sequence[str]) -> list[str]:
    """Without empty lines at both ends; the fence is longer than any run of its character inside."""
    body = "\n".join(texts).strip("\n")
    if not body:
        return []
    fence = "```"
    while fence in body:
        fence += "`"
    return [f"{fence}text", *body.split("\n"), fence]


def _plain(text: str) -> str:
    """Names of files and classes hold what Markdown would read as emphasis."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#" else letter for letter in text)
