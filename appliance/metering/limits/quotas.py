"""Limits as values: whose they are, what one of them says to one request, and the calendar window. No clock, no database."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Literal

import msgspec

LimitScope = Literal["tenant", "key", "model"]
LimitKind = Literal["tokens", "requests", "concurrency", "tokens_per_day", "budget"]

BUCKET_KINDS: tuple[LimitKind, ...] = ("tokens", "requests")
ALL_TENANTS = "model"  # stands where an id would, for the limits of a model over all tenants


class Owner(msgspec.Struct, frozen=True):
    """Whose limits: of a tenant or key over all models or for one, or of a model over all tenants. `id` is then ALL_TENANTS."""

    scope: LimitScope
    id: str
    model: str | None = None


def owners_of(tenant_id: str, key_id: str, model: str) -> tuple[Owner, ...]:
    """Return everybody whose limits the use of a model counts against, if he has any."""
    return (
        Owner("tenant", tenant_id),
        Owner("tenant", tenant_id, model),
        Owner("key", key_id),
        Owner("key", key_id, model),
        Owner("model", ALL_TENANTS, model),
    )


class Moment(msgspec.Struct, frozen=True):
    """One reading of both clocks, so that all limits of a decision see the same time, and the day it lies in."""

    now: datetime
    monotonic_s: float
    day: date
    next_day_start: datetime

    @property
    def month(self) -> date:
        """Return the first day of the month."""
        return self.day.replace(day=1)


@dataclass(slots=True)
class Window:
    """What was used and what is reserved in one day (tokens) or month (pico-units of money) of the billing calendar.

    `shadowed` is the part of `used` that limits in shadow mode would have refused. `live` is what running requests have cost so
    far, of what is reserved for them. `others` is the money that was used in currencies which do not count.
    """

    start: date
    used: int = 0
    reserved: int = 0
    shadowed: int = 0
    live: int = 0
    others: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDecision:
    """What one limit says to one request: the error, the answer to "would it pass?" and the tests read nothing else.

    `wait_s` is None when waiting cannot help. Budgets are in pico-units of `currency`. `model` is None for a limit over all
    models. In the mode `shadow` it refuses nobody. `held`: it refuses only for what running requests hold, of which they may
    give something back when they end. `ahead` requests wait before this one for the same limit.

    A wait is exact, but where only running requests stand in the way: nobody knows when they end, and it is `estimated`.
    """

    allowed: bool
    scope: LimitScope
    kind: LimitKind
    need: int
    limit: int
    level: int
    wait_s: float | None
    model: str | None = None
    mode: str = "enforce"
    held: bool = False
    ahead: int = 0
    currency: str = ""

    @property
    def estimated(self) -> bool:
        """Return whether `wait_s` is a guess about when running requests end."""
        return not self.allowed and self.wait_s is not None and (self.held or self.kind == "concurrency")
