"""A tenant's terms: limit mode, limits per model, currency, billing address, alert thresholds, free allowance."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from litestar import get, post
from litestar.params import FromPath

from appliance.console.context import Context, ContextDependency
from appliance.console.forms import Form
from appliance.console.limits import read_limits
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.metering.invoicing.free_allowances import allowance_in
from appliance.tenancy.fields import BILLING_FIELDS, LIMIT_MODES
from appliance.tenancy.principals import LIMIT_NAMES, Tenant, TenantChanges
from appliance.tenancy.roles import Action

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.tenancy.access import Access

LABELS = {
    "name": "Name on invoices",
    "address": "Address",
    "country": "Country code, like DE",
    "email": "E-mail for invoices",
    "tax_id": "Tax number",
    "reference": "Customer reference",
}
FIELDS = ("limit_mode", "currency", "alert_percents", *BILLING_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeTerms:
    """The free allowance of a tenant, in micro-units per month: for this month, and `later` as (first month, amount)."""

    micros: int
    later: tuple[tuple[str, int], ...]


async def free_terms(services: Services, tenant_id: str, *, access: Access) -> FreeTerms | None:
    """Return the free allowance of a tenant; None if there is none or the member may not read invoices."""
    if not access.may(Action.INVOICES, tenant_id):
        return None
    month = services.reports.calendar.month_of(services.clock.now())
    allowances = await services.free_allowances.list(tenant_id, access=access)
    later = tuple((one.first_month, one.monthly_micros) for one in allowances if one.first_month > month)
    micros = allowance_in(allowances, month)
    return FreeTerms(micros=micros, later=later) if micros or later else None


@get("/tenants/{tenant_id:str}/terms", guards=[needs(Action.WRITE)])
async def show_terms(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """The form for the terms of a tenant."""
    return _terms_form(context, await context.services.tenants.get(tenant_id, access=context.access), None)


@post("/tenants/{tenant_id:str}/terms", guards=[needs(Action.WRITE)], status_code=200)
async def save_terms(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """Save the terms, or show the form again with the errors."""
    form = await context.form()
    changes = _read_terms(form)
    if not form.errors:
        with form.refusals(FIELDS):
            await context.services.tenants.update(tenant_id, TenantChanges(**changes), access=context.access)
            return context.redirect(f"/tenants/{tenant_id}", done="tenant-saved")
    return _terms_form(context, await context.services.tenants.get(tenant_id, access=context.access), form)


@get("/tenants/{tenant_id:str}/model-limits", guards=[needs(Action.WRITE)])
async def show_model_limits(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """The form for the limits of a tenant for one model, filled in for the model in the query string."""
    tenant = await context.services.tenants.get(tenant_id, access=context.access)
    return _model_form(context, tenant, context.query.get("model", ""), None)


@post("/tenants/{tenant_id:str}/model-limits", guards=[needs(Action.WRITE)], status_code=200)
async def save_model_limits(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """Set the limits of a tenant for one model, or remove them if every field is empty."""
    form = await context.form()
    model, limits = form.text("model"), read_limits(form)
    if not form.errors:
        with form.refusals(("model", *LIMIT_NAMES)):
            changes = {name: getattr(limits, name) for name in LIMIT_NAMES}
            await context.services.tenants.limit_model(tenant_id, model, changes, access=context.access)
            return context.redirect(f"/tenants/{tenant_id}", done="tenant-saved")
    return _model_form(context, await context.services.tenants.get(tenant_id, access=context.access), model, form)


def _read_terms(form: Form) -> dict[str, Any]:
    return {
        "limit_mode": form.choice("limit_mode", LIMIT_MODES),
        "cut_at_budget": form.raw("cut_at_budget") == "yes",
        "currency": form.raw("currency") or None,
        "billing": {name: form.raw(name) or None for name in BILLING_FIELDS},
        "alert_percents": _read_percents(form),
    }


def _read_percents(form: Form) -> list[int] | None:
    """Return the percentages, an empty list for `none`, or None (the appliance's default) for an empty field."""
    typed = form.raw("alert_percents").casefold()
    if typed in ("", "none"):
        return [] if typed else None
    parts = [part.strip(" %") for part in re.split(r"[,\s]+", typed) if part.strip(" %")]
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        form.fail("alert_percents", "Enter percentages like 80, 100, or the word none, or leave this empty.")
        return None
    return [int(part) for part in parts]


def _terms_form(context: Context, tenant: Tenant, form: Form | None) -> Html:
    return context.sheet(
        "fragments/tenant_terms.html",
        title=f"Terms of {tenant.name}",
        tenant=tenant,
        form=form,
        modes=LIMIT_MODES,
        labels=LABELS,
    )


def _model_form(context: Context, tenant: Tenant, model: str, form: Form | None) -> Html:
    return context.sheet(
        "fragments/model_limits.html",
        title=f"Model limits of {tenant.name}",
        tenant=tenant,
        model=model,
        models=context.model_names,
        limits=tenant.model_limits.get(model),
        form=form,
    )
