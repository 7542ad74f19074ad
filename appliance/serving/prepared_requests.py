"""A request that is ready for admission: decoded, authenticated and tokenised. Other parts receive values derived from it:

PreparedRequest ─┬─► AdmissionRequest    for the limits, which answer with a Reservation or refuse
                 ├─► PendingEvent        for the ledger before the engine starts; a Settlement closes it
                 ├─► LiveRequest         for the table of live requests; updated until the request ends
                 └─► GenerationRequest   for the engine, which answers with TokenEvents
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from appliance.metering.ledger.records import PendingEvent
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.limit_waits import LimitWait
from appliance.metering.limits.reservations import Reservation
from appliance.metering.prices import Price
from appliance.serving.live_requests import LiveRequest
from appliance.serving.model_registry import ServedModel
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Principal
from engine.protocol import GenerationRequest, Priority, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked request from `address`. `max_output_tokens` is the client's value, None if it gave none.

    `field_names` maps sampling fields to the names that the client used for them. `batch` work is served in the lowest priority
    class, whatever its tenant's tier, and is billed at the batch share of the price.
    """

    request_id: str
    principal: Principal
    address: str
    model: ServedModel
    endpoint: str
    stream: bool
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_output_tokens: int | None
    field_names: Mapping[str, str] = field(default_factory=dict)
    batch: bool = False

    def admission_request(self, price: Price | None, policy: ModelPolicy | None) -> AdmissionRequest:
        """Return the request for the limits."""
        return AdmissionRequest(
            principal=self.principal,
            model=self.model.name,
            prompt_tokens=len(self.prompt_token_ids),
            max_output_tokens=self.max_output_tokens,
            price=price,
            output_room=self.sampling.max_tokens,
            num_answers=self.sampling.num_answers,
            batch=self.batch,
            policy=policy,
        )

    def pending_event(self, reservation: Reservation) -> PendingEvent:
        """Return the pending event of the admitted request."""
        tenant = self.principal.tenant
        return PendingEvent(
            request_id=self.request_id,
            tenant_id=tenant.id,
            key_id=self.principal.key.id,
            model=self.model.name,
            endpoint=self.endpoint,
            stream=self.stream,
            prompt_tokens=len(self.prompt_token_ids),
            reserved_tokens=reservation.reserved_tokens,
            price=reservation.request.price,
            price_basis_points=reservation.basis_points,
            currency=tenant.currency,
            batch=self.batch,
            admitted_at=reservation.admitted_at,
        )

    def live_request(
        self,
        *,
        admitted_at: datetime | None,
        monotonic_s: float,
        wait: LimitWait,
        tenant_open: int = 0,
    ) -> LiveRequest:
        """Return the live request just admitted, or with `admitted_at` None one that is not admitted yet, as of `monotonic_s`.
        `tenant_open`: how many others of its tenant are open."""
        tenant, key = self.principal.tenant, self.principal.key
        return LiveRequest(
            id=self.request_id,
            tenant_id=tenant.id,
            tenant_name=tenant.name,
            key_id=key.id,
            key_prefix=key.prefix,
            model=self.model.name,
            endpoint=self.endpoint,
            stream=self.stream,
            prompt_tokens=len(self.prompt_token_ids),
            admitted_at=admitted_at,
            admitted_monotonic_s=monotonic_s,
            num_answers=self.sampling.num_answers,
            batch=self.batch,
            tenant_open=tenant_open,
            admission_wait_s=wait.total_s(monotonic_s),
            awaited_limit=wait.awaited_limit,
        )

    def generation_request(self, queue_deadline_s: float | None) -> GenerationRequest:
        """Return the request for the engine. Tenant and weight come from the authenticated key, never from the body; the body
        can only lower the priority."""
        tenant = self.principal.tenant
        return GenerationRequest(
            request_id=self.request_id,
            tenant_id=tenant.id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            weight=tenant.weight,
            priority=Priority.BATCH if self.batch else Priority(tenant.tier),
            queue_deadline_s=queue_deadline_s,
        )
