"""Runs migrations on the connection passed by `appliance.base.migrations`, inside its transaction, for both databases."""

from __future__ import annotations

from alembic import context

from appliance.base.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite cannot alter most things in place
    transactional_ddl=True,  # true for SQLite too, because the driver's implicit transactions are disabled
    compare_type=True,
)
context.run_migrations()
