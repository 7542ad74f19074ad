"""A semaphore that serves tenants round robin, with a bounded queue: a tenant's burst delays only that tenant."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from appliance.base.errors import Overloaded


class FairSemaphore:
    """Admits `limit` holders at a time. When `waiting_max` callers wait already, the last one of the longest queue is refused
    in favour of the newcomer, unless the newcomer's queue would then be the longer one: then the newcomer is refused."""

    def __init__(self, limit: int, waiting_max: int, *, refusal: str, retry_after_s: float) -> None:
        """`refusal` is the error message for callers that are refused."""
        self._free = limit
        self._waiting_max = waiting_max
        self._refusal = refusal
        self._retry_after_s = retry_after_s
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by tenant; the next to be served first

    async def acquire(self, tenant_id: str) -> None:
        """Wait for the caller's turn; call `release` once afterwards. Raises Overloaded."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enqueue(tenant_id, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(tenant_id, turn)
            elif turn.exception() is None:  # granted just before the cancellation
                self.release()
            raise

    def release(self) -> None:
        """Let the next waiting caller proceed."""
        while self._queues:
            tenant_id, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            if queue:
                self._queues.move_to_end(tenant_id)
            else:
                del self._queues[tenant_id]
            if not turn.done():  # otherwise its caller was cancelled and has not yet removed it
                turn.set_result(None)
                return
        self._free += 1

    def _enqueue(self, tenant_id: str, turn: asyncio.Future[None]) -> None:
        if sum(map(len, self._queues.values())) >= self._waiting_max:
            longest = max(self._queues.values(), key=len, default=deque())
            if len(longest) < len(self._queues.get(tenant_id, ())) + 2:
                raise self._overloaded()
            last = longest.pop()
            if not last.done():
                last.set_exception(self._overloaded())
        self._queues.setdefault(tenant_id, deque()).append(turn)

    def _remove(self, tenant_id: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(tenant_id, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[tenant_id]

    def _overloaded(self) -> Overloaded:
        return Overloaded(self._refusal, retry_after_s=self._retry_after_s)
