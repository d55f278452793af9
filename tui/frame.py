"""What every screen has: the line on top, the line of keys, the message when the terminal is too small.

A screen says what it wants read (`ask`) and shows what was read (`present`). It never reads itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget

from orchestrator.store.rows import RunRow
from tui.acting import offered
from tui.editor import Finding, recipe_of
from tui.keys import key_of
from tui.painted import Bare, Rows
from tui.pieces import Line, Piece, fitted, width_of, wrapped
from tui.sheet import Sheet
from tui.snapshot import Ask, Room, Snapshot

if TYPE_CHECKING:
    from tui.app import Draftyard

LEAST_WIDTH, LEAST_HEIGHT = 60, 14
LEAST_CRUMBS = 14  # cells of the top line that no fault takes


class YardScreen(Screen[None], Bare):
    """A line on top, a body, a line of keys."""

    DEFAULT_CSS = """
    YardScreen { background: $background; layout: vertical; }
    YardScreen > .bar { height: 1; padding: 0 1; background: $yard-raised; }
    YardScreen > #trouble { display: none; padding: 0 1; background: $yard-raised; }
    YardScreen > #trouble.open { display: block; }
    YardScreen > #body { height: 1fr; }
    YardScreen > #small { display: none; height: 1fr; }
    YardScreen.small > #small { display: block; }
    YardScreen.small > #body, YardScreen.small > .bar, YardScreen.small > #trouble { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "back", "back", id="screen.back", priority=False),
    ]
    app: Draftyard

    def __init__(self) -> None:
        super().__init__()
        self.snapshot: Snapshot | None = None
        self._styled_for = ""  # a theme
        self._top = Sheet(id="top", classes="bar")
        self._trouble = Sheet(id="trouble")  # where the top line has no room for it
        self._keys = Sheet(id="keys", classes="bar")
        self._small = Sheet(id="small")

    # What a screen says of itself.

    def ask(self) -> Ask:
        raise NotImplementedError

    def present(self, snapshot: Snapshot) -> None:
        raise NotImplementedError

    def ahead(self) -> Callable[[Snapshot], object]:
        """What the reading thread does with a snapshot before this screen gets it: draws the charts of it, which are then known."""
        return lambda _: None

    def reads_beside(self, snapshot: Snapshot) -> Callable[[Room], object] | None:
        """What the reading thread does after a new snapshot and before it is shown: of what no snapshot holds."""
        return None

    def reread(self) -> None:
        """A person wants everything read anew: what the screen reads beside the store."""

    def crumbs(self) -> Sequence[Piece]:
        """Where we are, beside the program's name."""
        raise NotImplementedError

    def body(self) -> ComposeResult:
        raise NotImplementedError

    def chosen(self) -> tuple[RunRow, tuple[int, ...]] | None:
        """The run that keys act on, with its GPUs."""
        return None

    def file_to_edit(self) -> Finding | None:
        """Where the file lies that `e` opens: the recipe of the chosen run."""
        chosen = self.chosen()
        return recipe_of(self.app.places, chosen[0]) if chosen and self.app.places else None

    def document(self) -> Mapping[str, object]:
        """What it shows beside the snapshot, by name, for `--json`."""
        return {}

    # What all screens do.

    def compose(self) -> ComposeResult:
        yield self._top
        yield self._trouble
        with Rows(id="body"):
            yield from self.body()
        yield self._keys
        yield self._small

    def on_mount(self) -> None:
        self._styled_for = self.app.theme
        self._small.show(self._too_small)
        self._keys.show(lambda width, _: [self._keys_line(width)])
        self.show_top()
        self.app.ask_now()

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        # Textual would work out every style anew, a third of what it takes to come back; they follow the theme alone.
        event.refresh_styles = self._styled_for != self.app.theme
        self._styled_for = self.app.theme
        self.app.ask_after_paint()

    def take(self, snapshot: Snapshot) -> None:
        """A new snapshot for this screen."""
        self.snapshot = snapshot
        self.present(snapshot)
        self.show_top()
        self.show_keys()

    def show_top(self) -> None:
        if self.is_mounted:
            self._top.show(lambda width, _: [self._top_line(width)])
            self._show_trouble()

    def _show_trouble(self) -> None:
        """A fault of reading that the top line would cut, whole, below it."""
        lines = [] if self._has_room_for_trouble else wrapped(self.app.trouble, max(20, self.size.width - 3), "warn")
        if lines or self._trouble.has_class("open"):
            self._trouble.set_class(bool(lines), "open")
            self._trouble.styles.height = len(lines)
            self._trouble.show(lambda _width, _height: lines)

    @property
    def _has_room_for_trouble(self) -> bool:
        return cell_len(self.app.trouble) + LEAST_CRUMBS <= self.size.width

    def show_keys(self) -> None:
        if self.is_mounted:
            self._keys.redraw()

    def on_descendant_focus(self, _: events.DescendantFocus) -> None:
        self.show_keys()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < LEAST_WIDTH or event.size.height < LEAST_HEIGHT, "small")
        self.call_after_refresh(self.show_top)
        self.call_after_refresh(self.show_keys)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Home has nowhere to go back to, so its line of keys does not offer it."""
        return not (action == "back" and not self.can_go_back())

    def can_go_back(self) -> bool:
        return len(self.app.screen_stack) > 2

    def action_back(self) -> None:
        self.app.pop_screen()

    def focus_on(self, widget: Widget) -> None:
        self.set_focus(widget, scroll_visible=False)

    def _top_line(self, width: int) -> Line:
        left: list[Piece] = [("draftyard", "key"), ("  ", "text"), *self.crumbs()]
        right = self._status()
        room = width - width_of(right)
        return [*fitted(left, max(0, room)), *right]

    def _status(self) -> list[Piece]:
        """Live runs, what is wrong with reading, the time of what is shown."""
        if self.app.trouble:
            told = self.app.trouble if self._has_room_for_trouble else "not read"
            return [(f" {told} ", "warn")]
        if self.snapshot is None:
            return [(" reading ", "muted")]
        clock = time.strftime("%H:%M", time.localtime(self.snapshot.at_s))
        live = f"{self.snapshot.num_live} live" if self.snapshot.num_live else "none live"
        off = "follower off (readonly)  " if self.app.readonly else "follower off  "
        follower = [] if self.snapshot.is_followed or not self.snapshot.num_live else [(off, "warn")]
        return [
            ("  ", "text"),
            *follower,
            (live, "live" if self.snapshot.num_live else "muted"),
            (f"  {clock}", "muted"),
        ]

    def _keys_line(self, width: int) -> Line:
        """The keys that work now, most useful first; help and quit at the end always."""
        last: list[Piece] = [
            (key_of("app.help"), "key"),
            (" help  ", "muted"),
            (key_of("app.quit"), "key"),
            (" quit", "muted"),
        ]
        pieces: list[Piece] = []
        room = width - width_of(last)
        shown: set[str] = set()
        for active in self.active_bindings.values():
            binding = active.binding
            if (
                not binding.show
                or not active.enabled
                or not offered(self.app, binding)
                or {binding.action, binding.description} & shown
            ):
                continue
            key = self.app.get_key_display(binding)
            word: list[Piece] = [(key, "key"), (f" {binding.description}  ", "muted")]
            if width_of(pieces) + width_of(word) > room:
                break
            shown |= {binding.action, binding.description}
            pieces += word
        return [*fitted(pieces, max(0, room)), *last]

    def _too_small(self, width: int, height: int) -> list[Line]:
        return [
            [(f"{width}×{height} is too small;", "warn")],
            [(f"{LEAST_WIDTH}×{LEAST_HEIGHT} is the least.", "text")],
            [(f"{key_of('app.quit')} quits; runs go on", "muted")],
        ]
