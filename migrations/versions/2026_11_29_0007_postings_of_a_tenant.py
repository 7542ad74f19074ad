"""Index for the events of earlier months on a tenant's invoice: those posted since the previous month was closed.

Without it a draft reads all events of the tenant.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_POSTED = "posting IS NOT NULL"


def upgrade() -> None:
    """Upgrade the schema."""
    op.create_index(
        "ix_usage_events_tenant_id_posting",
        "usage_events",
        ["tenant_id", "posting", "billing_day"],
        sqlite_where=sa.text(_POSTED),
        postgresql_where=sa.text(_POSTED),
    )


def downgrade() -> None:
    """Downgrade the schema."""
    op.drop_index("ix_usage_events_tenant_id_posting", "usage_events")
