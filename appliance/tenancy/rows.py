"""Converts database rows of tenants and keys to values, and changes of them to columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import RowMapping

from appliance.base.errors import InvalidValue
from appliance.tenancy.fields import LIMIT_MAX, MODELS_LIMITED_MAX, Unset, check_name, check_whole
from appliance.tenancy.principals import (
    LIMIT_NAMES,
    ApiKey,
    KeyChanges,
    LimitChanges,
    Limits,
    ModelLimits,
    Tenant,
    TenantChanges,
)

T = TypeVar("T")
_COLUMN_OF_LIMIT = {name: name for name in LIMIT_NAMES} | {"monthly_budget": "monthly_budget_micros"}


def limits_from_row(row: RowMapping) -> Limits:
    """Return the limits in a row of `tenants` or `api_keys`."""
    return Limits(**{name: row[column] for name, column in _COLUMN_OF_LIMIT.items()})


def limits_to_row(limits: Limits) -> dict[str, int | None]:
    """Return the columns that hold `limits`."""
    return {column: getattr(limits, name) for name, column in _COLUMN_OF_LIMIT.items()}


def changed_limits_to_row(change: LimitChanges | Unset) -> dict[str, int | None]:
    """Return only the columns that `change` names, so that concurrent changes of other limits are not undone."""
    if isinstance(change, Unset):
        return {}
    if isinstance(change, Limits):
        return limits_to_row(change)
    for name in change:
        if name not in _COLUMN_OF_LIMIT:
            raise InvalidValue(f"limits.{name} is not a limit", param=f"limits.{name}")
    checked = limits_to_row(Limits(**change))
    return {_COLUMN_OF_LIMIT[name]: checked[_COLUMN_OF_LIMIT[name]] for name in change}


def changed_columns(changes: TenantChanges | KeyChanges, checks: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return the columns that `changes` sets, with the values returned by `checks`, which raise InvalidValue."""
    named = {name: value for name in checks if not isinstance(value := getattr(changes, name), Unset)}
    return {**changed_limits_to_row(changes.limits), **{name: checks[name](value) for name, value in named.items()}}


def optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a check that also accepts None."""
    return lambda value: None if value is None else check(value)


def model_limits_from_row(row: RowMapping) -> dict[str, Limits]:
    """Return the limits per model in a row of `tenants` or `api_keys`."""
    return {model: Limits(**limits) for model, limits in (row["model_limits"] or {}).items()}


def model_limits_to_row(limits: ModelLimits) -> dict[str, dict[str, int]] | None:
    """Return the value of the column `model_limits`: only limits that are set, None when there are no models."""
    return {model: _set_limits(of_model) for model, of_model in limits.items()} or None


def check_model_limits(value: object) -> dict[str, Limits]:
    """Return the limits by model name, without models that have none.

    Raises InvalidValue naming `model_limits.<model>.<limit>`.
    """
    if not isinstance(value, Mapping) or len(value) > MODELS_LIMITED_MAX:
        raise InvalidValue(f"model_limits must map at most {MODELS_LIMITED_MAX} models to limits", param="model_limits")
    checked = {check_name(model, "model_limits"): _limits_of(model, limits) for model, limits in value.items()}
    return {model: limits for model, limits in checked.items() if limits != Limits()}


def _limits_of(model: str, value: object) -> Limits:
    if isinstance(value, Limits):
        return value
    param = f"model_limits.{model}"
    if not isinstance(value, Mapping):
        raise InvalidValue(f"{param} must be an object of limits", param=param)
    for name, limit in value.items():
        if name not in _COLUMN_OF_LIMIT:
            raise InvalidValue(f"{param}.{name} is not a limit", param=f"{param}.{name}")
        if limit is not None:
            check_whole(limit, f"{param}.{name}", 0, LIMIT_MAX)
    return Limits(**value)


def _set_limits(limits: Limits) -> dict[str, int]:
    return {name: value for name in LIMIT_NAMES if (value := getattr(limits, name)) is not None}


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
        model_limits=model_limits_from_row(row),
        limit_mode=row["limit_mode"],
        cut_at_budget=row["cut_at_budget"],
        currency=row["currency"],
        billing=row["billing"],
        alert_percents=_optional_tuple(row["alert_percents"]),
        archived_at=row["archived_at"],
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
        model_limits=model_limits_from_row(row),
        limit_mode=row["limit_mode"],
        replaced_by=row["replaced_by"],
    )


def _optional_tuple(value: Sequence[T] | None) -> tuple[T, ...] | None:
    return None if value is None else tuple(value)
