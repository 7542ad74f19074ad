"""Turns refusing decisions into the error for the client. Only messages and codes; the decisions are made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.base.clock import format_wait
from appliance.base.errors import BudgetExceeded, ModelNotPriced, RateLimitExceeded, Refused, RequestExceedsLimit
from appliance.base.money import PICOS_PER_MICRO, format_micros
from appliance.metering.limits.decisions import TOKEN_KINDS, LimitDecision

LIMIT_NAMES = {
    "tokens": "tokens per minute",
    "requests": "requests per minute",
    "concurrency": "concurrent requests",
    "tokens_per_day": "tokens per day",
    "budget": "budget of this month",
}


def refusal(decisions: Sequence[LimitDecision]) -> Refused:
    """Return the error for refusing `decisions`: a request that never fits, else a spent budget, else the longest wait."""
    never = [decision for decision in decisions if decision.wait_s is None and decision.kind != "budget"]
    if never:
        return _never_fits(never[0])
    for decision in decisions:
        if decision.wait_s is None:
            return budget_exceeded(decision)
    longest = max(decisions, key=lambda decision: decision.wait_s or 0.0)
    wait_s = longest.wait_s or 0.0
    return RateLimitExceeded(
        f"{_reason(longest)}; try again in {_about(longest)}" + (", or lower max_tokens" if longest.held else ""),
        limit_type=_limit_type(longest),
        retry_after_s=wait_s,
    )


def budget_exceeded(decision: LimitDecision) -> BudgetExceeded:
    """Return the error for a spent budget."""
    left = _money(max(decision.level, 0), decision.currency)
    need = _money(decision.need + PICOS_PER_MICRO - 1, decision.currency)
    message = (
        f"{_limit(decision)} does not cover the request: {left} are left, it may cost {need}; "
        "lower max_tokens or ask for a higher budget"
    )
    return BudgetExceeded(message)


def not_priced(model: str, currency: str | None) -> ModelNotPriced:
    """Return the error for a model that may not be served because it has no price."""
    priced_in = "the currency of this appliance" if currency is None else currency
    message = f"the model {model} has no price in {priced_in}; the operator of the appliance can add one"
    return ModelNotPriced(message, param="model")


def _never_fits(decision: LimitDecision) -> RequestExceedsLimit:
    remedy = "shorten the prompt or lower max_tokens, or ask" if decision.kind in TOKEN_KINDS else "ask"
    return RequestExceedsLimit(
        f"the request needs {_need(decision)} and {_owner(decision)} limit is {decision.limit} "
        f"{LIMIT_NAMES[decision.kind]}: it can never be admitted; {remedy} for a higher limit",
        limit_type=_limit_type(decision),
    )


def _money(picos: int, currency: str) -> str:
    """Return an amount in units of its currency, rounded down to micro-units."""
    return f"{format_micros(picos // PICOS_PER_MICRO).rstrip('0').rstrip('.')} {currency}"


def _about(decision: LimitDecision) -> str:
    wait = format_wait(decision.wait_s or 0.0)
    return f"about {wait}, when running requests have probably ended" if decision.estimated else wait


def _reason(decision: LimitDecision) -> str:
    name = LIMIT_NAMES[decision.kind]
    if decision.held:
        return f"running requests have reserved the rest of {_owner(decision)} {name}"
    if decision.ahead:
        requests = "1 request is" if decision.ahead == 1 else f"{decision.ahead} requests are"
        return f"{requests} already waiting for {_limit(decision)}"
    left = max(decision.level, 0)
    return f"{_limit(decision)} is reached: the request needs {_need(decision)}, {left} are left"


def _need(decision: LimitDecision) -> str:
    return f"{decision.need} tokens" if decision.kind in TOKEN_KINDS else str(decision.need)


def _limit(decision: LimitDecision) -> str:
    name = LIMIT_NAMES[decision.kind]
    if decision.kind == "budget":
        return f"{_owner(decision)} {name} ({_money(decision.limit, decision.currency)})"
    return f"{_owner(decision)} limit of {decision.limit} {name}"


def _owner(decision: LimitDecision) -> str:
    if decision.scope == "model" or decision.model is None:
        return f"the {decision.scope}'s"
    return f"the {decision.scope}'s {decision.model}"


def _limit_type(decision: LimitDecision) -> str:
    return "tokens" if decision.kind in TOKEN_KINDS else "requests"
