"""Hosts: what was last seen on each. A host is chosen, or a run there: what ended runs left on the one can be found and ended,
the other is opened, and every key of a run acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from orchestrator.store.rows import RunRow
from tui.confirm import Confirm
from tui.home import HomeScreen
from tui.hosts_lines import MARK, NOWHERE, hosts_lines, never_seen, places_in_order
from tui.ordering import named_hosts, orphans, processes, reap
from tui.sheet import Sheet
from tui.snapshot import Ask, RunNumbers, Snapshot


class HostsScreen(HomeScreen):
    NAME = "hosts"
    DEFAULT_CSS = "HostsScreen #hosts { padding: 1 1 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "choose(1)", "Next host or run", show=False, priority=True, id="hosts.next"),
        Binding("up,k", "choose(-1)", "Previous host or run", show=False, priority=True, id="hosts.previous"),
        Binding("enter", "open('overview')", "open", id="hosts.open"),
        Binding("l", "open('log')", "Log", show=False, id="hosts.log"),
        Binding("o", "orphans", "orphans", id="hosts.orphans"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._sheet = Sheet(id="hosts", classes="scrolls", can_focus=True)
        self._chosen = NOWHERE
        self._named: list[str] = []  # hosts of hosts.yaml and ~/.ssh/config

    def body(self) -> ComposeResult:
        yield self._sheet

    def on_mount(self) -> None:
        self._sheet.focus()
        if not self.is_current:
            self._look_up()  # made before anybody asks for it: what takes long the first time is done by then

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        self._look_up()

    def reread(self) -> None:
        self._look_up()

    def document(self) -> Mapping[str, object]:
        return {"never_seen": [] if self.snapshot is None else never_seen(self.snapshot, self._named)}

    def ask(self) -> Ask:
        return Ask(wants_list=False, wants_hosts=True)

    def present(self, snapshot: Snapshot) -> None:
        places = places_in_order(snapshot)
        if self._chosen not in places:  # the run has ended, or the host is gone
            here = (self._chosen[0], "")
            self._chosen = here if here in places else places[0] if places else NOWHERE
        self._sheet.show(
            lambda width, _height: hosts_lines(
                snapshot, width, named=self._named, chosen=self._chosen, ascii_only=self.app.ascii_only
            )
        )

    def chosen(self) -> tuple[RunRow, tuple[int, ...]] | None:
        snapshot, run_id = self.snapshot, self._chosen[1]
        run = next((run for run in snapshot.live if run.id == run_id), None) if snapshot else None
        if run is None or snapshot is None:
            return None
        numbers = snapshot.numbers.get(run.id, RunNumbers())
        return run, tuple(sample.gpu for sample in numbers.gpus)

    def action_choose(self, by: int) -> None:
        """Another host or run. A host comes to the top, a run into sight."""
        places = places_in_order(self.snapshot) if self.snapshot else []
        if not places:
            return
        self._chosen = places[max(0, min(len(places) - 1, places.index(self._chosen) + by))]
        self._sheet.redraw()
        self.show_keys()
        row = next((row for row, line in enumerate(self._sheet.lines) if line and line[0] == MARK), 0)
        top, height = self._sheet.scroll_offset.y, self._sheet.scrollable_content_region.height
        if not self._chosen[1]:
            self._sheet.scroll_to(y=row, animate=False)
        elif not top <= row < top + height:
            self._sheet.scroll_to(y=row if row < top else row - height + 1, animate=False)

    def action_open(self, tab: str) -> None:
        if self._chosen[1]:
            self.app.open_run(self._chosen[1], tab)
        else:
            self.app.notify("j and k choose a run of this host, if one lives there.", timeout=4)

    def action_orphans(self) -> None:
        """Looks on the chosen host for processes of our ended runs."""
        host = self._chosen[0]
        if host and self.app.may_act():
            self.app.notify(f"looking at {host}", timeout=3)
            self.app.do_beside(partial(self._find, host), group="orphans")

    def _look_up(self) -> None:
        """The names as the files have them now."""
        if self.app.places is not None:
            self.app.do_beside(self._read_named, group="named")

    def _read_named(self) -> None:
        assert self.app.places is not None
        self.app.call_from_thread(self._take_named, named_hosts(self.app.places))

    def _take_named(self, named: list[str]) -> None:
        if named != self._named:
            self._named = named
            self._sheet.redraw()

    def _find(self, host: str) -> None:
        assert self.app.places is not None
        found = orphans(self.app.places, host)
        if not found:
            self.app.tell_from_thread(f"{host}: no process of an ended run is left")
            return
        self.app.call_from_thread(self._offer, host, found)

    def _offer(self, host: str, found: list[str]) -> None:
        def answer(is_yes: bool | None) -> None:
            if is_yes:
                self.app.do_beside(partial(self._reap, host), group="reap")

        self.app.push_screen(Confirm([f"end {processes(len(found))} of ended runs on {host}", *found[:12]]), answer)

    def _reap(self, host: str) -> None:
        assert self.app.places is not None
        self.app.tell_from_thread(reap(self.app.places, host))
