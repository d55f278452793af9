"""Two folders, each with a hosts.yaml of its own, and one database: every run is reached as it was launched."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.actions.lots import refuse_namesakes, way
from orchestrator.actions.order import Order, Settled
from orchestrator.errors import UsageError
from orchestrator.follow.lease import is_followed
from orchestrator.host import LOCAL, Hop, Hosts, hosts_of
from orchestrator.known import Known
from orchestrator.store.rows import Document, State
from orchestrator.store.writes import Store
from tests import sshd
from tests.orchestrator.runs import RUN, new_run, started
from tests.orchestrator.yard import Yard
from tests.remote.specs import tiny_spec

PATIENCE_S = 60.0


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    ours, theirs = tmp_path / "ours" / "hosts.yaml", tmp_path / "theirs" / "hosts.yaml"
    for file in (ours, theirs):
        file.parent.mkdir()
    ours.write_text("hosts: {gpu: {address: 10.0.0.1, user: me}, mine: {address: 10.0.0.7, user: me}}")
    theirs.write_text("hosts: {gpu: {address: 10.0.0.2, user: me}}")
    return ours, theirs


def test_a_host_is_looked_up_where_its_run_was_launched_and_here_once_that_is_gone(folders: tuple[Path, Path]) -> None:
    ours, theirs = folders

    assert hosts_of(["gpu"], kept=ours, here=theirs).file == ours
    assert hosts_of(["gpu", "local"], kept=ours, here=theirs).file == ours
    assert hosts_of(["gpu"], kept=None, here=theirs).file == theirs  # of an older draftyard
    ours.write_text("hosts: {other: }")
    assert hosts_of(["gpu"], kept=ours, here=theirs).file == theirs  # no longer known there
    shutil.rmtree(ours.parent)
    assert hosts_of(["gpu"], kept=ours, here=theirs).file == theirs


@pytest.mark.parametrize("why", ["closed", "cannot be named"])
def test_a_folder_that_this_user_may_not_look_into_is_as_good_as_gone(folders: tuple[Path, Path], why: str) -> None:
    """Launched under /root and resumed by another user, or on a disk that answers no more."""
    ours, theirs = folders
    if why == "cannot be named":
        ours = ours.parent / ("a" * 300) / "hosts.yaml"
    elif os.geteuid() == 0:
        pytest.skip("every folder is open to root")
    else:
        ours.parent.chmod(0)

    assert hosts_of(["gpu"], kept=ours, here=theirs).file == theirs
    (theirs.parent.parent / "ours").chmod(0o700)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "is_refused"),
    [
        ("{address: 10.0.0.1, user: me, jump: me@site-a}", True),  # a private address of another site
        ("{address: 10.0.0.2, user: me}", True),
        ("{address: 10.0.0.1, user: me, port: 2222}", True),
        ("{address: 10.0.0.1, user: me, hop: pct:200}", True),
        ("{address: 10.0.0.1, user: me, port: 22, gpus: [1]}", False),  # the same machine, spelled otherwise
        ("{address: 10.0.0.1, user: me}", False),
    ],
)
def test_another_machine_of_the_name_of_a_live_runs_host_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, entry: str, is_refused: bool
) -> None:
    """GPUs that are promised and hosts that are silent are known by their name."""
    ours, here = folders
    here.write_text(f"hosts: {{gpu: {entry}}}")
    with Store(tmp_path / "runs.db") as store:
        started(store, host="gpu", documents={Document.SPEC: "{}", Document.HOSTS_FILE: str(ours)})
        unasked = cast("Any", None)
        host = Hosts.load(here).find("gpu")
        settled = Settled(Order("tiny", host="gpu"), tiny_spec(), host, tree=unasked, git=unasked, env={})

        if is_refused:
            with pytest.raises(UsageError, match=r"me@10\.0\.0\.1:22 by .*ours/hosts\.yaml.*\n.*another name") as told:
                refuse_namesakes(store.reader, settled, here=here)
            assert RUN in str(told.value)
        refuse_namesakes(store.reader, replace(settled, host=replace(host, name="else")), here=here)
        if not is_refused:
            refuse_namesakes(store.reader, settled, here=here)


def test_namesakes_are_looked_up_once_for_a_folder_however_many_of_its_runs_live(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, here = folders
    here.write_text("hosts: {gpu: {address: 10.0.0.1, user: me, port: 22}}")
    asked, ssh = tmp_path / "asked", tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\necho >> '{asked}'\nexec {shutil.which('ssh')} \"$@\"\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    with Store(tmp_path / "runs.db") as store:
        for number in range(5):
            documents = {Document.SPEC: "{}", Document.HOSTS_FILE: str(ours)}
            started(store, f"run-{number}", host="gpu", documents=documents)
        unasked = cast("Any", None)
        host = Hosts.load(here).find("gpu")
        settled = Settled(Order("tiny", host="gpu"), tiny_spec(), host, tree=unasked, git=unasked, env={})

        refuse_namesakes(store.reader, settled, here=here)

    assert len(asked.read_text()) == 2  # for theirs and for ours


def test_a_way_names_every_door_on_it(tmp_path: Path) -> None:
    """The same private address behind another door is another machine."""
    config = tmp_path / "config"
    config.write_text(
        "Host *\n  User me\nHost door\nHost one two\n  HostName 10.0.0.5\nHost one\n  ProxyCommand nc -x one %h %p\n"
        "Host two\n  ProxyJump door,root@inner:2222\n"
    )
    hosts = Hosts.load(None, config)

    assert way(hosts.find("one")) == "me@10.0.0.5:22 by way of `nc -x one 10.0.0.5 22`"
    assert way(hosts.find("two")) == "me@10.0.0.5:22 by way of root@inner:2222 by way of me@door:22"
    inside = replace(hosts.find("door"), hops=(Hop("ssh", "inner"), Hop("pct", "200")))
    assert way(inside) == "pct:200 in ssh:inner in me@door:22"
    assert way(replace(LOCAL, hops=(Hop("docker", "box"),))) == "docker:box in local"


def test_what_a_run_was_given_in_secret_is_looked_up_where_it_was_launched(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    ours, here = folders
    for file, secret in ((ours, "of-our-gpu"), (here, "of-another-gpu")):
        (file.parent / "secret.env").write_text(f"TOKEN={secret}\n")
        file.write_text(f"hosts: {{gpu: {{env_file: {file.parent}/secret.env}}}}")
    with Store(tmp_path / "runs.db") as store:
        started(store, host="gpu", documents={Document.SPEC: "{}", Document.HOSTS_FILE: str(ours)})

        assert Known(here).of(store.reader, RUN) == {"of-our-gpu"}


def test_the_live_runs_of_a_host_say_where_it_is_found_and_only_without_one_the_newest(tmp_path: Path) -> None:
    """A run that goes on may be older than one that has ended: what is live there is what one goes there for."""
    with Store(tmp_path / "runs.db") as store:
        for number, file in enumerate(("/a/hosts.yaml", "/b/hosts.yaml")):
            text = {Document.SPEC: "{}", Document.HOSTS_FILE: file}
            store.create_run(new_run(f"run-{number}", host="first", more_hosts=("second",), documents=text))
        store.create_run(new_run("run-2", host="third"))

        def found(*names: str) -> list[Path | None]:
            return [store.reader.hosts_file_at(name) for name in names]

        assert found("first", "second", "third", "fourth") == [Path("/b/hosts.yaml"), Path("/b/hosts.yaml"), None, None]
        store.set_state("run-1", State.SUCCEEDED, evidence="done")
        assert found("first", "second") == [Path("/a/hosts.yaml"), Path("/a/hosts.yaml")]
        store.set_state("run-0", State.FAILED, evidence="x")
        assert found("first", "second") == [Path("/b/hosts.yaml"), Path("/b/hosts.yaml")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[sshd.Server]:
    with sshd.running(tmp_path / "sshd") as server:
        yield server


@pytest.mark.slow
def test_a_follower_of_one_folder_follows_what_another_one_launches(
    server: sshd.Server, yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "another project"
    shutil.copytree(yard.root, other)
    monkeypatch.setenv("DRAFTYARD_DB", str(yard.root / "runs.db"))
    for name, folder in (("alpha", yard.root), ("beta", other)):
        more = {"work_dir": json.dumps(str(tmp_path / name)), "python": sys.executable}
        (folder / "hosts.yaml").write_text(server.hosts_yaml(**more).replace("box:", f"{name}:"))
    assert yard.run("launch", "tiny", "-b", "slow", "--host", "alpha", "--force", "x", "--id", "first") == 0, yard.err
    ends_s = time.monotonic() + PATIENCE_S
    while not is_followed(yard.root / "runs.db"):
        assert time.monotonic() < ends_s
        time.sleep(0.02)
    monkeypatch.chdir(other)

    assert yard.run("launch", "tiny", "--host", "beta", "--force", "x", "--id", "second") == 0, yard.err
    assert yard.run("wait", "second", "--timeout", "90s") == 0, yard.err

    assert yard.json("show", "first")["run"]["state"] in ("setting_up", "running")  # so it was that one's follower
    assert yard.run("stop", "first", "--now", "--timeout", "90s") == 0, yard.err  # nor is alpha known here
    monkeypatch.chdir(yard.root)
    assert yard.run("resume", "second") == 1  # nothing of it is left to do, which is not "no host"
    assert yard.run("pull", "second", "--to", str(tmp_path / "pulled")) == 0, yard.err
