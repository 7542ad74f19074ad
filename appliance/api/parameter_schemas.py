"""JSON Schemas of parameters in query, path and headers, for the OpenAPI document, with the keys of `descriptions.parameters`.

As with `field_types`, nothing is validated here: the code that reads a parameter does that, and a test compares the two.
"""

from __future__ import annotations

from typing import Any

from appliance.api.admin.usage import EVENT_ID_DIGITS_MAX
from appliance.api.descriptions.parameters import lookup_keys
from appliance.api.organization import queries, usage
from appliance.api.organization.admin import BOUNDS
from appliance.api.organization.limits import ID_PREFIX, PAGE_MAX
from appliance.api.organization.projects import ACCESSES
from appliance.api.queries import ORDERS
from appliance.metering.alerts.outbox import STATES as DELIVERY_STATES
from appliance.metering.calendar import MONTH_PATTERN
from appliance.metering.invoicing.rows import STATES as INVOICE_STATES
from appliance.metering.ledger.corrections import KEY_CHARS_MAX
from appliance.metering.ledger.records import KINDS
from appliance.metering.usage import BUCKETS, GROUPS, STATUSES
from appliance.tenancy.fields import TIERS
from appliance.tenancy.pages import CURSOR_CHARS_MAX, PAGE_ROWS_MAX

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_GROUP = "|".join(GROUPS)
_ORGANIZATION = "/v1/organization"


def _integer(minimum: int, maximum: int) -> Schema:
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def _enum(*choices: str) -> Schema:
    return {"type": "string", "enum": list(choices)}


_MOMENT: Schema = {"type": "string", "format": "date-time"}
_FLAG: Schema = {"type": "boolean"}

SCHEMAS: dict[str, Schema] = {
    "limit": _integer(1, PAGE_ROWS_MAX),
    "cursor": {"type": "string", "minLength": 1, "maxLength": CURSOR_CHARS_MAX},
    "start": _MOMENT,
    "end": _MOMENT,
    "month": {"type": "string", "pattern": MONTH_PATTERN},
    "order": _enum(*ORDERS),
    "bucket": _enum(*BUCKETS),
    "kind": _enum(*KINDS),
    "status": _enum(*STATUSES),
    "include_archived": _FLAG,
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": KEY_CHARS_MAX, "pattern": "^[ -~]*$"},
    "event_id": {"type": "string", "pattern": f"^[0-9]{{1,{EVENT_ID_DIGITS_MAX}}}$"},
    "rate_limit_id": {"type": "string", "pattern": f"^{ID_PREFIX}"},
    "/admin/v1/tiers name": _enum(*TIERS),
    "/admin/v1/usage group_by": {"type": "string", "pattern": f"^({_GROUP})(,({_GROUP}))*$"},
    "/admin/v1/costs group_by": {"type": "string", "pattern": f"^({_GROUP})(,({_GROUP}))*$"},
    "/admin/v1/invoices state": _enum(*INVOICE_STATES),
    "/admin/v1/webhooks/{webhook_id}/deliveries state": _enum(*DELIVERY_STATES),
    # /v1/organization
    f"{_ORGANIZATION} limit": _integer(1, queries.LIMIT_MAX),
    f"{_ORGANIZATION}/projects/{{project_id}}/rate_limits limit": _integer(1, PAGE_MAX),
    f"{_ORGANIZATION}/usage limit": _integer(1, max(maximum for _default, maximum in usage.LIMITS_OF_WIDTH.values())),
    f"{_ORGANIZATION}/costs limit": _integer(1, usage.COST_LIMITS[1]),
    f"{_ORGANIZATION}/usage bucket_width": _enum(*usage.LIMITS_OF_WIDTH),
    f"{_ORGANIZATION}/costs bucket_width": _enum(*usage.COST_WIDTHS),
    f"{_ORGANIZATION}/usage group_by": _enum(*usage.USAGE_GROUPS),
    f"{_ORGANIZATION}/costs group_by": _enum(*usage.COST_GROUPS),
    "owner_project_access": _enum(*ACCESSES),
    "start_time": _integer(0, queries.SECONDS_MAX),
    "end_time": _integer(1, queries.SECONDS_MAX),  # after `start_time`, which is at least 0
    **{f"effective_at[{bound}]": _integer(0, queries.SECONDS_MAX - 1) for bound in BOUNDS},
    "batch": _FLAG,
    "tenant_only": _FLAG,
}


def parameter_schema(path: str, name: str) -> Schema:
    """Return the schema of the parameter `name` of `path`; if it is repeatable, of each of its values."""
    return next((SCHEMAS[key] for key in lookup_keys(path, name) if key in SCHEMAS), _TEXT)
