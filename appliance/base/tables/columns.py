"""What the columns of every table are made of: the metadata, aware UTC times, sequences, and the groups that tables share."""

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


def limit_columns() -> list[Column[Any]]:
    """Return the limit columns that tenants, keys and models share; NULL means no limit at this level."""
    names = ("tokens_per_minute", "requests_per_minute", "concurrent_requests", "tokens_per_day", "monthly_budget_micros")
    return [Column(name, BigInteger, nullable=True) for name in names]


def sum_columns() -> list[Column[Any]]:
    """Return the columns that every sum of settled events has. The cost is two halves, so that no sum of them can pass 64 bits:
    cost = cost_high * 10^9 + cost_low."""
    tokens = ("prompt_tokens", "cached_tokens", "completion_tokens", "rejected_tokens")
    return [Column(name, BigInteger, nullable=False) for name in ("requests", *tokens, "cost_high", "cost_low")]


def optional_json(name: str) -> Column[Any]:
    """Return a JSON column in which nothing is SQL's NULL."""
    return Column(name, JSON(none_as_null=True), nullable=True)


# Sequences where order matters are BIGINT; INTEGER on SQLite, where only that counts up by itself.
Sequence = BigInteger().with_variant(Integer, "sqlite")
