"""Which tokens of a conversation are learnt from."""

from __future__ import annotations

import re

import pytest

from remote.drafter.chat import prompt_text, render
from tests.remote.conftest import tiny_tokenizer

# What Qwen3's template does, in short: the last answer gets a reasoning header, earlier ones lose theirs;
# the prompt gets an empty one when thinking is switched off.
REASONING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
QUESTION = {"role": "user", "content": "Why?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def learnt(tokenizer, messages, **options) -> str:
    rendered = render(tokenizer, messages, **options)
    return tokenizer.decode([token for token, on in zip(rendered.ids, rendered.loss_mask, strict=True) if on])


@pytest.fixture(params=["chatml", "reasoning"])
def tokenizer(request):
    made = tiny_tokenizer()
    if request.param == "reasoning":
        made.chat_template = REASONING
    return made


def test_loss_falls_on_the_answer_and_the_token_that_ends_it(tokenizer):
    assert learnt(tokenizer, [QUESTION, answer("Because.")]) == "Because.<|im_end|>"


def test_every_assistant_turn_is_learnt(tokenizer):
    messages = [QUESTION, answer("Because."), {"role": "user", "content": "And?"}, answer("So.")]

    assert learnt(tokenizer, messages) == "Because.<|im_end|>So.<|im_end|>"


def test_a_cut_answer_ends_with_its_last_token_and_teaches_no_end(tokenizer):
    rendered = render(tokenizer, [QUESTION, answer("Because it")], finished=False)

    assert learnt(tokenizer, [QUESTION, answer("Because it")], finished=False) == "Because it"
    assert rendered.loss_mask[-1]


def test_a_cut_answer_that_brings_an_empty_reasoning_header_itself_is_read_once():
    tokenizer, messages = tiny_tokenizer(), [QUESTION, answer("<think>\n\n</think>\n\nBecause it")]

    rendered = render(tokenizer, messages, finished=False)

    assert tokenizer.decode(rendered.ids) == prompt_text(tokenizer, [QUESTION]) + messages[-1]["content"]
    assert learnt(tokenizer, messages, finished=False) == "Because it"


def test_a_row_that_calls_a_question_cut_is_refused(tokenizer):
    """The words of the user would be learnt as the target's own."""
    with pytest.raises(ValueError, match=r"says `finished: false`, and its last turn is no answer"):
        render(tokenizer, [QUESTION, answer("Because."), {"role": "user", "content": "And?"}], finished=False)


def test_an_answer_is_tokenised_as_it_is_when_it_follows_its_prompt(tokenizer):
    prompt = tokenizer(prompt_text(tokenizer, [QUESTION]), add_special_tokens=False)["input_ids"]

    assert render(tokenizer, [QUESTION, answer("\nYes")]).ids[: len(prompt)] == prompt


@pytest.mark.parametrize(
    ("text", "finished"),
    [("Because.", True), (" Because it ", True), ("So <|im_start|> it", True), (" ", True), ("Because it", False)],
)
def test_an_answers_own_tokens_are_kept_where_they_are_known(tokenizer, text, finished):
    """As a target may spell it: letter by letter."""
    parts = re.findall(r"<\|im_start\|>|.", text)
    letters = [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
    end = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"] if finished else []
    messages = [{"role": "user", "content": "Hi"}, answer("So."), QUESTION, answer(text)]

    by_text = render(tokenizer, messages, finished=finished)
    rendered = render(tokenizer, messages, finished=finished, answer_ids=letters)

    known = len(letters) + len(end)
    learnt_ids = [token for token, on in zip(rendered.ids, rendered.loss_mask, strict=True) if on]
    assert learnt_ids[-known:] == letters + end
    assert tokenizer.decode(learnt_ids[:-known]) == "So.<|im_end|>"
    assert tokenizer.decode(rendered.ids).split() == tokenizer.decode(by_text.ids).split()


def test_an_empty_reasoning_header_is_read_but_not_learnt():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = REASONING

    rendered = render(tokenizer, [QUESTION, answer("Because.")])

    assert "<think>\n\n</think>" in tokenizer.decode(rendered.ids)
    assert learnt(tokenizer, [QUESTION, answer("Because.")]) == "Because.<|im_end|>"


def test_a_chat_without_an_assistant_turn_is_refused(tokenizer):
    with pytest.raises(ValueError, match="has no assistant turn"):
        render(tokenizer, [QUESTION])


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ messages | length }}{% for message in messages %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"
    )

    with pytest.raises(ValueError, match="turn 2: the chat template rewrites the turns before it"):
        render(tokenizer, [QUESTION, answer("Because.")])
