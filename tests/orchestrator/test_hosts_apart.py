"""Several hosts at once, each in a network namespace with an address and an sshd of its own; one is cut off."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator import launch
from orchestrator.errors import HostError
from orchestrator.follow.follower import Follower, follow
from orchestrator.host import Hosts
from orchestrator.shell.connect import connect
from orchestrator.store.rows import State
from orchestrator.store.writes import Store
from orchestrator.workplace import Workplace
from tests.orchestrator.apart import Away, away, needed
from tests.orchestrator.runs import life, new_run


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Away]]:
    needed()
    with contextlib.ExitStack() as stack:
        yield [away(number, tmp_path, stack) for number in range(3)]


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
            store.path,
            lambda name, kept: connect(Hosts.load(None, away.config).find(name)),
            threading.Event(),
            idle_s=0.2,
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


@pytest.mark.slow
def test_three_hosts_answer_side_by_side(three: list[Away]) -> None:
    addresses = [away.shell.run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout.split()[2].decode() for away in three]

    assert addresses == [away.address for away in three]
    assert len(set(addresses)) == 3
