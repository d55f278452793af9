"""Hosts: what was last seen on each; one is chosen, and what our ended runs left there can be found and ended."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from tui.confirm import Confirm
from tui.home import HomeScreen
from tui.hosts_lines import hosts_in_order, hosts_lines
from tui.ordering import orphans, processes, reap
from tui.sheet import Sheet
from tui.snapshot import Ask, Snapshot


class HostsScreen(HomeScreen):
    NAME = "hosts"
    DEFAULT_CSS = "HostsScreen #hosts { padding: 1 1 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "choose(1)", "Next host", show=False, priority=True, id="hosts.next"),
        Binding("up,k", "choose(-1)", "Previous host", show=False, priority=True, id="hosts.previous"),
        Binding("o", "orphans", "orphans", id="hosts.orphans"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._sheet = Sheet(id="hosts", classes="scrolls", can_focus=True)
        self._chosen = ""  # a host's name

    def body(self) -> ComposeResult:
        yield self._sheet

    def on_mount(self) -> None:
        self._sheet.focus()

    def ask(self) -> Ask:
        return Ask(wants_list=False, wants_hosts=True)

    def present(self, snapshot: Snapshot) -> None:
        names = [host.name for host in hosts_in_order(snapshot)]
        if self._chosen not in names:
            self._chosen = names[0] if names else ""
        self._sheet.show(
            lambda width, _height: hosts_lines(snapshot, width, chosen=self._chosen, ascii_only=self.app.ascii_only)
        )

    def action_choose(self, by: int) -> None:
        """Another host; its heading comes into sight."""
        names = [host.name for host in hosts_in_order(self.snapshot)] if self.snapshot else []
        if not names:
            return
        place = max(0, min(len(names) - 1, names.index(self._chosen) + by))
        self._chosen = names[place]
        self._sheet.redraw()
        headings = [row for row, line in enumerate(self._sheet.lines) if line and line[0][0] == "▸ "]
        if headings:
            self._sheet.scroll_to(y=headings[0], animate=False)

    def action_orphans(self) -> None:
        """Looks on the chosen host for processes of our ended runs."""
        if self._chosen and self.app.may_act():
            self.app.notify(f"looking at {self._chosen}", timeout=3)
            self.app.do_beside(partial(self._find, self._chosen), group="orphans")

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
