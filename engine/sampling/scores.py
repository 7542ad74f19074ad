"""Log-probabilities of the tokens of a step as one table of integers, so that they reach the host in one copy.

row: rank of the token │ the token, the likeliest ones │ their log-probabilities, the bits of float64 as integers
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.protocol import TokenLogprob
from engine.sampling_params import TOP_LOGPROBS_MAX
from kernels import ops

TOP_SIZES = (1, 5, TOP_LOGPROBS_MAX)
"""A step's number of likeliest tokens is rounded up to one of these: a captured step computes a fixed number."""


def num_top(counts: Sequence[int], vocab_size: int) -> int:
    """How many likeliest tokens a step computes for rows that request `counts` of them; `counts` is not empty."""
    return min(next(size for size in TOP_SIZES if size >= max(counts)), vocab_size)


def width(num_top: int) -> int:
    """Columns of a table with this many likeliest tokens."""
    return 1 + 2 * (1 + num_top)


def packed(
    kernels: ops.Operations, logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """logits: [R, V] as the model computed them; tokens: [R] int64, below 0 is none → [R, width(num_top)] int64, written to
    `out` if given"""
    if kernels.score_tokens is not None:
        table = torch.empty(len(tokens), width(num_top), dtype=torch.int64) if out is None else out
        kernels.score_tokens(logits, tokens, num_top, out=table)
        return table
    likeliest = logits.float().topk(num_top, dim=-1).indices
    ids = torch.cat((tokens[:, None], likeliest), dim=1)
    logprobs, ranks = kernels.token_logprobs(logits, ids)
    return torch.cat((ranks[:, None].long(), ids, logprobs.double().view(torch.int64)), dim=1, out=out)


def unpacked(row: torch.Tensor, count: int) -> TokenLogprob:
    """row: [width(n)] int64 on the host, n ≥ `count` → the score of the chosen token and of the `count` likeliest"""
    num_ids = (len(row) - 1) // 2
    ids, logprobs = row[1 : 1 + num_ids].tolist(), row[1 + num_ids :].view(torch.float64).tolist()
    return TokenLogprob(
        logprob=logprobs[0], rank=int(row[0]), top_token_ids=ids[1 : 1 + count], top_logprobs=logprobs[1 : 1 + count]
    )
