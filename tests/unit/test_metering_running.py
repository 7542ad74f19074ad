"""`retry-after` when only running requests are in the way: an estimate from their progress and speed."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from appliance.base.errors import RateLimitExceeded
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.output_estimates import EXPECTED_OUTPUT_TOKENS
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.running_requests import WAIT_S_MAX, WAIT_S_MIN
from appliance.metering.prices import Price
from appliance.tenancy.principals import Limits, Principal
from tests.support.case_ids import case_id
from tests.support.clock import FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import admission_request, price, principal
from tests.support.ledgers import utc_admission


def request_of(
    who: Principal, output: int | None = 100, prompt: int = 10, room: int | None = None, cost: Price | None = None
) -> AdmissionRequest:
    return admission_request(who, prompt, output, price=cost, output_room=room)


def generate(clock: FakeClock, reservation: Reservation, tokens: int, token_s: float) -> None:
    """Let a request generate this many more tokens, `token_s` seconds each."""
    for _ in range(tokens):
        clock.advance(token_s)
        reservation.record_progress(0, reservation.output_tokens + 1)


async def retry_after_s(
    admission: Admission, who: Principal, output: int | None = 100, prompt: int = 10, cost: Price | None = None
) -> float:
    """Return the `retry-after` of a refused request; the dry run reports the same wait, as an estimate."""
    with pytest.raises(RateLimitExceeded) as refused:
        await admission.admit(request_of(who, output, prompt, cost=cost))
    (decision,) = (await admission.dry_run(request_of(who, output, prompt, cost=cost))).refusals
    assert decision.estimated
    assert decision.wait_s == refused.value.retry_after_s
    assert "about" in refused.value.message
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


@pytest.fixture
def admission(clock: FakeClock) -> Admission:
    return utc_admission(clock, EmptySums())


async def test_a_concurrency_refusal_estimates_when_the_first_running_request_ends(
    admission: Admission, clock: FakeClock
) -> None:
    bob = principal(Limits(concurrent_requests=2))
    first, second = await admission.admit(request_of(bob)), await admission.admit(request_of(bob, 20))
    generate(clock, first, 41, 0.1)
    assert await retry_after_s(admission, bob) == 2, "20 tokens at the pace of the first: the second has none yet"
    generate(clock, second, 10, 1.0)
    assert await retry_after_s(admission, bob) == 10
    second.settle(30)
    await admission.admit(request_of(bob))


async def test_without_any_known_pace_the_shortest_wait_is_reported(admission: Admission) -> None:
    bob = principal(Limits(concurrent_requests=1))
    await admission.admit(request_of(bob))
    assert await retry_after_s(admission, bob) == WAIT_S_MIN


async def test_one_progress_report_gives_no_pace(admission: Admission, clock: FakeClock) -> None:
    bob = principal(Limits(concurrent_requests=1))
    generate(clock, await admission.admit(request_of(bob)), 1, 1.0)
    assert await retry_after_s(admission, bob) == WAIT_S_MIN


async def test_the_estimate_is_at_most_a_minute(admission: Admission, clock: FakeClock) -> None:
    bob = principal(Limits(concurrent_requests=1))
    long = await admission.admit(request_of(bob, 200))
    generate(clock, long, 2, 5.0)
    assert await retry_after_s(admission, bob) == WAIT_S_MAX
    generate(clock, long, 197, 0.01)
    assert await retry_after_s(admission, bob) == WAIT_S_MIN


async def test_a_request_beyond_its_estimate_is_expected_to_double_up_to_its_maximum(
    admission: Admission, clock: FakeClock
) -> None:
    bob = principal(Limits(concurrent_requests=1))
    running = await admission.admit(request_of(bob, None, room=1000))
    generate(clock, running, EXPECTED_OUTPUT_TOKENS, 0.1)
    assert await retry_after_s(admission, bob) == 26  # 256 more
    generate(clock, running, 45, 0.1)
    assert await retry_after_s(admission, bob) == 31  # 301 more
    generate(clock, running, 600, 0.1)
    assert await retry_after_s(admission, bob) == 10  # 99 are left


@pytest.mark.parametrize("limits", [Limits(tokens_per_day=2200), Limits(monthly_budget=2200)], ids=case_id)
async def test_a_refusal_by_reservations_estimates_when_enough_is_released(
    admission: Admission, clock: FakeClock, limits: Limits
) -> None:
    bob, cost = principal(limits), price(prompt=10**6, cached=10**6, completion=10**6)
    first = await admission.admit(request_of(bob, None, room=990, cost=cost))  # holds 1000, is expected to take 266
    second = await admission.admit(request_of(bob, None, room=990, cost=cost))
    generate(clock, first, 156, 0.1)
    generate(clock, second, 56, 0.1)
    # 200 are left. The first gives 734 back after its last 100 tokens, the second as much after its last 200, 0.1 s each.
    # (The first had 156 in 21.1 s, because it stood still while the second ran.)
    assert await retry_after_s(admission, bob, prompt=200 + 734 - 100, cost=cost) == 14
    assert await retry_after_s(admission, bob, prompt=200 + 735 - 100, cost=cost) == 20


@pytest.mark.parametrize("limits", [Limits(tokens_per_day=1200), Limits(monthly_budget=1200)], ids=case_id)
async def test_what_runs_although_a_shadow_limit_refused_it_is_expected_to_be_released_once_the_limit_is_enforced(
    admission: Admission, clock: FakeClock, limits: Limits
) -> None:
    enforced, cost = principal(limits), price(prompt=10**6, cached=10**6, completion=10**6)
    shadow = dataclasses.replace(enforced, tenant=dataclasses.replace(enforced.tenant, limit_mode="shadow"))
    await admission.admit(request_of(shadow, 0, prompt=900, cost=cost))
    refused = await admission.admit(request_of(shadow, None, prompt=400, room=600, cost=cost))  # holds 1000
    generate(clock, refused, 156, 0.1)
    (decision,) = (await admission.dry_run(request_of(shadow, None, prompt=400, cost=cost))).decisions
    assert (decision.allowed, decision.held, decision.wait_s) == (False, True, WAIT_S_MIN), "it is not in the way yet"
    clock.advance(0.25)
    assert await retry_after_s(admission, enforced, 0, prompt=200, cost=cost) == 11, "100 tokens at 156 in 15.85 s"


async def test_a_shadow_limit_of_concurrency_once_enforced_does_not_wait_for_what_takes_no_place(
    admission: Admission, clock: FakeClock
) -> None:
    enforced = principal(Limits(concurrent_requests=1))
    shadow = dataclasses.replace(enforced, tenant=dataclasses.replace(enforced.tenant, limit_mode="shadow"))
    first = await admission.admit(request_of(shadow))
    refused = await admission.admit(request_of(shadow))
    for _ in range(51):
        generate(clock, first, 1, 0.1)
        refused.record_progress(0, 90)
    assert await retry_after_s(admission, enforced) == 5, "the end of the first"


@pytest.mark.parametrize("other", ["in another currency", "admitted the day before"])
async def test_only_what_is_held_of_the_limit_is_expected_to_be_released(
    admission: Admission, clock: FakeClock, other: str
) -> None:
    in_euros = price(prompt=10**6, cached=10**6, completion=10**6)
    in_dollars = dataclasses.replace(in_euros, currency="USD")
    is_currency = other == "in another currency"
    bob = principal(Limits(monthly_budget=1200) if is_currency else Limits(tokens_per_day=1200))
    clock.advance(12 * 3600 - 1)
    sooner = await admission.admit(request_of(bob, None, room=990, cost=in_dollars if is_currency else in_euros))
    clock.advance(1)
    later = await admission.admit(request_of(bob, None, room=990, cost=in_euros))
    generate(clock, sooner, 250, 0.1)
    generate(clock, later, 156, 0.1)
    assert await retry_after_s(admission, bob, 0, prompt=201, cost=in_euros) == 10, "100 tokens, 0.1 s each"


async def test_a_request_that_would_exactly_fit_without_running_ones_is_held(admission: Admission) -> None:
    bob = principal(Limits(tokens_per_day=100))
    (await admission.admit(request_of(bob, 0, prompt=40))).settle(40)
    await admission.admit(request_of(bob, 0, prompt=60))
    assert await retry_after_s(admission, bob, 0, prompt=60) == WAIT_S_MIN
    (decision,) = (await admission.dry_run(request_of(bob, 0, prompt=61))).refusals
    assert not decision.estimated


async def test_waiters_ahead_take_the_first_free_slots(admission: Admission, clock: FakeClock) -> None:
    bob = principal(Limits(concurrent_requests=2))
    first, second = await admission.admit(request_of(bob)), await admission.admit(request_of(bob))
    for _ in range(41):
        generate(clock, first, 1, 0.1)
        second.record_progress(0, first.output_tokens // 2)
    assert await retry_after_s(admission, bob) == 6
    waiting = asyncio.ensure_future(admission.admit(request_of(bob), 60))
    await asyncio.sleep(0)
    assert await retry_after_s(admission, bob) > 15, "the waiter ahead gets the first slot"
    first.settle(50)
    (await waiting).void()


async def test_a_place_kept_for_a_waiter_while_nothing_runs_is_retried_after_the_shortest_wait(admission: Admission) -> None:
    bob = principal(Limits(concurrent_requests=1, requests_per_minute=1))
    (await admission.admit(request_of(bob))).settle(10)
    waiting = asyncio.ensure_future(admission.admit(request_of(bob), 60))
    await asyncio.sleep(0)
    decisions = (await admission.dry_run(request_of(bob))).decisions
    assert [each.wait_s for each in decisions if each.kind == "concurrency"] == [WAIT_S_MIN]
    waiting.cancel()


async def test_a_wait_that_never_ends_is_no_estimate(admission: Admission) -> None:
    (decision,) = (await admission.dry_run(request_of(principal(Limits(concurrent_requests=0))))).refusals
    assert (decision.wait_s, decision.estimated) == (None, False)


class Looks:
    """Counts how often the pace of a running request is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[Reservation] = []
        plain = Reservation.seconds_per_token

        def seconds_per_token(reservation: Reservation, now_s: float) -> float | None:
            self.at.append(reservation)
            return plain(reservation, now_s)

        monkeypatch.setattr(Reservation, "seconds_per_token", seconds_per_token)


@pytest.mark.parametrize("limits", [Limits(concurrent_requests=30), Limits(tokens_per_day=30 * 110)])
async def test_a_flood_of_refusals_computes_the_estimate_at_most_four_times_a_second(
    admission: Admission, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    bob, looks = principal(limits), Looks(monkeypatch)
    running = [await admission.admit(request_of(bob)) for _ in range(30)]
    for _ in range(100):
        with pytest.raises(RateLimitExceeded):
            await admission.admit(request_of(bob))
        clock.advance(0.01)
    assert len(looks.at) == 4 * 30
    assert set(looks.at) == set(running)


async def test_elapsed_time_is_subtracted_from_a_shared_estimate(admission: Admission, clock: FakeClock) -> None:
    bob = principal(Limits(concurrent_requests=1))
    running = await admission.admit(request_of(bob, 200))
    generate(clock, running, 98, 0.1)  # 102 are left
    assert await retry_after_s(admission, bob) == 11
    clock.advance(0.24)
    assert await retry_after_s(admission, bob) == 10
    running.record_progress(0, 195)
    assert await retry_after_s(admission, bob) == 10
    clock.advance(0.01)
    assert await retry_after_s(admission, bob) == WAIT_S_MIN


async def test_only_holders_of_the_refusing_limit_are_considered(admission: Admission, monkeypatch: pytest.MonkeyPatch) -> None:
    bob, others = principal(Limits(concurrent_requests=1)), principal()
    for _ in range(20):
        await admission.admit(request_of(others))
    running, looks = await admission.admit(request_of(bob)), Looks(monkeypatch)
    await retry_after_s(admission, bob)
    assert looks.at == [running]


async def test_ended_requests_are_not_considered(admission: Admission, monkeypatch: pytest.MonkeyPatch) -> None:
    bob, looks = principal(Limits(concurrent_requests=1)), Looks(monkeypatch)
    (await admission.admit(request_of(bob))).settle(20)
    running = await admission.admit(request_of(bob))
    await retry_after_s(admission, bob)
    assert looks.at == [running]


async def test_requests_running_before_a_limit_is_set_are_considered_and_ended_ones_are_not(
    admission: Admission, clock: FakeClock
) -> None:
    bob = principal()
    first, second = await admission.admit(request_of(bob)), await admission.admit(request_of(bob))
    generate(clock, first, 51, 0.1)
    limited = dataclasses.replace(
        bob, tenant=dataclasses.replace(bob.tenant, model_limits={"demo": Limits(concurrent_requests=1)})
    )
    assert await retry_after_s(admission, limited) == 10, "the end of the second, at the pace of the first"
    first.settle(61)
    clock.advance(0.25)
    generate(clock, second, 90, 0.5)
    assert await retry_after_s(admission, limited) == 5
    second.settle(110)
    (await admission.admit(request_of(limited))).void()
