"""`gatehouse members`: members of tenants, their roles, and who can sign in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from appliance.base.texts import did_you_mean
from appliance.cli import output
from appliance.cli.connection import AdminClient, Work, run
from appliance.cli.failure import CommandFailed
from appliance.cli.options import DEFAULTS, CommonOptions
from appliance.cli.tenants import TenantFilter, call_on_tenant, find_tenant

app = typer.Typer(help="Manage members and their roles.", no_args_is_help=True)

COLUMNS = ("id", "email", "role", "disabled", "memberships", "created_at")
TENANT_COLUMNS = ("member_id", "email", "role", "disabled", "created_at")
KEEP_IT = "Pass on the password now: it is not shown again. It must be replaced at the first sign-in."
APPLIANCE_ROLES = "owner, admin, billing, viewer, or member for none."
TENANT_ROLES = "manager, developer or viewer."

Email = Annotated[str, typer.Argument(metavar="E-MAIL", help="The member's e-mail address.")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="TENANT", help="The tenant's id or name.")]


@app.command("list")
def list_members(
    tenant: TenantFilter = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List all members, or those of one tenant."""

    async def work(client: AdminClient) -> list[dict[str, Any]]:
        path = "/members" if tenant is None else f"/tenants/{(await find_tenant(client, tenant))['id']}/members"
        return await client.list_all(path)

    rows = run(options.settings(), work)
    if tenant is None:
        empty = "There are no members. Create one: gatehouse admin create E-MAIL"
        output.rows(rows, COLUMNS, empty=empty, as_json=options.as_json, line=_line)
    else:
        empty = "This tenant has no members. Invite one: gatehouse members invite E-MAIL"
        output.rows(rows, TENANT_COLUMNS, empty=empty, as_json=options.as_json)


def _line(member: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **member,
        "memberships": [f"{membership['role']}@{membership['tenant_id']}" for membership in member["memberships"]],
    }


@app.command("invite")
def invite(
    email: Email,
    tenant: Tenant,
    role: Annotated[str, typer.Option(metavar="ROLE", help=f"Role: {TENANT_ROLES}")] = "developer",
    options: CommonOptions = DEFAULTS,
) -> None:
    """Add a member to a tenant. Prints a new member's temporary password once, which must be replaced at the first sign-in."""
    body = {"email": email, "role": role}
    made = run(options.settings(), call_on_tenant(tenant, "POST", "/members", body=body))
    if made["password"] or options.as_json:
        output.item(made, as_json=options.as_json, note=KEEP_IT)
    else:
        output.item({**made, "password": "unchanged"}, as_json=False)


@app.command("set-role")
def set_role(
    email: Email,
    role: Annotated[
        str, typer.Argument(metavar="ROLE", help=f"In a tenant: {TENANT_ROLES} On the appliance: {APPLIANCE_ROLES}")
    ],
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Change the role in this tenant instead of on the appliance.")
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Change a member's role on the appliance or in a tenant."""
    work = _change(email, {"role": role}) if tenant is None else _at_membership(email, tenant, "PATCH", {"role": role})
    output.item(run(options.settings(), work), as_json=options.as_json)


@app.command("remove")
def remove(email: Email, tenant: Tenant, options: CommonOptions = DEFAULTS) -> None:
    """Remove a member from a tenant."""
    removed = run(options.settings(), _at_membership(email, tenant, "DELETE"))
    output.item(removed, as_json=options.as_json, note=f"{removed['email']} was removed from {tenant}; the account remains.")


@app.command("disable")
def disable(email: Email, options: CommonOptions = DEFAULTS) -> None:
    """Disable a member and end all their sessions."""
    output.item(run(options.settings(), _change(email, {"disabled": True})), as_json=options.as_json)


@app.command("enable")
def enable(email: Email, options: CommonOptions = DEFAULTS) -> None:
    """Enable a disabled member, so that they can sign in again."""
    output.item(run(options.settings(), _change(email, {"disabled": False})), as_json=options.as_json)


def _change(email: str, body: dict[str, Any]) -> Work:
    async def work(client: AdminClient) -> dict[str, Any]:
        member = await _find_in(client, "/members", "id", email, place="the appliance")
        return await client.call("PATCH", f"/members/{member}", body=body)

    return work


def _at_membership(email: str, tenant: str, method: str, body: dict[str, Any] | None = None) -> Work:
    async def work(client: AdminClient) -> dict[str, Any]:
        path = f"/tenants/{(await find_tenant(client, tenant))['id']}/members"
        member = await _find_in(client, path, "member_id", email, place=tenant)
        return await client.call(method, f"{path}/{member}", body=body)

    return work


async def _find_in(client: AdminClient, path: str, field: str, email: str, *, place: str) -> str:
    """Return the id, from the column `field` of the list `path`, of the member of `place` with this e-mail address."""
    rows = await client.list_all(path)
    for row in rows:
        if row["email"] == email.strip().lower():
            return str(row[field])
    hint = did_you_mean(email, [row["email"] for row in rows])
    raise CommandFailed(f"{place} has no member with the e-mail address {email!r}{hint}", code="not_found")
