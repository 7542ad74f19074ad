"""The database: transactions of writers, snapshots of readers, cancelled tasks, SQLite pragmas, URLs and errors."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from appliance.base import db, migrations
from appliance.base.db import SQLITE_SYNCHRONOUS, Database
from appliance.base.settings import UnusableData
from appliance.base.tables import epochs, members
from tests.support.clock import START
from tests.support.databases import Cluster


@pytest.fixture
def sqlite_file(migrated_sqlite_file: Path, tmp_path: Path) -> Path:
    """A migrated SQLite file for this test only."""
    path = tmp_path / "gatehouse.db"
    path.write_bytes(migrated_sqlite_file.read_bytes())
    return path


async def _add(database: Database, number: int, then: Exception | None = None) -> None:
    async with database.writing() as connection:
        await connection.execute(insert(epochs).values(id=f"epoch_{number}", version="test", pid=number, started_at=START))
        if then is not None:
            raise then


async def _count(database: Database) -> int:
    async with database.reading() as connection:
        return (await connection.execute(select(func.count()).select_from(epochs))).scalar_one()


async def test_connections_to_a_server_end_soon_after_the_network_stops_carrying_them() -> None:
    async with Database.open("postgresql://db.example.com/gatehouse?keepalives_idle=60") as database:
        for engine in (database._readers, database._writers, database._batch_writer):
            assert isinstance(engine, AsyncEngine)
            assert engine.url.query == {**db.KEEPALIVE, "keepalives_idle": "60", "client_encoding": "UTF8"}


async def test_the_error_of_a_statement_omits_its_values(sqlite_file: Path) -> None:
    database = Database.open(f"sqlite:///{sqlite_file}")
    values = {"id": "mb_1", "email": "a@example.com", "role": None, "created_at": START, "password_hash": "$argon2id$hash"}
    try:
        with pytest.raises(DBAPIError) as refused:
            async with database.writing() as connection:
                await connection.execute(insert(members).values(**values))
    finally:
        await database.close()

    assert "INSERT INTO members" in str(refused.value)
    assert "$argon2id$hash" not in str(refused.value)


async def test_a_writing_block_is_committed_unless_it_raises(database: Database) -> None:
    await _add(database, 1)
    with pytest.raises(RuntimeError, match="second thoughts"):
        await _add(database, 2, then=RuntimeError("second thoughts"))
    assert await _count(database) == 1


async def test_after_commit_callbacks_run_after_the_commit_and_never_after_a_rollback(database: Database) -> None:
    called: list[str] = []
    async with database.writing() as connection:
        db.after_commit(connection, lambda _database: called.append("first"))
        db.after_commit(connection, lambda committed: called.append(committed.kind))
        assert called == []
    assert called == ["first", database.kind]
    with contextlib.suppress(RuntimeError):
        async with database.writing() as connection:
            db.after_commit(connection, lambda _database: called.append("never"))
            raise RuntimeError("second thoughts")
    await _add(database, 1)
    assert called == ["first", database.kind]


async def test_a_reader_cannot_write(database: Database) -> None:
    with pytest.raises(DBAPIError):
        async with database.reading() as connection:
            await connection.execute(insert(epochs).values(id="epoch_1", version="test", pid=1, started_at=START))
    await _add(database, 1)


async def test_a_reader_sees_one_snapshot_while_others_write(database: Database) -> None:
    async with database.reading() as connection:
        query = select(func.count()).select_from(epochs)
        assert (await connection.execute(query)).scalar_one() == 0
        await _add(database, 1)
        assert (await connection.execute(query)).scalar_one() == 0
    assert await _count(database) == 1


async def test_concurrent_writers_all_succeed(database: Database) -> None:
    await asyncio.gather(*(_add(database, number) for number in range(40)))
    assert await _count(database) == 40


async def test_cancelled_tasks_leave_no_connection_and_no_open_transaction(database: Database) -> None:
    rng = random.Random(3)
    for round_number in range(20):
        tasks = [asyncio.create_task(_add(database, round_number * 10 + number)) for number in range(5)]
        tasks += [asyncio.create_task(_read(database)) for _ in range(5)]
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert database.checked_out() == 0
    await _add(database, 1000)
    await database.ping()


async def _read(database: Database) -> None:
    await _count(database)


def test_a_sqlite_that_is_too_old_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gatehouse.db"
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")
    with pytest.raises(UnusableData, match=r"SQLite 3\.34\.1.* 3\.35 .* --database"):
        migrations.upgrade(f"sqlite:///{path}")
    assert not path.exists()


@pytest.mark.postgres
@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_postgresql_database_that_is_not_utf_8_is_refused_before_migrating(postgresql: Cluster, encoding: str) -> None:
    url = postgresql.create(encoding=encoding)
    try:
        with pytest.raises(UnusableData, match=f"encoding {encoding}, .*ENCODING 'UTF8'"):
            migrations.upgrade(url)
        assert migrations.current_revision(url) is None
        database = Database.open(url)
        await database.ping()
        await database.close()
    finally:
        postgresql.drop(url)


async def test_ping_returns_if_the_database_is_writable(database: Database) -> None:
    await database.ping()
    await database.ping()


async def test_ping_raises_if_the_database_is_not_writable(sqlite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "BUSY_TIMEOUT_MS", 1)
    blocker = sqlite3.connect(sqlite_file, isolation_level=None)
    opened = Database.open(f"sqlite:///{sqlite_file}")
    await opened.ping()
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(DBAPIError, match="locked"):
        await opened.ping()
    blocker.execute("ROLLBACK")
    await opened.ping()
    blocker.close()
    await opened.close()


async def test_a_sqlite_writer_takes_the_lock_at_the_beginning_of_its_transaction(sqlite_file: Path) -> None:
    opened = Database.open(f"sqlite:///{sqlite_file}")
    other = sqlite3.connect(sqlite_file, isolation_level=None, timeout=0)
    async with opened.writing():
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
    other.execute("BEGIN IMMEDIATE")
    other.execute("ROLLBACK")
    other.close()
    await opened.close()


async def test_sqlite_connections_have_the_required_pragmas(sqlite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "SQLITE_SYNCHRONOUS", SQLITE_SYNCHRONOUS)  # undo the setting of the test suite
    opened = Database.open(f"sqlite:///{sqlite_file}")
    for block, query_only in ((opened.writing, 0), (opened.reading, 1)):
        async with block() as connection:
            values = {
                name: (await connection.execute(text(f"PRAGMA {name}"))).scalar_one()
                for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout", "query_only")
            }
        assert values == {
            "journal_mode": "wal",
            "synchronous": 2,
            "foreign_keys": 1,
            "busy_timeout": db.BUSY_TIMEOUT_MS,
            "query_only": query_only,
        }
    await opened.close()


@pytest.mark.parametrize("url", ["mysql://localhost/x", "sqlite://", "sqlite:///:memory:", "postgresql+asyncpg://localhost/x"])
def test_an_unsupported_database_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="sqlite:///PATH"):
        Database.open(url)


async def test_both_url_schemes_of_postgresql_are_accepted() -> None:
    for scheme in ("postgres", "postgresql"):
        opened = Database.open(f"{scheme}://user@localhost/name")
        assert opened.kind == "postgresql"
        await opened.close()


def test_reading_the_revision_needs_no_write_lock_and_creates_no_file(tmp_path: Path) -> None:
    path = tmp_path / "gatehouse.db"
    assert migrations.current_revision(f"sqlite:///{path}") is None
    assert not path.exists()
    migrations.upgrade(f"sqlite:///{path}")
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    assert migrations.current_revision(f"sqlite:///{path}") == migrations.head_revision()
    writer.execute("ROLLBACK")
    writer.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("disk full\nand more"), "disk full"),
        (OSError(), "OSError"),
        (ValueError(" \n"), "ValueError"),
        (DBAPIError("SELECT 1", {}, sqlite3.OperationalError("\nno such table\nHINT")), "no such table"),
        (DBAPIError("SELECT 1", {}, sqlite3.OperationalError()), "OperationalError"),
    ],
)
def test_the_reason_of_an_error_is_one_line_and_never_empty(error: Exception, reason: str) -> None:
    assert db.reason_of(error) == reason
