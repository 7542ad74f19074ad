"""The message of a refusal: the limit, the required amount, and when to retry in words."""

from __future__ import annotations

import dataclasses

import pytest

from appliance.base.errors import RateLimitExceeded, Refused
from appliance.metering.limits.decisions import LimitDecision, LimitKind
from appliance.metering.limits.refusals import not_priced, refusal
from appliance.metering.prices import Price
from tests.support import factories
from tests.support.factories import admission_request

EUR = 10**12  # pico-units
A_EURO_EACH = factories.price(prompt=EUR, cached=EUR, completion=EUR)  # micro-units per million tokens


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


def error_of(*decisions: LimitDecision, prompt: int = 100, answers: int = 1, cost: Price = A_EURO_EACH) -> Refused:
    """Return the error for a request that expects 800 tokens or euros in all."""
    request = admission_request(factories.principal(), prompt, None, price=cost, num_answers=answers)  # fmt: skip
    return refusal(decisions, request, 800)


def test_a_daily_limit_is_worded_in_hours_and_minutes_and_the_exact_wait_is_in_the_error() -> None:
    error = error_of(refused(3 * 3600 + 11 * 60 + 7.25))
    assert error.message == (
        "the key's limit of 1000 tokens per day is reached: the request needs 800 tokens (prompt 100, expected output 700), "
        "300 are left; try again in 3 h 12 min, or set max_tokens to at most 200"
    )
    assert isinstance(error, RateLimitExceeded)
    assert error.retry_after_s == pytest.approx(11_467.25)


def test_a_wait_for_running_requests_is_worded_as_an_estimate() -> None:
    assert error_of(refused(42.0, held=True)).message.endswith(
        "try again in about 42 s, when running requests have probably ended, or set max_tokens to at most 200"
    )


@pytest.mark.parametrize(
    ("prompt", "answers", "advice"),
    [
        (100, 4, ", or set max_tokens to at most 50"),
        (298, 4, ", or shorten the prompt"),  # the 2 tokens that are left are too few for 4 answers
        (300, 1, ", or shorten the prompt"),
        (0, 400, ""),
    ],
)
def test_a_smaller_request_is_proposed_if_one_fits(prompt: int, answers: int, advice: str) -> None:
    assert error_of(refused(5.0), prompt=prompt, answers=answers).message.endswith(f"try again in 5 s{advice}")


def test_the_proposed_maximum_fits_all_refusing_limits() -> None:
    tighter = dataclasses.replace(refused(4.0), level=150)
    assert error_of(refused(5.0), tighter).message.endswith("try again in 5 s, or set max_tokens to at most 50")


@pytest.mark.parametrize(
    ("cost", "advice"),
    [
        (factories.price(prompt=0, cached=0, completion=EUR), "ask for a higher budget"),
        (factories.price(prompt=EUR, cached=EUR, completion=0), "shorten the prompt or ask for a higher budget"),
    ],
    ids=["free prompt", "free output"],
)
def test_only_what_costs_something_is_proposed_to_be_less(cost: Price, advice: str) -> None:
    budget = dataclasses.replace(refused(0), kind="budget", need=800 * EUR, level=EUR // 2, wait_s=None, currency="EUR")
    assert error_of(budget, cost=cost).message.endswith(f"; {advice}")


@pytest.mark.parametrize("level", [0, -3])
def test_no_smaller_request_is_proposed_if_nothing_is_left(level: int) -> None:
    error = error_of(dataclasses.replace(refused(5.0), level=level))
    assert error.message.endswith("0 are left; try again in 5 s")


def test_a_request_larger_than_its_limit_gets_the_maximum_for_the_whole_limit_also_if_others_wait() -> None:
    never = dataclasses.replace(refused(0, ahead=2), limit=500, level=150, wait_s=None)
    assert "set max_tokens to at most 400 or ask" in error_of(never, refused(5.0)).message


def test_no_smaller_request_is_proposed_if_a_limit_on_requests_refuses_too() -> None:
    requests = dataclasses.replace(refused(4.0), kind="requests", need=1, limit=10, level=0)
    assert error_of(refused(5.0), requests).message.endswith("try again in 5 s")


@pytest.mark.parametrize(("ahead", "words"), [(1, "1 request is"), (2, "2 requests are")])
def test_requests_already_waiting_are_counted_in_the_message(ahead: int, words: str) -> None:
    message = error_of(refused(5.0, ahead=ahead)).message
    assert message == f"{words} already waiting for the key's limit of 1000 tokens per day; try again in 5 s"


def test_a_limit_on_requests_is_worded_in_requests() -> None:
    decision = dataclasses.replace(refused(5.0), kind="requests", need=1, limit=10, level=0)
    assert error_of(decision).message == (
        "the key's limit of 10 requests per minute is reached: the request needs 1, 0 are left; try again in 5 s"
    )


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("tokens", "1 token per minute"),
        ("requests", "1 request per minute"),
        ("concurrency", "1 concurrent request"),
        ("tokens_per_day", "1 token per day"),
    ],
)
def test_a_limit_of_one_is_worded_in_the_singular(kind: LimitKind, limit: str) -> None:
    message = error_of(dataclasses.replace(refused(5.0), kind=kind, limit=1)).message
    assert message.startswith(f"the key's limit of {limit} is reached: ")


def test_one_token_that_is_left_is_worded_in_the_singular() -> None:
    message = error_of(dataclasses.replace(refused(5.0), level=1)).message
    assert "(prompt 100, expected output 700), 1 is left; try again" in message


def test_a_budget_that_others_wait_for_is_worded_in_money() -> None:
    decision = dataclasses.replace(refused(5.0, ahead=2), kind="budget", limit=5 * EUR, currency="EUR")
    assert error_of(decision).message.startswith("2 requests are already waiting for the key's budget of this month (5 EUR);")


@pytest.mark.parametrize(
    ("kind", "need", "limit", "prompt", "message"),
    [
        (
            "tokens_per_day", 800, 500, 100,
            "the request needs 800 tokens (prompt 100, expected output 700) and the key's limit is 500 tokens per day: it can "
            "never be admitted; set max_tokens to at most 400 or ask for a higher limit",
        ),
        (
            "tokens_per_day", 800, 500, 800,
            "the request needs 800 tokens (prompt 800, expected output 0) and the key's limit is 500 tokens per day: it can "
            "never be admitted; shorten the prompt or ask for a higher limit",
        ),
        (
            "requests", 1, 0, 100,
            "the key's limit is 0 requests per minute: no request can be admitted; ask for a higher limit",
        ),
        (
            "budget", 800 * EUR, 500 * EUR, 100,
            "the key's budget of this month (500 EUR) does not cover the request: 300 EUR are left, the prompt and 700 tokens "
            "of expected output may cost 800 EUR; set max_tokens to at most 200 or ask for a higher budget",
        ),
        (
            "budget", 800 * EUR, 500 * EUR, 400,
            "the key's budget of this month (500 EUR) does not cover the request: 300 EUR are left, the prompt and 400 tokens "
            "of expected output may cost 800 EUR; shorten the prompt or ask for a higher budget",
        ),
    ],
)  # fmt: skip
def test_a_refusal_that_waiting_cannot_resolve_says_what_can(
    kind: LimitKind, need: int, limit: int, prompt: int, message: str
) -> None:
    level = 300 * EUR if kind == "budget" else 0
    decision = dataclasses.replace(refused(0), kind=kind, need=need, limit=limit, level=level, wait_s=None, currency="EUR")

    assert error_of(decision, prompt=prompt).message == message


def test_a_budget_that_is_overdrawn_has_nothing_left() -> None:
    budget = dataclasses.replace(refused(5.0), level=-3 * 10**6, kind="budget", currency="EUR", wait_s=None)
    message = error_of(budget).message
    assert "does not cover the request: 0 EUR are left," in message
    assert message.endswith("; ask for a higher budget")


@pytest.mark.parametrize(("picos", "euros"), [(10**6, "0.000001"), (10**6 + 1, "0.000002"), (2 * 10**6, "0.000002")])
def test_what_a_request_may_cost_is_rounded_up_to_a_micro_unit(picos: int, euros: str) -> None:
    budget = dataclasses.replace(refused(5.0), kind="budget", need=picos, currency="EUR", wait_s=None)
    assert f"may cost {euros} EUR;" in error_of(budget).message


@pytest.mark.parametrize(("currency", "words"), [("USD", "price in USD;"), (None, "price in the currency of this appliance;")])
def test_the_error_for_an_unpriced_model_names_the_currency(currency: str | None, words: str) -> None:
    error = not_priced("demo", currency)
    assert words in error.message
    assert error.param == "model"
