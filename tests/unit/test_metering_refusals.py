"""The message of a refusal: the limit, the required amount, and when to retry in words."""

from __future__ import annotations

import dataclasses

import pytest

from appliance.base.errors import RateLimitExceeded
from appliance.metering.limits.decisions import LimitDecision, LimitKind
from appliance.metering.limits.refusals import not_priced, refusal


def refused(wait_s: float, *, held: bool = False, ahead: int = 0) -> LimitDecision:
    return LimitDecision(
        allowed=False,
        scope="key",
        kind="tokens_per_day",
        need=800,
        limit=1000,
        level=300,
        wait_s=wait_s,
        held=held,
        ahead=ahead,
    )


def test_a_daily_limit_is_worded_in_hours_and_minutes_and_the_exact_wait_is_in_the_error() -> None:
    error = refusal([refused(3 * 3600 + 11 * 60 + 7.25)])
    assert error.message == (
        "the key's limit of 1000 tokens per day is reached: the request needs 800 tokens, 300 are left; try again in 3 h 12 min"
    )
    assert isinstance(error, RateLimitExceeded)
    assert error.retry_after_s == pytest.approx(11_467.25)


def test_a_wait_for_running_requests_is_worded_as_an_estimate() -> None:
    assert refusal([refused(42.0, held=True)]).message.endswith(
        "try again in about 42 s, when running requests have probably ended, or lower max_tokens"
    )


@pytest.mark.parametrize(("ahead", "words"), [(1, "1 request is"), (2, "2 requests are")])
def test_requests_already_waiting_are_counted_in_the_message(ahead: int, words: str) -> None:
    message = refusal([refused(5.0, ahead=ahead)]).message
    assert message.startswith(f"{words} already waiting for the key's limit of 1000 tokens per day; try again in")


def test_a_limit_on_requests_is_worded_in_requests() -> None:
    decision = dataclasses.replace(refused(5.0), kind="requests", need=1, limit=10, level=0)
    assert refusal([decision]).message.startswith(
        "the key's limit of 10 requests per minute is reached: the request needs 1, 0 are left;"
    )


def test_a_budget_that_others_wait_for_is_worded_in_money() -> None:
    decision = dataclasses.replace(refused(5.0, ahead=2), kind="budget", limit=5 * 10**12, currency="EUR")
    assert refusal([decision]).message.startswith("2 requests are already waiting for the key's budget of this month (5 EUR);")


@pytest.mark.parametrize(
    ("kind", "need", "limit", "message"),
    [
        (
            "tokens_per_day", 1800, 1000,
            "the request needs 1800 tokens and the key's limit is 1000 tokens per day: it can never be admitted; shorten the "
            "prompt or lower max_tokens, or ask for a higher limit",
        ),
        (
            "requests", 1, 0,
            "the request needs 1 and the key's limit is 0 requests per minute: it can never be admitted; ask for a higher "
            "limit",
        ),
        (
            "budget", 7 * 10**12, 5 * 10**12,
            "the key's budget of this month (5 EUR) does not cover the request: 0 EUR are left, it may cost 7 EUR; lower "
            "max_tokens or ask for a higher budget",
        ),
    ],
)  # fmt: skip
def test_a_refusal_that_waiting_cannot_resolve_says_what_can(kind: LimitKind, need: int, limit: int, message: str) -> None:
    decision = dataclasses.replace(refused(0), kind=kind, need=need, limit=limit, level=0, wait_s=None, currency="EUR")

    assert refusal([decision]).message == message


def test_a_limit_that_is_overdrawn_has_nothing_left() -> None:
    tokens = dataclasses.replace(refused(5.0), level=-3)
    assert "needs 800 tokens, 0 are left;" in refusal([tokens]).message
    budget = dataclasses.replace(tokens, kind="budget", level=-3 * 10**6, currency="EUR", wait_s=None)
    assert "does not cover the request: 0 EUR are left," in refusal([budget]).message


@pytest.mark.parametrize(("picos", "euros"), [(10**6, "0.000001"), (10**6 + 1, "0.000002"), (2 * 10**6, "0.000002")])
def test_what_a_request_may_cost_is_rounded_up_to_a_micro_unit(picos: int, euros: str) -> None:
    budget = dataclasses.replace(refused(5.0), kind="budget", need=picos, currency="EUR", wait_s=None)
    assert refusal([budget]).message.endswith(f"it may cost {euros} EUR; lower max_tokens or ask for a higher budget")


@pytest.mark.parametrize(("currency", "words"), [("USD", "price in USD;"), (None, "price in the currency of this appliance;")])
def test_the_error_for_an_unpriced_model_names_the_currency(currency: str | None, words: str) -> None:
    error = not_priced("demo", currency)
    assert words in error.message
    assert error.param == "model"
