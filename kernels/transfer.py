"""Values of the host sent to the device, in one copy that the host does not wait for."""

from __future__ import annotations

from typing import Any

import torch


def send(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `dtype` on `device` with these values: a tensor, an array or nested lists of numbers, of any shape.

    A GPU copies from page-locked memory, which torch reuses only when the copy is over: the host waits for no step under way.
    Torch locks no tensor that it makes of an array, but a copy of it. On a CPU the result may share the memory of `values`.
    """
    kept = torch.as_tensor(values, dtype=dtype)
    return kept.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else kept
