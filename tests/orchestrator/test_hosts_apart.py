"""Several hosts at once, each in a network namespace with an address and an sshd of its own; one is cut off."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator import launch
from orchestrator.errors import HostError
from orchestrator.follow.follower import Follower, follow
from orchestrator.host import Hosts
from orchestrator.shell.connect import connect
from orchestrator.shell.stream import StreamShell
from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from orchestrator.workplace import Workplace
from tests import sshd
from tests.orchestrator.runs import life, new_run

# Tests run side by side in several processes: each has addresses of its own.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def _base(number: int) -> str:
    return f"198.18.{10 * WORKER + number + 10}"


@dataclass
class Away:
    """A machine behind a link that can be cut."""

    name: str
    link: str
    shell: StreamShell
    config: Path

    def cut(self, *, off: bool = True) -> None:
        subprocess.run(["ip", "link", "set", self.link, "down" if off else "up"], check=True)
        if not off:
            time.sleep(0.2)


def _why_not() -> str | None:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "network namespaces need root and iproute2"
    name = f"dy{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"ip netns: {tried.stderr.decode(errors='replace').strip()}"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Away]]:
    if reason := _why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield [_away(number, tmp_path, stack) for number in range(3)]


def _away(number: int, folder: Path, stack: contextlib.ExitStack) -> Away:
    name, link, base = f"dy{os.getpid()}-{number}", f"dy{os.getpid() % 10000}v{number}", _base(number)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    ip("netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
    ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    # By itself it goes some time after its namespace: too late for the next test's, which has the same name.
    stack.callback(subprocess.run, ["ip", "link", "del", link], check=False)
    ip("addr", "add", f"{base}.1/30", "dev", link)
    ip("link", "set", link, "up")
    for words in (
        ["addr", "add", f"{base}.2/30", "dev", "eth0"],
        ["link", "set", "eth0", "up"],
        ["link", "set", "lo", "up"],
    ):
        ip("-n", name, *words)
    server = stack.enter_context(sshd.running(folder / name, alias=name, address=f"{base}.2", netns=name))
    shell = connect(Hosts.load(None, server.config_file).find(name))
    stack.callback(shell.close)
    return Away(name, link, shell, server.config_file)


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_an_error_within_a_minute_and_the_others_go_on(three: list[Away]) -> None:
    lost, *others = three
    done = dict.fromkeys((away.name for away in others), 0)
    is_over = threading.Event()

    def keep_asking(away: Away) -> None:
        while not is_over.is_set():
            assert away.shell.run(["echo", "x"]).stdout == b"x\n"
            done[away.name] += 1
            time.sleep(0.2)

    threads = [threading.Thread(target=keep_asking, args=(away,)) for away in others]
    for thread in threads:
        thread.start()
    threading.Timer(0.5, lost.cut).start()
    began = time.monotonic()
    try:
        with pytest.raises(HostError):
            lost.shell.run(["sleep", "300"], timeout_s=300)
        took_s = time.monotonic() - began
    finally:
        is_over.set()
        for thread in threads:
            thread.join()

    assert took_s < 60
    assert min(done.values()) > 20
    lost.cut(off=False)
    assert lost.shell.run(["echo", "back"]).stdout == b"back\n"


# Steps until a file appears.
UNTIL = """
import sys, time
from pathlib import Path
from remote.report import Reporter
with Reporter.from_environment().job() as reporter:
    step = 0
    while not Path(sys.argv[1]).exists():
        step += 1
        reporter.metrics(step, {"loss": 1 / step})
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_host_whose_route_was_dropped_is_followed_again_within_30_seconds(three: list[Away], tmp_path: Path) -> None:
    away, tree = three[0], Path(__file__).resolve().parents[2]
    place, ends = Workplace(str(tmp_path / "work"), sys.executable, str(tmp_path)), tmp_path / "enough"
    with Store(tmp_path / "runs.db") as store:
        store.create_run(new_run("cut", host=away.name, workdir=place.work_dir, documents=life(grace_s=1.0)))
        attempt = store.new_attempt("cut")
        argv = (sys.executable, "-c", UNTIL, str(ends))
        launch.start(away.shell, place, launch.Job("cut", "train", attempt, argv, str(tree), spec_json="{}"))
        follower = Follower(
            store.path, lambda name: connect(Hosts.load(None, away.config).find(name)), threading.Event(), idle_s=0.2
        )
        following = threading.Thread(target=follow, args=(follower,))
        following.start()
        try:
            _until(lambda: (store.reader.run("cut").step or 0) > 3)
            away.cut()
            time.sleep(60.0)
            seen = store.reader.run("cut")
            away.cut(off=False)
            _until(lambda: (store.reader.run("cut").step or 0) > (seen.step or 0), within_s=30.0)
        finally:
            away.cut(off=False)
            ends.touch()
            following.join(90)

        assert (seen.state, seen.unreachable_since_s is None) == (State.RUNNING, False)
        assert store.reader.run("cut").state is State.SUCCEEDED
        steps = [value.step for value in store.reader.metric_values("cut", "loss")]
        assert steps == list(range(1, steps[-1] + 1))


def _until(is_so: Callable[[], bool], *, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_three_hosts_answer_side_by_side(three: list[Away]) -> None:
    addresses = [away.shell.run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout.split()[2].decode() for away in three]

    assert addresses == [f"{_base(number)}.2" for number in range(3)]
