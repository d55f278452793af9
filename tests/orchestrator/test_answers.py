"""Whatever a host, a config or a program answers: a value of the right shape, or one of our errors. Never anything else."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.actions.host_facts import card_of, choose_gpus, gate_facts, versions
from orchestrator.actions.hosts import findings_of
from orchestrator.actions.site import checked_facts
from orchestrator.errors import DraftyardError
from orchestrator.host import Hosts, read_env_file
from orchestrator.launch import Job, find_processes, reap, start
from orchestrator.observe import parse
from orchestrator.shell.local import LocalShell
from orchestrator.shell.posix import PosixFiles
from orchestrator.shell.routes import Question, _endpoint, parse_answer
from orchestrator.shell.stream import Ended, Sink, Source
from orchestrator.ship import _read, ship
from orchestrator.sweep import survey, sweep
from orchestrator.tree import Entry, Tree
from orchestrator.units import format_size
from orchestrator.workplace import Workplace, run_script
from tests.orchestrator.test_host_facts import _spec

PLACE = Workplace("/srv/draftyard", "python3", "/")
SPEC = _spec()
WORDS = st.sampled_from(
    ["", "0", "22", "-1", "none", "yes", "²", "9" * 400, "a b", "%h%", "~/x", "~nobody-here/x", "\x1b[2J", "é"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


class Liar(PosixFiles):
    """A host that answers every command with the same bytes."""

    label = "liar"

    def __init__(self, stdout: bytes, exit_code: int = 0) -> None:
        self._stdout, self._exit_code = stdout, exit_code

    def stream(self, argv: list[str], *, source: Source, sink: Sink, timeout_s: float, idle: bool = False) -> Ended:
        sink(self._stdout)
        return Ended(self._exit_code, self._stdout)

    def close(self) -> None: ...


def _ours(act: Callable[[], object]) -> None:
    """Only errors that are told in one line may come out."""
    with contextlib.suppress(DraftyardError, FileNotFoundError):
        act()


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("hostname", "port", "user", "identityfile", "identitiesonly", "proxyjump", "proxycommand"),
                *(
                    "userknownhostsfile",
                    "globalknownhostsfile",
                    "hostkeyalias",
                    "stricthostkeychecking",
                    "connecttimeout",
                ),
            ]
        ),
        WORDS | st.text(max_size=10),
    )
)
def test_an_answer_of_ssh_becomes_a_way_or_an_error(said: dict[str, str]) -> None:
    text = "".join(f"{key} {value}\n" for key, value in said.items())

    _ours(lambda: _endpoint(Question("box"), parse_answer(text)))


@given(
    st.binary(max_size=60) | st.lists(WORDS, max_size=5).map(lambda words: " ".join(words).encode()),
    st.integers(0, 255),
)
def test_whatever_stat_prints_there_is_a_fact_or_an_error(tmp_path_factory: Any, printed: bytes, code: int) -> None:
    here = tmp_path_factory.getbasetemp() / "fetched"

    _ours(lambda: Liar(printed, code).stat("/x"))
    _ours(lambda: Liar(printed, code).get("/x", here))
    _ours(lambda: Liar(printed, code).read_range("/x", 0, 5))


TREE = Tree((Entry("a", 0o644, 10, "a" * 64, None, Path("/dev/null")),))
SENSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "whole": st.booleans() | JSON,
        "missing": st.lists(st.lists(st.sampled_from(["a" * 64, "b" * 64, 0, 10, 11, -1, True]), max_size=3)) | JSON,
        "refused": st.text(max_size=5) | JSON,
        "error": JSON,
        "disk": st.dictionaries(st.sampled_from(["to_come_bytes", "free_bytes", "to_come_files", "free_files"]), JSON)
        | JSON,
    },
)


@given(SENSIBLE)
def test_a_receiver_can_ask_for_nothing_but_content_of_the_tree(answer: dict[str, Any]) -> None:
    def read() -> None:
        understood = _read(LocalShell(), TREE, answer)
        assert all(sha == "a" * 64 and 0 <= have <= 10 for sha, have in understood.missing)

    _ours(read)


@pytest.mark.slow
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "trees": st.lists(st.dictionaries(st.sampled_from(["hash", "size_bytes", "age_s", "runs", "in_use"]), JSON))
            | JSON,
            "runs": st.lists(st.dictionaries(st.sampled_from(["run_id", "size_bytes", "age_s", "tree"]), JSON)) | JSON,
            "leftover_bytes": st.integers() | JSON,
            "removed": JSON,
            "kept": JSON,
            "freed_bytes": JSON,
        },
    )
)
def test_what_lies_on_a_host_is_told_or_an_error(answer: dict[str, Any]) -> None:
    liar = Liar(json.dumps(answer).encode())

    _ours(lambda: survey(liar, PLACE))
    _ours(lambda: sweep(liar, PLACE, ["trees/x"]))


NUMBERS = st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=3)
GPUS = st.lists(
    st.dictionaries(
        st.sampled_from(["index", "uuid", "name", "total_bytes", "used_bytes", "processes"]),
        NUMBERS
        | st.lists(
            st.dictionaries(st.sampled_from(["pid", "used_bytes", "user", "age_s"]), NUMBERS) | NUMBERS, max_size=2
        ),
    )
    | NUMBERS,
    max_size=2,
)
FACTS = st.dictionaries(
    st.sampled_from(
        ["python", "time_s", "driver", "disk", "memory", "session", "nvidia_nodes", "gpu_error", "tools", "container"]
    ),
    st.dictionaries(st.sampled_from(["packages", "version", "free_bytes", "total_bytes", "linger", "nvidia0"]), JSON)
    | JSON,
)


PROCESS = {"pid": 1, "run_id": "r", "attempt": "1", "age_s": 1.0, "rss_bytes": 1, "command": "x"}


@given(st.dictionaries(st.sampled_from([*PROCESS]), JSON), JSON)
@example({"pid": "x"}, ["a"])
@example({"rss_bytes": 10**400}, 3)
@example({"age_s": 1e999}, [10**400])
def test_processes_of_any_shape_are_told_or_an_error(changed: dict[str, Any], stubborn: Any) -> None:
    for processes in ([{**PROCESS, **changed}], stubborn):
        liar = Liar(json.dumps({"processes": processes, "stubborn": stubborn}).encode())
        _ours(lambda liar=liar: [format_size(item.rss_bytes) for item in find_processes(liar, PLACE)])
        _ours(lambda liar=liar: reap(liar, PLACE, names=["r"]))


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"{}", b"[", b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b"9" * 5000])
def test_an_answer_that_is_too_deep_or_empty_is_one_line(said: bytes) -> None:
    job = Job("r", "script", 1, ("true",), "/t")
    for ask in (
        lambda: find_processes(Liar(said), PLACE),
        lambda: survey(Liar(said), PLACE),
        lambda: start(Liar(said), PLACE, job),
        lambda: ship(TREE, Liar(said), PLACE),
    ):
        with pytest.raises(
            DraftyardError, match=r"remote/\w+\.py (gives no such answer|ended with)|that no receiver gives"
        ):
            ask()


@pytest.mark.slow
@given(FACTS, GPUS | JSON, st.lists(st.sampled_from(["0", "1", "GPU-1"]), max_size=2))
def test_facts_of_any_shape_are_read_or_refused(facts: dict[str, Any], gpus: Any, wanted: list[str]) -> None:
    def use() -> None:
        seen = checked_facts({**facts, "gpus": gpus}, "liar")
        findings_of(seen, python="python3", host="gpu")
        versions(seen)
        gate_facts(seen, wanted)
        card_of(seen)
        choose_gpus(seen, wanted, SPEC, host="liar")

    _ours(use)


def test_what_a_real_probe_says_is_of_its_kind() -> None:
    facts = run_script(LocalShell(), Workplace("/", sys.executable, "/"), "probe", ["/"])

    assert checked_facts(facts, "local") is facts


RECORDS = st.lists(
    st.tuples(
        st.sampled_from(
            ["host", "disk", "attempt", "claim", "stat supervisor", "stat job", "exit", "supervisor", "files"]
        ),
        st.binary(max_size=30) | st.lists(WORDS, max_size=4).map(lambda words: "\n".join(words).encode()),
    ),
    max_size=8,
)


@given(RECORDS)
def test_evidence_of_any_content_is_read(records: list[tuple[str, bytes]]) -> None:
    parse(b"".join(b"\x1e" + name.encode() + b"\n" + body for name, body in records))


KEYS = [
    "address",
    "port",
    "user",
    "jump",
    "identity",
    "hop",
    "work_dir",
    "python",
    "gpus",
    "env_file",
    "host_keys",
    "prot",
]
YAML = st.dictionaries(st.sampled_from(KEYS), JSON | WORDS, max_size=4)


@given(st.dictionaries(st.text(max_size=6) | st.sampled_from(["gpu", "local"]), YAML | JSON, max_size=3) | JSON)
def test_a_hosts_file_of_any_shape_is_read_or_refused(tmp_path_factory: Any, hosts: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "hosts.yaml"
    file.write_text(json.dumps({"hosts": hosts}), encoding="utf-8")

    _ours(lambda: Hosts.load(file, Path("/dev/null")))


@pytest.mark.parametrize("kind", ["hosts", "env"])
@given(st.binary(max_size=80) | st.text(alphabet="aA=:#'\"\\{}[]&*!|>-\n\t ²", max_size=60).map(str.encode))
def test_a_file_of_any_bytes_is_read_or_refused(tmp_path_factory: Any, kind: str, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / f"any-{kind}"
    file.write_bytes(content)

    _ours(lambda: read_env_file(file) if kind == "env" else Hosts.load(file, Path("/dev/null")))
