"""One gateway per database: a claim that ends with the process that holds it, however that ends.

Two gateways on one database would take each other's open records for those of a dead process and settle them.

    alone   a gateway, a migration: nobody else
    shared  commands that change something: each other, but no gateway, whose caches they cannot empty

On PostgreSQL the claim is an advisory lock of a connection of its own. It ends with that connection, so its holder watches it:

    held ─► connection gone ─► taken again, and `go_on` says yes ─► held
             ▲    │     │                   └── says no ─────────► lost: serve no longer
             └────┘     └────► somebody else holds it alone ─────► lost
       server not reached
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

from appliance.base.db import parse_url, reason_of
from appliance.base.settings import UnusableData

LOCK_KEY = 0x6761746568757365  # "gatehuse" in ASCII: advisory locks are named by 64-bit integers, per database
WAIT_S = 10.0  # a server notices the end of a killed process on the same machine at once, across a network within this time
POLL_S = 0.25
WATCH_INTERVAL_S = 2.0
CONNECT_TIMEOUT_S = 5
_KEEPALIVE = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "2",
    "tcp_user_timeout": "9000",  # milliseconds: keepalives are not sent while something sent is not acknowledged
}
_OWN_SESSION = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
_END_SESSION = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"
_HELD_ALONE = """
    SELECT EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND classid::bigint << 32 | objid::bigint = %s AND objsubid = 1
            AND mode = 'ExclusiveLock' AND granted AND pid <> ALL (%s)
    )
"""

Pause = Callable[[float], Awaitable[None]]
GoOn = Callable[[], Awaitable[bool]]
_Connection = psycopg.AsyncConnection[tuple[object, ...]]

log = structlog.get_logger()


class DatabaseTaken(UnusableData):
    """Somebody else holds the database."""


class DatabaseClaim(Protocol):
    """A claim that is held. It is dropped without `release` only at the end of the process."""

    async def lost(self, go_on: GoOn) -> str:
        """Watch the claim, and return why it is lost when it is. One caller at a time.

        `go_on` decides whenever it had ended and was taken again: others may have changed the database in between.
        """
        ...

    async def release(self) -> None:
        """Give the claim up, so that the next one gets it."""
        ...


async def claim_database(
    url: str, *, shared: bool = False, wait_s: float = WAIT_S, pause: Pause = asyncio.sleep
) -> DatabaseClaim:
    """Return the claim on the database at `url`, alone or shared. The folder of a SQLite file is made, as its opening does.

    Raises DatabaseTaken when others still hold the database after `wait_s`, or at once when one holds a SQLite file alone, and
    UnusableData when the server does not answer or the folder cannot be made.
    """
    kind, target = parse_url(url)
    give_up_s = time.monotonic() + wait_s
    if kind == "sqlite":
        return await _claim_file(str(target.database), shared, give_up_s, pause)
    server = target.set(drivername="postgresql").update_query_dict(_KEEPALIVE, append=False)
    if "connect_timeout" not in server.query:
        server = server.update_query_dict({"connect_timeout": str(CONNECT_TIMEOUT_S)})
    claim = _PostgresqlClaim(server.render_as_string(hide_password=False), shared, pause)
    try:
        while not await claim.take():
            if time.monotonic() >= give_up_s:
                raise _taken("this PostgreSQL database")
            await pause(POLL_S)
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
    """A lock of the machine on a file beside the database: it lasts as long as the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def lost(self, go_on: GoOn) -> str:  # noqa: ARG002 - of the protocol
        """Wait for ever."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody ends this wait")

    async def release(self) -> None:
        """Give the claim up, so that the next one gets it."""
        os.close(self._descriptor)


class _PostgresqlClaim:
    """A session's advisory lock: the server drops it with the connection.

    `_sessions` are our own that may hold it, the latest last: a server can keep one whose connection broke on the way.
    """

    def __init__(self, server: str, shared: bool, pause: Pause) -> None:
        self._server = server
        self._try = f"SELECT pg_try_advisory_lock{'_shared' if shared else ''}(%s)"
        self._pause = pause
        self._connection: _Connection | None = None
        self._sessions: list[tuple[object, ...]] = []

    async def take(self) -> bool:
        """Connect if there is no connection, and return whether the lock is ours now. Raises psycopg.Error."""
        connection = self._connection
        if connection is None or connection.closed:
            connection = self._connection = await psycopg.AsyncConnection.connect(self._server, autocommit=True)
            session = await _row(connection, _OWN_SESSION)
            for earlier in self._sessions:
                await connection.execute(_END_SESSION, earlier)
            self._sessions.append(session)
        is_ours = bool((await _row(connection, self._try, LOCK_KEY))[0])
        if is_ours:
            del self._sessions[:-1]
        return is_ours

    async def lost(self, go_on: GoOn) -> str:
        """Look at once, and then every WATCH_INTERVAL_S."""
        while (reason := await self._look(go_on)) is None:
            await self._pause(WATCH_INTERVAL_S)
        return reason

    async def release(self) -> None:
        """Give the claim up, so that the next one gets it."""
        if self._connection is not None:
            await self._connection.close()

    async def _look(self, go_on: GoOn) -> str | None:
        """Return why the claim is lost; None while it is held, or while the server is not reached."""
        try:
            if self._connection is not None and not self._connection.closed:
                await self._connection.execute("SELECT 1")
                return None
        except psycopg.Error as error:
            log.warning("the claim on the database ended with its connection", reason=reason_of(error))
        try:
            return await self._take_again(go_on)
        except (psycopg.Error, SQLAlchemyError, OSError) as error:
            log.warning("the database cannot be claimed again yet", reason=reason_of(error))
            await self.release()  # what was taken and not checked is not held
            return None

    async def _take_again(self, go_on: GoOn) -> str | None:
        while not await self.take():
            if self._connection is not None and await self._is_held_alone(self._connection):
                return "another Gatehouse took the database while the connection that claims it was gone"
            await self._pause(POLL_S)  # commands share it, or a session of our own has not ended yet
        if not await go_on():
            return "another Gatehouse has used the database while the connection that claims it was gone"
        log.warning("the database is claimed again")
        return None

    async def _is_held_alone(self, connection: _Connection) -> bool:
        """Return whether somebody else holds the lock and shares it with nobody."""
        return bool((await _row(connection, _HELD_ALONE, LOCK_KEY, [session[0] for session in self._sessions]))[0])


async def _row(connection: _Connection, question: str, *parameters: object) -> tuple[object, ...]:
    row = await (await connection.execute(question.encode(), parameters)).fetchone()
    assert row is not None, question
    return row


async def _claim_file(database: str, shared: bool, give_up_s: float, pause: Pause) -> _FileClaim:
    path, descriptor = _open_file(database)
    try:
        while not _try_file(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            is_shared = not shared and _try_file(descriptor, fcntl.LOCK_SH)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            if not is_shared or time.monotonic() >= give_up_s:
                raise _taken(path.removesuffix(".claim"))
            await pause(POLL_S)
    except BaseException:
        os.close(descriptor)
        raise
    return _FileClaim(descriptor)


def _open_file(database: str) -> tuple[str, int]:
    path = f"{os.path.realpath(database)}.claim"  # of the file itself, whatever links lead there
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return path, os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnusableData(f"the file {path} cannot be used ({error.strerror}): correct --database") from error


def _try_file(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _taken(what: str) -> DatabaseTaken:
    return DatabaseTaken(f"another Gatehouse uses {what}: stop it, or give this one a database of its own")
