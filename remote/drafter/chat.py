"""Chat messages to token ids and a loss mask, through the target's own chat template.

Loss falls on what the target itself would have to say: the text of each assistant turn and the token
that ends it. It does not fall on the header that opens the turn, nor on an empty reasoning header
(`<think></think>`), which a template adds by itself.

It reads no files; the tokenizer comes from `target`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, str]

_EMPTY_REASONING = re.compile(r"\s*<think>\s*</think>\s*")


@dataclass(frozen=True)
class Rendered:
    """One conversation as the target reads it."""

    ids: list[int]
    loss_mask: list[bool]  # True on assistant text and on the token that ends the turn


def prompt_text(tokenizer: Any, messages: Sequence[Message], *, thinking: bool = False) -> str:
    """The conversation and the header of the assistant's turn, ready to be continued."""
    kwargs = {} if thinking else {"enable_thinking": False}  # templates without the switch ignore it
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **kwargs)
    return text


def prompt_ids(tokenizer: Any, messages: Sequence[Message], *, thinking: bool = False) -> list[int]:
    return _tokens(tokenizer, prompt_text(tokenizer, messages, thinking=thinking))


def render(
    tokenizer: Any, messages: Sequence[Message], *, finished: bool = True, answer_ids: Sequence[int] = ()
) -> Rendered:
    """Token ids and loss mask of a conversation.

    `answer_ids`: the tokens of the last answer as the target produced them, without the one that ends it. Text alone
    does not tell them: a target may spell a word in other tokens than its tokenizer would. They are passed over where
    the template rewrites the answer.

    `finished=False`: the last answer was cut, so nothing follows its text and no end token is learnt.
    Supervised and other pieces are tokenised apart, as they are when an answer is generated after a
    prompt. ValueError: no assistant turn, a cut answer that is not the last turn, or a template that rewrites
    earlier turns.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no assistant turn")
    if not finished and messages[-1]["role"] != "assistant":
        raise ValueError(
            "says `finished: false`, and its last turn is no answer that could be cut; leave one of them out"
        )
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=False)
    spans = _assistant_spans(tokenizer, messages, text)
    if not finished:
        start, _ = spans[-1]
        text = text[:start] + _after_empty_reasoning(messages[-1]["content"])
        spans[-1] = (start, len(text))
    start, content = spans[-1][0], messages[-1]["content"]
    words = content.strip() if finished else content
    is_known = bool(answer_ids) and words in text[start:]
    behind = text.index(words, start) + len(words) if is_known else start
    if is_known:
        spans[-1] = (start, _end_of_turn(tokenizer, text, behind))
    pieces = [(_tokens(tokenizer, piece), is_supervised) for piece, is_supervised in _pieces(text, spans)]
    if is_known:
        end = text[behind : spans[-1][1]].lstrip()  # whitespace that the template left is among the answer's own tokens
        pieces[2 * len(spans) - 1] = ([*answer_ids, *_tokens(tokenizer, end)], True)
    ids: list[int] = []
    loss_mask: list[bool] = []
    for tokens, is_supervised in pieces:
        ids += tokens
        loss_mask += [is_supervised] * len(tokens)
    return Rendered(ids=ids, loss_mask=loss_mask)


def _assistant_spans(tokenizer: Any, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
    """Where each assistant turn's own words begin and end in the rendered text."""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # Thinking stays on here: the header then holds no empty reasoning, which history turns do not have.
        header = prompt_text(tokenizer, messages[:index], thinking=True)
        if not text.startswith(header):
            raise ValueError(f"turn {index + 1}: the chat template rewrites the turns before it; keep one answer a row")
        start = len(text) - len(_after_empty_reasoning(text[len(header) :]))
        spans.append((start, _end_of_turn(tokenizer, text, start)))
    return spans


def _after_empty_reasoning(text: str) -> str:
    empty = _EMPTY_REASONING.match(text)
    return text[empty.end() :] if empty else text


def _end_of_turn(tokenizer: Any, text: str, start: int) -> int:
    """Just after the first special token of the turn, which is the one that ends it; else the end of the text."""
    ends = [text.find(token, start) + len(token) for token in tokenizer.all_special_tokens if token in text[start:]]
    return min(ends, default=len(text))


def _pieces(text: str, spans: list[tuple[int, int]]) -> list[tuple[str, bool]]:
    pieces, done = [], 0
    for start, end in spans:
        pieces += [(text[done:start], False), (text[start:end], True)]
        done = end
    return [*pieces, (text[done:], False)]


def _tokens(tokenizer: Any, text: str) -> list[int]:
    if not text:
        return []
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
