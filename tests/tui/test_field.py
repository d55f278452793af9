"""A line to type into: what is typed at once arrives whole and in order."""

from collections.abc import Callable

import pytest
from textual import events

from orchestrator.errors import UsageError
from tests.tui.golden import opened, shown
from tui.app import Draftyard
from tui.field import Field, typed, words_of


@pytest.mark.parametrize(
    "words",
    [(), ("train.seed=7", "optim.lr=0.1"), ("data.path=/data/my rows", "train.seed=7"), ("own.note=it's \"so\"",),
     ('loss.terms={"ce": 1.0, "kl": 0.15}',), ("own.path=C:\\rows",), ("own.note=",), ("own.note=  two  blanks ",)],
)  # fmt: skip
def test_words_come_back_as_they_were_however_they_are_written(words: tuple[str, ...]) -> None:
    assert words_of(typed(words)) == words


def test_words_are_written_as_a_shell_takes_them_and_plainly_where_that_does() -> None:
    assert typed(["train.seed=7", "data.files=[a,b]"]) == "train.seed=7 'data.files=[a,b]'"
    assert words_of(' train.seed=7  own.note="a b" own.other=a\\ b ') == (
        "train.seed=7",
        "own.note=a b",
        "own.other=a b",
    )


@pytest.mark.parametrize("text", ["own.note='a b", 'own.note="a', "own.note=a\\"])
def test_a_quote_that_is_open_is_said_with_what_to_do(text: str) -> None:
    with pytest.raises(UsageError, match="close it"):
        words_of(text)


@pytest.mark.slow  # a whole app
@pytest.mark.parametrize("attempt", range(3))
async def test_a_burst_behind_an_editing_key_loses_no_letter(open_app: Callable[..., Draftyard], attempt: int) -> None:
    text = "train.num_steps=600 loss.gamma=7"
    app = open_app()
    async with opened(app, "4") as pilot:
        field = app.screen.query_one("#overrides", Field)
        field.value = "what"
        field.focus()
        await pilot.pause()
        for event in (events.Key("ctrl+u", "\x15"), *(events.Key(letter, letter) for letter in text)):
            app.post_message(event)
        while len(field.value) < len(text):
            await pilot.pause(0.02)

        assert field.value == text


@pytest.mark.slow
async def test_enter_at_the_end_of_a_burst_sends_what_was_typed(open_app: Callable[..., Draftyard]) -> None:
    app = open_app()
    async with opened(app, "slash", size=(120, 24)) as pilot:
        for event in (*(events.Key(letter, letter) for letter in "host:local"), events.Key("enter", "\r")):
            app.post_message(event)
        await shown(app, pilot, "/ host:local")

        assert app.screen.ask().where == "host:local"  # type: ignore[attr-defined]
