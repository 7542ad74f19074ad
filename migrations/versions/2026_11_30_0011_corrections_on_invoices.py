"""The key that makes a repeated correction harmless, and the reasons of corrections on the lines of closed invoices.

NULL for what the previous version wrote. It knows neither: a downgrade removes the columns unless they are in use. They are
kept then, and ignored by that version, because a closed invoice keeps its content and a correction must not be made twice.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Upgrade the schema. In place on both databases: no table is rebuilt, so the triggers of revision 0003 are kept."""
    for table, column in _columns():
        if not _has(table, column.name):
            op.add_column(table, column)


def downgrade() -> None:
    """Downgrade the schema."""
    for table, column in _columns():
        used = sa.select(sa.literal(1)).select_from(sa.table(table)).where(sa.column(column.name).is_not(sa.null())).limit(1)
        if op.get_bind().execute(used).first() is None:
            op.drop_column(table, column.name)


def _columns() -> list[tuple[str, sa.Column[str]]]:
    return [
        ("usage_events", sa.Column("idempotency_key", sa.String(255), nullable=True)),
        ("invoice_lines", sa.Column("reasons", sa.JSON(none_as_null=True), nullable=True)),
    ]


def _has(table: str, name: str) -> bool:
    return any(column["name"] == name for column in sa.inspect(op.get_bind()).get_columns(table))
