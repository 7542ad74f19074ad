"""Access: with any roles and memberships a member can do exactly what the two tables of roles grant."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sqlalchemy import Column, MetaData, String, Table, create_engine, insert, select

from appliance.base.acting import Actor
from appliance.base.errors import NotFound, RoleNotAllowed
from appliance.tenancy.access import Access
from appliance.tenancy.roles import ACTION_PHRASES, ALLOWED, ALLOWED_IN_TENANT, Action, Role, TenantRole

TENANTS = ("tn_bob", "tn_charlie", "tn_dora", "tn_emil")
ACTOR = Actor(kind="member", name="somebody@example.com", id="mb_1")

memberships = st.dictionaries(st.sampled_from(TENANTS[:3]), st.sampled_from(TenantRole))
accesses = st.builds(Access, role=st.sampled_from(Role), actor=st.just(ACTOR), tenants=memberships)
strangers = st.builds(Access, role=st.just(Role.MEMBER), actor=st.just(ACTOR), tenants=memberships)
actions = st.sampled_from(Action)
tenant_ids = st.sampled_from(TENANTS)


class Key(NamedTuple):
    """A row that belongs to a tenant."""

    tenant_id: str


_rows = Table("rows", MetaData(), Column("tenant_id", String(20), nullable=True))
_engine = create_engine("sqlite://")
_rows.metadata.create_all(_engine)
with _engine.begin() as _connection:
    _connection.execute(insert(_rows), [{"tenant_id": tenant_id} for tenant_id in (*TENANTS, None)])


def read(access: Access, action: Action) -> set[str | None]:
    """Return whose rows a narrowed query gives."""
    with _engine.connect() as connection:
        return set(connection.execute(access.narrow(select(_rows.c.tenant_id), _rows.c.tenant_id, action)).scalars())


def expected(access: Access, action: Action) -> set[str | None]:
    """Return the same by a plain walk through both tables of roles."""
    if action in ALLOWED[access.role]:
        return {*TENANTS, None}
    return {tenant_id for tenant_id, role in access.tenants.items() if action in ALLOWED_IN_TENANT[role]}


@given(accesses, actions)
def test_a_restricted_query_returns_what_the_tables_of_roles_grant(access: Access, action: Action) -> None:
    assert read(access, action) == expected(access, action)


@given(accesses, actions)
def test_both_forms_of_restriction_return_the_same_rows(access: Access, action: Action) -> None:
    query = select(_rows.c.tenant_id).where(*access.conditions(_rows.c.tenant_id, action))
    with _engine.connect() as connection:
        assert set(connection.execute(query).scalars()) == read(access, action)


@given(accesses, actions, tenant_ids)
def test_readable_tenants_are_those_allowed_by_name(access: Access, action: Action, tenant_id: str) -> None:
    covered = tenant_id in read(access, action)

    assert access.may(action, tenant_id) is covered
    if covered:
        access.require(action, tenant_id)
        access.row(Key(tenant_id), action, what="key", param="key_id")
        access.require_somewhere(action)


@given(strangers, actions, tenant_ids)
def test_a_stranger_reads_nothing_and_gets_not_found(access: Access, action: Action, tenant_id: str) -> None:
    assume(tenant_id not in access.tenants)
    assert not access.sees(tenant_id)
    assert tenant_id not in read(access, action)
    with pytest.raises(NotFound, match=r"^no such tenant$"):
        access.require(action, tenant_id)
    with pytest.raises(NotFound, match=r"^no such key$"):
        access.row(Key(tenant_id), action, what="key", param="key_id")


@given(strangers, actions)
def test_without_a_role_on_the_appliance_its_rows_are_refused(access: Access, action: Action) -> None:
    assert not access.sees_all
    assert not access.may(action)
    assert None not in read(access, action)
    with pytest.raises(RoleNotAllowed):
        access.require(action)


@given(st.sampled_from((Role.VIEWER, Role.MEMBER)), st.sampled_from((TenantRole.DEVELOPER, TenantRole.VIEWER)), actions)
def test_a_refused_action_in_a_visible_tenant_states_the_reason(role: Role, held: TenantRole, action: Action) -> None:
    access = Access(role=role, actor=ACTOR, tenants={"tn_bob": held})
    assume(not access.may(action, "tn_bob"))
    named = f"{held} of this tenant" if role is Role.MEMBER else role
    with pytest.raises(RoleNotAllowed, match=f"^the role {named} may not {ACTION_PHRASES[action]}$"):
        access.require(action, "tn_bob")


@given(accesses, actions)
def test_an_action_allowed_nowhere_is_refused_before_listing(access: Access, action: Action) -> None:
    if expected(access, action):
        access.require_somewhere(action)
        return
    with pytest.raises(RoleNotAllowed, match=f"^the role {access.role} may not {ACTION_PHRASES[action]}$"):
        access.require_somewhere(action)


@given(accesses, actions, st.sampled_from(TENANTS[:3]), st.sampled_from(TenantRole))
def test_a_membership_adds_rights_only_in_its_own_tenant(
    access: Access, action: Action, tenant_id: str, role: TenantRole
) -> None:
    assume(tenant_id not in access.tenants)
    more = Access(role=access.role, actor=ACTOR, tenants={**access.tenants, tenant_id: role})

    assert read(access, action) <= read(more, action) <= read(access, action) | {tenant_id}
    assert more.may(action) is access.may(action)


@given(memberships, st.tuples(st.integers(0, 3), st.integers(0, 3)), actions)
def test_a_higher_role_removes_no_right(held: dict[str, TenantRole], ranks: tuple[int, int], action: Action) -> None:
    order = (Role.MEMBER, Role.VIEWER, Role.ADMIN, Role.OWNER)
    less, more = (Access(role=order[rank], actor=ACTOR, tenants=held) for rank in sorted(ranks))

    assert read(less, action) <= read(more, action)


def test_no_tenant_role_includes_actions_of_the_appliance() -> None:
    of_the_appliance = {Action.READ_APPLIANCE, Action.WRITE, Action.BILLING, Action.MEMBERS}

    assert not any(of_the_appliance & covered for covered in ALLOWED_IN_TENANT.values())
