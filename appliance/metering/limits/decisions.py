"""What one limit says to one request. Values only: they are made in `allowances`, and told to clients in `refusals`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from appliance.metering.limits.owners import LimitScope

LimitKind = Literal["tokens", "requests", "concurrency", "tokens_per_day", "budget"]

BUCKET_KINDS: tuple[LimitKind, ...] = ("tokens", "requests")
WINDOW_KINDS: tuple[LimitKind, ...] = ("tokens_per_day", "budget")
TOKEN_KINDS: tuple[LimitKind, ...] = ("tokens", "tokens_per_day")
SHADOW = "shadow"  # the mode of limits that refuse nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDecision:
    """What one limit says to one request: the error, the answer to "would it pass?" and the tests read nothing else.

    `wait_s` is None when waiting cannot help. Budgets are in pico-units of `currency`. `model` is None for a limit over all
    models. In the mode `shadow` it refuses nobody. `held`: it refuses only because of what running requests hold, some of
    which they may give back when they end. `ahead` requests wait before this one for the same limit.

    A wait is exact unless only running requests are in the way: nobody knows when they will end, so then it is `estimated`.
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
