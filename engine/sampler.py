"""Chooses the next token of each row of logits. A row's choice depends on its own logits, parameters, seed and position only.

Greedy rows take the largest logit. Sampled rows invert a cumulative distribution with the one uniform number of
`engine.randomness`: over the whole vocabulary when nothing filters, else over the most likely candidates after temperature,
top-k, top-p (arXiv 1904.09751) and min-p (arXiv 2407.01082), in this order. Candidates come from a partial top-k; only rows
whose filter reaches beyond it are sorted in full. A row without a finite maximum, or without a weight to draw from, fails
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.logits_rules import LogitsRules, has_rules
from engine.protocol import SamplingParams, TokenLogprob
from engine.randomness import uniform
from engine.request import Request

CANDIDATE_STAGES = (64, 1024)
"""Partial top-k, widened only for rows whose own filter reaches beyond it; then the whole vocabulary. A partial top-k of 64
costs a third of one of 256, and trained models rarely keep more."""

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: a float32 column cannot hold the smallest of them, and none of them would draw otherwise."""

NO_TOKEN = -1
NOT_FINITE = "the model computed logits that are not finite for this request"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The choice for one row of logits, or why there is none."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    error: str | None = None


def is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < GREEDY_BELOW


def is_filtered(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


class Sampler:
    """Sampling for one engine; holds token counts of live requests and nothing else."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._rules = LogitsRules(vocab_size, device)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """logits: [B, V] float32 (may be changed), row i of `requests[i]` → one output per row"""
        raw = logits
        if any(has_rules(request) for request in requests):
            raw = logits.clone() if any(request.sampling.logprobs is not None for request in requests) else logits
            self._rules.apply(logits, requests)
        maxima, chosen = logits.max(dim=-1)
        sampled = [i for i, request in enumerate(requests) if not is_greedy(request.sampling)]
        for rows in _split(sampled, requests):
            if rows:
                chosen[rows] = self._draw(logits, maxima, requests, rows)
        return self._outputs(raw, maxima, chosen, requests)

    def _draw(self, logits: torch.Tensor, maxima: torch.Tensor, requests: Sequence[Request], rows: list[int]) -> torch.Tensor:
        """Token ids of `rows`, which either all filter or all do not, or NO_TOKEN: [len(rows)] int64"""
        params = [requests[row].sampling for row in rows]
        temperatures = self._column([p.temperature for p in params], torch.float32)
        noise = self._column([_uniform(requests[row]) for row in rows], torch.float64)
        scaled = (logits[rows] - maxima[rows, None]) / temperatures
        if not is_filtered(params[0]):
            return invert(torch.softmax(scaled, dim=-1), noise)
        return self._draw_filtered(scaled, params, noise)

    def _draw_filtered(self, scaled: torch.Tensor, params: Sequence[SamplingParams], noise: torch.Tensor) -> torch.Tensor:
        """Widen the candidates stage by stage, for the rows that need it: which stage serves a row is its own affair."""
        chosen = torch.empty(len(params), dtype=torch.int64, device=self._device)
        waiting = list(range(len(params)))
        for count in (*(stage for stage in CANDIDATE_STAGES if stage < scaled.shape[-1]), scaled.shape[-1]):
            rows = [row for row in waiting if params[row].top_k <= count or count == scaled.shape[-1]]
            if not rows:
                continue
            ids, kept = filtered_candidates(scaled[rows], count, *self._filters([params[row] for row in rows]))
            place = invert(kept, noise[rows])
            drawn = ids.gather(1, place.clamp(min=0)[:, None])[:, 0]
            chosen[rows] = torch.where(place == NO_TOKEN, NO_TOKEN, drawn)
            reaches_end = (kept[:, -1] > 0).tolist()
            done = {row for row, cut in zip(rows, reaches_end, strict=True) if not cut or params[row].top_k > 0}
            waiting = [row for row in waiting if row not in done]
        return chosen

    def _filters(self, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """top_k (0 is off), top_p and min_p as columns: [B, 1] each"""
        top_k = self._column([max(0, p.top_k) for p in params], torch.int64)
        top_p = self._column([p.top_p for p in params], torch.float32)
        return top_k, top_p, self._column([p.min_p for p in params], torch.float32)

    def _column(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)[:, None]

    def _outputs(
        self, raw: torch.Tensor, maxima: torch.Tensor, chosen: torch.Tensor, requests: Sequence[Request]
    ) -> list[SampledToken]:
        usable, token_ids = (torch.isfinite(maxima) & (chosen != NO_TOKEN)).tolist(), chosen.tolist()
        asked = [i for i, request in enumerate(requests) if request.sampling.logprobs is not None and usable[i]]
        logprobs = (
            dict(zip(asked, _logprobs(raw[asked], chosen[asked], [requests[i] for i in asked]), strict=True)) if asked else {}
        )
        return [
            SampledToken(token_id=token_ids[i], logprob=logprobs.get(i)) if usable[i] else SampledToken(error=NOT_FINITE)
            for i in range(len(requests))
        ]


def _split(sampled: list[int], requests: Sequence[Request]) -> tuple[list[int], list[int]]:
    filtered = [i for i in sampled if is_filtered(requests[i].sampling)]
    return filtered, [i for i in sampled if not is_filtered(requests[i].sampling)]


def _uniform(request: Request) -> float:
    assert request.sampling.seed is not None, f"request {request.request_id} has no seed"
    return uniform(request.sampling.seed, request.num_tokens)


def invert(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """weights: [B, V] ≥ 0, noise: [B, 1] float64 in [0, 1) → index drawn in proportion to the weights: [B]

    NO_TOKEN for rows whose weights do not sum to a finite number above zero.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    index = torch.searchsorted(cumulative, noise * total, right=True).clamp_(max=weights.shape[-1] - 1)
    return torch.where(torch.isfinite(total) & (total > 0), index, NO_TOKEN)[:, 0]


def filtered_candidates(
    scaled: torch.Tensor, count: int, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most likely ids of each row, and their weights with everything that is filtered out set to zero.

    scaled: [B, V] logits over temperature; top_k (0 is off), top_p, min_p: [B, 1] → ids [B, count] int64, weights [B, count]
    """
    values, ids = scaled.topk(count, dim=-1)
    has_top_k = top_k > 0
    within_k = (torch.arange(count, device=scaled.device)[None, :] < top_k) | ~has_top_k
    in_vocabulary = torch.logsumexp(scaled, dim=-1, keepdim=True)
    in_top_k = torch.logsumexp(values.masked_fill(~within_k, float("-inf")), dim=-1, keepdim=True)
    total = torch.where(has_top_k, in_top_k, in_vocabulary)
    weights = (values - total).exp().masked_fill_(~within_k, 0.0)
    before = weights.cumsum(dim=-1) - weights
    keep = (before < top_p) & (weights >= min_p * weights[:, :1])
    keep[:, 0] = True  # a top_p that float32 rounds to zero keeps it too
    return ids, weights * keep


def _logprobs(raw: torch.Tensor, chosen: torch.Tensor, requests: Sequence[Request]) -> list[TokenLogprob]:
    """raw: [B, V] logits of the model, chosen: [B] → one entry per row with as many alternatives as it asked for"""
    totals = torch.logsumexp(raw, dim=-1)
    own = (raw.gather(1, chosen[:, None])[:, 0] - totals).tolist()
    counts = [request.sampling.logprobs or 0 for request in requests]
    values, ids = raw.topk(max(*counts, 1), dim=-1)
    top_values, top_ids = (values - totals[:, None]).tolist(), ids.tolist()
    return [
        TokenLogprob(logprob=own[i], top_token_ids=top_ids[i][:count], top_logprobs=top_values[i][:count])
        for i, count in enumerate(counts)
    ]
