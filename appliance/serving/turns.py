"""A few things at a time, with tenants taking turns: a tenant that asks for much waits behind itself."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from appliance.base.errors import Overloaded


class Turns:
    """Turns for `at_a_time` holders. Where `waiting_max` wait already, the last of the longest line is refused in favour of the
    newcomer, unless the newcomer's line would then be the longer one: then the newcomer is refused."""

    def __init__(self, at_a_time: int, waiting_max: int, *, refusal: str, retry_after_s: float) -> None:
        """`refusal` is what those are told who may not wait."""
        self._free = at_a_time
        self._waiting_max = waiting_max
        self._refusal = refusal
        self._retry_after_s = retry_after_s
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # whose turn is next comes first

    async def take(self, tenant_id: str) -> None:
        """Return when it is the caller's turn, who then owes one `give_back`. Raises Overloaded."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line_up(tenant_id, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant_id, turn)
            elif turn.exception() is None:  # it came just now
                self.give_back()
            raise

    def give_back(self) -> None:
        """End a turn: the next one begins."""
        while self._lines:
            tenant_id, line = next(iter(self._lines.items()))
            turn = line.popleft()
            if line:
                self._lines.move_to_end(tenant_id)
            else:
                del self._lines[tenant_id]
            if not turn.done():  # else whoever waited was cancelled, and has not come to leave the line
                turn.set_result(None)
                return
        self._free += 1

    def _line_up(self, tenant_id: str, turn: asyncio.Future[None]) -> None:
        if sum(map(len, self._lines.values())) >= self._waiting_max:
            longest = max(self._lines.values(), key=len, default=deque())
            if len(longest) < len(self._lines.get(tenant_id, ())) + 2:
                raise self._overloaded()
            last = longest.pop()
            if not last.done():
                last.set_exception(self._overloaded())
        self._lines.setdefault(tenant_id, deque()).append(turn)

    def _leave(self, tenant_id: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(tenant_id, deque())
        if turn in line:
            line.remove(turn)
            if not line:
                del self._lines[tenant_id]

    def _overloaded(self) -> Overloaded:
        return Overloaded(self._refusal, retry_after_s=self._retry_after_s)
