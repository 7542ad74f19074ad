"""An unavailable, locked, full or read-only database is a 503 with retry-after, not a bug."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import psycopg
import pytest
import structlog
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from appliance.base.database_errors import as_outage
from tests.support.api_app import ApiApp
from tests.support.console_fixtures import ConsoleApp


def sqlite_error(path: Path, statement: str) -> OperationalError:
    """Return SQLAlchemy's error for a `statement` that SQLite refuses because another connection has locked the file."""
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    blocked = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        with pytest.raises(sqlite3.OperationalError) as refused:
            blocked.execute(statement)
    finally:
        blocked.close()
        holder.close()
    return OperationalError(statement, (), refused.value)


def failing(error: Exception) -> Callable[..., Awaitable[None]]:
    async def fail(*_arguments: object, **_options: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OperationalError("SELECT 1", (), psycopg.OperationalError("connection refused")), id="connection refused"),
        pytest.param(PoolTimeout("QueuePool limit reached"), id="pool exhausted"),
        pytest.param(
            InternalError("INSERT", (), psycopg.errors.ReadOnlySqlTransaction("cannot INSERT")), id="read-only standby"
        ),
    ],
)
async def test_a_failed_lookup_of_a_key_is_a_503_with_retry_after(
    api: ApiApp, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(api.services.keys, "_read", failing(error))
    answer = await api.client.post("/v1/chat/completions", headers={"authorization": f"Bearer gh_{'a' * 8}_{'b' * 26}"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded"), answer.text
    assert answer.headers["retry-after"] == "2"
    assert str(error) not in answer.text


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        pytest.param(PoolTimeout("QueuePool limit reached"), [1], id="an outage"),
        pytest.param(ValueError("a bug"), [None, None, None], id="a bug"),
    ],
)
async def test_requests_that_an_outage_fails_share_a_line_of_the_log_and_bugs_have_one_each(
    api: ApiApp, monkeypatch: pytest.MonkeyPatch, error: Exception, logged: list[int | None]
) -> None:
    monkeypatch.setattr(api.services.keys, "_read", failing(error))
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            await api.client.post("/v1/chat/completions", headers={"authorization": f"Bearer gh_{'a' * 8}_{'b' * 26}"})
    assert [line.get("failures") for line in lines if line["event"] == "request failed"] == logged


async def test_a_page_over_a_locked_database_says_it_is_unavailable(
    console: ConsoleApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await console.alice()
    monkeypatch.setattr(console.services.tenants, "list", failing(sqlite_error(tmp_path / "locked.db", "BEGIN IMMEDIATE")))
    answer = await alice.get("/tenants")

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "The database is temporarily unavailable; try again in a moment" in answer.text


@pytest.mark.parametrize(("method", "has_advice"), [("GET", False), ("HEAD", False), ("POST", True), ("DELETE", True)])
def test_only_changing_methods_are_told_to_check_the_result(method: str, has_advice: bool) -> None:
    outage = as_outage(PoolTimeout("QueuePool limit reached"), method)
    assert outage is not None
    assert ("check whether the change was made" in outage.message) == has_advice


@pytest.mark.parametrize(
    ("state", "outage"),
    [
        ("08006", True), ("25P03", True), ("28P01", True), ("40P01", True), ("53100", True), ("53300", True), ("55P03", True),
        ("57014", True), ("57P01", True), ("57P03", True), ("58030", True), ("08P01", False),
        ("3B001", False), ("54023", False), ("55000", False),
    ],
)  # fmt: skip
def test_sqlstates_of_postgresql_distinguish_outages_from_bugs(state: str, outage: bool) -> None:
    error = OperationalError("SELECT 1", (), psycopg.errors.lookup(state)("what it says"))
    assert (as_outage(error, "GET") is not None) == outage


def test_a_broken_connection_is_an_outage_and_a_misused_one_is_not() -> None:
    closed = psycopg.InterfaceError("the connection is closed")
    assert as_outage(InterfaceError("SELECT 1", (), closed, connection_invalidated=True), "GET") is not None
    assert as_outage(InterfaceError("SELECT 1", (), psycopg.InterfaceError("no result")), "GET") is None


def test_an_invalid_statement_is_not_an_outage(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "empty.db") as connection, pytest.raises(sqlite3.OperationalError) as refused:
        connection.execute("SELECT * FROM nothing")

    assert as_outage(OperationalError("SELECT * FROM nothing", (), refused.value), "GET") is None
    assert as_outage(InternalError("COMMIT", (), psycopg.errors.InvalidCursorName("none")), "GET") is None
    assert as_outage(RuntimeError("a bug"), "GET") is None
