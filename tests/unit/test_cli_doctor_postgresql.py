"""`gatehouse doctor` names what keeps a PostgreSQL server from taking writes, with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from appliance.base.db import POSTGRESQL_CONNECTIONS_MAX, Database
from appliance.cli import database_fault
from tests.support.databases import Cluster

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("skip_tensor_check")]


@pytest.fixture
def url(postgresql: Cluster) -> Iterator[str]:
    """A migrated database that no other test gets."""
    url = postgresql.acquire()
    yield url
    postgresql.drop(url)


@pytest.fixture
def diagnose(gatehouse: Any) -> Callable[[str], dict[str, str]]:
    """Return a function that runs doctor with a database and returns its row about it."""

    def run(url: str) -> dict[str, str]:
        rows = gatehouse("doctor", "--database", url, "--port", "0", "--json").json()["data"]
        return next(row for row in rows if row["check"] == "database")

    return run


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


def name_of(url: str) -> str:
    return url.removeprefix("postgresql://postgres@/").partition("?")[0]


def test_a_database_that_takes_writes_is_ok(url: str, diagnose: Any) -> None:
    assert diagnose(url)["state"] == "ok"


def test_a_read_only_database_is_named_with_its_remedy(url: str, diagnose: Any) -> None:
    execute(url, f"ALTER DATABASE {name_of(url)} SET default_transaction_read_only = on")
    row = diagnose(url)
    assert (row["state"], row["found"].partition(":")[0]) == ("wrong", "the database is read-only")
    assert row["advice"].startswith("give the address of the primary server with --database")


def test_a_limit_of_connections_is_named_with_its_remedy(url: str, diagnose: Any) -> None:
    role = f"limited_{name_of(url)}"
    execute(url, f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 0")
    try:
        row = diagnose(url.replace("postgres@", f"{role}@"))
    finally:
        execute(url, f"DROP ROLE {role}")
    assert (row["state"], row["found"].partition(":")[0]) == ("wrong", "the server accepts no more connections")
    assert row["advice"].startswith("end other connections, or raise max_connections")
    assert f"up to {POSTGRESQL_CONNECTIONS_MAX}" in row["advice"]
    guide = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text("utf-8")
    assert f"(a gateway uses up to {POSTGRESQL_CONNECTIONS_MAX})" in guide


@pytest.mark.parametrize(
    "message", ["FATAL:  sorry, too many clients already", "FATAL:  remaining connection slots are reserved for superusers"]
)
def test_a_server_without_free_connections_is_recognised_by_its_message(
    message: str, url: str, diagnose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver gives no SQLSTATE for a connection that was refused."""
    fail_with(psycopg.OperationalError(f"connection failed: {message}"), monkeypatch)
    assert diagnose(url)["found"].startswith("the server accepts no more connections: ")


def test_a_full_disk_of_the_server_is_named_with_its_remedy(url: str, diagnose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(psycopg.errors.DiskFull('could not extend file "base/5/1259": No space left on device'), monkeypatch)
    row = diagnose(url)
    assert row["state"] == "wrong"
    assert row["found"] == 'the disk of the server is full: could not extend file "base/5/1259": No space left on device'
    assert row["advice"] == "free some disk space on the database server"


def test_another_fault_of_the_server_leads_to_its_address(url: str, diagnose: Any) -> None:
    row = diagnose(url.replace(name_of(url), "missing"))
    assert (row["state"], row["found"].partition(":")[0]) == ("wrong", "unavailable")
    assert row["advice"] == "start the database server, or correct --database"


async def test_the_check_takes_space_on_the_disk_of_the_server_and_leaves_nothing_behind(url: str) -> None:
    """Otherwise a full disk would not be found."""
    sizes: list[int] = []

    def note_sizes(connection: Any) -> None:
        query = "SELECT pg_relation_size(oid) FROM pg_class WHERE relpersistence = 't'"
        sizes.extend(connection.exec_driver_sql(query).scalars())

    event.listen(Engine, "commit", note_sizes)
    try:
        async with Database.open(url) as database:
            await database_fault.try_to_write(database)
            async with database.writing() as connection:
                assert (await connection.exec_driver_sql("SELECT 1 FROM pg_class WHERE relpersistence = 't'")).first() is None
    finally:
        event.remove(Engine, "commit", note_sizes)
    assert len(sizes) == 1
    assert sizes[0] > 0


async def test_a_role_without_the_right_to_temporary_tables_is_no_fault(url: str) -> None:
    role = f"plain_{name_of(url)}"
    execute(url, f"REVOKE TEMPORARY ON DATABASE {name_of(url)} FROM PUBLIC")
    execute(url, f"CREATE ROLE {role} LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    try:
        async with Database.open(url.replace("postgres@", f"{role}@")) as database:
            await database_fault.try_to_write(database)
    finally:
        execute(url, f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_database_before_its_first_start_takes_writes(postgresql: Cluster) -> None:
    url = postgresql.create()
    try:
        async with Database.open(url) as database:
            await database_fault.try_to_write(database)
    finally:
        postgresql.drop(url)


def test_a_role_that_may_only_read_is_named_with_its_remedy(url: str, diagnose: Any) -> None:
    role = f"reader_{name_of(url)}"
    execute(url, f"CREATE ROLE {role} LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    try:
        row = diagnose(url.replace("postgres@", f"{role}@"))
    finally:
        execute(url, f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert (row["state"], row["found"].partition(":")[0]) == ("wrong", "the role lacks privileges")
    assert row["advice"] == "give --database the role that owns the tables, or grant this one all privileges on them"


def fail_with(error: psycopg.Error, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every write fail with `error`."""

    async def fail(_database: object) -> None:
        raise OperationalError("", {}, error)

    monkeypatch.setattr(database_fault, "try_to_write", fail)
