"""A failure that repeats is logged at once, then once a minute with the number of failures."""

from __future__ import annotations

from appliance.base.consecutive_failures import LOG_INTERVAL_S, ConsecutiveFailures
from tests.support.clock import FakeClock


def test_the_first_failure_is_due_at_once_and_the_next_one_after_a_minute(clock: FakeClock) -> None:
    failures, due = ConsecutiveFailures(clock.monotonic_s), []
    for _ in range(121):
        due.append(failures.count())
        clock.advance(LOG_INTERVAL_S / 60)
    assert {seconds: count for seconds, count in enumerate(due) if count} == {0: 1, 60: 61, 120: 121}


def test_the_end_of_a_series_gives_its_length_once(clock: FakeClock) -> None:
    failures = ConsecutiveFailures(clock.monotonic_s)
    assert failures.end() == 0
    for _ in range(3):
        failures.count()
    assert (failures.end(), failures.end()) == (3, 0)


def test_the_first_failure_of_another_series_is_due_at_once(clock: FakeClock) -> None:
    failures = ConsecutiveFailures(clock.monotonic_s)
    failures.count()
    failures.end()
    assert failures.count() == 1
