"""All generations of the gateway: admits and starts them, lists the live ones, checkpoints and drains them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from appliance.base.background import Background, repeat
from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import Draining, NotFound, Overloaded, RequestAborted
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.queue import Waiter
from appliance.metering.limits.refusals import not_priced
from appliance.metering.limits.reservations import Reservation
from appliance.metering.prices import PriceBook
from appliance.serving.access_watch import AccessWatch
from appliance.serving.bill import Bill
from appliance.serving.endings import RETRY_AFTER_DRAINING_S
from appliance.serving.generation import Generation
from appliance.serving.live_requests import LiveRequest
from appliance.serving.model_registry import ServedModel
from appliance.serving.open_requests import OpenRequests
from appliance.serving.prepared_requests import PreparedRequest
from appliance.serving.request_limits import RequestLimits
from appliance.telemetry.metrics import Metrics
from appliance.tenancy.access import Access
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.roles import Action
from appliance.tenancy.tiers import Tiers
from engine.protocol import EngineFrame, RequestProgress

CHECKPOINT_INTERVAL_S = 0.75  # with the time to write one, a crash leaves at most a second of tokens unbilled
RETRY_AFTER_OVERLOADED_S = 1.0
ABORT_WAIT_S = 5.0

log = structlog.get_logger()


class Generations:
    """Starts generations and keeps the live ones. While `draining`, new requests are refused."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        metrics: Metrics,
        limits: RequestLimits,
        *,
        admission: Admission,
        tiers: Tiers,
        policies: ModelPolicies,
        ledger: Ledger,
        prices: PriceBook,
    ) -> None:
        self.draining = False
        self._admission = admission
        self._tiers = tiers
        self._policies = policies
        self._ledger = ledger
        self._prices = prices
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._generations: dict[str, Generation] = {}
        self._admitting: dict[str, PreparedRequest] = {}
        self._watch = AccessWatch(db, clock, self._generations.values, admission=admission, policies=policies)
        self._open = OpenRequests()
        self._tasks: set[asyncio.Task[None]] = set()
        self._checkpoints = Background(
            "checkpoints",
            lambda: repeat(self._checkpoint, CHECKPOINT_INTERVAL_S, failure="running requests could not be checkpointed"),
        )
        self._idle = asyncio.Event()
        self._idle.set()

    def live(self, *, access: Access) -> Mapping[str, LiveRequest]:
        """Return the unsettled requests that `access` may see, by id, oldest first, then those that wait for room in their
        limits."""
        requests = [*(generation.live for generation in self._generations.values()), *self._waiting()]
        return {request.id: request for request in requests if access.sees(request.tenant_id)}

    def waiting(self, *, access: Access) -> list[LiveRequest]:
        """Return the requests that wait for room in their limits and that `access` may see, oldest first."""
        return [request for request in self._waiting() if access.sees(request.tenant_id)]

    @property
    def tenant_names(self) -> dict[str, str]:
        """Return the names of the tenants with live requests, by id."""
        return {generation.live.tenant_id: generation.live.tenant_name for generation in self._generations.values()}

    def find(self, request_id: str, *, access: Access, action: Action = Action.READ) -> LiveRequest | None:
        """Return a live request, or None if `access` sees none. Raises RoleNotAllowed if it does not permit `action`."""
        generation, waiter = self._generations.get(request_id), self._waiter(request_id)
        if generation is not None:
            live = generation.live
        elif waiter is not None:
            live = self._waiting_request(waiter)
        else:
            return None
        if not access.sees(live.tenant_id):
            return None
        access.require(action, live.tenant_id)
        return live

    def check_can_accept(self, model: ServedModel, tenant_id: str) -> None:
        """Raise Draining, ModelLoading, EngineUnavailable or Overloaded if a request of the tenant cannot be accepted now."""
        if self.draining:
            raise _draining()
        if not self._ledger.healthy:
            raise Overloaded("the usage ledger cannot be written now", retry_after_s=RETRY_AFTER_OVERLOADED_S)
        model.engine.check_ready()
        if not self._open.has_room(model.name, tenant_id, self._limits.max_waiting_requests + self._seats(model)):
            raise Overloaded("the waiting queue is full", retry_after_s=RETRY_AFTER_OVERLOADED_S)

    def _seats(self, model: ServedModel) -> int:
        """Return how many requests the engine of `model` runs at a time; 0 before it is ready."""
        return 0 if model.engine.info is None else model.engine.info.max_num_seqs

    async def start(self, prepared: PreparedRequest) -> Generation:
        """Admit the request, commit its pending event and submit it to the engine. Refusals raise and consume nothing.

        If the caller is cancelled because its client disconnected, the request ends, whether admitted yet or not.
        """
        self.check_can_accept(prepared.model, prepared.principal.tenant.id)
        self._admitting[prepared.request_id] = prepared
        try:
            reservation = await self._admit(prepared)
        finally:
            del self._admitting[prepared.request_id]
        try:
            generation = self._create(prepared, reservation)
        except BaseException:
            reservation.void()
            raise
        self._run(generation)
        self._watch.add(generation, prepared.principal)
        try:
            await asyncio.shield(generation.admitted)
        except asyncio.CancelledError:
            generation.end_early("disconnected")
            raise
        return generation

    async def _admit(self, prepared: PreparedRequest) -> Reservation:
        """Reserve the request's limits at the price that is in force at admission, and return the reservation.

        Its waits include those of attempts that were repeated because the price had changed.
        """
        tier = await self._tiers.get(prepared.principal.tenant.tier)
        currency = prepared.principal.tenant.currency
        waited_s: Mapping[str, float] = {}
        while True:
            price = await self._prices.current(prepared.model.name, self._clock.now(), currency=currency)
            if price is None and self._limits.refuse_unpriced:
                raise not_priced(prepared.model.name, currency)
            policy = await self._policies.find(prepared.model.name)
            request = prepared.admission_request(price, policy)
            reservation = await self._admission.admit(request, tier.admission_wait_ms / 1000)
            reservation.add_waits(waited_s)
            try:
                self.check_can_accept(prepared.model, prepared.principal.tenant.id)  # again, because admission may have waited
                if await self._prices.current(prepared.model.name, reservation.admitted_at, currency=currency) == price:
                    self._note_overlooked(reservation)
                    if price is None:
                        self._metrics.unpriced(prepared.model.name)
                    return reservation
            except BaseException:
                reservation.void()
                raise
            waited_s = reservation.waited_s
            reservation.void()  # the price changed while the request waited: admit it again

    def _note_overlooked(self, reservation: Reservation) -> None:
        for decision in reservation.shadow_refusals:
            self._metrics.shadow_refused(decision.scope, decision.kind)

    def abort(self, request_id: str, *, access: Access) -> LiveRequest:
        """End a live request, which may wait for room in its limits, and return it.

        Raises NotFound if it is not live or `access` may not see it, and RoleNotAllowed.
        """
        live = self.find(request_id, access=access, action=Action.ABORT)
        if live is None:
            raise NotFound(f"the request {request_id} is not live")
        waiter = self._waiter(request_id)
        if waiter is None:
            self._generations[request_id].end_early("aborted")
        else:
            error = RequestAborted("the request was ended by an administrator")
            self._admission.refuse(waiter, error)
            live.finish("aborted", now=self._clock.now(), error=error.message)
        return live

    async def abort_and_wait(self, request_id: str, *, access: Access) -> LiveRequest:
        """End a live request and return it once it has ended, or after ABORT_WAIT_S in its current state. Raises as `abort`."""
        live = self.abort(request_id, access=access)
        generation = self._generations.get(request_id)
        if generation is not None:
            await asyncio.wait({generation.outcome}, timeout=ABORT_WAIT_S)
        return live

    def note_frame(self, frame: EngineFrame) -> None:
        """Apply the progress that an engine reports about its live requests."""
        if frame.status is None or frame.status.requests is None:
            return
        by_request: dict[str, list[RequestProgress]] = {}
        for progress in frame.status.requests:
            by_request.setdefault(progress.request_id, []).append(progress)
        for request_id, answers in by_request.items():
            generation = self._generations.get(request_id)
            if generation is not None and generation.live.state != "finished":
                generation.live.apply_progress(answers)
                generation.note_batch_size()

    def start_watching(self) -> None:
        """Start the tasks that checkpoint live requests about once a second and end those whose key was revoked or the like."""
        self._watch.start()
        self._checkpoints.start()

    def checkpoint(self) -> None:
        """Checkpoint the current usage of live requests in the ledger."""
        running = [generation for generation in self._generations.values() if generation.live.state != "finished"]
        usages = {generation.request_id: generation.usage for generation in running if generation.live.completion_tokens > 0}
        if usages:
            self._ledger.checkpoint(usages)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new and waiting requests, wait for the live ones to end, and return whether all did so in time."""
        self._refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self) -> None:
        """Refuse new requests and end the live ones because of the shutdown; their clients are told to retry."""
        self._refuse_new()
        for generation in list(self._generations.values()):
            generation.end_early("shutdown")

    async def stop(self, timeout_s: float) -> None:
        """End live requests, wait at most `timeout_s` until they are settled, and stop the background tasks."""
        self.end_all()
        if not await self.drain(timeout_s):
            log.error("requests left unsettled at stop", requests=list(self._generations))
        await self._watch.stop()
        await self._checkpoints.stop()

    def _refuse_new(self) -> None:
        self.draining = True
        self._admission.refuse_waiting(_draining())

    def _waiter(self, request_id: str) -> Waiter | None:
        """Return the wait of a request for room in its limits, if it waits."""
        if request_id not in self._admitting:
            return None
        return next((waiter for waiter in self._admission.waiting if waiter.request.request_id == request_id), None)

    def _waiting(self) -> list[LiveRequest]:
        """Return the requests that wait for room in their limits, oldest first."""
        waiters = [waiter for waiter in self._admission.waiting if waiter.request.request_id in self._admitting]
        return [self._waiting_request(waiter) for waiter in sorted(waiters, key=lambda waiter: waiter.seq)]

    def _waiting_request(self, waiter: Waiter) -> LiveRequest:
        assert waiter.request.request_id is not None
        now_s = self._clock.monotonic_s()
        return self._admitting[waiter.request.request_id].live_request(
            admitted_at=None,
            monotonic_s=now_s,
            admission_wait_s=waiter.total_wait_s(now_s),
            awaited_limit=waiter.held_up_by,
        )

    def _create(self, prepared: PreparedRequest, reservation: Reservation) -> Generation:
        tenant_open = self._open.requests_of(prepared.model.name, prepared.principal.tenant.id)
        live = prepared.live_request(
            admitted_at=reservation.admitted_at,
            monotonic_s=self._clock.monotonic_s(),
            admission_wait_s=reservation.admission_wait_s,
            awaited_limit=reservation.awaited_limit,
            tenant_open=tenant_open,
        )
        bill = Bill(
            live=live,
            model=prepared.model,
            event=prepared.pending_event(reservation),
            reservation=reservation,
            ledger=self._ledger,
            clock=self._clock,
            metrics=self._metrics,
        )
        return Generation(
            live=live,
            prepared=prepared,
            bill=bill,
            clock=self._clock,
            metrics=self._metrics,
            limits=self._limits,
            on_end=self._remove,
        )

    def _run(self, generation: Generation) -> None:
        self._generations[generation.request_id] = generation
        live = generation.live
        self._open.add(live.model, live.tenant_id, live.num_answers)
        self._idle.clear()
        task = asyncio.create_task(generation.run(), name=f"generation {generation.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _remove(self, generation: Generation) -> None:
        del self._generations[generation.request_id]
        live = generation.live
        self._open.remove(live.model, live.tenant_id, live.num_answers)
        if not self._generations:
            self._idle.set()

    async def _checkpoint(self) -> None:
        self.checkpoint()


def _draining() -> Draining:
    return Draining("the appliance is shutting down", retry_after_s=RETRY_AFTER_DRAINING_S)
