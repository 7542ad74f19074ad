"""Runs migrations on the connection that `appliance.base.migrations` hands over, inside its transaction, on both databases."""

from __future__ import annotations

from alembic import context

from appliance.base.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite cannot alter most things in place
    transactional_ddl=True,  # holds for SQLite too, once the driver's own transaction handling is off
    compare_type=True,
)
context.run_migrations()
