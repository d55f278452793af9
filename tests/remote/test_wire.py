import json
import math
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.wire import KINDS, METRIC_UNITS, WIRE_VERSION, Event, WireError, decode, encode

numbers = st.one_of(st.floats(), st.integers(-(2**53), 2**53))
values = st.dictionaries(st.text(max_size=20), st.one_of(numbers, st.lists(numbers, max_size=4)), max_size=6)


def metrics_event(values: dict[str, Any]) -> Event:
    return Event(seq=7, kind="metrics", wall_s=1.5, monotonic_s=2.25, fields={"step": 3, "values": values})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@given(values)
def test_any_numbers_survive_the_wire(sent: dict[str, Any]) -> None:
    received = decode(encode(metrics_event(sent))).fields["values"]

    assert received.keys() == sent.keys()
    assert all(same(received[name], sent[name]) for name in sent)


@given(st.text())
def test_any_text_survives_the_wire(text: str) -> None:
    event = Event(seq=1, kind="note", wall_s=0.0, monotonic_s=0.0, fields={"text": text})

    line = encode(event)

    assert line.count(b"\n") == 1
    assert decode(line) == event


def test_a_line_is_json_that_other_readers_accept() -> None:
    line = encode(metrics_event({"loss": math.nan, "lr": math.inf}))

    assert json.loads(line)["values"] == {"loss": "nan", "lr": "inf"}


def test_text_that_spells_a_number_stays_text() -> None:
    event = Event(seq=1, kind="note", wall_s=0.0, monotonic_s=0.0, fields={"text": "nan"})

    assert decode(encode(event)).fields["text"] == "nan"


@pytest.mark.slow
@given(st.data())
def test_a_line_with_any_byte_changed_is_refused(data: st.DataObject) -> None:
    line = encode(metrics_event({"loss": 0.5}))
    index = data.draw(st.integers(0, len(line) - 2))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != line[index]))
    spoiled = line[:index] + bytes([byte]) + line[index + 1 :]

    try:
        survived = decode(spoiled)
    except WireError:
        return
    assert survived == decode(line), "only white space at the edge may differ"


@given(st.binary(max_size=200))
def test_decoding_noise_raises_nothing_but_wire_error(noise: bytes) -> None:
    with pytest.raises(WireError):
        decode(noise)


def test_a_torn_line_is_refused_at_every_length() -> None:
    line = encode(metrics_event({"loss": 0.5}))

    for length in range(len(line) - 2):
        with pytest.raises(WireError):
            decode(line[:length])


@pytest.mark.parametrize(("version", "side"), [(WIRE_VERSION + 1, "this program"), (0, "the shipped tree")])
def test_another_version_says_which_side_to_update(version: int, side: str) -> None:
    line = encode(replace(metrics_event({}), version=version))

    with pytest.raises(WireError, match=f"update {side}"):
        decode(line)


def test_half_a_surrogate_pair_arrives_as_text_that_can_be_stored() -> None:
    event = Event(seq=1, kind="note", wall_s=0.0, monotonic_s=0.0, fields={"text": "caf\udce9", "m\udce9": ["\ud800"]})

    fields = decode(encode(event)).fields

    assert fields == {"text": "caf?", "m?": ["?"]}


@pytest.mark.parametrize("change", [{"seq": 2**63}, {"seq": -1}])
def test_an_event_whose_place_no_database_holds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode(encode(replace(metrics_event({}), **change)))


def test_every_kind_and_metric_is_described() -> None:
    assert all(fields for fields in KINDS.values())
    assert {"loss", "accuracy", "streak", "acceptance_length"} <= set(METRIC_UNITS)


def _line(body: str) -> bytes:
    return _crc(body.encode())


def _crc(body: bytes) -> bytes:
    return body[:-1] + b',"crc":%d}\n' % zlib.crc32(body)


@pytest.mark.parametrize("time_s", ["1e300", "-1e300", "-1", "1e12", "NaN"])
def test_a_time_that_no_calendar_has_is_refused(time_s: str) -> None:
    with pytest.raises(WireError, match="time"):
        decode(_line(f'{{"v":1,"seq":1,"kind":"note","t":{time_s},"mono":1.0,"text":"x"}}'))


@pytest.mark.parametrize("nest", ["[" * 40 + "]" * 40, "[" * 900 + "]" * 900, '{"a":' * 400 + "1" + "}" * 400])
def test_fields_nested_for_no_reason_are_refused(nest: str) -> None:
    with pytest.raises(WireError, match=r"nested deeper|recursion"):
        decode(_line(f'{{"v":1,"seq":1,"kind":"note","t":1.0,"mono":1.0,"a":{nest}}}'))


def test_a_whole_number_that_no_database_holds_is_infinite() -> None:
    event = decode(
        _line(f'{{"v":1,"seq":1,"kind":"metrics","t":1.0,"mono":1.0,"values":{{"a":1{"0" * 400},"b":[-{"9" * 30}]}}}}')
    )

    assert event.fields["values"] == {"a": math.inf, "b": [-math.inf]}


def test_bytes_that_are_no_text_are_refused_also_where_another_writer_did_not_escape_them() -> None:
    head = b'{"v":1,"seq":1,"kind":"note","t":1.0,"mono":1.0,"text":"'

    assert decode(_crc(head + "naïve 🙂".encode() + b'"}')).fields["text"] == "naïve 🙂"
    for noise in (b"\xff", b"\xed\xa0\x80"):  # the second is half a surrogate pair
        with pytest.raises(WireError, match="not JSON"):
            decode(_crc(head + noise + b'"}'))


def test_a_crc_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(WireError, match="crc"):
        decode(b'{"v":1,"crc":' + b"1" * 5000 + b"}\n")
