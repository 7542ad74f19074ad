"""The results of a step applied to its requests: progress, tokens, ends. At once, or in two parts when steps overlap. No torch.

`apply` applies a finished step. Where the next step is planned while this one still runs, `advance` books all that is certain
without its results (progress, the end of a prompt, that there will be one more token), and `settle` does the rest later:

    plan n+1      launch n+1      advance n+1      results of n      settle n      plan n+2 …
    every request of n has one unknown token       two: of n, n+1                  one: of n+1

Nothing becomes findable by others and no fork starts before `settle`, so other requests build only on steps that are known to
have worked. Blocks of an answer become findable all at once, when they are released (`KvBlocks.release`).

A request that ended meanwhile (a stop token of step n, an abort) has a surplus row in step n+1, which is discarded. One that
reaches its last token for certain is not planned again, and keeps its seat until that token is known.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from engine.protocol import TokenEvent
from engine.scheduling.admission import Admission
from engine.scheduling.drafting import Drafting
from engine.scheduling.in_flight_batch import InFlightBatch
from engine.scheduling.kv_blocks import KvBlocks
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.limits import SchedulerTotals
from engine.scheduling.request import UNKNOWN_TOKEN, Request, RequestStatus
from engine.scheduling.row_diff import without_rows
from engine.scheduling.scheduled_batch import RowResult, ScheduledBatch, ScheduledRequest, StepOutput
from engine.scheduling.token_events import StepEvents, token_event


class Outcomes:
    """Applies the results of steps to their requests."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        kv: KvBlocks,
        admission: Admission,
        drafting: Drafting | None,
        totals: SchedulerTotals,
    ) -> None:
        self._lifecycle = lifecycle
        self._kv = kv
        self._admission = admission
        self._drafting = drafting
        self._totals = totals
        self.num_in_flight = 0
        """Steps that were advanced and are not settled."""

    def apply(self, batch: ScheduledBatch, outputs: Sequence[StepOutput]) -> list[TokenEvent]:
        """See `Scheduler.apply`."""
        assert len(outputs) == len(batch.decodes) + len(batch.prefills), "a step has one output per item"
        events = [self._apply_decode(item, output) for item, output in zip(batch.decodes, outputs, strict=False)]
        for item, output in zip(batch.prefills, outputs[len(batch.decodes) :], strict=True):
            event = self._apply_prefill(item, output)
            if event is not None:
                events.append(event)
        return events

    def _apply_decode(self, item: ScheduledRequest, output: StepOutput) -> TokenEvent:
        request, token_ids = item.request, output.token_ids
        if output.error is not None:
            request.num_computed_tokens += 1  # that token was booked when the step was planned
            return self._lifecycle.fail(request, output.error, output.error_param)
        num_new = len(token_ids)
        request.num_computed_tokens = item.start = item.start + num_new
        if item.num_draft_tokens:
            assert self._drafting is not None
            self._drafting.finish(request, item, num_new - 1)
        if num_new == 1 and output.logprobs is None:
            self._totals.generation_tokens += 1
            reason = request.append(token_ids[0])
            return token_event(request, token_ids) if reason is None else self._lifecycle.end(request, reason, token_ids)
        return self._append_tokens(request, output)

    def _apply_prefill(self, item: ScheduledRequest, output: StepOutput) -> TokenEvent | None:
        request = item.request
        if output.error is not None:
            return self._lifecycle.fail(request, output.error, output.error_param)
        request.num_computed_tokens = item.start + item.num_tokens
        self._keep_new_scores(request, output, item.start, request.num_computed_tokens)
        self._count_prompt(request, request.num_computed_tokens)
        self._kv.register(request, item.start, request.num_computed_tokens)
        if item.samples:
            self._lifecycle.start_decoding(request)
            self._lifecycle.record_first_token(request)
            return self._append_tokens(request, output)
        return self._finish_chunk(request, output)

    def _finish_chunk(self, request: Request, output: StepOutput, *, is_running: bool = True) -> TokenEvent | None:
        """A part of a prompt was computed, and more follow. The event, if the chunk has scores."""
        if is_running and request.status is RequestStatus.PREFILL:
            self._admission.note_next_block(request)
        if not output.prompt_logprobs:
            return None
        return token_event(request, [], prompt_logprobs=output.prompt_logprobs)

    def _keep_new_scores(self, request: Request, output: StepOutput, start: int, end: int) -> None:
        """Drop scores of tokens that were computed before a preemption: their event was sent."""
        if output.prompt_logprobs:
            last = min(end, request.num_prompt_tokens - 1)
            num_new = max(0, last - max(start, request.num_prompt_tokens_computed))
            output.prompt_logprobs = output.prompt_logprobs[len(output.prompt_logprobs) - num_new :]

    def _count_prompt(self, request: Request, end: int) -> None:
        if request.num_prompt_tokens_computed >= request.num_prompt_tokens:
            return
        computed = min(end, request.num_prompt_tokens)
        request.num_prompt_tokens_computed = max(request.num_prompt_tokens_computed, computed)
        if computed == request.num_prompt_tokens and request.forked_from is None:
            self._totals.prompt_tokens += computed

    def _append_tokens(self, request: Request, output: StepOutput) -> TokenEvent:
        """Append the sampled tokens up to the first that ends the request; tokens after it are dropped."""
        token_ids, logprobs = output.token_ids, output.logprobs
        assert token_ids, f"request {request.request_id} sampled no token"
        reason = request.append(token_ids[0])
        number = 1
        while reason is None and number < len(token_ids):
            reason = request.append(token_ids[number])
            number += 1
        if number < len(token_ids):
            token_ids, logprobs = token_ids[:number], logprobs and logprobs[:number]
        self._totals.generation_tokens += number
        self._totals.accepted_draft_tokens += min(number, len(output.token_ids) - 1)  # the last one was not a draft
        event = token_event(request, token_ids) if reason is None else self._lifecycle.end(request, reason, token_ids)
        event.logprobs, event.prompt_logprobs = logprobs, output.prompt_logprobs
        return event

    def advance(self, batch: ScheduledBatch) -> InFlightBatch:
        """See `Scheduler.advance`."""
        assert not batch.num_draft_tokens, "how many drafts are accepted is not known beforehand"
        self.num_in_flight += 1
        in_flight, ending = InFlightBatch.of(batch), [*batch.ending]
        for item in batch.decodes:
            request = item.request
            item.start = request.num_computed_tokens = item.start + 1
            request.token_ids.append(UNKNOWN_TOKEN)
        for item in batch.prefills:
            request = item.request
            request.num_computed_tokens = item.start + item.num_tokens
            request.num_in_flight_tokens += item.num_tokens
            if item.samples:
                self._lifecycle.start_decoding(request)
                request.token_ids.append(UNKNOWN_TOKEN)
                if request.num_tokens >= request.max_total_tokens:
                    ending.append(request)
        for request in ending:
            self._lifecycle.stop_decoding(request)
        return in_flight

    def settle(self, in_flight: InFlightBatch, outputs: Sequence[RowResult]) -> StepEvents:
        """See `Scheduler.settle`."""
        assert len(outputs) == len(in_flight.requests), "a step has one output per row"
        self.num_in_flight -= 1
        num_decodes = in_flight.num_decodes
        finished, none_ends = RequestStatus.FINISHED, not in_flight.has_ending
        events: list[TokenEvent] = []
        irregular: set[Request] = set()  # requests that do more than continue with one more token
        for request, start, output in zip(in_flight.requests[:num_decodes], in_flight.starts, outputs, strict=False):
            if output.__class__ is not int or request.status is finished:
                irregular.add(request)
                if output is not None and request.status is not finished:
                    assert isinstance(output, StepOutput)
                    events.append(self._settle_output(request, start + 1, output))
                continue
            end = start + 1
            # what `fill_token` does when nothing ends:
            if output not in request.stop_ids and (none_ends or end + 1 < request.max_total_tokens):
                request.token_ids[end] = output
            else:
                reason = request.fill_token(end, output)
                if reason is not None:
                    irregular.add(request)
                    self._totals.generation_tokens += 1
                    events.append(self._lifecycle.end(request, reason, [output]))
        step_events = StepEvents(events, *_columns(in_flight, outputs, irregular))
        self._totals.generation_tokens += len(step_events.token_ids)
        for row in range(num_decodes, len(in_flight.requests)):
            output = outputs[row]
            if output is not None and in_flight.requests[row].status is not RequestStatus.FINISHED:
                event = self._settle_prefill(in_flight, row, StepOutput([output]) if isinstance(output, int) else output)
                if event is not None:
                    events.append(event)
        return step_events

    def _settle_output(self, request: Request, end: int, output: StepOutput) -> TokenEvent:
        """Settle a row that ends a prefill, has log-probabilities or an error; `end` is the position of its sampled token."""
        if output.error is not None:
            request.discard_unknown_tokens()
            return self._lifecycle.fail(request, output.error, output.error_param)
        (token_id,) = output.token_ids
        self._totals.generation_tokens += 1
        reason = request.fill_token(end, token_id)
        event = token_event(request, [token_id]) if reason is None else self._lifecycle.end(request, reason, [token_id])
        event.logprobs, event.prompt_logprobs = output.logprobs, output.prompt_logprobs
        return event

    def _settle_prefill(self, in_flight: InFlightBatch, row: int, output: StepOutput) -> TokenEvent | None:
        request, start = in_flight.requests[row], in_flight.starts[row]
        num_tokens, samples = in_flight.chunks[row - in_flight.num_decodes]
        end, is_running = start + num_tokens, in_flight.is_live(row)  # it may have started again, with other blocks
        if is_running:
            request.num_in_flight_tokens -= num_tokens
        if output.error is not None:
            return self._settle_output(request, end, output)
        self._keep_new_scores(request, output, start, end)
        self._count_prompt(request, end)
        if is_running:
            self._kv.register(request, start, end)
        if samples:
            self._lifecycle.record_first_token(request)
            return self._settle_output(request, end, output)
        return self._finish_chunk(request, output, is_running=is_running)


def _columns(
    in_flight: InFlightBatch, outputs: Sequence[RowResult], irregular: Set[Request]
) -> tuple[list[Request], list[int], list[int]]:
    """Requests, starts and tokens of the decodes without `irregular`."""
    num_decodes = in_flight.num_decodes
    columns: tuple[Any, Any, Any] = in_flight.requests[:num_decodes], in_flight.starts[:num_decodes], outputs[:num_decodes]
    if not irregular:
        return columns
    rows = [row for row, request in enumerate(columns[0]) if request in irregular]
    return without_rows(columns[0], rows), without_rows(columns[1], rows), without_rows(columns[2], rows)
