"""What SQLite's planner, who has no statistics in a test, makes of a query."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, text
from sqlalchemy.dialects import sqlite

from appliance.base.db import Database


async def plan_of(database: Database, query: Select[Any]) -> list[str]:
    """Return the lines of SQLite's plan for a query that read usage events."""
    compiled = str(query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))
    async with database.reading() as connection:
        rows = (await connection.execute(text("EXPLAIN QUERY PLAN " + compiled.replace(":", r"\:")))).all()
    return [str(row[3]) for row in rows if "usage_events" in str(row[3])]
