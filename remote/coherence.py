"""Errors of a spec that one field alone cannot show: fields that must agree with one another.

Standard library only, so that the host checks what the local side has checked. What one number may be is
`remote.ranges`, which is asked first.
"""

from __future__ import annotations

import math
import posixpath

from remote.ranges import MOST_TOKENS, range_errors
from remote.spec import BUNDLED_RUNGS, LOSS_TERMS, RANKS_RUNG, REAL_RUNG, DFlashSpec, ScriptSpec, Spec

# Why a run may fail, so that another attempt can be wished: the reasons of `ls`, without the number of exit and signal.
RETRIED = (
    *("reboot", "gpu_fault", "gpu_oom", "host_oom", "cgroup_oom", "shm", "disk_full", "nonfinite", "exit", "signal"),
    *("unmarked_exit", "missing_dependency", "start_timeout"),
)
MAX_LISTED = 20  # names of rungs in one line
SOFT_TERMS = ("kl", "soft_ce")  # of the loss, as `remote.plan.sizes` has them
FP8_MULTIPLE = 16  # of both sides of the head, for cuBLASLt's product


def cross_field_errors(spec: Spec) -> list[tuple[str, str]]:
    """Errors that one field alone cannot show, as (dotted path, message); empty when all is well."""
    errors = _rung_errors(spec) + range_errors(spec) + _life_errors(spec) + _env_errors(spec)
    if isinstance(spec, DFlashSpec):
        errors += _target_errors(spec) + _drafter_errors(spec) + _loss_errors(spec) + _data_errors(spec)
        errors += _roles_errors(spec)
    else:
        errors += _script_errors(spec)
    return errors


def _rung_errors(spec: Spec) -> list[tuple[str, str]]:
    """A job of the user's own has no rungs but its scripts."""
    bundled = (*BUNDLED_RUNGS, RANKS_RUNG, REAL_RUNG) if isinstance(spec, DFlashSpec) else ()
    names = [*bundled, *spec.smoke.scripts]
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    known = ", ".join(names[:MAX_LISTED]) + more or "none: smoke.scripts is empty"
    unknown = [name for name in spec.smoke.rungs if name not in bundled and name not in spec.smoke.scripts]
    return [("smoke.rungs", f"names {name!r}, which is unknown; known rungs are {known}") for name in unknown]


def _life_errors(spec: Spec) -> list[tuple[str, str]]:
    on_end, known = spec.life.on_end, ", ".join(RETRIED)
    unknown = [word for word in spec.life.retry_on if word not in RETRIED]
    errors = [("life.retry_on", f"names {word!r}, for which nothing fails; known are {known}") for word in unknown]
    if on_end and not on_end[0].strip():
        errors.append(("life.on_end", f"is {on_end}; its first word must be a program: [shutdown, -h, '+10']"))
    return errors


def _env_errors(spec: Spec) -> list[tuple[str, str]]:
    """Names that no process can be given, and those that mean something to the job's supervisor."""
    errors = []
    for name in spec.env:
        if not name or "=" in name or "\0" in name:
            errors.append(("env", f"names {name!r}; the name of a variable is not empty and holds neither = nor NUL"))
        elif name.startswith("DRAFTYARD_"):
            errors.append(("env", f"sets {name}; each job is given those by draftyard, take another name"))
    return errors


def _script_errors(spec: ScriptSpec) -> list[tuple[str, str]]:
    errors = []
    if not spec.command or not spec.command[0].strip():
        errors.append(("command", f"is {spec.command}; its first word must be a program: ['{{python}}', train.py]"))
    if posixpath.normpath(spec.folder).strip("/") == "":
        errors.append(("folder", f"is {spec.folder!r}, a whole machine; name the folder of the program, to be shipped"))
    return errors


def _target_errors(spec: DFlashSpec) -> list[tuple[str, str]]:
    target, errors = spec.target, []
    depth = target.num_layers
    if target.keep_layers is not None:
        if not 1 <= target.keep_layers <= depth:
            errors.append(("target.keep_layers", f"is {target.keep_layers}; the target has {depth} layers"))
        depth = target.keep_layers
    layers = spec.drafter.captured_layers
    if not layers or sorted(set(layers)) != layers:
        errors.append(("drafter.captured_layers", f"is {layers}; it must be strictly increasing and not empty"))
    elif layers[0] < 0 or layers[-1] > depth - 2:
        errors.append(
            (
                "drafter.captured_layers",
                f"is {layers}; ids run from 0 to {depth - 2}: the last layer ({depth - 1}) is stored after the final norm",
            )
        )
    return errors


def _drafter_errors(spec: DFlashSpec) -> list[tuple[str, str]]:
    drafter, target, errors = spec.drafter, spec.target, []
    if drafter.num_kv_heads < 1 or drafter.num_heads % drafter.num_kv_heads:
        errors.append(
            (
                "drafter.num_heads",
                f"is {drafter.num_heads}; it must be a multiple of num_kv_heads {drafter.num_kv_heads}",
            )
        )
    if drafter.head_dim % 2:
        errors.append(("drafter.head_dim", f"is {drafter.head_dim}; rotary embedding needs an even one"))
    mask = drafter.mask_token_id
    if not 0 <= mask < target.vocab_size:
        errors.append(("drafter.mask_token_id", f"is {mask}; the vocabulary runs from 0 to {target.vocab_size - 1}"))
    for name in ("eos", "pad"):
        if mask == getattr(target, f"{name}_token_id"):
            errors.append(("drafter.mask_token_id", f"is {mask}, the {name} token; use a token no text contains"))
    if drafter.layer_types and len(drafter.layer_types) != drafter.num_layers:
        errors.append(
            ("drafter.layer_types", f"names {len(drafter.layer_types)} layers; the drafter has {drafter.num_layers}")
        )
    if "sliding" in drafter.layer_types and (drafter.sliding_window or 0) < drafter.block_size:
        errors.append(
            (
                "drafter.sliding_window",
                f"is {drafter.sliding_window}; sliding layers need at least block_size {drafter.block_size}",
            )
        )
    return errors


def _loss_errors(spec: DFlashSpec) -> list[tuple[str, str]]:
    loss, errors = spec.loss, []
    for name, weight in loss.terms.items():
        if name not in LOSS_TERMS:
            errors.append((f"loss.terms.{name}", f"is unknown; known terms are {', '.join(LOSS_TERMS)}"))
        elif not math.isfinite(weight) or weight < 0:
            errors.append((f"loss.terms.{name}", f"is {weight}; it must be finite and not negative"))
    if not any(loss.terms.values()):
        errors.append(("loss.terms", "has no term with a positive coefficient"))
    if loss.decay == "dpace" and not loss.terms.get("ce"):
        errors.append(("loss.decay", "is dpace, which weighs by the cross-entropy; it needs the term ce"))
    if loss.hidden_gradient == "fp8":
        errors += [("loss.hidden_gradient", f"is fp8: {why}") for why in against_fp8(spec)]
    return errors


def against_fp8(spec: DFlashSpec) -> list[str]:
    """Why the hidden states' gradient cannot be made in fp8. What only the card knows it says at start."""
    told, terms = list[str](), spec.loss.terms
    hard, soft = terms.get("ce", 0.0), sum(terms.get(term, 0.0) for term in SOFT_TERMS)
    if hard <= 0 or (
        hard < soft and not math.isclose(hard, soft)
    ):  # where q - p is small beside q, what is made of them must not be rounded apart
        told.append(f"it needs at least as much of ce as of soft terms; here are {hard:g} and {soft:g}")
    sizes = {"vocab_size": spec.target.vocab_size, "hidden_size": spec.target.hidden_size}
    odd = [f"{name} {size:,}" for name, size in sizes.items() if size % FP8_MULTIPLE]
    if odd:
        told.append(f"its product takes multiples of {FP8_MULTIPLE}; the target has {' and '.join(odd)}")
    if spec.train.kernels == "torch":
        told.append("it is a part of draftyard's own kernels; train.kernels is torch")
    if spec.train.dtype == "float32":
        told.append("it belongs to bfloat16; train.dtype is float32")
    return told


def _data_errors(spec: DFlashSpec) -> list[tuple[str, str]]:
    errors = []
    if spec.data.row_tokens < spec.drafter.block_size:
        errors.append(
            ("data.row_tokens", f"is {spec.data.row_tokens}; one block alone has {spec.drafter.block_size} tokens")
        )
    tokens = spec.data.row_tokens * spec.train.rows_per_step
    if tokens > MOST_TOKENS >= spec.data.row_tokens:
        errors.append(
            (
                "train.rows_per_step",
                f"is {spec.train.rows_per_step}; with data.row_tokens {spec.data.row_tokens:,} that is {tokens:,} tokens at "
                f"once, and it must be at most {MOST_TOKENS:,}; train.accumulation takes rows one after the other",
            )
        )
    if spec.data.hidden_states == "online" and spec.data.num_workers > 0:
        errors.append(
            (
                "data.num_workers",
                f"is {spec.data.num_workers}; with hidden_states online it must be 0: the target cannot run in a worker",
            )
        )
    return errors


def _roles_errors(spec: DFlashSpec) -> list[tuple[str, str]]:
    roles, errors = spec.roles, []
    ranks = roles.target + roles.drafter
    if roles.target > 0 and spec.data.hidden_states == "cached":
        errors.append(
            (
                "roles.target",
                f"is {roles.target}; with hidden_states cached nobody asks a target: use online, or 0 here",
            )
        )
    if roles.drafter > 1 and spec.train.accumulation % roles.drafter:
        errors.append(
            (
                "train.accumulation",
                f"is {spec.train.accumulation}; roles.drafter {roles.drafter} shares a step's batches evenly, so it must be "
                f"a multiple: {roles.drafter}, {2 * roles.drafter}, ...",
            )
        )
    if ranks > 1 and spec.life.num_gpus != ranks:
        errors.append(
            (
                "life.num_gpus",
                f"is {spec.life.num_gpus}; one for each process of roles: {roles.target} target + {roles.drafter} drafter "
                f"= {ranks}",
            )
        )
    return errors
