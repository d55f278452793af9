"""A trained drafter as a folder that public tools load, and such a folder back into a drafter.

The folder holds `config.json` and `model.safetensors`: exactly 11·L+3 bfloat16 tensors without a prefix, as
z-lab's reference, SGLang and vLLM read them. Servers skip names they do not know without a word, and differ in
what they assume about windows and order inside a block, so names, shapes, numbers and flags are checked here
before the folder appears. No `auto_map` is written: it points at a code file, and this folder holds no code.

It does not train and does not measure. Sources: z-lab/dflash `model.py`, SpecForge #742 and #2221 (rotary keys).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from remote.drafter.aside import beside, swap
from remote.drafter.model import DFlashDrafter, tensor_shapes
from remote.drafter.visibility import BIDIRECTIONAL_WINDOW, layer_types, window_meaning
from remote.report import UserFault
from remote.rundir import read_json, write_json
from remote.spec import DFlashSpec, DrafterSpec, TargetSpec

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BORROWED = ("embed_tokens.weight", "lm_head.weight")  # the target's own; some trainers put a copy into the folder
_TYPE_NAMES = {"full": "full_attention", "sliding": "sliding_attention"}


def export_drafter(drafter: DFlashDrafter, spec: DFlashSpec, folder: Path, *, step: int) -> Path:
    """Makes `folder` appear whole, replacing an older one. ValueError when the drafter is not fit to be served."""
    tensors = {name: parameter.detach().to("cpu", torch.bfloat16) for name, parameter in drafter.named_parameters()}
    aside = beside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside / WEIGHTS, {"format": "pt"})
        write_json(aside / CONFIG, export_config(spec, step=step))
        (aside / WEIGHTS).chmod((aside / CONFIG).stat().st_mode)  # safetensors makes it the owner's alone
        check_export(aside, spec)
        swap(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return folder


def export_config(spec: DFlashSpec, *, step: int) -> dict[str, Any]:
    """The config.json of z-lab's format. Model type is qwen3 whatever the target is: servers know drafts by no other."""
    target, drafter = spec.target, spec.drafter
    types = layer_types(drafter)
    rope = {"rope_type": "default", "rope_theta": drafter.rope_theta}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": drafter.block_size,
        "bos_token_id": None,
        "dflash_config": _dflash_config(target, drafter),
        "draftyard": {"recipe": spec.recipe, "branch": spec.branch, "step": step, "window_rule": drafter.window_rule},
        "dtype": "bfloat16",
        "eos_token_id": target.eos_token_id,
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": drafter.intermediate_size,
        "layer_types": [_TYPE_NAMES[kind] for kind in types],
        "max_position_embeddings": drafter.max_position_embeddings,
        "max_window_layers": drafter.num_layers,
        "num_attention_heads": drafter.num_heads,
        "num_hidden_layers": drafter.num_layers,
        "num_key_value_heads": drafter.num_kv_heads,
        "num_target_layers": target.keep_layers or target.num_layers,
        "pad_token_id": target.pad_token_id,
        "rms_norm_eps": drafter.rms_norm_eps,
        # Mirrored: transformers 5 reads rope_parameters, older loaders rope_theta; one alone once meant theta 1e4.
        "rope_parameters": rope,
        "rope_scaling": None,
        "rope_theta": drafter.rope_theta,
        "sliding_window": drafter.sliding_window if "sliding" in types else None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": "sliding" in types,
        "vocab_size": target.vocab_size,
    }
    causal = block_order(drafter)
    return config if causal is None else config | {"is_causal": causal}


def block_order(drafter: DrafterSpec) -> bool | None:
    """Whether every layer is causal in the block; None where sliding layers are and full ones are not.

    None is what servers assume when nothing is said (vLLM, SGLang, z-lab: sliding is causal, full is not).
    """
    kinds = {kind == "sliding" and drafter.window_rule not in BIDIRECTIONAL_WINDOW for kind in layer_types(drafter)}
    return None if True in kinds else False


def _dflash_config(target: TargetSpec, drafter: DrafterSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "block_size": drafter.block_size,  # SGLang looks here as well
        "mask_token_id": drafter.mask_token_id,
        "num_target_layers": target.keep_layers or target.num_layers,
        "target_layer_ids": list(drafter.captured_layers),
    }
    if "sliding" in layer_types(drafter):
        config |= {"use_swa": True, "swa_window_size": drafter.sliding_window}
    causal = block_order(drafter)
    return config if causal is None else config | {"causal": causal}


def check_export(folder: Path, spec: DFlashSpec) -> None:
    """ValueError, one line, when names, shapes, dtype, numbers or flags are not those of a drafter of `spec`."""
    config, tensors = read_export(folder)
    _check_tensors(folder, tensors, tensor_shapes(spec.target, spec.drafter))
    _check_dtype(folder, tensors)
    wrong = _differences(config, export_config(spec, step=0))
    if wrong:
        raise UserFault(f"{folder}: config.json has {'; '.join(wrong)}")


def load_exported(folder: Path, drafter: DFlashDrafter, target: TargetSpec) -> None:
    """Fills `drafter` with the weights of an exported folder, ours or another trainer's, to go on training.

    ValueError, one line: the folder is not there, is damaged, or is a drafter of other shapes or meaning.
    """
    config, tensors = read_export(folder)
    found, expected = imported_spec(config, folder), drafter.spec
    fields = ("captured_layers", "block_size", "mask_token_id", "rope_theta", "rms_norm_eps", "num_layers")
    wrong = [
        f"{name} {getattr(found, name)}, the recipe says {getattr(expected, name)}"
        for name in fields
        if getattr(found, name) != getattr(expected, name)
    ]
    if layer_types(found) != layer_types(expected):
        wrong.append(f"layer types {layer_types(found)}, the recipe says {layer_types(expected)}")
    wrong += _window_differences(found, expected)
    wrong += _scaled_rotation(config)
    if _told_causal(config) and "full" in layer_types(found):
        wrong.append("full layers that are causal in the block; this trainer's are not")
    if wrong:
        raise UserFault(f"drafter.init_from is {folder}, whose drafter has {'; '.join(wrong)}")
    own = {name: tensor for name, tensor in tensors.items() if name not in BORROWED}
    _check_tensors(folder, own, tensor_shapes(target, expected))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(own[name])


def _window_differences(found: DrafterSpec, expected: DrafterSpec) -> list[str]:
    """Where both have sliding layers: another size, another edge or another order in the block."""
    if not all("sliding" in layer_types(drafter) for drafter in (found, expected)):
        return []
    wrong = []
    if found.sliding_window != expected.sliding_window:
        wrong.append(f"sliding_window {found.sliding_window}, the recipe says {expected.sliding_window}")
    if _sight(found.window_rule) != _sight(expected.window_rule):
        wrong.append(f"window rule {found.window_rule}, the recipe says {expected.window_rule}")
    return wrong


def _sight(window_rule: str) -> tuple[bool, bool]:
    """What a rule means, size aside; two trainers' rules may mean the same."""
    rule = window_meaning(window_rule, 0)
    return rule.sloped, rule.causal


def _told_causal(config: dict[str, Any]) -> bool | None:
    told: bool | None = config.get("dflash_config", {}).get("causal", config.get("is_causal"))
    return told


def imported_spec(config: dict[str, Any], folder: Path) -> DrafterSpec:
    """The drafter that a config.json of this format describes. UserFault: a key is missing, or of the wrong kind."""
    try:
        inner = config.get("dflash_config", {})
        types = ["sliding" if kind == "sliding_attention" else "full" for kind in config.get("layer_types") or []]
        bidirectional = _told_causal(config) is False and "sliding" in types
        rule = config.get("draftyard", {}).get("window_rule", "automodel" if bidirectional else "specforge")
        return DrafterSpec(
            num_layers=config["num_hidden_layers"],
            intermediate_size=config["intermediate_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            captured_layers=list(inner["target_layer_ids"]),
            block_size=config.get("block_size", inner.get("block_size")),
            mask_token_id=inner["mask_token_id"],
            rope_theta=config.get("rope_theta") or config["rope_parameters"]["rope_theta"],
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            layer_types=types,  # type: ignore[arg-type]  # the two words of the spec, made just above
            sliding_window=(config.get("sliding_window") or inner.get("swa_window_size"))
            if "sliding" in types
            else None,
            window_rule=rule,
        )
    except KeyError as error:
        raise UserFault(f"{folder}: config.json has no {error.args[0]}; it is not a DFlash drafter's") from error
    except (TypeError, AttributeError) as error:
        raise UserFault(
            f"{folder}: config.json has a value of the wrong kind ({error}); it is not a DFlash drafter's"
        ) from error


def _scaled_rotation(config: dict[str, Any]) -> list[str]:
    """What a config says of its rotary embedding beside its base, where that is not nothing."""
    told = [value for value in (config.get("rope_scaling"), config.get("rope_parameters")) if isinstance(value, dict)]
    kinds = {str(value.get("rope_type", value.get("type", "default"))) for value in told} - {"default"}
    return [f"rotary embedding of type {kind}; this trainer's is plain" for kind in sorted(kinds)]


def read_export(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a folder; a leading `model.` of a name is taken off, as servers do."""
    config = read_json(folder / CONFIG)
    if config is None:
        raise UserFault(f"{folder}: no {CONFIG} that can be read; an exported drafter holds {CONFIG} and {WEIGHTS}")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserFault(f"{folder}: {WEIGHTS} cannot be read ({error})") from error
    return config, {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _check_tensors(folder: Path, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    missing, unknown = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if missing or unknown:
        told = [
            f"{len(names)} {word}, first {names[0]}"
            for names, word in ((missing, "missing"), (unknown, "unknown"))
            if names
        ]
        raise UserFault(f"{folder}: of {len(shapes)} tensors {'; '.join(told)}")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise UserFault(f"{folder}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if not tensor.isfinite().all():
            raise UserFault(f"{folder}: {name} holds a number that is not finite; export an earlier checkpoint")


def _check_dtype(folder: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            raise UserFault(f"{folder}: {name} is {tensor.dtype}; servers want bfloat16, norms included")


def _differences(config: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    keys = [key for key in expected if key != "draftyard"]
    return [
        f"{key} {json.dumps(config.get(key))} instead of {json.dumps(expected[key])}"
        for key in keys
        if config.get(key) != expected[key]
    ]
