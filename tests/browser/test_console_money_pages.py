"""Pages with amounts of money at widths from phone to laptop: no amount is truncated or overflows its card."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from playwright.async_api import Route, expect

from appliance.base.acting import Actor, acting
from appliance.base.clock import SystemClock
from appliance.metering.ledger.corrections import Correction
from appliance.tenancy.principals import TenantChanges
from tests.browser.conftest import Site
from tests.support.cast import OWNER
from tests.support.factories import pending, posted

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

MODEL = "Meta-Llama-3.1-70B-Instruct"
WIDTHS = (1280, 1024, 768, 390)
# Elements whose text overflows the nearest framing ancestor.
OUTSIDE = """() => [...document.querySelectorAll('main :is(dd, dt, .gauge-line > *, td, th, .line, .nowrap)')]
    .filter(one => one.getClientRects().length && one.innerText.trim() && !one.querySelector('.visually-hidden'))
    .filter(one => innerWidth > 720 || !one.closest('thead'))
    .filter(one => {
        const frame = one.closest('.card, .table-frame, .levels, .tiles');
        if (!frame) return false;
        const text = document.createRange();
        text.selectNodeContents(one);
        return text.getBoundingClientRect().right > frame.getBoundingClientRect().right + 1;
    })
    .map(one => one.innerText)"""
# Cells that truncate their text; names are truncated on purpose, with the full name in a title.
CUT = """() => [...document.querySelectorAll('tbody td')]
    .filter(one => one.scrollWidth > one.clientWidth + 1 && !one.querySelector('.clip')).map(one => one.innerText)"""


async def money_pages(site: Site) -> list[str]:
    """Create data with long names and amounts; return the paths of the pages that show them."""
    services, bob = site.console.services, site.console.cast.bob
    price = await services.prices.add(
        model=MODEL,
        currency="CHF",
        prompt=1_234_567_891,
        cached_prompt=123_456_789,
        completion=98_765_432_101,
        tier_percents={"interactive": 95, "standard": 90, "batch": 77},
    )
    limits = {"tokens_per_day": 5_000_000, "requests_per_minute": 600, "monthly_budget": 123_456_789}
    changes = TenantChanges(currency="CHF", limits=limits, name="Batch & Söhne Gesellschaft mbH")
    await services.tenants.update(bob.tenant.id, changes, access=OWNER)
    entry = pending(bob, model=MODEL, admitted_at=services.clock.now(), price=price)
    await services.ledger.open(entry)
    await services.ledger.settle(posted(entry.request_id, prompt=54_321, cached=12_345, completion=98_765))
    event = await services.reports.event(entry.request_id, access=OWNER)
    await services.corrections.add(event.id, Correction(note="agreed by telephone", cost_picos=1_234_567_890_123))
    draft = await services.invoices.draft(bob.tenant.id, f"{services.clock.now():%Y-%m}", access=OWNER)
    with acting(Actor(kind="cli", name="operator@example.com")):
        await services.audit.record("ledger.recover", "epoch", "epoch_01m8mnmzr9bh786mns6c", tenant_id=bob.tenant.id)
    for one in (bob, site.console.cast.charlie):  # with two drafts of a past month the list has a button for the month
        await services.invoices.draft(one.tenant.id, f"{services.clock.now().year - 1}-09", access=OWNER)
    pages = ["/invoices", f"/invoices/{draft.head.id}", f"/requests/{entry.request_id}", f"/tenants/{bob.tenant.id}"]
    return [*pages, f"{pages[-1]}/check", "/tenants", "/prices", "/usage?measure=cost", "/audit"]


async def test_no_amount_is_truncated_or_overflows_its_card(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = await money_pages(site)
    now = SystemClock.now
    monkeypatch.setattr(SystemClock, "now", lambda clock: now(clock) + timedelta(days=3))  # the audit log writes dates in full
    page = await site.alice(viewport={"width": WIDTHS[0], "height": 800})
    cut: list[tuple[str, int, object]] = []
    for path in paths:
        await page.goto(path)
        for width in WIDTHS:
            await page.set_viewport_size({"width": width, "height": 800})
            cells = await page.evaluate(CUT)
            frames = await page.locator(".table-frame").evaluate_all(
                "frames => frames.filter(frame => frame.scrollWidth > frame.clientWidth).map(frame => frame.ariaLabel)"
            )
            beyond = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            outside = await page.evaluate(OUTSIDE)
            if frames or cells or beyond or outside:
                cut.append((path.partition("_")[0], width, [*frames, *cells, beyond, *outside[:4]]))

    assert cut == []


async def test_a_month_cannot_be_drafted_again_while_it_is_drafted(site: Site) -> None:
    services, bob = site.console.services, site.console.cast.bob
    entry = pending(bob, admitted_at=services.clock.now())
    await services.ledger.open(entry)
    await services.ledger.settle(posted(entry.request_id, prompt=10, completion=5))
    page, answered = await site.alice(), asyncio.Event()

    async def answer_later(route: Route) -> None:
        await answered.wait()
        await route.continue_()

    await page.goto("/invoices")
    await page.route("**/invoices", answer_later)
    await page.locator("main input[name=month]").fill(f"{services.clock.now():%Y-%m}")
    button = page.get_by_role("button", name="Draft invoice")
    await button.click()
    await expect(button).to_be_disabled()
    answered.set()
    await page.wait_for_url("**/invoices?state=draft")
    await expect(button).to_be_enabled()


async def test_a_month_that_cannot_be_drafted_is_reported_beside_the_form(site: Site) -> None:
    page = await site.alice()
    await page.goto("/invoices")
    await page.locator("main input[name=month]").fill("2999-01")
    await page.get_by_role("button", name="Draft invoice").click()
    await expect(page.get_by_text("2999-01 has not begun")).to_be_visible()
    await expect(page.get_by_role("button", name="Draft invoice")).to_be_enabled()
    site.complaints.clear()  # Chromium reports every answer of 4xx to its console
