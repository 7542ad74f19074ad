"""Sampling that never asks the host: the parameters of a request lie in its slot, and kernels choose by them.

`ColumnSampler` is what the runner over slots samples with on a GPU. It chooses the very tokens of `sampling.sampler`, by the
same race with the same noise; what a slot cannot hold (`accepts`) is left to that.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from engine.protocol import SamplingParams
from engine.sampling.logits_filters import is_greedy, reach_of, scale_of
from engine.sampling.logits_rules import FORBIDDEN, has_penalties
from engine.sampling.randomness import signed, stream
from engine.scheduling.request import Request
from kernels import ops

NUM_RULES = 16
"""Requests with a bias that a step may hold: a row of the vocabulary for each, 1 MB for 128k tokens."""


def weighs(sampling: SamplingParams) -> bool:
    """Whether the whole vocabulary has to be weighed: for top-p that no top-k comes before."""
    return not is_greedy(sampling) and sampling.top_k <= 0 and sampling.top_p < 1.0


def _has_bias(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias) or bool(sampling.bad_words_token_ids)


class ColumnSampler:
    """Columns for `num_slots` slots of one engine. One thread calls everything."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, *, num_rules: int = NUM_RULES) -> None:
        self.columns = ops.SamplingColumns.empty(num_slots, vocab_size, num_rules, device)
        self._device = device
        self._kernels = ops.sampling_kernels(device)
        self._workspace = self._kernels.sampling_workspace(num_slots, vocab_size, device)
        self._vocab_size = vocab_size
        self._rules: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._num_rules = num_rules
        self._weighs = [False] * num_slots

    def accepts(self, request: Request) -> bool:
        """Whether everything this request asks of its tokens is in its columns. What depends on the tokens before (penalties,
        words of several tokens), on a grammar, or on log-probabilities is not; a bias is while there is a row for it."""
        sampling = request.sampling
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None or sampling.is_guided:
            return False
        if has_penalties(sampling) or sampling.typical_p < 1.0:
            return False
        if sampling.min_tokens > 0 and len(request.stop_ids) > ops.HELD_IDS_MAX:
            return False
        if any(len(word) > 1 for word in sampling.bad_words_token_ids or ()):
            return False
        return not _has_bias(sampling) or self._reserve(request)

    def _reserve(self, request: Request) -> bool:
        """A row for the bias of a request, for as long as the request lives."""
        if request not in self._rules:
            free = set(range(self._num_rules)).difference(self._rules.values())
            if not free:
                return False
            self._rules[request] = min(free)
        return True

    def place(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """The slots have these owners from now on."""
        index = self._send(slots, torch.int64)
        params = [request.sampling for request in requests]
        held = [sorted(request.stop_ids) if request.sampling.min_tokens > 0 else [] for request in requests]
        c = self.columns
        for column, values in (
            (c.scale, [scale_of(p) for p in params]),
            (c.streams, [signed(stream(p.seed or 0)) for p in params]),
            (c.top_k, [p.top_k if 0 < p.top_k < self._vocab_size else 0 for p in params]),
            (c.top_p, [p.top_p for p in params]),
            (c.reach, [reach_of(p) for p in params]),
            (c.held_until, [r.num_prompt_tokens + r.sampling.min_tokens for r in requests]),
            (c.held_ids, [ids + [-1] * (ops.HELD_IDS_MAX - len(ids)) for ids in held]),
            (c.rules, [self._rules.get(r, -1) if _has_bias(r.sampling) else -1 for r in requests]),
        ):
            column.index_copy_(0, index, self._send(values, column.dtype))
        for slot, request in zip(slots, requests, strict=True):
            self._weighs[slot] = weighs(request.sampling)
            if _has_bias(request.sampling):
                self._write_bias(self._rules[request], request.sampling)

    def _send(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """From page-locked memory, which torch reuses only when the copy is over: the host waits for no step under way."""
        kept = torch.tensor(values, dtype=dtype, pin_memory=self._device.type == "cuda")
        return kept.to(self._device, non_blocking=True)

    def _write_bias(self, rule: int, sampling: SamplingParams) -> None:
        row = torch.zeros(self._vocab_size, pin_memory=self._device.type == "cuda")
        bias = sampling.logit_bias or {}
        row[list(bias)] = torch.tensor(list(bias.values()))
        row[[word[0] for word in sampling.bad_words_token_ids or ()]] = FORBIDDEN
        self.columns.bias[rule].copy_(row, non_blocking=True)

    def kind(self, slots: Sequence[int]) -> Hashable:
        """Whether a step with these slots needs the pass that weighs vocabularies."""
        return any(self._weighs[slot] for slot in slots)

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, kind: Hashable) -> torch.Tensor:
        """logits: [R, V], left as they are; slots: [R] int32, below 0 is padding; positions: [R], index of the chosen token in
        prompt plus output → token ids, NO_TOKEN where none can be drawn: [R] int64. Can be captured in a graph."""
        chosen: torch.Tensor = self._kernels.sample(
            logits, slots, positions, self.columns, workspace=self._workspace, weighs=bool(kind)
        )
        return chosen
