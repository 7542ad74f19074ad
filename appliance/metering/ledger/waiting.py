"""The operations that wait for the ledger's next round: their order, and how long each may wait for others.

An open without a line in the journal goes into rounds of its own, because its caller waits and a settlement costs several times
as much; but when many wait, all go together, as fewer rounds are less work. Operations that nobody urgently waits for are held
back a moment for others, since a round of several costs little more than a round of one. Only the latest checkpoint of each
request counts.
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
TOGETHER_FROM = 24
SETTLE_PAUSE_S = 0.001  # how long a settlement waits for others; with more, answers end together, and clients return together
ROWS_PAUSE_S = 0.025  # how long rows wait for others, when their line is in the journal
CHECKPOINT_INTERVAL_S = 0.5  # at least; progress that requests report is to be written as it comes


class Waiting:
    """Operations and checkpoints that no round has taken yet. `closing`: nothing waits for others any more."""

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
        """Return whether there is nothing left to write."""
        return not self._opens and not self._others and not self._checkpoints

    def put(self, operation: Operation) -> None:
        """Queue an operation for a round."""
        if isinstance(operation, Open) and operation.number is None:
            self._opens.append(operation)
        else:
            has_line = isinstance(operation, TrackedOperation) and operation.number is not None
            due_s = asyncio.get_running_loop().time() + (ROWS_PAUSE_S if has_line else self._settle_pause_s)
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
        """Make everything that waits now due at once."""
        self._others_due_s = 0.0
        self._wake.set()

    def close(self) -> None:
        """From now on, let nothing wait for others."""
        self.closing = True
        self._wake.set()

    def newest_first(self) -> Iterator[Operation]:
        """Yield the waiting operations, the newest first, without opens whose callers wait."""
        return reversed(self._others)

    async def wait_until_due(self) -> None:
        """Return when there is something to write."""
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
        """Return what the next round writes: opens, or the rest, in turns while both wait, or both when many wait.

        An abandoned open is dropped here, so that its void, which may come first, finds nothing to do.
        """
        others_wait = self._others_are_due() or self._checkpoints_are_due()
        together = len(self) >= TOGETHER_FROM
        self._opens_alone = bool(self._opens) and not (others_wait and (together or self._opens_alone))
        operations: list[Operation] = []
        if self._opens_alone or together:
            operations += [operation for operation in _first(self._opens) if not operation.abandoned]
        if not self._opens_alone:
            operations += _first(self._others)
        return operations, self._take_checkpoints()

    def take_all(self) -> list[Operation]:
        """Remove and return every waiting operation."""
        operations = [*self._opens, *self._others]
        self._opens.clear()
        self._others.clear()
        return operations

    def put_back(self, operations: Sequence[Operation], checkpoints: Mapping[str, Usage]) -> None:
        """Queue again what a failed round had taken, before all others and in the same order."""
        self._others.extendleft(reversed(operations))
        settling = {operation.request_id for operation in self._others if isinstance(operation, Settle)}
        for request_id, usage in checkpoints.items():
            if request_id not in settling:
                self._checkpoints.setdefault(request_id, usage)

    def _pause_s(self) -> float | None:
        """Return how many seconds until something is due, if no open comes; None when nothing waits."""
        pauses_s: list[float] = []
        if self._others:
            pauses_s.append(self._others_due_s - asyncio.get_running_loop().time())
        if self._checkpoints:
            pauses_s.append(self._checkpoints_due_s - self._clock.monotonic_s())
        return min(pauses_s, default=None)

    def _others_are_due(self) -> bool:
        late = self.closing or asyncio.get_running_loop().time() >= self._others_due_s
        return bool(self._others) and late

    def _checkpoints_are_due(self) -> bool:
        return bool(self._checkpoints) and (self.closing or self._clock.monotonic_s() >= self._checkpoints_due_s)

    def _take_checkpoints(self) -> dict[str, Usage]:
        if self._opens_alone or not self._checkpoints_are_due():
            return {}
        self._checkpoints_due_s = self._clock.monotonic_s() + self._checkpoint_interval_s
        without_rows = {operation.entry.request_id for operation in self._others if isinstance(operation, Open)}
        taken = {name: usage for name, usage in sorted(self._checkpoints.items()) if name not in without_rows}
        self._checkpoints = {name: usage for name, usage in self._checkpoints.items() if name in without_rows}
        return taken


def _first(waiting: deque[T]) -> list[T]:
    """Take the operations of one round."""
    return [waiting.popleft() for _ in range(min(len(waiting), ROUND_OPERATIONS_MAX))]
