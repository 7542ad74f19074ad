"""One generation from admission to settlement, owned by a task that outlives the HTTP response.

admitted ─► pending committed ─► engine ─► text … ─► final counts ─► reservation ended ─► record committed ─► outcome
Whatever happens on the way (client disconnects, engine dies, bug in this module), the request is settled exactly once.
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
from appliance.serving.answers import COMPLETE, Answer, combined_finish_reason
from appliance.serving.batch_size import BatchMoment
from appliance.serving.bill import Bill
from appliance.serving.chunk_queue import ChunkQueue
from appliance.serving.endings import Outcome, RequestEnd, early_end, with_client_field_name
from appliance.serving.expiry_timer import ExpiryTimer
from appliance.serving.live_requests import LiveRequest
from appliance.serving.prepared_requests import PreparedRequest
from appliance.serving.request_limits import RequestLimits
from appliance.telemetry.metrics import Metrics
from engine.protocol import FinishReason, TokenEvent

SETTLE_WAIT_S = 2.0  # how long the client's last frame waits for the record to be durable
RETRY_AFTER_QUEUE_S = 10.0  # the engine was busy for the whole queue deadline: it will not be free at once

log = structlog.get_logger()


class Generation:
    """An admitted request. Read `chunks`, then await `outcome`; call `end_early` when the client is gone."""

    def __init__(
        self,
        *,
        live: LiveRequest,
        prepared: PreparedRequest,
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
        self._prepared = prepared
        self._model = prepared.model
        self._answers = [
            Answer(index, prepared.model.tokenizer, prepared.sampling) for index in range(prepared.sampling.num_answers)
        ]
        self._bill = bill
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._on_end = on_end
        self._engine_end: asyncio.Future[RequestEnd] = loop.create_future()
        self._early_end: RequestEnd | None = None
        self._failure: RequestEnd | None = None
        self._first_token: BatchMoment | None = None
        self._expiry = ExpiryTimer(clock, lambda: self.end_early("key_expired"))
        self._expiry.set(prepared.principal.key.expires_at)

    @property
    def request_id(self) -> str:
        """Return the request id, the same in header, log, ledger, engine and console."""
        return self.live.id

    @property
    def created(self) -> int:
        """Return the Unix time of its admission, in seconds."""
        assert self.live.admitted_at is not None, "a generation is admitted"
        return int(self.live.admitted_at.timestamp())

    @property
    def usage(self) -> Usage:
        """Return the usage that would be billed if the request ended now."""
        return self._bill.usage

    def end_early(self, reason: str) -> None:
        """End the request for one of EARLY_ENDS. Only the first call counts, and none after the request has ended."""
        if self.live.state == "finished" or self._early_end is not None:
            return
        self._early_end = early_end(reason)
        if self._bill.submitted:
            self._model.engine.abort(self.request_id)

    def set_expiry(self, expires_at: datetime | None) -> None:
        """Set when the request's key expires, which ends the request; None means never. Replaces an earlier expiry."""
        self._expiry.set(None if self.live.state == "finished" else expires_at)

    def note_batch_size(self) -> None:
        """Set the live request's mean batch size from its first token until now."""
        if self._first_token is not None:
            mean = self._model.engine.stats.batch_size.mean_since(self._first_token, self._clock.monotonic_s())
            self.live.batch_size_mean = mean

    async def run(self) -> None:
        """Run the generation to its settlement. Never raises: failures are reported through `admitted` and `outcome`."""
        try:
            await self._run()
        except Exception:  # owned task: a bug in the settlement itself must leave neither a reader waiting nor a record open
            log.exception("generation could not be settled", request_id=self.request_id)
            self._finish_with_error(InternalError("the answer could not be completed"))
            await self._bill.settle_after_bug(self._answers, is_recorded=self.admitted.exception() is None)
        finally:
            self._expiry.set(None)
            self._on_end(self)

    async def _run(self) -> None:
        error = await self._bill.open()
        if error is not None:
            self._bill.end_reservation()
            self._finish_with_error(error)
            return
        self.admitted.set_result(None)
        await self._settle(await self._generate())

    def _finish_with_error(self, error: GatehouseError) -> None:
        """Finish without a settlement: fail `admitted` or `outcome`, and close the chunks."""
        self.live.finish("error", now=self._clock.now(), error=error.message)
        if not self.admitted.done():
            self.admitted.set_exception(error)
        elif not self.outcome.done():
            self.outcome.set_result(Outcome(finish_reason="error", usage=Usage(), error=error))
        self.chunks.close()

    async def _generate(self) -> RequestEnd:
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

    async def _follow_engine(self) -> RequestEnd:
        """Submit the request, and return how it ended once every answer has had its final event, which has exact counts; also
        after one of them failed."""
        self._model.engine.submit(self._prepared.generation_request(self._limits.queue_deadline_s), self)
        self._bill.note_submitted()
        return await self._engine_end

    def receive(self, event: TokenEvent) -> None:
        """Process an event of the engine; a bug in that ends the request."""
        if self._engine_end.done():
            return
        try:
            self._process(event)
        except Exception as error:  # noqa: BLE001 - `_generate` logs it
            self._engine_end.set_exception(error)

    def fail(self, error: EngineUnavailable) -> None:
        """End the request without its final events."""
        if not self._engine_end.done():
            self._engine_end.set_exception(error)

    def _process(self, event: TokenEvent) -> None:
        answer = self._answers[event.index]
        answer.generated_tokens = event.num_output_tokens
        if not answer.stopped:
            self._apply_counts(event)
            self._emit_text(answer, event)
        if event.finish_reason is None:
            return
        failure = self._end_answer(answer, event)
        if failure is not None and self._failure is None:
            self._failure = failure
            self._model.engine.abort(self.request_id)  # fewer answers than requested are of no use
        if all(answer.finish_reason is not None for answer in self._answers):
            self._engine_end.set_result(self._failure or self._combined_end())

    def _combined_end(self) -> RequestEnd:
        """Return the end of a request whose answers have all ended, none of them by a failure."""
        reason = combined_finish_reason(self._answers)
        if self._early_end is not None and reason == self._early_end.finish_reason:
            return self._early_end
        if reason in COMPLETE:
            return RequestEnd(finish_reason=reason)
        return _failed("engine_ended", InternalError("the engine ended the request before its answer was complete"), reason)

    def _apply_counts(self, event: TokenEvent) -> None:
        is_first = self.live.ttft_s is None
        now_s = self._clock.monotonic_s()
        intervals_s = self.live.apply_event(event, monotonic_s=now_s)
        is_budget_spent = self._bill.record_progress(event)
        self._metrics.inter_token(self.live.model, intervals_s)
        if is_first and self.live.ttft_s is not None:
            self.live.first_token_at = self.live.at(now_s)
            self._model.engine.stats.note_ttft(self.live.ttft_s)
            self._first_token = self._model.engine.stats.batch_size.at(now_s)
        if is_budget_spent:
            self.end_early("budget_exceeded")

    def _emit_text(self, answer: Answer, event: TokenEvent) -> None:
        """Queue the text of `event` for the response. Abort the answer in the engine if a stop string has ended it."""
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

    def _end_answer(self, answer: Answer, event: TokenEvent) -> RequestEnd | None:
        """Set how `answer` ended; if that is a failure, return the end of the whole request."""
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
                cause = "aborted" if self._early_end is None else self._early_end.finish_reason
                answer.finish_reason = "error" if self._failure else cause
                return None
            case FinishReason.DEADLINE:
                answer.finish_reason = "deadline"
                error = Overloaded("the request waited too long in the queue", retry_after_s=RETRY_AFTER_QUEUE_S)
                return _failed("queue_deadline", error, "deadline")
            case FinishReason.OVERLOADED:
                answer.finish_reason = "refused"
                error = Overloaded(event.error or "the engine is overloaded", retry_after_s=RETRY_AFTER_QUEUE_S)
                return _failed("engine_overloaded", error, "refused")
            case FinishReason.ERROR:
                return self._engine_error(answer, event)
            case _:
                assert_never(event.finish_reason)

    def _finish(self, answer: Answer, event: TokenEvent) -> None:
        """Queue the last chunk of a complete answer. The last answer needs one only for text: `outcome` reports its end."""
        chunk = answer.finish(event)
        if chunk.text or any(other.finish_reason is None for other in self._answers):
            self.chunks.put(chunk)

    def _engine_error(self, answer: Answer, event: TokenEvent) -> RequestEnd:
        """Return the end of a request that failed in the engine: InvalidValue if a field of the request caused it, else
        InternalError."""
        if event.error_param is None:
            answer.finish_reason = "error"
            return _failed("engine_error", InternalError(f"the engine could not continue: {event.error}"))
        answer.finish_reason = "error" if self._bill.billable else "refused"
        message, param = with_client_field_name(
            event.error or f"{event.error_param} cannot be honoured", event.error_param, self._prepared.field_names
        )
        return _failed("invalid_request", InvalidValue(message, param=param), answer.finish_reason)

    def _end_without_engine(self, error: EngineUnavailable) -> RequestEnd:
        """Return the end of a request whose engine died, so that final events are missing. Complete answers stay complete, and
        an early end that was requested before stays the reason."""
        if all(answer.stopped or answer.finish_reason is not None for answer in self._answers):
            for answer in self._answers:
                answer.finish_reason = answer.finish_reason or "stop"
            return self._failure or self._combined_end()
        return self._failure or self._early_end or _failed("engine_died", error)

    async def _settle(self, end: RequestEnd) -> None:
        """Settle the reservation, then the record, and report the outcome to the reader, after SETTLE_WAIT_S in any case."""
        usage = self._bill.usage
        self._bill.end_reservation()
        self.note_batch_size()
        finished_at = self.live.at(self._clock.monotonic_s())
        self.live.finish(end.finish_reason, now=finished_at, error=None if end.error is None else end.error.message)
        self.live.kv_blocks = 0
        timer = asyncio.get_running_loop().call_later(SETTLE_WAIT_S, self._report, end, usage)
        try:
            await self._bill.settle(end, self._answers)
        finally:
            timer.cancel()
        self._report(end, usage)

    def _report(self, end: RequestEnd, usage: Usage) -> None:
        """Report the outcome to metrics and reader, unless that was done."""
        if self.outcome.done():
            return
        self._observe_metrics(end.finish_reason, usage)
        reasons = tuple(answer.finish_reason or end.finish_reason for answer in self._answers)
        outcome = Outcome(finish_reason=end.finish_reason, usage=usage, error=end.error, finish_reasons=reasons)
        self.outcome.set_result(outcome)
        self.chunks.close()

    def _observe_metrics(self, reason: str, usage: Usage) -> None:
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


def _failed(cause: str, error: GatehouseError, finish_reason: str = "error") -> RequestEnd:
    return RequestEnd(finish_reason=finish_reason, cause=cause, error=error)
