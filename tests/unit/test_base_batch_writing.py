"""Batched writes: atomic, also when a caller is cancelled or a statement fails; and prepared statements."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, bindparam, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from appliance.base.call_thread import CallThread
from appliance.base.counters import POSTING
from appliance.base.db import Database, after_commit
from appliance.base.prepared import Prepared
from appliance.base.tables import counters, epochs
from tests.support.clock import FakeClock


def add(connection: Connection, name: str) -> str:
    connection.execute(insert(counters).values(name=name, value=1))
    return name


def add_and_fail(connection: Connection, name: str) -> None:
    add(connection, name)
    add(connection, name)


async def names(database: Database) -> list[str]:
    """Return the names of the counters that a test has added."""
    query = select(counters.c.name).where(counters.c.name != POSTING).order_by(counters.c.name)
    async with database.reading() as connection:
        return list((await connection.execute(query)).scalars())


async def test_a_batch_is_atomic(database: Database) -> None:
    assert await database.batch_write(add, "one") == "one"
    with pytest.raises(IntegrityError):
        await database.batch_write(add_and_fail, "two")

    assert await names(database) == ["one"]


async def test_after_commit_callbacks_of_a_batch_run_after_its_commit(database: Database) -> None:
    called_with: list[Database] = []

    def work(connection: Connection) -> None:
        after_commit(connection, called_with.append)
        add(connection, "one")
        assert not called_with

    await database.batch_write(work)

    assert called_with == [database]


async def test_after_commit_callbacks_of_a_rolled_back_transaction_never_run(database: Database) -> None:
    called_with: list[Database] = []

    def fail(connection: Connection) -> None:
        after_commit(connection, called_with.append)
        raise RuntimeError("stop")

    async def fail_alone() -> None:
        async with database.writing() as connection:
            await connection.run_sync(fail)

    for failing in (database.batch_write(fail), fail_alone()):
        with pytest.raises(RuntimeError, match="stop"):
            await failing
    await database.batch_write(add, "one")
    async with database.writing() as connection:
        await connection.run_sync(add, "two")

    assert not called_with


async def test_batches_and_single_transactions_wait_for_each_other(database: Database) -> None:
    async def single(name: str) -> None:
        async with database.writing() as connection:
            await connection.execute(insert(counters).values(name=name, value=1))

    wanted = [f"{number:02}" for number in range(20)]
    writers: list[Any] = [database.batch_write(add, name) if int(name) % 2 else single(name) for name in wanted]
    await asyncio.gather(*writers)

    assert await names(database) == wanted


async def test_a_batch_of_a_cancelled_caller_is_written_before_the_next_one(
    migrated_sqlite: Database,
) -> None:
    database = migrated_sqlite
    began, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(connection: Connection) -> None:
        add(connection, "cancelled")
        loop.call_soon_threadsafe(began.set)
        assert go_on.wait(60)

    task = asyncio.create_task(database.batch_write(slow))
    await began.wait()
    task.cancel()
    loop.call_later(0, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    await database.batch_write(add, "next")

    assert await names(database) == ["cancelled", "next"]


async def test_after_a_failed_begin_batches_are_transactions_again(migrated_sqlite: Database, tmp_path: Path) -> None:
    database = migrated_sqlite
    await database.batch_write(execute, "PRAGMA busy_timeout=0")
    with closing(sqlite3.connect(tmp_path / "gatehouse.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DBAPIError, match="locked"):
            await database.batch_write(add, "locked out")
        other.execute("ROLLBACK")
    with pytest.raises(IntegrityError):
        await database.batch_write(add_and_fail, "half")
    await database.batch_write(add, "next")

    assert await names(database) == ["next"]


@pytest.mark.parametrize("method", ["batch_write", "writing"])
async def test_after_a_failed_commit_the_next_transaction_is_committed(migrated_sqlite: Database, method: str) -> None:
    database = migrated_sqlite

    async def write(fn: Callable[[Connection, str], object], name: str) -> None:
        if method == "batch_write":
            await database.batch_write(fn, name)
            return
        async with database.writing() as connection:
            await connection.run_sync(fn, name)

    for number in range(2):
        with pytest.raises(IntegrityError, match="FOREIGN KEY"):
            await write(add_with_violated_deferred_constraint, f"refused {number}")
    await write(add, "next")

    assert await names(database) == ["next"]


async def test_every_error_reaches_the_caller(database: Database) -> None:
    def find_nothing(_connection: Connection) -> None:
        next(iter([]))

    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await database.batch_write(find_nothing)
        await database.batch_write(add, "next")

    assert await names(database) == ["next"]


def test_a_call_that_outlives_its_event_loop_does_not_block_later_calls() -> None:
    caller, began, go_on = CallThread("test"), threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        assert go_on.wait(60)

    async def cancel_a_call() -> None:
        task = asyncio.create_task(caller.call(slow))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def call_again() -> str:
        async with asyncio.timeout(60):
            return await caller.call(lambda: "answer")

    loop = asyncio.SelectorEventLoop()
    loop.run_until_complete(cancel_a_call())
    loop.close()
    go_on.set()
    assert asyncio.run(call_again()) == "answer"
    caller.end()


def execute(connection: Connection, statement: str) -> None:
    connection.execute(text(statement))


def add_with_violated_deferred_constraint(connection: Connection, name: str) -> None:
    add(connection, name)
    execute(connection, "CREATE TABLE children (parent TEXT REFERENCES epochs (id) DEFERRABLE INITIALLY DEFERRED)")
    execute(connection, "INSERT INTO children VALUES ('nobody')")


@pytest.fixture
async def migrated_sqlite(migrated_sqlite_file: Any, tmp_path: Any) -> Any:
    """A migrated SQLite database for this test only."""
    path = tmp_path / "gatehouse.db"
    path.write_bytes(migrated_sqlite_file.read_bytes())
    database = Database.open(f"sqlite:///{path}")
    yield database
    await database.close()


async def test_a_prepared_statement_writes_the_same_as_the_plain_one(database: Database, clock: FakeClock) -> None:
    rows = [{"id": f"epoch_{number}", "version": "1", "pid": number, "started_at": clock.now()} for number in range(3)]
    change = (
        update(epochs)
        .where(epochs.c.id == bindparam("of_id"), epochs.c.version == "1")
        .values(ended_at=bindparam("at", type_=epochs.c.ended_at.type))
    )
    later = clock.now() + timedelta(microseconds=1)
    prepared, changes = Prepared(insert(epochs)), Prepared(change)

    def work(connection: Connection) -> tuple[int, int]:
        connection.execute(insert(epochs), [{**rows[0], "id": "epoch_plain"}])
        connection.execute(change, [{"of_id": "epoch_plain", "at": later}])
        prepared.execute(connection, rows)
        found = changes.execute(connection, [{"of_id": row["id"], "at": later} for row in rows])
        return found, changes.execute(connection, [{"of_id": "epoch_none", "at": later}])

    assert await database.batch_write(work) == (3, 0)
    async with database.reading() as connection:
        stored = (await connection.execute(select(epochs).order_by(epochs.c.id))).mappings().all()
        raw = (await connection.execute(text("SELECT DISTINCT started_at, ended_at FROM epochs"))).all()
    assert [row["id"] for row in stored] == ["epoch_0", "epoch_1", "epoch_2", "epoch_plain"]
    assert {(row["started_at"], row["ended_at"]) for row in stored} == {(clock.now(), later)}
    assert len(raw) == 1, "both statements store times alike"
