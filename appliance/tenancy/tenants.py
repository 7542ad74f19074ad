"""The table of tenants: made, changed, archived, never deleted."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NameTaken, NotFound
from appliance.base.ids import new_id
from appliance.base.tables import tenants
from appliance.tenancy.fields import TIERS, WEIGHT_MAX, Unset, check_choice, check_name, check_names, check_whole
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, check_limit, decode_cursor, page_of
from appliance.tenancy.principals import Limits, Tenant, TenantChanges
from appliance.tenancy.rows import changed_limits_to_row, limits_to_row, list_column, tenant_from_row


class Tenants:
    """All tenants. Every change takes effect on the next request of any key of the tenant."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def create(
        self,
        *,
        name: str,
        tier: str = "standard",
        weight: int = 1,
        limits: Limits | None = None,
        allowed_models: tuple[str, ...] | list[str] | None = None,
    ) -> Tenant:
        """Return the new tenant. Raises NameTaken (also when an archived tenant has the name) and InvalidValue."""
        tenant = Tenant(
            id=new_id("tn"),
            name=check_name(name),
            tier=check_choice(tier, "tier", TIERS),
            weight=check_whole(weight, "weight", 1, WEIGHT_MAX),
            limits=limits or Limits(),
            allowed_models=None if allowed_models is None else check_names(allowed_models, "allowed_models"),
            suspended=False,
            archived=False,
            created_at=self._clock.now(),
        )
        try:
            async with self._db.writing() as connection:
                await connection.execute(insert(tenants).values(id=tenant.id, created_at=tenant.created_at, **_columns(tenant)))
        except IntegrityError as error:
            raise NameTaken(f"there is a tenant named {tenant.name!r} already", param="name") from error
        self._db.principals.bump()
        return tenant

    async def get(self, tenant_id: str) -> Tenant:
        """Return the tenant, archived or not. Raises NotFound."""
        async with self._db.reading() as connection:
            return await _get(connection, tenant_id)

    async def find(self, name: str) -> Tenant | None:
        """Return the tenant of this name, archived or not."""
        async with self._db.reading() as connection:
            row = (await connection.execute(select(tenants).where(tenants.c.name == name.strip()))).mappings().first()
        return None if row is None else tenant_from_row(row)

    async def list(
        self, limit: int = PAGE_ROWS_DEFAULT, cursor: str | None = None, *, include_archived: bool = False
    ) -> Page[Tenant]:
        """Return tenants in the order they were made."""
        query = select(tenants).order_by(tenants.c.id).limit(check_limit(limit) + 1)
        if cursor is not None:
            (last_id,) = decode_cursor("tenants", cursor, [str])
            query = query.where(tenants.c.id > last_id)
        if not include_archived:
            query = query.where(tenants.c.archived_at.is_(None))
        async with self._db.reading() as connection:
            rows = (await connection.execute(query)).mappings().all()
        return page_of([tenant_from_row(row) for row in rows], limit, "tenants", lambda tenant: [tenant.id])

    async def update(self, tenant_id: str, changes: TenantChanges) -> Tenant:
        """Return the tenant after `changes`. Raises NotFound, NameTaken, and InvalidValue (also for an archived tenant)."""
        columns = _changed_columns(changes)
        try:
            async with self._db.writing() as connection:
                if columns:
                    await connection.execute(update(tenants).where(_unarchived(tenant_id)).values(**columns))
                tenant = await _get(connection, tenant_id)
        except IntegrityError as error:
            raise NameTaken("another tenant has this name", param="name") from error
        self._db.principals.bump()
        if tenant.archived:
            raise InvalidValue("an archived tenant cannot be changed", param="id")
        return tenant

    async def archive(self, tenant_id: str) -> Tenant:
        """Return the tenant, archived: its keys are refused from now on, its records stay. Raises NotFound; idempotent."""
        async with self._db.writing() as connection:
            await connection.execute(update(tenants).where(_unarchived(tenant_id)).values(archived_at=self._clock.now()))
            tenant = await _get(connection, tenant_id)
        self._db.principals.bump()
        return tenant


def _unarchived(tenant_id: str) -> ColumnElement[bool]:
    return (tenants.c.id == tenant_id) & tenants.c.archived_at.is_(None)


async def _get(connection: AsyncConnection, tenant_id: str) -> Tenant:
    row = (await connection.execute(select(tenants).where(tenants.c.id == tenant_id))).mappings().first()
    if row is None:
        raise NotFound("no such tenant", param="tenant_id")
    return tenant_from_row(row)


def _columns(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "tier": tenant.tier,
        "weight": tenant.weight,
        "allowed_models": list_column(tenant.allowed_models),
        "suspended": tenant.suspended,
        **limits_to_row(tenant.limits),
    }


def _changed_columns(changes: TenantChanges) -> dict[str, Any]:
    """Return the checked columns that `changes` names."""
    columns: dict[str, Any] = {**changed_limits_to_row(changes.limits)}
    if not isinstance(changes.name, Unset):
        columns["name"] = check_name(changes.name)
    if not isinstance(changes.tier, Unset):
        columns["tier"] = check_choice(changes.tier, "tier", TIERS)
    if not isinstance(changes.weight, Unset):
        columns["weight"] = check_whole(changes.weight, "weight", 1, WEIGHT_MAX)
    if not isinstance(changes.allowed_models, Unset):
        models = changes.allowed_models
        columns["allowed_models"] = None if models is None else list_column(check_names(models, "allowed_models"))
    if not isinstance(changes.suspended, Unset):
        if not isinstance(changes.suspended, bool):
            raise InvalidValue("suspended must be true or false", param="suspended")
        columns["suspended"] = changes.suspended
    return columns
