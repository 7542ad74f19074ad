"""Admission under random use: what is taken comes back, a refusal changes nothing, and a wait that is told is enough."""

from __future__ import annotations

import dataclasses
import random

import pytest

from appliance.base.errors import RateLimitExceeded, Refused
from appliance.metering.admission import Admission
from appliance.metering.quotas import Owner
from appliance.metering.reservations import Reservation
from appliance.metering.rules import Asked
from appliance.tenancy.principals import Limits, Principal
from tests.support.clock import FakeClock
from tests.support.factories import price, principal
from tests.support.sums import NothingYet

STEPS = 300
PRICE = price(prompt=3, cached=1, completion=7)


def _limits(chance: random.Random) -> Limits:
    """Return limits of which about half are set, small enough to be met often."""

    def maybe(high: int) -> int | None:
        return chance.randrange(high) if chance.random() < 0.5 else None

    return Limits(
        tokens_per_minute=maybe(2000),
        requests_per_minute=maybe(20),
        concurrent_requests=maybe(8),
        tokens_per_day=maybe(20_000),
        monthly_budget=maybe(2),
    )


def _state(admission: Admission) -> dict[Owner, tuple[object, ...]]:
    """Return everything that admission holds, with buckets and calendar brought to now."""
    at, now_s = admission._moment(), admission._clock.monotonic_s()
    return {
        owner: (
            allowance.running,
            *(dataclasses.astuple(window) for window in allowance._windows(at)),
            *(bucket and (bucket.capacity, bucket.level(now_s)) for bucket in (allowance.tokens, allowance.requests)),
        )
        for owner, allowance in admission._allowances.items()
    }


async def _ask(admission: Admission, who: Principal, prompt: int, output: int | None) -> Reservation | Refused:
    """Return the reservation or the refusal."""
    try:
        return await admission.admit(
            Asked(principal=who, model="demo", prompt_tokens=prompt, max_output_tokens=output, price=PRICE)
        )
    except Refused as refused:
        return refused


@pytest.mark.parametrize("seed", range(20))
async def test_what_is_taken_comes_back_and_a_refusal_changes_nothing(seed: int) -> None:
    chance = random.Random(seed)
    clock = FakeClock()
    admission = Admission(clock, NothingYet())
    people = [principal(_limits(chance), _limits(chance)) for _ in range(3)]
    live: list[tuple[Principal, Reservation]] = []
    for who in people:  # meet everyone once, so that the state before a refusal is complete
        answer = await _ask(admission, who, 0, 0)
        if isinstance(answer, Reservation):
            answer.void()
    for _ in range(STEPS):
        clock.advance(chance.choice([0, 0.000001, 0.5, 7, 40_000]))
        if live and chance.random() < 0.4:
            _end(chance, live.pop(chance.randrange(len(live)))[1])
            continue
        who = chance.choice(people)
        before = _state(admission)
        prompt, output = chance.randrange(300), chance.choice([None, 0, 5, 500])
        answer = await _ask(admission, who, prompt, output)
        if isinstance(answer, Refused):
            assert _state(admission) == before
        if isinstance(answer, RateLimitExceeded) and chance.random() < 0.3:
            clock.advance(answer.retry_after_s or 0.0)
            refused, answer = answer, await _ask(admission, who, prompt, output)
            assert isinstance(answer, Reservation) or _waits_for_others(answer) or _waits_for_others(refused)
        if isinstance(answer, Reservation):
            live.append((who, answer))
        for owner in {who.tenant.id for who in people}:
            assert admission.running(owner) == sum(holder.tenant.id == owner for holder, _ in live)
    for _, reservation in live:
        reservation.void()
    for allowance in admission._allowances.values():
        assert (allowance.running, allowance._day.reserved, allowance._month.reserved) == (0, 0, 0)
        assert allowance._day.used >= 0


def _waits_for_others(refused: Refused) -> bool:
    """Return whether running requests stand in the way, of which nobody knows when they end."""
    return "concurrent" in refused.message or "running requests hold" in refused.message


def _end(chance: random.Random, reservation: Reservation) -> None:
    if chance.random() < 0.3:
        reservation.void()
    else:
        reservation.settle(chance.randrange(600), cached_tokens=chance.randrange(50))
