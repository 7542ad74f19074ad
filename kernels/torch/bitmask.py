"""A grammar's mask applied to logits, eight tokens at a time."""

from __future__ import annotations

from functools import cache

import torch

SLICE_ELEMENTS = 1 << 24
"""Logits masked at a time: the biases added to them take as much memory."""


@cache
def _byte_biases(device: torch.device) -> torch.Tensor:
    """The biases added to the logits of eight tokens, for each byte of a mask: [256, 8] float32"""
    allowed = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return torch.where(allowed > 0, 0.0, -torch.inf)


def apply_bitmask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """As `kernels.triton.sampling.bitmask.apply_bitmask`, without padding. It adds: values that are not finite stay so."""
    vocab_size = logits.shape[1]
    mask_bytes = masks.contiguous().view(torch.uint8).int()
    size = max(1, SLICE_ELEMENTS // vocab_size)
    for begin in range(0, len(rows), size):
        chunk = slice(begin, begin + size)
        biases = torch.nn.functional.embedding(mask_bytes[chunk], _byte_biases(logits.device)).flatten(1)
        logits.index_add_(0, rows[chunk], biases[:, :vocab_size].to(logits.dtype))
