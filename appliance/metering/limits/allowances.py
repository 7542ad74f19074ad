"""Allowance: what one owner has left of each of its limits, in memory. Nothing here awaits, so check and take are atomic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime

import msgspec

from appliance.base.money import PICOS_PER_MICRO
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.limits.decisions import SHADOW, LimitDecision, LimitKind
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.sums import RECENT, PeriodSums
from appliance.metering.limits.token_bucket import MICROS_PER_S, Take, TokenBucket, ceil_to_ms
from appliance.metering.limits.windows import Moment, Month, Window, Windows
from appliance.tenancy.principals import Limits

RUNNING_RETRY_S = 1.0  # shortest `retry-after` when only running requests are in the way: their end is unknown


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and their cost."""

    tokens: int
    cost_picos: int


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What one request needs: the `expected` amount, and the `worst` case, an answer of the maximum length.

    Buckets per minute reserve the expected tokens: a longer answer becomes a debt, which the refill repays. Nothing repays a
    day's tokens or a month's money, so these reserve the worst case, also if less is left: then they admit nothing until enough
    has been returned. So only the last request that such a limit admitted can exceed it.
    """

    expected: Amount
    worst: Amount
    currency: str | None = None


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """What the waiters ahead of a request will take first: their number and tokens. `wants_window`: one of them waits for a
    daily or monthly limit, and may reserve all that is left of it."""

    requests: int = 0
    tokens: int = 0
    wants_window: bool = False


NOTHING_AHEAD = Ahead()


class Allowance:
    """Buckets, windows and running requests of one owner. A limit of None is not enforced.

    Only costs in `currency` count towards the budget: amounts in different currencies cannot be added.
    """

    def __init__(self, owner: Owner, currency: str, at: Moment) -> None:
        self.owner = owner
        self.currency = currency
        self.running = 0
        self.limits = Limits()
        self.mode = "enforce"
        self.tokens: TokenBucket | None = None
        self.requests: TokenBucket | None = None
        self.buckets: dict[LimitKind, TokenBucket] = {}  # also those of removed limits, which may be set again
        self._windows = Windows(at)
        self._created_s = at.monotonic_s
        self._recent: Sequence[tuple[float, int]] = ()
        self._through_posting = 0

    def restore(self, sums: PeriodSums, at: Moment) -> None:
        """Restore the usage recorded by earlier processes. Called once, before the first request."""
        day, month = self._windows.enter(at)
        day.used += sums.tokens_today
        for currency, cost_picos in {**sums.other_costs_picos, self.currency: sums.cost_month_picos}.items():
            month.window(currency).used += cost_picos
        self._through_posting = sums.through_posting
        self._recent = [(_monotonic_at(moment, at), tokens) for moment, tokens in sums.recent]
        for kind, saved in sums.levels.items():
            bucket = self.buckets[kind] = TokenBucket(saved.capacity, _monotonic_at(saved.saved_at, at), units=saved.units)
            for moment, units in saved.since:
                bucket.charge(units, _monotonic_at(moment, at))

    def correct(self, correction: UsageEvent) -> None:
        """Count a correction in its day and month, unless the restored sums include it. Its minute is over, so no bucket
        changes."""
        if (correction.posting or 0) <= self._through_posting:
            return
        tokens = correction.prompt_tokens + correction.completion_tokens
        self.add_usage(Amount(tokens=tokens, cost_picos=correction.cost_picos), correction.currency, correction.billing_day)

    def add_usage(self, used: Amount, currency: str | None, billing_day: date) -> None:
        """Add usage of `billing_day` to that day and its month, if they are still kept."""
        day, month = self._windows.find(billing_day)
        if day is not None:
            day.used += used.tokens
        if month is not None:
            month.window(currency or self.currency).used += used.cost_picos

    def configure(self, limits: Limits, mode: str, at: Moment) -> None:
        """Apply current limits; earlier usage counts towards them."""
        self.mode = mode
        if limits is self.limits:
            return
        self.tokens = self._bucket_for("tokens", limits.tokens_per_minute, at.monotonic_s, self._recent)
        requests = [(moment_s, 1) for moment_s, _tokens in self._recent]
        self.requests = self._bucket_for("requests", limits.requests_per_minute, at.monotonic_s, requests)
        self.limits = limits

    def in_use(self, at: Moment) -> dict[LimitKind, int]:
        """Return how much of each limit per minute that was ever set is in use, debts included, and how many requests run."""
        buckets = {kind: bucket.capacity - bucket.level(at.monotonic_s) for kind, bucket in self.buckets.items()}
        return {**buckets, "concurrency": self.running}

    @property
    def is_enforced(self) -> bool:
        """Return whether refusals are enforced: not in shadow mode."""
        return self.mode != SHADOW

    def enter(self, at: Moment) -> None:
        """Make the day and month of `at` current."""
        self._windows.enter(at)

    def refusals(self, need: Need, at: Moment, ahead: Ahead = NOTHING_AHEAD) -> list[LimitDecision]:
        """Return the decisions of the limits that refuse `need`. Changes nothing."""
        if ahead is NOTHING_AHEAD and self._clearly_fits(need, at):
            return []
        return [decision for decision in self.decisions(need, at, ahead) if not decision.allowed]

    def _clearly_fits(self, need: Need, at: Moment) -> bool:
        """Return whether certainly no limit refuses `need`: a fast path for almost every request.

        False only means that `decisions` must be evaluated.
        """
        limits, tokens = self.limits, need.expected.tokens
        if limits.concurrent_requests is not None and self.running >= limits.concurrent_requests:
            return False
        if self.requests is not None and self.requests.level(at.monotonic_s) < 1:
            return False
        if self.tokens is not None and self.tokens.level(at.monotonic_s) < tokens:
            return False
        day, month = self._windows.enter(at)
        if limits.tokens_per_day is not None and day.used + day.reserved + tokens > limits.tokens_per_day:
            return False
        budget = self._budget_picos
        if budget is None:
            return True
        costs = month.window(self.currency)
        return costs.used + costs.reserved + need.expected.cost_picos <= budget

    def decisions(self, need: Need, at: Moment, ahead: Ahead = NOTHING_AHEAD) -> Iterator[LimitDecision]:
        """Yield each limit's decision on `need`, leaving room for the waiters `ahead`."""
        limits = self.limits
        if limits.concurrent_requests is not None:
            yield self._decide_concurrency(limits.concurrent_requests, ahead)
        if self.requests is not None:
            yield self._decide_bucket("requests", self.requests, 1, at, ahead.requests, ahead)
        if self.tokens is not None:
            yield self._decide_bucket("tokens", self.tokens, need.expected.tokens, at, ahead.tokens, ahead)
        day, month = self._windows.enter(at)
        if limits.tokens_per_day is not None:
            tokens, limit = need.expected.tokens, limits.tokens_per_day
            wait_s = None if tokens > limit else _seconds_until(at.next_day_start, at.now)
            yield self._decide_window("tokens_per_day", day, tokens, limit, wait_s, ahead)
        if (budget := self._budget_picos) is not None:
            cost = need.expected.cost_picos if need.currency == self.currency else 0
            yield self._decide_window("budget", month.window(self.currency), cost, budget, None, ahead)

    def take(self, need: Need, at: Moment) -> Hold:
        """Take `need`. Call it only when `refusals` is empty, without an await in between. When it raises, nothing is taken."""
        hold = self._reserve(need, *self._windows.enter(at))
        try:
            if self.tokens is not None:
                hold.tokens = self.tokens.take(need.expected.tokens, at.monotonic_s)
                assert hold.tokens is not None, "take after a refusal"
            if self.requests is not None:
                hold.requests = self.requests.take(1, at.monotonic_s)
                assert hold.requests is not None, "take after a refusal"
        except Exception:
            hold.void(at.monotonic_s)
            raise
        return hold

    def adopt(self, need: Need, day: date) -> Hold:
        """Count a running request that was admitted on `day` without these limits: they were not loaded then, or do not apply
        to it. Takes nothing from the buckets; a day or month that is not kept is ignored."""
        known_day, known_month = self._windows.find(day)
        return self._reserve(need, known_day or Window(day), known_month or Month(day))

    def _reserve(self, need: Need, day: Window, month: Month, *, is_shadow_refused: bool = False) -> Hold:
        costs = month.window(need.currency or self.currency)
        day.reserved += need.worst.tokens
        costs.reserved += need.worst.cost_picos
        if is_shadow_refused:
            day.shadow_reserved += need.worst.tokens
            costs.shadow_reserved += need.worst.cost_picos
        else:
            self.running += 1
        return Hold(allowance=self, held=need.worst, day=day, costs=costs, is_shadow_refused=is_shadow_refused)

    def take_in_shadow(self, need: Need, at: Moment) -> Hold:
        """Take `need` for a request that these limits would have refused outside shadow mode: nothing from the buckets."""
        return self._reserve(need, *self._windows.enter(at), is_shadow_refused=True)

    def held_by(self, hold: Hold, at: Moment) -> Amount:
        """Return what a request has reserved of the current day, and of the current month in the budget's currency."""
        return Amount(
            tokens=hold.held.tokens if hold.day is self._windows.enter(at)[0] else 0,
            cost_picos=hold.held.cost_picos if hold.costs is self._current_costs(at) else 0,
        )

    def is_budget_spent(self, costs: Window, at: Moment) -> bool:
        """Return whether settled and running requests have used up an enforced budget, if `costs` are those of the current
        month in the budget's currency."""
        budget = self._budget_picos
        if budget is None or not self.is_enforced:
            return False
        return costs.used + costs.running_cost >= budget and costs is self._current_costs(at)

    def _current_costs(self, at: Moment) -> Window:
        return self._windows.enter(at)[1].window(self.currency)

    @property
    def _budget_picos(self) -> int | None:
        return None if self.limits.monthly_budget is None else self.limits.monthly_budget * PICOS_PER_MICRO

    def _bucket_for(
        self, kind: LimitKind, capacity: int | None, now_s: float, recent: Sequence[tuple[float, int]]
    ) -> TokenBucket | None:
        """Return the bucket for a limit of `capacity`. A new one is charged with what an earlier process admitted."""
        if capacity is None:
            return None
        bucket = self.buckets.get(kind)
        if bucket is None:
            bucket = self.buckets[kind] = TokenBucket(capacity, self._created_s - RECENT.total_seconds())
            for moment_s, count in recent:
                bucket.charge(count, moment_s)
        bucket.resize(capacity, now_s)
        return bucket

    def _decide_concurrency(self, limit: int, ahead: Ahead) -> LimitDecision:
        allowed = self.running + ahead.requests < limit
        wait_s = None if limit < 1 else RUNNING_RETRY_S
        return self._decision("concurrency", allowed, 1, limit, limit - self.running, wait_s, ahead=ahead)

    def _decide_bucket(
        self, kind: LimitKind, bucket: TokenBucket, need: int, at: Moment, ahead_tokens: int, ahead: Ahead
    ) -> LimitDecision:
        wait_s = bucket.wait_s(need, at.monotonic_s, ahead=ahead_tokens)
        return self._decision(kind, wait_s == 0, need, bucket.capacity, bucket.level(at.monotonic_s), wait_s, ahead=ahead)

    def _decide_window(
        self, kind: LimitKind, window: Window, need: int, limit: int, wait_s: float | None, ahead: Ahead
    ) -> LimitDecision:
        """Decide by what is used and reserved; `wait_s` is for a refusal that the end of running requests cannot lift.

        A request that needs nothing is allowed, even if an earlier one has overdrawn the limit.
        """
        used, reserved = window.used, window.reserved
        if not self.is_enforced:
            used, reserved = used - window.shadow_used, reserved - window.shadow_reserved
        left = limit - used - reserved
        allowed = need == 0 or (need <= left and not ahead.wants_window)
        held = not allowed and used + need <= limit
        return self._decision(kind, allowed, need, limit, left, RUNNING_RETRY_S if held else wait_s, held=held, ahead=ahead)

    def _decision(
        self,
        kind: LimitKind,
        allowed: bool,
        need: int,
        limit: int,
        level: int,
        wait_s: float | None,
        *,
        ahead: Ahead,
        held: bool = False,
    ) -> LimitDecision:
        return LimitDecision(
            allowed=allowed,
            scope=self.owner.scope,
            kind=kind,
            need=need,
            limit=limit,
            level=level,
            wait_s=0.0 if allowed else wait_s,
            model=self.owner.model,
            mode=self.mode,
            held=held,
            ahead=ahead.requests,
            currency=self.currency,
        )


@dataclass(slots=True, kw_only=True)
class Hold:
    """What one request has taken from one allowance; it is returned to the same buckets and windows. `costs` are those of its
    month, in the currency that it is paid in.

    `is_shadow_refused`: limits in shadow mode would have refused it, so it takes nothing from buckets and no place among the
    running requests, and its day and month count it apart, until the limits are enforced.
    """

    allowance: Allowance
    held: Amount
    day: Window
    costs: Window
    tokens: Take | None = None
    requests: Take | None = None
    is_shadow_refused: bool = False
    running_picos: int = 0

    def record_cost(self, cost_picos: int, at: Moment) -> bool:
        """Update the running request's cost so far; return whether it has a cost and the budget is used up."""
        if self.is_shadow_refused:
            return False
        self.costs.running_cost += cost_picos - self.running_picos
        self.running_picos = cost_picos
        return cost_picos > 0 and self.allowance.is_budget_spent(self.costs, at)

    def clear_running_cost(self) -> None:
        """Stop counting the running request's cost so far."""
        self.costs.running_cost -= self.running_picos
        self.running_picos = 0

    def settle(self, used: Amount, monotonic_s: float) -> None:
        """Replace the reserved amount by the used one."""
        self.day.used += used.tokens
        self.costs.used += used.cost_picos
        if self.is_shadow_refused:
            self.day.shadow_used += used.tokens
            self.costs.shadow_used += used.cost_picos
        self._release()
        if self.tokens is not None:
            self.tokens.bucket.settle(self.tokens, used.tokens, monotonic_s)
        if self.requests is not None:
            self.requests.bucket.settle(self.requests, 1, monotonic_s)

    def void(self, monotonic_s: float) -> None:
        """Give everything back, as if the request had never been admitted."""
        self._release()
        for take in (self.tokens, self.requests):
            if take is not None:
                take.bucket.settle(take, 0, monotonic_s)

    def _release(self) -> None:
        self.day.reserved -= self.held.tokens
        self.costs.reserved -= self.held.cost_picos
        if self.is_shadow_refused:
            self.day.shadow_reserved -= self.held.tokens
            self.costs.shadow_reserved -= self.held.cost_picos
        else:
            self.allowance.running -= 1
            self.clear_running_cost()


def _monotonic_at(moment: datetime, at: Moment) -> float:
    """Convert a past `moment` to a reading of the monotonic clock, which may be negative."""
    return at.monotonic_s - max((at.now - moment).total_seconds(), 0.0)


def _seconds_until(moment: datetime, now: datetime) -> float:
    difference = moment - now
    return ceil_to_ms((difference.days * 86400 + difference.seconds) * MICROS_PER_S + difference.microseconds)
