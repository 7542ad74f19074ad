"""`gatehouse ledger`: list and correct usage events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from appliance.base.money import format_picos
from appliance.cli import output
from appliance.cli.connection import AdminClient, run
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.options import DEFAULTS, LIMIT_DEFAULT, CommonOptions, Limit
from appliance.cli.tenants import TenantFilter, tenant_field

KEY_HEADER = "Idempotency-Key"

app = typer.Typer(help="List usage events (one per request), and correct them.", no_args_is_help=True)

COLUMNS = (
    "id", "posting", "admitted_at", "tenant_id", "model", "kind", "batch", "status", "finish_reason", "cause", "prompt_tokens",
    "cached_tokens", "completion_tokens", "rejected_tokens", "cost", "note", "request_id",
)  # fmt: skip

Tokens = Annotated[int, typer.Option(metavar="TOKENS", help="Tokens to add; negative to subtract.")]


@app.command("list")
def list_events(
    tenant: TenantFilter = None,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Only this request.")] = None,
    status: Annotated[
        str | None, typer.Option(metavar="STATUS", help="Only this status: pending, posted, voided or recovered.")
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Only this kind: usage or adjustment.")] = None,
    start: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only events admitted from this time on (RFC 3339).")
    ] = None,
    end: Annotated[str | None, typer.Option(metavar="TIME", help="Only events admitted before this time (RFC 3339).")] = None,
    limit: Limit = LIMIT_DEFAULT,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List usage events, newest first."""
    query = {"order": "desc", "request_id": request, "status": status, "kind": kind, "start": start, "end": end}

    async def work(client: AdminClient) -> tuple[list[dict[str, Any]], bool]:
        return await client.list_first("/ledger", limit, query=query | await tenant_field(client, tenant))

    rows, has_more = run(options.settings(), work)
    empty = "There are no matching events."
    output.rows(rows, COLUMNS, empty=empty, as_json=options.as_json, line=_line, has_more=has_more)


@app.command("correct")
def correct(
    event: Annotated[str, typer.Argument(metavar="EVENT", help="The settled event's id.")],
    note: Annotated[str, typer.Option(metavar="TEXT", help="The reason, shown on the tenant's invoice.")],
    prompt_tokens: Tokens = 0,
    cached_tokens: Tokens = 0,
    completion_tokens: Tokens = 0,
    rejected_tokens: Tokens = 0,
    cost_picos: Annotated[
        int | None, typer.Option(metavar="PICOS", help="Cost to add, instead of tokens; negative to credit.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Confirm a correction of more than 1,000 times the event or 10 million tokens.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option("--idempotency-key", metavar="KEY", help="With the same key the same correction is made only once."),
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Correct a settled event by adding an adjustment. Both are kept; the next invoice to be closed bills the adjustment."""
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise WrongUsage("--idempotency-key must have printable ASCII characters")
    body: dict[str, Any] = {
        "note": note,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": completion_tokens,
        "rejected_tokens": rejected_tokens,
        "cost_picos": cost_picos,
        "confirm": yes,
    }

    async def work(client: AdminClient) -> dict[str, Any]:
        try:
            headers = None if key is None else {KEY_HEADER: key}
            return await client.call("POST", f"/ledger/{event}/corrections", body=body, headers=headers)
        except CommandFailed as error:  # the message names the API field, which is an option here
            raise CommandFailed(error.message.replace("`confirm`", "`--yes`"), code=error.code, status=error.status) from error

    output.row(run(options.settings(), work), COLUMNS, as_json=options.as_json, line=_line)


def _line(event: Mapping[str, Any]) -> dict[str, Any]:
    return {**event, "cost": format_picos(int(event["cost_picos"]), str(event["currency"]))}
