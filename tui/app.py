"""The terminal UI's program: the timer that asks, the screens, the way out.

A timer asks, a thread reads a frozen Snapshot, the screen on top shows it; nothing new means nothing
drawn again. This file draws nothing and knows no run. Quitting never stops a run: it says so.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.filter import LineFilter, NoColor
from textual.pilot import Pilot
from textual.timer import Timer
from textual.worker import Worker, active_worker

from orchestrator.actions.log_text import inert
from orchestrator.actions.places import Places
from tui.acting import ACTS, Chosen, ask_and_do, find_and_edit
from tui.commands import open_help, open_palette
from tui.compare import CompareScreen
from tui.faults import trouble
from tui.filters import Ascii
from tui.following import Following
from tui.frame import YardScreen
from tui.home import SCREENS
from tui.hosts import HostsScreen
from tui.keys import spelled, tell_keys_of
from tui.launch import LaunchScreen
from tui.ordering import TROUBLE, refusal
from tui.outside import to_type
from tui.reading import ReadingThread, beside, in_screen
from tui.run import TABS, RunScreen
from tui.runs import RunsScreen
from tui.smoke import SmokeScreen
from tui.snapshot import Room, Snapshot
from tui.terminal import Terminal, get_ready, tidy
from tui.theme import THEMES
from tui.turns import TYPED, Turns

NO_RUN = "No run is chosen here."
TICK_S = 0.5
SLOW_READ_S = 1.0  # a reading that takes longer is told on the top line
REST_S = 0.06
PAINTED_S = 0.02  # by then what is known already has been painted, which a reading beside it would hold up
SETTLED_S = 0.05  # after the first answer, which is painted by then
CLOCK_S = 20.0  # without news the ages on the screen are refreshed this often


class Draftyard(App[None]):
    """Shows what the store says, live."""

    TITLE = "draftyard"
    ENABLE_COMMAND_PALETTE = False
    CSS_PATH = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "leave", "quit", show=False, id="app.quit", priority=False),
        Binding("r,ctrl+r", "reread", "Refresh", show=False, id="app.refresh"),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, id="app.suspend"),
        Binding("T", "next_theme", "Next theme", show=False, id="app.theme"),
        Binding("x,ctrl+k", "deed('stop')", "stop", id="app.stop"),
        Binding("e", "edit", "Open the log or the recipe in the editor", show=False, id="app.edit"),
        Binding("F", "follow", "Start the follower, which records live runs", show=False, id="app.follow"),
        Binding("y", "copy_id", "Copy the run's id", show=False, id="app.copy_id"),
        Binding("question_mark,f1", "help", "Help", show=False, key_display="?", id="app.help"),
        Binding("colon,ctrl+p", "palette", "Command palette", show=False, key_display=":", id="app.palette"),
    ]

    def __init__(
        self,
        db_path: Path,
        *,
        places: Places | None = None,
        run: str | None = None,
        screen: str | None = None,
        compared: Sequence[str] = (),
        ascii_only: bool = False,
        readonly: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens on the runs, on another of SCREENS, on a tab of one run, or on several compared."""
        super().__init__(driver_class=Terminal)
        self.no_color = bool(os.environ.get("NO_COLOR"))  # an empty one wishes for nothing; Textual takes it for a wish
        self.places, self.ascii_only = places, ascii_only
        self.readonly = readonly or places is None
        self.clock = clock
        self.trouble = ""  # why what is shown may be old; empty when all is well
        self._first, self._db_name = (run, screen, compared), db_path.name
        self._turns = Turns(self, super().on_event)
        self.reading = ReadingThread(Room(db_path, places, give_way=self._turns.give_way))
        self._is_reading = False
        self._must_read_again = False
        self._must_forget = False  # what was read before, because a person wants it anew
        self._soon: Timer | None = None
        self._asked_s = 0.0
        self._failing_since_s: float | None = None
        self._shown_s = 0.0
        self._following = Following(self)
        self.first_answer = asyncio.Event()
        self.baseline: str | None = None  # the run that curves are laid over
        self.num_live = 0
        self.shown: Snapshot | None = None  # the last one
        self._told_at_work: set[Worker[Any]] = set()  # what leaving would cut off, as it was said
        self.ended_by: int | None = None  # a signal
        self.crash: BaseException | None = None  # a fault of ours that ended the screen
        for theme in THEMES:
            self.register_theme(theme)
        # Where no colour is wanted, not even a ground: the theme of the terminal's own, less its colours.
        self.theme = THEMES[-1].name if self.no_color else THEMES[0].name
        self._line_filters = [*([Ascii()] if ascii_only else []), *([NoColor()] if self.no_color else [])]

    def on_mount(self) -> None:
        tell_keys_of(self)
        for screen in (RunsScreen(), HostsScreen(), SmokeScreen(), LaunchScreen(), RunScreen(), CompareScreen()):
            self.install_screen(screen, screen.NAME)
        self._open_first(*self._first)
        self.set_interval(TICK_S, self.tick)
        if not self.is_headless:
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self._end_by, number)

    def _open_first(self, run: str | None, screen: str | None, compared: Sequence[str]) -> None:
        self.push_screen(screen if screen in SCREENS else SCREENS[0])
        if compared:
            self.compare(compared)
        elif run is not None:
            self.open_run(run, screen or TABS[0])

    def _end_by(self, number: int) -> None:
        """Asked to end from outside: the terminal's modes are restored like on any way out."""
        self.ended_by = number
        self.exit()

    def _fatal_error(self) -> None:
        """A fault of ours: the modes are restored and one line is said after that.

        Overrides Textual's own, which prints a traceback with local values, secrets among them.
        """
        self.crash = sys.exc_info()[1] or self._exception
        self._close_messages_no_wait()

    def on_unmount(self) -> None:
        self._turns.stop()
        self.reading.stop()

    async def on_event(self, event: events.Event) -> None:
        is_typed = isinstance(event, TYPED) and not event.is_forwarded
        await (self._turns.take(event) if is_typed else super().on_event(event))

    def get_line_filters(self) -> Sequence[LineFilter]:
        return self._line_filters  # one of Textual's own mixes the terminal's colours into themes that have none

    def get_key_display(self, binding: Binding) -> str:
        shown = super().get_key_display(binding)
        return spelled(shown) if self.ascii_only else shown

    # ------------------------------------------------------------- reading

    def ask_now(self) -> None:
        """Reads for the screen on top without waiting for the timer."""
        if self._is_reading:
            self._must_read_again = True
        else:
            self._is_reading = True  # from here on, not from when the worker gets its turn
            self.run_worker(self._read(), group="reading")

    def ask_soon(self, after_s: float = REST_S) -> None:
        """Reads once keys have rested: what a cursor only passes is not worth a reading."""
        if self._soon is not None:
            self._soon.stop()
        self._soon = self.set_timer(after_s, self._ask_at_rest)

    def ask_after_paint(self) -> None:
        self.ask_soon(PAINTED_S)

    def _ask_at_rest(self) -> None:
        self._soon = None
        self.ask_now()

    def tick(self) -> None:
        if self._turns.are_calm:
            tidy(is_rested=self._turns.are_rested)
        if self._is_reading:
            waited_s = self.clock() - self._asked_s
            if waited_s > SLOW_READ_S:
                self._tell_trouble(f"reading takes {waited_s:.0f} s; shown is what was read before")
            return
        self.ask_now()

    async def _read(self) -> None:
        """One reading, and another when somebody asked meanwhile."""
        try:
            while True:
                self._must_read_again = False
                screen = self._asking_screen()
                if screen is not None:
                    await self._read_for(screen)
                if not self._must_read_again:
                    return
        finally:
            self._is_reading = False

    async def _read_for(self, screen: YardScreen) -> None:
        self._asked_s = now_s = self.clock()
        ask, ahead = screen.ask(), screen.ahead()
        is_stale = self._must_forget or now_s - self._shown_s > CLOCK_S
        self._must_forget = False
        try:
            snapshot = await self.reading.read(ask, now_s, ahead, anew=is_stale)
            if snapshot is not None and (reads := screen.reads_beside(snapshot)) is not None:
                await self.reading.do(reads)
        except TROUBLE as error:
            self._must_forget = True  # what has been read already was shown to nobody
            self._failing_since_s = self._failing_since_s or now_s
            self._tell_trouble(trouble(error, now_s - self._failing_since_s))
            self._answered()
            return
        self._failing_since_s = None
        await self._turns.calm()  # keys first
        self._tell_trouble("")
        if snapshot is not None and screen is self._asking_screen():
            self._shown_s = now_s
            self.num_live, self.shown = snapshot.num_live, snapshot
            screen.take(snapshot)
            if snapshot.is_another:
                self.notify(f"{self._db_name} is another database now; shown is what it holds.", timeout=8)
            self._following.keep(snapshot)
        self._answered()

    def _answered(self) -> None:
        if not self.first_answer.is_set():
            self.first_answer.set()
            if not self.is_headless:
                ready = partial(get_ready, self, (RunScreen.NAME, *SCREENS, CompareScreen.NAME), self._turns)
                self.set_timer(SETTLED_S, lambda: self.run_worker(ready(), group="ready"))

    def _asking_screen(self) -> YardScreen | None:
        """The topmost screen that shows a snapshot; a dialogue above it asks for nothing."""
        for screen in reversed(self.screen_stack):
            if isinstance(screen, YardScreen) and screen.is_mounted and screen.is_attached:
                return screen
        return None

    def _tell_trouble(self, text: str) -> None:
        if to_type(text) != self.trouble:
            self.trouble = to_type(text)
            screen = self._asking_screen()
            if screen is not None:
                screen.show_top()

    async def settle(self, pilot: Pilot[Any]) -> None:
        """Until the screen shows what the store says and nothing is under way: for `once` and for tests."""
        while self.is_running:
            await pilot.pause()
            is_asking = self._is_reading or self._must_read_again or self._soon is not None
            if self.first_answer.is_set() and self._turns.are_over and not is_asking:
                return

    # ------------------------------------------------------------- actions

    def action_leave(self) -> None:
        """Waits for nothing. What is being started or ended would be cut off, which is said once before."""
        at_work = {worker for worker in self.workers if worker.group in ACTS and not worker.is_finished}
        if at_work <= self._told_at_work:
            self.exit()
            return
        self._told_at_work = at_work
        self.notify("Something is being started or ended: leaving now cuts it off; q again leaves.", severity="warning")

    def go_home(self, name: str) -> None:
        """One of the screens at the top; what lay above it closes. Launch opens on what the run under the cursor was told."""
        if name == LaunchScreen.NAME and (chosen := self.chosen()) is not None:
            self.get_screen(name, LaunchScreen).turn_to(chosen[0])
        while len(self.screen_stack) > 2:
            self.pop_screen()
        self.switch_screen(name)

    def open_run(self, selector: str, tab: str = "overview") -> None:
        """Everything about one run, above what is open; the one screen for it stands there once."""
        screen = self.get_screen(RunScreen.NAME, RunScreen)
        screen.turn_to(selector, tab)
        if screen not in self.screen_stack:
            self.push_screen(screen)
        while self.screen is not screen:
            self.pop_screen()

    def compare(self, run_ids: Sequence[str]) -> None:
        """Runs over each other, above what is open; the one screen for it is never open twice."""
        self.get_screen(CompareScreen.NAME, CompareScreen).turn_to(run_ids)
        self.push_screen(CompareScreen.NAME)

    def action_copy_id(self) -> None:
        """Through the terminal's clipboard sequence (OSC 52), which also works over SSH."""
        if (chosen := self.chosen()) is None:
            self.notify(NO_RUN, timeout=3)
        else:
            self.copy_to_clipboard(chosen[0].id)
            self.notify(f"Copied {chosen[0].id}.", timeout=3)

    def action_follow(self) -> None:
        self._following.start()

    def action_edit(self) -> None:
        screen = self._asking_screen()
        finding = screen.file_to_edit() if screen else None
        if finding is not None and self.may_act():
            self.run_worker(partial(find_and_edit, self, finding), group="edit", exclusive=True)  # type: ignore[arg-type]

    def action_help(self) -> None:
        open_help(self)

    def action_palette(self) -> None:
        open_palette(self)

    def chosen(self) -> Chosen | None:
        """The run that keys act on, with its GPUs."""
        screen = self._asking_screen()
        return screen.chosen() if screen else None

    def action_deed(self, name: str) -> None:
        if (chosen := self.chosen()) is None:
            self.notify(NO_RUN, timeout=3)
        else:
            ask_and_do(self, name, chosen)

    def may_act(self) -> bool:
        """False, and said, where the screen only looks."""
        if self.readonly:
            self.notify("This screen only looks (--readonly).", severity="warning")
        return not self.readonly

    def notify(self, message: str, **settings: Any) -> None:
        """What an action or a host says is text: no markup, no commands for the terminal."""
        super().notify(inert(to_type(message)), **{**settings, "markup": False})

    def do_beside(self, job: Callable[[], None], *, group: str) -> None:
        """Does in a thread what may wait for a host; its trouble becomes a toast. Of looks at the same thing the newest counts:
        what an older one says, through `call_from_thread`, comes to nothing.

        Workers get functions: the coroutine of one that is called off before its turn would never be awaited.
        """
        self.run_worker(partial(self._beside, job), group=group, exclusive=group not in ACTS)  # type: ignore[arg-type]

    async def _beside(self, job: Callable[[], None]) -> None:
        try:
            await beside(job)
        except TROUBLE as error:
            self.notify(refusal(error), severity="error", timeout=12)

    def call_from_thread(self, callback: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        asked_by = active_worker.get(None)  # of the thread that `do_beside` began

        def do() -> Any:
            if asked_by is not None and asked_by.is_cancelled:
                return None  # somebody has asked again since
            with self._context():
                return callback(*args, **settings)

        assert self._loop is not None, "threads beside it come after its start"
        return in_screen(self._loop, do)

    def is_at_work(self, group: str) -> bool:
        return any(worker.group == group and not worker.is_finished for worker in self.workers)

    def tell_from_thread(self, text: str) -> None:
        self.call_from_thread(self.notify, text, timeout=6)
        self.call_from_thread(self.ask_now)

    def fail_from_thread(self, text: str) -> None:
        self.call_from_thread(self.notify, text, severity="error", timeout=12)

    def action_reread(self) -> None:
        self._must_forget = True
        if (screen := self._asking_screen()) is not None:
            screen.reread()
        self.ask_now()

    def action_next_theme(self) -> None:
        if self.no_color:
            return
        names = [theme.name for theme in THEMES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)]
        self.refresh(layout=False)
