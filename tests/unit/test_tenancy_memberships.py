"""Memberships of members in tenants, the access that follows from them, and the protection of the last owner."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select, update

from appliance.base.acting import SYSTEM
from appliance.base.db import Database
from appliance.base.errors import InvalidCredentials, InvalidValue, LastOwner, NameTaken, NotFound, RoleNotAllowed
from appliance.base.tables import audit_log, sessions, tenants
from appliance.tenancy import audit
from appliance.tenancy import memberships as memberships_module
from appliance.tenancy.access import Access
from appliance.tenancy.members import Members
from appliance.tenancy.memberships import Memberships
from appliance.tenancy.roles import Role, TenantRole
from appliance.tenancy.sessions import Sessions
from tests.support.cast import ALICE_PASSWORD, OWNER, Cast
from tests.support.clock import FakeClock
from tests.support.databases import transaction_is_blocked
from tests.support.polling import poll_until

DORA = "dora@example.com"


@pytest.fixture
def people(database: Database, clock: FakeClock) -> Members:
    return Members(database, clock)


@pytest.fixture
def memberships(database: Database, clock: FakeClock) -> Memberships:
    return Memberships(database, clock)


async def test_a_new_member_is_invited_with_a_valid_password(people: Members, memberships: Memberships, cast: Cast) -> None:
    membership, password = await memberships.invite(people, cast.bob.tenant.id, " Dora@Example.com", "developer", access=OWNER)

    assert (membership.email, membership.role, membership.disabled) == (DORA, TenantRole.DEVELOPER, False)
    member = (await people.prove_password(DORA, password or "")).member
    assert member.role is Role.MEMBER
    access = await memberships.access(member, SYSTEM)
    assert not access.sees_all
    assert access.tenants == {cast.bob.tenant.id: TenantRole.DEVELOPER}


async def test_a_new_member_is_invited_while_a_new_name_of_the_tenant_is_being_recorded(
    people: Members, memberships: Memberships, cast: Cast, clock: FakeClock, database: Database, database_url: str
) -> None:
    async with database.writing() as connection:
        await connection.execute(update(tenants).where(tenants.c.id == cast.bob.tenant.id).values(name="renamed"))
        invitation = memberships.invite(people, cast.bob.tenant.id, DORA, "developer", access=OWNER)
        inviting = asyncio.create_task(invitation)
        await poll_until(lambda: database.kind == "sqlite" or transaction_is_blocked(database_url))
        await audit.record(connection, clock, "tenant.update", "tenant", cast.bob.tenant.id)
    membership, _password = await inviting
    assert membership.email == DORA


async def test_an_existing_member_is_added_and_keeps_the_password(
    people: Members, memberships: Memberships, cast: Cast
) -> None:
    membership, password = await memberships.invite(people, cast.bob.tenant.id, "alice@example.com", "viewer", access=OWNER)

    assert (membership.member_id, password) == (cast.alice.id, None)
    assert (await people.prove_password("alice@example.com", ALICE_PASSWORD)).member.role is Role.OWNER


async def test_a_member_cannot_be_invited_to_a_tenant_twice(people: Members, memberships: Memberships, cast: Cast) -> None:
    await memberships.invite(people, cast.bob.tenant.id, DORA, "viewer", access=OWNER)
    with pytest.raises(NameTaken) as refused:
        await memberships.invite(people, cast.bob.tenant.id, DORA, "manager", access=OWNER)

    assert refused.value.param == "email"
    (only,) = (await memberships.of_tenant(cast.bob.tenant.id, access=OWNER)).data
    assert only.role is TenantRole.VIEWER


async def test_a_failed_invitation_creates_no_member(people: Members, memberships: Memberships, cast: Cast) -> None:
    with pytest.raises(NotFound) as refused:
        await memberships.invite(people, "tn_nothing", DORA, "viewer", access=OWNER)

    assert refused.value.param == "tenant_id"
    with pytest.raises(NotFound):
        await people.get_by_email(DORA)


@pytest.mark.parametrize(
    ("email", "role", "param"),
    [("nobody", "viewer", "email"), (DORA, "owner", "role"), (DORA, "", "role"), ("", "viewer", "email")],
)
async def test_an_invalid_invitation_names_its_field(
    people: Members, memberships: Memberships, cast: Cast, email: str, role: str, param: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        await memberships.invite(people, cast.bob.tenant.id, email, role, access=OWNER)

    assert refused.value.param == param


async def test_a_role_is_changed_and_removed_in_one_tenant_only(people: Members, memberships: Memberships, cast: Cast) -> None:
    for person in (cast.bob, cast.charlie):
        membership, _ = await memberships.invite(people, person.tenant.id, DORA, "viewer", access=OWNER)
    dora = await people.get_by_email(DORA)

    await memberships.invite(people, cast.bob.tenant.id, "emil@example.com", "developer", access=OWNER)  # is not affected
    changed = await memberships.change(cast.bob.tenant.id, dora.id, "manager", access=OWNER)
    assert changed.role is TenantRole.MANAGER
    access = await memberships.access(dora, SYSTEM)
    assert access.tenants == {cast.bob.tenant.id: TenantRole.MANAGER, cast.charlie.tenant.id: TenantRole.VIEWER}
    await memberships.remove(cast.bob.tenant.id, membership.member_id, access=OWNER)
    assert (await memberships.access(dora, SYSTEM)).tenants == {cast.charlie.tenant.id: TenantRole.VIEWER}
    for call in (
        memberships.remove(cast.bob.tenant.id, dora.id, access=OWNER),
        memberships.change(cast.bob.tenant.id, dora.id, "viewer", access=OWNER),
    ):
        with pytest.raises(NotFound):
            await call


async def test_memberships_are_limited_per_tenant_and_member(
    people: Members, memberships: Memberships, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memberships_module, "MEMBERS_OF_TENANT_MAX", 1)
    await memberships.invite(people, cast.bob.tenant.id, DORA, "viewer", access=OWNER)
    with pytest.raises(InvalidValue, match="at most 1 members"):
        await memberships.invite(people, cast.bob.tenant.id, "emil@example.com", "viewer", access=OWNER)
    monkeypatch.setattr(memberships_module, "TENANTS_OF_MEMBER_MAX", 1)
    with pytest.raises(InvalidValue, match="at most 1 tenants"):
        await memberships.invite(people, cast.charlie.tenant.id, DORA, "viewer", access=OWNER)
    with pytest.raises(NotFound):
        await people.get_by_email("emil@example.com")


async def test_members_of_a_tenant_are_paged(people: Members, memberships: Memberships, cast: Cast) -> None:
    made = [
        (await memberships.invite(people, cast.bob.tenant.id, f"m{number}@x.example", "viewer", access=OWNER))[0]
        for number in range(5)
    ]
    await memberships.invite(people, cast.charlie.tenant.id, DORA, "viewer", access=OWNER)
    first = await memberships.of_tenant(cast.bob.tenant.id, 3, access=OWNER)
    second = await memberships.of_tenant(cast.bob.tenant.id, 3, first.next_cursor, access=OWNER)

    assert [each.member_id for each in first.data + second.data] == [each.member_id for each in made]
    assert await memberships.of_members([made[0].member_id, made[4].member_id], access=OWNER) == [made[0], made[4]]


async def test_members_of_other_tenants_are_not_visible(memberships: Memberships, cast: Cast) -> None:
    stranger = Access(role=Role.MEMBER, actor=SYSTEM, tenants={cast.charlie.tenant.id: TenantRole.MANAGER})
    with pytest.raises(NotFound):
        await memberships.of_tenant(cast.bob.tenant.id, access=stranger)


async def test_unknown_members_and_tenants_are_not_found(memberships: Memberships, cast: Cast) -> None:
    for tenant_id, member_id, param in (
        (cast.bob.tenant.id, "mb_nobody", "member_id"),
        ("tn_none", cast.alice.id, "tenant_id"),
    ):
        with pytest.raises(NotFound) as refused:
            await memberships.add(tenant_id, member_id, "viewer", access=OWNER)
        assert refused.value.param == param


async def test_changes_of_memberships_are_audited_with_their_tenant(
    people: Members, memberships: Memberships, cast: Cast, database: Database
) -> None:
    membership, _ = await memberships.invite(people, cast.bob.tenant.id, DORA, "viewer", access=OWNER)
    await memberships.change(cast.bob.tenant.id, membership.member_id, "manager", access=OWNER)
    await memberships.change(cast.bob.tenant.id, membership.member_id, "manager", access=OWNER)
    await memberships.remove(cast.bob.tenant.id, membership.member_id, access=OWNER)

    async with database.reading() as connection:
        query = select(audit_log).where(audit_log.c.target_kind == "membership").order_by(audit_log.c.id)
        rows = (await connection.execute(query)).all()
    assert [row.action for row in rows] == ["membership.add", "membership.change", "membership.remove"]
    assert {(row.tenant_id, row.target_id) for row in rows} == {(cast.bob.tenant.id, membership.member_id)}


async def test_the_last_owner_cannot_be_demoted_or_disabled(people: Members, cast: Cast) -> None:
    for change in ({"role": "admin"}, {"role": "member"}, {"disabled": True}, {"role": "viewer", "disabled": True}):
        with pytest.raises(LastOwner):
            await people.change(cast.alice.id, **change)

    assert await people.get_by_email("alice@example.com") == cast.alice
    assert await people.change(cast.alice.id, role="owner", disabled=False) == cast.alice


async def test_a_disabled_owner_does_not_count_as_another_owner(people: Members, cast: Cast) -> None:
    dora = await people.create(DORA, "a password of tests", "owner")
    await people.change(dora.id, disabled=True)
    with pytest.raises(LastOwner):
        await people.change(cast.alice.id, role="admin")
    await people.change(dora.id, disabled=False)

    assert (await people.change(cast.alice.id, role="admin")).role is Role.ADMIN


async def test_two_owners_cannot_concurrently_demote_each_other(people: Members, cast: Cast) -> None:
    dora = await people.create(DORA, "a password of tests", "owner")
    changes = [people.change(cast.alice.id, role="viewer"), people.change(dora.id, disabled=True)]
    answers = await asyncio.gather(*changes, return_exceptions=True)

    assert sum(isinstance(answer, LastOwner) for answer in answers) == 1


async def test_disabling_a_member_ends_all_sessions_at_once(
    people: Members, cast: Cast, database: Database, clock: FakeClock
) -> None:
    session_store = Sessions(database, clock)
    dora = await people.create(DORA, "a password of tests", "admin")
    opened = [await session_store.open(dora.id, "browser", "192.0.2.1") for _ in range(3)]
    alices_token, _ = await session_store.open(cast.alice.id, "browser", "192.0.2.1")

    assert (await people.change(dora.id, disabled=True)).disabled
    assert [await session_store.resolve(token) for token, _ in opened] == [None] * 3
    assert await session_store.resolve(alices_token) is not None
    async with database.reading() as connection:
        assert len((await connection.execute(select(sessions).where(sessions.c.member_id == dora.id))).all()) == 0
    with pytest.raises(InvalidCredentials):
        await people.prove_password(DORA, "a password of tests")
    await people.change(dora.id, disabled=False)
    assert await session_store.resolve(opened[0][0]) is None
    assert (await people.prove_password(DORA, "a password of tests")).member.id == dora.id


@pytest.mark.parametrize(
    ("change", "param"), [({"role": "king"}, "role"), ({"role": ""}, "role"), ({"disabled": "yes"}, "disabled")]
)
async def test_an_invalid_change_of_a_member_names_its_field(
    people: Members, cast: Cast, change: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        await people.change(cast.alice.id, **change)  # type: ignore[arg-type]

    assert refused.value.param == param
    with pytest.raises(NotFound):
        await people.change("mb_nothing", role="viewer")


@pytest.mark.parametrize("role", [Role.MEMBER, Role.ADMIN])
async def test_only_an_owner_can_invite_an_unknown_address(
    people: Members, memberships: Memberships, cast: Cast, role: Role
) -> None:
    tenant_id = cast.charlie.tenant.id
    access = Access(role=role, actor=SYSTEM, tenants={tenant_id: TenantRole.MANAGER})
    with pytest.raises(RoleNotAllowed, match="ask an owner of the appliance"):
        await memberships.invite(people, tenant_id, "cfo@bob.example", "viewer", access=access)
    with pytest.raises(NotFound):
        await people.get_by_email("cfo@bob.example")
    membership, password = await memberships.invite(people, tenant_id, cast.alice.email, "viewer", access=access)
    assert (membership.email, password) == (cast.alice.email, None)
