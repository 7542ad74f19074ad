"""Queue of the operations for the ledger's next rounds: their order, and how long each may be delayed for batching.

Opens that are not journaled go into rounds of their own, because their callers wait and a settlement costs several times as
much; but when many operations wait, all go together, since fewer rounds are less work. Operations that nobody waits for
urgently are delayed a moment, since a round of several costs little more than a round of one. Only the latest checkpoint of
each request counts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from appliance.base.clock import Clock
from appliance.metering.ledger.records import Usage
from appliance.metering.ledger.round import Open, Operation, Settle, TrackedOperation

T = TypeVar("T")

ROUND_OPERATIONS_MAX = 256
COMBINE_FROM = 24  # from this many waiting operations on, opens and the others share rounds
SETTLE_PAUSE_S = 0.001  # batching delay of a settlement; with a longer one, answers end together and clients return together
ROWS_PAUSE_S = 0.025  # batching delay of the rows of a journaled operation
CHECKPOINT_INTERVAL_S = 0.5  # at least; progress reported by requests should be written as it arrives


class OperationQueue:
    """Operations and checkpoints that no round has taken yet. `closing`: batching delays no longer apply."""

    def __init__(self, clock: Clock, *, checkpoint_interval_s: float, settle_pause_s: float) -> None:
        self.closing = False
        self._clock = clock
        self._checkpoint_interval_s = checkpoint_interval_s
        self._settle_pause_s = settle_pause_s
        self._opens: deque[Open] = deque()
        self._others: deque[Operation] = deque()
        self._others_due_s = 0.0
        self._opens_alone = False
        self._checkpoints: dict[str, Usage] = {}
        self._checkpoints_due_s = 0.0
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """Return how many operations wait."""
        return len(self._opens) + len(self._others)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is left to write."""
        return not self._opens and not self._others and not self._checkpoints

    def put(self, operation: Operation) -> None:
        """Queue an operation for a round."""
        if isinstance(operation, Open) and operation.number is None:
            self._opens.append(operation)
        else:
            is_journaled = isinstance(operation, TrackedOperation) and operation.number is not None
            due_s = asyncio.get_running_loop().time() + (ROWS_PAUSE_S if is_journaled else self._settle_pause_s)
            self._others_due_s = min(self._others_due_s, due_s) if self._others else due_s
            self._others.append(operation)
        self._wake.set()

    def put_checkpoints(self, checkpoints: Mapping[str, Usage]) -> None:
        """Queue checkpoints; the latest of each request counts."""
        self._checkpoints.update(checkpoints)
        self._wake.set()

    def drop_checkpoint(self, request_id: str) -> None:
        """Drop the checkpoint of a request that is being settled."""
        self._checkpoints.pop(request_id, None)

    def make_due(self) -> None:
        """Make all queued operations due at once."""
        self._others_due_s = 0.0
        self._wake.set()

    def close(self) -> None:
        """Make everything due at once from now on."""
        self.closing = True
        self._wake.set()

    def newest_first(self) -> Iterator[Operation]:
        """Yield the queued operations, newest first, except opens whose callers wait."""
        return reversed(self._others)

    async def wait_until_due(self) -> None:
        """Wait until something is due, or an open is queued."""
        while not self._opens and not self.closing:
            self._wake.clear()
            pause_s = self._pause_s()
            if pause_s is not None and pause_s <= 0:
                return
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                return

    def take(self) -> tuple[list[Operation], dict[str, Usage]]:
        """Return what the next round writes: opens and other operations in alternation, or both when many wait.

        Abandoned opens are dropped, so that their voids, which may be written first, find nothing to do.
        """
        others_are_due = self._others_are_due() or self._checkpoints_are_due()
        combine = len(self) >= COMBINE_FROM
        self._opens_alone = bool(self._opens) and not (others_are_due and (combine or self._opens_alone))
        operations: list[Operation] = []
        if self._opens_alone or combine:
            operations += [operation for operation in _pop_round(self._opens) if not operation.abandoned]
        if not self._opens_alone:
            operations += _pop_round(self._others)
        return operations, self._take_checkpoints()

    def take_all(self) -> list[Operation]:
        """Remove and return every waiting operation."""
        operations = [*self._opens, *self._others]
        self._opens.clear()
        self._others.clear()
        return operations

    def put_back(self, operations: Sequence[Operation], checkpoints: Mapping[str, Usage]) -> None:
        """Put back what a failed round had taken, ahead of all others and in the same order."""
        self._others.extendleft(reversed(operations))
        settling = {operation.request_id for operation in self._others if isinstance(operation, Settle)}
        for request_id, usage in checkpoints.items():
            if request_id not in settling:
                self._checkpoints.setdefault(request_id, usage)

    def _pause_s(self) -> float | None:
        """Return the seconds until something is due, if no open arrives; None when nothing is queued."""
        pauses_s: list[float] = []
        if self._others:
            pauses_s.append(self._others_due_s - asyncio.get_running_loop().time())
        if self._checkpoints:
            pauses_s.append(self._checkpoints_due_s - self._clock.monotonic_s())
        return min(pauses_s, default=None)

    def _others_are_due(self) -> bool:
        is_time = self.closing or asyncio.get_running_loop().time() >= self._others_due_s
        return bool(self._others) and is_time

    def _checkpoints_are_due(self) -> bool:
        return bool(self._checkpoints) and (self.closing or self._clock.monotonic_s() >= self._checkpoints_due_s)

    def _take_checkpoints(self) -> dict[str, Usage]:
        if self._opens_alone or not self._checkpoints_are_due():
            return {}
        self._checkpoints_due_s = self._clock.monotonic_s() + self._checkpoint_interval_s
        without_rows = {operation.event.request_id for operation in self._others if isinstance(operation, Open)}
        taken = {request_id: usage for request_id, usage in sorted(self._checkpoints.items()) if request_id not in without_rows}
        self._checkpoints = {request_id: usage for request_id, usage in self._checkpoints.items() if request_id in without_rows}
        return taken


def _pop_round(queue: deque[T]) -> list[T]:
    """Remove and return the operations of one round."""
    return [queue.popleft() for _ in range(min(len(queue), ROUND_OPERATIONS_MAX))]
