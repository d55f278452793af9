"""The bench of the screens' tests itself."""

from pathlib import Path

import pytest

from tests.tui.golden import opened
from tests.tui.world import NOW_S
from tui.app import Draftyard
from tui.launch import LaunchScreen


class _NeverOpens(LaunchScreen):
    def __init__(self) -> None:
        raise NameError("name 'Shape' is not defined")


class _Broken(Draftyard):
    def action_break(self) -> None:
        self.push_screen(_NeverOpens())

    BINDINGS = [("f9", "break", "")]  # noqa: RUF012


@pytest.mark.slow
async def test_a_screen_that_cannot_be_made_fails_the_test_instead_of_hanging_it(filled_yard: Path) -> None:
    app = _Broken(filled_yard, clock=lambda: NOW_S)

    with pytest.raises((NameError, TimeoutError)):
        async with opened(app, "f9", deadline_s=10.0):
            pass
