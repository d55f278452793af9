"""From JSONL chat rows to packed rows with the target's hidden states, in an order that can be resumed anywhere.

A file holds one JSON object a line with `messages` (role, content) or `conversations` (from, value).
Every wrong row is refused by file and line before anything is computed. Documents are packed into
rows once; each epoch is a permutation of those rows drawn from (seed, epoch), so a position in the
endless stream of rows names the same row in every process, after every resume.

Noise, anchors and blocks are the trainer's. Hidden states are computed and kept by `hidden`.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import itertools
import json
import reprlib  # never as deep or as long as what it shows
import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from remote.drafter.blocks import PAD_DOCUMENT, Row, check_row, join_rows
from remote.drafter.chat import Message
from remote.drafter.teacher import Teacher, teacher_of, tensors_of
from remote.report import UserFault

if TYPE_CHECKING:  # rungs of the smoke ladder read this module and need no transformers
    from remote.drafter.target import Target

_PR_SET_PDEATHSIG = 1
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Chat:
    """One conversation of a file."""

    messages: tuple[Message, ...]
    where: str  # file and line, for messages to a person
    family: str = ""
    finished: bool = True  # False: the last answer was cut, its end is not learnt
    answer_ids: tuple[int, ...] = ()  # the last answer's tokens as the target produced them; empty: by its text


@dataclass(frozen=True)
class Document:
    """One conversation in tokens, short enough for a row."""

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


@dataclass(frozen=True)
class HiddenStates:
    """Of one document or row: features side by side, and what the loss reads of the target."""

    features_SC: Tensor
    teacher: Teacher

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.features_SC, *tensors_of(self.teacher)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> HiddenStates:
        """What `tensors` gave."""
        return cls(tensors[0], teacher_of(tensors[1:]))

    @classmethod
    def joined(cls, parts: Sequence[HiddenStates], *, pad: int = 0) -> HiddenStates:
        """One after the other, then as many zeros."""
        return cls.of([_padded(list(pieces), pad) for pieces in zip(*(part.tensors for part in parts), strict=True)])


class HiddenSource(Protocol):
    """Where the hidden states of document i come from: a cache on disk, or the target itself."""

    def document(self, index: int) -> HiddenStates: ...


@dataclass(frozen=True)
class Batch:
    """The rows of one step, joined into one, with the hidden states of every position."""

    row: Row
    features_SC: Tensor  # [S, K*H]
    teacher: Teacher  # of S positions
    parts: tuple[Row, ...]  # the same rows one by one: anchors are sampled in each by its own key
    keys: tuple[tuple[int, int], ...]  # (epoch, row) of each part: what its anchors are seeded with


def read_chats(path: Path) -> list[Chat]:
    """Every row of a JSONL file. ValueError names file, line and what is wrong with the first wrong row."""
    if not path.is_file():
        raise UserFault(f"{path}: no such file; data.* names files of the recipe's data folder")
    chats = [_chat(row_of(line, where), where) for where, line in lines_of(path)]
    if not chats:
        raise UserFault(f"{path}: holds no rows")
    return chats


def lines_of(path: Path) -> list[tuple[str, str]]:
    """(file and line in words, the line) of each line that is not empty. UserFault: it is not UTF-8 text."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserFault(f"{path.name} line {number}: not UTF-8 text (byte {content[error.start]:#04x})") from None
    lines = text.split("\n")  # splitlines would also cut at line ends inside a text
    return [(f"{path.name} line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def row_of(line: str, where: str) -> Any:
    """What the line says. UserFault names file and line."""
    try:
        return json.loads(line)
    except RecursionError:
        raise UserFault(f"{where}: nested too deeply to be a chat") from None
    except ValueError as error:
        raise UserFault(f"{where}: not JSON ({error})") from None


def _chat(row: Any, where: str) -> Chat:
    turns = row.get("messages", row.get("conversations")) if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns:
        raise UserFault(f"{where}: has neither `messages` nor `conversations` with at least one turn")
    ids = row.get("answer_ids", [])
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise UserFault(f"{where}: answer_ids is {reprlib.repr(ids)}; it must be a list of tokens, or left out")
    finished = row.get("finished", True)
    if not isinstance(finished, bool):
        raise UserFault(f"{where}: finished is {reprlib.repr(finished)}; it must be true or false, or left out")
    messages = tuple(_message(turn, where) for turn in turns)
    if ids and messages[-1]["role"] != "assistant":
        raise UserFault(f"{where}: has answer_ids, and its last turn is no answer")
    return Chat(
        messages=messages,
        where=where,
        family=str(row.get("family", "")),
        finished=finished,
        answer_ids=tuple(ids),
    )


def _message(turn: Any, where: str) -> Message:
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
    if role not in ROLES or not isinstance(content, str):
        raise UserFault(f"{where}: a turn needs a role ({', '.join(ROLES)}) and its text; seen {reprlib.repr(turn)}")
    if not content.isascii() and content != content.encode("utf-8", "replace").decode("utf-8"):
        raise UserFault(f"{where}: the text of a turn holds half a surrogate pair, which is no character")
    return {"role": ROLES[role], "content": content}


def tokenise(chats: Sequence[Chat], target: Target, *, row_tokens: int) -> list[Document]:
    """One document a chat, cut to a row's length. ValueError: a chat with nothing to learn from."""
    documents = []
    for chat in chats:
        try:
            rendered = target.render(chat.messages, finished=chat.finished, answer_ids=chat.answer_ids)
        except ValueError as error:
            raise UserFault(f"{chat.where}: {error}") from None
        mask = rendered.loss_mask[:row_tokens]
        if not any(a and b for a, b in itertools.pairwise(mask)):
            reason = "no two answer tokens follow each other, so no block can be trained"
            if len(rendered.ids) > row_tokens:
                reason = f"its answer begins after the {row_tokens} tokens of a row (data.row_tokens)"
            raise UserFault(f"{chat.where}: {reason}")
        documents.append(Document(ids=tuple(rendered.ids[:row_tokens]), loss_mask=tuple(mask)))
    return documents


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Document numbers of each row: longest first, each into the fullest row that still has room for it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(room, (lengths[index], -1))
        free, row = room.pop(at) if at < len(room) else (row_tokens, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        bisect.insort(room, (free - lengths[index], row))
    return rows


class Dataset:
    """Packed rows as an endless, repeatable stream; position p of the stream is row p % num_rows of epoch p // num_rows."""

    def __init__(
        self, documents: Sequence[Document], hidden: HiddenSource | None, *, row_tokens: int, seed: int
    ) -> None:
        self.documents, self.row_tokens, self._hidden, self._seed = documents, row_tokens, hidden, seed
        self._rows = pack([len(document.ids) for document in documents], row_tokens)
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def most_documents(self) -> int:
        """Documents in the row that holds most of them: it sizes the anchor slots where each document has its own."""
        return max(len(members) for members in self._rows)

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(document.ids) for document in self.documents)

    @cached_property
    def num_supervised_tokens(self) -> int:
        return sum(sum(document.loss_mask) for document in self.documents)

    def summary(self) -> str:
        """One line for a person."""
        full = self.num_tokens / (self.num_rows * self.row_tokens)
        documents = "document" if len(self.documents) == 1 else "documents"
        return (
            f"{len(self.documents)} {documents}, {self.num_tokens} tokens ({self.num_supervised_tokens} learnt from), "
            f"in {self.num_rows} {'row' if self.num_rows == 1 else 'rows'} of {self.row_tokens} tokens, {full:.0%} full"
        )

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, row) at a position of the stream."""
        epoch, index = divmod(position, self.num_rows)
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.num_rows, seed=self._seed, epoch=epoch))
        return epoch, self._order[1][index]

    def row(self, row: int) -> tuple[Row, HiddenStates]:
        """One packed row, padded to the row's length; hidden states are zero where padded."""
        assert self._hidden is not None, "hidden states of this dataset come from elsewhere: see batch_with"
        states = [self._hidden.document(index) for index in self._rows[row]]
        packed = self.packed(row)
        pad = self.row_tokens - sum(len(state.features_SC) for state in states)
        return packed, HiddenStates.joined(states, pad=pad)

    def packed(self, row: int) -> Row:
        """The tokens of one packed row, padded to the row's length."""
        documents = [self.documents[index] for index in self._rows[row]]
        pad = self.row_tokens - sum(len(document.ids) for document in documents)
        packed = Row(
            input_ids_S=_joined([torch.tensor(document.ids) for document in documents], pad, 0),
            document_S=_joined([torch.full((len(d.ids),), i) for i, d in enumerate(documents)], pad, PAD_DOCUMENT),
            position_S=_joined([torch.arange(len(document.ids)) for document in documents], pad, 0),
            loss_mask_S=_joined([torch.tensor(document.loss_mask) for document in documents], pad, False),
        )
        check_row(packed)
        return packed

    def keys(self, position: int, *, num_rows: int) -> tuple[tuple[int, int], ...]:
        """(epoch, row) of the `num_rows` rows of the stream that begin at `position * num_rows`."""
        return tuple(self.locate(position * num_rows + offset) for offset in range(num_rows))

    def batch(self, position: int, *, num_rows: int = 1) -> Batch:
        """The rows of `keys`, with their hidden states."""
        keys = self.keys(position, num_rows=num_rows)
        parts, states = zip(*(self.row(row) for _, row in keys), strict=True)
        return batch_of(parts, keys, HiddenStates.joined(states))

    def batch_with(self, position: int, states: HiddenStates, *, num_rows: int = 1) -> Batch:
        """The same rows with hidden states that came from elsewhere."""
        keys = self.keys(position, num_rows=num_rows)
        return batch_of([self.packed(row) for _, row in keys], keys, states)

    def batches(self, positions: range, *, num_rows: int = 1, num_workers: int = 0) -> Generator[Batch, None, None]:
        """The batches of these positions, read ahead by worker processes where `num_workers` is not 0."""
        if num_workers == 0:
            yield from (self.batch(position, num_rows=num_rows) for position in positions)
            return
        loader = torch.utils.data.DataLoader(
            _Positions(self, num_rows),
            batch_size=None,
            sampler=positions,
            num_workers=num_workers,
            multiprocessing_context="fork",
            worker_init_fn=_end_with_parent,
        )
        with _stops_held_back():
            reading = iter(loader)
        yield from reading


@dataclass(frozen=True)
class _Positions(torch.utils.data.Dataset[Batch]):
    """Batches by position, as torch's loader wants them."""

    dataset: Dataset
    num_rows: int

    def __getitem__(self, position: int) -> Batch:
        return self.dataset.batch(position, num_rows=self.num_rows)


@contextmanager
def _stops_held_back() -> Iterator[None]:
    """Processes started inside never see SIGTERM or SIGINT: a mask is inherited, with no moment in between.

    A stop is sent to the whole group. The training finishes its step, and for that it needs those who read for it;
    it ends them itself. A stop that comes meanwhile reaches this process a moment later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent(_worker: int) -> None:
    """Asks the kernel to kill this process when the one that started it dies, however that dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def batch_of(parts: Sequence[Row], keys: tuple[tuple[int, int], ...], states: HiddenStates) -> Batch:
    """Rows joined into one batch; `states` are those of all of them, one after the other."""
    row = parts[0] if len(parts) == 1 else join_rows(parts)
    return Batch(row, states.features_SC, states.teacher, tuple(parts), keys)


def epoch_order(num_rows: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of the rows that depends on (seed, epoch) alone."""
    digest = hashlib.sha256(json.dumps(["epoch order", seed, epoch]).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    order: list[int] = torch.randperm(num_rows, generator=generator).tolist()
    return order


def _joined(pieces: list[Tensor], pad: int, fill: int | bool) -> Tensor:
    return torch.cat([*pieces, torch.full((pad,), fill, dtype=pieces[0].dtype)])


def _padded(pieces: list[Tensor], pad: int) -> Tensor:
    return torch.cat([*pieces, pieces[0].new_zeros(pad, *pieces[0].shape[1:])])
