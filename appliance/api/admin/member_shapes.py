"""The JSON of members, memberships and the caller. The only secret here is a password that was just created."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.api.shapes import Shape
from appliance.tenancy.access import Access
from appliance.tenancy.members import Member
from appliance.tenancy.memberships import Membership


class TenantRoleShape(Shape, kw_only=True):
    """A role in a tenant."""

    tenant_id: str
    role: str


class MemberShape(Shape, kw_only=True):
    """A person who can sign in to the console."""

    id: str
    email: str
    role: str
    disabled: bool
    memberships: list[TenantRoleShape]
    created_at: str


class NewMemberShape(MemberShape, kw_only=True):
    """A member with a new password, which is returned only in this response."""

    password: str


class MembershipShape(Shape, kw_only=True):
    """A member's role in a tenant."""

    tenant_id: str
    member_id: str
    email: str
    role: str
    disabled: bool
    created_at: str


class NewMembershipShape(MembershipShape, kw_only=True):
    """A membership, with the password if its member was created with it. The password is returned only in this response."""

    password: str | None


class MeShape(Shape, kw_only=True):
    """The caller and their roles."""

    kind: str
    id: str | None
    name: str
    role: str
    memberships: list[TenantRoleShape]


def member_shape(member: Member, memberships: Sequence[Membership]) -> MemberShape:
    """Return a member with the member's `memberships` as JSON."""
    return MemberShape.of(member, memberships=[TenantRoleShape.of(membership) for membership in memberships])


def me_shape(access: Access) -> MeShape:
    """Return the caller as JSON."""
    memberships = [TenantRoleShape(tenant_id=tenant_id, role=role) for tenant_id, role in sorted(access.tenants.items())]
    return MeShape.of(access.actor, role=access.role, memberships=memberships)
