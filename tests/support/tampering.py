"""Tampering with the database directly: disables triggers, then changes or deletes immutable rows."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database

EVENTS = ("update", "delete", "insert_over", "update_over")
IMMUTABLE_TABLES = ("audit_log", "usage_events", "invoices", "invoice_lines", "prices", "free_allowances")


async def tamper(database: Database, *statements: str) -> None:
    """Execute `statements` with the triggers disabled."""
    async with database.writing() as connection:
        await disable_triggers(connection)
        for statement in statements:
            await connection.exec_driver_sql(statement)


async def disable_triggers(connection: AsyncConnection) -> None:
    """Let this transaction change immutable rows. On SQLite the triggers stay dropped."""
    if connection.dialect.name == "sqlite":
        disable = [f"DROP TRIGGER IF EXISTS {table}_no_{event}" for table in IMMUTABLE_TABLES for event in EVENTS]
    else:
        disable = ["SET LOCAL session_replication_role = replica"]
    for statement in disable:
        await connection.exec_driver_sql(statement)
