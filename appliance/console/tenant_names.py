"""The tenants that somebody may see, for lists to choose from and for names beside ids. Knows no page.

All of them, however many there are: a tenant that is left out would be an id among names, and could not be chosen.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from appliance.tenancy.pages import every_row

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.tenancy.access import Access
    from appliance.tenancy.principals import Tenant


async def tenants_by_name(services: Services, access: Access) -> list[Tenant]:
    """Return the tenants that `access` shows in the order of their names, archived ones too."""
    tenants = await every_row(partial(services.tenants.list, include_archived=True, access=access))
    return sorted(tenants, key=lambda tenant: tenant.name.casefold())


async def tenant_names(services: Services, access: Access) -> dict[str, str]:
    """Return names by tenant id."""
    return {tenant.id: tenant.name for tenant in await tenants_by_name(services, access)}
