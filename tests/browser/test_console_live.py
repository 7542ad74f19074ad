"""Live parts of the console in Chromium: updates without a reload and without layout shifts, pausing, and staleness."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Locator, Page, expect

from appliance.console import overview_view
from tests.browser.conftest import Site
from tests.support.console_fixtures import tenant_reading
from tests.support.engine_messages import engine_status
from tests.support.factories import pending, posted

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


def tile(page: Page, name: str) -> Locator:
    """Return the element with the figure of the tile `name`."""
    return page.locator(".tiles div", has=page.get_by_text(name, exact=True)).locator("dd")


async def test_live_figures_change_without_a_reload_unless_paused(site: Site) -> None:
    page = await site.alice()
    running = tile(page, "Running")
    await expect(running).to_have_text("3")
    await expect(page.locator("[data-live-text]")).to_have_text("Live")
    await page.evaluate("window.marker = 'same document'")

    site.console.engine_side.status = engine_status(num_running=17)
    await expect(running).to_have_text("17")
    await page.get_by_role("button", name="Pause").click()
    site.console.engine_side.status = engine_status(num_running=23)
    seen = len(site.console.services.sampler.history)
    while len(site.console.services.sampler.history) < seen + 3:
        await page.evaluate("new Promise(requestAnimationFrame)")
    await expect(running).to_have_text("17")

    await page.get_by_role("button", name="Resume").click()
    await expect(running).to_have_text("23")
    assert await page.evaluate("window.marker") == "same document"


async def test_a_page_without_updates_is_marked_as_stale(site: Site) -> None:
    page = await site.alice()
    await expect(page.locator("[data-live-text]")).to_have_text("Live")

    await site.console.services.sampler.stop()

    await expect(page.locator("[data-live-text]")).to_have_text("Stale")


async def test_the_history_does_not_move_while_requests_in_flight_end(site: Site) -> None:
    side = site.console.engine_side
    for number in range(9):
        side.add(site.console.cast.bob, f"req_{number}")
    page = await site.alice()
    await page.goto("/requests")
    await expect(page.locator("#live tbody tr")).to_have_count(9)
    await expect(page.locator("#live")).to_have_attribute("style", re.compile("min-height"))
    top = await page.locator("#history").evaluate("part => part.offsetTop")

    for number in range(8):
        del side.requests[f"req_{number}"]
    await expect(page.locator("#live tbody tr:not(.ended)")).to_have_count(1)

    assert await page.locator("#history").evaluate("part => part.offsetTop") == top
    side.requests.clear()
    await expect(page.get_by_text("No requests in flight.")).to_be_visible()
    await expect(page.locator("#live")).not_to_have_attribute("style", re.compile("min-height"))


async def test_the_first_request_in_flight_appears_without_a_reload(site: Site) -> None:
    page = await site.alice()
    await page.goto("/requests")
    await expect(page.get_by_text("No requests in flight.")).to_be_visible()

    site.console.engine_side.add(site.console.cast.bob, "req_first")

    await expect(page.locator("#live-req_first")).to_be_visible()


@pytest.mark.parametrize("width", [390, 1440])
async def test_a_request_in_flight_does_not_move_until_it_ends(site: Site, width: int) -> None:
    side = site.console.engine_side
    for name in ("first", "second", "third"):
        side.add(site.console.cast.bob, f"req_{name}", state="queued")
    page = await site.alice()
    await page.set_viewport_size({"width": width, "height": 900})
    await page.goto("/requests")
    third, states = page.locator("#live-req_third"), page.locator("#live tbody .state")
    await expect(states).to_have_text(["queued"] * 3)
    top = await third.evaluate("row => row.offsetTop")

    side.requests["req_second"].state = "decode"
    del side.requests["req_first"]
    await expect(states).to_have_text(["ended", "decode", "queued"])
    assert await third.evaluate("row => row.offsetTop") == top
    await expect(page.get_by_role("button", name="Cancel", disabled=True)).to_have_count(1)

    side.add(site.console.cast.bob, "req_fourth")
    await expect(page.locator("#live tbody tr").first).to_have_id("live-req_fourth")
    assert await third.evaluate("row => row.offsetTop") == top

    del side.requests["req_third"]
    await expect(states).to_have_text(["decode", "decode"])


async def test_the_overview_does_not_move_while_tenants_come_and_go(site: Site) -> None:
    side = site.console.engine_side
    side.tenants = [tenant_reading(name) for name in ("alice", "bob", "charlie")]
    page = await site.alice()
    rows, host = page.locator(".shares tbody tr"), page.get_by_label("Host")
    await expect(rows).to_have_count(3)
    top = await host.evaluate("part => part.offsetTop")

    side.tenants = []
    await expect(page.get_by_text("No requests run or wait for a seat.")).to_be_visible()
    assert await host.evaluate("part => part.offsetTop") == top
    side.tenants = [tenant_reading("bob")]
    await expect(rows).to_have_count(1)
    assert await host.evaluate("part => part.offsetTop") == top


async def test_recent_requests_are_not_updated_under_the_pointer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_view, "LEDGER_REFRESH_S", 0.0)
    console = site.console

    async def post_request() -> None:
        entry = pending(console.cast.bob, admitted_at=console.services.clock.now())
        await console.services.ledger.open(entry)
        await console.services.ledger.settle(posted(entry.request_id))

    await post_request()
    page = await site.alice()
    rows = page.locator("#recent tbody tr")
    await expect(rows).to_have_count(1)
    await rows.hover()

    await post_request()
    await expect(tile(page, "Requests today")).to_have_text("2")
    assert await rows.count() == 1
    await page.mouse.move(0, 0)
    await expect(rows).to_have_count(2)


async def test_a_session_ended_elsewhere_redirects_to_the_sign_in_page(site: Site) -> None:
    page = await site.alice()
    site.console.engine_side.status = engine_status(num_running=17)
    await expect(tile(page, "Running")).to_have_text("17")  # the stream is open

    await site.console.services.sessions.close_all(site.console.cast.alice.id)

    await page.wait_for_url("**/login")
