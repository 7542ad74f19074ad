"""Owners of limits: a tenant or a key, over all models or for one, or a model over all tenants. Values only."""

from __future__ import annotations

from typing import Literal

import msgspec

LimitScope = Literal["tenant", "key", "model"]

ALL_TENANTS = "model"  # `Owner.id` for the limits of a model over all tenants


class Owner(msgspec.Struct, frozen=True):
    """Owner of limits. `model` is None over all models; for a model over all tenants, `id` is ALL_TENANTS."""

    scope: LimitScope
    id: str
    model: str | None = None


def owners_of(tenant_id: str, key_id: str, model: str) -> tuple[Owner, ...]:
    """Return every owner whose limits, if it has any, a request of this key for this model counts towards."""
    return (
        Owner("tenant", tenant_id),
        Owner("tenant", tenant_id, model),
        Owner("key", key_id),
        Owner("key", key_id, model),
        Owner("model", ALL_TENANTS, model),
    )
