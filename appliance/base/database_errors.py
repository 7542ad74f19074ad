"""Which errors say that the database cannot be used at the moment, and not that a statement is wrong. Knows no table."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from appliance.base.errors import Overloaded

RETRY_AFTER_S = 2.0
_READ_METHODS = ("GET", "HEAD")
# Of SQLite's errors the driver names one kind for all of these and for a table that does not exist.
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
_PRIMARY_CODE = 0xFF  # the rest of a code says more of the same
# Of PostgreSQL's errors, by their class (https://www.postgresql.org/docs/current/errcodes-appendix.html): no connection, none
# with this password, a transaction that others undid, no memory or disk or connection left, ended by the operator or by a time
# limit, a file system that fails. The driver's kinds hold more: a statement too complex, a savepoint that nobody set.
_TRANSIENT_CLASSES = frozenset(("08", "28", "40", "53", "57", "58"))
# A standby that is not in charge (any more), a transaction that was open for too long, a lock that was not free in time.
_TRANSIENT_STATES = frozenset(("25006", "25P03", "25P04", "55P03"))
_PROTOCOL_VIOLATION = "08P01"  # of class 08, but where the connection stays, what we sent was wrong


def as_outage(error: Exception, method: str) -> Overloaded | None:
    """Return what a client whose `method` failed is told if the database is away, locked, full or read-only, else None.

    In our own words: the driver's name hosts and paths.
    """
    if not is_outage(error):
        return None
    then = "try again in a moment" if method in _READ_METHODS else "see whether a change was made before you send it again"
    return Overloaded(f"the database cannot be used now; {then}", retry_after_s=RETRY_AFTER_S)


def is_outage(error: Exception) -> bool:
    """Return whether the database is away, locked, full or read-only."""
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, OperationalError | InterfaceError | InternalError):
        return False
    if error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.Error):
        code = getattr(error.orig, "sqlite_errorcode", None)
        return code is not None and code & _PRIMARY_CODE in _TRANSIENT_CODES
    state = getattr(error.orig, "sqlstate", None)
    if state is None:
        return isinstance(error, OperationalError)  # the driver's own: no server has answered
    return state in _TRANSIENT_STATES or (state[:2] in _TRANSIENT_CLASSES and state != _PROTOCOL_VIOLATION)
