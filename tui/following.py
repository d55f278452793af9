"""Live runs that nobody records get their follower back, while the screen is open and by its key.

It is tried again and again, and a refusal is said once. A screen that only looks starts none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui.ordering import TROUBLE, refusal, start_follower
from tui.snapshot import Snapshot

if TYPE_CHECKING:
    from tui.app import Draftyard

AGAIN_S = 10.0  # between two tries


class Following:
    def __init__(self, app: Draftyard) -> None:
        self._app = app
        self._tried_s, self._refused = 0.0, ""  # when, and why there was none, as it was said last

    def keep(self, snapshot: Snapshot) -> None:
        """Starts one where live runs have none."""
        app = self._app
        self._refused = "" if snapshot.is_followed else self._refused
        is_due = app.clock() - self._tried_s > AGAIN_S
        if snapshot.num_live and not snapshot.is_followed and is_due and not (app.readonly or app.is_headless):
            self._tried_s = app.clock()
            app.do_beside(self._start, group="follower")

    def start(self) -> None:
        """A person asks for one, and is answered whatever was said before."""
        app = self._app
        if app.shown is not None and app.shown.is_followed:
            app.notify("The follower is at work.", timeout=3)
        elif app.may_act():
            self._refused = ""
            app.do_beside(self._start, group="follower")

    def _start(self) -> None:
        app = self._app
        assert app.places is not None
        try:
            start_follower(app.places)
        except TROUBLE as error:
            told, self._refused = self._refused, refusal(error)
            if self._refused != told:
                app.fail_from_thread(self._refused)
            return
        app.call_from_thread(app.ask_now)
