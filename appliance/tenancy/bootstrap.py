"""First start: creates an owner who can sign in, an administrator token, and a tenant with a key. Later starts do nothing.

If a start is interrupted before the login was shown, the next start creates new secrets and revokes the unseen ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.base.errors import NotFound
from appliance.base.settings import Settings
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.first_login import PendingLogin, read_pending, write_pending
from appliance.tenancy.keys import Keys
from appliance.tenancy.members import Members
from appliance.tenancy.roles import Role
from appliance.tenancy.secrets import new_password
from appliance.tenancy.tenants import Tenants

FIRST_EMAIL = "admin@localhost"
FIRST_TENANT = "demo"
FIRST_KEY = "first key"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStart:
    """The login that is shown to the operator once. `password` and `admin_token` are None if the operator chose them."""

    email: str
    password: str | None = field(repr=False)
    admin_token: str | None = field(repr=False)
    tenant_id: str
    tenant_name: str
    api_key: str = field(repr=False)


async def bootstrap(
    settings: Settings, members: Members, tokens: AdminTokens, tenants: Tenants, keys: Keys
) -> FirstStart | None:
    """Return the generated secrets, or None when a login has already been shown. Raises UnusableData.

    Call `mark_shown` once the operator has seen them. The member is created last, so that an interrupted first start is
    simply repeated.
    """
    unshown = await _revoke_unshown(settings, tokens, keys)
    has_members = await members.any_exist()
    if has_members and unshown is None:
        return None
    password = None if settings.admin_password else new_password()
    tenant = await tenants.find(FIRST_TENANT, access=WHOLE_APPLIANCE)
    tenant = tenant or await tenants.create(name=FIRST_TENANT, access=WHOLE_APPLIANCE)
    key, api_key = await keys.create(tenant.id, name=FIRST_KEY, access=WHOLE_APPLIANCE)
    token_id, admin_token = await _first_token(settings, tokens)
    email = unshown.email if has_members and unshown is not None else settings.admin_email or FIRST_EMAIL
    write_pending(settings.data_dir, PendingLogin(email=email, key_id=key.id, token_id=token_id))
    first_password = settings.admin_password or password or ""
    if has_members:
        await members.reset_password(email, first_password)
    else:
        await members.create(email, first_password, Role.OWNER)
    return FirstStart(
        email=email,
        password=password,
        admin_token=admin_token,
        tenant_id=tenant.id,
        tenant_name=tenant.name,
        api_key=api_key,
    )


async def _revoke_unshown(settings: Settings, tokens: AdminTokens, keys: Keys) -> PendingLogin | None:
    """Return the login that was created in this database but never shown, if any; revoke its key and token."""
    pending = read_pending(settings.data_dir)
    if pending is None:
        return None
    try:
        await keys.revoke(pending.key_id, access=WHOLE_APPLIANCE)
    except NotFound:
        return None  # the pending login belongs to another database that this data folder was used with
    if pending.token_id is not None:
        await tokens.revoke(pending.token_id)
    return pending


async def _first_token(settings: Settings, tokens: AdminTokens) -> tuple[str | None, str | None]:
    """Return (id, secret) of the new token; both are None if the operator chose the token."""
    if settings.admin_token:
        await tokens.ensure(settings.admin_token, "first token", Role.OWNER)
        return None, None
    token, secret = await tokens.create("first token", Role.OWNER)
    return token.id, secret
