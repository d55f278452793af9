"""Keep-alive with a missed count, on a turned clock: when a probe is sent, and when a machine is given up."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import HostError
from orchestrator.shell.hops import ROWS
from orchestrator.shell.pulse import PATIENCE_S, KeepAlive, Pulse
from orchestrator.shell.routes import Question, route


class Machine:
    """A transport whose other end answers probes, or does not."""

    def __init__(self, *, answers: bool) -> None:
        self.answers, self.is_closed = answers, threading.Event()
        self.num_probes = 0

    def is_active(self) -> bool:
        return not self.is_closed.is_set()

    def close(self) -> None:
        self.is_closed.set()

    def global_request(self, kind: str, wait: bool) -> None:
        self.num_probes += 1
        if not self.answers:
            self.is_closed.wait(10)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def given_up_after_s(machine: Any, keepalive: KeepAlive, *, look_s: float = 1.0) -> tuple[float, HostError]:
    clock = Clock()
    pulse = Pulse(machine, "box", keepalive, clock=clock)
    for _ in range(200):
        clock.now_s += look_s
        try:
            pulse.check()
        except HostError as error:
            return clock.now_s - Clock.now_s, error
    raise AssertionError("it was never given up")


@pytest.mark.parametrize(
    ("interval_s", "count_max"), [(0, 3), (5, 2), (15, 3), (60, 3), (600, 1), (1, 1000), (3, 0), (0, 1)]
)
def test_a_machine_that_answers_no_probe_is_given_up_in_under_45_seconds_whatever_was_asked(
    interval_s: int, count_max: int
) -> None:
    machine, keepalive = Machine(answers=False), KeepAlive.of(interval_s, count_max)

    after_s, error = given_up_after_s(machine, keepalive)

    assert keepalive.interval_s * (keepalive.count_max + 1) <= after_s < 45
    assert f"answered none of {keepalive.count_max} probes" in str(error)
    assert not machine.is_active()


def test_what_the_config_asks_for_is_kept_where_it_fits_and_else_in_smaller_steps() -> None:
    assert KeepAlive.of(5, 4) == KeepAlive(5, 4)
    assert KeepAlive.of(0, 3) == KeepAlive()
    assert KeepAlive.of(60, 3) == KeepAlive(PATIENCE_S / 4, 3)


def test_ssh_config_says_how_often_and_how_many(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host lab\n  ServerAliveInterval 7\n  ServerAliveCountMax 2\nHost *\n  HostName 10.0.0.2\n")

    (lab,) = route(Question("lab", config_file=config))
    (other,) = route(Question("other", config_file=config))

    assert lab.keepalive == KeepAlive(7, 2)
    assert other.keepalive == KeepAlive()


def test_an_answer_takes_the_missed_count_back() -> None:
    clock, machine = Clock(), Machine(answers=True)
    pulse = Pulse(machine, "box", KeepAlive(8, 3), clock=clock)  # type: ignore[arg-type]

    for _ in range(20):
        clock.now_s += 8.5
        pulse.check()
        for _ in range(6000):
            if pulse.num_unanswered == 0:
                break
            time.sleep(0.01)

    assert machine.num_probes == 20


def test_bytes_that_come_need_no_probe() -> None:
    clock, machine = Clock(), Machine(answers=False)
    pulse = Pulse(machine, "box", KeepAlive(8, 3), clock=clock)  # type: ignore[arg-type]

    for _ in range(100):
        clock.now_s += 5
        pulse.heard()
        pulse.check()

    assert machine.num_probes == 0


def test_after_our_own_sleep_of_hours_the_machine_is_asked_again_as_often_as_ever() -> None:
    machine, clock = Machine(answers=False), Clock()
    pulse = Pulse(machine, "box", KeepAlive(8, 3), clock=clock)  # type: ignore[arg-type]

    clock.now_s += 7200  # the lid was closed
    for _ in range(10):
        pulse.check()

    assert pulse.num_unanswered == 1
    assert machine.is_active()
    machine.close()


def test_an_inner_ssh_gives_a_frozen_machine_up_in_under_45_seconds_too() -> None:
    options = dict(word.split("=") for word in ROWS["ssh"].prefix if word.startswith("ServerAlive"))

    assert int(options["ServerAliveInterval"]) * (int(options["ServerAliveCountMax"]) + 1) < 45
