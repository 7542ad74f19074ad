"""Embeddings: whole texts through an encoder or a decoder, pooled to one vector each. Keeps no cache and decides no order.

Texts are computed in batches of a bounded number of tokens, texts of similar length together; answers come in the order of
the texts. A vector does not depend on the other texts of its batch, but for the order of float sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine.config.pooling import PoolingConfig
from engine.errors import PromptError
from engine.layers.forward_inputs import ForwardInputs
from engine.layers.rotary import RotaryTable
from engine.models.decoder import Decoder
from kernels.ops import AttentionShape, GatheredPlanner

CPU_BATCH_TOKENS = 2048
CUDA_BATCH_TOKENS = 32768


class Forward(Protocol):
    """A decoder or an encoder with its weights."""

    def __call__(self, inputs: ForwardInputs, kv_caches: Sequence[torch.Tensor] | None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A loaded model with what it needs for whole texts: its rotations and attention planners, and its limits. `batch_tokens`
    are those of a pass that memory was planned for, None where nothing else needs the device's memory."""

    forward: Forward
    rotaries: Sequence[RotaryTable]
    planners: Sequence[GatheredPlanner]
    vocab_size: int
    max_len: int
    device: torch.device
    batch_tokens: int | None = None
    default_pooling: str = "last"  # a token of a decoder sees only those before it

    @classmethod
    def of_decoder(
        cls,
        decoder: Decoder,
        rotaries: Sequence[RotaryTable],
        shapes: Sequence[AttentionShape],
        max_len: int,
        *,
        batch_tokens: int | None = None,
    ) -> TextModel:
        """`rotaries` and `shapes` are those of the decoder's attention."""
        return cls(
            forward=decoder,
            rotaries=rotaries,
            planners=[GatheredPlanner(shape, dtype=decoder.dtype, device=decoder.device) for shape in shapes],
            vocab_size=decoder.config.vocab_size,
            max_len=max_len,
            device=decoder.device,
            batch_tokens=batch_tokens,
        )


class Embedding(list[float]):
    """One vector, also under the names of vLLM's result: `outputs.embedding` and `prompt_token_ids`."""

    def __init__(self, vector: Iterable[float], prompt_token_ids: Sequence[int]) -> None:
        super().__init__(vector)
        self.prompt_token_ids = list(prompt_token_ids)

    @property
    def outputs(self) -> Embedding:
        return self

    @property
    def embedding(self) -> list[float]:
        return list(self)


class Embedder:
    """One vector per text of token ids."""

    def __init__(self, model: TextModel, pooling: PoolingConfig) -> None:
        self._model = model
        self.pooling = pooling
        suitable = CUDA_BATCH_TOKENS if model.device.type == "cuda" else CPU_BATCH_TOKENS
        self._batch_tokens = min(suitable, model.batch_tokens or suitable)
        self._max_len = min(model.max_len, pooling.max_len or model.max_len, model.batch_tokens or model.max_len)

    def check(self, index: int, token_ids: Sequence[int]) -> None:
        """Raise `PromptError`, naming the text by its index and the limit, when it cannot be computed."""
        if not token_ids:
            raise PromptError(f"text {index} has no tokens")
        if len(token_ids) > self._max_len:
            raise PromptError(f"text {index} has {len(token_ids)} tokens; at most {self._max_len} fit")
        if min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size:
            raise PromptError(f"text {index} has token ids outside of the vocabulary (0 to {self._model.vocab_size - 1})")

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]], *, progress: Callable[[int], None] = lambda _: None) -> list[Embedding]:
        """Vectors in the order of `texts`; `progress` gets the number of texts that are done. Raises `PromptError`."""
        for index, token_ids in enumerate(texts):
            self.check(index, token_ids)
        vectors: dict[int, Embedding] = {}
        done = 0
        for batch in self._batches(texts):
            batch_texts = [texts[index] for index in batch]
            pooled = self._pool(self._model.forward(self._inputs(batch_texts), None), [len(text) for text in batch_texts])
            for index, vector in zip(batch, pooled.tolist(), strict=True):
                vectors[index] = Embedding(vector, texts[index])
            done += len(batch)
            progress(done)
        return [vectors[index] for index in range(len(texts))]

    def _batches(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of `texts`, the longest first, cut where the next text would exceed the bound."""
        batch: list[int] = []
        num_tokens = 0
        for index in sorted(range(len(texts)), key=lambda i: -len(texts[i])):
            if batch and num_tokens + len(texts[index]) > self._batch_tokens:
                yield batch
                batch, num_tokens = [], 0
            batch.append(index)
            num_tokens += len(texts[index])
        if batch:
            yield batch

    def _inputs(self, texts: Sequence[Sequence[int]]) -> ForwardInputs:
        device, lens = self._model.device, [len(text) for text in texts]
        positions = torch.cat([torch.arange(length) for length in lens]).to(device)
        return ForwardInputs(
            token_ids=torch.tensor([token_id for text in texts for token_id in text], dtype=torch.int64).to(device),
            positions=positions,
            rotations=tuple(rotary.at(positions) for rotary in self._model.rotaries),
            slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
            sampled_rows=self._rows(lens).to(device),
            attention=tuple(planner.plan_whole(lens) for planner in self._model.planners),
        )

    def _rows(self, lens: Sequence[int]) -> torch.Tensor:
        """The rows whose hidden states are pooled."""
        ends = torch.tensor(lens).cumsum(0)
        if self.pooling.mode == "mean":
            return torch.arange(int(ends[-1]))
        return ends - 1 if self.pooling.mode == "last" else ends - torch.tensor(lens)

    def _pool(self, hidden: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
        """hidden: [rows, hidden] → [B, hidden] float32"""
        pooled = hidden.float()
        if self.pooling.mode == "mean":
            pooled = torch.stack([text.mean(dim=0) for text in torch.split(pooled, list(lens))])
        return functional.normalize(pooled, dim=-1) if self.pooling.normalised else pooled
