"""What one exception or one line of the system's means: rules from text to a failure word.

A rule looks at the class of an exception and at its message, never at a whole log, because a log may
quote yesterday's failure. So may a message: an error of the card's memory begins with its words (`spoken`), and where
they stand further on they are somebody else's. The first rule that fits counts, so look-alikes stand before what they
look like. Texts are those of PyTorch 1.x to 2.13, CUDA, cuBLAS, cuDNN, NCCL, Triton, the Linux kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.failure import xid
from orchestrator.failure.oom_text import numbers, shortage
from orchestrator.failure.spoken import ELSEWHERE, HEAD, OF_SYSTEM, ONLY_TELLS, carried, is_of_another, own_words
from orchestrator.store.rows import Reason

EXCEPTION = "exception"  # failed by an exception that no rule knows better


@dataclass(frozen=True)
class Meaning:
    kind: str  # a Reason, or EXCEPTION
    hint: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_certain: bool = True
    is_echo: bool = False  # what happens to the others after one has failed: never the first cause


# import name -> what pip calls it, where they differ
_DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "bs4": "beautifulsoup4",
    "flash_attn": "flash-attn",
    "google.protobuf": "protobuf",
    "dateutil": "python-dateutil",
    "OpenSSL": "pyopenssl",
    "dotenv": "python-dotenv",
    "pynvml": "nvidia-ml-py",
    "triton": "triton",
    "sentence_transformers": "sentence-transformers",
}

_NO_MODULE = re.compile(r"No module named '?(?P<name>[\w.]+)'?")
_NO_METADATA = re.compile(r"No package metadata was found for (?P<name>[\w.\-]+)")
_NEEDS_LIBRARY = re.compile(r"requires the (?P<name>[\w\-]+) library but it was not found", re.IGNORECASE)
_ADVISED = re.compile(r"pip install (?:-U |--upgrade )?[`'\"]?(?P<name>[A-Za-z][\w.\-]*)")
_NO_LIBRARY = re.compile(
    r"(?P<name>lib[\w.+\-]+\.so[.\d]*): (?:cannot open shared object file|[Kk]ann die Shared-Object-Datei nicht öffnen"
    r"|[Nn]e peut (?:pas )?ouvrir le fichier d'objet partagé|[Nn]o se puede abrir el (?:archivo|fichero) (?:del|de) objeto)"
)
KILLED_ELSEWHERE = r"Getötet|Processus arrêté|Terminado \(killed\)"  # of SIGKILL, as shells say it elsewhere


def _missing(kind: str, text: str) -> Meaning | None:
    module = _NO_MODULE.search(text) if kind.endswith(("ModuleNotFoundError", "ImportError")) else None
    module = module or (_NO_MODULE.search(text) if "/python" in text.split(":")[0] else None)
    if module is not None:
        return _missing_module(module["name"])
    library = _NO_LIBRARY.search(text)
    if library is not None:
        hint = f"{library['name']} is not on the host's library path; install the package that brings it, or set LD_LIBRARY_PATH"
        return Meaning(Reason.MISSING_DEPENDENCY, hint, {"library": library["name"]})
    package = _NO_METADATA.search(text) or _NEEDS_LIBRARY.search(text)
    if package is None and kind.endswith(("ImportError", "PackageNotFoundError")):
        package = _ADVISED.search(text)
    if package is None:
        return None
    name = package["name"].lower()
    return Meaning(Reason.MISSING_DEPENDENCY, _install(name), {"distribution": name, "install": f"pip install {name}"})


def _missing_module(module: str) -> Meaning:
    top = module.split(".")[0]
    facts = {"module": module}
    if top == "remote":
        hint = "a file of the shipped tree is missing on the host; deploy the recipe again"
        return Meaning(Reason.MISSING_DEPENDENCY, hint, facts)
    name = _DISTRIBUTIONS.get(module) or _DISTRIBUTIONS.get(top) or top.replace("_", "-").lower()
    return Meaning(
        Reason.MISSING_DEPENDENCY, _install(name), {**facts, "distribution": name, "install": f"pip install {name}"}
    )


def _install(name: str) -> str:
    return f"install it in the host's Python: python -m pip install {name}"


KILLED = "killed from outside, mostly by the kernel's out-of-memory killer; `dmesg | grep -i kill` on the host says so"
KILLED_BY_SOMEBODY = "killed by somebody: the kernel's out-of-memory killer did not kill anything meanwhile"
_GPU_HINTS = {
    "larger_than_card": "one allocation is larger than the whole card: a tensor has a shape nobody meant, or needs chunks",
    "fragmentation": "enough is reserved but in pieces: pad to a few sizes, or let segments grow (expandable_segments:True)",
    "other_process": "another process holds the memory that is missing; free the card or choose another",
    "process_limit": "the process reached the limit set on it, not the card's end; raise the cap or make the step smaller",
    "full": "the card is full: fewer anchors, a smaller block, smaller loss chunks or activation checkpointing",
}
_GPU_HINT = "the card is full: look at who holds it, and make the step smaller"


def _gpu_oom(text: str, level: str) -> Meaning:
    facts = numbers(text)
    found = shortage(facts)
    facts |= {"level": level} | ({"shortage": found} if found else {})
    return Meaning(Reason.GPU_OOM, _GPU_HINTS.get(found or "", _GPU_HINT), facts)


def _handle(text: str) -> Meaning:
    """A library that could not begin: mostly for want of memory, but a broken driver and a fork look the same."""
    hint = "no room for a library's handle, or its driver is broken, or CUDA was used before a fork: what was free says which"
    return Meaning(Reason.GPU_OOM, hint, {"level": "handle"}, is_certain=False)


def _quoted(text: str) -> Meaning:
    return Meaning(EXCEPTION, "its message only quotes another failure: the class and the traceback say what failed")


def _elsewhere(text: str) -> Meaning:
    hint = "it tells of an out-of-memory error of another process: look for that one's failure"
    return Meaning(EXCEPTION, hint, is_echo=True)


def _pinned(text: str) -> Meaning:
    hint = (
        "the host could not pin that much of its memory (none of the card's is missing): read fewer batches ahead, "
        "or raise the limit of locked memory (`ulimit -l`)"
    )
    return Meaning(Reason.HOST_OOM, hint, numbers(text))


def _locked(text: str) -> Meaning:
    return Meaning(
        EXCEPTION, "the limit of locked memory is too low for it: `ulimit -l unlimited` (memlock) on the host"
    )


def _host(text: str) -> Meaning:
    hint = (
        "the host (or a limit set on the process) had no memory left: fewer workers, smaller batches, or a larger limit"
    )
    return Meaning(Reason.HOST_OOM, hint, numbers(text))


def _maybe_host(text: str) -> Meaning:
    return Meaning(Reason.HOST_OOM, KILLED, numbers(text), is_certain=False)


def _cgroup(text: str) -> Meaning:
    hint = "the container's memory limit was reached; raise it, or use fewer workers and smaller batches"
    return Meaning(Reason.CGROUP_OOM, hint, numbers(text))


def _shm(text: str) -> Meaning:
    hint = "/dev/shm is full: fewer DataLoader workers, or a larger one (docker: --shm-size; lxc: a tmpfs mount)"
    return Meaning(Reason.SHM, hint)


def _disk(text: str) -> Meaning:
    hint = (
        "a disk of the host is full (space, inodes or quota): `draftyard gc` frees old trees, keep_last old checkpoints"
    )
    return Meaning(Reason.DISK_FULL, hint)


def _fault(text: str) -> Meaning:
    hint = "the card or its driver failed, not the program: `nvidia-smi` and `dmesg | grep -i xid` on the host"
    return Meaning(Reason.GPU_FAULT, hint, xid.facts(text))


def _xid(text: str) -> Meaning:
    told = xid.facts(text)
    if not told or xid.is_fault(told["xid"]):
        return _fault(text)
    hint = f"Xid {told['xid']} is the driver's word on a program, or news: it says nothing against the card"
    return Meaning(EXCEPTION, hint, told, is_certain=False)


def _echo(text: str) -> Meaning:
    return Meaning(EXCEPTION, "an echo: another process failed first, look for its failure", is_echo=True)


def _unheard(text: str) -> Meaning:
    hint = "it stood still, or its host could not be reached: look at that host and at the network between the two"
    return Meaning(EXCEPTION, hint, is_echo=True)


def _cut_off(text: str) -> Meaning:
    return Meaning(EXCEPTION, "look at this host's network: `ip link`, the cable, lines of its driver in `dmesg`")


def _kernel_limit(text: str) -> Meaning:
    hint = "a GPU kernel wants more on-chip shared memory than the card has (no VRAM is missing): smaller tiles or num_stages"
    return Meaning(EXCEPTION, hint, numbers(text))


def _traced_in_threads(text: str) -> Meaning:
    hint = (
        "a compiled model was first called by several threads at once: call it once before they start, or under a lock"
    )
    return Meaning(EXCEPTION, hint)


def _cache_blocks(text: str) -> Meaning:
    return Meaning(EXCEPTION, "the server's own budget leaves no room for its cache: raise gpu_memory_utilization")


def _nonfinite(text: str) -> Meaning:
    return Meaning(
        Reason.NONFINITE, "a loss or gradient became NaN or infinite: lower lr, more warm-up, look at the last steps"
    )


# (classes, message, meaning): both patterns must be found; the order is the precedence.
_ANY = r""
_OWN = (  # classes that a program's own error of the card's memory has; "" is a line of the system's
    r"^$|RuntimeError|OutOfMemory|AcceleratorError|C(UDA|uda)\w*Error|DistBackendError|LinAlgError|Inductor|CompilerFailed"
    r"|MemoryError|CompilationError|RuntimeException|ProcessRaised|bad_alloc"
)
_UNQUOTED = r"\A[^'\"`/]*?"  # nothing quoted and no path before it
_PLACE = rf"{HEAD}(?:\[[\w -]+\] ?)*(?:[\w.]+: )?"  # before a driver's error: who says it
_FAULTY = (
    r"((CUDA|HIP)( driver| runtime)? [Ee]rror( \([^)\n]*\)| in \w+| 2)?: (\d+ \()?(CUDA_ERROR_OUT_OF_MEMORY|out of memory\b(?!\.\w))"
    r"|Triton Error \[CUDA\]: out of memory|cuda runtime error \(2\)|CUDA call failed lazily [^\n]*: out of memory"
    r"|Error:? out of memory at line \d+ in file)"
)
_SYMBOLS = (
    r"((in|failed:|with|init:) CUDA_ERROR_OUT_OF_MEMORY|(cudaErrorMemoryAllocation|hipErrorOutOfMemory)(:? out of memory)?\s*$"
    r"|\bcudaMalloc\w* (failed:?|returned) out of memory|out_of_memory: CUDA error|Out of memory error on GPU \d)"
)
_CUT = "|".join(re.escape("memory. Tried to allocate"[:length]) for length in range(2, 25))  # at the end of a log
_SYSTEMS = rf"^$|{OF_SYSTEM}$"  # its errors are known by their number, whatever their language, which they begin with
_Rule = tuple[str, str, Callable[[str], Meaning]]
_TABLE: tuple[_Rule, ...] = (
    # the bundled trainer's ranks name the one that ended: its own words are another process's failure
    (r"RankLost", r"\) failed: ", _echo),
    (r"RankLost", r"is gone without a word", _maybe_host),
    (r"RankLost", r"was not heard for", _unheard),  # before it comes what another rank says of itself
    (r"WayLost", r"by which this host reaches the others", _cut_off),
    # shared memory of the host before the kernels', before the bus error and the full disk it looks like, before echoes
    (
        _ANY,
        r"workers are out of shared memory|insufficient shared memory|shared memory ?\(shm\)"
        r"|unable to (write to|open|mmap .* from) file </?torch_",
        _shm,
    ),
    (
        _ANY,
        r"/dev/shm.{0,300}(No space left|Error while creating)|No space left[^\n]{0,200}/dev/shm|failed to extend /dev/shm"
        r"|creating shared memory segment|posix_fallocate failed",
        _shm,
    ),
    (_SYSTEMS, r"\A\[Errno 28\][^\n]{0,200}/dev/shm", _shm),
    # look-alikes
    (
        _ANY,
        r"out of resource: (shared memory|threads|tensor memory)|too many resources requested for launch|out of shared memory",
        _kernel_limit,
    ),
    (_ANY, r"ibv_reg_mr|\bmlock(all)? failed|memlock", _locked),
    (
        _ANY,
        r"(?si)\A(?=.*(out of memory|OutOfMemory|cannot allocate)).*(CachingHostAllocator|cudaHost(Alloc|Register)|cudaMallocHost|pinned (buffer|memory))",
        _pinned,
    ),
    (_ANY, r"using FX to symbolically trace a dynamo-optimized function", _traced_in_threads),
    (_ANY, r"No available memory for the cache blocks|Free memory on device .* is less than desired", _cache_blocks),
    # torchrun names the exit status of the rank that fell first: a kill is the cause, anything else an echo
    (
        r"ChildFailedError|ProcessExitedException|TerminatedWorkerError",
        r"exitcode\s*: -9|terminated with signal SIGKILL|SIGKILL\(-9\)",
        _maybe_host,
    ),
    # what others say after one has died
    (
        r"ChildFailedError|DistNetworkError|BrokenPipeError|ConnectionResetError|ProcessExitedException|SignalException"
        r"|SIGTERMException|BrokenProcessPool|TerminatedWorkerError",
        r"(?i)\A(?!.*out of memory)",
        _echo,
    ),
    (
        r"^subprocess\.CalledProcessError$",
        r"\ACommand '\[?'?[^ ',]*python[\d.]*[' ][^\n]* returned non-zero exit status \d+\.\Z",
        _echo,
    ),
    (_ANY, r"Watchdog caught collective operation timeout|Timed out initializing process group|Socket Timeout", _echo),
    (
        _ANY,
        r"(?s)\A(?!.*out of memory).*(ncclSystemError|Connection (reset|closed) by (remote )?peer)|ncclRemoteError",
        _echo,
    ),
    (r"^ray\.", r"(actor|worker) died unexpectedly|its worker process has died", _echo),
    (ELSEWHERE, r"(?i)out[ _]?of[ _]?memory", _elsewhere),
    (_ANY, r"remote process exited or there was a network error", _echo),
    # the card
    (r"NonFinite", _ANY, _nonfinite),
    (
        _ANY,
        rf"{HEAD}(CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate [^\n]*(\(GPU|GPU \d)",
        lambda text: _gpu_oom(text, "allocator"),
    ),
    (
        _OWN,
        rf"{HEAD}(CUDA|HIP|XPU|NPU|MPS backend) out of (memory(\.? *$|\. Tried to allocate| \(MPS)|({_CUT})\Z)",
        lambda text: _gpu_oom(text, "allocator"),
    ),
    (_OWN, rf"{_PLACE}{_FAULTY}", lambda text: _gpu_oom(text, "driver")),
    (_OWN, rf"{_UNQUOTED}{_SYMBOLS}", lambda text: _gpu_oom(text, "driver")),
    (
        _OWN,
        rf"{_UNQUOTED}(CU(BLAS|SOLVER|DNN|SPARSE)_STATUS_(ALLOC_FAILED|INSUFFICIENT_RESOURCES|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)"
        r"|CUFFT_ALLOC_FAILED)",
        lambda text: _gpu_oom(text, "library"),
    ),
    (_OWN, rf"{_UNQUOTED}CU(BLAS|SOLVER|DNN|SPARSE)_STATUS_NOT_INITIALIZED", _handle),
    (
        _OWN,
        r"Cuda failure (\d+ )?'?out of memory|Failed to CUDA calloc|CUDA error 2 'out of memory",
        lambda text: _gpu_oom(text, "nccl"),
    ),
    (r"ray\.exceptions\.OutOfMemoryError|^OutOfMemoryError$", r"node running low on memory", _host),
    (r"(torch|cupy|c10)\S*OutOfMemoryError", _ANY, lambda text: _gpu_oom(text, "allocator")),
    (
        r"^OutOfMemoryError$|(Xla|Jax)RuntimeError|ResourceExhaustedError",
        r"(?i)out of memory|Tried to allocate|Allocation on device|device:GPU",
        lambda text: _gpu_oom(text, "allocator"),
    ),
    (_OWN, r"RESOURCE_EXHAUSTED: .{0,200}\bon device ordinal", lambda text: _gpu_oom(text, "allocator")),
    (_ANY, r"NVRM: Xid", _xid),
    (
        _ANY,
        r"uncorrectable ECC|fallen off the bus|GPU is lost|Unable to determine the device handle|CUDA error: unspecified launch failure",
        _fault,
    ),
    # the host
    (
        _ANY,
        r"Memory cgroup out of memory|CONSTRAINT_MEMCG|slurmstepd: error: Detected \d+ oom.?kill|^srun: error: .*Out Of Memory",
        _cgroup,
    ),
    (_ANY, r"Out of memory: Kill(ed)? process|oom-kill:constraint=CONSTRAINT_NONE|invoked oom-killer", _host),
    (_ANY, r"DefaultCPUAllocator|\$ Torch: not enough memory", _host),
    (r"(^|\.)_?(Array)?MemoryError$", _ANY, _host),
    (_ANY, r"Cannot allocate memory|std::bad_alloc", _host),
    (_SYSTEMS, r"\A\[Errno 12\]", _host),
    (
        _ANY,
        r"killed by signal: Killed|exitcode: -9|exit code -9\b|Signal 9 \(SIGKILL\)|died with <Signals\.SIGKILL"
        rf"|^(Killed|{KILLED_ELSEWHERE})$|\d+ (Killed|{KILLED_ELSEWHERE}) +\S|^(zsh:|\[\d+\] .*) killed {{2}}|^fish: .* SIGKILL\b",
        _maybe_host,
    ),
    # disks
    (
        _ANY,
        r"No space left on device|StorageFull|Disk quota exceeded|PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+",
        _disk,
    ),
    (_SYSTEMS, r"\A\[Errno (28|122)\](?!.*inotify)", _disk),
    (
        _ANY,
        r"(?i)\b(CUDA|HIP|XPU|GPU)\b.{0,200}out[ _]of[ _]memory|_OUT_OF_MEMORY|cudaErrorMemoryAllocation|_ALLOC_FAILED",
        _quoted,
    ),
)
_RULES = tuple((re.compile(kind), re.compile(message, re.MULTILINE), mean) for kind, message, mean in _TABLE)

OWN_LIMIT_HINT = (
    "the process may allocate no more than life.memory_limit_bytes: raise it, or use fewer workers and smaller batches"
)
NO_SHARED_MEMORY = _shm
CGROUP_LIMIT = _cgroup
HOST_KILLER = _host
FULL_DISK = _disk
PINNED = _pinned


def meaning(kind: str, message: str) -> Meaning:
    """What an exception of class `kind` with this message means; `kind` is "" for a line that is no exception."""
    missing = _missing(kind, message)
    if missing is not None:
        return missing
    for handed_on in carried(kind, message):
        if (found := meaning(*handed_on)).kind != EXCEPTION:
            return found
    kind, text = own_words(kind, message)
    for class_pattern, message_pattern, mean in _RULES:
        if class_pattern.search(kind) and (words := message_pattern.search(text)):
            meant = mean(text)
            words_alone = kind and not class_pattern.pattern  # a class of its own says whose words they are
            tells = ONLY_TELLS.search(kind) or (words_alone and is_of_another(kind, text[: words.start()]))
            return _quoted(text) if tells and meant.kind != EXCEPTION else meant
    return Meaning(EXCEPTION, "")
