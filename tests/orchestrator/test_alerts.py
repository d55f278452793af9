"""Alerts to a real HTTP receiver: none lost, none about ordinary life, no address in any text."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest

from orchestrator.follow.alerts import CURSOR, Alerts, AlertThread, NotTaken, webhook
from orchestrator.follow.desk import Desk
from orchestrator.follow.nodes import views_on
from orchestrator.follow.notices import note_silence, notice
from orchestrator.observe import Evidence
from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from tests.orchestrator.runs import RUN, batch, event, new_run, started, steps


class Receiver(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.answer = 200
        self.authorizations: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook/secret-token"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.answer == 200:
            self.server.bodies.append(json.loads(body))
            self.server.authorizations.append(self.headers["Authorization"])
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs.db")


def test_each_change_of_state_is_told_in_its_order(store: Store, receiver: Receiver) -> None:
    alerts = Alerts(store, store.reader, webhook(receiver.url))
    alerts.begin()
    started(store)
    store.set_state(RUN, State.RUNNING, evidence="x")
    store.set_state(RUN, State.RUNNING, reason="stalled", evidence="no step for 5 min")
    store.set_state(RUN, State.RUNNING, evidence="x")
    store.set_state(RUN, State.FAILED, reason="gpu_oom", evidence="CUDA out of memory")

    assert alerts.send_new() == 4
    assert alerts.send_new() == 0

    assert [(body["state"], body["reason"]) for body in receiver.bodies] == [
        ("running", None),
        ("running", "stalled"),
        ("running", None),
        ("failed", "gpu_oom"),
    ]
    assert receiver.bodies[3]["text"].endswith("running -> failed (gpu_oom): CUDA out of memory")


def test_user_and_password_of_the_address_are_sent_as_basic_authorization(receiver: Receiver) -> None:
    webhook(receiver.url.replace("//", "//me:p%40ss@"))({"text": "x"})
    webhook(receiver.url)({"text": "x"})

    assert receiver.authorizations == ["Basic bWU6cEBzcw==", None]


def test_a_metric_of_any_name_that_is_not_finite_is_told_once(store: Store) -> None:
    started(store)
    desk = Desk(store, store.reader, time.time)
    run = store.reader.run(RUN)
    store.ingest(batch(steps(1, 3, **{"val/loss": float("nan"), "lr": 0.1}), offset_bytes=10))
    notice(desk, run, Evidence.nothing())
    notice(desk, run, Evidence.nothing())
    store.ingest(
        batch(
            [event(4, "metrics", step=4, values={"val/loss": float("inf"), "grad_norm": float("inf")})], offset_bytes=20
        )
    )
    notice(desk, run, Evidence.nothing())

    assert [event.text for event in store.reader.events(RUN, kinds=["nonfinite"])] == [
        "val/loss is not a number in 3 of 3 steps; last at or before step 3",
        "grad_norm is infinite; last at or before step 4",
    ]


def test_a_disk_of_this_machine_that_fills_up_is_told_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    started(store)
    desk, left = Desk(store, store.reader, time.time), disk_usage(store.path.parent)
    monkeypatch.setattr("orchestrator.follow.notices.shutil.disk_usage", lambda _: left._replace(free=300 * 2**20))

    for _ in range(2):
        notice(desk, store.reader.run(RUN), replace(Evidence.nothing(), disk_free_bytes=2**40))

    (said,) = store.reader.events(RUN, kinds=["low_disk"])
    assert said.text == f"this machine has 0.29 GiB free where it keeps what runs say, {store.path.parent}"
    assert said.fields == {"host": "this machine"}


def test_a_host_that_stays_silent_is_told_once_each_time(store: Store, receiver: Receiver) -> None:
    alerts = Alerts(store, store.reader, webhook(receiver.url))
    alerts.begin()
    started(store)
    moments: list[int] = []
    for _ in range(2):
        store.host_unreachable("local", error="no answer")
        run = store.reader.run(RUN)
        assert run.unreachable_since_s is not None
        for seconds in (599.0, 600.0, 700.0):
            now_s = run.unreachable_since_s + seconds
            note_silence(Desk(store, store.reader, lambda now_s=now_s: now_s), run)
            moments.append(len(store.reader.events(RUN, kinds=["silent_host"])))
        store.host_seen("local")
        note_silence(Desk(store, store.reader, time.time), store.reader.run(RUN))

    assert moments == [0, 1, 1, 1, 2, 2]
    assert alerts.send_new() == 2
    assert {(body["kind"], body["host"]) for body in receiver.bodies} == {("silent_host", "local")}
    assert "host local has not answered for 10 min" in store.reader.events(RUN, kinds=["silent_host"])[0].text


@pytest.mark.slow  # a process of its own
def test_the_follower_posts_to_the_address_in_its_environment(store: Store, receiver: Receiver, tmp_path: Path) -> None:
    store.move_cursor(CURSOR, 0)
    started(store)
    store.set_state(RUN, State.FAILED, reason="gpu_oom", evidence="CUDA out of memory")
    command = [sys.executable, "-m", "orchestrator.follow.follower", "--db", str(store.path), "--idle", "0.1"]
    environment = {**os.environ, "DRAFTYARD_WEBHOOK": receiver.url}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    assert [(body["run"], body["reason"]) for body in receiver.bodies] == [(RUN, "gpu_oom")]
    assert "secret-token" not in done.stdout + done.stderr
    assert not any(b"secret-token" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_an_alert_names_those_of_several_hosts_that_are_silent_else_all(store: Store, receiver: Receiver) -> None:
    alerts = Alerts(store, store.reader, webhook(receiver.url))
    alerts.begin()
    store.create_run(new_run(RUN, host="a", more_hosts=("b", "c")))
    store.place_nodes(RUN, ["/a", "/b", "/c"])
    store.new_attempt(RUN)
    for silent in ("c", "b", None):
        if silent is None:
            for host in ("b", "c"):
                store.host_seen(host)
        else:
            store.host_unreachable(silent, error="no answer")
        store.add_event(RUN, "low_disk", "x")
        alerts.send_new()

    assert [body["host"] for body in receiver.bodies] == ["c", "b, c", "a, b, c"]
    assert receiver.bodies[0]["text"] == f"smollm2/v6 on c ({RUN}): x"


def test_a_disk_that_fills_up_is_told_once_of_each_host_by_its_name(store: Store, receiver: Receiver) -> None:
    alerts = Alerts(store, store.reader, webhook(receiver.url))
    alerts.begin()
    store.create_run(new_run(RUN, host="a", more_hosts=("b",)))
    store.place_nodes(RUN, ["/a", "/b"])
    store.new_attempt(RUN)
    desk = Desk(store, store.reader, time.time)

    for _ in range(2):
        for view in (view for host in ("a", "b") for view in views_on(store.reader, host, store.reader.live_runs())):
            notice(desk, view, replace(Evidence.nothing(), disk_free_bytes=300 * 2**20))
    alerts.send_new()

    assert [(body["kind"], body["host"]) for body in receiver.bodies] == [("low_disk", "a"), ("low_disk", "b")]
    assert "host b has 0.29 GiB free on its disk; the next checkpoint wants 1.00 GiB" in receiver.bodies[1]["text"]


def test_history_from_before_the_first_use_is_not_news(store: Store, receiver: Receiver) -> None:
    started(store)
    store.set_state(RUN, State.FAILED, reason="exit:1", evidence="x")
    alerts = Alerts(store, store.reader, webhook(receiver.url))

    alerts.begin()

    assert alerts.send_new() == 0


def test_a_receiver_that_refuses_gets_the_alert_later(store: Store, receiver: Receiver) -> None:
    alerts = Alerts(store, store.reader, webhook(receiver.url))
    alerts.begin()
    started(store)
    store.set_state(RUN, State.LOST, reason="reboot", evidence="x")
    receiver.answer = 503
    with pytest.raises(NotTaken, match=r"^HTTPError$"):
        alerts.send_new()

    receiver.answer = 200

    assert alerts.send_new() == 1
    assert [body["reason"] for body in receiver.bodies] == ["reboot"]


def test_a_receiver_that_speaks_no_http_is_one_that_does_not_take_it(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        alerts = Alerts(store, store.reader, webhook(f"http://127.0.0.1:{listening.getsockname()[1]}/"))
        alerts.begin()
        started(store)
        store.set_state(RUN, State.LOST, reason="reboot", evidence="x")
        thread = threading.Thread(target=_answer, args=(listening, b"220 mail here\r\n"))
        thread.start()

        with pytest.raises(NotTaken, match=r"^BadStatusLine$"):
            alerts.send_new()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("begins", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n"], ids=["its body", "its head"])
def test_an_answer_without_end_holds_up_nothing(begins: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that drips in is cut after a while, its status counts; a body is not waited for, and not kept."""
    monkeypatch.setattr("orchestrator.follow.alerts.POST_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_drip, args=(listening, begins))
        thread.start()
        webhook(f"http://127.0.0.1:{listening.getsockname()[1]}/")({})
        thread.join(60)
        assert not thread.is_alive(), "its connection is closed"


def _drip(listening: socket.socket, begins: bytes) -> None:
    """A line at a time, until the other end has gone."""
    connection, _ = listening.accept()
    with connection, suppress(OSError):
        connection.sendall(begins)
        while True:
            connection.sendall(b"X-More: 1\r\n")
            time.sleep(0.05)


def _answer(listening: socket.socket, words: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(words)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/hook/secret-token", "no address secret-token"])
def test_a_failing_webhook_is_said_once_without_its_address(store: Store, url: str) -> None:
    started(store)
    ending = threading.Event()
    ending.set()
    Alerts(store, store.reader, webhook(url)).begin()
    store.set_state(RUN, State.LOST, evidence="x")

    for _ in range(2):
        thread = AlertThread(store.path, webhook(url), ending)
        thread.start()
        thread.join()

    said = store.reader.events(kinds=["alert_failed"])
    assert len(said) == 1
    assert b"secret-token" not in store.path.read_bytes() + store.path.with_name("runs.db-wal").read_bytes()


def test_a_database_that_cannot_be_used_is_said_and_no_thread_dies_of_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs.db").mkdir()
    ending = threading.Event()
    thread = AlertThread(tmp_path / "runs.db", lambda body: None, ending)
    thread.start()
    while "alerts: " not in (said := capfd.readouterr().err):
        assert thread.is_alive()
        time.sleep(0.02)

    ending.set()
    thread.join(timeout=60.0)

    assert not thread.is_alive()
    assert "runs.db is a folder" in said
