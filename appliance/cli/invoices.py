"""`gatehouse invoices`: draft, discard, close, export, list; also the seller and the free allowances."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from appliance.base.errors import InvalidValue
from appliance.base.spreadsheet import escape_formulas
from appliance.cli import output
from appliance.cli.confirmation import Yes, ask_for_name, needs_terminal
from appliance.cli.connection import AdminClient, run
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.options import DEFAULTS, CommonOptions
from appliance.cli.tenants import OnlyTenant, at_tenant, find
from appliance.metering.invoicing.wording import format_payment

app = typer.Typer(help="Invoices: drafts, closing a month, files to send.", no_args_is_help=True)

COLUMNS = ("number", "tenant", "month", "state", "due", "id")
# With --all, the errors that leave a tenant out, and the words that follow the number of such tenants.
_LEFT_OUT = {
    "invoice_closed": "closed already",
    "month_out_of_order": "skipped: a later month is closed",
    "nothing_to_bill": "without anything to bill",
}
_SAME_FOR_ALL_TENANTS = ("invalid_value", "month_not_over")  # a wrong month is wrong for all tenants, so it is reported once
FORMATS = ("pdf", "csv", "json", "events")

Month = Annotated[str, typer.Option("--month", metavar="YYYY-MM", help="The month, in the billing time zone.")]
All = Annotated[bool, typer.Option("--all", help="All tenants, including archived ones, except those with nothing to bill.")]

Row = dict[str, Any]


@app.command("list")
def list_invoices(
    month: Annotated[str | None, typer.Option(metavar="YYYY-MM", help="Only this month.")] = None,
    tenant: OnlyTenant = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List invoices, newest month first. Drafts show what would be billed now."""
    if month is not None:
        _check_month(month)

    async def work(client: AdminClient) -> list[Row]:
        rows: list[Row] = []
        for chosen in await _tenants(client, tenant, everybody=tenant is None):
            invoices = await client.every(f"/tenants/{chosen['id']}/invoices")
            rows += [_row(invoice, chosen) for invoice in invoices if month in (None, invoice["month"])]
        return sorted(rows, key=lambda row: (row["month"], row["number"] or ""), reverse=True)

    _show(run(options.settings(), work), as_json=options.as_json)


@app.command("draft")
def draft(
    month: Month,
    tenant: OnlyTenant = None,
    everybody: All = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Draft the invoices of a month. They show what would be billed now."""
    _each(options, month, tenant, everybody=everybody, close=False)


@app.command("close")
def close(
    month: Month,
    tenant: OnlyTenant = None,
    everybody: All = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Close the invoices of a month that is over. They get their numbers and never change again."""
    _each(options, month, tenant, everybody=everybody, close=True)


@app.command("discard")
def discard(
    invoice_id: Annotated[str, typer.Argument(metavar="ID", help="The draft's id, as `invoices list` shows it.")],
    yes: Yes = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Discard a draft. Asks for the tenant's name; no usage is lost."""
    settings = options.settings()
    if not yes:
        needs_terminal("discarding removes the draft", expected="the tenant's name")
        draft = run(settings, lambda client: _find_draft(client, invoice_id))
        if "tenant" in draft:
            month, name = draft["month"], draft["tenant"]
            effect = f"The draft of {month} of {name} is removed. Its usage is kept; the month can be drafted again."
            ask_for_name(name, effect)
    output.item(run(settings, lambda client: _discarded(client, invoice_id)), as_json=options.as_json)


@app.command("export")
def export(
    month: Month,
    tenant: OnlyTenant = None,
    everybody: All = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files, created if missing.")] = Path("."),
    forms: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="FORMAT", help="pdf, csv, json or events (each request as CSV); repeatable."),
    ] = None,
    drafts: Annotated[bool, typer.Option("--drafts", help="Export drafts too, marked as such.")] = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Write invoices as files to send, such as invoice-2026-0001.pdf."""
    _check_month(month)
    for form in forms or ():
        if form not in FORMATS:
            raise WrongUsage(f"--format takes {', '.join(FORMATS)}, not {form!r}")

    async def work(client: AdminClient) -> tuple[list[str], int]:
        written: list[str] = []
        chosen = await _tenants(client, tenant, everybody=everybody)
        names = {each["id"] for each in chosen}
        heads = [head for head in await client.every("/invoices", query={"month": month}) if head["tenant_id"] in names]
        wanted = [head for head in heads if drafts or head["state"] == "closed"]
        with output.progress("Exporting", quiet=options.as_json) as advance:
            for done, head in enumerate(wanted, 1):
                written += [await _write(client, head, form, out) for form in forms or ("pdf",)]
                advance(done / len(wanted))
        return written, len(heads) - len(wanted)

    files, num_drafts = run(options.settings(), work)
    if not options.as_json:
        output.say("\n".join(files) if files else _why_no_file(month, num_drafts))
        return
    output.data({"files": files})
    if not files:
        sys.stderr.write(f"{_why_no_file(month, num_drafts)}\n")


def _why_no_file(month: str, num_drafts: int) -> str:
    if num_drafts:
        return f"There is no closed invoice of {month}, only drafts ({num_drafts}): close them, or export them with --drafts"
    return f"There is no closed invoice of {month}: gatehouse invoices close"


@app.command("seller")
def seller(
    file: Annotated[
        Path | None, typer.Option("--file", metavar="JSON", help="Replace the seller with this file, as in docs/billing.md.")
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Show or replace the seller on invoices. The seller is a name and address, with tax and bank details."""
    body = None if file is None else read_json(file)

    method = "GET" if body is None else "PUT"
    found = run(options.settings(), lambda client: client.call(method, "/seller", body=body))
    output.item(found, as_json=options.as_json)


@app.command("allowance")
def allowance(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="A tenant's id or name.")],
    month: Month,
    micros: Annotated[int, typer.Option("--micros", help="Free amount per month, in millionths of the currency; 0 ends it.")],
    options: CommonOptions = DEFAULTS,
) -> None:
    """Set a tenant's free monthly allowance, from a month on."""
    body = {"first_month": month, "monthly_micros": micros}
    work = at_tenant(tenant, "POST", "/allowances", body=body)
    output.item(run(options.settings(), work), as_json=options.as_json)


def _each(options: CommonOptions, month: str, tenant: str | None, *, everybody: bool, close: bool) -> None:
    """Draft the month of each tenant, `close` it if told, and show the results. With --all a failure does not stop the others,
    but sets the exit status."""
    _check_month(month)
    title, verb, only = ("Closing", "close", "closable") if close else ("Drafting", "draft", "billable")
    left_out: Counter[str] = Counter()

    async def work(client: AdminClient) -> tuple[list[Row], list[str]]:
        chosen = await _tenants(client, tenant, everybody=everybody)
        rows: list[Row] = []
        failures: list[str] = []
        with output.progress(title, quiet=options.as_json) as advance:
            for done, each in enumerate(chosen, 1):
                draft: Row | None = None
                try:
                    draft = await _draft_of(client, each, month, only if everybody else None)
                    invoice = await client.call("POST", f"/invoices/{draft['id']}/close") if close else draft
                    rows.append(_row(invoice, each))
                except CommandFailed as failure:
                    if not everybody or failure.code in _SAME_FOR_ALL_TENANTS:
                        raise
                    if draft is None and failure.code in _LEFT_OUT:
                        left_out[failure.code] += 1
                    else:
                        failures.append(f"{each['name']}: {failure.message}")
                finally:
                    advance(done / len(chosen))
        return rows, failures

    rows, failures = run(options.settings(), work)
    nothing = "" if failures else _why_nothing(verb, month, left_out)
    if options.as_json and not rows and nothing:
        sys.stderr.write(f"{nothing}\n")
    _show(rows, as_json=options.as_json, empty=nothing)
    if any(row["seller"] is None for row in rows):
        sys.stderr.write("gatehouse: these invoices name no seller; enter one: gatehouse invoices seller --file FILE\n")
    if failures:
        raise CommandFailed("; ".join(failures), code="invoices")


async def _draft_of(client: AdminClient, tenant: Row, month: str, only: str | None) -> Row:
    body = {"month": month} | ({} if only is None else {"only": only})
    return await client.call("POST", f"/tenants/{tenant['id']}/invoices", body=body)


def _why_nothing(verb: str, month: str, left_out: Counter[str]) -> str:
    """Return why nothing was done for any tenant: `Nothing to close of 2026-10: 3 closed already.`"""
    reasons = [f"{left_out[code]} {_LEFT_OUT[code]}" for code in _LEFT_OUT if left_out[code]]
    return f"Nothing to {verb} of {month}: {', '.join(reasons) or 'there are no tenants'}."


async def _find_draft(client: AdminClient, invoice_id: str) -> Row:
    """Return a draft's tenant and month; only the id if it is not a draft. Does not read its lines, which a draft in two
    currencies does not have."""
    for head in await client.every("/invoices", query={"state": "draft"}):
        if head["id"] == invoice_id:
            tenant = await client.call("GET", f"/tenants/{head['tenant_id']}")
            return {"id": invoice_id, "tenant_id": tenant["id"], "tenant": tenant["name"], "month": head["month"]}
    return {"id": invoice_id}


async def _discarded(client: AdminClient, invoice_id: str) -> Row:
    draft = await _find_draft(client, invoice_id)
    await client.remove(f"/invoices/{quote(invoice_id, safe='')}")
    return {**draft, "discarded": True}


def _check_month(month: str) -> None:
    """Raise WrongUsage for an invalid month before the appliance is called."""
    from appliance.metering.calendar import first_day

    try:
        first_day(month)
    except InvalidValue as error:
        raise WrongUsage(f"--{error.message}, not {month!r}") from error


async def _tenants(client: AdminClient, tenant: str | None, *, everybody: bool) -> list[Row]:
    if (tenant is None) != everybody:
        raise WrongUsage("choose --tenant TENANT or --all")
    if tenant is not None:
        return [await find(client, tenant)]
    return await client.every("/tenants", query={"include_archived": "true"})


async def _write(client: AdminClient, head: Row, form: str, out: Path) -> str:
    name = f"invoice-{head['number']}" if head["number"] else f"draft-{head['month']}-{head['tenant_id']}"
    if form == "events":
        return _save(out / f"{name}-events.csv", events_csv(await client.every(f"/invoices/{head['id']}/events")))
    return _save(out / f"{name}.{form}", await client.fetch(f"/invoices/{head['id']}.{form}"))


def events_csv(rows: list[Row]) -> bytes:
    """Return usage events as CSV; no cell is a formula."""
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
    """Return the value of a cell: yes and no as in the invoice's own file."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape_formulas(value) if isinstance(value, str) else value


def _save(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}", code="file") from error
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
        raise CommandFailed(f"{path} cannot be read as JSON: {error}", code="file") from error
