"""Limits of tenants, keys and models together: for one model, over all tenants, in shadow mode, in currencies and zones."""

from __future__ import annotations

import dataclasses
from datetime import UTC, date, datetime, timedelta

import pytest

from appliance.base.errors import BudgetExceeded, RateLimitExceeded, Refused
from appliance.metering.calendar import BillingCalendar
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.rate_limits import RateLimit, RateLimitState
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.windows import WINDOWS_KEPT, Moment, Windows
from appliance.metering.prices import Price
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal
from tests.support.case_ids import case_id
from tests.support.clock import START, FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import admission_request, price, principal
from tests.support.ledgers import utc_admission


@pytest.fixture
def admission(clock: FakeClock) -> Admission:
    return utc_admission(clock, EmptySums())


def with_tenant(who: Principal, **changes: object) -> Principal:
    return dataclasses.replace(who, tenant=dataclasses.replace(who.tenant, **changes))  # type: ignore[arg-type]


def with_key(who: Principal, **changes: object) -> Principal:
    return dataclasses.replace(who, key=dataclasses.replace(who.key, **changes))  # type: ignore[arg-type]


def policy(mode: str = "enforce", **limits: int) -> ModelPolicy:
    return ModelPolicy(model="demo", limits=Limits(**limits), limit_mode=mode, updated_at=START)


async def admit(
    admission: Admission, who: Principal, tokens: int, model: str = "demo", *, cost: Price | None = None, **fields: object
) -> Reservation:
    request = admission_request(who, tokens, model=model, price=cost, **fields)  # type: ignore[arg-type]
    return await admission.admit(request)


@pytest.mark.parametrize("owner", ["tenant", "key"])
async def test_a_limit_for_one_model_applies_only_to_it_in_addition_to_the_limit_over_all(
    admission: Admission, owner: str
) -> None:
    change = with_tenant if owner == "tenant" else with_key
    bob = change(principal(), limits=Limits(tokens_per_minute=100), model_limits={"demo": Limits(tokens_per_minute=50)})
    with pytest.raises(Refused, match=f"the {owner}'s demo limit is 50"):
        await admit(admission, bob, 51)
    await admit(admission, bob, 50)
    await admit(admission, bob, 50, "other")
    with pytest.raises(RateLimitExceeded, match=f"the {owner}'s limit of 100"):
        await admit(admission, bob, 1, "other")


async def test_a_models_limit_counts_all_tenants_together(admission: Admission) -> None:
    bob, charlie = principal(), principal()
    held = await admit(admission, bob, 60, policy=policy(tokens_per_minute=100, concurrent_requests=2))
    with pytest.raises(RateLimitExceeded, match="the model's limit of 100 tokens per minute"):
        await admit(admission, charlie, 41, policy=policy(tokens_per_minute=100, concurrent_requests=2))
    held.void()
    await admit(admission, charlie, 100, policy=policy(tokens_per_minute=100, concurrent_requests=2))
    await admit(admission, charlie, 1000, "other")


async def test_a_removed_limit_of_a_model_is_no_longer_reported(admission: Admission) -> None:
    bob = principal()
    await admit(admission, bob, 60, policy=policy(tokens_per_minute=100))
    shown = admission.snapshot(bob, "demo").tokens
    assert shown is not None
    assert shown.remaining == 40
    await admit(admission, bob, 1000)
    assert admission.snapshot(bob, "demo").tokens is None


async def test_remaining_requests_and_tokens_are_each_those_of_the_tightest_limit(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=600, requests_per_minute=1))
    await admit(admission, bob, 0)
    assert admission.snapshot(bob) == RateLimitState(
        requests=RateLimit(limit=1, remaining=0, reset_s=60.0), tokens=RateLimit(limit=600, remaining=600, reset_s=0.0)
    )


async def test_the_limit_with_the_least_left_is_reported_even_if_it_is_the_larger_one(admission: Admission) -> None:
    bob = with_tenant(principal(), limits=Limits(tokens_per_minute=1000))
    await admit(admission, bob, 950)
    other_key = with_key(bob, id="key_other", limits=Limits(tokens_per_minute=100))
    await admit(admission, other_key, 0)
    tokens = admission.snapshot(other_key).tokens
    assert tokens is not None
    assert (tokens.limit, tokens.remaining) == (1000, 50)


async def test_of_two_limits_with_as_much_left_either_is_reported(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=100), Limits(tokens_per_minute=100))
    await admit(admission, bob, 10)
    tokens = admission.snapshot(bob).tokens
    assert tokens is not None
    assert tokens.remaining == 90


async def test_a_limit_in_debt_has_nothing_remaining_and_is_reset_when_the_debt_is_paid_and_it_is_full(
    admission: Admission,
) -> None:
    bob = principal(Limits(tokens_per_minute=600))
    (await admit(admission, bob, 10)).settle(900)
    assert admission.snapshot(bob).tokens == RateLimit(limit=600, remaining=0, reset_s=90.0)


async def test_a_new_limit_counts_running_requests(admission: Admission) -> None:
    bob = principal()
    running = [await admit(admission, bob, 10) for _ in range(3)]
    limited = with_tenant(bob, model_limits={"demo": Limits(concurrent_requests=3, tokens_per_day=100)})
    with pytest.raises(RateLimitExceeded, match="concurrent"):
        await admit(admission, limited, 10)
    running[0].settle(80)
    with pytest.raises(RateLimitExceeded, match="tokens per day"):
        await admit(admission, limited, 10)
    for reservation in running[1:]:
        reservation.void()
    await admit(admission, limited, 20)


@pytest.mark.parametrize("scope", ["tenant", "key", "model"])
async def test_a_request_that_a_shadow_limit_would_refuse_is_served_and_takes_nothing_from_it(
    admission: Admission, scope: str
) -> None:
    limits = Limits(tokens_per_minute=100, requests_per_minute=3, concurrent_requests=2, tokens_per_day=150)
    bob = principal()
    if scope == "tenant":
        bob = with_tenant(bob, limits=limits, limit_mode="shadow")
    elif scope == "key":
        bob = with_key(bob, limits=limits, limit_mode="shadow")
    shadow = ModelPolicy(model="demo", limits=limits, limit_mode="shadow", updated_at=START) if scope == "model" else None
    first = await admit(admission, bob, 90, policy=shadow)
    large = await admit(admission, bob, 5000, policy=shadow)
    small = await admit(admission, bob, 10, policy=shadow)

    assert first.shadow_refusals == small.shadow_refusals == []
    assert {(each.scope, each.kind) for each in large.shadow_refusals} == {(scope, "tokens"), (scope, "tokens_per_day")}
    large.settle(5000)
    small.void()
    assert (await admit(admission, bob, 10, policy=shadow)).shadow_refusals == []
    assert admission.snapshot(bob, "demo").tokens is None, "limits in shadow mode are not reported"


async def test_a_request_that_fits_a_shadow_limit_takes_from_it(admission: Admission) -> None:
    bob = principal()
    for tokens, shadow_refusals in ((60, []), (60, ["tokens"]), (40, []), (1, ["tokens"])):
        made = await admit(admission, bob, tokens, policy=policy("shadow", tokens_per_minute=100))
        assert [decision.kind for decision in made.shadow_refusals] == shadow_refusals


async def test_a_shadow_limit_does_not_cut_the_estimate_for_other_limits(admission: Admission) -> None:
    bob = with_tenant(principal(None, Limits(tokens_per_minute=1000)), limits=Limits(tokens_per_minute=20), limit_mode="shadow")
    request = admission_request(bob, 10, None)
    dry_run = await admission.dry_run(request)

    assert [(each.scope, each.need, each.allowed) for each in dry_run.decisions] == [("tenant", 20, True), ("key", 266, True)]
    assert (await admission.admit(request)).reserved_tokens == 266


async def test_usage_in_shadow_mode_counts_for_the_day_once_the_limit_is_enforced(admission: Admission) -> None:
    bob = with_tenant(principal(), limits=Limits(tokens_per_day=100), limit_mode="shadow")
    (await admit(admission, bob, 90)).settle(90)
    shadow_refused = await admit(admission, bob, 500)
    shadow_refused.settle(500)
    assert (await admit(admission, bob, 10)).shadow_refusals == []
    with pytest.raises(RateLimitExceeded, match="tokens per day"):
        await admit(admission, with_tenant(bob, limit_mode="enforce"), 1)


@pytest.mark.parametrize("limits", [Limits(tokens_per_day=100), Limits(monthly_budget=100)], ids=case_id)
async def test_what_runs_although_a_shadow_limit_refused_it_is_reserved_once_the_limit_is_enforced(
    admission: Admission, limits: Limits
) -> None:
    cost = price(prompt=10**6, cached=10**6, completion=10**6)  # a micro-unit a token
    bob = with_tenant(principal(), limits=limits, limit_mode="shadow")
    enforced = with_tenant(bob, limit_mode="enforce")
    shadow_refused = await admit(admission, bob, 500, cost=cost)
    assert (await admit(admission, bob, 40, cost=cost)).shadow_refusals == []
    with pytest.raises(RateLimitExceeded, match="running requests have reserved the rest"):
        await admit(admission, enforced, 60, cost=cost)
    shadow_refused.settle(0)
    await admit(admission, enforced, 60, cost=cost)


async def test_an_enforced_limit_refuses_whatever_is_in_shadow_mode(admission: Admission) -> None:
    bob = with_tenant(principal(None, Limits(requests_per_minute=1)), limits=Limits(tokens_per_minute=5), limit_mode="shadow")
    await admit(admission, bob, 50)
    with pytest.raises(RateLimitExceeded, match="the key's limit of 1 request per minute"):
        await admit(admission, bob, 50)


async def test_a_budget_is_in_the_currency_of_its_tenant_and_a_models_in_that_of_the_appliance(clock: FakeClock) -> None:
    admission = utc_admission(clock, EmptySums(), currency="EUR")
    francs = with_tenant(principal(Limits(monthly_budget=100)), currency="CHF")
    cost = dataclasses.replace(price(prompt=1_000_000, cached=0, completion=0), currency="CHF")
    await admit(admission, francs, 60, cost=cost, policy=policy(monthly_budget=10))  # francs are nothing to the model
    with pytest.raises(RateLimitExceeded, match="reserved the rest"):
        await admit(admission, francs, 60, cost=cost, policy=policy(monthly_budget=10))
    euros = dataclasses.replace(cost, currency="EUR")
    with pytest.raises(BudgetExceeded, match="the model's budget"):
        await admit(admission, principal(), 11, cost=euros, policy=policy(monthly_budget=10))


async def test_a_tier_that_pays_less_gets_further_with_its_budget(clock: FakeClock) -> None:
    admission = utc_admission(clock, EmptySums())
    cost = dataclasses.replace(price(prompt=1_000_000, cached=0, completion=0), tier_percents={"batch": 50})
    bob = with_tenant(principal(Limits(monthly_budget=100)), tier="batch")
    await admit(admission, bob, 200, cost=cost)
    with pytest.raises(RateLimitExceeded):
        await admit(admission, bob, 2, cost=cost)


@pytest.mark.parametrize(
    ("now", "hours"),
    [("2026-03-29T00:30", 21.5), ("2026-10-25T00:30", 22.5), ("2026-10-24T22:00", 25.0), ("2026-11-21T12:00", 11.0)],
)
async def test_a_day_ends_at_midnight_of_the_billing_zone_also_when_clocks_change(now: str, hours: float) -> None:
    clock = FakeClock(datetime.fromisoformat(now).replace(tzinfo=UTC))
    admission = utc_admission(clock, EmptySums(), calendar=BillingCalendar("Europe/Zurich"))
    bob = principal(Limits(tokens_per_day=10))
    (await admit(admission, bob, 10)).settle(10)
    with pytest.raises(RateLimitExceeded) as refused:
        await admit(admission, bob, 1)
    assert refused.value.retry_after_s == hours * 3600
    clock.advance(hours * 3600 - 0.001)
    with pytest.raises(RateLimitExceeded):
        await admit(admission, bob, 1)
    clock.advance(0.001)
    await admit(admission, bob, 1)


async def test_a_clock_that_steps_back_over_midnight_gives_no_second_day() -> None:
    clock = FakeClock(datetime(2026, 11, 22, 0, 0, 0, 100, tzinfo=UTC))
    admission = utc_admission(clock, EmptySums())
    bob = principal(Limits(tokens_per_day=10))
    (await admit(admission, bob, 10)).settle(10)
    clock.jump_wall(-1)
    for _ in range(2):
        with pytest.raises(RateLimitExceeded):
            await admit(admission, bob, 1)
        clock.jump_wall(1)


def test_the_last_days_are_kept_and_the_oldest_goes_first() -> None:
    days = [START.date() + timedelta(days=number) for number in range(WINDOWS_KEPT + 1)]
    moments = [Moment(START, 0.0, day, START) for day in days]
    windows = Windows(moments[0])
    for moment in moments[1:]:
        windows.enter(moment)
    assert [windows.find(day)[0] is not None for day in days] == [False, *[True] * WINDOWS_KEPT]


@pytest.mark.parametrize(
    ("days", "day", "month"),
    [
        (("2027-01-01", "2026-12-31"), "2027-01-01", "2027-01-01"),
        (("2027-01-02", "2026-12-31"), "2026-12-31", "2027-01-01"),
        (("2027-01-01", "2026-11-30"), "2026-11-30", "2026-11-01"),
        (("2026-12-31", "2027-01-01", "2026-12-31"), "2026-12-31", "2026-12-01"),
    ],
    ids=["one day back", "two days back", "two months back", "back to what was entered"],
)
def test_a_clock_that_steps_back_a_little_stays_in_the_day_and_month_that_have_begun(
    days: tuple[str, ...], day: str, month: str
) -> None:
    moments = [Moment(START, 0.0, date.fromisoformat(entered), START) for entered in days]
    windows = Windows(moments[0])
    for moment in moments[1:]:
        found = windows.enter(moment)
    assert [period.start.isoformat() for period in found] == [day, month]


async def test_a_clock_that_jumps_a_year_ahead_and_is_set_right_finds_its_day_again(
    admission: Admission, clock: FakeClock
) -> None:
    who = principal(Limits(tokens_per_day=100))
    (await admit(admission, who, 90)).settle(90)
    clock.jump_wall(400 * 86400)
    (await admit(admission, who, 50)).settle(50)
    clock.jump_wall(-400 * 86400)
    (await admit(admission, who, 10)).settle(10)
    with pytest.raises(RateLimitExceeded):
        await admit(admission, who, 1)
    clock.advance(86400)
    await admit(admission, who, 100)


def limited(owner: str, who: Principal, **limits: int) -> tuple[Principal, ModelPolicy | None]:
    """Return the principal after `owner` got limits for the model, and the model's own."""
    if owner == "model":
        return who, ModelPolicy(model="demo", limits=Limits(**limits), limit_mode="enforce", updated_at=START)
    change = with_tenant if owner == "tenant" else with_key
    return change(who, model_limits={"demo": Limits(**limits)}), None


@pytest.mark.parametrize("owner", ["tenant", "key", "model"])
async def test_a_limit_removed_and_set_again_counts_the_usage_in_between(admission: Admission, owner: str) -> None:
    bob = principal()
    with_limit, shared = limited(owner, bob, tokens_per_day=100)
    (await admit(admission, with_limit, 10, policy=shared)).settle(10)
    (await admit(admission, bob, 60)).settle(60)
    running = await admit(admission, bob, 500)
    with pytest.raises(RateLimitExceeded, match="tokens per day"):
        await admit(admission, with_limit, 1, policy=shared)
    running.void()
    with pytest.raises(RateLimitExceeded, match="tokens per day"):
        await admit(admission, with_limit, 31, policy=shared)
    await admit(admission, with_limit, 30, policy=shared)


@pytest.mark.parametrize("owner", ["tenant", "key", "model"])
async def test_removed_limits_of_all_scopes_keep_counting_also_on_another_day(
    admission: Admission, clock: FakeClock, owner: str
) -> None:
    bob = principal()
    everywhere = with_key(with_tenant(bob, model_limits={"demo": Limits(tokens_per_day=100)}), model_limits={"demo": Limits()})
    (await admit(admission, everywhere, 10, policy=policy(tokens_per_day=100))).settle(10)
    clock.advance(86400)
    (await admit(admission, bob, 60)).settle(60)
    with_limit, shared = limited(owner, bob, tokens_per_day=100)
    with pytest.raises(RateLimitExceeded, match="tokens per day"):
        await admit(admission, with_limit, 41, policy=shared)
    await admit(admission, with_limit, 40, policy=shared)


async def test_removed_budgets_of_all_scopes_end_no_request(admission: Admission) -> None:
    bob = with_tenant(principal(), cut_at_budget=True)
    budget = {"demo": Limits(monthly_budget=100)}
    everywhere = with_key(with_tenant(bob, model_limits=budget), model_limits=budget)
    (await admit(admission, everywhere, 90, cost=price(), policy=policy(monthly_budget=100))).settle(90)
    running = await admit(admission, bob, 50, cost=price())
    assert not running.record_progress(0, 50)


@pytest.mark.parametrize("owner", ["tenant", "key", "model"])
async def test_a_removed_budget_ends_no_request(admission: Admission, owner: str) -> None:
    bob = with_tenant(principal(), cut_at_budget=True)
    with_limit, shared = limited(owner, bob, monthly_budget=100)
    (await admit(admission, with_limit, 90, cost=price(), policy=shared)).settle(90)
    running = await admit(admission, bob, 50, cost=price())
    assert not running.record_progress(0, 50)


async def test_a_spent_budget_in_shadow_mode_or_of_a_past_month_ends_no_request(admission: Admission, clock: FakeClock) -> None:
    hard = with_tenant(principal(), cut_at_budget=True)
    shadow, enforced = (policy(mode, monthly_budget=100) for mode in ("shadow", "enforce"))
    for tokens in (10, 200):  # one that is admitted, and one refused only in shadow mode
        free = await admit(admission, hard, tokens, cost=price(), policy=shadow)
        assert not free.record_progress(0, 100)
        free.void()
    running = await admit(admission, hard, 10, cost=price(), policy=enforced)
    assert not running.record_progress(0, 29), "10 + 3 · 29, and nothing of the others"
    assert running.record_progress(0, 30)
    clock.advance(31 * 86400)
    assert not running.record_progress(0, 100)


async def test_the_cost_of_a_running_request_counts_only_with_cut_at_budget(admission: Admission) -> None:
    hard, shared = with_tenant(principal(), cut_at_budget=True), policy(monthly_budget=100)
    first, second = [await admit(admission, hard, 10, cost=price(), policy=shared) for _ in range(2)]
    assert not first.record_progress(0, 10), "10 + 3 · 10"
    assert second.record_progress(0, 25), "10 + 3 · 25"
    first.set_cut_at_budget(False)
    assert not second.record_progress(0, 25), "what the first has cost is forgotten until it ends"
    first.settle(20)
    assert second.record_progress(0, 25)
    second.settle(10)
    third = await admit(admission, hard, 10, cost=price(), policy=shared)
    assert not third.record_progress(0, 13), "10 + 3 · 10, 10, and 10 + 3 · 13"
    assert third.record_progress(0, 14)


@pytest.mark.parametrize("owner", ["tenant", "key", "model"])
async def test_running_requests_count_towards_a_new_budget(admission: Admission, owner: str) -> None:
    bob = principal()
    running = await admit(admission, bob, 90, cost=price())
    with_limit, shared = limited(owner, bob, monthly_budget=100)
    with pytest.raises(Refused):
        await admit(admission, with_limit, 11, cost=price(), policy=shared)
    running.settle(90)
    with pytest.raises(BudgetExceeded):
        await admit(admission, with_limit, 11, cost=price(), policy=shared)
    await admit(admission, with_limit, 10, cost=price(), policy=shared)


async def test_usage_refused_only_in_shadow_mode_does_not_use_up_the_budget(admission: Admission) -> None:
    shared = policy("shadow", monthly_budget=100)
    shadow_refused = await admit(admission, principal(), 101, cost=price(), policy=shared)
    assert [decision.kind for decision in shadow_refused.shadow_refusals] == ["budget"]
    shadow_refused.settle(101)
    admitted = await admit(admission, principal(), 100, cost=price(), policy=shared)
    assert not admitted.shadow_refusals


async def test_usage_refused_in_shadow_mode_in_one_currency_gives_no_room_in_another(admission: Admission) -> None:
    bob = with_tenant(principal(), limits=Limits(monthly_budget=100), limit_mode="shadow")
    in_dollars = dataclasses.replace(price(), currency="USD")
    (await admit(admission, bob, 60, cost=in_dollars)).settle(60)
    (await admit(admission, bob, 101, cost=price())).settle(101)
    with_dollars = with_tenant(bob, currency="USD")
    assert (await admit(admission, with_dollars, 41, cost=in_dollars)).shadow_refusals


async def test_usage_refused_in_shadow_mode_counts_towards_the_budget_in_its_own_currency(admission: Admission) -> None:
    in_dollars = dataclasses.replace(price(), currency="USD")
    refused = await admit(admission, principal(), 60, cost=in_dollars, policy=policy("shadow", tokens_per_minute=10))
    assert refused.shadow_refusals
    refused.settle(60)
    await admit(admission, principal(), 100, cost=price(), policy=policy(monthly_budget=100))


async def test_a_request_settled_with_a_part_of_its_prompt_costs_that_part(admission: Admission) -> None:
    shared = policy(monthly_budget=100)
    (await admit(admission, principal(), 10, cost=price(), policy=shared)).settle(4)
    with pytest.raises(BudgetExceeded):
        await admit(admission, principal(), 97, cost=price(), policy=shared)
    await admit(admission, principal(), 96, cost=price(), policy=shared)


async def test_rejected_draft_tokens_with_a_price_count_towards_a_hard_budget(admission: Admission) -> None:
    hard, shared = with_tenant(principal(), cut_at_budget=True), policy(monthly_budget=100)
    with_rejected_drafts = dataclasses.replace(price(), rejected_draft=2_000_000)
    running = await admit(admission, hard, 10, cost=with_rejected_drafts, policy=shared)
    assert not running.record_progress(0, 10, 29), "10 + 3 · 10 + 2 · 29"
    assert running.record_progress(0, 10, 30)
    running.settle(20, rejected_tokens=29)
    again = await admit(admission, hard, 1, cost=with_rejected_drafts, policy=shared)
    assert not again.record_progress(0, 0)
    again.settle(1)
    with pytest.raises(BudgetExceeded):
        await admit(admission, hard, 2, cost=with_rejected_drafts, policy=shared)


async def test_a_soft_budget_ends_no_request_and_counts_each_ended_request_once(admission: Admission) -> None:
    soft, shared = principal(), policy(monthly_budget=100)
    running, ended = [await admit(admission, soft, 10, cost=price(), policy=shared) for _ in range(2)]
    assert not running.record_progress(0, 100)
    ended.set_cut_at_budget(True)
    ended.settle(10)
    assert not ended.record_progress(0, 100)
    running.set_cut_at_budget(True)
    assert not running.record_progress(0, 26), "10 of the other, 10 + 3 · 26"
    assert running.record_progress(0, 27)


async def test_a_change_that_leaves_a_budget_hard_keeps_the_costs_of_running_requests(admission: Admission) -> None:
    hard, shared = with_tenant(principal(), cut_at_budget=True), policy(monthly_budget=100)
    dear, cheap = [await admit(admission, hard, 0, cost=price(), policy=shared) for _ in range(2)]
    assert not dear.record_progress(0, 30)
    dear.set_cut_at_budget(True)
    assert cheap.record_progress(0, 4), "3 · 30 + 3 · 4"


@pytest.mark.parametrize("owner", ["tenant", "key", "model"])
async def test_a_request_running_across_months_counts_in_the_month_of_admission_with_new_limits(
    admission: Admission, clock: FakeClock, owner: str
) -> None:
    bob = principal()
    running = await admit(admission, bob, 90, cost=price())
    clock.advance(10 * 86400)
    with_limit, shared = limited(owner, bob, tokens_per_day=100, monthly_budget=100, concurrent_requests=2)
    (await admit(admission, with_limit, 10, cost=price(), policy=shared)).void()
    running.settle(90)
    await admit(admission, with_limit, 100, cost=price(), policy=shared)


async def test_costs_in_another_currency_do_not_end_a_running_request(admission: Admission) -> None:
    bob = with_tenant(principal(), currency="USD", cut_at_budget=True)
    in_dollars = dataclasses.replace(price(), currency="USD")
    running = await admit(admission, bob, 50, cost=in_dollars, policy=policy(monthly_budget=100))
    assert not running.record_progress(0, 50)
    running.settle(100)
    again = await admit(admission, with_tenant(bob, currency=None), 50, cost=price(), policy=policy(monthly_budget=100))
    assert again.record_progress(0, 50)


async def test_after_a_change_of_currency_only_costs_in_the_new_one_count(
    admission: Admission,
) -> None:
    bob = with_tenant(principal(), limits=Limits(monthly_budget=100))
    in_dollars, in_euros = dataclasses.replace(price(), currency="USD"), price()
    (await admit(admission, bob, 60, cost=in_dollars)).settle(60)
    (await admit(admission, bob, 90, cost=in_euros)).settle(90)
    with_dollars = with_tenant(bob, currency="USD")
    (await admit(admission, with_dollars, 40, cost=in_dollars)).settle(40)
    with pytest.raises(BudgetExceeded):
        await admit(admission, with_dollars, 1, cost=in_dollars)
    await admit(admission, bob, 10, cost=in_euros)


async def test_what_a_running_request_reserves_counts_only_while_the_budget_is_in_its_currency(admission: Admission) -> None:
    bob = with_tenant(principal(), limits=Limits(monthly_budget=100))
    with_dollars = with_tenant(bob, currency="USD")
    in_dollars, in_euros = dataclasses.replace(price(), currency="USD"), price()
    await admit(admission, bob, 70, cost=in_euros)
    early = await admit(admission, bob, 20, cost=in_dollars)
    await admit(admission, with_dollars, 80, cost=in_dollars)
    with pytest.raises(RateLimitExceeded, match="running requests have reserved"):
        await admit(admission, with_dollars, 1, cost=in_dollars)
    early.void()
    await admit(admission, with_dollars, 20, cost=in_dollars)
    await admit(admission, bob, 30, cost=in_euros)
    with pytest.raises(RateLimitExceeded, match="running requests have reserved"):
        await admit(admission, bob, 1, cost=in_euros)
