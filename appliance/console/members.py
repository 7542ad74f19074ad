"""Members: who can sign in, with which role on the appliance. Invitations, changes, resets of password and second factor.

A password created here is shown in one response only. Roles in a tenant are set on the tenant's page.
"""

from __future__ import annotations

from litestar import get, post
from litestar.params import FromPath

from appliance.console.context import Context, ContextDependency
from appliance.console.forms import Form
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.console.tenant_names import tenant_names
from appliance.console.urls import next_page_url
from appliance.tenancy.members import EMAIL_CHARS_MAX, Member
from appliance.tenancy.memberships import Membership
from appliance.tenancy.roles import Action, Role
from appliance.tenancy.secrets import new_password

PAGE_ROWS = 100
FIELDS = ("email", "role")
ROLES = (
    (Role.OWNER.value, "Owner: everything"),
    (Role.ADMIN.value, "Admin: everything except user management"),
    (Role.BILLING.value, "Billing: reads everything, manages prices and invoices"),
    (Role.VIEWER.value, "Viewer: reads everything"),
    (Role.MEMBER.value, "Member: only their own tenants"),
)
CONFIRMATIONS = {
    "password": (
        "New password",
        "The old password stops working and all devices are signed out. The new one is temporary: it is shown once and must "
        "be changed at the next sign-in.",
        "Create password",
    ),
    "second-factor": (
        "Reset the second factor",
        "For a lost phone. Signing in then requires the password alone. All devices are signed out.",
        "Reset",
    ),
}


@get("/members", guards=[needs(Action.READ_APPLIANCE)])
async def list_members(context: ContextDependency) -> Html:
    """All members with their roles, second factor and last activity."""
    services, access = context.services, context.access
    page = await services.members.list(PAGE_ROWS, context.query.get("cursor"))
    ids = [member.id for member in page.data]
    return context.page(
        "pages/members.html",
        members=page.data,
        factors=await services.second_factors.enabled_of(ids),
        last_seen=await services.sessions.last_seen_of(ids),
        tenant_roles=_tenant_roles(
            await services.memberships.of_members(ids, access=access),
            await tenant_names(services, access),
        ),
        next_page=next_page_url("/members", page),
    )


@get("/members/new", guards=[needs(Action.MEMBERS)])
async def new_member(context: ContextDependency) -> Html:
    """The form for an invitation."""
    return _invitation(context, None)


@post("/members", guards=[needs(Action.MEMBERS)], status_code=200)
async def invite_member(context: ContextDependency) -> Html:
    """Create a member and show the password, or show the form again with the errors."""
    form = await context.form()
    email, role = form.text("email", chars_max=EMAIL_CHARS_MAX), form.choice("role", [role for role, _ in ROLES])
    if not form.errors:
        password = new_password()
        with form.refusals(FIELDS):
            member = await context.services.members.create(email, password, role, temporary=True)
            return show_password(context, member.email, password, back="/members")
    return _invitation(context, form)


@get("/members/{member_id:str}", guards=[needs(Action.MEMBERS)])
async def edit_member(context: ContextDependency, member_id: FromPath[str]) -> Html:
    """The form for the role and state of a member."""
    return await _change_form(context, await context.services.members.get(member_id), None)


@post("/members/{member_id:str}", guards=[needs(Action.MEMBERS)], status_code=200)
async def change_member(context: ContextDependency, member_id: FromPath[str]) -> Html:
    """Save role and state, or show the form again with the errors, such as for the last owner."""
    member = await context.services.members.get(member_id)
    form = await context.form()
    role = form.choice("role", [role for role, _ in ROLES])
    if not form.errors:
        with form.refusals(FIELDS):
            await context.services.members.change(member_id, role=role, disabled=form.raw("disabled") == "yes")
            return context.redirect("/members", done="member-saved")
    return await _change_form(context, member, form)


@get("/members/{member_id:str}/password", guards=[needs(Action.MEMBERS)])
async def confirm_password(context: ContextDependency, member_id: FromPath[str]) -> Html:
    """Confirm a password reset and explain its consequences."""
    return _confirm(context, await context.services.members.get(member_id), "password")


@post("/members/{member_id:str}/password", guards=[needs(Action.MEMBERS)], status_code=200)
async def reset_password(context: ContextDependency, member_id: FromPath[str]) -> Html:
    """Replace the password and show the new one."""
    member, password = await context.services.members.get(member_id), new_password()
    await context.services.members.reset_password(member.email, password, temporary=True)
    return show_password(context, member.email, password, back="/members")


@get("/members/{member_id:str}/second-factor", guards=[needs(Action.MEMBERS)])
async def confirm_factor_reset(context: ContextDependency, member_id: FromPath[str]) -> Html:
    """Confirm a reset of the second factor and explain its consequences."""
    return _confirm(context, await context.services.members.get(member_id), "second-factor")


@post("/members/{member_id:str}/second-factor", guards=[needs(Action.MEMBERS)], status_code=200)
async def reset_factor(context: ContextDependency, member_id: FromPath[str]) -> Html:
    """Remove the second factor of a member."""
    await context.services.second_factors.reset(member_id)
    return context.redirect("/members", done="factor-reset")


def show_password(context: Context, email: str, password: str, *, back: str) -> Html:
    """Return the only page that shows this password; `back` is the path to continue to."""
    return context.sheet("fragments/member_password.html", title=f"Password of {email}", password=password, back=back)


def _tenant_roles(memberships: list[Membership], names: dict[str, str]) -> dict[str, list[str]]:
    """Return the tenant roles of each member as text: `manager of acme`."""
    roles: dict[str, list[str]] = {}
    for membership in memberships:
        tenant = names.get(membership.tenant_id, membership.tenant_id)
        roles.setdefault(membership.member_id, []).append(f"{membership.role.value} of {tenant}")
    return roles


def _invitation(context: Context, form: Form | None) -> Html:
    return context.sheet("fragments/member_new.html", title="Invite a member", form=form, roles=ROLES)


async def _change_form(context: Context, member: Member, form: Form | None) -> Html:
    return context.sheet(
        "fragments/member_change.html",
        title=f"Change {member.email}",
        person=member,
        form=form,
        roles=ROLES,
        has_factor=member.id in await context.services.second_factors.enabled_of([member.id]),
    )


def _confirm(context: Context, member: Member, what: str) -> Html:
    title, consequence, verb = CONFIRMATIONS[what]
    return context.sheet(
        "fragments/member_confirm.html",
        title=f"{title} of {member.email}",
        person=member,
        what=what,
        consequence=consequence,
        verb=verb,
    )
