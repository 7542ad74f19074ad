"""Records the SQL statements that are executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event


@contextmanager
def record_statements() -> Iterator[Sequence[str]]:
    """Yield a list to which every SQL statement of any database is appended until the end of the block."""
    statements: list[str] = []

    def record(_connection: Any, _cursor: Any, statement: str, _parameters: Any, _context: Any, _many: bool) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", record)
