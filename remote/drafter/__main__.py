"""`python -m remote.drafter JOB RUN_DIR`: the bundled trainer's jobs, and the only place that reads the environment.

    train RUN_DIR              trains; a second attempt goes on from the newest whole checkpoint
    smoke RUN_DIR [RUNG...]    climbs the smoke ladder; `rung RUN_DIR RUNG` is one step of it, in this process
    prepare RUN_DIR            makes the target's answers and hidden states
    evaluate RUN_DIR           measures the newest checkpoint by decoding
    export RUN_DIR             writes the newest checkpoint as a folder that public tools load

An exception ends every job the same way: a failure event with the whole traceback, a final event,
exit status 1; a mistake of the user's (`UserFault`) is one line instead of a traceback. A spec that cannot be read is such
a line and exit status 2. SIGTERM lets a training finish its step and ends any other job at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from remote.coherence import cross_field_errors
from remote.drafter import ladder
from remote.drafter.job import Job, StopWish, say
from remote.drafter.ranks import Place, alone, joined
from remote.drafter.snapshot import record_allocations
from remote.drafter.watch import RankStopped
from remote.limits import limit_allocations
from remote.report import Reporter, UserFault
from remote.roles import Roles
from remote.rundir import AttemptDir, RunDir
from remote.spec import RANKS_RUNG, DFlashSpec, load

BAD_INPUT = 2  # exit status
MOST_QUEUES = "32"  # of kernels that a card can be asked for (CUDA programming guide, CUDA_DEVICE_MAX_CONNECTIONS)
TREE = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Runs one job and returns its exit status."""
    options = _options(arguments)
    if options.when_told and not sys.stdin.readline():  # everything is loaded, the card untouched; nobody says go
        return 1
    stop = StopWish()
    signal.signal(signal.SIGTERM, stop)
    attempt = RunDir(options.run_dir).attempt(int(os.environ.get("DRAFTYARD_ATTEMPT", "1")))
    try:
        if options.job == "rung":
            place = _place() if options.names[0] == RANKS_RUNG else None
            rank = f"-{place.rank}" if place and place.rank else ""  # each process has a writer of its own
            reporter = Reporter(attempt.root, writer=f"rung-{options.names[0]}{rank}")
            job = _job(options, attempt, reporter, local_rank=place.local_rank if place else 0)
            return ladder.run_one(job, options.names[0], place)
        is_shared = options.job == "train"  # by several ranks, where a launcher started them
        reporter = Reporter(attempt.root, writer=f"rank{os.environ.get('RANK', '0') if is_shared else 0}")
        with reporter.job():
            place = _place() if is_shared else None
            job = _job(options, attempt, reporter, local_rank=place.local_rank if place else 0)
            roles = Roles.of(job.spec, num_nodes=place.num_nodes if place else 1)
            save_s = job.spec.life.grace_s
            try:
                with joined(place, roles, job.device, reporter, save_s=save_s) if is_shared else alone() as ranks:
                    outcome = _run(replace(job, ranks=ranks), options, stop)
            except KeyboardInterrupt as told:
                if not is_shared or not (stop.is_wanted or isinstance(told, RankStopped)):
                    raise
                say(f"ended outside its steps, as told: {told}")
                outcome = "stopped"  # with status 0: to a launcher any other is a rank that failed
            status = 1 if outcome == "failed" else 0
            reporter.final(outcome, exit_code=status)
    except UserFault as fault:
        sys.stderr.write(f"{fault}\n")
        return 1
    return status


def _run(job: Job, options: argparse.Namespace, stop: StopWish) -> str:
    if options.job == "smoke":
        return "succeeded" if ladder.climb(job, options.names, cap_bytes=options.cap) else "failed"
    # Loaded only now: rungs need no target, and transformers costs each of their processes two seconds.
    jobs = importlib.import_module("remote.drafter.jobs")
    outcome: str = jobs.JOBS[options.job](job, stop)
    return outcome


def _place() -> Place | None:
    """Where torch's launcher put this process; None without one. UserFault: only some of its variables are set.

    One of several also asks its card for more queues, by the environment and so before anything touches the card.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ.get(name) for name in names}
    missing = [name for name, value in found.items() if value is None]
    if len(missing) == len(names):
        return None
    if missing:
        raise UserFault(
            f"{', '.join(missing)} is not set and the launcher's other variables are; start it with torchrun"
        )
    # Of a card's eight queues of kernels streams beyond share one, and wait there for what they do not depend on: a receive
    # for a sum of gradients, say, which waits for another rank. See "Hidden states and gradients" in docs/decisions.md.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", MOST_QUEUES)
    rank, local_rank, world_size, local_size, address, port = (str(value) for value in found.values())
    num_nodes = int(world_size) // int(local_size)
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or None
    return Place(int(rank), int(local_rank), int(world_size), address, int(port), num_nodes, interface)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m remote.drafter", description="The bundled drafter trainer.")
    parser.add_argument("job", choices=["train", "smoke", "rung", "prepare", "evaluate", "export"])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("names", nargs="*", metavar="RUNG", help="smoke: rungs to climb; none: all of the recipe's")
    parser.add_argument(
        "--cap", type=int, metavar="BYTES", help="use at most this much GPU memory, as on a smaller card"
    )
    parser.add_argument("--when-told", action="store_true", help="rung: begin at a line on stdin; the ladder's own")
    options = parser.parse_args(arguments)
    if options.job == "rung" and len(options.names) != 1:
        parser.error("rung takes the name of one rung")
    return options


def _job(options: argparse.Namespace, attempt: AttemptDir, reporter: Reporter, *, local_rank: int = 0) -> Job:
    run = RunDir(options.run_dir)
    try:
        spec = _spec(run)
    except (OSError, ValueError) as error:
        fault = UserFault(str(error))
        reporter.failure(fault)
        sys.stderr.write(f"{fault}\n")
        raise SystemExit(BAD_INPUT) from None
    work_dir = Path(os.environ.get("DRAFTYARD_WORK_DIR", run.root.parent.parent))
    if spec.train.num_threads is not None:
        torch.set_num_threads(spec.train.num_threads)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    told = record_allocations(device) if options.job in ("rung", "train") else None
    if told is not None:
        say(told)
    _limit_memory(device, cap_bytes=options.cap, limit_bytes=spec.life.memory_limit_bytes)
    return Job(
        spec=spec,
        run=run,
        attempt=attempt,
        cache=work_dir / "cache",
        data_dir=Path(os.environ.get("DRAFTYARD_DATA_DIR", TREE / "recipes" / "data")),
        device=device,
        reporter=reporter,
    )


def _spec(run: RunDir) -> DFlashSpec:
    """ValueError for one that the local side would have refused: it was written by something else, or by hand."""
    spec = load(run.spec_json)
    if not isinstance(spec, DFlashSpec):
        raise ValueError(f"{run.spec_json}: entry is {spec.entry}; this trainer runs dflash")
    wrong = [f"{path} {message}" for path, message in cross_field_errors(spec)]
    if wrong:
        raise ValueError(f"{run.spec_json}: {'; '.join(wrong)}")
    return spec


def _limit_memory(device: torch.device, *, cap_bytes: int | None, limit_bytes: int | None) -> None:
    """Caps the card, or on a CPU what the process may allocate; a supervisor has set the same limit already.

    UserFault for a cap without a card: nothing would be capped, and what passes would pass for a smaller card.
    """
    if device.type == "cuda":
        if cap_bytes is not None:
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), device)
        return
    if cap_bytes is not None:
        raise UserFault(
            f"--cap {cap_bytes} bytes is of a GPU's memory, and torch sees no GPU here: leave --cap out, or repair the driver"
        )
    limit_bytes = int(os.environ.get("DRAFTYARD_MEMORY_LIMIT_BYTES", limit_bytes or 0)) or None
    if limit_bytes is not None:
        limit_allocations(limit_bytes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
