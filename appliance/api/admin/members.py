"""`/admin/v1/members`, `/admin/v1/tenants/{id}/members` and `/admin/v1/me`: members, and their roles in tenants."""

from __future__ import annotations

import msgspec
from litestar import delete, get, patch, post
from litestar.params import FromPath

from appliance.api.admin.member_shapes import (
    MemberShape,
    MembershipShape,
    MeShape,
    NewMemberShape,
    NewMembershipShape,
    me_shape,
    member_shape,
)
from appliance.api.auth import authenticate_administrator, authenticate_anybody
from appliance.api.bodies import OMITTED, Omittable, decode_body, given_fields
from appliance.api.connection_services import services_of
from appliance.api.field_types import ApplianceRole, Email, RoleInTenant
from appliance.api.queries import PAGING, AdminRequest, paging
from appliance.api.shapes import PageShape, page_shape
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action
from appliance.tenancy.secrets import new_password


class NewMemberBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A member to create. The appliance generates the password."""

    email: Email
    role: ApplianceRole


class MemberPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a member to change. Fields left out keep their values."""

    role: ApplianceRole | Omittable = OMITTED
    disabled: bool | Omittable = OMITTED


class NewMembershipBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A member to add to a tenant."""

    email: Email
    role: RoleInTenant


class MembershipPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A member's new role in a tenant."""

    role: RoleInTenant


@get("/me", summary="Retrieve the caller")
async def retrieve_me(request: AdminRequest) -> MeShape:
    """Return the caller's name, role on the appliance and roles in tenants."""
    return me_shape(await authenticate_anybody(request))


@get("/members", summary="List members", opt={"query": PAGING})
async def list_members(request: AdminRequest) -> PageShape[MemberShape]:
    """Return all members with their roles in tenants, in the order they were created."""
    access = await authenticate_administrator(request, Action.READ_APPLIANCE)
    services = services_of(request)
    page = await services.members.list(*paging(request))
    memberships = await services.memberships.of_members([member.id for member in page.data], access=access)
    return page_shape(page, lambda member: member_shape(member, [row for row in memberships if row.member_id == member.id]))


@post("/members", summary="Create a member", opt={"body": NewMemberBody, "errors": (409,)})
async def create_member(request: AdminRequest) -> NewMemberShape:
    """Create a member with a role on the appliance. The temporary `password` is returned only in this response."""
    await authenticate_administrator(request, Action.MEMBERS)
    body = decode_body(await request.body(), NewMemberBody)
    password = new_password()
    member = await services_of(request).members.create(body.email, password, body.role, temporary=True)
    return NewMemberShape.of(member, memberships=[], password=password)


@get("/members/{member_id:str}", summary="Retrieve a member")
async def retrieve_member(request: AdminRequest, member_id: FromPath[str]) -> MemberShape:
    """Return one member, disabled or not."""
    access = await authenticate_administrator(request, Action.READ_APPLIANCE)
    return await _member(request, member_id, access)


@patch("/members/{member_id:str}", summary="Change a member", opt={"body": MemberPatch, "errors": (409,)})
async def change_member(request: AdminRequest, member_id: FromPath[str]) -> MemberShape:
    """Change a member's role on the appliance, or disable the member, who is then signed out everywhere at once."""
    access = await authenticate_administrator(request, Action.MEMBERS)
    body = decode_body(await request.body(), MemberPatch)
    await services_of(request).members.change(member_id, **given_fields(body))
    return await _member(request, member_id, access)


@post("/members/{member_id:str}/reset-password", status_code=200, summary="Reset a member's password")
async def reset_password(request: AdminRequest, member_id: FromPath[str]) -> NewMemberShape:
    """Set a temporary password, which is returned only in this response, and end the member's sessions."""
    await authenticate_administrator(request, Action.MEMBERS)
    members = services_of(request).members
    member = await members.get(member_id)
    password = new_password()
    member = await members.reset_password(member.email, password, temporary=True)
    return NewMemberShape.of(member, memberships=[], password=password)


@get("/tenants/{tenant_id:str}/members", summary="List a tenant's members", opt={"query": PAGING})
async def list_memberships(request: AdminRequest, tenant_id: FromPath[str]) -> PageShape[MembershipShape]:
    """Return the members of a tenant, with their roles in it."""
    access = await authenticate_administrator(request, Action.READ, tenant_id)
    services = services_of(request)
    tenant = await services.tenants.get(tenant_id, access=access)
    page = await services.memberships.of_tenant(tenant.id, *paging(request), access=access)
    return page_shape(page, MembershipShape.of)


@post("/tenants/{tenant_id:str}/members", summary="Add a member to a tenant", opt={"body": NewMembershipBody, "errors": (409,)})
async def invite_member(request: AdminRequest, tenant_id: FromPath[str]) -> NewMembershipShape:
    """Add a member to a tenant. Only an owner of the appliance can add an unknown address: this creates a member with a
    temporary `password`, which is returned only in this response."""
    access = await authenticate_administrator(request, Action.TENANT_MEMBERS, tenant_id)
    body = decode_body(await request.body(), NewMembershipBody)
    services = services_of(request)
    membership, password = await services.memberships.invite(services.members, tenant_id, body.email, body.role, access=access)
    return NewMembershipShape.of(membership, password=password)


@patch(
    "/tenants/{tenant_id:str}/members/{member_id:str}",
    summary="Change a member's role in a tenant",
    opt={"body": MembershipPatch},
)
async def change_membership(request: AdminRequest, tenant_id: FromPath[str], member_id: FromPath[str]) -> MembershipShape:
    """Change a member's role in a tenant. The change applies from the member's next request on."""
    access = await authenticate_administrator(request, Action.TENANT_MEMBERS, tenant_id)
    body = decode_body(await request.body(), MembershipPatch)
    return MembershipShape.of(await services_of(request).memberships.change(tenant_id, member_id, body.role, access=access))


@delete("/tenants/{tenant_id:str}/members/{member_id:str}", status_code=200, summary="Remove a member from a tenant")
async def remove_membership(request: AdminRequest, tenant_id: FromPath[str], member_id: FromPath[str]) -> MembershipShape:
    """Remove a member from a tenant and return the ended membership. The member can still sign in."""
    access = await authenticate_administrator(request, Action.TENANT_MEMBERS, tenant_id)
    return MembershipShape.of(await services_of(request).memberships.remove(tenant_id, member_id, access=access))


async def _member(request: AdminRequest, member_id: str, access: Access) -> MemberShape:
    services = services_of(request)
    member = await services.members.get(member_id)
    return member_shape(member, await services.memberships.of_members([member.id], access=access))
