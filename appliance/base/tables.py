"""The tables of both databases, as SQLAlchemy Core. Queries stand with the modules that own the rows, not here.

Ids are text, times are UTC, tokens and money are 64-bit integers (pico-units unless the name says otherwise), lists are JSON.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    TypeDecorator,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time in both databases. SQLite forgets the zone, so it is put back on reading; naive values are refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return `value` in UTC; raise ValueError if it has no zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone cannot be stored")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy's signature
        """Return the stored time as aware UTC."""
        if value is None:
            return None
        stored: datetime = value
        return stored.replace(tzinfo=UTC) if stored.tzinfo is None else stored.astimezone(UTC)


def _limits() -> list[Column[Any]]:
    """Return the limit columns that tenants and keys share; NULL means no limit at this level."""
    names = ("tokens_per_minute", "requests_per_minute", "concurrent_requests", "tokens_per_day", "monthly_budget_micros")
    return [Column(name, BigInteger, nullable=True) for name in names]


# A text primary key; sequences where order matters are BIGINT (INTEGER on SQLite, where only that auto-increments).
_Sequence = BigInteger().with_variant(Integer, "sqlite")

tenants = Table(
    "tenants",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("tier", String(20), nullable=False),
    Column("weight", Integer, nullable=False),
    *_limits(),
    Column("allowed_models", JSON(none_as_null=True), nullable=True),
    Column("suspended", Boolean, nullable=False),
    Column("archived_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False, index=True),
    Column("name", String(200), nullable=False),
    Column("prefix", String(20), nullable=False, unique=True),
    Column("digest", String(64), nullable=False),
    Column("scopes", JSON(none_as_null=True), nullable=False),
    *_limits(),
    Column("allowed_models", JSON(none_as_null=True), nullable=True),
    Column("allowed_networks", JSON(none_as_null=True), nullable=True),
    Column("expires_at", UtcDateTime, nullable=True),
    Column("revoked_at", UtcDateTime, nullable=True),
    Column("last_used_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
)

members = Table(
    "members",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("email", String(320), nullable=False, unique=True),
    Column("password_hash", String(200), nullable=False),
    Column("role", String(20), nullable=False),
    Column("disabled_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("token_hash", String(64), primary_key=True),
    Column("member_id", ForeignKey("members.id"), nullable=False, index=True),
    Column("csrf_token", String(64), nullable=False),
    Column("user_agent", String(400), nullable=False),
    Column("address", String(64), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("last_seen_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
)

admin_tokens = Table(
    "admin_tokens",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("digest", String(64), nullable=False, unique=True),
    Column("role", String(20), nullable=False),
    Column("revoked_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
)

prices = Table(
    "prices",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("model", String(200), nullable=False),
    Column("effective_from", UtcDateTime, nullable=False),
    Column("currency", String(3), nullable=False),
    Column("prompt", BigInteger, nullable=False),
    Column("cached_prompt", BigInteger, nullable=False),
    Column("completion", BigInteger, nullable=False),
    Column("batch_percent", Integer, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("model", "effective_from"),
)

# One row per start of the gateway. A pending event of an epoch that is not the running one belongs to a dead process.
epochs = Table(
    "epochs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("version", String(40), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_at", UtcDateTime, nullable=False),
    Column("ended_at", UtcDateTime, nullable=True),
)

# pending -> posted | voided | recovered, once, by a conditional UPDATE on status. Money columns change in that update alone;
# while pending, the token columns are checkpoints of what the engine has counted so far.
usage_events = Table(
    "usage_events",
    metadata,
    Column("id", _Sequence, primary_key=True, autoincrement=True),
    Column("request_id", String(40), nullable=False),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("key_id", ForeignKey("api_keys.id"), nullable=False),
    Column("epoch_id", ForeignKey("epochs.id"), nullable=False),
    Column("model", String(200), nullable=False),
    Column("endpoint", String(80), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("status", String(20), nullable=False),
    Column("finish_reason", String(20), nullable=True),
    Column("reserved_tokens", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("estimated", Boolean, nullable=False),
    Column("price_id", ForeignKey("prices.id"), nullable=True),
    Column("cost_picos", BigInteger, nullable=False),
    Column("currency", String(3), nullable=False),
    Column("admitted_at", UtcDateTime, nullable=False),
    Column("settled_at", UtcDateTime, nullable=True),
    Index(
        "uq_usage_events_request_id",
        "request_id",
        unique=True,
        sqlite_where=text("kind = 'usage'"),
        postgresql_where=text("kind = 'usage'"),
    ),
    Index("ix_usage_events_tenant_id_admitted_at", "tenant_id", "admitted_at"),
    Index("ix_usage_events_key_id_admitted_at", "key_id", "admitted_at"),
    Index("ix_usage_events_admitted_at", "admitted_at"),
    Index(
        "ix_usage_events_pending",
        "epoch_id",
        sqlite_where=text("status = 'pending'"),
        postgresql_where=text("status = 'pending'"),
    ),
    sqlite_autoincrement=True,
)

# What the console shows of a past request. Prunable; nothing here is money.
requests = Table(
    "requests",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("key_id", ForeignKey("api_keys.id"), nullable=False),
    Column("model", String(200), nullable=False),
    Column("endpoint", String(80), nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("kv_blocks", Integer, nullable=False),
    Column("preemptions", Integer, nullable=False),
    Column("finish_reason", String(20), nullable=True),
    Column("error", String(500), nullable=True),
    Column("queue_us", BigInteger, nullable=True),
    Column("ttft_us", BigInteger, nullable=True),
    Column("inter_token_p50_us", BigInteger, nullable=True),
    Column("decode_us", BigInteger, nullable=True),
    Column("admitted_at", UtcDateTime, nullable=False),
    Column("first_token_at", UtcDateTime, nullable=True),
    Column("finished_at", UtcDateTime, nullable=True),
    Index("ix_requests_admitted_at", "admitted_at"),
    Index("ix_requests_tenant_id_admitted_at", "tenant_id", "admitted_at"),
)
