"""Page-locked host buffers for what every step sends, used in turn so that neither side overwrites what the other still reads.

There are more buffers than steps in flight. Each has an event, recorded after the copy that uses it; the buffer is taken again
only after that event has passed, which in practice nothing has to wait for.

On a CPU there is no copy that runs by itself: values are taken at once, and the same class passes them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.runner.device_waits import STEP_WAITS

DEPTH = 4
"""Buffers in turn: two steps are in flight at a time."""
STAGED_NUMBERS = 4096


def record(event: torch.cuda.Event) -> None:
    """Record an event after everything launched so far. `event.record()` would ask `torch.cuda.current_stream`, which reads
    the environment: 10 to 20 µs in torch 2.11, where this takes 3."""
    event.record(torch.accelerator.current_stream())


class PinnedBuffer:
    """Page-locked integers, and the event after the copy that uses them. Both are made once: the driver makes them."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.array = self.tensor.numpy()  # the same memory
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last_view = self.tensor

    def view_of(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """[size]. The last view is kept: steps request the same size again and again."""
        if len(self._last_view) != size or self._last_view.dtype is not dtype:
            self._last_view = self.tensor.view(dtype)[:size]
        return self._last_view


class Staging:
    """Sends small tables of integers to the device, in each step.

    `ops.send` takes page-locked memory from torch's allocator for each copy; what every step sends has buffers of its own.
    """

    def __init__(self, device: torch.device, size: int = STAGED_NUMBERS) -> None:
        """`size`: numbers that are sent at once. More can be: then page-locked memory is requested while requests wait."""
        self._device = device
        self._buffers = [PinnedBuffer(size) for _ in range(DEPTH)] if device.type == "cuda" else []
        self._last_index = 0

    def send(
        self,
        values: Sequence[Sequence[int]] | Sequence[int] | np.ndarray[Any, Any],
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A tensor on the device with these integers, after everything launched so far: `into`, int64 or int32, else a new
        one, int64."""
        if not self._buffers:
            host_tensor = torch.from_numpy(np.array(values, dtype=np.int64))
            return host_tensor if into is None else into.copy_(host_tensor)
        dtype = torch.int64 if into is None else into.dtype
        host_values = np.asarray(values, dtype=np.int32 if dtype is torch.int32 else np.int64)
        buffer = self._next_buffer(host_values.size)
        buffer.array.view(host_values.dtype)[: host_values.size] = host_values.reshape(-1)
        pinned = buffer.view_of(host_values.size, dtype)
        if host_values.ndim > 1:
            pinned = pinned.view(host_values.shape)
        sent = pinned.to(self._device, non_blocking=True) if into is None else into.copy_(pinned, non_blocking=True)
        record(buffer.event)
        return sent

    def _next_buffer(self, size: int) -> PinnedBuffer:
        """A buffer of `size` numbers at least, when the copy that used it last is over."""
        self._last_index = (self._last_index + 1) % DEPTH
        buffer = self._buffers[self._last_index]
        STEP_WAITS.wait_for(buffer.event)
        if len(buffer.array) < size:
            buffer = self._buffers[self._last_index] = PinnedBuffer(2 * size)
        return buffer
