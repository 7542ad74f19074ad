"""Database writability is checked rarely, and the reason for a failure is logged."""

from __future__ import annotations

import structlog

from appliance.base.db import Database
from appliance.serving.database_watch import CHECK_INTERVAL_S, DatabaseWatch
from tests.support.clock import FakeClock
from tests.support.ledgers import FailingDatabase


async def test_a_change_is_logged_once_with_its_reason(database: Database, clock: FakeClock) -> None:
    failing = FailingDatabase.around(database)
    failing.fail_before_commit = 2
    watch = DatabaseWatch(failing, clock)
    with structlog.testing.capture_logs() as lines:
        for _ in range(4):
            await watch.problem()
            await watch.problem()
            clock.advance(CHECK_INTERVAL_S)

    assert [line["event"] for line in lines] == ["database is not writable", "database is writable again"]
    assert "disk full" in lines[0]["reason"]
