"""The alert about a reached threshold: its event name, receivers, deduplication subject and data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from appliance.base.money import PICOS_PER_MICRO
from appliance.metering.alerts.rules import AlertRule, Period


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdAlert:
    """`used` is at or above `percent` of the limit of `period.kind`."""

    rule: AlertRule
    period: Period
    percent: int
    used: int

    @property
    def event(self) -> str:
        """Return the event name."""
        return "budget.threshold" if self.period.kind == "budget" else "tokens_per_day.threshold"

    @property
    def tenant_id(self) -> str | None:
        """Return the tenant whose webhooks get the alert besides those of the appliance; None for a limit over all tenants."""
        return self.rule.owner_fields.get("tenant_id")

    @property
    def subject(self) -> str:
        """Return the subject by which the outbox deduplicates alerts: owner, period, percentage and limit."""
        limit = self.rule.limits[self.period.kind]
        return f"{self._owner}:{self.period.start.isoformat()}:{self.percent}:{limit}"

    @property
    def _owner(self) -> str:
        """Return the owner's id; for a single model with a digest of its name, which may be too long for an outbox key."""
        owner = self.rule.owner
        if owner.model is None:
            return owner.id
        return f"{owner.id}/{hashlib.blake2b(owner.model.encode(), digest_size=16).hexdigest()}"

    @property
    def data(self) -> dict[str, Any]:
        """Return the data of the alert."""
        rule, period = self.rule, self.period
        model = {} if rule.owner.model is None else {"model": rule.owner.model}
        facts = {"scope": rule.owner.scope, **rule.owner_fields, **model, "percent": self.percent}
        if period.kind == "budget":
            return facts | {
                "month": f"{period.start:%Y-%m}",
                "monthly_budget": rule.limits["budget"] // PICOS_PER_MICRO,
                "spent_picos": self.used,
                "currency": rule.currency,
            }
        tokens = {"tokens_per_day": rule.limits["tokens_per_day"], "tokens": self.used}
        return facts | {"day": period.start.isoformat(), **tokens}


def reached_alerts(rule: AlertRule, period: Period, used: int) -> list[ThresholdAlert]:
    """Return an alert for each threshold that `used` has reached."""
    percents = rule.reached_percents(period.kind, used)
    return [ThresholdAlert(rule=rule, period=period, percent=percent, used=used) for percent in percents]
