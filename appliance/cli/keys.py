"""`gatehouse keys`: list, create, update, rotate and revoke API keys."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.base.ids import is_id
from appliance.cli import output
from appliance.cli.connection import AdminClient, Work, run
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.limit_options import NO_OWNER_LIMITS, OwnerLimitOptions
from appliance.cli.options import DEFAULTS, CommonOptions
from appliance.cli.tenants import TenantArgument, TenantFilter, call_on_tenant, find_tenant, with_readable_budgets

app = typer.Typer(help="Manage the tenants' API keys.", no_args_is_help=True)

COLUMNS = (
    "id",
    "tenant",
    "tenant_id",
    "name",
    "prefix",
    "scopes",
    "expires_at",
    "revoked_at",
    "replaced_by",
    "last_used_at",
    "created_at",
)
KEEP_IT = "Save the key now: it is not shown again."

KeyId = Annotated[str, typer.Argument(metavar="KEY", help="The key's id or public prefix (not the secret).")]


@app.command("list")
def list_keys(
    tenant: TenantFilter = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List the keys, without secrets."""
    rows = run(options.settings(), lambda client: _keys(client, tenant))
    output.rows(rows, COLUMNS, empty="There are no keys. Create one: gatehouse keys create TENANT", as_json=options.as_json)


@app.command("create")
def create(
    tenant: TenantArgument,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the key, such as its purpose.")] = "key",
    scope: Annotated[
        list[str] | None, typer.Option(metavar="SCOPE", help="inference or usage; repeatable; default: inference.")
    ] = None,
    expires_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Expiry, such as 2027-01-31T00:00:00Z; default: never.")
    ] = None,
    network: Annotated[
        list[str] | None, typer.Option(metavar="CIDR", help="Network from which the key may be used; repeatable; default: any.")
    ] = None,
    limits: OwnerLimitOptions = NO_OWNER_LIMITS,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Create a key and print its secret once."""
    optional = {"scopes": scope, "expires_at": expires_at, "allowed_networks": network}
    body: dict[str, Any] = {"name": name} | {field: value for field, value in optional.items() if value not in (None, [])}
    body |= limits.body()
    key = run(options.settings(), call_on_tenant(tenant, "POST", "/keys", body=body))
    _print_secret(key, as_json=options.as_json)


@app.command("update")
def update(
    key: KeyId,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="New name.")] = None,
    scope: Annotated[list[str] | None, typer.Option(metavar="SCOPE", help="inference or usage; repeatable.")] = None,
    expires_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Expiry, such as 2027-01-31T00:00:00Z, or `none` for never.")
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(metavar="CIDR", help="Network from which the key may be used; repeatable; `all` for any."),
    ] = None,
    limits: OwnerLimitOptions = NO_OWNER_LIMITS,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Change a key. Options that are not given stay unchanged."""
    given = {"name": name, "scopes": scope or None}
    body: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if expires_at is not None:
        body["expires_at"] = None if expires_at == "none" else expires_at
    if network:
        body["allowed_networks"] = None if network == ["all"] else network
    body |= limits.body()
    if not body:
        raise WrongUsage("nothing to change: give at least one option (see gatehouse keys update --help)")
    settings = options.settings()

    async def work(client: AdminClient) -> dict[str, Any]:
        changed = await call_on_key(key, "PATCH", body=body)(client)
        if options.as_json:
            return changed
        tenant = await client.call("GET", f"/tenants/{changed['tenant_id']}")
        return with_readable_budgets(changed, tenant["currency"] or settings.currency)

    output.item(run(settings, work), as_json=options.as_json)


@app.command("rotate")
def rotate(
    key: KeyId,
    grace_s: Annotated[int, typer.Option(metavar="SECONDS", help="How long the old secret continues to work.")] = 0,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Rotate a key and print the new secret once. The old one stops working immediately, or after --grace-s."""
    work = call_on_key(key, "POST", "/rotate", body={"grace_s": grace_s})
    _print_secret(run(options.settings(), work), as_json=options.as_json)


@app.command("revoke")
def revoke(key: KeyId, options: CommonOptions = DEFAULTS) -> None:
    """Revoke a key. It stops working immediately."""
    output.item(run(options.settings(), call_on_key(key, "DELETE")), as_json=options.as_json)


async def _keys(client: AdminClient, tenant: str | None) -> list[dict[str, Any]]:
    query = {"include_archived": "true"}
    owners = [await find_tenant(client, tenant)] if tenant is not None else await client.list_all("/tenants", query=query)
    return [
        {**key, "tenant": owner["name"]} for owner in owners for key in await client.list_all(f"/tenants/{owner['id']}/keys")
    ]


async def find_key(client: AdminClient, which: str) -> dict[str, Any]:
    """Return the key with this id or public prefix."""
    if is_id(which, "key") and (found := await client.find("/keys", which)) is not None:
        return found
    for key in await _keys(client, None):
        if which in (key["id"], key["prefix"]):
            return key
    raise CommandFailed("there is no key with this id or public prefix", code="not_found")


def call_on_key(which: str, method: str, below: str = "", *, body: object = None) -> Work:
    """Return work that calls `/keys/{id}{below}` for the key with this id or public prefix."""

    async def work(client: AdminClient) -> dict[str, Any]:
        key = await find_key(client, which)
        return await client.call(method, f"/keys/{key['id']}{below}", body=body)

    return work


def _print_secret(key: dict[str, Any], *, as_json: bool) -> None:
    shown = {"key": key["key"], **{name: key[name] for name in COLUMNS if name in key}}
    output.item(key if as_json else shown, as_json=as_json, note=KEEP_IT)
