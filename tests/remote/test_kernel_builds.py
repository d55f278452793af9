"""The kernels compile for cards that are not here, and fit the shared memory of each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SHARED_BYTES = {90: 227 * 1024, 120: 99 * 1024}  # of one program: H200; RTX PRO 6000 and the consumer cards


@pytest.mark.slow  # the compiler takes up to 30 s of processor time
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capability", "parts", "count"), [(90, ["attention", "hopper"], 11), (120, ["attention", "others"], 22)]
)
def test_kernels_compile_and_fit_the_shared_memory(capability: int, parts: list[str], count: int) -> None:
    """In a process of its own, with Triton's compiler instead of its interpreter."""
    code = (
        "import os, runpy, sys, tests.remote\n"  # the package chooses the interpreter: undone before Triton is loaded
    )
    code += "os.environ['TRITON_INTERPRET'] = '0'\n"
    code += f"sys.argv[1:] = {[str(capability), *parts]}\nrunpy.run_module('tests.remote.kernel_builds', run_name='__main__')"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(built) == count
    too_large = [each for each in built if each["shared_bytes"] > SHARED_BYTES[capability]]
    assert not too_large
