"""Recipes: layers, faults in order, explain, diff, and where a recipe is found."""

import dataclasses
import re
import textwrap
from pathlib import Path
from textwrap import indent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import RecipeError, UsageError
from orchestrator.recipe import Recipe, diff, find_recipe, known_recipes, load_recipe, slug
from orchestrator.recipe.file import read_recipe_file
from orchestrator.recipe.layers import leaves
from orchestrator.recipe.overrides import format_path, format_value
from orchestrator.recipe.strict_yaml import dump
from remote.spec import DFlashSpec, ScriptSpec

PRESET = """\
why: A model for tests.
target: {source: /nowhere, hidden_size: 32, num_layers: 4, vocab_size: 96, tied_embeddings: true,
  num_parameters: 40_000, eos_token_id: 2, pad_token_id: 2}
drafter: {num_layers: 2, intermediate_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 16,
  captured_layers: [0, 1, 2], block_size: 4, mask_token_id: 3, rope_theta: 1e4, max_position_embeddings: 256}
"""

RECIPE = """\
name: tiny
why: Small enough to read.
base:
  entry: dflash
  preset: tiny
  data: {prompts: p, answers: a, held_out: h, row_tokens: 48, max_anchors: 6, anchors_per: document}
  train: {num_steps: 4}
  life: {grace_s: 1m30s}
branches:
  ce:
    why: The baseline.
    tags: [a]
  kl:
    extends: ce
    loss: {terms: {kl: 0.15}, gamma: 5}
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str = RECIPE, preset: str = PRESET, name: str = "tiny") -> Path:
    folder = Path("recipes")
    (folder / "presets").mkdir(parents=True, exist_ok=True)
    (folder / "presets" / "tiny.yaml").write_text(preset)
    (folder / f"{name}.yaml").write_text(textwrap.dedent(text))
    return folder / f"{name}.yaml"


def load(text: str = RECIPE) -> Recipe:
    return load_recipe(write(text))


def faults(text: str, preset: str = PRESET) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        load_recipe(write(text, preset))
    return raised.value.items


def changed(old: str, new: str) -> str:
    assert old in RECIPE
    return RECIPE.replace(old, new)


def test_a_branch_is_the_defaults_the_preset_the_base_and_what_it_extends() -> None:
    spec = load().resolve("kl").spec

    assert isinstance(spec, DFlashSpec)
    assert (spec.recipe, spec.branch, spec.why, spec.tags) == ("tiny", "kl", "The baseline.", ["a"])
    assert spec.loss.terms == {"ce": 1.0, "kl": 0.15}
    assert (spec.loss.gamma, spec.life.grace_s, spec.target.hidden_size, spec.optim.lr) == (5.0, 90.0, 32, 6e-4)


def test_the_first_branch_is_the_default_unless_the_file_names_one() -> None:
    assert load().default_branch == "ce"
    assert load(RECIPE + "default_branch: kl\n").resolve().spec.branch == "kl"


def test_a_branch_without_a_sentence_has_the_recipes() -> None:
    spec = load(changed("    why: The baseline.\n", "")).resolve("kl").spec

    assert spec.why == "Small enough to read."


def test_a_branch_that_extends_two_takes_the_later_ones_word_and_each_ancestor_once() -> None:
    recipe = load(
        RECIPE
        + """\
  left: {extends: kl, loss: {gamma: 6}}
  right: {extends: kl, optim: {lr: 1e-3}}
  both: {extends: [left, right]}
"""
    )

    spec = recipe.resolve("both").spec

    assert isinstance(spec, DFlashSpec)
    assert (spec.loss.gamma, spec.optim.lr) == (6.0, 1e-3)


def test_a_null_takes_a_free_key_away() -> None:
    spec = load(RECIPE + "  only_kl: {extends: kl, loss: {terms: {ce: null}}}\n").resolve("only_kl").spec

    assert isinstance(spec, DFlashSpec)
    assert spec.loss.terms == {"kl": 0.15}


def test_a_name_with_a_slash_becomes_one_folder_name() -> None:
    recipe = load(changed("name: tiny", "name: a/b c"))

    assert (recipe.name, recipe.slug, recipe.resolve().spec.recipe) == ("a/b c", "a-b-c", "a-b-c")


def test_branches_that_lay_too_many_values_over_one_another_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each branch is resolved with all that is below it: 1 MiB of branches and keys were hours of work."""
    monkeypatch.setattr("orchestrator.recipe.file.MAX_LAID", 40)
    text = """
        name: tiny
        why: y
        base: {entry: script, folder: ., command: [a, b, c], env: {A: "1", B: "2", C: "3"}}
        branches:
        """
    few = [f"  b{index}: {{why: z}}" for index in range(3)]
    many = [f"  b{index}: {{why: z}}" for index in range(4)]
    lined = ["  c0: {env: {D: '4'}}", *(f"  c{index}: {{extends: c{index - 1}}}" for index in range(1, 4))]

    assert len(load(textwrap.dedent(text) + "\n".join(few)).branches) == 3
    for branches in (many, lined):
        with pytest.raises(RecipeError) as refused:
            load(textwrap.dedent(text) + "\n".join(branches))
        assert len(refused.value.items) == 1
        assert re.fullmatch(
            r"recipes/tiny.yaml:6:\d+: branches: the branches together write \d+ values, "
            r"those of base and of what each extends counted for each; at most 40",
            refused.value.items[0],
        ), refused.value.items


def test_the_bound_of_all_branches_is_far_above_what_a_person_writes() -> None:
    branches = "".join(f"  b{index}: {{why: z, tags: [a]}}\n" for index in range(100))
    env = ", ".join(f'K{index}: "1"' for index in range(1000))
    text = f"name: x\nwhy: y\nbase: {{entry: script, folder: ., command: [a], env: {{{env}}}}}\nbranches:\n{branches}"

    assert len(read_recipe_file(write(text), Path("none")).branches) == 100


def test_a_nul_byte_is_a_fault_with_its_place() -> None:
    (told,) = faults(changed("    tags: [a]", '    tags: ["a\\0b"]'))

    assert told.startswith("recipes/tiny.yaml:12:")
    assert "holds a NUL byte" in told


def test_a_number_that_no_database_holds_is_a_fault() -> None:
    (told,) = faults(changed("num_steps: 4", "num_steps: " + "9" * 26))

    assert "larger than 2^62" in told


def test_a_number_of_thousands_of_digits_is_refused_as_no_number() -> None:
    (told,) = faults(changed("num_steps: 4", "num_steps: " + "1" * 5000))

    assert told.startswith("recipes/tiny.yaml:7:")
    assert "a number of 5,000 characters" in told


@pytest.mark.parametrize("sign", list("/\\:#?%"))
def test_a_sign_that_paths_and_addresses_use_is_not_in_a_folder_name(sign: str) -> None:
    assert slug(f"a{sign}b") == "a-b"


def test_names_of_other_letters_stay_apart_and_plain_ones_stay_as_they_are() -> None:
    names = ["é", "ü", "模型", "模型二", "café", "cafe"]

    assert len({slug(name) for name in names}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", slug(name)) for name in names)
    assert slug("qwen3.6-27b_v2") == "qwen3.6-27b_v2"


def test_a_typo_is_named_with_its_place_and_the_nearest_key() -> None:
    (section,), (key,) = faults(changed("loss: {terms", "los: {terms")), faults(changed("gamma: 5", "gama: 5"))

    assert re.fullmatch(
        r"recipes/tiny.yaml:15:5: los: no key 'los'; known: loss, \w+.* and \d+ more; did you mean 'loss'\?", section
    )
    assert re.fullmatch(r"recipes/tiny.yaml:15:31: loss.gama: no key 'gama'; known: \w+.*; did you mean 'gamma'\?", key)


def test_a_typo_in_the_preset_is_named_in_the_presets_file() -> None:
    missing, unknown = faults(RECIPE, PRESET.replace("block_size", "bloc_size"))

    assert missing == "recipes/presets/tiny.yaml:4:10: drafter.block_size: is missing; expected a whole number"
    assert unknown.startswith(
        "recipes/presets/tiny.yaml:5:31: drafter.bloc_size: no key 'bloc_size'; known: block_size, "
    )
    assert unknown.endswith("; did you mean 'block_size'?")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("num_steps: 4", "num_steps: '4'", "7:22: train.num_steps: is '4', which is text; expected a whole number"),
        ("num_steps: 4", "num_steps: 4e3", "7:22: train.num_steps: is 4000.0; expected a whole number: write 4000"),
        ("num_steps: 4", "num_steps: true", "7:22: train.num_steps: is true; expected a whole number"),
        ("num_steps: 4", "num_steps: ~", "7:22: train.num_steps: is empty; expected a whole number"),
        ("gamma: 5", "gamma: five", "15:38: loss.gamma: is 'five', which is text; expected a number"),
        ("gamma: 5", "gamma: .nan", "15:38: loss.gamma: is not finite; write a finite number"),
        ("gamma: 5", "gamma: 1e400", "15:38: loss.gamma: is not finite; write a finite number"),
        ("kl: 0.15", "kl: .inf", "15:24: loss.terms.kl: is not finite; write a finite number"),
        ("tags: [a]", "tags: a", "12:11: tags: is 'a'; expected a list whose items are each text"),
        ("tags: [a]", "tags: [a, 1]", "12:15: tags.1: is 1; expected text: write \"1\""),
        ("tags: [a]", "env: {A: 1}", "12:14: env.A: is 1; expected text: write \"1\""),
        ("tags: [a]", "env: {A: no, B: on}", None),
        ("tags: [a]", "evaluate: {at_end: no}", "12:24: evaluate.at_end: is 'no', which is text; expected true or false"),
        ("gamma: 5", "decay: dpaice", "15:38: loss.decay: is 'dpaice'; expected one of exponential, dpace, none; did you mean 'dpace'?"),
        ("grace_s: 1m30s", "grace_s: 1m30", "8:19: life.grace_s: is '1m30'; write a duration such as 90s, 45m, 2h30m or 1d"),
        ("grace_s: 1m30s", "memory_limit_bytes: 2G", "8:30: life.memory_limit_bytes: is '2G', which could be either"),
        ("grace_s: 1m30s", "memory_limit_bytes: 2GiB", None),
        ("life: {grace_s: 1m30s}", "life: 3", "8:9: life: is 3; expected a section with the keys grace_s,"),
        ("tags: [a]", "recipe: x", "12:5: recipe: no key 'recipe'; known: "),
        ("tags: [a]", "env: {grace_s: 1h}", None),
    ],
)  # fmt: skip
def test_a_value_of_another_type_says_what_was_seen_and_what_is_due(old: str, new: str, fault: str | None) -> None:
    text = changed(old, new)
    if fault is None:
        load(text)
        return

    found = faults(text)

    assert len(found) == 1
    assert found[0].startswith(f"recipes/tiny.yaml:{fault}")


def test_a_key_of_another_section_is_named_with_its_home() -> None:
    (told,) = faults(changed("num_steps: 4", "num_steps: 4, lr: 1"))

    assert ": train.lr: no key 'lr'; known: " in told
    assert told.endswith("; did you mean 'optim.lr'?")


def test_a_missing_preset_is_one_fault_without_its_echoes() -> None:
    assert faults(changed("preset: tiny", "preset: tinny")) == [
        "recipes/tiny.yaml:5:11: base.preset: no preset 'tinny'; known: qwen3-8b, qwen3.6-27b, smollm2-135m, tiny; did you mean 'tiny'?"
    ]


def test_field_faults_of_all_branches_come_together_in_the_files_order() -> None:
    text = changed("num_steps: 4", "num_step: 4").replace("gamma: 5", "gamma: x") + "  other: {los: 1}\nwhi: 3\n"

    assert [item.split(": ")[0:2] for item in faults(text)] == [
        ["recipes/tiny.yaml:7:10", "train.num_steps"],
        ["recipes/tiny.yaml:7:11", "train.num_step"],
        ["recipes/tiny.yaml:15:38", "loss.gamma"],
        ["recipes/tiny.yaml:16:11", "los"],
        ["recipes/tiny.yaml:17:1", "whi"],
    ]


def test_faults_across_fields_come_only_when_every_field_is_right() -> None:
    across = changed("gamma: 5", "gamma: 0").replace("row_tokens: 48", "row_tokens: 2")

    assert faults(across) == [
        "recipes/tiny.yaml:6:59: data.row_tokens: is 2; one block alone has 4 tokens",
        "recipes/tiny.yaml:15:38: loss.gamma: is 0; it must be positive",
    ]
    assert faults(across.replace("num_steps: 4", "num_steps: x")) == [
        "recipes/tiny.yaml:7:22: train.num_steps: is 'x', which is text; expected a whole number"
    ]


def test_syntax_faults_hide_the_rest_and_come_together() -> None:
    assert faults(changed("train: {num_steps: 4}", "train: {num_steps: x, num_steps: 4}") + "why: again\n") == [
        "recipes/tiny.yaml:7:25: base.train.num_steps: duplicate key (first given at line 7)",
        "recipes/tiny.yaml:16:1: why: duplicate key (first given at line 2)",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "1:1: expected a map with the keys name, why, default_branch, base, branches"),
        ("[1]\n", "1:1: expected a map with the keys"),
        (RECIPE.replace("name: tiny\n", ""), "1:1: name is missing"),
        (RECIPE.replace("entry: dflash", "entry: dflsh"), "4:10: entry: is 'dflsh'; expected one of dflash, script"),
        (RECIPE.replace("  entry: dflash\n", ""), "4:3: entry: is missing; expected one of dflash, script"),
        (
            RECIPE.replace("extends: ce", "extends: cee"),
            "14:14: branches.kl.extends: no branch 'cee'; known: ce, kl; did you mean 'ce'?",
        ),
        (RECIPE.replace("extends: ce", "extends: kl"), "14:14: branches.kl.extends: extends itself: kl -> kl"),
        (
            RECIPE.replace("preset: tiny", "preset: tinny"),
            "5:11: base.preset: no preset 'tinny'; known: qwen3-8b, qwen3.6-27b, smollm2-135m, tiny; did you mean 'tiny'?",
        ),
        (RECIPE + "default_branch: kll\n", "16:17: default_branch: no branch 'kll'; known: ce, kl; did you mean 'kl'?"),
        (RECIPE + "  a b: {}\n", "16:3: branches.a b: a branch name has letters, digits"),
        (RECIPE + "  list: [1]\n", "16:9: branches.list: expected a section with what this branch changes"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(text: str, fault: str) -> None:
    assert any(item.startswith(f"recipes/tiny.yaml:{fault}") for item in faults(text))


def test_an_empty_branch_is_the_base() -> None:
    assert load(RECIPE + "  plain:\n").resolve("plain").spec.tags == []


def test_an_unknown_branch_is_named_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="no branch 'k'; known: ce, kl; did you mean 'kl'"):
        load().resolve("k")


def test_of_many_branches_the_nearest_are_named_and_the_rest_counted() -> None:
    many = RECIPE + "".join(f"  b{number}:\n" for number in range(500))

    with pytest.raises(RecipeError) as refused:
        load(many).resolve("zzzz-b499-zzzz")

    assert "b499" in str(refused.value)
    assert str(refused.value).endswith("and 494 more")
    assert len(str(refused.value)) < 200


def test_ways_that_fork_and_meet_again_are_merged_once() -> None:
    """Thirty forks one after the other are tens of millions of ways up."""
    levels = "".join(f"  a{level}: {{extends: [{_above(level)}]}}\n" for level in range(30))

    assert load(RECIPE + levels).resolve("a29").spec.branch == "a29"


def _above(level: int) -> str:
    return ", ".join(f"a{level - back}" for back in (1, 2, 3) if level >= back) or "ce"


@pytest.mark.slow
def test_a_line_of_too_many_branches_is_refused_once_where_it_grows_too_long() -> None:
    line = "".join(f"  a{number}: {{extends: {f'a{number - 1}' if number else 'ce'}}}\n" for number in range(3000))

    found = faults(RECIPE + line)

    assert len(found) == 1
    assert "branches.a63.extends: extends 64 branches; at most 63" in found[0]


@pytest.mark.slow
def test_many_branches_that_extend_what_is_not_there_are_all_told_in_time() -> None:
    lost = "".join(f"  a{number}: {{extends: zzzz{number}}}\n" for number in range(300))

    found = faults(RECIPE + lost)

    assert len(found) == 300
    assert "no branch 'zzzz0'; known: a" in found[0]
    assert found[-1].endswith("branches.a299.extends: no branch 'zzzz299'")


def test_a_circle_of_many_is_told_once_and_shortly() -> None:
    circle = "".join(f"  a{number}: {{extends: a{(number + 1) % 3000}}}\n" for number in range(3000))

    found = faults(RECIPE + circle + "  behind: {extends: a7}\n")

    assert len(found) == 1
    assert found[0].endswith("extends itself: a0 -> a1 -> a2 -> a3 -> a4 -> a5 -> a6 -> a7 -> ...")


def test_every_circle_is_told_at_once_also_those_that_share_a_branch() -> None:
    circles = "  a: {extends: [b, c, b]}\n  b: {extends: a}\n  c: {extends: [d, a]}\n  d: {extends: [d, c]}\n  e: {extends: d}\n"

    found = [fault.partition("extends itself: ")[2] for fault in faults(RECIPE + circles)]

    assert sorted(found) == ["a -> b -> a", "a -> c -> a", "c -> d -> c", "d -> d"]


def test_explain_names_every_layer_that_wrote_a_key() -> None:
    (told,) = load().resolve("kl", ["loss.gamma=9"]).explain("loss.gamma")

    assert told.value == 9.0
    assert [(origin.layer, origin.value) for origin in told.origins] == [
        ("default", 7.0),
        ("branch kl", 5),
        ("--set", 9),
    ]
    assert told.origins[0].where.startswith("remote/spec.py:")
    assert [origin.where for origin in told.origins[1:]] == ["recipes/tiny.yaml:15:38", "--set loss.gamma=9"]
    assert told.due == "a number"
    assert told.meaning.startswith("Decay length")
    assert told.meaning.endswith("It must be positive.")


def test_explain_of_a_default_points_at_the_line_of_the_schema() -> None:
    (told,) = load().resolve().explain("optim.lr")
    line = int(told.origins[0].where.split(":")[1])

    source = (Path(__file__).parents[2] / "remote" / "spec.py").read_text().splitlines()

    assert source[line - 1].strip().startswith("lr: float = 6e-4")


def test_explain_of_a_section_tells_every_key_below_it() -> None:
    told = load().resolve("kl").explain("optim")

    assert {one.key: one.origins[-1].layer for one in told if one.key in ("optim.lr", "optim.beta2")} == {
        "optim.lr": "default",
        "optim.beta2": "default",
    }


@pytest.mark.parametrize("section", ["loss", "loss.terms"])
def test_explain_of_the_loss_tells_every_term_that_there_is(section: str) -> None:
    """Only by their names could those that a branch leaves out be found."""
    told = {one.key: one for one in load().resolve("kl").explain(section) if one.key.startswith("loss.terms.")}

    assert list(told) == [f"loss.terms.{name}" for name in ("ce", "kl", "soft_ce", "cap")]
    assert [[origin.layer for origin in one.origins][-1:] for one in told.values()] == [
        ["default"],
        ["branch kl"],
        [],
        [],
    ]
    assert all(one.meaning for one in told.values())


def test_explain_of_no_section_names_them_all_in_the_order_of_the_schema() -> None:
    with pytest.raises(UsageError) as refused:
        load().resolve().explain("nope")

    told = str(refused.value)
    assert told.startswith("no key 'nope'; sections: ")
    assert "target, drafter, data, train, loss, optim" in told
    assert " more" not in told
    with pytest.raises(UsageError, match="did you mean 'loss'"):
        load().resolve().explain("los")


def test_a_term_of_the_loss_is_explained_before_it_is_used() -> None:
    (told,) = load().resolve().explain("loss.terms.cap")

    assert (told.value, told.origins) == (None, [])
    assert told.meaning.startswith("Mean entropy of the slots that are already right")
    with pytest.raises(UsageError, match=r"no key 'loss\.terms\.cap'; sections: [\w, ]*settings"):
        load_recipe("own-script").resolve().explain("loss.terms.cap")


def test_explain_of_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no key 'loss\.gama'; known: loss\..*; did you mean 'loss\.gamma'"):
        load().resolve().explain("loss.gama")


def test_every_leaf_of_a_resolved_spec_has_an_origin() -> None:
    resolved = load().resolve("kl")

    assert all(resolved.origins.values())
    assert resolved.origins["target.hidden_size"][0].layer == "preset tiny"


def test_diff_lists_what_differs_and_marks_what_only_a_person_reads() -> None:
    recipe = load(changed("    extends: ce\n", "    why: Softer.\n"))

    found = {
        one.key: (one.left, one.right, one.is_cosmetic) for one in diff(recipe.resolve("ce"), recipe.resolve("kl"))
    }

    assert found == {
        "loss.gamma": (7.0, 5.0, False),
        "loss.terms.kl": (None, 0.15, False),
        "tags": (["a"], [], True),
        "why": ("The baseline.", "Softer.", True),
    }


def test_a_script_of_ones_own_needs_its_folder_beside_the_recipe() -> None:
    own = "name: own\nbase: {entry: script, folder: job, command: ['{python}', run.py]}\nbranches: {a: {settings: {lr: '1'}}}\n"
    assert faults(own) == ["recipes/tiny.yaml:2:31: folder: is 'job'; there is no such folder beside the recipe"]
    Path("recipes/job").mkdir()

    spec = load(own).resolve().spec

    assert isinstance(spec, ScriptSpec)
    assert (spec.command, spec.settings) == (["{python}", "run.py"], {"lr": "1"})


def test_a_recipe_is_a_path_else_of_the_folder_else_bundled() -> None:
    path = write()

    assert find_recipe("recipes/tiny.yaml").samefile(path)
    assert find_recipe("tiny").samefile(path)
    assert find_recipe("smollm2").parent.name == "recipes"
    assert {"tiny", "smollm2"} <= set(known_recipes())


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"no recipe 'smolm2'; known: .*smollm2.*; did you mean 'smollm2'"):
        find_recipe("smolm2")
    with pytest.raises(RecipeError, match=r"x/y\.yaml: there is no such file"):
        find_recipe("x/y.yaml")


@pytest.mark.parametrize("name", ["smollm2", "qwen3-8b", "qwen3.6-27b"])
def test_a_resolved_branch_written_out_as_a_recipe_resolves_to_itself(name: str) -> None:
    spec = load_recipe(name).resolve().spec
    fields = {key: value for key, value in dataclasses.asdict(spec).items() if key not in ("recipe", "branch")}

    again = load(dump({"name": spec.recipe, "base": fields, "branches": {spec.branch: None}})).resolve().spec

    assert again == spec


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gamma=st.floats(1e-6, 1e6),
    steps=st.integers(1, 10**9),
    env=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0="), min_size=1),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    ),
    why=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
)
def test_any_value_survives_the_way_through_a_file_and_through_an_override(
    gamma: float, steps: int, env: dict[str, str], why: str
) -> None:
    body = {"loss": {"gamma": gamma}, "train": {"num_steps": steps}, "env": env, "why": why}
    typed = [f"{format_path(path)}={format_value(value)}" for path, value in leaves(body)]

    written = load(RECIPE + indent(dump({"drawn": body}), "  ")).resolve("drawn").spec
    overridden = load().resolve(None, typed).spec

    for spec in (written, overridden):
        assert isinstance(spec, DFlashSpec)
        assert (spec.loss.gamma, spec.train.num_steps, spec.env, spec.why) == (gamma, steps, env, why)
