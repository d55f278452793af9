"""The wheel, installed where nothing else is: the local side with its data files, and no torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("smollm2", "qwen3-8b", "qwen3.6-27b", "own-script")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # builds, and installs the local side's dependencies


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that holds the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("package")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True, timeout=300)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (wheel,) = folder.glob("*.whl")
    # What a command then loads is compiled as it is loaded.
    into = [*pip, "--python", folder / "venv" / "bin" / "python", "install", "--no-compile"]
    subprocess.run([*into, "--constraint", ROOT / "constraints.txt", wheel], check=True, timeout=600)
    return folder / "venv" / "bin"


def test_the_wheel_holds_all_the_local_side_needs_and_no_torch(installed: Path, tmp_path: Path) -> None:
    """From an empty folder: recipes, plans, a shipped trainer, a store; what the host lacks is named."""
    home = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)}
    environment = {"PATH": os.environ["PATH"], **home}

    def draftyard(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [installed / "draftyard", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "4 branches" in draftyard("recipe", "check", *RECIPES)
    assert "peak" in draftyard("plan", "qwen3.6-27b", "-b", "ddtree", "--gpu", "95GiB")
    assert "verified" in draftyard("deploy", "smollm2", "--host", "local")
    lacking = draftyard("smoke", "smollm2", "--host", "local", code=1)
    draftyard("ls")
    assert "torch is not installed" in lacking
    # What `doctor --fix` installs.
    assert list(installed.parent.glob("lib/*/site-packages/orchestrator/constraints.txt"))
    assert "pip install 'torch>=" in lacking
    assert not list(installed.parent.glob("lib/*/site-packages/torch"))
