"""Accessibility of every page by the rules of axe in both colour schemes, and layout at several widths.

The schemes differ only by the values of `light-dark()`, so that the dark one is checked by the rules of colours only.
"""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from appliance.metering.economics import Hardware, HostedPrice
from appliance.metering.invoicing.seller import Seller
from appliance.tenancy.principals import Limits, TenantChanges
from tests.browser.conftest import Site
from tests.support.accessibility import violations
from tests.support.cast import OWNER, Person, change_tenant
from tests.support.clock import START
from tests.support.console_fixtures import tenant_reading
from tests.support.factories import pending, posted

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

WIDTHS = (1440, 1280, 1024, 768)
LONG_NAME = "A tenant whose lawyers insisted on the whole registered name of the company, GmbH & Co. KG"


async def pages(site: Site) -> list[str]:
    """Create data for every page and return the paths of all pages."""
    console = site.console
    tenant = await console.services.tenants.create(name=LONG_NAME, access=OWNER)
    key, secret = await console.services.keys.create(tenant.id, name="a key with quite a long name for a program", access=OWNER)
    await console.services.tenants.update(
        tenant.id, TenantChanges(weight=7, limits={"tokens_per_minute": 10**12}), access=OWNER
    )
    person = Person(tenant=tenant, key=key, secret=secret)
    entry = pending(person, batch=True)
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id))
    console.engine_side.add(person, "req_live_with_a_long_id", batch=True, completion_tokens=7, ttft_s=0.2, decode_s=1.0)
    console.engine_side.add(person, "req_queued_with_a_long_id", state="queued", queue_position=0)
    teams = [tenant_reading(f"team {number}") for number in range(9)]
    console.engine_side.tenants = [tenant_reading(LONG_NAME, waiting=3, blocks=200), *teams]
    await console.services.sampler.sample()
    address = "https://hooks.example.com/services/a-long-path-of-a-program-that-hears-of-budgets"
    webhook, _ = await console.services.alerts.webhooks.create(kind="webhook", target=address, access=OWNER)
    await console.services.alerts.outbox.send_test(webhook.id, access=OWNER)
    await console.services.alerts.webhooks.rotate(webhook.id, grace_s=86_400, access=OWNER)
    await console.services.members.create("somebody-with-quite-a-long-address@engineering.example.com", "a password of tests")
    await console.services.appliance_records.put(
        "seller", Seller(name=LONG_NAME, address=("1 Long Lane", "Bristol")).to_record()
    )
    hosted = (HostedPrice(name=LONG_NAME, prompt=1, completion=2),)
    costs = Hardware(currency="EUR", cost_micros=10**10, months=36, kwh_price_micros=300_000, power_w=400, hosted=hosted)
    await console.services.economics.set_hardware(costs)
    await console.services.model_policies.put("demo", Limits(tokens_per_minute=10**12))
    of_tenant, of_key, of_alert = f"/tenants/{tenant.id}", f"/keys/{key.id}", f"/alerts/{webhook.id}"
    plain = ["/", "/requests", f"/requests/{entry.request_id}", "/tenants", "/keys", "/tenants/new", "/audit"]
    appliance_pages = ["/members", "/members/new", "/alerts", "/alerts/new", of_alert, f"{of_alert}/rotate", "/settings"]
    sheets = [f"/settings/{name}" for name in ("models", "seller", "economics")]
    plain += [*appliance_pages, *sheets, f"{of_tenant}/members/new", f"{of_key}/rotate"]
    return [*plain, of_tenant, f"{of_tenant}/archive", f"{of_tenant}/keys/new", of_key, f"{of_key}/revoke"]


async def test_no_page_has_a_serious_violation(site: Site) -> None:
    page = await site.alice(reduced_motion="reduce")
    found = {}
    for path in await pages(site):
        await page.goto(path)
        found[path] = await violations(page)
    await page.goto(f"/tenants/{site.console.cast.bob.tenant.id}")
    await page.get_by_role("link", name="New key").click()
    await expect(page.get_by_role("dialog").get_by_label("Name")).to_be_focused()
    found["dialog"] = await violations(page)

    assert {path: rules for path, rules in found.items() if rules} == {}


async def test_sign_in_and_not_found_pages_have_no_serious_violation(site: Site) -> None:
    page = await (await site.context()).new_page()
    await page.goto("/login")
    assert await violations(page) == []

    member = await site.alice()
    await member.goto("/tenants/nobody")
    assert await violations(member) == []
    site.complaints.clear()  # Chromium reports the expected 404


@pytest.mark.parametrize("site", ["America/Argentina/Buenos_Aires"], indirect=True)  # times with a long name
async def test_no_page_is_wider_than_a_phone(site: Site) -> None:
    page = await site.alice(viewport={"width": 390, "height": 800}, has_touch=True)
    wide = []
    for path in await pages(site):
        await page.goto(path)
        if await page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(path)

    assert wide == []


async def test_no_name_is_truncated_on_a_phone_which_shows_no_tooltips(site: Site) -> None:
    page = await site.alice(viewport={"width": 390, "height": 800}, has_touch=True)
    await pages(site)
    names, cut = page.locator(".rows th .clip"), []
    for path in ("/tenants", "/keys", "/members", "/alerts", "/usage"):
        await page.goto(path)
        cut += await names.evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)")

    assert cut == []


async def test_a_section_s_button_ends_where_its_card_ends(site: Site) -> None:
    page = await site.alice(viewport={"width": 1440, "height": 900})
    await page.goto(f"/tenants/{site.console.cast.bob.tenant.id}")
    terms = page.get_by_role("region", name="Terms")
    button, card = await terms.get_by_role("link", name="Change").bounding_box(), await terms.locator(".card").bounding_box()
    assert button is not None
    assert card is not None
    assert button["x"] + button["width"] == card["x"] + card["width"]


@pytest.mark.parametrize("width", [390, 320])
async def test_figures_of_a_tenant_do_not_wrap_on_a_phone(site: Site, width: int) -> None:
    services, bob = site.console.services, site.console.cast.bob
    price = await services.prices.add(
        model="demo", currency="EUR", prompt=9_000_000, cached_prompt=0, completion=9_000_000, effective_from=START
    )
    entry = pending(bob, admitted_at=services.clock.now(), price=price)
    await services.ledger.open(entry)
    await services.ledger.settle(posted(entry.request_id))
    limits = {"tokens_per_minute": 1_500_000, "monthly_budget": 5_000_000}
    await change_tenant(services.tenants, bob, limits=limits)
    page = await site.alice(viewport={"width": width, "height": 800})
    await page.goto("/tenants?q=bob")
    heights = await page.locator(".rows td.num").evaluate_all("cells => cells.map(cell => cell.clientHeight)")
    assert len(set(heights)) == 1


async def test_no_table_overflows_its_frame_on_a_tablet_or_laptop(site: Site) -> None:
    page = await site.alice(viewport={"width": WIDTHS[0], "height": 800})
    cut = []
    for path in await pages(site):
        await page.goto(path)
        frames = page.locator(".table-frame")
        for width in WIDTHS:
            await page.set_viewport_size({"width": width, "height": 800})
            if any(await frames.evaluate_all("frames => frames.map(frame => frame.scrollWidth > frame.clientWidth)")):
                cut.append((path, width))

    assert cut == []


async def test_on_a_phone_the_sections_are_in_a_menu(site: Site) -> None:
    page = await site.alice(viewport={"width": 390, "height": 800})
    tenants = page.get_by_role("link", name="Tenants", exact=True)
    await expect(tenants).to_be_hidden()

    await page.get_by_role("button", name="Menu").click()
    await tenants.click()

    await page.wait_for_url("**/tenants")
