"""The table of memberships: who belongs to which tenant with which role, and what access a member has through them."""

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
    """All memberships. Each request reads its caller's, so that a change counts from the next request on."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def access(self, member: Member, actor: Actor) -> Access:
        """Return what a member who has just been authenticated may see and do."""
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
        """Return who belongs to the tenant, in the order in which they became members of the box.

        Raises NotFound for a tenant that may not be seen, and RoleNotAllowed.
        """
        access.require(Action.READ, tenant_id)
        query = _joined().where(memberships.c.tenant_id == tenant_id)
        return await read_page(self._db, "memberships", query, memberships.c.member_id, limit, cursor, _from_row)

    async def of_members(self, member_ids: Sequence[str], *, access: Access) -> list[Membership]:
        """Return every membership of these members in tenants that `access` shows, by one query."""
        query = access.narrow(_joined(), memberships.c.tenant_id).where(memberships.c.member_id.in_(member_ids))
        query = query.order_by(memberships.c.member_id, memberships.c.tenant_id)
        async with self._db.reading() as connection:
            return [_from_row(row) for row in (await connection.execute(query)).mappings()]

    async def add(self, tenant_id: str, member_id: str, role: str, *, access: Access) -> Membership:
        """Return the new membership. Raises NotFound, RoleNotAllowed, NameTaken when it exists already, and InvalidValue."""
        access.require(Action.TENANT_MEMBERS, tenant_id)
        granted = check_tenant_role(role)
        try:
            async with self._db.writing() as connection:
                return await self._add(connection, tenant_id, member_id, granted, access)
        except IntegrityError as error:
            raise NameTaken("this member belongs to the tenant already", param="email") from error

    async def invite(
        self, people: Members, tenant_id: str, email: str, role: str, *, access: Access
    ) -> tuple[Membership, str | None]:
        """Return (membership, password). The password is that of a new member, created here; None for an existing member.

        Only callers with `Action.MEMBERS` on the box may invite a new address: otherwise a tenant's manager, who sees the
        password, could sign in as somebody whom others will trust. Raises NotFound, RoleNotAllowed, NameTaken when the member
        already belongs to the tenant, and InvalidValue.
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
        """Return the membership with its new role, which counts from the next request on.

        Raises NotFound, RoleNotAllowed and InvalidValue.
        """
        granted = check_tenant_role(role)
        condition = (memberships.c.tenant_id == tenant_id) & (memberships.c.member_id == member_id)
        async with self._db.writing() as connection:
            before = await _get(connection, tenant_id, member_id, access, Action.TENANT_MEMBERS)
            await connection.execute(update(memberships).where(condition).values(role=granted.value))
            after = await _get(connection, tenant_id, member_id, access, Action.TENANT_MEMBERS)
            await self._record(connection, "membership.change", before, after)
        return after

    async def remove(self, tenant_id: str, member_id: str, *, access: Access) -> Membership:
        """Remove a membership and return it: from the next request on its member sees nothing of the tenant, and gets no more
        of its alerts, unless a role on the box allows it.

        Raises NotFound and RoleNotAllowed.
        """
        condition = (memberships.c.tenant_id == tenant_id) & (memberships.c.member_id == member_id)
        async with self._db.writing() as connection:
            before = await _get(connection, tenant_id, member_id, access, Action.TENANT_MEMBERS)
            await connection.execute(delete(memberships).where(condition))
            await self._record(connection, "membership.remove", before, None)
            role = (await connection.execute(select(members.c.role).where(members.c.id == member_id))).scalar_one()
            if role == Role.MEMBER.value:
                await disable_alerts(connection, self._clock, before.email, tenant_id=tenant_id)
        return before

    async def _add(
        self, connection: AsyncConnection, tenant_id: str, member_id: str, role: TenantRole, access: Access
    ) -> Membership:
        await _check_places(connection, tenant_id, member_id)
        row = {"tenant_id": tenant_id, "member_id": member_id, "role": role.value, "created_at": self._clock.now()}
        await connection.execute(insert(memberships).values(**row))
        made = await _get(connection, tenant_id, member_id, access, Action.TENANT_MEMBERS)
        await self._record(connection, "membership.add", None, made)
        return made

    async def _record(
        self, connection: AsyncConnection, action: str, before: Membership | None, after: Membership | None
    ) -> None:
        one = after or before
        assert one is not None
        was, now = (None if each is None else {"email": each.email, "role": each.role.value} for each in (before, after))
        target = (action, "membership", one.member_id)
        await audit.record(connection, self._clock, *target, tenant_id=one.tenant_id, before=was, after=now)


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


async def _check_places(connection: AsyncConnection, tenant_id: str, member_id: str) -> None:
    """Raise unless tenant and member exist and both have room for one more membership."""
    if (await connection.execute(select(tenants.c.id).where(tenants.c.id == tenant_id))).first() is None:
        raise NotFound("no such tenant", param="tenant_id")
    if (await connection.execute(select(members.c.id).where(members.c.id == member_id))).first() is None:
        raise NotFound("no such member", param="member_id")
    places = (
        (memberships.c.tenant_id == tenant_id, MEMBERS_OF_TENANT_MAX, "a tenant can have at most {} members"),
        (memberships.c.member_id == member_id, TENANTS_OF_MEMBER_MAX, "a member belongs to at most {} tenants"),
    )
    for condition, most, sentence in places:
        count = (await connection.execute(select(func.count()).select_from(memberships).where(condition))).scalar_one()
        if count >= most:
            raise InvalidValue(sentence.format(most), param="email")
