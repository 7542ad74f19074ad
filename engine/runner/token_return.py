"""Tokens of steps on their way to the host.

    step ─► ops.advance_slots ─► page-locked memory ─► event               CudaFetch
         ─► inputs, scores ─► copy, where they are requested ─────┘
    step                                                                   ImmediateFetch: the device is the host

Buffers are used in turn, and there are more of them than steps in flight.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch

from engine.environment import num_cores
from engine.runner.device_waits import STEP_WAITS
from engine.runner.staging import DEPTH, record
from engine.switches import BUSY_WAIT, is_on
from kernels import ops

BUSY_WAIT_CORES = 4
"""With fewer cores, a busy wait would take one from the gateway and from the processes that compile grammars."""


class Fetch(Protocol):
    """Tokens on their way to the host."""

    def tokens(self) -> list[int]:
        """Wait for them. Raises what the device failed with."""
        ...

    def scores(self) -> torch.Tensor:
        """[R, W] int64, what was sent with the tokens, when these are there; good until a few steps later"""
        ...

    def inputs(self) -> list[int]:
        """The input token of each row, if they were sent with the sampled tokens, when these are there."""
        ...


class ImmediateFetch:
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


def uses_busy_wait() -> bool:
    """Whether the thread of the steps stays awake while it waits for tokens. See `CudaFetch.wait`."""
    return num_cores() >= BUSY_WAIT_CORES and is_on(BUSY_WAIT)


class CudaFetch:
    """Tokens that the step's last kernel writes to the host's memory, and what is copied after it, when an event has passed.
    The wait ends with that, not with later steps."""

    def __init__(
        self,
        event: torch.cuda.Event,
        buffer: np.ndarray[Any, Any],
        step_number: int,
        num_rows: int,
        columns: torch.Tensor | None = None,
        *,
        has_inputs: bool = False,
    ) -> None:
        """buffer: [1 + B] int64, of `ops.HostTokens`, the step number before the tokens; not read without rows. columns: [R, W]
        or [R, 1 + W] int64, page-locked: scores, preceded by inputs where `has_inputs`."""
        self._event = event
        self._buffer = buffer
        self._step_number = step_number
        self._num_rows = num_rows
        self._columns = columns
        self._has_inputs = has_inputs

    def wait(self) -> None:
        """The only place where the step thread waits for the device, and only while the device computes: never without a step
        in flight. Other threads of the process continue meanwhile.

        It stays awake (`uses_busy_wait`). A core that has slept for the milliseconds of a step wakes at a low clock, with cold
        caches: what follows was measured to take several times as long (ADR 55)."""
        STEP_WAITS.wait_for(self._event)

    def tokens(self) -> list[int]:
        """Raises RuntimeError where another step has written there: host and device have lost count of each other."""
        self.wait()
        if not self._num_rows:
            return []
        values: list[int] = self._buffer[: 1 + self._num_rows].tolist()
        written_step = values.pop(0)
        if written_step != self._step_number:
            raise RuntimeError(f"step {self._step_number} left no tokens: its buffer has those of step {written_step}")
        return values

    def scores(self) -> torch.Tensor:
        assert self._columns is not None, "nothing was sent with the tokens"
        return self._columns[:, int(self._has_inputs) :]

    def inputs(self) -> list[int]:
        assert self._columns is not None, "nothing was sent with the tokens"
        assert self._has_inputs, "they were not sent"
        values: list[int] = self._columns[:, 0].tolist()
        return values


def _release_after(events: Sequence[torch.cuda.Event], buffers: torch.Tensor) -> None:  # noqa: ARG001 - is held until then
    """Release `buffers` after the events: torch does not know that kernels still write there, and would reuse the memory."""
    with contextlib.suppress(RuntimeError):  # of a device that computes no more
        for event in events:
            event.synchronize()


class TokenReturn:
    """Brings the tokens of steps to the host, with scores and inputs where requested.

    On a GPU the last kernel of a step writes them to the host's memory, so that a replayed graph brings them itself: all that
    the host launches after it is an event. Scores and inputs are copied, in the stream of the step, so that the copy is over
    before the next step changes what it reads. The next step waits for it, for a few microseconds; on a stream of its own the
    copy would cost the host more than that.
    """

    def __init__(self, max_rows: int, max_scores: int, *, device: torch.device) -> None:
        """`max_scores`: columns of the widest table of scores."""
        self._num_steps = 0  # that were fetched
        self._has_unfetched = False  # whether the device may have counted one more
        self.host: ops.HostTokens | None = None
        """Where each step leaves its tokens, which are fetched once; None where the device is the host."""
        if device.type == "cuda":
            sleeps = not uses_busy_wait()
            buffers = torch.zeros(DEPTH, 1 + max_rows, dtype=torch.int64, pin_memory=True)
            self.host = ops.HostTokens(buffers, torch.zeros(1, dtype=torch.int64, device=device))
            self._buffers = [*buffers.numpy()]  # the same memory
            self._events = [torch.cuda.Event(blocking=sleeps) for _ in self._buffers]  # type: ignore[no-untyped-call]
            # Used in turn, of steps without tokens.
            self._ends = cycle([torch.cuda.Event(blocking=sleeps) for _ in self._buffers])  # type: ignore[no-untyped-call]
            weakref.finalize(self, _release_after, self._events, buffers).atexit = False
            self._columns = torch.empty(DEPTH, max_rows * (1 + max_scores), dtype=torch.int64, pin_memory=True)

    def begin_step(self) -> None:
        """Call this before a step launches anything. Raises what the device has failed with."""
        if self._has_unfetched and self.host is not None:
            self.host.num_steps.fill_(self._num_steps)
        self._has_unfetched = False

    def fetch(self, tokens: torch.Tensor, scores: torch.Tensor | None = None, *, inputs: torch.Tensor | None = None) -> Fetch:
        """Bring back the tokens of the step just launched. tokens: [R] int64, as given to `ops.advance_slots` with `host`;
        scores: [R, W] int64, inputs: [R] int64, on the device. All are free to be overwritten by the next step."""
        if self.host is None:
            kept_inputs = None if inputs is None else inputs.tolist()
            return ImmediateFetch(tokens.tolist(), None if scores is None else scores.clone(), kept_inputs)
        self._num_steps += 1
        index, columns = self._num_steps % DEPTH, None
        if scores is not None or inputs is not None:
            parts = [] if inputs is None else [inputs[:, None]]
            if scores is not None:
                parts.append(scores)
            sent = torch.cat(parts, dim=1)
            columns = self._columns[index, : sent.numel()].view(sent.shape)
            columns.copy_(sent, non_blocking=True)
        event = self._events[index]
        record(event)
        return CudaFetch(event, self._buffers[index], self._num_steps, len(tokens), columns, has_inputs=inputs is not None)

    def fetch_end(self) -> Fetch:
        """Bring back that the step just launched, which samples nothing, is over. Without that the host would launch step after
        step of a long prompt, until it waits for a buffer, and whatever arrives would wait for all of them."""
        if self.host is None:
            return ImmediateFetch([])
        event = next(self._ends)
        record(event)
        return CudaFetch(event, self._buffers[0], self._num_steps, 0)

    def mark_unfetched(self) -> None:
        """A step may have been launched that was not fetched: the device has perhaps counted one more."""
        self._has_unfetched = True
