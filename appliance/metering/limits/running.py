"""The requests that run, and an estimate of when they will end, from how far they are: refused clients are told to return then.

Nobody knows how long an answer will be, so it is no promise. Nothing that is told as exact depends on it.
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
OUTLOOK_S = 0.25
"""An outlook is used for this long by everyone that is refused, less the time gone by: flooding a limit makes no work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """When the requests that hold something of an allowance will probably end, in seconds after `made_s` and soonest first, and
    how much they will have given back by then, all together."""

    made_s: float
    waits_s: Sequence[float]
    tokens: Sequence[int]
    cost_picos: Sequence[int]

    def wait_s(self, decision: LimitDecision) -> float:
        """Return after how long the refused request has room, or the last end if it has none even then."""
        if not self.waits_s:
            return 0.0
        missing = decision.need - decision.level
        if decision.kind == "concurrency":  # also for those who wait before
            place = max(missing + decision.ahead, 1) - 1
        else:
            place = bisect_left(self.tokens if decision.kind == "tokens_per_day" else self.cost_picos, missing)
        return self.waits_s[min(place, len(self.waits_s) - 1)]


class Running:
    """The requests that run, and of which allowances they hold something. Predicts when they end."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._live: set[Reservation] = set()
        self._holders: dict[Allowance, dict[Reservation, Hold]] = {}
        self._outlooks: dict[Allowance, Outlook] = {}

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._live)

    def add(self, reservation: Reservation) -> None:
        """Add a request that was admitted."""
        self._live.add(reservation)
        for hold in reservation.holds:
            self._note(reservation, hold)

    def hold(self, reservation: Reservation, hold: Hold) -> None:
        """Add what a request that runs holds of one more allowance."""
        reservation.holds.append(hold)
        self._note(reservation, hold)

    def discard(self, reservation: Reservation) -> None:
        """Forget a request that has ended."""
        self._live.discard(reservation)
        for hold in reservation.holds:
            self._holders.get(hold.allowance, {}).pop(reservation, None)

    def estimate(self, allowance: Allowance, decision: LimitDecision) -> LimitDecision:
        """Return `decision` with the time after which the running requests in its way have probably given back enough."""
        if not decision.estimated:
            return decision
        now_s = self._moment().monotonic_s
        outlook = self._outlooks.get(allowance)
        if outlook is None or now_s - outlook.made_s >= OUTLOOK_S:
            outlook = self._outlooks[allowance] = _outlook(self._holders.get(allowance, {}), now_s)
        wait_s = outlook.wait_s(decision) - (now_s - outlook.made_s)
        return dataclasses.replace(decision, wait_s=float(math.ceil(min(max(wait_s, WAIT_S_MIN), WAIT_S_MAX))))

    def _note(self, reservation: Reservation, hold: Hold) -> None:
        if not hold.overlooked:
            self._holders.setdefault(hold.allowance, {})[reservation] = hold


def _outlook(holders: Mapping[Reservation, Hold], now_s: float) -> Outlook:
    """Return the outlook for requests that hold something of an allowance.

    A request that has no pace yet is taken to go at the median pace of the others; if there is none, it may end at once.
    """
    paces = {each: each.token_s(now_s) for each in holders}
    usual_s = median([pace for pace in paces.values() if pace is not None] or [0.0])
    ends: list[tuple[float, int, int]] = []
    for each, hold in holders.items():
        pace_s, left = paces[each], each.tokens_left
        share = max(1 - (each.request.prompt_tokens + each.output_tokens + left) / max(each.need.worst.tokens, 1), 0.0)
        given_back = int(hold.held.tokens * share), int(hold.held.cost_picos * share)
        ends.append((left * (usual_s if pace_s is None else pace_s), *given_back))
    ends.sort()
    return Outlook(
        made_s=now_s,
        waits_s=[wait_s for wait_s, _tokens, _cost in ends],
        tokens=list(accumulate(tokens for _wait_s, tokens, _cost in ends)),
        cost_picos=list(accumulate(cost for _wait_s, _tokens, cost in ends)),
    )
