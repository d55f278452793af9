"""A small valid spec that tests change one field of."""

from dataclasses import replace
from typing import Any

from remote.spec import DataSpec, DFlashSpec, DrafterSpec, TargetSpec, TrainSpec


def tiny_spec(**sections: dict[str, Any]) -> DFlashSpec:
    """A 4-layer target of width 32 and a 2-layer drafter; `tiny_spec(drafter={"block_size": 8})` changes fields."""
    spec = DFlashSpec(
        recipe="tiny",
        branch="ce",
        entry="dflash",
        target=TargetSpec(
            source="/nowhere",
            hidden_size=32,
            num_layers=4,
            vocab_size=96,
            tied_embeddings=True,
            num_parameters=40_000,
            eos_token_id=2,
            pad_token_id=2,
        ),
        drafter=DrafterSpec(
            num_layers=2,
            intermediate_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            captured_layers=[0, 1, 2],
            block_size=4,
            mask_token_id=3,
            rope_theta=10_000.0,
            max_position_embeddings=256,
        ),
        data=DataSpec(
            prompts="tiny.prompts.jsonl",
            answers="tiny.answers.jsonl",
            held_out="tiny.held_out.jsonl",
            row_tokens=48,
            max_anchors=6,
            anchors_per="row",
        ),
        train=TrainSpec(num_steps=4),
    )
    return replace(spec, **{name: replace(getattr(spec, name), **fields) for name, fields in sections.items()})


def published_layers(num_target_layers: int, num_captured: int) -> list[int]:
    """Evenly spread from layer 1 to layer n-3: 64 layers and 5 give [1, 16, 31, 46, 61]."""
    if num_captured == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_captured - 1)
    return [round(1 + i * step) for i in range(num_captured)]
