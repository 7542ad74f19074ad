"""Periodic checks: expiring keys, engines that stay down, and a task that survives database failures."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from typing import cast as typed

import pytest

from appliance.base.db import Database
from appliance.metering.alerts.key_expiry import SWEEP_INTERVAL_S, KeyExpiryAlerts
from appliance.metering.calendar import BillingCalendar
from appliance.serving.alerting.watch import ENGINE_DOWN_S, AlertWatch
from appliance.tenancy.access import WHOLE_BOX
from appliance.tenancy.keys import Keys
from appliance.tenancy.principals import KeyChanges
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import TARGET, AlertBox, alert_box
from tests.support.cast import PEPPER, Cast, Person
from tests.support.clock import FakeClock
from tests.support.ledgers import euro_budget_alerts
from tests.support.spending import record_statements

DAY_S = 86400.0


class Engines:
    """Models of the registry, of which only the state is looked at."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(state="ready", error=None)

    def list(self) -> list[Any]:
        return [SimpleNamespace(name="demo", engine=self.engine)]


class Watched:
    """A watch over one test's database and a webhook of the box that hears everything."""

    def __init__(self, alerts: AlertBox, clock: FakeClock) -> None:
        self.alerts, self.clock, self.engines = alerts, clock, Engines()
        self.keys = Keys(alerts.db, clock, PEPPER)
        self.watch = AlertWatch(
            alerts.db,
            clock,
            euro_budget_alerts(alerts.db, clock, BillingCalendar()),
            KeyExpiryAlerts(alerts.db, clock),
            typed("Any", self.engines),
        )

    async def new_key(self, person: Person, days: float) -> str:
        """Return the id of a new key that lives so many days."""
        expires_at = self.clock.now() + timedelta(days=days)
        key, _ = await self.keys.create(person.tenant.id, "ci", KeyChanges(expires_at=expires_at), access=WHOLE_BOX)
        return key.id

    async def alerts_sent(self) -> list[dict[str, Any]]:
        """Look, and return what has been told so far."""
        await self.watch.check()
        return [message.payload["data"] for message in await self.alerts.messages()]


@pytest.fixture
async def watched(database: Database, clock: FakeClock) -> Watched:
    """A watch, and a webhook that hears everything."""
    alerts = alert_box(database, clock)
    await alerts.webhooks.create(kind="webhook", target=TARGET, access=WHOLE_BOX)
    return Watched(alerts, clock)


async def test_a_key_is_told_of_a_week_before_it_expires_and_once(watched: Watched, cast: Cast, clock: FakeClock) -> None:
    key_id = await watched.new_key(cast.bob, 30)
    assert await watched.alerts_sent() == []
    clock.advance(23 * DAY_S - 1)
    assert await watched.alerts_sent() == []
    clock.advance(SWEEP_INTERVAL_S)
    (data,) = await watched.alerts_sent()
    assert (data["key_id"], data["tenant_name"], data["key_name"]) == (key_id, "bob", "ci")
    assert data["expires_at"] == "2026-12-21T12:00:00.000Z"
    for _ in range(5):
        clock.advance(DAY_S)
        assert len(await watched.alerts_sent()) == 1


async def test_a_key_that_was_prolonged_is_told_of_again(watched: Watched, cast: Cast, clock: FakeClock) -> None:
    key_id = await watched.new_key(cast.bob, 10)
    clock.advance(4 * DAY_S)
    assert len(await watched.alerts_sent()) == 1
    await watched.keys.update(key_id, KeyChanges(expires_at=clock.now() + timedelta(days=20)), access=WHOLE_BOX)
    assert len(await watched.alerts_sent()) == 1
    clock.advance(15 * DAY_S)
    assert len(await watched.alerts_sent()) == 2


async def test_keys_that_need_nobody_are_not_told_of(
    watched: Watched, cast: Cast, clock: FakeClock, database: Database
) -> None:
    revoked, rotated = await watched.new_key(cast.bob, 10), await watched.new_key(cast.bob, 10)
    await watched.new_key(cast.charlie, 10)
    clock.advance(DAY_S)
    await watched.keys.revoke(revoked, access=WHOLE_BOX)
    await watched.keys.rotate(rotated, grace_s=3600, access=WHOLE_BOX)
    await Tenants(database, clock).archive(cast.charlie.tenant.id, access=WHOLE_BOX)
    await watched.new_key(cast.bob, 2)  # was never to live for long
    clock.advance(3000)
    assert await watched.alerts_sent() == []
    clock.advance(3 * DAY_S)
    told = [data["key_id"] for data in await watched.alerts_sent()]
    assert len(told) == 1, "the successor of the rotated key alone"
    assert told[0] not in (revoked, rotated)


async def test_a_key_that_has_a_successor_or_has_expired_is_not_told_of(watched: Watched, cast: Cast, clock: FakeClock) -> None:
    await watched.new_key(cast.charlie, 9)
    rotated = await watched.new_key(cast.bob, 60)
    clock.advance(10 * DAY_S)
    await watched.keys.rotate(rotated, grace_s=3600, access=WHOLE_BOX)
    assert await watched.alerts_sent() == []


async def test_keys_are_looked_at_once_an_hour_and_whenever_keys_or_webhooks_change(
    watched: Watched, cast: Cast, clock: FakeClock
) -> None:
    async def looks() -> bool:
        with record_statements() as statements:
            await watched.alerts_sent()
        return any("api_keys.replaced_by IS NULL" in statement for statement in statements)

    key_id = await watched.new_key(cast.bob, 10)
    told = []
    for wait_s in (1000, 0, SWEEP_INTERVAL_S - 1, 1, 0):
        clock.advance(wait_s)
        told.append(await looks())
    assert told == [True, False, False, True, False]
    clock.advance(3 * DAY_S - SWEEP_INTERVAL_S - 1000)  # a week is left now
    assert [data["key_id"] for data in await watched.alerts_sent()] == [key_id]
    await watched.alerts.webhooks.create(kind="webhook", target=TARGET, access=WHOLE_BOX)
    assert [data["key_id"] for data in await watched.alerts_sent()] == [key_id] * 2


async def test_a_model_that_stays_away_is_told_of_once_until_it_was_back(watched: Watched, clock: FakeClock) -> None:
    engine = watched.engines.engine
    assert await watched.alerts_sent() == []
    engine.state, engine.error = "failed", "out of memory"
    assert await watched.alerts_sent() == []
    clock.advance(ENGINE_DOWN_S - 1)
    assert await watched.alerts_sent() == []
    clock.advance(1)
    assert await watched.alerts_sent() == [{"model": "demo", "state": "failed", "down_s": 60, "error": "out of memory"}]
    clock.advance(3600)
    assert len(await watched.alerts_sent()) == 1
    engine.state = "ready"
    await watched.alerts_sent()
    engine.state = "restarting"
    await watched.alerts_sent()
    clock.advance(ENGINE_DOWN_S)
    assert len(await watched.alerts_sent()) == 2


async def test_a_model_that_is_back_in_time_is_not_told_of(watched: Watched, clock: FakeClock) -> None:
    for _ in range(3):
        watched.engines.engine.state = "restarting"
        await watched.alerts_sent()
        clock.advance(ENGINE_DOWN_S - 1)
        watched.engines.engine.state = "ready"
        assert await watched.alerts_sent() == []
