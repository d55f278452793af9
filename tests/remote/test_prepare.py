"""Answering prompts and keeping hidden states: resumable, whole, checked."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from remote.drafter import answers, hidden
from remote.drafter.answers import Answer, AnswerFile, answer_batch, answer_chats, answer_line, protocol_of
from remote.drafter.data import Chat, read_chats, tokenise
from remote.drafter.decode import Setting, decode_plain
from remote.drafter.hidden import cached_hidden, forecast_bytes
from remote.drafter.prepare import answers_path, load_rows, prepare
from remote.report import UserFault
from tests.remote.disks import disk_that_takes
from tests.remote.specs import tiny_spec

RECIPE_DATA = Path(__file__).resolve().parents[2] / "recipes" / "data"
QUESTIONS = ["Why?", "When did they all come to the place?", "2 + 2", "Who", "A poem about rain, please.", "No."]
LAYERS = [1, 2, 4]


@pytest.fixture(scope="module")
def chats():
    return [Chat(({"role": "user", "content": text},), where=f"p line {i}") for i, text in enumerate(QUESTIONS, 1)]


@pytest.fixture
def spec(tiny_target_spec, tiny_drafter_spec):
    return replace(
        tiny_spec(data={"answer_tokens": 9, "answer_batch": 4, "row_tokens": 160}),
        target=tiny_target_spec,
        drafter=tiny_drafter_spec,
    )


@pytest.fixture
def places(tmp_path, spec):
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    rows = [json.dumps({"family": "f", "messages": [{"role": "user", "content": text}]}) for text in QUESTIONS]
    (data_dir / spec.data.prompts).write_text("\n".join(rows) + "\n")
    return {"data_dir": data_dir, "cache": tmp_path / "cache"}


def greedy(target, max_tokens=12):
    return protocol_of(target, temperature=0.0, max_tokens=max_tokens, seed=0)


@pytest.mark.slow
def test_batched_greedy_answers_are_the_ones_decoded_alone(tiny_target, chats):
    prompts = [tiny_target.prompt_ids(chat.messages) for chat in chats]

    batched = answer_batch(tiny_target, prompts, greedy(tiny_target))

    for prompt, answer in zip(prompts, batched, strict=True):
        assert answer.ids == decode_plain(tiny_target, prompt, Setting(12)).ids
        assert not answer.finished


@pytest.mark.slow
def test_rows_that_finish_early_leave_the_others_unchanged(tiny_target, chats):
    prompts = [tiny_target.prompt_ids(chat.messages) for chat in chats]
    whole = answer_batch(tiny_target, prompts, greedy(tiny_target, 20))
    stops = frozenset({whole[0].ids[3], whole[2].ids[2], whole[3].ids[0], whole[5].ids[5]})
    stopping = replace(tiny_target, stop_ids=stops)

    answered = answer_batch(stopping, prompts, greedy(tiny_target, 20))

    for before, after in zip(whole, answered, strict=True):
        ends = [index for index, token in enumerate(before.ids) if token in stops]
        assert after == Answer(before.ids[: ends[0]] if ends else before.ids, finished=bool(ends))


@pytest.mark.slow
def test_a_sampled_answer_depends_on_seed_and_prompt_and_not_on_its_neighbours(tiny_target, chats):
    prompts = [tiny_target.prompt_ids(chat.messages) for chat in chats]
    sampled = replace(greedy(tiny_target), temperature=0.8, seed=5)

    together = answer_batch(tiny_target, prompts, sampled)
    alone = [answer_batch(tiny_target, [prompt], sampled)[0] for prompt in prompts]
    reseeded = answer_batch(tiny_target, prompts, replace(sampled, seed=6))

    assert together == alone
    assert together != reseeded


def test_every_answer_carries_how_it_was_made(tiny_target, chats):
    protocol = greedy(tiny_target)

    row = json.loads(answer_line(tiny_target, chats[0], Answer((80, 81), finished=True), protocol))

    assert row["protocol"] == asdict(protocol)
    assert row["messages"][-1] == {"role": "assistant", "content": tiny_target.tokenizer.decode([80, 81])}
    assert protocol.seed is None


def test_a_made_answer_is_learnt_in_the_tokens_that_the_target_produced(tmp_path, tiny_target, chats):
    """`ab` as two tokens and as one is the same text; what was produced is what a drafter has to draft."""
    ids = tuple(
        token for letter in "the end" for token in tiny_target.tokenizer(letter, add_special_tokens=False)["input_ids"]
    )
    path = tmp_path / "a.jsonl"
    path.write_text(answer_line(tiny_target, chats[0], Answer(ids, finished=True), greedy(tiny_target)))

    (document,) = tokenise(read_chats(path), tiny_target, row_tokens=1024)

    learnt = [token for token, on in zip(document.ids, document.loss_mask, strict=True) if on]
    assert tuple(learnt[:-1]) == ids
    assert learnt[-1] in tiny_target.stop_ids


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ("7", r"a.jsonl line 1: answer_ids is 7; it must be a list of tokens"),
        ("[true]", r"answer_ids is \[True\]; it must be a list of tokens"),
        ("[5]", r"a.jsonl line 1: its answer_ids spell another text than its last turn"),
        ("[-1]", r"a.jsonl line 1: its answer_ids hold -1; the target's tokens are 0 to "),
        ("[5, 99999999]", r"a.jsonl line 1: its answer_ids hold 99999999; the target's tokens are 0 to "),
    ],
)
def test_tokens_of_another_tokenizer_are_refused_in_one_line(tmp_path, tiny_target, ids, words):
    path = tmp_path / "a.jsonl"
    turns = '[{"role": "user", "content": "x"}, {"role": "assistant", "content": "zebra"}]'
    path.write_text(f'{{"messages": {turns}, "answer_ids": {ids}}}')

    with pytest.raises(UserFault, match=words):
        tokenise(read_chats(path), tiny_target, row_tokens=1024)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("content", ["", "Because", "Because it rains.\n", "it rains."])
def test_tokens_of_an_answer_that_was_changed_since_are_refused(tmp_path, tiny_target, chats, content, finished):
    """They would be learnt, and with them what somebody took out of the text."""
    ids = tuple(tiny_target.tokenizer("Because it rains.", add_special_tokens=False)["input_ids"])
    row = json.loads(answer_line(tiny_target, chats[0], Answer(ids, finished=finished), greedy(tiny_target)))
    row["messages"][-1]["content"] = content
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))

    with pytest.raises(UserFault, match=r"^a.jsonl line 1: its answer_ids spell another text than its last turn"):
        tokenise(read_chats(path), tiny_target, row_tokens=1024)


@pytest.mark.parametrize("ids", [[-1, -1], [10**9], [10**30, -5]])
def test_tokens_outside_of_the_vocabulary_are_refused_beside_an_empty_answer_too(tmp_path, tiny_target, ids):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": turns, "answer_ids": ids}))

    with pytest.raises(UserFault, match=rf"^a.jsonl line 1: its answer_ids hold {ids[0]}; "):
        tokenise(read_chats(path), tiny_target, row_tokens=1024)


def test_an_answer_cut_inside_a_character_keeps_its_own_tokens(tmp_path, tiny_target, chats):
    ids = tuple(tiny_target.tokenizer("Je vois l'été", add_special_tokens=False)["input_ids"])[:-1]
    path = tmp_path / "a.jsonl"
    path.write_text(answer_line(tiny_target, chats[0], Answer(ids, finished=False), greedy(tiny_target)))

    (document,) = tokenise(read_chats(path), tiny_target, row_tokens=1024)

    assert document.ids[-len(ids) :] == ids


def test_an_unusual_line_end_inside_an_answer_does_not_cut_its_row(tmp_path, tiny_target, chats):
    protocol, file = greedy(tiny_target), AnswerFile(tmp_path / "a.jsonl")
    text = "one\u2028two\x85three"
    ids = tuple(tiny_target.tokenizer(text, add_special_tokens=False)["input_ids"])
    file.add(chats[0], answer_line(tiny_target, chats[0], Answer(ids, finished=True), protocol))

    AnswerFile(file.path).finish(chats[:1])

    assert read_chats(file.path)[0].messages[-1]["content"] == text


def test_a_stopped_job_goes_on_after_its_last_whole_answer(tmp_path, tiny_target, chats):
    protocol, path = greedy(tiny_target), tmp_path / "a.jsonl"
    first = AnswerFile(path)
    for chat in chats[:2]:
        first.add(chat, answer_line(tiny_target, chat, Answer((80,), finished=True), protocol))
    with path.with_suffix(".part").open("a") as part:
        part.write("[" * 100_000 + '\n{"messages": {"a": 1}}\n5\n')  # spoilt by a power cut
        part.write('{"messages": [{"ro')  # killed while writing

    second = AnswerFile(path)

    assert [second.has(chat) for chat in chats[:3]] == [True, True, False]
    for chat in chats[2:]:
        second.add(chat, answer_line(tiny_target, chat, Answer((81,), finished=True), protocol))
    second.finish(chats)
    assert [chat.messages[0]["content"] for chat in read_chats(path)] == QUESTIONS
    assert not path.with_suffix(".part").exists()


def test_prepare_answers_every_prompt_once_and_says_how_far_it_is(spec, tiny_target, places):
    said = []

    def progress(what, *, done, total, unit):
        said.append((what, done, total, unit))

    prepared = prepare(spec, tiny_target, **places, progress=progress)
    said_first, said[:] = list(said), []
    again = prepare(spec, tiny_target, **places, progress=progress)

    assert ("answering prompts", 6, 6, "prompts") in said_first
    assert ("computing hidden states", 1, 1, "shards") in said_first
    assert said == []  # nothing was left to do
    assert again == prepared
    assert prepared.summary.startswith(f"{len(read_chats(prepared.answers))} documents, ")
    files = (places["cache"] / "hidden").rglob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    assert prepared.hidden_bytes <= size < prepared.hidden_bytes + 1024  # the rest is the file's header


def test_answers_made_otherwise_are_not_taken_and_a_users_own_are(spec, tiny_target, places):
    made = answers_path(spec, tiny_target, **places)
    shipped = places["data_dir"] / spec.data.answers
    shipped.write_text(made.read_text())
    warmer = replace(spec, data=replace(spec.data, answer_temperature=0.7))

    assert answers_path(spec, tiny_target, **places) == shipped
    assert answers_path(warmer, tiny_target, **places) != shipped

    row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is."}]}
    shipped.write_text(json.dumps(row) + "\n")
    assert answers_path(warmer, tiny_target, **places) == shipped


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"messages": [], "protocol": }', r"line 2: not JSON \("),
        (b"[" * 100_000 + b'"protocol"', "line 2: nested too deeply"),
        (
            '{"messages": [{"role": "user", "content": "caf\xe9"}]}'.encode("latin-1"),
            r"line 2: not UTF-8 text \(byte 0xe9\)",
        ),
        (
            b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            "line 2: has half|line 2: the text of a turn",
        ),
        (b'["protocol"]', "line 2: has neither"),
    ],
    ids=["bad JSON", "deep", "latin-1", "half a pair", "no object"],
)
@pytest.mark.parametrize("which", ["answers", "prompts"])
def test_a_row_that_cannot_be_read_is_one_line_with_file_and_line(spec, tiny_target, places, which, content, said):
    name = getattr(spec.data, which)
    good = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is."}]}
    (places["data_dir"] / name).write_bytes(json.dumps(good).encode() + b"\n" + content + b"\n")

    with pytest.raises(UserFault, match=f"^{name} {said}") as caught:
        prepare(spec, tiny_target, **places)

    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_two_prepares_at_once_make_the_answers_once_and_the_second_says_that_it_waits(
    spec,
    tiny_target,
    places,
):
    """The second starts while the first answers; it has nothing left to answer afterwards."""
    said = [[], []]
    threads = []

    def second():
        paths.append(answers_path(spec, tiny_target, **places, progress=lambda what, **_: said[1].append(what)))

    def first_progress(what, *, done, total, unit):
        said[0].append((what, done))
        if not threads:
            threads.append(threading.Thread(target=second))
            threads[0].start()
            deadline = time.monotonic() + 120
            while not said[1] and time.monotonic() < deadline:
                time.sleep(0.01)

    paths = []
    paths.append(answers_path(spec, tiny_target, **places, progress=first_progress))
    threads[0].join()

    assert said[1] == ["waiting for another job that makes these answers"]
    assert paths[0] == paths[1]
    assert [what for what, _ in said[0]] == ["answering prompts"] * 7  # once before the first, once an answer
    assert len(read_chats(paths[0])) == 5  # one was answered with nothing


def test_hidden_states_online_and_cached_are_the_same(spec, tiny_target, places):
    online = load_rows(replace(spec, data=replace(spec.data, hidden_states="online")), tiny_target, **places)
    cached = load_rows(spec, tiny_target, **places)

    for position in range(2):
        left, right = online.batch(position), cached.batch(position)
        assert torch.equal(left.row.input_ids_S, right.row.input_ids_S)
        torch.testing.assert_close(left.features_SC, right.features_SC, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(left.teacher, right.teacher, rtol=1e-4, atol=1e-5)


@pytest.fixture
def many(tiny_target):
    """Documents for several shards."""
    turn = {"role": "assistant", "content": "x" * 500}
    return tokenise(
        [Chat(({"role": "user", "content": str(i)}, turn), where="x") for i in range(12)], tiny_target, row_tokens=1024
    )


@pytest.mark.slow
def test_a_stopped_cache_goes_on_with_the_next_shard(tmp_path, tiny_target, many):
    said = []

    def stop_in_the_second(what, *, done, total, unit):
        said.append((done, total))
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, progress=stop_in_the_second)
    said.clear()
    cached_hidden(many, tiny_target, LAYERS, cache=tmp_path, progress=lambda what, **how: said.append(how["done"]))

    assert said[0] == 1
    assert said == [1, 2, 3]


@pytest.mark.slow
def test_a_damaged_shard_is_one_clear_line_and_prepare_mends_it(tmp_path, tiny_target, many):
    cached = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path)
    expected = cached.document(0)
    path = hidden.shard_path(cached.folder, 0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    reader = replace(cached, _open={})

    with pytest.raises(ValueError, match=r"shard-00000.safetensors: this shard of hidden states is damaged") as caught:
        reader.document(0)

    assert "\n" not in str(caught.value)
    mended = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path)
    assert torch.equal(mended.document(0).features_SC, expected.features_SC)


@pytest.mark.slow
@pytest.mark.parametrize("facts", ["{}", '{"sha256": 7}', '"text"', "torn", ""])
def test_facts_of_a_shard_that_say_nothing_are_one_clear_line_and_the_shard_is_remade(
    tmp_path, tiny_target, many, facts
):
    cached = cached_hidden(many, tiny_target, [1, 2, 4], cache=tmp_path)
    before = hidden.shard_path(cached.folder, 0).read_bytes()
    hidden.shard_path(cached.folder, 0).with_suffix(".json").write_text(facts)

    with pytest.raises(ValueError, match=r"shard-00000\.safetensors: .*run prepare again"):
        cached.document(0)

    cached_hidden(many, tiny_target, [1, 2, 4], cache=tmp_path).document(0)
    assert hidden.shard_path(cached.folder, 0).read_bytes() == before


def test_a_disk_that_fills_up_under_a_shard_is_an_os_error_that_names_it(tmp_path, tiny_target, many):
    with disk_that_takes(4096), pytest.raises(OSError, match=r"File too large: .*shard-00000\.tmp"):
        cached_hidden(many, tiny_target, [1, 2, 4], cache=tmp_path)


@pytest.mark.slow
def test_a_missing_shard_is_one_clear_line(tmp_path, tiny_target, many):
    cached = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path)
    hidden.shard_path(cached.folder, 1).unlink()

    with pytest.raises(ValueError, match="a shard of hidden states is missing; run prepare again"):
        cached.document(len(many) - 8)


@pytest.mark.slow
def test_the_forecast_is_what_the_cache_takes(tmp_path, tiny_target, many):
    cached = cached_hidden(many, tiny_target, LAYERS, cache=tmp_path)

    size = sum(path.stat().st_size for path in cached.folder.glob("*.safetensors"))
    assert 0 <= size - forecast_bytes(many, tiny_target, LAYERS, is_taught_ahead=False) < 1024


def test_too_little_room_is_said_before_anything_is_written(tmp_path, tiny_target, many):
    with pytest.raises(ValueError, match=r"the hidden states take 931322\.57 GiB and .* GiB free") as caught:
        hidden._check_room(tmp_path, 10**15)

    assert "data.hidden_states: online" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["prompts", "held_out", "answers"])
def test_the_shipped_rows_are_five_families_of_the_promised_size(name):
    chats = read_chats(RECIPE_DATA / f"smollm2.{name}.jsonl")
    per_family = {family: sum(chat.family == family for chat in chats) for family in {chat.family for chat in chats}}

    assert len(per_family) == 5
    low, high = (8, 12) if name == "held_out" else (50, 70)
    assert all(low <= count <= high for count in per_family.values())


def _either_way_round(question: str) -> str:
    """9 times 4 is 4 times 9 asked again, and 5 plus 3 is 3 plus 5."""
    return re.sub(
        r"(\d+) (plus|times) (\d+)",
        lambda found: f" {found[2]} ".join(sorted((found[1], found[3]), key=int)),
        question,
    )


def test_held_out_prompts_are_never_trained_on_either_way_round():
    trained, held_out = (
        {_either_way_round(chat.messages[0]["content"]) for chat in read_chats(RECIPE_DATA / f"smollm2.{name}.jsonl")}
        for name in ("prompts", "held_out")
    )

    assert _either_way_round("What is 29 plus 7?") == "What is 7 plus 29?"
    assert trained.isdisjoint(held_out)


def test_the_demo_is_judged_by_prompts_that_nobody_looked_at_while_choosing_its_settings():
    """Of the 50, three of each family had been decoded by then, or to compare losses: they stand last in the file."""
    chats = read_chats(RECIPE_DATA / "smollm2.held_out.jsonl")
    recipe = (RECIPE_DATA.parent / "smollm2.yaml").read_text(encoding="utf-8")

    num_prompts = int(re.findall(r"num_prompts: (\d+)", recipe)[0])
    seen = chats[-15:]
    assert num_prompts <= len(chats) - len(seen)
    assert seen[0].messages[0]["content"] == "What is 23 plus 22? Show the steps."
    assert seen[-1].messages[0]["content"] == "What does the word mineral mean?"
    assert len({chat.family for chat in chats[:num_prompts]}) == 5


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")  # what they share costs some seconds to make
def test_the_shipped_answers_are_the_targets_own(smollm2):
    """A few are made again; where they part, the two tokens must be a near tie (another batch rounds differently)."""
    shipped = {chat.messages[0]["content"]: chat for chat in read_chats(RECIPE_DATA / "smollm2.answers.jsonl")}
    chats = read_chats(RECIPE_DATA / "smollm2.prompts.jsonl")
    few = [*chats[:3], *chats[-2:]]  # of the first family and of the last
    protocol = protocol_of(smollm2, temperature=0.0, max_tokens=56, seed=0)
    rows = json.loads((RECIPE_DATA / "smollm2.answers.jsonl").read_text().splitlines()[0])
    assert rows["protocol"] == asdict(protocol)

    made: dict[int, Answer] = {}
    answer_chats(smollm2, few, protocol, batch=len(few), on_done=made.__setitem__)

    for index, chat in enumerate(few):
        line = json.loads(answers.answer_line(smollm2, chat, made[index], protocol))
        text = shipped[chat.messages[0]["content"]].messages[-1]["content"]
        if line["messages"][-1]["content"] != text:
            assert _gap_at_first_difference(smollm2, chat, made[index], text) < 1e-3


def _gap_at_first_difference(target, chat, answer, text) -> float:
    prompt = target.prompt_ids(chat.messages)
    theirs = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    place = next(i for i, (a, b) in enumerate(zip(answer.ids, theirs, strict=False)) if a != b)
    ids = torch.tensor([[*prompt, *answer.ids[:place]]])
    states = target.decoder.run(ids, torch.arange(ids.shape[1])[None])
    logits = target.logits(states.last_hidden_BQH[0, -1])
    return abs(float(logits[answer.ids[place]] - logits[theirs[place]]))


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")  # what they share costs some seconds to make
def test_the_demo_data_is_about_25_000_tokens(smollm2):
    documents = tokenise(read_chats(RECIPE_DATA / "smollm2.answers.jsonl"), smollm2, row_tokens=512)

    assert 23_000 < sum(len(document.ids) for document in documents) < 29_000
    assert all(16 not in document.ids for document in documents)  # the mask token is in no text
