"""Default values for tests to vary, without a database: ledger entries, settlements, prices, principals, admission requests."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from appliance.base.ids import new_id
from appliance.metering.ledger.records import PendingEvent, Settlement, Usage, UsageEvent
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.prices import Price
from appliance.tenancy.principals import ApiKey, Limits, Principal, Tenant
from tests.support.cast import Person
from tests.support.clock import START


def pending(person: Person, *, admitted_at: datetime = START, **changes: Any) -> PendingEvent:
    """Return a pending event of `person`."""
    event = PendingEvent(
        request_id=new_id("req"),
        tenant_id=person.tenant.id,
        key_id=person.key.id,
        model="demo",
        endpoint="/v1/chat/completions",
        stream=True,
        prompt_tokens=10,
        reserved_tokens=266,
        price=None,
        admitted_at=admitted_at,
    )
    return msgspec.structs.replace(event, **changes)


def posted(request_id: str, *, prompt: int = 10, cached: int = 0, completion: int = 5, reason: str = "stop") -> Settlement:
    """Return the settlement of a served request."""
    usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
    return Settlement(request_id=request_id, status="posted", finish_reason=reason, usage=usage)


def voided(request_id: str) -> Settlement:
    """Return the settlement of a voided request."""
    return Settlement(request_id=request_id, status="voided", finish_reason="refused")


def settled_event(person: Person | Principal, *, at: datetime = START, **changes: Any) -> UsageEvent:
    """Return a posted event of `person` without tokens or cost that is in no table."""
    event = UsageEvent(
        id=1,
        request_id=new_id("req"),
        tenant_id=person.tenant.id,
        key_id=person.key.id,
        model="demo",
        endpoint="/v1/chat/completions",
        kind="usage",
        status="posted",
        finish_reason="stop",
        reserved_tokens=0,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        estimated=False,
        price_id=None,
        cost_picos=0,
        currency="EUR",
        admitted_at=at,
        settled_at=at,
        billing_day=at.date(),
        posting=1,
    )
    return msgspec.structs.replace(event, **changes)


def adjustment(person: Person | Principal, *, at: datetime = START, **changes: Any) -> UsageEvent:
    """Return a correction of an event of `person` that is in no table."""
    correction = {"id": 2, "posting": 2, "kind": "adjustment", "corrects_id": 1, "note": "too much"}
    return settled_event(person, at=at, **correction | changes)


def price(prompt: int = 1_000_000, cached: int = 100_000, completion: int = 3_000_000, *, at: datetime = START) -> Price:
    """Return a price that is in no table, in micro-units per million tokens."""
    return Price(
        id=new_id("price"),
        model="demo",
        effective_from=at,
        currency="EUR",
        prompt=prompt,
        cached_prompt=cached,
        completion=completion,
        batch_percent=50,
        created_at=at,
    )


def admission_request(who: Principal, prompt: int = 0, output: int | None = 0, **changes: Any) -> AdmissionRequest:
    """Return a request with a prompt of so many tokens and this requested maximum of output, by default without a price."""
    request = AdmissionRequest(principal=who, model="demo", prompt_tokens=prompt, max_output_tokens=output, price=None)
    return msgspec.structs.replace(request, **changes)


def principal(tenant: Limits | None = None, key: Limits | None = None) -> Principal:
    """Return a principal with these limits that is in no table."""
    owner = Tenant(
        id=new_id("tn"),
        name="bob",
        tier="standard",
        weight=1,
        limits=tenant or Limits(),
        allowed_models=None,
        suspended=False,
        archived=False,
        created_at=START,
    )
    held = ApiKey(
        id=new_id("key"),
        tenant_id=owner.id,
        name="bob's key",
        prefix="gh_aaaaaaaa",
        scopes=("inference",),
        limits=key or Limits(),
        allowed_models=None,
        allowed_networks=None,
        expires_at=None,
        revoked_at=None,
        last_used_at=None,
        created_at=START,
    )
    return Principal(tenant=owner, key=held)
