"""Admission checks all limits of tenant, key and model together: a request reserves from all of them or from none."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime

import msgspec
import pytest

from appliance.base.errors import BudgetExceeded, RateLimitExceeded, Refused, RequestExceedsLimit
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.output_estimates import EXPECTED_OUTPUT_TOKENS, OUTPUTS_KEPT, OUTPUTS_MIN, percentile_90
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.sums import PeriodSums
from appliance.metering.limits.windows import Moment
from appliance.metering.prices import Price
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal
from tests.support.case_ids import case_id
from tests.support.clock import FakeClock
from tests.support.factories import admission_request, price, principal
from tests.support.ledgers import num_running, utc_admission


class FixedSums:
    """Sums as if the ledger held them. Each read passes through the event loop, as a database would."""

    def __init__(self, tokens_today: int = 0, cost_month_picos: int = 0) -> None:
        self.sums = PeriodSums(tokens_today=tokens_today, cost_month_picos=cost_month_picos)
        self.reads: list[list[str]] = []

    async def read(
        self, currencies: Mapping[Owner, str], at: Moment, ended: Callable[[], Collection[str]]
    ) -> dict[Owner, PeriodSums]:
        self.reads.append(sorted(owner.scope for owner in currencies))
        await asyncio.sleep(0)
        return dict.fromkeys(currencies, self.sums)

    async def outputs(self, key_id: str, model: str, before: datetime) -> Sequence[int]:
        await asyncio.sleep(0)
        return ()


@pytest.fixture
def admission(clock: FakeClock) -> Admission:
    return utc_admission(clock, FixedSums())


async def admit(
    admission: Admission, who: Principal, prompt: int = 10, output: int | None = 10, cost: Price | None = None
) -> Reservation:
    return await admission.admit(admission_request(who, prompt, output, price=cost))


async def test_a_request_without_limits_is_admitted(admission: Admission) -> None:
    reservation = await admit(admission, principal(), prompt=10**9, output=None)
    assert reservation.reserved_tokens == 10**9 + EXPECTED_OUTPUT_TOKENS


async def test_200_concurrent_requests_are_admitted_exactly_up_to_the_capacity(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=1000))
    answers = await asyncio.gather(*(admit(admission, bob, 10, 3) for _ in range(200)), return_exceptions=True)
    admitted = [answer for answer in answers if isinstance(answer, Reservation)]
    assert len(admitted) == 1000 // 13
    assert all(isinstance(answer, Reservation | RateLimitExceeded) for answer in answers)


@pytest.mark.parametrize(
    ("tenant", "key"),
    [
        (Limits(tokens_per_minute=100), Limits(requests_per_minute=0)),
        (Limits(requests_per_minute=5), Limits(tokens_per_minute=5)),
        (Limits(concurrent_requests=5, tokens_per_day=100), Limits(concurrent_requests=0)),
        (Limits(tokens_per_minute=100, requests_per_minute=5, concurrent_requests=5), Limits(tokens_per_day=1)),
    ],
    ids=case_id,
)
async def test_a_refusal_consumes_nothing(admission: Admission, tenant: Limits, key: Limits) -> None:
    bob = principal(tenant, key)
    for _ in range(20):
        with pytest.raises(Refused):
            await admit(admission, bob)
    assert num_running(admission, bob.tenant.id) == num_running(admission, bob.key.id) == 0
    assert not any(admission.in_use(Owner("tenant", bob.tenant.id)).values())
    assert not any(admission.in_use(Owner("key", bob.key.id)).values())
    unlimited = dataclasses.replace(bob, key=dataclasses.replace(bob.key, limits=Limits()))
    for _ in range(5):
        await admit(admission, unlimited)


async def test_retry_after_is_exactly_the_time_until_the_bucket_has_room(admission: Admission, clock: FakeClock) -> None:
    bob = principal(Limits(tokens_per_minute=100, requests_per_minute=7), Limits(tokens_per_minute=90))
    (await admit(admission, bob, 77, 0)).settle(77)
    with pytest.raises(RateLimitExceeded) as refused:
        await admit(admission, bob, 31, 0)
    wait_s = refused.value.retry_after_s
    assert wait_s == 12.0
    clock.advance(wait_s - 0.001)
    with pytest.raises(RateLimitExceeded):
        await admit(admission, bob, 31, 0)
    clock.advance(0.001)
    await admit(admission, bob, 31, 0)


async def test_retry_after_is_the_longest_wait_of_all_refusing_limits(admission: Admission, clock: FakeClock) -> None:
    bob = principal(Limits(tokens_per_minute=60), Limits(requests_per_minute=2))
    for _ in range(2):
        await admit(admission, bob, 30, 0)
    with pytest.raises(RateLimitExceeded, match="requests per minute") as refused:
        await admit(admission, bob, 1, 0)
    assert refused.value.retry_after_s == 30.0
    assert refused.value.type == "requests"
    with pytest.raises(RateLimitExceeded, match="tokens per minute") as refused:
        await admit(admission, bob, 50, 0)
    assert refused.value.retry_after_s == 50.0
    assert refused.value.type == "tokens"
    clock.advance(50.0)
    await admit(admission, bob, 50, 0)


async def test_a_request_larger_than_the_limit_is_refused_without_retry(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=100))
    with pytest.raises(
        RequestExceedsLimit, match=r"needs 101 tokens \(prompt 91, .* 10\) and the tenant's limit is 100 tokens per minute"
    ) as refused:
        await admit(admission, bob, 91, 10)
    assert refused.value.should_retry is False
    assert refused.value.type == "tokens"


@pytest.mark.parametrize("limits", [Limits(tokens_per_minute=100), Limits(tokens_per_day=100)], ids=case_id)
async def test_an_estimated_output_never_makes_a_request_too_large(admission: Admission, limits: Limits) -> None:
    bob = principal(limits)
    assert (await admit(admission, bob, 40, None)).reserved_tokens == 100
    with pytest.raises(RequestExceedsLimit):
        await admit(admission, bob, 101, None)


@pytest.mark.parametrize("output", [None, 900])
@pytest.mark.parametrize("answers", [1, 3])
@pytest.mark.parametrize("limits", [Limits(tokens_per_minute=800), Limits(tokens_per_day=800), Limits(monthly_budget=4200)])
async def test_the_max_tokens_that_a_refusal_proposes_is_the_largest_that_is_admitted(
    admission: Admission, limits: Limits, answers: int, output: int | None
) -> None:
    bob, cost = principal(limits), price(prompt=7_000_000, cached=0, completion=3_000_000)
    (await admit(admission, bob, 560, 0, cost)).settle(560)
    request = admission_request(bob, 20, output, price=cost, num_answers=answers)
    with pytest.raises(Refused, match="set max_tokens to at most") as refused:
        await admission.admit(request)
    proposed = int(refused.value.message.partition("at most ")[2].split()[0])

    with pytest.raises(Refused):
        await admission.admit(msgspec.structs.replace(request, max_output_tokens=proposed + 1))
    await admission.admit(msgspec.structs.replace(request, max_output_tokens=proposed))


async def test_a_limit_removed_and_set_again_has_kept_its_usage(admission: Admission) -> None:
    limited = principal(Limits(tokens_per_minute=100, requests_per_minute=10))
    unlimited = dataclasses.replace(limited, tenant=dataclasses.replace(limited.tenant, limits=Limits()))
    (await admit(admission, limited, 90, 0)).settle(90)
    (await admit(admission, unlimited, 1, 0)).settle(1)

    with pytest.raises(RateLimitExceeded):
        await admit(admission, limited, 90, 0)
    state = admission.snapshot(limited)
    assert state.requests is not None
    assert state.requests.remaining == 9


async def test_a_snapshot_with_changed_limits_changes_nothing(admission: Admission) -> None:
    bob = principal(Limits(monthly_budget=20, tokens_per_minute=1000, concurrent_requests=1))
    bob = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, cut_at_budget=True))
    running = await admit(admission, bob, 1, 10, price(completion=10**6))
    before = admission.snapshot(bob)
    unlimited = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, limits=Limits()))

    assert admission.snapshot(unlimited) == before
    assert admission.in_use(Owner("tenant", bob.tenant.id)) == {"tokens": 11, "concurrency": 1}
    assert running.record_progress(0, 30)


async def test_a_changed_hard_budget_applies_to_running_requests(admission: Admission) -> None:
    bob = principal(Limits(monthly_budget=20))
    bob = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, cut_at_budget=True))
    running = await admit(admission, bob, 1, 10, price(completion=10**6))
    assert not running.record_progress(0, 10)
    for budget, is_cut in ((5, True), (15, False), (None, False), (10, True)):
        changed = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, limits=Limits(monthly_budget=budget)))
        admission.reconfigure({bob.key.id: changed}, {})
        assert running.record_progress(0, 10) == is_cut


async def test_limits_changed_for_several_tenants_at_once_apply_to_all_their_running_requests(admission: Admission) -> None:
    tenants = [principal(Limits(monthly_budget=1000)) for _ in range(4)]
    running = [await admit(admission, who, 1, 10, price(completion=10**6)) for who in tenants]
    changed = {}
    for who in tenants:
        hard = dataclasses.replace(who.tenant, limits=Limits(monthly_budget=5), cut_at_budget=True)
        changed[who.key.id] = dataclasses.replace(who, tenant=hard)
    admission.reconfigure(changed, {})
    assert [each.record_progress(0, 10) for each in running] == [True] * 4


async def test_a_changed_currency_or_mode_applies_to_running_requests(admission: Admission) -> None:
    bob, in_dollars = principal(Limits(monthly_budget=20)), dataclasses.replace(price(completion=10**6), currency="USD")
    bob = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, cut_at_budget=True))
    running = await admit(admission, bob, 1, 10, in_dollars)
    changes = [("USD", "enforce", True), (None, "enforce", False), ("USD", "shadow", False), ("USD", "enforce", True)]
    for currency, mode, is_cut in changes:
        changed = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, currency=currency, limit_mode=mode))
        admission.reconfigure({bob.key.id: changed}, {})
        assert running.record_progress(0, 20) == is_cut


async def test_a_snapshot_reports_the_tighter_limit_of_tenant_and_key(admission: Admission) -> None:
    for tenant, key in (
        (Limits(tokens_per_minute=100), Limits(tokens_per_minute=30)),
        (Limits(), Limits(tokens_per_minute=30)),
        (Limits(tokens_per_minute=30), Limits(tokens_per_minute=100)),
        (Limits(tokens_per_minute=30), Limits()),
    ):
        bob = principal(tenant, key)
        for remaining in (30, 20):
            state = admission.snapshot(bob, "demo").tokens
            assert state is not None
            assert (state.limit, state.remaining) == (30, remaining)
            await admit(admission, bob, 10, 0)


@pytest.mark.parametrize("owner", ["tenant", "key", "tenant for a model", "key for a model", "model"])
async def test_usage_in_the_ledger_counts_for_every_kind_of_owner(clock: FakeClock, owner: str) -> None:
    admission, limits = utc_admission(clock, FixedSums(tokens_today=90)), Limits(tokens_per_day=100)
    bob, policy = principal(), None
    changes = {"model_limits": {"demo": limits}} if owner.endswith("for a model") else {"limits": limits}
    if owner == "model":
        policy = ModelPolicy(model="demo", limits=limits, limit_mode="enforce", updated_at=clock.now())
    elif owner.startswith("tenant"):
        bob = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, **changes))
    else:
        bob = dataclasses.replace(bob, key=dataclasses.replace(bob.key, **changes))
    request = admission_request(bob, 11, policy=policy)
    with pytest.raises(RateLimitExceeded, match="tokens per day"):
        await admission.admit(request)
    await admission.admit(msgspec.structs.replace(request, prompt_tokens=10))


async def test_a_dry_run_of_a_request_that_fits_or_never_fits_would_not_wait(
    admission: Admission,
) -> None:
    bob = principal(Limits(tokens_per_minute=100))
    for prompt, refusals in ((50, 0), (100, 0), (101, 1)):
        request = admission_request(bob, prompt)
        dry_run = await admission.dry_run(request, wait_s=60.0)
        assert (len(dry_run.refusals), dry_run.would_wait) == (refusals, False)


async def test_a_dry_run_would_wait_only_if_there_is_room_within_its_maximum_wait(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=100))
    await admit(admission, bob, 100, 0)
    request = admission_request(bob, 50)
    assert [(await admission.dry_run(request, wait_s)).would_wait for wait_s in (0.0, 29.0, 30.0)] == [False, False, True]


async def test_levels_to_save_are_returned_once_per_change_and_again_after_a_failed_save(
    admission: Admission,
) -> None:
    bob = principal(Limits(tokens_per_minute=100), Limits(requests_per_minute=10))
    bobs = Owner("tenant", bob.tenant.id)
    kinds = {bobs: ["tokens"], Owner("key", bob.key.id): ["requests"]}

    def unsaved() -> dict[Owner, list[str]]:
        return {owner: [*levels] for owner, levels in admission.unsaved_levels().items()}

    running = await admit(admission, bob, 10, 10)
    assert unsaved() == kinds
    assert unsaved() == {}

    admission.mark_unsaved([bobs])
    assert list(unsaved()) == [bobs]

    running.settle(5)
    assert unsaved() == kinds
    assert unsaved() == {}
    admission.mark_unsaved(kinds)
    assert unsaved() == kinds


async def test_an_owner_that_is_not_loaded_is_reported_with_its_full_limits(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=100))
    state = admission.snapshot(bob).tokens
    assert state is not None
    assert (state.limit, state.remaining, state.reset_s) == (100, 100, 0.0)
    assert admission.in_use(Owner("tenant", bob.tenant.id)) == {}


async def test_settling_corrects_the_bucket_at_once(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=100))
    reservation = await admit(admission, bob, 40, 60)
    with pytest.raises(RateLimitExceeded):
        await admit(admission, bob, 1, 1)
    reservation.settle(50)
    state = admission.snapshot(bob)
    assert state.tokens is not None
    assert state.tokens.remaining == 50
    assert state.tokens.reset_s == 30.0
    await admit(admission, bob, 25, 25)


async def test_more_output_than_expected_leaves_a_debt_repaid_by_the_refill(admission: Admission, clock: FakeClock) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    (await admit(admission, bob, 10, None)).settle(80)
    with pytest.raises(RateLimitExceeded) as refused:
        await admit(admission, bob, 10, 0)
    assert refused.value.retry_after_s == 30.0
    clock.advance(30.0)
    await admit(admission, bob, 10, 0)


async def test_voiding_a_reservation_returns_everything(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=20, requests_per_minute=1, concurrent_requests=1, tokens_per_day=20))
    for _ in range(3):
        (await admit(admission, bob)).void()
    (await admit(admission, bob)).settle(20)


async def test_buckets_keep_no_reference_to_ended_requests(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=100, requests_per_minute=10))
    (await admit(admission, bob)).settle(5)
    (await admit(admission, bob)).void()
    buckets = admission._allowances[Owner("tenant", bob.tenant.id)].buckets
    assert {kind: bucket._last for kind, bucket in buckets.items()} == {"tokens": None, "requests": None}


async def test_a_reservation_cannot_be_settled_or_voided_twice(admission: Admission) -> None:
    reservation = await admit(admission, principal())
    reservation.settle(5)
    with pytest.raises(RuntimeError):
        reservation.settle(5)
    with pytest.raises(RuntimeError):
        reservation.void()


async def test_negative_token_counts_are_rejected(admission: Admission) -> None:
    with pytest.raises(ValueError, match="negative"):
        await admit(admission, principal(), -1)
    reservation = await admit(admission, principal())
    with pytest.raises(ValueError, match="negative"):
        reservation.settle(-1)
    reservation.settle(0)


async def test_running_requests_are_counted_at_tenant_and_key(admission: Admission) -> None:
    bob = principal(Limits(concurrent_requests=2))
    first, _second = await admit(admission, bob), await admit(admission, bob)
    with pytest.raises(RateLimitExceeded, match="concurrent") as refused:
        await admit(admission, bob)
    assert refused.value.retry_after_s == 1.0
    first.settle(1)
    await admit(admission, bob)
    assert num_running(admission, bob.key.id) == 2


async def test_the_limit_of_tokens_per_day_is_reset_at_midnight(clock: FakeClock) -> None:
    admission = utc_admission(clock, FixedSums(tokens_today=90))
    bob = principal(Limits(tokens_per_day=100))
    late = await admit(admission, bob, 5, 5)
    with pytest.raises(RateLimitExceeded, match="tokens per day") as refused:
        await admit(admission, bob, 11, 0)
    assert refused.value.retry_after_s == 12 * 3600
    clock.advance(12 * 3600 - 0.001)
    with pytest.raises(RateLimitExceeded):
        await admit(admission, bob, 11, 0)
    clock.advance(0.001)
    late.settle(10)  # admitted yesterday, so it counts for yesterday
    await admit(admission, bob, 100, 0)
    with pytest.raises(RequestExceedsLimit):
        await admit(admission, bob, 101, 0)


async def test_the_budget_counts_what_is_reserved_and_what_was_spent(clock: FakeClock) -> None:
    admission = utc_admission(clock, FixedSums(cost_month_picos=60_000_000))
    bob = principal(Limits(monthly_budget=100))  # micro-units: 100 000 000 picos
    cost = price(prompt=1_000_000, cached=0, completion=1_000_000)
    first = await admit(admission, bob, 20, 10, cost)
    with pytest.raises(BudgetExceeded, match=r"0\.00001 EUR are left") as refused:
        await admit(admission, bob, 41, 0, cost)
    assert refused.value.should_retry is False
    first.settle(30, cached_tokens=20)  # 20 tokens of the prompt cost nothing
    (await admit(admission, bob, 30, 0, cost)).settle(30)
    with pytest.raises(BudgetExceeded):
        await admit(admission, bob, 1, 0, cost)
    clock.advance(10 * 86400)  # December
    await admit(admission, bob, 100, 0, cost)


async def test_a_cost_in_another_currency_takes_nothing_from_the_budget(clock: FakeClock) -> None:
    admission = utc_admission(clock, FixedSums(cost_month_picos=0), currency="CHF")
    bob = principal(Limits(monthly_budget=1))
    cost = price(prompt=1_000_000, cached=0, completion=1_000_000)
    (await admit(admission, bob, 20, 10, cost)).settle(30)
    with pytest.raises(BudgetExceeded):
        await admit(admission, bob, 20, 10, dataclasses.replace(cost, currency="CHF"))


COSTS_NOTHING_HERE = [None, price(prompt=0, cached=0, completion=0), dataclasses.replace(price(), currency="CHF")]


@pytest.mark.parametrize("cost", COSTS_NOTHING_HERE, ids=["no price", "price of zero", "another currency"])
async def test_an_overdrawn_budget_refuses_no_request_that_costs_nothing_in_it(clock: FakeClock, cost: Price | None) -> None:
    admission = utc_admission(clock, FixedSums(cost_month_picos=10**12))
    bob = principal(Limits(monthly_budget=100))
    with pytest.raises(BudgetExceeded):
        await admit(admission, bob, 1, 0, price())

    (await admit(admission, bob, 20, 10, cost)).settle(30)


async def test_a_spent_budget_refuses_a_request_of_which_only_unexpected_output_costs_something(clock: FakeClock) -> None:
    admission = utc_admission(clock, FixedSums(cost_month_picos=10**12))
    bob, cost = principal(Limits(monthly_budget=10**6, tokens_per_minute=10)), price(prompt=0, cached=0, completion=10**6)
    request = admission_request(bob, 10, None, price=cost, output_room=50)  # fills the limit of tokens: no output is expected
    with pytest.raises(BudgetExceeded):
        await admission.admit(request)


@pytest.mark.parametrize("cost", COSTS_NOTHING_HERE, ids=["no price", "price of zero", "another currency"])
async def test_a_spent_hard_budget_ends_no_request_that_costs_nothing_in_it(clock: FakeClock, cost: Price | None) -> None:
    admission = utc_admission(clock, FixedSums(cost_month_picos=10**12))
    bob = principal(Limits(monthly_budget=10**6))
    bob = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, cut_at_budget=True))
    running = await admit(admission, bob, 20, 10, cost)

    assert not running.record_progress(0, 5)


async def test_the_sums_are_read_once_for_many_concurrent_requests(clock: FakeClock) -> None:
    sums = FixedSums(tokens_today=95)
    admission = utc_admission(clock, sums)
    bob = principal(Limits(tokens_per_day=100))
    answers = await asyncio.gather(*(admit(admission, bob, 1, 0) for _ in range(50)), return_exceptions=True)
    assert sum(isinstance(answer, Reservation) for answer in answers) == 5
    assert sums.reads == [["key", "tenant"]]


async def test_a_changed_limit_takes_effect_at_once(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=100))
    await admit(admission, bob, 60, 0)
    raised = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, limits=Limits(tokens_per_minute=200)))
    with pytest.raises(RateLimitExceeded):
        await admit(admission, bob, 100, 0)
    await admit(admission, raised, 140, 0)
    lowered = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, limits=Limits(tokens_per_minute=10)))
    with pytest.raises(RateLimitExceeded):
        await admit(admission, lowered, 1, 0)


async def test_a_limit_set_while_a_request_runs_gets_no_refund_when_it_ends(admission: Admission) -> None:
    bob = principal()
    before = await admit(admission, bob, 90, 10)
    limited = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, limits=Limits(tokens_per_minute=100)))
    await admit(admission, limited, 100, 0)
    before.settle(0)
    with pytest.raises(RateLimitExceeded):
        await admit(admission, limited, 1, 0)


async def test_the_expected_output_is_learnt_per_key_and_capped_at_the_requested_maximum(admission: Admission) -> None:
    bob, charlie = principal(), principal()
    for _ in range(OUTPUTS_MIN):
        (await admit(admission, bob, 10, None)).settle(10 + 400)
    assert (await admit(admission, bob, 10, None)).reserved_tokens == 410
    assert (await admit(admission, bob, 10, 7)).reserved_tokens == 17
    assert (await admit(admission, charlie, 10, None)).reserved_tokens == 10 + EXPECTED_OUTPUT_TOKENS


@pytest.mark.parametrize("max_output_tokens", [95, 200, 500])
async def test_a_requested_maximum_above_the_limit_is_refused(admission: Admission, max_output_tokens: int) -> None:
    with pytest.raises(RequestExceedsLimit):
        await admit(admission, principal(Limits(tokens_per_minute=100)), 10, max_output_tokens)


async def test_a_key_with_short_answers_reserves_their_90th_percentile(admission: Admission) -> None:
    bob = principal()
    for length in range(1, 101):
        (await admit(admission, bob, 10, None)).settle(10 + length)
    assert (await admit(admission, bob, 10, None)).reserved_tokens == 10 + 90
    assert (await admit(admission, bob, 10, 5)).reserved_tokens == 10 + 5


async def test_a_burst_after_short_answers_soon_reserves_the_default_estimate_again(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=1000))
    for _ in range(OUTPUTS_MIN):
        (await admit(admission, bob, 1, 1)).settle(2)
    answers = await asyncio.gather(*(admit(admission, bob, 1, 400) for _ in range(60)), return_exceptions=True)
    held = [answer.reserved_tokens for answer in answers if isinstance(answer, Reservation)]
    assert held == [2, 2, 2, 257, 257, 257]


async def test_many_answers_of_one_request_count_as_a_burst(admission: Admission) -> None:
    bob = principal()
    for _ in range(OUTPUTS_KEPT):
        (await admit(admission, bob, 0, 1)).settle(1)
    request = admission_request(bob, 0, 400, num_answers=12)
    twelve = await admission.admit(request)
    assert twelve.reserved_tokens == 12
    twelve.settle(12)
    thirteen = await admission.admit(msgspec.structs.replace(request, num_answers=13))
    assert thirteen.reserved_tokens == 13 * EXPECTED_OUTPUT_TOKENS


async def test_concurrent_long_answers_are_expected_to_be_as_long_as_single_ones(admission: Admission) -> None:
    bob = principal()
    for _ in range(OUTPUTS_KEPT):
        (await admit(admission, bob, 0, None)).settle(900)
    held = [(await admit(admission, bob, 0, None)).reserved_tokens for _ in range(30)]
    assert held == [900] * 30


@pytest.mark.parametrize("limits", [Limits(tokens_per_day=1000), Limits(monthly_budget=1000)], ids=case_id)
async def test_concurrent_requests_exceed_a_limit_of_the_day_or_month_by_one_request_at_most(
    clock: FakeClock, limits: Limits
) -> None:
    admission = utc_admission(clock, FixedSums())
    bob = principal(limits)
    cost = price(prompt=1_000_000, cached=1_000_000, completion=1_000_000)  # a micro-unit a token

    async def admit_one() -> Reservation:
        return await admission.admit(admission_request(bob, 1, None, price=cost, output_room=600))

    answers = await asyncio.gather(*(admit_one() for _ in range(60)), return_exceptions=True)

    admitted = [answer for answer in answers if isinstance(answer, Reservation)]
    refused = [answer for answer in answers if isinstance(answer, RateLimitExceeded)]
    assert (len(admitted), len(refused)) == (2, 58)
    assert refused[0].retry_after_s == 1.0
    assert "have reserved the rest of" in refused[0].message
    for reservation in admitted:
        reservation.settle(1 + 10)
    await admit_one()


@pytest.mark.parametrize(
    ("max_tokens", "room", "advice"),
    [
        (None, 5000, "; requests with max_tokens below 5000 reserve less"),
        (None, None, "; requests with max_tokens reserve less"),
        (None, 1, ""),
        (700, 700, ""),
    ],
)
async def test_a_refusal_because_of_reservations_says_what_reduces_them(
    admission: Admission, max_tokens: int | None, room: int | None, advice: str
) -> None:
    bob = principal(Limits(tokens_per_day=1000))
    request = admission_request(bob, 1, max_tokens, output_room=room)
    await admission.admit(msgspec.structs.replace(request, output_room=5000, max_output_tokens=None))
    with pytest.raises(RateLimitExceeded, match="reserved the rest") as refused:
        await admission.admit(request)
    assert refused.value.message.endswith(f"in about 1 s, when running requests have probably ended{advice}")


async def test_no_more_output_is_expected_than_the_longest_that_the_request_may_get(admission: Admission) -> None:
    request = admission_request(principal(), 1, None, output_room=100)
    assert (await admission.admit(request)).reserved_tokens == 1 + 100


@pytest.mark.parametrize("limits", [Limits(tokens_per_day=1000), Limits(monthly_budget=1000)], ids=case_id)
async def test_what_a_request_returns_first_covers_the_longest_output_of_those_that_run(
    admission: Admission, limits: Limits
) -> None:
    bob, cost = principal(limits), price(prompt=10**6, cached=10**6, completion=10**6)  # a micro-unit a token
    first = admission_request(bob, 1, None, price=cost, output_room=700)
    second, third = msgspec.structs.replace(first, output_room=800), msgspec.structs.replace(first, output_room=5000)
    running = await admission.admit(first), await admission.admit(second)  # of the 801 of the second, 299 were left
    running[0].settle(10)  # 189 are left beside it
    with pytest.raises(RateLimitExceeded, match=r"reserved the rest .* set max_tokens to at most 188$"):
        await admission.admit(third)
    with pytest.raises(RateLimitExceeded):
        await admission.admit(msgspec.structs.replace(third, max_output_tokens=189))
    third = msgspec.structs.replace(third, max_output_tokens=188, output_room=188)
    (await admission.admit(third)).settle(189)
    running[1].settle(801)
    with pytest.raises(Refused):
        await admission.admit(msgspec.structs.replace(third, prompt_tokens=0, max_output_tokens=1))


async def test_one_tenant_cannot_use_up_the_limits_of_another(admission: Admission) -> None:
    bob, charlie = principal(Limits(tokens_per_minute=100)), principal(Limits(tokens_per_minute=100))
    await admit(admission, bob, 100, 0)
    with pytest.raises(RateLimitExceeded):
        await admit(admission, bob, 1, 0)
    await admit(admission, charlie, 100, 0)


@pytest.mark.parametrize(("values", "expected"), [([1], 1), (list(range(1, 11)), 9), (list(range(1, 101)), 90), ([5] * 20, 5)])
def test_the_90th_percentile_is_one_of_the_values(values: list[int], expected: int) -> None:
    assert percentile_90(values) == expected


@pytest.mark.parametrize(("output", "expected"), [(10, 10), (5000, EXPECTED_OUTPUT_TOKENS), (None, EXPECTED_OUTPUT_TOKENS)])
async def test_each_of_several_answers_is_reserved_and_the_prompt_once(
    admission: Admission, output: int | None, expected: int
) -> None:
    reservation = await admission.admit(admission_request(principal(), 10, output, num_answers=4))

    assert reservation.reserved_tokens == 10 + 4 * expected


async def test_the_total_estimate_for_several_answers_is_capped_at_the_limit(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_minute=410))
    reservation = await admission.admit(admission_request(bob, 10, None, num_answers=4))

    assert reservation.reserved_tokens == 410


async def test_a_budget_reserves_the_maximum_length_of_all_answers(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_day=10_000))
    two = admission_request(bob, 0, 2000, num_answers=2)
    first = await admission.admit(msgspec.structs.replace(two, num_answers=5))
    with pytest.raises(RateLimitExceeded):
        await admission.admit(two)
    first.settle(100)
    await admission.admit(two)


async def test_a_budget_reserves_the_higher_price_of_a_prompt(admission: Admission) -> None:
    bob = principal(Limits(monthly_budget=1000))
    dearer_when_cached = price(prompt=1_000_000, cached=2_000_000, completion=0)

    first = await admit(admission, bob, prompt=500, output=1, cost=dearer_when_cached)

    with pytest.raises(Refused):  # the first one may take all of it
        await admit(admission, bob, prompt=1, output=1, cost=dearer_when_cached)
    first.settle(501)
    await admit(admission, bob, prompt=1, output=1, cost=dearer_when_cached)


async def test_no_length_is_learnt_from_requests_that_were_not_served(admission: Admission) -> None:
    bob = principal()
    for _ in range(OUTPUTS_MIN):
        (await admit(admission, bob, 0, None)).void()
    assert (await admit(admission, bob, 0, None)).reserved_tokens == EXPECTED_OUTPUT_TOKENS


async def test_the_expected_output_is_learnt_per_answer(admission: Admission) -> None:
    bob = principal()
    for _ in range(OUTPUTS_MIN):
        four = admission_request(bob, 0, 9000, num_answers=4)
        (await admission.admit(four)).settle(4 * 1000 - 3)
    one = await admission.admit(msgspec.structs.replace(four, num_answers=1))

    assert one.reserved_tokens == 1000
