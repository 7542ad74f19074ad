"""The task that finds alerts which no transaction reports: lowered budgets, expiring keys, engines that stay down."""

from __future__ import annotations

from appliance.base.background import Background, repeat
from appliance.base.clock import Clock, rfc3339
from appliance.base.db import Database
from appliance.metering.alerts import outbox
from appliance.metering.alerts.budgets import BudgetAlerts
from appliance.metering.alerts.key_expiry import KeyExpiryAlerts
from appliance.serving.model_registry import ModelRegistry

INTERVAL_S = 10.0
ENGINE_DOWN_S = 60.0  # an engine restart takes less and causes no alert
_SERVED = ("ready", "loading")


class AlertWatch:
    """Checks every INTERVAL_S. The outbox ensures that nothing is reported twice."""

    def __init__(self, db: Database, clock: Clock, budgets: BudgetAlerts, keys: KeyExpiryAlerts, models: ModelRegistry) -> None:
        self._db = db
        self._clock = clock
        self._budgets = budgets
        self._keys = keys
        self._models = models
        self._down_since_s: dict[str, float] = {}
        self._alerted: set[str] = set()
        self._rounds = Background(
            "alert watch",
            lambda: repeat(self.check, INTERVAL_S, failure="the check for alerts failed", immediately=True),
        )

    def start(self) -> None:
        """Start the task."""
        self._rounds.start()

    async def stop(self) -> None:
        """Stop the task."""
        await self._rounds.stop()

    async def check(self) -> None:
        """Check budgets, keys and engines once."""
        await self._budgets.sweep()
        await self._keys.sweep()
        await self._check_engines()

    async def _check_engines(self) -> None:
        now_s = self._clock.monotonic_s()
        for model in self._models.list():
            state = model.engine.state
            if state in _SERVED:
                self._down_since_s.pop(model.name, None)
                self._alerted.discard(model.name)
                continue
            down_s = now_s - self._down_since_s.setdefault(model.name, now_s)
            if down_s >= ENGINE_DOWN_S and model.name not in self._alerted:
                await self._enqueue_engine_down(model.name, state, round(down_s), model.engine.error)
                self._alerted.add(model.name)

    async def _enqueue_engine_down(self, model: str, state: str, down_s: int, error: str | None) -> None:
        now = self._clock.now()
        async with self._db.writing() as connection:
            await connection.run_sync(
                outbox.enqueue,
                now,
                event="engine.down",
                subject=f"{model[:60]}:{rfc3339(now)}",
                data={"model": model, "state": state, "down_s": down_s, "error": error},
            )
