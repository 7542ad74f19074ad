"""All visible tenants, for select fields and to show names instead of ids. Knows no page.

Never only some of them: others would be shown by id and could not be selected.
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
    """Return the tenants visible to `access`, archived ones too, sorted by name."""
    tenants = await read_every_page(partial(services.tenants.list, include_archived=True, access=access))
    return sorted(tenants, key=lambda tenant: tenant.name.casefold())


async def tenant_names(services: Services, access: Access) -> dict[str, str]:
    """Return the names of the visible tenants by id."""
    return {tenant.id: tenant.name for tenant in await tenants_by_name(services, access)}
