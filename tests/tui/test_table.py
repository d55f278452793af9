"""The table that draws only what is in sight."""

import pytest
from textual.app import App, ComposeResult

from tui.plain import screen_text
from tui.table import Column, Table
from tui.theme import THEMES
from tui.wording import plain

COLUMNS = (Column("name", 0, least=8), Column("number", 8, right=True), Column("rare", 12, rank=3))


class Bench(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table(COLUMNS, empty="Nothing here.")
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = THEMES[0].name

    def compose(self) -> ComposeResult:
        yield self.table

    def on_mount(self) -> None:
        self.table.focus()

    def fill(self, num_rows: int) -> None:
        self.drawn = 0

        def draw(row: int) -> list[list[tuple[str, str]]]:
            self.drawn += 1
            return [[(f"row {row}", "text")], [(str(row), "text")], [("x", "muted")]]

        self.table.set_rows([str(row) for row in range(num_rows)], draw)


async def test_ten_thousand_rows_cost_what_is_in_sight() -> None:
    app = Bench()
    async with app.run_test(size=(80, 24)) as pilot:
        app.fill(10_000)
        await pilot.pause()

        assert app.drawn < 24 * 6


async def test_keys_move_and_the_row_stays_in_sight() -> None:
    app = Bench()
    async with app.run_test(size=(80, 24)) as pilot:
        app.fill(500)
        await pilot.press("G")
        last = screen_text(app)
        await pilot.press("g", "j", "j", "k")

        assert "▌row 499" in last
        assert "▌row 1 " in screen_text(app)


async def test_a_mark_does_not_hide_the_cursor() -> None:
    app = Bench()
    async with app.run_test(size=(80, 24)) as pilot:
        app.fill(10)
        await pilot.press("j")
        app.table.toggle_mark()
        app.table.toggle_mark()
        await pilot.press("k")
        text = screen_text(app)

    assert "●row 1 " in text
    assert "◉row 2 " in text
    assert "▌" not in text


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("is_signed", [False, True])
async def test_neither_a_mark_nor_a_letter_hides_the_cursor(is_marked: bool, is_signed: bool) -> None:
    """Without colours there is nothing else that shows it."""
    app = Bench()
    async with app.run_test(size=(80, 24)) as pilot:
        app.fill(10)
        app.table.marks = {"4"} if is_marked else set()
        app.table.sign("4" if is_signed else None, "B")
        signs = []
        for key in (*"jjjj", "j"):
            await pilot.press(key)
            signs.append(next(line for line in screen_text(app).splitlines() if "row 4" in line)[0])
    beside, under, after = signs[-3:]

    assert beside == after == ("●" if is_marked else "B" if is_signed else " ")
    assert under != beside
    assert plain(under) != plain(beside)
    assert len(plain(under)) == 1


async def test_the_least_important_column_leaves_a_narrow_screen() -> None:
    app = Bench()
    async with app.run_test(size=(24, 10)) as pilot:
        app.fill(3)
        await pilot.pause()

        assert "number" in screen_text(app)
        assert "rare" not in screen_text(app)


async def test_an_empty_table_says_so() -> None:
    app = Bench()
    async with app.run_test(size=(40, 10)):
        assert "Nothing here." in screen_text(app)


async def test_a_click_chooses_and_a_double_click_opens() -> None:
    app = Bench()
    async with app.run_test(size=(80, 24)) as pilot:
        app.fill(10)
        await pilot.click(Table, offset=(4, 4))
        await pilot.pause()

        assert app.table.cursor_key == "3"


@pytest.mark.parametrize(("key", "row"), [("j", 0), ("k", 0), ("pagedown", 0), ("g", 0), ("G", 49)])
async def test_no_row_is_chosen_until_a_key_chooses_one(key: str, row: int) -> None:
    """Neither do new rows choose one."""
    app = Bench()
    async with app.run_test(size=(80, 24)) as pilot:
        app.fill(500)
        await pilot.press("j", "j")
        app.table.go_nowhere()
        app.fill(50)
        await pilot.pause()
        before = (app.table.cursor_key, "▌" in screen_text(app))
        await pilot.press(key)

        assert before == (None, False)
        assert app.table.cursor_key == str(row)
        assert f"▌row {row} " in screen_text(app)
