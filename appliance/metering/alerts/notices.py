"""The alert when a budget's threshold is reached: its event, its receivers, the subject that makes it unique, its figures."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from appliance.base.money import PICOS_PER_MICRO
from appliance.metering.alerts.plans import Period, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """`used` is at or above `percent` of the limit of `period.kind`."""

    plan: Plan
    period: Period
    percent: int
    used: int

    @property
    def event(self) -> str:
        """Return the event's name."""
        return "budget.threshold" if self.period.kind == "budget" else "tokens_per_day.threshold"

    @property
    def tenant_id(self) -> str | None:
        """Return the tenant whose webhooks get it besides those of the box; None for a limit of all tenants together."""
        return self.plan.owner_fields.get("tenant_id")

    @property
    def subject(self) -> str:
        """Return the subject for which the outbox sends only one message: share, limit, owner and period."""
        limit = self.plan.limits[self.period.kind]
        return f"{self._owner}:{self.period.start.isoformat()}:{self.percent}:{limit}"

    @property
    def _owner(self) -> str:
        """Return the id of the owner; for a model the digest of its name, which may be too long for a key of the outbox."""
        owner = self.plan.owner
        if owner.model is None:
            return owner.id
        return f"{owner.id}/{hashlib.blake2b(owner.model.encode(), digest_size=16).hexdigest()}"

    @property
    def data(self) -> dict[str, Any]:
        """Return the content of the alert."""
        plan, period = self.plan, self.period
        model = {} if plan.owner.model is None else {"model": plan.owner.model}
        facts = {"scope": plan.owner.scope, **plan.owner_fields, **model, "percent": self.percent}
        if period.kind == "budget":
            return facts | {
                "month": f"{period.start:%Y-%m}",
                "monthly_budget": plan.limits["budget"] // PICOS_PER_MICRO,
                "spent_picos": self.used,
                "currency": plan.currency,
            }
        tokens = {"tokens_per_day": plan.limits["tokens_per_day"], "tokens": self.used}
        return facts | {"day": period.start.isoformat(), **tokens}


def notices_of(plan: Plan, period: Period, used: int) -> list[Notice]:
    """Return the notices due for `used`."""
    return [Notice(plan=plan, period=period, percent=percent, used=used) for percent in plan.reached(period.kind, used)]
