"""The console in a real Chromium, as an administrator uses it."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Dialog, Locator, Page, expect
from sqlalchemy import update

from appliance.base.tables import outbox
from appliance.tenancy.access import WHOLE_BOX
from tests.browser.conftest import Site
from tests.support.console_fixtures import engine_status, tenant
from tests.support.factories import pending, posted

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

SECRET = re.compile(r"^gh_[a-z0-9]{8}_[a-z0-9]{26}$")


def tile(page: Page, name: str) -> Locator:
    """Return the figure of the tile `name`."""
    return page.locator(".tiles div", has=page.get_by_text(name, exact=True)).locator("dd")


async def test_live_numbers_change_without_a_reload_and_hold_still_when_paused(site: Site) -> None:
    page = await site.alice()
    running = tile(page, "Running")
    await expect(running).to_have_text("3")
    await expect(page.locator("[data-live-text]")).to_have_text("Live")
    await page.evaluate("window.marker = 'same document'")

    site.box.engine_side.status = engine_status(num_running=17)
    await expect(running).to_have_text("17")
    await page.get_by_role("button", name="Pause").click()
    site.box.engine_side.status = engine_status(num_running=23)
    seen = len(site.box.services.sampler.history)
    while len(site.box.services.sampler.history) < seen + 3:
        await page.evaluate("new Promise(requestAnimationFrame)")
    await expect(running).to_have_text("17")

    await page.get_by_role("button", name="Resume").click()
    await expect(running).to_have_text("23")
    assert await page.evaluate("window.marker") == "same document"


@pytest.mark.parametrize(("width", "rows"), [(1920, 1), (1280, 1), (1024, 3), (390, 3)])
async def test_no_tile_stands_alone_in_a_row(site: Site, width: int, rows: int) -> None:
    page = await site.alice()
    await page.set_viewport_size({"width": width, "height": 800})
    await expect(page.locator(".tiles > div")).to_have_count(9)
    tops = await page.locator(".tiles > div").evaluate_all("tiles => tiles.map(tile => tile.offsetTop)")
    assert [tops.count(top) for top in sorted(set(tops))] == [9 // rows] * rows


async def test_a_page_that_hears_nothing_says_that_it_is_stale(site: Site) -> None:
    page = await site.alice()
    await expect(page.locator("[data-live-text]")).to_have_text("Live")

    await site.box.services.sampler.stop()

    await expect(page.locator("[data-live-text]")).to_have_text("Stale")


async def test_a_session_that_ends_elsewhere_leads_to_the_sign_in_page(site: Site) -> None:
    page = await site.alice()
    site.box.engine_side.status = engine_status(num_running=17)
    await expect(tile(page, "Running")).to_have_text("17")  # only a page whose stream is open can hear of the end

    await site.box.services.sessions.close_all(site.box.cast.alice.id)

    await page.wait_for_url("**/login")


async def test_a_tenant_and_a_key_are_made_the_secret_is_copied_once_and_the_key_revoked(site: Site) -> None:
    page = await site.alice(permissions=["clipboard-read", "clipboard-write"])
    async with page.expect_navigation():
        await page.get_by_role("link", name="Tenants").click()
    await page.get_by_role("link", name="New tenant").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Name").fill("Acme")
    async with page.expect_navigation():
        await dialog.get_by_role("button", name="Create tenant").click()
    await expect(page.get_by_role("heading", name="Acme")).to_be_visible()
    await expect(page.get_by_role("status").filter(has_text="Tenant created")).to_be_visible()

    await page.get_by_role("link", name="New key").click()
    await dialog.get_by_label("Name").fill("reports")
    await dialog.get_by_role("button", name="Create key").click()
    await dialog.get_by_role("button", name="Copy").first.click()
    await expect(dialog.get_by_role("button", name="Copied")).to_be_visible()
    await expect(dialog.get_by_role("status").filter(has_text="Copied")).to_be_attached()
    secret = await page.evaluate("navigator.clipboard.readText()")
    assert SECRET.match(secret)
    assert (await site.box.services.keys.authenticate(secret, "192.0.2.1")).tenant.name == "Acme"
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_visible()
    async with page.expect_navigation():
        await dialog.get_by_role("link", name="I have stored it").click()
    await expect(dialog).to_be_hidden()
    assert secret not in await page.content()

    await page.get_by_role("link", name="Revoke reports").click()
    async with page.expect_navigation():
        await dialog.get_by_role("button", name="Revoke key").click()
    await expect(page.get_by_role("status").filter(has_text="Key revoked")).to_be_visible()
    await expect(page.locator(".badge", has_text="revoked")).to_be_visible()


async def test_a_wrong_field_is_told_inside_the_dialog_and_has_the_focus(site: Site) -> None:
    page = await site.alice()
    await page.goto("/tenants")
    await page.get_by_role("link", name="New tenant").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Name").fill("bob")
    await dialog.get_by_role("button", name="Create tenant").click()

    await expect(dialog.get_by_text("There is a tenant named 'bob' already.")).to_be_visible()
    await expect(dialog.get_by_label("Name")).to_be_focused()
    await expect(dialog.get_by_label("Name")).to_have_value("bob")
    site.complaints.clear()  # Chromium reports every answer of 4xx to its console


@pytest.mark.parametrize("scripts", [True, False])
async def test_a_wrong_field_of_a_page_has_the_focus_and_is_in_sight(site: Site, scripts: bool) -> None:
    page = await site.alice(java_script_enabled=scripts, viewport={"width": 800, "height": 500})
    await page.goto(f"/tenants/{site.box.cast.bob.tenant.id}")
    await page.get_by_label("Requests per minute").fill("many")
    await page.get_by_label("Tokens per day").fill("some")
    await page.get_by_role("button", name="Save").click()

    await expect(page.get_by_text("2 fields have an error")).to_have_count(1)
    await expect(page.get_by_label("Requests per minute")).to_be_focused()
    await expect(page.get_by_label("Requests per minute")).to_be_in_viewport()
    site.complaints.clear()  # Chromium reports every answer of 4xx to its console


async def test_escape_closes_the_dialog_and_the_focus_returns(site: Site) -> None:
    page = await site.alice()
    await page.goto("/tenants")
    opener = page.get_by_role("link", name="New tenant")
    await opener.focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog").get_by_label("Name")).to_be_focused()

    await page.keyboard.press("Escape")

    await expect(page.get_by_role("dialog")).to_be_hidden()
    await expect(opener).to_be_focused()


async def test_a_click_beside_the_dialog_closes_it_but_never_loses_what_was_typed(site: Site) -> None:
    page = await site.alice()
    await page.goto("/tenants")
    opener, dialog = page.get_by_role("link", name="New tenant"), page.get_by_role("dialog")
    await opener.click()
    await expect(dialog).to_be_visible()
    await page.mouse.click(5, 5)
    await expect(dialog).to_be_hidden()

    await opener.click()
    box = await dialog.get_by_label("Name").bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + 90, box["y"] + 9)
    await page.mouse.down()
    await page.mouse.move(5, box["y"] + 9)
    await page.mouse.up()
    await expect(dialog).to_be_visible()  # what was pressed inside was a selection, wherever it was let go
    await dialog.get_by_label("Name").fill("Acme")
    await page.mouse.click(5, 5)
    await expect(dialog.get_by_label("Name")).to_have_value("Acme")


async def test_a_running_request_is_cancelled_and_leaves_the_table(site: Site) -> None:
    side = site.box.engine_side
    side.add(site.box.cast.bob, "req_keeps_running_1")
    side.add(site.box.cast.bob, "req_to_be_cancelled_2")
    page = await site.alice()
    await page.goto("/requests")
    questions: list[str] = []

    async def agree(dialog: Dialog) -> None:
        questions.append(dialog.message)
        await dialog.accept()

    page.on("dialog", agree)
    await page.get_by_role("button", name="Cancel …celled_2").click()

    await expect(page.locator("#live-req_to_be_cancelled_2")).to_have_count(0)
    await expect(page.locator("#live-req_keeps_running_1")).to_be_visible()
    await expect(page.get_by_role("status").filter(has_text="Cancelled.")).to_be_visible()
    assert side.aborted == ["req_to_be_cancelled_2"]
    assert questions
    assert "billed" in questions[0]


async def test_the_page_of_a_running_request_follows_it_to_its_end(site: Site) -> None:
    box = site.box
    entry = pending(box.cast.bob, admitted_at=box.services.clock.now())
    await box.services.ledger.open(entry)
    live = box.engine_side.add(box.cast.bob, entry.request_id)
    page = await site.alice()
    await page.goto(f"/requests/{entry.request_id}")
    await expect(page.locator(".page-head .badge")).to_have_text("decode")

    live.kv_blocks = 41
    await expect(page.get_by_text("41", exact=True)).to_be_visible()
    del box.engine_side.requests[entry.request_id]
    await box.services.ledger.settle(posted(entry.request_id, reason="length"))

    await expect(page.locator(".page-head .badge")).to_have_text("length")
    await expect(page.locator("#request [hx-get]")).to_have_count(0)


async def test_the_page_of_a_running_request_leaves_focus_and_selection_where_they_are(site: Site) -> None:
    box = site.box
    entry = pending(box.cast.bob, admitted_at=box.services.clock.now())
    await box.services.ledger.open(entry)
    live = box.engine_side.add(box.cast.bob, entry.request_id)
    page = await site.alice()
    await page.goto(f"/requests/{entry.request_id}")
    cancel = page.get_by_role("button", name="Cancel")
    await cancel.focus()
    await page.evaluate("getSelection().selectAllChildren(document.querySelector('#request code'))")

    for blocks in ("41", "43"):
        live.kv_blocks = int(blocks)
        await expect(page.get_by_text(blocks, exact=True)).to_be_visible()

    await expect(cancel).to_be_focused()
    assert await page.evaluate("String(getSelection())") == entry.request_id


async def test_an_action_that_comes_too_late_is_told_in_a_toast_that_stays(site: Site) -> None:
    side = site.box.engine_side
    side.add(site.box.cast.bob, "req_about_to_end")
    page = await site.alice()
    await page.goto("/requests")
    await expect(page.locator("[data-live-text]")).to_have_text("Live")
    await page.get_by_role("button", name="Pause").click()
    side.requests.clear()
    page.on("dialog", lambda dialog: dialog.accept())

    await page.get_by_role("button", name="Cancel …t_to_end").click()

    await expect(page.locator(".toast[data-kind=error]")).to_contain_text("No live request")
    site.complaints.clear()


async def test_the_history_is_searched_while_typing_and_the_address_follows(site: Site) -> None:
    page = await site.alice()
    await page.goto("/requests")

    await page.keyboard.press("/")
    await expect(page.get_by_role("searchbox")).to_be_focused()
    await page.keyboard.type("nothing like this")

    await expect(page.get_by_text("No request matches.")).to_be_visible()
    await page.wait_for_url("**/requests?q=nothing*")
    await page.go_back()
    await expect(page.get_by_text("No request yet.")).to_be_visible()


async def test_choices_of_the_usage_page_are_made_one_after_another_by_keyboard(site: Site) -> None:
    page = await site.alice()
    await page.goto("/usage")
    await page.get_by_label("Period").focus()

    await page.keyboard.press("ArrowUp")
    await page.wait_for_url("**/usage?period=7d*")
    await page.keyboard.press("Tab")
    await expect(page.get_by_label("By")).to_be_focused()
    await page.keyboard.press("ArrowDown")

    await page.wait_for_url("**/usage?period=7d&group=key*")
    await expect(page.get_by_label("By")).to_be_focused()
    await page.go_back()
    await expect(page.get_by_label("By")).to_have_value("tenant")


async def test_the_history_stays_where_it_is_while_requests_in_flight_end(site: Site) -> None:
    side = site.box.engine_side
    for number in range(9):
        side.add(site.box.cast.bob, f"req_{number}")
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


@pytest.mark.parametrize("width", [390, 1440])
async def test_a_request_in_flight_stays_where_it_is_until_it_ends(site: Site, width: int) -> None:
    side = site.box.engine_side
    for name in ("first", "second", "third"):
        side.add(site.box.cast.bob, f"req_{name}", state="queued")
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

    side.add(site.box.cast.bob, "req_fourth")
    await expect(page.locator("#live tbody tr").first).to_have_id("live-req_fourth")
    assert await third.evaluate("row => row.offsetTop") == top

    del side.requests["req_third"]
    await expect(states).to_have_text(["decode", "decode"])


async def test_the_overview_stays_where_it_is_while_tenants_come_and_go(site: Site) -> None:
    side = site.box.engine_side
    side.tenants = [tenant(name) for name in ("alice", "bob", "charlie")]
    page = await site.alice()
    rows, host = page.locator(".shares tbody tr"), page.get_by_label("Host")
    await expect(rows).to_have_count(3)
    top = await host.evaluate("part => part.offsetTop")

    side.tenants = []
    await expect(page.get_by_text("No running or waiting requests.")).to_be_visible()
    assert await host.evaluate("part => part.offsetTop") == top
    side.tenants = [tenant("bob")]
    await expect(rows).to_have_count(1)
    assert await host.evaluate("part => part.offsetTop") == top


async def test_requests_that_ended_join_the_history_when_it_is_reloaded(site: Site) -> None:
    box = site.box
    page = await site.alice()
    await page.goto("/requests")
    await expect(page.get_by_text("No request yet.")).to_be_visible()
    entry = pending(box.cast.bob, admitted_at=box.services.clock.now())
    await box.services.ledger.open(entry)
    await box.services.ledger.settle(posted(entry.request_id))

    await page.get_by_role("button", name="Reload").click()

    await expect(page.locator("#history tbody tr")).to_have_count(1)


async def test_the_page_of_an_alert_target_follows_a_test_until_it_is_delivered(site: Site) -> None:
    box = site.box
    webhook, _ = await box.services.alerts.webhooks.create(
        kind="webhook", target="https://hooks.example.com/x", tenant_id=None, events=None, access=WHOLE_BOX
    )
    page = await site.alice()
    await page.goto(f"/alerts/{webhook.id}")
    await page.get_by_role("button", name="Send test").click()
    await expect(page.locator("#deliveries .badge")).to_have_text("pending")

    async with box.services.db.writing() as connection:
        await connection.execute(update(outbox).values(next_attempt_at=None, attempts=1, delivered_at=outbox.c.created_at))

    await expect(page.locator("#deliveries .badge")).to_have_text("delivered")
    await expect(page.locator("#deliveries-follow")).to_have_count(0)


async def test_the_first_tab_stop_skips_to_the_content(site: Site) -> None:
    page = await site.alice()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()

    await page.keyboard.press("Enter")

    await expect(page.locator("#main")).to_be_focused()


async def test_the_colours_are_chosen_and_kept(site: Site) -> None:
    page = await site.alice(color_scheme="light")
    light = await page.evaluate("getComputedStyle(document.body).backgroundColor")

    await page.get_by_role("button", name="Dark").click()
    await expect(page.get_by_role("button", name="Dark")).to_have_attribute("aria-pressed", "true")
    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    await page.goto("/keys")
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")


async def test_without_scripts_a_tenant_and_a_key_are_made_by_plain_forms(site: Site) -> None:
    page = await site.alice(java_script_enabled=False)
    await page.goto("/tenants/new")
    await page.get_by_label("Name").fill("Plain")
    await page.get_by_role("button", name="Create tenant").click()
    await page.get_by_role("link", name="New key").click()
    await page.get_by_label("Name").fill("plain key")
    await page.get_by_role("button", name="Create key").click()

    secret = await page.locator("#secret").inner_text()
    assert SECRET.match(secret)
    await expect(page.get_by_role("button", name="Copy")).to_have_count(0)
