"""The token bucket under random use: exact, never too generous, and with exact waiting times."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.metering.limits.token_bucket import DEBT_MINUTES_MAX, UNITS_PER_TOKEN, Take, TokenBucket
from tests.support.clock import FakeClock

capacities = st.integers(1, 10**6) | st.integers(10**12, 10**15)
LIVES = 300


@dataclass(frozen=True)
class Step:
    """Wait, then ask for a share of the capacity."""

    wait_us: int
    share: float


steps = st.lists(st.builds(Step, st.integers(0, 30_000_000), st.floats(0, 1.2)), max_size=60)


@dataclass
class Request:
    """What a request took and, once it is settled, what it used of that."""

    at_us: int
    taken: int
    take: Take
    used: int | None = None

    @property
    def kept(self) -> int:
        return self.taken if self.used is None else min(self.used, self.taken)


@dataclass
class Life:
    """A bucket and everything that happened to it, so that a plain twin can live the same life knowing the ends before."""

    capacity: int
    at_us: int = 0
    requests: list[Request] = field(default_factory=list)
    charges: list[tuple[int, int, int]] = field(default_factory=list)
    events: int = 0

    def __post_init__(self) -> None:
        self.bucket = TokenBucket(self.capacity, 0.0)
        self.order: list[tuple[int, Request | int]] = []

    def advance(self, micros: int) -> None:
        self.at_us += micros

    def ask(self, tokens: int) -> bool:
        take = self.bucket.take(tokens, self.at_us / 1e6)
        if take is None:
            return False
        request = Request(self.at_us, tokens, take)
        self.requests.append(request)
        self.order.append((self.at_us, request))
        return True

    def settle(self, request: Request, used: int) -> None:
        self.bucket.settle(request.take, used, self.at_us / 1e6)
        request.used = used
        if used > request.taken:
            self.order.append((self.at_us, used - request.taken))

    def twin_units(self) -> int:
        """Return the level of a bucket of which only what is kept was ever taken."""
        full = self.capacity * UNITS_PER_TOKEN
        units, at_us = full, 0
        for moment_us, what in self.order:
            units = min(units + (moment_us - at_us) * self.capacity, full)
            at_us = moment_us
            tokens = what.kept if isinstance(what, Request) else what
            units = max(units - tokens * UNITS_PER_TOKEN, -DEBT_MINUTES_MAX * full)
        return min(units + (self.at_us - at_us) * self.capacity, full)


def live(seed: int, *, surprises: bool) -> Life:
    """Return a life of random takes and settlements, checked against its twin at every step."""
    chance = random.Random(seed)
    life = Life(chance.choice([1, 7, 100, 1000]))
    for _ in range(60):
        life.advance(chance.choice([0, 0, 1, 1000, chance.randrange(60_000_000), 200_000_000]))
        running = [request for request in life.requests if request.used is None]
        if running and chance.random() < 0.5:
            request = chance.choice(running)
            most = life.capacity * chance.choice([3, 3, 3 * DEBT_MINUTES_MAX])  # sometimes past the bound of the debt
            more = chance.randrange(most) if surprises and chance.random() < 0.3 else 0
            life.settle(request, chance.choice([0, request.taken + more, chance.randrange(request.taken + 1)]))
        else:
            level, tokens = life.bucket.level(life.at_us / 1e6), chance.randrange(life.capacity + 1)
            assert life.ask(tokens) == (tokens <= level)
        assert life.bucket.units(life.at_us / 1e6) == life.twin_units()
    for request in life.requests:
        if request.used is None:
            life.settle(request, request.taken)
    assert life.bucket.units(life.at_us / 1e6) == life.twin_units()
    assert life.bucket._last is None, "a bucket remembers nothing of what has ended"
    return life


@pytest.mark.parametrize("seed", range(LIVES))
def test_a_refund_leaves_the_bucket_as_if_never_taken_however_late(seed: int) -> None:
    live(seed, surprises=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(LIVES))
def test_no_interval_keeps_more_than_capacity_plus_refill_whatever_is_refunded(seed: int) -> None:
    life = live(seed, surprises=False)
    kept = [(request.at_us, request.kept) for request in life.requests]
    for first in range(len(kept)):
        total = 0
        for moment_us, tokens in kept[first:]:
            total += tokens
            assert total * UNITS_PER_TOKEN <= life.capacity * (UNITS_PER_TOKEN + moment_us - kept[first][0])


@given(capacities, steps)
def test_no_interval_admits_more_than_capacity_plus_refill(capacity: int, taken: list[Step]) -> None:
    clock = FakeClock()
    bucket = TokenBucket(capacity, clock.monotonic_s())
    admitted: list[tuple[int, int]] = []
    at_us = 0
    for step in taken:
        clock.advance(step.wait_us / 1e6)
        at_us += step.wait_us
        need = int(capacity * step.share)
        if bucket.take(need, clock.monotonic_s()):
            admitted.append((at_us, need))
    for first in range(len(admitted)):
        total = 0
        for moment_us, need in admitted[first:]:
            total += need
            assert total * 60_000_000 <= capacity * 60_000_000 + capacity * (moment_us - admitted[first][0])


@given(capacities, st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**9), st.integers(0, 10**6))
def test_the_reported_wait_is_enough_and_a_millisecond_less_is_not(
    capacity: int, spent: float, share: float, start_us: int, ahead: int
) -> None:
    clock = FakeClock(monotonic_s=start_us / 1e6)
    bucket = TokenBucket(capacity, clock.monotonic_s())
    assert bucket.take(int(capacity * spent), clock.monotonic_s())
    need = int(capacity * share)
    promised = min(ahead, capacity - need)
    wait_s = bucket.wait_s(need, clock.monotonic_s(), ahead=promised)
    assert wait_s is not None
    if wait_s == 0:
        assert bucket.take(need + promised, clock.monotonic_s())
        return
    clock.advance(wait_s - 0.001)
    assert not bucket.take(need + promised, clock.monotonic_s())
    clock.advance(0.001)
    assert bucket.take(need + promised, clock.monotonic_s())


@given(capacities, st.integers(0, 10**18), st.integers(0, 10**6))
def test_a_debt_is_repaid_within_its_bound(capacity: int, used: int, later_us: int) -> None:
    clock = FakeClock()
    bucket = TokenBucket(capacity, clock.monotonic_s())
    bucket.charge(used, clock.monotonic_s())
    clock.advance(later_us / 1e6)
    bucket.charge(used, clock.monotonic_s())
    assert bucket.level(clock.monotonic_s()) >= -DEBT_MINUTES_MAX * capacity
    full_s = bucket.wait_s(capacity, clock.monotonic_s())
    assert full_s is not None
    assert full_s <= 60 * (DEBT_MINUTES_MAX + 1)


@given(capacities, st.integers(1, 10**12))
def test_more_than_the_capacity_never_fits_and_the_bucket_never_overflows(capacity: int, waited_us: int) -> None:
    clock = FakeClock()
    bucket = TokenBucket(capacity, clock.monotonic_s())
    take = bucket.take(capacity, clock.monotonic_s())
    assert take is not None
    clock.advance(waited_us / 1e6)
    bucket.settle(take, 0, clock.monotonic_s())
    assert bucket.level(clock.monotonic_s()) == capacity
    assert bucket.wait_s(capacity + 1, clock.monotonic_s()) is None
    assert not bucket.take(capacity + 1, clock.monotonic_s())


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1))
def test_usage_of_the_old_limit_counts_towards_the_new_one(before: int, after: int, share: float) -> None:
    clock = FakeClock()
    bucket = TokenBucket(before, clock.monotonic_s())
    used = int(before * share)
    assert bucket.take(used, clock.monotonic_s())
    bucket.resize(after, clock.monotonic_s())
    assert bucket.level(clock.monotonic_s()) == max(after - used, -after)
    bucket.resize(before, clock.monotonic_s())
    assert bucket.level(clock.monotonic_s()) == before - used, "a limit that is lowered and raised again gives nothing"


@pytest.mark.parametrize(("minutes", "level"), [(0, -10), (2, 10), (11, 10), (13, 30), (20, 100), (30, 100)])
def test_a_deferred_debt_is_repaid_by_the_refill_lost_while_the_bucket_is_full(minutes: int, level: int) -> None:
    bucket = TokenBucket(100, 0.0)
    bucket.charge(200, 0.0)
    bucket.resize(10, 0.0)
    assert bucket.level(0.0) == -10
    assert bucket.units(0.0) == -190 * UNITS_PER_TOKEN, "a restart remembers all of it"
    assert bucket.units(1e-6) == -190 * UNITS_PER_TOKEN + 10, "nothing is lost yet"
    for minute in range(minutes + 1):
        assert bucket.level(minute * 60.0) == min(10 * minute - 10, 10)
    bucket.resize(100, minutes * 60.0)
    assert bucket.level(minutes * 60.0) == level


def test_refill_before_a_change_of_the_limit_is_at_the_old_rate() -> None:
    bucket = TokenBucket(60, 0.0)
    assert bucket.take(60, 0.0)
    bucket.resize(6000, 10.0)
    assert bucket.level(10.0) == 10 + (6000 - 60)


@pytest.mark.parametrize("seed", range(LIVES))
def test_no_series_of_limit_changes_admits_more_than_the_largest_limit(seed: int) -> None:
    chance = random.Random(seed)
    capacities = [chance.randrange(1, 2000) for _ in range(4)]
    bucket, at_us, admitted = TokenBucket(capacities[0], 0.0), 0, [(0, 0)]
    for _ in range(80):
        at_us += chance.choice([0, 1, 1000, chance.randrange(5_000_000)])
        if chance.random() < 0.3:
            bucket.resize(chance.choice(capacities), at_us / 1e6)
        elif bucket.take(need := chance.randrange(bucket.capacity + 1), at_us / 1e6):
            admitted.append((at_us, need))
    for first in range(len(admitted)):
        total = 0
        for moment_us, need in admitted[first:]:
            total += need
            assert total * UNITS_PER_TOKEN <= max(capacities) * (UNITS_PER_TOKEN + moment_us - admitted[first][0])


def test_after_a_lowered_limit_a_bucket_never_exceeds_its_capacity_when_requests_end() -> None:
    bucket = TokenBucket(100, 0.0)
    first, second = bucket.take(0, 0.0), bucket.take(100, 1.0)
    assert first is not None
    assert second is not None
    bucket.resize(10, 1.0)
    assert bucket.level(181.0) == 10
    bucket.settle(second, 100, 181.0)
    bucket.settle(first, 0, 181.0)
    assert bucket.level(181.0) == 10


def test_a_clock_that_runs_backwards_adds_nothing() -> None:
    bucket = TokenBucket(60, 100.0)
    assert bucket.take(60, 100.0)
    assert bucket.level(50.0) == 0
    assert bucket.level(101.0) == 1


def test_a_limit_of_zero_admits_only_zero_tokens() -> None:
    bucket = TokenBucket(0, 0.0)
    assert bucket.wait_s(1, 0.0) is None
    assert bucket.wait_s(0, 0.0) == 0.0
    assert bucket.wait_s(0, 0.0, ahead=1) is None


def test_the_wait_is_exact_to_the_smallest_unit() -> None:
    bucket = TokenBucket(1, 0.0)
    assert bucket.take(1, 0.0)
    assert bucket.wait_s(1, 59.999999) == 0.001
    assert bucket.wait_s(1, 60.0) == 0.0
