"""YAML read strictly: scalars, positions, faults."""

import math
import string
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.recipe.strict_yaml import MAX_DEPTH, Document, YamlFaults, dump, dump_flow, parse, scalar


def faults(content: str | bytes) -> list[str]:
    with pytest.raises(YamlFaults) as raised:
        parse(content, "f.yaml")
    return [str(fault) for fault in raised.value.faults]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("1.e-4", 1e-4),
        (".5e-3", 5e-4),
        ("+.5e3", 500.0),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("-3", -3),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("=", "="),
    ],
)
def test_a_plain_scalar_means_what_yaml_1_2_says(text: str, value: object) -> None:
    read = parse(f"a: {text}").value["a"]

    assert read == value
    assert type(read) is type(value)
    assert scalar(text) == value


def test_infinity_and_nan_are_read_so_that_the_fields_can_refuse_them_with_a_place() -> None:
    value = parse("a: .inf\nb: -.inf\nc: .nan\nd: 1e400").value

    assert (value["a"], value["b"], value["d"]) == (math.inf, -math.inf, math.inf)
    assert math.isnan(value["c"])


def test_a_duplicate_key_names_both_lines_at_every_depth() -> None:
    assert faults("lr: 1\nb:\n  c: 1\n  c: 2\nlr: 2\n") == [
        "f.yaml:4:3: b.c: duplicate key (first given at line 3)",
        "f.yaml:5:1: lr: duplicate key (first given at line 1)",
    ]


def test_every_value_and_key_has_its_position() -> None:
    document = parse("a:\n  b: [1, 22, 3]\n", "f.yaml")

    assert str(document.values["a", "b", 1]) == "f.yaml:2:10"
    assert str(document.keys["a", "b"]) == "f.yaml:2:3"
    assert str(document.locate(("a", "absent", "deeper"))) == "f.yaml:2:3"


def test_merge_keys_fill_in_what_the_map_itself_does_not_say() -> None:
    document = parse("x: &x {b: 1, c: 2}\ny: &y {c: 9, d: 4}\nz:\n  <<: [*x, *y]\n  b: 7\n", "f.yaml")

    assert document.value["z"] == {"b": 7, "c": 2, "d": 4}
    assert str(document.values["z", "c"]) == "f.yaml:1:17"
    assert str(document.values["z", "b"]) == "f.yaml:5:6"


def test_of_several_merged_maps_every_fault_is_told_and_every_place_is_known() -> None:
    assert faults("z: {<<: {a: !x 1, b: 1, b: 2}, a: 3}\n") == [
        "f.yaml:1:13: z.a: the tag !x is not known; leave it out",
        "f.yaml:1:25: z.b: duplicate key (first given at line 1)",
    ]
    assert faults("z: {<<: [1, {c: 1}]}\n") == ["f.yaml:1:10: z.<<: only maps can be merged"]
    document = parse("x: &x {b: {c: [1, 2]}}\ny: &y {<<: *x, d: 1}\nz: {<<: *y}\n", "f.yaml")
    assert document.value["z"] == {"b": {"c": [1, 2]}, "d": 1}
    assert str(document.values["z", "b", "c", 1]) == "f.yaml:1:19"
    assert str(document.keys["z", "b", "c"]) == "f.yaml:1:12"
    assert str(document.keys["z", "b"]) == "f.yaml:1:8"


def _merged_map(num: int) -> str:
    return "env: &b {" + ", ".join(f"k{index}: 1" for index in range(num)) + "}\nsettings: {<<: *b}\n"


def _merged_maps(num: int) -> str:
    below = "".join(f"- &b{index} {{k{index}: 1}}\n" for index in range(num))
    return f"a:\n{below}settings: {{<<: [{', '.join(f'*b{index}' for index in range(num))}]}}\n"


def _merges_in_turn(num: int) -> str:
    """Each map merges the one before it: what is long is the first."""
    return (
        "m0: &m0 {"
        + ", ".join(f"k{index}: 1" for index in range(num))
        + "}\n"
        + "".join(f"m{index}: &m{index} {{<<: *m{index - 1}, l{index}: 1}}\n" for index in range(1, 10))
    )


def _work(text: str) -> int:
    """Lines of the recipe's own code that reading `text` takes, each round of a loop counted."""
    num = 0

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal num
        num += event == "line"
        return trace if Path(frame.f_code.co_filename).parent.name in ("recipe", "yaml") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        parse(text)
    finally:
        sys.settrace(before)
    return num


def test_of_many_tabs_the_first_are_told() -> None:
    """The text is read anew behind each: a file of tabs alone took minutes."""
    told = faults("".join(f"k{index}:\n\tx: 1\n" for index in range(100)))

    assert told[0] == "f.yaml:2:1: a tab cannot indent; use spaces"
    assert told[-1] == "f.yaml:40:1: a tab cannot indent; use spaces, in the lines below as well"
    assert len(told) == 20


@pytest.mark.parametrize("text_of", [_merged_map, _merged_maps, _merges_in_turn])
def test_reading_takes_as_much_longer_as_the_text_is_longer(text_of: Callable[[int], str]) -> None:
    """Four times the text was sixteen times the work: a recipe of 100 kB took minutes."""
    assert _work(text_of(200)) < 6 * _work(text_of(50))


def test_merges_and_lists_that_nest_by_their_aliases_are_refused_like_written_ones() -> None:
    """Each stands one level deep where it is written; read out, they went deeper than Python does."""
    maps, lists = "a0: &a0 {k: 1}\n", "a0: &a0 [1]\n"
    for index in range(1, MAX_DEPTH + 6):
        maps += f"a{index}: &a{index} {{<<: *a{index - 1}, k{index}: 1}}\n"
        lists += f"a{index}: &a{index} [*a{index - 1}]\n"

    for text in (maps, lists):
        assert faults(text) == [f"f.yaml:65:6: aliases nest deeper than {MAX_DEPTH} levels"]


def test_an_alias_inside_what_it_names_is_refused() -> None:
    assert faults("a: &a [1, *a]\n") == ["f.yaml:1:4: an alias refers to what contains it"]


def test_aliases_that_multiply_are_refused_before_they_are_written_out() -> None:
    laughs = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for last, name in zip("abcdefg", "bcdefgh", strict=True):
        laughs += f"{name}: &{name} [" + ", ".join([f"*{last}"] * 10) + "]\n"

    assert "aliases expand to more than 100000 values" in faults(laughs)[0]


def test_deep_nesting_is_refused_with_its_place() -> None:
    assert faults("[" * 100) == [f"f.yaml:1:{MAX_DEPTH + 1}: nested deeper than {MAX_DEPTH} levels"]
    assert "nesting depth" in faults("[" * 100_000)[0]


def test_tabs_are_all_reported_together_with_the_fault_after_them() -> None:
    assert faults("a:\n\tb: 1\n\tc: 2\na: 3\n") == [
        "f.yaml:2:1: a tab cannot indent; use spaces",
        "f.yaml:3:1: a tab cannot indent; use spaces",
        "f.yaml:4:1: a: duplicate key (first given at line 1)",
    ]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\xef\xbb\xbfa: 1\n", "f.yaml:1:1: the file starts with a byte order mark; save it as UTF-8 without one"),
        ("a: 1\n".encode("utf-16"), "f.yaml:1:1: the file is UTF-16; save it as UTF-8"),
        ("a: 1\n".encode("utf-16-le"), "f.yaml:1:1: the file is UTF-16; save it as UTF-8"),
        (b"a: 1\r\nb: 2\r\n", "f.yaml:1:5: the line ends in CR; save the file with LF line ends"),
        (b"a: 1\nb: \xe4\n", "f.yaml:2:4: byte 0xe4 is not UTF-8; save the file as UTF-8"),
        (b"a: \x07\n", "f.yaml:1:4: the character U+0007 is not allowed; write it as an escape in quotes"),
    ],
)
def test_a_file_of_another_encoding_is_refused_with_line_and_column(content: bytes, fault: str) -> None:
    assert faults(content) == [fault]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("1: 2\n", "f.yaml:1:1: a key must be text; write '\"1\"'"),
        ("? [a]\n: 2\n", "f.yaml:1:3: a key must be text"),
        (
            "a: !!python/object:os.system x\n",
            "f.yaml:1:4: a: the tag tag:yaml.org,2002:python/object:os.system is not known",
        ),
        ("a: !mine x\n", "f.yaml:1:4: a: the tag !mine is not known; leave it out"),
        ("a: !!int abc\n", "f.yaml:1:4: a: 'abc' is not of the type its tag"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: expected a single document in the stream"),
        ("a: 'x\n", "f.yaml:2:1: while scanning a quoted scalar"),
        ("a: *missing\n", "f.yaml:1:4: found undefined alias"),
        ("<<: 3\n", "f.yaml:1:5: <<: only maps can be merged"),
    ],
)
def test_what_a_recipe_has_no_use_for_is_refused(text: str, fault: str) -> None:
    assert faults(text)[0].startswith(fault)


def test_an_empty_text_is_null() -> None:
    assert parse("# only a remark\n") == Document("<text>", None)


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)


@pytest.mark.slow
@given(values)
def test_what_is_dumped_is_read_back_the_same(value: object) -> None:
    assert parse(dump({"a": value})).value == {"a": value}
    assert parse(f"a: {dump_flow(value)}").value == {"a": value}


@pytest.mark.parametrize(
    "text",
    [
        "1e-4",
        "1e-05",
        "0.00001",
        "no",
        "null",
        "~",
        "",
        "<<",
        "=",
        "- a",
        "#x",
        "a: b",
        " x",
        "12:30",
        "0o7",
        "\t",
        "x\ny",
        "\x85",
        "\u2028",
    ],
)
def test_awkward_texts_stay_text_over_a_round_trip(text: str) -> None:
    assert parse(dump({"s": text, text: 1})).value == {"s": text, text: 1}


def test_a_small_number_is_a_number_at_the_second_load() -> None:
    once = parse("lr: 0.00001").value

    assert parse(dump(once)).value == once == {"lr": 1e-5}


@given(st.text(alphabet=string.printable, max_size=40))
def test_any_text_is_read_or_refused_with_places(text: str) -> None:
    places = []
    try:
        parse(text, "f.yaml")
    except YamlFaults as refused:
        places = [fault.position.file for fault in refused.faults]

    assert set(places) <= {"f.yaml"}
