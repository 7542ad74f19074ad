"""Closes all drafts of a month together, after their number and totals were confirmed. Each is closed independently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from litestar import get, post
from litestar.params import FromPath

from appliance.base.errors import GatehouseError, NotFound
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import FORM_ERROR, Form, sentence
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.console.tenant_names import tenant_names
from appliance.metering.invoicing.portions import Expected
from appliance.metering.invoicing.rows import Invoice
from appliance.metering.invoicing.wording import format_payment, month_name
from appliance.tenancy.roles import Action

REASONS_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMonth:
    """The drafts of a month as (tenant name, invoice), by name. `uncomputable`: (tenant name, reason) of drafts without a
    total."""

    month: str
    drafts: Sequence[tuple[str, Invoice]]
    uncomputable: Sequence[tuple[str, str]]

    @property
    def sums(self) -> list[tuple[str, int, int]]:
        """Return (currency, number of invoices, amount due in micro-units) by currency."""
        numbers, due = Counter[str](), Counter[str]()
        for _, invoice in self.drafts:
            numbers[invoice.currency] += 1
            due[invoice.currency] += invoice.totals.due_micros
        return [(currency, number, due[currency]) for currency, number in sorted(numbers.items())]

    @property
    def confirmation(self) -> str:
        """Return the value that the form sends back: a digest of the drafts and totals that it showed."""
        shown = sorted((invoice.head.id, invoice.currency, invoice.totals.total_micros) for _, invoice in self.drafts)
        return sha256(repr(shown).encode()).hexdigest()


@get("/invoices/months/{month:str}/close", guards=[needs(Action.BILLING)])
async def confirm_month(context: ContextDependency, month: FromPath[str]) -> Html:
    """Confirm closing: shows the number of drafts and the amount due in each currency."""
    return _form(context, await _open_month(context, month), None)


@post("/invoices/months/{month:str}/close", guards=[needs(Action.BILLING)], status_code=200)
async def close_month(context: ContextDependency, month: FromPath[str]) -> Html:
    """Close the confirmed drafts. The form is shown again with the reasons if some cannot be closed."""
    form = await context.form()
    open_month = await _open_month(context, month)
    if form.raw("confirmed") != open_month.confirmation:
        form.fail(FORM_ERROR, "The drafts have changed in the meantime. Check their number and amounts again.")
        return _form(context, open_month, form)
    refused = await _close(context, open_month)
    if not refused:
        return _closed(context)
    reasons = " ".join(refused[:REASONS_SHOWN_MAX])
    form.fail(FORM_ERROR, f"{len(open_month.drafts) - len(refused)} closed, {len(refused)} not. {reasons}")
    try:
        return _form(context, await _open_month(context, month), form)
    except NotFound:  # the remaining drafts were closed or discarded concurrently
        return _closed(context)


async def _open_month(context: Context, month: str) -> OpenMonth:
    """Return the drafts of a month. Raises InvalidValue for an invalid month, and NotFound if no draft has a total."""
    names = await tenant_names(context.services, context.access)
    drafts: list[tuple[str, Invoice]] = []
    uncomputable: list[tuple[str, str]] = []
    for invoice in await context.services.invoices.drafts_of_month(month, access=context.access):
        name = names[invoice.head.tenant_id]
        if invoice.problem is None:
            drafts.append((name, invoice))
        else:
            uncomputable.append((name, invoice.problem))
    uncomputable.sort(key=_by_name)
    if not drafts:
        reasons = "".join(f"; {name}: {reason}" for name, reason in uncomputable[:REASONS_SHOWN_MAX])
        raise NotFound(f"there is no draft of {month_name(month)} that could be closed{reasons}", param="month")
    return OpenMonth(month=month, drafts=sorted(drafts, key=_by_name), uncomputable=uncomputable)


def _by_name(named: tuple[str, object]) -> str:
    return named[0].casefold()


async def _close(context: Context, open_month: OpenMonth) -> list[str]:
    """Close the drafts; return an error message for each that could not be closed."""
    expected = {
        invoice.head.id: Expected(invoice.totals.total_micros, invoice.currency) for _name, invoice in open_month.drafts
    }
    outcomes = await context.services.invoices.close_each(expected, access=context.access)
    refused = []
    for name, invoice in open_month.drafts:
        outcome = outcomes[invoice.head.id]
        if isinstance(outcome, GatehouseError):  # also NotFound: discarded concurrently
            refused.append(f"{name}: {sentence(outcome.message)}")
    return refused


def _closed(context: Context) -> Html:
    return context.redirect("/invoices?state=closed", done="month-closed")


def _form(context: Context, open_month: OpenMonth, form: Form | None) -> Html:
    title = f"Close all drafts of {month_name(open_month.month)}"
    return context.sheet(
        "fragments/month_close.html", title=title, open_month=open_month, format_payment=format_payment, form=form
    )
