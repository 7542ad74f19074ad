"""One gateway per database: a claim that ends with the process that holds it, however that ends.

Two gateways on one database would take each other's open records for those of a dead process and settle them.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from typing import Protocol

import psycopg

from appliance.base.db import parse_url, reason_of
from appliance.base.settings import UnusableData

LOCK_KEY = 0x6761746568757365  # "gatehuse" in ASCII: advisory locks are named by 64-bit integers, per database
WAIT_S = 10.0  # a server notices the end of a killed process on the same machine at once, across a network within this time
POLL_S = 0.25
_KEEPALIVE = {"keepalives": "1", "keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "2"}


class DatabaseClaim(Protocol):
    """What is held. Dropping it without `release` is for the end of the process alone."""

    async def release(self) -> None:
        """Let the next gateway in."""
        ...


async def claim_database(url: str, *, wait_s: float = WAIT_S) -> DatabaseClaim:
    """Return the claim on the database at `url`.

    Raises UnusableData when the server does not answer, or when another gateway still holds the database after `wait_s`.
    """
    kind, target = parse_url(url)
    if kind == "sqlite":
        return _claim_file(str(target.database))
    server = target.set(drivername="postgresql").update_query_dict(_KEEPALIVE, append=False)
    try:
        connection = await psycopg.AsyncConnection.connect(server.render_as_string(hide_password=False), autocommit=True)
    except psycopg.Error as error:
        raise UnusableData(
            f"the database cannot be used: {reason_of(error)}; check --database and `gatehouse doctor`"
        ) from error
    give_up_s = time.monotonic() + wait_s
    try:
        while not await _try_lock(connection):
            if time.monotonic() >= give_up_s:
                raise _taken("this PostgreSQL database")
            await asyncio.sleep(POLL_S)
    except BaseException:
        await connection.close()
        raise
    return _PostgresqlClaim(connection)


class _FileClaim:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def release(self) -> None:
        os.close(self._descriptor)


class _PostgresqlClaim:
    """A session's advisory lock: the server drops it with the connection."""

    def __init__(self, connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        self._connection = connection

    async def release(self) -> None:
        await self._connection.close()


def _claim_file(database: str) -> _FileClaim:
    path = f"{os.path.realpath(database)}.claim"  # of the file itself, whatever links lead there
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _taken(path.removesuffix(".claim")) from None
    return _FileClaim(descriptor)


async def _try_lock(connection: psycopg.AsyncConnection[tuple[object, ...]]) -> bool:
    row = await (await connection.execute("SELECT pg_try_advisory_lock(%s)", (LOCK_KEY,))).fetchone()
    return row is not None and bool(row[0])


def _taken(what: str) -> UnusableData:
    return UnusableData(f"another Gatehouse uses {what}: stop it, or give this one a database of its own")
