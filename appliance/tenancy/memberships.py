"""The store of memberships: who belongs to which tenant with which role, and the access that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, Select, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.acting import Actor
from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NameTaken, NotFound, RoleNotAllowed
from appliance.base.tables import members, memberships, tenants
from appliance.tenancy import audit
from appliance.tenancy.access import Access
from appliance.tenancy.mailboxes import disable_alerts
from appliance.tenancy.members import Member, Members, check_email
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, read_page
from appliance.tenancy.roles import Action, Role, TenantRole, check_tenant_role
from appliance.tenancy.secrets import new_password

MEMBERS_OF_TENANT_MAX = 1000
TENANTS_OF_MEMBER_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A member's role in one tenant. `disabled` and `password_temporary` describe the member."""

    member_id: str
    email: str
    tenant_id: str
    role: TenantRole
    disabled: bool
    password_temporary: bool
    created_at: datetime


class Memberships:
    """The store of memberships. Each request reads those of its caller, so that a change applies from the next request on."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def access(self, member: Member, actor: Actor) -> Access:
        """Return the access of an authenticated member."""
        query = select(memberships.c.tenant_id, memberships.c.role).where(memberships.c.member_id == member.id)
        async with self._db.reading() as connection:
            rows = (await connection.execute(query)).all()
        return Access(role=member.role, actor=actor, tenants={row.tenant_id: TenantRole(row.role) for row in rows})

    async def get(self, tenant_id: str, member_id: str, *, access: Access, action: Action = Action.READ) -> Membership:
        """Return one member's role in a tenant. Raises NotFound and RoleNotAllowed."""
        async with self._db.reading() as connection:
            return await _get(connection, tenant_id, member_id, access, action)

    async def of_tenant(
        self, tenant_id: str, limit: int = PAGE_ROWS_DEFAULT, cursor: str | None = None, *, access: Access
    ) -> Page[Membership]:
        """Return the memberships of the tenant, in the order in which their members were created.

        Raises NotFound for an invisible tenant, and RoleNotAllowed.
        """
        access.require(Action.READ, tenant_id)
        query = _joined().where(memberships.c.tenant_id == tenant_id)
        return await read_page(self._db, "memberships", query, memberships.c.member_id, limit, cursor, _from_row)

    async def of_members(self, member_ids: Sequence[str], *, access: Access) -> list[Membership]:
        """Return all memberships of these members in tenants visible to `access`, by one query."""
        query = access.narrow(_joined(), memberships.c.tenant_id).where(memberships.c.member_id.in_(member_ids))
        query = query.order_by(memberships.c.member_id, memberships.c.tenant_id)
        async with self._db.reading() as connection:
            return [_from_row(row) for row in (await connection.execute(query)).mappings()]

    async def add(self, tenant_id: str, member_id: str, role: str, *, access: Access) -> Membership:
        """Add a member to a tenant. Raises NotFound, RoleNotAllowed, NameTaken if the membership exists, and InvalidValue."""
        access.require(Action.TENANT_MEMBERS, tenant_id)
        granted = check_tenant_role(role)
        try:
            async with self._db.writing() as connection:
                return await self._add(connection, tenant_id, member_id, granted, access)
        except IntegrityError as error:
            raise NameTaken("this member already belongs to the tenant", param="email") from error

    async def invite(
        self, people: Members, tenant_id: str, email: str, role: str, *, access: Access
    ) -> tuple[Membership, str | None]:
        """Add the person with this address to the tenant, as a new member if there is none. Return (membership, password).

        `password` is that of a new member, else None. Only callers with `Action.MEMBERS` may invite a new address: a tenant's
        manager, who sees the password, could otherwise sign in under another person's name. Raises NotFound, RoleNotAllowed,
        NameTaken if the member already belongs to the tenant, and InvalidValue.
        """
        access.require(Action.TENANT_MEMBERS, tenant_id)
        granted = check_tenant_role(role)
        try:
            known = await people.get_by_email(check_email(email))
            return await self.add(tenant_id, known.id, granted, access=access), None
        except NotFound as error:
            if error.param != "email":
                raise
        if not access.may(Action.MEMBERS):
            raise RoleNotAllowed("no member with this e-mail yet: ask an owner of the appliance to create them first")
        password = new_password()

        async def join(connection: AsyncConnection, member: Member) -> None:
            await self._add(connection, tenant_id, member.id, granted, access)

        member = await people.create(email, password, Role.MEMBER, temporary=True, in_transaction=join)
        (membership,) = await self.of_members([member.id], access=access)
        return membership, password

    async def change(self, tenant_id: str, member_id: str, role: str, *, access: Access) -> Membership:
        """Change the role; it applies from the next request on. Raises NotFound, RoleNotAllowed and InvalidValue."""
        granted = check_tenant_role(role)
        condition = (memberships.c.tenant_id == tenant_id) & (memberships.c.member_id == member_id)
        async with self._db.writing() as connection:
            before = await _get(connection, tenant_id, member_id, access, Action.TENANT_MEMBERS)
            await connection.execute(update(memberships).where(condition).values(role=granted.value))
            after = await _get(connection, tenant_id, member_id, access, Action.TENANT_MEMBERS)
            await self._record(connection, "membership.change", before, after)
        return after

    async def remove(self, tenant_id: str, member_id: str, *, access: Access) -> Membership:
        """Remove a membership and return it. From the next request on the member cannot see the tenant and gets no more of its
        alerts, unless a role on the appliance allows it. Raises NotFound and RoleNotAllowed.
        """
        condition = (memberships.c.tenant_id == tenant_id) & (memberships.c.member_id == member_id)
        async with self._db.writing() as connection:
            before = await _get(connection, tenant_id, member_id, access, Action.TENANT_MEMBERS)
            await connection.execute(delete(memberships).where(condition))
            role = (await connection.execute(select(members.c.role).where(members.c.id == member_id))).scalar_one()
            if role == Role.MEMBER.value:
                await disable_alerts(connection, self._clock, before.email, tenant_id=tenant_id)
            await self._record(connection, "membership.remove", before, None)
        return before

    async def _add(
        self, connection: AsyncConnection, tenant_id: str, member_id: str, role: TenantRole, access: Access
    ) -> Membership:
        await _check_membership_counts(connection, tenant_id, member_id)
        row = {"tenant_id": tenant_id, "member_id": member_id, "role": role.value, "created_at": self._clock.now()}
        await connection.execute(insert(memberships).values(**row))
        membership = await _get(connection, tenant_id, member_id, access, Action.TENANT_MEMBERS)
        await self._record(connection, "membership.add", None, membership)
        return membership

    async def _record(
        self, connection: AsyncConnection, action: str, before: Membership | None, after: Membership | None
    ) -> None:
        membership = after or before
        assert membership is not None
        was, now = (None if state is None else {"email": state.email, "role": state.role.value} for state in (before, after))
        target = (action, "membership", membership.member_id)
        await audit.record(connection, self._clock, *target, tenant_id=membership.tenant_id, before=was, after=now)


def _joined() -> Select[Any]:
    columns = (memberships, members.c.email, members.c.disabled_at, members.c.password_temporary)
    return select(*columns).join_from(memberships, members, members.c.id == memberships.c.member_id)


def _from_row(row: RowMapping) -> Membership:
    return Membership(
        member_id=row["member_id"],
        email=row["email"],
        tenant_id=row["tenant_id"],
        role=TenantRole(row["role"]),
        disabled=row["disabled_at"] is not None,
        password_temporary=row["password_temporary"],
        created_at=row["created_at"],
    )


async def _get(connection: AsyncConnection, tenant_id: str, member_id: str, access: Access, action: Action) -> Membership:
    access.require(action, tenant_id)
    query = _joined().where(memberships.c.tenant_id == tenant_id, memberships.c.member_id == member_id)
    row = (await connection.execute(query)).mappings().first()
    if row is None:
        raise NotFound("this tenant has no such member", param="member_id")
    return _from_row(row)


async def _check_membership_counts(connection: AsyncConnection, tenant_id: str, member_id: str) -> None:
    """Raise NotFound unless tenant and member exist, and InvalidValue if either has the maximum number of memberships."""
    if (await connection.execute(select(tenants.c.id).where(tenants.c.id == tenant_id))).first() is None:
        raise NotFound("no such tenant", param="tenant_id")
    if (await connection.execute(select(members.c.id).where(members.c.id == member_id))).first() is None:
        raise NotFound("no such member", param="member_id")
    limits = (
        (memberships.c.tenant_id == tenant_id, MEMBERS_OF_TENANT_MAX, "a tenant can have at most {} members"),
        (memberships.c.member_id == member_id, TENANTS_OF_MEMBER_MAX, "a member can belong to at most {} tenants"),
    )
    for condition, maximum, message in limits:
        count = (await connection.execute(select(func.count()).select_from(memberships).where(condition))).scalar_one()
        if count >= maximum:
            raise InvalidValue(message.format(maximum), param="email")
