"""What the screens at the top have in common: the line of screens, and the number keys between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from tui.frame import YardScreen
from tui.pieces import Piece, tabs

SCREENS = ("runs", "hosts", "smoke", "launch")


class HomeScreen(YardScreen):
    """One of SCREENS; escape leads back to the runs."""

    NAME: ClassVar[str]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(str(number), f"go('{name}')", name, show=False, id=f"home.{name}")
        for number, name in enumerate(SCREENS, 1)
    ]

    def crumbs(self) -> Sequence[Piece]:
        return [*tabs(SCREENS, self.NAME), *self.told()]

    def told(self) -> Sequence[Piece]:
        """What the top line says of this screen, behind the names of all."""
        return ()

    def action_go(self, name: str) -> None:
        if name != self.NAME:
            self.app.go_home(name)

    def can_go_back(self) -> bool:
        return SCREENS[0] != self.NAME

    def action_back(self) -> None:
        self.app.go_home(SCREENS[0])
