"""The bill of one request: its tokens by kind with their prices, and later corrections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.base.money import BASIS_POINTS
from appliance.metering.invoicing.wording import format_percent
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.prices import Price
from appliance.metering.usage import LedgerFilter
from appliance.tenancy.access import Access

if TYPE_CHECKING:
    from appliance.serving.services import Services

CORRECTIONS_SHOWN_MAX = 50
CAUSES = {
    "client": "the client disconnected",
    "administrator": "an administrator cancelled it",
    "key_revoked": "the key was revoked",
    "key_expired": "the key expired",
    "tenant_suspended": "the tenant was suspended",
    "tenant_archived": "the tenant was archived",
    "budget_exceeded": "the budget was spent",
    "shutdown": "the appliance shut down",
    "queue_deadline": "it exceeded the queue deadline",
    "request_deadline": "it exceeded the request deadline",
    "engine_died": "the engine died",
    "engine_error": "the engine failed",
    "engine_ended": "the engine ended it",
    "engine_overloaded": "the engine was overloaded",
    "invalid_request": "invalid request",
    "gateway_died": "the gateway died; only the usage already in the ledger is billed",
    "internal_error": "internal error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """Tokens of one kind, their price per million after discounts, and their cost; None if the price is unknown."""

    label: str
    tokens: int
    unit_micros: int | None
    cost_picos: int | None
    currency: str


async def bill_of(services: Services, event: UsageEvent, access: Access) -> dict[str, Any]:
    """Return the template values of the bill."""
    price = await _price(services, event)
    filters = LedgerFilter(request_id=event.request_id, kind="adjustment")
    corrections = await services.reports.ledger_page(CORRECTIONS_SHOWN_MAX, None, filters, access=access)
    shown = [correction for correction in corrections.data if correction.corrects_id == event.id]
    number, corrected_picos = await services.reports.correction_totals(event, access=access)
    return {
        "cause": None if event.cause is None else CAUSES.get(event.cause, event.cause.replace("_", " ")),
        "cost_lines": cost_lines(event, price),
        "discount": discount(event),
        "corrections": shown,
        "corrections_left": max(0, number - len(shown)),
        "corrected_cost_picos": event.cost_picos + corrected_picos,
    }


def discount(event: UsageEvent) -> str | None:
    """Return the billed share of the price, such as `50 %`; None for the full price."""
    if event.price_basis_points == BASIS_POINTS:
        return None
    return format_percent(event.price_basis_points)


def cost_lines(event: UsageEvent, price: Price | None) -> list[CostLine]:
    """Return the lines of the bill; rejected draft tokens only if there are any."""
    uncached, cached, rejected = event.prompt_tokens - event.cached_tokens, event.cached_tokens, event.rejected_tokens
    kinds = [("Prompt, computed", "prompt", uncached), ("Prompt, cached", "cached_prompt", cached)]
    kinds += [("Output", "completion", event.completion_tokens)]
    kinds += [("Rejected drafts", "rejected_draft", rejected)] if rejected else []
    rate = None if price is None else price.rate_at(event.price_basis_points)
    return [_line(event, label, tokens, None if rate is None else getattr(rate, name)) for label, name, tokens in kinds]


def _line(event: UsageEvent, label: str, tokens: int, unit_micros: int | None) -> CostLine:
    """Return one line. Its cost is exact, because micro-units per million tokens equal pico-units per token."""
    cost_picos = None if unit_micros is None else tokens * unit_micros
    return CostLine(label=label, tokens=tokens, unit_micros=unit_micros, cost_picos=cost_picos, currency=event.currency)


async def _price(services: Services, event: UsageEvent) -> Price | None:
    """Return the price of the event, None if the price found by model and time is another one."""
    price = await services.prices.current(event.model, event.admitted_at, currency=event.currency)
    return price if price is not None and price.id == event.price_id else None
