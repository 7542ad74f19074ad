"""The store of tenants, which are created, changed and archived, but never deleted."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, exists, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import Conflict, InvalidValue, NameTaken, NotFound
from appliance.base.ids import new_id
from appliance.base.tables import tenants, usage_events
from appliance.tenancy.access import Access
from appliance.tenancy.audit import record, recorded_fields
from appliance.tenancy.fields import (
    LIMIT_MODES,
    TIERS,
    WEIGHT_MAX,
    check_alert_percents,
    check_billing,
    check_choice,
    check_currency,
    check_flag,
    check_name,
    check_names,
    check_whole,
    lookalike_form,
)
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, read_page
from appliance.tenancy.principals import Limits, Tenant, TenantChanges
from appliance.tenancy.roles import Action
from appliance.tenancy.rows import (
    changed_columns,
    check_model_limits,
    model_limits_to_row,
    optional,
    tenant_from_row,
)

DEFAULT_TERMS = TenantChanges()


class Tenants:
    """The store of tenants. A change applies from the next request of the tenant on."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def create(self, name: str, terms: TenantChanges = DEFAULT_TERMS, *, access: Access) -> Tenant:
        """Create a tenant. Raises RoleNotAllowed, NameTaken (also if an archived tenant has the name) and InvalidValue."""
        access.require(Action.WRITE)
        columns = _DEFAULT_COLUMNS | changed_columns(dataclasses.replace(terms, name=name), _CHECKS)
        tenant_id = new_id("tn")
        try:
            async with self._db.changing_principals(tenant_id) as connection:
                await _check_name_free(connection, columns["name"])
                await connection.execute(insert(tenants).values(id=tenant_id, created_at=self._clock.now(), **columns))
                tenant = await _get(connection, tenant_id, access, Action.WRITE)
                await self._record(connection, "tenant.create", None, tenant)
        except IntegrityError as error:  # a concurrent transaction has taken the name since the check
            raise NameTaken(f"there is a tenant named {columns['name']!r} already", param="name") from error
        return tenant

    async def get(self, tenant_id: str, *, access: Access, action: Action = Action.READ) -> Tenant:
        """Return the tenant, archived or not. Raises NotFound, also for an invisible tenant, and RoleNotAllowed."""
        async with self._db.reading() as connection:
            return await _get(connection, tenant_id, access, action)

    async def find(self, name: str, *, access: Access) -> Tenant | None:
        """Return the tenant with this name, archived or not, if it exists and is visible to `access`."""
        query = access.narrow(select(tenants), tenants.c.id).where(tenants.c.name == name.strip())
        async with self._db.reading() as connection:
            row = (await connection.execute(query)).mappings().first()
        return None if row is None else tenant_from_row(row)

    async def currencies(self, default: str) -> builtins.list[str]:
        """Return the currencies of all tenants that are not archived; `default` is that of tenants without their own."""
        query = select(tenants.c.currency).where(tenants.c.archived_at.is_(None)).distinct()
        async with self._db.reading() as connection:
            found = (await connection.execute(query)).scalars().all()
        return sorted({currency or default for currency in found})

    async def list(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        *,
        include_archived: bool = False,
        text: str | None = None,
        access: Access,
    ) -> Page[Tenant]:
        """Return the tenants visible to `access` in order of creation; with `text`, those whose name contains it."""
        query = access.narrow(select(tenants), tenants.c.id)
        if not include_archived:
            query = query.where(tenants.c.archived_at.is_(None))
        if text is not None:
            query = query.where(tenants.c.name.icontains(text, autoescape=True))
        return await read_page(self._db, "tenants", query, tenants.c.id, limit, cursor, tenant_from_row)

    async def update(self, tenant_id: str, changes: TenantChanges, *, access: Access) -> Tenant:
        """Apply `changes` and return the tenant.

        Raises NotFound, RoleNotAllowed, NameTaken, Conflict for an archived tenant, and InvalidValue, also for a change of the
        currency once usage is recorded (`_currency_can_change`).
        """
        columns = changed_columns(changes, _CHECKS)
        try:
            async with self._db.changing_principals(tenant_id) as connection:
                before = await _get(connection, tenant_id, access, Action.WRITE, lock=True)
                if columns.get("name", before.name) != before.name:
                    await _check_name_free(connection, columns["name"], except_id=tenant_id)
                if columns:
                    statement = update(tenants).where(_is_unarchived(tenant_id), *_currency_can_change(tenant_id, columns))
                    await connection.execute(statement.values(**columns))
                tenant = await _get(connection, tenant_id, access, Action.WRITE)
                await self._record(connection, "tenant.update", before, tenant)
        except IntegrityError as error:
            raise NameTaken(f"there is a tenant named {columns.get('name')!r} already", param="name") from error
        if tenant.archived:
            raise Conflict("an archived tenant cannot be changed", param="id")
        if columns.get("currency", tenant.currency) != tenant.currency:
            message = "currency cannot be changed after the first request, except from null to one that the usage has"
            raise InvalidValue(message, param="currency")
        return tenant

    async def limit_model(self, tenant_id: str, model: str, changes: Mapping[str, int | None], *, access: Access) -> Tenant:
        """Change the tenant's limits for one model; other models keep theirs. Raises as `update`."""
        async with self._db.changing_principals(tenant_id) as connection:
            before = await _get(connection, tenant_id, access, Action.WRITE, lock=True)
            if before.archived:
                raise Conflict("an archived tenant cannot be changed", param="id")
            limits = dataclasses.replace(before.model_limits.get(model, Limits()), **changes)
            column = model_limits_to_row(check_model_limits({**before.model_limits, model: limits}))
            await connection.execute(update(tenants).where(tenants.c.id == tenant_id).values(model_limits=column))
            tenant = await _get(connection, tenant_id, access, Action.WRITE)
            await self._record(connection, "tenant.update", before, tenant)
        return tenant

    async def archive(self, tenant_id: str, *, access: Access) -> Tenant:
        """Archive the tenant and return it: its keys are refused, its records are kept. Idempotent.

        Raises NotFound and RoleNotAllowed.
        """
        async with self._db.changing_principals(tenant_id) as connection:
            before = await _get(connection, tenant_id, access, Action.WRITE, lock=True)
            await connection.execute(update(tenants).where(_is_unarchived(tenant_id)).values(archived_at=self._clock.now()))
            tenant = await _get(connection, tenant_id, access, Action.WRITE)
            await self._record(connection, "tenant.archive", before, tenant)
        return tenant

    async def _record(self, connection: AsyncConnection, action: str, before: Tenant | None, after: Tenant) -> None:
        was, now = recorded_fields(before), recorded_fields(after)
        await record(connection, self._clock, action, "tenant", after.id, tenant_id=after.id, before=was, after=now)


def _is_unarchived(tenant_id: str) -> ColumnElement[bool]:
    return (tenants.c.id == tenant_id) & tenants.c.archived_at.is_(None)


def _currency_can_change(tenant_id: str, columns: Mapping[str, Any]) -> list[ColumnElement[bool]]:
    """Return the condition for setting the currency: it stays the same, or the tenant has no usage yet, or the tenant had no
    currency of its own and already has usage in this one."""
    if "currency" not in columns:
        return []
    currency = columns["currency"]
    recorded = select(usage_events.c.id).where(usage_events.c.tenant_id == tenant_id)
    was_default = tenants.c.currency.is_(None) & exists(recorded.where(usage_events.c.currency == currency))
    return [or_(tenants.c.currency.is_not_distinct_from(currency), ~exists(recorded), was_default)]


async def _check_name_free(connection: AsyncConnection, name: str, *, except_id: str | None = None) -> None:
    """Raise NameTaken if another tenant, archived or not, has a name that looks like `name`."""
    form = lookalike_form(name)
    for row in await connection.execute(select(tenants.c.id, tenants.c.name, tenants.c.archived_at)):
        if row.id != except_id and lookalike_form(row.name) == form:
            what = "a tenant" if row.archived_at is None else "an archived tenant, whose invoices keep its name,"
            raise NameTaken(f"there is {what} named {row.name!r} already", param="name")


async def _get(connection: AsyncConnection, tenant_id: str, access: Access, action: Action, *, lock: bool = False) -> Tenant:
    access.require(action, tenant_id)
    query = select(tenants).where(tenants.c.id == tenant_id)
    row = (await connection.execute(query.with_for_update(key_share=True) if lock else query)).mappings().first()
    if row is None:
        raise NotFound("no such tenant", param="tenant_id")
    return tenant_from_row(row)


_DEFAULT_COLUMNS: dict[str, Any] = {"tier": "standard", "weight": 1, "suspended": False}
"""Defaults for a new tenant; the table defines those of the other columns."""
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "name": check_name,
    "tier": lambda value: check_choice(value, "tier", TIERS),
    "weight": lambda value: check_whole(value, "weight", 1, WEIGHT_MAX),
    "model_limits": optional(lambda value: model_limits_to_row(check_model_limits(value))),
    "limit_mode": lambda value: check_choice(value, "limit_mode", LIMIT_MODES),
    "cut_at_budget": lambda value: check_flag(value, "cut_at_budget"),
    "currency": optional(check_currency),
    "billing": optional(check_billing),
    "alert_percents": optional(lambda value: list(check_alert_percents(value))),
    "allowed_models": optional(lambda value: list(check_names(value, "allowed_models"))),
    "suspended": lambda value: check_flag(value, "suspended"),
}
