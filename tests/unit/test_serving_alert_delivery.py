"""Alert delivery: at least once, with growing backoff, in parallel, and with the same id after a crash."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest
import structlog

from appliance.base.db import Database
from appliance.base.sealing import Sealer
from appliance.metering.alerts.outbox import ATTEMPTS_MAX, LEASE_S, RETRY_S_MAX
from appliance.metering.alerts.webhooks import Webhooks
from appliance.serving.alerting import delivery as delivery_module
from appliance.serving.alerting.delivery import FailureReason, SendFailed
from tests.support.alerts import LOOPBACK, TARGET, AlertParts, RecordingSender, alert_parts
from tests.support.cast import OWNER
from tests.support.clock import FakeClock
from tests.support.ledgers import FailingDatabase
from tests.support.polling import poll_until

pytestmark = pytest.mark.on_either_database


@pytest.fixture
def alerts(database: Database, clock: FakeClock) -> AlertParts:
    """The alerting parts over the test's database."""
    return alert_parts(database, clock)


async def webhook(alerts: AlertParts, target: str = TARGET) -> str:
    created, _ = await alerts.webhooks.create(kind="webhook", target=target, access=OWNER)
    return created.id


def counted(alerts: AlertParts, name: str, **labels: str) -> float:
    """Return the value of a metric, 0 if it was never set."""
    return alerts.metrics.registry.get_sample_value(f"gatehouse_{name}", labels) or 0.0


async def test_an_accepted_message_is_sent_once(alerts: AlertParts) -> None:
    await webhook(alerts)
    await alerts.enqueue()
    sender = RecordingSender()
    delivery = alerts.delivery(sender)
    assert await delivery.deliver_due() == 1
    assert await delivery.deliver_due() == 0
    (message,) = await alerts.messages()
    assert (message.state, sender.ids) == ("delivered", [message.id])
    assert counted(alerts, "alerts_delivered_total") == 1


async def test_failures_are_counted_from_zero_so_that_the_first_one_is_an_increase(alerts: AlertParts) -> None:
    alerts.delivery(RecordingSender())
    for reason in get_args(FailureReason):
        assert alerts.metrics.registry.get_sample_value("gatehouse_alert_attempts_failed_total", {"reason": reason}) == 0


async def test_a_rejected_message_is_retried_exactly_when_due(alerts: AlertParts, clock: FakeClock) -> None:
    await webhook(alerts)
    await alerts.enqueue()
    sender = RecordingSender(*(SendFailed("failed", "the receiver answered 500") for _ in range(3)))
    delivery = alerts.delivery(sender)
    for wait_s in (10, 30, 90):
        assert await delivery.deliver_due() == 1
        clock.advance(wait_s - 0.001)
        assert await delivery.deliver_due() == 0
        clock.advance(0.001)
    assert await delivery.deliver_due() == 1
    assert len(sender.ids) == 4
    assert len(set(sender.ids)) == 1
    assert counted(alerts, "alert_attempts_failed_total", reason="failed") == 3


async def test_an_outbox_that_cannot_be_read_is_logged_once_with_the_number_of_failures_at_the_end(
    alerts: AlertParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery, outages = alerts.delivery(RecordingSender()), [OSError("down")] * 3

    async def start_due() -> None:
        if outages:
            raise outages.pop()

    monkeypatch.setattr(delivery_module, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(delivery, "_start_due", start_due)
    with structlog.testing.capture_logs() as logs:
        delivery.start()
        await poll_until(lambda: len(logs) > 1)
        await delivery.stop()
    assert [(line["event"], line.get("after"), line["failures"]) for line in logs] == [
        ("the outbox could not be read", None, 1),
        ("works again", "the outbox could not be read", 3),
    ]


@pytest.mark.parametrize(("randomness", "wait_s"), [(0.0, 5.0), (1.0, 15.0)])
async def test_jitter_spreads_the_retries(alerts: AlertParts, randomness: float, wait_s: float) -> None:
    await webhook(alerts)
    await alerts.enqueue()
    await alerts.delivery(RecordingSender(SendFailed("timeout", "no answer")), randomness=randomness).deliver_due()
    assert await alerts.outbox.next_due_s() == wait_s


async def test_retry_after_is_honoured_up_to_a_limit(alerts: AlertParts) -> None:
    await webhook(alerts)
    for asked_s, waits_s in ((3600.0, 3600.0), (1.0, 10.0), (10**9, RETRY_S_MAX)):
        await alerts.enqueue(str(asked_s))
        await alerts.delivery(RecordingSender(SendFailed("failed", "503", retry_after_s=asked_s))).deliver_due()
        assert await alerts.outbox.next_due_s() == waits_s
        message = next(message for message in await alerts.messages() if message.state == "pending")
        await alerts.outbox.mark_delivered(message)


async def test_after_the_last_attempt_a_message_is_given_up_and_logged(alerts: AlertParts, clock: FakeClock) -> None:
    await webhook(alerts)
    await alerts.enqueue()
    sender = RecordingSender(*(SendFailed("connect", "no connection") for _ in range(ATTEMPTS_MAX)))
    delivery = alerts.delivery(sender)
    began = clock.now()
    for _ in range(ATTEMPTS_MAX):
        clock.advance(await alerts.outbox.next_due_s() or 0)
        assert await delivery.deliver_due() == 1
    assert 2.5 < (clock.now() - began).total_seconds() / 86400 < 3
    (message,) = await alerts.messages()
    assert (message.state, message.last_error, message.attempts) == ("failed", "no connection", ATTEMPTS_MAX)
    assert counted(alerts, "alerts_given_up_total") == 1
    clock.advance(30 * 86400)
    assert await delivery.deliver_due() == 0
    await alerts.outbox.retry(message.webhook_id, message.id, access=OWNER)
    assert await delivery.deliver_due() == 1
    assert set(sender.ids) == {message.id}


async def test_a_webhook_that_is_gone_is_disabled(alerts: AlertParts) -> None:
    webhook_id = await webhook(alerts)
    for subject in ("one", "two"):
        await alerts.enqueue(subject)
    await alerts.delivery(RecordingSender(SendFailed("gone", "the receiver answered 410"))).deliver_due()
    assert (await alerts.webhooks.get(webhook_id, access=OWNER)).disabled
    assert {message.state for message in await alerts.messages()} == {"failed"}
    assert await alerts.enqueue("three") == 0


async def test_a_slow_receiver_delays_no_other_and_gets_one_message_at_a_time(alerts: AlertParts) -> None:
    slow, fast = "https://slow.example.com/", "https://fast.example.com/"
    await webhook(alerts, slow)
    for subject in ("one", "two", "three"):
        await alerts.enqueue(subject)
    await webhook(alerts, fast)
    await alerts.enqueue("four")
    sender = RecordingSender()
    gate = sender.gates[slow] = asyncio.Event()
    delivery = alerts.delivery(sender, parallel_max=2)
    delivery.start()
    await poll_until(lambda: [target for target, _ in sender.sent].count(fast) == 1)
    for subject in ("five", "six"):
        await alerts.enqueue(subject)
    await poll_until(lambda: [target for target, _ in sender.sent].count(fast) == 3)
    assert [target for target, _ in sender.sent].count(slow) == 1
    gate.set()
    await poll_until(lambda: [target for target, _ in sender.sent].count(slow) == 6)
    await delivery.stop()
    assert {message.state for message in await alerts.messages()} == {"delivered"}


async def test_parallel_deliveries_are_limited(alerts: AlertParts) -> None:
    sender = RecordingSender()
    targets = [f"https://receiver-{index}.example.com/" for index in range(5)]
    for target in targets:
        await webhook(alerts, target)
        sender.gates[target] = asyncio.Event()
    await alerts.enqueue()
    delivery = alerts.delivery(sender, parallel_max=3)
    delivery.start()
    await poll_until(lambda: len(sender.sent) == 3)
    await alerts.enqueue("another")  # wakes the delivery task
    await poll_until(lambda: not alerts.db.outbox_written.is_set())
    assert len(sender.sent) == 3
    for gate in sender.gates.values():
        gate.set()
    await poll_until(lambda: len(sender.sent) == 10)
    await delivery.stop()


async def test_a_new_message_wakes_the_delivery_at_once(alerts: AlertParts) -> None:
    await webhook(alerts)
    sender = RecordingSender()
    delivery = alerts.delivery(sender)
    delivery.start()
    await poll_until(lambda: not alerts.db.outbox_written.is_set())
    await alerts.enqueue()
    await poll_until(lambda: counted(alerts, "alerts_delivered_total") == 1 and counted(alerts, "alerts_pending") == 0)
    await delivery.stop()
    assert len(sender.sent) == 1


async def test_a_message_sent_but_not_recorded_is_sent_again_with_the_same_id(database: Database, clock: FakeClock) -> None:
    failing = FailingDatabase.around(database)
    alerts = alert_parts(failing, clock)
    await webhook(alerts)
    await alerts.enqueue()
    sender = RecordingSender()
    delivery = alerts.delivery(sender)
    claim = alerts.outbox.claim

    async def claim_and_lose_the_database(count: int, busy: object = ()) -> list[object]:
        claimed = await claim(count)
        failing.fail_before_commit = 1
        return list(claimed)

    alerts.outbox.claim = claim_and_lose_the_database  # type: ignore[method-assign,assignment]
    await delivery.deliver_due()
    (message,) = await alerts.messages()
    assert (len(sender.sent), message.state) == (1, "pending")
    # Another process, later: the first one died after sending, before it recorded the result.
    after = alert_parts(database, clock)
    assert await after.delivery(sender).deliver_due() == 0
    clock.advance(LEASE_S)
    assert await after.delivery(sender).deliver_due() == 1
    assert sender.ids == [message.id, message.id]
    assert (await after.messages())[0].state == "delivered"


async def test_after_a_crash_claimed_messages_are_sent_at_once_and_others_when_due(
    alerts: AlertParts, clock: FakeClock
) -> None:
    await webhook(alerts)
    await alerts.enqueue("waits")
    await alerts.delivery(RecordingSender(SendFailed("failed", "500"))).deliver_due()
    await webhook(alerts, "https://other.example.com/")
    await alerts.enqueue("is being sent")
    claimed = {delivery.id for delivery in await alerts.outbox.claim(10)}
    assert len(claimed) == 2
    sender = RecordingSender()
    delivery = alerts.delivery(sender)
    delivery.start()
    await poll_until(lambda: counted(alerts, "alerts_delivered_total") == 2)
    await delivery.stop()
    assert set(sender.ids) == claimed
    assert [message.attempts for message in await alerts.messages() if message.id in claimed] == [2, 2]
    assert await alerts.outbox.next_due_s() == 10.0


async def test_stop_cancels_hanging_attempts_and_loses_no_message(alerts: AlertParts, clock: FakeClock) -> None:
    await webhook(alerts)
    await alerts.enqueue()
    sender = RecordingSender()
    sender.gates[TARGET] = asyncio.Event()
    delivery = alerts.delivery(sender)
    delivery.start()
    await poll_until(lambda: len(sender.sent) == 1)
    await delivery.stop(timeout_s=0.0)
    assert (await alerts.messages())[0].state == "pending"
    clock.advance(LEASE_S)
    sender.gates.clear()
    assert await alerts.delivery(sender).deliver_due() == 1


async def test_stop_gives_running_attempts_the_time_to_end(alerts: AlertParts) -> None:
    await webhook(alerts)
    await alerts.enqueue()
    sender = RecordingSender()
    gate = sender.gates[TARGET] = asyncio.Event()
    delivery = alerts.delivery(sender)
    delivery.start()
    await poll_until(lambda: len(sender.sent) == 1)
    asyncio.get_running_loop().call_soon(gate.set)
    await delivery.stop(timeout_s=60.0)
    assert (await alerts.messages())[0].state == "delivered"


async def test_an_unreadable_secret_is_reported_and_the_message_retried(alerts: AlertParts) -> None:
    await webhook(alerts)
    await alerts.enqueue()
    alerts.webhooks = Webhooks(alerts.db, alerts.clock, Sealer(b"y" * 32, "x"), target_policy=LOOPBACK, mail=True)
    sender = RecordingSender()
    await alerts.delivery(sender).deliver_due()
    (message,) = await alerts.messages()
    assert (message.state, sender.sent) == ("pending", [])
    assert message.last_error is not None
    assert "secret.key" in message.last_error


async def test_without_a_mail_server_e_mail_fails_and_says_why(alerts: AlertParts) -> None:
    await alerts.webhooks.create(kind="email", target="ops@example.com", access=OWNER)
    await alerts.enqueue()
    delivery = alerts.delivery(RecordingSender())
    delivery._senders = {}
    await delivery.deliver_due()
    assert "smtp_url" in str((await alerts.messages())[0].last_error)


async def test_a_bug_in_a_sender_ends_only_its_attempt(alerts: AlertParts, clock: FakeClock) -> None:
    await webhook(alerts)
    await alerts.enqueue()
    sender = RecordingSender(RuntimeError("a bug"))
    delivery = alerts.delivery(sender)
    await delivery.deliver_due()
    clock.advance(LEASE_S)
    await delivery.deliver_due()
    assert [message.state for message in await alerts.messages()] == ["delivered"]


async def test_a_message_whose_every_attempt_hits_a_bug_is_given_up(alerts: AlertParts, clock: FakeClock) -> None:
    await webhook(alerts)
    await alerts.enqueue()
    sender = RecordingSender(*(RuntimeError("a bug") for _ in range(ATTEMPTS_MAX)))
    delivery = alerts.delivery(sender)
    for _ in range(ATTEMPTS_MAX + 1):
        await delivery.deliver_due()
        clock.advance(LEASE_S)
    (message,) = await alerts.messages()
    assert (message.state, len(sender.sent)) == ("failed", ATTEMPTS_MAX)
    assert counted(alerts, "alerts_given_up_total") == 1
