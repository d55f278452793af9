"""The target model: loaded from its folder, checked against the spec, and run.

Weights, tokenizer and chat template are read by transformers, which `target_files` alone imports beside it: that finds
the folder and makes it of a GGUF file. The forward pass is `decoder`'s, because the library's cache differs between the
releases we support.

It trains nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as library_logging

from remote.drafter import chat
from remote.drafter.decoder import Decoder, KVCache, Pass, View, can_run
from remote.drafter.library_decoder import LibraryDecoder, TextCache
from remote.drafter.product import linear
from remote.drafter.target_files import Progress, folder_identity, reading, silent, target_folder
from remote.report import UserFault
from remote.spec import TargetSpec

_CAPTURE_TOKENS = 4096  # padded tokens of one capture pass; bounds memory, costs nothing in speed


@dataclass(frozen=True)
class Target:
    """The frozen model on its device. Captured layers are 0-based outputs of layers, see `Decoder.run`."""

    spec: TargetSpec
    name: str  # the folder or file it came from
    tokenizer: Any
    decoder: Decoder | LibraryDecoder
    head_VH: Tensor  # the embedding table itself where the two are tied
    stop_ids: frozenset[int]  # tokens that end an answer
    identity: str  # changes when the weights, the cut or the dtype change; names caches

    @property
    def device(self) -> torch.device:
        return self.head_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_VH.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings [..., H]."""
        return F.embedding(ids, self.decoder.embedding.weight)

    def logits(self, last_hidden: Tensor) -> Tensor:
        """[..., V] from a last hidden state that is normed."""
        return linear(last_hidden, self.head_VH)

    def new_cache(self, *, batch: int = 1, capacity: int = 512) -> KVCache | TextCache:
        return self.decoder.new_cache(batch=batch, capacity=capacity)

    def step(
        self,
        ids_BQ: Tensor,
        position_BQ: Tensor,
        *,
        cache: Any,  # what new_cache gave
        layers: Sequence[int] = (),
        view: View | None = None,
    ) -> Pass:
        """Decodes Q new tokens a row after those in `cache`; `view` brings padding or a tree's mask."""
        return self.decoder.run(ids_BQ, position_BQ, cache=cache, layers=layers, view=view)

    def capture(
        self, ids_S: Tensor, document_S: Tensor, position_S: Tensor, *, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of a packed row: (features [S, K*H], last hidden [S, H], normed once); padding (-1) is zero.

        Documents never meet: each is run as a sequence of its own, several of like length at a time.
        """
        hidden_size = self.spec.hidden_size
        features_SC = self.head_VH.new_zeros(len(ids_S), len(layers) * hidden_size)
        last_hidden_SH = self.head_VH.new_zeros(len(ids_S), hidden_size)
        for spans in _batches(_document_spans(document_S)):
            ids_BQ, position_BQ = (_ragged(values, spans).to(self.device) for values in (ids_S, position_S))
            states = self.decoder.run(ids_BQ, position_BQ, layers=layers)
            for row, (start, end) in enumerate(spans):
                features_SC[start:end] = states.features_BQC[row, : end - start]
                last_hidden_SH[start:end] = states.last_hidden_BQH[row, : end - start]
        return features_SC, last_hidden_SH

    def render(
        self, messages: Sequence[chat.Message], *, finished: bool = True, answer_ids: Sequence[int] = ()
    ) -> chat.Rendered:
        """Token ids and loss mask of a conversation, see `chat.render`.

        ValueError also where the answer's tokens spell another text than the answer: they are another tokenizer's, or the
        text was changed since, and what is learnt would be the tokens.
        """
        if answer_ids and self.text_of(answer_ids, finished=finished) != messages[-1]["content"]:
            raise ValueError("its answer_ids spell another text than its last turn; leave them out")
        return chat.render(self.tokenizer, messages, finished=finished, answer_ids=answer_ids)

    def text_of(self, answer_ids: Sequence[int], *, finished: bool) -> str:
        """What an answer's tokens spell, special ones included; a cut one without the character that it was cut in.

        ValueError: a token that is not in the vocabulary.
        """
        num_tokens = self.spec.vocab_size
        foreign = [token for token in answer_ids if token not in range(num_tokens)]
        if foreign:
            raise ValueError(
                f"its answer_ids hold {foreign[0]}; the target's tokens are 0 to {num_tokens - 1}: leave them out"
            )
        text: str = self.tokenizer.decode(
            list(answer_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text if finished else text.rstrip("\N{REPLACEMENT CHARACTER}")

    def prompt_ids(self, messages: Sequence[chat.Message]) -> list[int]:
        return chat.prompt_ids(self.tokenizer, messages)


def load_target(
    spec: TargetSpec, *, cache: Path, device: torch.device | str, dtype: torch.dtype, progress: Progress = silent
) -> Target:
    """The target of `spec` on `device`. `cache` is `<work>/cache`; a GGUF source is converted there once.

    UserFault: the source is missing or cannot be read, or its config is not what the spec says.
    """
    library_logging.set_verbosity_error()  # a cut target has weights left over; that is no warning to a user
    library_logging.disable_progress_bar()
    loading = partial(progress, "loading the target", total=4, unit="parts")
    loading(done=0)  # a conversion, or hashing a large file to know that there was one, may come first
    folder = target_folder(spec.source, cache=cache, progress=progress)
    with reading(spec.source, folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text_config = config.get_text_config()
        _check_config(spec, text_config, folder)
        _cut(text_config, spec.keep_layers)
        loading(done=1)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, use_safetensors=True
        )
        tokenizer = _tokenizer(spec, folder)
    _check_parameters(spec, model, folder)
    body = getattr(model.model, "language_model", model.model)  # a vision model keeps its text body inside
    loading(done=2)
    model = model.eval().requires_grad_(False).to(device)
    loading(done=3)
    target = Target(
        spec=spec,
        name=_name(spec),
        tokenizer=tokenizer,
        decoder=Decoder(body, text_config) if can_run(text_config) else LibraryDecoder(body),
        head_VH=model.get_output_embeddings().weight.detach(),
        stop_ids=_stop_ids(spec, model),
        identity=f"{folder_identity(folder)}-{spec.keep_layers or spec.num_layers}-{str(dtype).removeprefix('torch.')}",
    )
    loading(done=4)
    return target


def tables(target: Target, *, outlive_it: bool) -> tuple[Tensor, Tensor]:
    """(embedding, head) [V, H], one tensor where the two are tied; with `outlive_it` they keep nothing else alive.

    On a CPU weights are views into the mapped file, and a view of one table keeps all of the file: there they are
    copied. On a card each has memory of its own.
    """
    embedding_VH = target.decoder.embedding.weight.detach()
    is_tied = embedding_VH.data_ptr() == target.head_VH.data_ptr()
    if not outlive_it or target.device.type == "cuda":
        return embedding_VH, target.head_VH
    own_VH = embedding_VH.clone()
    return own_VH, own_VH if is_tied else target.head_VH.clone()


def _check_config(spec: TargetSpec, config: Any, folder: Path) -> None:
    tied = bool(getattr(config, "tie_word_embeddings", False))
    found = {
        "hidden_size": (spec.hidden_size, config.hidden_size),
        "num_layers": (spec.num_layers, config.num_hidden_layers),
        "vocab_size": (spec.vocab_size, config.vocab_size),
        "tied_embeddings": (spec.tied_embeddings, tied),
    }
    if getattr(config, "final_logit_softcapping", None):
        raise UserFault(
            f"the target caps its logits ({folder}: final_logit_softcapping); this trainer has no such head"
        )
    wrong = [f"{name} {said}, the model has {seen}" for name, (said, seen) in found.items() if said != seen]
    if wrong:
        raise UserFault(f"the recipe's target says {'; '.join(wrong)} ({folder}); correct target.* or target.source")


def _check_parameters(spec: TargetSpec, model: Any, folder: Path) -> None:
    seen = model.num_parameters()
    if spec.keep_layers is None and seen != spec.num_parameters:
        raise UserFault(
            f"the recipe's target says num_parameters {spec.num_parameters}, the model has {seen} ({folder}); "
            "correct target.num_parameters"
        )


def _name(spec: TargetSpec) -> str:
    name = Path(spec.source).name.removesuffix(".gguf")
    return name if spec.keep_layers is None else f"{name} (first {spec.keep_layers} layers)"


def _cut(config: Any, keep_layers: int | None) -> None:
    if keep_layers is None:
        return
    config.num_hidden_layers = keep_layers
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[:keep_layers]


def _tokenizer(spec: TargetSpec, folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id != spec.eos_token_id:
        # Transformers 5.17 takes a GGUF file's first token for its last one; a chat model's folder may name another.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(spec.eos_token_id)
    return tokenizer


def _stop_ids(spec: TargetSpec, model: Any) -> frozenset[int]:
    named = getattr(model.generation_config, "eos_token_id", None)
    more = named if isinstance(named, list) else [] if named is None else [named]
    return frozenset({spec.eos_token_id, *more})


def _document_spans(document_S: Tensor) -> list[tuple[int, int]]:
    """[start, end) of each document of a packed row, padding left out."""
    marks = document_S.tolist()
    starts = [i for i, mark in enumerate(marks) if mark != -1 and (i == 0 or marks[i - 1] != mark)]
    ends = [i + 1 for i, mark in enumerate(marks) if mark != -1 and (i + 1 == len(marks) or marks[i + 1] != mark)]
    return list(zip(starts, ends, strict=True))


def _batches(spans: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Documents of like length together: at most an eighth of padding and `_CAPTURE_TOKENS` tokens a pass."""
    batch: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span[0] - span[1]):
        longest = batch[0][1] - batch[0][0] if batch else 0
        too_short = (span[1] - span[0]) * 8 < longest * 7
        if batch and (too_short or longest * (len(batch) + 1) > _CAPTURE_TOKENS):
            yield batch
            batch = []
        batch.append(span)
    if batch:
        yield batch


def _ragged(values_S: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """[documents, longest], padded on the right with zeros, which no real token sees."""
    rows = [values_S[start:end] for start, end in spans]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
