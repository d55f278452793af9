"""What stands in a run folder before and between supervisors: laying it out, and telling what is there."""

from __future__ import annotations

from typing import Any

from remote.processes import Identity
from remote.rundir import RunDir, read_json, write_json


def place(run: RunDir, request: dict[str, Any]) -> dict[str, Any]:
    """Writes what an attempt needs, unless the attempt was claimed before; says which it was.

    `differs` names what the claimed one does not share with the request: it may be another database's run of that id.
    `shared_with` is the node of the same attempt that has this folder already: nothing was written.
    """
    number = int(request["attempt"])
    if (run.attempt(number).root / "claim").exists():
        return {"is_claimed": True, "differs": _differences(run, request)}
    before = read_json(run.job_json) or {}
    node = int(request["job"].get("node", 0))
    if before.get("attempt") == number and before.get("node", node) != node:  # two hosts that share a disk
        return {"is_claimed": False, "shared_with": before["node"]}
    run.root.mkdir(parents=True, exist_ok=True)
    run.root.chmod(0o700)  # on a shared host nobody else reads what a job says: an exception may hold a token
    write_json(run.env_file, {str(name): str(value) for name, value in request["env"].items()}, mode=0o600)
    if request.get("spec") is not None:
        write_json(run.spec_json, request["spec"])
    write_json(run.job_json, request["job"])
    run.attempt(number).root.mkdir(parents=True, exist_ok=True)
    return {"is_claimed": False}


def _differences(run: RunDir, request: dict[str, Any]) -> list[str]:
    job = read_json(run.job_json) or {}
    differs = [name for name in ("kind", "argv", "cwd", "facts") if job.get(name) != request["job"].get(name)]
    return differs if read_json(run.spec_json) == request.get("spec") else [*differs, "spec"]


def status(run: RunDir) -> dict[str, Any]:
    """The evidence about the newest attempt, for reading by hand."""
    attempts = run.attempts()
    if not attempts:
        return {"run": str(run.root), "attempt": None}
    newest = attempts[-1]
    supervisor = read_json(newest.supervisor_json)
    return {
        "run": str(run.root),
        "attempt": newest.number,
        "supervisor": supervisor,
        "supervisor_alive": supervisor is not None
        and Identity(supervisor["pid"], supervisor["start_ticks"], supervisor["boot_id"]).is_alive,
        "exit": read_json(newest.exit_json),
    }
