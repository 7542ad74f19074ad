"""`gatehouse invoices`: list, draft, close, discard and export invoices; set the seller and free allowances."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from appliance.base.batches import batched
from appliance.base.errors import InvalidValue, NotFound
from appliance.base.spreadsheet import escape_formulas
from appliance.base.texts import counted
from appliance.cli import output
from appliance.cli.confirmation import Yes, ask_for_name, require_terminal
from appliance.cli.connection import AdminClient, run
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.options import DEFAULTS, CommonOptions
from appliance.cli.tenants import TenantFilter, call_on_tenant, find_tenant
from appliance.metering.invoicing.wording import file_stem, format_payment

app = typer.Typer(help="Draft, close and export invoices; set seller and allowances.", no_args_is_help=True)

COLUMNS = ("number", "tenant", "month", "state", "due", "id")
# With --all: error codes for which a tenant is skipped, with the text that follows the number of such tenants.
_SKIPPED = {
    "invoice_closed": "already closed",
    "month_out_of_order": "skipped because a later month is closed",
    "nothing_to_bill": "with nothing to bill",
}
_UNCOMPUTABLE = ("currencies_mixed", "invoice_inconsistent")  # error codes of drafts without lines
CALL_TENANTS = 20  # billed by one call, so that progress is shown; no more go into one transaction
BILLING_TIMEOUT_S = 600.0  # tenants with millions of requests take seconds
FORMATS = ("pdf", "csv", "json", "events")

Month = Annotated[str, typer.Option("--month", metavar="YYYY-MM", help="The month, in the billing time zone.")]
All = Annotated[bool, typer.Option("--all", help="All tenants, archived ones too, except those with nothing to bill.")]

Row = dict[str, Any]


@app.command("list")
def list_invoices(
    month: Annotated[str | None, typer.Option(metavar="YYYY-MM", help="Only this month.")] = None,
    tenant: TenantFilter = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List invoices, newest month first. Drafts show what would be billed now."""
    if month is not None:
        _check_month(month)

    async def work(client: AdminClient) -> list[Row]:
        rows: list[Row] = []
        for chosen in await _tenants(client, tenant, all_tenants=tenant is None):
            invoices = await client.list_all(f"/tenants/{chosen['id']}/invoices")
            rows += [_row(invoice, chosen) for invoice in invoices if month in (None, invoice["month"])]
        return sorted(rows, key=lambda row: (row["month"], row["number"] or ""), reverse=True)

    _show(run(options.settings(), work), as_json=options.as_json)


@app.command("draft")
def draft(
    month: Month,
    tenant: TenantFilter = None,
    all_tenants: All = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Draft the invoices of a month. A draft shows what would be billed now."""
    _bill(options, month, tenant, all_tenants=all_tenants)


@app.command("close")
def close(
    month: Month,
    tenant: TenantFilter = None,
    all_tenants: All = False,
    total: Annotated[
        int | None,
        typer.Option("--expected-total-micros", metavar="N", help="Close only with this total_micros; needs --tenant."),
    ] = None,
    currency: Annotated[
        str | None,
        typer.Option("--expected-currency", metavar="CODE", help="Close only in this currency; needs --tenant."),
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Close the invoices of a past month. They get their numbers and never change again."""
    if all_tenants and (total, currency) != (None, None):
        raise WrongUsage("--expected-total-micros and --expected-currency are for one invoice: give them with --tenant")
    closing = {"expected_total_micros": total, "expected_currency": currency}
    _bill(options, month, tenant, all_tenants=all_tenants, closing=closing)


@app.command("discard")
def discard(
    invoice_id: Annotated[str, typer.Argument(metavar="ID", help="The draft's id, from `invoices list`.")],
    yes: Yes = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Discard a draft. Asks for the tenant's name to confirm; no usage is lost."""
    settings = options.settings()
    if not yes:
        require_terminal("discarding a draft cannot be undone", expected="the tenant's name")
        draft = run(settings, lambda client: _find_draft(client, invoice_id))
        if "tenant" in draft:
            month, name = draft["month"], draft["tenant"]
            effect = f"This removes the draft of {month} for {name}. The usage is kept, and the month can be drafted again."
            ask_for_name(name, effect)
    output.item(run(settings, lambda client: _discard(client, invoice_id)), as_json=options.as_json)


@app.command("export")
def export(
    month: Month,
    tenant: TenantFilter = None,
    all_tenants: All = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files, created if missing.")] = Path("."),
    forms: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="pdf, csv, json, or events (a CSV with one line per request); repeatable; default: pdf.",
        ),
    ] = None,
    drafts: Annotated[bool, typer.Option("--drafts", help="Export drafts too, marked as drafts.")] = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Export invoices to files.

    An invoice's file is named such as invoice-2026-0001-bob-2026-10.pdf: number, tenant, month.
    """
    _check_month(month)
    for form in forms or ():
        if form not in FORMATS:
            raise WrongUsage(f"--format must be one of {', '.join(FORMATS)}, not {form!r}")

    async def work(client: AdminClient) -> tuple[list[str], int, list[str]]:
        written: list[str] = []
        failures: list[str] = []
        chosen = await _tenants(client, tenant, all_tenants=all_tenants)
        names = {tenant["id"]: tenant["name"] for tenant in chosen}
        rows = await client.list_all("/invoices", query={"month": month})
        invoices = [invoice for invoice in rows if invoice["tenant_id"] in names]
        exported = [invoice for invoice in invoices if drafts or invoice["state"] == "closed"]
        with output.progress("Exporting", quiet=options.as_json) as advance:
            for done, invoice in enumerate(exported, 1):
                name = names[invoice["tenant_id"]]
                try:
                    for form in forms or ("pdf",):
                        written.append(await _write(client, invoice, name, form, out))
                except CommandFailed as failure:
                    if failure.code not in _UNCOMPUTABLE:
                        raise
                    failures.append(f"{name}: {failure.message}")
                advance(done / len(exported))
        return written, len(invoices) - len(exported), failures

    files, num_drafts, failures = run(options.settings(), work)
    if failures:
        if files and not options.as_json:
            output.say("\n".join(files))
        raise CommandFailed("\n".join(failures), code="invoices", done={"files": files})
    why_none = "" if files else _why_no_file(month, num_drafts)
    if options.as_json:
        output.data({"files": files})
        sys.stderr.write(f"{why_none}\n" if why_none else "")
    else:
        output.say("\n".join(files) or why_none)


def _why_no_file(month: str, num_drafts: int) -> str:
    if num_drafts:
        return f"There are no closed invoices for {month}, only drafts ({num_drafts}): close them, or export them with --drafts"
    return f"There are no invoices for {month}. To create and close them: gatehouse invoices close"


@app.command("seller")
def seller(
    file: Annotated[
        Path | None, typer.Option("--file", metavar="JSON", help="Set the seller from this file (format: docs/billing.md).")
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Show or set the seller on invoices. It has a name and an address, tax and bank details."""
    body = None if file is None else read_json(file)

    method = "GET" if body is None else "PUT"
    found = run(options.settings(), lambda client: client.call(method, "/seller", body=body))
    output.item(found, as_json=options.as_json)


@app.command("allowance")
def allowance(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="A tenant's id or name.")],
    month: Month,
    micros: Annotated[
        int, typer.Option("--micros", help="Free amount per month, in millionths of the currency; 0 ends the allowance.")
    ],
    options: CommonOptions = DEFAULTS,
) -> None:
    """Set a tenant's free monthly allowance, starting with a month."""
    body = {"first_month": month, "monthly_micros": micros}
    work = call_on_tenant(tenant, "POST", "/allowances", body=body)
    output.item(run(options.settings(), work), as_json=options.as_json)


@dataclass(slots=True)
class _Billed:
    """What became of a month: rows of the invoices, numbers of skipped tenants by error code, and failures with names.
    `unfinished`: why the last tenants were not billed."""

    rows: list[Row]
    skipped: Counter[str]
    failures: list[str]
    unfinished: str = ""


def _bill(options: CommonOptions, month: str, tenant: str | None, *, all_tenants: bool, closing: Row | None = None) -> None:
    """Draft, and with `closing` (the body of the call for one tenant) also close, the invoices of a month for the chosen
    tenants, and print them. With --all, a failure for one tenant does not stop the others, but sets the exit status."""
    _check_month(month)

    async def work(client: AdminClient) -> _Billed:
        chosen = await _tenants(client, tenant, all_tenants=all_tenants)
        await _warn_without_seller(client)
        if all_tenants:
            return await _bill_all(client, chosen, month, "draft" if closing is None else "close", quiet=options.as_json)
        (owner,) = chosen
        return _Billed([_row(await _bill_one(client, owner, month, closing), owner)], Counter(), [])

    billed = run(options.settings(), work)
    summary = _summary("Drafted" if closing is None else "Closed", month, billed) if all_tenants else ""
    failure = "\n".join(filter(None, [*billed.failures, billed.unfinished]))
    if not (failure and options.as_json):
        _show(billed.rows, as_json=options.as_json, empty=summary)
    if summary and (billed.rows or options.as_json):
        sys.stderr.write(f"{summary}\n")
    if failure:
        raise CommandFailed(failure, code="invoices", done={"data": billed.rows})


async def _warn_without_seller(client: AdminClient) -> None:
    try:
        await client.call("GET", "/seller")
    except CommandFailed as failure:
        if failure.code != NotFound.code:
            raise
        sys.stderr.write(
            "gatehouse: the seller has not been entered; closed invoices without a seller never get one, and have no tax. "
            "Enter it before closing: gatehouse invoices seller --file FILE\n"
        )


async def _bill_all(client: AdminClient, tenants: list[Row], month: str, verb: str, *, quiet: bool) -> _Billed:
    """Bill all tenants, a few with each call. A call that fails ends this; only if it is the first one, its error is raised."""
    names = {tenant["id"]: tenant for tenant in tenants}
    billed, done = _Billed([], Counter(), []), 0
    with output.progress("Drafting" if verb == "draft" else "Closing", quiet=quiet) as advance:
        for ids in batched(list(names), CALL_TENANTS):
            path, body = f"/invoices/months/{month}/{verb}", {"tenant_ids": ids}
            try:
                outcomes = (await client.call("POST", path, body=body, timeout_s=BILLING_TIMEOUT_S))["data"]
            except CommandFailed as failure:
                if not done:
                    raise
                left = counted(len(tenants) - done, "tenant")
                billed.unfinished = f"the last {left}, from {names[ids[0]]['name']} on, may not be billed: {failure.message}"
                break
            for outcome in outcomes:
                tenant, error = names[outcome["tenant_id"]], outcome["error"]
                if error is None:
                    billed.rows.append(_row(outcome["invoice"], tenant))
                elif outcome["result"] == "skipped":
                    billed.skipped[error["code"]] += 1
                else:
                    billed.failures.append(f"{tenant['name']}: {error['message']}")
            done += len(ids)
            advance(done / len(tenants))
    return billed


async def _bill_one(client: AdminClient, tenant: Row, month: str, closing: Row | None) -> Row:
    """Return the draft, or with `closing` the closed invoice. A draft that is created and cannot be closed is discarded."""
    body = {"month": month}
    if closing is None:
        return await client.call("POST", f"/tenants/{tenant['id']}/invoices", body=body)
    earlier = {draft["id"] for draft in await client.list_all("/invoices", query={"month": month, "state": "draft"})}
    draft = await client.call("POST", f"/tenants/{tenant['id']}/invoices", body=body)
    try:
        return await client.call("POST", f"/invoices/{draft['id']}/close", body=closing)
    except CommandFailed:
        if draft["id"] not in earlier:
            with suppress(CommandFailed):
                await client.remove(f"/invoices/{draft['id']}")
        raise


def _summary(done: str, month: str, billed: _Billed) -> str:
    """Return such as `Closed 2 invoices for 2026-10: 3 tenants already closed, 1 tenant failed.`"""
    counts = [(billed.skipped[code], text) for code, text in _SKIPPED.items()] + [(len(billed.failures), "failed")]
    others = ", ".join(f"{counted(count, 'tenant')} {text}" for count, text in counts if count)
    invoices = counted(len(billed.rows), "invoice") if billed.rows else "nothing"
    return f"{done} {invoices} for {month}{': ' if others else ''}{others}."


async def _find_draft(client: AdminClient, invoice_id: str) -> Row:
    """Return a draft's tenant and month, or only the id if it is no draft. Does not read its lines, because some
    drafts have none."""
    for draft in await client.list_all("/invoices", query={"state": "draft"}):
        if draft["id"] == invoice_id:
            tenant = await client.call("GET", f"/tenants/{draft['tenant_id']}")
            return {"id": invoice_id, "tenant_id": tenant["id"], "tenant": tenant["name"], "month": draft["month"]}
    return {"id": invoice_id}


async def _discard(client: AdminClient, invoice_id: str) -> Row:
    draft = await _find_draft(client, invoice_id)
    await client.remove(f"/invoices/{quote(invoice_id, safe='')}")
    return {**draft, "discarded": True}


def _check_month(month: str) -> None:
    """Raise WrongUsage for an invalid month, before the appliance is called."""
    from appliance.metering.calendar import first_day

    try:
        first_day(month)
    except InvalidValue as error:
        raise WrongUsage(f"--{error.message}, not {month!r}") from error


async def _tenants(client: AdminClient, tenant: str | None, *, all_tenants: bool) -> list[Row]:
    if (tenant is None) != all_tenants:
        raise WrongUsage("give either --tenant TENANT or --all")
    if tenant is not None:
        return [await find_tenant(client, tenant)]
    return await client.list_all("/tenants", query={"include_archived": "true"})


async def _write(client: AdminClient, invoice: Row, tenant_name: str, form: str, out: Path) -> str:
    name = file_stem(invoice["number"], invoice["month"], invoice["tenant_id"], tenant_name)
    if form == "events":
        return _save(out / f"{name}-events.csv", events_csv(await client.list_all(f"/invoices/{invoice['id']}/events")))
    return _save(out / f"{name}.{form}", await client.fetch(f"/invoices/{invoice['id']}.{form}"))


def events_csv(rows: list[Row]) -> bytes:
    """Return usage events as CSV, with formulas escaped."""
    import csv
    import io

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    columns = list(rows[0]) if rows else ["id"]
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row[column]) for column in columns])
    return buffer.getvalue().encode()


def _cell(value: object) -> object:
    """Return the value of a cell, with yes and no as in the invoice's own CSV."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape_formulas(value) if isinstance(value, str) else value


def _save(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}", code="file") from error
    return str(path)


def _row(invoice: Row, tenant: Row) -> Row:
    due = invoice["problem"] or format_payment(invoice["due_micros"], invoice["currency"])
    return {**invoice, "tenant": tenant["name"], "due": due}


def _show(rows: list[Row], *, as_json: bool, empty: str = "There are no invoices.") -> None:
    output.rows(rows, COLUMNS, empty=empty, as_json=as_json)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CommandFailed(f"cannot read {path} as JSON: {error}", code="file") from error
