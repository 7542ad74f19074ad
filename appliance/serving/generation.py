"""One generation from admission to settlement, owned by a task that outlives the HTTP response.

admitted ─► pending committed ─► engine ─► text … ─► final counts ─► reservation ended ─► record committed ─► outcome
Whatever happens on the way (the client leaves, the engine dies, a bug here), the task reaches the settlement exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import assert_never

import structlog

from appliance.base.clock import Clock
from appliance.base.errors import EngineUnavailable, GatehouseError, InternalError, InvalidValue, Overloaded
from appliance.metering.ledger.records import Usage
from appliance.serving.answers import SERVED, Answer, reason_of_all
from appliance.serving.bill import Bill
from appliance.serving.chunk_queue import ChunkQueue
from appliance.serving.endings import Ended, Outcome, as_written, early
from appliance.serving.live_requests import LiveRequest
from appliance.serving.orders import Order
from appliance.serving.request_limits import RequestLimits
from appliance.telemetry.metrics import Metrics
from engine.protocol import FinishReason, TokenEvent

SETTLE_WAIT_S = 2.0  # how long the client's last frame waits for the record to be on disk
RETRY_AFTER_QUEUE_S = 10.0  # the box was too busy for the whole queue deadline: it will not be free at once

log = structlog.get_logger()


class Generation:
    """A request that was admitted. Read `chunks`, then await `outcome`; call `end_early` when nobody reads any more."""

    def __init__(
        self,
        *,
        live: LiveRequest,
        order: Order,
        bill: Bill,
        clock: Clock,
        metrics: Metrics,
        limits: RequestLimits,
        on_end: Callable[[Generation], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.live = live
        self.chunks = ChunkQueue(limits.buffer_chunks)
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self.admitted: asyncio.Future[None] = loop.create_future()
        self._order = order
        self._model = order.model
        self._answers = [Answer(index, order.model.prompting, order.sampling) for index in range(order.sampling.num_answers)]
        self._bill = bill
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._on_end = on_end
        self._early_end: Ended | None = None
        self._failure: Ended | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._submitted = False

    @property
    def request_id(self) -> str:
        """Return the id that header, log, ledger, engine and console share."""
        return self.live.id

    @property
    def usage(self) -> Usage:
        """Return what is billed as it is now."""
        return self._bill.usage

    def end_early(self, reason: str) -> None:
        """End early, for one of EARLY_ENDS. The first reason counts; after the end this does nothing."""
        if self.live.state == "finished" or self._early_end is not None:
            return
        self._early_end = early(reason)
        if self._submitted:
            self._model.engine.abort(self.request_id)

    def end_at(self, moment: datetime | None) -> None:
        """End when the key of the request expires, at `moment`; None is never. It takes the place of what was set before."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if moment is not None and self.live.state != "finished":
            left_s = max((moment - self._clock.now()).total_seconds(), 0.0)
            self._expiry = asyncio.get_running_loop().call_later(left_s, self.end_early, "key_expired")

    async def run(self) -> None:
        """Own the generation to its end. Never raises: failures are told through `admitted` and `outcome`."""
        try:
            await self._run()
        except Exception:  # owned task: a bug in the settlement itself must leave neither a reader waiting nor a record open
            log.exception("generation could not be settled", request_id=self.request_id)
            self._give_up(InternalError("the answer could not be completed"))
            await self._bill.settle_after_bug(self._answers, is_recorded=self.admitted.exception() is None)
        finally:
            self.end_at(None)
            self._on_end(self)

    async def _run(self) -> None:
        refusal = await self._bill.open()
        if refusal is not None:
            self._bill.end_reservation()
            self._give_up(refusal)
            return
        self.admitted.set_result(None)
        await self._settle(await self._generate())

    def _give_up(self, error: GatehouseError) -> None:
        """Tell whoever waits that nothing more comes."""
        self.live.finish("error", now=self._clock.now(), error=error.message)
        if not self.admitted.done():
            self.admitted.set_exception(error)
        elif not self.outcome.done():
            self.outcome.set_result(Outcome(finish_reason="error", usage=Usage(), error=error))
        self.chunks.close()

    async def _generate(self) -> Ended:
        """Run the request in the engine and return how it ended."""
        if self._early_end is not None:
            return self._early_end
        timer = asyncio.get_running_loop().call_later(self._limits.deadline_s, self.end_early, "deadline")
        try:
            return await self._follow_engine()
        except EngineUnavailable as error:
            return self._end_without_engine(error)
        except Exception:  # owned task: a bug here must not leave the record pending
            log.exception("generation failed", request_id=self.request_id)
            self._model.engine.abort(self.request_id)
            return _failed("internal_error", InternalError("the answer could not be completed"))
        finally:
            timer.cancel()

    async def _follow_engine(self) -> Ended:
        """Follow every answer to its final event, which has its exact counts, also when one of them has failed."""
        events = self._model.engine.submit(self._order.generation_request(self._limits.queue_deadline_s))
        self._submitted = True
        self._bill.submitted()
        while True:
            for event in await events.take():
                answer = self._answers[event.index]
                answer.generated_tokens = event.num_output_tokens
                if not answer.stopped:
                    self._count(event)
                    self._show(answer, event)
                if event.finish_reason is None:
                    continue
                failure = self._end_answer(answer, event)
                if failure is not None and self._failure is None:
                    self._failure = failure
                    self._model.engine.abort(self.request_id)  # one answer alone is not what was asked for
                if all(answer.finish_reason is not None for answer in self._answers):
                    return self._failure or self._end_of_all()

    def _end_of_all(self) -> Ended:
        """Return how the request ended whose answers have all ended, none of them by a failure."""
        reason = reason_of_all(self._answers)
        if self._early_end is not None and reason == self._early_end.finish_reason:
            return self._early_end
        if reason in SERVED:
            return Ended(finish_reason=reason)
        return _failed("engine_ended", InternalError("the engine ended the request before its answer was complete"), reason)

    def _count(self, event: TokenEvent) -> None:
        is_first = self.live.ttft_s is None
        intervals_s = self.live.apply_event(event, now=self._clock.now(), monotonic_s=self._clock.monotonic_s())
        is_budget_spent = self._bill.record_progress(event)
        self._metrics.inter_token(self.live.model, intervals_s)
        if is_first and self.live.ttft_s is not None:
            self._model.engine.figures.note_ttft(self.live.ttft_s)
        if is_budget_spent:
            self.end_early("budget_exceeded")

    def _show(self, answer: Answer, event: TokenEvent) -> None:
        """Hand on the text of `event`. An answer that a stop string ended is of no more use to anybody."""
        chunk = answer.push(event)
        if chunk.completion_tokens != event.num_output_tokens:
            self.live.set_completion(answer.index, chunk.completion_tokens)
        if chunk.text or chunk.logprobs:
            self.chunks.put(chunk)
        if not answer.stopped or event.finish_reason is not None:
            return
        if len(self._answers) == 1:
            self._model.engine.abort(self.request_id)
        else:
            self._model.engine.abort_answer(self.request_id, answer.index)

    def _end_answer(self, answer: Answer, event: TokenEvent) -> Ended | None:
        """Note how `answer` ended; return the end of the whole request when it is a failure."""
        assert event.finish_reason is not None
        if answer.stopped:
            self._metrics.discarded(self.live.model, event.num_output_tokens - answer.completion_tokens)
            self._finish(answer, event)
            return None
        match event.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self._finish(answer, event)
                return None
            case FinishReason.ABORTED:
                answer.end("error" if self._failure else self._early_end.finish_reason if self._early_end else "aborted")
                return None
            case FinishReason.DEADLINE:
                answer.end("deadline")
                late = Overloaded("the request waited too long for its turn", retry_after_s=RETRY_AFTER_QUEUE_S)
                return _failed("queue_deadline", late, "deadline")
            case FinishReason.OVERLOADED:
                answer.end("refused")
                busy = Overloaded(event.error or "the engine is overloaded", retry_after_s=RETRY_AFTER_QUEUE_S)
                return _failed("engine_overloaded", busy, "refused")
            case FinishReason.ERROR:
                return self._fail(answer, event)
            case _:
                assert_never(event.finish_reason)

    def _finish(self, answer: Answer, event: TokenEvent) -> None:
        """Hand on the end of an answer that was served. The end of the last one is told by the outcome."""
        chunk = answer.finish(event)
        if chunk.text or any(other.finish_reason is None for other in self._answers):
            self.chunks.put(chunk)

    def _fail(self, answer: Answer, event: TokenEvent) -> Ended:
        """Return whose fault it was: a field of the request, which is named as the client wrote it, or ours."""
        if event.error_param is None:
            answer.end("error")
            return _failed("engine_error", InternalError(f"the engine could not go on: {event.error}"))
        answer.end("error" if self._bill.billable else "refused")
        message, param = as_written(
            event.error or f"{event.error_param} cannot be honoured", event.error_param, self._order.field_names
        )
        return _failed("invalid_request", InvalidValue(message, param=param), str(answer.finish_reason))

    def _end_without_engine(self, error: EngineUnavailable) -> Ended:
        """No final event comes: an answer that is complete stays one, and who asked for the end hears of that end."""
        if all(answer.stopped or answer.finish_reason is not None for answer in self._answers):
            for answer in self._answers:
                answer.finish_reason = answer.finish_reason or "stop"
            return self._failure or self._end_of_all()
        return self._failure or self._early_end or _failed("engine_died", error)

    async def _settle(self, ended: Ended) -> None:
        """Close the books once: quota now, then the record; then tell the reader."""
        usage, reason = self._bill.usage, ended.finish_reason
        self._bill.end_reservation()
        self.live.finish(reason, now=self._clock.now(), error=None if ended.error is None else ended.error.message)
        self.live.kv_blocks = 0
        writing = self._bill.start_writing(ended, self._answers)
        await asyncio.wait({writing}, timeout=SETTLE_WAIT_S)
        self._observe(reason, usage)
        ends = tuple(answer.finish_reason or reason for answer in self._answers)
        self.outcome.set_result(Outcome(finish_reason=reason, usage=usage, error=ended.error, finish_reasons=ends))
        self.chunks.close()
        await writing

    def _observe(self, reason: str, usage: Usage) -> None:
        live = self.live
        self._metrics.settled(
            model=live.model,
            tenant=live.tenant_name,
            reason=reason,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )
        self._metrics.timings(
            model=live.model,
            request_s=self._clock.monotonic_s() - live.admitted_monotonic_s,
            queue_s=live.queue_s,
            ttft_s=live.ttft_s,
            preemptions=live.preemptions,
        )


def _failed(cause: str, error: GatehouseError | None, finish_reason: str = "error") -> Ended:
    return Ended(finish_reason=finish_reason, cause=cause, error=error)
