"""Journal records survive encoding and decoding, also between versions, and what is missing in the tables is replayed."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from appliance.base.db import Database
from appliance.base.journal import Journal, remaining_records
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.journal_records import INTEGER_MAX, JournaledEvent, decode, encode, open_journal, replay
from appliance.metering.ledger.records import PendingEvent, RequestRecord, Settlement, Usage
from appliance.metering.prices import Price
from tests.support.cast import Cast
from tests.support.clock import START, FakeClock
from tests.support.factories import pending, posted
from tests.support.ledgers import all_events, without_alerts


def test_an_entry_survives_encoding_and_decoding(clock: FakeClock) -> None:
    entry = complete_entry(clock)
    journaled = JournaledEvent(epoch_id="epoch", currency="EUR", billing_day=START.date(), event=entry)
    assert decode(encode(journaled)) == journaled


def test_a_settlement_survives_encoding_and_decoding() -> None:
    usage = Usage(prompt_tokens=9, cached_tokens=8, completion_tokens=7, rejected_tokens=6)
    record = RequestRecord(
        queue_s=0.1, ttft_s=0.2, inter_token_p50_s=None, decode_s=0.3, kv_blocks=4, preemptions=5, first_token_at=START,
        finished_at=START + timedelta(microseconds=1), error="démo\n", admission_wait_s=0.4, awaited_limit="key_tokens",
        batch_size_mean=63.5,
    )  # fmt: skip
    settlement = Settlement(
        request_id="req", status="posted", finish_reason="stop", usage=usage, record=record, cause="key_revoked"
    )
    assert decode(encode(settlement)) == settlement


def test_the_largest_count_of_the_tables_is_encoded_and_the_next_is_refused() -> None:
    most = posted("req", completion=INTEGER_MAX)
    assert decode(encode(most)) == most
    with pytest.raises(ValueError, match="64 bits"):
        encode(posted("req", completion=INTEGER_MAX + 1))


async def test_replay_counts_what_was_missing_and_empties_the_journal(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    journal, calendar = Journal(tmp_path / "j"), BillingCalendar()
    events = [pending(cast.bob) for _ in range(2)]
    records = [
        encode(JournaledEvent(epoch_id=cast.epoch_id, currency="EUR", billing_day=START.date(), event=event))
        for event in events
    ]
    for record in (*records, encode(posted(events[0].request_id))):
        await journal.append(record)
    assert await replay(database, journal, clock, calendar, without_alerts) == 3
    assert remaining_records(tmp_path / "j") == []
    assert await replay(database, journal, clock, calendar, without_alerts) == 0
    await journal.close()


async def test_an_unreadable_record_is_logged_and_keeps_none_behind_it_from_the_tables(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    journal, event = Journal(tmp_path / "j"), pending(cast.bob)
    good = JournaledEvent(epoch_id=cast.epoch_id, currency="EUR", billing_day=START.date(), event=event)
    for record in (b"half a r\xc3", encode(good)):
        await journal.append(record)
    assert await replay(database, journal, clock, BillingCalendar(), without_alerts) == 1
    assert [each.request_id for each in await all_events(database)] == [event.request_id]
    log = capfd.readouterr().out
    assert "unreadable journal record" in log
    assert "half a r\N{REPLACEMENT CHARACTER}" in log
    await journal.close()


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


def test_the_journal_is_next_to_the_real_file_behind_links(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "real.db").touch()
    (tmp_path / "link.db").symlink_to(tmp_path / "data" / "real.db")
    journal = open_journal(f"sqlite:///{tmp_path}/link.db")
    assert journal is not None
    asyncio.run(journal.close())
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "real.db",
        "real.db.admitted-1",
        "real.db.admitted-2",
    ]
