"""Statements that change rows, compiled once: for a writer that sends the same few of them many hundred times a second.

SQLAlchemy finds, checks and fills a compiled statement anew each time, which on SQLite costs several times what the statement
itself does. Here that is done at the first use, and on SQLite alone; on PostgreSQL the way to the server outweighs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import BindParameter, Connection, Dialect, Insert, Update


class Prepared:
    """One statement. All rows have the names that the first row had."""

    def __init__(self, statement: Insert | Update) -> None:
        self.statement: Insert | Update = statement
        self._sql: str | None = None
        self._places: list[_Place] = []

    def execute(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> int:
        """Execute the statement for each of `rows` and return how many rows of the table it met."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self.statement, rows).rowcount
        if self._sql is None:
            self._prepare(connection, rows[0])
        assert self._sql is not None
        parameters = [tuple([place(row) for place in self._places]) for row in rows]
        return connection.exec_driver_sql(self._sql, parameters).rowcount

    def _prepare(self, connection: Connection, row: Mapping[str, Any]) -> None:
        compiled = self.statement.compile(dialect=connection.dialect, column_keys=list(row))
        assert compiled.positiontup is not None, "the parameters stand in an order"
        self._places = [_place(compiled.binds[name], connection.dialect, row) for name in compiled.positiontup]
        self._sql = compiled.string


_Place = Callable[[Mapping[str, Any]], Any]


def _place(parameter: BindParameter[Any], dialect: Dialect, row: Mapping[str, Any]) -> _Place:
    """Return what takes the value of `parameter`, as the driver wants it, from a row; those of the statement are constant."""
    name = parameter.key
    given = parameter.type.dialect_impl(dialect).bind_processor(dialect)
    if name not in row:
        assert not parameter.required, f"{name} is in no row"
        constant = parameter.value if given is None else given(parameter.value)
        return lambda _row: constant
    if given is None:
        return itemgetter(name)
    return lambda row: given(row[name])
