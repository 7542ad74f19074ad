"""Turns refusing decisions into the error for the client. Only messages and codes; the decisions are made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.base.clock import format_wait
from appliance.base.errors import BudgetExceeded, ModelNotPriced, RateLimitExceeded, Refused, RequestExceedsLimit
from appliance.base.money import PICOS_PER_MICRO, format_micros
from appliance.base.texts import counted
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.decisions import TOKEN_KINDS, LimitDecision

LIMIT_WORDS = {
    "tokens": "tokens per minute",
    "requests": "requests per minute",
    "concurrency": "concurrent requests",
    "tokens_per_day": "tokens per day",
    "budget": "budget of this month",
}
_LIMITS_OF_ONE = {
    "tokens": "token per minute",
    "requests": "request per minute",
    "concurrency": "concurrent request",
    "tokens_per_day": "token per day",
}


def refusal(decisions: Sequence[LimitDecision], request: AdmissionRequest, reserved_tokens: int) -> Refused:
    """Return the error for refusing `decisions`: a request that never fits, else a spent budget, else the longest wait.

    `reserved_tokens` is what the request would reserve: its prompt and expected output.
    """
    output = reserved_tokens - request.prompt_tokens
    never = [decision for decision in decisions if decision.wait_s is None]
    smaller = _smaller_request(never or decisions, request)
    for decision in never:
        if decision.kind != "budget":
            return _never_fits(decision, output, smaller)
    if never:
        return _budget_exceeded(never[0], output, smaller)
    longest = max(decisions, key=lambda decision: decision.wait_s or 0.0)
    help_text = f", or {smaller}" if smaller else ""
    if not smaller and longest.held and request.max_output_tokens is None and request.output_room != 1:
        below = "" if request.output_room is None else f" below {request.output_room}"
        help_text = f"; requests with max_tokens{below} reserve less"
    return RateLimitExceeded(
        f"{_reason(longest, output)}; try again in {_about(longest)}{help_text}",
        limit_type=_limit_type(longest),
        retry_after_s=longest.wait_s or 0.0,
    )


def not_priced(model: str, currency: str | None) -> ModelNotPriced:
    """Return the error for a model that may not be served because it has no price."""
    priced_in = "the currency of this appliance" if currency is None else currency
    message = f"the model {model} has no price in {priced_in}; the operator of the appliance can add one"
    return ModelNotPriced(message, param="model")


def _never_fits(decision: LimitDecision, output: int, smaller: str) -> RequestExceedsLimit:
    limit = f"{_owner(decision)} limit is {_size(decision)}"
    if decision.limit:
        why = f"the request needs {_need(decision, output)} and {limit}: it can never be admitted"
    else:
        why = f"{limit}: no request can be admitted"
    help_text = f"{smaller} or ask" if smaller else "ask"
    return RequestExceedsLimit(f"{why}; {help_text} for a higher limit", limit_type=_limit_type(decision))


def _budget_exceeded(decision: LimitDecision, output: int, smaller: str) -> BudgetExceeded:
    left = _money(max(decision.level, 0), decision.currency)
    need = _money(decision.need + PICOS_PER_MICRO - 1, decision.currency)
    return BudgetExceeded(
        f"{_limit(decision)} does not cover the request: {left} are left, the prompt and {counted(output, 'token')} of "
        f"expected output may cost {need}; {smaller}{' or ' * bool(smaller)}ask for a higher budget"
    )


def _smaller_request(decisions: Sequence[LimitDecision], request: AdmissionRequest) -> str:
    """Return what the client can do to need no more than all of these limits have left, or than their size if the request is
    larger; "" if nothing helps."""
    max_tokens: list[int] = []
    for decision in decisions:
        is_budget = decision.kind == "budget"
        if not is_budget and decision.kind not in TOKEN_KINDS:
            return ""
        if decision.ahead and decision.wait_s is not None:
            return ""
        room = decision.limit if decision.wait_s is None and not is_budget else decision.level
        prompt = request.cost(0, 0) if is_budget else request.prompt_tokens
        per_token = request.cost(0, request.num_answers) - prompt if is_budget else request.num_answers
        most = (room - prompt) // per_token if per_token else 0
        if room <= 0 or (most < 1 and prompt == 0):
            return ""
        max_tokens.append(most)
    return f"set max_tokens to at most {min(max_tokens)}" if min(max_tokens) >= 1 else "shorten the prompt"


def _money(picos: int, currency: str) -> str:
    """Return an amount in units of its currency, rounded down to micro-units."""
    return f"{format_micros(picos // PICOS_PER_MICRO).rstrip('0').rstrip('.')} {currency}"


def _about(decision: LimitDecision) -> str:
    wait = format_wait(decision.wait_s or 0.0)
    return f"about {wait}, when running requests have probably ended" if decision.estimated else wait


def _reason(decision: LimitDecision, output: int) -> str:
    if decision.held:
        return f"running requests have reserved the rest of {_owner(decision)} {LIMIT_WORDS[decision.kind]}"
    if decision.ahead:
        requests = counted(decision.ahead, "request is", plural="requests are")
        return f"{requests} already waiting for {_limit(decision)}"
    left = counted(max(decision.level, 0), "is left", plural="are left")
    return f"{_limit(decision)} is reached: the request needs {_need(decision, output)}, {left}"


def _need(decision: LimitDecision, output: int) -> str:
    if decision.kind not in TOKEN_KINDS:
        return str(decision.need)
    return f"{counted(decision.need, 'token')} (prompt {decision.need - output}, expected output {output})"


def _limit(decision: LimitDecision) -> str:
    if decision.kind == "budget":
        return f"{_owner(decision)} {LIMIT_WORDS['budget']} ({_money(decision.limit, decision.currency)})"
    return f"{_owner(decision)} limit of {_size(decision)}"


def _size(decision: LimitDecision) -> str:
    return counted(decision.limit, _LIMITS_OF_ONE[decision.kind], plural=LIMIT_WORDS[decision.kind])


def _owner(decision: LimitDecision) -> str:
    if decision.scope == "model" or decision.model is None:
        return f"the {decision.scope}'s"
    return f"the {decision.scope}'s {decision.model}"


def _limit_type(decision: LimitDecision) -> str:
    return "tokens" if decision.kind in TOKEN_KINDS else "requests"
