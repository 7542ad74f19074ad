"""The limit check: shows what each limit would decide for a hypothetical request. Reserves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from litestar import get
from litestar.params import FromPath

from appliance.base.clock import format_wait
from appliance.base.errors import GatehouseError
from appliance.console.context import ContextDependency
from appliance.console.formatting import count, money
from appliance.console.forms import Form, sentence
from appliance.console.rendering import Html
from appliance.metering.limits.admission_request import SERVICE_TIERS, is_batch_work
from appliance.metering.limits.decisions import LimitDecision
from appliance.serving.dry_runs import DryRunRequest, DryRunResult
from appliance.tenancy.fields import LIMIT_MAX, check_name
from appliance.tenancy.principals import ApiKey, Tenant

if TYPE_CHECKING:
    from appliance.serving.services import Services

KEYS_LISTED_MAX = 200
PROMPT_TOKENS = 500
KINDS = {
    "tokens": "Tokens per minute",
    "requests": "Requests per minute",
    "concurrency": "Concurrent requests",
    "tokens_per_day": "Tokens per day",
    "budget": "Budget per month",
}
FIELDS = {
    "model": "Model",
    "key": "Key",
    "prompt_tokens": "Prompt tokens",
    "max_tokens": "max_tokens",
    "service_tier": "Service tier",
}


@get("/tenants/{tenant_id:str}/check")
async def check_request(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """The form, and the result for the request in the query string. htmx requests only the result."""
    access = context.access
    tenant = await context.services.tenants.get(tenant_id, access=access)
    page = await context.services.keys.list(tenant.id, KEYS_LISTED_MAX, None, access=access)
    keys = [key for key in page.data if key.revoked_at is None]
    models = context.model_names
    form = Form({"model": models[0] if models else "", "prompt_tokens": str(PROMPT_TOKENS)} | dict(context.query))
    result = await _run_check(context.services, form, tenant, keys)
    return context.page(
        "pages/limit_check.html",
        part="fragments/limit_check_result.html",
        status=200,
        tenant=tenant,
        keys=keys,
        models=models,
        form=form,
        fields=FIELDS,
        result=result,
        headline=headline(result) if result else None,
        rows=[_row(decision, context.services, tenant) for decision in result.limits.decisions] if result else [],
    )


def headline(result: DryRunResult) -> tuple[str, str]:
    """Return a tone and one sentence on what would happen to the request."""
    if result.allowed:
        return "ok", f"Admitted: {count(result.limits.tokens)} tokens would be reserved."
    if result.would_wait:
        wait = format_wait(result.wait_s or 0.0)
        return "warn", f"Waits {wait} for room, and is then admitted unless other requests take it."
    assert result.error is not None, "a request that is neither admitted nor waits is refused"
    return "bad", f"Refused with {result.error.status} {result.error.code}: {sentence(result.error.message)}"


async def _run_check(services: Services, form: Form, tenant: Tenant, keys: list[ApiKey]) -> DryRunResult | None:
    """Return the result, or None if the form is wrong; its `errors` say how."""
    prompt_tokens = form.whole_number("prompt_tokens", most=LIMIT_MAX)
    max_tokens = form.whole_number("max_tokens", least=1, most=LIMIT_MAX)
    key = next((key for key in keys if key.id == form.raw("key")), None)
    if form.raw("key") and key is None:
        form.fail("key", "No such key, or it was revoked.")
    if not form.raw("model"):
        form.fail("model", "Fill this in.")
    if form.raw("service_tier"):
        form.choice("service_tier", SERVICE_TIERS)
    if form.errors:
        return None
    try:
        hypothetical = DryRunRequest(
            tenant=tenant,
            key=key,
            model=check_name(form.raw("model"), "model"),
            prompt_tokens=PROMPT_TOKENS if prompt_tokens is None else prompt_tokens,
            max_tokens=max_tokens,
            batch=is_batch_work(form.raw("service_tier") or "default"),
        )
        return await services.dry_runs.run(hypothetical)
    except GatehouseError as error:
        form.fail_with(error, tuple(FIELDS))
        return None


def _row(decision: LimitDecision, services: Services, tenant: Tenant) -> dict[str, object]:
    """Return the table's row for one limit, budgets as money."""
    currency = tenant.currency if decision.scope != "model" and tenant.currency else services.settings.currency

    def shown(value: int) -> str:
        return money(value, currency) if decision.kind == "budget" else count(value)

    return {
        "name": KINDS[decision.kind],
        "owner": f"{decision.scope}{f', {decision.model}' if decision.model and decision.scope != 'model' else ''}",
        "mode": decision.mode,
        "need": shown(decision.need),
        "left": shown(max(decision.level, 0)),
        "limit": shown(decision.limit),
        "allowed": decision.allowed,
        "wait": "never" if decision.wait_s is None else f"{'about ' * decision.estimated}{format_wait(decision.wait_s)}",
    }
