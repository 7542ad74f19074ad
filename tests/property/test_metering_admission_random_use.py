"""Admission under random use: reservations are returned, refusals change nothing, and reported waits are exact."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import msgspec
import pytest

from appliance.base.errors import RateLimitExceeded, Refused
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.token_bucket import UNITS_PER_TOKEN
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal
from tests.support.clock import START, FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import price, principal
from tests.support.fake_timer import FakeTimer
from tests.support.ledgers import num_running, num_waiting, utc_admission

STEPS = 300
PRICE = price(prompt=3, cached=1, completion=7)
MODELS = ("demo", "other")


def _limits(chance: random.Random, share: float = 0.5) -> Limits:
    """Return limits of which about `share` are set, small enough to be met often."""

    def maybe(high: int) -> int | None:
        return chance.randrange(high) if chance.random() < share else None

    return Limits(
        tokens_per_minute=maybe(2000),
        requests_per_minute=maybe(20),
        concurrent_requests=maybe(8),
        tokens_per_day=maybe(20_000),
        monthly_budget=maybe(2),
    )


def _person(chance: random.Random) -> Principal:
    """Return a principal with limits of every scope, some in shadow mode."""
    made = principal(_limits(chance), _limits(chance))
    per_model = [{"demo": _limits(chance, 0.3)} if chance.random() < 0.5 else {} for _ in range(2)]
    modes = [chance.choice(["enforce", "enforce", "shadow"]) for _ in range(2)]
    return dataclasses.replace(
        made,
        tenant=dataclasses.replace(made.tenant, model_limits=per_model[0], limit_mode=modes[0]),
        key=dataclasses.replace(made.key, model_limits=per_model[1], limit_mode=modes[1]),
    )


def _changed(chance: random.Random, who: Principal) -> Principal:
    """Return the same principal with other limits."""
    other = _person(chance)
    tenant = dataclasses.replace(other.tenant, id=who.tenant.id)
    return Principal(tenant=tenant, key=dataclasses.replace(other.key, id=who.key.id, tenant_id=tenant.id))


def _state(admission: Admission) -> dict[Owner, tuple[object, ...]]:
    """Return the whole state of admission, with buckets and calendar advanced to the current time."""
    at, now_s = admission._moment(), admission._clock.monotonic_s()
    return {
        owner: (
            allowance.running,
            *(dataclasses.astuple(period) for period in allowance._windows.enter(at)),
            *(bucket and (bucket.capacity, bucket.level(now_s)) for bucket in (allowance.tokens, allowance.requests)),
        )
        for owner, allowance in admission._allowances.items()
    }


async def _try_admit(admission: Admission, request: AdmissionRequest) -> Reservation | Refused:
    """Return the reservation or the refusal."""
    try:
        return await admission.admit(request)
    except Refused as refused:
        return refused


def _random_request(chance: random.Random, who: Principal, policy: ModelPolicy | None) -> AdmissionRequest:
    model = chance.choice(MODELS)
    return AdmissionRequest(
        principal=who,
        model=model,
        prompt_tokens=chance.randrange(300),
        max_output_tokens=chance.choice([None, 0, 5, 500]),
        price=PRICE,
        output_room=chance.choice([None, 700]),
        policy=policy if model == "demo" else None,
    )


@pytest.mark.parametrize("seed", range(15))
async def test_reservations_are_returned_in_full_and_a_refusal_changes_nothing(seed: int) -> None:
    chance = random.Random(seed)
    clock = FakeClock()
    admission = utc_admission(clock, EmptySums())
    people = [_person(chance) for _ in range(3)]
    policy = ModelPolicy(
        model="demo", limits=_limits(chance), limit_mode=chance.choice(["enforce", "shadow"]), updated_at=START
    )
    live: list[tuple[Principal, Reservation]] = []
    for _ in range(STEPS):
        clock.advance(chance.choice([0, 0.000001, 0.5, 7, 40_000]))
        if chance.random() < 0.05:
            index = chance.randrange(len(people))
            people[index] = _changed(chance, people[index])
        if live and chance.random() < 0.4:
            _end(chance, live.pop(chance.randrange(len(live)))[1])
            continue
        request = _random_request(chance, chance.choice(people), policy)
        await admission.dry_run(request)  # loads all owners, so that the state before a refusal is complete
        before = _state(admission)
        answer = await _try_admit(admission, request)
        if isinstance(answer, Refused):
            assert _state(admission) == before
            await _check_proposed_maximum(admission, request, answer)
        if isinstance(answer, RateLimitExceeded) and chance.random() < 0.5:
            answer = await _wait_as_reported(admission, clock, request, answer)
        if isinstance(answer, Reservation):
            live.append((request.principal, answer))
        _check_running(admission, live)
    for _, reservation in live:
        reservation.void()
    for allowance in admission._allowances.values():
        month = allowance._windows.month.window(allowance.currency)
        assert (allowance.running, allowance._windows.day.reserved, month.reserved) == (0, 0, 0)
        assert allowance._windows.day.used >= allowance._windows.day.shadow_used >= 0
        assert month.running_cost == 0


async def _check_proposed_maximum(admission: Admission, request: AdmissionRequest, refused: Refused) -> None:
    """The max_tokens that a refusal proposes is the largest that passes the limits that it is about."""
    if "set max_tokens to at most" not in refused.message:
        return
    proposed = int(refused.message.partition("at most ")[2].split()[0])
    can_wait = isinstance(refused, RateLimitExceeded)

    async def refusing(max_tokens: int | None) -> set[str]:
        dry_run = await admission.dry_run(msgspec.structs.replace(request, max_output_tokens=max_tokens))
        return {each.name + str(each.model) for each in dry_run.refusals if can_wait or each.wait_s is None}

    about = await refusing(request.max_output_tokens)
    assert about & await refusing(proposed + 1)
    assert not about & await refusing(proposed)


async def _wait_as_reported(
    admission: Admission, clock: FakeClock, request: AdmissionRequest, refused: RateLimitExceeded
) -> Reservation | Refused:
    """Wait for the reported time: it is exactly enough, over all limits together, and a millisecond less is not."""
    assert refused.retry_after_s is not None
    clock.advance(refused.retry_after_s - 0.001)
    early = await _try_admit(admission, request)
    assert isinstance(early, Refused) or _waits_for_others(refused)
    if isinstance(early, Reservation):
        return early
    clock.advance(0.001)
    answer = await _try_admit(admission, request)
    assert isinstance(answer, Reservation) or _waits_for_others(answer) or _waits_for_others(refused)
    return answer


def _check_running(admission: Admission, live: list[tuple[Principal, Reservation]]) -> None:
    for owner, allowance in admission._allowances.items():
        holds = [hold for _, each in live for hold in each.holds if hold.allowance is allowance]
        assert allowance.running == sum(not hold.is_shadow_refused for hold in holds), owner


def _waits_for_others(refused: Refused) -> bool:
    """Return whether running requests block it, whose end is unknown."""
    return "concurrent" in refused.message or "running requests have reserved" in refused.message


def _end(chance: random.Random, reservation: Reservation) -> None:
    if chance.random() < 0.3:
        reservation.void()
    else:
        reservation.settle(chance.randrange(600), cached_tokens=chance.randrange(50))


@pytest.mark.parametrize("seed", range(20))
async def test_with_a_queue_no_interval_admits_more_than_any_limit(seed: int) -> None:
    chance = random.Random(seed)
    clock = FakeClock()
    timer = FakeTimer(clock)
    admission = utc_admission(clock, EmptySums(), call_later=timer.call_later)
    bob = principal(Limits(tokens_per_minute=600, requests_per_minute=30, concurrent_requests=4))
    keys = [dataclasses.replace(bob.key, id=f"key {n}", limits=Limits(tokens_per_minute=300)) for n in range(3)]
    admitted: list[tuple[int, float, int]] = []  # arrival, time, tokens
    tasks: list[asyncio.Task[None]] = []

    async def run(arrival: int, key_index: int, tokens: int, used: int, runs_s: float) -> None:
        request = AdmissionRequest(
            principal=dataclasses.replace(bob, key=keys[key_index]),
            model="demo", prompt_tokens=tokens, max_output_tokens=0, price=None,
        )  # fmt: skip
        try:
            reservation = await admission.admit(request, chance.choice([0.0, 2.0, 30.0]))
        except RateLimitExceeded:
            return
        admitted.append((arrival, clock.monotonic_s(), min(used, tokens)))
        timer.call_later(runs_s, lambda: reservation.settle(used) if used else reservation.void())

    for arrival in range(150):
        tokens = chance.randrange(1, 250)
        used, runs_s = chance.choice([0, tokens, tokens // 2]), chance.choice([0.0, 1.0, 20.0])
        tasks.append(asyncio.create_task(run(arrival, chance.randrange(3), tokens, used, runs_s)))
        await timer.settle()
        await timer.advance(chance.choice([0, 0.01, 1.5]))
    await timer.advance(120)
    await asyncio.gather(*tasks)

    assert num_waiting(admission) == 0
    assert not admission._queue._queues
    assert num_running(admission, bob.tenant.id) == 0
    for first, (_, since_s, _) in enumerate(admitted):
        total = 0
        for count, (_, moment_s, tokens) in enumerate(admitted[first:], 1):
            total += tokens
            micros = round((moment_s - since_s) * 1e6)
            assert total * UNITS_PER_TOKEN <= 600 * (UNITS_PER_TOKEN + micros)
            assert count - _voided(admitted[first : first + count]) <= 30 + 30 * micros / 60e6


def _voided(rows: list[tuple[int, float, int]]) -> int:
    return sum(tokens == 0 for _, _, tokens in rows)
