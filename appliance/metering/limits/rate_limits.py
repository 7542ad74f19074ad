"""What is left of limits per minute, as the x-ratelimit headers tell it. Values, and which of some limits is the tightest."""

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
    """One limit per minute as headers tell it: `remaining` now, and after how many seconds it is full again."""

    limit: int
    remaining: int
    reset_s: float


class RateLimitState(msgspec.Struct, frozen=True, kw_only=True):
    """The tightest of the limits per minute that hold for a request; None where there is none."""

    requests: RateLimit | None
    tokens: RateLimit | None


def rate_limit_state(found: Sequence[tuple[Allowance | None, Limits]], at: Moment) -> RateLimitState:
    """Return the state of these limits. Without an allowance nobody has used anything of them yet."""
    return RateLimitState(requests=_tightest(found, "requests", at), tokens=_tightest(found, "tokens", at))


def _tightest(found: Sequence[tuple[Allowance | None, Limits]], kind: LimitKind, at: Moment) -> RateLimit | None:
    """Return the limit of this kind of which least remains."""
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
