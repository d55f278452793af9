"""Canaries in an env file, and in the webhook's address, looked for everywhere a run leaves something: locally, over
ssh, in a container behind ssh.

Database, what is posted, logs as shown, run folder, shipped tree, what verbs print, an exported table, a crash report, and every
process's arguments and environment for as long as the run takes. They have no shape to know them by: what is tested
is that they are known by value.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import string
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.actions.places import find_places
from remote.hiding import spellings
from tests import container, sshd
from tests.orchestrator.test_alerts import Receiver, receiver
from tests.orchestrator.yard import Yard
from tui.log_page import LogAsk, read_log
from tui.snapshot import Room

__all__ = ["receiver"]  # a fixture
pytestmark = pytest.mark.slow  # real servers, real jobs

# Python, JSON and addresses each spell it in a way of their own. No other process that runs tests has the same: its jobs
# would be taken for ours by whoever looks at every process.
PASSWORD = f"a'9$ü@\\{secrets.token_hex(4)}"
# Prints, reports and fails with the secrets in it, as libraries do that tell of a refused request.
CRASH = """\
import os, sys, time
from remote.report import Reporter

said = [os.environ["HUB"], os.environ["DB_PW"]]
assert len(said[0]) == 37
with (reporter := Reporter.from_environment()).job():
    reporter.start(choices={"login": said[0]})
    reporter.note(f"at {said[0]} with {said[1]}")
    reporter.rung("login", passed=False, values={"tried": said}, message=f"refused {said[1]}")
    reporter.evaluation(1, protocol={"name": said[0]}, values={"who": said[1]})
    reporter.metrics(1, {"loss": 1.0})
    print("working as", *said, said, flush=True)
    while not os.path.exists(os.environ["DRAFTYARD_WORK_DIR"] + "/seen"):
        time.sleep(0.05)
    raise RuntimeError(f"401 for {said[0]}, {said}")
"""
NO_CONTAINER = container.why_not()


@dataclass
class Watch:
    """Looks at every process again and again; what it found wrong is in `seen`."""

    canaries: tuple[bytes, ...]
    address: bytes  # of the webhook: the follower has it in its environment, no job has
    seen: set[str] = field(default_factory=set)
    num_holders: int = 0  # looks at a job of ours that has the canary, as it should
    is_over: threading.Event = field(default_factory=threading.Event)
    sign: Path | None = None  # made when a job has been looked at: it waits for that

    def look(self) -> None:
        while not self.is_over.wait(0.005):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    self._look_at(process)

    def _look_at(self, process: Path) -> None:
        line = (process / "cmdline").read_bytes()
        if any(secret in line for secret in (*self.canaries, self.address)):
            self.seen.add(f"arguments: {line[:80]!r}")
        environment = (process / "environ").read_bytes()
        if self.address in environment and b"\0DRAFTYARD_ATTEMPT=1\0" in environment:
            self.seen.add(f"the webhook in the environment of: {line[:80]!r}")
        if any(canary in environment for canary in self.canaries):
            self.num_holders += 1
            if self.sign is not None:
                self.sign.touch()
            if b"DRAFTYARD_RUN_ID=" not in environment or b"remote.supervise" in line:
                self.seen.add(f"environment of: {line[:80]!r}")


@contextlib.contextmanager
def _watching(*canaries: str, address: str) -> Iterator[Watch]:
    watch = Watch(tuple(canary.encode() for canary in canaries), address.encode())
    thread = threading.Thread(target=watch.look)
    thread.start()
    try:
        yield watch
    finally:
        watch.is_over.set()
        thread.join()


@contextlib.contextmanager
def _host(way: str, folder: Path, env_file: Path) -> Iterator[tuple[str, Path]]:
    """An entry for hosts.yaml and where its work folder is seen from here."""
    work_dir = "/var/tmp/draftyard-canary" if way == "pct" else str(folder / "there")
    # The container has a /root of its own: an interpreter that lies there is not inside.
    python = "/usr/bin/python3" if way == "pct" else sys.executable
    more = {"work_dir": work_dir, "python": python, "env_file": str(env_file)}
    with contextlib.ExitStack() as stack:
        if way == "local":
            del more["python"]
            yield json.dumps({"hosts": {"local": more}}), Path(work_dir)
            return
        if way == "ssh":
            server = stack.enter_context(sshd.running(folder / "sshd", alias="box"))
            yield server.hosts_yaml(**more), Path(work_dir)
            return
        inside = stack.enter_context(container.running(folder / "ct"))
        server = stack.enter_context(sshd.running(folder / "sshd", alias="box", path=f"{inside.bin}:/usr/bin:/bin"))
        yield server.hosts_yaml(hop=f"pct:{inside.number}", **more), Path(f"/proc/{inside.init_pid}/root{work_dir}")


@pytest.mark.parametrize(
    "way",
    ["local", "ssh", pytest.param("pct", marks=pytest.mark.skipif(bool(NO_CONTAINER), reason=str(NO_CONTAINER)))],
)
def test_a_canary_is_found_nowhere_but_in_its_file_and_in_the_job(
    yard: Yard, tmp_path: Path, way: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary, address = ("".join(secrets.choice(string.ascii_letters) for _ in range(37)) for _ in range(2))
    monkeypatch.setenv("DRAFTYARD_WEBHOOK", f"{receiver.url}/{address}")
    env_file = tmp_path / "secret.env"
    env_file.write_text(f"HUB={canary}\nDB_PW={PASSWORD}\n")
    (yard.root / "recipes" / "job" / "train.py").write_text(CRASH)
    name, said = "local" if way == "local" else "box", ""

    with _host(way, tmp_path, env_file) as (entry, there), _watching(canary, PASSWORD, address=address) as watch:
        (yard.root / "hosts.yaml").write_text(entry)
        watch.sign = there / "seen"
        code = yard.run("launch", "tiny", "--host", name, "--force", "the canary needs no rung", "--follow")
        said += yard.out + yard.err
        assert code == 10, said
        for words in (
            ("show", "@last"),
            ("show", "@last", "--json"),
            ("logs", "@last"),
            ("logs", "@last", "--raw"),
            ("events", "@last", "--json"),
            ("ls", "--json"),
            ("metrics", "@last", "--json"),
            ("export", "@last", "--metrics", "csv"),
            ("export", "@last", "--metrics", "jsonl", "--to", "values.jsonl"),
            ("plot", "@last", "-o", "loss.svg"),
            ("plan", "tiny", "--json"),
            ("recipe", "show", "tiny"),
            ("hosts", "--json"),
            ("doctor", name, "--json"),
            ("launch", "tiny", "--host", name, "--dry-run", "-v"),
        ):
            yard.run(*words)
            said += yard.out + yard.err
        said += _screen(yard)
        posted = json.dumps(_posted(receiver), ensure_ascii=False)
        time.sleep(0.5)  # the supervisor's last breath
        kept = {path: content for root in (yard.root, there) for path, content in _files(root)}

    assert watch.num_holders > 0
    assert watch.seen == set()
    assert [spelled for spelled in spellings([canary, PASSWORD]) if spelled in said + posted] == []
    assert "RuntimeError: 401 for " in posted, posted
    assert address not in said + posted
    assert [path for path, content in kept.items() if address.encode() in content] == []
    assert "401 for " in said  # the crash report is there, without the secrets
    assert "working as *****" in said
    # What a job prints lies as it is in its log, on its host and here; stars are put over it where it is read.
    kept = {path: content for path, content in kept.items() if path.name not in ("stdout.log", "stderr.log")}
    found = {
        path
        for path, content in kept.items()
        for spelled in spellings([canary, PASSWORD])
        if spelled.encode() in content
    }
    assert found == {env_file} & kept.keys()
    assert any(path.name == "runs.db" for path in kept)
    assert any(path.name.startswith("events.") for path in kept)


def _posted(receiver: Receiver) -> list[dict[str, Any]]:
    """All bodies, once that of the run's end has come."""
    deadline = time.monotonic() + 120
    while not any(body["state"] == "failed" for body in list(receiver.bodies)):
        assert time.monotonic() < deadline, receiver.bodies
        time.sleep(0.05)
    return receiver.bodies


def _files(root: Path) -> Iterator[tuple[Path, bytes]]:
    """What lies there; some of it may be on its way out, as the log of a database that is closed."""
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.read_bytes()


def _screen(yard: Yard) -> str:
    """What the log screen shows of the newest run."""
    with contextlib.closing(Room(yard.root / "runs.db", find_places(yard.root, {}, db=yard.root / "runs.db"))) as room:
        run = room.reader.runs(kind=None)[0]
        pages = [read_log(room.reader, run, LogAsk(stream=stream)) for stream in ("stdout", "stderr")]
    return "\n".join(line.text for page in pages for line in page.lines)


@pytest.mark.parametrize("where", ["recipe", "set", "branch", "settings", "command"])
def test_a_secret_in_a_recipe_is_refused_by_name_and_kept_nowhere(yard: Yard, where: str) -> None:
    canary, recipe = f"hf_{secrets.token_hex(17)}", yard.root / "recipes" / "tiny.yaml"
    before, overrides = recipe.read_text(), ()
    change = {
        "recipe": ("base:\n", f"base:\n  env: {{HF_TOKEN: {canary}}}\n"),
        "branch": ("there is.}", f"there is., env: {{HUB: {canary}}}}}"),
        "settings": ("settings: {num", f"settings: {{password: {canary}, num"),
        "command": ('"train.py"]', f'"train.py", "{canary}"]'),
    }
    if where == "set":
        overrides = ("--set", f"env.HF_TOKEN={canary}")
    else:
        yard.edit("tiny.yaml", before.replace(*change[where], 1))
        assert canary in recipe.read_text()
    verbs = (
        ("launch", "tiny", "--force", "x", *overrides),
        ("plan", "tiny", *overrides),
        ("smoke", "tiny", *overrides),
    )

    for words in (*verbs, ("recipe", "show", "tiny", *overrides), ("deploy", "tiny", *overrides, "--json")):
        assert yard.run(*words) == 2, words
        said = yard.out + yard.err
        assert "holds a secret" in said, words
        assert "--env KEY" in said
        assert canary not in said

    recipe.write_text(before)
    assert yard.json("ls")["runs"] == []
    assert [path for path in yard.root.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()] == []
