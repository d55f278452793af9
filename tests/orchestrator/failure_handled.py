"""Failures that were handled and gone on from, and words of checks and tests that only tell an out-of-memory error.

The fourth part of the corpus (`failure_corpus`). A traceback counts with the one after it where a launcher alone has spoken
between the two; a dated line, or one with INFO or WARNING, is the job's own log: it went on.
"""

from tests.orchestrator.failure_case import Case
from tests.orchestrator.failure_quotes import FRAME, HEADER, quoting
from tests.orchestrator.failure_wrappers import AGENT, COMMAND_FAILED, MAIN, NOT_TOLD, OOM, SHORT, handed_on, logged

CAUGHT = f"{HEADER}{FRAME}{OOM}\n"
EXPORT = "subprocess.CalledProcessError: Command '['python', 'convert.py']' returned non-zero exit status 1.\n"
OLD_AGENT = (
    "[2024-03-01 10:00:02,123] torch.distributed.elastic.multiprocessing.api: [WARNING] Sending process 3347 closing signal SIGTERM\n"
    "[2024-03-01 10:00:02,456] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 1) local_rank: 0 (pid: 3346)\n"
)
OLDEST_AGENT = (
    "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 3347 closing signal SIGTERM\n"
    "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 3346) of binary: /usr/bin/python\n"
)
DEEPSPEED = (
    "[2024-03-01 10:00:02,123] [INFO] [launch.py:315:sigkill_handler] Killing subprocess 3346\n"
    "[2024-03-01 10:00:02,456] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python', 'train.py'] exits with return code = 1\n"
)
WATCHDOG = (
    "[E1130 10:00:02.123456789 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0 Rank 0] Process group watchdog thread terminated\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "Exception raised from ncclCommWatchdog at ProcessGroupNCCL.cpp:1901 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f libc10.so)\n\n"
)


def went_on(name: str, between: str, end: str = EXPORT) -> Case:
    """An out-of-memory error that was caught, what the job went on to say, and an end of another cause."""
    return Case(name, "exception", f"{CAUGHT}{between}{HEADER}{MAIN}{end}", is_echo=True)


HANDLED = [
    went_on(
        "a command, days after a caught one",
        "2026-12-01 10:00:00 WARNING batch halved, going on\n2026-12-03 10:00:00 INFO step 9000, loss 1.2; exporting\n",
    ),
    went_on("a command, after a level alone", "WARNING batch halved, going on\nINFO step 9000\n"),
    went_on("a command, after the logging module's own form", "WARNING:trainer:batch halved, going on\n"),
    went_on("a command, after a date in brackets", "[2026-12-01 10:00:00,123][trainer][INFO] - step 9000\n"),
    went_on("a command, after absl's lines", "I1201 10:00:00.123456 140 train.py:12] step 9000, loss 1.2\n"),
    went_on(
        "a command, after DeepSpeed's step",
        "[2024-03-01 10:00:02,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=9000, skipped=0, lr=[1e-4]\n",
    ),
    went_on(
        "a command, after Rich's lines of one second", "           WARNING  batch halved, going on     train.py:12\n"
    ),
    went_on(
        "a command, after bars that went on",
        "  3%|3         | 30/1000 [00:10<05:00,  3.0it/s]\n  4%|4         | 40/1000 [00:13<05:00,  3.0it/s]\n",
    ),
    went_on(
        "a client that went away", "2026-12-01 10:00:00 INFO step 9000\n", "BrokenPipeError: [Errno 32] Broken pipe\n"
    ),
    went_on(
        "a peer, after torchrun began again",
        "W1130 10:00:02.123000 3345 torch/distributed/elastic/agent/server/api.py:906] [default] Worker group FAILED. 3/3 attempts"
        " left; will restart worker group\n",
        "ConnectionResetError: [Errno 104] Connection reset by peer\n",
    ),
    logged(
        "torchrun, of a binary in a folder called restarts",
        f"{CAUGHT}{AGENT.replace('(pid: 3346)', '(pid: 3346) of binary: /srv/restarts/python')}{HEADER}{MAIN}{NOT_TOLD}",
    ),
    logged("torchrun of torch 2.1, behind the rank's own words", f"{CAUGHT}{OLD_AGENT}{HEADER}{MAIN}{NOT_TOLD}"),
    logged("torchrun of torch 1.13, behind the rank's own words", f"{CAUGHT}{OLDEST_AGENT}{HEADER}{MAIN}{NOT_TOLD}"),
    logged("DeepSpeed's launcher, behind the rank's own words", f"{CAUGHT}{DEEPSPEED}{COMMAND_FAILED}"),
    logged("NCCL's watchdog between the rank and torchrun", f"{CAUGHT}{WATCHDOG}{AGENT}{HEADER}{MAIN}{NOT_TOLD}"),
    logged(
        "a bar's last drawing before torchrun",
        f"{CAUGHT}  0%|          | 0/10 [00:03<?, ?it/s]\n{AGENT}{HEADER}{MAIN}{NOT_TOLD}",
    ),
    quoting("what a test expected, in words", "AssertionError", f"expected error: {OOM}"),
    quoting("what a test saw", "AssertionError", f"worker 3 failed: {OOM}"),
    quoting("a test's own failure", "_pytest.outcomes.Failed", f"the step did not fail: {OOM}"),
    quoting("a table of handlers", "KeyError", f"no handler for error: {OOM}"),
    quoting("a table of a sweep", "ValueError", f"cannot parse line of sweep table, device 3: {OOM}"),
    quoting("such a table, read by one's own error", "sweep.TableError", f"line 8 of the table, device 3: {OOM}"),
    quoting("a step that did not fail", "RuntimeError", f"step 5 did not fail: {SHORT}"),
    quoting("a worker that never raised it", "RuntimeError", f"worker 3 never raised the expected error: {OOM}"),
    quoting("a text that should match", "RuntimeError", f"failure of rank 2 should match: {OOM}"),
    quoting("an error without a rule", "RuntimeError", f"unknown error in rank 2, no rule for: {OOM}"),
    quoting("a pattern", "re.error", f"pattern of failure 3: {OOM}"),
    handed_on("a step, with what was on", "RuntimeError", f"step 41 failed (loss log enabled): {OOM}"),
    handed_on("a step, without its class", "RuntimeError", f"step 41 failed (loss log enabled): {SHORT}"),
    handed_on("a trainer's name, an epoch and a step", "RuntimeError", f"[trainer] epoch 3, step 5: {OOM}"),
    handed_on("a kind of error", "RuntimeError", f"model inference error: {OOM}"),
    handed_on("an error in a part of the step", "RuntimeError", f"CUDA OOM error in forward: {OOM}"),
    handed_on("on a node", "RuntimeError", f"compute on node failed: {OOM}"),
    handed_on("in a file of the job", "RuntimeError", f"step 41 failed in /home/me/train.py: {OOM}"),
    handed_on("at a file's line", "RuntimeError", f"forward failed at /home/me/train.py:30: {OOM}"),
]
