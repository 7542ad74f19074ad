"""Between rows and values of tenants and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import RowMapping

from appliance.base.errors import InvalidValue
from appliance.tenancy.fields import Unset
from appliance.tenancy.principals import LIMIT_NAMES, ApiKey, Limits, Tenant

_COLUMN_OF_LIMIT = {name: name for name in LIMIT_NAMES} | {"monthly_budget": "monthly_budget_micros"}


def limits_from_row(row: RowMapping) -> Limits:
    """Return the limits in a row of `tenants` or `api_keys`."""
    return Limits(**{name: row[column] for name, column in _COLUMN_OF_LIMIT.items()})


def limits_to_row(limits: Limits) -> dict[str, int | None]:
    """Return the columns that hold `limits`."""
    return {column: getattr(limits, name) for name, column in _COLUMN_OF_LIMIT.items()}


def changed_limits_to_row(change: Limits | Mapping[str, int | None] | Unset) -> dict[str, int | None]:
    """Return the columns that `change` names and no others, so that two changes at once cannot undo each other."""
    if isinstance(change, Unset):
        return {}
    if isinstance(change, Limits):
        return limits_to_row(change)
    for name in change:
        if name not in _COLUMN_OF_LIMIT:
            raise InvalidValue(f"limits.{name} is not a limit", param=f"limits.{name}")
    checked = limits_to_row(Limits(**change))
    return {_COLUMN_OF_LIMIT[name]: checked[_COLUMN_OF_LIMIT[name]] for name in change}


def tenant_from_row(row: RowMapping) -> Tenant:
    """Return the tenant of a row of `tenants`."""
    return Tenant(
        id=row["id"],
        name=row["name"],
        tier=row["tier"],
        weight=row["weight"],
        limits=limits_from_row(row),
        allowed_models=_optional_tuple(row["allowed_models"]),
        suspended=row["suspended"],
        archived=row["archived_at"] is not None,
        created_at=row["created_at"],
    )


def key_from_row(row: RowMapping) -> ApiKey:
    """Return the key of a row of `api_keys`."""
    return ApiKey(
        id=row["id"],
        tenant_id=row["tenant_id"],
        name=row["name"],
        prefix=row["prefix"],
        scopes=tuple(row["scopes"]),
        limits=limits_from_row(row),
        allowed_models=_optional_tuple(row["allowed_models"]),
        allowed_networks=_optional_tuple(row["allowed_networks"]),
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_used_at=row["last_used_at"],
        created_at=row["created_at"],
    )


def list_column(value: tuple[str, ...] | None) -> list[str] | None:
    """Return what a JSON column stores for an optional list."""
    return None if value is None else list(value)


def _optional_tuple(value: Any) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)
