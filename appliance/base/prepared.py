"""Statements that change rows, compiled once: for a writer that sends the same few of them many hundred times a second.

SQLAlchemy looks a compiled statement up, checks and fills it each time, which on SQLite costs several times what the statement
itself does. Here that is done at the first use, on SQLite only; on PostgreSQL the way to the server outweighs it.

On SQLite many rows are one statement instead of one each: the driver releases the interpreter's lock for every statement, and
then waits until the event loop is done with it. Twenty rows sent one by one took six times as long beside a busy loop.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Connection, Dialect, Insert, Select, Update, bindparam
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.exc import DBAPIError

from appliance.base.batches import batched

ROWS_PER_STATEMENT_MAX = 32  # each number up to it is a statement of its own, which the driver keeps compiled


class Prepared:
    """One statement. All rows have the same names as the first."""

    def __init__(self, statement: Insert | Update) -> None:
        self.statement: Insert | Update = statement
        self._getters: list[_Getter] = []
        self._texts: list[str] = []
        """For 1, 2, 3, … rows."""

    def scalar(self, connection: Connection, row: Mapping[str, Any]) -> Any:
        """Execute the statement for one row and return the value of its RETURNING, None when no row matched."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self.statement, row).scalar_one_or_none()
        if not self._texts:
            self._prepare(connection, row)
        found, _met = _send(connection, self._texts[0], [get(row) for get in self._getters])
        return found[0][0] if found else None

    def execute(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> int:
        """Execute the statement for each of `rows` and return how many rows of the table it changed."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self.statement, rows).rowcount
        if not self._texts:
            self._prepare(connection, rows[0])
        met = 0
        for part in batched(rows, ROWS_PER_STATEMENT_MAX):
            parameters = [get(row) for row in part for get in self._getters]
            met += _send(connection, self._texts[len(part) - 1], parameters)[1]
        return met

    def _prepare(self, connection: Connection, row: Mapping[str, Any]) -> None:
        statement, dialect = self.statement, connection.dialect
        if isinstance(statement, Insert):
            names, texts = _insert_texts(statement, dialect, row)
        else:
            names, texts = _update_texts(statement, row)
        binds = statement.compile(dialect=dialect, column_keys=list(row)).binds
        self._getters = [_getter(binds[name], dialect, row) for name in names]
        self._texts = texts


class Lookup:
    """A query for the rows with one of some values of `key`, of columns that both databases store as they are read."""

    def __init__(self, query: Select[Any], key: ColumnElement[Any]) -> None:
        self._query = query.where(key.in_(bindparam("keys", expanding=True)))
        self._text: str | None = None

    def rows(self, connection: Connection, keys: Sequence[Any]) -> Sequence[Any]:
        """Return the rows, in any order, as tuples."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self._query, {"keys": keys}).all()
        if self._text is None:
            self._text = self._query.compile(dialect=connection.dialect).string
        # Padded with the last key to a power of two: SQLite keeps a compiled statement for each number of keys.
        padded = [*keys, *[keys[-1]] * ((1 << (len(keys) - 1).bit_length()) - len(keys))]
        places = f"({', '.join('?' * len(padded))})"
        return _send(connection, _EXPANDING.sub(places, self._text), padded)[0]


def _send(connection: Connection, statement: str, parameters: Sequence[Any]) -> tuple[list[Any], int]:
    """Send one statement straight to SQLite, in the transaction of `connection`; return its rows and how many it changed.

    Raises SQLAlchemy's errors.
    """
    if not connection.in_transaction():
        connection.begin()
    cursor = connection.connection.cursor()
    try:
        cursor.execute(statement, parameters)
        return list(cursor.fetchall()) if cursor.description else [], int(cursor.rowcount)
    except sqlite3.Error as error:
        raise DBAPIError.instance(statement, tuple(parameters), error, sqlite3.Error) from error
    finally:
        cursor.close()


def _insert_texts(statement: Insert, dialect: Dialect, row: Mapping[str, Any]) -> tuple[Sequence[str], list[str]]:
    """Return the names of a row's parameters in their order, and the statement for 1, 2, 3, … rows."""
    compiled = statement.compile(dialect=dialect, column_keys=list(row))
    assert compiled.positiontup is not None, "the parameters stand in an order"
    places = f"({', '.join('?' * len(compiled.positiontup))})"
    assert compiled.string.count("?") == len(compiled.positiontup), "all parameters are values of a row"
    assert places in compiled.string
    return compiled.positiontup, [compiled.string.replace(places, ", ".join([places] * count)) for count in _COUNTS]


def _update_texts(statement: Update, row: Mapping[str, Any]) -> tuple[Sequence[str], list[str]]:
    """Do the same: an UPDATE of many rows takes their parameters from a table of them, `given`.

    What is the same for all rows is written out, so that SQLite sees that a partial index has all it looks for.
    """
    compiled = statement.compile(dialect=SQLiteDialect(paramstyle="named"))
    names: list[str] = []

    def place(found: re.Match[str]) -> str:
        bind = compiled.binds[found[1]]
        if bind.key not in row:
            assert not bind.required, f"{bind.key} is in no row"
            return str(compiled.render_literal_value(bind.value, bind.type))
        if found[1] not in names:
            names.append(found[1])
        return f"given.column{names.index(found[1]) + 1}"

    changes, condition = re.sub(r"(?<!:):(\w+)", place, compiled.string).split(" WHERE ", 1)
    places = f"({', '.join('?' * len(names))})"
    tables = [f"(VALUES {', '.join([places] * count)}) AS given" for count in _COUNTS]
    return names, [f"{changes} FROM {table} WHERE {condition}" for table in tables]


_EXPANDING = re.compile(r"\(__\[POSTCOMPILE_keys\w*\]\)")
_COUNTS = range(1, ROWS_PER_STATEMENT_MAX + 1)
_Getter = Callable[[Mapping[str, Any]], Any]


def _getter(parameter: BindParameter[Any], dialect: Dialect, row: Mapping[str, Any]) -> _Getter:
    """Return the function that takes the value of `parameter` from a row, as the driver wants it, or returns its constant."""
    name = parameter.key
    given = parameter.type.dialect_impl(dialect).bind_processor(dialect)
    if name not in row:
        assert not parameter.required, f"{name} is in no row"
        constant = parameter.value if given is None else given(parameter.value)
        return lambda _row: constant
    if given is None:
        return itemgetter(name)
    return lambda row: given(row[name])
