"""Rules that change logits before a token is chosen: penalties, bias and the minimum length. Only rows that ask pay for them.

Order: repetition penalty (arXiv 1909.05858, section 4.1) over prompt and output, frequency and presence penalties over
the output, logit bias, then end tokens are forbidden below `min_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from engine.protocol import SamplingParams
from engine.request import Request


def has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def has_rules(request: Request) -> bool:
    """Whether this request's logits differ from the model's at this step."""
    sampling = request.sampling
    short = request.num_output_tokens < sampling.min_tokens and bool(request.stop_ids)
    return has_penalties(sampling) or bool(sampling.logit_bias) or short


class TokenCounts:
    """How often each token id stands in one request: prompt and output, and output alone. Follows the request's list."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.anywhere = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_output = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._num_counted = 0

    def follow(self, request: Request) -> None:
        """Count the tokens that were added since the last call."""
        new = request.token_ids[self._num_counted :]
        output = request.token_ids[max(self._num_counted, request.num_prompt_tokens) :]
        self._num_counted = request.num_tokens
        if new:
            self.anywhere[torch.tensor(new, device=self.anywhere.device)] = True
        if output:
            ids = torch.tensor(output, device=self.in_output.device)
            self.in_output.index_add_(0, ids, torch.ones(len(output), device=self.in_output.device))


class LogitsRules:
    """Applies the rules in place and keeps token counts for as long as their requests live."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts: WeakKeyDictionary[Request, TokenCounts] = WeakKeyDictionary()

    def apply(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """logits: [B, V] float32, changed in place; row i belongs to `requests[i]`."""
        for row, request in enumerate(requests):
            if has_rules(request):
                self._apply_one(logits[row], request)

    def _apply_one(self, logits: torch.Tensor, request: Request) -> None:
        sampling = request.sampling
        if has_penalties(sampling):
            self._penalise(logits, request)
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=self._device)
            logits.index_add_(0, ids, torch.tensor(list(sampling.logit_bias.values()), device=self._device))
        if request.num_output_tokens < sampling.min_tokens and request.stop_ids:
            logits.index_fill_(0, torch.tensor(sorted(request.stop_ids), device=self._device), float("-inf"))

    def _penalise(self, logits: torch.Tensor, request: Request) -> None:
        sampling = request.sampling
        counts = self._counts.get(request)
        if counts is None:
            counts = self._counts[request] = TokenCounts(self._vocab_size, self._device)
        counts.follow(request)
        if sampling.repetition_penalty != 1.0:
            factor = sampling.repetition_penalty
            penalised = torch.where(logits > 0, logits / factor, logits * factor)
            logits.copy_(torch.where(counts.anywhere, penalised, logits))
        logits -= sampling.frequency_penalty * counts.in_output
        logits -= sampling.presence_penalty * (counts.in_output > 0)
