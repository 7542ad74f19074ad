"""The next start of a ledger finds in its journal what the last process had not written to the tables."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from appliance.base.db import Database
from appliance.base.errors import InternalError, Overloaded
from appliance.base.journal import Journal
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import operation_queue, rollups
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.ledger.journal_records import JournaledEvent, count_unwritten_events, encode, open_journal, replay
from appliance.metering.ledger.records import Usage, UsageEvent
from appliance.metering.ledger.round import LedgerBroken
from appliance.metering.ledger.writer import Ledger
from appliance.metering.past_requests import PastRequests
from tests.support.cast import OWNER, Cast
from tests.support.clock import START, FakeClock
from tests.support.factories import pending, posted, voided
from tests.support.ledgers import (
    FailingDatabase,
    all_events,
    euro_prices,
    kill_ledger,
    settle,
    utc_ledger,
    utc_recover,
    without_alerts,
)
from tests.support.polling import DEADLINE_S, poll_until

pytestmark = [
    pytest.mark.parametrize("database_url", ["sqlite"], indirect=True),  # others have no journal
    pytest.mark.usefixtures("patient_journal"),
]


async def start_again(database: Database, clock: FakeClock, path: Path) -> dict[str, UsageEvent]:
    """Start again over database and journal. → events by request"""
    epoch_id = await begin_epoch(database, clock, "next")
    journal = Journal(path)
    await replay(database, journal, clock, BillingCalendar(), without_alerts)
    await utc_recover(database, clock, epoch_id)
    await journal.close()
    return {event.request_id: event for event in await all_events(database)}


async def test_a_crash_between_the_journal_record_and_its_rows_leaves_a_recovered_request(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    ledger = utc_ledger(gated, clock, cast.epoch_id, journal=Journal(tmp_path / "j"))
    await ledger.start()
    entries = [pending(cast.bob, admitted_at=START + timedelta(microseconds=number)) for number in range(40)]
    await asyncio.gather(*(ledger.open(entry) for entry in entries))
    await kill_ledger(ledger)
    assert await all_events(database) == []
    events = await start_again(database, clock, tmp_path / "j")
    assert set(events) == {entry.request_id for entry in entries}
    for entry in entries:
        event = events[entry.request_id]
        assert (event.status, event.estimated, event.cost_picos) == ("recovered", True, 0)
        assert (event.admitted_at, event.reserved_tokens, event.model) == (entry.admitted_at, 266, "demo")
    assert await start_again(database, clock, tmp_path / "j") == events, "once"


async def test_a_crash_between_a_journaled_settlement_and_its_rows_leaves_the_exact_bill(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    price = await euro_prices(database, clock).add(model="demo", currency="EUR", prompt=3, cached_prompt=1, completion=7)
    gated = FailingDatabase.around(database)
    ledger = utc_ledger(gated, clock, cast.epoch_id, journal=Journal(tmp_path / "j"))
    await ledger.start()
    with_rows, in_lines, refused, running = (pending(cast.bob, price=price, admitted_at=clock.now()) for _ in range(4))
    await ledger.open(with_rows)
    await ledger.catch_up()
    gated.gate = asyncio.Event()
    await asyncio.gather(*(ledger.open(entry) for entry in (in_lines, refused, running)))
    await asyncio.gather(*(ledger.settle(posted(entry.request_id, completion=5)) for entry in (with_rows, in_lines)))
    await ledger.settle(voided(refused.request_id))
    await kill_ledger(ledger)
    events = await start_again(database, clock, tmp_path / "j")
    for entry in (with_rows, in_lines):
        event = events[entry.request_id]
        assert (event.status, event.estimated, event.completion_tokens) == ("posted", False, 5)
        assert event.cost_picos == 10 * 3 + 5 * 7
        row = await PastRequests(database).get(entry.request_id, access=OWNER)
        assert (row.finish_reason, row.completion_tokens, row.finished_at) == (event.finish_reason, 5, clock.now())
    assert events[refused.request_id].status == "voided"
    assert events[running.request_id].status == "recovered"
    assert await start_again(database, clock, tmp_path / "j") == events, "once"
    async with database.reading() as connection:
        assert await rollups.mismatched_levels(connection, database.kind, BillingCalendar()) == []


async def test_while_the_tables_fail_a_settlement_is_journaled_however_many_wait(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    failing = FailingDatabase.around(database)
    ledger = utc_ledger(failing, clock, cast.epoch_id, journal=Journal(tmp_path / "j"))
    await ledger.start()
    entries = [pending(cast.bob) for _ in range(operation_queue.COMBINE_FROM + 1)]
    await asyncio.gather(*(ledger.open(entry) for entry in entries))
    await ledger.catch_up()
    failing.fail_before_commit = 1_000_000
    await ledger.settle(posted(entries[0].request_id))
    await poll_until(lambda: not ledger.healthy)
    for entry in entries[1:]:
        async with asyncio.timeout(DEADLINE_S):
            await ledger.settle(posted(entry.request_id))
    await kill_ledger(ledger)
    events = await start_again(database, clock, tmp_path / "j")
    assert {event.status for event in events.values()} == {"posted"}


async def test_a_settlement_after_the_writer_ended_unexpectedly_is_journaled_for_the_next_start(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise KeyError("a bug")

    journal = Journal(tmp_path / "j")
    ledger = utc_ledger(database, clock, cast.epoch_id, journal=journal)
    await ledger.start()
    entry = pending(cast.bob)
    await ledger.open(entry)
    monkeypatch.setattr(ledger._queue, "take", bug)
    await poll_until(lambda: not ledger.healthy)
    await ledger.settle(posted(entry.request_id, completion=5))
    assert ledger.unrecorded_usage_tokens == 0
    await journal.close()
    event = (await start_again(database, clock, tmp_path / "j"))[entry.request_id]
    assert (event.status, event.completion_tokens) == ("posted", 5)


async def test_replay_does_not_write_existing_rows_again(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    ledger = utc_ledger(database, clock, cast.epoch_id, journal=Journal(tmp_path / "j"))
    await ledger.start()
    entry = pending(cast.bob)
    await ledger.open(entry)
    event = await settle(ledger, posted(entry.request_id))
    await kill_ledger(ledger)
    assert await start_again(database, clock, tmp_path / "j") == {entry.request_id: event}


async def test_a_hanging_disk_refuses_requests_and_leaves_nothing_pending(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "j")
    ledger = utc_ledger(database, clock, cast.epoch_id, journal=journal, open_timeout_s=0.05)
    await ledger.start()
    journal._thread = Thread()  # a thread that was never started: waiting records are not written
    with pytest.raises(Overloaded, match="nothing was started"):
        await ledger.open(pending(cast.bob))
    journal._thread = None
    await ledger.stop()
    await journal.close()
    assert await start_again(database, clock, tmp_path / "j") == {}


async def test_records_that_cannot_be_written_to_the_tables_do_not_stop_the_start(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "j")
    day = START.date()
    good = JournaledEvent(epoch_id=cast.epoch_id, currency="EUR", billing_day=day, event=pending(cast.bob))
    lost = JournaledEvent(epoch_id="epoch_of_a_later_backup", currency="EUR", billing_day=day, event=pending(cast.bob))
    counts: dict[str, Any] = {"reserved_tokens": 2**80}
    huge = msgspec.json.encode(msgspec.structs.replace(good, event=pending(cast.bob, **counts)))
    for record in (encode(lost), huge, b'{"not": "an entry"}', b"not JSON", encode(good)):
        await journal.append(record)
    events = await start_again(database, clock, tmp_path / "j")
    assert set(events) == {good.event.request_id}


async def test_replay_logs_a_settlement_without_an_event(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await Journal(tmp_path / "j").append(encode(posted("req_of_a_later_backup")))
    assert await start_again(database, clock, tmp_path / "j") == {}
    assert "req_of_a_later_backup has no event" in capfd.readouterr().out


async def test_a_start_with_an_unwritable_database_loses_nothing(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "j")
    left = JournaledEvent(epoch_id=cast.epoch_id, currency="EUR", billing_day=START.date(), event=pending(cast.bob))
    await journal.append(encode(left))
    failing = FailingDatabase.around(database)
    failing.fail_before_commit = 1
    with pytest.raises(Exception, match="disk full"):
        await replay(failing, Journal(tmp_path / "j"), clock, BillingCalendar(), without_alerts)
    assert set(await start_again(database, clock, tmp_path / "j")) == {left.event.request_id}


async def test_a_stopping_ledger_refuses_late_operations(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "j")
    ledger = utc_ledger(database, clock, cast.epoch_id, journal=journal)
    await ledger.start()
    opening = asyncio.create_task(ledger.open(pending(cast.bob)))
    await asyncio.sleep(0)
    await ledger.stop()
    with pytest.raises(InternalError, match="not running"):
        await opening
    await journal.close()
    assert await start_again(database, clock, tmp_path / "j") == {}


@pytest.mark.parametrize("seed", range(8))
async def test_every_admitted_request_is_in_the_ledger_once_despite_failures_and_crashes(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    failing = FailingDatabase.around(database)
    admitted: set[str] = set()
    settled: dict[str, int] = {}

    async def live(ledger: Ledger) -> None:
        entry = pending(cast.bob)
        await asyncio.sleep(chance.random() * 0.05)
        try:
            await ledger.open(entry)
        except (Overloaded, InternalError):
            return
        admitted.add(entry.request_id)
        ledger.checkpoint({entry.request_id: Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=1)})
        if chance.random() < 0.7:
            completion = chance.randrange(50)
            await ledger.settle(posted(entry.request_id, completion=completion))
            settled[entry.request_id] = completion

    for _ in range(4):
        journal = Journal(tmp_path / "j", file_bytes=2000)
        epoch_id = await begin_epoch(database, clock, "test")
        await replay(database, journal, clock, BillingCalendar(), without_alerts)
        await utc_recover(database, clock, epoch_id)
        ledger = utc_ledger(failing, clock, epoch_id, checkpoint_interval_s=0.0, journal=journal)
        await ledger.start()
        lives = [asyncio.create_task(live(ledger)) for _ in range(30)]
        failing.fail_before_commit, failing.fail_after_commit = chance.randrange(2), chance.randrange(3)
        await asyncio.sleep(chance.random() * 0.1)
        await kill_ledger(ledger)
        failing.fail_before_commit = failing.fail_after_commit = 0
        for task in lives:
            task.cancel()
        await asyncio.wait(lives)
        await journal.close()  # its thread must not write into the files of the next life
    events = await start_again(database, clock, tmp_path / "j")
    assert admitted <= set(events)
    assert all(event.status != "pending" for event in events.values())
    for request_id, completion in settled.items():
        event = events[request_id]
        assert (event.status, event.estimated, event.completion_tokens) == ("posted", False, completion)


async def test_stopping_while_the_database_fails_leaves_the_journal_to_the_next_start(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    failing = FailingDatabase.around(database)
    failing.fail_before_commit = 1_000_000
    journal = Journal(tmp_path / "j")
    ledger = utc_ledger(failing, clock, cast.epoch_id, journal=journal)
    await ledger.start()
    entries = [pending(cast.bob) for _ in range(3)]
    await asyncio.gather(*(ledger.open(entry) for entry in entries))
    await ledger.settle(posted(entries[0].request_id))
    with pytest.raises(LedgerBroken, match="unwritten"):
        await ledger.stop(0.1)
    await journal.close()
    events = await start_again(database, clock, tmp_path / "j")
    assert [events[entry.request_id].status for entry in entries] == ["posted", "recovered", "recovered"]


async def test_text_passes_through_the_journal_unchanged_or_is_refused(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    entry = pending(cast.bob, model="a\nb\u2028 démo " + "l" * 100)
    ledger = utc_ledger(database, clock, cast.epoch_id, journal=Journal(tmp_path / "j"))
    await ledger.start()
    with pytest.raises(InternalError, match="nothing was started"):
        await ledger.open(pending(cast.bob, model="half a \ud800"))
    await ledger.open(entry)
    await kill_ledger(ledger)
    events = await start_again(database, clock, tmp_path / "j")
    assert events[entry.request_id].model == entry.model


async def test_entries_only_in_the_journal_are_counted_without_changing_it(
    database: Database, database_url: str, clock: FakeClock, cast: Cast
) -> None:
    journal = open_journal(database_url)
    assert journal is not None
    ledger = utc_ledger(database, clock, cast.epoch_id, journal=journal)
    await ledger.start()
    written, left = pending(cast.bob), pending(cast.bob)
    await ledger.open(written)
    await settle(ledger, posted(written.request_id))
    await kill_ledger(ledger)
    await journal.append(encode(JournaledEvent(epoch_id=cast.epoch_id, currency="EUR", billing_day=START.date(), event=left)))
    for _ in range(2):
        async with database.reading() as connection:
            assert await count_unwritten_events(connection, database_url) == 1
