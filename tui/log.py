"""The log of a run: follows the newest lines, scrolls through the rest by pieces, searches.

Holds one piece of the file at a time. Scrolling past its ends asks for the next piece and keeps the
line that was in sight in its place; so does a jump to a search result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from orchestrator.actions.log_text import ERRORS
from orchestrator.errors import UsageError
from orchestrator.store.reads import Reader
from orchestrator.store.rows import State
from orchestrator.units import format_size
from tui.field import Field
from tui.log_page import Found, LogAsk, LogPage, search_log
from tui.log_sheet import LogSheet
from tui.ordering import TROUBLE, refusal
from tui.painted import Rows
from tui.pieces import Line, Piece
from tui.reading import beside
from tui.searcher import Searcher, Span, TooSlow, finder, is_plain
from tui.sheet import Sheet
from tui.snapshot import Snapshot
from tui.wording import percent


class LogPane(Rows):
    DEFAULT_CSS = """
    LogPane #log-state { height: 1; padding: 0 1; }
    LogPane LogSheet { padding: 0 1; }
    LogPane #search { display: none; height: 1; border: none; padding: 0 1; background: $yard-raised; }
    LogPane #search.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "follow_end", "follow", id="log.follow"),
        Binding("slash", "search", "search", key_display="/", id="log.search"),
        Binding("n", "again(1)", "Next match", show=False, id="log.next"),
        Binding("N", "again(-1)", "Previous match", show=False, id="log.previous"),
        Binding("exclamation_mark", "first_error", "first error", key_display="!", id="log.first_error"),
        Binding("o", "stream", "stream", id="log.stream"),
        Binding(
            "left_square_bracket", "attempt(-1)", "attempt", key_display="[ ]", tooltip="Attempt before", id="log.older"
        ),
        Binding("right_square_bracket", "attempt(1)", "Attempt after", show=False, id="log.newer"),
        Binding("w", "wrap", "wrap", id="log.wrap"),
        Binding("u", "ranks", "Group ranks", show=False, id="log.ranks"),
        Binding("y,c", "copy", "Copy", show=False, id="log.copy"),
        Binding("escape", "close_search", "back", id="log.close_search"),
    ]

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._set_out()
        self._searcher = Searcher()
        self._is_marking = self._must_mark_again = False
        self._state = Sheet(id="log-state")
        self.body = LogSheet(id="log-lines", classes="scrolls")
        self._box = Field(id="search", compact=True, placeholder="a regular expression, any case")

    def begin(self) -> None:
        """As when it was made: the log of another run."""
        self._set_out()
        self.body.begin()
        self._box.remove_class("open")
        self._state.redraw()

    def _set_out(self) -> None:
        self._attempt: int | None = None  # None: the newest, however many come
        self._num_attempts = 1
        self._stream: str | None = None  # None: the one that says more, until a person chooses
        self._is_stream_chosen = False
        self._page: LogPage | None = None
        self._pattern = ""
        self._is_trusted = False  # that it ends: plain words, and ours
        self._said = ""  # about the search
        self._sought: object = None  # the search that is wanted: one that was given up stops
        self._marks: tuple[str, dict[str, Sequence[Span]]] = ("", {})  # a pattern and what of each line it matches
        self._has_ended = False  # nothing more will be printed

    def compose(self) -> ComposeResult:
        yield self._state
        yield self.body
        yield self._box

    def on_unmount(self) -> None:
        self._searcher.close()

    def on_mount(self) -> None:
        self._state.show(lambda _width, _height: [self._state_line()])

    def ask(self) -> LogAsk:
        start, end = self.body.wanted
        return LogAsk(stream=self._stream or "stdout", attempt=self._attempt, start=start, end=end)

    def present(self, snapshot: Snapshot) -> None:
        page, detail = snapshot.log, snapshot.detail
        if page is None or detail is None:
            return
        is_another = self._attempt is None and self._num_attempts < max(detail.run.attempt, page.attempt)
        self._num_attempts = max(detail.run.attempt, page.attempt)
        if is_another and self._page is not None and not self._is_stream_chosen:
            self._stream = None  # which one says more is asked anew of each attempt
            self._ask()
        if (page.attempt, page.stream) != (self._attempt or self._num_attempts, self._stream or "stdout"):
            return  # asked for before another one was chosen
        state = next((row.state for row in detail.attempts if row.number == page.attempt), detail.run.state)
        if self._stream is None:
            self._stream = page.stream
            if page.other_size and (state is State.FAILED or not page.size):  # the error stream tells why
                self._turn_stream()
                return
        self._has_ended = state.is_final or page.attempt < self._num_attempts
        is_new, self._page = page != self._page, page
        self.body.present(page, has_ended=self._has_ended)
        if is_new:
            self._mark()
        self._state.redraw()

    # ------------------------------------------------------------- actions

    def action_follow_end(self) -> None:
        self.body.follow(not self.body.is_following)
        self._ask()

    def action_stream(self) -> None:
        self._is_stream_chosen = True
        self._turn_stream()

    def action_attempt(self, by: int) -> None:
        """The log of the attempt before, or of the one after; past the last one is the newest, which is followed."""
        number = (self._attempt or self._num_attempts) + by
        if 1 <= number <= self._num_attempts:
            self.turn_to(None if number == self._num_attempts else number)

    def turn_to_failed(self, snapshot: Snapshot) -> None:
        """The attempt that the page of the failure tells of."""
        if snapshot.detail is not None and snapshot.detail.failures:
            self._num_attempts = snapshot.detail.run.attempt
            number = snapshot.detail.failures[0].attempt
            self.turn_to(None if number == self._num_attempts else number)

    def turn_to(self, attempt: int | None) -> None:
        """What that attempt printed; None: the newest one. The stream that a person chose stays."""
        self._attempt = attempt
        if not self._is_stream_chosen:
            self._stream = None
        self._said = ""
        self.body.follow(True)
        self._ask()

    def action_wrap(self) -> None:
        self.body.toggle_wrap()

    def action_ranks(self) -> None:
        self.body.toggle_ranks()

    def action_copy(self) -> None:
        """The lines in sight, through the terminal's clipboard sequence."""
        self.app.copy_to_clipboard(self.body.visible_text())
        self.app.notify("Copied the lines in sight.", timeout=3)

    def action_search(self) -> None:
        self._box.add_class("open")
        self._box.value = ""
        self._box.focus()

    def action_close_search(self) -> None:
        if self._box.has_class("open"):
            self._box.remove_class("open")
            self.body.focus()
        elif self._pattern:
            self._pattern = self._said = ""
            self._sought = None
            self.body.highlight(None)
            self._state.redraw()
        else:
            self.app.pop_screen()

    def action_first_error(self) -> None:
        self._pattern, self._is_trusted = ERRORS, True
        self._mark()
        self._search(after=0, backwards=False)

    def action_again(self, direction: int) -> None:
        if self._pattern and self._page is not None:
            at = self.body.top_offset()
            after = at if direction < 0 else self.body.offset_after(at)
            self._search(after=after, backwards=direction < 0)

    @on(Input.Submitted, "#search")
    def submit(self, event: Input.Submitted) -> None:
        self.action_close_search()
        if not event.value:
            return
        try:
            finder(event.value)
        except UsageError as error:
            self._say(str(error))
            return
        self._pattern, self._is_trusted = event.value, is_plain(event.value)
        self._mark()
        self._search(after=self.body.top_offset(), backwards=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Other attempts are offered where there are any."""
        return action != "attempt" or self._num_attempts > 1

    # --------------------------------------------------------------- inner

    def _turn_stream(self) -> None:
        self._stream = "stderr" if self._stream == "stdout" else "stdout"
        self.body.follow(True)
        self._ask()

    def _ask(self) -> None:
        self._state.redraw()
        self.app.ask_now()  # type: ignore[attr-defined]

    def _say(self, text: str) -> None:
        self._said = text
        self._state.redraw()

    def _mark(self) -> None:
        """What matches in the piece that is shown; of a pattern that may not end once another process has found it."""
        if not self._pattern:
            return
        if self._is_trusted:
            self.body.highlight(partial(_spans, re.compile(self._pattern, re.IGNORECASE)))
            return
        if self._marks[0] != self._pattern:
            self._marks = (self._pattern, {})
        self.body.highlight(lambda text: self._marks[1].get(text, ()))
        self._must_mark_again = True
        if not self._is_marking:
            self._is_marking = True  # from here on, not from when the worker gets its turn
            self.run_worker(self._marking(), group="marking")

    async def _marking(self) -> None:
        """One at a time, and another when the piece or the pattern has changed meanwhile; what is marked stays so until then."""
        try:
            while self._must_mark_again:
                self._must_mark_again = False
                pattern, known = self._marks
                texts = self.body.texts()
                if pattern == self._pattern and (unknown := sorted(texts - known.keys())):
                    await self._mark_more(pattern, unknown, texts)
        finally:
            self._is_marking = False

    async def _mark_more(self, pattern: str, unknown: Sequence[str], texts: Collection[str]) -> None:
        try:
            found = await beside(partial(self._searcher.spans, pattern, unknown))
        except UsageError as error:
            self._give_up(pattern, error)
        except TROUBLE as error:
            self._say(refusal(error))
        else:
            if pattern == self._marks[0]:
                every = {**self._marks[1], **{text: found.get(text, ()) for text in unknown}}
                self._marks = (pattern, {text: every[text] for text in texts if text in every})
                self.body.redraw()

    def _give_up(self, pattern: str, error: UsageError) -> None:
        """It is not tried again, neither by `n` nor with what is printed next."""
        if pattern == self._pattern:
            self._pattern = ""
            self._say(str(error))

    def _search(self, *, after: int, backwards: bool) -> None:
        self._sought = sought = object()
        self.run_worker(partial(self._searching, sought, after, backwards=backwards), group="search", exclusive=True)  # type: ignore[arg-type]

    async def _searching(self, sought: object, after: int, *, backwards: bool) -> None:
        """Goes through the file in steps; a new search or another key press may end it between them."""
        page, pattern, position = self._page, self._pattern, after
        searcher = None if self._is_trusted else self._searcher
        if page is None:
            return

        def is_wanted() -> bool:
            return sought is self._sought and _log_of(self._page) == _log_of(page)

        search = partial(search_log, page=page, pattern=pattern, backwards=backwards, searcher=searcher)
        open_reader = self.app.reading.open_reader  # type: ignore[attr-defined]
        while True:
            try:
                step = partial(search, after=position, is_wanted=is_wanted)
                found = await beside(partial(_with_reader, open_reader, step))
            except TooSlow as error:
                self._give_up(pattern, error)
                return
            except TROUBLE as error:
                if is_wanted():
                    self._say(refusal(error))
                return
            if not is_wanted():
                return
            if found.at is not None:
                self._say("")
                self.body.go_to(found.at)
                self._ask()
                return
            if found.is_done:
                none = "no earlier match" if backwards else "no further match"
                self._say(f"nothing in {page.stream} looks like an error" if after == 0 and pattern == ERRORS else none)
                return
            position = found.searched_to
            self._say(f"searching, {percent(position / page.size if page.size else 1.0)} of the file")

    def _state_line(self) -> Line:
        page = self._page
        if page is None:
            return [("reading the log", "muted")]
        of = f" of {self._num_attempts}" if self._num_attempts > 1 else ""
        pieces: list[Piece] = [(f"attempt {page.attempt}", "strong" if of else "muted"), (of, "muted")]
        pieces += [(f"  {page.stream}", "strong"), (f"  {format_size(page.size)}", "muted")]
        if page.other_size:
            other = "stderr" if page.stream == "stdout" else "stdout"
            pieces.append((f"  {other} {format_size(page.other_size)}", "faint"))
        if self.body.is_following:
            pieces.append(("  at the end", "muted") if self._has_ended else ("  following", "live"))
        elif page.size:
            pieces.append((f"  at {percent(self.body.top_offset() / page.size)}", "text"))
            pieces.append(("  End follows again", "muted"))
        if self._pattern and self._pattern != ERRORS:
            pieces.append((f"  / {self._pattern}", "accent"))
        return [*pieces, (f"  {self._said}", "warn")] if self._said else pieces


def _log_of(page: LogPage | None) -> object:
    return page and (page.run_id, page.attempt, page.stream)


def _with_reader(open_reader: Callable[[], Reader], step: Callable[[Reader], Found]) -> Found:
    """With a reader of its own: that of the screens is its thread's alone."""
    with open_reader() as reader:
        return step(reader)


def _spans(pattern: re.Pattern[str], text: str) -> list[Span]:
    return [match.span() for match in pattern.finditer(text)]
