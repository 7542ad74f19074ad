"""Detects conflicting writes of `index_copy_`, whose order on a card is undefined."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def run_operation(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func`. Raises RuntimeError if it would write different values to one index."""
    if func is aten.index_copy_.default:
        _, dim, index, source = args
        _refuse_two_values(dim, index, source)
    return func(*args, **kwargs)


def _refuse_two_values(dim: int, index: torch.Tensor, source: torch.Tensor) -> None:
    places, numbers = torch.unique(index, return_inverse=True)
    if len(places) == index.numel():
        return
    chosen = torch.zeros(len(places), dtype=torch.int64).scatter_(0, numbers, torch.arange(index.numel()))
    taken = source.index_select(dim, chosen[numbers])
    if not torch.equal(taken.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8)):
        raise RuntimeError("index_copy_ writes different values to one place, and a card decides which one stays")
