import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from remote.rundir import RunDir, read_json, write_json, write_whole


def test_attempts_are_ordered_as_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number in (10, 2, 1):
        run.attempt(number).root.mkdir(parents=True)
    (tmp_path / "attempts" / "notes.txt").touch()

    assert [attempt.number for attempt in run.attempts()] == [1, 2, 10]


def test_only_whole_checkpoints_are_listed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.checkpoint(200).mkdir(parents=True)
    run.checkpoint(30).mkdir(parents=True)
    (run.checkpoints / ".step-00000300.123.tmp").mkdir()

    assert [path.name for path in run.whole_checkpoints()] == ["step-00000030", "step-00000200"]


def test_a_secret_file_is_never_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "env"

    write_whole(path, b"TOKEN=x", mode=0o600)

    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_absent_and_half_written_json_read_as_none(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"exit_code": ')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    os.mkfifo(tmp_path / "pipe.json")

    names = ("absent.json", "half.json", "list.json", "latin.json", "pipe.json")
    assert [read_json(tmp_path / name) for name in names] == [None] * 5


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"n": 0, "pad": "x" * 200_000})
    code = (
        "import sys, pathlib; from remote.rundir import write_json\n"
        f"p = pathlib.Path({str(path)!r}); n = 0\n"
        "print('go', flush=True)\n"
        "while True: n += 1; write_json(p, {'n': n, 'pad': 'x' * 200_000})"
    )

    for round_number in range(5):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.01 * round_number)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()

        body = read_json(path)
        assert body is not None
        assert len(body["pad"]) == 200_000


def test_a_file_larger_than_any_of_ours_is_no_whole_one_and_costs_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "job.json").open("wb") as stream:
        stream.write(b'{"a": 1}')
        stream.truncate(2**40)

    assert read_json(tmp_path / "job.json") is None
