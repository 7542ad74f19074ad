"""The tenants that the member may see, for lists of choices and to show names instead of ids. Knows no page.

Always all of them: a tenant left out would show as an id among names, and could not be chosen.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from appliance.tenancy.pages import read_every_page

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.tenancy.access import Access
    from appliance.tenancy.principals import Tenant


async def tenants_by_name(services: Services, access: Access) -> list[Tenant]:
    """Return the tenants that `access` shows in the order of their names, archived ones too."""
    tenants = await read_every_page(partial(services.tenants.list, include_archived=True, access=access))
    return sorted(tenants, key=lambda tenant: tenant.name.casefold())


async def tenant_names(services: Services, access: Access) -> dict[str, str]:
    """Return names by tenant id."""
    return {tenant.id: tenant.name for tenant in await tenants_by_name(services, access)}
