"""What keeps a database from taking writes, in plain words and with a remedy, for `gatehouse doctor`."""

from __future__ import annotations

import re
import shutil
import sqlite3
from pathlib import Path

from sqlalchemy import false, func, select, text, update
from sqlalchemy.exc import DBAPIError

from appliance.base.database_errors import INSUFFICIENT_PRIVILEGE, sqlite_code, sqlstate
from appliance.base.db import POSTGRESQL_CONNECTIONS_MAX, Database, reason_of
from appliance.base.settings import Settings
from appliance.base.tables import counters

DISK_FULL_ADVICE = "free some disk space"
MIB = 1024 * 1024
# SQLSTATE: what it means, and what to do (https://www.postgresql.org/docs/current/errcodes-appendix.html).
_SERVER_FAULTS = {
    "53100": ("the disk of the server is full", f"{DISK_FULL_ADVICE} on the database server"),
    "53300": (
        "the server accepts no more connections",
        "end other connections, or raise max_connections or the CONNECTION LIMIT of the role or database: a gateway uses up to "
        f"{POSTGRESQL_CONNECTIONS_MAX}",
    ),
    "25006": (
        "the database is read-only",
        "give the address of the primary server with --database, or set default_transaction_read_only to off",
    ),
    INSUFFICIENT_PRIVILEGE: (
        "the role lacks privileges",
        "give --database the role that owns the tables, or grant this one all privileges on them",
    ),
}
# The driver does not pass on the SQLSTATE of a refused connection.
_TOO_MANY_CONNECTIONS = re.compile(r"too many (clients|connections)|connection slots are reserved")


async def try_to_write(database: Database) -> None:
    """Raise the driver's error unless the database accepts writes and its disk has space for them. Leaves nothing behind."""
    if database.kind == "sqlite":
        await database.ping()
        return
    try:
        async with database.writing() as connection:
            await connection.execute(text("CREATE TEMPORARY TABLE gatehouse_space ON COMMIT DROP AS SELECT 1"))
    except DBAPIError as error:
        if sqlstate(error) != INSUFFICIENT_PRIVILEGE:
            raise
    async with database.writing() as connection:
        is_created = (await connection.execute(select(func.to_regclass(counters.name)))).scalar_one() is not None
        if is_created:
            await connection.execute(update(counters).where(false()).values(value=counters.c.value))


def describe(error: Exception, settings: Settings) -> tuple[str, str]:
    """Return why a database cannot be used, and what to do about it. `error` was raised by `try_to_write` or on connecting."""
    reason = reason_of(error)
    if settings.database_url.startswith("postgres"):
        state = "53300" if _TOO_MANY_CONNECTIONS.search(reason) else sqlstate(error)
        name, advice = _SERVER_FAULTS.get(state or "", ("unavailable", "start the database server, or correct --database"))
        return f"{name}: {reason}", advice
    return f"unavailable: {reason}", _file_advice(error, Path(settings.database_url.removeprefix("sqlite:///")))


def _file_advice(error: Exception, path: Path) -> str:
    """Return what to do about a SQLite file that cannot be used because of `error`."""
    code = sqlite_code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"wait for {_lock_holder(path)} to finish, or stop it"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return "restore a backup"
    if code == sqlite3.SQLITE_FULL or shutil.disk_usage(path.parent).free < MIB:  # SQLite calls a full disk an I/O error too
        return DISK_FULL_ADVICE
    return f"check the owner and the permissions of {path} and its folder, and the disk"


def _lock_holder(database: Path) -> str:
    """Return which process holds a write lock on a SQLite file or its shared memory, as far as Linux tells."""
    files = {path.stat().st_ino for path in (database, Path(f"{database}-shm")) if path.exists()}
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
    except OSError:
        locks = []
    for _number, _kind, _mode, access, pid, file, *_range in locks:
        if access == "WRITE" and int(file.rpartition(":")[2]) in files:
            return f"the process with pid {pid}, which locks it,"
    return "the program that locks it"
