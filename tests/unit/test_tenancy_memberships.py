"""Memberships in tenants, the resulting access, and that an owner always remains."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select

from appliance.base.acting import SYSTEM
from appliance.base.db import Database
from appliance.base.errors import InvalidCredentials, InvalidValue, LastOwner, NameTaken, NotFound, RoleNotAllowed
from appliance.base.tables import audit_log, sessions
from appliance.tenancy import memberships as table
from appliance.tenancy.access import WHOLE_APPLIANCE, Access
from appliance.tenancy.members import Members
from appliance.tenancy.memberships import Memberships
from appliance.tenancy.roles import Role, TenantRole
from appliance.tenancy.sessions import Sessions
from tests.support.cast import ALICE_PASSWORD, Cast
from tests.support.clock import FakeClock

DORA = "dora@example.com"


@pytest.fixture
def people(database: Database, clock: FakeClock) -> Members:
    return Members(database, clock)


@pytest.fixture
def belongings(database: Database, clock: FakeClock) -> Memberships:
    return Memberships(database, clock)


async def test_somebody_new_is_invited_with_a_password_that_opens_the_door(
    people: Members, belongings: Memberships, cast: Cast
) -> None:
    membership, password = await belongings.invite(
        people, cast.bob.tenant.id, " Dora@Example.com", "developer", access=WHOLE_APPLIANCE
    )

    assert (membership.email, membership.role) == (DORA, TenantRole.DEVELOPER)
    member = (await people.prove_password(DORA, password or "")).member
    assert member.role is Role.MEMBER
    access = await belongings.access(member, SYSTEM)
    assert not access.sees_all
    assert access.tenants == {cast.bob.tenant.id: TenantRole.DEVELOPER}


async def test_somebody_known_is_added_and_keeps_the_password(people: Members, belongings: Memberships, cast: Cast) -> None:
    membership, password = await belongings.invite(
        people, cast.bob.tenant.id, "alice@example.com", "viewer", access=WHOLE_APPLIANCE
    )

    assert (membership.member_id, password) == (cast.alice.id, None)
    assert (await people.prove_password("alice@example.com", ALICE_PASSWORD)).member.role is Role.OWNER


async def test_nobody_belongs_to_a_tenant_twice(people: Members, belongings: Memberships, cast: Cast) -> None:
    await belongings.invite(people, cast.bob.tenant.id, DORA, "viewer", access=WHOLE_APPLIANCE)
    with pytest.raises(NameTaken) as refused:
        await belongings.invite(people, cast.bob.tenant.id, DORA, "manager", access=WHOLE_APPLIANCE)

    assert refused.value.param == "email"
    (only,) = (await belongings.of_tenant(cast.bob.tenant.id, access=WHOLE_APPLIANCE)).data
    assert only.role is TenantRole.VIEWER


async def test_an_invitation_that_fails_leaves_nobody_behind(people: Members, belongings: Memberships, cast: Cast) -> None:
    with pytest.raises(NotFound) as refused:
        await belongings.invite(people, "tn_nothing", DORA, "viewer", access=WHOLE_APPLIANCE)

    assert refused.value.param == "tenant_id"
    with pytest.raises(NotFound):
        await people.get_by_email(DORA)


@pytest.mark.parametrize(
    ("email", "role", "param"),
    [("nobody", "viewer", "email"), (DORA, "owner", "role"), (DORA, "", "role"), ("", "viewer", "email")],
)
async def test_a_wrong_invitation_names_its_field(
    people: Members, belongings: Memberships, cast: Cast, email: str, role: str, param: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        await belongings.invite(people, cast.bob.tenant.id, email, role, access=WHOLE_APPLIANCE)

    assert refused.value.param == param


async def test_a_role_changes_and_ends_in_its_tenant_alone(people: Members, belongings: Memberships, cast: Cast) -> None:
    for person in (cast.bob, cast.charlie):
        membership, _ = await belongings.invite(people, person.tenant.id, DORA, "viewer", access=WHOLE_APPLIANCE)
    dora = await people.get_by_email(DORA)

    await belongings.invite(people, cast.bob.tenant.id, "emil@example.com", "developer", access=WHOLE_APPLIANCE)  # and stays
    changed = await belongings.change(cast.bob.tenant.id, dora.id, "manager", access=WHOLE_APPLIANCE)
    assert changed.role is TenantRole.MANAGER
    access = await belongings.access(dora, SYSTEM)
    assert access.tenants == {cast.bob.tenant.id: TenantRole.MANAGER, cast.charlie.tenant.id: TenantRole.VIEWER}
    await belongings.remove(cast.bob.tenant.id, membership.member_id, access=WHOLE_APPLIANCE)
    assert (await belongings.access(dora, SYSTEM)).tenants == {cast.charlie.tenant.id: TenantRole.VIEWER}
    for work in (
        belongings.remove(cast.bob.tenant.id, dora.id, access=WHOLE_APPLIANCE),
        belongings.change(cast.bob.tenant.id, dora.id, "viewer", access=WHOLE_APPLIANCE),
    ):
        with pytest.raises(NotFound):
            await work


async def test_a_tenant_has_room_for_so_many_members(
    people: Members, belongings: Memberships, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MEMBERS_OF_TENANT_MAX", 1)
    await belongings.invite(people, cast.bob.tenant.id, DORA, "viewer", access=WHOLE_APPLIANCE)
    with pytest.raises(InvalidValue, match="at most 1 members"):
        await belongings.invite(people, cast.bob.tenant.id, "emil@example.com", "viewer", access=WHOLE_APPLIANCE)
    monkeypatch.setattr(table, "TENANTS_OF_MEMBER_MAX", 1)
    with pytest.raises(InvalidValue, match="at most 1 tenants"):
        await belongings.invite(people, cast.charlie.tenant.id, DORA, "viewer", access=WHOLE_APPLIANCE)
    with pytest.raises(NotFound):
        await people.get_by_email("emil@example.com")


async def test_members_of_a_tenant_come_in_pages(people: Members, belongings: Memberships, cast: Cast) -> None:
    made = [
        (await belongings.invite(people, cast.bob.tenant.id, f"m{number}@x.example", "viewer", access=WHOLE_APPLIANCE))[0]
        for number in range(5)
    ]
    await belongings.invite(people, cast.charlie.tenant.id, DORA, "viewer", access=WHOLE_APPLIANCE)
    first = await belongings.of_tenant(cast.bob.tenant.id, 3, access=WHOLE_APPLIANCE)
    second = await belongings.of_tenant(cast.bob.tenant.id, 3, first.next_cursor, access=WHOLE_APPLIANCE)

    assert [each.member_id for each in first.data + second.data] == [each.member_id for each in made]
    assert await belongings.of_members([made[0].member_id, made[4].member_id], access=WHOLE_APPLIANCE) == [made[0], made[4]]


async def test_who_belongs_to_a_tenant_is_nothing_to_strangers(belongings: Memberships, cast: Cast) -> None:
    stranger = Access(role=Role.MEMBER, actor=SYSTEM, tenants={cast.charlie.tenant.id: TenantRole.MANAGER})
    with pytest.raises(NotFound):
        await belongings.of_tenant(cast.bob.tenant.id, access=stranger)


async def test_nobody_and_nothing_cannot_belong_together(belongings: Memberships, cast: Cast) -> None:
    for tenant_id, member_id, param in (
        (cast.bob.tenant.id, "mb_nobody", "member_id"),
        ("tn_none", cast.alice.id, "tenant_id"),
    ):
        with pytest.raises(NotFound) as refused:
            await belongings.add(tenant_id, member_id, "viewer", access=WHOLE_APPLIANCE)
        assert refused.value.param == param


async def test_each_change_stands_in_the_audit_log_with_its_tenant(
    people: Members, belongings: Memberships, cast: Cast, database: Database
) -> None:
    membership, _ = await belongings.invite(people, cast.bob.tenant.id, DORA, "viewer", access=WHOLE_APPLIANCE)
    await belongings.change(cast.bob.tenant.id, membership.member_id, "manager", access=WHOLE_APPLIANCE)
    await belongings.change(cast.bob.tenant.id, membership.member_id, "manager", access=WHOLE_APPLIANCE)
    await belongings.remove(cast.bob.tenant.id, membership.member_id, access=WHOLE_APPLIANCE)

    async with database.reading() as connection:
        wanted = select(audit_log).where(audit_log.c.target_kind == "membership").order_by(audit_log.c.id)
        rows = (await connection.execute(wanted)).all()
    assert [row.action for row in rows] == ["membership.add", "membership.change", "membership.remove"]
    assert {(row.tenant_id, row.target_id) for row in rows} == {(cast.bob.tenant.id, membership.member_id)}


async def test_the_last_owner_stays_owner_and_enabled(people: Members, cast: Cast) -> None:
    for change in ({"role": "admin"}, {"role": "member"}, {"disabled": True}, {"role": "viewer", "disabled": True}):
        with pytest.raises(LastOwner):
            await people.change(cast.alice.id, **change)

    assert await people.get_by_email("alice@example.com") == cast.alice
    assert await people.change(cast.alice.id, role="owner", disabled=False) == cast.alice


async def test_a_disabled_owner_is_no_owner_to_fall_back_on(people: Members, cast: Cast) -> None:
    dora = await people.create(DORA, "a password of tests", "owner")
    await people.change(dora.id, disabled=True)
    with pytest.raises(LastOwner):
        await people.change(cast.alice.id, role="admin")
    await people.change(dora.id, disabled=False)

    assert (await people.change(cast.alice.id, role="admin")).role is Role.ADMIN


async def test_two_owners_who_demote_each_other_at_once_do_not_both_succeed(people: Members, cast: Cast) -> None:
    dora = await people.create(DORA, "a password of tests", "owner")
    changes = [people.change(cast.alice.id, role="viewer"), people.change(dora.id, disabled=True)]
    answers = await asyncio.gather(*changes, return_exceptions=True)

    assert sum(isinstance(answer, LastOwner) for answer in answers) == 1


async def test_who_is_disabled_is_signed_out_at_once_and_everywhere(
    people: Members, cast: Cast, database: Database, clock: FakeClock
) -> None:
    doors = Sessions(database, clock)
    dora = await people.create(DORA, "a password of tests", "admin")
    opened = [await doors.open(dora.id, "browser", "192.0.2.1") for _ in range(3)]
    alices, _ = await doors.open(cast.alice.id, "browser", "192.0.2.1")

    assert (await people.change(dora.id, disabled=True)).disabled
    assert [await doors.resolve(token) for token, _ in opened] == [None] * 3
    assert await doors.resolve(alices) is not None
    async with database.reading() as connection:
        assert len((await connection.execute(select(sessions).where(sessions.c.member_id == dora.id))).all()) == 0
    with pytest.raises(InvalidCredentials):
        await people.prove_password(DORA, "a password of tests")
    await people.change(dora.id, disabled=False)
    assert await doors.resolve(opened[0][0]) is None
    assert (await people.prove_password(DORA, "a password of tests")).member.id == dora.id


@pytest.mark.parametrize(
    ("change", "param"), [({"role": "king"}, "role"), ({"role": ""}, "role"), ({"disabled": "yes"}, "disabled")]
)
async def test_a_wrong_change_of_a_member_names_its_field(
    people: Members, cast: Cast, change: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        await people.change(cast.alice.id, **change)  # type: ignore[arg-type]

    assert refused.value.param == param
    with pytest.raises(NotFound):
        await people.change("mb_nothing", role="viewer")


@pytest.mark.parametrize("role", [Role.MEMBER, Role.ADMIN])
async def test_an_address_that_nobody_knows_is_let_in_by_an_owner_alone(
    people: Members, belongings: Memberships, cast: Cast, role: Role
) -> None:
    tenant_id = cast.charlie.tenant.id
    access = Access(role=role, actor=SYSTEM, tenants={tenant_id: TenantRole.MANAGER})
    with pytest.raises(RoleNotAllowed, match="ask an owner of the appliance"):
        await belongings.invite(people, tenant_id, "cfo@bob.example", "viewer", access=access)
    with pytest.raises(NotFound):
        await people.get_by_email("cfo@bob.example")
    membership, password = await belongings.invite(people, tenant_id, cast.alice.email, "viewer", access=access)
    assert (membership.email, password) == (cast.alice.email, None)
