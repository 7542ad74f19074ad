"""Rate limits of manual sends to webhooks: tests and retries. Knows neither messages nor permissions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock, format_wait
from appliance.base.errors import RateLimitExceeded
from appliance.base.tables import outbox, webhooks

TEST_EVENT = "webhook.test"
TESTS_PER_HOUR_MAX = 10
RETRIES_PER_HOUR_MAX = 100
_AN_HOUR = timedelta(hours=1)


async def check_test_limit(connection: AsyncConnection, webhook_id: str, tenant_id: str | None, now: datetime) -> None:
    """Raise RateLimitExceeded if the webhook has had TESTS_PER_HOUR_MAX tests in the last hour.

    Tests of webhooks that the same owner removed in that hour count too, so recreating a webhook does not reset the limit.
    """
    owner = webhooks.c.tenant_id.is_(None) if tenant_id is None else webhooks.c.tenant_id == tenant_id
    counted_webhooks = select(webhooks.c.id).where(owner, webhooks.c.removed_at > now - _AN_HOUR)
    query = (
        select(outbox.c.created_at)
        .where(outbox.c.webhook_id.in_(counted_webhooks.union_all(select(webhooks.c.id).where(webhooks.c.id == webhook_id))))
        .where(outbox.c.event == TEST_EVENT, outbox.c.created_at > now - _AN_HOUR)
        .order_by(outbox.c.created_at.desc())
        .limit(TESTS_PER_HOUR_MAX)
    )
    recent: Sequence[datetime] = (await connection.execute(query)).scalars().all()
    if len(recent) >= TESTS_PER_HOUR_MAX:
        wait_s = (recent[-1] + _AN_HOUR - now).total_seconds()
        raise _rate_limit_error(f"a webhook takes {TESTS_PER_HOUR_MAX} tests an hour", wait_s)


class RetryLimiter:
    """Limits retries by owner: a tenant, or None for the appliance. Kept in memory; a restart resets it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent_s: dict[str | None, deque[float]] = {}

    def acquire(self, tenant_id: str | None) -> None:
        """Count one retry, or raise RateLimitExceeded without counting it."""
        now_s = self._clock.monotonic_s()
        recent_s = self._recent_s.setdefault(tenant_id, deque(maxlen=RETRIES_PER_HOUR_MAX))
        wait_s = recent_s[0] + _AN_HOUR.total_seconds() - now_s if len(recent_s) == RETRIES_PER_HOUR_MAX else 0.0
        if wait_s > 0:
            raise _rate_limit_error(f"{RETRIES_PER_HOUR_MAX} messages an hour can be sent again", wait_s)
        recent_s.append(now_s)


def _rate_limit_error(message: str, wait_s: float) -> RateLimitExceeded:
    return RateLimitExceeded(f"{message}; try again in {format_wait(wait_s)}", limit_type="requests", retry_after_s=wait_s)
