"""What one owner of limits has left of each of them, in memory. Nothing here awaits: check and take are one step."""

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
from appliance.metering.limits.windows import Moment, Window, Windows
from appliance.tenancy.principals import Limits

RUNNING_RETRY_S = 1.0  # the least a client is told where only running requests are in the way: nobody knows when they end


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, and what they cost."""

    tokens: int
    cost_picos: int


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What one request asks for: what is to be expected of it, and the `worst` case, in which the answer takes all its room.

    Buckets per minute hold the expected tokens: a surprise is a debt that time repays. Time repays neither a day's tokens
    nor a month's money, so of these the worst case is held, or all that is left: at most one request overruns such a limit.
    """

    expected: Amount
    worst: Amount
    currency: str | None = None


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """What the waiters ahead of a request will take first: how many they are, and their tokens. `for_window`: one of them waits
    for a day's or a month's limit, and will hold all that it can get of it."""

    requests: int = 0
    tokens: int = 0
    for_window: bool = False


NOTHING_AHEAD = Ahead()


class Allowance:
    """Buckets, windows and running requests of one owner. A limit that is None is not counted against.

    Costs count in `currency` alone: a budget is one sum, and amounts in two currencies have none.
    """

    def __init__(self, owner: Owner, currency: str, at: Moment) -> None:
        self.owner = owner
        self.currency = currency
        self.running = 0
        self.limits = Limits()
        self.mode = "enforce"
        self.tokens: TokenBucket | None = None
        self.requests: TokenBucket | None = None
        self.buckets: dict[LimitKind, TokenBucket] = {}  # also of limits that were taken away: they may come back
        self._windows = Windows(at)
        self._begun_s = at.monotonic_s
        self._recent: Sequence[tuple[float, int]] = ()
        self._through_posting = 0

    def remember(self, sums: PeriodSums, at: Moment) -> None:
        """Take over what earlier processes have counted. Called once, before the first request."""
        day, month = self._windows.enter(at)
        day.used += sums.tokens_today
        month.used += sums.cost_month_picos
        month.others.update(sums.other_costs_picos)
        self._through_posting = sums.through_posting
        self._recent = [(_monotonic_at(moment, at), tokens) for moment, tokens in sums.recent]
        for kind, saved in sums.levels.items():
            bucket = self.buckets[kind] = TokenBucket(saved.capacity, _monotonic_at(saved.saved_at, at), units=saved.units)
            for moment, units in saved.since:
                bucket.charge(units, _monotonic_at(moment, at))

    def correct(self, correction: UsageEvent) -> None:
        """Count a correction in its day and its month, unless the sums that we began with include it. Its minute is over, so
        no bucket changes."""
        if (correction.posting or 0) <= self._through_posting:
            return
        tokens = correction.prompt_tokens + correction.completion_tokens
        self.count(Amount(tokens=tokens, cost_picos=correction.cost_picos), correction.currency, correction.billing_day)

    def count(self, used: Amount, currency: str | None, billing_day: date) -> None:
        """Count usage of `billing_day` in that day and its month, where they are still kept."""
        day, month = self._windows.find(billing_day)
        if day is not None:
            day.used += used.tokens
        if month is not None:
            self.spend(month, used.cost_picos, currency)

    def spend(self, month: Window, cost_picos: int, currency: str | None) -> None:
        """Count a cost in a month, separately if it is in another currency."""
        if currency is None or currency == self.currency:
            month.used += cost_picos
        else:
            month.others[currency] = month.others.get(currency, 0) + cost_picos

    def bill_in(self, currency: str) -> None:
        """Count costs in `currency` from now on, earlier ones included, and those in the former currency no longer."""
        if currency == self.currency:
            return
        for month in self._windows.months:
            month.others[self.currency], month.used = month.used, month.others.pop(currency, 0)
            month.shadowed = 0
        self.currency = currency

    def configure(self, limits: Limits, mode: str, at: Moment) -> None:
        """Adopt the limits as they are now; what was used counts against the new ones."""
        self.mode = mode
        if limits is self.limits:
            return
        self.tokens = self._resized("tokens", limits.tokens_per_minute, at.monotonic_s, self._recent)
        requests = [(moment_s, 1) for moment_s, _tokens in self._recent]
        self.requests = self._resized("requests", limits.requests_per_minute, at.monotonic_s, requests)
        self.limits = limits

    def taken(self, at: Moment) -> dict[LimitKind, int]:
        """Return what is taken of each limit per minute that was ever set, debts included, and how many requests run."""
        buckets = {kind: bucket.capacity - bucket.level(at.monotonic_s) for kind, bucket in self.buckets.items()}
        return {**buckets, "concurrency": self.running}

    @property
    def enforces(self) -> bool:
        """Return whether a refusal refuses."""
        return self.mode != SHADOW

    def enter(self, at: Moment) -> None:
        """Make the day and the month of `at` the current ones."""
        self._windows.enter(at)

    def refusals(self, need: Need, at: Moment, ahead: Ahead = NOTHING_AHEAD) -> list[LimitDecision]:
        """Return the decisions of the limits that refuse `need`; none of them changes anything."""
        if ahead is NOTHING_AHEAD and self._has_plenty(need, at):
            return []
        return [decision for decision in self.decisions(need, at, ahead) if not decision.allowed]

    def _has_plenty(self, need: Need, at: Moment) -> bool:
        """Return whether certainly no limit refuses `need`: the quick check that almost every request passes.

        False means no more than that `decisions` must be asked.
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
        return budget is None or month.used + month.reserved + need.expected.cost_picos <= budget

    def decisions(self, need: Need, at: Moment, ahead: Ahead = NOTHING_AHEAD) -> Iterator[LimitDecision]:
        """Yield what each limit says to `need`, after what those `ahead` will take."""
        limits = self.limits
        if limits.concurrent_requests is not None:
            yield self._concurrency(limits.concurrent_requests, ahead)
        if self.requests is not None:
            yield self._bucket("requests", self.requests, 1, at, ahead.requests, ahead)
        if self.tokens is not None:
            yield self._bucket("tokens", self.tokens, need.expected.tokens, at, ahead.tokens, ahead)
        if limits.tokens_per_day is not None:
            yield self._per_day(limits.tokens_per_day, need.expected.tokens, at, ahead)
        if limits.monthly_budget is not None:
            yield self._budget(limits.monthly_budget, self.counted(need.expected.cost_picos, need.currency), at, ahead)

    def take(self, need: Need, at: Moment) -> Hold:
        """Take `need`. Call it only when `refusals` is empty and without an await in between. A bug leaves nothing taken."""
        hold = self._hold(need, *self._windows.enter(at))
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

    def join(self, need: Need, day: date) -> Hold:
        """Count from now on a running request that was admitted on `day` without these limits: they were not known then, or do
        not apply to it. Nothing is taken from the buckets, and a day or month that is not kept does not matter."""
        known_day, known_month = self._windows.find(day)
        return self._hold(need, known_day or Window(day), known_month or Window(day.replace(day=1)))

    def _hold(self, need: Need, day: Window, month: Window) -> Hold:
        held = Amount(
            tokens=_held(need.worst.tokens, self.limits.tokens_per_day, day),
            cost_picos=_held(self.counted(need.worst.cost_picos, need.currency), self._budget_picos, month),
        )
        day.reserved += held.tokens
        month.reserved += held.cost_picos
        self.running += 1
        return Hold(allowance=self, held=held, day=day, month=month)

    def overlook(self, at: Moment) -> Hold:
        """Return the hold of a request that only shadow mode let pass: nothing."""
        day, month = self._windows.enter(at)
        return Hold(allowance=self, held=Amount(tokens=0, cost_picos=0), day=day, month=month, overlooked=True)

    def spent(self, month: Window, at: Moment) -> bool:
        """Return whether an enforced budget is used up by settled and running requests, if `month` is the current one."""
        budget = self._budget_picos
        if budget is None or not self.enforces:
            return False
        return month.used + month.live >= budget and month is self._windows.enter(at)[1]

    @property
    def _budget_picos(self) -> int | None:
        return None if self.limits.monthly_budget is None else self.limits.monthly_budget * PICOS_PER_MICRO

    def counted(self, cost_picos: int, currency: str | None) -> int:
        """Return what a cost counts for here: in another currency, which was ours before, nothing."""
        return cost_picos if currency is None or currency == self.currency else 0

    def _resized(
        self, kind: LimitKind, capacity: int | None, now_s: float, recent: Sequence[tuple[float, int]]
    ) -> TokenBucket | None:
        """Return the bucket for a limit of `capacity`. A new one remembers what an earlier process has admitted."""
        if capacity is None:
            return None
        bucket = self.buckets.get(kind)
        if bucket is None:
            bucket = self.buckets[kind] = TokenBucket(capacity, self._begun_s - RECENT.total_seconds())
            for moment_s, count in recent:
                bucket.charge(count, moment_s)
        bucket.resize(capacity, now_s)
        return bucket

    def _concurrency(self, limit: int, ahead: Ahead) -> LimitDecision:
        allowed = self.running + ahead.requests < limit
        wait_s = None if limit < 1 else RUNNING_RETRY_S
        return self._decide("concurrency", allowed, 1, limit, limit - self.running, wait_s, ahead=ahead)

    def _bucket(
        self, kind: LimitKind, bucket: TokenBucket, need: int, at: Moment, ahead_tokens: int, ahead: Ahead
    ) -> LimitDecision:
        wait_s = bucket.wait_s(need, at.monotonic_s, ahead=ahead_tokens)
        return self._decide(kind, wait_s == 0, need, bucket.capacity, bucket.level(at.monotonic_s), wait_s, ahead=ahead)

    def _per_day(self, limit: int, need: int, at: Moment, ahead: Ahead) -> LimitDecision:
        wait_s = None if need > limit else _until(at.next_day_start, at.now)
        return self._window("tokens_per_day", self._windows.enter(at)[0], need, limit, wait_s, ahead)

    def _budget(self, limit_micros: int, need: int, at: Moment, ahead: Ahead) -> LimitDecision:
        return self._window("budget", self._windows.enter(at)[1], need, limit_micros * PICOS_PER_MICRO, None, ahead)

    def _window(
        self, kind: LimitKind, window: Window, need: int, limit: int, wait_s: float | None, ahead: Ahead
    ) -> LimitDecision:
        """Decide by what is used and held; `wait_s` is told where running requests could not give back enough."""
        used = window.used if self.enforces else window.used - window.shadowed
        left = limit - used - window.reserved
        allowed = need <= left and not ahead.for_window
        held = not allowed and used + need <= limit
        return self._decide(kind, allowed, need, limit, left, RUNNING_RETRY_S if held else wait_s, held=held, ahead=ahead)

    def _decide(
        self,
        kind: LimitKind,
        allowed: bool,
        need: int,
        limit: int,
        level: int,
        wait_s: float | None,
        *,
        held: bool = False,
        ahead: Ahead = NOTHING_AHEAD,
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
    """What one request has taken from one allowance, from the very buckets and windows it was taken from.

    `overlooked`: in shadow mode it would have been refused, so it takes nothing, and what it uses counts as such.
    """

    allowance: Allowance
    held: Amount
    day: Window
    month: Window
    tokens: Take | None = None
    requests: Take | None = None
    overlooked: bool = False
    live_picos: int = 0

    def record_cost(self, cost_picos: int, currency: str | None, at: Moment) -> bool:
        """Update what the running request has cost so far; return whether that used up the budget."""
        if self.overlooked:
            return False
        cost_picos = self.allowance.counted(cost_picos, currency)
        self.month.live += cost_picos - self.live_picos
        self.live_picos = cost_picos
        return self.allowance.spent(self.month, at)

    def forget_live(self) -> None:
        """Stop counting what the running request has cost so far."""
        self.month.live -= self.live_picos
        self.live_picos = 0

    def settle(self, used: Amount, currency: str | None, monotonic_s: float) -> None:
        """Replace what was reserved by what was used."""
        self.day.used += used.tokens
        self.allowance.spend(self.month, used.cost_picos, currency)
        if self.overlooked:
            self.day.shadowed += used.tokens
            self.month.shadowed += self.allowance.counted(used.cost_picos, currency)
            return
        self._release()
        if self.tokens is not None:
            self.tokens.bucket.settle(self.tokens, used.tokens, monotonic_s)
        if self.requests is not None:
            self.requests.bucket.settle(self.requests, 1, monotonic_s)

    def void(self, monotonic_s: float) -> None:
        """Put everything back, as if the request had never been."""
        if self.overlooked:
            return
        self._release()
        for take in (self.tokens, self.requests):
            if take is not None:
                take.bucket.settle(take, 0, monotonic_s)

    def _release(self) -> None:
        self.allowance.running -= 1
        self.day.reserved -= self.held.tokens
        self.month.reserved -= self.held.cost_picos
        self.forget_live()


def _held(worst: int, limit: int | None, window: Window) -> int:
    """Return what to hold of a window: the worst case, or all that is left of the limit."""
    return worst if limit is None else min(worst, max(limit - window.used - window.reserved, 0))


def _monotonic_at(moment: datetime, at: Moment) -> float:
    """Return the reading of the monotonic clock at `moment`, which lies in the past, maybe before the clock began."""
    return at.monotonic_s - max((at.now - moment).total_seconds(), 0.0)


def _until(moment: datetime, now: datetime) -> float:
    difference = moment - now
    return ceil_to_ms((difference.days * 86400 + difference.seconds) * MICROS_PER_S + difference.microseconds)
