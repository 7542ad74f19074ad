"""Rules that change logits before a token is chosen. Only rows that have rules pay for them.

Order: repetition penalty (arXiv 1909.05858, section 4.1) over prompt and output, frequency and presence penalties over the
output, logit bias; then forbidden tokens, whatever their logits: end tokens before `min_tokens`, the last token of a bad word,
and every token that the grammar does not allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from engine.protocol import SamplingParams
from engine.sampling.bad_words import BadWords
from engine.scheduling.request import Request
from kernels import ops

FORBIDDEN = float("-inf")
_NO_IDS = np.zeros(0, dtype=np.int64)


class SampledRow(NamedTuple):
    """One row of logits: `position` is the index, in prompt plus output of `request`, of the token that it chooses.

    It is `request.num_tokens`, or more in rows after drafts of speculative decoding. Those rows have no rules that depend on
    the tokens before them.
    """

    request: Request
    position: int

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def is_too_short_to_end(self) -> bool:
        request = self.request
        return self.position - request.num_prompt_tokens < request.sampling.min_tokens and bool(request.stop_ids)


def has_rules(row: SampledRow) -> bool:
    """Whether this row's logits differ from the model's, apart from a grammar."""
    sampling = row.request.sampling
    return _has_rules_anywhere(sampling) or (sampling.min_tokens > 0 and row.is_too_short_to_end)


def changes_logits(sampling: SamplingParams) -> bool:
    """Whether some row of such a request has logits that differ from the model's."""
    return _has_rules_anywhere(sampling) or sampling.min_tokens > 0 or sampling.is_guided


def _has_rules_anywhere(sampling: SamplingParams) -> bool:
    return sampling.has_penalties or bool(sampling.logit_bias) or bool(sampling.bad_words_token_ids)


class TokenCounts:
    """The distinct ids in one request, and how often each occurs in its output. Follows the request's list."""

    def __init__(self, device: torch.device) -> None:
        self._index_of: dict[int, int] = {}
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._in_output = torch.empty(0, dtype=torch.float32, device=device)
        self._num_counted = 0

    @property
    def ids(self) -> torch.Tensor:
        """[S] int64"""
        return self._ids[: len(self._index_of)]

    @property
    def in_output(self) -> torch.Tensor:
        """How often `ids` occur in the output: [S] float32"""
        return self._in_output[: len(self._index_of)]

    def update(self, request: Request) -> None:
        """Count the tokens that were added since the last call."""
        new = request.token_ids[self._num_counted :]
        num_known, num_prompt = len(self._index_of), max(0, request.num_prompt_tokens - self._num_counted)
        self._num_counted = request.num_tokens
        indices = [self._index_of.setdefault(token_id, len(self._index_of)) for token_id in new]
        if len(self._index_of) > num_known:
            self._append([*dict.fromkeys(token_id for token_id, index in zip(new, indices, strict=True) if index >= num_known)])
        if indices[num_prompt:]:
            output_indices = torch.tensor(indices[num_prompt:], device=self._ids.device)
            self._in_output.index_add_(0, output_indices, torch.ones(len(output_indices), device=self._ids.device))

    def _append(self, ids: list[int]) -> None:
        """Doubles the capacity when needed, so that a growing output is rarely copied."""
        end = len(self._index_of)
        if end > len(self._ids):
            growth = end * 2 - len(self._ids)
            self._ids = torch.cat((self._ids, self._ids.new_empty(growth)))
            self._in_output = torch.cat((self._in_output, self._in_output.new_zeros(growth)))
        self._ids[end - len(ids) : end] = torch.tensor(ids, device=self._ids.device)


class ForbiddenTokens:
    """Tokens that a row may not choose, whatever their logits. Keeps the state of each request while the request exists."""

    def __init__(self) -> None:
        self._bad_words = BadWords()
        self._stop_ids: WeakKeyDictionary[Request, np.ndarray] = WeakKeyDictionary()

    def of(self, row: SampledRow) -> np.ndarray:
        """[F] int64; the tokens before `row.position` must be known."""
        forbidden = self._stop_ids_of(row.request) if row.is_too_short_to_end else _NO_IDS
        if not row.sampling.bad_words_token_ids:
            return forbidden
        completing = self._bad_words.forbidden_tokens(row.request, row.position)
        return np.concatenate((forbidden, completing)) if len(forbidden) else completing

    def _stop_ids_of(self, request: Request) -> np.ndarray:
        stop_ids = self._stop_ids.get(request)
        if stop_ids is None:
            stop_ids = self._stop_ids[request] = np.array(sorted(request.stop_ids), dtype=np.int64)
        return stop_ids


class LogitsRules:
    """Applies the rules in place, and keeps token counts while their requests exist."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: WeakKeyDictionary[Request, TokenCounts] = WeakKeyDictionary()
        self._forbidden = ForbiddenTokens()
        self._ops = ops.operations(device)

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        """logits: [R, V] float32, changed in place, row i of `rows[i]`. For a grammar, call `apply_masks` afterwards."""
        for index, row in enumerate(rows):
            if has_rules(row):
                self._apply_one(logits[index], row)

    def apply_masks(self, logits: torch.Tensor, masks: torch.Tensor, guided: Sequence[int]) -> None:
        """Forbid what the masks of the rows `guided` do not allow.

        logits: [R, V] float32, changed in place; masks: [R, ceil(V / 32)] int32, bit b of word w allows token 32 w + b
        """
        chosen = masks if len(guided) == len(masks) else masks[list(guided)]
        self._ops.apply_bitmask(logits, chosen.to(self._device), torch.tensor(guided).to(self._device))

    def _apply_one(self, logits: torch.Tensor, row: SampledRow) -> None:
        sampling = row.request.sampling
        if sampling.has_penalties:
            self._penalise(logits, row)
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=self._device)
            values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=self._device)
            logits.index_add_(0, ids, values)
        assert not sampling.bad_words_token_ids or row.position == row.request.num_tokens, "drafts in spite of bad words"
        forbidden = self._forbidden.of(row)
        if len(forbidden):
            logits.index_fill_(0, torch.from_numpy(forbidden).to(self._device), FORBIDDEN)

    def _penalise(self, logits: torch.Tensor, row: SampledRow) -> None:
        request, sampling = row.request, row.request.sampling
        assert row.position == request.num_tokens, f"request {request.request_id} has drafts in spite of penalties"
        counts = self._counts.get(request)
        if counts is None:
            counts = self._counts[request] = TokenCounts(self._device)
        counts.update(request)
        values = logits[counts.ids]
        if sampling.repetition_penalty != 1.0:
            factor = values.new_full((), sampling.repetition_penalty)  # a GPU multiplies by the inverse of a Python number
            values = torch.where(values > 0, values / factor, values * factor)
        values -= sampling.frequency_penalty * counts.in_output
        values -= sampling.presence_penalty * (counts.in_output > 0)
        logits.index_copy_(0, counts.ids, values)
