"""The ledger on databases that really fail: a file that cannot grow, a server that drops connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from appliance.base.db import READERS_MAX, Database
from appliance.base.errors import Overloaded
from appliance.metering.ledger.writer import RETRY_S_MIN
from tests.support.cast import make_cast
from tests.support.clock import FakeClock
from tests.support.databases import Cluster
from tests.support.factories import pending, posted
from tests.support.ledgers import all_events, running_ledger
from tests.support.polling import poll_until


@pytest.fixture
async def full_disk(migrated_sqlite_file: Path, tmp_path: Path) -> AsyncIterator[Database]:
    """A SQLite database of this test alone."""
    copy = await asyncio.to_thread(_copy, migrated_sqlite_file, tmp_path / "gatehouse.db")
    database = Database.open(f"sqlite:///{copy}")
    yield database
    assert database.checked_out() == 0
    await database.close()


def _copy(source: Path, target: Path) -> Path:
    target.write_bytes(source.read_bytes())
    return target


async def _limit_pages(database: Database, pages: str) -> None:
    """Let the file grow to `pages` and no further, as a full disk would."""
    await database.batch_write(lambda connection: connection.execute(text(f"PRAGMA max_page_count = {pages}")).close())


async def test_a_full_disk_refuses_requests_settles_running_ones_and_recovers(full_disk: Database, clock: FakeClock) -> None:
    database = full_disk
    cast = await make_cast(database, clock)
    running = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(running)
        await _limit_pages(database, "1")  # no less than it has: nothing new fits
        refused = [pending(cast.bob) for _ in range(200)]
        answers = await asyncio.gather(*(ledger.open(entry) for entry in refused), return_exceptions=True)
        assert all(isinstance(answer, Overloaded) for answer in answers)
        assert "full" in str(ledger.last_error)
        assert not ledger.healthy
        await _limit_pages(database, "1000000")
        await poll_until(lambda: ledger.healthy)
        await ledger.settle(posted(running.request_id))
        late = pending(cast.bob)
        await ledger.open(late)
        await ledger.settle(posted(late.request_id))
    assert [(event.request_id, event.status) for event in await all_events(database)] == [
        (running.request_id, "posted"),
        (late.request_id, "posted"),
    ]


@pytest.mark.postgres
async def test_dropped_connections_lose_no_settlement(postgresql: Cluster, clock: FakeClock) -> None:
    url = postgresql.acquire()
    database = Database.open(url)
    cast = await make_cast(database, clock)
    entries = [pending(cast.bob) for _ in range(20)]
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        settling = []
        for entry in entries:
            settling.append(asyncio.create_task(ledger.settle(posted(entry.request_id))))
            await asyncio.to_thread(_drop_connections, url)
        await asyncio.gather(*settling)
        assert ledger.unrecorded_usage_tokens == 0
    assert {event.status for event in await all_events(database)} == {"posted"}
    assert database.checked_out() == 0
    await database.close()
    postgresql.release(url)


def _drop_connections(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


async def test_readers_that_use_every_connection_delay_no_request(database: Database, clock: FakeClock) -> None:
    cast = await make_cast(database, clock)
    entry, done = pending(cast.bob), asyncio.Event()

    async def read() -> None:
        async with database.reading():
            await done.wait()

    reading = [asyncio.create_task(read()) for _ in range(4 * READERS_MAX)]
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await asyncio.sleep(0)  # lets each request a connection
        await ledger.open(entry)
        await ledger.settle(posted(entry.request_id))
    done.set()
    await asyncio.gather(*reading)
    assert [event.status for event in await all_events(database)] == ["posted"]


@pytest.mark.postgres
async def test_while_no_event_can_be_added_the_ledger_stays_unhealthy_without_requests_and_settles_running_ones(
    postgresql: Cluster, clock: FakeClock
) -> None:
    """As on a server whose disk is full: what is there can be read and often changed, but tables cannot grow."""
    url = postgresql.acquire()
    database = Database.open(url)
    cast = await make_cast(database, clock)
    running = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(running)
        await asyncio.to_thread(_execute, url, _NO_SPACE)
        with pytest.raises(Overloaded, match="nothing was started"):
            await ledger.open(pending(cast.bob))
        await ledger.settle(posted(running.request_id))
        await poll_until(lambda: ledger._retry_s > 2 * RETRY_S_MIN)  # it grows while nothing succeeds
        assert not ledger.healthy
        assert "No space left on device" in str(ledger.last_error)
        await asyncio.to_thread(_execute, url, "DROP FUNCTION no_space CASCADE")
        await poll_until(lambda: ledger.healthy)
    assert [(event.request_id, event.status) for event in await all_events(database)] == [(running.request_id, "posted")]
    await database.close()
    postgresql.release(url)


_NO_SPACE = """
    CREATE FUNCTION no_space() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$;
    CREATE TRIGGER no_space BEFORE INSERT ON usage_events EXECUTE FUNCTION no_space();
"""


@pytest.mark.postgres
async def test_briefly_unavailable_tables_lose_no_settlement(postgresql: Cluster, clock: FakeClock) -> None:
    url = postgresql.acquire()
    database = Database.open(url)
    cast = await make_cast(database, clock)
    entry = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        await asyncio.to_thread(_execute, url, "ALTER TABLE usage_events RENAME TO away")
        settling = asyncio.create_task(ledger.settle(posted(entry.request_id)))
        await poll_until(lambda: ledger.last_error is not None or settling.done())
        assert not ledger.healthy
        await asyncio.to_thread(_execute, url, "ALTER TABLE away RENAME TO usage_events")
        await settling
        assert ledger.unrecorded_usage_tokens == 0
    assert [event.status for event in await all_events(database)] == ["posted"]
    await database.close()
    postgresql.release(url)


def _execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())
