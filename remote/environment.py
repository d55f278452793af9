"""The environment a job runs in: what was there, our defaults, what the job's owner set, our marker.

Later wins in that order; only the marker cannot be overridden. Values are secrets until shown
otherwise: they reach the host in a file of mode 0600 and are printed nowhere.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from remote import allocator
from remote.hiding import NAMES, secret_names
from remote.job import Job
from remote.processes import ATTEMPT_MARK, RUN_MARK
from remote.rundir import RunDir, read_json

DEFAULTS = {
    "PYTHONUNBUFFERED": "1",  # else a print of one line a second stays unseen for minutes
    "PYTHONFAULTHANDLER": "1",
    "LANG": "C.UTF-8",  # a container entered without a login shell has none, and Python falls to ASCII
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of nvidia-smi; CUDA's own is fastest first
    "CUDA_MODULE_LOADING": "LAZY",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
# The bundled trainer alone: what it reads is on the host. A script of the user's own may load its data from a hub.
OFFLINE = {"HF_HUB_OFFLINE": "1"}
BUNDLED = "remote.drafter"
# A socket's path holds 107 bytes, and multiprocessing appends some 31 to the folder for temporary files.
LONGEST_TMPDIR = 76
LONGEST_WORD = 128 * 1024  # MAX_ARG_STRLEN, execve(2); the NUL at its end counts


def temporary_folder(run: RunDir) -> Path | None:
    """Where jobs put temporary files: /tmp is often small, in RAM, or under a quota. Shared, for torch keeps compiled
    kernels there from run to run. None where its path is too long for a socket in it: then the host's own is used."""
    folder = run.root.parent.parent / "tmp"
    return folder if len(os.fsencode(folder)) <= LONGEST_TMPDIR else None


def cannot_start(error: OSError | ValueError, argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Why the job's first process did not come to be; of what is too long which one, as the kernel names the program alone."""
    if not isinstance(error, OSError):  # a NUL byte in an argument or a variable
        return f"cannot start {argv[0]!r}: {error}"
    told = f"cannot start {error.filename or argv[0]}: {error.strerror}"
    if error.errno != errno.E2BIG:
        return told
    sizes = {f"variable {name}": len(os.fsencode(f"{name}={value}")) for name, value in environment.items()}
    sizes |= {f"argument {place}": len(os.fsencode(word)) for place, word in enumerate(argv)}
    longest = max(sizes, key=lambda name: sizes[name])
    if sizes[longest] < LONGEST_WORD:
        return (
            f"{told}; arguments and variables are {sum(sizes.values())} bytes together, {longest} the largest of them"
        )
    return (
        f"{told}; {longest} is {sizes[longest]} bytes, and Linux takes less than {LONGEST_WORD} in one: put what it holds "
        "in a file on the host, and the file's path in its place"
    )


def job_environment(run: RunDir, job: Job, *, inherited: dict[str, str]) -> dict[str, str]:
    """Every variable of the job's first process."""
    own = {str(name): str(value) for name, value in (read_json(run.env_file) or {}).items()}
    work_dir = run.root.parent.parent
    # What describes the connection it was started over, not the machine it runs on.
    base = {name: value for name, value in inherited.items() if not name.startswith(("SSH_", "DRAFTYARD_"))}
    environment = {
        **base,
        **DEFAULTS,
        **(OFFLINE if BUNDLED in job.argv else {}),
        **job.variables,
        "HF_HOME": base.get("HF_HOME", str(work_dir / "cache" / "huggingface")),
    }
    temporary = temporary_folder(run)
    if temporary is not None:
        environment["TMPDIR"] = str(temporary)
    if not any(name in own for name in allocator.NAMES):
        environment |= dict.fromkeys(allocator.NAMES, allocator.DEFAULT)
    else:
        environment = {name: value for name, value in environment.items() if name not in allocator.NAMES}
    if job.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus)
    # The shipped tree first, so that `import remote.report` works from any script in it.
    python_path = [job.cwd, own.get("PYTHONPATH") or base.get("PYTHONPATH", "")]
    # The interpreter's own programs (torchrun, ...) before others of the same name.
    environment["PATH"] = f"{Path(sys.executable).parent}:{base.get('PATH', os.defpath)}"
    environment |= own
    environment["PYTHONPATH"] = ":".join(part for part in python_path if part)
    if job.memory_limit_bytes is not None:
        environment["DRAFTYARD_MEMORY_LIMIT_BYTES"] = str(job.memory_limit_bytes)
    if job.data_dir is not None:
        environment["DRAFTYARD_DATA_DIR"] = job.data_dir
    environment["DRAFTYARD_RUN_DIR"] = str(run.root)
    environment["DRAFTYARD_WORK_DIR"] = str(work_dir)
    environment[NAMES] = secret_names(own, (read_json(run.spec_json) or {}).get("env") or {})
    environment[RUN_MARK] = job.run_id
    environment[ATTEMPT_MARK] = str(job.attempt)
    return environment
