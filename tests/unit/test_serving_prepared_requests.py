"""What a prepared request passes to limits, ledger and live requests: output room, reservation, currency and key prefix."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

from appliance.metering.limits.limit_waits import LimitWait
from appliance.serving.prepared_requests import PreparedRequest
from appliance.tenancy.principals import Principal
from engine.protocol import SamplingParams
from tests.support.clock import FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import principal
from tests.support.ledgers import utc_admission


def prepared_by(who: Principal) -> PreparedRequest:
    """A prompt of three tokens without a requested length; the answer may have 50 tokens."""
    return PreparedRequest(
        request_id="req_a",
        principal=who,
        address="192.0.2.7",
        model=cast(Any, SimpleNamespace(name="demo")),
        endpoint="/v1/completions",
        stream=False,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=50),
        max_output_tokens=None,
    )


def test_limits_get_the_output_room_even_without_a_requested_length() -> None:
    request = prepared_by(principal()).admission_request(None, None)
    assert (request.max_output_tokens, request.output_room) == (None, 50)


async def test_the_pending_record_has_the_reserved_tokens(clock: FakeClock) -> None:
    prepared = prepared_by(principal())
    reservation = await utc_admission(clock, EmptySums()).admit(prepared.admission_request(None, None))
    assert prepared.pending_event(reservation).reserved_tokens == reservation.reserved_tokens > 0


async def test_the_record_of_a_request_without_a_price_has_the_currency_of_its_tenant(clock: FakeClock) -> None:
    bob = principal()
    prepared = prepared_by(dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, currency="USD")))
    reservation = await utc_admission(clock, EmptySums()).admit(prepared.admission_request(None, None))
    assert prepared.pending_event(reservation).currency == "USD"


def test_a_live_request_shows_the_prefix_of_its_key(clock: FakeClock) -> None:
    bob = principal()
    live = prepared_by(bob).live_request(admitted_at=clock.now(), monotonic_s=0.0, wait=LimitWait())
    assert live.key_prefix == bob.key.prefix != bob.key.id
