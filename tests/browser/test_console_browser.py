"""The console in Chromium as an administrator uses it: dialogs, focus, keyboard, cancelling, filters, and plain forms."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Dialog, expect
from sqlalchemy import update

from appliance.base.tables import outbox
from appliance.metering.alerts.outbox import TENANT_EVENTS
from tests.browser.conftest import Site
from tests.support.cast import OWNER
from tests.support.factories import pending, posted

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

SECRET = re.compile(r"^gh_[a-z0-9]{8}_[a-z0-9]{26}$")


@pytest.mark.parametrize(("width", "rows"), [(1920, 1), (1280, 1), (1024, 3), (390, 3)])
async def test_tiles_fill_every_row_at_every_width(site: Site, width: int, rows: int) -> None:
    page = await site.alice()
    await page.set_viewport_size({"width": width, "height": 800})
    await expect(page.locator(".tiles > div")).to_have_count(9)
    tops = await page.locator(".tiles > div").evaluate_all("tiles => tiles.map(tile => tile.offsetTop)")
    assert [tops.count(top) for top in sorted(set(tops))] == [9 // rows] * rows


async def test_a_tenant_and_a_key_are_created_its_secret_copied_and_the_key_revoked(site: Site) -> None:
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
    await expect(dialog.get_by_role("button", name="Copy").first).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(dialog.get_by_role("button", name="Copied")).to_be_visible()
    await expect(dialog.get_by_role("status").filter(has_text="Copied")).to_be_attached()
    secret = await page.evaluate("navigator.clipboard.readText()")
    assert SECRET.match(secret)
    assert (await site.console.services.keys.authenticate(secret, "192.0.2.1")).tenant.name == "Acme"
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_visible()
    async with page.expect_navigation():
        await dialog.get_by_role("link", name="I have stored it").click()
    await expect(dialog).to_be_hidden()
    await expect(page.get_by_role("link", name="New key")).to_be_focused()
    assert secret not in await page.content()

    await page.get_by_role("link", name="Revoke reports").click()
    async with page.expect_navigation():
        await dialog.get_by_role("button", name="Revoke key").click()
    await expect(page.get_by_role("status").filter(has_text="Key revoked")).to_be_visible()
    await expect(page.locator(".badge", has_text="revoked")).to_be_visible()


async def test_an_invalid_field_is_reported_inside_the_dialog_and_focused(site: Site) -> None:
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
async def test_an_invalid_field_of_a_page_is_focused_and_visible(site: Site, scripts: bool) -> None:
    page = await site.alice(java_script_enabled=scripts, viewport={"width": 800, "height": 500})
    await page.goto(f"/tenants/{site.console.cast.bob.tenant.id}")
    await page.get_by_label("Requests per minute").fill("many")
    await page.get_by_label("Tokens per day").fill("some")
    await page.get_by_role("button", name="Save").click()

    await expect(page.get_by_text("2 fields have an error")).to_have_count(1)
    await expect(page.get_by_label("Requests per minute")).to_be_focused()
    await expect(page.get_by_label("Requests per minute")).to_be_in_viewport()
    site.complaints.clear()  # Chromium reports every answer of 4xx to its console


@pytest.mark.parametrize("scripts", [True, False])
async def test_an_alert_target_without_events_is_refused_with_the_focus_on_the_events(site: Site, scripts: bool) -> None:
    page = await site.alice(java_script_enabled=scripts)
    await page.goto("/alerts")
    await page.get_by_role("link", name="Add alert target").click()
    await page.get_by_label("Address").fill("https://example.com/")
    for event in await page.get_by_role("checkbox").all():
        await event.uncheck()
    await page.get_by_role("button", name="Add", exact=True).click()

    await expect(page.get_by_role("group", name="Events")).to_be_focused()
    site.complaints.clear()  # Chromium reports every answer of 4xx to its console


async def test_events_of_the_whole_appliance_can_be_chosen_for_that_scope_only(site: Site) -> None:
    page, bob = await site.alice(), site.console.cast.bob.tenant
    await page.goto("/alerts/new")
    scope, engine_down = page.get_by_label("Scope"), page.get_by_label("Engine down")
    await expect(engine_down).to_be_checked()
    await scope.select_option("")
    await expect(engine_down).to_be_enabled()
    await scope.select_option(bob.id)
    await expect(engine_down).to_be_disabled()
    await page.get_by_label("Address").fill("https://example.com/")
    await page.get_by_role("button", name="Add", exact=True).click()

    await expect(page.get_by_role("heading", name="Signing secret")).to_be_visible()
    (webhook,) = (await site.console.services.alerts.webhooks.list(access=OWNER)).data
    assert (webhook.tenant_id, webhook.events) == (bob.id, TENANT_EVENTS)


async def test_escape_closes_the_dialog_and_restores_the_focus(site: Site) -> None:
    page = await site.alice()
    await page.goto("/tenants")
    opener = page.get_by_role("link", name="New tenant")
    await opener.focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog").get_by_label("Name")).to_be_focused()

    await page.keyboard.press("Escape")

    await expect(page.get_by_role("dialog")).to_be_hidden()
    await expect(opener).to_be_focused()


async def test_the_focus_returns_to_the_opener_after_a_dialog_has_saved_its_form(site: Site) -> None:
    page = await site.alice(viewport={"width": 1280, "height": 600})
    await page.goto(f"/tenants/{site.console.cast.bob.tenant.id}")
    opener = page.get_by_role("region", name="Terms").get_by_role("link", name="Change")
    await opener.click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("Limit mode")).to_be_focused()
    async with page.expect_navigation():
        await dialog.get_by_role("button", name="Save").click()

    await expect(opener).to_be_focused()
    await expect(opener).to_be_in_viewport()
    await page.reload()
    await expect(opener).not_to_be_focused()


async def test_a_click_outside_closes_an_empty_dialog_but_keeps_one_with_input(site: Site) -> None:
    page = await site.alice()
    await page.goto("/tenants")
    opener, dialog = page.get_by_role("link", name="New tenant"), page.get_by_role("dialog")
    await opener.click()
    await expect(dialog).to_be_visible()
    await page.mouse.click(5, 5)
    await expect(dialog).to_be_hidden()

    await opener.click()
    bounds = await dialog.get_by_label("Name").bounding_box()
    assert bounds is not None
    await page.mouse.move(bounds["x"] + 90, bounds["y"] + 9)
    await page.mouse.down()
    await page.mouse.move(5, bounds["y"] + 9)
    await page.mouse.up()
    await expect(dialog).to_be_visible()  # a selection that ends outside is no click outside
    await dialog.get_by_label("Name").fill("Acme")
    await page.mouse.click(5, 5)
    await expect(dialog.get_by_label("Name")).to_have_value("Acme")


async def test_a_cancelled_request_leaves_the_table(site: Site) -> None:
    side = site.console.engine_side
    side.add(site.console.cast.bob, "req_keeps_running_1")
    side.add(site.console.cast.bob, "req_to_be_cancelled_2")
    page = await site.alice()
    await page.goto("/requests")
    confirmations: list[str] = []

    async def accept_dialog(dialog: Dialog) -> None:
        confirmations.append(dialog.message)
        await dialog.accept()

    page.on("dialog", accept_dialog)
    await page.get_by_role("button", name="Cancel …celled_2").click()

    await expect(page.locator("#live-req_to_be_cancelled_2")).to_have_count(0)
    await expect(page.locator("#live-req_keeps_running_1")).to_be_visible()
    await expect(page.get_by_role("status").filter(has_text="Cancelled.")).to_be_visible()
    assert side.aborted == ["req_to_be_cancelled_2"]
    assert confirmations
    assert "billed" in confirmations[0]


async def test_cancelling_on_the_page_of_a_request_asks_for_confirmation(site: Site) -> None:
    console = site.console
    entry = pending(console.cast.bob, admitted_at=console.services.clock.now())
    await console.services.ledger.open(entry)
    console.engine_side.add(console.cast.bob, entry.request_id)
    page = await site.alice()
    await page.goto(f"/requests/{entry.request_id}")
    page.once("dialog", lambda dialog: dialog.dismiss())
    await page.get_by_role("button", name="Cancel").click()
    assert console.engine_side.aborted == []
    page.once("dialog", lambda dialog: dialog.accept())
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.get_by_role("status").filter(has_text="Cancelled.")).to_be_visible()
    assert console.engine_side.aborted == [entry.request_id]


async def test_suspending_a_tenant_asks_for_confirmation_and_names_running_requests(site: Site) -> None:
    page, bob, asked = await site.alice(), site.console.cast.bob.tenant, list[str]()
    await page.goto(f"/tenants/{bob.id}")

    async def answer(dialog: Dialog) -> None:
        asked.append(dialog.message)
        await (dialog.accept() if len(asked) == 2 else dialog.dismiss())

    page.on("dialog", answer)
    await page.get_by_role("button", name="Suspend").click()
    assert "running ones are aborted" in asked[0]
    async with page.expect_navigation():
        await page.get_by_role("button", name="Suspend").click()
    async with page.expect_navigation():
        await page.get_by_role("button", name="Resume").click()
    await expect(page.get_by_role("button", name="Suspend")).to_be_visible()
    assert len(asked) == 2


async def test_the_page_of_a_running_request_is_updated_until_it_ends(site: Site) -> None:
    console, live = site.console, await site.running_request()
    page = await site.alice()
    await page.goto(f"/requests/{live.id}")
    await expect(page.locator(".page-head .badge")).to_have_text("decode")

    live.kv_blocks = 41
    await expect(page.get_by_text("41", exact=True)).to_be_visible()
    del console.engine_side.requests[live.id]
    await console.services.ledger.settle(posted(live.id, reason="length"))

    await expect(page.locator(".page-head .badge")).to_have_text("length")
    await expect(page.locator("#request [hx-get]")).to_have_count(0)


async def test_updates_of_a_running_request_keep_focus_and_selection(site: Site) -> None:
    live = await site.running_request()
    page = await site.alice()
    await page.goto(f"/requests/{live.id}")
    cancel = page.get_by_role("button", name="Cancel")
    await cancel.focus()
    await page.evaluate("getSelection().selectAllChildren(document.querySelector('#request code'))")

    for blocks in ("41", "43"):
        live.kv_blocks = int(blocks)
        await expect(page.get_by_text(blocks, exact=True)).to_be_visible()

    await expect(cancel).to_be_focused()
    assert await page.evaluate("String(getSelection())") == live.id


async def test_the_message_about_a_saved_change_can_be_closed(site: Site) -> None:
    page = await site.alice()
    await page.goto(f"/tenants/{site.console.cast.bob.tenant.id}")
    async with page.expect_navigation():
        await page.get_by_role("button", name="Save").click()
    message = page.get_by_role("status").filter(has_text="Tenant saved")
    await message.get_by_role("button", name="Close").click()
    await expect(page.get_by_text("Tenant saved")).to_have_count(0)


async def test_an_action_that_comes_too_late_shows_a_persistent_toast(site: Site) -> None:
    side = site.console.engine_side
    side.add(site.console.cast.bob, "req_about_to_end")
    page = await site.alice()
    await page.goto("/requests")
    await expect(page.locator("[data-live-text]")).to_have_text("Live")
    await page.get_by_role("button", name="Pause").click()
    side.requests.clear()
    page.on("dialog", lambda dialog: dialog.accept())

    await page.get_by_role("button", name="Cancel …t_to_end").click()

    await expect(page.locator(".toast[data-kind=error]")).to_contain_text("No live request")
    site.complaints.clear()


async def test_the_history_is_searched_while_typing_and_the_url_follows(site: Site) -> None:
    page = await site.alice()
    await page.goto("/requests")

    await page.keyboard.press("/")
    await expect(page.get_by_role("searchbox")).to_be_focused()
    await page.keyboard.type("nothing like this")

    await expect(page.get_by_text("No request matches.")).to_be_visible()
    await page.wait_for_url("**/requests?q=nothing*")
    await page.go_back()
    await expect(page.get_by_text("No requests yet.")).to_be_visible()


async def test_choices_of_the_usage_page_keep_the_focus_when_made_by_keyboard(site: Site) -> None:
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


async def test_reloading_the_history_shows_requests_that_have_ended(site: Site) -> None:
    console = site.console
    page = await site.alice()
    await page.goto("/requests")
    await expect(page.get_by_text("No requests yet.")).to_be_visible()
    entry = pending(console.cast.bob, admitted_at=console.services.clock.now())
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id))

    await page.get_by_role("button", name="Reload").click()

    await expect(page.locator("#history tbody tr")).to_have_count(1)


async def test_the_page_of_an_alert_target_is_updated_until_a_test_is_delivered(site: Site) -> None:
    console = site.console
    webhook, _ = await console.services.alerts.webhooks.create(
        kind="webhook", target="https://hooks.example.com/x", tenant_id=None, events=None, access=OWNER
    )
    page = await site.alice()
    await page.goto(f"/alerts/{webhook.id}")
    await page.get_by_role("button", name="Send test").click()
    await expect(page.locator("#deliveries .badge")).to_have_text("pending")

    async with console.services.db.writing() as connection:
        await connection.execute(update(outbox).values(next_attempt_at=None, attempts=1, delivered_at=outbox.c.created_at))

    await expect(page.locator("#deliveries .badge")).to_have_text("delivered")
    await expect(page.locator("#deliveries-follow")).to_have_count(0)


async def test_the_first_tab_stop_skips_to_the_content(site: Site) -> None:
    page = await site.alice()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()

    await page.keyboard.press("Enter")

    await expect(page.locator("#main")).to_be_focused()


async def test_the_chosen_colour_scheme_is_kept(site: Site) -> None:
    page = await site.alice(color_scheme="light")
    light = await page.evaluate("getComputedStyle(document.body).backgroundColor")

    await page.get_by_role("button", name="Dark").click()
    await expect(page.get_by_role("button", name="Dark")).to_have_attribute("aria-pressed", "true")
    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    await page.goto("/keys")
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")


async def test_without_scripts_a_tenant_and_a_key_are_created_by_plain_forms(site: Site) -> None:
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
