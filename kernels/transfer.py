"""Host values sent to the device in one asynchronous copy."""

from __future__ import annotations

from typing import Any

import torch


def send(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `dtype` on `device` with these values: a tensor, an array or nested lists of numbers, of any shape.

    A GPU copies from page-locked memory, which torch reuses only after the copy, so the host need not wait for steps under way.
    torch cannot page-lock a tensor made from an array, only a copy of it. On a CPU the result may share the memory of `values`.
    """
    host_tensor = torch.as_tensor(values, dtype=dtype)
    return host_tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host_tensor
