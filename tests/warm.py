"""Python that has loaded already what a program of ours needs: loading takes seconds of every process.

    [*python("remote.drafter"), "-m", "remote.drafter", ...]      what a test starts instead of [sys.executable, "-m", ...]
    environment("orchestrator")      in which a follower is as warm, whoever starts it: warm_path
    executable("remote.drafter", folder)      a file for what asks for a path: `sys.executable`, WARM_PYTHON

The command is a small client. It hands its words, folder, environment and files to a server, which forks a process for them;
signals go there, the status comes back, and the end of the client is the job's. So each job is a process of its own, as
it is without this, but for its memory: a test that measures that, or a group of processes, starts Python itself. In a job
whose environment has WARM_PYTHON that file is `sys.executable`, so what it starts by `-m` is warm too. All
that run tests beside one another share one server of a program: what it loads is eight seconds of a processor.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[1]
PATH = TREE / "tests" / "warm_path"  # first on PYTHONPATH
TRAINER = ("remote.drafter.ladder", "remote.drafter.jobs", "torch.distributed.elastic.agent.server.local_elastic_agent")
TRAINER += ("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.distributed.launcher.api")
TRAINER += ("transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.tokenization_auto")
FOLLOWER = "orchestrator.follow.follower"
OWN = (
    "orchestrator.verbs.jobs",
    "orchestrator.verbs.life",
    "orchestrator.actions.jobs",
    "orchestrator.shell.ssh",
    FOLLOWER,
)
LOADED = {"remote.drafter": TRAINER, "orchestrator": OWN}
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@functools.cache
def python(program: str) -> list[str]:
    """The command; the first to ask starts the server, which ends with the process that runs all the tests."""
    if not hasattr(os, "pidfd_open"):  # elsewhere than on Linux each job loads all by itself
        return [sys.executable]
    whole = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    name = f"draftyard-warm-{whole}-{zlib.crc32(sys.prefix.encode())}-{program}"  # of no file
    with socket.socket(socket.AF_UNIX) as turn:
        while not _has(turn.bind, f"\0{name}-turn"):  # another one starts it
            time.sleep(0.05)
        with socket.socket(socket.AF_UNIX) as knock:
            if not _has(knock.connect, f"\0{name}"):
                _start(name, program, whole)
    return [sys.executable, "-I", "-S", __file__, name]


def executable(program: str, folder: Path) -> str:
    """A file in the folder that stands for Python: modules run warm, all else as ever."""
    path = folder / "warm-python"
    loaded = shlex.join(python(program))
    cases = f'"-m "*) exec {loaded} "$@";; "-u -m") shift; exec {loaded} "$@";;'
    path.write_text(
        f'#!/bin/sh\ncase "$1 $2" in {cases} esac\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8"
    )
    path.chmod(0o755)
    return str(path)


def _has(act: Callable[[str], None], address: str) -> bool:
    """Whether it could be done: the address is free, or its server is there."""
    try:
        act(address)
    except OSError:
        return False
    return True


def _start(name: str, program: str, whole: int) -> None:
    # Its line is that of what it forks, and a follower is known by its own: whether a lease's holder may be ended.
    words = [sys.executable, __file__, "serve", name, program, str(whole), FOLLOWER]
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=TREE)
    assert server.stdout is not None
    with server.stdout as said:
        assert said.readline() == b"ready\n", "the server of warm processes did not start"
    server.returncode = 0  # nobody waits for it: it outlives whoever started it


def environment(program: str) -> dict[str, str]:
    """To be added to the environment; nothing where `python` has no server."""
    *_, name = python(program)
    path = [str(PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {} if name == sys.executable else {"WARM_SERVER": name, "PYTHONPATH": os.pathsep.join(path)}


# ---- The client


def ask(name: str, words: list[str]) -> int:
    """Runs them there; the status they end with, or this process ends by the same signal."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        asked = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}
        text = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(connection, [text], [0, 1, 2])
        connection.sendall(text[sent:])
        answers = connection.makefile("r")
        job = int(answers.readline())
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(job, number))  # reaped only after its status is told
        status = int(answers.readline())
    if status >= 0:
        return status
    if -status in PASSED_ON:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    return 1


# ---- The server: returns in a job's process alone, which then is what it was asked for


def serve(name: str, program: str, whole: int) -> dict[str, Any]:
    ended = os.pidfd_open(whole)
    for module in LOADED[program]:
        importlib.import_module(module)
    sys.modules.pop(FOLLOWER, None)  # it is run under another name, with what it has loaded
    gc.freeze()  # a collection in a fork would copy every page of it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        os.write(1, b"ready\n")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who mind a job
        while ended not in select.select([listener, ended], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                os.close(ended)
                return mind(connection)
            connection.close()
    os._exit(0)


def mind(connection: socket.socket) -> dict[str, Any]:
    """Forks the job and tells how it ended; a client that is gone takes it along."""
    text, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:  # somebody looked whether the server is there
            os._exit(0)
        text += more
    job = os.fork()
    if job == 0:
        connection.close()
        return take_over(json.loads(text), files)
    for file in files:
        os.close(file)
    unused = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # a follower stays on when the tests have ended, and holds no output of theirs
        os.dup2(unused, number)
    connection.sendall(b"%d\n" % job)
    ended = os.pidfd_open(job)
    if connection in select.select([ended, connection], [], [])[0]:
        os.kill(job, signal.SIGKILL)
    select.select([ended], [], [])
    seen = os.waitid(os.P_PID, job, os.WEXITED | os.WNOWAIT)
    assert seen is not None
    has_exited = seen.si_code == os.CLD_EXITED
    try:
        connection.sendall(b"%d\n" % (seen.si_status if has_exited else -seen.si_status))
        connection.recv(1)  # until the client has ended, and signals nobody any more
    except OSError:  # it has
        pass
    os._exit(0)


def take_over(asked: dict[str, Any], files: list[int]) -> dict[str, Any]:
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.executable = os.environ.get("WARM_PYTHON", sys.executable)
    # Those of the server know of its files what is not so of these: whether they can be sought in.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    return asked


def run(words: list[str]) -> None:
    """As `python WORDS` does, but that what was loaded is not taken apart at the end, which takes a second."""
    status = 1
    try:
        run_main(words)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001  # Python's own last resort
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_main(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.path[0] = str(TREE)
        run(serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))["words"])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
