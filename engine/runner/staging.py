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

from engine.cpu_environment import num_cores
from engine.switches import BUSY_WAIT, is_on

DEPTH = 4
"""Buffers in ring: two steps are under way at a time."""
STAGED_NUMBERS = 4096
BUSY_WAIT_CORES = 4
"""With fewer, whoever keeps one busy takes it from the gateway and from those who compile grammars."""

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

    def __init__(self, size: int, *, sleeps: bool = False) -> None:
        """`sleeps`: who waits for the event does not keep a core busy."""
        self.numbers = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.on_host = self.numbers.numpy()  # the same memory
        self.event = torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]
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


def waits_busily() -> bool:
    """Whether the thread of the steps stays awake while it waits for tokens. See `CudaFetch.wait`."""
    return num_cores() >= BUSY_WAIT_CORES and is_on(BUSY_WAIT)


class CudaFetch:
    """Tokens in a page-locked buffer. The wait ends with their copy, not with later steps."""

    def __init__(self, buffer: PinnedNumbers, shape: tuple[int, ...], *, has_inputs: bool) -> None:
        """shape: (R,), or (R, columns) with inputs and scores behind each token"""
        self._buffer = buffer
        self._shape = shape
        self._has_inputs = has_inputs

    def wait(self) -> None:
        """The one place where the thread of the steps waits for the device, as long as that computes and no longer: while
        nothing is under way nobody is here. Other threads of the process go on meanwhile.

        It stays awake (`waits_busily`). A core that has slept for the milliseconds of a step wakes at a low clock, with cold
        caches: what follows was measured to take several times as long (ADR 55)."""
        self._buffer.event.synchronize()

    def tokens(self) -> list[int]:
        self.wait()
        if len(self._shape) == 1:
            found: list[int] = self._buffer.on_host[: self._shape[0]].tolist()
            return found
        return self._column(0)

    def scores(self) -> torch.Tensor:
        num_rows, width = self._shape
        return self._buffer.numbers[: num_rows * width].view(num_rows, width)[:, 1 + self._has_inputs :]

    def inputs(self) -> list[int]:
        assert self._has_inputs, "they were not sent"
        return self._column(1)

    def _column(self, index: int) -> list[int]:
        num_rows, width = self._shape
        found: list[int] = self._buffer.on_host[index : num_rows * width : width].tolist()
        return found


class TokenReturn:
    """Sends the tokens of steps to the host, and what was asked about them.

    On a GPU the copy is launched in the stream of the step, so that it is over before the next step changes what it reads. The
    next step waits for it, for a few microseconds; on a stream of its own the copy would cost the host more than that.
    """

    def __init__(self, max_rows: int, max_scores: int, *, device: torch.device) -> None:
        """`max_scores`: columns of the widest table of scores."""
        self._ring: BufferRing[PinnedNumbers] | None = None
        if device.type == "cuda":
            sleeps = not waits_busily()
            self._ring = BufferRing(lambda: PinnedNumbers(max_rows * (2 + max_scores), sleeps=sleeps))

    def send(self, tokens: torch.Tensor, scores: torch.Tensor | None = None, *, inputs: torch.Tensor | None = None) -> Fetch:
        """tokens: [R] int64, scores: [R, W] int64, inputs: [R] int64, on the device, free to be overwritten by the next step"""
        if self._ring is None:
            kept_inputs = None if inputs is None else inputs.tolist()
            return FetchedAtOnce(tokens.tolist(), None if scores is None else scores.clone(), kept_inputs)
        sent = tokens
        if scores is not None or inputs is not None:
            parts = [tokens[:, None], *([] if inputs is None else [inputs[:, None]]), *([] if scores is None else [scores])]
            sent = torch.cat(parts, dim=1)
        place, buffer = self._ring.take()
        pinned = buffer.first(sent.numel())
        (pinned if sent is tokens else pinned.view(sent.shape)).copy_(sent, non_blocking=True)
        buffer.event.record()
        self._ring.used(place, buffer.event)
        return CudaFetch(buffer, tuple(sent.shape), has_inputs=inputs is not None)
