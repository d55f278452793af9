"""What a system says in other languages, lines that bear a rank's or a host's label, and boxes without box characters.

The fifth part of the corpus (`failure_corpus`). A number of an error, a status, the form of a shell's line are alike in every
language; a label counts where the next line of a traceback bears the same one.
"""

from tests.orchestrator.failure_case import Case, gib, mib
from tests.orchestrator.failure_quotes import FRAME, HEADER
from tests.orchestrator.failure_wrappers import COMMAND_FAILED, OOM

TRACEBACK = f"{HEADER}{FRAME}{OOM}\n"
OWN = f"{HEADER}{FRAME}ValueError: bad row\n"
SRUN = "srun: error: gpu01: task 0: Exited with exit code 1\n"
PDSH = "pdsh@head: gpu01: ssh exited with exit code 1\n"
RECORDED = (  # rich 15 under LC_ALL=C, stderr in ASCII
    "+--------------------- Traceback (most recent call last) ----------------------+\n"
    "| /srv/me/train.py:7 in <module>                                               |\n"
    "|                                                                              |\n"
    "|   5 def step():                                                              |\n"
    '|   6     raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.  |\n'
    "| \\u2771 7 step()                                                                   |\n"
    "|                                                                              |\n"
    "| /srv/me/train.py:6 in step                                                   |\n"
    "|                                                                              |\n"
    '| \\u2771 6     raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.  |\n'
    "|   7 step()                                                                   |\n"
    "+------------------------------------------------------------------------------+\n"
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total \n"
    "capacity of 94.97 GiB of which 1.00 GiB is free. Including non-PyTorch memory, \n"
    "this process has 93.90 GiB memory in use.\n"
)


def labelled(label: str, text: str = TRACEBACK) -> str:
    return "".join(f"{label}{line}" for line in text.splitlines(keepends=True))


def numbered(label: str) -> str:
    return "".join(f"{label}{number}:{line}" for number, line in enumerate(TRACEBACK.splitlines(keepends=True), 1))


def at_labels(*labels: str) -> str:
    """Lines of several at once, as they come in: in turn, line by line."""
    lines = TRACEBACK.splitlines(keepends=True)
    return "".join(f"{label}{line}" for line in lines for label in labels)


LANGUAGES = [
    Case(
        "a full disk, in German",
        "disk_full",
        "[Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar",
        "OSError",
    ),
    Case(
        "a full disk, in French",
        "disk_full",
        "[Errno 28] Aucun espace disponible sur le périphérique: 'step-40.pt'",
        "OSError",
    ),
    Case("a full disk, in Japanese", "disk_full", "[Errno 28] デバイスに空き領域がありません", "OSError"),
    Case("a quota, in Spanish", "disk_full", "[Errno 122] Se ha excedido la cuota de disco", "OSError"),
    Case(
        "a full disk, by a library in Rust, in German",
        "disk_full",
        "Error while serializing: I/O error: Auf dem Gerät ist kein Speicherplatz mehr verfügbar (os error 28)",
        "safetensors_rust.SafetensorError",
    ),
    Case(
        "a worker's full disk, in German",
        "disk_full",
        "worker 3 died: OSError: [Errno 28] Kein Speicherplatz",
        "RuntimeError",
    ),
    Case("a full disk, by an old name of its class", "disk_full", "[Errno 28] Gerät voll", "IOError"),
    Case("a full disk, in a class of the job's own", "disk_full", "[Errno 28] Gerät voll", "shards.ShardIOError"),
    Case("a full disk, handed on with its class", "disk_full", "OSError: [Errno 28] Gerät voll", "RuntimeError"),
    Case(
        "a full disk, in a rank's step",
        "disk_full",
        "[rank 3] step 41: OSError: [Errno 122] Se ha excedido la cuota de disco",
        "RuntimeError",
    ),
    Case("no memory, of a worker", "host_oom", "worker 3 died: OSError: [Errno 12] Nicht genügend", "RuntimeError"),
    Case(
        "shared memory, of a worker, in German",
        "shm",
        "worker 3 died: OSError: [Errno 28] Gerät voll: '/dev/shm/torch_4711_1'",
        "RuntimeError",
    ),
    Case("a full disk, by Rust alone, in German", "disk_full", "Gerät voll (os error 28)", "OSError"),
    Case("a full disk, by Rust, in a path", "disk_full", "write /srv/k3/a.bin: Gerät voll (os error 28)", "OSError"),
    Case(
        "a full disk, by Rust in Rust",
        "disk_full",
        "Data processing error: IO Error: Gerät voll (os error 122)",
        "Exception",
    ),
    Case("no memory for a fork, in German", "host_oom", "[Errno 12] Nicht genügend Hauptspeicher verfügbar", "OSError"),
    Case("no memory for a fork, in French", "host_oom", "[Errno 12] Ne peut allouer de la mémoire", "OSError"),
    Case(
        "shared memory, in German",
        "shm",
        "[Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar: '/dev/shm/torch_4711_1'",
        "OSError",
    ),
    Case(
        "a library that is not there, in German",
        "missing_dependency",
        "libcudart.so.12: Kann die Shared-Object-Datei nicht öffnen: Datei oder Verzeichnis nicht gefunden",
        "ImportError",
    ),
    Case(
        "a shell's killed job, in German",
        "host_oom",
        "run.sh: Zeile 3: 12345 Getötet                python train.py\n",
        is_certain=False,
    ),
    Case(
        "a shell's killed job, in French",
        "host_oom",
        "run.sh : ligne 3 : 12345 Processus arrêté      python train.py\n",
        is_certain=False,
    ),
    Case(
        "a shell's killed job, in Spanish",
        "host_oom",
        "run.sh: línea 3: 12345 Terminado (killed)      python train.py\n",
        is_certain=False,
    ),
    Case("a shell's killed job, in German, alone", "host_oom", "step 40\nGetötet\n", is_certain=False),
    Case("a shell's killed job, in French, alone", "host_oom", "Processus arrêté\n", is_certain=False),
    Case("a shell's killed job, in Spanish, alone", "host_oom", "Terminado (killed)\n", is_certain=False),
    # what only looks like it
    Case("inotify's limit has a full disk's number", "exception", "[Errno 28] inotify watch limit reached", "OSError"),
    Case(
        "a number that is quoted",
        "exception",
        "run k3 of yesterday ended by 'OSError: [Errno 28] Kein Speicherplatz', not resumed",
        "ValueError",
    ),
    Case(
        "another number",
        "exception",
        "[Errno 2] Datei oder Verzeichnis nicht gefunden: 'rows.jsonl'",
        "FileNotFoundError",
    ),
    Case("a number that begins alike", "exception", "[Errno 128] Schlüssel wurde widerrufen", "OSError"),
    *(
        Case(f"a number in a sentence, {number}", "exception", text, kind)
        for number, (kind, text) in enumerate(
            (
                ("ValueError", "expected: [Errno 28] no"),
                ("ValueError", "[Errno 28] no"),
                ("RuntimeError", "upload of shard 3: [Errno 28] remote says full"),
                ("OSError", "upload of shard 3: [Errno 28] remote says full"),
                ("ValueError", "parsed 3 lines: [Errno 12] was not found in table"),
                ("KeyError", "OSError: [Errno 28] has no handler"),
                ("AssertionError", "worker 3 died: OSError: [Errno 28] Gerät voll"),
                ("RuntimeError", "worker 3 of yesterday's run died: OSError: [Errno 28] Gerät voll"),
                ("RuntimeError", "worker 3 died: expected OSError: [Errno 28] Gerät voll"),
                ("RuntimeError", "worker 3 died, the log has 'OSError: [Errno 28] Gerät voll'"),
                ("RuntimeError", "server replied: OSError: [Errno 28] Gerät voll"),
                ("requests.exceptions.HTTPError", "OSError: [Errno 28] Gerät voll"),
                ("RuntimeError", "test passed, as disk refused (os error 28)"),
                ("RuntimeError", "test passed: I/O error: disk refused (os error 28)"),
                ("ValueError", "expected: I/O error: Gerät voll (os error 28)"),
                ("ValueError", "I/O error: Gerät voll (os error 28)"),
                ("OSError", "server replied: Gerät voll (os error 28)"),
                ("RuntimeError", "peer is full: [Errno 28] Gerät voll: '/dev/shm/torch_4711_1'"),
                ("ValueError", "expected: [Errno 28] in /dev/shm"),
            ),
            1,
        )
    ),
    *(
        Case(f"words that a {kind} only tells, {number}", "exception", text, kind)
        for number, (kind, text) in enumerate(
            (
                ("AssertionError", "expected: [Errno 28] No space left on device"),
                ("KeyError", "'No space left on device'"),
                ("ValueError", "unknown word in line 3: Disk quota exceeded"),
                ("ValueError", "parsed 3 lines: [Errno 12] Cannot allocate memory was not found in table"),
                ("json.decoder.JSONDecodeError", "No space left on device: line 1 column 1 (char 0)"),
                ("TypeError", "no handler for insufficient shared memory (shm)"),
                ("_pytest.outcomes.Failed", "no line says: Memory cgroup out of memory"),
                ("IndexError", "row 7 of the table of faults: GPU is lost"),
                ("ValueError", "unknown end of a worker: exit code -9"),
            ),
            1,
        )
    ),
    Case("killed, in a German sentence", None, "Getötet wurden 3 alte Sperren\nstep 1\n"),
    Case("ended, in a Spanish log", None, "Terminado en 3 s\n"),
    Case("stopped, in a French log", None, "Processus arrêté proprement après 3 pas\n"),
    # labels
    Case("srun -l", "gpu_oom", labelled("0: "), facts={"requested_bytes": mib(970)}),
    Case("srun -l, of many tasks", "gpu_oom", at_labels(" 3: ", "12: ")),
    Case("pdsh", "gpu_oom", labelled("gpu01: ")),
    Case("DeepSpeed's runner, of two machines", "gpu_oom", at_labels("worker-0: ", "worker-1: ")),
    Case("a label with a whole name", "gpu_oom", labelled("node-3.cluster.local: ")),
    Case("a label with an address", "gpu_oom", labelled("10.0.0.7: ")),
    Case("a rank's label", "gpu_oom", labelled("rank3: ")),
    Case("a label behind a container's date", "gpu_oom", labelled("2026-12-01T10:00:00.123456789Z stderr F 0: ")),
    Case(
        "srun -l, with its own last word",
        "gpu_oom",
        labelled("0: ") + SRUN,
    ),
    Case(
        "srun between the rank and whoever waited for it",
        "gpu_oom",
        f"{TRACEBACK}{SRUN}{COMMAND_FAILED}",
    ),
    Case("slurm's word for a killed step", "cgroup_oom", "srun: error: gpu01: task 0: Out Of Memory\n"),
    Case("srun -l, its empty lines without their blank", "gpu_oom", labelled("0: ").replace("0: \n", "0:\n")),
    Case(
        "srun -l, and whoever waited for it, without srun's word",
        "gpu_oom",
        f"{labelled('0: ')}step 3 of the pipeline\n{COMMAND_FAILED}",
    ),
    *(
        Case(f"srun -l, and {what} of its launcher", "gpu_oom", f"{labelled('0: ')}{text}")
        for what, text in (
            ("a last word", "Exception ignored in: <function Pool.__del__ at 0x7f>\n" + OWN),
            ("an interrupt", f"{HEADER}{FRAME}KeyboardInterrupt\n"),
            ("a word of it and an error", f"{SRUN}{OWN}"),
            ("a word of several and an error", f"{SRUN.replace('task 0', 'tasks 0-1,7')}{OWN}"),
        )
    ),
    Case("pdsh, its word and an error of its launcher", "gpu_oom", f"{labelled('gpu01: ')}{PDSH}{OWN}"),
    Case("a retry, before srun's word and an error", "exception", f"{labelled('retry-1: ')}{SRUN}{OWN}"),
    Case("a step, before pdsh's word and an error", "exception", f"{labelled('step12: ')}{PDSH}{OWN}"),
    # no labels
    *(
        Case(f"what {who}, then an error of one's own", "exception", f"{text}{OWN}")
        for who, text in (
            ("grep -r printed", labelled("old-2026-11.log:")),
            ("grep -rn printed", numbered("old-2026-11.log:")),
            ("grep -h printed, labelled", labelled("run3: ")),
            ("a retry printed", labelled("retry-1: ") + "retry-1: trying again\n"),
            ("a step printed and handled", labelled("step12: ") + "step 13\n"),
            ("two steps printed and handled", labelled("step12: ") + labelled("step13: ")),
            ("a step drew and handled", labelled("step12: ", RECORDED)),
            ("a step printed and handled, in a container", labelled("2026-12-01T10:00:00.1Z stderr F step12: ")),
        )
    ),
    Case("grep -r alone", None, labelled("old-2026-11.log:")),
    Case("grep -r of several files", None, at_labels("old-2026-11.log:", "old-2026-12.log:")),
    Case(
        "a message that quotes a traceback line by line",
        "exception",
        f"{HEADER}{FRAME}ValueError: last night's log:\n" + labelled("> ", TRACEBACK),
    ),
    Case(
        "a class is no label",
        "exception",
        f"{HEADER}{FRAME}ValueError: Traceback (most recent call last):\n{FRAME}{OOM}\n",
    ),
    Case("a date is no label", None, labelled("2026-12-01: ")),
    Case("a level is no label", None, labelled("INFO: ")),
    Case("a note is no label", None, labelled("yesterday: ")),
    Case("a label whose next line bears none", None, f"k3: {HEADER}step 1\nstep 2\n"),
    # boxes, cuts, representations, odd breaks of lines
    Case("rich's box in ASCII, as recorded", "gpu_oom", RECORDED, facts={"requested_bytes": gib(2)}),
    Case("rich's box in ASCII, signs replaced", "gpu_oom", RECORDED.replace("\\u2771", "?")),
    Case(
        "a ruled table with that title",
        None,
        "+--- Traceback (most recent call last) ---+\n| none today                            |\n+----+\nstep 1\n",
    ),
    Case("a text cut inside the request", "gpu_oom", "CUDA out of memory. Tried to alloc", "RuntimeError"),
    Case("a text cut inside its first words", "gpu_oom", "CUDA out of mem", "RuntimeError"),
    Case("a class that ends as the cut does", "exception", "CUDA out of range", "RuntimeError"),
    Case(
        "a representation, behind a worker's name",
        "gpu_oom",
        f"worker 3 failed: OutOfMemoryError('{OOM.split(': ', 1)[1]}')",
        "RuntimeError",
    ),
    Case("a representation alone", "gpu_oom", f"OutOfMemoryError('{OOM.split(': ', 1)[1]}')", "RuntimeError"),
    Case(
        "a representation in quotation marks",
        "gpu_oom",
        f'rank 2 raised torch.OutOfMemoryError("{OOM.split(": ", 1)[1]}")',
        "RuntimeError",
    ),
    Case(
        "a representation that a test expected",
        "exception",
        f"expected failure: OutOfMemoryError('{OOM.split(': ', 1)[1]}')",
        "AssertionError",
    ),
    Case(
        "a representation of yesterday",
        "exception",
        f"worker 3 of yesterday's run failed: OutOfMemoryError('{OOM.split(': ', 1)[1]}')",
        "RuntimeError",
    ),
    *(
        Case(f"a line of source with {name}", "gpu_oom", TRACEBACK.replace("\n    ", f"\n    a = '{sign}'; ", 1))
        for name, sign in (
            ("a form feed", "\f"),
            ("a file separator", "\x1c"),
            ("U+0085", "\x85"),
            ("U+2028", "\u2028"),
        )
    ),
]
