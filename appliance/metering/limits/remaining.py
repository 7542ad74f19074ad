"""When running requests will end, guessed from how far they are: for those who are told to come back then. Takes nothing.

A guess and no promise: nobody knows how long an answer will be. What is told as exact elsewhere never depends on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from appliance.metering.limits.allowances import Allowance, Hold
from appliance.metering.limits.quotas import LimitDecision, Moment
from appliance.metering.limits.reservations import Reservation

WAIT_S_MIN = 1.0
WAIT_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Ending:
    """When a running request will probably end, from now, and the share of what it holds that it will then give back."""

    wait_s: float
    share: float
    hold: Hold


class Endings:
    """Predicts the ends of `live` requests. Looks at all of them, so ask it only when a refusal is told to somebody."""

    def __init__(self, live: Collection[Reservation], moment: Callable[[], Moment]) -> None:
        self._live = live
        self._moment = moment

    def estimate(self, allowance: Allowance, decision: LimitDecision) -> LimitDecision:
        """Return `decision` with the time after which the running requests in its way have probably given back enough."""
        if not decision.estimated:
            return decision
        endings = self._of(allowance)
        wait_s = _concurrent(endings, decision) if decision.kind == "concurrency" else _held(endings, decision)
        return dataclasses.replace(decision, wait_s=float(math.ceil(min(max(wait_s, WAIT_S_MIN), WAIT_S_MAX))))

    def _of(self, allowance: Allowance) -> Sequence[Ending]:
        """Return the ends of those who hold something of `allowance`, the first one first.

        Whoever has no pace of his own yet is taken to go at the pace that is usual now; where there is none, nothing is known
        and he may end at once.
        """
        now_s = self._moment().monotonic_s
        running = [(each, hold) for each in self._live for hold in each.holds if hold.allowance is allowance]
        paces = {each: each.token_s(now_s) for each, _hold in running}
        usual_s = median([pace for pace in paces.values() if pace is not None] or [0.0])
        endings = []
        for each, hold in running:
            pace_s, left = paces[each], each.tokens_left
            share = 1 - (each.work.prompt_tokens + each.output_tokens + left) / max(each.need.worst.tokens, 1)
            endings.append(Ending(left * (usual_s if pace_s is None else pace_s), max(share, 0.0), hold))
        return sorted(endings, key=lambda ending: ending.wait_s)


def _concurrent(endings: Sequence[Ending], decision: LimitDecision) -> float:
    """Return when so many have ended that there is a place, also for those who wait before."""
    ends = [ending.wait_s for ending in endings if not ending.hold.overlooked]
    missing = decision.ahead + decision.need - decision.level
    return ends[min(max(missing, 1), len(ends)) - 1] if ends else 0.0


def _held(endings: Sequence[Ending], decision: LimitDecision) -> float:
    """Return when those who have ended have given back what is missing; the last end if all of them together do not."""
    missing, wait_s = decision.need - decision.level, 0.0
    for ending in endings:
        held = ending.hold.held.tokens if decision.kind == "tokens_per_day" else ending.hold.held.cost_picos
        wait_s, missing = ending.wait_s, missing - int(held * ending.share)
        if missing <= 0:
            break
    return wait_s
