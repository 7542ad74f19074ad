"""Invoices: the list, a single invoice, and drafting, closing and discarding. Metering computes the contents of invoices; the
administrator API serves them as files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from litestar import get, post
from litestar.params import FromPath

from appliance.base.errors import DraftUncomputable, InvalidValue
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import FORM_ERROR, Form, sentence
from appliance.console.month_closing import REASONS_SHOWN_MAX
from appliance.console.rendering import Html
from appliance.console.request_bill import CORRECTIONS_SHOWN_MAX
from appliance.console.security import needs
from appliance.console.tenant_names import tenants_by_name
from appliance.console.urls import next_page_url
from appliance.metering.calendar import first_day
from appliance.metering.invoicing.portions import BILLABLE, check_draft
from appliance.metering.invoicing.rows import STATES, Invoice, InvoiceHead
from appliance.metering.invoicing.wording import ABORT_POLICY, format_day, format_payment, line_name, month_name, tax_name
from appliance.tenancy.principals import Tenant
from appliance.tenancy.roles import Action

if TYPE_CHECKING:
    from appliance.serving.services import Services

PAGE_ROWS = 100
ALL_TENANTS = "all"
FIELDS = ("tenant", "month")
FORMATTERS: dict[str, Any] = {
    "month_name": month_name,
    "format_day": format_day,
    "line_name": line_name,
    "format_payment": format_payment,
    "tax_name": tax_name,
    "abort_policy": ABORT_POLICY,
}


@get("/invoices", guards=[needs(Action.INVOICES)])
async def list_invoices(context: ContextDependency) -> Html:
    """The invoices of the visible tenants, newest month first."""
    return await _list(context, None)


@post("/invoices", guards=[needs(Action.BILLING)], status_code=200)
async def draft_invoice(context: ContextDependency) -> Html:
    """Draft the invoice of a tenant's month (or show the existing one), or of all tenants with something to bill."""
    form = await context.form()
    tenant_id, month = form.text("tenant"), form.text("month")
    if not form.errors:
        with form.refusals(FIELDS):
            if tenant_id == ALL_TENANTS:
                drafts, refused = await _draft_all(context, month)
                if not drafts and not refused:
                    return context.redirect("/invoices", done="month-not-drafted")
                if not refused:
                    return context.redirect("/invoices?state=draft", done="month-drafted")
                form.fail(
                    FORM_ERROR, f"All invoices were drafted except {len(refused)}. {' '.join(refused[:REASONS_SHOWN_MAX])}"
                )
                return await _list(context, form)
            invoice = await context.services.invoices.draft(tenant_id, month, access=context.access)
            return context.redirect(f"/invoices/{invoice.head.id}")
    return await _list(context, form)


@get("/invoices/{invoice_id:str}", guards=[needs(Action.INVOICES)])
async def show_invoice(context: ContextDependency, invoice_id: FromPath[str]) -> Html:
    """One invoice. A draft is computed now; one that cannot be computed is shown with the reason."""
    try:
        invoice, tenant = await _find(context, invoice_id, Action.INVOICES)
    except DraftUncomputable as error:
        head, tenant = await _find_head(context, invoice_id, Action.INVOICES)
        problem = sentence(error.message)
        return context.page("pages/invoice_uncomputable.html", head=head, tenant=tenant, problem=problem, **FORMATTERS)
    corrections = await context.services.invoices.events(
        invoice_id, CORRECTIONS_SHOWN_MAX, kind="adjustment", access=context.access
    )
    return context.page(
        "pages/invoice.html",
        invoice=invoice,
        tenant=tenant,
        closable_from=_closable_from(context.services, invoice.head),
        corrections=corrections.data,
        corrections_more=corrections.has_more,
        **FORMATTERS,
    )


@get("/invoices/{invoice_id:str}/close", guards=[needs(Action.BILLING)])
async def confirm_close(context: ContextDependency, invoice_id: FromPath[str]) -> Html:
    """Confirm closing and explain its consequences."""
    invoice, tenant = await _find(context, invoice_id, Action.BILLING)
    return _close_form(context, invoice, tenant, None)


@post("/invoices/{invoice_id:str}/close", guards=[needs(Action.BILLING)], status_code=200)
async def close_invoice(context: ContextDependency, invoice_id: FromPath[str]) -> Html:
    """Close the invoice with the total that the form showed: it gets its number and cannot be changed."""
    form = await context.form()
    with form.refusals(()):
        micros, currency = _shown_total(form)
        await context.services.invoices.close(
            invoice_id, expected_total_micros=micros, expected_currency=currency, access=context.access
        )
        return context.redirect(f"/invoices/{invoice_id}", done="invoice-closed")
    invoice, tenant = await _find(context, invoice_id, Action.BILLING)
    return _close_form(context, invoice, tenant, form)


@get("/invoices/{invoice_id:str}/discard", guards=[needs(Action.BILLING)])
async def confirm_discard(context: ContextDependency, invoice_id: FromPath[str]) -> Html:
    """Confirm discarding a draft. Raises InvoiceClosed for a closed invoice."""
    head, tenant = await _find_head(context, invoice_id)
    check_draft(head)
    return _discard_form(context, head, tenant, None)


@post("/invoices/{invoice_id:str}/discard", guards=[needs(Action.BILLING)], status_code=200)
async def discard_invoice(context: ContextDependency, invoice_id: FromPath[str]) -> Html:
    """Discard the draft, or show why it cannot be discarded."""
    form = await context.form()
    head, tenant = await _find_head(context, invoice_id)
    with form.refusals(()):
        await context.services.invoices.discard(invoice_id, access=context.access)
        return context.redirect("/invoices", done="draft-discarded")
    return _discard_form(context, head, tenant, form)


async def _draft_all(context: Context, month: str) -> tuple[int, list[str]]:
    """Draft a month for all tenants, except where the draft would be empty or the month or a later one is closed.

    Return the number of drafts, and an error message for each tenant whose draft cannot be computed.
    """
    tenants = await tenants_by_name(context.services, context.access)
    tenant_ids = [tenant.id for tenant in tenants]
    outcomes = await context.services.invoices.draft_each(tenant_ids, month, only=BILLABLE, access=context.access)
    refused = [
        f"{tenant.name}: {sentence(outcome.message)}"
        for tenant in tenants
        if isinstance(outcome := outcomes[tenant.id], DraftUncomputable)
    ]
    return sum(isinstance(outcome, Invoice) for outcome in outcomes.values()), refused


async def _find(context: Context, invoice_id: str, action: Action) -> tuple[Invoice, Tenant]:
    """Return an invoice and its tenant. Raises NotFound, also for an invisible invoice."""
    access = context.access
    invoice = await context.services.invoices.get(invoice_id, access=access, action=action)
    return invoice, await context.services.tenants.get(invoice.head.tenant_id, access=access)


async def _find_head(context: Context, invoice_id: str, action: Action = Action.BILLING) -> tuple[InvoiceHead, Tenant]:
    """Like `_find`, but without the invoice lines, which some drafts do not have."""
    access = context.access
    head = await context.services.invoices.head(invoice_id, access=access, action=action)
    return head, await context.services.tenants.get(head.tenant_id, access=access)


async def _list(context: Context, form: Form | None) -> Html:
    services, access = context.services, context.access
    state, month = context.query.get("state", ""), context.query.get("month", "")
    page = await services.invoices.list(
        PAGE_ROWS,
        context.query.get("cursor") or None,
        month=month or None,
        state=state if state in STATES else None,
        access=access,
    )
    tenants = await tenants_by_name(services, access)
    return context.page(
        "pages/invoices.html",
        invoices=page.data,
        names={tenant.id: tenant.name for tenant in tenants},
        tenants=[tenant for tenant in tenants if access.may(Action.BILLING, tenant.id)],
        last_month=_last_month(context.services),
        state=state,
        month=month,
        states=STATES,
        next_page=next_page_url("/invoices", page, state=state, month=month),
        closable=await _closable_months(context, page.data) if access.may(Action.BILLING) else [],
        form=form,
        **FORMATTERS,
    )


def _last_month(services: Services) -> str:
    """Return the previous month, which is the one usually billed."""
    calendar = services.reports.calendar
    return calendar.month_of(first_day(calendar.month_of(services.clock.now())) - timedelta(days=1))


async def _closable_months(context: Context, heads: Sequence[InvoiceHead]) -> list[str]:
    """Return the past months with more than one draft, oldest first, among the last month and those of `heads`."""
    services, last_month = context.services, _last_month(context.services)
    drafts_of_last = await services.invoices.list(2, month=last_month, state="draft", access=context.access)
    drafts = Counter(head.month for head in heads if head.state == "draft") | Counter({last_month: len(drafts_of_last.data)})
    return sorted(month for month, number in drafts.items() if number > 1 and _is_over(services, month))


def _closable_from(services: Services, head: InvoiceHead) -> date | None:
    """Return the first day on which the draft can be closed, or None if its month is already over."""
    calendar = services.reports.calendar
    return None if _is_over(services, head.month) else calendar.day_of(calendar.next_month_start(head.month))


def _is_over(services: Services, month: str) -> bool:
    return services.clock.now() >= services.reports.calendar.next_month_start(month)


def _close_form(context: Context, invoice: Invoice, tenant: Tenant, form: Form | None) -> Html:
    return context.sheet(
        "fragments/invoice_close.html",
        title=f"Close {month_name(invoice.head.month)} of {tenant.name}",
        invoice=invoice,
        form=form,
        **FORMATTERS,
    )


def _shown_total(form: Form) -> tuple[int, str]:
    """Return the total in micro-units, and its currency, that the form for closing showed. Raises InvalidValue."""
    text, currency = form.raw("total_micros"), form.raw("currency")
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or not currency:
        raise InvalidValue("the form did not say which amount it showed: check the amount again")
    return int(text), currency


def _discard_form(context: Context, head: InvoiceHead, tenant: Tenant, form: Form | None) -> Html:
    return context.sheet(
        "fragments/invoice_discard.html",
        title=f"Discard {month_name(head.month)} of {tenant.name}",
        head=head,
        form=form,
    )
