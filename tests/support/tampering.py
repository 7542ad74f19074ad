"""What somebody with the database in hand could do to the audit log: the triggers put away, rows changed or removed."""

from __future__ import annotations

from appliance.base.db import Database


async def tamper(database: Database, *statements: str) -> None:
    """Execute `statements` on the audit log as if no trigger kept it."""
    if database.kind == "sqlite":
        disable = ["DROP TRIGGER IF EXISTS audit_log_no_update", "DROP TRIGGER IF EXISTS audit_log_no_delete"]
    else:
        disable = ["SET LOCAL session_replication_role = replica"]
    async with database.writing() as connection:
        for statement in (*disable, *statements):
            await connection.exec_driver_sql(statement)
