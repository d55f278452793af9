"""Exported folders: exactly the tensors and flags that servers read, checked by an independent reader."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from remote.drafter.attention import choose_backend
from remote.drafter.decode import Setting, decode_chain
from remote.drafter.export import check_export, export_config, export_drafter, imported_spec, load_exported
from remote.drafter.model import DFlashDrafter, DraftCache
from tests.remote.reference_drafter import ReferenceDrafter
from tests.remote.specs import tiny_spec

pytestmark = pytest.mark.slow  # whole exports

LAYOUTS = {
    "full": {},
    "sliding and full": {"layer_types": ["sliding", "full"], "sliding_window": 6},
    "sliding, not causal": {"layer_types": ["sliding", "sliding"], "sliding_window": 6, "window_rule": "automodel"},
}


def make_drafter(spec) -> DFlashDrafter:
    backend = choose_backend(spec.drafter, device=torch.device("cpu"), dtype=torch.float32)
    drafter = DFlashDrafter(spec.target, spec.drafter, backend=backend)
    drafter.init_weights(torch.Generator().manual_seed(11))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:  # norms of one would hide a mistake
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(parameter.numel()))
            else:
                parameter.mul_(5)
    return drafter


@pytest.fixture(params=LAYOUTS, ids=str)
def spec(request, tiny_target_spec, tiny_drafter_spec):
    return replace(tiny_spec(), target=tiny_target_spec, drafter=replace(tiny_drafter_spec, **LAYOUTS[request.param]))


@pytest.fixture
def full_spec(tiny_target_spec, tiny_drafter_spec):
    return replace(tiny_spec(), target=tiny_target_spec, drafter=tiny_drafter_spec)


@pytest.fixture
def exported(full_spec, tmp_path):
    return export_drafter(make_drafter(full_spec), full_spec, tmp_path / "drafter", step=40)


def test_a_folder_holds_two_files_and_eleven_tensors_a_layer_and_three(exported):
    tensors = load_file(exported / "model.safetensors")

    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors"]
    assert len(tensors) == 11 * 2 + 3
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not any("embed" in name or "lm_head" in name or name.startswith("model.") for name in tensors)


def test_an_independent_module_reads_the_folder_and_computes_the_same(spec, tmp_path):
    drafter = make_drafter(spec)
    folder = export_drafter(drafter, spec, tmp_path / "drafter", step=1)
    features = torch.randn(13, 3 * 48, generator=torch.Generator().manual_seed(1))
    block = torch.randn(4, 48, generator=torch.Generator().manual_seed(2))

    reference = ReferenceDrafter(folder)(features, block)

    for parameter in drafter.parameters():
        parameter.data = parameter.data.bfloat16().float()  # what the folder holds
    ours = drafter.draft(features, DraftCache(2), block)
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_the_config_says_what_servers_look_for(full_spec):
    config = export_config(full_spec, step=40)

    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"]["mask_token_id"] == 3
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["num_target_layers"] == 6
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4
    assert config["tie_word_embeddings"] is False  # although the target's are tied: none are in the file
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert "auto_map" not in config


@pytest.mark.parametrize(
    ("layout", "causal", "window"),
    [("full", False, None), ("sliding and full", None, 6), ("sliding, not causal", False, 6)],
)
def test_order_and_windows_are_written_as_they_were_trained(full_spec, layout, causal, window):
    spec = replace(full_spec, drafter=replace(full_spec.drafter, **LAYOUTS[layout]))

    config = export_config(spec, step=1)

    assert config["dflash_config"].get("causal") is causal
    assert config["sliding_window"] == config["dflash_config"].get("swa_window_size") == window
    assert config["use_sliding_window"] is (window is not None)
    assert config["draftyard"]["window_rule"] == spec.drafter.window_rule


def test_a_folder_describes_the_drafter_it_came_from(spec, tmp_path):
    folder = export_drafter(make_drafter(spec), spec, tmp_path / "drafter", step=1)

    found = imported_spec(json.loads((folder / "config.json").read_text()), folder)

    types = found.layer_types if spec.drafter.layer_types else []
    assert replace(found, layer_types=types) == spec.drafter


def test_an_exported_folder_is_read_by_whoever_may_read_any_of_it(full_spec, tmp_path):
    folder = export_drafter(make_drafter(full_spec), full_spec, tmp_path / "drafter", step=1)

    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_an_imported_drafter_accepts_what_the_exported_one_did(full_spec, tmp_path, tiny_target):
    drafter = make_drafter(full_spec)
    folder = export_drafter(drafter, full_spec, tmp_path / "drafter", step=1)
    again = make_drafter(full_spec)
    again.init_weights(torch.Generator().manual_seed(99))

    load_exported(folder, again, full_spec.target)

    for parameter in drafter.parameters():
        parameter.data = parameter.data.bfloat16().float()
    for text in ("One?", "And two!", "Three..."):
        prompt = tiny_target.prompt_ids([{"role": "user", "content": text}])
        before, after = (decode_chain(tiny_target, each, prompt, Setting(16)) for each in (drafter, again))
        assert (before.ids, before.accepted) == (after.ids, after.accepted)


def test_another_trainers_folder_with_prefixed_names_is_read(full_spec, exported):
    tensors = load_file(exported / "model.safetensors")
    renamed = {f"model.{name}": tensor.float() for name, tensor in tensors.items()}
    renamed["embed_tokens.weight"] = torch.zeros(260, 48)
    save_file(renamed, exported / "model.safetensors")
    drafter = make_drafter(full_spec)
    drafter.init_weights(torch.Generator().manual_seed(99))

    load_exported(exported, drafter, full_spec.target)

    assert torch.equal(drafter.fc.weight, tensors["fc.weight"].float())


def test_an_older_export_is_replaced_whole(full_spec, exported):
    (exported / "leftover").write_text("x")

    export_drafter(make_drafter(full_spec), full_spec, exported, step=80)

    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((exported / "config.json").read_text())["draftyard"]["step"] == 80


def test_a_drafter_with_a_number_that_is_not_finite_is_not_exported(full_spec, tmp_path):
    drafter = make_drafter(full_spec)
    drafter.norm.weight.data[3] = float("nan")

    with pytest.raises(
        ValueError, match=r"norm.weight holds a number that is not finite; export an earlier checkpoint"
    ):
        export_drafter(drafter, full_spec, tmp_path / "drafter", step=1)

    assert list(tmp_path.iterdir()) == []


def drop(tensors):
    del tensors["fc.weight"]


def add(tensors):
    tensors["lm_head.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)


def reshape(tensors):
    tensors["fc.weight"] = torch.zeros(48, 48, dtype=torch.bfloat16)


def widen(tensors):
    tensors["norm.weight"] = tensors["norm.weight"].float()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop, "of 25 tensors 1 missing, first fc.weight"),
        (add, "of 25 tensors 1 unknown, first lm_head.weight"),
        (reshape, r"fc.weight has shape \[48, 48\], expected \[48, 144\]"),
        (widen, "norm.weight is torch.float32; servers want bfloat16"),
    ],
)
def test_a_spoiled_folder_is_one_clear_line(full_spec, exported, spoil, words):
    tensors = load_file(exported / "model.safetensors")
    spoil(tensors)
    save_file(tensors, exported / "model.safetensors")

    with pytest.raises(ValueError, match=words) as caught:
        check_export(exported, full_spec)

    assert "\n" not in str(caught.value)


def test_a_flag_that_was_not_trained_is_named(full_spec, exported):
    config = json.loads((exported / "config.json").read_text())
    config["rope_theta"] = 1e6
    (exported / "config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match=r"config.json has rope_theta 1000000.0 instead of 10000.0"):
        check_export(exported, full_spec)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 8}, "block_size 4, the recipe says 8"),
        ({"captured_layers": [0, 2, 4]}, r"captured_layers \[1, 2, 4\], the recipe says \[0, 2, 4\]"),
        ({"mask_token_id": 9}, "mask_token_id 3, the recipe says 9"),
        ({"intermediate_size": 80}, r"layers.0.mlp.gate_proj.weight has shape \[64, 48\], expected \[80, 48\]"),
    ],
)
def test_a_folder_of_another_drafter_is_refused_by_name(full_spec, exported, changes, words):
    spec = replace(full_spec, drafter=replace(full_spec.drafter, **changes))

    with pytest.raises(ValueError, match=words):
        load_exported(exported, make_drafter(spec), spec.target)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 9}, "sliding_window 8, the recipe says 9"),
        ({"window_rule": "speculators"}, "window rule specforge, the recipe says speculators"),
        ({"window_rule": "automodel"}, "window rule specforge, the recipe says automodel"),
        ({"layer_types": ["full", "full"]}, r"layer types \['sliding', 'full'\], the recipe says \['full', 'full'\]"),
    ],
)
def test_a_folder_trained_with_another_window_is_refused_by_name(full_spec, tmp_path, changes, words):
    windowed = replace(full_spec.drafter, layer_types=["sliding", "full"], sliding_window=8, window_rule="specforge")
    trained = replace(full_spec, drafter=windowed)
    folder = export_drafter(make_drafter(trained), trained, tmp_path / "windowed", step=3)
    spec = replace(full_spec, drafter=replace(windowed, **changes))

    with pytest.raises(ValueError, match=words):
        load_exported(folder, make_drafter(spec), spec.target)


def test_a_folder_whose_full_layers_are_causal_is_refused(full_spec, exported):
    config = json.loads((exported / "config.json").read_text())
    config["dflash_config"]["causal"] = True
    (exported / "config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match="full layers that are causal in the block; this trainer's are not"):
        load_exported(exported, make_drafter(full_spec), full_spec.target)


@pytest.mark.parametrize(
    "scaled",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ],
)
def test_a_folder_whose_rotary_embedding_is_scaled_is_refused(full_spec, exported, scaled):
    """Its tensors would load without a complaint, and mean something else."""
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | scaled))

    with pytest.raises(ValueError, match="rotary embedding of type yarn; this trainer's is plain"):
        load_exported(exported, make_drafter(full_spec), full_spec.target)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dflash_config": None},
        {"dflash_config": [1]},
        {"dflash_config": {"mask_token_id": 3, "target_layer_ids": 3}},
        {"layer_types": 3},
        {"rope_theta": None, "rope_parameters": None},
        {"draftyard": None},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_one_clear_line(full_spec, exported, wrong):
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | wrong))

    with pytest.raises(ValueError, match=r"config\.json has a value of the wrong kind") as caught:
        load_exported(exported, make_drafter(full_spec), full_spec.target)

    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_drafter_is_one_clear_line(full_spec, tmp_path):
    drafter = make_drafter(full_spec)

    with pytest.raises(ValueError, match=r"no config.json that can be read"):
        load_exported(tmp_path, drafter, full_spec.target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        load_exported(tmp_path, drafter, full_spec.target)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"config.json has no \w+; it is not a DFlash drafter's"):
        load_exported(tmp_path, drafter, full_spec.target)
