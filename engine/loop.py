"""The engine: requests in, one step at a time, events out. Scheduler and runner meet here and nowhere else.

A step that raises is repeated request by request, which is harmless because a step only rewrites its own cache slots. Who
fails alone is ended with an error; the others go on. After a step that failed for everybody one harmless token is computed:
when that fails too, several times in a row, the device is taken to be broken, and `EngineBroken` asks for a new process.
So no request, however often it comes, can have the engine replaced by being bad.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import EngineBroken, PromptError
from engine.protocol import (
    EngineInfo,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    InvalidOption,
    RequestProgress,
    TokenEvent,
)
from engine.request import Request, RequestStatus
from engine.request_checks import PROMPT_PARAM, check_request
from engine.scheduled_batch import ScheduledRequest, StepOutput
from engine.scheduler import Scheduler

FAILED_STEPS_MAX = 3
ERROR_CHARS_MAX = 500

log = logging.getLogger("gatehouse.engine")


class Runner(Protocol):
    """What the loop needs of a model runner; tests bring one without tensors."""

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]: ...


@dataclass(slots=True)
class StepFigures:
    """About steps so far and the last one."""

    steps_total: int = 0
    step_ms: float = 0.0
    num_batched_tokens: int = 0


class Engine:
    """One loaded model with its live requests. Single-threaded."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, info: EngineInfo, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._live: dict[str, Request] = {}
        self._figures = StepFigures()
        self._failed_steps = 0

    @property
    def runner(self) -> Runner:
        """The device half, for work beside the steps."""
        return self._runner

    @property
    def has_requests(self) -> bool:
        return self._scheduler.has_requests

    def submit(self, wanted: GenerationRequest) -> TokenEvent | None:
        """Queue a request. One that cannot be run is answered at once with its final event, which says why."""
        if wanted.request_id in self._live:
            return _refusal(wanted, f"request id {wanted.request_id} is already live", "request_id")
        try:
            check_request(wanted, self.info)
        except PromptError as error:
            return _refusal(wanted, str(error), PROMPT_PARAM)
        except InvalidOption as error:
            return _refusal(wanted, str(error), error.param)
        request = self._make_request(wanted)
        self._live[request.request_id] = request
        self._scheduler.add(request)
        return None

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a live request; its blocks are free at once. None for an id that is not live."""
        request = self._live.pop(request_id, None)
        return None if request is None else self._scheduler.abort(request)

    def abort_all(self) -> list[TokenEvent]:
        events = [self.abort(request_id) for request_id in list(self._live)]
        return [event for event in events if event is not None]

    def step(self) -> list[TokenEvent]:
        """Schedule, run, apply. Does nothing when no request is live."""
        started_s = self._clock()
        batch = self._scheduler.schedule()
        if batch.is_empty:
            return []
        outputs = self._run(batch.items)
        events = self._scheduler.apply(batch, outputs)
        for event in events:
            if event.finish_reason is not None:
                self._live.pop(event.request_id, None)
        self._figures.steps_total += 1
        self._figures.num_batched_tokens = batch.num_tokens
        self._figures.step_ms = (self._clock() - started_s) * 1000
        self._judge(outputs)
        return events

    def _run(self, items: list[ScheduledRequest]) -> list[StepOutput]:
        try:
            return self._runner.run(items)
        except Exception:
            log.exception("step failed request_ids=%s", _names(items))
            return [self._run_alone(item) for item in items]

    def _run_alone(self, item: ScheduledRequest) -> StepOutput:
        try:
            return self._runner.run([item])[0]
        except Exception as error:
            log.exception("request failed request_id=%s", item.request.request_id)
            return StepOutput(error=f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX])

    def _judge(self, outputs: Sequence[StepOutput]) -> None:
        """Count a step that failed for everybody, unless the probe says that its requests were to blame."""
        failed = all(output.error for output in outputs) and not self._device_works()
        self._failed_steps = self._failed_steps + 1 if failed else 0
        if self._failed_steps > FAILED_STEPS_MAX:
            raise EngineBroken(f"{self._failed_steps} steps in a row failed for every request, and for a probe")

    def _device_works(self) -> bool:
        """The applied step gave its blocks back, so the probe finds one unless others live, who will tell in their turn."""
        with self._scheduler.probe() as item:
            return item is None or self._run_alone(item).error is None

    def _make_request(self, wanted: GenerationRequest) -> Request:
        sampling, limit = wanted.sampling, self.info.max_model_len
        num_prompt_tokens = len(wanted.prompt_token_ids)
        end_ids = () if sampling.ignore_eos else self.info.eos_token_ids
        return Request(
            request_id=wanted.request_id,
            tenant_id=wanted.tenant_id,
            sampling=sampling,
            token_ids=list(wanted.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            max_total_tokens=min(limit, num_prompt_tokens + (sampling.max_tokens or limit)),
            stop_ids=frozenset(end_ids).union(sampling.stop_token_ids),
            arrived_s=self._clock(),
        )

    def status(self, *, with_requests: bool = False) -> EngineStatus:
        """Gauges and totals now; `with_requests` adds every live request, at a cost proportional to their number."""
        scheduler, pool, totals, figures = self._scheduler, self._scheduler.pool, self._scheduler.totals, self._figures
        return EngineStatus(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            kv_blocks_cached=pool.num_cached,
            kv_blocks_free=pool.num_free,
            step_ms=figures.step_ms,
            num_batched_tokens=figures.num_batched_tokens,
            steps_total=figures.steps_total,
            prompt_tokens_total=totals.prompt_tokens,
            generation_tokens_total=totals.generation_tokens,
            prefix_cache_hit_tokens_total=totals.prefix_cache_hit_tokens,
            preemptions_total=totals.preemptions,
            requests=self._progress() if with_requests else None,
        )

    def _progress(self) -> list[RequestProgress]:
        positions = {request: position for position, request in enumerate(self._scheduler.waiting())}
        return [
            RequestProgress(
                request_id=request.request_id,
                state=request.status.value,
                queue_position=positions.get(request) if request.status is RequestStatus.QUEUED else None,
                kv_blocks=len(request.block_table),
                num_computed_tokens=request.num_computed_tokens,
                num_output_tokens=request.num_output_tokens,
                num_preemptions=request.num_preemptions,
            )
            for request in self._scheduler.live()
        ]

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless scheduler, pool and live requests agree."""
        self._scheduler.check_invariants()
        assert {r.request_id for r in self._scheduler.live()} == set(self._live), "live requests and scheduler disagree"


def _names(items: Sequence[ScheduledRequest]) -> str:
    return ",".join(item.request.request_id for item in items)


def _refusal(wanted: GenerationRequest, reason: str, param: str) -> TokenEvent:
    return TokenEvent(
        request_id=wanted.request_id,
        token_ids=[],
        num_output_tokens=0,
        num_prompt_tokens_computed=0,
        finish_reason=FinishReason.ERROR,
        error=reason,
        error_param=param,
    )
