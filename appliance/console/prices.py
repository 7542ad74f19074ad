"""Prices per million tokens, each valid from a given time. Prices are added, never changed; a future one can be withdrawn."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from litestar import get, post
from litestar.params import FromPath

from appliance.base.errors import NotFound
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import Form
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.metering.prices import Price
from appliance.tenancy.fields import TIERS
from appliance.tenancy.pages import read_every_page
from appliance.tenancy.roles import Action

if TYPE_CHECKING:
    from appliance.serving.services import Services

FIELDS = ("model", "currency", "prompt", "cached_prompt", "completion", "rejected_draft", "effective_from", "batch_percent")


@get("/prices", guards=[needs(Action.READ_APPLIANCE)])
async def list_prices(context: ContextDependency) -> Html:
    """All prices, grouped by model and currency: future, current and past."""
    services = context.services
    prices = await read_every_page(services.prices.list)
    currencies = await services.tenants.currencies(services.settings.currency)
    served = context.model_names
    priced_in = [(model, currency) for model in served for currency in currencies]
    return context.page(
        "pages/prices.html",
        groups=group_prices(prices, services.clock.now()),
        served=served,
        refuse_unpriced=services.settings.unpriced == "refuse",
        unpriced=await services.prices.unpriced(priced_in, services.clock.now()),
    )


@get("/prices/new", guards=[needs(Action.BILLING)])
async def new_price(context: ContextDependency) -> Html:
    """The form for a new price, filled in with the price in force for the model and currency in the query string."""
    services = context.services
    model = context.query.get("model", "")
    currency = context.query.get("currency") or services.settings.currency
    current = await services.prices.current(model, services.clock.now(), currency=currency) if model else None
    return _form(context, None, model=model, price_currency=currency, current=current)


@post("/prices", guards=[needs(Action.BILLING)], status_code=200)
async def add_price(context: ContextDependency) -> Html:
    """Add a price, or show the form again with the errors."""
    form = await context.form()
    values = _read(form, context.services)
    if not form.errors:
        with form.refusals((*FIELDS, *(f"tier_{tier}" for tier in TIERS))):
            await context.services.prices.add(**values)
            is_served = values["model"] in context.model_names
            return context.redirect("/prices", done="price-added" if is_served else "price-added-not-served")
    return _form(context, form, model=form.raw("model"), price_currency=form.raw("currency"), current=None)


@get("/prices/{price_id:str}/withdraw", guards=[needs(Action.BILLING)])
async def confirm_withdrawal(context: ContextDependency, price_id: FromPath[str]) -> Html:
    """Ask for confirmation before a future price is withdrawn."""
    return _withdrawal(context, None, await _price(context.services, price_id))


@post("/prices/{price_id:str}/withdraw", guards=[needs(Action.BILLING)], status_code=200)
async def withdraw_price(context: ContextDependency, price_id: FromPath[str]) -> Html:
    """Withdraw a future price, or show why it cannot be withdrawn."""
    form = await context.form()
    price = await _price(context.services, price_id)
    with form.refusals(()):
        await context.services.prices.withdraw(price_id)
        return context.redirect("/prices", done="price-withdrawn")
    return _withdrawal(context, form, price)


def group_prices(prices: list[Price], now: datetime) -> list[tuple[str, str, list[tuple[Price, str]]]]:
    """Return (model, currency, [(price, state)]), newest price first; the state is future, in force or past."""
    by_model: dict[tuple[str, str], list[Price]] = {}
    for price in sorted(prices, key=lambda price: price.effective_from, reverse=True):
        by_model.setdefault((price.model, price.currency), []).append(price)
    groups = []
    for (model, currency), group in sorted(by_model.items()):
        in_force = next((price.id for price in group if price.effective_from <= now), None)
        states = ["future" if price.effective_from > now else "in force" if price.id == in_force else "past" for price in group]
        groups.append((model, currency, list(zip(group, states, strict=True))))
    return groups


def _read(form: Form, services: Services) -> dict[str, Any]:
    required = ("prompt", "completion")
    names = (*required, "cached_prompt", "rejected_draft")
    amounts = {name: form.amount_micros(name, required=name in required) for name in names}
    batch_percent = form.whole_number("batch_percent", most=100)
    tiers = {tier: form.whole_number(f"tier_{tier}", most=100) for tier in TIERS}
    return {
        "model": form.text("model"),
        "currency": form.raw("currency") or services.settings.currency,
        "prompt": amounts["prompt"],
        "cached_prompt": amounts["prompt"] if amounts["cached_prompt"] is None else amounts["cached_prompt"],
        "completion": amounts["completion"],
        "rejected_draft": amounts["rejected_draft"] or 0,
        "batch_percent": 100 if batch_percent is None else batch_percent,
        "tier_percents": {tier: percent for tier, percent in tiers.items() if percent is not None} or None,
        "effective_from": form.first_day("effective_from", services.reports.calendar),
    }


def _form(context: Context, form: Form | None, *, model: str, price_currency: str, current: Price | None) -> Html:
    return context.sheet(
        "fragments/price_new.html",
        title="New price",
        form=form,
        model=model,
        price_currency=price_currency,
        current=current,
        unfold_discounts=current is not None and _has_discounts(current),
        tiers=TIERS,
        discounts=("batch_percent", "rejected_draft", *(f"tier_{tier}" for tier in TIERS)),
        models=context.model_names,
        zone=context.services.settings.time_zone,
    )


def _has_discounts(price: Price) -> bool:
    """Return whether a price has values in the folded section of the form."""
    return price.batch_percent != 100 or bool(price.tier_percents) or price.rejected_draft != 0


def _withdrawal(context: Context, form: Form | None, price: Price) -> Html:
    return context.sheet("fragments/price_withdraw.html", title="Withdraw price", form=form, price=price)


async def _price(services: Services, price_id: str) -> Price:
    found = next((price for price in await read_every_page(services.prices.list) if price.id == price_id), None)
    if found is None:
        raise NotFound("no such price", param="price_id")
    return found
