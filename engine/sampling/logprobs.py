"""Log-probabilities of chosen tokens and of the likeliest ones, as the model has them: before temperature, rules and filters.

log p(token) = logit − log Σ exp(logits): one number per row beside a gather and a partial top-k. A table of log-probabilities
of the size of the logits is never made; what `logsumexp` needs on the way is bounded by taking the rows in slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.protocol import TokenLogprob
from kernels import ops

SLICE_ELEMENTS = 1 << 24
"""Logits taken at a time: 64 MiB of float32, enough to fill a GPU and little beside a vocabulary times a prompt."""


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """logits: [T, V] float32, row i before prompt token `token_ids[i]` → its log-probability and the `count` likeliest"""
    ids = torch.tensor(token_ids, dtype=torch.int64).to(logits.device)
    return token_logprobs(logits, range(len(token_ids)), ids, [count] * len(token_ids))


def token_logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, counts: Sequence[int]
) -> list[TokenLogprob]:
    """One entry per row of `rows`: for the token `token_ids[i]`, with the `counts[i]` likeliest tokens.

    logits: [B, V] float32, left as it is; token_ids: [len(rows)] int64 on the same device
    """
    size = max(1, SLICE_ELEMENTS // logits.shape[-1])
    entries: list[TokenLogprob] = []
    for begin in range(0, len(rows), size):
        part = slice(begin, begin + size)
        entries += _logprobs(_take(logits, rows[part]), token_ids[part], counts[part])
    return entries


def _take(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Rows of `logits`, without a copy where they lie together: [len(rows), V]"""
    first, last = rows[0], rows[-1]
    if isinstance(rows, range) or list(rows) == list(range(first, last + 1)):
        return logits[first : last + 1]
    return logits[torch.tensor(rows, dtype=torch.int64).to(logits.device)]


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
    values, ids = logits.topk(min(max(1, *counts), logits.shape[-1]), dim=-1)
    score = _scored_by_kernel if logits.device.type == "cuda" else _scored
    own_logprobs, top_logprobs, ranks = score(logits, token_ids, values, ids)
    top_ids = ids.tolist()
    return [
        TokenLogprob(
            logprob=own_logprobs[i], rank=ranks[i], top_token_ids=top_ids[i][:count], top_logprobs=top_logprobs[i][:count]
        )
        for i, count in enumerate(counts)
    ]


Scored = tuple[list[float], list[list[float]], list[int]]
"""Log-probabilities of the tokens asked for, of the likeliest ones, and the ranks of the former."""


def _scored_by_kernel(logits: torch.Tensor, token_ids: torch.Tensor, _: torch.Tensor, ids: torch.Tensor) -> Scored:
    """On a GPU: nothing of the size of the logits is made, and a row is summed in one order whatever is beside it."""
    wanted = torch.cat((token_ids[:, None], ids), dim=1)
    scored, ranks = ops.operations(logits.device).token_logprobs(logits, wanted)
    return scored[:, 0].tolist(), scored[:, 1:].tolist(), ranks.tolist()


def _scored(logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor, _: torch.Tensor) -> Scored:
    totals = torch.logsumexp(logits, dim=-1)
    own = logits.gather(1, token_ids[:, None])
    ranks = ((values > own).sum(dim=-1) + 1).tolist()
    beyond = [i for i, rank in enumerate(ranks) if rank > values.shape[-1]]
    if beyond:
        counted = ((_take(logits, beyond) > own[beyond]).sum(dim=-1) + 1).tolist()
        for i, rank in zip(beyond, counted, strict=True):
            ranks[i] = rank
    return (own[:, 0] - totals).tolist(), (values - totals[:, None]).tolist(), ranks
