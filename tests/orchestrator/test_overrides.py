"""Overrides typed on a command line."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import RecipeError, UsageError
from orchestrator.recipe import load_recipe
from orchestrator.recipe.fields import hint_at
from orchestrator.recipe.overrides import format_path, format_value, override_layer, read_value, split_override
from remote.spec import DFlashSpec


@pytest.mark.parametrize(
    "value",
    ["a,b", "a@b", "50%", "#1", "*x", "a|b", "a[0]", "a-b", "a=b", "x: y", "!t", "&a", "a b", "~/x", "-", "a{b}"],
)
def test_an_awkward_value_is_text_as_typed(value: str) -> None:
    layer = override_layer(f"env.A={value}", DFlashSpec)

    assert layer.value == {"env": {"A": value}}


@pytest.mark.parametrize("key", ["a,b", "a@b", "50%", "#1", "*x", "a|b", "a[0]", "a-b"])
def test_an_awkward_key_is_taken_as_typed(key: str) -> None:
    assert split_override(f"env.{key}=1") == (("env", key), "1")


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("evaluate.at_end=false", False),
        ("loss.gamma=1e1", 10.0),
        ("train.num_threads=null", None),
        ("train.num_steps=1_000", 1000),
        ("drafter.captured_layers=[1, 5]", [1, 5]),
        ("env.OMP_NUM_THREADS=1", "1"),
        ("env.A=true", "true"),
        ("env.A=", ""),
        ("drafter.init_from=null", None),
        ("drafter.attention=sdpa", "sdpa"),
        ('env.A="[x]"', "[x]"),
        ("tags=[a, b]", ["a", "b"]),
        ("loss.terms={kl: 0.1}", {"kl": 0.1}),
    ],
)
def test_a_value_has_the_type_the_field_is_due(typed: str, value: object) -> None:
    path, text = split_override(typed)
    read = read_value(text, hint_at(DFlashSpec, path), typed)

    assert read == value
    assert type(read) is type(value)


def test_a_text_for_a_truth_value_is_refused_not_taken_for_true() -> None:
    with pytest.raises(
        RecipeError,
        match=r"--set evaluate\.at_end=no: evaluate\.at_end: is 'no', which is text; expected true or false",
    ):
        load_recipe("smollm2").resolve(None, ["evaluate.at_end=no"])


@pytest.mark.parametrize("typed", ["loss", "=1", ".a=1", "a..b=1", "a.=1", "", "a b=1", 'a"b"=1'])
def test_what_is_no_override_is_repeated_with_an_example(typed: str) -> None:
    with pytest.raises(UsageError, match=r"expected section\.key=value, such as loss\.gamma=10"):
        split_override(typed)


def test_an_open_bracket_is_refused_with_the_way_to_quote_it() -> None:
    with pytest.raises(UsageError, match=r"to mean the text itself, quote it: '\[x'"):
        override_layer("env.A=[x", DFlashSpec)


def test_the_last_override_wins_and_all_are_told() -> None:
    resolved = load_recipe("smollm2").resolve("ce", ["loss.gamma=5", "loss.gamma=6"])

    (told,) = resolved.explain("loss.gamma")

    assert told.value == 6.0
    assert [origin.where for origin in told.origins[-2:]] == ["--set loss.gamma=5", "--set loss.gamma=6"]


def test_an_override_spells_times_and_sizes_as_the_file_does() -> None:
    spec = load_recipe("own-script").resolve(None, ["life.max_duration_s=2h", "life.memory_limit_bytes=2GiB"]).spec

    assert (spec.life.max_duration_s, spec.life.memory_limit_bytes) == (7200.0, 2 * 2**30)


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ("los.gamma=1", "los: no key 'los'; known: "),
        ("loss.gama=1", "did you mean 'gamma'"),
        ("branch=x", "branch: no key 'branch'; known: "),
        (
            "preset=smolm2-135m",
            "no preset 'smolm2-135m'; known: qwen3-8b, qwen3.6-27b, smollm2-135m; did you mean 'smollm2-135m'?",
        ),
        ("optim.lr=.nan", "is not finite"),
        ("life.memory_limit_bytes=2G", "write 2GiB"),
        ("drafter.captured_layers.0=1", "is a section; expected a list"),
        ("loss.gamma=0", "--set loss.gamma=0: loss.gamma: is 0; it must be positive"),
    ],
)
def test_a_wrong_override_is_refused_by_the_rules_of_the_file(typed: str, fault: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe("smollm2").resolve(None, [typed])

    assert fault in str(raised.value)
    assert typed in str(raised.value)


def test_a_preset_can_be_chosen_by_an_override() -> None:
    spec = load_recipe("qwen3-8b").resolve(None, ["preset=qwen3.6-27b"]).spec

    assert isinstance(spec, DFlashSpec)
    assert spec.target.hidden_size == 5120


keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


@given(st.lists(keys, min_size=1, max_size=4).map(tuple), values)
def test_what_is_formatted_is_read_back_the_same(path: tuple[str, ...], value: object) -> None:
    typed = f"{format_path(path)}={format_value(value)}"

    found, text = split_override(typed)

    assert found == path
    assert read_value(text, None, typed) == value


@given(texts)
def test_any_text_is_an_override_or_refused_politely(typed: str) -> None:
    try:
        path, text = split_override(typed)
    except UsageError:
        return

    assert split_override(f"{format_path(path)}={text}") == (path, text)


@pytest.mark.slow
@given(st.floats(min_value=1e-12, max_value=1e12))
def test_a_number_keeps_its_value_through_an_override(number: float) -> None:
    spec = load_recipe("smollm2").resolve(None, [f"optim.lr={number!r}"]).spec

    assert isinstance(spec, DFlashSpec)
    assert math.isclose(spec.optim.lr, number, rel_tol=0)


def test_a_path_deeper_than_any_recipe_is_refused() -> None:
    with pytest.raises(UsageError, match="deeper than 64"):
        split_override(f"settings.{'a.' * 500}b=1")
