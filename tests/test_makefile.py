"""What `make` does before there is an environment to do it in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_PIP = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p "$3/bin" && touch "$3/bin/python"
exit 1
"""  # as Debian's python3 without python3-venv: new enough, and a venv that is left half made


def test_a_venv_that_could_not_be_made_passes_for_none_the_next_time(tmp_path: Path) -> None:
    python, venv = tmp_path / "python3", tmp_path / "venv"
    python.write_text(WITHOUT_PIP)
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", f"VENV={venv}", f"{venv}/bin/python"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of a make above

    told = [
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        for _ in range(2)
    ]

    assert [done.returncode for done in told] == [2, 2]
    assert [done.stdout for done in told] == ["no venv module: install it (Debian: apt-get install python3-venv)\n"] * 2
