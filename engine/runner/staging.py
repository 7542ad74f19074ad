"""Page-locked host buffers between host and device, used in turn so that neither side overwrites what the other still reads.

A `BufferRing` has more buffers than steps under way. Each buffer has an event, recorded behind the copy that uses it; the
buffer is taken again only after that event has passed, which in practice nothing has to wait for.

On a CPU there is no copy that runs by itself: values are taken at once, and the same classes pass them on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

DEPTH = 4
"""Buffers in ring: two steps are under way at a time."""
STAGED_NUMBERS = 4096

Buffer = TypeVar("Buffer")


class Event(Protocol):
    """The part of `torch.cuda.Event` that a ring needs."""

    def synchronize(self) -> None: ...


class BufferRing(Generic[Buffer]):
    """A ring of `depth` buffers: each is taken in turn, when its last use is over."""

    def __init__(self, make: Callable[[], Buffer], depth: int = DEPTH) -> None:
        self._buffers = [make() for _ in range(depth)]
        self._events: list[Event | None] = [None] * depth
        self._next = 0

    def take(self) -> tuple[int, Buffer]:
        """The next buffer and its index; waits until its last use is over."""
        place, self._next = self._next, (self._next + 1) % len(self._buffers)
        event, self._events[place] = self._events[place], None
        if event is not None:
            event.synchronize()
        return place, self._buffers[place]

    def used(self, place: int, until: Event) -> None:
        """Mark the buffer at this index as in use until the event has passed."""
        self._events[place] = until

    def replace(self, place: int, buffer: Buffer) -> None:
        """Put another buffer at this index, a larger one for instance."""
        self._buffers[place] = buffer


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
        self._ring: BufferRing[PinnedNumbers] | None = None
        if device.type == "cuda":
            self._ring = BufferRing(lambda: PinnedNumbers(size))

    def send(
        self,
        values: Sequence[Sequence[int]] | Sequence[int] | np.ndarray[Any, Any],
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A tensor on the device with these integers, behind everything launched so far: `into`, int64 or int32, else a new
        one, int64."""
        if self._ring is None:
            given = torch.from_numpy(np.array(values, dtype=np.int64))
            return given if into is None else into.copy_(given)
        dtype = torch.int64 if into is None else into.dtype
        wanted = np.asarray(values, dtype=np.int32 if dtype is torch.int32 else np.int64)
        size = wanted.size
        place, buffer = self._ring.take()
        if len(buffer.on_host) < size:
            buffer = PinnedNumbers(2 * size)
            self._ring.replace(place, buffer)
        buffer.on_host.view(wanted.dtype)[:size] = wanted.reshape(-1)
        pinned = buffer.first(size, dtype)
        if wanted.ndim > 1:
            pinned = pinned.view(wanted.shape)
        sent = pinned.to(self._device, non_blocking=True) if into is None else into.copy_(pinned, non_blocking=True)
        buffer.event.record()
        self._ring.used(place, buffer.event)
        return sent
