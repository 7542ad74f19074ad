"""The settings page: admission wait per tier, model limits across all tenants, invoice issuer, server costs."""

from __future__ import annotations

from litestar import get, post

from appliance.console.context import Context, ContextDependency
from appliance.console.forms import Form
from appliance.console.limits import read_limits
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.console.seller import TEXTS
from appliance.console.server_costs import cost_section
from appliance.metering.invoicing.seller import read_seller
from appliance.metering.invoicing.wording import format_percent
from appliance.tenancy.fields import LIMIT_MODES, TIERS
from appliance.tenancy.principals import LIMIT_NAMES, Limits
from appliance.tenancy.roles import Action
from appliance.tenancy.tiers import ADMISSION_WAIT_MS_MAX

TIER_FIELDS = {tier: f"wait_{tier}" for tier in TIERS}


@get("/settings", guards=[needs(Action.READ_APPLIANCE)])
async def show_settings(context: ContextDependency) -> Html:
    """The settings of the appliance that can change while it runs."""
    return await _page(context)


@post("/settings/tiers", guards=[needs(Action.WRITE)], status_code=200)
async def save_tiers(context: ContextDependency) -> Html:
    """Save how long requests of each tier may wait for admission, or show the page again with the errors."""
    form = await context.form()
    waits = {tier: form.whole_number(field, most=ADMISSION_WAIT_MS_MAX, required=True) for tier, field in TIER_FIELDS.items()}
    if form.errors:
        return await _page(context, form)
    for tier, wait_ms in waits.items():
        assert wait_ms is not None, "an empty field is a form error"
        await context.services.tiers.update(tier, admission_wait_ms=wait_ms)
    return context.redirect("/settings", done="settings-saved")


@get("/settings/models", guards=[needs(Action.WRITE)])
async def show_model_limits(context: ContextDependency) -> Html:
    """The form with the limits of a model across all tenants, filled in for the model in the query string."""
    return await _model_form(context, context.query.get("model", ""), None)


@post("/settings/models", guards=[needs(Action.WRITE)], status_code=200)
async def save_model_limits(context: ContextDependency) -> Html:
    """Set the limits of a model across all tenants, or remove them if every field is empty."""
    form, policies = await context.form(), context.services.model_policies
    model, limits, mode = form.text("model"), read_limits(form), form.choice("limit_mode", LIMIT_MODES)
    if not form.errors:
        with form.refusals(("model", "limit_mode", *LIMIT_NAMES)):
            if limits != Limits():
                await policies.put(model, limits, mode)
            elif await policies.find(model) is not None:
                await policies.remove(model)
            return context.redirect("/settings", done="settings-saved")
    return await _model_form(context, model, form)


async def _model_form(context: Context, model: str, form: Form | None) -> Html:
    policy = await context.services.model_policies.find(model) if model else None
    return context.sheet(
        "fragments/model_policy.html",
        title="Model limits across all tenants",
        model=model,
        models=context.model_names,
        limits=None if policy is None else policy.limits,
        mode="enforce" if policy is None else policy.limit_mode,
        modes=LIMIT_MODES,
        form=form,
    )


async def _page(context: Context, form: Form | None = None) -> Html:
    services = context.services
    policies = await services.model_policies.list()
    return context.page(
        "pages/settings.html",
        tiers=await services.tiers.list(),
        tier_fields=TIER_FIELDS,
        form=form,
        model_limits={policy.model: policy.limits for policy in policies},
        modes_of={policy.model: policy.limit_mode for policy in policies},
        seller=await read_seller(services.appliance_records),
        seller_texts=TEXTS,
        format_percent=format_percent,
        costs=await cost_section(services),
    )
