"""The divisor and the soft-cap of logits that some models have, in torch."""

from __future__ import annotations

import torch


def cap_logits(logits: torch.Tensor, *, divisor: float = 1.0, softcap: float | None = None) -> torch.Tensor:
    """Divide logits (Granite), then cap them: c · tanh(logits / c) (Gemma 2). [R, V] float32, in place and returned."""
    if divisor != 1.0:
        logits.div_(divisor)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
