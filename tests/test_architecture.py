"""Keeps the house as drawn in docs/architecture.md: who imports whom, what parses where, how large things grow."""

import ast
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.xdist_group("architecture")  # every file is read once, in one process
ROOMS = ("orchestrator", "remote", "recipes", "tui")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
ALLOWED_ROOMS = {
    "remote": {"remote"},
    "orchestrator": {"orchestrator", "remote"},
    "tui": {"tui", "orchestrator"},
    "recipes": {"remote"},
}
# One importer each: the package and the folder or file it is confined to.
SINGLE_IMPORTERS = {
    "fabric": "orchestrator/shell/",
    "paramiko": "orchestrator/shell/",
    "sqlmodel": "orchestrator/store/",
    "sqlalchemy": "orchestrator/store/",
    "transformers": "remote/drafter/target",
    "triton": "remote/drafter/kernels/",
    "textual": "tui/",
    "yaml": "orchestrator/recipe/",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def sources(*starts: str) -> list[Path]:
    """The modules below these. A rule is one test of a room, not one of each file: a thousand tests cost seconds to count."""
    return [path for path in SOURCES if relative(path).startswith(starts)]


def is_stdlib_file(name: str) -> bool:
    return name.startswith("remote/") and not name.startswith("remote/drafter/")


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, the module first; a file is read once for all tests."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} is a relative import"
            found.append((node.lineno, node.module or ""))
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_with_the_grain(room: str) -> None:
    for name, line, module in ((relative(path), *each) for path in sources(f"{room}/") for each in imports_of(path)):
        top = module.split(".")[0]
        where = f"{name}:{line} imports {module}"
        assert top not in ROOMS or top in ALLOWED_ROOMS[room], where
        assert top != "torch" or room == "remote", where
        if top in SINGLE_IMPORTERS:
            assert name.startswith(SINGLE_IMPORTERS[top]), where
        if is_stdlib_file(name):
            assert top in sys.stdlib_module_names or top == "remote", where
        if room == "orchestrator" and top == "remote":
            assert not module.startswith("remote.drafter"), where


# Beside actions, what only says or spells something. Whole module names: what lies below one is another one.
WORDS = {"errors", "gate", "given", "lazy", "nearest", "units", "recipe.layers", "recipe.overrides", "store.rows"}
READS = {
    "errors",
    "lazy",
    "redact",
    "store.acceptance",
    "store.filter",
    "store.logs",
    "store.place",
    "store.reads",
    "store.rows",
    "units",
}
MAY_SEE = {
    "tui": {f"orchestrator.{name}" for name in READS},
    "orchestrator/verbs": {f"orchestrator.{name}" for name in WORDS} | {"remote.wire"},
}
OF_THEIR_OWN = {
    "orchestrator/verbs/follow.py": {"orchestrator.follow.follower"},  # the verb is the follower
    "orchestrator/verbs/screen.py": {"tui.opening"},  # and this one the screens
    "orchestrator/verbs/reference.py": {"orchestrator.cli", "orchestrator.store.filter"},  # it writes docs/reference.md
}


LOADERS = ("lazy", "loaded")


@cache
def loaded_by(path: Path) -> list[tuple[int, str]]:
    """Modules of ours that are loaded when it runs: imported anywhere but for types, or named to `lazy`."""
    for_types = [node for node in nodes_of(path) if isinstance(node, ast.If) and is_named(node.test, "TYPE_CHECKING")]
    left_out = {below for node in for_types for statement in node.body for below in ast.walk(statement)}
    found: list[tuple[int, str]] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and is_named(node.func, *LOADERS) and isinstance(node.args[0], ast.Constant):
            found.append((node.lineno, str(node.args[0].value)))
        elif isinstance(node, ast.ImportFrom) and node not in left_out:
            assert node.module
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name if is_module(name) else node.module) for name in inside]
        elif isinstance(node, ast.Import) and node not in left_out:
            found += [(node.lineno, alias.name) for alias in node.names]
    return found


def is_named(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


@cache
def is_module(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


@pytest.mark.parametrize("room", MAY_SEE)
def test_screens_and_verbs_call_actions_and_nothing_deeper(room: str) -> None:
    own = (room.replace("/", "."), "orchestrator.actions")

    for name, line, module in ((relative(path), *each) for path in sources(room) for each in loaded_by(path)):
        is_ours = module.split(".")[0] in ROOMS
        is_open = module.startswith(own) or module in MAY_SEE[room] | OF_THEIR_OWN.get(name, set())
        assert is_open or not is_ours, f"{name}:{line} loads {module}"


LOOKS_AT_FILES = {
    *(
        "access",
        "open",
        "stat",
        "lstat",
        "exists",
        "is_file",
        "is_dir",
        "is_symlink",
        "iterdir",
        "glob",
        "rglob",
        "scandir",
    ),
    *(
        "read_text",
        "read_bytes",
        "write_text",
        "write_bytes",
        "mkdir",
        "touch",
        "unlink",
        "connect",
        "create_connection",
    ),
}


def test_a_screen_looks_at_no_file_and_no_socket_itself() -> None:
    for path in sources("tui/"):
        calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        called = {getattr(node.func, "attr", getattr(node.func, "id", "")): node.lineno for node in calls}

        assert not called.keys() & LOOKS_AT_FILES, relative(path)
        assert not {module.split(".")[0] for _, module in imports_of(path)} & {"sqlite3", "socket"}, relative(path)


# What runs or unpacks what it reads. Allowed is the one `exec` of orchestrator/workplace.py: text of our own that is sent
# to a host and run there, so no call that this side makes.
RUNS_WHAT_IT_READS = {"dill", "marshal", "pickle", "shelve", "tarfile", "zipfile"}
RUNNERS = {"eval", "exec", "unpack_archive"}


@pytest.mark.parametrize("room", ["orchestrator", "tui"])
def test_nothing_that_was_read_is_unpickled_unpacked_or_run(room: str) -> None:
    for path in sources(f"{room}/"):
        for line, module in [*imports_of(path), *loaded_by(path)]:
            assert module.split(".")[0] not in RUNS_WHAT_IT_READS, f"{relative(path)}:{line} loads {module}"
        for node in nodes_of(path):
            # `exec` as a method is SQLModel's: a statement, with its values bound.
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            is_of_sql = isinstance(node, ast.Attribute) and name == "exec" and not is_named(node.value, "builtins")
            where = f"{relative(path)}:{getattr(node, 'lineno', 0)} calls {name}"
            assert name not in RUNNERS or is_of_sql, where


# What a room of the local side may load beside itself and the words of the house; the arrows of the drawing.
GROUND = {"errors", "given", "known", "nearest", "redact", "units", "lazy"}
BELOW = {
    "recipe": set(),
    "shell": {"host"},
    "store": set(),
    "failure": {"store"},  # its rows
    "follow": {"failure", "host", "launch", "launcher", "observe", "shell", "store", "workplace"},
}


@pytest.mark.parametrize("room", BELOW)
def test_a_room_loads_only_what_lies_below_it(room: str) -> None:
    for path in sources(f"orchestrator/{room}/"):
        seen = {module.split(".")[1] for _, module in loaded_by(path) if module.startswith("orchestrator.")}
        assert seen <= {room} | GROUND | BELOW[room], relative(path)


def test_nothing_of_the_local_side_loads_verbs_or_screens_but_they_themselves() -> None:
    above = ("orchestrator.cli", "orchestrator.verbs", "tui")
    for path in sources("orchestrator/", "remote/"):
        is_above = relative(path).startswith(("orchestrator/cli.py", "orchestrator/entry.py", "orchestrator/verbs/"))
        assert is_above or not any(module.startswith(above) for _, module in loaded_by(path)), relative(path)


@pytest.mark.parametrize("room", ["orchestrator", "remote", "tui"])
def test_the_drawing_names_every_file_of_a_room(room: str) -> None:
    drawing = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w*]+\.py", drawing))
    files = {path.name for path in (ROOT / room).glob("*.py") if not path.name.startswith("__")}

    assert {file for file in files if not any(fnmatch(file, word) for word in named)} == set()


def test_modules_are_loaded_by_name_in_one_place() -> None:
    local = sources("orchestrator/", "tui/")
    loaders = {
        relative(path) for path in local if any(name.split(".")[0] == "importlib" for _, name in imports_of(path))
    }

    # Beside it: a library that may be missing.
    assert loaders == {"orchestrator/lazy.py", "orchestrator/actions/chart.py"}


def test_every_module_named_to_be_loaded_later_is_there() -> None:
    """Nothing looks for it before it is used."""
    names = {name for path in SOURCES for _, name in loaded_by(path) if name.split(".")[0] in ROOMS}

    assert {name for name in names if not is_module(name)} == set()


def test_remote_parses_on_python_3_10() -> None:
    for path in sources("remote/"):
        ast.parse(path.read_text(encoding="utf-8"), filename=relative(path), feature_version=(3, 10))


@pytest.mark.parametrize("room", ROOMS)
def test_files_and_functions_stay_small(room: str) -> None:
    for path in sources(f"{room}/"):
        module, *inside = nodes_of(path)
        functions = [node for node in inside if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

        assert path.read_text(encoding="utf-8").count("\n") <= 400, relative(path)
        assert isinstance(module, ast.Module)
        assert ast.get_docstring(module), f"{relative(path)}: a module says what it is responsible for"
        for function in functions:
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            assert length <= 60, f"{relative(path)}, {function.name}: {length} lines"


@pytest.mark.slow
def test_importing_every_module_starts_nothing_and_needs_no_order() -> None:
    modules = [relative(p)[:-3].replace("/", ".") for p in SOURCES if p.name not in ("__init__.py", "__main__.py")]
    local = [m for m in modules if not m.startswith(("remote.drafter", "recipes.examples"))]
    code = "import importlib, sys, threading\n" + "\n".join(f"importlib.import_module({m!r})" for m in local)
    code += "\nassert threading.active_count() == 1\nassert 'torch' not in sys.modules"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr


def test_the_shipped_files_import_without_the_rest(tmp_path: Path) -> None:
    """An unpacked copy of remote/ stands alone: no installed packages (-S, -I), nothing of ours beside it."""
    copy = tmp_path / "tree"
    shutil.copytree(ROOT / "remote", copy / "remote")
    names = [
        relative(p)[:-3].replace("/", ".") for p in SOURCES if is_stdlib_file(relative(p)) and p.stem != "__init__"
    ]
    code = f"import sys; sys.path.insert(0, {str(copy)!r})\n" + "\n".join(f"import {name}" for name in names)

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
