"""Batch work: which requests asked for the service tier flex, and which lines of closed invoices are theirs.

The previous version does not know batch work. If there was none, a downgrade removes the columns. Otherwise they stay, unread
and filled with "no" by that version: billed usage must keep its share of the price.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_TABLES = ("usage_events", "requests", "invoice_lines")


def upgrade() -> None:
    """Bring the schema up. In place on both databases: no table is rebuilt, so the triggers of revision 0003 stay."""
    for table in _TABLES:
        if not _has_batch(table):
            op.add_column(table, sa.Column("batch", sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Take the schema back."""
    events = sa.table("usage_events", sa.column("batch", sa.Boolean()))
    first = sa.select(sa.literal(1)).select_from(events).where(events.c.batch.is_(sa.true())).limit(1)
    if op.get_bind().execute(first).first() is None:
        for table in _TABLES:
            op.drop_column(table, "batch")


def _has_batch(table: str) -> bool:
    return any(column["name"] == "batch" for column in sa.inspect(op.get_bind()).get_columns(table))
