"""Texts by which training jobs end, and what each means. The shapes are those the programs print; the numbers are ours.

`where` is "exception" (class and message, as a job reports them) or "log" (a stderr, as it was printed).
`kind` None: nothing failed according to this text. Sizes in `facts` are what the text says, in bytes.
"""

from tests.orchestrator.failure_case import GIB, KIB, Case, gib, mib
from tests.orchestrator.failure_handled import HANDLED
from tests.orchestrator.failure_languages import LANGUAGES
from tests.orchestrator.failure_quotes import COATS, MORE_ALLOCATOR, MORE_DRIVER, OTHER_MEMORY, QUOTATIONS
from tests.orchestrator.failure_terminals import TERMINALS
from tests.orchestrator.failure_wrappers import WRAPPED_QUOTATIONS, WRAPPERS

__all__ = ["CORPUS", "FATAL_XIDS", "LOOK_ALIKES", "OTHER_XIDS", "Case", "gib", "xid_line"]

SPLIT_ADVICE = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
    "  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
SEGMENTS_ADVICE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
    " fragmentation.  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html)"
)
OOM = "torch.OutOfMemoryError"

GPU_ALLOCATOR = [
    Case(
        "1.0, cached in KiB",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 11.93 GiB total capacity; 4.00 GiB already allocated;"
        " 7.33 GiB free; 179.00 KiB cached)",
        "RuntimeError",
        {
            "requested_bytes": mib(20),
            "gpu": 0,
            "total_bytes": gib(11.93),
            "allocated_bytes": gib(4),
            "free_bytes": gib(7.33),
        }
        | {"reserved_bytes": 179 * KIB, "shortage": "fragmentation"},
    ),
    Case(
        "1.5, reserved in total",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 1.25 GiB (GPU 3; 15.78 GiB total capacity; 13.90 GiB already allocated;"
        " 310.75 MiB free; 14.21 GiB reserved in total by PyTorch)",
        "RuntimeError",
        {
            "requested_bytes": gib(1.25),
            "gpu": 3,
            "reserved_bytes": gib(14.21),
            "free_bytes": mib(310.75),
            "shortage": "full",
        },
    ),
    Case(
        "1.13, split advice, 0 bytes free",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 10.50 GiB (GPU 0; 24.00 GiB total capacity; 17.20 GiB already allocated;"
        " 0 bytes free; 22.15 GiB reserved in total by PyTorch)" + SPLIT_ADVICE,
        "torch.cuda.OutOfMemoryError",
        {"requested_bytes": gib(10.5), "free_bytes": 0, "reserved_bytes": gib(22.15), "shortage": "full"},
    ),
    Case(
        "1.13, fragmentation: reserved far above allocated",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 1.41 GiB (GPU 0; 23.69 GiB total capacity; 15.00 GiB already allocated;"
        " 512.00 MiB free; 22.50 GiB reserved in total by PyTorch)" + SPLIT_ADVICE,
        "torch.cuda.OutOfMemoryError",
        {"shortage": "fragmentation"},
    ),
    Case(
        "1.13, limit of the process",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 15.78 GiB total capacity; 7.28 GiB already allocated;"
        " 6.97 GiB free; 7.89 GiB allowed; 7.42 GiB reserved in total by PyTorch)" + SPLIT_ADVICE,
        "RuntimeError",
        {"allowed_bytes": gib(7.89), "free_bytes": gib(6.97), "shortage": "process_limit"},
    ),
    Case(
        "asked for more than the card",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 93.75 GiB (GPU 0; 79.20 GiB total capacity; 4.10 GiB already allocated;"
        " 74.00 GiB free; 4.20 GiB reserved in total by PyTorch)",
        "RuntimeError",
        {"requested_bytes": gib(93.75), "total_bytes": gib(79.2), "shortage": "larger_than_card"},
    ),
    Case(
        "2.1, capacty, one other process",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacty of 23.69 GiB of which 17.06 MiB is free."
        " Process 12345 has 23.67 GiB memory in use. Of the allocated memory 21.28 GiB is allocated by PyTorch, and"
        " 103.10 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
        " max_split_size_mb to avoid fragmentation.",
        "torch.cuda.OutOfMemoryError",
        {"gpu": 0, "total_bytes": gib(23.69), "free_bytes": mib(17.06), "allocated_bytes": gib(21.28)}
        | {"idle_reserved_bytes": mib(103.1), "other_processes": [{"pid": 12345, "used_bytes": gib(23.67)}]},
    ),
    Case(
        "2.1, several processes",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 5 has a total capacty of 94.97 GiB of which 1.50 GiB is free."
        " Process 811 has 40.00 GiB memory in use. Process 3072 has 512.00 MiB memory in use."
        " Including non-PyTorch memory, this process has 52.90 GiB memory in use. Of the allocated memory 51.70 GiB is"
        " allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated." + SEGMENTS_ADVICE,
        OOM,
        {"gpu": 5, "own_use_bytes": gib(52.9), "shortage": "other_process"}
        | {"other_processes": [{"pid": 811, "used_bytes": gib(40)}, {"pid": 3072, "used_bytes": mib(512)}]},
    ),
    Case(
        "2.6, the math fallback of attention",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 22.31 GiB. GPU 5 has a total capacity of 94.97 GiB of which 21.94 GiB is free."
        " Including non-PyTorch memory, this process has 73.02 GiB memory in use. Of the allocated memory 71.50 GiB is"
        " allocated by PyTorch, and 187.21 MiB is reserved by PyTorch but unallocated." + SEGMENTS_ADVICE,
        OOM,
        {"requested_bytes": gib(22.31), "free_bytes": gib(21.94), "own_use_bytes": gib(73.02), "level": "allocator"},
    ),
    Case(
        "2.6, fragmentation",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.21 GiB is free."
        " Including non-PyTorch memory, this process has 77.80 GiB memory in use. Of the allocated memory 60.00 GiB is"
        " allocated by PyTorch, and 16.90 GiB is reserved by PyTorch but unallocated." + SEGMENTS_ADVICE,
        OOM,
        {"idle_reserved_bytes": gib(16.9), "shortage": "fragmentation"},
    ),
    Case(
        "2.6, no process list",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is free."
        " Of the allocated memory 7.51 GiB is allocated by PyTorch, and 15.90 MiB is reserved by PyTorch but unallocated.",
        OOM,
        {"free_bytes": 0, "total_bytes": gib(8), "shortage": "full"},
    ),
    Case(
        "2.6, private pools of CUDA graphs",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a total capacity of 79.10 GiB of which 400.50 MiB is free."
        " Including non-PyTorch memory, this process has 78.60 GiB memory in use. Of the allocated memory 70.00 GiB is"
        " allocated by PyTorch, with 6.00 GiB allocated in private pools (e.g., CUDA Graphs), and 300.00 MiB is reserved"
        " by PyTorch but unallocated." + SEGMENTS_ADVICE,
        OOM,
        {"private_pool_bytes": gib(6), "allocated_bytes": gib(70), "idle_reserved_bytes": mib(300)},
    ),
    Case(
        "2.6, limit of the process",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 90.00 GiB is free."
        " Including non-PyTorch memory, this process has 49.00 GiB memory in use. 50.00 GiB allowed; Of the allocated memory"
        " 47.50 GiB is allocated by PyTorch, and 800.00 MiB is reserved by PyTorch but unallocated." + SEGMENTS_ADVICE,
        OOM,
        {"allowed_bytes": gib(50), "shortage": "process_limit"},
    ),
    Case(
        "2.11, class without its module",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 970.00 MiB. GPU 0 has a total capacity of 94.97 GiB of which 151.06 MiB is free.",
        "OutOfMemoryError",
        {"requested_bytes": mib(970)},
    ),
    Case(
        "bytes and KiB",
        "gpu_oom",
        "CUDA out of memory. Tried to allocate 512 bytes. GPU 2 has a total capacity of 94.97 GiB of which 64.00 KiB is free.",
        OOM,
        {"requested_bytes": 512, "free_bytes": 64 * KIB, "gpu": 2},
    ),
    Case("more than an exabyte", "gpu_oom", "CUDA out of memory. Tried to allocate more than 1EB memory.", OOM),
    Case(
        "ROCm",
        "gpu_oom",
        "HIP out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of 63.98 GiB of which 5.01 GiB is free.",
        OOM,
        {"requested_bytes": gib(12)},
    ),
    Case(
        "XPU",
        "gpu_oom",
        "XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.91 GiB of which 1.00 GiB is free."
        " Of the allocated memory 13.00 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated.",
        OOM,
        {"total_bytes": gib(15.91)},
    ),
    Case(
        "CuPy",
        "gpu_oom",
        "Out of memory allocating 8,589,934,592 bytes (allocated so far: 1,073,741,824 bytes, limit set to:"
        " 2,147,483,648 bytes).",
        "cupy.cuda.memory.OutOfMemoryError",
        {"requested_bytes": 8 * GIB, "allocated_bytes": GIB, "limit_bytes": 2 * GIB},
    ),
]

GPU_DRIVER = [
    Case(
        "runtime, old",
        "gpu_oom",
        "cuda runtime error (2) : out of memory at /build/aten/src/THC/generic/THCStorage.cu:58",
        "RuntimeError",
        {"level": "driver"},
    ),
    Case(
        "runtime",
        "gpu_oom",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call.",
        "RuntimeError",
        {"level": "driver"},
    ),
    Case(
        "accelerator error",
        "gpu_oom",
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the CUDA documentation.",
        "torch.AcceleratorError",
        {"level": "driver"},
    ),
    Case("driver", "gpu_oom", "CUDA driver error: out of memory", "RuntimeError", {"level": "driver"}),
    Case("Triton launch", "gpu_oom", "Triton Error [CUDA]: out of memory", "RuntimeError", {"level": "driver"}),
    Case(
        "cuBLAS handle",
        "gpu_oom",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError",
        {"level": "library"},
    ),
    Case(
        "cuBLAS not initialised",
        "gpu_oom",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RuntimeError",
        {"level": "handle"},
        is_certain=False,
    ),
    Case("cuDNN", "gpu_oom", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "RuntimeError", {"level": "library"}),
    Case(
        "cuSOLVER",
        "gpu_oom",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "torch._C._LinAlgError",
        {"level": "library"},
    ),
    Case(
        "NCCL, error with its last words",
        "gpu_oom",
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for"
        " details), NCCL version 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'",
        "torch.distributed.DistBackendError",
        {"level": "nccl"},
    ),
    Case(
        "NCCL, its own warning in the log",
        "gpu_oom",
        "node7:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
        "node7:3063028:3066152 [3] NCCL INFO transport/p2p.cc:204 -> 1\n",
        facts={"level": "nccl"},
    ),
    Case(
        "NCCL, failed calloc",
        "gpu_oom",
        "node7:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\n",
        facts={"requested_bytes": 6291456},
    ),
    Case(
        "C++ terminate",
        "gpu_oom",
        "terminate called after throwing an instance of 'c10::OutOfMemoryError'\n"
        "  what():  CUDA out of memory. Tried to allocate 34.00 MiB. GPU 0 has a total capacity of 94.97 GiB of which"
        " 12.00 MiB is free.\nException raised from malloc at ../c10/cuda/CUDACachingAllocator.cpp:1340\nAborted (core dumped)\n",
        facts={"requested_bytes": mib(34)},
    ),
]

HOST = [
    Case(
        "CPU allocator",
        "host_oom",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
        " 274877906944 bytes. Error code 12 (Cannot allocate memory)",
        "RuntimeError",
        {"requested_bytes": 256 * GIB},
    ),
    Case(
        "CPU allocator, elsewhere",
        "host_oom",
        "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to allocate 4294967296 bytes.",
        "RuntimeError",
        {"requested_bytes": 4 * GIB},
    ),
    Case(
        "CPU allocator, oldest",
        "host_oom",
        "$ Torch: not enough memory: you tried to allocate 2GB. Buy new RAM! at /build/aten/src/TH/THGeneral.cpp:201",
        "RuntimeError",
    ),
    Case("Python", "host_oom", "", "MemoryError"),
    Case("Python, qualified", "host_oom", "", "builtins.MemoryError"),
    Case(
        "NumPy",
        "host_oom",
        "Unable to allocate 29.8 GiB for an array with shape (4000000000,) and data type float64",
        "numpy._core._exceptions._ArrayMemoryError",
        {"requested_bytes": gib(29.8)},
    ),
    Case("errno 12", "host_oom", "[Errno 12] Cannot allocate memory", "OSError"),
    Case("fork", "host_oom", "[Errno 12] Cannot allocate memory: '/usr/bin/ninja'", "BlockingIOError"),
    Case("C++", "host_oom", "std::bad_alloc", "MemoryError"),
    Case(
        "C++ terminate",
        "host_oom",
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\nAborted (core dumped)\n",
    ),
    Case(
        "kernel log, whole machine",
        "host_oom",
        "[1234567.890123] Out of memory: Killed process 4242 (python) total-vm:310213632kB, anon-rss:250000000kB, file-rss:0kB,"
        " shmem-rss:1024kB, UID:0 pgtables:491000kB oom_score_adj:0\n",
        facts={"killed_pid": 4242, "killed_name": "python", "killed_rss_bytes": 250000000 * 1024},
    ),
    Case(
        "kernel log, oldest",
        "host_oom",
        "[88.1] Out of memory: Kill process 77 (pt_main_thread) score 912 or sacrifice child\n",
        facts={"killed_pid": 77},
    ),
    Case(
        "kernel log, container",
        "cgroup_oom",
        "[5678.12] Memory cgroup out of memory: Killed process 999 (pt_data_worker) total-vm:52428800kB, anon-rss:33554432kB, file-rss:0kB\n",
        facts={"killed_pid": 999, "killed_rss_bytes": 32 * GIB},
    ),
    Case(
        "kernel log, container, v1",
        "cgroup_oom",
        "[5678.12] Memory cgroup out of memory: Kill process 999 (python) score 1974 or sacrifice child\n",
        facts={"killed_pid": 999},
    ),
    Case(
        "Slurm",
        "cgroup_oom",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1234.0. Some of the step tasks have been OOM Killed.\n",
    ),
    Case("shell", "host_oom", "Killed\n", is_certain=False),
    Case(
        "shell, with its line",
        "host_oom",
        "train.sh: line 12: 40213 Killed                  python train.py --steps 1000\n",
        is_certain=False,
    ),
    Case(
        "DataLoader worker killed",
        "host_oom",
        "DataLoader worker (pid 3216) is killed by signal: Killed.",
        "RuntimeError",
        is_certain=False,
    ),
    Case(
        "subprocess killed",
        "host_oom",
        "Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.",
        "subprocess.CalledProcessError",
        is_certain=False,
    ),
    Case(
        "torchrun, a rank was killed",
        "host_oom",
        "E0325 20:57:27.620000 2606 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 5\n"
        "Traceback (most recent call last):\n"
        '  File "/venv/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        '  File "/venv/lib/python3.12/site-packages/torch/distributed/launcher/api.py", line 269, in launch_agent\n'
        "    raise ChildFailedError(\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "============================================================\ntrain.py FAILED\n"
        "------------------------------------------------------------\nFailures:\n  <NO_OTHER_FAILURES>\n"
        "------------------------------------------------------------\nRoot Cause (first observed failure):\n[0]:\n"
        "  rank      : 5 (local_rank: 5)\n  exitcode  : -9 (pid: 2630)\n  traceback : Signal 9 (SIGKILL) received by PID 2630\n",
        is_certain=False,
    ),
]

SHARED_MEMORY_AND_DISKS = [
    Case(
        "DataLoader bus error",
        "shm",
        "DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        "RuntimeError",
    ),
    Case(
        "worker's own word",
        "shm",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n",
    ),
    Case(
        "shm file, full",
        "shm",
        "unable to write to file </torch_1234_5678_0>: No space left on device (28)",
        "RuntimeError",
    ),
    Case(
        "shm file, no room to map",
        "shm",
        "unable to mmap 3145728 bytes from file </torch_77_12_3>: Cannot allocate memory (12)",
        "RuntimeError",
    ),
    Case(
        "shm file, allocation",
        "shm",
        "unable to allocate shared memory(shm) for file </torch_77_12_4>: Success (0)",
        "RuntimeError",
    ),
    Case(
        "NCCL in /dev/shm",
        "shm",
        "node:12:34 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-aBcDeF to 33030532 bytes, error: No space left on device (28)\n",
    ),
    Case(
        "NCCL segment",
        "shm",
        "NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error\nLast error:\nError while creating shared memory segment /dev/shm/nccl-aBcDeF (size 33030528)",
        "torch.distributed.DistBackendError",
    ),
    Case(
        "errno 28", "disk_full", "[Errno 28] No space left on device: '/data/runs/x/checkpoints/.step.tmp'", "OSError"
    ),
    Case("quota", "disk_full", "[Errno 122] Disk quota exceeded", "OSError"),
    Case(
        "safetensors",
        "disk_full",
        "Error while serializing: I/O error: No space left on device (os error 28)",
        "safetensors_rust.SafetensorError",
    ),
    Case(
        "safetensors, older",
        "disk_full",
        'Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
        "safetensors_rust.SafetensorError",
    ),
    Case(
        "torch.save",
        "disk_full",
        "[enforce fail at inline_container.cc:603] . unexpected pos 1280 vs 1182",
        "RuntimeError",
    ),
    Case(
        "torch.save, writer",
        "disk_full",
        "PytorchStreamWriter failed writing file data/17: file write failed",
        "RuntimeError",
    ),
]

# As NVIDIA's catalogue has them: the card wants a reset, a reboot or support ...
FATAL_XIDS = {
    48: "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer",
    62: "2f1b 0000 0000 00000000",
    64: "Row Remapper: Error writing to row remapper table, remapping failed",
    74: "NVLink: fatal error detected on link 3(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    95: "Uncontained: FBHUB. RST: Yes, D-RST: No",
    109: "pid=4242, name=python, Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x3c046",
    119: "pid=4242, name=python, Timeout after 45s of waiting for RPC response from GPU1 GSP!",
    120: "GSP task exception: page fault",
    140: "ECC unrecoverable error escape",
    158: "GPU fatal timeout",
    999: "one that no catalogue has yet",
}
# ... or a program is to be started anew, or nothing at all is to be done.
OTHER_XIDS = {
    13: "pid=4242, name=python, Graphics Exception: ESR 0x505730=0x104000e",
    31: "pid=4242, name=python, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f",
    32: "pid=4242, name=python, Channel ID 00000001 intr 00040000",
    43: "pid=4242, name=python, Ch 00000008",
    45: "pid=4242, name=python, Ch 00000008",
    63: "Row Remapper: New row marked for remapping, reset gpu to activate.",
    69: "pid=4242, name=python, Class Error: ChId 0008, Class 0000c6c0",
    92: "High single bit ECC error rate detected. RIDs: 2",
    94: "pid=4242, name=python, Contained: CE User Channel (0x9). RST: No, D-RST: No",
    154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
}


def xid_line(number: int, what: str, pci: str = "0000:c1:00") -> str:
    return f"[12345.6] NVRM: Xid (PCI:{pci}): {number}, {what}\n"


THE_CARD = [
    Case("ECC", "gpu_fault", "CUDA error: uncorrectable ECC error encountered", "RuntimeError"),
    Case(
        "Xid in the kernel log",
        "gpu_fault",
        "[12345.6] NVRM: Xid (PCI:0000:c1:00): 79, pid=4242, name=python, GPU has fallen off the bus.\n",
        facts={"xid": 79, "pci": "0000:c1:00"},
    ),
    *(
        Case(f"Xid {number}: {what}", "gpu_fault", xid_line(number, what), facts={"xid": number, "pci": "0000:c1:00"})
        for number, what in FATAL_XIDS.items()
    ),
    Case(
        "lost",
        "gpu_fault",
        "Unable to determine the device handle for GPU0000:C1:00.0: GPU is lost. Reboot the system to recover this GPU\n",
    ),
    Case("launch failure", "gpu_fault", "CUDA error: unspecified launch failure", "torch.AcceleratorError"),
]

PACKAGES = [
    Case(
        "module",
        "missing_dependency",
        "No module named 'safetensors'",
        "ModuleNotFoundError",
        {"module": "safetensors", "install": "pip install safetensors"},
    ),
    Case(
        "module with another name in pip",
        "missing_dependency",
        "No module named 'yaml'",
        "builtins.ModuleNotFoundError",
        {"install": "pip install pyyaml"},
    ),
    Case(
        "submodule",
        "missing_dependency",
        "No module named 'sklearn.metrics'",
        "ModuleNotFoundError",
        {"install": "pip install scikit-learn"},
    ),
    Case(
        "own tree",
        "missing_dependency",
        "No module named 'remote.drafter'",
        "ModuleNotFoundError",
        {"module": "remote.drafter"},
    ),
    Case(
        "python -m",
        "missing_dependency",
        "/root/venv/bin/python: No module named torch\n",
        facts={"install": "pip install torch"},
    ),
    Case(
        "library",
        "missing_dependency",
        "libcudart.so.12: cannot open shared object file: No such file or directory",
        "ImportError",
        {"library": "libcudart.so.12"},
    ),
    Case(
        "metadata",
        "missing_dependency",
        "No package metadata was found for The 'tokenizers>=0.22' distribution",
        "importlib.metadata.PackageNotFoundError",
    ),
    Case(
        "advice",
        "missing_dependency",
        "GGUF loading requires the accelerate library but it was not found in your environment. You can install it with: pip install accelerate",
        "ImportError",
        {"install": "pip install accelerate"},
    ),
]

NUMBERS = [
    Case("ours", "nonfinite", "step 41: loss_ce is nan", "remote.drafter.optim.NonFiniteError"),
]

LOOK_ALIKES = [
    Case(
        "Triton shared memory",
        "exception",
        "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
        "triton.runtime.errors.OutOfResources",
        {"required_shared_bytes": 147456, "limit_shared_bytes": 101376},
    ),
    Case(
        "Triton tensor memory",
        "exception",
        "out of resource: tensor memory, Required: 640, Hardware limit: 512.",
        "triton.runtime.errors.OutOfResources",
    ),
    Case("too many registers", "exception", "CUDA error: too many resources requested for launch", "RuntimeError"),
    Case(
        "vLLM cache blocks",
        "exception",
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        "ValueError",
    ),
    Case(
        "vLLM start",
        "exception",
        "Free memory on device (20.1/94.97 GiB) on startup is less than desired GPU memory utilization (0.9, 85.47 GiB).",
        "ValueError",
    ),
    Case("user's own words", "exception", "prompt 17 says: my app died with OutOfMemory, please help", "ValueError"),
    Case("user's class", "exception", "the queue is full", "shop.errors.OutOfMemoryBudget"),
    Case(
        "illegal access", "exception", "CUDA error: an illegal memory access was encountered", "torch.AcceleratorError"
    ),
    Case("device assert", "exception", "CUDA error: device-side assert triggered", "RuntimeError"),
    Case(
        "a note quotes yesterday",
        None,
        'note: yesterday this ended with "CUDA out of memory. Tried to allocate 22.31 GiB", chunk is 1024 now\nstep 1 loss 2.31\n',
    ),
    Case(
        "a log line quotes a traceback",
        None,
        "2026-01-02 10:00:00 INFO previous attempt: Traceback (most recent call last): ... torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\nstep 2\n",
    ),
    Case(
        "indented quotation",
        None,
        'last failure was:\n    Traceback (most recent call last):\n      File "train.py", line 3, in <module>\n    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\nstarting again\n',
    ),
    Case(
        "help text",
        None,
        "usage: train.py [--retry-on oom]\n  --retry-on   RuntimeError: CUDA out of memory is retried with half the batch\n",
    ),
    Case("killed as a word", None, "Killed 3 stale lock files\nstep 1\n"),
    Case("clean log", None, "loading\nstep 1 loss 2.3\nstep 2 loss 2.2\n"),
    Case(
        "another failure after a quoted one",
        "exception",
        '[note] resumed after: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"\n'
        "Traceback (most recent call last):\n"
        '  File "train.py", line 8, in <module>\n    main()\n'
        "ValueError: block_size is 0; it must be at least 2\n",
    ),
]

ECHOES = [
    Case(
        "watchdog",
        "exception",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE) ran for 600029 milliseconds before timing out.",
        "torch.distributed.DistBackendError",
        is_echo=True,
    ),
    Case(
        "peer gone",
        "exception",
        "NCCL communicator was aborted on rank 1. Original reason: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "torch.distributed.DistBackendError",
        is_echo=True,
    ),
    Case(
        "store",
        "exception",
        "The client socket has timed out after 1800000ms while trying to connect to (10.0.0.2, 29500).",
        "torch.distributed.DistNetworkError",
        is_echo=True,
    ),
    Case(
        "connection",
        "exception",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41234",
        "RuntimeError",
        is_echo=True,
    ),
    Case(
        "another rank, which said why",
        "exception",
        "rank 1 (drafter 1) failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "remote.drafter.watch.RankLost",
        is_echo=True,
    ),
    Case(
        "another rank, which said nothing",
        "host_oom",
        "rank 3 (target 0) is gone without a word (process 4711): killed from outside, or by the kernel for its memory",
        "remote.drafter.watch.RankLost",
        is_certain=False,
    ),
    Case("pipe", "exception", "[Errno 32] Broken pipe", "BrokenPipeError", is_echo=True),
    Case(
        "torchrun, ordinary failure",
        "exception",
        "\n====\ntrain.py FAILED\nRoot Cause (first observed failure):\n  exitcode  : 1 (pid: 2630)",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
        is_echo=True,
    ),
]

CORPUS = [
    *GPU_ALLOCATOR,
    *GPU_DRIVER,
    *HOST,
    *SHARED_MEMORY_AND_DISKS,
    *THE_CARD,
    *PACKAGES,
    *NUMBERS,
    *LOOK_ALIKES,
    *ECHOES,
    *QUOTATIONS,
    *OTHER_MEMORY,
    *MORE_DRIVER,
    *MORE_ALLOCATOR,
    *COATS,
    *WRAPPERS,
    *WRAPPED_QUOTATIONS,
    *HANDLED,
    *LANGUAGES,
    *TERMINALS,
]
