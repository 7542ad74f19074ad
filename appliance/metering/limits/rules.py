"""Which limits hold for a request: of its tenant, key and model, over all models and for this one. Values only."""

from __future__ import annotations

import msgspec

from appliance.metering.limits.owners import ALL_TENANTS, Owner
from appliance.metering.limits.reservations import Work
from appliance.metering.prices import Price
from appliance.tenancy.fields import check_choice
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal

SERVICE_TIERS = ("auto", "default", "flex")
"""What a request may ask for. `flex` is batch work: cheaper, and served when nothing more urgent waits."""


def is_batch_work(service_tier: object) -> bool:
    """Return whether a service tier, one of SERVICE_TIERS, is that of batch work. Raises InvalidValue."""
    return check_choice(service_tier, "service_tier", SERVICE_TIERS) == "flex"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request as admission sees it.

    `max_output_tokens` is what was asked for; `output_room` is how long the answer may get, which differs when nothing was
    asked for: then it is the rest of the model's context. Both are of one answer, of which there are `answers`. `batch` work
    pays the batch share of the price.
    """

    principal: Principal
    model: str
    prompt_tokens: int
    max_output_tokens: int | None
    price: Price | None
    output_room: int | None = None
    answers: int = 1
    batch: bool = False
    policy: ModelPolicy | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or (self.max_output_tokens or 0) < 0 or self.answers < 1:
            raise ValueError("token counts must not be negative, and there is at least one answer")

    def work(self) -> Work:
        """Return what it costs whom."""
        tenant, price = self.principal.tenant, self.price
        return Work(
            tenant_id=tenant.id,
            key_id=self.principal.key.id,
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            answers=self.answers,
            rate=None if price is None else price.rate(tenant.tier, batch=self.batch),
            currency=None if price is None else price.currency,
        )


class Rule(msgspec.Struct, frozen=True):
    """Limits that hold for a request, whose they are, and how they are meant. Budgets are in `currency`."""

    owner: Owner
    limits: Limits
    mode: str
    currency: str


def rules_for(principal: Principal, model: str | None, policy: ModelPolicy | None, currency: str) -> list[Rule]:
    """Return what holds for a request, or for every request when `model` is None. Those of tenant and key are always there.

    Models, and tenants without a currency of their own, have their budgets in `currency`.
    """
    tenant, key = principal.tenant, principal.key
    billed_in = tenant.currency or currency
    rules = [
        Rule(Owner("tenant", tenant.id), tenant.limits, tenant.limit_mode, billed_in),
        Rule(Owner("key", key.id), key.limits, key.limit_mode, billed_in),
    ]
    if model is None:
        return rules
    if policy is not None:
        rules.append(Rule(Owner("model", ALL_TENANTS, model), policy.limits, policy.limit_mode, currency))
    if model in tenant.model_limits:
        rules.append(Rule(Owner("tenant", tenant.id, model), tenant.model_limits[model], tenant.limit_mode, billed_in))
    if model in key.model_limits:
        rules.append(Rule(Owner("key", key.id, model), key.model_limits[model], key.limit_mode, billed_in))
    return rules
