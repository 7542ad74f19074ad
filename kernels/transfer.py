"""Values of the host sent to the device, in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

ALIGNED_BYTES = 16


def send(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `dtype` on `device` with these values: a tensor, an array or nested lists of numbers, of any shape.

    A GPU copies from page-locked memory, which torch reuses only when the copy is over: the host waits for no step under way.
    Torch locks no tensor that it makes of an array, but a copy of it. On a CPU the result may share the memory of `values`.
    """
    kept = torch.as_tensor(values, dtype=dtype)
    return kept.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else kept


def send_together(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[torch.Tensor]:
    """As `send` of each, with their types and shapes, by one copy: pieces of one tensor, each on 16 bytes."""
    sizes = [-(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for array in arrays]
    starts = [*accumulate(sizes, initial=0)]
    kept = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_host = kept.numpy()
    for array, start in zip(arrays, starts, strict=False):
        on_host[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    sent = kept.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]
