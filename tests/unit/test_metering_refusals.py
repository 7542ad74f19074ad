"""The message of a refusal: the limit, the required amount, and when to retry in words."""

from __future__ import annotations

import dataclasses

import pytest

from appliance.base.errors import RateLimitExceeded
from appliance.metering.limits.decisions import LimitDecision
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


def test_a_limit_of_the_day_tells_hours_and_minutes_and_the_exact_wait_goes_into_headers() -> None:
    error = refusal([refused(3 * 3600 + 11 * 60 + 7.25)])
    assert error.message == (
        "the key's limit of 1000 tokens per day is reached: the request needs 800 tokens, 300 are left; try again in 3 h 12 min"
    )
    assert isinstance(error, RateLimitExceeded)
    assert error.retry_after_s == pytest.approx(11_467.25)


def test_a_wait_for_running_requests_says_that_it_is_an_estimate() -> None:
    assert refusal([refused(42.0, held=True)]).message.endswith(
        "try again in about 42 s, by when running requests have probably ended, or ask for fewer max_tokens"
    )


@pytest.mark.parametrize(("ahead", "words"), [(1, "1 request is"), (2, "2 requests are")])
def test_requests_that_wait_for_the_same_limit_are_counted_in_words(ahead: int, words: str) -> None:
    message = refusal([refused(5.0, ahead=ahead)]).message
    assert message.startswith(f"{words} already waiting for the key's limit of 1000 tokens per day; try again in")


def test_a_limit_of_requests_is_told_in_requests() -> None:
    decision = dataclasses.replace(refused(5.0), kind="requests", need=1, limit=10, level=0)
    assert refusal([decision]).message.startswith(
        "the key's limit of 10 requests per minute is reached: the request needs 1, 0 are left;"
    )


def test_a_budget_that_others_wait_for_is_told_in_money() -> None:
    decision = dataclasses.replace(refused(5.0, ahead=2), kind="budget", limit=5 * 10**12, currency="EUR")
    assert refusal([decision]).message.startswith(
        "2 requests are already waiting for the key's limit of 5 EUR budget of this month;"
    )


@pytest.mark.parametrize(("currency", "words"), [("USD", "price in USD;"), (None, "price in the currency of this appliance;")])
def test_a_model_without_a_price_is_told_with_the_currency_that_it_has_none_in(currency: str | None, words: str) -> None:
    assert words in not_priced("demo", currency).message
