"""How long a request has waited for room in its limits, by the limit that held it up. Values only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from appliance.metering.limits.decisions import LimitDecision


class LimitWait:
    """The wait of one request. `waited_s` is the time in seconds until its last attempt, by the name of the limit; `held_up_by`
    the limit that holds it up since then: of those that refused that attempt, the one with the longest wait. None while it does
    not wait. `arrival` is its place in the queues: a number in the order in which requests began to wait, None before.
    `deadline_s` is when the wait ends by the monotonic clock, infinite before it began."""

    def __init__(self) -> None:
        self.arrival: int | None = None
        self.deadline_s = math.inf
        self.waited_s: dict[str, float] = {}
        self.held_up_by: str | None = None
        self._tried_s = 0.0

    def note_attempt(self, refusing: Sequence[LimitDecision], now_s: float) -> None:
        """Note an attempt to admit it, and the decisions that refused it; none if it was admitted."""
        if self.held_up_by is not None:
            self.waited_s[self.held_up_by] = self.waited_s.get(self.held_up_by, 0.0) + now_s - self._tried_s
        longest = max(refusing, key=lambda decision: decision.wait_s or 0.0, default=None)
        self.held_up_by, self._tried_s = None if longest is None else longest.name, now_s

    def total_s(self, now_s: float) -> float:
        """Return how long it has waited in all."""
        return sum(self.waited_s.values()) + (0.0 if self.held_up_by is None else now_s - self._tried_s)

    @property
    def awaited_limit(self) -> str | None:
        """Return the limit that holds it up, else the one that it waited for longest; None if it has not waited."""
        return self.held_up_by or max(self.waited_s, key=self.waited_s.__getitem__, default=None)
