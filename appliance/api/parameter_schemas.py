"""What query and path parameters accept, as JSON Schema for the OpenAPI document. Keys are those of `descriptions.parameters`.

As with `field_types`, what refuses a value stands where the parameter is read, and a test compares.
"""

from __future__ import annotations

from typing import Any

from appliance.api.admin.usage import EVENT_ID_DIGITS_MAX
from appliance.api.descriptions.parameters import keys_of
from appliance.api.organization import queries, usage
from appliance.api.organization.admin import BOUNDS
from appliance.api.organization.limits import ID_PREFIX, LISTED_MAX
from appliance.api.organization.projects import ACCESSES
from appliance.api.queries import ORDERS
from appliance.metering.alerts.outbox import STATES as DELIVERY_STATES
from appliance.metering.calendar import MONTH_PATTERN
from appliance.metering.invoicing.rows import STATES as INVOICE_STATES
from appliance.metering.usage import BUCKETS, GROUPS, KINDS, STATUSES
from appliance.tenancy.fields import TIERS
from appliance.tenancy.pages import CURSOR_CHARS_MAX, PAGE_ROWS_MAX

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_GROUP = "|".join(GROUPS)
_ORGANIZATION = "/v1/organization"


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _one_of(*choices: str) -> Schema:
    return {"type": "string", "enum": list(choices)}


_MOMENT: Schema = {"type": "string", "format": "date-time"}
_FLAG: Schema = {"type": "boolean"}

SCHEMAS: dict[str, Schema] = {
    "limit": _whole(1, PAGE_ROWS_MAX),
    "cursor": {"type": "string", "minLength": 1, "maxLength": CURSOR_CHARS_MAX},
    "start": _MOMENT,
    "end": _MOMENT,
    "month": {"type": "string", "pattern": MONTH_PATTERN},
    "order": _one_of(*ORDERS),
    "bucket": _one_of(*BUCKETS),
    "kind": _one_of(*KINDS),
    "status": _one_of(*STATUSES),
    "include_archived": _FLAG,
    "event_id": {"type": "string", "pattern": f"^[0-9]{{1,{EVENT_ID_DIGITS_MAX}}}$"},
    "rate_limit_id": {"type": "string", "pattern": f"^{ID_PREFIX}"},
    "/admin/v1/tiers name": _one_of(*TIERS),
    "/admin/v1/usage group_by": {"type": "string", "pattern": f"^({_GROUP})(,({_GROUP}))*$"},
    "/admin/v1/costs group_by": {"type": "string", "pattern": f"^({_GROUP})(,({_GROUP}))*$"},
    "/admin/v1/invoices state": _one_of(*INVOICE_STATES),
    "/admin/v1/webhooks/{webhook_id}/deliveries state": _one_of(*DELIVERY_STATES),
    # /v1/organization
    f"{_ORGANIZATION} limit": _whole(1, queries.LIMIT_MAX),
    f"{_ORGANIZATION}/projects/{{project_id}}/rate_limits limit": _whole(1, LISTED_MAX),
    f"{_ORGANIZATION}/usage limit": _whole(1, max(most for _default, most in usage.LIMITS_OF_WIDTH.values())),
    f"{_ORGANIZATION}/costs limit": _whole(1, usage.COST_LIMITS[1]),
    f"{_ORGANIZATION}/usage bucket_width": _one_of(*usage.LIMITS_OF_WIDTH),
    f"{_ORGANIZATION}/costs bucket_width": _one_of(*usage.COST_WIDTHS),
    f"{_ORGANIZATION}/usage group_by": _one_of(*usage.USAGE_GROUPS),
    f"{_ORGANIZATION}/costs group_by": _one_of(*usage.COST_GROUPS),
    "owner_project_access": _one_of(*ACCESSES),
    "start_time": _whole(0, queries.SECONDS_MAX),
    "end_time": _whole(1, queries.SECONDS_MAX),  # later than `start_time`
    **{f"effective_at[{bound}]": _whole(0, queries.SECONDS_MAX - 1) for bound in BOUNDS},
    "batch": _FLAG,
    "tenant_only": _FLAG,
}


def parameter_schema(path: str, name: str) -> Schema:
    """Return the schema of one value of the parameter `name` of `path`; of several, they have it each."""
    return next((SCHEMAS[key] for key in keys_of(path, name) if key in SCHEMAS), _TEXT)
