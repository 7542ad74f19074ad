"""Whose request it is: tenants, keys, their limits, and the pair of both behind a request. Values only; no SQL."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from appliance.base.errors import ModelNotAllowed, ScopeNotAllowed
from appliance.tenancy.fields import LIMIT_MAX, UNSET, Unset, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a tenant or of one key; None is no limit at this level. `monthly_budget` is in micro-units of money.

    Raises InvalidValue naming `limits.<field>` for anything but whole numbers from 0 to LIMIT_MAX.
    """

    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    monthly_budget: int | None = None

    def __post_init__(self) -> None:
        for name in LIMIT_NAMES:
            value = getattr(self, name)
            if value is not None:
                check_whole(value, f"limits.{name}", 0, LIMIT_MAX)


LIMIT_NAMES = tuple(f.name for f in dataclasses.fields(Limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A team that is limited and billed as one. `allowed_models` None is every model."""

    id: str
    name: str
    tier: str
    weight: int
    limits: Limits
    allowed_models: tuple[str, ...] | None
    suspended: bool
    archived: bool
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What is known of a key; its secret is not. `prefix` is the public part, `gh_` and eight characters."""

    id: str
    tenant_id: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    limits: Limits
    allowed_models: tuple[str, ...] | None
    allowed_networks: tuple[str, ...] | None
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The tenant and the key behind a request."""

    tenant: Tenant
    key: ApiKey

    def may_use(self, model: str) -> bool:
        """Return whether tenant and key both allow `model`."""
        return all(allowed is None or model in allowed for allowed in (self.tenant.allowed_models, self.key.allowed_models))

    def check_model(self, model: str) -> None:
        """Raise ModelNotAllowed unless tenant and key both allow `model`."""
        if not self.may_use(model):
            raise ModelNotAllowed(f"this key may not use the model {model}", param="model")

    def check_scope(self, scope: str) -> None:
        """Raise ScopeNotAllowed unless the key has `scope`."""
        if scope not in self.key.scopes:
            raise ScopeNotAllowed(f"this key lacks the scope {scope}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChanges:
    """What a PATCH of a tenant changes. `limits` as a mapping changes the named limits, as `Limits` all of them."""

    name: str | Unset = UNSET
    tier: str | Unset = UNSET
    weight: int | Unset = UNSET
    limits: Limits | Mapping[str, int | None] | Unset = UNSET
    allowed_models: tuple[str, ...] | list[str] | Unset | None = UNSET
    suspended: bool | Unset = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChanges:
    """What a PATCH of a key changes. `limits` as in TenantChanges."""

    name: str | Unset = UNSET
    scopes: tuple[str, ...] | list[str] | Unset = UNSET
    expires_at: datetime | Unset | None = UNSET
    limits: Limits | Mapping[str, int | None] | Unset = UNSET
    allowed_models: tuple[str, ...] | list[str] | Unset | None = UNSET
    allowed_networks: tuple[str, ...] | list[str] | Unset | None = UNSET
