"""The outbox: messages are visible once committed, enqueued once, claimed by one sender, retried, and finally given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import datetime, timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database
from appliance.base.errors import Conflict, NotFound, RateLimitExceeded
from appliance.metering.alerts import outbox as outbox_module
from appliance.metering.alerts import send_limits
from appliance.metering.alerts.outbox import ATTEMPTS_MAX, LEASE_S, Delivery, Outbox, retry_delay_s
from appliance.metering.alerts.send_limits import TESTS_PER_HOUR_MAX
from appliance.metering.alerts.webhooks import WebhookChanges
from tests.support.alerts import TARGET, AlertParts, alert_parts
from tests.support.cast import OWNER, Cast
from tests.support.clock import FakeClock


@pytest.fixture
def alerts(database: Database, clock: FakeClock) -> AlertParts:
    """The components of alerting over this test's database."""
    return alert_parts(database, clock)


async def add_webhook(alerts: AlertParts, tenant_id: str | None = None, events: list[str] | None = None) -> str:
    webhook, _secret = await alerts.webhooks.create(
        kind="webhook", target=TARGET, tenant_id=tenant_id, events=events, access=OWNER
    )
    return webhook.id


async def test_an_event_of_a_tenant_goes_to_its_webhooks_and_those_of_the_appliance(alerts: AlertParts, cast: Cast) -> None:
    bobs, appliance_webhook = await add_webhook(alerts, cast.bob.tenant.id), await add_webhook(alerts)
    await add_webhook(alerts, cast.charlie.tenant.id)
    assert await alerts.enqueue(tenant_id=cast.bob.tenant.id) == 2
    messages = await alerts.messages()
    assert {message.webhook_id for message in messages} == {bobs, appliance_webhook}
    assert {message.state for message in messages} == {"pending"}
    assert messages[0].payload == {
        "type": "key.expiring",
        "timestamp": "2026-11-21T12:00:00.000Z",
        "data": {"subject": "one"},
    }


async def test_an_event_of_the_appliance_goes_only_to_its_own_webhooks(alerts: AlertParts, cast: Cast) -> None:
    await add_webhook(alerts, cast.bob.tenant.id)
    appliance_webhook = await add_webhook(alerts)
    assert await alerts.enqueue(event="engine.down") == 1
    assert [message.webhook_id for message in await alerts.messages()] == [appliance_webhook]


async def test_an_event_goes_only_to_enabled_webhooks_subscribed_to_it(alerts: AlertParts) -> None:
    await add_webhook(alerts, events=["invoice.closed"])
    disabled, removed = await add_webhook(alerts), await add_webhook(alerts)
    await alerts.webhooks.update(disabled, WebhookChanges(disabled=True), access=OWNER)
    await alerts.webhooks.remove(removed, access=OWNER)
    assert await alerts.enqueue() == 0


async def test_an_event_is_enqueued_once_per_subject(alerts: AlertParts) -> None:
    await add_webhook(alerts)
    assert [await alerts.enqueue("one"), await alerts.enqueue("one"), await alerts.enqueue("two")] == [1, 0, 1]


async def test_a_rolled_back_message_is_not_enqueued_and_does_not_wake_the_sender(alerts: AlertParts) -> None:
    await add_webhook(alerts)
    alerts.db.outbox_written.clear()

    async def enqueue_and_fail() -> None:
        async with alerts.db.writing() as connection:
            message = outbox_module.Message("key.expiring", "one", {})
            await connection.run_sync(outbox_module.enqueue, alerts.clock.now(), [message])
            raise RuntimeError("rolled back")

    with pytest.raises(RuntimeError):
        await enqueue_and_fail()
    assert not alerts.db.outbox_written.is_set()
    assert await alerts.enqueue() == 1
    assert alerts.db.outbox_written.is_set()


async def test_a_claim_takes_the_oldest_message_of_each_webhook_that_is_not_busy(alerts: AlertParts) -> None:
    first, second, busy = [await add_webhook(alerts) for _ in range(3)]
    await alerts.enqueue("one")
    await alerts.enqueue("two")
    messages = await alerts.messages()  # in the order of their ids
    oldest = {next(message.id for message in messages if message.webhook_id == webhook_id) for webhook_id in (first, second)}
    claimed = await alerts.outbox.claim(10, busy={busy})
    assert {delivery.id for delivery in claimed} == oldest
    assert {delivery.attempts for delivery in claimed} == {1}


async def test_the_message_due_for_longest_is_claimed_first(alerts: AlertParts, clock: FakeClock) -> None:
    delayed, waiting = [await add_webhook(alerts) for _ in range(2)]
    await alerts.enqueue("one")
    (claimed,) = await alerts.outbox.claim(10, busy={waiting})
    await alerts.outbox.mark_failed(claimed, "no answer", 30.0)
    clock.advance(60)
    await alerts.enqueue("two")  # due later than either, and for both
    (first,) = await alerts.outbox.claim(1)
    assert (first.webhook_id, first.payload["data"]["subject"]) == (waiting, "one")
    (second,) = await alerts.outbox.claim(1, busy={waiting})
    assert (second.id, second.webhook_id) == (claimed.id, delayed)


async def test_a_message_claimed_concurrently_is_not_claimed_again(alerts: AlertParts, monkeypatch: pytest.MonkeyPatch) -> None:
    await add_webhook(alerts)
    await alerts.enqueue()
    claimed_first, claim_one = list[object](), Outbox._claim_one

    async def claim_second(connection: AsyncConnection, message_id: str, now: datetime) -> Delivery | None:
        claimed_first.append(await claim_one(connection, message_id, now))
        return await claim_one(connection, message_id, now)

    monkeypatch.setattr(alerts.outbox, "_claim_one", claim_second)
    assert await alerts.outbox.claim(10) == []
    assert len(claimed_first) == 1


async def test_a_failed_attempt_delays_only_its_own_message(alerts: AlertParts, clock: FakeClock) -> None:
    for _ in range(2):
        await add_webhook(alerts)
    await alerts.enqueue()
    first, second = await alerts.outbox.claim(10)
    assert first.next_attempt_at == second.next_attempt_at, "claimed at the same moment"
    await alerts.outbox.mark_failed(first, "no answer", 30.0)
    left = {message.id: message for message in await alerts.messages()}
    assert left[first.id].last_error == "no answer"
    assert left[second.id] == second
    assert await alerts.outbox.next_due_s() == 30.0
    assert await alerts.outbox.next_due_s(busy={first.webhook_id}) == LEASE_S
    clock.advance(LEASE_S + 5)
    assert await alerts.outbox.next_due_s() == 0


async def test_removing_a_webhook_fails_only_its_pending_messages(alerts: AlertParts) -> None:
    removed, other = [await add_webhook(alerts) for _ in range(2)]
    await alerts.enqueue("one")
    (claimed,) = await alerts.outbox.claim(10, busy={other})
    await alerts.outbox.mark_failed(claimed, "no answer for days", None)
    await alerts.enqueue("two")
    await alerts.webhooks.remove(removed, access=OWNER)
    by_subject = {(message.webhook_id, message.payload["data"]["subject"]): message for message in await alerts.messages()}
    assert by_subject[removed, "one"].last_error == "no answer for days"
    assert by_subject[removed, "two"].last_error == "the webhook was removed"
    assert [by_subject[other, subject].state for subject in ("one", "two")] == ["pending"] * 2


async def test_concurrent_claims_return_distinct_messages(alerts: AlertParts) -> None:
    for _ in range(5):
        await add_webhook(alerts)
    await alerts.enqueue()
    claims = await asyncio.gather(*(alerts.outbox.claim(10) for _ in range(4)))
    ids = [delivery.id for claim in claims for delivery in claim]
    assert len(ids) == len(set(ids)) == 5


async def test_after_its_lease_a_claimed_message_is_claimed_again_with_the_same_id(
    alerts: AlertParts, clock: FakeClock
) -> None:
    await add_webhook(alerts)
    await alerts.enqueue()
    (before,) = await alerts.outbox.claim(10)
    clock.advance(LEASE_S - 0.001)
    assert await alerts.outbox.claim(10) == []
    clock.advance(0.001)
    (after,) = await alerts.outbox.claim(10)
    assert (after.id, after.attempts) == (before.id, 2)


async def test_a_failed_attempt_is_retried_after_its_delay_and_finally_given_up(alerts: AlertParts, clock: FakeClock) -> None:
    await add_webhook(alerts)
    await alerts.enqueue()
    (claimed,) = await alerts.outbox.claim(10)
    await alerts.outbox.mark_failed(claimed, "no answer", 30.0)
    assert await alerts.outbox.next_due_s() == 30.0
    clock.advance(30.0)
    (claimed,) = await alerts.outbox.claim(10)
    await alerts.outbox.mark_failed(claimed, "no answer again", None)
    (message,) = await alerts.messages()
    assert (message.state, message.last_error, message.attempts) == ("failed", "no answer again", 2)
    assert await alerts.outbox.next_due_s() is None
    assert await alerts.outbox.count_pending() == 0


async def test_messages_of_a_disabled_webhook_are_not_counted_as_pending(alerts: AlertParts) -> None:
    disabled, _ = await add_webhook(alerts), await add_webhook(alerts)
    await alerts.enqueue()
    await alerts.webhooks.update(disabled, WebhookChanges(disabled=True), access=OWNER)
    assert await alerts.outbox.count_pending() == 1
    await alerts.webhooks.update(disabled, WebhookChanges(disabled=False), access=OWNER)
    assert await alerts.outbox.count_pending() == 2


async def test_a_message_retried_by_hand_during_an_attempt_is_not_delayed_by_its_failure(
    alerts: AlertParts, clock: FakeClock
) -> None:
    webhook_id = await add_webhook(alerts)
    await alerts.enqueue()
    (claimed,) = await alerts.outbox.claim(10)
    clock.advance(1)
    await alerts.outbox.retry(webhook_id, claimed.id, access=OWNER)
    await alerts.outbox.mark_failed(claimed, "no answer", 3600.0)
    (again,) = await alerts.outbox.claim(10)
    assert (again.id, again.attempts) == (claimed.id, 1)


async def test_a_delivered_message_can_be_sent_again_with_the_same_id(alerts: AlertParts) -> None:
    webhook_id = await add_webhook(alerts)
    await alerts.enqueue()
    (claimed,) = await alerts.outbox.claim(10)
    await alerts.outbox.mark_delivered(claimed)
    assert (await alerts.outbox.get(webhook_id, claimed.id, access=OWNER)).state == "delivered"
    alerts.db.outbox_written.clear()
    assert (await alerts.outbox.retry(webhook_id, claimed.id, access=OWNER)).state == "pending"
    assert alerts.db.outbox_written.is_set(), "the sender is woken at once"
    (again,) = await alerts.outbox.claim(10)
    assert again.id == claimed.id


async def test_pending_messages_wait_while_their_webhook_is_disabled_and_fail_when_it_is_removed(alerts: AlertParts) -> None:
    webhook_id = await add_webhook(alerts)
    await alerts.enqueue()
    await alerts.webhooks.update(webhook_id, WebhookChanges(disabled=True), access=OWNER)
    assert await alerts.outbox.claim(10) == []
    assert await alerts.outbox.next_due_s() is None
    (waiting,) = await alerts.messages()
    with pytest.raises(Conflict, match="disabled"):
        await alerts.outbox.retry(webhook_id, waiting.id, access=OWNER)
    alerts.db.outbox_written.clear()
    await alerts.webhooks.update(webhook_id, WebhookChanges(disabled=False), access=OWNER)
    assert alerts.db.outbox_written.is_set(), "the sender is woken at once"
    assert await alerts.outbox.next_due_s() == 0
    await alerts.webhooks.remove(webhook_id, access=OWNER)
    (message,) = await alerts.messages()
    assert (message.state, message.last_error) == ("failed", "the webhook was removed")


async def test_test_messages_go_to_their_webhook_and_are_limited_per_hour(alerts: AlertParts, clock: FakeClock) -> None:
    webhook_id = await add_webhook(alerts, events=["invoice.closed"])
    await add_webhook(alerts)
    for _ in range(TESTS_PER_HOUR_MAX):
        delivery = await alerts.outbox.send_test(webhook_id, access=OWNER)
        clock.advance(60)
    assert (delivery.event, delivery.webhook_id) == ("webhook.test", webhook_id)
    with pytest.raises(RateLimitExceeded) as refused:
        await alerts.outbox.send_test(webhook_id, access=OWNER)
    assert refused.value.retry_after_s is not None
    clock.advance(refused.value.retry_after_s - 0.001)
    with pytest.raises(RateLimitExceeded):
        await alerts.outbox.send_test(webhook_id, access=OWNER)
    clock.advance(0.001)
    await alerts.outbox.send_test(webhook_id, access=OWNER)
    assert len(await alerts.messages()) == TESTS_PER_HOUR_MAX + 1


async def test_other_messages_and_tests_of_other_webhooks_do_not_count_towards_the_limit(alerts: AlertParts) -> None:
    webhook_ids = [await add_webhook(alerts) for _ in range(2)]
    for number in range(TESTS_PER_HOUR_MAX):
        await alerts.enqueue(f"message {number}")
    for webhook_id in webhook_ids:
        for _ in range(TESTS_PER_HOUR_MAX):
            delivery = await alerts.outbox.send_test(webhook_id, access=OWNER)
        assert delivery.payload["data"] == {"webhook_id": webhook_id, "note": "This is a test. Nothing has happened."}


@pytest.mark.parametrize("of_appliance", [False, True])
async def test_tests_of_removed_webhooks_count_for_new_webhooks_of_the_same_owner(
    alerts: AlertParts, cast: Cast, clock: FakeClock, of_appliance: bool
) -> None:
    bob = cast.bob.tenant.id
    owner, other = (None, bob) if of_appliance else (bob, None)
    for _ in range(TESTS_PER_HOUR_MAX):
        removed = await add_webhook(alerts, owner)
        await alerts.outbox.send_test(removed, access=OWNER)
        await alerts.webhooks.remove(removed, access=OWNER)
    made_again = await add_webhook(alerts, owner)
    with pytest.raises(RateLimitExceeded):
        await alerts.outbox.send_test(made_again, access=OWNER)
    for other_owner in (cast.charlie.tenant.id, other):
        await alerts.outbox.send_test(await add_webhook(alerts, other_owner), access=OWNER)
    clock.advance(3600)
    await alerts.outbox.send_test(made_again, access=OWNER)


async def test_manual_retries_are_limited_per_owner_and_hour(
    alerts: AlertParts, cast: Cast, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_limits, "RETRIES_PER_HOUR_MAX", 6)
    webhook_ids = [await add_webhook(alerts, cast.bob.tenant.id) for _ in range(2)]
    await alerts.enqueue(tenant_id=cast.bob.tenant.id)
    bobs = await alerts.messages()
    appliance_webhook = await add_webhook(alerts)
    test_message = await alerts.outbox.send_test(appliance_webhook, access=OWNER)
    for attempt in range(6):
        message = bobs[attempt % 2]
        await alerts.outbox.retry(message.webhook_id, message.id, access=OWNER)
        clock.advance(1)
    assert {message.webhook_id for message in bobs} == set(webhook_ids)
    with pytest.raises(RateLimitExceeded) as refused:
        await alerts.outbox.retry(bobs[0].webhook_id, bobs[0].id, access=OWNER)
    assert refused.value.retry_after_s == 3600 - 6
    await alerts.outbox.retry(appliance_webhook, test_message.id, access=OWNER)
    clock.advance(refused.value.retry_after_s)
    await alerts.outbox.retry(bobs[0].webhook_id, bobs[0].id, access=OWNER)
    with pytest.raises(RateLimitExceeded) as refused_again:
        await alerts.outbox.retry(bobs[0].webhook_id, bobs[0].id, access=OWNER)
    assert refused_again.value.retry_after_s == 1


async def test_unknown_webhooks_and_messages_of_other_webhooks_are_not_found(alerts: AlertParts) -> None:
    first, second = await add_webhook(alerts), await add_webhook(alerts)
    delivery = await alerts.outbox.send_test(first, access=OWNER)
    await alerts.webhooks.remove(first, access=OWNER)
    missing: list[tuple[str, Awaitable[object]]] = [
        ("delivery_id", alerts.outbox.get(second, delivery.id, access=OWNER)),
        ("delivery_id", alerts.outbox.retry(second, delivery.id, access=OWNER)),
        ("webhook_id", alerts.outbox.send_test("wh_unknown", access=OWNER)),
        ("webhook_id", alerts.outbox.get(first, delivery.id, access=OWNER)),
        ("webhook_id", alerts.outbox.list(first, access=OWNER)),
    ]
    for param, call in missing:
        with pytest.raises(NotFound) as refused:
            await call
        assert refused.value.param == param


async def test_messages_are_listed_newest_first_and_filtered_by_state(alerts: AlertParts) -> None:
    webhook_id = await add_webhook(alerts)
    for subject in ("a", "b", "c"):
        await alerts.enqueue(subject)
    first, second, third = [message.id for message in await alerts.messages()]
    (claimed,) = await alerts.outbox.claim(1)
    await alerts.outbox.mark_delivered(claimed)
    (claimed,) = await alerts.outbox.claim(1)
    await alerts.outbox.mark_failed(claimed, "no", None)
    other = await add_webhook(alerts)
    assert (await alerts.outbox.list(other, access=OWNER)).data == [], "those of another webhook"
    page = await alerts.outbox.list(webhook_id, 2, access=OWNER)
    assert [delivery.id for delivery in page.data] == [third, second]
    rest = await alerts.outbox.list(webhook_id, 2, page.next_cursor, access=OWNER)
    assert [delivery.id for delivery in rest.data] == [first]
    for state, message_id in (("delivered", first), ("failed", second), ("pending", third)):
        found = await alerts.outbox.list(webhook_id, state=state, access=OWNER)
        assert [delivery.id for delivery in found.data] == [message_id]


def test_retry_delays_grow_with_jitter_and_end_after_about_three_days() -> None:
    waits = [retry_delay_s(attempt, 0.5) for attempt in range(1, ATTEMPTS_MAX)]
    assert waits[:4] == [10.0, 30.0, 90.0, 270.0]
    assert waits == sorted(waits, key=lambda wait_s: wait_s or 0)
    assert waits[-1] == 12 * 3600
    total = timedelta(seconds=sum(wait_s or 0 for wait_s in waits))
    assert timedelta(days=2.8) < total < timedelta(days=3)
    assert retry_delay_s(ATTEMPTS_MAX, 0.5) is None
    assert (retry_delay_s(1, 0.0), retry_delay_s(1, 1.0)) == (5.0, 15.0)
