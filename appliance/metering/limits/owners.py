"""Whose limits: a tenant's or a key's, over all models or for one, or those of a model over all tenants. Values only."""

from __future__ import annotations

from typing import Literal

import msgspec

LimitScope = Literal["tenant", "key", "model"]

ALL_TENANTS = "model"  # stands where an id would, for the limits of a model over all tenants


class Owner(msgspec.Struct, frozen=True):
    """Whose limits: of a tenant or key over all models or for one, or of a model over all tenants. `id` is then ALL_TENANTS."""

    scope: LimitScope
    id: str
    model: str | None = None


def owners_of(tenant_id: str, key_id: str, model: str) -> tuple[Owner, ...]:
    """Return everybody whose limits the use of a model counts against, if he has any."""
    return (
        Owner("tenant", tenant_id),
        Owner("tenant", tenant_id, model),
        Owner("key", key_id),
        Owner("key", key_id, model),
        Owner("model", ALL_TENANTS, model),
    )
