"""Number of the tenant's open requests when a request arrived, to explain past requests like live ones.

NULL if unknown, and for requests settled by the previous version.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Upgrade the schema. In place on both databases."""
    op.add_column("requests", sa.Column("tenant_open", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Downgrade the schema."""
    op.drop_column("requests", "tenant_open")
