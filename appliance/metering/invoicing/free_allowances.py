"""The table of free allowances: an amount per month that a tenant does not pay, valid until a row with a later month.

Closed months keep their allowance; the last closed month is all that this module reads of invoices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import RowMapping, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.counters import POSTING, lock
from appliance.base.db import Database
from appliance.base.errors import InvoiceClosed
from appliance.base.ids import new_id
from appliance.base.tables import free_allowances, invoices
from appliance.metering.calendar import first_day
from appliance.tenancy import audit
from appliance.tenancy.access import Access
from appliance.tenancy.fields import LIMIT_MAX, check_whole
from appliance.tenancy.roles import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeAllowance:
    """`monthly_micros`, in the tenant's currency, are free in `first_month` and in each later month."""

    id: str
    tenant_id: str
    first_month: str
    monthly_micros: int
    created_at: datetime


class FreeAllowances:
    """The allowances of all tenants."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def set(self, tenant_id: str, first_month: str, monthly_micros: int, *, access: Access) -> FreeAllowance:
        """Set and return the allowance from `first_month` on, replacing one with the same `first_month`; 0 ends an earlier one.

        Raises NotFound, RoleNotAllowed, InvalidValue, and InvoiceClosed for a closed month.
        """
        access.require(Action.BILLING, tenant_id)
        first_day(first_month, "first_month")
        check_whole(monthly_micros, "monthly_micros", 0, LIMIT_MAX)
        async with self._db.writing() as connection:
            await lock(connection, POSTING)  # no month can be closed between the check and the write
            await _check_not_closed(connection, tenant_id, first_month)
            before = await _find(connection, tenant_id, first_month)
            allowance = FreeAllowance(
                id=new_id("free") if before is None else before.id,
                tenant_id=tenant_id,
                first_month=first_month,
                monthly_micros=monthly_micros,
                created_at=self._clock.now(),
            )
            await _store(connection, allowance, is_new=before is None)
            await audit.record(
                connection,
                self._clock,
                "allowance.set",
                "tenant",
                tenant_id,
                tenant_id=tenant_id,
                before={} if before is None else audit.recorded_fields(before, "id", "created_at"),
                after=audit.recorded_fields(allowance, "id", "created_at"),
            )
        return allowance

    async def list(self, tenant_id: str, *, access: Access) -> Sequence[FreeAllowance]:
        """Return the allowances of a tenant in the order of their months. Raises NotFound and RoleNotAllowed."""
        access.require(Action.INVOICES, tenant_id)
        async with self._db.reading() as connection:
            return (await read_allowances(connection, [tenant_id]))[tenant_id]


async def read_allowances(connection: AsyncConnection, tenant_ids: Collection[str]) -> dict[str, list[FreeAllowance]]:
    """Return the allowances of tenants in the order of their months, by tenant id, read in the transaction of `connection`."""
    columns = free_allowances.c
    query = select(free_allowances).where(columns.tenant_id.in_(tenant_ids)).order_by(columns.first_month)
    found: dict[str, list[FreeAllowance]] = {tenant_id: [] for tenant_id in tenant_ids}
    for row in (await connection.execute(query)).mappings():
        found[row["tenant_id"]].append(_from_row(row))
    return found


def allowance_in(allowances: Sequence[FreeAllowance], month: str) -> int:
    """Return the allowance in force in `month`, in micro-units; `allowances` are ordered by month."""
    in_force = [allowance.monthly_micros for allowance in allowances if allowance.first_month <= month]
    return in_force[-1] if in_force else 0


async def _check_not_closed(connection: AsyncConnection, tenant_id: str, month: str) -> None:
    columns = invoices.c
    query = select(func.max(columns.month)).where(columns.tenant_id == tenant_id, columns.state == "closed")
    last_closed = (await connection.execute(query)).scalar_one()
    if last_closed is not None and month <= last_closed:
        message = f"{last_closed} is closed: an allowance can begin in the month after it at the earliest"
        raise InvoiceClosed(message, param="first_month")


async def _find(connection: AsyncConnection, tenant_id: str, month: str) -> FreeAllowance | None:
    columns = free_allowances.c
    query = select(free_allowances).where(columns.tenant_id == tenant_id, columns.first_month == month)
    row = (await connection.execute(query)).mappings().first()
    return None if row is None else _from_row(row)


async def _store(connection: AsyncConnection, allowance: FreeAllowance, *, is_new: bool) -> None:
    values = {column.name: getattr(allowance, column.name) for column in free_allowances.columns}
    if is_new:
        await connection.execute(insert(free_allowances).values(**values))
    else:
        await connection.execute(update(free_allowances).where(free_allowances.c.id == allowance.id).values(**values))


def _from_row(row: RowMapping) -> FreeAllowance:
    return FreeAllowance(**{column.name: row[column.name] for column in free_allowances.columns})
