"""Python that has loaded already what a program of ours needs: loading takes seconds of every process.

    [*python("remote.drafter"), "-m", "remote.drafter", ...]      what a test starts instead of [sys.executable, "-m", ...]
    environment("orchestrator")      in which a follower is as warm, whoever starts it: warm_path

The command is a small client. It hands its words, folder, environment and files to a server, which forks a process for them;
signals go there, the status comes back, and the end of the client is the job's. So each job is a process of its own, as
it is without this, but for its memory: a test that measures that, or a group of processes, starts Python itself.
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
import signal
import socket
import subprocess
import sys
import threading
import time
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
    """The command; its server starts with the first call and ends with this process, whose pipe it reads."""
    if not hasattr(os, "pidfd_open"):  # elsewhere than on Linux each job loads all by itself
        return [sys.executable]
    name = f"draftyard-warm-{os.getpid()}-{time.monotonic_ns()}"  # of no file
    command = [sys.executable, __file__]
    # Its line is that of what it forks, and a follower is known by its own: whether a lease's holder may be ended.
    server = subprocess.Popen(
        [*command, "serve", name, program, FOLLOWER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=TREE
    )
    atexit.register(end, server)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server of warm processes did not start"
    return [command[0], "-I", "-S", command[1], name]


def environment(program: str) -> dict[str, str]:
    """To be added to the environment; nothing where `python` has no server."""
    *_, name = python(program)
    path = [str(PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {} if name == sys.executable else {"WARM_SERVER": name, "PYTHONPATH": os.pathsep.join(path)}


def end(server: subprocess.Popen[bytes]) -> None:
    server.communicate()


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


def serve(name: str, program: str) -> dict[str, Any]:
    for module in LOADED[program]:
        importlib.import_module(module)
    sys.modules.pop(FOLLOWER, None)  # it is run under another name, with what it has loaded
    gc.freeze()  # a collection in a fork would copy every page of it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        os.write(1, b"ready\n")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who mind a job
        while listener in select.select([listener, 0], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                return mind(connection)
            connection.close()
    os._exit(0)


def mind(connection: socket.socket) -> dict[str, Any]:
    """Forks the job and tells how it ended; a client that is gone takes it along."""
    text, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
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
        run(serve(*sys.argv[2:4])["words"])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
