"""Ended messages of the outbox are deleted in small batches; pending ones and those needed to avoid repetition are kept."""

from __future__ import annotations

import pytest

from appliance.base.db import Database
from appliance.metering.alerts import outbox_pruning
from appliance.metering.alerts.outbox_pruning import INTERVAL_S, KEEP_DAYS_MIN, OutboxPruner
from tests.support.alerts import TARGET, AlertParts, alert_parts
from tests.support.cast import OWNER
from tests.support.clock import FakeClock

DAY_S = 86400.0


@pytest.fixture
async def alerts(database: Database, clock: FakeClock) -> AlertParts:
    """An outbox with one webhook, and on day 0 a delivered message, one that was given up and one that is pending."""
    parts = alert_parts(database, clock)
    await parts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    for subject in ("delivered", "given up", "pending"):
        await parts.enqueue(subject)
        if subject != "pending":
            (claimed,) = await parts.outbox.claim(1)
            await (
                parts.outbox.mark_delivered(claimed)
                if subject == "delivered"
                else parts.outbox.mark_failed(claimed, "gone", None)
            )
    return parts


async def remaining(alerts: AlertParts) -> list[str]:
    return [message.payload["data"]["subject"] for message in await alerts.messages()]


async def test_messages_that_ended_before_the_retention_period_are_deleted_and_pending_ones_kept(
    alerts: AlertParts, clock: FakeClock
) -> None:
    pruner = OutboxPruner(alerts.db, clock, keep_days=90)
    clock.advance(89 * DAY_S)
    assert await pruner.prune() == 0
    clock.advance(2 * DAY_S)
    await alerts.enqueue("new")
    assert await pruner.prune() == 2
    assert await remaining(alerts) == ["pending", "new"]


async def test_a_message_sent_again_recently_is_kept(alerts: AlertParts, clock: FakeClock) -> None:
    clock.advance(100 * DAY_S)
    first = (await alerts.messages())[0]
    await alerts.outbox.retry(first.webhook_id, first.id, access=OWNER)
    (claimed,) = await alerts.outbox.claim(1)
    await alerts.outbox.mark_delivered(claimed)
    assert await OutboxPruner(alerts.db, clock, keep_days=90).prune() == 1
    assert await remaining(alerts) == ["delivered", "pending"]


async def test_an_alert_is_kept_while_its_period_can_still_be_checked(alerts: AlertParts, clock: FakeClock) -> None:
    pruner = OutboxPruner(alerts.db, clock, keep_days=1)
    clock.advance(31 * DAY_S)
    assert await pruner.prune() == 0
    assert await alerts.enqueue("delivered") == 0, "its alert was already sent"
    clock.advance((KEEP_DAYS_MIN - 30) * DAY_S)
    assert await pruner.prune() == 2


async def test_a_call_deletes_a_bounded_number_and_the_next_continues(
    alerts: AlertParts, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_pruning, "BATCH_ROWS", 1)
    clock.advance(100 * DAY_S)
    pruner = OutboxPruner(alerts.db, clock, keep_days=90)
    assert [await pruner.prune(1), await pruner.prune(1), await pruner.prune(1)] == [1, 1, 0]


async def test_a_call_returns_the_number_deleted_in_all_its_batches(
    alerts: AlertParts, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_pruning, "BATCH_ROWS", 1)
    clock.advance(100 * DAY_S)
    assert await OutboxPruner(alerts.db, clock, keep_days=90).prune(2) == 2
    assert await remaining(alerts) == ["pending"]


async def test_pruning_runs_once_an_hour(alerts: AlertParts, clock: FakeClock) -> None:
    pruner = OutboxPruner(alerts.db, clock, keep_days=90)
    clock.advance(90 * DAY_S)
    assert await pruner.prune() == 0
    clock.advance(INTERVAL_S - 1)
    assert await pruner.prune() == 0
    clock.advance(1)
    assert await pruner.prune() == 2
