"""All live requests of the gateway: admits them and starts their generations, lists, checkpoints and drains them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from appliance.base.background import Background, repeat
from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import Draining, NotFound, Overloaded, RequestAborted
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.refusals import not_priced
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.rules import Rule
from appliance.metering.prices import Price, PriceBook
from appliance.serving.access_watch import AccessWatch
from appliance.serving.bill import Bill
from appliance.serving.endings import RETRY_AFTER_DRAINING_S
from appliance.serving.generation import Generation
from appliance.serving.live_requests import LiveRequest
from appliance.serving.model_registry import ServedModel
from appliance.serving.open_requests import OpenRequests
from appliance.serving.prepared_requests import PreparedRequest
from appliance.serving.request_limits import RequestLimits
from appliance.serving.waiting_requests import WaitingRequest
from appliance.telemetry.metrics import Metrics
from appliance.tenancy.access import Access
from appliance.tenancy.model_policies import ModelPolicies, ModelPolicy
from appliance.tenancy.roles import Action
from appliance.tenancy.tiers import Tiers
from engine.protocol import EngineFrame, RequestProgress

CHECKPOINT_INTERVAL_S = 0.75  # with the time to write one, a crash leaves at most a second of tokens unbilled
RETRY_AFTER_OVERLOADED_S = 1.0
ABORT_WAIT_S = 5.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """On what a request is admitted. Two are equal if they have the same limits and make the same bill."""

    tier: str
    currency: str | None
    price: Price | None
    rules: Sequence[Rule]
    cut_at_budget: bool
    wait_s: float = field(compare=False)
    policy: ModelPolicy | None = field(compare=False)


class Generations:
    """Starts generations and keeps the live requests, in the order of their arrival: each is a WaitingRequest until it is
    admitted, then a Generation until it is settled. While `draining`, new requests are refused."""

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
        self._requests: dict[str, WaitingRequest | Generation] = {}
        self._watch = AccessWatch(db, clock, self._requests.values, admission=admission, policies=policies)
        self._open = OpenRequests()
        self._tasks: set[asyncio.Task[None]] = set()
        self._checkpoints = Background(
            "checkpoints",
            lambda: repeat(self.checkpoint, CHECKPOINT_INTERVAL_S, failure="running requests could not be checkpointed"),
        )
        self._idle = asyncio.Event()
        self._idle.set()

    def live(self, *, access: Access) -> Mapping[str, LiveRequest]:
        """Return the unsettled requests that `access` may see, by id, in the order of their arrival."""
        live = {request_id: request.live for request_id, request in self._requests.items()}
        return {request_id: request for request_id, request in live.items() if access.sees(request.tenant_id)}

    def unrecorded(self, *, access: Access) -> list[LiveRequest]:
        """Return the live requests that `access` may see and that have no usage event yet: they are not admitted, or the event
        is being committed."""
        unrecorded = [
            request.live
            for request in self._requests.values()
            if isinstance(request, WaitingRequest) or not request.admitted.done()
        ]
        return [request for request in unrecorded if access.sees(request.tenant_id)]

    def num_waiting_for_limits(self, model: str) -> int:
        """Return how many requests for `model` are not admitted yet."""
        return sum(
            isinstance(request, WaitingRequest) and request.prepared.model.name == model for request in self._requests.values()
        )

    @property
    def tenant_names(self) -> dict[str, str]:
        """Return the names of the tenants with admitted requests, by id."""
        return {generation.live.tenant_id: generation.live.tenant_name for generation in self._generations()}

    def find(self, request_id: str, *, access: Access, action: Action = Action.READ) -> LiveRequest | None:
        """Return a live request, or None if `access` sees none. Raises RoleNotAllowed if it does not permit `action`."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        live = request.live
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
        waiting = WaitingRequest(prepared, self._clock)
        self._requests[prepared.request_id] = waiting
        self._idle.clear()
        try:
            generation = await self._admitted(waiting)
        except BaseException:
            self._remove(prepared.request_id)
            raise
        self._run(generation)
        try:
            await asyncio.shield(generation.admitted)
        except asyncio.CancelledError:
            generation.end_early("disconnected")
            raise
        return generation

    async def _admitted(self, waiting: WaitingRequest) -> Generation:
        """Return the generation of a request once its limits have room for it."""
        reservation = await waiting.until_admitted(self._admit(waiting))
        try:
            return self._create(waiting, reservation)
        except BaseException:
            reservation.void()
            raise

    async def _admit(self, waiting: WaitingRequest) -> Reservation:
        """Reserve the request's limits, which are those in force at admission, as are the price and the terms of its tenant.

        If they change while it waits, it is admitted again, in its place: nothing is awaited between the end of one reservation
        and the next attempt. Its wait includes all attempts.
        """
        terms = await self._terms(waiting, self._clock.now())
        while True:
            prepared = waiting.prepared
            request = prepared.admission_request(terms.price, terms.policy)
            reservation = await self._admission.admit(request, terms.wait_s, waiting.wait)
            try:
                self.check_can_accept(prepared.model, prepared.principal.tenant.id)  # again, because admission may have waited
                reserved_on, terms = terms, await self._terms(waiting, reservation.admitted_at)
                if terms == reserved_on:
                    self._count_exceptions(reservation)
                    return reservation
            except BaseException:
                reservation.void()
                raise
            reservation.void()

    async def _terms(self, waiting: WaitingRequest, at: datetime) -> _Terms:
        """Return the terms of a request at `at`. Raises ModelNotPriced, and the error of a key that may no longer be used."""
        model = waiting.prepared.model.name
        while True:
            tenant = waiting.prepared.principal.tenant
            tier, currency = await self._tiers.get(tenant.tier), tenant.currency
            price, policy = await self._prices.current(model, at, currency=currency), await self._policies.find(model)
            await self._watch.refresh(waiting)  # last, so that the tenant's terms are current until the next await
            latest = waiting.prepared.principal
            if (latest.tenant.tier, latest.tenant.currency) == (tenant.tier, currency):
                break
        if price is None and self._limits.refuse_unpriced:
            raise not_priced(model, currency)
        return _Terms(
            tier=tier.name,
            currency=currency,
            price=price,
            rules=self._admission.rules(latest, model, policy),
            cut_at_budget=latest.tenant.cut_at_budget,
            wait_s=tier.admission_wait_ms / 1000,
            policy=policy,
        )

    def _count_exceptions(self, reservation: Reservation) -> None:
        """Count what stricter settings would have refused: limits in shadow mode, and a missing price."""
        for decision in reservation.shadow_refusals:
            self._metrics.shadow_refused(decision.scope, decision.kind)
        if reservation.request.price is None:
            self._metrics.unpriced(reservation.request.model)

    def abort(self, request_id: str, *, access: Access) -> LiveRequest:
        """End a live request, admitted or not, and return it.

        Raises NotFound if it is not live or `access` may not see it, and RoleNotAllowed.
        """
        if self.find(request_id, access=access, action=Action.ABORT) is None:
            raise NotFound(f"the request {request_id} is not live")
        request = self._requests[request_id]
        if isinstance(request, WaitingRequest):
            request.end(RequestAborted("the request was ended by an administrator"))
        else:
            request.end_early("aborted")
        return request.live

    async def abort_and_wait(self, request_id: str, *, access: Access) -> LiveRequest:
        """End a live request and return it once it has ended, or after ABORT_WAIT_S in its current state. Raises as `abort`."""
        live = self.abort(request_id, access=access)
        request = self._requests.get(request_id)
        if isinstance(request, Generation):
            await asyncio.wait({request.outcome}, timeout=ABORT_WAIT_S)
        return live

    def note_frame(self, frame: EngineFrame) -> None:
        """Apply the progress that an engine reports about its live requests."""
        if frame.status is None or frame.status.requests is None:
            return
        by_request: dict[str, list[RequestProgress]] = {}
        for progress in frame.status.requests:
            by_request.setdefault(progress.request_id, []).append(progress)
        for request_id, answers in by_request.items():
            request = self._requests.get(request_id)
            if isinstance(request, Generation) and request.live.state != "finished":
                request.live.apply_progress(answers)
                request.note_batch_size()

    def start_watching(self) -> None:
        """Start the tasks that checkpoint live requests about once a second and end those whose key was revoked or the like."""
        self._watch.start()
        self._checkpoints.start()

    async def checkpoint(self) -> None:
        """Checkpoint the current usage of live requests in the ledger."""
        running = [generation for generation in self._generations() if generation.live.state != "finished"]
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
        for generation in self._generations():
            generation.end_early("shutdown")

    async def stop(self, timeout_s: float) -> None:
        """End live requests, wait at most `timeout_s` until they are settled, and stop the background tasks."""
        self.end_all()
        if not await self.drain(timeout_s):
            log.error("requests left unsettled at stop", requests=list(self._requests))
        await self._watch.stop()
        await self._checkpoints.stop()

    def _refuse_new(self) -> None:
        self.draining = True
        for request in self._requests.values():
            if isinstance(request, WaitingRequest):
                request.end(_draining())

    def _generations(self) -> Iterator[Generation]:
        """Yield the admitted requests."""
        return (request for request in self._requests.values() if isinstance(request, Generation))

    def _create(self, waiting: WaitingRequest, reservation: Reservation) -> Generation:
        prepared = waiting.prepared
        tenant_open = self._open.requests_of(prepared.model.name, prepared.principal.tenant.id)
        live = prepared.live_request(
            admitted_at=reservation.admitted_at,
            monotonic_s=self._clock.monotonic_s(),
            wait=waiting.wait,
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
            on_end=self._ended,
        )

    def _run(self, generation: Generation) -> None:
        """Start the task of a generation, which takes the place of its waiting request."""
        self._requests[generation.request_id] = generation
        live = generation.live
        self._open.add(live.model, live.tenant_id, live.num_answers)
        task = asyncio.create_task(generation.run(), name=f"generation {generation.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ended(self, generation: Generation) -> None:
        live = generation.live
        self._open.remove(live.model, live.tenant_id, live.num_answers)
        self._remove(generation.request_id)

    def _remove(self, request_id: str) -> None:
        del self._requests[request_id]
        if not self._requests:
            self._idle.set()


def _draining() -> Draining:
    return Draining("the appliance is shutting down", retry_after_s=RETRY_AFTER_DRAINING_S)
