"""A wall clock that is set by an hour, as NTP does or the host of a suspended machine, changes no limit and no duration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from typing import cast as typed

import pytest
from sqlalchemy import select

from appliance.base.db import Database
from appliance.base.errors import RateLimitExceeded
from appliance.base.tables import requests
from appliance.metering.alerts import send_limits
from appliance.metering.alerts.send_limits import RetryLimiter
from appliance.serving.alerting.watch import ENGINE_DOWN_S, AlertWatch
from appliance.serving.model_registry import ModelRegistry
from appliance.serving.readiness import Readiness
from appliance.serving.supervisor import Supervisor
from appliance.tenancy.sessions import Sessions
from tests.support.alerts import alert_parts
from tests.support.cast import OWNER, Cast
from tests.support.clock import FakeClock
from tests.support.generations import open_serving

HOUR_S = 3600.0
either_way = pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S], ids=["forwards", "back"])


@either_way
async def test_the_times_of_a_running_request_stay_its_durations(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, jump_s: float
) -> None:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id) as serving:
        clock.advance(2.0)
        serving.engine.allow_steps(0)
        generation = await serving.start(cast.bob, [5, 6], max_tokens=3)
        clock.jump_wall(jump_s)
        clock.advance(1.0)
        serving.engine.allow_steps(3)
        await generation.outcome
    async with database.reading() as connection:
        row = (await connection.execute(select(requests))).mappings().one()
    assert [(row[name] - row["admitted_at"]).total_seconds() for name in ("first_token_at", "finished_at")] == [1.0, 1.0]


@either_way
def test_manual_retries_are_limited_as_long_as_before(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    monkeypatch.setattr(send_limits, "RETRIES_PER_HOUR_MAX", 1)
    limiter = RetryLimiter(clock)
    limiter.acquire("tenant")
    clock.jump_wall(jump_s)
    clock.advance(60.0)
    with pytest.raises(RateLimitExceeded) as refused:
        limiter.acquire("tenant")
    assert refused.value.retry_after_s == HOUR_S - 60.0
    clock.advance(refused.value.retry_after_s)
    limiter.acquire("tenant")


@either_way
async def test_sessions_do_not_end(database: Database, clock: FakeClock, cast: Cast, jump_s: float) -> None:
    sessions = Sessions(database, clock, idle_s=8 * 3600, absolute_s=7 * 24 * 3600)
    token, _session = await sessions.open(cast.alice.id, "browser", "127.0.0.1")
    for _ in range(3):
        clock.jump_wall(jump_s)
        assert await sessions.resolve(token) is not None
        clock.jump_wall(-jump_s)
        assert await sessions.resolve(token) is not None


@either_way
async def test_a_message_that_is_new_after_the_jump_is_due_at_once(database: Database, clock: FakeClock, jump_s: float) -> None:
    alerts = alert_parts(database, clock)
    await alerts.webhooks.create(kind="webhook", target="https://alerts.example.com/in", access=OWNER)
    clock.jump_wall(jump_s)
    await alerts.enqueue(event="engine.down")
    assert len(await alerts.outbox.claim(1)) == 1


@either_way
async def test_a_model_stays_ready_and_an_outage_is_as_long_as_it_was(
    database: Database, clock: FakeClock, jump_s: float
) -> None:
    engine = Supervisor(name="demo", command=lambda _file: [], clock=clock)
    engine.state, engine.ready_monotonic_s, engine.last_token_monotonic_s = "ready", clock.monotonic_s(), clock.monotonic_s()
    model = typed("Any", SimpleNamespace(name="demo", engine=engine))
    readiness = Readiness(ModelRegistry([model]), clock, interval_s=30.0)
    alerts = alert_parts(database, clock)
    await alerts.webhooks.create(kind="webhook", target="https://alerts.example.com/in", access=OWNER)
    unused: Any = SimpleNamespace(sweep=_nothing)
    watch = AlertWatch(database, clock, unused, unused, ModelRegistry([model]), readiness)
    clock.jump_wall(jump_s)
    assert readiness.problem(model) is None
    engine.state = "restarting"
    await watch.check()
    clock.jump_wall(jump_s)
    clock.advance(ENGINE_DOWN_S - 1)
    await watch.check()
    assert await alerts.messages() == []
    clock.advance(1)
    await watch.check()
    assert [message.payload["data"]["down_s"] for message in await alerts.messages()] == [60]


async def _nothing() -> None:
    """Find nothing to alert about."""
