"""The `x-ratelimit-*` headers: the limit, what remains of it, and the time until the bucket is full again."""

from __future__ import annotations

from appliance.metering.limits.rate_limits import RateLimit, RateLimitState

UNLIMITED = 2**53 - 1  # the largest integer that every client reads exactly; sent where there is no limit
_NO_LIMIT = RateLimit(limit=UNLIMITED, remaining=UNLIMITED, reset_s=0.0)


def rate_limit_headers(state: RateLimitState) -> dict[str, str]:
    """Return the six headers."""
    headers = {}
    for kind, limit in (("requests", state.requests), ("tokens", state.tokens)):
        shown = limit or _NO_LIMIT
        headers[f"x-ratelimit-limit-{kind}"] = str(shown.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(shown.remaining)
        headers[f"x-ratelimit-reset-{kind}"] = duration(shown.reset_s)
    return headers


def duration(seconds: float) -> str:
    """Return a duration in the notation of OpenAI's headers: `250ms`, `1s`, `1.5s`, `6m0s`, `1h0m0s`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    if not minutes:
        return text
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"
