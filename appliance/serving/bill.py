"""Billing of one request: a reservation and a usage event, both opened before the work and closed exactly once after it.

pending event committed ─► tokens counted ─► reservation ended ─► settlement committed
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from appliance.base.clock import Clock
from appliance.base.errors import GatehouseError, InternalError
from appliance.metering.ledger.records import PendingEvent, RequestRecord, Settlement, Usage
from appliance.metering.ledger.round import LedgerBroken
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.reservations import Reservation
from appliance.serving.answers import Answer
from appliance.serving.endings import RequestEnd
from appliance.serving.live_requests import LiveRequest
from appliance.serving.model_registry import ServedModel
from appliance.telemetry.metrics import Metrics
from engine.protocol import TokenEvent

log = structlog.get_logger()


class Bill:
    """Reservation and usage event of `live`. It is `submitted` once the engine has it, and `billable` once its prompt was
    computed or a token generated: nothing is billed before."""

    def __init__(
        self,
        *,
        live: LiveRequest,
        model: ServedModel,
        event: PendingEvent,
        reservation: Reservation,
        ledger: Ledger,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.billable = False
        self.submitted = False
        self._live = live
        self._model = model
        self._event = event
        self._reservation = reservation
        self._ledger = ledger
        self._clock = clock
        self._metrics = metrics
        self._reservation_ended = False
        self._settled = False

    @property
    def usage(self) -> Usage:
        """Return the usage that would be billed if the request ended now."""
        if not self.billable:
            return Usage()
        live = self._live
        return Usage(
            prompt_tokens=live.prompt_tokens,
            cached_tokens=min(live.cached_tokens, live.prompt_tokens),
            completion_tokens=live.completion_tokens,
            rejected_tokens=live.rejected_tokens,
        )

    async def open(self) -> GatehouseError | None:
        """Commit the pending event; return the error if that fails. The request must not reach the engine without it."""
        try:
            await self._ledger.open(self._event)
        except GatehouseError as refusal:
            return refusal
        except Exception:  # owned task
            log.exception("pending record could not be written", request_id=self._live.id)
            return InternalError("the request could not be recorded and was not started")
        return None

    def note_submitted(self) -> None:
        """Note that the request was submitted to the engine: from now on its tokens must appear in a record."""
        self.submitted = True
        self._model.engine.stats.reconciliation.note_submitted()

    def record_progress(self, event: TokenEvent) -> bool:
        """Report the live request's counts after `event` to its limits; return whether they exhausted a budget."""
        live = self._live
        self.billable |= event.num_output_tokens > 0 or event.num_prompt_tokens_computed >= live.prompt_tokens
        return self.billable and self._reservation.record_progress(
            live.cached_tokens, live.completion_tokens, live.rejected_tokens
        )

    def end_reservation(self) -> None:
        """Replace the reserved amounts by the billed ones, or release them if nothing is billed."""
        self._reservation_ended = True
        if self.billable:
            usage = self.usage
            self._reservation.settle(
                usage.total_tokens,
                cached_tokens=usage.cached_tokens,
                rejected_tokens=usage.rejected_tokens,
                request_id=self._live.id,
            )
        else:
            self._reservation.void()

    async def settle(self, end: RequestEnd, answers: Sequence[Answer]) -> None:
        """Commit the record of the finished request. Logs a failure of the ledger instead of raising it."""
        await self._settle(end, self._record(answers), answers)

    async def settle_after_bug(self, answers: Sequence[Answer], *, is_recorded: bool) -> None:
        """End the reservation and settle the record (if there is one) at the last known counts, unless that was done."""
        if not self._reservation_ended:
            self.end_reservation()
        if is_recorded and not self._settled:
            record = RequestRecord(finished_at=self._live.at(self._clock.monotonic_s()), error=InternalError.code)
            await self._settle(RequestEnd(finish_reason="error", cause="internal_error"), record, answers)

    async def _settle(self, end: RequestEnd, record: RequestRecord, answers: Sequence[Answer]) -> None:
        usage = self.usage
        settlement = Settlement(
            request_id=self._live.id,
            status="posted" if self.billable else "voided",
            finish_reason=end.finish_reason,
            usage=usage,
            record=record,
            cause=end.cause,
        )
        self._settled = True
        try:
            await self._ledger.settle(settlement, self._reservation.mark_recorded)
        except LedgerBroken:  # the ledger has counted these tokens as unrecorded
            log.exception("usage record was refused", request_id=self._live.id)
        except Exception:  # owned task: the metric shows that the ledger lacks these tokens
            log.exception("usage record could not be written", request_id=self._live.id)
            self._metrics.unrecorded(usage.total_tokens)
            self._reservation.mark_recorded()
        if self.submitted:
            self._model.engine.stats.reconciliation.note_settled(
                generated_tokens=sum(answer.generated_tokens for answer in answers),
                billed_completion=usage.completion_tokens,
                billed_prompt=usage.prompt_tokens,
            )

    def _record(self, answers: Sequence[Answer]) -> RequestRecord:
        assert self._live.finished_at is not None
        fields = {name: getattr(self._live, name) for name in RequestRecord.__struct_fields__}
        return RequestRecord(**fields | {"kv_blocks": max(self._live.kv_blocks_max, self._kv_blocks_needed(answers))})

    def _kv_blocks_needed(self, answers: Sequence[Answer]) -> int:
        """Return the KV blocks that the tokens need. The engine reports blocks a few times per second, which misses short
        requests. The last token of an answer is never written to the cache."""
        info = self._model.engine.info
        if info is None or not self.billable:
            return 0
        prompt_tokens = self._live.prompt_tokens
        shared = prompt_tokens // info.block_size
        longest = [prompt_tokens + max(answer.completion_tokens, 1) - 1 for answer in answers]
        return shared + sum(-(-length // info.block_size) - shared for length in longest)
