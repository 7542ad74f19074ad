"""Periodic checks: expiring keys, engines that stay down, budgets."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from typing import cast as typed
from unittest.mock import AsyncMock, Mock

import pytest

from appliance.base.db import Database
from appliance.metering.alerts import key_expiry
from appliance.metering.alerts.budgets import BudgetAlerts
from appliance.metering.alerts.key_expiry import SWEEP_INTERVAL_S, KeyExpiryAlerts
from appliance.metering.alerts.outbox import BOX_EVENTS
from appliance.metering.calendar import BillingCalendar
from appliance.serving.alerting.watch import ENGINE_DOWN_S, AlertWatch
from appliance.tenancy.keys import Keys
from appliance.tenancy.principals import KeyChanges
from appliance.tenancy.tenants import Tenants
from engine.protocol import KernelChoice
from tests.support.alerts import TARGET, AlertParts, alert_parts
from tests.support.cast import OWNER, PEPPER, Cast, Person
from tests.support.clock import FakeClock
from tests.support.engine_messages import engine_info
from tests.support.ledgers import euro_budget_alerts
from tests.support.sql_statements import record_statements

DAY_S = 86400.0


class Engines:
    """A model registry of which only the engine's state and description are used; the engine serves all models `names`.
    `silence`: why they are not ready although its state is."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(state="ready", error=None, info=engine_info())
        self.names = ["demo"]
        self.silence: str | None = None

    def list(self) -> list[Any]:
        return [SimpleNamespace(name=name, engine=self.engine) for name in self.names]

    def problem(self, _model: object) -> str | None:
        """Return why no model is ready, as `Readiness` does."""
        return self.silence if self.engine.state == "ready" else f"engine of demo is {self.engine.state}"


class Watched:
    """An alert watch over the test's database and a webhook of the appliance for all events."""

    def __init__(self, alerts: AlertParts, clock: FakeClock) -> None:
        self.alerts, self.clock, self.engines = alerts, clock, Engines()
        self.keys = Keys(alerts.db, clock, PEPPER)
        self.restart_gateway()

    async def new_key(self, person: Person, days: float) -> str:
        """Return the id of a new key that expires in so many days."""
        expires_at = self.clock.now() + timedelta(days=days)
        key, _ = await self.keys.create(person.tenant.id, "ci", KeyChanges(expires_at=expires_at), access=OWNER)
        return key.id

    def restart_gateway(self) -> None:
        """Continue with an alert watch that remembers nothing."""
        self.watch = AlertWatch(
            self.alerts.db,
            self.clock,
            euro_budget_alerts(self.alerts.db, self.clock, BillingCalendar()),
            KeyExpiryAlerts(self.alerts.db, self.clock),
            typed("Any", self.engines),
            typed("Any", self.engines),
        )

    async def alerts_sent(self) -> list[dict[str, Any]]:
        """Run one check and return all alerts sent so far."""
        await self.watch.check()
        return [message.payload["data"] for message in await self.alerts.messages()]


@pytest.fixture
async def watched(database: Database, clock: FakeClock) -> Watched:
    """An alert watch with a webhook for all events."""
    alerts = alert_parts(database, clock)
    await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    return Watched(alerts, clock)


async def test_an_expiring_key_is_reported_once_a_week_before(watched: Watched, cast: Cast, clock: FakeClock) -> None:
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


async def test_an_extended_key_is_reported_again(watched: Watched, cast: Cast, clock: FakeClock) -> None:
    key_id = await watched.new_key(cast.bob, 10)
    clock.advance(4 * DAY_S)
    assert len(await watched.alerts_sent()) == 1
    await watched.keys.update(key_id, KeyChanges(expires_at=clock.now() + timedelta(days=20)), access=OWNER)
    assert len(await watched.alerts_sent()) == 1
    clock.advance(15 * DAY_S)
    assert len(await watched.alerts_sent()) == 2


async def test_an_alert_about_a_key_is_not_written_again_when_another_key_changes(
    watched: Watched, cast: Cast, clock: FakeClock
) -> None:
    await watched.new_key(cast.bob, 10)
    clock.advance(4 * DAY_S)
    assert len(await watched.alerts_sent()) == 1
    await watched.new_key(cast.bob, 90)
    with record_statements() as statements:
        await watched.watch.check()
    assert not [statement for statement in statements if statement.startswith("INSERT INTO outbox")]


async def test_alerts_about_many_keys_are_written_in_several_transactions(
    watched: Watched, cast: Cast, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await watched.new_key(cast.bob, 10)
    clock.advance(4 * DAY_S)
    monkeypatch.setattr(key_expiry, "KEYS_PER_TRANSACTION", 2)
    writing = Mock(wraps=watched.alerts.db.writing)
    monkeypatch.setattr(watched.alerts.db, "writing", writing)
    assert len(await watched.alerts_sent()) == 3
    assert writing.call_count == 2


async def test_revoked_rotated_archived_and_short_lived_keys_are_not_reported(
    watched: Watched, cast: Cast, clock: FakeClock, database: Database
) -> None:
    revoked, rotated = await watched.new_key(cast.bob, 10), await watched.new_key(cast.bob, 10)
    await watched.new_key(cast.charlie, 10)
    clock.advance(DAY_S)
    await watched.keys.revoke(revoked, access=OWNER)
    await watched.keys.rotate(rotated, grace_s=3600, access=OWNER)
    await Tenants(database, clock).archive(cast.charlie.tenant.id, access=OWNER)
    for days in (2, 7):
        await watched.new_key(cast.bob, days)  # was never to live for long
    clock.advance(3000)
    assert await watched.alerts_sent() == []
    clock.advance(3 * DAY_S)
    reported = [data["key_id"] for data in await watched.alerts_sent()]
    assert len(reported) == 1, "the successor of the rotated key alone"
    assert reported[0] not in (revoked, rotated)


async def test_a_key_with_a_successor_or_already_expired_is_not_reported(
    watched: Watched, cast: Cast, clock: FakeClock
) -> None:
    await watched.new_key(cast.charlie, 9)
    rotated = await watched.new_key(cast.bob, 60)
    clock.advance(10 * DAY_S)
    await watched.keys.rotate(rotated, grace_s=3600, access=OWNER)
    assert await watched.alerts_sent() == []


async def test_keys_are_checked_hourly_and_whenever_keys_or_webhooks_change(
    watched: Watched, cast: Cast, clock: FakeClock
) -> None:
    async def looks() -> bool:
        with record_statements() as statements:
            await watched.alerts_sent()
        return any("api_keys.replaced_by IS NULL" in statement for statement in statements)

    key_id = await watched.new_key(cast.bob, 10)
    results = []
    for wait_s in (1000, 0, SWEEP_INTERVAL_S - 1, 1, 0):
        clock.advance(wait_s)
        results.append(await looks())
    assert results == [True, False, False, True, False]
    clock.advance(3 * DAY_S - SWEEP_INTERVAL_S - 1000)  # a week is left now
    assert [data["key_id"] for data in await watched.alerts_sent()] == [key_id]
    await watched.alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    assert [data["key_id"] for data in await watched.alerts_sent()] == [key_id] * 2


async def test_a_check_includes_budgets(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = AsyncMock()
    monkeypatch.setattr(BudgetAlerts, "sweep", sweep)
    await watched.watch.check()
    sweep.assert_awaited_once_with()


async def test_an_engine_that_stays_down_is_reported_once_until_it_recovers(watched: Watched, clock: FakeClock) -> None:
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


async def test_an_engine_that_recovers_in_time_is_not_reported(watched: Watched, clock: FakeClock) -> None:
    for _ in range(3):
        watched.engines.engine.state = "restarting"
        await watched.alerts_sent()
        clock.advance(ENGINE_DOWN_S - 1)
        watched.engines.engine.state = "ready"
        assert await watched.alerts_sent() == []


async def test_an_engine_that_lives_but_fails_its_probes_is_reported_as_down_until_it_generates_a_token(
    watched: Watched, clock: FakeClock
) -> None:
    problem = "engine of demo generated its last token 31 s ago"
    for time in (1, 2):
        watched.engines.silence = problem
        assert len(await watched.alerts_sent()) == time - 1
        clock.advance(ENGINE_DOWN_S)
        sent = await watched.alerts_sent()
        assert sent == [{"model": "demo", "state": "not ready", "down_s": 60, "error": problem}] * time
        watched.engines.silence = None
        await watched.alerts_sent()


async def test_an_engine_that_ends_after_failing_its_probes_is_reported_once(watched: Watched, clock: FakeClock) -> None:
    watched.engines.silence = "engine of demo generated its last token 31 s ago"
    await watched.alerts_sent()
    clock.advance(ENGINE_DOWN_S - 1)
    watched.engines.engine.state, watched.engines.engine.error = "restarting", "signal 9"
    assert await watched.alerts_sent() == []
    clock.advance(1)
    assert [alert["state"] for alert in await watched.alerts_sent()] == ["restarting"]
    watched.engines.engine.state = "ready"
    clock.advance(1)
    assert len(await watched.alerts_sent()) == 1


async def test_a_model_that_loads_for_the_first_time_is_not_reported(watched: Watched, clock: FakeClock) -> None:
    watched.engines.engine.state = "loading"
    for _ in range(3):
        assert await watched.alerts_sent() == []
        clock.advance(ENGINE_DOWN_S)


async def test_an_engine_on_the_cpu_of_a_machine_with_a_gpu_is_reported_once_until_it_uses_the_gpu(
    watched: Watched, clock: FakeClock
) -> None:
    note, engine = "torch finds no usable GPU. Too old.", watched.engines.engine
    assert await watched.alerts_sent() == []
    engine.info = engine_info(device_note=note)
    assert await watched.alerts_sent() == [{"model": "demo", "reason": note}]
    for info, state in ((None, "restarting"), (engine.info, "ready")):
        engine.info, engine.state = info, state
        assert len(await watched.alerts_sent()) == 1
    for note_later, num_sent in ((None, 1), (note, 2)):
        clock.advance(1)
        engine.info = engine_info(device_note=note_later)
        assert len(await watched.alerts_sent()) == num_sent
    assert [message.event for message in await watched.alerts.messages()] == ["engine.gpu_unused"] * 2


async def test_an_engine_on_the_cpu_is_reported_again_after_a_start_of_the_gateway(watched: Watched, clock: FakeClock) -> None:
    watched.engines.engine.info = engine_info(device_note="Too old.")
    assert len(await watched.alerts_sent()) == 1
    clock.advance(1)
    watched.restart_gateway()
    assert len(await watched.alerts_sent()) == 2


async def test_refused_kernels_are_reported_with_their_reasons(watched: Watched) -> None:
    refused = KernelChoice(
        name="products of one row", serves="tiles", refused={"GEMV": "wrong results", "Hopper kernel": "timeout"}
    )
    watched.engines.engine.info = engine_info(kernel_choices=[KernelChoice(name="attention", serves="parts"), refused])
    kernels = ["products of one row by GEMV: wrong results", "products of one row by Hopper kernel: timeout"]
    assert await watched.alerts_sent() == [{"model": "demo", "kernels": kernels}]
    assert [message.event for message in await watched.alerts.messages()] == ["engine.kernels_refused"]


async def test_the_same_refused_kernels_are_not_reported_again_by_later_starts(watched: Watched, clock: FakeClock) -> None:
    for reason, num_sent in (("wrong results", 1), ("wrong results", 1), ("timeout", 2)):
        refused = KernelChoice(name="products", serves="tiles", refused={"GEMV": reason})
        watched.engines.engine.info = engine_info(kernel_choices=[refused])
        assert len(await watched.alerts_sent()) == num_sent
        watched.restart_gateway()
        clock.advance(1)


async def test_models_whose_long_names_begin_alike_are_reported_each(watched: Watched, clock: FakeClock) -> None:
    watched.engines.names = [f"{'m' * 100}-{number}" for number in (1, 2)]
    refused = KernelChoice(name="products", serves="tiles", refused={"GEMV": "timeout"})
    watched.engines.engine.info = engine_info(device_note="Too old.", kernel_choices=[refused])
    await watched.watch.check()
    watched.engines.engine.state = "failed"
    await watched.watch.check()
    clock.advance(ENGINE_DOWN_S)
    await watched.watch.check()
    reported = [(message.event, message.payload["data"]["model"]) for message in await watched.alerts.messages()]
    assert sorted(reported) == [(event, name) for event in sorted(BOX_EVENTS) for name in watched.engines.names]


async def test_an_alert_that_could_not_be_written_is_written_by_the_next_check(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.engines.engine.info = engine_info(device_note="Too old.")
    with monkeypatch.context() as outage:
        outage.setattr(watched.alerts.db, "writing", Mock(side_effect=OSError("down")))
        with pytest.raises(OSError, match="down"):
            await watched.watch._check_engines()
    assert len(await watched.alerts_sent()) == 1
