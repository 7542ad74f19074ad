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


class Staging:
    """Sends small tables of integers to the device, in each step.

    `ops.send` takes page-locked memory from torch's allocator for each copy; what every step sends has buffers of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: BufferRing[torch.Tensor] | None = None
        if device.type == "cuda":
            self._ring = BufferRing(lambda: torch.empty(4096, dtype=torch.int64, pin_memory=True))

    def send(self, values: Sequence[Sequence[int]] | Sequence[int] | np.ndarray[Any, Any]) -> torch.Tensor:
        """A tensor on the device with these integers, int64, behind everything launched so far."""
        wanted = torch.from_numpy(np.array(values, dtype=np.int64))
        if self._ring is None:
            return wanted
        place, buffer = self._ring.take()
        if buffer.numel() < wanted.numel():
            buffer = torch.empty(2 * wanted.numel(), dtype=torch.int64, pin_memory=True)
            self._ring.replace(place, buffer)
        pinned = buffer[: wanted.numel()].view(wanted.shape)
        pinned.copy_(wanted)
        sent = pinned.to(self._device, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._ring.used(place, event)
        return sent


class Fetch(Protocol):
    """Tokens on their way to the host."""

    def tokens(self) -> list[int]:
        """Wait for them. Raises what the device failed with."""
        ...

    def scores(self) -> torch.Tensor:
        """[R, W] int64, what was sent with the tokens, when these are there; good until a few steps later"""
        ...

    def inputs(self) -> list[int]:
        """The tokens behind which those were chosen, where they were sent with them, when these are there."""
        ...


class FetchedAtOnce:
    """Tokens of a device that is the host."""

    def __init__(self, tokens: list[int], scores: torch.Tensor | None = None, inputs: list[int] | None = None) -> None:
        self._tokens = tokens
        self._scores = scores
        self._inputs = inputs

    def tokens(self) -> list[int]:
        return self._tokens

    def scores(self) -> torch.Tensor:
        assert self._scores is not None, "nothing was sent with the tokens"
        return self._scores

    def inputs(self) -> list[int]:
        assert self._inputs is not None, "they were not sent"
        return self._inputs


class CudaFetch:
    """Tokens in a page-locked buffer; the wait sleeps instead of spinning, and ends with the copy, not with later steps."""

    def __init__(self, pinned: torch.Tensor, event: torch.cuda.Event, *, has_inputs: bool) -> None:
        self._pinned = pinned
        self._event = event
        self._has_inputs = has_inputs

    def tokens(self) -> list[int]:
        self._event.synchronize()
        found: list[int] = self._pinned[:, 0].tolist()
        return found

    def scores(self) -> torch.Tensor:
        return self._pinned[:, 1 + self._has_inputs :]

    def inputs(self) -> list[int]:
        assert self._has_inputs, "they were not sent"
        found: list[int] = self._pinned[:, 1].tolist()
        return found


class TokenReturn:
    """Sends the tokens of steps to the host, and what was asked about them. On a GPU over a stream of its own: the next step
    does not wait for the bus."""

    def __init__(self, max_rows: int, max_scores: int, *, device: torch.device) -> None:
        """`max_scores`: columns of the widest table of scores."""
        self._ring: BufferRing[tuple[torch.Tensor, torch.Tensor]] | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            size = max_rows * (2 + max_scores)
            self._ring = BufferRing(
                lambda: (
                    torch.empty(size, dtype=torch.int64, device=device),
                    torch.empty(size, dtype=torch.int64, pin_memory=True),
                )
            )

    def send(self, tokens: torch.Tensor, scores: torch.Tensor | None = None, *, inputs: torch.Tensor | None = None) -> Fetch:
        """tokens: [R] int64, scores: [R, W] int64, inputs: [R] int64, on the device, free to be overwritten by the next step"""
        if self._ring is None:
            kept_inputs = None if inputs is None else inputs.tolist()
            return FetchedAtOnce(tokens.tolist(), None if scores is None else scores.clone(), kept_inputs)
        numbers = (tokens[:, None],) if inputs is None else (tokens[:, None], inputs[:, None])
        parts = numbers if scores is None else (*numbers, scores)
        shape = tokens.shape[0], sum(part.shape[1] for part in parts)
        place, buffers = self._ring.take()
        kept, pinned = (buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers)
        torch.cat(parts, dim=1, out=kept)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            pinned.copy_(kept, non_blocking=True)
            done.record(self._stream)
        self._ring.used(place, done)
        return CudaFetch(pinned, done, has_inputs=inputs is not None)
