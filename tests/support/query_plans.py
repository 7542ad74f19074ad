"""SQLite's query plans, made without statistics in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import SelectBase
from sqlalchemy.dialects import sqlite

from appliance.base.db import Database


async def query_plan(database: Database, query: SelectBase, text: str = "usage_events") -> list[str]:
    """Return the lines of SQLite's plan for `query` that contain `text`.

    Parameters are not inlined, as in production: the planner uses a partial index only if its condition is in the text.
    """
    compiled = str(query.compile(dialect=sqlite.dialect(), compile_kwargs={"render_postcompile": True}))
    async with database.reading() as connection:
        rows: Sequence[Any] = (
            await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}", ("",) * compiled.count("?"))
        ).all()
    return [line for line in (str(row[3]) for row in rows) if text in line]
