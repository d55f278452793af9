"""Texts that speak of an out-of-memory error without being one, and real ones in every coat a log puts on them.

The second part of the corpus (`failure_corpus`): a message quotes another's words, or another process's; a traceback is
drawn in a box, coloured, grouped, or written by a journal.
"""

from tests.orchestrator.failure_case import Case, gib, mib

GPU = "GPU 0 has a total capacity of 94.97 GiB of which 100.00 MiB is free."
SHORT = f"CUDA out of memory. Tried to allocate 970.00 MiB. {GPU}"
FRAME = '  File "/srv/t.py", line 9, in step\n    loss.backward()\n'
HEADER = "Traceback (most recent call last):\n"


def quoting(name: str, raised: str, text: str, **more: bool) -> Case:
    """An exception that is no out-of-memory error of the card's, though its message holds the words."""
    return Case(name, "exception", text, raised, **more)


QUOTATIONS = [
    quoting(
        "advice on a size",
        "ValueError",
        "batch_size 64 is too big; last week this gave 'CUDA out of memory' on the 95 GB card, use 32",
    ),
    quoting(
        "advice on a key",
        "trainer.ConfigError",
        "max_anchors 4096 ran CUDA out of memory yesterday (run k7f3mnpq); set data.max_anchors=1024",
    ),
    quoting("a key that is missing", "KeyError", "'CUDA out of memory'"),
    quoting("a symbol that is missing", "KeyError", "'CUDA_ERROR_OUT_OF_MEMORY'"),
    quoting("an assertion on a text", "AssertionError", "assert 'CUDA out of memory' in str(err)"),
    quoting(
        "a note of an assertion",
        "AssertionError",
        "see docs: to avoid CUDA out of memory errors set PYTORCH_CUDA_ALLOC_CONF",
    ),
    quoting(
        "a file's name",
        "FileNotFoundError",
        "[Errno 2] No such file or directory: '/root/logs/CUDA out of memory.txt'",
    ),
    quoting("a file's name, bare", "RuntimeError", "failed to open /data/notes/CUDA error: out of memory.md"),
    quoting(
        "what a parser was given",
        "json.decoder.JSONDecodeError",
        "Expecting value: line 1 column 1 (char 0): 'CUDA out of memory'",
    ),
    quoting(
        "a note that says it did not",
        "torch.utils.checkpoint.CheckpointError",
        "Recomputed values differ; note: CUDA out of memory not involved",
    ),
    quoting(
        "a whole traceback, quoted",
        "RuntimeError",
        f"Traceback of yesterday's run follows:\n{HEADER}{FRAME}torch.OutOfMemoryError: {SHORT}",
    ),
    quoting(
        "a repr of an answer",
        "RuntimeError",
        "worker 3 returned {'error': 'ok', 'note': \"last run: torch.OutOfMemoryError: CUDA out of memory.\"}",
    ),
    quoting("a whole text of last week", "ValueError", f"the run of last week failed: {SHORT}"),
    quoting("a wrapper's guess", "OSError", "Unable to load weights from the checkpoint file (CUDA out of memory)"),
    quoting("a class of the user's", "StaleError", "the note says: died of CUDA out of memory on 2026-11-29"),
    quoting("a class of another's shop", "shop.errors.OutOfMemoryError", "the queue is full"),
    quoting(
        "a warning made an error",
        "UserWarning",
        "CUDA out of memory was seen 3 times and retried by the allocator; consider expandable_segments",
        is_echo=True,
    ),
    quoting("a worker that did not answer", "TimeoutError", "CUDA out of memory worker did not answer", is_echo=True),
    quoting("a drill", "RuntimeError", "CUDA out of memory! (this is a drill)"),
    quoting("a variable", "RuntimeError", "CUDA_HOME not set; out of memory not relevant"),
    quoting("a symbol in a sentence", "RuntimeError", "config: on cudaErrorMemoryAllocation we retry 3 times, got 4"),
    quoting(
        "a library's symbol in a sentence", "ValueError", "retry_on must be a list, got 'CUBLAS_STATUS_ALLOC_FAILED'"
    ),
    quoting(
        "a peer's last words", "ConnectionResetError", f"Connection reset by peer; rank 0 said: {SHORT}", is_echo=True
    ),
    quoting(
        "a server's answer",
        "openai.InternalServerError",
        "Error code: 500 - {'error': {'message': 'CUDA out of memory. Tried to allocate 2.00 GiB'}}",
        is_echo=True,
    ),
    quoting(
        "a server's answer, as it is",
        "requests.exceptions.HTTPError",
        "500 Server Error: CUDA out of memory. Tried to allocate 2.00 GiB for url http://10.0.0.7:8000/v1/completions",
        is_echo=True,
    ),
    quoting("a server's answer, nothing else", "grpc.RpcError", SHORT, is_echo=True),
    quoting("a request in a wrapper", "RuntimeError", f"request 7 failed: {SHORT}"),
    quoting(
        "a command on another host",
        "subprocess.CalledProcessError",
        "Command '['ssh', 'node7', 'train']' returned non-zero exit status 1: CUDA out of memory",
        is_echo=True,
    ),
    quoting(
        "a remote rank's, through NCCL",
        "torch.distributed.DistBackendError",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
        " Last error: remote: CUDA out of memory",
        is_echo=True,
    ),
    quoting(
        "a watchdog that quotes",
        "torch.distributed.DistBackendError",
        "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88) ran for 600000 ms. Last log of rank 0:"
        " CUDA out of memory. Tried to allocate 2 GiB",
        is_echo=True,
    ),
    Case(
        "a quoted traceback in the message of a real one",
        "exception",
        f"{HEADER}{FRAME}RuntimeError: Traceback of yesterday's run follows:\n{HEADER}{FRAME}torch.OutOfMemoryError: {SHORT}\n",
    ),
    Case(
        "an exception that quotes, in a log",
        "exception",
        f"{HEADER}{FRAME}ValueError: 64 rows gave 'CUDA out of memory' last week, use 32\n",
    ),
    Case(
        "a box that was printed within a box",
        None,
        "note of yesterday: ╭─ Traceback (most recent call last) ─╮\nstep 1 loss 2.31\n",
    ),
]

# Not VRAM, though a driver's or a library's text says that memory is out.
OTHER_MEMORY = [
    Case(
        "pinned, by its allocator's file",
        "host_oom",
        "CUDA error: out of memory\nException raised from allocate at ../aten/src/ATen/cuda/CachingHostAllocator.cpp:137"
        " (most recent call first):",
        "RuntimeError",
    ),
    Case("pinned, by its call", "host_oom", "cudaHostAlloc failed: out of memory", "RuntimeError"),
    Case("pinned, by its name", "host_oom", "out of memory, cannot allocate pinned buffer", "RuntimeError"),
    Case(
        "pinned, by its line",
        "host_oom",
        f'{HEADER}  File "/srv/t.py", line 20, in fill\n    x = torch.empty(2**36).pin_memory()\n'
        "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported.\n",
    ),
    Case(
        "pinned, in its thread",
        "host_oom",
        f'{HEADER}  File "/srv/t.py", line 1, in <module>\n    next(it)\n'
        "torch.OutOfMemoryError: Caught OutOfMemoryError in pin memory thread for device 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/usr/lib/python3/dist-packages/torch/utils/data/_utils/pin_memory.py", line 37, in do_one_step\n'
        "    data = pin_memory(data, device)\nRuntimeError: CUDA error: out of memory\n",
    ),
    Case(
        "Ray's watch over a node",
        "host_oom",
        "Task was killed due to the node running low on memory.\nMemory on the node was 60.1GB / 62.0GB (0.97), which"
        " exceeds the memory usage threshold of 0.95.",
        "ray.exceptions.OutOfMemoryError",
    ),
    quoting("shared memory of a kernel", "RuntimeError", "CUDA error: out of shared memory"),
    quoting(
        "shared memory of a kernel, CUTLASS",
        "RuntimeError",
        "cutlass cannot initialize, out of shared memory on device",
    ),
    quoting(
        "shared memory of a kernel, with sizes",
        "RuntimeError",
        "out of shared memory: kernel needs 262144 B, the SM has 232448 B",
    ),
    Case(
        "NCCL could not lengthen its segment",
        "shm",
        "NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error\nncclSystemError: System call (e.g. socket, malloc)"
        " or external library call failed or device error.\nLast error:\nError: failed to extend /dev/shm/nccl-aBcDeF to"
        " 33030532 bytes, error: No space left on device (28)",
        "torch.distributed.DistBackendError",
    ),
    Case("errno 28 in /dev/shm", "shm", "[Errno 28] No space left on device: '/dev/shm/psm_1f2e3d4c'", "OSError"),
    quoting("memory that may be locked", "RuntimeError", "mlock failed: Cannot allocate memory (ulimit -l)"),
    quoting(
        "memory that may be locked, of a network card",
        "torch.distributed.DistBackendError",
        "NCCL error: unhandled system error. Last error: Call to ibv_reg_mr failed with error Cannot allocate memory",
    ),
]


def real(name: str, raised: str, text: str, level: str = "driver", **facts: int) -> Case:
    return Case(name, "gpu_oom", text, raised, {"level": level, **facts})


# Texts of the driver and of libraries; each is the whole of what is said.
MORE_DRIVER = [
    real("HIP, runtime", "RuntimeError", "HIP error: out of memory"),
    real("CUDA Error, of a library", "RuntimeError", "transformer_engine: CUDA Error: out of memory"),
    real("CUDA error, with its place", "RuntimeError", "CUDA error (flash_fwd_launch_template.h:66): out of memory"),
    real("CUDA error 2", "RuntimeError", "CUDA error 2: out of memory"),
    real(
        "a driver error with its place and name",
        "RuntimeError",
        "CUDA driver error (csrc/jit/handle.hpp:89): 2 (CUDA_ERROR_OUT_OF_MEMORY, out of memory)",
    ),
    real(
        "the first call of all",
        "torch.cuda.DeferredCudaCallError",
        "CUDA call failed lazily at initialization with error: out of memory",
    ),
    real("cudaMalloc", "RuntimeError", "cudaMalloc failed: out of memory"),
    real(
        "cudaMalloc, of a backend",
        "RuntimeError",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 10240.00 MiB on device 0: cudaMalloc failed: out of memory",
    ),
    real("cudaMallocAsync", "RuntimeError", "cudaMallocAsync returned out of memory"),
    real("a context", "RuntimeError", "cuDevicePrimaryCtxRetain failed: CUDA_ERROR_OUT_OF_MEMORY"),
    real(
        "Numba",
        "numba.cuda.cudadrv.driver.CudaAPIError",
        "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    ),
    real(
        "CuPy's runtime", "cupy_backends.cuda.api.runtime.CUDARuntimeError", "cudaErrorMemoryAllocation: out of memory"
    ),
    real("Thrust", "RuntimeError", "after reduction step 1: cudaErrorMemoryAllocation: out of memory"),
    real(
        "RMM",
        "MemoryError",
        "std::bad_alloc: out_of_memory: CUDA error (failed to allocate 1073741824 bytes) at:"
        " /opt/rmm/include/rmm/mr/device/cuda_memory_resource.hpp:62: cudaErrorMemoryAllocation out of memory",
    ),
    real("bitsandbytes", "RuntimeError", "Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp"),
    real(
        "NVLS",
        "torch.distributed.DistBackendError",
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 'out of memory'",
        "nccl",
    ),
    real(
        "cuDNN 9",
        "RuntimeError",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "library",
    ),
    Case(
        "a handle of cuDNN, or a broken driver",
        "gpu_oom",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "RuntimeError",
        {"level": "handle"},
        is_certain=False,
    ),
]

MORE_ALLOCATOR = [
    real("the class alone", "torch.cuda.OutOfMemoryError", "Allocation on device", "allocator"),
    real("the class alone, wordless", "torch.OutOfMemoryError", "", "allocator"),
    real(
        "a server's warm-up",
        "torch.OutOfMemoryError",
        "CUDA out of memory occurred when warming up sampler with 256 dummy requests.",
        "allocator",
    ),
    real(
        "cudaMallocAsync, with its own numbers",
        "torch.OutOfMemoryError",
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 90.00 GiB\n"
        "Requested               : 970.00 MiB\nDevice limit            : 94.97 GiB\nFree (according to CUDA): 12.00 MiB\n"
        "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        "allocator",
        requested_bytes=mib(970),
        allocated_bytes=gib(90),
        total_bytes=gib(94.97),
        free_bytes=mib(12),
    ),
    real(
        "JAX",
        "jax.errors.JaxRuntimeError",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.",
        "allocator",
        requested_bytes=8 * 1024**3,
    ),
    real(
        "JAX, on its ordinal",
        "RuntimeError",
        "Bad StatusOr access: RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0",
        "allocator",
    ),
    real(
        "TensorFlow",
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError",
        "OOM when allocating tensor with shape[24576,248320] and type bfloat16 on"
        " /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
        "allocator",
    ),
    real(
        "MPS",
        "RuntimeError",
        "MPS backend out of memory (MPS allocated: 17.21 GiB, other allocations: 512.00 MiB, max allowed: 18.13 GiB)."
        " Tried to allocate 1.00 GiB on private pool.",
        "allocator",
        requested_bytes=gib(1),
    ),
    real("a user's wrapper", "trainer.StepFailed", f"step 41 failed: {SHORT}", "allocator", requested_bytes=mib(970)),
    real(
        "a compiler's wrapper",
        "torch._inductor.exc.InductorError",
        f"OutOfMemoryError: {SHORT}",
        "allocator",
        requested_bytes=mib(970),
    ),
    real(
        "a compiler's wrapper, on two lines",
        "torch._dynamo.exc.BackendCompilerFailed",
        f"backend='inductor' raised:\nOutOfMemoryError: {SHORT}",
        "allocator",
        requested_bytes=mib(970),
    ),
    real(
        "another process of the pool",
        "multiprocessing.pool.RemoteTraceback",
        f'\n"""\n{HEADER}torch.OutOfMemoryError: {SHORT}\n"""',
        "allocator",
        requested_bytes=mib(970),
    ),
    Case(
        "a display beside it is no other process's fault",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 94.97 GiB of which 10.00 MiB is free."
        " Process 9 has 410.00 MiB memory in use. Including non-PyTorch memory, this process has 94.50 GiB memory in use."
        " Of the allocated memory 93.00 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated.",
        "torch.OutOfMemoryError",
        {"shortage": "full"},
    ),
]

COATS = [
    Case(
        "a box",
        "gpu_oom",
        "╭───────────────── Traceback (most recent call last) ─────────────────╮\n"
        "│ /srv/t.py:9 in step                                                 │\n"
        "│                                                                     │\n"
        "│    8   optimizer.zero_grad()                                        │\n"
        "│ ❱  9   loss.backward()                                              │\n"
        "╰─────────────────────────────────────────────────────────────────────╯\n"
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 970.00 MiB. GPU \n"
        "0 has a total capacity of 94.97 GiB of which 100.00 MiB is free.\n",
        facts={
            "requested_bytes": mib(970),
            "total_bytes": gib(94.97),
            "frame": {"file": "/srv/t.py", "line": 9, "function": "step", "source": "loss.backward()"},
        },
    ),
    Case(
        "colours",
        "gpu_oom",
        f"\x1b[31m{HEADER.rstrip()}\x1b[0m\n{FRAME}\x1b[1;35mtorch.OutOfMemoryError\x1b[0m: \x1b[35m{SHORT}\x1b[0m\n",
        facts={"requested_bytes": mib(970)},
    ),
    Case(
        "a journal",
        "gpu_oom",
        "Nov 30 10:00:01 box python[3345]: Traceback (most recent call last):\n"
        'Nov 30 10:00:01 box python[3345]:   File "/srv/t.py", line 9, in step\n'
        f"Nov 30 10:00:02 box python[3345]: torch.OutOfMemoryError: {SHORT}\n",
        facts={"requested_bytes": mib(970)},
    ),
    Case(
        "a journal, dated in full",
        "gpu_oom",
        "2026-11-30T10:00:01.123456+01:00 box train.sh[3345]: Traceback (most recent call last):\n"
        f"2026-11-30T10:00:01.123999+01:00 box train.sh[3345]: torch.OutOfMemoryError: {SHORT}\n",
    ),
    Case(
        "a container's log",
        "gpu_oom",
        "2026-11-30T10:00:01.123456789Z Traceback (most recent call last):\n"
        '2026-11-30T10:00:01.123456999Z   File "/srv/t.py", line 9, in step\n'
        f"2026-11-30T10:00:02.000000001Z torch.OutOfMemoryError: {SHORT}\n",
    ),
    Case(
        "the kernel's word in a journal",
        "host_oom",
        "Nov 30 10:00:01 box kernel: Out of memory: Killed process 3345 (python) total-vm:9kB, anon-rss:8kB, file-rss:0kB\n",
        facts={"killed_pid": 3345},
    ),
    Case(
        "a group",
        "gpu_oom",
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/srv/t.py", line 5, in <module>\n'
        "  | ExceptionGroup: errors in 2 workers (2 sub-exceptions)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/srv/t.py", line 9, in step\n'
        f"    | torch.OutOfMemoryError: {SHORT}\n"
        "    +---------------- 2 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/srv/t.py", line 9, in step\n'
        "    | ConnectionError: peer gone\n"
        "    +------------------------------------\n",
        facts={"requested_bytes": mib(970)},
    ),
    Case(
        "a group of other errors",
        "exception",
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/srv/t.py", line 5, in <module>\n'
        "  | ExceptionGroup: errors in 1 worker (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/srv/t.py", line 9, in step\n'
        "    | ValueError: 64 rows gave 'CUDA out of memory' last week\n"
        "    +------------------------------------\n",
    ),
    Case(
        "Ray, its driver",
        "gpu_oom",
        f'{HEADER}  File "t.py", line 1, in <module>\n    ray.get(f)\n'
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::W.step() (pid=44, ip=10.0.0.2)\n"
        f'  File "/srv/t.py", line 3, in step\ntorch.OutOfMemoryError: {SHORT}\n',
        facts={"requested_bytes": mib(970)},
    ),
    Case(
        "Ray, its worker",
        "gpu_oom",
        f"\x1b[36m(Train pid=3345)\x1b[0m Traceback (most recent call last):\n\x1b[36m(Train pid=3345)\x1b[0m"
        f'   File "/srv/t.py", line 9, in step\n\x1b[36m(Train pid=3345)\x1b[0m torch.OutOfMemoryError: {SHORT}\n',
    ),
    Case(
        "a spawned process",
        "gpu_oom",
        f"{HEADER}{FRAME}torch.multiprocessing.spawn.ProcessRaisedException: \n\n"
        f"-- Process 0 terminated with the following error:\n{HEADER}{FRAME}torch.OutOfMemoryError: {SHORT}\n",
    ),
]
