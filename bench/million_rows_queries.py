"""The queries of the million-row bench: every kind of usage API query, and the console pages that read most."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

GROUPINGS = ("model", "tenant", "key", "tenant,model", "tenant,key,model")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySubjects:
    """Ids that the queries refer to: the tenant and the key that use most, a tenant that used nothing, keys that use little,
    and one request."""

    tenant_id: str
    key_id: str
    quiet_tenant_id: str
    quiet_key_ids: tuple[str, ...]
    request_id: str


def queries(now: datetime, subjects: QuerySubjects) -> dict[str, str]:
    """Return the paths to request, by name of the query."""
    usage = _usage_queries(now, subjects)
    return usage | _organization_queries(now, subjects) | _row_queries(now, subjects) | _console_queries(subjects)


def _usage_queries(now: datetime, subjects: QuerySubjects) -> dict[str, str]:
    day, week, month = (_iso(now - timedelta(days=days)) for days in (1, 7, 30))
    one, key, quiet = f"tenant_id={subjects.tenant_id}", f"key_id={subjects.key_id}", f"tenant_id={subjects.quiet_tenant_id}"
    api = "/admin/v1/usage?"
    urls = {
        "usage of 30 days": api,
        "usage of 30 days by model": f"{api}group_by=model",
        "usage of 30 days by tenant": f"{api}group_by=tenant",
        "usage of 30 days by tenant, key and model": f"{api}group_by=tenant,key,model",
        "usage of 90 days by model": f"{api}group_by=model&start={_iso(now - timedelta(days=90))}",
        "usage of 30 days of one tenant by key": f"{api}group_by=key&{one}",
        "usage of 7 days by hour and tenant": f"{api}bucket=hour&group_by=tenant&start={week}",
        "usage of a day by minute and model": f"{api}bucket=minute&group_by=model&start={day}",
        "costs of 30 days by tenant": "/admin/v1/costs?group_by=tenant",
    }
    for bucket in ("hour", "minute"):
        of_month = f"{api}bucket={bucket}&start={month}"
        urls[f"usage of 30 days by {bucket}"] = of_month
        for groups in GROUPINGS:
            urls[f"usage of 30 days by {bucket}, {groups}"] = f"{of_month}&group_by={groups}"
        for name, only in {
            "the largest tenant": one,
            "a quiet tenant": quiet,
            "one key": key,
            "a rare model": "model=rare",
        }.items():
            urls[f"usage of 30 days by {bucket} of {name}"] = f"{of_month}&{only}"
            urls[f"usage of 30 days by {bucket} of {name} by tenant, key and model"] = (
                f"{of_month}&group_by=tenant,key,model&{only}"
            )
    return urls


def _organization_queries(now: datetime, subjects: QuerySubjects) -> dict[str, str]:
    quiet = "".join(f"&api_key_ids[]={key_id}" for key_id in subjects.quiet_key_ids)
    usage, costs = "/v1/organization/usage/completions?", "/v1/organization/costs?"
    urls = {"organization costs of 180 days": f"{costs}limit=180&start_time={_unix(now, 180)}"}
    urls["organization costs of 30 days by project and line item"] = (
        f"{costs}limit=31&start_time={_unix(now, 30)}&group_by[]=project_id&group_by[]=line_item"
    )
    for width, limit in {"1d": 31, "1h": 168, "1m": 1440}.items():
        of_month = f"{usage}bucket_width={width}&limit={limit}&start_time={_unix(now, 30)}"
        urls[f"organization usage, {limit} of {width}"] = of_month
        urls[f"organization usage, {limit} of {width} by model"] = f"{of_month}&group_by[]=model"
        urls[f"organization usage, {limit} of {width} of quiet keys by key"] = f"{of_month}{quiet}&group_by[]=api_key_id"
        urls[f"organization usage, {limit} of {width} by project, key and model"] = (
            f"{of_month}&group_by[]=project_id&group_by[]=api_key_id&group_by[]=model"
        )
    return urls


def _row_queries(now: datetime, subjects: QuerySubjects) -> dict[str, str]:
    ledger, past = "/admin/v1/ledger?", "/admin/v1/requests?"
    middle = f"start={_iso(now - timedelta(days=15))}&end={_iso(now - timedelta(days=14))}"
    return {
        "ledger": ledger,
        "ledger, newest first": f"{ledger}order=desc",
        "ledger, a thousand": f"{ledger}limit=1000",
        "ledger of the largest tenant": f"{ledger}tenant_id={subjects.tenant_id}",
        "ledger of a quiet tenant": f"{ledger}tenant_id={subjects.quiet_tenant_id}",
        "ledger of one key": f"{ledger}key_id={subjects.key_id}",
        "ledger of one key, newest first": f"{ledger}key_id={subjects.key_id}&order=desc",
        "ledger of a rare model": f"{ledger}model=rare",
        "ledger of an unknown model": f"{ledger}model=none",
        "ledger of what was voided": f"{ledger}status=voided",
        "ledger of what is pending": f"{ledger}status=pending",
        "ledger of adjustments": f"{ledger}kind=adjustment",
        "ledger of one request": f"{ledger}request_id={subjects.request_id}",
        "ledger of a day": f"{ledger}{middle}",
        "ledger of a day, newest first": f"{ledger}{middle}&order=desc",
        "requests": past,
        "requests, a thousand": f"{past}limit=1000",
        "requests of the largest tenant": f"{past}tenant_id={subjects.tenant_id}",
        "requests of one key": f"{past}key_id={subjects.key_id}",
        "requests of a rare model": f"{past}model=rare",
        "requests of an unknown model": f"{past}model=none",
    }


def _console_queries(subjects: QuerySubjects) -> dict[str, str]:
    return {
        "console usage": "/usage",
        "console usage by key": "/usage?group=key",
        "console usage by model": "/usage?group=model",
        "console usage of one tenant": f"/usage?tenant={subjects.tenant_id}",
        "console usage of today": "/usage?period=today",
        "console usage of this month by key": "/usage?period=month&group=key",
        "console usage as CSV": "/usage.csv?group=key",
        "console overview": "/",
        "console tenants": "/tenants",
        "console tenant": f"/tenants/{subjects.tenant_id}",
        "console key": f"/keys/{subjects.key_id}",
        "console requests": "/requests",
        "console requests that mention a model": "/requests?q=rare",
        "console requests that mention nothing known": "/requests?q=nothing-like-it",
        "console request by its whole id": f"/requests?q={subjects.request_id}",
        "console requests that failed": "/requests?state=error",
        "console request": f"/requests/{subjects.request_id}",
        "console invoices": "/invoices",
        "console prices": "/prices",
        "console economics": "/settings/economics",
    }


def walks(now: datetime) -> dict[str, str]:
    """Return the paths of the reports that are read page by page to the end, by name."""
    hours = f"/admin/v1/usage?bucket=hour&start={_iso(now - timedelta(days=30))}"
    minutes = f"/admin/v1/usage?bucket=minute&start={_iso(now - timedelta(days=1))}"
    usage = f"/v1/organization/usage/completions?bucket_width=1h&limit=168&start_time={_unix(now, 7)}"
    return {
        "30 days by hour by tenant, key and model": f"{hours}&group_by=tenant,key,model",
        "30 days by hour by tenant": f"{hours}&group_by=tenant",
        "a day by minute by tenant, key and model": f"{minutes}&group_by=tenant,key,model",
        "organization, a week by hour by project, key and model": (
            f"{usage}&group_by[]=project_id&group_by[]=api_key_id&group_by[]=model"
        ),
    }


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _unix(now: datetime, days: int) -> int:
    return int((now - timedelta(days=days)).timestamp())
