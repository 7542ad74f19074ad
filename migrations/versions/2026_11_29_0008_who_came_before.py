"""How many requests of its own tenant were open when a request came: a past one's explanation says it, as a live one's does.

NULL of requests that the version before settled, and of those that nothing is known of.
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
