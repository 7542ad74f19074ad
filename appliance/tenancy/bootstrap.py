"""The first start: somebody who can sign in, a token for scripts, a tenant with a key. Later starts do nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.base.settings import Settings
from appliance.tenancy.admin_tokens import AdminTokens
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
    """What the operator is shown, once. `password` and `admin_token` are None when the operator has set them."""

    email: str
    password: str | None = field(repr=False)
    admin_token: str | None = field(repr=False)
    tenant_id: str
    tenant_name: str
    api_key: str = field(repr=False)


async def bootstrap(
    settings: Settings, members: Members, tokens: AdminTokens, tenants: Tenants, keys: Keys
) -> FirstStart | None:
    """Return the generated secrets of a first start, or None when there are members already.

    The member is made last, so that a first start that was interrupted is a first start again.
    """
    if await members.any_exist():
        return None
    email = settings.admin_email or FIRST_EMAIL
    password = None if settings.admin_password else new_password()
    tenant = await tenants.find(FIRST_TENANT) or await tenants.create(name=FIRST_TENANT)
    _key, api_key = await keys.create(tenant.id, name=FIRST_KEY)
    admin_token = None
    if settings.admin_token:
        await tokens.ensure(settings.admin_token, "first token", Role.OWNER)
    else:
        _token, admin_token = await tokens.create("first token", Role.OWNER)
    await members.create(email, settings.admin_password or password or "", Role.OWNER)
    return FirstStart(
        email=email,
        password=password,
        admin_token=admin_token,
        tenant_id=tenant.id,
        tenant_name=tenant.name,
        api_key=api_key,
    )
