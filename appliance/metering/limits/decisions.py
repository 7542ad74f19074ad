"""The decision of one limit on one request. Values only: made in `allowances`, put into words for clients in `refusals`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from appliance.metering.limits.owners import LimitScope

LimitKind = Literal["tokens", "requests", "concurrency", "tokens_per_day", "budget"]

BUCKET_KINDS: tuple[LimitKind, ...] = ("tokens", "requests")
WINDOW_KINDS: tuple[LimitKind, ...] = ("tokens_per_day", "budget")
TOKEN_KINDS: tuple[LimitKind, ...] = ("tokens", "tokens_per_day")
SHADOW = "shadow"  # limit mode: refusals are counted, not enforced


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDecision:
    """The decision of one limit on one request: the source of error messages and of dry-run results.

    `wait_s` is None when waiting cannot help. Amounts of a budget are in pico-units of `currency`. `model` is None for a limit
    over all models. `held`: it refuses only because of what running requests have reserved, of which they may return a part
    when they end. `ahead` is the number of requests that already wait for the same limit.

    A wait is exact unless only running requests are in the way: their end is unknown, so it is `estimated`.
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
    def name(self) -> str:
        """Return the name of the limit, such as `tenant_tokens` or `model_concurrency`."""
        return f"{self.scope}_{self.kind}"

    @property
    def estimated(self) -> bool:
        """Return whether `wait_s` is an estimate of when running requests end."""
        return not self.allowed and self.wait_s is not None and (self.held or self.kind == "concurrency")
