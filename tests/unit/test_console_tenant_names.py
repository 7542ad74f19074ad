"""Names of tenants on pages, with more tenants than a page of the list has."""

from __future__ import annotations

from sqlalchemy import insert, select

from appliance.base.acting import SYSTEM
from appliance.base.tables import tenants
from appliance.console.tenant_names import tenant_names, tenants_by_name
from appliance.tenancy.access import Access
from appliance.tenancy.pages import PAGE_ROWS_MAX
from appliance.tenancy.roles import Role, TenantRole
from tests.support.cast import OWNER
from tests.support.console_fixtures import ConsoleApp
from tests.support.factories import pending, posted

LAST = "tn_zzz"


async def fill_first_page(console: ConsoleApp) -> None:
    """Add tenants until there is one more than a page of the list has; the last one is LAST."""
    async with console.services.db.writing() as connection:
        bob = (await connection.execute(select(tenants).where(tenants.c.id == console.cast.bob.tenant.id))).mappings().one()
        existing = len((await connection.execute(select(tenants.c.id))).all())
        ids = [f"tn_{number:04}" for number in range(PAGE_ROWS_MAX - existing)] + [LAST]
        await connection.execute(insert(tenants), [{**bob, "id": one, "name": f"Team {one}"} for one in ids])


async def test_names_include_tenants_beyond_the_first_page(console: ConsoleApp) -> None:
    await fill_first_page(console)

    found = await tenants_by_name(console.services, OWNER)

    assert len(found) == PAGE_ROWS_MAX + 1
    assert [tenant.name.casefold() for tenant in found] == sorted(tenant.name.casefold() for tenant in found)
    assert (await tenant_names(console.services, OWNER))[LAST] == f"Team {LAST}"


async def test_a_member_of_one_tenant_gets_only_its_name(console: ConsoleApp) -> None:
    bob = console.cast.bob.tenant
    member = Access(role=Role.MEMBER, actor=SYSTEM, tenants={bob.id: TenantRole.VIEWER})

    assert await tenant_names(console.services, member) == {bob.id: bob.name}


async def test_a_tenant_beyond_the_first_page_can_be_chosen_in_filters_and_is_shown_by_name(console: ConsoleApp) -> None:
    await fill_first_page(console)
    entry = pending(console.cast.bob, tenant_id=LAST)
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id))

    browser = await console.alice()

    for path in ("/requests", "/usage?period=today", "/audit"):
        assert f'<option value="{LAST}">Team {LAST}</option>' in (await browser.get(path)).text, path
    row = (await browser.get("/requests")).text.partition(f'<tr id="row-{entry.request_id}">')[2].partition("</tr>")[0]
    assert f">Team {LAST}</a>" in row
