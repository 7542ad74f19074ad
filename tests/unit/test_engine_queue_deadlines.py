"""Queue deadlines keep no state of requests that no longer wait."""

from __future__ import annotations

import gc
from weakref import ref

from engine.scheduling.waiting import Deadlines
from tests.support.scheduling import make_request


def test_a_request_that_ended_before_its_deadline_is_not_kept_alive() -> None:
    deadlines = Deadlines()
    gone, waiting = make_request("gone", 4, queue_deadline_s=5.0), make_request("waiting", 4, queue_deadline_s=5.0)
    for request in (gone, waiting):
        deadlines.add(request)
    request_ref = ref(gone)
    del request, gone
    gc.collect()
    assert request_ref() is None
    assert deadlines.expired(4.9) == []
    assert deadlines.expired(5.0) == [waiting]


def test_deadlines_of_requests_that_no_longer_wait_are_removed() -> None:
    deadlines = Deadlines()
    waiting = [make_request(f"waiting {number}", 4, queue_deadline_s=600.0 - number) for number in range(200)]
    running = make_request("running", 4, queue_deadline_s=600.0)
    running.record_first_schedule(0.0)
    for request in waiting:
        deadlines.add(request)
    for number in range(20_000):
        deadlines.add(running if number % 2 else make_request("gone", 4, queue_deadline_s=600.0))
    assert len(deadlines) < 1000
    assert deadlines.expired(600.0) == waiting[::-1]
    assert len(deadlines) == 0
