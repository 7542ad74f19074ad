"""Journal records survive encoding and decoding, also between versions."""

from __future__ import annotations

from datetime import timedelta

from appliance.metering.ledger.journal_records import JournaledEvent, decode, encode
from appliance.metering.ledger.records import PendingEvent, RequestRecord, Settlement, Usage
from appliance.metering.prices import Price
from tests.support.clock import START, FakeClock


def test_an_entry_survives_encoding_and_decoding(clock: FakeClock) -> None:
    entry = complete_entry(clock)
    journaled = JournaledEvent(epoch_id="epoch", currency="EUR", billing_day=START.date(), event=entry)
    assert decode(encode(journaled)) == journaled


def test_a_settlement_survives_encoding_and_decoding() -> None:
    usage = Usage(prompt_tokens=9, cached_tokens=8, completion_tokens=7, rejected_tokens=6)
    record = RequestRecord(
        queue_s=0.1, ttft_s=0.2, inter_token_p50_s=None, decode_s=0.3, kv_blocks=4, preemptions=5, first_token_at=START,
        finished_at=START + timedelta(microseconds=1), error="démo\n",
    )  # fmt: skip
    settlement = Settlement(
        request_id="req", status="posted", finish_reason="stop", usage=usage, record=record, cause="key_revoked"
    )
    assert decode(encode(settlement)) == settlement


def complete_entry(clock: FakeClock) -> PendingEvent:
    """An entry with a price and every field set."""
    price = Price(
        id="price", model="démo", effective_from=clock.now(), currency="EUR", prompt=1, cached_prompt=2, completion=3,
        batch_percent=50, created_at=clock.now(), rejected_draft=4, tier_percents={"priority": 120},
    )  # fmt: skip
    return PendingEvent(
        request_id="req", tenant_id="tenant", key_id="key", model="démo\n", endpoint="/v1", stream=False, prompt_tokens=1,
        reserved_tokens=2, price=price, admitted_at=clock.now(), price_basis_points=5000, currency="USD", batch=True,
    )  # fmt: skip


def test_records_of_the_first_version_can_be_read() -> None:
    first = (
        b'{"epoch_id":"epoch","currency":"EUR","billing_day":"2026-11-21","entry":{"request_id":"req","tenant_id":"tenant",'
        b'"key_id":"key","model":"demo","endpoint":"/v1","stream":false,"prompt_tokens":1,"reserved_tokens":2,"price":{"id":'
        b'"price","model":"demo","effective_from":"2026-11-21T20:38:14.467045Z","currency":"EUR","prompt":1,"cached_prompt":2,'
        b'"completion":3,"batch_percent":50,"created_at":"2026-11-21T20:38:14.467045Z","rejected_draft":4,"tier_percents":'
        b'{"priority":120}},"admitted_at":"2026-11-21T20:38:14.467045Z","price_basis_points":10000,"currency":null}}'
    )
    entry = decode(first)
    assert isinstance(entry, JournaledEvent)
    assert encode(entry) == first.replace(b'"currency":null}}', b'"currency":null,"batch":false}}')
    assert not entry.event.batch, "the first version had no batch work"


def test_an_earlier_version_reads_later_records_ignoring_unknown_fields() -> None:
    journaled = JournaledEvent(epoch_id="epoch", currency="EUR", billing_day=START.date(), event=complete_entry(FakeClock()))
    later = encode(journaled).replace(b'"batch":true', b'"batch":true,"from_later":{"x":[1]}')
    assert b"from_later" in later
    assert decode(later) == journaled
