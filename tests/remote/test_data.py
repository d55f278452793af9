"""Reading chats, packing them and walking through them in an order that can be resumed."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remote.drafter.blocks import check_row
from remote.drafter.data import Chat, Dataset, Document, HiddenStates, epoch_order, pack, read_chats, tokenise
from remote.drafter.hidden import OnlineHidden
from remote.drafter.teacher import expect, tensors_of

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat(answer: str, **changes) -> Chat:
    return Chat((USER, {"role": "assistant", "content": answer}), where="x line 1", **changes)


@pytest.fixture(scope="module")
def documents(tiny_target):
    chats = [chat("Because " + "it is " * count) for count in (1, 9, 3, 5, 2, 7, 4)]
    return tokenise(chats, tiny_target, row_tokens=128)


@pytest.fixture(scope="module")
def dataset(tiny_target, documents):
    return Dataset(documents, OnlineHidden(tiny_target, documents, [1, 2, 4]), row_tokens=128, seed=3)


def test_both_spellings_of_a_conversation_are_read(tmp_path):
    path = write(
        tmp_path / "x.jsonl",
        {"messages": [USER, ANSWER], "family": "reasons"},
        {
            "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}],
            "finished": False,
        },
    )

    first, second = read_chats(path)

    assert first.messages == second.messages == (USER, ANSWER)
    assert (first.family, first.finished, second.finished) == ("reasons", True, False)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{broken", "x.jsonl line 2: not JSON"),
        ("[1]", "x.jsonl line 2: has neither `messages` nor `conversations`"),
        ({"messages": []}, "x.jsonl line 2: has neither"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "x.jsonl line 2: a turn needs a role"),
        ({"messages": [{"role": "user"}]}, "x.jsonl line 2: a turn needs a role"),
        ({"messages": [USER, ANSWER], "finished": "false"}, "x.jsonl line 2: finished is 'false'; it must be"),
        ({"messages": [USER, ANSWER], "finished": None}, r"x.jsonl line 2: finished is None; it must be true or false"),
        ({"messages": [USER, ANSWER], "finished": 0}, r"x.jsonl line 2: finished is 0; it must be true or false"),
        ("[" * 100_000, "x.jsonl line 2: nested too deeply"),
    ],
)
def test_a_wrong_row_is_one_line_with_its_number(tmp_path, row, words):
    path = write(tmp_path / "x.jsonl", {"messages": [USER, ANSWER]}, row)

    with pytest.raises(ValueError, match=words) as caught:
        read_chats(path)

    assert "\n" not in str(caught.value)


def test_an_absent_or_empty_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no.jsonl: no such file"):
        read_chats(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match=r"x.jsonl: holds no rows"):
        read_chats(write(tmp_path / "x.jsonl", ""))


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"messages": "\xff\xfe"}')

    with pytest.raises(ValueError, match=r"x.jsonl line 1: not UTF-8 text \(byte 0xff\)"):
        read_chats(tmp_path / "x.jsonl")


def test_a_row_without_an_assistant_turn_is_named(tiny_target):
    with pytest.raises(ValueError, match="x line 9: has no assistant turn"):
        tokenise([Chat((USER,), where="x line 9")], tiny_target, row_tokens=128)


def test_a_row_with_nothing_to_learn_from_is_named(tiny_target):
    with pytest.raises(ValueError, match="x line 1: no two answer tokens follow each other"):
        tokenise([chat("", finished=True)], tiny_target, row_tokens=128)
    with pytest.raises(ValueError, match="x line 1: its answer begins after the 16 tokens of a row"):
        tokenise([chat("Because.")], tiny_target, row_tokens=16)


def test_a_long_document_is_cut_to_the_row(tiny_target):
    (document,) = tokenise([chat("Because. " * 40)], tiny_target, row_tokens=100)

    assert len(document.ids) == len(document.loss_mask) == 100


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packing_keeps_every_document_once_and_wastes_no_row(lengths):
    rows = pack(lengths, 50)

    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    totals = [sum(lengths[index] for index in row) for row in rows]
    assert max(totals) <= 50
    assert all(a + b > 50 for a, b in pairwise(sorted(totals)))  # no two rows would fit in one


def test_a_packed_row_keeps_the_rules_of_rows_and_carries_its_states(dataset, tiny_target):
    row, states = dataset.row(0)

    check_row(row)
    real = row.document_S >= 0
    features, last_hidden = tiny_target.capture(row.input_ids_S, row.document_S, row.position_S, layers=[1, 2, 4])
    torch.testing.assert_close(states.features_SC, features, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.teacher, last_hidden, rtol=1e-4, atol=1e-5)
    assert not states.features_SC[~real].any()
    assert len(row.input_ids_S) == 128


@pytest.mark.usefixtures("without_triton")
def test_a_packed_row_carries_the_targets_expectation_of_each_document_and_nothing_where_it_is_padded(
    tiny_target, documents, dataset
):
    class Taught:
        def document(self, index):
            states = OnlineHidden(tiny_target, documents, [1, 2, 4]).document(index)
            return HiddenStates(states.features_SC, expect(states.teacher, tiny_target.head_VH))

    taught = Dataset(documents, Taught(), row_tokens=128, seed=3)

    row, states = taught.row(0)
    batch = taught.batch(0, num_rows=2)

    real = row.document_S >= 0
    expected = expect(dataset.row(0)[1].teacher, tiny_target.head_VH)
    for found, wanted in zip(states.teacher.tensors, expected.tensors, strict=True):
        assert len(found) == 128
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-5)
        assert not found[~real].any()
    assert not bool(real.all())
    assert [len(tensor) for tensor in batch.teacher.tensors] == [256] * 4


def test_every_epoch_has_every_row_once_in_its_own_order(dataset):
    epochs = [[dataset.locate(epoch * dataset.num_rows + i) for i in range(dataset.num_rows)] for epoch in range(6)]

    assert all(sorted(row for _, row in keys) == list(range(dataset.num_rows)) for keys in epochs)
    assert len({tuple(row for _, row in keys) for keys in epochs}) > 1
    assert epochs[2] == [(2, row) for row in epoch_order(dataset.num_rows, seed=3, epoch=2)]


@pytest.mark.slow
def test_a_stream_resumed_anywhere_gives_the_same_batches(tiny_target, documents, dataset):
    again = Dataset(documents, OnlineHidden(tiny_target, documents, [1, 2, 4]), row_tokens=128, seed=3)

    whole = list(dataset.batches(range(7), num_rows=2))
    resumed = list(again.batches(range(4, 7), num_rows=2))

    for left, right in zip(whole[4:], resumed, strict=True):
        assert left.keys == right.keys
        assert torch.equal(left.row.input_ids_S, right.row.input_ids_S)
        assert torch.equal(left.features_SC, right.features_SC)


def test_a_batch_of_two_rows_is_one_row_and_keeps_its_parts(dataset):
    batch = dataset.batch(0, num_rows=2)

    check_row(batch.row)
    assert batch.row.num_rows == 2
    assert len(batch.row.input_ids_S) == len(batch.features_SC) == 256
    assert torch.equal(batch.parts[1].input_ids_S, batch.row.input_ids_S[128:])
    assert len(set(batch.keys)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("is_taught_ahead", [False, True])
def test_worker_processes_give_the_same_batches(tmp_path, tiny_target, documents, is_taught_ahead):
    from remote.drafter.hidden import cached_hidden

    hidden = cached_hidden(documents, tiny_target, [1, 2, 4], cache=tmp_path, is_taught_ahead=is_taught_ahead)
    cached = Dataset(documents, hidden, row_tokens=128, seed=3)

    alone = list(cached.batches(range(3, 9)))
    with_workers = list(cached.batches(range(3, 9), num_workers=2))

    for left, right in zip(alone, with_workers, strict=True):
        assert left.keys == right.keys
        assert type(left.teacher) is type(right.teacher)
        assert all(map(torch.equal, tensors_of(left.teacher), tensors_of(right.teacher)))


def test_the_summary_counts_documents_tokens_and_rows(tiny_target):
    documents = [Document(ids=(5,) * 10, loss_mask=(False,) * 6 + (True,) * 4)] * 3
    dataset = Dataset(documents, OnlineHidden(tiny_target, documents, [1]), row_tokens=20, seed=0)

    assert dataset.summary() == "3 documents, 30 tokens (12 learnt from), in 2 rows of 20 tokens, 75% full"
    one = Dataset(documents[:1], OnlineHidden(tiny_target, documents[:1], [1]), row_tokens=20, seed=0)
    assert one.summary() == "1 document, 10 tokens (4 learnt from), in 1 row of 20 tokens, 50% full"
    assert dataset.most_documents == 2
