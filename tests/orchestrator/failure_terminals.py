"""More labels of ranks, what terminals swallow before a traceback, and a machine's words in an error's sentence.

The sixth part of the corpus (`failure_corpus`). A label is one of a few forms, borne line by line; a terminal shows nothing of
a bell, a mode, a title; words of a full disk behind a sentence about another job, day or machine are that one's.
"""

from tests.orchestrator.failure_case import Case, mib
from tests.orchestrator.failure_languages import OWN, TRACEBACK, at_labels, labelled
from tests.orchestrator.failure_quotes import FRAME, HEADER
from tests.orchestrator.failure_wrappers import OOM

DATES = (
    "2026-12-01 10:00:00 ",
    "[2026-12-01 10:00:00,123] ",
    "2026-12-01T10:00:00.123Z ",
    "10:00:00 ",
    "Dec 01 10:00:00 ",
)
ASCTIME = "Tue Dec  1 10:00:00 2026"
GROUP = (
    "  + Exception Group Traceback (most recent call last):\n"
    '  |   File "/srv/me/train.py", line 7, in <module>\n'
    "  |     main()\n"
    "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
    "  +-+---------------- 1 ----------------\n"
    f"    | {HEADER}"
    '    |   File "/srv/me/train.py", line 3, in step\n'
    "    |     loss.backward()\n"
    f"    | {OOM}\n"
    "    +------------------------------------\n"
)
FULL = "No space left on device"

TERMINALS = [
    *(
        Case(f"the label of {who}", "gpu_oom", labelled(label), facts={"requested_bytes": mib(970)})
        for who, label in (
            ("docker compose", "train-1  | "),
            ("docker compose, with its dates", "train-1  | 2026-12-01T10:00:00.123456789Z "),
            ("docker-compose", "train_1  | "),
            ("kubectl logs --prefix", "[pod/train-0/main] "),
            ("kubectl logs --prefix --timestamps", "[pod/train-0/main] 2026-12-01T10:00:00.123456789Z "),
            ("mpiexec -l", "[0] "),
            ("a host in capitals", "GPU01: "),
            ("a host named by its cards", "v100-3: "),
            ("a service of a word that programs count with", "run-1  | "),
            ("such a one again", "test-1  | "),
            ("a rank in two words", "rank 0: "),
            ("a rank in two words, with a capital", "Rank 12: "),
            ("a task, in brackets", "[task 3] "),
            ("a node and a rank, in brackets", "[node-1:rank-3]: "),
            ("Open MPI 4, with a time", f"{ASCTIME}[1,0]<stderr>:"),
            ("Open MPI 4, with a time alone", f"{ASCTIME}<stderr>:"),
            ("Open MPI 5", "[prterun-gpu01-4711@1,0]<stderr>: "),
            ("Open MPI 5, in detail", "[prterun-gpu01-4711@1,0][gpu01:4712]<stderr>: "),
            *((f"a task, behind {date}", f"{date}0: ") for date in DATES),
            ("a rank, behind a date", "2026-12-01 10:00:00 [rank0]: "),
            ("srun -l, before torch's own", "0: [rank0]: "),
            ("torchrun's role", "[trainer0]:"),
            ("horovodrun", "[0]<stderr>:"),
            ("SageMaker's MPI", "[1,mpirank:0,algo-1]<stderr>:"),
            ("GNU parallel --tag", "lr-3e4\t"),
            ("honcho", "10:00:00 train.1 | "),
            ("concurrently, in colours", "\x1b[34m[0]\x1b[39m "),
            ("docker compose, before torch's own", "train-1  | [rank0]: "),
            ("a host, before Ray's", "gpu01: (train pid=4711) "),
            ("a host, before a date", "gpu01: 2026-12-01 10:00:00,123 "),
        )
    ),
    Case(
        "a task, behind dates that differ",
        "gpu_oom",
        "".join(
            f"2026-12-01 10:00:0{second} 0: {line}" for second, line in enumerate(TRACEBACK.splitlines(keepends=True))
        ),
    ),
    *(
        Case(f"the marks of {who}", "gpu_oom", labelled(marks), facts={"requested_bytes": mib(970)})
        for who, marks in (
            ("torchrun and torch", "[default0]:[rank0]: "),
            ("torchrun for a rank, and torch", "[rank0]:[rank0]: "),
            ("torchrun for a role, and torch", "[trainer0]:[rank0]: "),
            ("Open MPI and torch", "[1,0]<stderr>:[rank0]: "),
            ("Ray and torch", "(train pid=4711) [rank0]: "),
            ("a journal and torch", "Dec 01 10:00:00 gpu01 python[4711]: [rank0]: "),
            ("a pod, torchrun and torch", "[pod/train-0/main] [default0]:[rank0]: "),
        )
    ),
    Case(
        "Open MPI 4, with times alone that differ",
        "gpu_oom",
        "".join(
            f"{ASCTIME[:-6]}{second} 2026<stderr>:{line}"
            for second, line in enumerate(TRACEBACK.splitlines(keepends=True))
        ),
    ),
    *(
        Case(
            f"what {who} handled, before its last error",
            "exception",
            labelled(mark) + labelled(f"{mark}[rank0]: ", OWN),
        )
        for who, mark in (("torchrun's process", "[default0]:"), ("srun's task", "0: "))
    ),
    Case("another rank's, before a last error", "gpu_oom", labelled("[rank1]: ") + labelled("[rank10]: ", OWN)),
    *(
        Case(
            f"a program's own count {count!r} before what it handled",
            "exception",
            labelled(count) + labelled("[rank0]: ", OWN),
        )
        for count in (
            "step 41: ",
            "[step 41] ",
            "sample 17: ",
            "prompt 3: ",
            "line 7: ",
            "run 3: ",
            "v2 | ",
            "     1\t",
            "Dec 1: ",
        )
    ),
    Case(
        "a label of a launcher's, before a rank's last error",
        "exception",
        labelled("attempt1: ") + labelled("[rank0]: ", OWN),
    ),
    Case("kubectl logs --prefix, of a name without a number", "gpu_oom", labelled("[pod/train-xkxkp/main] ")),
    Case("docker compose, of two services", "gpu_oom", at_labels("train-1  | ", "eval-12  | ")),
    Case(
        "docker compose, its empty lines without their blank",
        "gpu_oom",
        labelled("train-1  | ") + "train-1  |\ntrain-1  | bye\n",
    ),
    Case(
        "docker compose, its last word and an error",
        "gpu_oom",
        labelled("train-1  | ") + f"train-1 exited with code 1\n{OWN}",
    ),
    Case("a group behind a label", "gpu_oom", labelled("0: ", GROUP)),
    Case("a group behind a pod's label", "gpu_oom", labelled("[pod/train-0/main] ", GROUP)),
    # what no launcher wrote, or what a job handled or copied before an error of its own
    *(
        Case(f"a job's own label {label!r}, then an error", "exception", labelled(label) + f"going on\n{OWN}")
        for label in (
            "attempt1: ",
            "attempt 1: ",
            "Attempt1: ",
            "[attempt-1] ",
            "try-1  | ",
            "2026-12-01 10:00:00 try1: ",
            "[0] ",
            "attempt1: [rank0]: ",
        )
    ),
    *(
        Case(f"no label: {what}", None, labelled(label))
        for what, label in (
            ("a date", "2026-12-01 10:00:00: "),
            ("a date in brackets", "[2026-12-01] "),
            ("a date of a day", "[2026-12-01 10:00:00] "),
            ("the kernel's clock", "[ 1234.567890] "),
            ("the kernel's clock, without blanks", "[1234.567890] "),
            ("seconds since 1970", "1764583200: "),
            ("seconds since 1970, in brackets", "[1764583200.123] "),
            ("a level", "ERROR: "),
            ("a level in brackets", "[ERROR] "),
            ("a level behind a date", "2026-12-01 10:00:00 ERROR "),
            ("a named day", "[yesterday] "),
            ("a quotation", "> "),
            ("a column of a table", "| "),
            ("two columns of a table", "| 3 | "),
            ("a note", "notes | "),
            ("a sentence", "yesterday rank 0: "),
            ("a sentence of a run", "run k3 of rank 0: "),
            ("a file's name", "logs/run3.log: "),
            ("a blank and a label", "          rank0: "),
        )
    ),
    Case(
        "lines that a pager numbered",
        None,
        "".join(f"{n} | {line}" for n, line in enumerate(TRACEBACK.splitlines(True), 8)),
    ),
    Case(
        "lines that were numbered in brackets",
        None,
        "".join(f"[{n}] {line}" for n, line in enumerate(TRACEBACK.splitlines(True), 8)),
    ),
    Case("a label before a traceback's first line alone", None, f"[0] {HEADER}{FRAME}{OOM}\n"),
    Case(
        "a pod's last words, that another's error quotes",
        "exception",
        f"{HEADER}{FRAME}ValueError: the pod said:\n" + labelled("[pod/train-0/main] "),
    ),
    # what a terminal shows nothing of
    *(
        Case(f"behind {what}", "gpu_oom", f"step 1\n{sign}{TRACEBACK}")
        for what, sign in (
            ("a bell", "\a"),
            ("a cursor kept", "\x1b7"),
            ("a cursor that is put back", "\x1b8"),
            ("the keypad's mode", "\x1b="),
            ("a reset", "\x1bc"),
            ("a line up", "\x1bM"),
            ("a string for the device", "\x1bPq#0;2;0;0;0\x1b\\"),
            ("a program's string", "\x1b_Gi=1;AAAA\x1b\\"),
            ("a private message", "\x1b^x\x1b\\"),
            ("a title that ends by its eight-bit sign", "\x1b]0;training\x9c"),
            ("a title of eight bits", "\x9d0;training\x07"),
            ("a title without an end", "\x1b]0;training "),
            ("a string without an end", "\x1bPq "),
            ("a title as screen sets it", "\x1bktrain\x1b\\"),
            ("a byte order mark", "\ufeff"),
            ("a zero", "\x00"),
            ("many zeros, as a file that was truncated has them", "\x00" * 4096),
            ("a shift of character sets", "\x0f"),
        )
    ),
    Case("a group behind a title without an end", "gpu_oom", f"\x1b]0;training{GROUP}"),
    Case("a title that holds a traceback's first words", None, f"\x1b]0;{HEADER.strip()}\x07{FRAME}{OOM}\n"),
    Case("a title without an end, and no traceback", None, "\x1b]0;yesterday: CUDA out of memory\nstep 1\n"),
    # shells
    Case("zsh's killed job", "host_oom", "zsh: killed     python train.py\n", is_certain=False),
    Case(
        "zsh's killed job, in the background", "host_oom", "[1]  + 4711 killed     python train.py\n", is_certain=False
    ),
    Case(
        "fish's killed job",
        "host_oom",
        "fish: Job 1, 'python train.py' terminated by signal SIGKILL (Forced quit)\n",
        is_certain=False,
    ),
    Case("a sentence of zsh's", None, "zsh: killed by hand, going on\n"),
    # a machine's words in a sentence
    *(
        Case(f"{kind} in an error's own sentence, {number}", kind, text, raised)
        for number, (kind, raised, text) in enumerate(
            (
                ("host_oom", "OSError", "Cannot allocate memory (os error 12)"),
                ("host_oom", "OSError", "Nicht genügend Hauptspeicher (os error 12)"),
                (
                    "host_oom",
                    "safetensors_rust.SafetensorError",
                    "Error reading: I/O error: Kein Speicher (os error 12)",
                ),
                ("disk_full", "RuntimeError", FULL),
                ("disk_full", "RuntimeError", f"step 40: {FULL}"),
                ("disk_full", "RuntimeError", f"could not write /srv/server/jobs/old/a.pt: {FULL}"),
                ("disk_full", "RuntimeError", f"checkpoint not saved in /srv/me: [Errno 28] {FULL}"),
                ("disk_full", "OSError", f"Can't write data (file write failed: errno = 28, error message = '{FULL}')"),
                ("disk_full", "RuntimeError", f"expected to write 4096 bytes, wrote 512: {FULL}"),
                ("disk_full", "RuntimeError", f"[node 1] rank 8: OSError: [Errno 28] {FULL}"),
                (
                    "disk_full",
                    "RuntimeError",
                    f"Error building extension 'fused': [1/3] c++ server.cpp -o x.o\nas: can't write 12 bytes: {FULL}",
                ),
                ("disk_full", "c10.Error", f"request for 4 blocks of /srv/a failed: {FULL}"),
                ("disk_full", "datasets.exceptions.DatasetGenerationError", f"read, then written: {FULL}"),
                ("disk_full", "RuntimeError", f"could not write the log of step 4: {FULL}"),
                ("disk_full", "RuntimeError", f"writing the test split, 3 docs: {FULL}"),
                (
                    "host_oom",
                    "RuntimeError",
                    "unable to mmap 4096 bytes from file </srv/m.safetensors>: Cannot allocate memory (12)",
                ),
                ("disk_full", "RuntimeError", f"runs/server: {FULL}"),
                ("disk_full", "RuntimeError", f"could not write jobs/4.pt, next to my-job: {FULL}"),
                ("disk_full", "RuntimeError", f"2026-12-02 03:40:00 write failed: {FULL}"),
                ("host_oom", "RuntimeError", "request for 4 GiB failed: Cannot allocate memory"),
                (
                    "shm",
                    "torch.distributed.DistBackendError",
                    "NCCL error in: x.cpp:77, unhandled system error\nLast error:\n"
                    f"Error while creating shared memory segment /dev/shm/nccl-abc (size 9637888), error: {FULL} (28)",
                ),
            ),
            1,
        )
    ),
    Case(
        "a killed command with such words",
        "host_oom",
        "Command '['ssh', 'gpu01', 'python', 'rerun.py', '--job', 'test', 'server']' died with <Signals.SIGKILL: 9>.",
        "subprocess.CalledProcessError",
        is_certain=False,
    ),
    *(
        Case(f"a sentence of its own, {number}", kind, text, raised)
        for number, (kind, raised, text) in enumerate(
            (
                ("disk_full", "OSError", f"saving the job state: {FULL}"),
                ("disk_full", "RuntimeError", f"failed to write shard of job 12: {FULL}"),
                ("disk_full", "RuntimeError", f"could not write the service file: {FULL}"),
                ("disk_full", "RuntimeError", f"previously saved checkpoint kept; new one failed: {FULL}"),
                ("disk_full", "MyCheckpointError", f"peer rank 2 could not write: {FULL}"),
                ("host_oom", "RuntimeError", "remote worker 3 failed: Cannot allocate memory"),
                ("disk_full", "RuntimeError", f"run failed: {FULL}"),
                ("disk_full", "RuntimeError", f"Client write failed: {FULL}"),
                ("disk_full", "RuntimeError", f"should have written 4096 bytes: {FULL}"),
                ("disk_full", "ray.exceptions.LocalDiskError", f"Job 01000000: {FULL}"),
                ("host_oom", "RuntimeError", "peer 3 (this node) failed: std::bad_alloc"),
                ("gpu_fault", "RuntimeError", "CUDA error: device-side peer lost: GPU has fallen off the bus"),
            ),
            1,
        )
    ),
    *(
        Case(f"a sentence about another, {number}", "exception", text, raised)
        for number, (raised, text) in enumerate(
            (
                ("RuntimeError", f"server replied: {FULL}"),
                ("RuntimeError", f"job k3 of yesterday ended: [Errno 28] {FULL}"),
                ("RuntimeError", f"job k3 of yesterday ended: OSError: [Errno 28] {FULL}"),
                ("OSError", f"server replied: {FULL}"),
                ("RuntimeError", f"the log has 'OSError: [Errno 28] {FULL}'"),
                ("RuntimeError", f"the last lines of the log:\nOSError: [Errno 28] {FULL}"),
                ("RuntimeError", f"expected OSError: [Errno 28] {FULL}"),
                ("RuntimeError", f"test passed, as disk refused: {FULL}"),
                ("RuntimeError", f"the note of 2026-11-30 says {FULL}"),
                ("RuntimeError", f"https://hub.example/upload: 507: {FULL}"),
                ("RuntimeError", f"the message was: '{FULL}'"),
                ("RuntimeError", "yesterday's run: Cannot allocate memory"),
                ("RuntimeError", "the peer said: std::bad_alloc"),
                ("RuntimeError", "previous run ended with exit code -9"),
                ("RuntimeError", "the server's table: GPU is lost"),
                ("RuntimeError", "the client's log: insufficient shared memory (shm)"),
                ("requests.exceptions.HTTPError", f"507 Server Error: {FULL}"),
                ("openai.APIStatusError", "Error code: 500 - Cannot allocate memory"),
            ),
            1,
        )
    ),
]
