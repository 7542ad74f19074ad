"""How long a request waited for room in its limits before its admission and for which limit, and the mean batch size.

NULL if unknown, and for requests settled by the previous version.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Upgrade the schema. In place on both databases."""
    op.add_column("requests", sa.Column("admission_wait_us", sa.BigInteger(), nullable=True))
    op.add_column("requests", sa.Column("awaited_limit", sa.String(40), nullable=True))
    op.add_column("requests", sa.Column("batch_size_mean", sa.Float(), nullable=True))


def downgrade() -> None:
    """Downgrade the schema."""
    op.drop_column("requests", "batch_size_mean")
    op.drop_column("requests", "awaited_limit")
    op.drop_column("requests", "admission_wait_us")
