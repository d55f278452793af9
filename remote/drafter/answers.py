"""Answers made by the target itself: what a drafter is trained on and what it is measured against.

Batches of like length, greedy or sampled with a seed; each row's choice depends on the seed and the
prompt alone, never on its neighbours (up to the rounding of a batched product). Finished answers are
appended to a file as they come, so a stopped job goes on where it was.

It does not pack, and it runs no drafter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remote.drafter.data import Chat
from remote.drafter.decoder import KVCache, View
from remote.drafter.library_decoder import TextCache
from remote.drafter.target import Target
from remote.rundir import write_whole


@dataclass(frozen=True)
class Protocol:
    """How answers were made. Rows of different protocols are not compared and not mixed."""

    target: str  # whose answers they are
    temperature: float  # 0 is greedy
    thinking: bool
    template: str  # hash of the chat template
    max_tokens: int
    seed: int | None  # None where greedy


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]  # without the token that ends it
    finished: bool  # False: cut at max_tokens


def protocol_of(target: Target, *, temperature: float, max_tokens: int, seed: int) -> Protocol:
    template = hashlib.sha256((target.tokenizer.chat_template or "").encode()).hexdigest()[:12]
    return Protocol(
        target=target.name,
        temperature=temperature,
        thinking=False,
        template=template,
        max_tokens=max_tokens,
        seed=seed if temperature > 0 else None,
    )


def choose(logits_V: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """The greedy token, or one sampled at `temperature` (softmax of logits / T, no truncation)."""
    if temperature == 0:
        return int(logits_V.argmax())
    weights = torch.softmax(logits_V.float() / temperature, dim=-1).cpu()
    return int(torch.multinomial(weights, 1, generator=generator))


def answer_batch(target: Target, prompts: Sequence[Sequence[int]], protocol: Protocol) -> list[Answer]:
    """One answer a prompt, decoded side by side."""
    return _Batch(target, prompts, protocol).run()


def answer_chats(
    target: Target, chats: Sequence[Chat], protocol: Protocol, *, batch: int, on_done: Callable[[int, Answer], None]
) -> None:
    """Answers every chat, longest prompts first; `on_done(index, answer)` is called as batches finish."""
    prompts = [target.prompt_ids(chat.messages) for chat in chats]
    order = sorted(range(len(chats)), key=lambda index: -len(prompts[index]))
    for start in range(0, len(order), batch):
        members = order[start : start + batch]
        for index, answer in zip(members, answer_batch(target, [prompts[i] for i in members], protocol), strict=True):
            on_done(index, answer)


class _Batch:
    """The state of one batch: rows that have finished leave it once they are half of it."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], protocol: Protocol) -> None:
        self.target, self.protocol, self.prompts = target, protocol, prompts
        self.generators = [_generator(protocol.seed, prompt) for prompt in prompts]
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.finished = [False] * len(prompts)
        self.rows = list(range(len(prompts)))  # which prompt each row of the cache belongs to

    @torch.no_grad()
    def run(self) -> list[Answer]:
        cache, hidden_BH = self._prefill()
        for _ in range(self.protocol.max_tokens):
            self._take(self.target.logits(hidden_BH))
            if not any(self._is_live(row) for row in self.rows):
                break
            self._thin(cache)
            hidden_BH = self._step(cache)
        pairs = zip(self.answers, self.finished, strict=True)
        return [Answer(ids=tuple(ids), finished=finished) for ids, finished in pairs]

    def _prefill(self) -> tuple[KVCache | TextCache, Tensor]:
        lengths = [len(prompt) for prompt in self.prompts]
        ids = [torch.tensor(prompt) for prompt in self.prompts]
        ids_BQ = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.target.device)
        position_Q = torch.arange(max(lengths), device=self.target.device)
        last_B = torch.tensor(lengths, device=self.target.device) - 1
        real_BQ = position_Q <= last_B[:, None]
        capacity = max(lengths) + self.protocol.max_tokens
        cache = self.target.new_cache(batch=len(lengths), capacity=capacity)
        view = View(real_BQ=None if len(set(lengths)) == 1 else real_BQ)
        states = self.target.step(ids_BQ, position_Q.expand_as(ids_BQ), cache=cache, view=view)
        return cache, states.last_hidden_BQH[torch.arange(len(lengths)), last_B]

    def _take(self, logits_BV: Tensor) -> None:
        greedy = logits_BV.argmax(-1).tolist()
        for index, row in enumerate(self.rows):
            if not self._is_live(row):
                continue
            sampled = self.protocol.temperature > 0
            generator = self.generators[row]
            token = choose(logits_BV[index], self.protocol.temperature, generator) if sampled else greedy[index]
            if token in self.target.stop_ids:
                self.finished[row] = True
            else:
                self.answers[row].append(token)

    def _is_live(self, row: int) -> bool:
        return not self.finished[row] and len(self.answers[row]) < self.protocol.max_tokens

    def _thin(self, cache: KVCache | TextCache) -> None:
        live = [index for index, row in enumerate(self.rows) if self._is_live(row)]
        if 2 * len(live) <= len(self.rows):
            cache.keep_rows(live)
            self.rows = [self.rows[index] for index in live]

    def _step(self, cache: KVCache | TextCache) -> Tensor:
        last = [[self.answers[row][-1]] if self.answers[row] else [0] for row in self.rows]
        position = [[len(self.prompts[row]) + max(len(self.answers[row]) - 1, 0)] for row in self.rows]
        device = self.target.device
        states = self.target.step(torch.tensor(last, device=device), torch.tensor(position, device=device), cache=cache)
        return states.last_hidden_BQH[:, -1]


def _generator(seed: int | None, prompt: Sequence[int]) -> torch.Generator | None:
    if seed is None:
        return None
    digest = hashlib.sha256(json.dumps([seed, list(prompt)]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def answer_line(target: Target, chat: Chat, answer: Answer, protocol: Protocol) -> str:
    """The JSONL row of an answered prompt, with its tokens, which the text alone would not tell, and how it was made."""
    text = target.text_of(answer.ids, finished=answer.finished)
    row: dict[str, Any] = {"family": chat.family} if chat.family else {}
    row["messages"] = [*chat.messages, {"role": "assistant", "content": text}]
    row |= {"answer_ids": answer.ids, "finished": answer.finished, "protocol": asdict(protocol)}
    return json.dumps(row, ensure_ascii=False)


def _whole_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(key of the prompt, line) of the answered rows of a file that another process was writing when it died.

    What a power cut spoilt is left out.
    """
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            *prompt, answer = json.loads(line)["messages"]
            if answer["content"] is not None:
                yield _prompt_key(prompt), line


class AnswerFile:
    """Answers of one protocol in the making: appended as they come, then written whole in the prompts' order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_suffix(".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = dict(_whole_lines(self._part))
        write_whole(self._part, "".join(f"{line}\n" for line in self._lines.values()).encode())

    def has(self, chat: Chat) -> bool:
        return _prompt_key(chat.messages) in self._lines

    def add(self, chat: Chat, line: str) -> None:
        self._lines[_prompt_key(chat.messages)] = line
        descriptor = os.open(self._part, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)

    def finish(self, chats: Sequence[Chat]) -> None:
        """The whole file, in the order of `chats`; a prompt that was answered with nothing is left out."""
        lines = [self._lines[_prompt_key(chat.messages)] for chat in chats]
        lines = [line for line in lines if json.loads(line)["messages"][-1]["content"]]
        write_whole(self.path, "".join(f"{line}\n" for line in lines).encode())
        self._part.unlink(missing_ok=True)


def _prompt_key(messages: Sequence[Any]) -> str:
    return json.dumps(list(messages), sort_keys=True, ensure_ascii=False)
