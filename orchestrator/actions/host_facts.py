"""What a probe's facts mean: what is missing for a job, which GPUs it gets, what the gate should know.

Pure reading of the dictionary that `remote/probe.py` answers. A fact that is absent counts as unknown,
never as bad.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from orchestrator import gate
from orchestrator.actions.again import no_such_gpu
from orchestrator.actions.card_names import CardKind, kind_of
from orchestrator.actions.installing import (
    OLDEST,
    PINNED_FOR,
    WITHOUT_DEPENDENCIES,
    install_command,
    newer_python,
    tested,
)
from orchestrator.errors import DraftyardError
from orchestrator.store.rows import Kind
from orchestrator.units import counted, format_duration, format_size
from remote.plan import plan
from remote.plan.roles import roles_plan
from remote.probe import oldest_driver
from remote.spec import DFlashSpec, Spec

OLDEST_PYTHON = (3, 10)
TRAINER_PACKAGES = ("torch", "transformers", "safetensors", "numpy")
GGUF_PACKAGES = ("gguf", "sentencepiece", "accelerate")  # transformers needs them to read a GGUF file
TARGET_PACKAGES = (*GGUF_PACKAGES, *WITHOUT_DEPENDENCIES)  # beyond those, for the targets of some bundled recipes

# A card without listed holders may still draw a desktop, whose processes are listed nowhere; beyond this it is taken.
# By index, or by the beginning of a UUID: fewer of its signs name no card yet. A part of a MIG card has its place behind it.
_GPU_NAME = re.compile(r"[0-9]{1,4}|(?:GPU|MIG)-(?:GPU-)?[0-9a-fA-F-]{3,}(?:/[0-9]+){0,2}")
UNLISTED_BYTES = 4 * 2**30

NO_CARDS = "No devices were found"  # nvidia-smi, of a driver that works

NOTHING: Mapping[str, str] = MappingProxyType({})


class MissingDependency(DraftyardError):
    """Something a job needs is not on its host; the message ends in the command that installs it."""

    reason = "missing_dependency"


class GpuBusy(DraftyardError):
    """Fewer GPUs are free than were asked for, or somebody holds one of those that were named."""

    reason = "gpu"


class NoGpu(DraftyardError):
    """The host has no GPU at all, or not the one that was named."""

    reason = "gpu"


@dataclass(frozen=True)
class Lack:
    """One thing a job needs and the host has not."""

    name: str
    seen: str
    repair: str
    package: str | None = None  # what pip installs, where that is the repair
    tested: str | None = None  # the same in the version that the trainer was tested with, where that Python takes it


def lacks(facts: Mapping[str, Any], spec: Spec | None, *, python: str) -> list[Lack]:
    """What of Python and its packages is missing for a spec; `spec` None: for the bundled trainer in general."""
    version = str(_at(facts, "python", "version") or "")
    if version and _numbers(version) < OLDEST_PYTHON:
        return [
            Lack(
                "Python",
                f"is {version}; at least 3.10 is needed",
                newer_python(python) + ", and name it as python: in hosts.yaml",
            )
        ]
    if spec is not None and not isinstance(spec, DFlashSpec):
        return []
    return [*_not_usable(facts, needed_packages(spec), python), *_old_driver(facts)]


def lacks_for_targets(facts: Mapping[str, Any], *, python: str) -> list[Lack]:
    """What of the packages for the targets of some recipes is missing: a launch of those wants it, others do not."""
    return _not_usable(facts, TARGET_PACKAGES, python)


def _not_usable(facts: Mapping[str, Any], names: Sequence[str], python: str) -> list[Lack]:
    """Those that are not there, and those that are older than what the trainer was made for."""
    takes_tested = _numbers(str(_at(facts, "python", "version") or "")) >= _numbers(PINNED_FOR)
    found = []
    for name in names:
        there, oldest = _package(facts, name), OLDEST.get(name)
        if there and (oldest is None or _numbers(there) >= _numbers(oldest)):
            continue
        seen, package = "is not installed", name
        if there:
            seen, package = f"is {there}; at least {oldest} is needed", f"{name}>={oldest}"
        wanted = tested(name) if takes_tested else package
        found.append(Lack(name, seen, install_command(python, wanted), package, wanted))
    return found


def _old_driver(facts: Mapping[str, Any]) -> list[Lack]:
    """torch would not start CUDA with it, in words that name neither version. Where torch says that it does, it does."""
    cuda, driver = str(facts.get("torch_cuda") or ""), str(facts.get("driver") or "")
    oldest = oldest_driver(cuda, driver)
    if not facts.get("gpus") or oldest is None or facts.get("cuda_available") is True:
        return []
    seen = f"of torch is {cuda}, which wants a driver of {oldest} or newer; the driver is {driver}"
    repair = (
        f"apt-get install nvidia-driver-{oldest}  # or how that system has it: update the driver to {oldest} or newer, "
    )
    repair += "or install a build of torch for an older CUDA"
    return [Lack("CUDA", seen, repair)]


def require(facts: Mapping[str, Any], spec: Spec, *, host: str, python: str) -> None:
    """Raises MissingDependency that names everything missing and the one command that installs it."""
    missing = lacks(facts, spec, python=python)
    if missing:
        told = ", ".join(f"{lack.name} {lack.seen}" for lack in missing)
        by_doctor = f"\n  or let draftyard do it: draftyard doctor {host} --fix"
        named = {lack.name for lack in missing if lack.package}
        seen, known = f"host {host} lacks what the job needs: {told}", named & {*TRAINER_PACKAGES, *TARGET_PACKAGES}
        if known and is_managed(facts):
            raise MissingDependency(f"{seen}\n  repair: {fix_command(host)}  # pip may not change {python}")
        raise MissingDependency(f"{seen}\n  repair: {repair_of(missing, python=python)}" + (by_doctor if known else ""))


def is_managed(facts: Mapping[str, Any]) -> bool:
    """Whether the host's Python is one that its system keeps for itself: pip installs nothing there, a venv is due."""
    return _at(facts, "python", "is_managed") is True


def fix_command(host: str) -> str:
    return shlex.join(["draftyard", "doctor", host, "--fix"])


def repair_of(missing: Sequence[Lack], *, python: str) -> str:
    """The one command that puts everything right, and in words what no command can."""
    names = [lack.tested for lack in missing if lack.tested]
    by_hand = [lack.repair for lack in missing if not lack.package]
    return "; ".join([*([install_command(python, *names)] if names else []), *by_hand])


def needed_packages(spec: Spec | None) -> tuple[str, ...]:
    """Distributions the bundled trainer imports for this spec; one inside which the target lies is among them."""
    source = spec.target.source if isinstance(spec, DFlashSpec) else ""
    for_gguf = GGUF_PACKAGES if source.endswith(".gguf") else ()
    holder = (source.removeprefix("package:").partition("/")[0],) if source.startswith("package:") else ()
    return (*TRAINER_PACKAGES, *for_gguf, *holder)


def choose_gpus(
    facts: Mapping[str, Any],
    wanted: Sequence[str],
    spec: Spec,
    *,
    host: str,
    promised: Mapping[str, str] = NOTHING,
    kind: Kind = Kind.TRAIN,
    num_gpus: int | None = None,
    seen: Mapping[str, Sequence[int]] | None = None,
) -> tuple[str, ...]:
    """The GPUs a job gets, by UUID or index: those named, else the `num_gpus` emptiest (None: those of life.num_gpus).
    None where the host has none.

    `promised`: GPU -> the live run that has it, though it may not show on the card yet. Raises GpuBusy when a named
    one is not there or promised, when too few are left, when somebody else holds one (listed by nvidia-smi or not), or
    when less is free than the plan needs; only training and smoke are planned, other kinds of job take less.
    `seen`: what runs took beyond that plan, by stage, as `remote.plan.plan` has it.
    """
    gpus = list(facts.get("gpus") or [])
    if not gpus and not wanted:
        return ()
    chosen = named_gpus(gpus, wanted, host)
    _refuse_promised(chosen, promised, host)
    if not chosen:
        whole = spec.life.num_gpus
        wants = whole if num_gpus is None else num_gpus
        share = f", which is {wants} on each of {whole // wants} hosts" if wants < whole else ""
        chosen = _emptiest(gpus, promised, host, wants, f"the recipe wants {whole} (life.num_gpus){share}")
    held = [line for gpu in chosen for line in (_holders(gpu) or unlisted(gpu, facts))]
    if held:
        told = "\n".join(f"  {line}" for line in held)
        raise GpuBusy(
            f"host {host}: somebody holds memory of the GPUs for this job:\n{told}\n  name others with --gpus, or wait"
        )
    if kind in (Kind.TRAIN, Kind.SMOKE):
        _refuse_too_full(chosen, spec, host, seen)
    return tuple(str(gpu.get("uuid") or gpu["index"]) for gpu in sorted(chosen, key=lambda gpu: gpu["index"]))


def gate_facts(facts: Mapping[str, Any], gpus: Sequence[str]) -> gate.HostFacts:
    """What of the host belongs to a fingerprint."""
    rows = [gpu for gpu in facts.get("gpus") or [] if str(gpu.get("uuid")) in gpus or str(gpu["index"]) in gpus]
    return gate.HostFacts(
        torch=_package(facts, "torch"),
        cuda=_text(facts.get("torch_cuda")),
        driver=_text(facts.get("driver")),
        gpus=tuple((str(gpu.get("name")), int(gpu.get("total_bytes") or 0)) for gpu in rows),
    )


def versions(facts: Mapping[str, Any]) -> dict[str, str]:
    """Versions worth keeping with a run: Python, CUDA, the driver, and the packages that do the work."""
    packages = _at(facts, "python", "packages") or {}
    found = {name: str(packages[name]) for name in (*TRAINER_PACKAGES, "triton", *GGUF_PACKAGES) if packages.get(name)}
    extra = {"python": _at(facts, "python", "version"), "cuda": facts.get("torch_cuda"), "driver": facts.get("driver")}
    return found | {name: str(value) for name, value in extra.items() if value}


class Card(NamedTuple):
    """What a plan is made for: the memory there is, the device, and whether a GPU is of the kind with own kernels."""

    capacity_bytes: int | None
    device: str  # cuda or cpu
    is_hopper: bool | None  # None: nobody said which GPU
    multiplies_float8: bool | None = None  # likewise, or nobody knows of that model


def card_of(facts: Mapping[str, Any], gpus: Sequence[str] | None = None) -> Card:
    """The smallest GPU (of those named), or the machine.

    A GPU that tells no size shares the machine's memory: what is available there is what a job can have.
    """
    rows = [
        gpu
        for gpu in facts.get("gpus") or []
        if gpus is None or str(gpu.get("uuid")) in gpus or str(gpu["index"]) in gpus
    ]
    sizes = [int(gpu["total_bytes"]) for gpu in rows if gpu.get("total_bytes")]
    if rows:
        least = min(sizes, default=None) or _at(facts, "memory", "available_bytes")
        kind = kind_of([str(gpu.get("name")) for gpu in rows])
        return Card(int(least) if least else None, "cuda", **kind)
    total = _at(facts, "memory", "total_bytes")
    return Card(int(total) if total else None, "cpu", None)


def gpu_fault(facts: Mapping[str, Any]) -> str | None:
    """Why nvidia-smi tells of no GPU though one may be there, in its first line; None where it says that none is."""
    told = gpu_complaint(facts)
    return None if told is not None and told.startswith(NO_CARDS) else told


def gpu_complaint(facts: Mapping[str, Any]) -> str | None:
    """What nvidia-smi says in place of GPUs, in its first line: also that there are none, which one that fell off leaves."""
    lines = str(facts.get("gpu_error") or "").split("\n", 1)
    return lines[0] or None


def _emptiest(
    gpus: Sequence[Mapping[str, Any]], promised: Mapping[str, str], host: str, num_gpus: int, wish: str
) -> list[Mapping[str, Any]]:
    free = [gpu for gpu in gpus if _owner(gpu, promised) is None]
    if len(free) < num_gpus:
        runs = sorted({owner for gpu in gpus if (owner := _owner(gpu, promised))})
        taken = f", {len(gpus) - len(free)} of them promised to {_runs(runs)}" if runs else ""
        raise GpuBusy(
            f"host {host} has {counted(len(gpus), 'GPU')}{taken}; {wish}"
            + (f"\n  wait for them: draftyard wait {runs[0]}" if runs and len(gpus) >= num_gpus else "")
        )
    by_use = sorted(free, key=lambda gpu: (bool(gpu.get("processes")), gpu.get("used_bytes") or 0, gpu["index"]))
    return by_use[:num_gpus]


def _refuse_promised(chosen: Sequence[Mapping[str, Any]], promised: Mapping[str, str], host: str) -> None:
    taken = {str(gpu["index"]): owner for gpu in chosen if (owner := _owner(gpu, promised))}
    if taken:
        told = ", ".join(f"GPU {index} is promised to run {owner}" for index, owner in taken.items())
        first = next(iter(taken.values()))
        raise GpuBusy(f"host {host}: {told}\n  name others with --gpus, or wait for it: draftyard wait {first}")


def _owner(gpu: Mapping[str, Any], promised: Mapping[str, str]) -> str | None:
    return promised.get(str(gpu.get("uuid"))) or promised.get(str(gpu["index"]))


def _runs(ids: Sequence[str]) -> str:
    return f"{'run' if len(ids) == 1 else 'runs'} {', '.join(ids)}"


def named_gpus(gpus: Sequence[Mapping[str, Any]], words: Sequence[str], host: str) -> list[Mapping[str, Any]]:
    """Those of the host's GPUs that are named by index or UUID. Raises NoGpu for one that is not there."""
    return [_named(gpus, word, host) for word in words]


def can_name_gpu(word: str) -> bool:
    """Whether some GPU may be named so: by its index, or by enough of a UUID."""
    return _GPU_NAME.fullmatch(word) is not None


def no_name_of_a_gpu(word: str) -> str:
    """What to say where it may not."""
    return f"{word!r} is neither an index, as 5, nor the beginning of a UUID, as GPU-4f1c88de"


def _named(gpus: Sequence[Mapping[str, Any]], word: str, host: str) -> Mapping[str, Any]:
    for gpu in gpus:
        if word == str(gpu["index"]) or (gpu.get("uuid") and str(gpu["uuid"]).startswith(word) and can_name_gpu(word)):
            return gpu
    known = ", ".join(f"{gpu['index']} ({gpu.get('name')})" for gpu in gpus) or "none"
    raise NoGpu(f"host {host} {no_such_gpu(word)} it has {known}")


def _holders(gpu: Mapping[str, Any]) -> list[str]:
    told = []
    for process in gpu.get("processes") or []:
        size = (process.get("used_bytes") or 0) / 2**30
        who = f"pid {process.get('pid')}, user {process.get('user') or '?'}, {process.get('command') or '?'}"
        age_s = process.get("age_s")
        age = f", for {format_duration(age_s)}" if age_s is not None else ""
        told.append(f"GPU {gpu['index']}: {size:.2f} GiB by {who}{age}")
    return told


def unlisted(gpu: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """The line on memory that no listed process holds: usual where the holder is in another container."""
    used, total = gpu.get("used_bytes") or 0, gpu.get("total_bytes") or 0
    if gpu.get("processes") or used <= min(UNLISTED_BYTES, total / 2):
        return []
    container = facts.get("container")
    who = f"from outside this container ({container})" if container else "by no process that nvidia-smi lists"
    return [f"GPU {gpu['index']}: {used / 2**30:.2f} of {total / 2**30:.2f} GiB are held {who}"]


def _refuse_too_full(
    chosen: Sequence[Mapping[str, Any]], spec: Spec, host: str, seen: Mapping[str, Sequence[int]] | None
) -> None:
    """Where an empty card would do and this one does not. One that is too small altogether is told by its smoke run."""
    if not isinstance(spec, DFlashSpec):
        return
    kind = kind_of([str(gpu.get("name")) for gpu in chosen])
    alone, learnt = (_need_bytes(spec, each, kind) for each in (None, seen))
    for gpu in chosen:
        total = gpu.get("total_bytes") or 0
        free = total - (gpu.get("used_bytes") or 0)
        need_bytes = max((size for size in (alone, learnt) if size <= total), default=0)
        measured = f", {format_size(need_bytes - alone)} of it as runs took more" if need_bytes > alone else ""
        if free < need_bytes:
            raise GpuBusy(
                f"host {host}: the job needs {need_bytes / 2**30:.2f} GiB by its plan{measured}, and GPU {gpu['index']} has "
                f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB free, {format_size(need_bytes - free)} too few\n  name another with --gpus, or wait"
            )


def _need_bytes(spec: DFlashSpec, seen: Mapping[str, Sequence[int]] | None, kind: CardKind) -> int:
    made = plan(spec, device="cuda", residuals=seen, **kind)
    by_role = roles_plan(spec, made, seen)  # which card gets which role is not told here: the larger one counts
    return max(role.driver_bytes for role in by_role.each) if by_role else made.driver_bytes


def _package(facts: Mapping[str, Any], name: str) -> str | None:
    return _text((_at(facts, "python", "packages") or {}).get(name))


def _at(facts: Mapping[str, Any], *path: str) -> Any:
    found: Any = facts
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
