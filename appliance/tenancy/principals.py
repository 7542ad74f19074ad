"""Value types: tenants, keys, their limits and changes, and the principal (tenant and key) of a request. No SQL."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from appliance.base.change_count import ChangeCount
from appliance.base.errors import ExpiredApiKey, InvalidApiKey, ModelNotAllowed, ScopeNotAllowed, TenantSuspended
from appliance.tenancy.fields import INFERENCE_SCOPE, LIMIT_MAX, UNSET, Unset, check_whole
from appliance.tenancy.networks import check_address, parse_networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a tenant, key or model; None means no limit at this level. `monthly_budget` is in micro-units of the currency.

    Raises InvalidValue naming `limits.<field>` unless a limit is None or an integer from 0 to LIMIT_MAX.
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
ModelLimits = Mapping[str, Limits]
"""Limits of a tenant or key per model, by model name; they apply in addition to those for all models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A team that is limited and billed as one. `allowed_models` None allows every model.

    `limit_mode` is enforce or shadow (requests over a limit are counted but served). `cut_at_budget` ends running answers when
    the monthly budget is spent. `currency` None is the appliance's currency. `billing` is the billed party on invoices.
    `alert_percents` are the percentages of a budget at which alerts are sent; None is the appliance's default.
    """

    id: str
    name: str
    tier: str
    weight: int
    limits: Limits
    allowed_models: tuple[str, ...] | None
    suspended: bool
    archived: bool
    created_at: datetime
    model_limits: ModelLimits = field(default_factory=dict)
    limit_mode: str = "enforce"
    cut_at_budget: bool = False
    currency: str | None = None
    billing: Mapping[str, str] | None = None
    alert_percents: tuple[int, ...] | None = None
    archived_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key without its secret, which is not stored. `prefix` is the public part, `gh_` and eight characters.

    `replaced_by` is the id of its successor after a rotation.
    """

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
    model_limits: ModelLimits = field(default_factory=dict)
    limit_mode: str = "enforce"
    replaced_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The tenant and the key behind a request.

    `change_count` is the value of the change counter of keys and tenants when they were read, None if unknown.
    """

    tenant: Tenant
    key: ApiKey
    change_count: int | None = field(default=None, compare=False)

    def is_current(self, changes: ChangeCount) -> bool:
        """Return whether neither key nor tenant has changed since they were read."""
        return changes.is_current(self.change_count, self.tenant.id, self.key.id)

    def check_usable(self, now: datetime) -> None:
        """Raise InvalidApiKey, ExpiredApiKey or TenantSuspended if the key may not be used for any request."""
        if self.key.revoked_at is not None:
            raise unknown_key()
        if self.key.expires_at is not None and self.key.expires_at <= now:
            raise ExpiredApiKey("the API key has expired")
        if self.tenant.suspended or self.tenant.archived:
            raise TenantSuspended("the tenant of this key is " + ("archived" if self.tenant.archived else "suspended"))

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

    def check_inference(self, now: datetime, model: str | None, *, address: str | None = None) -> None:
        """Raise the error that a request for `model` (None: no such model) gets at `now` because of its key or tenant, in the
        order in which `Keys.authenticate` and the API check it. `address` None: from wherever the key may be used."""
        self.check_usable(now)
        if address is not None:
            check_address(address, parse_networks(self.key.allowed_networks))
        self.check_scope(INFERENCE_SCOPE)
        if model is not None:
            self.check_model(model)


def unknown_key() -> InvalidApiKey:
    """Return the error for an unknown or revoked key, the same for both, so that callers cannot tell them apart."""
    return InvalidApiKey("the API key is not known or was revoked")


LimitChanges = Limits | Mapping[str, int | None]
"""Limits to set: all of them (`Limits`), or only the named ones (a mapping, in which None removes a limit)."""
ModelLimitChanges = Mapping[str, LimitChanges]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChanges:
    """Fields of a tenant to set; UNSET fields keep their value, or get the default of a new tenant.

    `limits` sets the limits that it names; `model_limits` replaces the limits of all models.
    """

    name: str | Unset = UNSET
    tier: str | Unset = UNSET
    weight: int | Unset = UNSET
    limits: LimitChanges | Unset = UNSET
    model_limits: ModelLimitChanges | Unset | None = UNSET
    limit_mode: str | Unset = UNSET
    cut_at_budget: bool | Unset = UNSET
    currency: str | Unset | None = UNSET
    billing: Mapping[str, str | None] | Unset | None = UNSET
    alert_percents: Sequence[int] | Unset | None = UNSET
    allowed_models: Sequence[str] | Unset | None = UNSET
    suspended: bool | Unset = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChanges:
    """Fields of a key to set, as in TenantChanges."""

    name: str | Unset = UNSET
    scopes: Sequence[str] | Unset = UNSET
    expires_at: datetime | Unset | None = UNSET
    limits: LimitChanges | Unset = UNSET
    model_limits: ModelLimitChanges | Unset | None = UNSET
    limit_mode: str | Unset = UNSET
    allowed_models: Sequence[str] | Unset | None = UNSET
    allowed_networks: Sequence[str] | Unset | None = UNSET
