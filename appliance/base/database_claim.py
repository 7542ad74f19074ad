"""One gateway per database: a lock on the database, called a claim, that is released when its process ends for any reason.

Two gateways on one database would each take the other's pending events for those of a dead process and settle them.

    exclusive  a gateway or a migration: excludes everyone else
    shared     commands that change data: exclude gateways, whose caches they cannot invalidate, but not each other

On PostgreSQL the claim is an advisory lock on a dedicated connection. It ends with that connection, so its holder watches it:

    held ─► connection lost ─► acquired again, `may_resume` is true ─► held
             ▲    │     │                      └─ is false ──────────► lost: stop serving
             └────┘     └────► another process holds it exclusively ─► lost
     server unreachable
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import psycopg
import structlog
from sqlalchemy.exc import SQLAlchemyError

from appliance.base.consecutive_failures import ConsecutiveFailures
from appliance.base.db import KEEPALIVE, parse_url, reason_of
from appliance.base.settings import UnusableData

LOCK_KEY = 0x6761746568757365  # "gatehuse" in ASCII: an advisory lock is identified by a 64-bit integer within a database
WAIT_S = 10.0  # a server notices a killed client at once on the same machine, and within this time across a network
POLL_S = 0.25
WATCH_INTERVAL_S = 2.0
CONNECT_TIMEOUT_S = 5
_OWN_SESSION = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
_END_SESSION = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"
_HELD_EXCLUSIVELY = """
    SELECT EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND classid::bigint << 32 | objid::bigint = %s AND objsubid = 1
            AND mode = 'ExclusiveLock' AND granted AND pid <> ALL (%s)
    )
"""

Sleep = Callable[[float], Awaitable[None]]
MayResume = Callable[[], Awaitable[bool]]
_Connection = psycopg.AsyncConnection[tuple[object, ...]]

log = structlog.get_logger()


class DatabaseInUse(UnusableData):
    """Another process holds a conflicting claim on the database."""


class DatabaseClaim(Protocol):
    """A claim that is held, until `release` or the end of the process."""

    async def wait_until_lost(self, may_resume: MayResume) -> str:
        """Wait until the claim is lost and return the reason. One caller at a time.

        `may_resume` is called whenever the claim had ended and was acquired again, and decides whether it still counts as
        held: other processes may have changed the database in between.
        """
        ...

    async def release(self) -> None:
        """Release the claim."""
        ...


async def claim_database(
    url: str, *, shared: bool = False, wait_s: float = WAIT_S, sleep: Sleep = asyncio.sleep
) -> DatabaseClaim:
    """Acquire the claim on the database at `url`, exclusive or `shared`. Creates the folder of a SQLite file.

    Raises DatabaseInUse if a conflicting claim is still held after `wait_s`, or at once if a SQLite file is claimed
    exclusively; UnusableData if the server is unreachable or the folder cannot be created.
    """
    kind, target = parse_url(url)
    deadline_s = time.monotonic() + wait_s
    if kind == "sqlite":
        return await _claim_file(str(target.database), shared, deadline_s, sleep)
    server = target.set(drivername="postgresql").update_query_dict(KEEPALIVE, append=False)
    if "connect_timeout" not in server.query:
        server = server.update_query_dict({"connect_timeout": str(CONNECT_TIMEOUT_S)})
    claim = _PostgresqlClaim(server.render_as_string(hide_password=False), shared, sleep)
    try:
        while not await claim.take():
            if time.monotonic() >= deadline_s:
                raise _in_use("this PostgreSQL database")
            await sleep(POLL_S)
    except psycopg.Error as error:
        await claim.release()
        raise UnusableData(
            f"the database cannot be used: {reason_of(error)}; check --database and `gatehouse doctor`"
        ) from error
    except BaseException:
        await claim.release()
        raise
    return claim


class _FileClaim:
    """A lock (flock) on a file next to the SQLite database; the operating system drops it when the process ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def wait_until_lost(self, may_resume: MayResume) -> str:  # noqa: ARG002 - the protocol's signature
        """Wait for ever: a file lock is not lost while the process lives."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def release(self) -> None:
        """Release the claim."""
        os.close(self._descriptor)


class _PostgresqlClaim:
    """A session-level advisory lock, which the server drops with the connection.

    `_sessions` are our own sessions that may hold the lock, newest last: after a network failure the server may keep an old
    session for a while.
    """

    def __init__(self, server: str, shared: bool, sleep: Sleep) -> None:
        self._server = server
        self._try_lock_query = f"SELECT pg_try_advisory_lock{'_shared' if shared else ''}(%s)"
        self._sleep = sleep
        self._connection: _Connection | None = None
        self._sessions: list[tuple[object, ...]] = []
        self._failures = ConsecutiveFailures()  # of attempts to claim the database again

    async def take(self) -> bool:
        """Connect if not connected, try to acquire the lock, and return whether it is held. Raises psycopg.Error."""
        connection = self._connection
        if connection is None or connection.closed:
            connection = self._connection = await psycopg.AsyncConnection.connect(self._server, autocommit=True)
            session = await _row(connection, _OWN_SESSION)
            for earlier in self._sessions:
                await connection.execute(_END_SESSION, earlier)
            self._sessions.append(session)
        is_ours = bool((await _row(connection, self._try_lock_query, LOCK_KEY))[0])
        if is_ours:
            del self._sessions[:-1]
        return is_ours

    async def wait_until_lost(self, may_resume: MayResume) -> str:
        """Check at once, then every WATCH_INTERVAL_S."""
        while (reason := await self._check(may_resume)) is None:
            await self._sleep(WATCH_INTERVAL_S)
        return reason

    async def release(self) -> None:
        """Release the claim."""
        if self._connection is not None:
            await self._connection.close()

    async def _check(self, may_resume: MayResume) -> str | None:
        """Return why the claim is lost; None while it is held, or while the server is unreachable."""
        try:
            if self._connection is not None and not self._connection.closed:
                await self._connection.execute("SELECT 1")
                return None
        except psycopg.Error as error:
            log.warning("database claim ended: its connection was lost", reason=reason_of(error))
        try:
            return await self._take_again(may_resume)
        except (psycopg.Error, SQLAlchemyError, OSError) as error:
            if failures := self._failures.count():
                log.warning("database cannot be claimed again yet", reason=reason_of(error), failures=failures)
            await self.release()  # a lock taken before `may_resume` was asked must not be kept
            return None

    async def _take_again(self, may_resume: MayResume) -> str | None:
        while not await self.take():
            if self._connection is not None and await self._is_held_exclusively(self._connection):
                return "another Gatehouse claimed the database while the connection that held the claim was lost"
            await self._sleep(POLL_S)  # commands hold it shared, or an old session of our own has not ended yet
        if not await may_resume():
            return "another Gatehouse used the database while the connection that held the claim was lost"
        log.warning("database claimed again", failures=self._failures.end())
        return None

    async def _is_held_exclusively(self, connection: _Connection) -> bool:
        """Return whether another process holds the lock exclusively."""
        return bool((await _row(connection, _HELD_EXCLUSIVELY, LOCK_KEY, [session[0] for session in self._sessions]))[0])


async def _row(connection: _Connection, query: str, *parameters: object) -> tuple[object, ...]:
    row = await (await connection.execute(query.encode(), parameters)).fetchone()
    assert row is not None, query
    return row


async def _claim_file(database: str, shared: bool, deadline_s: float, sleep: Sleep) -> _FileClaim:
    path, descriptor = _open_file(database)
    try:
        while not _try_flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            is_shared = not shared and _try_flock(descriptor, fcntl.LOCK_SH)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            if not is_shared or time.monotonic() >= deadline_s:
                raise _in_use(path.removesuffix(".claim"))
            await sleep(POLL_S)
    except BaseException:
        os.close(descriptor)
        raise
    return _FileClaim(descriptor)


def _open_file(database: str) -> tuple[str, int]:
    path = f"{os.path.realpath(database)}.claim"  # of the real path, so that all links to the file share one claim
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return path, os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnusableData(f"cannot open {path} ({error.strerror}): correct --database") from error


def _try_flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(what: str) -> DatabaseInUse:
    return DatabaseInUse(f"another Gatehouse is using {what}: stop it, or use a different database")
