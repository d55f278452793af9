"""What `make` does before there is an environment to do it in. Stand-ins are found first, so that nothing is installed."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_PIP = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p "$3/bin" && touch "$3/bin/python"
exit 1
"""  # as Debian's python3 without python3-venv: new enough, and a venv that is left half made
KILLED = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p "$3/bin" "$3/lib" && printf '#!/bin/sh\\n' >"$3/bin/python" && chmod +x "$3/bin/python"
kill -9 $PPID
"""  # what runs make's command is killed while the venv is made; its pip would answer all the same
OLD = """#!/bin/sh
[ "$1" = -c ] && exit 1
echo Python 3.9.2
"""
PIP = """#!/bin/sh
echo "$@" >>{calls}
"""  # an interpreter that does what it is told


def make(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of a make above
    environment |= {} if path is None else {"PATH": path}
    command = [shutil.which("make") or "make", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def stand_in(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_venv_that_could_not_be_made_passes_for_none_the_next_time(tmp_path: Path) -> None:
    python, venv = stand_in(tmp_path / "python3", WITHOUT_PIP), tmp_path / "venv"

    told = [make(f"PYTHON={python}", f"VENV={venv}", f"{venv}/pip.ready") for _ in range(2)]

    assert [done.returncode for done in told] == [2, 2]
    assert [done.stdout for done in told] == ["no venv module: install it (Debian: apt-get install python3-venv)\n"] * 2


def test_a_venv_whose_making_was_killed_is_not_taken_for_made(tmp_path: Path) -> None:
    python, venv = stand_in(tmp_path / "python3", KILLED), tmp_path / "venv"
    words = (f"PYTHON={python}", f"VENV={venv}", f"{venv}/pip.ready")

    assert make(*words).returncode == 2
    stand_in(python, WITHOUT_PIP)

    assert make(*words).stdout.startswith("no venv module"), "it is made again, whatever its pip says"
    assert not (venv / "pip.ready").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_venv_whose_making_was_killed_is_made_whole_the_next_time(tmp_path: Path, is_begun: bool) -> None:
    """With no pip in it, or with half of one, which would pass for installed."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", *([] if is_begun else ["--without-pip"]), str(venv)], check=True)
    if is_begun:
        (venv / "making").touch()
        (package,) = venv.glob("lib/python*/site-packages/pip")
        shutil.rmtree(package / "_vendor" / "rich")

    done = make(f"PYTHON={sys.executable}", f"VENV={venv}", f"{venv}/pip.ready")

    assert done.returncode == 0, done.stderr
    asked = [venv / "bin" / "python", "-m", "pip", "install", "--dry-run", "pip"]  # there already: no index is asked
    assert subprocess.run([*asked, "--no-index"], check=False).returncode == 0
    assert list(venv.glob("lib/python*/site-packages/pip/_vendor/rich"))
    assert not (venv / "making").exists()


@pytest.mark.parametrize("is_there", [True, False], ids=["a link that leads nowhere", "no python"])
def test_a_venv_whose_python_is_gone_is_made_again(tmp_path: Path, is_there: bool) -> None:
    """The system's python was upgraded, or the folder moved: every target after it would end in "No such file"."""
    python, venv = stand_in(tmp_path / "python3", WITHOUT_PIP), tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for mark in ("pip.ready", "demo.ready", "test.ready"):
        (venv / mark).touch()
    if is_there:
        (venv / "bin" / "python").symlink_to(tmp_path / "python3.10")

    for target in ("setup-demo", "setup-test"):
        told = make(f"PYTHON={python}", f"VENV={venv}", "SYSTEM_TOOLS=sh", target)

        assert (told.returncode, told.stdout) == (
            2,
            "no venv module: install it (Debian: apt-get install python3-venv)\n",
        )


@pytest.mark.slow
def test_links_that_lead_nowhere_are_made_anew(tmp_path: Path) -> None:
    """The venv module keeps a link that it finds, wherever that leads."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (venv / "pip.ready").touch()
    for link in (venv / "bin").glob("python*"):
        link.unlink()
        link.symlink_to(tmp_path / "gone")

    done = make(f"PYTHON={sys.executable}", f"VENV={venv}", f"{venv}/pip.ready")

    assert done.returncode == 0, done.stderr
    assert subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"], check=False).returncode == 0


def test_a_venv_that_is_whole_is_left_alone(tmp_path: Path) -> None:
    venv, calls = tmp_path / "venv", tmp_path / "calls"
    stand_in(venv / "bin" / "python", PIP.format(calls=calls))
    for mark in ("pip.ready", "demo.ready"):
        (venv / mark).touch()

    done = make(f"PYTHON={tmp_path / 'none'}", f"VENV={venv}", "setup-demo")

    assert done.returncode == 0, done.stderr
    assert not calls.exists()


def test_an_old_python_is_named_with_what_to_type(tmp_path: Path) -> None:
    python = stand_in(tmp_path / "python3", OLD)

    done = make(f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", "setup-demo")

    wanted = f"draftyard needs Python 3.11 or newer; {python} is Python 3.9.2."
    assert (done.returncode, done.stdout) == (2, f"{wanted} Name another: make PYTHON=python3.12 setup-demo\n")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with what the recipe of `system-packages` calls, and a sudo that needs no password."""
    stand_in(tmp_path / "bin" / "sudo", '#!/bin/sh\nexec "$@"\n')
    for name in ("env", "id", "sh"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    return tmp_path / "bin"


@pytest.mark.parametrize("apt", [None, "exit 100"], ids=["no apt-get", "an apt-get that fails"])
def test_what_cannot_be_installed_is_named_with_what_to_do(tools: Path, apt: str | None) -> None:
    if apt is not None:
        stand_in(tools / "apt-get", f"#!/bin/sh\n{apt}\n")

    done = make("SYSTEM_TOOLS=a-tool-that-nobody-has", "system-packages", path=str(tools))

    assert done.returncode == 2
    told = " ".join(done.stdout.split())
    assert "the tests need sshd, rsync, ip, busybox and tmux" in told
    assert "(Debian: apt-get install openssh-server rsync iproute2 busybox tmux) and run make again." in told


def test_system_packages_are_installed_where_a_tool_is_missing_and_only_there(tools: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    stand_in(tools / "apt-get", PIP.format(calls=calls))

    assert make("SYSTEM_TOOLS=sh", "system-packages", path=str(tools)).returncode == 0
    assert not calls.exists()

    assert make("SYSTEM_TOOLS=sh a-tool-that-nobody-has", "system-packages", path=str(tools)).returncode == 0
    updated, installed = calls.read_text().splitlines()
    assert updated == "update -qq"
    assert installed == "install -qq -y openssh-server rsync iproute2 busybox tmux"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_setup_shows_how_far_it_is_on_a_terminal_and_says_only_its_steps_elsewhere(
    tmp_path: Path, is_terminal: bool
) -> None:
    """Gigabytes come in minutes: without a bar that looks like a machine that hangs."""
    venv, calls = tmp_path / "venv", tmp_path / "calls"
    stand_in(venv / "bin" / "python", PIP.format(calls=calls))
    words = (f"VENV={venv}", "setup-demo")

    told = on_a_terminal(*words) if is_terminal else make(*words).stdout

    assert (venv / "demo.ready").exists(), told
    steps = [line for line in told.splitlines() if line.startswith("setting up ")]
    assert [re.search(r"\d of \d|compiling", step)[0] for step in steps] == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]  # type: ignore[index]
    assert "compil" in steps[-1]
    installs = [line for line in calls.read_text().splitlines() if " pip install " in line]
    assert len(installs) == 3
    assert all(("--progress-bar=on" in line) is is_terminal for line in installs)
    assert all(("--quiet" in line) is not is_terminal for line in installs)
    assert all("--constraint constraints.txt" in line for line in installs)


@pytest.mark.parametrize(("tests", "types"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_types_are_read_beside_the_tests_and_either_of_them_can_fail(tmp_path: Path, tests: int, types: int) -> None:
    """What the types came to stands at the end, and tests that take both cores begin only when all before has passed."""
    venv, calls = tmp_path / "venv", tmp_path / "calls"
    stand_in(venv / "bin" / "ruff", "#!/bin/sh\n")
    meet = "touch {0}/$1; n=0; while [ ! -e {0}/$2 ]; do n=$((n+1)); [ $n -lt 300 ] || exit 9; sleep 0.1; done\n"
    stand_in(tmp_path / "meet", f"#!/bin/sh\n{meet.format(tmp_path)}")  # each waits until the other has begun
    met = f"{tmp_path / 'meet'} {{}} {{}} || exit 9\n"
    stand_in(
        venv / "bin" / "mypy", f"#!/bin/sh\n{met.format('types', 'tests')}echo types came to {types}\nexit {types}\n"
    )
    beside = f'*"not alone"*) {met.format("tests", "types")} exit {tests};;'
    stand_in(venv / "bin" / "python", f'#!/bin/sh\necho "$@" >>{calls}; case "$*" in {beside} esac\n')
    for mark in ("pip.ready", "demo.ready", "test.ready"):
        (venv / mark).touch()

    done = make(f"VENV={venv}", "SYSTEM_TOOLS=sh", "test")

    runs = calls.read_text().splitlines()
    assert done.returncode == (2 if tests or types else 0), done.stderr
    assert done.stdout.count(f"types came to {types}\n") == (1 if types else 2)
    assert [" alone and not gpu" in run for run in runs] == ([False] if tests or types else [False, True])
    assert "-n 6 --dist loadgroup -m not gpu and not alone" in runs[0]


@pytest.mark.slow
def test_what_tests_start_under_nohup_or_behind_an_ampersand_hears_its_signals_all_the_same() -> None:
    """Both come ignored there, and a program that inherits that would go on for minutes after a test's Ctrl-C."""
    child = (
        "import signal; print(signal.getsignal(2) is signal.default_int_handler, signal.getsignal(1) is signal.SIG_DFL)"
    )
    code = "import os, signal, subprocess, sys\n"
    code += "for number in (signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
    code += (
        f"import tests.conftest\nos.kill(os.getpid(), signal.SIGHUP)\nsubprocess.run([sys.executable, '-c', {child!r}])"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


STOPS_AT = """#!/usr/bin/env python3
import os, signal, sys, time
if sys.argv[1] != {verb!r}:
    sys.exit(0)
try:
    print("under way", os.getpid(), flush=True)
    time.sleep({waits_s})
    sys.exit({ends})
except KeyboardInterrupt:
    print("the run goes on", flush=True)
    sys.exit(130)
"""  # as draftyard ends: by itself, or by a Ctrl-C that it has answered


def _interrupted_demo(tmp_path: Path, verb: str, interrupt: Callable[[int, int], None]) -> tuple[int, str, str]:
    """Status, stdout and stderr of a demo; `interrupt` is given its process group and the process of the verb."""
    venv = tmp_path / "venv"
    _demo_ready(venv, STOPS_AT.format(verb=verb, waits_s=60, ends=0))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    with subprocess.Popen(
        ["make", f"VENV={venv}", "demo"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        said, _, process = demo.stdout.readline().rpartition(" ")
        assert said == "under way"
        interrupt(demo.pid, int(process))
        out, err = demo.communicate(timeout=60)
    return demo.returncode, out, err


@pytest.mark.parametrize("verb", ["deploy", "smoke", "launch"])
def test_ctrl_c_of_the_demo_leaves_no_line_that_reads_as_an_error(tmp_path: Path, verb: str) -> None:
    # A key goes to make, its shell and the program.
    ended = _interrupted_demo(tmp_path, verb, lambda group, _: os.killpg(group, signal.SIGINT))

    assert ended == (-signal.SIGINT, "the run goes on\n", "")


@pytest.mark.parametrize("verb", ["deploy", "smoke", "launch"])
def test_a_demo_whose_program_alone_is_interrupted_is_no_success(tmp_path: Path, verb: str) -> None:
    status, out, err = _interrupted_demo(tmp_path, verb, lambda _, process: os.kill(process, signal.SIGINT))

    assert (status, out) == (2, "the run goes on\n")
    assert "Error 130" in err


@pytest.mark.parametrize("verb", ["deploy", "smoke", "launch"])
def test_a_demo_that_fails_is_a_failure(tmp_path: Path, verb: str) -> None:
    venv = tmp_path / "venv"
    _demo_ready(venv, STOPS_AT.format(verb=verb, waits_s=0, ends=10))

    done = make(f"VENV={venv}", "demo")

    assert done.returncode == 2
    assert "Error 10" in done.stderr


def _demo_ready(venv: Path, draftyard: str) -> None:
    """A venv that is set up, with this in place of the program."""
    stand_in(venv / "bin" / "draftyard", draftyard)
    stand_in(venv / "bin" / "python", "#!/bin/sh\n")
    for mark in ("pip.ready", "demo.ready"):
        (venv / mark).touch()


def on_a_terminal(*words: str) -> str:
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(["make", *words], cwd=ROOT, env=environment, stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)
    told = os.read(ours, 65536).decode()
    os.close(ours)
    return told
