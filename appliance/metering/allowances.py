"""What one tenant or key has left of each of its limits, in memory. Nothing here awaits: check and take are one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from appliance.metering.quotas import MICROS_PER_S, LimitDecision, LimitKind, LimitScope, TokenBucket, Window, ceil_to_ms
from appliance.metering.sums import RECENT, PeriodSums, day_start, month_start, next_day_start
from appliance.tenancy.principals import Limits

CONCURRENCY_RETRY_S = 1.0  # nobody knows when a running request ends
HELD_RETRY_S = 1.0  # nor when it gives back what it holds and does not use
PICOS_PER_MICRO = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Tokens, and what they cost."""

    tokens: int
    cost_picos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one request asks for: what is to be expected of it, and the `worst` case, in which the answer takes all its room.

    Buckets per minute hold the expected tokens: a surprise is a debt that time repays. Nothing repays a day's tokens or a
    month's money, so of these the worst case is held, or all that is left: at most one request passes such a limit.
    """

    expected: Amount
    worst: Amount


@dataclass(frozen=True, slots=True)
class Moment:
    """One reading of both clocks, so that all limits of a decision see the same time."""

    now: datetime
    monotonic_s: float


class Allowance:
    """Buckets, windows and running requests of one tenant or key. A limit that is None is not counted against."""

    def __init__(self, scope: LimitScope, sums: PeriodSums, at: Moment) -> None:
        self.scope: LimitScope = scope
        self.running = 0
        self.limits = Limits()
        self.tokens: TokenBucket | None = None
        self.requests: TokenBucket | None = None
        self._buckets: dict[str, TokenBucket] = {}  # also of limits that were taken away: they may come back
        self._day = Window(day_start(at.now).date(), used=sums.tokens_today)
        self._month = Window(month_start(at.now).date(), used=sums.cost_month_picos)
        self._begun_s = at.monotonic_s
        self._recent = [
            (at.monotonic_s - max((at.now - moment).total_seconds(), 0.0), tokens) for moment, tokens in sums.recent
        ]

    def configure(self, limits: Limits, at: Moment) -> None:
        """Take over the limits as they are now; what was used counts against the new ones."""
        requests = [(moment_s, 1) for moment_s, _tokens in self._recent]
        self.tokens = self._resized("tokens", limits.tokens_per_minute, at.monotonic_s, self._recent)
        self.requests = self._resized("requests", limits.requests_per_minute, at.monotonic_s, requests)
        self.limits = limits

    def refusals(self, need: Need, at: Moment) -> list[LimitDecision]:
        """Return the decisions of the limits that refuse `need`; none of them changes anything."""
        return [decision for decision in self._decisions(need, at) if not decision.allowed]

    def take(self, need: Need, at: Moment) -> Hold:
        """Take `need`. Call it only when `refusals` is empty and without an await in between."""
        for bucket, count in ((self.requests, 1), (self.tokens, need.expected.tokens)):
            taken = bucket is None or bucket.take(count, at.monotonic_s)
            assert taken, "take after a refusal"
        day, month = self._windows(at.now)
        held = Amount(
            tokens=_held(need.worst.tokens, self.limits.tokens_per_day, day),
            cost_picos=_held(need.worst.cost_picos, self._budget_picos, month),
        )
        day.reserved += held.tokens
        month.reserved += held.cost_picos
        self.running += 1
        return Hold(
            allowance=self,
            bucket_tokens=need.expected.tokens,
            held=held,
            tokens=self.tokens,
            requests=self.requests,
            day=day,
            month=month,
        )

    @property
    def _budget_picos(self) -> int | None:
        return None if self.limits.monthly_budget is None else self.limits.monthly_budget * PICOS_PER_MICRO

    def _resized(
        self, kind: LimitKind, capacity: int | None, now_s: float, recent: Sequence[tuple[float, int]]
    ) -> TokenBucket | None:
        """Return the bucket for a limit of `capacity`. A new one remembers what an earlier process has admitted."""
        if capacity is None:
            return None
        bucket = self._buckets.get(kind)
        if bucket is None:
            bucket = self._buckets[kind] = TokenBucket(capacity, self._begun_s - RECENT.total_seconds())
            for moment_s, count in recent:
                bucket.charge(count, moment_s)
        bucket.resize(capacity, now_s)
        return bucket

    def _decisions(self, need: Need, at: Moment) -> Iterator[LimitDecision]:
        day, month = self._windows(at.now)
        if self.limits.concurrent_requests is not None:
            yield self._concurrency(self.limits.concurrent_requests)
        if self.requests is not None:
            yield self._bucket("requests", self.requests, 1, at)
        if self.tokens is not None:
            yield self._bucket("tokens", self.tokens, need.expected.tokens, at)
        if self.limits.tokens_per_day is not None:
            yield self._per_day(self.limits.tokens_per_day, day, need.expected.tokens, at.now)
        if self._budget_picos is not None:
            yield self._budget(self._budget_picos, month, need.expected.cost_picos)

    def _concurrency(self, limit: int) -> LimitDecision:
        allowed = self.running < limit
        wait_s = None if limit < 1 else CONCURRENCY_RETRY_S
        return self._decide("concurrency", allowed, 1, limit, limit - self.running, wait_s)

    def _bucket(self, kind: LimitKind, bucket: TokenBucket, need: int, at: Moment) -> LimitDecision:
        wait_s = bucket.wait_s(need, at.monotonic_s)
        return self._decide(kind, wait_s == 0, need, bucket.capacity, bucket.level(at.monotonic_s), wait_s)

    def _per_day(self, limit: int, day: Window, need: int, now: datetime) -> LimitDecision:
        wait_s = None if need > limit else _until(next_day_start(now), now)
        return self._window("tokens_per_day", day, need, limit, wait_s)

    def _budget(self, limit: int, month: Window, need: int) -> LimitDecision:
        return self._window("budget", month, need, limit, None)

    def _window(self, kind: LimitKind, window: Window, need: int, limit: int, wait_s: float | None) -> LimitDecision:
        """Decide by what is used and held; `wait_s` is for what no running request can give back."""
        allowed = window.taken + need <= limit
        held = not allowed and window.used + need <= limit
        return self._decide(kind, allowed, need, limit, limit - window.taken, HELD_RETRY_S if held else wait_s, held=held)

    def _decide(
        self, kind: LimitKind, allowed: bool, need: int, limit: int, level: int, wait_s: float | None, *, held: bool = False
    ) -> LimitDecision:
        return LimitDecision(
            allowed=allowed,
            scope=self.scope,
            kind=kind,
            need=need,
            limit=limit,
            level=level,
            wait_s=0.0 if allowed else wait_s,
            held=held,
        )

    def _windows(self, now: datetime) -> tuple[Window, Window]:
        """Return today's and this month's window. A hold keeps the windows that it was taken from."""
        today, month = day_start(now).date(), month_start(now).date()
        if self._day.start < today:
            self._day = Window(today)
        if self._month.start < month:
            self._month = Window(month)
        return self._day, self._month


@dataclass(slots=True, kw_only=True)
class Hold:
    """What one request has taken from one allowance, from the very buckets and windows it was taken from."""

    allowance: Allowance
    bucket_tokens: int
    held: Amount
    tokens: TokenBucket | None
    requests: TokenBucket | None
    day: Window
    month: Window

    def settle(self, used: Amount, monotonic_s: float) -> None:
        """Replace what was reserved by what was used."""
        self._release()
        self.day.used += used.tokens
        self.month.used += used.cost_picos
        if self.tokens is not None:
            difference = used.tokens - self.bucket_tokens
            if difference > 0:
                self.tokens.charge(difference, monotonic_s)
            else:
                self.tokens.put_back(-difference, monotonic_s)

    def void(self, monotonic_s: float) -> None:
        """Put everything back, as if the request had never been."""
        self._release()
        if self.tokens is not None:
            self.tokens.put_back(self.bucket_tokens, monotonic_s)
        if self.requests is not None:
            self.requests.put_back(1, monotonic_s)

    def _release(self) -> None:
        self.allowance.running -= 1
        self.day.reserved -= self.held.tokens
        self.month.reserved -= self.held.cost_picos


def _held(worst: int, limit: int | None, window: Window) -> int:
    """Return what to hold of a window: the worst case, or all that is left of the limit."""
    return worst if limit is None else min(worst, limit - window.taken)


def _until(moment: datetime, now: datetime) -> float:
    difference = moment - now
    return ceil_to_ms((difference.days * 86400 + difference.seconds) * MICROS_PER_S + difference.microseconds)
