"""What SQLite's planner, who has no statistics in a test, makes of a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select
from sqlalchemy.dialects import sqlite

from appliance.base.db import Database


async def query_plan(database: Database, query: Select[Any]) -> list[str]:
    """Return the lines of SQLite's plan for a query that read usage events.

    Parameters stay parameters, as they are sent: of an index on some rows alone the planner knows only what is written out.
    """
    compiled = str(query.compile(dialect=sqlite.dialect(), compile_kwargs={"render_postcompile": True}))
    async with database.reading() as connection:
        rows: Sequence[Any] = (
            await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}", ("",) * compiled.count("?"))
        ).all()
    return [str(row[3]) for row in rows if "usage_events" in str(row[3])]
