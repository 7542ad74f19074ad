"""What waits is kept for as long as it waits, and no longer."""

from __future__ import annotations

import gc
from weakref import ref

from engine.scheduling.waiting import Deadlines
from tests.support.scheduling import make_request


def test_a_request_that_ended_long_before_its_deadline_is_not_kept_until_then() -> None:
    deadlines = Deadlines()
    gone, waiting = make_request("gone", 4, queue_deadline_s=5.0), make_request("waiting", 4, queue_deadline_s=5.0)
    for request in (gone, waiting):
        deadlines.add(request)
    kept = ref(gone)
    del request, gone
    gc.collect()
    assert kept() is None
    assert deadlines.expired(4.9) == []
    assert deadlines.expired(5.0) == [waiting]
