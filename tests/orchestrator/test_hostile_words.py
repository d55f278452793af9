"""Words and places that a careless shell or a full disk hand to any verb: one clear line, the right code, no traceback."""

from __future__ import annotations

import functools
import io
import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from orchestrator import cli
from orchestrator.recipe import load_recipe
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document, State
from orchestrator.store.writes import Store
from orchestrator.verbs.words_typed import TypedPath
from remote.spec import dump
from tests.orchestrator.runs import batch, event, started, steps

pytestmark = pytest.mark.slow  # every verb, many of them as processes

ROOT = Path(__file__).resolve().parents[2]
RUN = "kxxxaaaa"
FULL = Path("/dev/full")

# Every verb with words that it takes; where an id stands, it is the run's own.
VERBS: dict[str, list[str]] = {
    "recipe check": ["smollm2"],
    "recipe show": ["smollm2"],
    "recipe explain": ["smollm2", "optim.lr"],
    "recipe diff": ["smollm2:ce", ":ce_kl"],
    "plan": ["smollm2"],
    "deploy": ["smollm2", "--host", "nosuch"],
    "prepare": ["smollm2", "--host", "nosuch"],
    "smoke": ["smollm2", "--host", "nosuch"],
    "evidence": ["smollm2"],
    "launch": ["smollm2", "--host", "nosuch"],
    "watch": [RUN, "--once"],
    "ls": [],
    "show": [RUN],
    "logs": [RUN],
    "metrics": [RUN, "loss"],
    "plot": [RUN, "loss", "-o", "a.svg"],
    "compare": [RUN, RUN],
    "diff": [RUN, RUN],
    "wait": [RUN],
    "stop": [RUN],
    "resume": [RUN],
    "evaluate": [RUN],
    "export": [RUN, "--metrics", "jsonl"],
    "pull": [RUN],
    "import": ["."],
    "tag": [RUN, "x"],
    "mark": [RUN, "succeeded", "seen"],
    "note": [RUN, "text"],
    "rm": [RUN],
    "restore": [RUN],
    "purge": [RUN, "--yes"],
    "doctor": ["nosuch"],
    "reap": ["nosuch"],
    "gc": ["nosuch"],
    "hosts": [],
    "follow": [],
    "reset-term": [],
    "config show": ["--origin"],
}
CODES = set(range(7)) | {10, 11, 12, 13}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one run that has ended."""
    db = tmp_path_factory.mktemp("recorded") / "runs.db"
    with Store(db) as store:
        started(store, RUN, documents={Document.SPEC: _spec()})
        store.ingest(batch([*steps(1, 3, loss=2.0), event(4, "final", outcome="succeeded", exit_code=0)], run_id=RUN))
        store.set_state(RUN, State.SUCCEEDED, evidence="said so")
    return db


@pytest.fixture
def project(tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with that database, its settings under the same roof."""
    for folder in ("recipes", ".git", "home"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("DRAFTYARD_DB", "DRAFTYARD_HOSTS", "DRAFTYARD_HOST", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    shutil.copy(recorded, tmp_path / "runs.db")
    return tmp_path


@functools.cache
def _spec() -> str:
    return dump(load_recipe("smollm2").resolve("ce").spec)


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def _error(captured: str) -> str:
    """The one line after `error:`; a try line may follow."""
    lines = [line for line in captured.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, captured
    return lines[0]


def test_the_table_above_has_every_verb() -> None:
    below = {"recipe": ("check", "show", "explain", "diff"), "config": ("show",)}
    names = [name for verbs in cli.GROUPS.values() for name in verbs]
    assert {*VERBS} == {
        f"{name} {word}".strip() for name in names for word in (below.get(name, ("",)) if name in below else ("",))
    }


@pytest.mark.parametrize("verb", [verb for verb, words in VERBS.items() if words])
def test_an_empty_word_is_refused_before_anything_happens(
    project: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """What `--host $HOST` becomes when the variable is unset and quoted."""
    for words in ([*VERBS[verb], "--db", ""], [*VERBS[verb], "--db="]):
        assert _run(*verb.split(), *words) == 2
        assert "empty" in _error(capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "smollm2", "--host", ""], ["launch", "smollm2", "--force", ""], ["export", RUN, "--metrics", "csv", "--to", ""],
        ["tag", RUN, ""], ["doctor", ""], ["recipe", "check", ""], ["--db", "", "ls"], ["ls", "--sort", ""], ["metrics", RUN, ""],
        ["import", ""], ["pull", RUN, "--to", ""], ["pull", RUN, "--to="], ["plot", RUN, "-o", ""],
    ],
)  # fmt: skip
def test_an_empty_word_is_no_default(project: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert _run(*words) == 2

    assert "empty" in _error(capsys.readouterr().err)


@pytest.mark.parametrize("words", [["import", "."], ["import", "./"], ["pull", RUN, "--to", "."]])
def test_the_folder_one_stands_in_is_no_empty_word(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert _run(*words) in CODES

    assert "empty" not in _error(capsys.readouterr().err)


def test_every_path_that_is_typed_is_refused_when_it_is_empty() -> None:
    """A path of click's own kind makes the working folder of an empty word."""
    kinds = {type(parameter.type) for command in _commands(cli.draftyard) for parameter in command.params}

    assert {kind for kind in kinds if issubclass(kind, click.Path)} == {TypedPath}


def _commands(group: click.Group) -> Iterator[click.Command]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        yield from _commands(command) if isinstance(command, click.Group) else [command]


def test_an_empty_note_takes_the_note_away_and_an_empty_filter_is_none(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("note", RUN, "text") == 0
    assert _run("note", RUN, "") == 0
    assert _run("ls", "") == 0

    assert RUN in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_words_that_are_not_utf_8_are_no_traceback(
    project: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """As Python has the bytes of such words: lone surrogates."""
    texts = [word for word in VERBS[verb] if not word.startswith("-")]
    if verb == "follow":
        return  # takes none
    for words in ([*VERBS[verb][: len(texts)], "\udcff"], ["\udcff\udcfe", *VERBS[verb][1:]]):
        code = _run(*verb.split(), *words)
        captured = capsys.readouterr()
        assert code in CODES, captured
        if code != 0:
            assert "error: " in captured.err or captured.out, captured


def test_a_note_that_is_not_utf_8_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("note", RUN, "caf\udce9") == 2

    assert "UTF-8" in _error(capsys.readouterr().err)


@pytest.mark.parametrize("number", ["99999999999999999999", "9223372036854775808", "-1", "1e3", "x"])
@pytest.mark.parametrize(
    "words", [["ls", "-n"], ["metrics", RUN, "loss", "-n"], ["logs", RUN, "-n"], ["logs", RUN, "--attempt"], ["logs", RUN, "--rank"]]
)  # fmt: skip
def test_a_number_beyond_all_use_is_a_line(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], number: str
) -> None:
    assert _run(*words, number) == 2

    _error(capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("follow", "reset-term", "stop", "logs")])
def test_a_full_disk_behind_stdout_is_a_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    if not FULL.exists():
        pytest.skip("/dev/full is Linux's")
    with FULL.open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code = _run(*verb.split(), *VERBS[verb], "--json")
        monkeypatch.undo()

    told = capfd.readouterr().err
    assert code in {1, 2, 3, 4, 5}, told
    assert "Traceback" not in told
    if verb in ("ls", "show", "metrics", "plan", "recipe show", "config show"):
        assert _error(told) == "error: the output cannot be written: No space left on device"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("follow", "reset-term")])
def test_a_working_directory_that_is_gone_is_a_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    gone = project / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert _run(*verb.split(), *VERBS[verb], "--json") in (1, 2)

    error = json.loads(capsys.readouterr().out)["error"]
    assert "working directory" in error["message"]


@pytest.mark.parametrize(
    ("name", "told"),
    [("nosuch", "known are created"), ("crated", "did you mean 'created'?"), ("-los", "did you mean 'loss'?")],
)
def test_an_unknown_name_to_sort_by_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    assert _run("ls", "--sort", name) == 2

    assert told in _error(capsys.readouterr().err)


@pytest.mark.parametrize("name", ["loss", "-loss", "state", "accept", "started", "run", "acceptance_length"])
def test_every_column_and_metric_sorts(project: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert _run("ls", "--sort", name) == 0

    assert RUN in capsys.readouterr().out


@pytest.mark.parametrize("words", [["watch"], ["watch", RUN]])
def test_watch_without_a_terminal_says_what_to_do(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert _run(*words) == 2

    captured = capsys.readouterr()
    assert f"draftyard {' '.join(words)} --once" in _error(captured.err)
    assert captured.out == ""


def test_a_terminal_that_cannot_be_drawn_on_gets_no_screen(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An editor's shell is a terminal by every other sign, and showed the escapes as letters."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdin", _Terminal())
    monkeypatch.setattr("sys.stdout", _Terminal())

    assert _run("watch") == 2

    told = _error(capsys.readouterr().err)
    assert "needs a terminal that can be drawn on, and TERM is dumb; draftyard watch --once prints it" in told


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("group", ["recipe", "config"])
def test_a_group_without_its_verb_shows_its_help(project: Path, capsys: pytest.CaptureFixture[str], group: str) -> None:
    assert _run(group) == 2

    captured = capsys.readouterr()
    assert captured.err.startswith("Usage: draftyard ")
    assert captured.out == ""


def test_a_file_cannot_be_written_into_a_folder_that_is_not_there(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["export", RUN, "--metrics", "csv", "--to", "typo/a.csv"], ["plot", RUN, "-o", "typo/a.png"]):
        assert _run(*words) == 1
        assert "typo" in _error(capsys.readouterr().err)
    assert not (project / "typo").exists()


def test_what_the_system_refuses_is_json_where_json_is_asked_for(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name too long to be looked up is met by no check of ours."""
    folder = "n" * 300

    assert _run("export", RUN, "--metrics", "csv", "--to", f"{folder}/a.csv", "--json") == 1

    error = json.loads(capsys.readouterr().out)["error"]
    assert error == {"message": f"{folder}: File name too long", "exit_code": 1, "reason": "failed"}


def test_a_script_that_cannot_be_read_is_said(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its fault used to be taken for one of the output: reading a file says no name either."""
    for script in ("recipes", "nosuch.py", "/proc/self/mem"):
        assert _run("smoke", "smollm2", "--script", script) == 2
        assert f"--script {script} cannot be read" in _error(capsys.readouterr().err)


def test_a_name_that_was_mistyped_beside_a_pattern_is_said(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["los", "l*"], ["l*", "los"], ["l*", "los", "-n", "1"]):
        assert _run("metrics", RUN, *words) == 2
        assert "did you mean 'loss'?" in _error(capsys.readouterr().err)


def test_the_newest_values_of_whatever_a_pattern_fits(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("metrics", RUN, "lo*", "-n", "2", "--json") == 0

    found = json.loads(capsys.readouterr().out)["values"]
    assert {name: [value["step"] for value in values] for name, values in found.items()} == {"loss": [2, 3]}


def test_a_number_of_values_wants_to_know_of_which_metric(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("metrics", RUN, "-n", "2") == 2

    assert "'*'" in _error(capsys.readouterr().err)


def test_a_list_without_trainings_says_how_to_see_what_there_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("ls", "--kind", "smoke") == 0
    assert "1 run of another kind: draftyard ls --kind all" in capsys.readouterr().err

    assert _run("ls", "--kind", "smoke", "recipe:nosuch") == 0
    assert "draftyard ls" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hosts.yaml", ["hosts"]), ("draftyard.yaml", ["ls"]), ("config/draftyard/config.yaml", ["ls"]),
        ("recipes/x.yaml", ["recipe", "show", "x"]), ("recipes/x.yaml", ["plan", "recipes/x.yaml"]),
    ],
)  # fmt: skip
def test_a_folder_where_a_file_is_due_is_said(
    project: Path, capsys: pytest.CaptureFixture[str], name: str, words: list[str]
) -> None:
    (project / name).mkdir(parents=True)

    assert _run(*words) == 2

    told = _error(capsys.readouterr().err)
    assert name in told
    assert "is a folder" in told


def test_an_unknown_metric_is_answered_with_the_nearest(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("metrics", RUN, "los") == 2

    assert "did you mean 'loss'?" in _error(capsys.readouterr().err)


def test_a_run_named_twice_is_meant_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("rm", RUN, RUN[:5]) == 0
    assert _run("purge", RUN, RUN, "--yes", "--json") == 0

    told = capsys.readouterr().out
    assert (told.count("in the bin"), told.count(f'"{RUN}"')) == (1, 1)  # one line, one document


def test_exported_metrics_are_json_where_json_is_asked_for(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("export", RUN, "--metrics", "csv", "--json") == 2
    capsys.readouterr()
    assert _run("export", RUN, "--metrics", "jsonl", "--json") == 0

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["value"] for line in lines] == [2.0, 2.0, 2.0]
    assert all(line["schema_version"] == 1 for line in lines)


def test_an_exported_file_is_whole_and_leaves_nothing_beside_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("export", RUN, "--metrics", "csv", "--to", "m.csv", "--json") == 0

    assert json.loads(capsys.readouterr().out)["num_values"] == 3
    assert (project / "m.csv").read_text() == (
        "run,metric,attempt,rank,step,value\n" + "".join(f"{RUN},loss,1,0,{step},2.0\n" for step in (1, 2, 3))
    )
    assert not list(project.glob(".m.csv*"))


def test_a_recipe_path_that_is_not_there_is_said(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("recipe", "check", "nowhere/at_all") == 2

    assert "there is no such" in _error(capsys.readouterr().err)


def test_a_closed_pipe_is_silent_for_streams_too(project: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        sys.stdout = os.fdopen(1, "w")
        try:
            cli.main(["export", RUN, "--metrics", "jsonl"])
        except SystemExit as ended:
            os._exit(int(str(ended.code)))
    os.close(writing)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 141


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "closed"),
    [
        *(("ls", "<&-"), ("ls", ">&-"), ("ls", "<&- >&- 2>&-"), ("--help", ">&-"), ("--help", "2>&-")),
        *(("note kxxxaaaa hello", "2>&-"), ("note kxxxaaaa hello", "<&- >&- 2>&-")),
    ],
)
def test_a_stream_that_the_shell_closed_is_no_traceback(project: Path, closed: str, words: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m orchestrator.cli {words} {closed}"

    done = subprocess.run(["bash", "-c", command], cwd=project, env=env, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    with Reader(project / "runs.db") as reader:
        assert reader.run(RUN).note == ("hello" if "note" in words else "")


@pytest.mark.parametrize("home", ["~", "~nobody", "~/x"])
def test_a_home_that_only_a_shell_could_expand_is_none(project: Path, home: str) -> None:
    """As `docker run -e HOME=~` or a file of variables hands it on."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": home}
    for words in (["doctor"], ["ls"], ["config", "show"]):
        command = [sys.executable, "-m", "orchestrator.cli", *words]
        done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)

        assert done.returncode in (0, 1), words
        assert "broke" not in done.stderr + done.stdout, words
        assert not list(project.glob("~*"))


def test_an_error_keeps_its_code_when_stderr_is_full(project: Path) -> None:
    command = f"{sys.executable} -m orchestrator.cli nosuch 2>/dev/full"

    done = subprocess.run(["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)

    assert done.returncode == 2


@pytest.mark.parametrize("words", [["plan", "smollm2", "--gpu", "0GiB"], ["smoke", "smollm2", "--cap", "0GiB"]])
def test_a_card_without_memory_is_refused(project: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert _run(*words) == 2

    assert "nothing fits" in _error(capsys.readouterr().err)


LONG = "x" * 5000


@pytest.mark.parametrize("verb", [verb for verb, words in VERBS.items() if words])
def test_a_word_of_thousands_of_letters_fills_no_screen(
    project: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    words = VERBS[verb]
    for chosen in (
        [LONG, *words[1:]],
        [f"./{LONG}.yaml", *words[1:]],
        [LONG if word == "nosuch" else word for word in words],
        [*words, "--db", f"{LONG}/x.db"],
        [*words, f"--{LONG}"],
    ):
        code = _run(*verb.split(), *chosen)

        told = capsys.readouterr().err
        assert code in CODES
        assert code == 0 or len(told) < 1000, told[:2000]


def test_a_recipe_of_a_name_too_long_for_a_file_is_an_unknown_one(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb, word, told in (
        ("launch", LONG, f"no recipe '{'x' * 60}... (5,000 characters)'; known: "),
        ("plan", f"{LONG}.yaml", "there is no such file"),
    ):
        assert _run(verb, word) == 2
        assert told in _error(capsys.readouterr().err)
    assert _run("launch", LONG, "--json") == 2
    assert LONG in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_database_whose_name_no_file_can_have_says_what_names_another(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("ls", "--db", f"{LONG}/x.db") == 2

    assert "cannot be used (File name too long): --db or DRAFTYARD_DB names another" in _error(capsys.readouterr().err)


@pytest.mark.parametrize(
    "names",
    [
        "-1",
        "0-3",
        "0,1-2",
        "all",
        "GPU-1",
        "5x",
        "nonsense",
        "everything",
        "cuda:0,1",
        "0..3333",
        "-1000000",
        "GPU-something",
        "²",
    ],
)
def test_what_can_name_no_gpu_is_refused_before_anything_happens(
    project: Path, capsys: pytest.CaptureFixture[str], names: str
) -> None:
    for verb in ("launch", "smoke", "deploy", "prepare"):
        assert _run(verb, "smollm2", "--gpus", names) == 2
        assert "is neither an index, as 5, nor the beginning of a UUID, as GPU-4f1c88de" in _error(
            capsys.readouterr().err
        )
    with Reader(project / "runs.db") as reader:
        assert [run.id for run in reader.runs(kind=None)] == [RUN]


@pytest.mark.parametrize("content", [b"", b" \n\n"])
def test_an_empty_script_is_no_test_that_passes(
    project: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    """What `make_test | draftyard smoke smollm2 --script -` brings where make_test fails."""
    (project / "test.py").write_bytes(content)

    assert _run("smoke", "smollm2", "--script", "test.py") == 2

    assert "test.py is empty" in _error(capsys.readouterr().err)


@pytest.mark.parametrize("empty", [None, ""])
def test_without_a_home_in_the_environment_it_is_the_users(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty: str | None
) -> None:
    """A host's work folder lay below /, and an empty HOME stood for / as well."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.delenv("HOME") if empty is None else monkeypatch.setenv("HOME", empty)

    assert _run("doctor", "local", "--json") in (0, 1)

    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings[0]["told"].endswith(f"{pwd.getpwuid(os.getuid()).pw_dir}/.local/share/draftyard")


def test_the_name_of_a_folder_tears_no_line_of_an_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a\nb" / "recipes").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a\nb")

    assert _run("ls") == 0

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no runs yet: ")


def test_a_doctor_moves_no_database_away_that_may_be_whole(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "in the way").touch()

    _run("doctor", "--db", "in the way/runs.db", "--json")

    here = {item["name"]: item for item in json.loads(capsys.readouterr().out)["here"]}
    assert not here["database"]["is_good"]
    assert here["database"]["repair"] == "--db or DRAFTYARD_DB names another file"


@pytest.mark.parametrize(
    "asked", [{}, {"COMP_WORDS": "draftyard show "}, {"COMP_WORDS": 'draftyard show "', "COMP_CWORD": "x"}]
)
@pytest.mark.parametrize("is_broken", [True, False])
def test_completion_prints_nothing_into_the_prompt(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: dict[str, str],
    is_broken: bool,
) -> None:
    if is_broken:
        (project / "draftyard.yaml").write_text("[", encoding="utf-8")
    for name, value in {"_DRAFTYARD_COMPLETE": "bash_complete", **asked}.items():
        monkeypatch.setenv(name, value)

    _run()

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


EVIL = "ev\nil\x1b[2J\x07\u2028x"


@pytest.mark.parametrize("verb", [verb for verb, words in VERBS.items() if words])
def test_a_name_with_line_breaks_and_controls_tears_no_error(
    project: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    words = VERBS[verb]
    hostile = [[EVIL, *words[1:]], [f"{EVIL}.yaml", *words[1:]], [f"./{EVIL}:{EVIL}", *words[1:]]]
    hostile += [
        [EVIL if word == "nosuch" else word for word in words],
        [*words, "--db", f"{EVIL}/x"],
        [*words, f"--{EVIL}"],
    ]
    for chosen in hostile:
        _run(*verb.split(), *chosen)

        told = [line for line in capsys.readouterr().err.split("\n") if line]
        assert [line for line in told if line.startswith("il") or "\x1b" in line or "\u2028" in line] == [], told


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("hosts.yaml", 'hosts: {"g\\npu": {"k\\ney": 1, port: "a\\nb"}}', ["hosts"]),
        ("hosts.yaml", '"k\\ney": 1\n"k\\ney": 2', ["hosts"]),
        ("draftyard.yaml", '"k\\ney": 1\nkeys: {"a\\nb": q}', ["ls"]),
        ("draftyard.yaml", 'keys: {"a\\nb": q}', ["watch", "--once"]),
        (
            "recipes/x.yaml",
            'name: x\nbase: {entry: script}\n"k\\ney": 1\nbranches: {"b\\nad": {extends: "no\\nne"}}',
            ["recipe", "check", "x"],
        ),
    ],
)
def test_every_fault_of_a_file_is_one_line_whatever_names_it_holds(
    project: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, words: list[str]
) -> None:
    (project / name).write_text(text)

    assert _run(*words) == 2

    told = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert [line for line in told if not line.startswith(("try: ", "  ")) and name not in line] == []
