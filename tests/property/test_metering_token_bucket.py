"""The token bucket under random use: exact, never generous, and it says exactly how long to wait."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from appliance.metering.quotas import DEBT_MINUTES_MAX, TokenBucket
from tests.support.clock import FakeClock

capacities = st.integers(1, 10**6) | st.integers(10**12, 10**15)


@dataclass(frozen=True)
class Step:
    """Wait, then ask for a share of the capacity."""

    wait_us: int
    share: float


steps = st.lists(st.builds(Step, st.integers(0, 30_000_000), st.floats(0, 1.2)), max_size=60)


@given(capacities, steps)
def test_no_stretch_of_time_admits_more_than_capacity_plus_refill(capacity: int, taken: list[Step]) -> None:
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


@given(capacities, st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**9))
def test_waiting_as_told_is_enough_and_a_millisecond_less_is_not(
    capacity: int, spent: float, share: float, start_us: int
) -> None:
    clock = FakeClock(monotonic_s=start_us / 1e6)
    bucket = TokenBucket(capacity, clock.monotonic_s())
    assert bucket.take(int(capacity * spent), clock.monotonic_s())
    need = int(capacity * share)
    wait_s = bucket.wait_s(need, clock.monotonic_s())
    assert wait_s is not None
    if wait_s == 0:
        assert bucket.take(need, clock.monotonic_s())
        return
    clock.advance(wait_s - 0.001)
    assert not bucket.take(need, clock.monotonic_s())
    clock.advance(0.001)
    assert bucket.take(need, clock.monotonic_s())


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


@given(capacities, st.floats(0, 1), st.floats(0, 1))
def test_what_is_put_back_leaves_the_bucket_as_if_less_had_been_taken(capacity: int, share: float, back: float) -> None:
    clock = FakeClock()
    bucket, twin = TokenBucket(capacity, clock.monotonic_s()), TokenBucket(capacity, clock.monotonic_s())
    taken = int(capacity * share)
    returned = int(taken * back)
    assert bucket.take(taken, clock.monotonic_s())
    assert twin.take(taken - returned, clock.monotonic_s())
    bucket.put_back(returned, clock.monotonic_s())
    assert bucket.level(clock.monotonic_s()) == twin.level(clock.monotonic_s())


@given(capacities, st.integers(1, 10**12))
def test_more_than_the_capacity_never_fits_and_the_bucket_never_overflows(capacity: int, waited_us: int) -> None:
    clock = FakeClock()
    bucket = TokenBucket(capacity, clock.monotonic_s())
    clock.advance(waited_us / 1e6)
    bucket.put_back(capacity, clock.monotonic_s())
    assert bucket.level(clock.monotonic_s()) == capacity
    assert bucket.wait_s(capacity + 1, clock.monotonic_s()) is None
    assert not bucket.take(capacity + 1, clock.monotonic_s())


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1))
def test_what_was_used_of_the_old_limit_counts_against_the_new_one(before: int, after: int, share: float) -> None:
    clock = FakeClock()
    bucket = TokenBucket(before, clock.monotonic_s())
    used = int(before * share)
    assert bucket.take(used, clock.monotonic_s())
    bucket.resize(after, clock.monotonic_s())
    assert bucket.level(clock.monotonic_s()) == max(after - used, -after)
    bucket.resize(before, clock.monotonic_s())
    if used <= 2 * after:
        assert bucket.level(clock.monotonic_s()) == before - used


def test_a_clock_that_runs_backwards_adds_nothing() -> None:
    bucket = TokenBucket(60, 100.0)
    assert bucket.take(60, 100.0)
    assert bucket.level(50.0) == 0
    assert bucket.level(101.0) == 1


def test_a_limit_of_zero_admits_nothing_but_nothing() -> None:
    bucket = TokenBucket(0, 0.0)
    assert bucket.wait_s(1, 0.0) is None
    assert bucket.wait_s(0, 0.0) == 0.0
    assert bucket.rate_per_s == 0
