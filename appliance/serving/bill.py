"""What one request is billed: its reservation and its record, each begun before the work and ended once after it.

pending committed ─► what is generated counts ─► reservation ended ─► record committed
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from appliance.base.clock import Clock
from appliance.base.errors import GatehouseError, InternalError
from appliance.metering.ledger.records import PendingEntry, RequestRecord, Settlement, Usage
from appliance.metering.ledger.round import LedgerBroken
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.reservations import Reservation
from appliance.serving.answers import Answer
from appliance.serving.endings import Ended
from appliance.serving.live_requests import LiveRequest
from appliance.serving.model_registry import ServedModel
from appliance.telemetry.metrics import Metrics
from engine.protocol import TokenEvent

log = structlog.get_logger()


class Bill:
    """The books of the request `live`. Nothing is billed before its prompt was computed or a token generated."""

    def __init__(
        self,
        *,
        live: LiveRequest,
        model: ServedModel,
        entry: PendingEntry,
        reservation: Reservation,
        ledger: Ledger,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.billable = False
        self._live = live
        self._model = model
        self._entry = entry
        self._reservation = reservation
        self._ledger = ledger
        self._clock = clock
        self._metrics = metrics
        self._reservation_ended = False
        self._submitted = False
        self._writing: asyncio.Task[None] | None = None

    @property
    def usage(self) -> Usage:
        """Return what is billed as it is now."""
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
        """Commit the pending record; return why that failed. Without it the request must not reach the engine."""
        try:
            await self._ledger.open(self._entry)
        except GatehouseError as refusal:
            return refusal
        except Exception:  # owned task
            log.exception("pending record could not be written", request_id=self._live.id)
            return InternalError("the request could not be recorded and was not started")
        return None

    def submitted(self) -> None:
        """Note that the engine has the request: what it counts from now on must stand in a record."""
        self._submitted = True
        self._model.engine.figures.balance.opened()

    def record_progress(self, event: TokenEvent) -> bool:
        """Count what `event` has added to the live request; return whether a budget is spent with it."""
        live = self._live
        self.billable |= event.num_output_tokens > 0 or event.num_prompt_tokens_computed >= live.prompt_tokens
        return self.billable and self._reservation.record_progress(
            live.cached_tokens, live.completion_tokens, live.rejected_tokens
        )

    def end_reservation(self) -> None:
        """Replace what is reserved by what is billed, or put it back where that is nothing."""
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

    def start_writing(self, ended: Ended, answers: Sequence[Answer]) -> asyncio.Task[None]:
        """Begin to commit the record of the request, which is finished; the task never raises."""
        return self._start_writing(ended, self._record(answers), answers)

    async def settle_after_bug(self, answers: Sequence[Answer], *, is_recorded: bool) -> None:
        """Where it was not done: end the reservation, and settle the record, if there is one, at the last known counts."""
        if not self._reservation_ended:
            self.end_reservation()
        if is_recorded and self._writing is None:
            record = RequestRecord(finished_at=self._clock.now(), error=InternalError.code)
            self._start_writing(Ended(finish_reason="error", cause="internal_error"), record, answers)
        if self._writing is not None:
            await self._writing

    def _start_writing(self, ended: Ended, record: RequestRecord, answers: Sequence[Answer]) -> asyncio.Task[None]:
        settlement = Settlement(
            request_id=self._live.id,
            status="posted" if self.billable else "voided",
            finish_reason=ended.finish_reason,
            usage=self.usage,
            record=record,
            cause=ended.cause,
        )
        self._writing = asyncio.create_task(self._write(settlement, answers), name=f"settle {self._live.id}")
        return self._writing

    async def _write(self, settlement: Settlement, answers: Sequence[Answer]) -> None:
        usage = settlement.usage
        try:
            await self._ledger.settle(settlement, self._reservation.mark_recorded)
        except LedgerBroken:  # which has counted what the books are short of
            log.exception("usage record was refused", request_id=self._live.id)
        except Exception:  # owned task: the metric is what shows that the books are short
            log.exception("usage record could not be written", request_id=self._live.id)
            self._metrics.unrecorded(usage.total_tokens)
            self._reservation.mark_recorded()
        if self._submitted:
            self._model.engine.figures.balance.closed(
                generated_tokens=sum(answer.generated_tokens for answer in answers),
                billed_completion=usage.completion_tokens,
                billed_prompt=usage.prompt_tokens,
            )

    def _record(self, answers: Sequence[Answer]) -> RequestRecord:
        assert self._live.finished_at is not None
        known = {name: getattr(self._live, name) for name in RequestRecord.__struct_fields__}
        return RequestRecord(**known | {"kv_blocks": max(self._live.kv_blocks_max, self._blocks_filled(answers))})

    def _blocks_filled(self, answers: Sequence[Answer]) -> int:
        """Return the KV blocks that the tokens filled: the engine reports them a few times per second, too seldom for short
        requests. The last token was never written to the cache."""
        info = self._model.engine.info
        if info is None or not self.billable:
            return 0
        prompt_tokens = self._live.prompt_tokens
        shared = prompt_tokens // info.block_size
        longest = [prompt_tokens + max(answer.completion_tokens, 1) - 1 for answer in answers]
        return shared + sum(-(-length // info.block_size) - shared for length in longest)
