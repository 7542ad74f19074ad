"""The running requests, and an estimate of when they will end, from their progress: the `retry-after` of refused requests.

The length of an answer is unknown in advance, so this is an estimate, and no wait reported as exact depends on it.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from appliance.metering.limits.allowances import Allowance, Hold
from appliance.metering.limits.decisions import LimitDecision
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.windows import Moment

WAIT_S_MIN = 1.0
WAIT_S_MAX = 60.0
ESTIMATE_TTL_S = 0.25
"""All refusals within this time share an estimate, less the time elapsed, so that flooding a limit causes no extra work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEstimate:
    """When the requests that hold something of an allowance will probably end, in seconds after `made_s`, soonest first, and
    how much they will have released in total by then. `place_waits_s` are the ends of those that take a place among the running
    requests: all but those that the allowance refused in shadow mode."""

    made_s: float
    place_waits_s: Sequence[float]
    waits_s: Sequence[float]
    tokens: Sequence[int]
    cost_picos: Sequence[int]

    def wait_s(self, decision: LimitDecision) -> float:
        """Return the time until the refused request has room, or until the last end if even that does not suffice."""
        missing = decision.need - decision.level
        if decision.kind == "concurrency":  # the waiters ahead need a slot too
            waits_s, index = self.place_waits_s, max(missing + decision.ahead, 1) - 1
        else:
            released = self.tokens if decision.kind == "tokens_per_day" else self.cost_picos
            waits_s, index = self.waits_s, bisect_left(released, missing)
        return waits_s[min(index, len(waits_s) - 1)] if waits_s else 0.0


class RunningRequests:
    """The running requests by the allowances in which they hold something. Predicts when they end."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._running: set[Reservation] = set()
        self._holders: dict[Allowance, dict[Reservation, Hold]] = {}
        self._estimates: dict[Allowance, ReleaseEstimate] = {}

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._running)

    def add(self, reservation: Reservation) -> None:
        """Add an admitted request."""
        self._running.add(reservation)
        for hold in reservation.holds:
            self._index(reservation, hold)

    def add_hold(self, reservation: Reservation, hold: Hold) -> None:
        """Add a running request's hold in one more allowance."""
        reservation.holds.append(hold)
        self._index(reservation, hold)

    def discard(self, reservation: Reservation) -> None:
        """Remove a request that has ended."""
        self._running.discard(reservation)
        for hold in reservation.holds:
            self._holders.get(hold.allowance, {}).pop(reservation, None)

    def estimate(self, allowance: Allowance, decision: LimitDecision) -> LimitDecision:
        """Return `decision` with the time after which the running requests in its way have probably released enough."""
        if not decision.estimated:
            return decision
        at = self._moment()
        releases = self._estimates.get(allowance)
        if releases is None or at.monotonic_s - releases.made_s >= ESTIMATE_TTL_S:
            releases = self._estimates[allowance] = _estimate_releases(allowance, self._holders.get(allowance, {}), at)
        wait_s = releases.wait_s(decision) - (at.monotonic_s - releases.made_s)
        return dataclasses.replace(decision, wait_s=float(math.ceil(min(max(wait_s, WAIT_S_MIN), WAIT_S_MAX))))

    def _index(self, reservation: Reservation, hold: Hold) -> None:
        self._holders.setdefault(hold.allowance, {})[reservation] = hold


def _estimate_releases(allowance: Allowance, holders: Mapping[Reservation, Hold], at: Moment) -> ReleaseEstimate:
    """Estimate when these holders of an allowance release what they hold. Those that it refused in shadow mode are in the way
    of a day or budget only once it is enforced.

    A request whose pace is not known yet is assumed to have the median pace of the others; without one, it may end at once.
    """
    paces = {reservation: reservation.seconds_per_token(at.monotonic_s) for reservation in holders}
    median_s = median([pace_s for pace_s in paces.values() if pace_s is not None] or [0.0])
    ends: list[tuple[float, int, int]] = []
    place_waits_s: list[float] = []
    for reservation, hold in holders.items():
        if hold.is_shadow_refused and not allowance.is_enforced:
            continue
        pace_s, left = paces[reservation], reservation.tokens_left
        used = reservation.request.prompt_tokens + reservation.output_tokens + left
        share = max(1 - used / max(reservation.need.worst.tokens, 1), 0.0)
        held = allowance.held_by(hold, at)
        released = int(held.tokens * share), int(held.cost_picos * share)
        wait_s = left * (median_s if pace_s is None else pace_s)
        ends.append((wait_s, *released))
        if not hold.is_shadow_refused:
            place_waits_s.append(wait_s)
    ends.sort()
    return ReleaseEstimate(
        made_s=at.monotonic_s,
        place_waits_s=sorted(place_waits_s),
        waits_s=[wait_s for wait_s, _tokens, _cost in ends],
        tokens=list(accumulate(tokens for _wait_s, tokens, _cost in ends)),
        cost_picos=list(accumulate(cost for _wait_s, _tokens, cost in ends)),
    )
