"""`follow`: the background follower by hand. Apart from `life`, because it loads the transports."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import click

from orchestrator.actions import followed, history, life
from orchestrator.actions.log_text import inert
from orchestrator.lazy import lazy
from orchestrator.verbs.frame import Terminal, verb

if TYPE_CHECKING:
    from orchestrator.actions.places import Places
    from orchestrator.follow import follower
else:
    follower = lazy("orchestrator.follow.follower")


LOOK_S = 1.0


@verb("follow", examples=["draftyard follow", "draftyard follow --db /data/runs.db -v"])
def follow(terminal: Terminal) -> None:
    """Follow every live run until none is left. Started by itself when needed; by hand to see what it does.

    -v tells each event that it records. Ctrl-C ends the following, not the runs.
    """
    places = terminal.places
    life.refuse_stopped(places)
    life.end_older_follower(places)
    if followed.is_followed(places):
        told = f"another process follows the runs of {places.db} already{_whom(followed.follower_pid(places))}"
        terminal.say(f"{told}; nothing was started")
        return
    over = threading.Event()
    teller = threading.Thread(target=_tell_events, args=(terminal, _newest_event(places), over), daemon=True)
    if terminal.verbosity:
        teller.start()
    terminal.say(f"following the live runs of {places.db} until none is left; Ctrl-C ends the following, not the runs")
    try:
        raise click.exceptions.Exit(follower.main(["--db", str(places.db), "--hosts", str(places.hosts_file)]))
    finally:
        over.set()
        if teller.is_alive():
            teller.join(timeout=2 * LOOK_S)


def _whom(pid: int | None) -> str:
    return "" if pid is None else f" (pid {pid})"


def _newest_event(places: Places) -> int:
    with history.open_reader(places) as reader:
        return max((item.id for item in reader.events(limit=1)), default=0)


def _tell_events(terminal: Terminal, newest: int, over: threading.Event) -> None:
    """Every event after `newest` as it is recorded, the last of them after the end."""
    with history.open_reader(terminal.places) as reader:
        is_last = False
        while not is_last:
            is_last = over.wait(LOOK_S)
            for item in reader.events(after_id=newest):
                terminal.detail(f"{item.run_id or '-'}  {item.kind}: {inert(item.text)}")
                newest = item.id


VERBS = {"follow": follow}
