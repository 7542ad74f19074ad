"""Batch work: marks requests with service tier flex, and the lines of closed invoices that bill them.

The previous version does not support batch work. A downgrade removes the columns if there was none. Otherwise they are kept,
ignored and filled with false by that version, because billed usage must keep its price.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_TABLES = ("usage_events", "requests", "invoice_lines")


def upgrade() -> None:
    """Upgrade the schema. In place on both databases: no table is rebuilt, so the triggers of revision 0003 are kept."""
    for table in _TABLES:
        if not _has_batch(table):
            op.add_column(table, sa.Column("batch", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Downgrade the schema."""
    events = sa.table("usage_events", sa.column("batch", sa.Boolean()))
    first = sa.select(sa.literal(1)).select_from(events).where(events.c.batch.is_(sa.true())).limit(1)
    if op.get_bind().execute(first).first() is None:
        for table in _TABLES:
            op.drop_column(table, "batch")


def _has_batch(table: str) -> bool:
    return any(column["name"] == "batch" for column in sa.inspect(op.get_bind()).get_columns(table))
