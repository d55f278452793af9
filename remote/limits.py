"""The memory limit of a job without a GPU: a limit on what each of its processes may allocate.

RLIMIT_DATA counts heap, anonymous and private writable mappings, touched or not. RLIMIT_AS would count code and
address space that is only reserved as well: torch's libraries alone map gigabytes, so a limit of a useful size could
be set only after they are loaded, and not from outside. Past the limit an allocation is refused, which the job sees
as a MemoryError or torch's "can't allocate memory"; nothing is killed. Kernels before 4.7 count the heap alone.

On a machine with GPUs no limit is set: CUDA maps more than it uses, and its memory is the card's.
"""

from __future__ import annotations

import resource
from pathlib import Path

from remote.job import Job

_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def limit_allocations(limit_bytes: int) -> None:
    """Of this process and those it starts. A lower hard limit, set by whoever runs the machine, stays."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def allocation_limit(job: Job, nodes: tuple[str, ...] = _GPU_NODES) -> int | None:
    """Bytes that each of the job's processes may allocate; None where it has a GPU or no limit is wished."""
    has_gpu = bool(job.gpus) or any(Path(node).exists() for node in nodes)
    return None if has_gpu else job.memory_limit_bytes
