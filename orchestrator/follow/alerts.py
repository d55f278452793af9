"""One webhook for what a person wants to know at night: states, stalls, silent hosts, numbers that are none, full disks.

Alerts are events of the store, read from a cursor kept in the store: none is lost when the follower
dies, at worst one is sent twice. The address is a secret; it comes from DRAFTYARD_WEBHOOK, is never
stored, and no message names it. A receiver that does not answer, or answers without end, is asked again later and
holds up nothing.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from orchestrator.errors import RunNotFound, StoreError
from orchestrator.follow.nodes import silent_hosts
from orchestrator.store.reads import Reader
from orchestrator.store.rows import EventRow
from orchestrator.store.writes import Store

CURSOR = "alerts"
KINDS = ("state", "nonfinite", "low_disk", "silent_host", "follower_error")
POST_TIMEOUT_S = 10.0
LOOK_S = 2.0
LONGEST_WAIT_S = 300.0
AFTER_FAULT_S = 5.0

Post = Callable[[dict[str, Any]], None]


class NotTaken(Exception):
    """The receiver did not take an alert. Holds the kind of error alone: its text may hold the address."""


class _Bounded(HTTPConnection):
    """Ends POST_TIMEOUT_S after it was made: a socket's own timeout is begun anew by every byte that drips in."""

    def connect(self) -> None:
        super().connect()
        ending = threading.Timer(POST_TIMEOUT_S, self._cut)
        ending.daemon = True
        ending.start()

    def _cut(self) -> None:
        if (sock := self.sock) is not None:  # urllib takes it away once the head of an answer has come
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class _BoundedTLS(_Bounded, HTTPSConnection):
    """The same over TLS."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Bounded, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_BoundedTLS, req)


def webhook(url: str) -> Post:
    """Posts one JSON object. What urllib raises where the receiver does not take it: OSError; HTTPException for an
    answer that is no HTTP; ValueError for an address that is none."""
    url, credentials = _told_apart(url)
    opener = urllib.request.build_opener(_Http, _Https)

    def post(body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            url,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "User-Agent": "draftyard"},
            method="POST",
        )
        if credentials is not None:
            request.add_unredirected_header("Authorization", credentials)
        opener.open(request, timeout=POST_TIMEOUT_S).close()  # its status says it all: what follows is not read

    return post


def _told_apart(url: str) -> tuple[str, str | None]:
    """The address, and what its `user:password@` comes to as a header (RFC 7617): urllib takes them for a host's name."""
    with contextlib.suppress(ValueError):  # no address at all: said when it is posted to
        parts = urlsplit(url)
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
            return bare.geturl(), f"Basic {b64encode(user.encode()).decode()}"
    return url, None


@dataclass(frozen=True)
class Alerts:
    """Sends what has happened since the cursor."""

    store: Store
    reader: Reader
    post: Post

    def begin(self) -> None:
        """What lies before the first use of alerts is history, not news."""
        if self.store.cursor(CURSOR) is None:
            events = self.reader.events(limit=1)
            self.store.move_cursor(CURSOR, events[-1].id if events else 0)

    def send_new(self) -> int:
        """How many were sent. NotTaken leaves the cursor before the one that failed."""
        sent = 0
        for event in self.reader.events(kinds=KINDS, after_id=self.store.cursor(CURSOR) or 0):
            body = self._body(event)
            if body is not None:
                self._send(body)
                sent += 1
            self.store.move_cursor(CURSOR, event.id)
        return sent

    def _send(self, body: dict[str, Any]) -> None:
        try:
            self.post(body)
        except (OSError, HTTPException, ValueError) as error:
            raise NotTaken(type(error).__name__) from error

    def _body(self, event: EventRow) -> dict[str, Any] | None:
        """None for what is of no run."""
        if event.run_id is None:
            return None
        run = self.reader.run(event.run_id)
        where = event.fields.get("host") or ", ".join(silent_hosts(self.reader, run) or run.hosts)
        return {
            "text": f"{run.recipe}/{run.branch} on {where} ({run.id}): {event.text}",
            "run": run.id,
            "kind": event.kind,
            "state": event.fields.get("to", run.state),
            "reason": event.fields.get("reason"),
            "host": where,
            "step": run.step,
            "at_s": event.at_s,
        }


class AlertThread(threading.Thread):
    """Sends alerts until told to end, then what is left, once."""

    def __init__(self, db: Path, post: Post, ending: threading.Event) -> None:
        super().__init__(name="alerts", daemon=True)
        self._db, self._post, self._ending = db, post, ending

    def start(self) -> None:
        """What is there before this returns is history, where alerts were never used; whatever comes later is told."""
        with contextlib.suppress(StoreError), Store(self._db) as store, Reader(self._db) as reader:  # tried again later
            Alerts(store, reader, self._post).begin()
        super().start()

    def run(self) -> None:
        while True:
            try:
                return self._send_until_told()
            except StoreError as error:  # busy, full: no alert is lost, the cursor stays where it is
                sys.stderr.write(f"alerts: {error}\n")
            if self._ending.wait(AFTER_FAULT_S):
                return None

    def _send_until_told(self) -> None:
        with Store(self._db) as store, Reader(self._db) as reader:
            alerts = Alerts(store, reader, self._post)
            alerts.begin()
            wait_s, seen = LOOK_S, -1
            while not self._ending.wait(wait_s):
                version = reader.data_version()
                if version == seen and wait_s == LOOK_S:
                    continue
                wait_s = LOOK_S if self._try(alerts) else min(LONGEST_WAIT_S, wait_s * 2)
                seen = version
            self._try(alerts)

    def _try(self, alerts: Alerts) -> bool:
        try:
            alerts.send_new()
        except NotTaken as error:
            text = f"the webhook did not take an alert: {error}"
            if not any(event.text == text for event in alerts.reader.events(kinds=["alert_failed"], limit=1)):
                alerts.store.add_event(None, "alert_failed", text)
            return False
        except RunNotFound:  # purged between its event and this look; the event is gone with it
            return False
        return True
