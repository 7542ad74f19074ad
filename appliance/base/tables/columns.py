"""Building blocks of the tables: metadata, UTC datetimes, sequence columns, and column groups shared by several tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Column, DateTime, Dialect, Integer, MetaData, TypeDecorator

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC datetime in both databases. SQLite drops the time zone, so it is restored on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return `value` in UTC. Raises ValueError if it is naive."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a time zone cannot be stored")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy's signature
        """Return the stored time as an aware UTC datetime."""
        if value is None:
            return None
        stored: datetime = value
        return stored.replace(tzinfo=UTC) if stored.tzinfo is None else stored.astimezone(UTC)


def limit_columns() -> list[Column[Any]]:
    """Return the limit columns of tenants, keys and models. NULL means no limit at this level."""
    names = ("tokens_per_minute", "requests_per_minute", "concurrent_requests", "tokens_per_day", "monthly_budget_micros")
    return [Column(name, BigInteger, nullable=True) for name in names]


def sum_columns() -> list[Column[Any]]:
    """Return the columns of sums of billed events. The cost is split in two, so that no sum of either part can exceed 64 bits:
    cost = cost_high * 10^9 + cost_low."""
    tokens = ("prompt_tokens", "cached_tokens", "completion_tokens", "rejected_tokens")
    return [Column(name, BigInteger, nullable=False) for name in ("requests", *tokens, "cost_high", "cost_low")]


def optional_json(name: str) -> Column[Any]:
    """Return a nullable JSON column that stores None as SQL NULL."""
    return Column(name, JSON(none_as_null=True), nullable=True)


# Autoincrementing primary keys: BIGINT, but INTEGER on SQLite, which autoincrements only that.
Sequence = BigInteger().with_variant(Integer, "sqlite")
