"""An allocator's whole text behind a wrapper's words, as pools, launchers and trainers hand it on, and what only looks so.

The third part of the corpus (`failure_corpus`). A wrapper of the same job says which part of it failed and then the whole
text: that is an out-of-memory error. The same sentence about another job, another day or another machine is a quotation.
"""

from tests.orchestrator.failure_case import Case, gib, mib
from tests.orchestrator.failure_quotes import FRAME, HEADER, SHORT, quoting, real

OOM = f"torch.OutOfMemoryError: {SHORT}"
OLDER = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 23.70 GiB total capacity; 20.00 GiB already allocated; 1.10 GiB"
    " free; 21.00 GiB reserved in total by PyTorch)"
)
DRIVER = "RuntimeError: CUDA error: out of memory"
DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
MAIN = '  File "/srv/t.py", line 30, in <module>\n    main()\n'
CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
NOT_TOLD = (
    f"{CHILD_FAILED}: \n============\ntrain.py FAILED\n------------\nFailures:\n  <NO_OTHER_FAILURES>\n------------\n"
    "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-30_10:00:02\n  rank      : 0 (local_rank: 0)\n"
    "  exitcode  : 1 (pid: 3346)\n  error_file: <N/A>\n"
    "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n============\n"
)
AGENT = (
    "W1130 10:00:02.123000 3345 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 3347 closing signal SIGTERM\n"
    "E1130 10:00:02.456000 3345 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 3346)\n"
)
COMMAND_FAILED = (
    f'{HEADER}  File "/root/venv/bin/accelerate", line 8, in <module>\n    sys.exit(main())\n'
    "subprocess.CalledProcessError: Command '['/root/venv/bin/python', 'train.py']' returned non-zero exit status 1.\n"
)


def handed_on(name: str, raised: str, text: str, requested: int = mib(970)) -> Case:
    return real(name, raised, text, "allocator", requested_bytes=requested)


def logged(name: str, text: str) -> Case:
    return Case(name, "gpu_oom", text, facts={"level": "allocator", "requested_bytes": mib(970)})


WRAPPERS = [
    handed_on("a pool's worker, by its class", "RuntimeError", f"worker 3 failed: {OOM}"),
    handed_on("a pool's worker, in words alone", "RuntimeError", f"worker 3 failed: {SHORT}"),
    handed_on("a pool's worker, torch 1", "RuntimeError", f"worker 3 failed: RuntimeError: {OLDER}", gib(2)),
    handed_on("a pool's worker, AMD", "RuntimeError", f"worker 3 failed: {OOM}".replace("CUDA", "HIP")),
    handed_on("a rank", "RuntimeError", f"rank 2 failed: {OOM}"),
    handed_on("a child", "trainer.ChildError", f"child process 4711 raised: {OOM}"),
    handed_on("two wrappers", "RuntimeError", f"training aborted: worker 3 failed: {OOM}"),
    handed_on("where it was raised", "RuntimeError", f"Exception in worker 3: {OOM}"),
    handed_on("a step on a rank", "trainer.StepFailed", f"step 41 failed on rank 3: {OOM}"),
    handed_on("a rank in brackets", "RuntimeError", f"[rank 3] step 41: {OOM}"),
    handed_on("a text that its wrapper cut", "RuntimeError", f"Error in rank 2: {OOM[:78]}", mib(970)),
    real(
        "a pool's worker, of the driver",
        "RuntimeError",
        "worker 3 failed: torch.AcceleratorError: CUDA error: out of memory\nCompile with",
    ),
    real("a step, of the driver", "trainer.StepFailed", f"step 41 failed: {DRIVER}"),
    handed_on(
        "Ray, an actor that could not begin",
        "ray.exceptions.ActorDiedError",
        "The actor died because of an error raised in its creation task, ray::Worker.__init__() (pid=3345, ip=10.0.0.2)\n"
        f'  File "/srv/t.py", line 3, in step\n{OOM}',
    ),
    handed_on(
        "Ray Train, its workers",
        "ray.train.WorkerGroupError",
        f"Training failed due to worker errors:\n[Rank 0,3 Error Snippet]:\n{FRAME}{OOM}\n[Rank 1 Error Snippet]:\n{FRAME}"
        "ConnectionError: peer gone",
    ),
    logged(
        "Ray Train, the task behind its error",
        f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::_Inner.train() (pid=44, ip=10.0.0.2)\n{FRAME}{OOM}\n{DIRECT}"
        f"{HEADER}{MAIN}ray.train.base_trainer.TrainingFailedError: The Ray Train run failed. Please inspect the previous error"
        " messages for a cause.\n",
    ),
    handed_on(
        "DataLoader, a worker",
        "torch.OutOfMemoryError",
        f"Caught OutOfMemoryError in DataLoader worker process 0.\nOriginal {HEADER}{FRAME}{OOM}",
    ),
    real(
        "DataLoader, a worker, of the driver",
        "RuntimeError",
        f"Caught RuntimeError in DataLoader worker process 0.\nOriginal {HEADER}{FRAME}{DRIVER}",
    ),
    handed_on(
        "DataParallel, a replica",
        "RuntimeError",
        f"Caught RuntimeError in replica 1 on device 1.\nOriginal {HEADER}{FRAME}RuntimeError: {OLDER}",
        gib(2),
    ),
    handed_on(
        "concurrent.futures, the worker's side",
        "concurrent.futures.process._RemoteTraceback",
        f'\n"""\n{HEADER}{FRAME}{OOM}\n"""',
    ),
    logged(
        "concurrent.futures, behind an error of one's own",
        f'concurrent.futures.process._RemoteTraceback: \n"""\n{HEADER}{FRAME}{OOM}\n"""\n{DIRECT}{HEADER}{MAIN}'
        "trainer.ShardFailed: shard 3\n",
    ),
    handed_on(
        "joblib, the worker's side",
        "joblib.externals.loky.process_executor._RemoteTraceback",
        f'\n"""\n{HEADER}{FRAME}{OOM}\n"""',
    ),
    logged(
        "joblib, both sides",
        f'joblib.externals.loky.process_executor._RemoteTraceback: \n"""\n{HEADER}{FRAME}{OOM}\n"""\n{DIRECT}{HEADER}{MAIN}{OOM}\n',
    ),
    handed_on(
        "accelerate, in a notebook",
        "RuntimeError",
        f"An issue was found when launching the training:\n\n-- Process 0 terminated with the following error:\n{HEADER}{FRAME}{OOM}",
    ),
    logged("accelerate, from a shell", f"{HEADER}{FRAME}{OOM}\n{COMMAND_FAILED}"),
    handed_on(
        "torchrun, with the rank's traceback",
        CHILD_FAILED,
        "\n============\ntrain.py FAILED\n------------\nRoot Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 3)\n"
        "  exitcode  : 1 (pid: 3345)\n  error_file: /tmp/torchelastic_a/none_b/attempt_0/3/error.json\n"
        f'  traceback : {HEADER}    File "/srv/t.py", line 9, in step\n      loss.backward()\n  {OOM}\n  \n============',
    ),
    logged("torchrun, behind the rank's own words", f"{HEADER}{FRAME}{OOM}\n{AGENT}{HEADER}{MAIN}{NOT_TOLD}"),
    real(
        "torch's RPC",
        "RuntimeError",
        f"On WorkerInfo(id=1, name=trainer1):\nRuntimeError('CUDA error: out of memory')\n{HEADER}{FRAME}{DRIVER}",
    ),
    logged(
        "Lightning, its ranks",
        f'[rank0]: {HEADER}[rank0]:   File "/srv/t.py", line 9, in step\n[rank0]: {OOM}\n[rank1]: {HEADER}'
        '[rank1]:   File "/srv/t.py", line 9, in step\n[rank1]: lightning.pytorch.utilities.exceptions.SIGTERMException\n'
        "[rank: 1] Child process with PID 3346 terminated with code 1. Forcefully terminating all other processes to avoid zombies\n",
    ),
    logged("mpirun", "".join(f"[1,0]<stderr>:{line}\n" for line in f"{HEADER}{FRAME}{OOM}".splitlines())),
]

WRAPPED_QUOTATIONS = [
    quoting("yesterday's worker", "RuntimeError", f"refusing to start: yesterday worker 3 failed: {OOM}"),
    quoting("the attempt before", "RuntimeError", f"the last attempt failed: {OOM}"),
    quoting("the last run's worker, of the driver", "RuntimeError", f"worker 3 of the last run failed: {DRIVER}"),
    quoting("another job, cut", "RuntimeError", "job 7 failed: torch.OutOfMemoryError: CUDA out of memory."),
    quoting("another job", "ValueError", f"max_anchors 4096: job 8812 failed: {OOM}"),
    quoting("a log that was read", "RuntimeError", f"found in log of attempt 1: worker 3 failed: {OOM}"),
    quoting("a server's worker", "RuntimeError", f"server replied: worker 3 failed: {OOM}"),
    quoting("a dated one", "RuntimeError", f"this configuration fails (2026-11-29): worker 3 failed: {OOM}"),
    quoting("a run that was resumed", "RuntimeError", f"resumed from a run whose worker 3 failed: {OOM}"),
    quoting(
        "a worker of another run", "RuntimeError", f"nothing to go on from: worker 3 of run k7f3mnpq failed: {OOM}"
    ),
    quoting("a worker's file", "RuntimeError", f"/logs/worker-3.txt: worker 3 failed: {OOM}"),
    quoting("what a test expected", "AssertionError", f"expected 'worker 3 failed: {OOM}'"),
    quoting("advice, and a worker", "ValueError", f"batch 64 is too large: {SHORT}"),
    quoting(
        "another rank's, by the rank that heard of it",
        "remote.drafter.watch.RankLost",
        f"rank 1 (drafter 1) failed: OutOfMemoryError: {SHORT}",
        is_echo=True,
    ),
    quoting("a worker behind a time-out", "TimeoutError", f"worker 3 failed: {OOM}", is_echo=True),
    Case("a log line of yesterday's", None, f"2026-11-30 10:00:00 INFO yesterday: worker 3 failed: {OOM}\nstep 1\n"),
    Case(
        "a log line of a worker that began again", None, f"ERROR worker 3 failed: {OOM}\nrestarting worker 3\nstep 8\n"
    ),
    Case(
        "a command that failed long after a caught one",
        "exception",
        f"{HEADER}{FRAME}{OOM}\nretrying with half the batch\nstep 1\nstep 2\n{HEADER}{MAIN}"
        "subprocess.CalledProcessError: Command '['git', 'rev-parse', 'HEAD']' returned non-zero exit status 128.\n",
    ),
    Case(
        "torchrun, long after a caught one",
        "exception",
        f"{HEADER}{FRAME}{OOM}\nretrying with half the batch\nstep 1\nstep 2\n{AGENT}{HEADER}{MAIN}{NOT_TOLD}",
        is_echo=True,
    ),
    Case(
        "joblib, a worker that was killed",
        "host_oom",
        "A worker process managed by the executor was unexpectedly terminated. This could be caused by a segmentation fault while"
        " calling the function or by an excessive memory usage causing the Operating System to kill the worker.\n\nThe exit codes"
        " of the workers are {SIGKILL(-9)}",
        "joblib.externals.loky.process_executor.TerminatedWorkerError",
        is_certain=False,
    ),
    quoting(
        "concurrent.futures, a worker that is gone",
        "concurrent.futures.process.BrokenProcessPool",
        "A process in the process pool was terminated abruptly while the future was running or pending.",
        is_echo=True,
    ),
    quoting(
        "Ray, an actor that is gone",
        "ray.exceptions.ActorDiedError",
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Train\nThe actor is dead because its worker process"
        " has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End"
        " of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory"
        " usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors.",
        is_echo=True,
    ),
    quoting("Lightning, told to end", "lightning.pytorch.utilities.exceptions.SIGTERMException", "", is_echo=True),
    quoting("accelerate, no batch is small enough", "RuntimeError", "No executable batch size found, reached zero."),
]
