"""Why a run failed: a corpus of texts, and how several witnesses are weighed against each other."""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.failures import ours, table
from orchestrator.failure import Failure, Findings, Told, causes, from_log
from orchestrator.failure.last_words import last_words
from orchestrator.failure.oom_text import numbers, size_bytes
from tests.orchestrator.failure_corpus import CORPUS, FATAL_XIDS, LOOK_ALIKES, OTHER_XIDS, Case, gib, xid_line
from tests.orchestrator.failure_handled import HANDLED
from tests.orchestrator.failure_languages import LANGUAGES, labelled
from tests.orchestrator.failure_quotes import FRAME, HEADER, OTHER_MEMORY, QUOTATIONS
from tests.orchestrator.failure_terminals import TERMINALS
from tests.orchestrator.failure_wrappers import WRAPPED_QUOTATIONS

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"
OOM_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 94.97 GiB of which 1.00 GiB is free."
    " Including non-PyTorch memory, this process has 93.90 GiB memory in use."
)


def told(kind: str, message: str, *, writer: str = "rank0", at_s: float = 1.0, **more: Any) -> Told:
    fields = {"failure": kind, "message": f"{kind}: {message}", "traceback": "", "facts": {}, **more}
    return Told(writer, at_s, fields)


def found_in(case: Case) -> list[Failure]:
    return causes(Findings(told=[told(case.raised, case.text)])) if case.raised else from_log(case.text, "stderr")


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.name)
def test_every_text_of_the_corpus_is_told_for_what_it_is(case: Case) -> None:
    found = found_in(case)

    if case.kind is None:
        assert found == []
        return
    first = next((item for item in found if not item.is_echo), found[0])
    assert (first.kind, first.is_certain, first.is_echo) == (case.kind, case.is_certain, case.is_echo), found
    assert {name: first.facts.get(name) for name in case.facts} == case.facts
    assert "\n" not in first.message
    if case.kind != "exception":
        assert first.hint


@pytest.mark.parametrize("case", [case for case in (*LANGUAGES, *TERMINALS) if case.raised], ids=lambda case: case.name)
def test_what_an_exception_means_is_the_same_in_a_log(case: Case) -> None:
    """There its class does not stand in front of its message a second time."""
    (found,) = from_log(f"{HEADER}{FRAME}{case.raised}: {case.text}\n", "stderr")

    assert (found.kind, found.is_certain, found.is_echo) == (case.kind, case.is_certain, case.is_echo)


def test_the_corpus_is_large_and_no_look_alike_is_called_gpu_oom() -> None:
    assert len(CORPUS) >= 60
    assert len({(case.name, case.text) for case in CORPUS}) == len(CORPUS)
    alike = (
        *LOOK_ALIKES,
        *QUOTATIONS,
        *OTHER_MEMORY,
        *WRAPPED_QUOTATIONS,
        *(case for case in (*HANDLED, *LANGUAGES, *TERMINALS) if case.kind != "gpu_oom"),
    )
    assert [case.name for case in alike for item in found_in(case) if item.kind == "gpu_oom"] == []


def test_the_table_of_classifiers_in_the_docs_counts_todays_texts() -> None:
    """Of the others, which are not installed here, the page keeps what `python -m benchmarks.failures` found once."""
    page = DOCS.read_text(encoding="utf-8")

    for line in table({"draftyard": ours})[2:]:
        assert line in page, "`python -m benchmarks.failures` prints the table anew"
    assert f"of the {len(CORPUS)} in `tests/orchestrator/failure_corpus.py`" in page
    assert "| gpualert 0.1.6 | soup-cli 0.77.0 |" in page


# ------------------------------------------------------------------------------ several witnesses


def test_the_first_cause_wins_over_later_echoes() -> None:
    found = causes(
        Findings(
            told=[
                told(
                    "torch.distributed.DistBackendError",
                    "Watchdog caught collective operation timeout",
                    writer="rank0",
                    at_s=700.0,
                ),
                told("torch.OutOfMemoryError", OOM_TEXT, writer="rank3", at_s=95.0, stage="backward", step=12),
                told("RuntimeError", "Connection reset by peer", writer="rank1", at_s=96.0),
            ]
        )
    )

    assert [(item.source, item.kind, item.is_echo) for item in found] == [
        ("rank3", "gpu_oom", False),
        ("rank1", "exception", True),
        ("rank0", "exception", True),
    ]
    assert (found[0].stage, found[0].step, found[0].reason) == ("backward", 12, "gpu_oom")


def test_a_host_that_lost_its_interface_comes_before_the_other_that_only_heard_no_more_of_it() -> None:
    heard = "rank 1 (target 0, node 1) was not heard for 15 s (process 7): it is frozen, or its machine is out of reach"
    lost = "interface eth1, by which this host reaches the others, is down: the first host's launcher was not heard for 15 s"
    witnesses = [
        told("remote.drafter.watch.RankLost", heard, writer="rank0", at_s=5.0),
        told("remote.drafter.watch.WayLost", lost, writer="rank1", at_s=9.0),
    ]

    assert [item.source for item in causes(Findings(told=witnesses))] == ["rank1", "rank0"]
    assert causes(Findings(told=witnesses[:1]))[0].hint.startswith("it stood still, or its host could not be reached")


@pytest.mark.parametrize(
    ("kind", "text", "requested"),
    [
        ("MemoryError", "", None),
        (
            "RuntimeError",
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.",
            4096,
        ),
    ],
)
def test_memory_refused_by_a_limit_is_told_with_peak_and_limit_as_numbers(
    kind: str, text: str, requested: int | None
) -> None:
    """Of a script that reports nothing, of one that reports, and of the trainer, which knows its own peak."""
    ending = {"exit_code": 1, "peak_bytes": 300, "memory_limit_bytes": 512}
    raised = f"{kind}: {text}" if text else kind
    stderr = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    grow()\n{raised}\n'

    (silent,) = causes(Findings(stderr=stderr, exit_file=ending))
    (reporting,) = causes(Findings(told=[told(kind, text)], exit_file=ending))
    own = {"peak_bytes": 200, "limit_bytes": None}
    (knowing,) = causes(Findings(told=[told(kind, text, facts=own)], exit_file=ending))

    for failure, peak in ((silent, 300), (reporting, 300), (knowing, 200)):
        assert (failure.kind, failure.facts["peak_bytes"], failure.facts["limit_bytes"]) == ("host_oom", peak, 512)
        assert failure.facts.get("requested_bytes") == requested
        assert "life.memory_limit_bytes" in failure.hint


def test_a_limit_that_was_passed_is_told_with_its_sum() -> None:
    """Recorded: 0.30 GiB were resident under a limit of 0.29, which counts data."""
    text = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 113246208 bytes."
    facts = {"peak_bytes": 326_348_800, "limit_bytes": 314_572_800, "data_bytes": 248_918_016}
    (failure,) = causes(Findings(told=[told("RuntimeError", text, facts=facts)], exit_file={"exit_code": 1}))
    (vague,) = causes(Findings(told=[told("RuntimeError", text, facts=facts | {"data_bytes": "many"})]))

    assert failure.hint.endswith("; it had allocated 0.23 GiB of 0.29 GiB and asked for 0.11 GiB more")
    assert "it had allocated" not in vague.hint


def test_memory_that_ran_out_without_a_limit_names_none() -> None:
    (failure,) = causes(
        Findings(
            told=[told("MemoryError", "", facts={"limit_bytes": None})], exit_file={"exit_code": 1, "peak_bytes": 9}
        )
    )

    assert failure.facts["peak_bytes"] == 9
    assert "limit_bytes" not in failure.facts
    assert "life.memory_limit_bytes" not in failure.hint


def test_a_failure_told_and_printed_is_one_failure() -> None:
    stderr = f'Traceback (most recent call last):\n  File "train.py", line 3, in step\n    loss.backward()\ntorch.OutOfMemoryError: {OOM_TEXT}\n'
    told_too = told("torch.OutOfMemoryError", OOM_TEXT, traceback=stderr)

    found = causes(Findings(told=[told_too], stderr=stderr))

    assert len(found) == 1
    assert found[0].traceback == stderr
    assert found[0].facts["frame"] == {"file": "train.py", "line": 3, "function": "step", "source": "loss.backward()"}


def test_an_exception_that_came_of_handling_another_is_a_consequence() -> None:
    stderr = (
        "Traceback (most recent call last):\n"
        '  File "/app/train.py", line 10, in step\n    loss.backward()\n'
        f"torch.OutOfMemoryError: {OOM_TEXT}\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/app/train.py", line 12, in step\n    report(error.shape)\n'
        "AttributeError: 'OutOfMemoryError' object has no attribute 'shape'\n"
    )

    (found,) = from_log(stderr, "stderr")

    assert found.kind == "gpu_oom"
    assert found.message.startswith("torch.OutOfMemoryError: CUDA out of memory")
    assert found.traceback == stderr.rstrip("\n")


def test_clients_that_went_away_for_days_bring_no_old_error_back() -> None:
    one = 'Traceback (most recent call last):\n  File "serve.py", line 9, in send\n    out.flush()\n'
    gone = "".join(f"{one}BrokenPipeError: client {number} went away\n" for number in range(300))
    dated = "".join(
        f"{one}BrokenPipeError: client {number} went away\n2026-12-01 10:00:00 INFO step {number}\n"
        for number in range(300)
    )

    (found,) = from_log(f"{one}ValueError: bad row\n2026-12-01 10:00:00 INFO step 1\n{dated}", "stderr")
    many = from_log(f"{one}ValueError: bad row\n{gone}", "stderr")

    assert found.message == "BrokenPipeError: client 299 went away"
    assert all(failure.is_echo for failure in many)
    assert len(many) <= 32


GONE = (
    'Traceback (most recent call last):\n  File "/srv/t.py", line 12, in step\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 970.00 MiB. GPU 0 has a total capacity of 94.97 GiB of which"
    " 310.00 MiB is free.\n"
)
LATER = 'Traceback (most recent call last):\n  File "/lib/x.py", line 3, in f\n    g()\nAssertionError: can only test a child process\n'


@pytest.mark.parametrize(
    "words",
    [
        "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\n",
        "Exception ignored in atexit callback: <function close at 0x7f>\n",
        "Exception ignored while finalizing file <_io.FileIO name='x'>:\n",
        "Task exception was never retrieved\nfuture: <Task finished name='Task-1' coro=<f()>>\n",
        "--- Logging error ---\n",
    ],
)
def test_what_python_says_it_ignores_is_never_the_cause_where_there_is_another(words: str) -> None:
    assert [found.kind for found in from_log(f"{GONE}{words}{LATER}", "stderr")] == ["gpu_oom"]
    assert [found.kind for found in from_log(f"{words}{LATER}{GONE}", "stderr")] == ["gpu_oom"]
    assert [found.message for found in from_log(f"{words}{LATER}", "stderr")] == [
        "AssertionError: can only test a child process"
    ]


@pytest.mark.parametrize(
    "bar", ["\r  0%|          | 0/10 [00:00<?, ?it/s]", "\r 40%|####| 4/10 [00:07<00:10,  1.7s/it, loss=2.1]", "\r3it [00:01,  2.9it/s]"]
)  # fmt: skip
def test_a_traceback_right_behind_a_bar_that_was_drawn_by_hand_is_one(bar: str) -> None:
    assert [found.kind for found in from_log(f"start\n{bar}{GONE}", "stderr")] == ["gpu_oom"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\x1b[38:2::255:0:0m", "\x1b[m"), ("\x1b[?25h", ""), ("\x1b]0;training\x07", ""),
        ("\x1b]8;;http://x\x1b\\", "\x1b]8;;\x1b\\"), ("\x1b(B", ""), ("\x9b31m", "\x9b0m"),
    ],
)  # fmt: skip
def test_no_escape_hides_a_traceback_or_stands_in_its_message(before: str, after: str) -> None:
    text = "".join(f"{before}{line}{after}\n" for line in GONE.splitlines())

    (found,) = from_log(text, "stderr")

    assert found.kind == "gpu_oom"
    assert found.message == GONE.splitlines()[-1]


def test_a_message_that_quotes_a_traceback_is_none_for_a_bar_in_it() -> None:
    quoted = f"ValueError: 40%| of [rows] were like this: {GONE}"

    assert all(found.kind != "gpu_oom" for found in from_log(quoted, "stderr"))


def test_thousands_of_tracebacks_are_read_in_time() -> None:
    one = 'Traceback (most recent call last):\n  File "serve.py", line 9, in send\n    out.flush()\nBrokenPipeError: client '
    took = []
    for many in (1_000, 8_000):
        text = "".join(f"{one}{number} went away\n" for number in range(many))
        begun = time.process_time()
        from_log(text, "stderr")
        took.append(time.process_time() - begun)

    assert (
        took[1] < 24 * took[0]
    )  # eight times as much where each is read once, 64 times where each is held against all


@pytest.mark.parametrize(
    "line", ["(" + 60_000 * "pid=1", 300_000 * "\x9d", 100_000 * "\x1b]", "\x1b]" + 300_000 * "+", "[" + 300_000 * "1"]
)
def test_a_long_line_of_what_begins_a_label_or_a_title_is_read_once(line: str) -> None:
    """A label elsewhere has all lines looked at; 0.1 s, and minutes where each sign is held against all behind it."""
    labelled = "".join(f"0: {each}" for each in GONE.splitlines(keepends=True))
    begun = time.process_time()

    assert [found.kind for found in from_log(f"{labelled}{line}\n", "stderr")] == ["gpu_oom"]
    assert time.process_time() - begun < 5


def test_a_caught_failure_earlier_in_the_log_is_not_the_cause() -> None:
    """A loop that halves its batch after an out-of-memory error, goes on, and dies of something else."""
    stderr = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 5, in try_batch\n    run(64)\n'
        f"torch.OutOfMemoryError: {OOM_TEXT}\n"
        "retrying with half the batch\nstep 1\nstep 2\n"
        "Traceback (most recent call last):\n"
        '  File "train.py", line 9, in <module>\n    main()\n'
        "KeyError: 'lr'\n"
    )

    (found,) = from_log(stderr, "stderr")

    assert (found.kind, found.message) == ("exception", "KeyError: 'lr'")


def test_ranks_are_told_apart_by_the_prefix_of_their_lines() -> None:
    stderr = (
        "[rank3]: Traceback (most recent call last):\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank3]:   File "/app/train.py", line 10, in step\n'
        "[rank3]:     loss.backward()\n"
        '[rank0]:   File "/app/train.py", line 11, in step\n'
        f"[rank3]: torch.OutOfMemoryError: {OOM_TEXT}\n"
        "[rank0]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0. ncclRemoteError\n"
    )

    found = causes(Findings(stderr=stderr))

    assert [(item.source, item.kind) for item in found] == [
        ("stderr [rank3]", "gpu_oom"),
        ("stderr [rank0]", "exception"),
    ]
    assert found[1].is_echo


@pytest.mark.parametrize(
    ("words", "kinds"),
    [("the pod of yesterday said", ["exception"]), ("rank 0 failed, its words", ["exception", "gpu_oom"])],
)
def test_labelled_lines_below_a_message_are_quoted_unless_it_tells_of_a_part_that_failed(
    words: str, kinds: list[str]
) -> None:
    below = "".join(f"[rank-0] {line}" for line in GONE.splitlines(keepends=True))

    found = from_log(f"{HEADER}{FRAME}RuntimeError: {words}:\n{below}", "stderr")

    assert [failure.kind for failure in found] == kinds


def test_stdout_is_a_witness_only_when_nobody_else_speaks() -> None:
    text = "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nModuleNotFoundError: No module named 'cv2'\n"

    (alone,) = causes(Findings(stdout=text))
    (other,) = causes(Findings(stdout=text, stderr=text.replace("cv2", "PIL")))

    assert (alone.source, alone.facts["install"]) == ("stdout", "pip install opencv-python")
    assert (other.source, other.facts["install"]) == ("stderr", "pip install pillow")


def test_a_traceback_of_any_length_is_kept_whole() -> None:
    frames = "".join(f'  File "deep.py", line {number}, in f{number}\n    f{number + 1}()\n' for number in range(3000))
    stderr = f"Traceback (most recent call last):\n{frames}RecursionError: maximum recursion depth exceeded\n"

    (found,) = from_log(stderr, "stderr")

    assert found.traceback == stderr.rstrip("\n")
    assert found.facts["frame"]["function"] == "f2999"


# -------------------------------------------------------------------------- the kernel's counters

KILLED = {"exit_code": None, "signal": 9, "oom_kill_delta": 0, "host_oom_kill_delta": 0}
LIMIT = {"version": 2, "limit_bytes": 64 * 1024**3, "peak_bytes": 64 * 1024**3}


@pytest.mark.parametrize(
    ("exit_file", "kind"),
    [
        ({**KILLED, "host_oom_kill_delta": 1}, "host_oom"),
        ({**KILLED, "oom_kill_delta": 1, "host_oom_kill_delta": 1, "cgroup": LIMIT}, "cgroup_oom"),
        ({**KILLED, "oom_kill_delta": 2, "host_oom_kill_delta": None, "cgroup": {**LIMIT, "version": 1}}, "cgroup_oom"),
        ({**KILLED, "oom_kill_delta": 1, "cgroup": {"version": 2, "limit_bytes": None}}, "host_oom"),
        ({"exit_code": 137, "signal": None, "host_oom_kill_delta": 1}, "host_oom"),
        ({"exit_code": None, "signal": 7, "shm": {"free_bytes": 0}}, "shm"),
        ({"exit_code": 1, "signal": None, "disk": {"free_bytes": 4096, "free_inodes": 10}}, "disk_full"),
        ({"exit_code": 1, "signal": None, "disk": {"free_bytes": 10**12, "free_inodes": 0}}, "disk_full"),
        (
            {"reason": "start_failed", "message": "cannot start /root/venv/bin/python: No such file or directory"},
            "missing_dependency",
        ),
    ],
)
def test_the_exit_file_names_what_no_text_could_say(exit_file: dict[str, Any], kind: str) -> None:
    (found,) = causes(Findings(exit_file=exit_file))

    assert (found.kind, found.reason, found.source) == (kind, kind, "exit file")
    assert found.hint


def test_an_exit_status_is_told_as_one_even_where_a_shell_means_a_signal_by_it() -> None:
    full = {"signal": None, "disk": {"free_bytes": 4096, "free_inodes": 10}}
    for code in (137, 200):
        (found,) = causes(Findings(exit_file={**full, "exit_code": code, "host_oom_kill_delta": int(code == 137)}))
        assert found.message.startswith(f"exit status {code}; ")
    (found,) = causes(Findings(exit_file={**KILLED, "host_oom_kill_delta": 1}))
    assert found.message.startswith("signal 9; ")

    for exit_file, told in (
        ({"exit_code": 137, "signal": None}, "exit status 137, as a shell says of signal 9 (SIGKILL)"),
        ({"exit_code": 255, "signal": None}, "exit status 255"),
        ({"exit_code": None, "signal": 9}, "signal 9 (SIGKILL)"),
    ):
        words = last_words(exit_file, "", "")
        assert words is not None
        assert words.message == told


@pytest.mark.parametrize(
    "exit_file",
    [KILLED, {}, {"exit_code": 3}, {"signal": 7, "shm": {"free_bytes": 10**10}}, {"exit_code": "x", "cgroup": 7}],
)
def test_an_exit_file_without_proof_names_nothing(exit_file: dict[str, Any]) -> None:
    assert {found.kind for found in causes(Findings(exit_file=exit_file))} <= {"unexplained"}


@pytest.mark.parametrize("ending", [{"exit_code": 137, "signal": None}, {"exit_code": None, "signal": 9}])
@pytest.mark.parametrize(
    "said",
    [
        "",
        "run.sh: 3 行: 12345 強制終了  python train.py\n",
        "run.sh: Zeile 3: 12345 Getötet  python train.py\n",
        "Killed\n",
    ],
    ids=["nothing", "Japanese", "German", "English"],
)
def test_a_kill_is_told_by_status_and_counters_whatever_the_shells_language(said: str, ending: dict[str, Any]) -> None:
    proven, *_ = causes(Findings(stderr=said, exit_file={**ending, "host_oom_kill_delta": 1}))
    refuted, *_ = causes(Findings(stderr=said, exit_file={**ending, "oom_kill_delta": 0, "host_oom_kill_delta": 0}))
    unknown, *_ = causes(Findings(stderr=said, exit_file=ending))

    assert (proven.kind, proven.reason) == ("host_oom", "host_oom")
    assert (refuted.reason, unknown.reason) == (None, None)
    assert refuted.hint.startswith(
        "killed by somebody: the kernel's out-of-memory killer did not kill anything meanwhile"
    )
    assert unknown.hint.startswith("killed from outside, mostly by the kernel's out-of-memory killer; `dmesg")


def test_a_killed_worker_is_host_oom_only_when_the_counter_rose() -> None:
    worker = told("RuntimeError", "DataLoader worker (pid 3216) is killed by signal: Killed.")

    (proven,) = causes(Findings(told=[worker], exit_file={"exit_code": 1, "oom_kill_delta": 1, "cgroup": LIMIT}))
    (refuted,) = causes(
        Findings(told=[worker], exit_file={"exit_code": 1, "oom_kill_delta": 0, "host_oom_kill_delta": 0})
    )
    (open_case,) = causes(Findings(told=[worker]))

    assert (proven.kind, proven.reason, proven.facts["limit_bytes"]) == ("cgroup_oom", "cgroup_oom", 64 * 1024**3)
    assert (refuted.kind, refuted.reason) == ("exception", None)
    assert (open_case.kind, open_case.reason) == ("host_oom", None)


def test_facts_given_by_the_job_are_kept_beside_those_parsed() -> None:
    (found,) = causes(
        Findings(told=[told("torch.OutOfMemoryError", OOM_TEXT, facts={"shapes": ["[182, 8, 8032, 128]"]})])
    )

    assert found.facts["shapes"] == ["[182, 8, 8032, 128]"]
    assert found.facts["requested_bytes"] == gib(2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (("11.93", "GiB"), 12809739960),
        (("179.00", "KiB"), 183296),
        (("512", "bytes"), 512),
        (("1,024", "bytes"), 1024),
        (("2", "GB"), 2 * 10**9),
    ],
)
def test_sizes_become_bytes(text: tuple[str, str], expected: int) -> None:
    assert size_bytes(*text) == expected


@pytest.mark.parametrize(
    "piece", ["CUDA", "x", "_Error", "/dev/shm ", "CUDNN_STATUS_", "GPU ", "\n", "a.", "failed: ", "\x1b[", "  | "]
)
def test_a_message_of_any_content_is_read_in_time_that_grows_with_its_length(piece: str) -> None:
    """A job may write anything there; rules that look at every part of it from every other took some 15 s."""
    text = piece * (60_000 // len(piece))
    begin_s = time.process_time()

    causes(
        Findings(
            stderr=f"Traceback (most recent call last):\nRuntimeError: {text}\n", told=[told("RuntimeError", text)]
        )
    )

    assert time.process_time() - begin_s < 6


def test_a_text_without_numbers_gives_no_facts() -> None:
    assert numbers("CUDA error: out of memory") == {}


@pytest.mark.parametrize(("asked", "is_named"), [("45.64", True), ("0.02", False)])
def test_a_large_ask_in_fused_attention_is_the_math_kernels(asked: str, is_named: bool) -> None:
    text = f"""Traceback (most recent call last):
  File "/srv/job/train.py", line 88, in forward
    out = F.scaled_dot_product_attention(
          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of 94.97 GiB of which 20.10 GiB is free."""

    (found,) = from_log(text, "stderr")

    assert ("math kernel" in found.hint) == is_named
    assert (found.facts.get("cause") == "math_fallback") == is_named


def test_a_compiled_model_called_from_threads_is_known() -> None:
    text = """Traceback (most recent call last):
  File "/srv/job/train.py", line 12, in step
    model(batch)
RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function. This is not supported at the moment."""

    (found,) = from_log(text, "stderr")

    assert "before they start" in found.hint


HEALTHY = {"exit_code": 0, "said": [], "gone": [], "ecc_uncorrected": {}}


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        ({"kernel": ["NVRM: Xid (PCI:0000:17:00): 79, pid=7, GPU has fallen off the bus."]}, "Xid"),
        ({"gpu_health": HEALTHY | {"said": ["Unable to determine the device handle for GPU 0000:17:00.0"]}}, "handle"),
        ({"gpu_health": HEALTHY | {"said": ["0, GPU-a, 00000000:17:00.0, [Unknown Error]"]}}, "Unknown Error"),
        ({"gpu_health": HEALTHY | {"gone": ["GPU-a"]}}, "no longer lists GPU-a"),
        ({"gpu_health": HEALTHY | {"ecc_uncorrected": {"GPU-a": [0, 2]}}}, "from 0 to 2"),
    ],
)
def test_a_fault_that_only_the_machine_knows_of_is_the_cards(evidence: dict[str, Any], said: str) -> None:
    illegal = told("torch.AcceleratorError", "CUDA error: an illegal memory access was encountered")

    found, *others = causes(Findings(told=[illegal], exit_file={"exit_code": 1, **evidence}))

    assert (found.kind, found.reason, found.source) == ("gpu_fault", "gpu_fault", "exit file")
    assert said in found.message
    assert [other.kind for other in others] == ["exception"]


@pytest.mark.parametrize(
    "evidence",
    [
        {"kernel": ["NVRM: Xid (PCI:0000:17:00): 31, pid=7, name=python, MMU Fault"], "gpu_health": HEALTHY},
        {"kernel": ["python invoked oom-killer: gfp_mask=0x0"], "gpu_health": None},
        {"kernel": "x", "gpu_health": HEALTHY | {"exit_code": 1, "said": 7, "gone": [3], "ecc_uncorrected": [1]}},
        {"kernel": None, "gpu_health": HEALTHY | {"exit_code": None, "said": ["no answer in 20 s"]}},
    ],
)
def test_a_programs_own_mistake_and_a_silent_driver_are_no_fault_of_the_card(evidence: dict[str, Any]) -> None:
    assert [found.kind for found in causes(Findings(exit_file={"exit_code": 1, **evidence}))] == ["unexplained"]


@pytest.mark.parametrize(
    ("exit_file", "stderr", "told", "hint"),
    [
        ({"signal": 11, "exit_code": None}, "", "signal 11 (SIGSEGV)", "PYTHONFAULTHANDLER"),
        ({"exit_code": 3}, "loading\nno such dataset\n", "exit status 3: no such dataset", "draftyard logs"),
        ({"exit_code": 1}, "", "exit status 1", "printed nothing"),
    ],
)
def test_a_bad_end_that_nothing_explains_is_shown_with_its_last_words(
    exit_file: dict[str, Any], stderr: str, told: str, hint: str
) -> None:
    (found,) = causes(Findings(stderr=stderr, exit_file=exit_file))

    assert (found.kind, found.message, found.traceback) == ("unexplained", told, stderr.rstrip())
    assert hint in found.hint
    assert found.reason is None


# ------------------------------------------------------------------ the driver's numbered messages

OURS, ANOTHERS = "0000:c1:00", "0000:17:00"
CARDS = {"gpu_health": HEALTHY | {"pci": ["0000:c1:00"]}}
OFF_THE_BUS = "pid=7, GPU has fallen off the bus."
LOST = "Traceback (most recent call last):\nRuntimeError: CUDA error: unknown error\n"
OWN_MISTAKE = "Traceback (most recent call last):\nValueError: block_size is 0; it must be at least 2\n"
FULL = f"Traceback (most recent call last):\ntorch.OutOfMemoryError: {OOM_TEXT}\n"


def kinds(**findings: Any) -> list[str]:
    return [failure.kind for failure in causes(Findings(**findings))]


@pytest.mark.parametrize("number", FATAL_XIDS)
@pytest.mark.parametrize("log", [LOST, ""])
def test_an_xid_of_a_card_that_failed_is_the_cause_in_the_log_and_in_the_kernels(number: int, log: str) -> None:
    line = xid_line(number, FATAL_XIDS[number])

    assert kinds(stderr=line + log, exit_file={"exit_code": 1, **CARDS})[0] == "gpu_fault"
    assert kinds(stderr=log, exit_file={"exit_code": 1, "kernel": [line], **CARDS})[0] == "gpu_fault"


@pytest.mark.parametrize("number", OTHER_XIDS)
@pytest.mark.parametrize(
    ("log", "kind"), [(LOST, "exception"), (FULL, "gpu_oom"), (OWN_MISTAKE, "exception"), ("", "unexplained")]
)
def test_an_xid_about_a_program_and_one_that_is_news_are_no_cause(number: int, log: str, kind: str) -> None:
    line = xid_line(number, OTHER_XIDS[number])

    assert kinds(stderr=line + log, exit_file={"exit_code": 1, **CARDS}) == [kind]
    assert kinds(stderr=log, exit_file={"exit_code": 1, "kernel": [line], **CARDS}) == [kind]


@pytest.mark.parametrize(("log", "kind"), [(LOST, "exception"), ("", "unexplained")])
def test_an_xid_of_another_card_is_no_cause(log: str, kind: str) -> None:
    line = xid_line(79, OFF_THE_BUS, ANOTHERS)

    assert kinds(stderr=line + log, exit_file={"exit_code": 1, **CARDS}) == [kind]
    assert kinds(stderr=log, exit_file={"exit_code": 1, "kernel": [line], **CARDS}) == [kind]


def test_where_the_jobs_cards_are_not_known_any_may_be_its_own() -> None:
    assert kinds(stderr=xid_line(79, OFF_THE_BUS, ANOTHERS), exit_file={"exit_code": 1}) == ["gpu_fault"]


@pytest.mark.parametrize(
    ("log", "exit_file", "kind"),
    [
        (OWN_MISTAKE, {"exit_code": 1}, "exception"),
        (FULL, {"exit_code": 1}, "gpu_oom"),
        (
            "Traceback (most recent call last):\nModuleNotFoundError: No module named 'x'\n",
            {"exit_code": 1},
            "missing_dependency",
        ),
        ("", {"exit_code": None, "signal": 9, "host_oom_kill_delta": 1}, "host_oom"),
    ],
)
def test_a_run_that_ended_for_a_reason_of_its_own_is_not_called_a_fault_of_the_card(
    log: str, exit_file: dict[str, Any], kind: str
) -> None:
    """The card was reset by somebody, and the run went on; or the Xid came with the end of another program on it."""
    line = xid_line(79, OFF_THE_BUS, OURS)

    assert kinds(stderr=line + log, exit_file=exit_file | CARDS) == [kind]
    assert kinds(stderr=log, exit_file=exit_file | CARDS | {"kernel": [line]}) == [kind]


def test_a_good_end_has_no_cause() -> None:
    assert causes(Findings(stderr="warning: slow\n", exit_file={"exit_code": 0})) == []


@pytest.mark.parametrize("pci", [OURS, "00000000:C1:00.0", None])
def test_a_fault_without_a_number_is_the_cards_unless_it_names_another(pci: str | None) -> None:
    line = f"NVRM: GPU {pci}: GPU has fallen off the bus." if pci else "NVRM: A GPU has fallen off the bus."

    assert kinds(exit_file={"exit_code": 1, "kernel": [line], **CARDS}) == ["gpu_fault"]


def test_a_fault_without_a_number_of_another_card_is_no_cause() -> None:
    line = f"NVRM: GPU {ANOTHERS}.0: GPU has fallen off the bus."

    assert kinds(exit_file={"exit_code": 1, "kernel": [line], **CARDS}) == ["unexplained"]


@pytest.mark.parametrize(
    ("exit_file", "due"),
    [
        ({"signal": 9, "oom_kill_delta": 1, "cgroup": {"version": 2, "limit_bytes": 2**30}}, "cgroup_oom"),
        ({"exit_code": 1, "disk": {"free_bytes": 0}}, "disk_full"),
        ({"exit_code": 1}, "gpu_oom"),
    ],
)
def test_what_the_kernel_counted_beats_what_a_job_may_have_labelled_itself(exit_file: dict, due: str) -> None:
    text = labelled("gpu01: ") + "step 2 loss 2.0\n" * 300

    first, *_ = causes(Findings(stderr=text, exit_file=exit_file))

    assert first.kind == due


def test_a_last_line_as_long_as_a_log_is_read_at_once_and_told_by_its_end() -> None:
    """A bar of progress drawn 40,000 times in one line, with the words of a traceback that is none behind it."""
    line = "1it ]" * 40_000 + "Traceback (most recent call last):x"
    began_s = time.monotonic()

    (found,) = causes(Findings(stderr=line, exit_file={"exit_code": 3}))

    assert time.monotonic() - began_s < 5  # 0.1 s; 25 where each place of the bar is tried
    assert found.message.startswith("exit status 3: … ")
    assert found.message.endswith("Traceback (most recent call last):x")
    assert len(found.message) < 600
