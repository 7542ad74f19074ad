"""A start without any model that can be loaded ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from appliance.app import _stop_without_models
from appliance.base.clock import SystemClock
from appliance.serving.supervisor import Supervisor


class FirstModels:
    """Two models that begin to load, and the server that waits for one of them."""

    def __init__(self) -> None:
        self.first, self.second = (Supervisor(name=name, command=lambda _fd: [], clock=SystemClock()) for name in ("a", "b"))
        self.num_stops = 0
        models = [SimpleNamespace(name=engine.name, engine=engine) for engine in (self.first, self.second)]
        registry: Any = SimpleNamespace(list=lambda: models)
        server: Any = SimpleNamespace(stop=self._stop)
        for engine in (self.first, self.second):
            engine._set_state("loading")
        self.watch = asyncio.create_task(_stop_without_models(registry, server))

    def _stop(self) -> None:
        self.num_stops += 1

    async def reach(self, engine: Supervisor, state: str) -> None:
        """Put an engine into a state, and let the watch notice it."""
        engine._set_state(state)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_the_server_stops_when_all_models_have_failed() -> None:
    models = FirstModels()
    await models.reach(models.first, "failed")
    assert models.num_stops == 0
    models.second.error = "no such architecture"
    await models.reach(models.second, "failed")
    assert models.num_stops == 1
    assert await models.watch == "the model a could not be loaded: None; the model b could not be loaded: no such architecture"


async def test_the_server_stays_when_a_model_that_failed_first_is_ready_before_the_last_one_fails() -> None:
    models = FirstModels()
    await models.reach(models.first, "failed")
    await models.reach(models.first, "ready")
    await models.reach(models.second, "failed")
    assert models.num_stops == 0
    assert await models.watch is None


async def test_the_server_waits_for_a_model_whose_engine_is_restarted_before_it_was_ready() -> None:
    models = FirstModels()
    await models.reach(models.first, "restarting")
    await models.reach(models.second, "failed")
    assert not models.watch.done()
    await models.reach(models.first, "failed")
    assert models.num_stops == 1
