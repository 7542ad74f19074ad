"""Prepared statements: compiled once, for a writer that executes the same few statements many hundred times a second.

For each execution SQLAlchemy looks up the compiled statement, checks it and binds its parameters, which on SQLite costs several
times as much as the statement itself. Here that happens once, at the first use. On PostgreSQL the round trip outweighs the
cost, so statements go through SQLAlchemy.

On SQLite many rows are sent in one statement: the driver releases the interpreter lock for every statement and then waits for
the event loop to release it. Twenty rows sent one by one took six times as long beside a busy loop.
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

ROWS_PER_STATEMENT_MAX = 32  # each number of rows is a statement of its own in the driver's cache


class Prepared:
    """One INSERT or UPDATE. All rows must have the same keys as the first."""

    def __init__(self, statement: Insert | Update) -> None:
        self.statement: Insert | Update = statement
        self._getters: list[_Getter] = []
        self._texts: list[str] = []
        """The SQL for 1, 2, 3, … rows."""

    def scalar(self, connection: Connection, row: Mapping[str, Any]) -> Any:
        """Execute the statement for one row and return its RETURNING value, None if no row matched."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self.statement, row).scalar_one_or_none()
        if not self._texts:
            self._prepare(connection, row)
        returned, _num_changed = _send(connection, self._texts[0], [get(row) for get in self._getters])
        return returned[0][0] if returned else None

    def execute(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> int:
        """Execute the statement for all `rows` and return the number of table rows changed."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self.statement, rows).rowcount
        if not self._texts:
            self._prepare(connection, rows[0])
        num_changed = 0
        for part in batched(rows, ROWS_PER_STATEMENT_MAX):
            parameters = [get(row) for row in part for get in self._getters]
            num_changed += _send(connection, self._texts[len(part) - 1], parameters)[1]
        return num_changed

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
    """A query for the rows whose `key` is one of several values. Its columns must need no type conversion."""

    def __init__(self, query: Select[Any], key: ColumnElement[Any]) -> None:
        self._query = query.where(key.in_(bindparam("keys", expanding=True)))
        self._text: str | None = None

    def rows(self, connection: Connection, keys: Sequence[Any]) -> Sequence[Any]:
        """Return the rows, in any order, as tuples."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self._query, {"keys": keys}).all()
        if self._text is None:
            self._text = self._query.compile(dialect=connection.dialect).string
        # Padded with the last key to a power of two, to limit the number of distinct statements in the driver's cache.
        padded = [*keys, *[keys[-1]] * ((1 << (len(keys) - 1).bit_length()) - len(keys))]
        placeholders = f"({', '.join('?' * len(padded))})"
        return _send(connection, _EXPANDING.sub(placeholders, self._text), padded)[0]


def _send(connection: Connection, statement: str, parameters: Sequence[Any]) -> tuple[list[Any], int]:
    """Execute one statement directly in SQLite, in the transaction of `connection`; return its rows and the number changed.

    Raises SQLAlchemy's DBAPIError.
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
    """Return the parameter names of a row in order, and the SQL for 1, 2, 3, … rows."""
    compiled = statement.compile(dialect=dialect, column_keys=list(row))
    assert compiled.positiontup is not None, "the dialect has positional parameters"
    placeholders = f"({', '.join('?' * len(compiled.positiontup))})"
    assert compiled.string.count("?") == len(compiled.positiontup), "every placeholder is a column value"
    assert placeholders in compiled.string
    return compiled.positiontup, [
        compiled.string.replace(placeholders, ", ".join([placeholders] * count)) for count in _ROW_COUNTS
    ]


def _update_texts(statement: Update, row: Mapping[str, Any]) -> tuple[Sequence[str], list[str]]:
    """Like `_insert_texts`, for an UPDATE: the parameters of many rows come from a VALUES table, `given`.

    Constants are written as literals, so that SQLite can use partial indexes.
    """
    compiled = statement.compile(dialect=SQLiteDialect(paramstyle="named"))
    names: list[str] = []

    def replacement(match: re.Match[str]) -> str:
        bind = compiled.binds[match[1]]
        if bind.key not in row:
            assert not bind.required, f"{bind.key} is in no row"
            return str(compiled.render_literal_value(bind.value, bind.type))
        if match[1] not in names:
            names.append(match[1])
        return f"given.column{names.index(match[1]) + 1}"

    changes, condition = re.sub(r"(?<!:):(\w+)", replacement, compiled.string).split(" WHERE ", 1)
    placeholders = f"({', '.join('?' * len(names))})"
    tables = [f"(VALUES {', '.join([placeholders] * count)}) AS given" for count in _ROW_COUNTS]
    return names, [f"{changes} FROM {table} WHERE {condition}" for table in tables]


_EXPANDING = re.compile(r"\(__\[POSTCOMPILE_keys\w*\]\)")
_ROW_COUNTS = range(1, ROWS_PER_STATEMENT_MAX + 1)
_Getter = Callable[[Mapping[str, Any]], Any]


def _getter(parameter: BindParameter[Any], dialect: Dialect, row: Mapping[str, Any]) -> _Getter:
    """Return a function that gets the value of `parameter` from a row, converted for the driver, or returns its constant."""
    name = parameter.key
    convert = parameter.type.dialect_impl(dialect).bind_processor(dialect)
    if name not in row:
        assert not parameter.required, f"{name} is in no row"
        constant = parameter.value if convert is None else convert(parameter.value)
        return lambda _row: constant
    if convert is None:
        return itemgetter(name)
    return lambda row: convert(row[name])
