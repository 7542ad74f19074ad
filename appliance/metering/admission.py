"""Whether a request may begin: all limits of its tenant and key at once, all or nothing. Knows no engine and no HTTP.

Between the check and the taking there is no `await`, so in one event loop nothing can come between. What is reserved is the
prompt, which is known exactly, and the output that is to be expected; the expectation never changes the request itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.base.clock import Clock
from appliance.base.errors import BudgetExceeded, RateLimitExceeded, Refused, RequestExceedsLimit
from appliance.base.money import PICOS_PER_MICRO
from appliance.metering.allowances import Allowance, Amount, Hold, Moment, Need
from appliance.metering.prices import Price
from appliance.metering.quotas import LimitDecision, LimitScope, TokenBucket
from appliance.metering.sums import SumsReader
from appliance.tenancy.principals import Limits, Principal

EXPECTED_OUTPUT_TOKENS = 256
"""Output expected of a key of which fewer than OUTPUTS_MIN requests with this model are known, and the least that is expected
of any: a key cannot make itself cheap by a row of short answers before a burst of long ones."""
OUTPUTS_MIN = 20
OUTPUTS_KEPT = 100

_LIMIT_NAMES = {
    "tokens": "tokens per minute",
    "requests": "requests per minute",
    "concurrency": "concurrent requests",
    "tokens_per_day": "tokens per day",
    "budget": "budget of this month",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """One limit per minute as headers tell it: `remaining` now, and after how many seconds it is full again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitState:
    """The tighter of tenant's and key's limits per minute; None where neither has one."""

    requests: RateLimit | None
    tokens: RateLimit | None


class Admission:
    """Guards the limits of every tenant and key. Belongs to one event loop. Budgets are in `currency`; so are the `sums`."""

    def __init__(self, clock: Clock, sums: SumsReader, *, currency: str = "EUR") -> None:
        self._clock = clock
        self._currency = currency
        self._sums = sums
        self._allowances: dict[str, Allowance] = {}
        self._outputs: dict[tuple[str, str], deque[int]] = {}
        self._first_use = asyncio.Lock()

    async def admit(
        self,
        principal: Principal,
        *,
        model: str,
        prompt_tokens: int,
        max_output_tokens: int | None,
        price: Price | None,
        output_room: int | None = None,
        answers: int = 1,
    ) -> Reservation:
        """Return what was reserved for the request, which must be settled or voided once.

        `max_output_tokens` is what was asked for; `output_room` is how long the answer may get, which differs when nothing
        was asked for: then it is the rest of the model's context. Both are of one answer, of which there are `answers`.

        Raises RequestExceedsLimit, BudgetExceeded or RateLimitExceeded; then nothing was taken. After `retry_after_s` of the
        latter every limit that refused has room again, if nobody else takes it.
        """
        if prompt_tokens < 0 or (max_output_tokens is not None and max_output_tokens < 0) or answers < 1:
            raise ValueError("token counts must not be negative, and there is at least one answer")
        tenant = await self._allowance("tenant", principal.tenant.id)
        key = await self._allowance("key", principal.key.id)
        if price is not None and price.currency != self._currency:
            price = None  # from before the currency was set: billed as it says, and in no sum of ours
        # No await from here on.
        at = self._moment()
        tenant.configure(principal.tenant.limits, at)
        key.configure(principal.key.limits, at)
        outputs = self._outputs.setdefault((principal.key.id, model), deque(maxlen=OUTPUTS_KEPT))
        room = (_room(principal) - prompt_tokens) / answers
        each = expected_output(outputs, max_output_tokens, room=room)
        expected, longest = answers * each, answers * max(each, max_output_tokens or 0, output_room or 0)
        need = Need(
            expected=Amount(tokens=prompt_tokens + expected, cost_picos=_cost(price, prompt_tokens, 0, expected)),
            worst=Amount(tokens=prompt_tokens + longest, cost_picos=_cost(price, prompt_tokens, 0, longest)),
        )
        refusals = tenant.refusals(need, at) + key.refusals(need, at)
        if refusals:
            raise refusal(refusals)
        holds = (tenant.take(need, at), key.take(need, at))
        return Reservation(self._clock, holds, prompt_tokens, need.expected.tokens, price, outputs, answers)

    def snapshot(self, principal: Principal) -> RateLimitState:
        """Return the state for the x-ratelimit headers. Takes nothing and reads no database."""
        at = self._moment()
        scopes = [(principal.tenant.id, principal.tenant.limits), (principal.key.id, principal.key.limits)]
        return RateLimitState(
            requests=_tightest([self._rate_limit(owner, "requests", limits, at) for owner, limits in scopes]),
            tokens=_tightest([self._rate_limit(owner, "tokens", limits, at) for owner, limits in scopes]),
        )

    def running(self, owner_id: str) -> int:
        """Return how many requests of the tenant or key hold a reservation."""
        allowance = self._allowances.get(owner_id)
        return 0 if allowance is None else allowance.running

    async def _allowance(self, scope: LimitScope, owner_id: str) -> Allowance:
        """Return the allowance of a tenant or key. At its first use today's and this month's sums are read."""
        if owner_id not in self._allowances:
            async with self._first_use:
                if owner_id not in self._allowances:
                    at = self._moment()
                    sums = await self._sums.read(scope, owner_id, at.now)
                    self._allowances[owner_id] = Allowance(scope, sums, at)
        return self._allowances[owner_id]

    def _rate_limit(self, owner_id: str, kind: str, limits: Limits, at: Moment) -> RateLimit | None:
        capacity = limits.tokens_per_minute if kind == "tokens" else limits.requests_per_minute
        if capacity is None:
            return None
        allowance = self._allowances.get(owner_id)
        if allowance is not None:
            allowance.configure(limits, at)
        bucket: TokenBucket | None = getattr(allowance, kind, None)
        if bucket is None:
            return RateLimit(limit=capacity, remaining=capacity, reset_s=0.0)
        remaining = max(bucket.level(at.monotonic_s), 0)
        return RateLimit(limit=capacity, remaining=remaining, reset_s=bucket.wait_s(capacity, at.monotonic_s) or 0.0)

    def _moment(self) -> Moment:
        return Moment(self._clock.now(), self._clock.monotonic_s())


class Reservation:
    """What a request holds until it is settled or voided: exactly one of them, exactly once."""

    def __init__(
        self,
        clock: Clock,
        holds: Sequence[Hold],
        prompt_tokens: int,
        tokens_reserved: int,
        price: Price | None,
        outputs: deque[int],
        answers: int,
    ) -> None:
        self.tokens_reserved = tokens_reserved
        self._clock = clock
        self._holds = holds
        self._prompt_tokens = prompt_tokens
        self._price = price
        self._outputs = outputs
        self._answers = answers
        self._ended = False

    def settle(self, tokens_used: int, *, cached_tokens: int = 0) -> None:
        """Replace the reservation by the tokens that are billed, `cached_tokens` of them at the cached price.

        Raises RuntimeError when the reservation has ended.
        """
        if tokens_used < 0:
            raise ValueError("token counts must not be negative")
        self._end()
        prompt = min(tokens_used, self._prompt_tokens)
        completion = tokens_used - prompt
        cost = _cost(self._price, prompt, min(cached_tokens, prompt), completion)
        used = Amount(tokens=tokens_used, cost_picos=cost)
        for hold in self._holds:
            hold.settle(used, self._clock.monotonic_s())
        if completion:
            self._outputs.append(-(-completion // self._answers))

    def void(self) -> None:
        """Put everything back: the request was not served. Raises RuntimeError when the reservation has ended."""
        self._end()
        for hold in self._holds:
            hold.void(self._clock.monotonic_s())

    def _end(self) -> None:
        if self._ended:
            raise RuntimeError("a reservation ends once")
        self._ended = True


def expected_output(outputs: Sequence[int] | deque[int], max_output_tokens: int | None, room: float) -> int:
    """Return the output to reserve for one answer: what nine in ten of the key's recent ones stayed within, never above the
    asked maximum.

    When nothing was asked for, a guess never makes a request larger than a limit: it is cut to the `room` that the limits leave
    beside the prompt.
    """
    guess = max(percentile_90(outputs), EXPECTED_OUTPUT_TOKENS) if len(outputs) >= OUTPUTS_MIN else EXPECTED_OUTPUT_TOKENS
    if max_output_tokens is not None:
        return min(max_output_tokens, guess)
    return int(max(0, min(guess, room)))


def _room(principal: Principal) -> float:
    """Return the smallest limit in tokens that tenant and key have."""
    limits = (principal.tenant.limits, principal.key.limits)
    sizes = [size for each in limits for size in (each.tokens_per_minute, each.tokens_per_day) if size is not None]
    return min(sizes, default=math.inf)


def percentile_90(values: Sequence[int] | deque[int]) -> int:
    """Return the smallest value that nine in ten of `values` do not pass."""
    ordered = sorted(values)
    return ordered[-(-9 * len(ordered) // 10) - 1]


def refusal(decisions: Sequence[LimitDecision]) -> Refused:
    """Return the error that tells of refusing `decisions`: what never fits before what is spent before what frees with time."""
    never = [decision for decision in decisions if decision.wait_s is None and decision.kind != "budget"]
    if never:
        decision = never[0]
        return RequestExceedsLimit(
            f"the request needs {decision.need} and the {decision.scope}'s limit is {decision.limit} "
            f"{_LIMIT_NAMES[decision.kind]}: it can never be admitted",
            limit_type=_limit_type(decision),
        )
    for decision in decisions:
        if decision.kind == "budget" and decision.wait_s is None:
            return _budget_exceeded(decision)
    longest = max(decisions, key=lambda decision: decision.wait_s or 0.0)
    wait_s = longest.wait_s or 0.0
    if longest.held:
        return RateLimitExceeded(
            f"running requests hold what is left of the {longest.scope}'s {_LIMIT_NAMES[longest.kind]}; "
            f"try again in {wait_s:.3f} s, or ask for fewer max_tokens",
            limit_type=_limit_type(longest),
            retry_after_s=wait_s,
        )
    return RateLimitExceeded(
        f"the {longest.scope}'s limit of {longest.limit} {_LIMIT_NAMES[longest.kind]} is reached: the request needs "
        f"{longest.need}, {max(longest.level, 0)} are left; try again in {wait_s:.3f} s",
        limit_type=_limit_type(longest),
        retry_after_s=wait_s,
    )


def _budget_exceeded(decision: LimitDecision) -> BudgetExceeded:
    limit, left = decision.limit // PICOS_PER_MICRO, decision.level // PICOS_PER_MICRO
    return BudgetExceeded(
        f"the {decision.scope}'s budget of this month ({limit} micro-units) does not cover the request: {max(left, 0)} are left"
    )


def _limit_type(decision: LimitDecision) -> str:
    return "tokens" if decision.kind in ("tokens", "tokens_per_day") else "requests"


def _tightest(limits: Sequence[RateLimit | None]) -> RateLimit | None:
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.remaining, default=None)


def _cost(price: Price | None, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
    if price is None:
        return 0
    return price.cost_picos(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, completion_tokens=completion_tokens)
