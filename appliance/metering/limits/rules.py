"""Which limits apply to a request: those of its tenant, key and model, over all models and for this one. Values only."""

from __future__ import annotations

import msgspec

from appliance.metering.limits.owners import ALL_TENANTS, Owner
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal


class Rule(msgspec.Struct, frozen=True):
    """Limits that apply to a request, with their owner and mode (`enforce` or `shadow`). Budgets are in `currency`."""

    owner: Owner
    limits: Limits
    mode: str
    currency: str


def rules_for(principal: Principal, model: str | None, policy: ModelPolicy | None, currency: str) -> list[Rule]:
    """Return the rules for a request; with `model` None, those for every request. Tenant and key always have one.

    Budgets of models, and of tenants without a currency of their own, are in `currency`.
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
