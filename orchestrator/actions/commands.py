"""What a job's first process is told: the argv on each host. Only a training has more than one host."""

from __future__ import annotations

from orchestrator.actions.meeting import Meeting
from orchestrator.actions.sending import Command, Commands
from orchestrator.actions.spread import Node, num_ranks
from orchestrator.workplace import Workplace
from remote.spec import ScriptSpec, Spec

LAUNCHER = ("-m", "torch.distributed.run")


def alike(command: Command) -> Commands:
    """The same wherever it runs."""
    return lambda node, meeting: command


def trainer_command(job: str) -> Command:
    return lambda place, folder: (place.python, "-m", "remote.drafter", job, folder)


def train_commands(spec: Spec) -> Commands:
    """A script's own words; the bundled trainer alone, or under torch's launcher where it has several processes."""

    def commands(node: Node, meeting: Meeting | None) -> Command:
        if isinstance(spec, ScriptSpec):
            words = spec.command
            return lambda place, _: tuple(place.python if word == "{python}" else word for word in words)
        if num_ranks(spec) == 1:
            return trainer_command("train")
        each = str(num_ranks(spec) // node.num_nodes)
        launcher = (*LAUNCHER, *_where(node, meeting), "--nproc-per-node", each)

        def command(place: Workplace, folder: str) -> tuple[str, ...]:
            return (place.python, *launcher, "-m", "remote.drafter", "train", folder)

        return command

    return commands


def _where(node: Node, meeting: Meeting | None) -> tuple[str, ...]:
    """A place of its own choice on one host; on several the first one's launcher holds the store at this address."""
    if meeting is None:
        return ("--standalone",)
    at = ("--master-addr", meeting.address, "--master-port", str(meeting.port))
    return ("--nnodes", str(node.num_nodes), "--node-rank", str(node.number), *at)
