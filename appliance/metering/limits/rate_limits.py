"""What is left of limits per minute, for the x-ratelimit headers: the tightest limit of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import msgspec

from appliance.metering.limits.allowances import Allowance
from appliance.metering.limits.decisions import LimitKind
from appliance.metering.limits.token_bucket import TokenBucket
from appliance.metering.limits.windows import Moment
from appliance.tenancy.principals import Limits


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit per minute for the headers: `remaining` now, and `reset_s` until the bucket is full again."""

    limit: int
    remaining: int
    reset_s: float


class RateLimitState(msgspec.Struct, frozen=True, kw_only=True):
    """The tightest limits per minute that apply to a request; None for a kind without a limit."""

    requests: RateLimit | None
    tokens: RateLimit | None


def rate_limit_state(found: Sequence[tuple[Allowance | None, Limits]], at: Moment) -> RateLimitState:
    """Return the state of these limits. Without an allowance, nothing of a limit has been used yet."""
    return RateLimitState(requests=_tightest(found, "requests", at), tokens=_tightest(found, "tokens", at))


def _tightest(found: Sequence[tuple[Allowance | None, Limits]], kind: LimitKind, at: Moment) -> RateLimit | None:
    """Return the limit of this kind with the least remaining."""
    levels: list[tuple[int, int, TokenBucket | None]] = []
    for allowance, limits in found:
        capacity = limits.tokens_per_minute if kind == "tokens" else limits.requests_per_minute
        if capacity is not None:
            bucket = None if allowance is None else allowance.buckets.get(kind)
            levels.append((capacity if bucket is None else max(bucket.level(at.monotonic_s), 0), capacity, bucket))
    if not levels:
        return None
    remaining, capacity, bucket = min(levels, key=itemgetter(0))
    reset_s = None if bucket is None else bucket.wait_s(capacity, at.monotonic_s)
    return RateLimit(limit=capacity, remaining=remaining, reset_s=reset_s or 0.0)
