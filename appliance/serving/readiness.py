"""Whether each model really answers: a token generated within the last probe interval, by traffic or by a probe of our own.

A probe is one greedy token for nobody: it is not admitted, not billed, has no record and stands in no figure.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import structlog

from appliance.base.background import Background
from appliance.base.clock import Clock
from appliance.base.errors import GatehouseError
from appliance.base.ids import new_id
from appliance.serving.event_queue import EventQueue
from appliance.serving.model_registry import ModelRegistry, ServedModel
from engine.protocol import FinishReason, GenerationRequest, SamplingParams

PROBE_TENANT = "probe"
PROBE_TIMEOUT_S = 30.0
POLL_S = 0.25

log = structlog.get_logger()


class Readiness:
    """Keeps every model's last token fresh; `problem` says why a model does not count as ready.

    Probes run twice per interval, so that one probe that takes long does not turn readiness red by itself.
    """

    def __init__(self, models: ModelRegistry, clock: Clock, *, interval_s: float) -> None:
        self._models = models
        self._clock = clock
        self._interval_s = interval_s
        self._probes: list[Background] = []

    def start(self) -> None:
        """Probe each model in a task of its own."""
        for model in self._models.list():
            probe = Background(f"probe {model.name}", partial(self._keep_fresh, model))
            probe.start()
            self._probes.append(probe)

    async def stop(self) -> None:
        """End the probes."""
        await asyncio.gather(*(probe.stop() for probe in self._probes))
        self._probes.clear()

    def problem(self, model: ServedModel) -> str | None:
        """Return why `model` is not ready, or None when it is. What the engine said stays with administrators and the log."""
        if model.engine.state != "ready":
            return f"engine of {model.name} is {model.engine.state}"
        age_s = self._token_age_s(model)
        if age_s is None:
            return f"engine of {model.name} has not generated a token yet"
        if age_s > self._interval_s:
            return f"engine of {model.name} generated its last token {age_s:.0f} s ago"
        return None

    def _token_age_s(self, model: ServedModel) -> float | None:
        last_s = model.engine.last_token_monotonic_s
        started_s = model.engine.ready_monotonic_s
        if last_s is None or started_s is None or last_s < started_s:
            return None
        return self._clock.monotonic_s() - last_s

    async def _keep_fresh(self, model: ServedModel) -> None:
        while True:
            await model.engine.wait_for_state("ready")
            age_s = self._token_age_s(model)
            if age_s is None or age_s >= self._interval_s / 2:
                await self._probe(model)
            await asyncio.sleep(min(POLL_S, self._interval_s / 4))

    async def _probe(self, model: ServedModel) -> None:
        info = model.info
        if info is None:
            return
        request = GenerationRequest(
            request_id=new_id("probe"),
            tenant_id=PROBE_TENANT,
            prompt_token_ids=[info.eos_token_ids[0] if info.eos_token_ids else 0],
            sampling=SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True),
        )
        counted, stats = _Counted(), model.engine.stats
        stats.probe_id = request.request_id
        try:
            events = model.engine.submit(request)
        except GatehouseError as error:
            log.warning("probe failed", model=model.name, reason=error.message)
            return
        stats.reconciliation.note_submitted()
        try:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await _until_final(model, events, counted)
            except TimeoutError:
                model.engine.abort(request.request_id)
                log.warning("probe unanswered", model=model.name, timeout_s=PROBE_TIMEOUT_S)
                await _until_final(model, events, counted)  # comes soon: an engine that does not answer is given up
        except GatehouseError as error:
            log.warning("probe failed", model=model.name, reason=error.message)
        finally:
            stats.reconciliation.note_settled(generated_tokens=counted.tokens, billed_completion=0, billed_prompt=0)


@dataclass(slots=True)
class _Counted:
    """What the engine counted for a probe: nobody is billed for it."""

    tokens: int = 0


async def _until_final(model: ServedModel, events: EventQueue, counted: _Counted) -> None:
    while True:
        for event in await events.take():
            counted.tokens = event.num_prompt_tokens_computed + event.num_output_tokens
            if event.finish_reason is FinishReason.ERROR:
                log.warning("probe failed", model=model.name, reason=event.error)
            if event.finish_reason is not None:
                return
