"""The command line as a program: quick, quiet in pipes, exact exit codes, JSON everywhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from orchestrator import cli
from orchestrator.recipe import BUNDLED
from orchestrator.store.rows import Document, NewRun, State
from orchestrator.store.writes import Store
from orchestrator.verbs import reference
from tests.orchestrator.yard import RECIPE, Yard

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "textual", "fabric", "paramiko", "sqlmodel", "sqlalchemy", "pydantic")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own: recipes/, runs.db beside it, settings and work folder under the same roof."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("DRAFTYARD_DB", "DRAFTYARD_HOSTS", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def known_run(project: Path) -> str:
    """One run that has ended well, with a metric that went through NaN."""
    with Store(project / "runs.db") as store:
        spec = json.dumps({"recipe": "own", "branch": "main", "settings": {"lr": "1e-3"}})
        new = NewRun("kxxxaaaa", "train", "own", "main", "local", {Document.SPEC: spec}, num_steps=4, tags=("first",))
        store.create_run(new)
        store.new_attempt(new.id)
        store.set_state(new.id, State.SUCCEEDED, evidence="exit status 0 and the job's final event")
    return new.id


def _program(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "orchestrator.cli", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, timeout=60, check=False)


def _run(*arguments: str) -> int:
    """In this process: the exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def _modules_after(code: str, *, cwd: Path) -> set[str]:
    script = f"import sys, json\nfrom orchestrator import cli\ntry:\n    {code}\nexcept SystemExit: pass\n"
    # A module that only waits to be loaded has cost nothing yet.
    script += "loaded = [name for name, module in sys.modules.items() if type(module).__name__ != '_LazyModule']\n"
    script += "print('\\n@' + json.dumps(loaded))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, env=env, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.rpartition("@")[2]))


def test_help_loads_nothing_heavy(project: Path) -> None:
    loaded = _modules_after("cli.main(['--help'])", cwd=project)

    assert not loaded & set(HEAVY)


@pytest.mark.slow
def test_help_is_quick(project: Path) -> None:
    def processor_s(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    library = min(processor_s("-c", "import click") for _ in range(5))
    helped = min(processor_s("-m", "orchestrator.cli", "--help") for _ in range(5))

    # It took 1.5 times what its library takes to load (85 ms of 57), however busy the machine was: twice that would be seen.
    assert helped < 2.2 * library


@pytest.mark.slow
@pytest.mark.parametrize("words", [["ls"], ["show", "kxxx"]])
def test_reading_verbs_load_neither_transports_nor_writes(known_run: str, project: Path, words: list[str]) -> None:
    loaded = _modules_after(f"cli.main({words!r})", cwd=project)

    assert not loaded & set(HEAVY)


def test_a_list_loads_only_what_a_list_needs(known_run: str, project: Path) -> None:
    loaded = _modules_after("cli.main(['ls'])", cwd=project)

    assert not loaded & {"difflib", "subprocess", "yaml", "orchestrator.follow.lease", "orchestrator.store.writes"}


def _verbs(command: click.Command = cli.draftyard, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every verb by the words that call it, those of groups too."""
    with click.Context(command) as context:
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                yield from _verbs(below, (*path, name))
        else:
            yield " ".join(path), command


VERBS = dict(_verbs())


def _parsed(line: str) -> click.Context:
    """What click makes of a command line, down to the verb itself; nothing is run. UsageError where it is refused."""
    program, *words = shlex.split(line)
    assert program == "draftyard"
    command: click.Command = cli.draftyard
    context = command.make_context(program, words)
    while isinstance(command, click.Group):
        name, below, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert below is not None
        command, context = below, below.make_context(name, rest, parent=context)
    return context


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_the_help_of_every_verb_has_two_examples_that_its_own_parser_takes(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [param.type for param in VERBS["import"].params if isinstance(param.type, click.Path)]
    for folder in folders:
        monkeypatch.setattr(folder, "exists", False)  # those of the examples are not here
    assert _run(*verb.split(), "--help") == 0
    told = capsys.readouterr().out
    lines = told.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()

    commands = [part for line in lines for part in line.split(" && ")]
    called = [_parsed(command).command_path for command in commands]

    assert len(lines) >= 2
    assert sum(path.startswith(f"draftyard {verb}".rstrip()) for path in called) >= 2
    assert "Exit codes:" in told
    assert "--json" in told or not verb


def test_root_help_prints_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--help") == 0

    told = capsys.readouterr().out
    assert "3      gate refused" in told
    assert "6      not finished" in told


def test_the_help_of_ls_says_which_way_a_bare_name_sorts(capsys: pytest.CaptureFixture[str]) -> None:
    """As `order_by` does: test_runs_are_sorted_paged_and_counted."""
    assert _run("ls", "--help") == 0

    assert "largest or newest first; -NAME the smallest or oldest, as -loss" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lauch"], "did you mean 'launch'?"),
        (["ls", "--knd", "all"], "--kind"),
        (["recipe", "chek", "x"], "check"),
        (["recipe", "show", "smolm2"], "no recipe 'smolm2'; known: "),
        (["recipe", "show", "smollm2", "-b", "ce_kll"], "no branch 'ce_kll'; known: "),
        (["recipe", "show", "smollm2", "--set", "optim.lrr=1"], "no key 'lrr'; known: "),
        (["ls", "stauts:failed"], "status"),
    ],
)
def test_an_unknown_word_is_exit_2_with_the_nearest(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert _run(*words) == 2

    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""
    assert not (project / "runs.db").exists()


def test_explain_says_what_a_key_means_its_range_and_who_wrote_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("recipe", "explain", "smollm2", "data.max_anchors") == 0

    head, meaning, *layers = capsys.readouterr().out.splitlines()
    assert head == "data.max_anchors = 8"
    assert meaning.startswith("  Most blocks drafted a step in each row, or in each document (see anchors_per)")
    assert meaning.endswith("It must be at least 1. (a whole number)")
    assert "<- this one" in layers[-1]


def test_check_warns_of_programs_that_a_scripts_folder_lacks(yard: Yard) -> None:
    yard.edit("tiny.yaml", RECIPE.replace('"train.py"]', '"trian.py"]').replace("quick.py}", "nope.py}"))

    assert yard.run("recipe", "check", "tiny") == 0

    assert yard.out.endswith("tiny.yaml: 4 branches, 2 warnings\n")
    assert re.search(r"tiny.yaml:\d+:\d+: command: 'trian.py' is not in .*job, which is what is shipped", yard.err)
    assert re.search(r"tiny.yaml:\d+:\d+: smoke.scripts.quick: 'nope.py' is not in ", yard.err)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["ls", "branch:man"], 0, "no run has branch 'man'; did you mean 'main'?"),
        (["ls", "tag:x,frist"], 0, "no run has tag 'x'; there is first"),
        (["ls", "lozz<3"], 0, "no run has reported 'lozz'; there is loss, "),
        (["ls", "settings.lr>1000"], 0, "no runs pass this filter"),
        (["evidence", "smollm3"], 2, "did you mean 'smollm2'"),
        (["evidence", "smollm3", "--json"], 2, ""),
        (["ls", "--db", "absent.db"], 0, "absent.db is not there"),
    ],
)
def test_a_slip_that_finds_nothing_is_named(
    known_run: str, capsys: pytest.CaptureFixture[str], words: list[str], code: int, told: str
) -> None:
    assert _run(*words) == code

    assert told in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "00", "0GiB"])
def test_a_card_of_no_bytes_is_answered_with_one_of_some(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("plan", "smollm2", "--gpu", size) == 2

    assert f"is {size}; nothing fits into that; write a size such as 95GiB" in capsys.readouterr().err


def test_a_digit_that_is_no_number_is_no_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("plan", "smollm2", "--gpu", "²") == 2

    assert "is '²'; write a size such as" in capsys.readouterr().err


def test_a_size_without_its_unit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("plan", "smollm2", "--gpu", "95") == 2

    assert "is 95 bytes; write the unit, such as 95GiB" in capsys.readouterr().err


def test_check_warns_of_data_that_nobody_has_and_a_launch_of_it_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (BUNDLED / "smollm2.yaml").read_text(encoding="utf-8")
    (project / "recipes").mkdir(exist_ok=True)
    text = text.replace("smollm2.held_out", "gone").replace("name: smollm2", "name: mine")
    (project / "recipes" / "mine.yaml").write_text(
        text.replace("$schema=", "$schema=https://example.org/"), encoding="utf-8"
    )

    assert _run("recipe", "check", "recipes/mine.yaml") == 0

    captured = capsys.readouterr()
    assert captured.out == "recipes/mine.yaml: 4 branches, 1 warning\n"
    assert captured.err.startswith(
        "warning: recipes/mine.yaml:12:15: data.held_out: 'gone.jsonl' is neither in recipes/data"
    )
    assert _run("recipe", "check", "recipes/mine.yaml", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["recipes"][0]["warnings"]) == 1
    assert _run("launch", "mine") == 2
    assert "data.held_out: 'gone.jsonl' is neither in" in capsys.readouterr().err


def test_an_unknown_run_is_exit_5(known_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("show", "zzzz") == 5

    assert "zzzz" in capsys.readouterr().err


# What each verb is told that nobody has; where it takes neither run, recipe nor host, a word too many.
UNKNOWN = {
    "run": [
        *[
            "show",
            "logs",
            "metrics",
            "watch",
            "compare",
            "diff",
            "wait",
            "stop",
            "resume",
            "evaluate",
            "export",
            "pull",
            "tag",
            "note",
            "rm",
            "restore",
            "purge",
        ]
    ],
    "recipe": [
        "recipe check",
        "recipe show",
        "recipe explain",
        "recipe diff",
        *["plan", "deploy", "prepare", "smoke", "launch"],
    ],
    "host": ["doctor", "reap", "gc"],
    "word": ["hosts", "follow", "reset-term", "config show", "recipe list"],
}
WORDS = {
    verb: {"run": ["zzzz"], "recipe": ["nowhere"], "host": ["nohost"], "word": ["odd"]}[kind]
    for kind, verbs in UNKNOWN.items()
    for verb in verbs
}
WORDS |= {
    "compare": ["zzzz", "@last"], "diff": ["@last", "zzzz"], "recipe explain": ["nowhere", "optim.lr"],
    "recipe diff": ["smollm2", "nowhere"], "plot": ["zzzz", "loss"], "mark": ["zzzz", "lost", "why"],
    "evidence": ["a", "b"], "ls": ["status:nowhere"], "import": ["nowhere"], "watch": ["zzzz", "--once"],
}  # fmt: skip


def test_no_verb_is_left_out_of_the_errors() -> None:
    assert WORDS.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_tells_what_it_does_not_know_as_json(
    verb: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _run(*verb.split(), *WORDS[verb], "--json")

    error = json.loads(capsys.readouterr().out)
    assert error["schema_version"] == 1
    assert error["error"]["exit_code"] == code
    assert code == (5 if "zzzz" in WORDS[verb] else 2)
    assert error["error"]["message"]


def test_an_error_is_json_when_json_is_asked_for(known_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("show", "zzzz", "--json") == 5

    error = json.loads(capsys.readouterr().out)
    assert error["schema_version"] == 1
    assert error["error"]["reason"] == "run_not_found"
    assert error["error"]["exit_code"] == 5


@pytest.mark.parametrize(
    "words",
    [
        ["ls"], ["show", "@last"], ["metrics", "@last"], ["compare", "@last", "kxxx"], ["diff", "@last", "kxxx"],
        ["evidence"], ["hosts"], ["config", "show"], ["tag", "@last"], ["note", "@last"], ["logs", "@last"],
        ["recipe", "list"], ["recipe", "check", "own-script"], ["recipe", "show", "smollm2"], ["recipe", "explain", "smollm2", "optim.lr"],
        ["recipe", "diff", "smollm2:ce", ":ce_kl", "--effects"], ["plan", "smollm2"], ["wait", "@last"], ["tag", "@last", "x"],
        ["note", "@last", "text"], ["rm", "@last"],
    ],
)  # fmt: skip
def test_every_reading_verb_prints_json(known_run: str, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert _run(*words, "--json") == 0

    out = capsys.readouterr().out
    documents = [json.loads(out)] if words[0] != "logs" else [json.loads(line) for line in out.splitlines()]
    assert all(document["schema_version"] == 1 for document in documents)


def test_a_tag_that_is_not_there_is_not_taken_away(known_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("tag", known_run, "-r", "nope") == 2

    assert f"run {known_run} has no tag 'nope'; it has " in capsys.readouterr().err


def test_a_removed_run_comes_back_or_goes_for_good(known_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("rm", "@last") == 0
    assert capsys.readouterr().out == f"{known_run}  in the bin; out again: draftyard restore {known_run}\n"
    assert _run("ls", "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []
    assert _run("restore", known_run) == 0
    assert _run("restore", "@last") == 1
    assert f"run {known_run} is not in the bin" in capsys.readouterr().err
    assert _run("rm", known_run) == 0

    assert _run("purge", known_run, "--no-input") == 2  # a question that nobody may be asked
    assert _run("purge", known_run, "--yes") == 0
    assert _run("show", known_run) == 5


def test_a_pipe_gets_neither_colours_nor_cut_cells(known_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("ls") == 0

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "…" not in out


def test_colours_are_there_when_asked_for_and_no_color_wins(
    known_run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run("ls", "--color", "always") == 0
    assert "\x1b[" in capsys.readouterr().out

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert _run("ls") == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_closed_pipe_is_silent(known_run: str, project: Path) -> None:
    command = f"{sys.executable} -m orchestrator.cli recipe show smollm2 -q | head -n 1; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(["bash", "-c", command], cwd=project, env=env, capture_output=True, text=True, check=True)

    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141")  # 0: all of it fitted into the pipe


@pytest.mark.slow
def test_text_that_the_terminal_cannot_spell_is_no_crash(known_run: str, project: Path) -> None:
    with Store(project / "runs.db") as store:
        store.note(known_run, "γ × 10 — schön")

    done = _program("show", known_run, cwd=project, LANG="C", LC_ALL="C", PYTHONIOENCODING="ascii")

    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


def test_the_database_is_beside_recipes_unless_named(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / "mine.db"
    below = project / "recipes" / "deep"
    below.mkdir()

    found = json.loads(_program("config", "show", "--json", cwd=below).stdout)
    named = json.loads(_program("config", "show", "--json", cwd=below, DRAFTYARD_DB=str(other)).stdout)

    values = [{item["name"]: item for item in told["settings"]} for told in (found, named)]
    assert values[0]["db"]["value"] == str(project / "runs.db")
    assert values[1]["db"] == {"name": "db", "value": str(other), "origin": "DRAFTYARD_DB"}


def _asked(line: str) -> dict[str, str]:
    """What bash's completion script puts into the environment."""
    return {"_DRAFTYARD_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}


def _complete(line: str) -> list[str]:
    """As the program answers, in this process."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(said):
        for name, value in _asked(line).items():
            patched.setenv(name, value)
        _run()
    return [item.partition(",")[2] for item in said.buffer.getvalue().decode().splitlines()]


def test_completion_knows_verbs_runs_recipes_and_hosts_from_local_state(known_run: str, project: Path) -> None:
    (project / "hosts.yaml").write_text("hosts:\n  gpubox: {address: 10.1.2.3}\n", encoding="utf-8")

    assert b"launch" in _program(cwd=project, **_asked("draftyard la")).stdout
    assert known_run in _complete("draftyard show k")
    assert "@last" in _complete("draftyard show @")
    assert "smollm2" in _complete("draftyard launch smo")
    assert _complete("draftyard launch smollm2 --host gpu") == ["gpubox"]
    assert _complete("draftyard launch smollm2 -b ce_kl_") == ["ce_kl_cap"]
    assert _complete("draftyard recipe show smollm2 -b d") == ["dpace"]
    assert _complete("draftyard ls --sort crea") == ["created"]
    assert known_run in _complete(f"draftyard plot {known_run} k")
    assert _complete("draftyard launch nosuch -b x") == [""]  # an empty answer


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed_for_each_shell(project: Path, shell: str) -> None:
    done = _program(cwd=project, _DRAFTYARD_COMPLETE=f"{shell}_source")

    assert done.returncode == 0
    assert b"draftyard" in done.stdout


def test_the_reference_page_is_what_the_verbs_say_now() -> None:
    written = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")

    assert written == reference.page(), "run: python -m orchestrator.verbs.reference docs/reference.md"


def _break(*_: object, **__: object) -> None:
    raise ZeroDivisionError("by zero with hf_canary1234567890\nand more")


@pytest.mark.parametrize("words", [(), ("-v",), ("--json",)])
def test_a_fault_of_our_own_ends_in_one_line_without_secrets(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("orchestrator.actions.hosts.known", _break)

    code = _run("hosts", *words)
    out, err = capsys.readouterr()

    assert code == 1
    told = json.loads(out)["error"]["message"] if "--json" in words else err.splitlines()[-1]
    assert "draftyard broke at hosts.py:" in told
    assert "ZeroDivisionError: by zero with " in told
    assert told.endswith("; please report it")
    assert "hf_canary" not in out + err
    assert ("Traceback" in err) == ("-v" in words)
    assert "-v" in words or len(err.splitlines()) == ("--json" not in words)
