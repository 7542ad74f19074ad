"""Settings of the whole box: how long tiers wait, and limits of models for everybody. The page also shows seller and costs."""

from __future__ import annotations

from litestar import get, post

from appliance.base.errors import BadRequest
from appliance.console.box_costs import costs_of
from appliance.console.context import Console, ConsoleDependency
from appliance.console.forms import Form
from appliance.console.limits import read_limits
from appliance.console.rendering import Html
from appliance.console.security import ConsoleRequest, needs
from appliance.console.tenant_terms import model_lines
from appliance.metering.invoicing.seller import read_seller
from appliance.tenancy.fields import LIMIT_MODES, TIERS
from appliance.tenancy.principals import LIMIT_NAMES, Limits
from appliance.tenancy.roles import Action
from appliance.tenancy.tiers import ADMISSION_WAIT_MS_MAX

TIER_FIELDS = {tier: f"wait_{tier}" for tier in TIERS}


@get("/settings", guards=[needs(Action.READ_BOX)])
async def show_settings(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Everything that is set for the whole box while it runs."""
    return await _page(request, console)


@post("/settings/tiers", guards=[needs(Action.WRITE)], status_code=200)
async def save_tiers(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Save how long requests of each tier may wait for room, or show the page again with what is wrong."""
    form = await console.form(request)
    waits = {tier: form.whole_number(field, most=ADMISSION_WAIT_MS_MAX, required=True) for tier, field in TIER_FIELDS.items()}
    if form.errors:
        return await _page(request, console, form)
    for tier, wait_ms in waits.items():
        assert wait_ms is not None, "an empty field has its error"
        await console.services.tiers.update(tier, admission_wait_ms=wait_ms)
    return console.pages.redirect(request, "/settings", done="settings-saved")


@get("/settings/models", guards=[needs(Action.WRITE)])
async def show_model_limits(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """The form with the limits of a model for everybody; the model in the address fills it."""
    return await _model_form(request, console, request.query_params.get("model", ""), None)


@post("/settings/models", guards=[needs(Action.WRITE)], status_code=200)
async def save_model_limits(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Set what all tenants together may use of a model; if every field is empty, its limits are removed."""
    form, policies = await console.form(request), console.services.model_policies
    model, limits, mode = form.text("model"), read_limits(form), form.choice("limit_mode", LIMIT_MODES)
    if not form.errors:
        try:
            if limits != Limits():
                await policies.put(model, limits, mode)
            elif await policies.find(model) is not None:
                await policies.remove(model)
            return console.pages.redirect(request, "/settings", done="settings-saved")
        except BadRequest as error:
            form.fail_with(error, ("model", "limit_mode", *LIMIT_NAMES))
    return await _model_form(request, console, model, form)


async def _model_form(request: ConsoleRequest, console: Console, model: str, form: Form | None) -> Html:
    policy = await console.services.model_policies.find(model) if model else None
    return console.pages.sheet(
        request,
        "fragments/model_policy.html",
        title="Model limits across all tenants",
        model=model,
        limits=None if policy is None else policy.limits,
        mode="enforce" if policy is None else policy.limit_mode,
        modes=LIMIT_MODES,
        form=form,
    )


async def _page(request: ConsoleRequest, console: Console, form: Form | None = None) -> Html:
    services = console.services
    policies = await services.model_policies.list()
    return console.pages.page(
        request,
        "pages/settings.html",
        tiers=await services.tiers.list(),
        tier_fields=TIER_FIELDS,
        form=form,
        model_lines=model_lines({policy.model: policy.limits for policy in policies}),
        modes_of={policy.model: policy.limit_mode for policy in policies},
        seller=await read_seller(services.box_records),
        costs=await costs_of(services),
    )


HANDLERS = (show_settings, save_tiers, show_model_limits, save_model_limits)
