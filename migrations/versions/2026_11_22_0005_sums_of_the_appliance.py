"""Usage sums of the whole appliance by model, filled from usage_rollups; indexes for reports on a tenant, request or model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "rejected_tokens", "cost_high", "cost_low")
_ADJUSTMENTS = "kind = 'adjustment'"


def upgrade() -> None:
    """Upgrade the schema."""
    op.create_table(
        "usage_box_rollups",
        sa.Column("bucket", sa.String(10), nullable=False),
        sa.Column("start_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTS),
        sa.PrimaryKeyConstraint("bucket", "start_at", "model", "currency", name="pk_usage_box_rollups"),
        sqlite_with_rowid=False,
    )
    sums = ", ".join(f"sum({name})" for name in _COUNTS)
    op.execute(
        f"INSERT INTO usage_box_rollups (bucket, start_at, model, currency, {', '.join(_COUNTS)}) "  # noqa: S608 - our own names
        f"SELECT bucket, start_at, model, currency, {sums} FROM usage_rollups "
        "GROUP BY bucket, start_at, model, currency ORDER BY bucket, start_at, model, currency"
    )
    op.create_index(
        "ix_usage_rollups_tenant_id_bucket_start_at_key_id", "usage_rollups", ["tenant_id", "bucket", "start_at", "key_id"]
    )
    op.create_index("ix_requests_model_admitted_at", "requests", ["model", "admitted_at"])
    op.create_index(
        "ix_usage_events_adjustments",
        "usage_events",
        ["request_id"],
        sqlite_where=sa.text(_ADJUSTMENTS),
        postgresql_where=sa.text(_ADJUSTMENTS),
    )

    if op.get_bind().dialect.name == "postgresql":
        # Otherwise the planner takes tenant and key for independent, expects a hundredth of the rows and reads all for a page.
        op.execute("CREATE STATISTICS usage_rollups_key_of_tenant (dependencies) ON tenant_id, key_id FROM usage_rollups")


def downgrade() -> None:
    """Downgrade the schema."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP STATISTICS usage_rollups_key_of_tenant")
    op.drop_index("ix_usage_events_adjustments", "usage_events")
    op.drop_index("ix_requests_model_admitted_at", "requests")
    op.drop_index("ix_usage_rollups_tenant_id_bucket_start_at_key_id", "usage_rollups")
    op.drop_table("usage_box_rollups")
