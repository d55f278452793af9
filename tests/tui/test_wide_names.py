"""Names of wide characters: every screen has the shape it has with narrow names of as many cells."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from orchestrator.actions.places import find_places
from tests.tui.golden import on_top, opened, walk
from tui.app import Draftyard
from tui.plain import screen_strips

# Names of the yard -> as many cells, which sort as they do.
WIDE = {
    "ddtree": "木構造", "qwen27b": "日本語b", "pve-a": "計算a", "pve-b": "計算b", "demo": "見😀", "v6": "版", "zz_names": "zz_名前s",
}  # fmt: skip
RECIPE = """name: {0}
why: names
base:
  entry: dflash
  preset: smollm2-135m
  data: {{prompts: p.jsonl, answers: a.jsonl, held_out: h.jsonl, row_tokens: 512, max_anchors: 32}}
  train: {{num_steps: 9}}
branches:
  {1}: {{why: one}}
"""


def spelled_wide(path: Path) -> None:
    """Every text of the database."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for _, column, kind, *_ in database.execute(f"PRAGMA table_info({table})").fetchall():
                for narrow, wide in WIDE.items() if kind == "TEXT" else ():
                    database.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (narrow, wide))
        database.commit()


def narrowed(text: str) -> str:
    for narrow, wide in WIDE.items():
        text = text.replace(f"'{wide}'", narrow).replace(wide, narrow)  # in a command a shell wants it quoted
    return text


def shapes(text: str, first: int) -> list[tuple[list[int], str]]:
    """Where a line is cut, by cells, and what stands behind that: of a name that is cut a wide sign is there whole or not at all."""
    parts = [line.split("…") for line in text.splitlines()[first:]]
    return [([cell_len(part) for part in before], rest) for *before, rest in parts]


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (170, 45)])
async def test_wide_names_keep_every_column_of_every_screen_in_line(
    size: tuple[int, int], yard_copy: Path, open_app: Callable[..., Draftyard]
) -> None:
    seen: list[dict[str, str]] = []
    for names in (("zz_names", "ddtree"), ("zz_名前s", "木構造")):
        if seen:
            spelled_wide(yard_copy)
        recipes = yard_copy.parent / "recipes"
        recipes.mkdir(exist_ok=True)
        for old in recipes.iterdir():
            old.unlink()
        (recipes / f"{names[0]}.yaml").write_text(RECIPE.format(*names), encoding="utf-8")
        app = open_app(yard_copy, places=find_places(yard_copy.parent, {"HOME": str(yard_copy.parent)}, db=yard_copy))
        screens: dict[str, str] = {}
        async with opened(app, size=size) as pilot:
            async for name in walk(app, pilot):
                screens[name] = "\n".join(strip.text.rstrip() for strip in on_top(app))
                assert {strip.cell_length for strip in screen_strips(app)} == {size[0]}, name
        seen.append(screens)

    plain, wide = seen
    for name, text in wide.items():
        first = 8 if name == "spec" else 0  # above it stands which recipe was meant, by the likeness of letters
        assert shapes(narrowed(text), first) == shapes(plain[name], first), name
    shown = "".join(wide.values())
    assert [word for word in WIDE.values() if word not in shown] == []
