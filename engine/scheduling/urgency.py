"""Lateness: which waiting requests can no longer have their first token in time. Knows no torch.

In order of arrival every request waits for all before it, so once a burst has made the wait longer than the target, all
requests miss it until the burst is worked off. Here a request that will miss it anyway steps aside, once, and the others make
it. This is first come, first served while that serves all in time, and otherwise few late requests instead of many. It is the
rule of Moore (Management Science 1968) for the fewest late jobs, decided for one request at a time when it is looked at.

Late requests go on whenever no other request of their tenant can use the step. Once they have waited for `AGED_TARGETS`
targets, they also go first in one step of `AGED_EVERY`, so that they never starve. The class `batch` has no target: it keeps
the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.protocol import Priority
from engine.scheduling.costs import TokenCosts
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request

FIRST_TOKEN_TARGET_S = 1.0
"""From arrival to first token."""

PREFILL_STRETCH = 3
"""A prompt shares its steps with decodes and with other prompts: it takes about this many times as long as alone."""

AGED_TARGETS = 20
AGED_EVERY = 8


class Urgency:
    """Decides which requests are late, in O(log blocks) for each."""

    def __init__(self, clock: Callable[[], float], costs: TokenCosts, prefix_cache: PrefixCache) -> None:
        self._clock = clock
        self._costs = costs
        self._prefix_cache = prefix_cache

    def is_late(self, request: Request) -> bool:
        """Whether it will miss its first-token target. A late request stays late; one that has had a token is not late."""
        if request.is_late or request.priority is Priority.BATCH:
            return request.is_late
        if request.num_preemptions or request.num_output_tokens:
            return False
        left_s = FIRST_TOKEN_TARGET_S - (self._clock() - request.arrived_s)
        start = request.num_computed_tokens
        if self._prefill_s(request, start) > left_s:
            if not start:
                start = self._prefix_cache.match_len(request) * self._prefix_cache.block_size
            request.is_late = self._prefill_s(request, start) > left_s
        return request.is_late

    def _prefill_s(self, request: Request, start: int) -> float:
        return PREFILL_STRETCH * self._costs.prefill_ns(start, request.num_tokens - start) / 1e9

    def is_aged(self, request: Request) -> bool:
        """Whether a late request has waited so long that it must go on."""
        return self._clock() - request.arrived_s > AGED_TARGETS * FIRST_TOKEN_TARGET_S
