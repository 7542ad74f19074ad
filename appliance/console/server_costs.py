"""Server costs: the form for hardware and power, the cost per million tokens, and the break-even with hosted prices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from litestar import get, post

from appliance.base.errors import BadRequest, NotFound
from appliance.console.context import Context, ContextDependency
from appliance.console.formatting import NOTHING, budget, count, units
from appliance.console.forms import Form
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.metering.economics import MONTHS_MAX, POWER_W_MAX, Figure, Hardware, HostedPrice
from appliance.tenancy.roles import Action

if TYPE_CHECKING:
    from appliance.serving.services import Services

FIELDS = ("currency", "cost_micros", "months", "kwh_price_micros", "power_w", "other_power_w", "other_monthly_micros", "hosted")
_AMOUNTS = ("cost_micros", "kwh_price_micros", "other_monthly_micros")
_HOSTED_LINE = "Line {}: enter a name and two or three prices, like: Hosted large; 0.50; 1.50; 0.10"


@get("/settings/economics", guards=[needs(Action.BILLING)])
async def show_costs(context: ContextDependency) -> Html:
    """The form with the server costs."""
    return await _form(context, None)


@post("/settings/economics", guards=[needs(Action.BILLING)], status_code=200)
async def save_costs(context: ContextDependency) -> Html:
    """Save the server costs, or show the form again with the errors."""
    form = await context.form()
    values = _read(form, context.services.settings.currency)
    if not form.errors:
        with form.refusals(FIELDS):
            await context.services.economics.set_hardware(Hardware(**values))
            return context.redirect("/settings", done="costs-saved")
    return await _form(context, form)


async def cost_section(services: Services) -> dict[str, Any] | None:
    """Return the template values of the section, None before the hardware was entered."""
    try:
        _hardware, economics = await services.economics.report(services.sampler.latest.gpu_power_w)
    except NotFound:
        return None
    return {
        "economics": economics,
        "figures": [
            (figure.name.replace("_", " "), _value(figure, economics.currency), figure.source) for figure in economics.figures
        ],
        "currency": economics.currency,
    }


def _value(figure: Figure, currency: str) -> str:
    if figure.value is None:
        return NOTHING
    return budget(figure.value, currency) if figure.unit.startswith("micro-units") else f"{count(figure.value)} {figure.unit}"


def _read(form: Form, currency: str) -> dict[str, Any]:
    amounts = {name: form.amount_micros(name, required=name == "cost_micros") for name in _AMOUNTS}
    return {
        "currency": form.raw("currency").upper() or currency,
        **{name: amount or 0 for name, amount in amounts.items()},
        "months": form.whole_number("months", least=1, most=MONTHS_MAX, required=True),
        "power_w": form.whole_number("power_w", most=POWER_W_MAX),
        "other_power_w": form.whole_number("other_power_w", most=POWER_W_MAX) or 0,
        "hosted": _read_hosted(form),
    }


def _read_hosted(form: Form) -> tuple[HostedPrice, ...]:
    """Parse hosted prices, one per line: name; prompt; output; cached prompt (optional)."""
    hosted = []
    for number, line in enumerate(form.raw("hosted").splitlines(), 1):
        parts = [part.strip() for part in line.split(";")]
        if not any(parts):
            continue
        prices = Form({str(index): part for index, part in enumerate(parts[1:])})
        parsed = [prices.amount_micros(str(index)) for index in range(len(parts) - 1)]
        amounts = [amount for amount in parsed if amount is not None]
        if prices.errors or len(amounts) < len(parsed) or not 2 <= len(amounts) <= 3:
            form.fail("hosted", _HOSTED_LINE.format(number))
            continue
        named = dict(zip(("prompt", "completion", "cached_prompt"), amounts, strict=False))
        try:
            hosted.append(HostedPrice(name=parts[0], **named))
        except BadRequest as error:
            form.fail("hosted", f"Line {number}: {re.sub('^hosted[.]', '', error.message)}.")
    return tuple(hosted)


def _hosted_text(hardware: Hardware | None) -> str:
    """Return hosted prices in the syntax of the text field."""
    lines = []
    for price in hardware.hosted if hardware else ():
        amounts = [price.prompt, price.completion, *([] if price.cached_prompt is None else [price.cached_prompt])]
        lines.append("; ".join([price.name, *(units(amount) for amount in amounts)]))
    return "\n".join(lines)


async def _form(context: Context, form: Form | None) -> Html:
    hardware = await context.services.economics.hardware()
    return context.sheet(
        "fragments/server_costs_form.html",
        title="Server costs",
        form=form,
        hardware=hardware,
        hosted=_hosted_text(hardware),
    )
