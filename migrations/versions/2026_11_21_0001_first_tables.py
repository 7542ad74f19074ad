"""The first tables: tenants, keys, members, sessions, administrator tokens, prices, epochs, usage events, requests."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Upgrade the schema."""
    _create_tenants_and_keys()
    _create_people()
    _create_prices_and_epochs()
    _create_usage_events()
    _create_requests()


def downgrade() -> None:
    """Downgrade the schema."""
    for table in ("requests", "usage_events", "epochs", "prices", "admin_tokens", "sessions", "members", "api_keys", "tenants"):
        op.drop_table(table)


def _id(name: str = "id") -> sa.Column[Any]:
    return sa.Column(name, sa.String(40), nullable=False)


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _count(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def _list(name: str, *, nullable: bool = True) -> sa.Column[Any]:
    return sa.Column(name, sa.JSON(none_as_null=True), nullable=nullable)


def _limits() -> list[sa.Column[Any]]:
    names = ("tokens_per_minute", "requests_per_minute", "concurrent_requests", "tokens_per_day", "monthly_budget_micros")
    return [_count(name, nullable=True) for name in names]


def _primary(table: str, column: str = "id") -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(column, name=f"pk_{table}")


def _refers(table: str, column: str, target: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{target}.id"], name=f"fk_{table}_{column}")


def _create_tenants_and_keys() -> None:
    op.create_table(
        "tenants",
        _id(),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("tier", sa.String(20), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        *_limits(),
        _list("allowed_models"),
        sa.Column("suspended", sa.Boolean(), nullable=False),
        _time("archived_at", nullable=True),
        _time("created_at"),
        _primary("tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "api_keys",
        _id(),
        _id("tenant_id"),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("prefix", sa.String(20), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        _list("scopes", nullable=False),
        *_limits(),
        _list("allowed_models"),
        _list("allowed_networks"),
        _time("expires_at", nullable=True),
        _time("revoked_at", nullable=True),
        _time("last_used_at", nullable=True),
        _time("created_at"),
        _primary("api_keys"),
        _refers("api_keys", "tenant_id", "tenants"),
        sa.UniqueConstraint("prefix", name="uq_api_keys_prefix"),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])


def _create_people() -> None:
    op.create_table(
        "members",
        _id(),
        sa.Column("email", sa.String(320), nullable=False),
        sa.Column("password_hash", sa.String(200), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        _time("disabled_at", nullable=True),
        _time("created_at"),
        _primary("members"),
        sa.UniqueConstraint("email", name="uq_members_email"),
    )
    op.create_table(
        "sessions",
        sa.Column("token_hash", sa.String(64), nullable=False),
        _id("member_id"),
        sa.Column("csrf_token", sa.String(64), nullable=False),
        sa.Column("user_agent", sa.String(400), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        _time("created_at"),
        _time("last_seen_at"),
        _time("expires_at"),
        _primary("sessions", "token_hash"),
        _refers("sessions", "member_id", "members"),
    )
    op.create_index("ix_sessions_member_id", "sessions", ["member_id"])
    op.create_table(
        "admin_tokens",
        _id(),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        _time("revoked_at", nullable=True),
        _time("created_at"),
        _primary("admin_tokens"),
        sa.UniqueConstraint("digest", name="uq_admin_tokens_digest"),
    )


def _create_prices_and_epochs() -> None:
    op.create_table(
        "prices",
        _id(),
        sa.Column("model", sa.String(200), nullable=False),
        _time("effective_from"),
        sa.Column("currency", sa.String(3), nullable=False),
        _count("prompt"),
        _count("cached_prompt"),
        _count("completion"),
        sa.Column("batch_percent", sa.Integer(), nullable=False),
        _time("created_at"),
        _primary("prices"),
        sa.UniqueConstraint("model", "effective_from", name="uq_prices_model_effective_from"),
    )
    op.create_table(
        "epochs",
        _id(),
        sa.Column("version", sa.String(40), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        _time("started_at"),
        _time("ended_at", nullable=True),
        _primary("epochs"),
    )


def _create_usage_events() -> None:
    op.create_table(
        "usage_events",
        # On SQLite only INTEGER columns are numbered automatically.
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        _id("request_id"),
        _id("tenant_id"),
        _id("key_id"),
        _id("epoch_id"),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("endpoint", sa.String(80), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("finish_reason", sa.String(20), nullable=True),
        _count("reserved_tokens"),
        _count("prompt_tokens"),
        _count("cached_tokens"),
        _count("completion_tokens"),
        sa.Column("estimated", sa.Boolean(), nullable=False),
        sa.Column("price_id", sa.String(40), nullable=True),
        _count("cost_picos"),
        sa.Column("currency", sa.String(3), nullable=False),
        _time("admitted_at"),
        _time("settled_at", nullable=True),
        _refers("usage_events", "tenant_id", "tenants"),
        _refers("usage_events", "key_id", "api_keys"),
        _refers("usage_events", "epoch_id", "epochs"),
        _refers("usage_events", "price_id", "prices"),
        _primary("usage_events"),
        sqlite_autoincrement=True,
    )
    usage, pending = sa.text("kind = 'usage'"), sa.text("status = 'pending'")
    for name, columns in {
        "ix_usage_events_tenant_id_admitted_at": ["tenant_id", "admitted_at"],
        "ix_usage_events_key_id_admitted_at": ["key_id", "admitted_at"],
        "ix_usage_events_admitted_at": ["admitted_at"],
    }.items():
        op.create_index(name, "usage_events", columns)
    op.create_index(
        "uq_usage_events_request_id",
        "usage_events",
        ["request_id"],
        unique=True,
        sqlite_where=usage,
        postgresql_where=usage,
    )
    op.create_index("ix_usage_events_pending", "usage_events", ["epoch_id"], sqlite_where=pending, postgresql_where=pending)


def _create_requests() -> None:
    op.create_table(
        "requests",
        _id(),
        _id("tenant_id"),
        _id("key_id"),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("endpoint", sa.String(80), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        _count("prompt_tokens"),
        _count("cached_tokens"),
        _count("completion_tokens"),
        sa.Column("kv_blocks", sa.Integer(), nullable=False),
        sa.Column("preemptions", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(20), nullable=True),
        sa.Column("error", sa.String(500), nullable=True),
        _count("queue_us", nullable=True),
        _count("ttft_us", nullable=True),
        _count("inter_token_p50_us", nullable=True),
        _count("decode_us", nullable=True),
        _time("admitted_at"),
        _time("first_token_at", nullable=True),
        _time("finished_at", nullable=True),
        _refers("requests", "tenant_id", "tenants"),
        _refers("requests", "key_id", "api_keys"),
        _primary("requests"),
    )
    op.create_index("ix_requests_admitted_at", "requests", ["admitted_at"])
    op.create_index("ix_requests_tenant_id_admitted_at", "requests", ["tenant_id", "admitted_at"])
