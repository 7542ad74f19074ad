"""The members of a tenant, a section of its page: their roles, invitations, changes and removals."""

from __future__ import annotations

from typing import Any

from litestar import get, post
from litestar.params import FromPath

from appliance.base.errors import BadRequest, Conflict, RoleNotAllowed
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import Form, sentence
from appliance.console.members import show_password
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.tenancy.members import EMAIL_CHARS_MAX
from appliance.tenancy.memberships import Membership
from appliance.tenancy.roles import Action, TenantRole

SHOWN_MAX = 200
FIELDS = ("email", "role")
ROLES = (
    (TenantRole.MANAGER.value, "Manager: manages keys, members and alerts, reads invoices and the audit log"),
    (TenantRole.DEVELOPER.value, "Developer: reads keys, requests and usage, manages keys, cancels requests"),
    (TenantRole.VIEWER.value, "Viewer: reads keys, requests and usage"),
)
ROLE_NAMES = [role for role, _ in ROLES]


async def tenant_members_of(context: Context, tenant_id: str) -> dict[str, Any]:
    """Return the template values of the section on the tenant's page."""
    page = await context.services.memberships.of_tenant(tenant_id, SHOWN_MAX, access=context.access)
    return {
        "members": page.data,
        "more_members": page.has_more,
        "may_change_members": context.access.may(Action.TENANT_MEMBERS, tenant_id),
    }


@get("/tenants/{tenant_id:str}/members/new", guards=[needs(Action.TENANT_MEMBERS)])
async def new_tenant_member(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """The form to add somebody to a tenant."""
    return await _invitation(context, tenant_id, None)


@post("/tenants/{tenant_id:str}/members", guards=[needs(Action.TENANT_MEMBERS)], status_code=200)
async def invite_tenant_member(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """Add somebody to the tenant; a new member gets a password, shown in this response only."""
    form, services = await context.form(), context.services
    email, role = form.text("email", chars_max=EMAIL_CHARS_MAX), form.choice("role", ROLE_NAMES)
    if not form.errors:
        try:
            membership, password = await services.memberships.invite(
                services.members, tenant_id, email, role, access=context.access
            )
            if password is None:
                return context.redirect(f"/tenants/{tenant_id}", done="tenant-member-added")
            return show_password(context, membership.email, password, back=f"/tenants/{tenant_id}")
        except (BadRequest, Conflict) as error:
            form.fail_with(error, FIELDS)
        except RoleNotAllowed as error:
            form.fail("email", sentence(error.message))
    return await _invitation(context, tenant_id, form)


@get("/tenants/{tenant_id:str}/members/{member_id:str}", guards=[needs(Action.TENANT_MEMBERS)])
async def edit_tenant_member(context: ContextDependency, tenant_id: FromPath[str], member_id: FromPath[str]) -> Html:
    """The form for the role of a member in the tenant."""
    return _change_form(context, await _membership(context, tenant_id, member_id), None)


@post("/tenants/{tenant_id:str}/members/{member_id:str}", guards=[needs(Action.TENANT_MEMBERS)], status_code=200)
async def change_tenant_member(context: ContextDependency, tenant_id: FromPath[str], member_id: FromPath[str]) -> Html:
    """Save the role, or show the form again with the errors."""
    membership, form = await _membership(context, tenant_id, member_id), await context.form()
    role = form.choice("role", ROLE_NAMES)
    if form.errors:
        return _change_form(context, membership, form)
    await context.services.memberships.change(tenant_id, member_id, role, access=context.access)
    return context.redirect(f"/tenants/{tenant_id}", done="tenant-member-saved")


@post("/tenants/{tenant_id:str}/members/{member_id:str}/remove", guards=[needs(Action.TENANT_MEMBERS)], status_code=200)
async def remove_tenant_member(context: ContextDependency, tenant_id: FromPath[str], member_id: FromPath[str]) -> Html:
    """Remove a member from the tenant. Members who remove themselves are redirected to a page that they may still see."""
    await context.services.memberships.remove(tenant_id, member_id, access=context.access)
    access = context.access
    still_sees_tenant = access.sees_all or access.actor.id != member_id
    return context.redirect(f"/tenants/{tenant_id}" if still_sees_tenant else "/tenants", done="tenant-member-removed")


async def _membership(context: Context, tenant_id: str, member_id: str) -> Membership:
    """Return the membership. Raises NotFound."""
    memberships, access = context.services.memberships, context.access
    return await memberships.get(tenant_id, member_id, access=access, action=Action.TENANT_MEMBERS)


async def _invitation(context: Context, tenant_id: str, form: Form | None) -> Html:
    tenant = await context.services.tenants.get(tenant_id, access=context.access)
    return context.sheet(
        "fragments/tenant_member_new.html",
        title=f"Add a member to {tenant.name}",
        tenant=tenant,
        form=form,
        roles=ROLES,
    )


def _change_form(context: Context, membership: Membership, form: Form | None) -> Html:
    return context.sheet(
        "fragments/tenant_member_change.html",
        title=f"Role of {membership.email}",
        person=membership,
        form=form,
        roles=ROLES,
    )
