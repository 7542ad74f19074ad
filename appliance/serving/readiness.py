"""Whether each model really answers: it has generated a token within the last probe interval, for a request or for a probe.

A probe generates one greedy token for no tenant: it is not admitted, billed or recorded, and left out of all statistics.
"""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from appliance.base.background import Background
from appliance.base.clock import Clock
from appliance.base.consecutive_failures import ConsecutiveFailures
from appliance.base.errors import EngineUnavailable, GatehouseError
from appliance.base.ids import new_id
from appliance.serving.model_registry import ModelRegistry, ServedModel
from engine.protocol import FinishReason, GenerationRequest, SamplingParams, TokenEvent

PROBE_TENANT = "probe"
PROBE_TIMEOUT_S = 30.0
POLL_S = 0.25

log = structlog.get_logger()


class Readiness:
    """Probes models that have not generated a token for half an interval; `problem` says why a model is not ready.

    Half an interval, so that a single slow probe does not make a model unready.
    """

    def __init__(self, models: ModelRegistry, clock: Clock, *, interval_s: float) -> None:
        self._models = models
        self._clock = clock
        self._interval_s = interval_s
        self._probes: list[Background] = []

    def start(self) -> None:
        """Start one probing task per model."""
        for model in self._models.list():
            probe = Background(f"probe {model.name}", partial(self._keep_fresh, model))
            probe.start()
            self._probes.append(probe)

    async def stop(self) -> None:
        """Stop the probing tasks."""
        await asyncio.gather(*(probe.stop() for probe in self._probes))
        self._probes.clear()

    def problem(self, model: ServedModel) -> str | None:
        """Return why `model` is not ready, or None when it is. Without the engine's error, which only administrators see."""
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
        failures = ConsecutiveFailures(self._clock.monotonic_s)
        while True:
            await model.engine.wait_for_state("ready")
            age_s = self._token_age_s(model)
            if age_s is None or age_s >= self._interval_s / 2:
                error = await self._probe(model)
                if error is None:
                    failures.end()
                elif number := failures.count():
                    log.warning("probe failed", model=model.name, reason=error, failures=number)
            await asyncio.sleep(min(POLL_S, self._interval_s / 4))

    async def _probe(self, model: ServedModel) -> str | None:
        """Generate one token. Return the error that prevented it, None if there is none or it is logged as unanswered."""
        info = model.engine.info
        if info is None:
            return None
        request = GenerationRequest(
            request_id=new_id("probe"),
            tenant_id=PROBE_TENANT,
            prompt_token_ids=[info.eos_token_ids[0] if info.eos_token_ids else 0],
            sampling=SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True),
        )
        probe, stats = _Probe(), model.engine.stats
        stats.probe_id = request.request_id
        try:
            model.engine.submit(request, probe)
        except GatehouseError as error:
            return error.message
        stats.reconciliation.note_submitted()
        try:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    return await asyncio.shield(probe.end)
            except TimeoutError:
                model.engine.abort(request.request_id)
                log.warning("probe unanswered", model=model.name, timeout_s=PROBE_TIMEOUT_S)
                await asyncio.shield(probe.end)  # bounded: the client fails aborts without an answer
                return None
        except GatehouseError as error:
            return error.message
        finally:
            stats.reconciliation.note_settled(generated_tokens=probe.tokens, billed_completion=0, billed_prompt=0)


class _Probe:
    """Receives a probe's events. `end` is the engine's error, or None. `tokens` are the prompt and output tokens that it
    counted; nobody pays them."""

    def __init__(self) -> None:
        self.end: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.tokens = 0

    def receive(self, event: TokenEvent) -> None:
        """Count the tokens, and end with the final event."""
        self.tokens = event.num_prompt_tokens_computed + event.num_output_tokens
        if event.finish_reason is not None:
            self.end.set_result((event.error or "no reason") if event.finish_reason is FinishReason.ERROR else None)

    def fail(self, error: EngineUnavailable) -> None:
        """End with `error`."""
        self.end.set_exception(error)
