"""Database writability is checked rarely, and the reason for a failure is logged."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from appliance.base.consecutive_failures import LOG_INTERVAL_S
from appliance.base.db import Database
from appliance.serving import database_watch
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


async def test_requests_that_an_outage_fails_are_to_be_logged_once_a_minute_until_it_ends(
    database: Database, clock: FakeClock
) -> None:
    watch = DatabaseWatch(database, clock)
    assert [watch.count_failed_request() for _ in range(3)] == [1, 0, 0]
    clock.advance(LOG_INTERVAL_S)
    assert watch.count_failed_request() == 4
    with structlog.testing.capture_logs() as lines:
        await watch.problem()
    assert [(line["event"], line["after"], line["failures"]) for line in lines] == [("works again", "request failed", 4)]
    assert watch.count_failed_request() == 1


async def test_a_check_that_fails_does_not_end_the_count_of_failed_requests(database: Database, clock: FakeClock) -> None:
    failing = FailingDatabase.around(database)
    failing.fail_before_commit = 1
    watch = DatabaseWatch(failing, clock)
    watch.count_failed_request()
    await watch.problem()
    assert watch.count_failed_request() == 0


async def test_a_write_that_hangs_is_reported_and_given_up(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_watch, "CHECK_TIMEOUT_S", 0.02)
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    assert await DatabaseWatch(gated, clock).problem() == "no write within 0.02 s"
    await asyncio.sleep(0)
    gated.gate.set()
    assert gated.commits == 0
