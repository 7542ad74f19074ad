"""The tables for both databases, in SQLAlchemy Core. Queries are in the modules that own the rows.

Ids are text, times are UTC, tokens and money are 64-bit integers (pico-units unless the name says otherwise), lists are JSON.
"""

from appliance.base.tables.billing import (
    appliance_records,
    audit_head,
    audit_log,
    free_allowances,
    invoice_lines,
    invoices,
    outbox,
    webhooks,
)
from appliance.base.tables.columns import UtcDateTime, metadata
from appliance.base.tables.ledger import (
    counters,
    epochs,
    limit_levels,
    prices,
    requests,
    usage_appliance_rollups,
    usage_events,
    usage_rollups,
)
from appliance.base.tables.people import (
    admin_tokens,
    api_keys,
    members,
    memberships,
    model_policies,
    recovery_codes,
    sessions,
    tenants,
    tiers,
)

__all__ = [
    "UtcDateTime",
    "admin_tokens",
    "api_keys",
    "appliance_records",
    "audit_head",
    "audit_log",
    "counters",
    "epochs",
    "free_allowances",
    "invoice_lines",
    "invoices",
    "limit_levels",
    "members",
    "memberships",
    "metadata",
    "model_policies",
    "outbox",
    "prices",
    "recovery_codes",
    "requests",
    "sessions",
    "tenants",
    "tiers",
    "usage_appliance_rollups",
    "usage_events",
    "usage_rollups",
    "webhooks",
]
