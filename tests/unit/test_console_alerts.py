"""Alert targets in the console: adding, testing, pausing, rotating the secret, removing, and retrying deliveries."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from sqlalchemy import select, update

from appliance.base.tables import outbox
from appliance.metering.alerts.outbox import EVENTS, TENANT_EVENTS, Message, enqueue
from appliance.metering.alerts.send_limits import TESTS_PER_HOUR_MAX
from appliance.metering.alerts.webhooks import Webhook
from tests.support.cast import OWNER
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp

URL = "https://hooks.example.com/very-secret-path"
CHECKED = dict.fromkeys(TENANT_EVENTS, "yes")
FIELDS = {"kind": "webhook", "target": URL, "tenant_id": "", **CHECKED}
_SECRET = re.compile(r'id="signing-secret">([^<]+)<')


async def add_webhook(console: ConsoleApp, browser: Browser, **fields: str) -> Webhook:
    """Add a webhook through the form and return it."""
    answer = await browser.post_htmx("/alerts", **{**FIELDS, **fields})
    assert answer.status_code == 200, answer.text
    assert _SECRET.findall(answer.text)
    return (await console.services.alerts.webhooks.list(access=OWNER)).data[-1]


async def test_an_added_target_shows_its_signing_secret_once(console: ConsoleApp) -> None:
    alice = await console.alice()
    assert "No alert targets." in (await alice.get("/alerts")).text
    answer = await alice.post_htmx("/alerts", **FIELDS)
    (secret,) = _SECRET.findall(answer.text)
    (webhook,) = (await console.services.alerts.webhooks.list(access=OWNER)).data
    assert (webhook.target, webhook.tenant_id, webhook.events) == (URL, None, TENANT_EVENTS)
    for path in ("/alerts", f"/alerts/{webhook.id}"):
        page = (await alice.get(path)).text
        assert URL in page
        assert secret not in page


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target": ""}, "Fill this in."),
        ({"target": "http://hooks.example.com"}, "must begin with https://"),
        ({"target": "https://127.0.0.1/"}, "is an address that the operator does not list"),
        ({"kind": "pigeon"}, "Choose one of webhook, email."),
        ({"kind": "email", "target": "ops@example.com"}, "no mail server"),
        (dict.fromkeys(TENANT_EVENTS, ""), "Choose at least one."),
    ],
)
async def test_an_invalid_target_is_refused_and_the_form_keeps_its_input(
    console: ConsoleApp, change: dict[str, str], sentence: str
) -> None:
    alice = await console.alice()
    fields = {**FIELDS, **change}
    answer = await alice.post_htmx("/alerts", **fields)
    assert answer.status_code == 422
    assert sentence.casefold() in answer.text.casefold()
    assert f'value="{fields["target"]}"' in answer.text
    assert (await console.services.alerts.webhooks.list(access=OWNER)).data == []


async def test_a_tenant_cannot_subscribe_to_engine_events(console: ConsoleApp) -> None:
    alice = await console.alice()
    all_events = dict.fromkeys(EVENTS, "yes")
    answer = await alice.post_htmx("/alerts", **{**FIELDS, **all_events, "tenant_id": console.cast.bob.tenant.id})
    assert answer.status_code == 422
    assert "Engine events are sent for the whole appliance only" in answer.text
    assert (await add_webhook(console, alice, **all_events)).events == EVENTS


async def test_a_refused_form_of_a_tenant_offers_no_events_of_the_whole_appliance(console: ConsoleApp) -> None:
    alice = await console.alice()
    answer = await alice.post_htmx("/alerts", **{**FIELDS, "target": "", "tenant_id": console.cast.bob.tenant.id})
    assert re.search(r'name="engine.down"[^>]* disabled', answer.text)
    assert not re.search(r'name="engine.down"[^>]* disabled', (await alice.get("/alerts/new")).text)


async def test_tests_of_a_target_are_listed_and_limited_per_hour(console: ConsoleApp) -> None:
    alice = await console.alice()
    path = f"/alerts/{(await add_webhook(console, alice)).id}"
    assert (await alice.post(f"{path}/test")).headers["location"] == path
    page = (await alice.get(path)).text
    for text in ("Test queued", "pending", ">Test<"):
        assert text in page
    for _ in range(TESTS_PER_HOUR_MAX - 1):
        await alice.post(f"{path}/test")
    refused = await alice.post(f"{path}/test")
    assert refused.status_code == 422
    assert f"A webhook takes {TESTS_PER_HOUR_MAX} tests an hour; try again in 1 h." in refused.text


async def test_a_delivery_shows_the_message_that_was_sent(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    webhook = await add_webhook(console, alice)
    key = {"scope": "key", "tenant_id": "tn_1", "tenant_name": "bob", "key_id": "key_1", "key_name": "<ci>", "model": "demo"}
    tokens = {"percent": 80, "day": "2026-11-21", "tokens_per_day": 10, "tokens": 9}
    async with console.services.db.writing() as connection:
        message = Message("tokens_per_day.threshold", "a key", {**key, **tokens})
        await connection.run_sync(enqueue, clock.now(), [message])
    page = (await alice.get(f"/alerts/{webhook.id}")).text
    assert "Daily token threshold reached" in page
    assert "The key &lt;ci&gt; of bob has reached 80 % of the token limit of 2026-11-21 for the model demo: 9 of 10." in page


async def test_a_failed_delivery_shows_its_error_and_can_be_retried(console: ConsoleApp) -> None:
    alice = await console.alice()
    webhook = await add_webhook(console, alice)
    delivery = await console.services.alerts.outbox.send_test(webhook.id, access=OWNER)
    async with console.services.db.writing() as connection:
        failed = {"next_attempt_at": None, "attempts": 14, "last_error": "answered 503"}
        await connection.execute(update(outbox).where(outbox.c.id == delivery.id).values(**failed))
    page = (await alice.get(f"/alerts/{webhook.id}")).text
    for text in ("failed", "answered 503", "Retry"):
        assert text in page
    for path in ("/alerts", f"/alerts/{webhook.id}"):
        assert 'class="badge bad" title="The last delivery failed; see its page.">failing' in (await alice.get(path)).text
    answer = await alice.post(f"/alerts/{webhook.id}/deliveries/{delivery.id}/retry")
    assert answer.headers["location"] == f"/alerts/{webhook.id}"
    assert (await console.services.alerts.outbox.get(webhook.id, delivery.id, access=OWNER)).state == "pending"
    newer = await console.services.alerts.outbox.send_test(webhook.id, access=OWNER)
    async with console.services.db.writing() as connection:
        taken = {"next_attempt_at": None, "attempts": 1, "delivered_at": newer.created_at}
        await connection.execute(update(outbox).where(outbox.c.id == newer.id).values(**taken))
    assert '<span class="badge ok">active' in (await alice.get("/alerts")).text


async def test_target_and_events_are_saved_and_invalid_ones_refused(console: ConsoleApp) -> None:
    alice = await console.alice()
    webhook = await add_webhook(console, alice)
    path = f"/alerts/{webhook.id}"
    wrong = await alice.post(path, target="nonsense", **{"invoice.closed": "yes"})
    assert wrong.status_code == 422
    assert 'value="nonsense"' in wrong.text
    answer = await alice.post(path, target="https://other.example.com/", **{"engine.down": "yes"})
    assert answer.headers["location"] == path
    changed = await console.services.alerts.webhooks.get(webhook.id, access=OWNER)
    assert (changed.target, changed.events) == ("https://other.example.com/", ("engine.down",))


async def test_a_paused_target_takes_no_tests_until_it_is_resumed(console: ConsoleApp) -> None:
    alice = await console.alice()
    path = f"/alerts/{(await add_webhook(console, alice)).id}"
    await alice.post(f"{path}/pause")
    page = (await alice.get(path)).text
    assert "paused" in page
    refused = await alice.post(f"{path}/test")
    assert (refused.status_code, "The webhook is disabled" in refused.text) == (422, True)
    await alice.post(f"{path}/resume")
    assert (await alice.post(f"{path}/test")).status_code == 303


async def test_a_rotated_secret_is_shown_once_and_the_old_one_signs_until_its_grace_period_ends(
    console: ConsoleApp, clock: FakeClock
) -> None:
    alice = await console.alice()
    webhook = await add_webhook(console, alice)
    (before,) = (await console.services.alerts.webhooks.read_endpoint(webhook.id)).secrets
    path = f"/alerts/{webhook.id}/rotate"
    assert "Old secret expires" in (await alice.fragment(path)).text
    assert (await alice.post_htmx(path, grace_s="1")).status_code == 422
    (secret,) = _SECRET.findall((await alice.post_htmx(path, grace_s="3600")).text)
    assert (await console.services.alerts.webhooks.read_endpoint(webhook.id)).secrets == (secret, before)
    assert (
        await console.services.alerts.webhooks.get(webhook.id, access=OWNER)
    ).previous_secret_until == clock.now() + timedelta(hours=1)
    assert "Old secret valid until" in (await alice.get(f"/alerts/{webhook.id}")).text


async def test_a_removed_target_is_gone_and_its_pending_deliveries_are_cancelled(console: ConsoleApp) -> None:
    alice = await console.alice()
    webhook = await add_webhook(console, alice)
    await console.services.alerts.outbox.send_test(webhook.id, access=OWNER)
    path = f"/alerts/{webhook.id}"
    assert "No more alerts are sent to this target" in (await alice.fragment(f"{path}/remove")).text
    assert (await alice.post(f"{path}/remove")).headers["location"] == "/alerts"
    assert (await alice.get(path)).status_code == 404
    async with console.services.db.reading() as connection:
        assert (await connection.execute(select(outbox.c.next_attempt_at))).scalars().all() == [None]


async def test_a_viewer_of_the_appliance_sees_only_the_hosts_of_targets(console: ConsoleApp) -> None:
    alice, vera = await console.alice(), await console.vera()
    webhook = await add_webhook(console, alice)
    path = f"/alerts/{webhook.id}"
    for page in [await vera.get("/alerts"), await vera.get(path)]:
        assert page.status_code == 200
        assert "https://hooks.example.com" in page.text
        assert "very-secret-path" not in page.text
    assert (await vera.get("/alerts/new")).status_code == 403
    for verb in ("", "/pause", "/resume", "/test", "/rotate", "/remove"):
        assert (await vera.post(f"{path}{verb}", **FIELDS)).status_code == 403, verb


async def test_a_manager_sees_and_adds_only_targets_of_the_own_tenant(console: ConsoleApp) -> None:
    alice, manager = await console.alice(), await console.member_of(console.cast.bob, "manager")
    bob, charlie = console.cast.bob.tenant, console.cast.charlie.tenant
    of_appliance = await add_webhook(console, alice)
    of_charlie = await add_webhook(console, alice, tenant_id=charlie.id, target="https://charlie.example.com/")
    form = (await manager.fragment("/alerts/new")).text
    for text, there in (("bob", True), ("charlie", False), ("Whole appliance", False), ("Engine down", False)):
        assert (text in form) is there, text
    own = await add_webhook(console, manager, tenant_id=bob.id, target="https://bob.example.com/")
    listed = (await manager.get("/alerts")).text
    assert [url in listed for url in (own.target, of_appliance.target, of_charlie.target)] == [True, False, False]
    for webhook in (of_appliance, of_charlie):
        assert (await manager.get(f"/alerts/{webhook.id}")).status_code == 404
        for verb in ("", "/pause", "/test", "/rotate", "/remove"):
            assert (await manager.post(f"/alerts/{webhook.id}{verb}", **FIELDS, grace_s="0")).status_code == 404
    assert (await manager.post("/alerts", **FIELDS)).status_code == 403
    assert (await manager.post("/alerts", **{**FIELDS, "tenant_id": charlie.id})).status_code == 404


@pytest.mark.parametrize("role", ["developer", "viewer"])
async def test_developers_and_viewers_of_a_tenant_have_no_access_to_alerts(console: ConsoleApp, role: str) -> None:
    browser = await console.member_of(console.cast.bob, role)
    assert (await browser.get("/alerts")).status_code == 403
    assert "/alerts" not in (await browser.get("/tenants")).text
