import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from remote import ranges
from remote import spec as schema
from remote.coherence import cross_field_errors
from remote.plan.sizes import holds_target
from tests.remote.specs import published_layers, tiny_spec


def test_a_spec_survives_the_way_to_the_host(tmp_path: Path) -> None:
    spec = tiny_spec(data={"noise": schema.NoiseSpec("gaussian", 0.05)}, loss={"terms": {"ce": 1.0, "kl": 0.15}})
    path = tmp_path / "spec.json"

    path.write_text(schema.dump(spec))

    assert schema.load(path) == spec


def test_a_script_spec_survives_the_way_to_the_host(tmp_path: Path) -> None:
    spec = schema.ScriptSpec("own", "main", "script", folder="own", command=["{python}", "train.py"], env={"A": "b c"})
    path = tmp_path / "spec.json"

    path.write_text(schema.dump(spec))

    assert schema.load(path) == spec


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spec_version": 99}, "spec version 99"),
        ({"entry": "jax"}, "entry is 'jax'"),
        ({"bloc": 1}, "unknown key 'bloc'"),
    ],
)
def test_load_refuses_what_it_does_not_know(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({**json.loads(schema.dump(tiny_spec())), **change}))

    with pytest.raises(ValueError, match=words):
        schema.load(path)


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("train", "num_steps", "ten", r'train\.num_steps is "ten"; it must be a whole number of at most 64 bits$'),
        ("train", "num_steps", True, r"train\.num_steps is true; it must be a whole number of at most 64 bits$"),
        (
            "train",
            "num_threads",
            1.5,
            r"train\.num_threads is 1\.5; it must be a whole number of at most 64 bits or null$",
        ),
        ("optim", "lr", "1e-3", r'optim\.lr is "1e-3"; it must be a finite number$'),
        ("optim", "lr", 10**400, r"optim\.lr is 10{59}…; it must be a finite number$"),
        (
            "data",
            "answer_batch",
            10**400,
            r"data\.answer_batch is 10{59}…; it must be a whole number of at most 64 bits$",
        ),
        ("data", "answer_batch", -(2**63), r"answer_batch is -92\d+; it must be a whole number of at most 64 bits$"),
        ("data", "answer_batch", "\ud800", r'answer_batch is "\?"; it must be a whole number of at most 64 bits$'),
        ("optim", "lr", float("inf"), r"optim\.lr is Infinity; it must be a finite number$"),
        ("optim", "name", "sgd", r'optim\.name is "sgd"; it must be one of adamw, muon$'),
        (
            "drafter",
            "captured_layers",
            [0, "1"],
            r"captured_layers is \[0, \"1\"\]; it must be a list, each of it a whole",
        ),
        ("loss", "terms", [1], r"loss\.terms is \[1\]; it must be an object, each value of it a finite number$"),
        ("data", "noise", 3, r"data\.noise is 3; it must be an object with the keys of NoiseSpec$"),
        ("data", "noise", {"bloc": 1}, r"data\.noise: unknown key 'bloc' in NoiseSpec$"),
    ],
)
def test_a_value_of_another_type_is_one_line_with_key_seen_and_due(
    section: str, name: str, value: Any, words: str
) -> None:
    tree = json.loads(schema.dump(tiny_spec()))
    tree[section][name] = value

    with pytest.raises(ValueError, match=rf"^spec\.json: .*{words}"):
        schema.parse(json.dumps(tree), "spec.json")


@pytest.mark.parametrize("text", ["", "[1]", "3", "null", '{"spec_version": 1, "entry": []}', "[" * 100_000])
def test_a_text_that_is_no_spec_is_one_line_that_names_the_file(text: str) -> None:
    with pytest.raises(ValueError, match=r"^spec\.json: .+") as told:
        schema.parse(text, "spec.json")

    assert "\n" not in str(told.value)


def test_no_field_takes_a_value_of_every_type() -> None:
    whole = json.loads(schema.dump(tiny_spec()))
    for section, value in whole.items():
        for name in value if isinstance(value, dict) and section != "env" else ():
            spoiled = {**whole, section: {**value, name: {"": [[None]]}}}
            with pytest.raises(ValueError, match=rf"^spec\.json: {section}\.{name}"):
                schema.parse(json.dumps(spoiled), "spec.json")


def test_the_27b_drafter_has_the_published_number_of_parameters() -> None:
    target = tiny_spec(target={"hidden_size": 5120}).target
    drafter = tiny_spec(
        drafter={
            "num_layers": 5,
            "intermediate_size": 17408,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "captured_layers": [1, 16, 31, 46, 61],
        }
    ).drafter

    assert schema.num_drafter_parameters(target, drafter) == 1_730_213_120


@pytest.mark.parametrize(
    ("depth", "count", "layers"),
    [
        (64, 5, [1, 16, 31, 46, 61]),
        (40, 5, [1, 10, 19, 28, 37]),
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (30, 5, [1, 8, 14, 20, 27]),
        (28, 5, [1, 7, 13, 19, 25]),
        (24, 5, [1, 6, 11, 16, 21]),
        (30, 1, [15]),
    ],
)
def test_captured_layers_follow_the_published_rule(depth: int, count: int, layers: list[int]) -> None:
    assert published_layers(depth, count) == layers


def test_a_bound_is_told_with_what_was_seen() -> None:
    errors = dict(cross_field_errors(tiny_spec(drafter={"num_layers": 100_000_000}, data={"answer_batch": 10**400})))

    assert errors["drafter.num_layers"] == "is 100,000,000; it must be from 1 to 1,000"
    assert errors["data.answer_batch"] == "is a number of more than 64 bits; it must be at least 1"


def test_rows_that_are_too_many_tokens_at_once_are_refused_with_the_arithmetic() -> None:
    errors = dict(cross_field_errors(tiny_spec(data={"row_tokens": 2**17}, train={"rows_per_step": 3})))

    assert "with data.row_tokens 131,072 that is 393,216 tokens at once" in errors["train.rows_per_step"]
    assert "it must be at most 262,144" in errors["train.rows_per_step"]


def test_a_sound_spec_has_no_cross_field_error() -> None:
    assert cross_field_errors(tiny_spec()) == []


@pytest.mark.parametrize(
    ("section", "fields", "path"),
    [
        ("drafter", {"mask_token_id": 2}, "drafter.mask_token_id"),
        ("drafter", {"mask_token_id": 96}, "drafter.mask_token_id"),
        ("drafter", {"mask_token_id": -1}, "drafter.mask_token_id"),
        ("drafter", {"captured_layers": [0, 3]}, "drafter.captured_layers"),
        ("drafter", {"captured_layers": [1, 1]}, "drafter.captured_layers"),
        ("drafter", {"captured_layers": []}, "drafter.captured_layers"),
        ("drafter", {"block_size": 1}, "drafter.block_size"),
        ("drafter", {"num_kv_heads": 3}, "drafter.num_heads"),
        ("drafter", {"head_dim": 15}, "drafter.head_dim"),
        ("drafter", {"layer_types": ["full"]}, "drafter.layer_types"),
        ("drafter", {"layer_types": ["sliding", "full"]}, "drafter.sliding_window"),
        ("target", {"keep_layers": 9}, "target.keep_layers"),
        ("target", {"keep_layers": 3}, "drafter.captured_layers"),
        ("loss", {"terms": {"cee": 1.0}}, "loss.terms.cee"),
        ("loss", {"terms": {"ce": -1.0}}, "loss.terms.ce"),
        ("loss", {"terms": {}}, "loss.terms"),
        ("loss", {"terms": {"kl": 1.0}, "decay": "dpace"}, "loss.decay"),
        ("loss", {"gamma": 0.0}, "loss.gamma"),
        ("loss", {"dpace_alpha": 1.5}, "loss.dpace_alpha"),
        ("data", {"row_tokens": 3}, "data.row_tokens"),
        ("data", {"max_anchors": 0}, "data.max_anchors"),
        ("train", {"num_steps": 0}, "train.num_steps"),
        ("life", {"grace_s": -1.0}, "life.grace_s"),
        ("evaluate", {"tree_budgets": [16, 0]}, "evaluate.tree_budgets"),
        ("evaluate", {"tree_budgets": [-4]}, "evaluate.tree_budgets"),
        ("evaluate", {"temperature": -0.1}, "evaluate.temperature"),
        ("evaluate", {"num_prompts": 0}, "evaluate.num_prompts"),
        ("evaluate", {"max_new_tokens": 0}, "evaluate.max_new_tokens"),
        ("optim", {"lr": 0.0}, "optim.lr"),
        ("optim", {"lr": float("nan")}, "optim.lr"),
        ("optim", {"muon_lr": -1e-3}, "optim.muon_lr"),
        ("optim", {"beta1": 1.0}, "optim.beta1"),
        ("optim", {"beta2": -0.1}, "optim.beta2"),
        ("optim", {"muon_momentum": 1.0}, "optim.muon_momentum"),
        ("optim", {"warmup_steps": -1}, "optim.warmup_steps"),
        ("optim", {"weight_decay": -0.1}, "optim.weight_decay"),
        ("optim", {"clip_norm": -1.0}, "optim.clip_norm"),
        ("optim", {"min_lr_ratio": 1.5}, "optim.min_lr_ratio"),
        ("data", {"num_workers": -1}, "data.num_workers"),
        ("data", {"num_workers": 2, "hidden_states": "online"}, "data.num_workers"),
        ("data", {"noise": schema.NoiseSpec("gaussian", -0.1)}, "data.noise.scale"),
        ("data", {"answer_tokens": 0}, "data.answer_tokens"),
        ("data", {"answer_batch": 0}, "data.answer_batch"),
        ("data", {"answer_temperature": -1.0}, "data.answer_temperature"),
        ("train", {"num_threads": 0}, "train.num_threads"),
        ("smoke", {"rungs": ["fwd", "fwd-bwd"]}, "smoke.rungs"),
        ("loss", {"streak_beta": -1.0}, "loss.streak_beta"),
        ("life", {"max_duration_s": 0.0}, "life.max_duration_s"),
        ("life", {"grace_s": 1e30}, "life.grace_s"),
        ("life", {"retry_on": ["exti"]}, "life.retry_on"),
        ("roles", {"target": 1}, "roles.target"),  # the tiny recipe reads its hidden states from disk
        ("roles", {"drafter": 0}, "roles.drafter"),
        ("roles", {"target": -1}, "roles.target"),
        ("roles", {"queue": 0}, "roles.queue"),
        ("roles", {"drafter": 2}, "train.accumulation"),
        ("roles", {"drafter": 2}, "life.num_gpus"),
        ("roles", {"target": 2_000}, "roles.target"),
        ("roles", {"drafter": 2_000}, "roles.drafter"),
        ("drafter", {"num_layers": 100_000_000}, "drafter.num_layers"),
        ("drafter", {"block_size": 100_000_000}, "drafter.block_size"),
        ("target", {"num_layers": 100_000_000}, "target.num_layers"),
        ("data", {"row_tokens": 100_000_000}, "data.row_tokens"),
        ("train", {"rows_per_step": 100_000_000}, "train.rows_per_step"),
        ("data", {"answer_batch": 10**400}, "data.answer_batch"),
        ("optim", {"lr": 10**400}, "optim.lr"),
    ],
)
def test_a_fault_across_fields_is_named_by_its_path(section: str, fields: dict[str, Any], path: str) -> None:
    errors = cross_field_errors(tiny_spec(**{section: fields}))

    assert path in [where for where, _ in errors]
    assert all(message for _, message in errors)


def test_every_ranged_field_is_one_of_the_schema() -> None:
    """A path misspelt in the table would let every value pass."""
    for rules, _, _ in ranges._RULES:
        for path in rules.split():
            kind: Any = schema.DFlashSpec
            for name in path.split("."):
                hints = get_type_hints(kind)
                assert name in hints, path
                kind = hints[name]


def test_a_rung_of_the_recipes_own_scripts_is_known() -> None:
    own = schema.SmokeSpec(rungs=["fwd", "mine"], scripts={"mine": "mine.py"})

    assert cross_field_errors(replace(tiny_spec(), smoke=own)) == []


def test_a_script_has_no_rungs_but_its_own() -> None:
    spec = schema.ScriptSpec("own", "main", "script", folder="own", command=["x"], smoke=schema.SmokeSpec())

    errors = cross_field_errors(spec)

    assert [path for path, _ in errors] == ["smoke.rungs"] * 5
    assert "'fwd', which is unknown; known rungs are none" in errors[0][1]


def test_roles_that_do_not_come_out_even_are_refused_with_the_arithmetic() -> None:
    spec = tiny_spec(roles={"target": 5, "drafter": 3}, data={"hidden_states": "online"}, train={"accumulation": 4})

    errors = dict(cross_field_errors(spec))

    assert errors["life.num_gpus"] == "is 1; one for each process of roles: 5 target + 3 drafter = 8"
    assert "must be a multiple: 3, 6, ..." in errors["train.accumulation"]


def test_five_targets_and_three_drafters_are_eight_processes_and_none_has_both() -> None:
    spec = tiny_spec(
        roles={"target": 5, "drafter": 3, "queue": 20},
        data={"hidden_states": "online"},
        train={"accumulation": 6},
        life={"num_gpus": 8},
    )

    assert cross_field_errors(spec) == []
    assert not holds_target(spec)
    assert holds_target(tiny_spec(data={"hidden_states": "online"}))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"env": {"": "x"}}, "env"),
        ({"env": {"A=B": "x"}}, "env"),
        ({"env": {"A\0": "x"}}, "env"),
        ({"env": {"DRAFTYARD_RUN_ID": "x"}}, "env"),
        ({"command": []}, "command"),
        ({"command": [" "]}, "command"),
        ({"folder": "/"}, "folder"),
        ({"folder": "/usr/.."}, "folder"),
    ],
)
def test_a_script_that_cannot_be_run_is_refused(fields: dict[str, Any], path: str) -> None:
    sound = schema.ScriptSpec("own", "main", "script", folder="own", command=["x"], smoke=schema.SmokeSpec(rungs=[]))

    assert cross_field_errors(sound) == []
    assert [where for where, _ in cross_field_errors(replace(sound, **fields))] == [path]
