"""One allowance by itself: what it reserves, decides and restores at the edges of its limits."""

from __future__ import annotations

from datetime import timedelta

import pytest

from appliance.metering.limits.allowances import Ahead, Allowance, Amount, Need
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.sums import PeriodSums, SavedLevel
from appliance.metering.limits.windows import Moment
from appliance.tenancy.principals import Limits
from tests.support.case_ids import case_id
from tests.support.clock import START, FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.ledgers import utc_admission

MICRO = 10**6


def moment(clock: FakeClock) -> Moment:
    return utc_admission(clock, EmptySums())._moment()


def allowance_with(clock: FakeClock, limits: Limits, *, mode: str = "enforce", used: int = 0) -> Allowance:
    """Return Bob's allowance, of which `used` tokens, a micro-unit each, were used today."""
    at = moment(clock)
    allowance = Allowance(Owner("tenant", "bob"), "EUR", at)
    allowance.configure(limits, mode, at)
    allowance.add_usage(Amount(tokens=used, cost_picos=used * MICRO), "EUR", at.day)
    return allowance


def need_of(tokens: int) -> Need:
    amount = Amount(tokens=tokens, cost_picos=tokens * MICRO)
    return Need(expected=amount, worst=amount, currency="EUR")


@pytest.mark.parametrize("limits", [Limits(tokens_per_day=100), Limits(monthly_budget=100)], ids=case_id)
def test_a_worst_case_larger_than_what_is_left_is_reserved_in_full(clock: FakeClock, limits: Limits) -> None:
    allowance = allowance_with(clock, limits, used=60)
    running = allowance.adopt(need_of(90), moment(clock).day)
    (refusal,) = allowance.refusals(need_of(40), moment(clock))
    assert refusal.held
    assert refusal.level == -50 * (1 if refusal.kind == "tokens_per_day" else MICRO)
    running.void(clock.monotonic_s())
    assert allowance.refusals(need_of(40), moment(clock)) == []


def test_a_request_as_large_as_the_limit_of_a_day_waits_for_midnight(clock: FakeClock) -> None:
    clock.advance(0.25)
    allowance = allowance_with(clock, Limits(tokens_per_day=100), used=1)
    (refusal,) = allowance.refusals(need_of(100), moment(clock))
    assert refusal.wait_s == 12 * 3600 - 0.25
    (never,) = allowance.refusals(need_of(101), moment(clock))
    assert never.wait_s is None


def test_every_decision_says_how_many_requests_wait_ahead_and_in_which_mode(clock: FakeClock) -> None:
    limits = Limits(tokens_per_minute=100, requests_per_minute=5, concurrent_requests=5, tokens_per_day=100, monthly_budget=100)
    allowance = allowance_with(clock, limits, mode="shadow")
    decisions = list(allowance.decisions(need_of(1), moment(clock), Ahead(requests=2, tokens=1)))
    assert [(each.kind, each.ahead, each.mode, each.allowed, each.wait_s) for each in decisions] == [
        (kind, 2, "shadow", True, 0.0) for kind in ("concurrency", "requests", "tokens", "tokens_per_day", "budget")
    ]


def test_a_request_refused_in_shadow_mode_that_is_voided_leaves_no_room_behind(clock: FakeClock) -> None:
    allowance = allowance_with(clock, Limits(concurrent_requests=1), mode="shadow")
    allowance.take(need_of(1), moment(clock))
    allowance.take_in_shadow(need_of(1), moment(clock)).void(clock.monotonic_s())
    assert allowance.running == 1


def test_a_level_saved_before_the_clock_was_set_back_refills_from_now_on(clock: FakeClock) -> None:
    at = moment(clock)
    allowance = Allowance(Owner("tenant", "bob"), "EUR", at)
    saved = SavedLevel(capacity=60, units=0, saved_at=START + timedelta(hours=1))
    allowance.restore(PeriodSums(tokens_today=0, cost_month_picos=0, levels={"tokens": saved}), at)
    allowance.configure(Limits(tokens_per_minute=60), "enforce", at)
    assert allowance.in_use(at)["tokens"] == 60
    clock.advance(60)
    assert allowance.in_use(moment(clock))["tokens"] == 0
