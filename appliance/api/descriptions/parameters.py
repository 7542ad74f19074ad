"""Descriptions of parameters in path, query and headers. A bare name describes the parameter of any path; `/path name` that of
this path and all paths below it. The longest match wins."""

from __future__ import annotations

from collections.abc import Iterator

_ORGANIZATION = "/v1/organization"

PARAMETERS = {
    "limit": "The maximum number of rows on a page, 1 to 1,000. Default: 50.",
    "cursor": "The `next_cursor` of the previous page.",
    "start": "Only entries at or after this time (RFC 3339 with a UTC offset).",
    "end": "Only entries before this time (RFC 3339 with a UTC offset).",
    "tenant_id": "The id of a tenant.",
    "key_id": "The id of an API key.",
    "member_id": "The id of a member.",
    "webhook_id": "The id of a webhook.",
    "delivery_id": "The id of a delivery.",
    "invoice_id": "The id of an invoice. When retrieving one, `.json`, `.csv` or `.pdf` may follow.",
    "session_id": "The id of a session.",
    "price_id": "The id of a price.",
    "event_id": "The id of a usage event.",
    "request_id": "The id of a request, the same as `x-request-id`.",
    "model_id": "The name of a model.",
    "model": "The name of a model.",
    "name": "`interactive`, `standard` or `batch`.",
    "include_archived": "`true` to include archived tenants. Default: `false`.",
    "order": "`asc` (oldest first) or `desc` (newest first). Default: `asc`.",
    "month": "Only this month, such as `2026-10`.",
    "Idempotency-Key": (
        "A key of your choice, unique for the event: the same correction with the same key is made once, however often it is "
        "sent. With the key of another correction the call fails with 409 `idempotency_conflict`."
    ),
    # /admin/v1
    **{
        f"/admin/v1/{report} {name}": text
        for report in ("usage", "costs")
        for name, text in {
            "start": "The start of the report (RFC 3339 with a UTC offset), inclusive. Default: 30 days before `end`.",
            "end": "The end of the report (RFC 3339 with a UTC offset), exclusive. Default: now.",
            "bucket": "The length of the periods: `minute`, `hour` or `day`. Default: `day`.",
            "group_by": "`tenant`, `key` or `model`; repeatable or comma-separated. Default: no groups, one row per period.",
            "tenant_id": "Only usage of this tenant.",
            "key_id": "Only usage of this API key; repeatable.",
            "model": "Only usage of this model; repeatable.",
            "limit": "The maximum number of rows on a page, 1 to 1,000. Default: 1,000.",
        }.items()
    },
    **{
        f"/admin/v1/{short} limit": "The maximum number of rows on a page, 1 to 1,000. Default: 1,000."
        for short in ("tiers", "model-limits", "tenants/{tenant_id}/allowances")
    },
    "/admin/v1/sessions member_id": "The member whose sessions to list or to end. Default: the caller.",
    "/admin/v1/ledger tenant_id": "Only events of this tenant.",
    "/admin/v1/ledger key_id": "Only events of this API key.",
    "/admin/v1/ledger model": "Only events of this model.",
    "/admin/v1/ledger kind": "Only `usage` or only `adjustment`.",
    "/admin/v1/ledger status": "Only `pending`, `posted`, `voided` or `recovered`.",
    "/admin/v1/ledger request_id": "Only events of this request.",
    "/admin/v1/ledger start": "Only events admitted from this time on (RFC 3339 with a UTC offset).",
    "/admin/v1/ledger end": "Only events admitted before this time (RFC 3339 with a UTC offset).",
    "/admin/v1/requests tenant_id": "Only requests of this tenant.",
    "/admin/v1/requests key_id": "Only requests with this API key.",
    "/admin/v1/requests model": "Only requests to this model.",
    "/admin/v1/invoices state": "Only `draft` or only `closed`.",
    "/admin/v1/webhooks tenant_id": "Only webhooks of this tenant.",
    "/admin/v1/webhooks/{webhook_id}/deliveries state": "Only `pending`, `delivered` or `failed`.",
    "/admin/v1/audit actor": "Only changes by this member, token or key: an id, an e-mail address or a name; repeatable.",
    "/admin/v1/audit action": "Only this action, such as `key.rotate`; repeatable.",
    "/admin/v1/audit target": "Only changes of the object with this id; repeatable.",
    "/admin/v1/audit tenant_id": "Only changes that concern this tenant; repeatable.",
    # /v1/organization
    "project_id": "The id of a project (tenant).",
    "rate_limit_id": "The id of a rate limit, such as `rl-*`.",
    f"{_ORGANIZATION} limit": "The maximum number of rows on a page, 1 to 100. Default: 20.",
    f"{_ORGANIZATION}/projects/{{project_id}}/rate_limits limit": (
        "The maximum number of rows on a page, 1 to 1,000. Default: 100."
    ),
    f"{_ORGANIZATION}/usage limit": (
        "The maximum number of buckets on a page. Default and maximum: 60 and 1,440 for `1m`, 24 and 168 for `1h`, 7 and 31 "
        "for `1d`."
    ),
    f"{_ORGANIZATION}/costs limit": "The maximum number of buckets on a page, 1 to 180. Default: 7.",
    f"{_ORGANIZATION}/admin_api_keys key_id": "The id of an admin key.",
    "after": "Only rows after the one with this id.",
    "before": "Only rows before the one with this id.",
    "owner_project_access": "`active`, `inactive` (keys of archived projects) or `any`. Default: `any`.",
    "start_time": "The start of the report in Unix seconds, inclusive. Required.",
    "end_time": "The end of the report in Unix seconds, exclusive. Default: the end of the current bucket.",
    f"{_ORGANIZATION}/usage bucket_width": "`1m`, `1h` or `1d` (days of the billing time zone). Default: `1d`.",
    f"{_ORGANIZATION}/costs bucket_width": "Only `1d` (days of the billing time zone).",
    "page": "The `next_page` of the previous page.",
    "project_ids": "Only these projects (tenants); repeatable.",
    "api_key_ids": "Only these API keys; repeatable.",
    "models": "Only these models; repeatable.",
    "line_items": "Only these models; repeatable.",
    "user_ids": "Not supported, because usage is not recorded per user: refused with 400.",
    "batch": "Not supported, because reports do not distinguish batch work: refused with 400.",
    f"{_ORGANIZATION}/usage group_by": (
        "`project_id`, `api_key_id` or `model`; repeatable. Default: no groups, one result per bucket."
    ),
    f"{_ORGANIZATION}/costs group_by": (
        "`project_id`, `api_key_id` or `line_item` (a model); repeatable. Default: no groups, one result per bucket and "
        "currency."
    ),
    "tenant_only": "Not supported: refused with 400. Filter with `project_ids` instead.",
    "actor_emails": "Only changes by these members (e-mail addresses) or other actors (names); repeatable.",
    "actor_ids": "Only changes by these members, tokens or keys (ids); repeatable.",
    "event_types": "Only these types of events, such as `api_key.created`; repeatable.",
    "resource_ids": "Only changes of the objects with these ids; repeatable.",
    "effective_at[gte]": "Only entries at or after this time, in Unix seconds.",
    "effective_at[gt]": "Only entries after this time, in Unix seconds.",
    "effective_at[lt]": "Only entries before this time, in Unix seconds.",
    "effective_at[lte]": "Only entries at or before this time, in Unix seconds.",
}


def describe_parameter(path: str, name: str) -> str | None:
    """Return the description of the parameter `name` of `path`, or None. `name[]` has the description of `name`."""
    candidates = (PARAMETERS.get(key) for key in lookup_keys(path, name))
    return next((text for text in candidates if text is not None), None)


def lookup_keys(path: str, name: str) -> Iterator[str]:
    """Yield the keys under which to look a parameter up, the most specific first."""
    name = name.removesuffix("[]")
    path = path if path.startswith("/v1") else path.replace("/organization", _ORGANIZATION, 1)
    while path:
        yield f"{path} {name}"
        path = path.rpartition("/")[0]
    yield name
