"""Tenants: the list, creation, the page of a tenant with limits and keys, suspending and archiving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from litestar import get, post
from litestar.params import FromPath

from appliance.console.context import Context, ContextDependency
from appliance.console.forms import Form
from appliance.console.limits import read_limits, tenant_levels
from appliance.console.prices import group_prices
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.console.tenant_members import tenant_members_of
from appliance.console.tenant_terms import free_terms
from appliance.console.totals import costs_this_month, totals_this_month, totals_today
from appliance.console.urls import next_page_url
from appliance.metering.invoicing.wording import month_name
from appliance.tenancy.fields import NAME_CHARS_MAX, TIERS, UNSET, WEIGHT_MAX
from appliance.tenancy.pages import read_every_page
from appliance.tenancy.principals import LIMIT_NAMES, Tenant, TenantChanges
from appliance.tenancy.roles import Action

if TYPE_CHECKING:
    from appliance.serving.services import Services

PAGE_ROWS = 100
KEYS_SHOWN_MAX = 200
FIELDS = ("name", "tier", "weight", "allowed_models", *LIMIT_NAMES)


@get("/tenants")
async def list_tenants(context: ContextDependency) -> Html:
    """The visible tenants whose name matches the search; archived ones on request."""
    query = context.query
    text, archived = query.get("q", "").strip()[:NAME_CHARS_MAX], query.get("archived") == "yes"
    page = await context.services.tenants.list(
        PAGE_ROWS, query.get("cursor"), include_archived=archived, text=text or None, access=context.access
    )
    return context.page(
        "pages/tenants.html",
        part="fragments/tenant_list.html",
        tenants=page.data,
        costs=await costs_this_month(context.services, [tenant.id for tenant in page.data], access=context.access),
        text=text,
        archived=archived,
        next_page=next_page_url("/tenants", page, q=text, archived="yes" if archived else ""),
    )


@get("/tenants/new", guards=[needs(Action.WRITE)])
async def new_tenant(context: ContextDependency) -> Html:
    """The form for a new tenant."""
    return _new_form(context, None)


@post("/tenants", guards=[needs(Action.WRITE)], status_code=200)
async def create_tenant(context: ContextDependency) -> Html:
    """Create a tenant, or show the form again with the errors."""
    form = await context.form()
    values = _read(form)
    if not form.errors:
        with form.refusals(FIELDS):
            tenant = await context.services.tenants.create(values["name"], TenantChanges(**values), access=context.access)
            return context.redirect(f"/tenants/{tenant.id}", done="tenant-created")
    return _new_form(context, form)


@get("/tenants/{tenant_id:str}")
async def show_tenant(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """One tenant: its usage, keys and settings."""
    return await _tenant_page(context, await context.services.tenants.get(tenant_id, access=context.access))


@post("/tenants/{tenant_id:str}", guards=[needs(Action.WRITE)], status_code=200)
async def save_tenant(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """Save name, tier, weight, limits and models, or show the page again with the errors."""
    form = await context.form()
    tenant = await context.services.tenants.get(tenant_id, access=context.access)
    changes = _read(form) | {"allowed_models": form.changed_names("allowed_models", tenant.allowed_models)}
    if changes["name"] == tenant.name:  # an existing name may stay even if it is invalid for new tenants
        changes["name"] = UNSET
    if not form.errors:
        with form.refusals(FIELDS):
            await context.services.tenants.update(tenant_id, TenantChanges(**changes), access=context.access)
            return context.redirect(f"/tenants/{tenant_id}", done="tenant-saved")
    return await _tenant_page(context, tenant, form)


@post("/tenants/{tenant_id:str}/suspend", guards=[needs(Action.WRITE)], status_code=200)
async def suspend_tenant(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """Suspend the tenant: refuse its keys until it is resumed."""
    await context.services.tenants.update(tenant_id, TenantChanges(suspended=True), access=context.access)
    return context.redirect(f"/tenants/{tenant_id}", done="tenant-suspended")


@post("/tenants/{tenant_id:str}/resume", guards=[needs(Action.WRITE)], status_code=200)
async def resume_tenant(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """Resume a suspended tenant."""
    await context.services.tenants.update(tenant_id, TenantChanges(suspended=False), access=context.access)
    return context.redirect(f"/tenants/{tenant_id}", done="tenant-resumed")


@get("/tenants/{tenant_id:str}/archive", guards=[needs(Action.WRITE)])
async def confirm_archive(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """Confirm archiving: asks for the tenant's name."""
    return _archive_form(context, await context.services.tenants.get(tenant_id, access=context.access), None)


@post("/tenants/{tenant_id:str}/archive", guards=[needs(Action.WRITE)], status_code=200)
async def archive_tenant(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """Archive the tenant permanently if its name was typed."""
    tenant = await context.services.tenants.get(tenant_id, access=context.access)
    form = await context.form()
    if form.raw("confirm") != tenant.name:
        form.fail("confirm", "This is not the tenant's name.")
        return _archive_form(context, tenant, form)
    await context.services.tenants.archive(tenant_id, access=context.access)
    return context.redirect("/tenants", done="tenant-archived")


def _read(form: Form) -> dict[str, Any]:
    return {
        "name": form.text("name"),
        "tier": form.choice("tier", TIERS),
        "weight": form.whole_number("weight", least=1, most=WEIGHT_MAX, required=True),
        "limits": read_limits(form),
        "allowed_models": form.names("allowed_models"),
    }


def _new_form(context: Context, form: Form | None) -> Html:
    return context.sheet("fragments/tenant_new.html", title="New tenant", form=form, tiers=TIERS)


def _archive_form(context: Context, tenant: Tenant, form: Form | None) -> Html:
    title = f"Archive {tenant.name}"
    return context.sheet("fragments/tenant_archive.html", title=title, tenant=tenant, form=form)


async def _prices(services: Services, tenant: Tenant) -> dict[str, Any]:
    """Return the tenant's current and future prices per million tokens, including the discount of its tier, and the usable
    models without a price in its currency."""
    currency, now = tenant.currency or services.settings.currency, services.clock.now()
    names = [model.name for model in services.models.list()]
    usable = [name for name in names if tenant.allowed_models is None or name in tenant.allowed_models]
    prices = [
        price for price in await read_every_page(services.prices.list) if price.currency == currency and price.model in usable
    ]
    return {
        "unpriced": await services.prices.unpriced([(name, currency) for name in usable], now),
        "prices": [
            (price, state, price.rate(tenant.tier))
            for _, _, group in group_prices(prices, now)
            for price, state in reversed(group)
            if state != "past"
        ],
    }


async def _tenant_page(context: Context, tenant: Tenant, form: Form | None = None) -> Html:
    services, access = context.services, context.access
    keys = await services.keys.list(tenant.id, KEYS_SHOWN_MAX, None, access=access)
    today = await totals_today(services, tenant.id, currency=tenant.currency, access=access)
    month = await totals_this_month(services, tenant.id, currency=tenant.currency, access=access)
    return context.page(
        "pages/tenant.html",
        tenant=tenant,
        may_keys=access.may(Action.KEYS, tenant.id),
        owners={tenant.id: tenant},
        keys=sorted(keys.data, key=lambda key: key.revoked_at is not None),
        keys_more=keys.has_more,
        levels=await tenant_levels(services, tenant, access=access),
        model_limits=tenant.model_limits,
        today=today,
        month=month,
        tiers=TIERS,
        refuse_unpriced=services.settings.unpriced == "refuse",
        free=await free_terms(services, tenant.id, access=access),
        month_name=month_name,
        form=form,
        **await _prices(services, tenant),
        **await tenant_members_of(context, tenant.id),
    )
