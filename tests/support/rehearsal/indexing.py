"""torch's indexing in Python: its own implementation needs a CUDA device before it dispatches to a tensor subclass."""

from __future__ import annotations

import operator
from typing import Any

import torch

aten = torch.ops.aten


def get_item(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    place, indices = split_index(tensor, key)
    return aten.index.Tensor(place, indices) if indices else place


def split_index(tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Split an index in two steps: a view by integers, slices, None and Ellipsis; then index tensors by dimension."""
    keys = list(key) if isinstance(key, tuple) else [key]
    spent = sum(0 if each is None or each is Ellipsis else each.dim() if is_mask(each) else 1 for each in keys)
    if not any(each is Ellipsis for each in keys):
        keys.append(Ellipsis)
    place: torch.Tensor = tensor
    indices: list[torch.Tensor | None] = []
    dim = 0
    for each in keys:
        if each is Ellipsis:
            skipped = tensor.dim() - spent
            indices += [None] * skipped
            dim += skipped
        elif each is None:
            place = place.unsqueeze(dim)
            indices.append(None)
            dim += 1
        elif isinstance(each, slice):
            assert each.step is None or operator.index(each.step) > 0, "slice step must be positive"
            if each != slice(None):
                place = aten.slice.Tensor(place, dim, each.start, each.stop, 1 if each.step is None else each.step)
            indices.append(None)
            dim += 1
        elif isinstance(each, torch.Tensor | list) or hasattr(each, "__array_interface__"):
            index = each if isinstance(each, torch.Tensor) else torch.as_tensor(each)
            indices.append(index)
            dim += index.dim() if is_mask(index) else 1
        else:
            place = place.select(dim, operator.index(each))
    while indices and indices[-1] is None:
        indices.pop()
    return place, indices


def is_mask(key: Any) -> bool:
    return isinstance(key, torch.Tensor) and key.dtype in (torch.bool, torch.uint8)
