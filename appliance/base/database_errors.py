"""Tells temporary outages of the database (unreachable, locked, full, read-only) from errors in statements."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from appliance.base.errors import Overloaded

RETRY_AFTER_S = 2.0
_READ_METHODS = ("GET", "HEAD")
# SQLite's primary result codes for outages. The driver raises the same exception class for these as for a missing table.
_TRANSIENT_CODES = frozenset(
    (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
    )
)
_PRIMARY_CODE = 0xFF  # the higher bits of an extended code only refine the primary one
# SQLSTATE classes (https://www.postgresql.org/docs/current/errcodes-appendix.html): connection failure, failed authentication,
# transaction rolled back by conflicts, resources exhausted, stopped by the operator or a time limit, I/O errors. The driver's
# exception classes are broader: they include statements that are too complex and unknown savepoints.
_TRANSIENT_CLASSES = frozenset(("08", "28", "40", "53", "57", "58"))
# Read-only standby, transaction or idle timeout, lock not available in time.
_TRANSIENT_STATES = frozenset(("25006", "25P03", "25P04", "55P03"))
INSUFFICIENT_PRIVILEGE = "42501"
_PROTOCOL_VIOLATION = "08P01"  # class 08, but if the connection survives, our message was wrong


def as_outage(error: Exception, method: str) -> Overloaded | None:
    """Return the error for the client if `error` is an outage of the database, else None. `method` is the HTTP method.

    The driver's message is not used, because it names hosts and paths.
    """
    if not is_outage(error):
        return None
    advice = "try again in a moment" if method in _READ_METHODS else "check whether the change was made before you retry"
    return Overloaded(f"the database is temporarily unavailable; {advice}", retry_after_s=RETRY_AFTER_S)


def is_outage(error: Exception) -> bool:
    """Return whether `error` means that the database is unreachable, locked, full or read-only."""
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, OperationalError | InterfaceError | InternalError):
        return False
    if error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.Error):
        return sqlite_code(error) in _TRANSIENT_CODES
    state = sqlstate(error)
    if state is None:
        return isinstance(error, OperationalError)  # raised by the driver itself: no server answered
    return state in _TRANSIENT_STATES or (state[:2] in _TRANSIENT_CLASSES and state != _PROTOCOL_VIOLATION)


def sqlite_code(error: Exception) -> int | None:
    """Return SQLite's primary result code of `error`, such as `sqlite3.SQLITE_FULL`; None if it is none of SQLite's errors."""
    code: int | None = getattr(getattr(error, "orig", None) or error, "sqlite_errorcode", None)
    return None if code is None else code & _PRIMARY_CODE


def sqlstate(error: Exception) -> str | None:
    """Return PostgreSQL's SQLSTATE of `error`; None if no statement failed on a server, such as for a refused connection."""
    state: str | None = getattr(getattr(error, "orig", None) or error, "sqlstate", None)
    return state
