"""How many requests of its own tenant were open when a request came, for the explanation of past requests as of live ones.

NULL for requests that the previous version settled, and if it is unknown.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Bring the schema up. In place on both databases."""
    op.add_column("requests", sa.Column("tenant_open", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Take the schema back."""
    op.drop_column("requests", "tenant_open")
