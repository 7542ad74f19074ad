"""The task that finds alerts which no transaction reports: lowered budgets, expiring keys, engines that are down or slow."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from appliance.base.background import Background, repeat
from appliance.base.clock import Clock, rfc3339
from appliance.base.db import Database
from appliance.metering.alerts import outbox
from appliance.metering.alerts.budgets import BudgetAlerts
from appliance.metering.alerts.key_expiry import KeyExpiryAlerts
from appliance.serving.model_registry import ModelRegistry, ServedModel
from appliance.serving.readiness import Readiness

INTERVAL_S = 10.0
ENGINE_DOWN_S = 60.0  # an engine restart takes less and causes no alert


class AlertWatch:
    """Checks every INTERVAL_S. The outbox ensures that nothing is reported twice."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        budgets: BudgetAlerts,
        keys: KeyExpiryAlerts,
        models: ModelRegistry,
        readiness: Readiness,
    ) -> None:
        self._db = db
        self._clock = clock
        self._budgets = budgets
        self._keys = keys
        self._models = models
        self._readiness = readiness
        self._down_since_s: dict[str, float] = {}
        self._alerted: set[str] = set()
        self._slow: dict[str, dict[str, Mapping[str, Any]]] = {}  # by model and event, what was reported
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
        for model in self._models.list():
            await self._check_down(model)
            await self._check_slow(model)

    async def _check_down(self, model: ServedModel) -> None:
        """Report a model that is not ready for ENGINE_DOWN_S: its engine has ended, or lives but generates nothing."""
        now_s, state, problem = self._clock.monotonic_s(), model.engine.state, self._readiness.problem(model)
        if problem is None or state == "loading":
            self._down_since_s.pop(model.name, None)
            self._alerted.discard(model.name)
            return
        down_s = now_s - self._down_since_s.setdefault(model.name, now_s)
        if down_s >= ENGINE_DOWN_S and model.name not in self._alerted:
            shown, error = ("not ready", problem) if state == "ready" else (state, model.engine.error)
            data = {"state": shown, "down_s": round(down_s), "error": error}
            await self._enqueue("engine.down", model.name, rfc3339(self._clock.now()), data)
            self._alerted.add(model.name)

    async def _check_slow(self, model: ServedModel) -> None:
        """Report what an engine that has just started has found out about GPU and kernels, unless its predecessor found the
        same."""
        info = model.engine.info
        if info is None or model.engine.state != "ready":
            return
        found: dict[str, dict[str, Any]] = {}
        if info.device_note is not None:
            found["engine.gpu_unused"] = {"reason": info.device_note}
        if info.refused_kernels:
            found["engine.kernels_refused"] = {"kernels": info.refused_kernels}
        reported = self._slow.setdefault(model.name, {})
        for event in reported.keys() - found.keys():
            del reported[event]
        for event, data in found.items():
            if reported.get(event) != data:
                await self._enqueue(event, model.name, self._occasion(event, data), data)
                reported[event] = data

    def _occasion(self, event: str, data: Mapping[str, Any]) -> str:
        """Return what tells an alert of a slow engine from earlier ones. A refusal lasts until a person ends it or the version
        changes, so that the same kernels are reported once to each target, however often the gateway starts."""
        if event == "engine.kernels_refused":
            return "\n".join(data["kernels"])
        return rfc3339(self._clock.now())

    async def _enqueue(self, event: str, model: str, occasion: str, data: Mapping[str, Any]) -> None:
        subject = hashlib.sha256(f"{model}\n{occasion}".encode()).hexdigest()  # the names may be too long for an outbox key
        async with self._db.writing() as connection:
            message = outbox.Message(event, subject, {"model": model, **data})
            await connection.run_sync(outbox.enqueue, self._clock.now(), [message])
