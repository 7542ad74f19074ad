"""`gatehouse usage`: usage and cost from the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from appliance.base.clock import rfc3339
from appliance.base.money import format_picos
from appliance.cli import output
from appliance.cli.connection import AdminClient, run
from appliance.cli.keys import find_key
from appliance.cli.options import DEFAULTS, CommonOptions
from appliance.cli.tenants import TenantFilter, tenant_field

COLUMNS = ("start", "tenant", "key_id", "model", "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
DAYS_DEFAULT = 30


def usage(
    start: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start of the report (RFC 3339); default: 30 days ago.")
    ] = None,
    end: Annotated[str | None, typer.Option(metavar="TIME", help="End of the report (RFC 3339); default: now.")] = None,
    bucket: Annotated[str, typer.Option(metavar="PERIOD", help="Length of the periods: minute, hour or day.")] = "day",
    group_by: Annotated[
        str, typer.Option(metavar="FIELDS", help="tenant, key or model; separate several by commas.")
    ] = "tenant",
    tenant: TenantFilter = None,
    key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Only this key (id or public prefix); repeatable.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(metavar="MODEL", help="Only this model; repeatable.")] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Show usage and cost by period, and by tenant, key or model."""
    now = datetime.now(UTC)
    query: dict[str, Any] = {
        "start": rfc3339(now - timedelta(days=DAYS_DEFAULT)) if start is None else start,
        "end": rfc3339(now + timedelta(seconds=1)) if end is None else end,
        "bucket": bucket,
        "group_by": group_by or None,
    }

    async def work(client: AdminClient) -> tuple[list[dict[str, Any]], dict[str, str]]:
        tenants = await client.list_all("/tenants", query={"include_archived": "true"})
        keys = [(await find_key(client, which))["id"] for which in key or ()]
        filtered = query | await tenant_field(client, tenant) | {"key_id": keys or None, "model": model or None}
        return await client.list_all("/usage", query=filtered), {owner["id"]: owner["name"] for owner in tenants}

    rows, names = run(options.settings(), work)
    grouped = {"tenant": "tenant", "key": "key_id", "model": "model"}
    hidden = {column for group, column in grouped.items() if group not in group_by.split(",")}
    shown = [column for column in COLUMNS if column not in hidden]

    def line(row: Mapping[str, Any]) -> dict[str, Any]:
        cost = format_picos(int(row["cost_picos"]), str(row["currency"]))
        return {**row, "cost": cost, "tenant": names.get(row.get("tenant_id") or "")}

    output.rows(rows, shown, empty="There was no usage in this period.", as_json=options.as_json, line=line)
