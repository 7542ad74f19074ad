"""The JSON of people: members, memberships and the caller. The only secret it sees is a password that was just created."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from appliance.api.shapes import shape_of
from appliance.tenancy.access import Access
from appliance.tenancy.members import Member
from appliance.tenancy.memberships import Membership


class TenantRoleShape(msgspec.Struct, kw_only=True):
    """A role in a tenant."""

    tenant_id: str
    role: str


class MemberShape(msgspec.Struct, kw_only=True):
    """A person who can sign in to the console."""

    id: str
    email: str
    role: str
    disabled: bool
    memberships: list[TenantRoleShape]
    created_at: str


class NewMemberShape(MemberShape, kw_only=True):
    """A member with a new password, shown only in this answer."""

    password: str


class MembershipShape(msgspec.Struct, kw_only=True):
    """A member's role in a tenant."""

    tenant_id: str
    member_id: str
    email: str
    role: str
    disabled: bool
    created_at: str


class NewMembershipShape(MembershipShape, kw_only=True):
    """A membership with the password of a member created for it, shown only in this answer."""

    password: str | None


class MeShape(msgspec.Struct, kw_only=True):
    """The caller and their roles."""

    kind: str
    id: str | None
    name: str
    role: str
    memberships: list[TenantRoleShape]


def member_shape(member: Member, memberships: Sequence[Membership]) -> MemberShape:
    """Return a member as JSON; `memberships` are his own."""
    return shape_of(MemberShape, member, memberships=[shape_of(TenantRoleShape, each) for each in memberships])


def new_member_shape(member: Member, password: str) -> NewMemberShape:
    """Return a member as JSON with a password that was made for him."""
    return shape_of(NewMemberShape, member, memberships=[], password=password)


def membership_shape(membership: Membership) -> MembershipShape:
    """Return a membership as JSON."""
    return shape_of(MembershipShape, membership)


def new_membership_shape(membership: Membership, password: str | None) -> NewMembershipShape:
    """Return a membership as JSON with the password of a new member."""
    return shape_of(NewMembershipShape, membership, password=password)


def me_shape(access: Access) -> MeShape:
    """Return the caller as JSON."""
    memberships = [TenantRoleShape(tenant_id=tenant_id, role=role) for tenant_id, role in sorted(access.tenants.items())]
    return shape_of(MeShape, access.actor, role=access.role, memberships=memberships)
