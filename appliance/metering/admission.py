"""Whether a request may begin: all limits of its tenant, key and model at once, all or nothing. Knows no engine and no HTTP.

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
from appliance.metering.allowances import Allowance, Amount, Hold, Need
from appliance.metering.calendar import BillingCalendar
from appliance.metering.expectations import OUTPUTS_KEPT, expected_output
from appliance.metering.limit_levels import LevelRow, SavedLevel
from appliance.metering.prices import Price
from appliance.metering.quotas import ALL_TENANTS, LimitDecision, Moment, Owner
from appliance.metering.refusals import refusal
from appliance.metering.reservations import Reservation, Work
from appliance.metering.sums import SumsReader
from appliance.metering.token_bucket import TokenBucket
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """One limit per minute as headers tell it: `remaining` now, and after how many seconds it is full again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitState:
    """The tightest of the limits per minute that hold for a request; None where there is none."""

    requests: RateLimit | None
    tokens: RateLimit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as admission sees it.

    `max_output_tokens` is what was asked for; `output_room` is how long the answer may get, which differs when nothing was
    asked for: then it is the rest of the model's context. Both are of one answer, of which there are `answers`.
    """

    principal: Principal
    model: str
    prompt_tokens: int
    max_output_tokens: int | None
    price: Price | None
    output_room: int | None = None
    answers: int = 1
    batch: bool = False
    policy: ModelPolicy | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or (self.max_output_tokens or 0) < 0 or self.answers < 1:
            raise ValueError("token counts must not be negative, and there is at least one answer")


@dataclass(frozen=True, slots=True)
class _Rule:
    """Limits that hold for a request, whose they are, and how they are meant."""

    owner: Owner
    limits: Limits
    mode: str
    currency: str


class Admission:
    """Guards the limits of every tenant, key and model. Belongs to one event loop. A tenant without a currency of its own has
    its budget in `currency`, as have models."""

    def __init__(
        self, clock: Clock, sums: SumsReader, *, currency: str = "EUR", calendar: BillingCalendar | None = None
    ) -> None:
        self._clock = clock
        self._currency = currency
        self._calendar = calendar or BillingCalendar()
        self._sums = sums
        self._allowances: dict[Owner, Allowance] = {}
        self._outputs: dict[tuple[str, str], deque[int]] = {}
        self._live: set[Reservation] = set()
        self._unsaved: set[Allowance] = set()
        self._first_use = asyncio.Lock()
        self._today: Moment | None = None

    async def admit(self, asked: Asked) -> Reservation:
        """Return what was reserved for the request, which must be settled or voided once.

        Raises RequestExceedsLimit, BudgetExceeded or RateLimitExceeded; then nothing was taken. After `retry_after_s` of the
        latter every limit that refused has room again, if nobody else takes it.
        """
        allowances = await self._allowances_of(asked)
        # No await from here on.
        answer = self._try(asked, allowances)
        if isinstance(answer, Reservation):
            return answer
        raise refusal(answer)

    async def preview(self, asked: Asked) -> list[LimitDecision]:
        """Return what every limit would say now, allowing ones too. Takes nothing."""
        allowances = await self._allowances_of(asked)
        at = self._moment()
        needs = self._needs(asked, allowances)
        return [decision for each, need in zip(allowances, needs, strict=True) for decision in each.decisions(need, at)]

    def snapshot(self, principal: Principal, model: str | None = None, policy: ModelPolicy | None = None) -> RateLimitState:
        """Return the state for the x-ratelimit headers: of limits that refuse. Takes nothing and reads no database."""
        at = self._moment()
        rules = [rule for rule in self._rules(principal, model, policy) if rule.mode == "enforce"]
        return RateLimitState(
            requests=_tightest([self._rate_limit(rule, "requests", at) for rule in rules]),
            tokens=_tightest([self._rate_limit(rule, "tokens", at) for rule in rules]),
        )

    def running(self, owner_id: str) -> int:
        """Return how many requests of the tenant or key hold a reservation."""
        found = [self._allowances.get(Owner(scope, owner_id)) for scope in ("tenant", "key")]
        return sum(allowance.running for allowance in found if allowance is not None)

    def unsaved_levels(self) -> list[LevelRow]:
        """Return the levels of buckets that changed since the last call."""
        changed, self._unsaved = self._unsaved, set()
        at = self._moment()
        return [
            LevelRow(
                owner=allowance.owner,
                kind=kind,
                level=SavedLevel(capacity=bucket.capacity, units=bucket.units(at.monotonic_s), saved_at=at.now),
            )
            for allowance in changed
            for kind, bucket in allowance.buckets.items()
        ]

    def save_again(self, rows: Sequence[LevelRow]) -> None:
        """Hear that these levels could not be saved."""
        self._unsaved |= {self._allowances[row.owner] for row in rows}

    async def _allowances_of(self, asked: Asked) -> list[Allowance]:
        """Return the allowances that hold for a request, as the limits are now. New ones read the ledger once."""
        rules = self._rules(asked.principal, asked.model, asked.policy)
        for rule in rules:
            if rule.owner not in self._allowances:
                await self._meet(rule)
        at = self._moment()
        allowances = [self._allowances[rule.owner] for rule in rules]
        for rule, allowance in zip(rules, allowances, strict=True):
            allowance.currency = rule.currency
            allowance.configure(rule.limits, rule.mode, at)
        return allowances

    def _rules(self, principal: Principal, model: str | None, policy: ModelPolicy | None) -> list[_Rule]:
        tenant, key = principal.tenant, principal.key
        currency = tenant.currency or self._currency
        rules = [
            _Rule(Owner("tenant", tenant.id), tenant.limits, tenant.limit_mode, currency),
            _Rule(Owner("key", key.id), key.limits, key.limit_mode, currency),
        ]
        if model is None:
            return rules
        if policy is not None:
            rules.append(_Rule(Owner("model", ALL_TENANTS, model), policy.limits, policy.limit_mode, self._currency))
        if model in tenant.model_limits:
            rules.append(_Rule(Owner("tenant", tenant.id, model), tenant.model_limits[model], tenant.limit_mode, currency))
        if model in key.model_limits:
            rules.append(_Rule(Owner("key", key.id, model), key.model_limits[model], key.limit_mode, currency))
        return rules

    async def _meet(self, rule: _Rule) -> None:
        """Make an allowance at its first use. What runs already, from before it had limits, counts with it from now on."""
        async with self._first_use:
            if rule.owner in self._allowances:
                return
            at = self._moment()
            allowance = Allowance(rule.owner, rule.currency, at)
            for reservation in self._live:
                if _is_of(rule.owner, reservation.work):
                    reservation.holds.append(allowance.take(reservation.need, at, buckets=False))
            allowance.remember(await self._sums.read(rule.owner, rule.currency, at), at)
            self._allowances[rule.owner] = allowance

    def _try(self, asked: Asked, allowances: Sequence[Allowance]) -> Reservation | list[LimitDecision]:
        """Reserve in every allowance, or in none and return the refusals."""
        at = self._moment()
        needs = self._needs(asked, allowances)
        refused: list[LimitDecision] = []
        overlooked: dict[Allowance, list[LimitDecision]] = {}
        for allowance, need in zip(allowances, needs, strict=True):
            refusals = allowance.refusals(need, at)
            if refusals and not allowance.enforces:
                overlooked[allowance] = refusals
            else:
                refused += refusals
        if refused:
            return refused
        holds = [
            allowance.overlook(at) if allowance in overlooked else allowance.take(need, at)
            for allowance, need in zip(allowances, needs, strict=True)
        ]
        return self._reserve(asked, needs[0], holds, [refusal for each in overlooked.values() for refusal in each])

    def _reserve(self, asked: Asked, need: Need, holds: Sequence[Hold], overlooked: Sequence[LimitDecision]) -> Reservation:
        reservation = Reservation(
            self._work(asked),
            need,
            holds,
            moment=self._moment,
            on_end=self._ended,
            overlooked=overlooked,
            cut_at_budget=asked.principal.tenant.cut_at_budget,
        )
        self._live.add(reservation)
        self._unsaved.update(hold.allowance for hold in holds)
        return reservation

    def _ended(self, reservation: Reservation, output_tokens: int) -> None:
        self._live.discard(reservation)
        self._unsaved.update(hold.allowance for hold in reservation.holds)
        if output_tokens:
            work = reservation.work
            self._outputs.setdefault((work.key_id, work.model), deque(maxlen=OUTPUTS_KEPT)).append(output_tokens)

    def _needs(self, asked: Asked, allowances: Sequence[Allowance]) -> list[Need]:
        """Return what is asked of each allowance. It differs where a guess is cut to the room that limits leave: limits in
        shadow mode cut it for themselves alone."""
        enforced = [allowance.limits for allowance in allowances if allowance.enforces]
        common = self._need(asked, _room(enforced))
        return [
            common if allowance.enforces else self._need(asked, _room([*enforced, allowance.limits]))
            for allowance in allowances
        ]

    def _need(self, asked: Asked, room: float) -> Need:
        outputs = self._outputs.get((asked.principal.key.id, asked.model), ())
        each = expected_output(outputs, asked.max_output_tokens, room=(room - asked.prompt_tokens) / asked.answers)
        expected = asked.answers * each
        longest = asked.answers * max(each, asked.max_output_tokens or 0, asked.output_room or 0)
        work = self._work(asked)
        return Need(
            expected=Amount(tokens=asked.prompt_tokens + expected, cost_picos=work.cost(0, expected)),
            worst=Amount(tokens=asked.prompt_tokens + longest, cost_picos=work.cost(0, longest)),
            currency=work.currency,
        )

    def _work(self, asked: Asked) -> Work:
        tenant, price = asked.principal.tenant, asked.price
        return Work(
            tenant_id=tenant.id,
            key_id=asked.principal.key.id,
            model=asked.model,
            prompt_tokens=asked.prompt_tokens,
            answers=asked.answers,
            rate=None if price is None else price.rate(tenant.tier, batch=asked.batch),
            currency=None if price is None else price.currency,
        )

    def _rate_limit(self, rule: _Rule, kind: str, at: Moment) -> RateLimit | None:
        capacity = rule.limits.tokens_per_minute if kind == "tokens" else rule.limits.requests_per_minute
        if capacity is None:
            return None
        allowance = self._allowances.get(rule.owner)
        if allowance is not None:
            allowance.configure(rule.limits, rule.mode, at)
        bucket: TokenBucket | None = getattr(allowance, kind, None)
        if bucket is None:
            return RateLimit(limit=capacity, remaining=capacity, reset_s=0.0)
        remaining = max(bucket.level(at.monotonic_s), 0)
        return RateLimit(limit=capacity, remaining=remaining, reset_s=bucket.wait_s(capacity, at.monotonic_s) or 0.0)

    def _moment(self) -> Moment:
        """Return both readings of the clock. The calendar is asked once a day."""
        now, today = self._clock.now(), self._today
        if today is None or not today.now <= now < today.next_day_start:
            today = self._today = Moment(
                self._calendar.day_start(now), 0.0, self._calendar.day_of(now), self._calendar.next_day_start(now)
            )
        return Moment(now, self._clock.monotonic_s(), today.day, today.next_day_start)


def _is_of(owner: Owner, work: Work) -> bool:
    """Return whether the limits of `owner` hold for `work`."""
    whose = {"tenant": work.tenant_id, "key": work.key_id, "model": ALL_TENANTS}
    return whose[owner.scope] == owner.id and owner.model in (None, work.model)


def _room(limits: Sequence[Limits]) -> float:
    """Return the smallest limit in tokens."""
    sizes = [size for each in limits for size in (each.tokens_per_minute, each.tokens_per_day) if size is not None]
    return min(sizes, default=math.inf)


def _tightest(limits: Sequence[RateLimit | None]) -> RateLimit | None:
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.remaining, default=None)
