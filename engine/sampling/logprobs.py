"""Log-probabilities of chosen tokens and of the likeliest ones, from the model's logits: before temperature, rules and filters.

log p(token) = logit − log Σ exp(logits): one number per row besides a gather and a partial top-k. A table of log-probabilities
of the size of the logits is never created. The kernels are those of steps over slots, so a row has the same bits in both. They
sum a row in one order, whatever other rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.protocol import TokenLogprob
from engine.sampling import scores
from kernels import ops

SLICE_ELEMENTS = 1 << 24
"""Logits processed at a time: 64 MiB of float32, enough to fill a GPU, and little compared with vocabulary × prompt."""


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
    for start in range(0, len(rows), size):
        chunk = slice(start, start + size)
        entries += _logprobs(_select_rows(logits, rows[chunk]), token_ids[chunk], counts[chunk])
    return entries


def _select_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Rows of `logits`, without a copy if they are contiguous: [len(rows), V]"""
    first, last = rows[0], rows[-1]
    if isinstance(rows, range) or list(rows) == list(range(first, last + 1)):
        return logits[first : last + 1]
    return logits[torch.tensor(rows, dtype=torch.int64).to(logits.device)]


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
    num_top = min(max(1, *counts), logits.shape[-1])
    table = scores.packed(ops.operations(logits.device, logits.dtype), logits, token_ids, num_top).cpu()
    return [scores.unpacked(row, count) for row, count in zip(table, counts, strict=True)]
