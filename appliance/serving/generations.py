"""All generations of the gateway: starts them in the right order, knows the live ones, checkpoints them, drains them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from appliance.base.background import Background, repeat
from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import Draining, NotFound, Overloaded
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.admission import Admission
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
from appliance.serving.orders import Order
from appliance.serving.request_limits import RequestLimits
from appliance.telemetry.metrics import Metrics
from appliance.tenancy.access import Access
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.roles import Action
from appliance.tenancy.tiers import Tiers
from engine.protocol import EngineFrame, RequestProgress

CHECKPOINT_INTERVAL_S = 0.75  # a death leaves at most a second unbilled: the rest of it is for writing them
RETRY_AFTER_OVERLOADED_S = 1.0
ABORT_WAIT_S = 5.0

log = structlog.get_logger()


class Generations:
    """Starts generations and keeps those that live. `draining` refuses new ones."""

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
        self._watch = AccessWatch(db, clock, self._generations.values, admission=admission, policies=policies)
        self._open = OpenRequests()
        self._tasks: set[asyncio.Task[None]] = set()
        self._checkpoints = Background(
            "checkpoints",
            lambda: repeat(self._checkpoint, CHECKPOINT_INTERVAL_S, failure="how far running requests are could not be noted"),
        )
        self._idle = asyncio.Event()
        self._idle.set()

    def live(self, *, access: Access) -> Mapping[str, LiveRequest]:
        """Return the requests that are not yet settled and that `access` shows, by id, oldest first."""
        lives = (generation.live for generation in self._generations.values())
        return {live.id: live for live in lives if access.sees(live.tenant_id)}

    @property
    def tenant_names(self) -> dict[str, str]:
        """Return the names of the tenants with live requests, by id."""
        return {generation.live.tenant_id: generation.live.tenant_name for generation in self._generations.values()}

    def find(self, request_id: str, *, access: Access, action: Action = Action.READ) -> LiveRequest | None:
        """Return one live request; None when there is none, or none that `access` shows. Raises RoleNotAllowed."""
        generation = self._generations.get(request_id)
        if generation is None or not access.sees(generation.live.tenant_id):
            return None
        access.require(action, generation.live.tenant_id)
        return generation.live

    def check_open(self, model: ServedModel, tenant_id: str) -> None:
        """Raise Draining, ModelLoading, EngineUnavailable or Overloaded when a request of the tenant could not be taken now."""
        if self.draining:
            raise _draining()
        if not self._ledger.healthy:
            raise Overloaded("the usage ledger cannot be written now", retry_after_s=RETRY_AFTER_OVERLOADED_S)
        model.engine.check_ready()
        if not self._open.has_place(model.name, tenant_id, self._limits.max_waiting_requests + self._seats(model)):
            raise Overloaded("the waiting queue is full", retry_after_s=RETRY_AFTER_OVERLOADED_S)

    def _seats(self, model: ServedModel) -> int:
        """Return how many requests of `model` run at a time, as its engine says."""
        return 0 if model.engine.info is None else model.engine.info.max_num_seqs

    async def start(self, order: Order) -> Generation:
        """Admit `order`, commit its pending record and hand it to the engine. Refusals raise and consume nothing.

        The caller is cancelled when its client leaves: then the request ends, admitted or not.
        """
        self.check_open(order.model, order.principal.tenant.id)
        reservation = await self._admit(order)
        try:
            generation = self._generation(order, reservation)
        except BaseException:
            reservation.void()
            raise
        self._own(generation)
        self._watch.began(generation, order.principal)
        try:
            await asyncio.shield(generation.admitted)
        except asyncio.CancelledError:
            generation.end_early("disconnected")
            raise
        return generation

    async def _admit(self, order: Order) -> Reservation:
        """Return what the request holds, at the price that is in force now that it does."""
        tier = await self._tiers.get(order.principal.tenant.tier)
        currency = order.principal.tenant.currency
        while True:
            price = await self._prices.current(order.model.name, self._clock.now(), currency=currency)
            if price is None and self._limits.refuse_unpriced:
                raise not_priced(order.model.name, currency)
            policy = await self._policies.find(order.model.name)
            request = order.admission_request(price, policy)
            reservation = await self._admission.admit(request, tier.admission_wait_ms / 1000)
            try:
                self.check_open(order.model, order.principal.tenant.id)  # it may have waited
                if await self._prices.current(order.model.name, reservation.admitted_at, currency=currency) == price:
                    self._note_overlooked(reservation)
                    if price is None:
                        self._metrics.unpriced(order.model.name)
                    return reservation
            except BaseException:
                reservation.void()
                raise
            reservation.void()  # another price came into force while it waited

    def _note_overlooked(self, reservation: Reservation) -> None:
        for decision in reservation.overlooked:
            self._metrics.shadow_refused(decision.scope, decision.kind)

    def abort(self, request_id: str, *, access: Access) -> LiveRequest:
        """End a live request on somebody's behalf and return it.

        Raises NotFound when it does not live or is another tenant's, and RoleNotAllowed.
        """
        return self._abort(request_id, access).live

    async def abort_and_wait(self, request_id: str, *, access: Access) -> LiveRequest:
        """Do the same and return the request when it has ended, or after ABORT_WAIT_S as it is then."""
        generation = self._abort(request_id, access)
        await asyncio.wait({generation.outcome}, timeout=ABORT_WAIT_S)
        return generation.live

    def note_frame(self, frame: EngineFrame) -> None:
        """Take over what an engine says of its live requests."""
        if frame.status is None or frame.status.requests is None:
            return
        answers: dict[str, list[RequestProgress]] = {}
        for progress in frame.status.requests:
            answers.setdefault(progress.request_id, []).append(progress)
        for request_id, rows in answers.items():
            generation = self._generations.get(request_id)
            if generation is not None and generation.live.state != "finished":
                generation.live.apply_progress(rows)

    def start_watching(self) -> None:
        """Begin to record, about once a second, what live requests have used, and to end those whose key may not go on."""
        self._watch.start()
        self._checkpoints.start()

    def checkpoint(self) -> None:
        """Tell the ledger how far the live requests are."""
        running = [generation for generation in self._generations.values() if generation.live.state != "finished"]
        usages = {generation.request_id: generation.usage for generation in running if generation.live.completion_tokens > 0}
        if usages:
            self._ledger.checkpoint(usages)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and those that wait for room, wait for the live ones, and return whether all ended in time."""
        self._refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self) -> None:
        """Refuse new requests, and end the live ones because the appliance shuts down: who asked is told to send them again."""
        self._refuse_new()
        for generation in list(self._generations.values()):
            generation.end_early("shutdown")

    async def stop(self, timeout_s: float) -> None:
        """End what still lives and wait until it is settled, at most `timeout_s`."""
        self.end_all()
        if not await self.drain(timeout_s):
            log.error("requests left unsettled at stop", requests=list(self._generations))
        await self._watch.stop()
        await self._checkpoints.stop()

    def _refuse_new(self) -> None:
        self.draining = True
        self._admission.refuse_waiting(_draining())

    def _abort(self, request_id: str, access: Access) -> Generation:
        live = self.find(request_id, access=access, action=Action.ABORT)
        if live is None:
            raise NotFound(f"the request {request_id} is not live")
        generation = self._generations[live.id]
        generation.end_early("aborted")
        return generation

    def _generation(self, order: Order, reservation: Reservation) -> Generation:
        tenant_open = self._open.requests_of(order.model.name, order.principal.tenant.id)
        live = order.live_request(reservation.admitted_at, self._clock.monotonic_s(), tenant_open=tenant_open)
        bill = Bill(
            live=live,
            model=order.model,
            entry=order.pending_entry(reservation),
            reservation=reservation,
            ledger=self._ledger,
            clock=self._clock,
            metrics=self._metrics,
        )
        return Generation(
            live=live,
            order=order,
            bill=bill,
            clock=self._clock,
            metrics=self._metrics,
            limits=self._limits,
            on_end=self._forget,
        )

    def _own(self, generation: Generation) -> None:
        self._generations[generation.request_id] = generation
        live = generation.live
        self._open.began(live.model, live.tenant_id, live.num_answers)
        self._idle.clear()
        task = asyncio.create_task(generation.run(), name=f"generation {generation.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget(self, generation: Generation) -> None:
        del self._generations[generation.request_id]
        live = generation.live
        self._open.ended(live.model, live.tenant_id, live.num_answers)
        if not self._generations:
            self._idle.set()

    async def _checkpoint(self) -> None:
        self.checkpoint()


def _draining() -> Draining:
    return Draining("the appliance is shutting down", retry_after_s=RETRY_AFTER_DRAINING_S)
