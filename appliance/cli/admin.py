"""`gatehouse admin`: administrators who can sign in to the console, and tokens for the administrator API.

Works directly on the database, so that anyone with access to the data folder can reset a lost password.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from appliance.base.clock import SystemClock, rfc3339
from appliance.cli import output
from appliance.cli.connection import open_database
from appliance.cli.failure import WrongUsage
from appliance.cli.operator import operator
from appliance.cli.options import DEFAULTS, CommonOptions

if TYPE_CHECKING:
    from appliance.base.db import Database
    from appliance.base.settings import Settings
    from appliance.tenancy.admin_tokens import AdminToken
    from appliance.tenancy.members import Member

app = typer.Typer(help="Manage administrators' sign-in, and tokens for /admin/v1.", no_args_is_help=True)

T = TypeVar("T")
ROLES = "Role: owner, admin, billing or viewer."
RESERVED_NAMES = ("create", "list", "revoke")  # subcommands elsewhere: here they are surely typed by mistake
KEEP_IT = "Save it now: it is not shown again."
TEMPORARY = "The password is temporary and must be replaced at the next sign-in."
TOKEN_COLUMNS = ("id", "name", "role", "revoked_at", "created_at")

Email = Annotated[str, typer.Argument(metavar="E-MAIL", help="The member's e-mail address.")]
FromStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password from standard input instead of generating one.")
]
Temporary = Annotated[bool, typer.Option("--temporary", help="The member must replace the password at the next sign-in.")]


@app.command("create")
def create(
    email: Email,
    role: Annotated[str, typer.Option(metavar="ROLE", help=ROLES)] = "admin",
    password_stdin: FromStdin = False,
    temporary: Temporary = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Create a member who can sign in to the console. Prints the generated password once. It stays valid unless --temporary
    is given."""
    from appliance.tenancy.members import Members

    given, password = _password(password_stdin)
    settings = options.settings()
    _make_tables(settings)
    member = _on_database(settings, lambda db: Members(db, SystemClock()).create(email, password, role, temporary=temporary))
    _print_new_login(member, None if given else password, as_json=options.as_json)


@app.command("reset-password")
def reset_password(
    email: Email,
    password_stdin: FromStdin = False,
    temporary: Temporary = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Reset a member's password and end all their sessions. Prints a generated password once."""
    from appliance.tenancy.members import Members

    given, password = _password(password_stdin)
    settings = options.settings()
    member = _on_database(settings, lambda db: Members(db, SystemClock()).reset_password(email, password, temporary=temporary))
    _print_new_login(member, None if given else password, as_json=options.as_json)


@app.command("reset-second-factor")
def reset_second_factor(email: Email, options: CommonOptions = DEFAULTS) -> None:
    """Remove a member's second factor (lost device). The password alone is enough until a new one is set up."""
    from appliance.tenancy.second_factor import reset_by_email

    member = _on_database(options.settings(), lambda db: reset_by_email(db, SystemClock(), email))
    output.item(_member_facts(member), as_json=options.as_json)


@app.command("unlink-provider")
def unlink_provider(email: Email, options: CommonOptions = DEFAULTS) -> None:
    """Unlink a member from the sign-in provider. The next sign-in there links them again, by verified e-mail."""
    from appliance.tenancy.identities import unlink_by_email

    member = _on_database(options.settings(), lambda db: unlink_by_email(db, SystemClock(), email))
    output.item(_member_facts(member), as_json=options.as_json)


@app.command("token")
def token(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the new token, such as its purpose.")] = None,
    role: Annotated[str, typer.Option(metavar="ROLE", help=ROLES)] = "admin",
    show: Annotated[bool, typer.Option("--list", help="List the tokens, without secrets.")] = False,
    revoke: Annotated[str | None, typer.Option(metavar="ID", help="Revoke the token with this id.")] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Create, list or revoke bearer tokens for /admin/v1. Prints a new token once."""
    from appliance.tenancy.admin_tokens import AdminTokens
    from appliance.tenancy.pages import read_every_page

    if (name is not None) + show + (revoke is not None) != 1:
        raise WrongUsage("give exactly one of: a name for a new token, --list, or --revoke ID")
    if name in RESERVED_NAMES:
        raise WrongUsage(f"{name!r} would be the name of a new token: use --list or --revoke ID, or choose another name")
    settings = options.settings()
    if revoke is not None:
        revoked = _on_database(settings, lambda db: AdminTokens(db, SystemClock()).revoke(revoke))
        output.item(_token_row(revoked), as_json=options.as_json)
    elif show:
        found = _on_database(settings, lambda db: read_every_page(AdminTokens(db, SystemClock()).list))
        output.rows(
            [_token_row(known) for known in found], TOKEN_COLUMNS, empty="There are no tokens.", as_json=options.as_json
        )
    else:
        made, secret = _on_database(settings, lambda db: AdminTokens(db, SystemClock()).create(str(name), role))
        output.item({"token": secret, **_token_row(made)}, as_json=options.as_json, note=KEEP_IT)


def _password(from_stdin: bool) -> tuple[bool, str]:
    """Return whether the password was given on standard input, and the given or generated password."""
    from appliance.tenancy.secrets import new_password

    return (True, sys.stdin.readline().rstrip("\n")) if from_stdin else (False, new_password())


def _make_tables(settings: Settings) -> None:
    """Create the tables if there are none: an administrator may be created before the first start."""
    from appliance.base import migrations

    if migrations.current_revision(settings.database_url) is None:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        migrations.upgrade(settings.database_url)


def _on_database(settings: Settings, work: Callable[[Database], Awaitable[T]]) -> T:
    """Run `work` on the database, whose schema must be up to date."""
    from appliance.base.acting import act_as

    async def work_as_operator() -> T:
        act_as(operator())
        async with open_database(settings) as database:
            return await work(database)

    return asyncio.run(work_as_operator())


def _print_new_login(member: Member, generated: str | None, *, as_json: bool) -> None:
    """Print a member whose password was set. `generated`: the password if it was generated, None if it was given."""
    secret = {} if generated is None else {"password": generated}
    notes = [KEEP_IT] * bool(secret) + [TEMPORARY] * member.password_temporary
    output.item({**_member_facts(member), **secret}, as_json=as_json, note=" ".join(notes))


def _member_facts(member: Member) -> dict[str, Any]:
    return {"id": member.id, "email": member.email, "role": str(member.role)}


def _token_row(token: AdminToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "role": str(token.role),
        "revoked_at": None if token.revoked_at is None else rfc3339(token.revoked_at),
        "created_at": rfc3339(token.created_at),
    }
