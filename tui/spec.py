"""What a run was told: what differs from its recipe's base, then every value with the line that decided it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tui.answers import Answers
from tui.detail import RunDetail
from tui.pieces import BLANK, Line, Piece, heading, text_of, width_of, wrapped
from tui.wording import fit

if TYPE_CHECKING:
    from orchestrator.actions.recipes import Told

LABEL_WIDTH = 27
COSMETIC = ("why", "tags")  # of the branch itself, so always different
VALUE_WIDTH, ORIGIN_WIDTH = 12, 36  # of the value's column at least, of the origin's at 80 cells


def spec_lines(detail: RunDetail, width: int) -> list[Line]:
    if not detail.spec:
        return [[("No spec was kept with this run.", "muted")]]
    values = list(leaves(detail.spec))
    lines = _difference(values, detail.answers, width)
    section = None
    for path, item in values:
        top = path.split(".")[0] if "." in path else ""
        if top != section:
            section = top
            lines += [*([BLANK] if lines else []), heading(top or "run", width)]
        name = path.removeprefix(f"{top}.")
        lines += _value_lines(name, item, detail.answers.told.get(path), width)
    return [*lines, *_launch_lines(detail.launch or {}, width), *_provenance(detail, width)]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys as an override writes them, and values; plain values before sections."""
    for key, item in sorted(tree.items(), key=lambda item: isinstance(item[1], Mapping)):
        name = f'{prefix}"{key}"' if set(key) & set('.="') else f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from leaves(item, f"{name}.")
        else:
            yield name, item


def _difference(values: list[tuple[str, Any]], answers: Answers, width: int) -> list[Line]:
    """What the branch and the overrides changed; where the recipe cannot be asked, why."""
    title: Line = heading("Different from base", width)
    if answers.fault:
        return [title, *wrapped(f"The recipe cannot be asked: {answers.fault}", width, "warn")]
    if not answers.told:
        return []
    lines: list[Line] = []
    for path, item in values:
        told = answers.told.get(path)
        if told is None or not told.is_above_base or told.base == item or path in COSMETIC:
            continue
        pieces: list[Piece] = [(_text(told.base), "muted"), (" → ", "faint"), (_text(item), "strong")]
        lines += _fitting(path, pieces, _origin(told), width)
    doubt = wrapped(answers.doubt, width, "warn") if answers.doubt else []
    return [title, *doubt, *(lines or [[("nothing but the branch's name", "muted")]])]


def _value_lines(name: str, item: Any, told: Told | None, width: int) -> list[Line]:
    meaning = "strong" if told is not None and told.is_above_base else "text"
    lines = _fitting(name, [(_text(item), meaning)], _origin(told), width)
    if told is not None and told.now != item:
        lines.append(
            [
                (" " * (LABEL_WIDTH + 1), "text"),
                (f"ran with {_text(item)}; the recipe says {_text(told.now)} now", "warn"),
            ]
        )
    return lines


def _origin(told: Told | None) -> str:
    """`file:line  layer`; the column is left to `recipe explain`."""
    if told is None or not told.where:
        return ""
    if told.is_override:
        return told.layer
    place = told.where.rsplit(":", 1)[0] if told.where.count(":") > 1 else told.where
    return f"{place.rsplit('/', 1)[-1]}  {told.layer.split()[0] if told.layer.startswith('preset') else told.layer}"


def _fitting(name: str, shown: list[Piece], origin: str, width: int) -> list[Line]:
    """Name, value and origin in columns; what finds no room beside its neighbour goes below, in its own column."""
    room = max(VALUE_WIDTH, min(40, width - LABEL_WIDTH - ORIGIN_WIDTH))
    label: Piece = (fit(name, LABEL_WIDTH) + " ", "muted")
    indent: Piece = (" " * (LABEL_WIDTH + 1), "text")
    rows: list[Line] = [shown]
    if width_of(shown) > width - LABEL_WIDTH - 1:
        rows = wrapped(text_of([shown]), max(8, width - LABEL_WIDTH - 1), shown[-1][1]) or [shown]
    lines: list[Line] = [[label if index == 0 else indent, *row] for index, row in enumerate(rows)]
    if not origin:
        return lines
    if width_of(rows[-1]) >= room:
        lines, rows = [*lines, [indent]], [*rows, []]
    last = [*lines[-1], (" " * (room - width_of(rows[-1])), "text")]
    return [*lines[:-1], [*last, (fit(origin, max(1, width - width_of(last))).rstrip(), "faint")]]


def _text(item: Any) -> str:
    return item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)


def _launch_lines(launch: Mapping[str, Any], width: int) -> list[Line]:
    if not launch:
        return []
    lines = [line for path, item in leaves(launch) for line in _fitting(path, [(_text(item), "text")], "", width)]
    return [BLANK, heading("How it was launched", width), *lines]


def _provenance(detail: RunDetail, width: int) -> list[Line]:
    run = detail.run
    commit = (run.git_commit or "no commit") + (", with uncommitted edits" if run.git_dirty else "")
    facts = (("git", commit), ("tree", run.tree_hash), ("fingerprint", run.fingerprint), ("work folder", run.workdir))
    lines: list[Line] = [BLANK, heading("Where it came from", width)]
    for name, text in facts:
        lines += _fitting(name, [(text, "text")], "", width) if text else []
    return lines
