"""`gatehouse audit`: list the audit log, and verify that it has not been altered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.base.clock import SystemClock
from appliance.base.texts import counted
from appliance.cli import output
from appliance.cli.connection import AdminClient, check_has_tables, open_database, run
from appliance.cli.failure import WrongUsage
from appliance.cli.options import DEFAULTS, LIMIT_DEFAULT, CommonOptions, Limit
from appliance.cli.tenants import TenantFilter, tenant_field

if TYPE_CHECKING:
    from appliance.base.settings import Settings
    from appliance.tenancy.audit_chain import Verification

app = typer.Typer(help="List the audit log, and verify its hash chain.", no_args_is_help=True)

COLUMNS = ("id", "at", "actor", "action", "target", "tenant_id", "before", "after", "request_id", "address")
HASH_CHARS = 64
HEXADECIMAL = "0123456789abcdef"


@app.command("list")
def list_entries(
    actor: Annotated[
        str | None, typer.Option(metavar="ACTOR", help="Only this actor: e-mail address, token name or id.")
    ] = None,
    action: Annotated[str | None, typer.Option(metavar="ACTION", help="Only this action, such as key.rotate.")] = None,
    target: Annotated[str | None, typer.Option(metavar="ID", help="Only changes to the object with this id.")] = None,
    tenant: TenantFilter = None,
    start: Annotated[str | None, typer.Option(metavar="TIME", help="Only entries from this time on (RFC 3339).")] = None,
    end: Annotated[str | None, typer.Option(metavar="TIME", help="Only entries before this time (RFC 3339).")] = None,
    limit: Limit = LIMIT_DEFAULT,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List the entries, newest first."""
    query = {"actor": actor, "action": action, "target": target, "start": start, "end": end}

    async def work(client: AdminClient) -> tuple[list[dict[str, Any]], bool]:
        return await client.list_first("/audit", limit, query=query | await tenant_field(client, tenant))

    rows, has_more = run(options.settings(), work)
    empty = "There are no matching entries."
    output.rows(rows, COLUMNS, empty=empty, as_json=options.as_json, line=_line, has_more=has_more)


@app.command("verify")
def verify(
    expect: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="Hash printed by an earlier verification, which the log must still contain."),
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Verify the hash chain. The appliance may be running. Exit status 1 if an entry is invalid; the first one is reported.

    Store the printed hash elsewhere: with --expect it later proves that the log was not rewritten.
    """
    if expect is not None and (len(expect) != HASH_CHARS or set(expect) - set(HEXADECIMAL) or not expect.strip("0")):
        raise WrongUsage(
            "--expect takes the 64 hexadecimal digits that `gatehouse audit verify` prints for a non-empty log",
        )
    verification = asyncio.run(_verify(options.settings(), expect, quiet=options.as_json))
    fault = verification.fault
    if options.as_json:
        wrong = None if fault is None else {"entry_id": str(fault.entry_id), "kind": fault.kind, "message": fault.text}
        output.data({"ok": fault is None, "entries": verification.entries, "hash": verification.hash, "fault": wrong})
    elif fault is None:
        last = f", hash of the last one: {verification.hash}" if verification.entries else ""
        output.say(f"Audit log verified: {counted(verification.entries, 'entry', plural='entries')}{last}")
    else:
        output.failed(f"audit log verification failed: {fault.text}", "audit_log", as_json=False)
    if fault is not None:
        raise typer.Exit(1)


async def _verify(settings: Settings, expect: str | None, *, quiet: bool) -> Verification:
    from appliance.tenancy.audit import AuditLog

    await asyncio.to_thread(check_has_tables, settings)
    async with open_database(settings) as database:
        with output.progress("Verifying the audit log", quiet=quiet) as progress:
            return await AuditLog(database, SystemClock()).verify(expect, progress)


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry as a table row."""
    actor, target = row["actor"], row["target"]
    return {**row, "actor": f"{actor['kind']} {actor['name']}", "target": f"{target['kind']} {target['id']}"}
