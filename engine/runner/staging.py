"""Page-locked host buffers for what every step sends, used in turn so that neither side overwrites what the other still reads.

There are more buffers than steps under way. Each has an event, recorded behind the copy that uses it; the buffer is taken again
only after that event has passed, which in practice nothing has to wait for.

On a CPU there is no copy that runs by itself: values are taken at once, and the same class passes them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

DEPTH = 4
"""Buffers in turn: two steps are under way at a time."""
STAGED_NUMBERS = 4096


class PinnedNumbers:
    """Page-locked integers, and the event behind the copy that uses them. Both are made once: the driver makes them."""

    def __init__(self, size: int) -> None:
        self.numbers = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.on_host = self.numbers.numpy()  # the same memory
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._first = self.numbers

    def first(self, size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """[size], of which the last one is kept: steps ask for the same again and again."""
        if len(self._first) != size or self._first.dtype is not dtype:
            self._first = self.numbers.view(dtype)[:size]
        return self._first


class Staging:
    """Sends small tables of integers to the device, in each step.

    `ops.send` takes page-locked memory from torch's allocator for each copy; what every step sends has buffers of its own.
    """

    def __init__(self, device: torch.device, size: int = STAGED_NUMBERS) -> None:
        """`size`: numbers that are sent at once. More can be: then page-locked memory is asked for while requests wait."""
        self._device = device
        self._buffers = [PinnedNumbers(size) for _ in range(DEPTH)] if device.type == "cuda" else []
        self._turn = 0

    def send(
        self,
        values: Sequence[Sequence[int]] | Sequence[int] | np.ndarray[Any, Any],
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A tensor on the device with these integers, behind everything launched so far: `into`, int64 or int32, else a new
        one, int64."""
        if not self._buffers:
            given = torch.from_numpy(np.array(values, dtype=np.int64))
            return given if into is None else into.copy_(given)
        dtype = torch.int64 if into is None else into.dtype
        wanted = np.asarray(values, dtype=np.int32 if dtype is torch.int32 else np.int64)
        buffer = self._next_buffer(wanted.size)
        buffer.on_host.view(wanted.dtype)[: wanted.size] = wanted.reshape(-1)
        pinned = buffer.first(wanted.size, dtype)
        if wanted.ndim > 1:
            pinned = pinned.view(wanted.shape)
        sent = pinned.to(self._device, non_blocking=True) if into is None else into.copy_(pinned, non_blocking=True)
        buffer.event.record()
        return sent

    def _next_buffer(self, size: int) -> PinnedNumbers:
        """A buffer of `size` numbers at least, when the copy that used it last is over."""
        self._turn = (self._turn + 1) % DEPTH
        buffer = self._buffers[self._turn]
        buffer.event.synchronize()
        if len(buffer.on_host) < size:
            buffer = self._buffers[self._turn] = PinnedNumbers(2 * size)
        return buffer
