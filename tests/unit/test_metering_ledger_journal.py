"""A running ledger with a journal: rows follow, and hanging or failing disks and tables lose nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import structlog
from sqlalchemy import select

from appliance.base.consecutive_failures import LOG_INTERVAL_S
from appliance.base.db import Database
from appliance.base.errors import InternalError, Overloaded
from appliance.base.journal import Journal
from appliance.base.tables import usage_events
from appliance.metering.ledger import operation_queue
from appliance.metering.ledger import writer as writer_module
from appliance.metering.ledger.records import Usage
from appliance.metering.ledger.round import LedgerBroken
from appliance.metering.ledger.writer import Ledger
from tests.support.cast import Cast
from tests.support.clock import FakeClock
from tests.support.factories import pending, posted, voided
from tests.support.ledgers import (
    FailingDatabase,
    all_events,
    euro_prices,
    settle,
    utc_ledger,
)
from tests.support.loop_iterations import run_iterations
from tests.support.polling import DEADLINE_S, poll_until

pytestmark = [
    pytest.mark.parametrize("database_url", ["sqlite"], indirect=True),  # others have no journal
    pytest.mark.usefixtures("patient_journal"),
]


@asynccontextmanager
async def journaling(database: Database, clock: FakeClock, epoch_id: str, path: Path, **options: Any) -> AsyncIterator[Ledger]:
    """Yield a started ledger with a journal, and stop both in order."""
    journal = Journal(path)
    ledger = utc_ledger(database, clock, epoch_id, checkpoint_interval_s=0.0, journal=journal, **options)
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.stop()
        await journal.close()


def _contents(path: Path) -> list[bytes]:
    """The content of the two files of a journal."""
    return [file.read_bytes().strip(b"\0") for file in path.parent.glob(f"{path.name}-*")]


async def test_a_journaled_event_is_settled_like_any_other(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    price = await euro_prices(database, clock).add(model="demo", currency="EUR", prompt=3, cached_prompt=1, completion=7)
    entries = [pending(cast.bob, price=price, admitted_at=clock.now()) for _ in range(60)]
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        events = await asyncio.gather(*(settle(ledger, posted(entry.request_id)) for entry in entries))
    assert {event.cost_picos for event in events} == {10 * 3 + 5 * 7}
    assert sorted(await all_events(database), key=lambda event: event.id) == sorted(events, key=lambda event: event.id)
    assert _contents(tmp_path / "j") == [b"", b""]


async def test_the_rows_of_a_journaled_event_follow_by_themselves(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    entry = pending(cast.bob)
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        await ledger.open(entry)
        await poll_until(lambda: entry.request_id in ledger._opened)
        (event,) = await all_events(database)
        assert event.status == "pending"
        ledger.checkpoint({entry.request_id: Usage(prompt_tokens=9, cached_tokens=0, completion_tokens=2)})
        await ledger.settle(voided(entry.request_id))


async def test_readers_and_writers_see_settlements_however_late_the_rows_come(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_queue, "ROWS_PAUSE_S", 60.0)
    statuses = select(usage_events.c.status)
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        for transaction in (database.reading, database.writing):
            entry = pending(cast.bob)
            await ledger.open(entry)
            await ledger.settle(posted(entry.request_id))
            async with transaction() as connection:
                assert set((await connection.execute(statuses)).scalars()) == {"posted"}


async def test_when_many_operations_wait_a_settlement_joins_their_round(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_queue, "ROWS_PAUSE_S", 60.0)
    entries = [pending(cast.bob) for _ in range(operation_queue.COMBINE_FROM)]
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        await ledger.settle(posted(entries[0].request_id))
        database.catch_up = None
        events = {event.request_id: event.status for event in await all_events(database)}
    assert events == {entry.request_id: "pending" for entry in entries} | {entries[0].request_id: "posted"}


async def test_a_settlement_is_written_to_the_tables_if_the_journal_times_out_and_at_once_if_it_is_known_to_fail(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        journal = ledger._journal
        assert journal is not None
        first, second = pending(cast.bob), pending(cast.bob)
        await asyncio.gather(ledger.open(first), ledger.open(second))
        real = journal._waiting
        deaf = SimpleNamespace(put=lambda _append: None, get=real.get, get_nowait=real.get_nowait)
        for entry, timeout_s, stuck_s in ((first, 0.01, None), (second, 60.0, -60.0)):
            monkeypatch.setattr(writer_module, "JOURNAL_TIMEOUT_S", timeout_s)
            with monkeypatch.context() as hanging:
                hanging.setattr(journal, "_waiting", deaf)  # the thread never sees waiting records
                hanging.setattr(journal, "_writing_since_s", stuck_s)  # long ago
                async with asyncio.timeout(DEADLINE_S):
                    await ledger.settle(posted(entry.request_id))
    assert [event.status for event in await all_events(database)] == ["posted"] * 2


async def test_only_the_first_reader_waits_for_a_hanging_round(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CATCH_UP_S", 0.05)
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    async with journaling(gated, clock, cast.epoch_id, tmp_path / "j") as ledger:
        await ledger.open(pending(cast.bob))
        await poll_until(lambda: gated.held == 1)
        await ledger.catch_up()
        await poll_until(lambda: ledger._round_time.elapsed_s > 0.05)
        monkeypatch.setattr(asyncio, "wait", None)
        await ledger.catch_up()
        monkeypatch.undo()
        gated.gate.set()


async def test_a_caller_cancelled_during_the_journal_write_does_not_stop_the_settlement(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        entry = pending(cast.bob)
        await ledger.open(entry)
        settling = asyncio.create_task(ledger.settle(posted(entry.request_id)))
        await asyncio.sleep(0)
        settling.cancel()
        await asyncio.wait({settling})
    assert [event.status for event in await all_events(database)] == ["posted"]


async def test_a_contradicting_settlement_is_counted_even_after_its_caller_has_continued(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        entry = pending(cast.bob)
        await ledger.open(entry)
        first = await settle(ledger, posted(entry.request_id, completion=5))
        again = await settle(ledger, posted(entry.request_id, completion=5))
        assert (again, ledger.unrecorded_usage_tokens) == (first, 0)
        assert await settle(ledger, posted(entry.request_id, completion=6)) == first
        assert ledger.unrecorded_usage_tokens == 16
    assert "other figures" in capfd.readouterr().out


async def test_a_settlement_that_cannot_be_encoded_waits_for_its_rows(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        entry = pending(cast.bob)
        await ledger.open(entry)
        with pytest.raises(LedgerBroken, match="the database rejected the settlement"):
            await ledger.settle(posted(entry.request_id, completion=2**63))
        await ledger.settle(posted(entry.request_id))
        assert ledger.unrecorded_usage_tokens == 10 + 2**63


async def test_rows_with_a_commit_of_unknown_outcome_are_written_once(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = FailingDatabase.around(database)
    async with journaling(failing, clock, cast.epoch_id, tmp_path / "j") as ledger:
        failing.fail_after_commit, failing.fail_before_commit = 2, 1
        entries = [pending(cast.bob) for _ in range(5)]
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        await poll_until(lambda: not ledger.healthy)
        with pytest.raises(Overloaded, match="nothing was started"):
            await ledger.open(pending(cast.bob))
        await poll_until(lambda: ledger.healthy)
        await asyncio.gather(*(ledger.settle(posted(entry.request_id)) for entry in entries))
    assert [event.status for event in await all_events(database)] == ["posted"] * 5
    assert "rejected a journaled operation" not in capfd.readouterr().out, "none of them was written a second time"


async def test_an_unwritable_journal_refuses_requests_and_recovers(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.base.journal.RETRY_S", 0.01)
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        running = pending(cast.bob)
        await ledger.open(running)
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", _no_space)
            with pytest.raises(Overloaded, match="nothing was started"):
                await ledger.open(pending(cast.bob))
            assert not ledger.healthy
            await ledger.settle(posted(running.request_id))
        await poll_until(lambda: ledger.healthy)
        late = pending(cast.bob)
        await ledger.open(late)
        await ledger.settle(posted(late.request_id))
    assert {event.request_id for event in await all_events(database)} == {running.request_id, late.request_id}


def _no_space(*_arguments: Any) -> int:
    raise OSError(28, "no space left on device")


async def test_a_journaled_event_rejected_by_the_tables_is_logged_and_affects_no_other(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = pending(cast.bob), pending(cast.bob, tenant_id="nobody")
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        await asyncio.gather(ledger.open(bad), ledger.open(good))
        await ledger.settle(posted(bad.request_id))
        event = await settle(ledger, posted(good.request_id))
        assert ledger.unrecorded_usage_tokens == 15
        assert ledger.healthy
    assert await all_events(database) == [event]
    assert "the tables rejected a journaled operation" in capfd.readouterr().out


async def test_readers_can_wait_for_pending_rows(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_queue, "ROWS_PAUSE_S", 60.0)
    entries = [pending(cast.bob) for _ in range(600)]  # more than two rounds take
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j", settle_pause_s=60.0) as ledger:
        await ledger.catch_up()
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        await asyncio.gather(ledger.catch_up(), ledger.catch_up())
        assert {event.request_id for event in await all_events(database)} == {entry.request_id for entry in entries}
        await asyncio.gather(*(ledger.settle(posted(entry.request_id)) for entry in entries))


async def test_readers_wait_for_the_round_being_written_also_after_a_pause_of_the_process(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated, entry = FailingDatabase.around(database), pending(cast.bob)
    gated.gate = asyncio.Event()
    async with journaling(gated, clock, cast.epoch_id, tmp_path / "j") as ledger:
        await ledger.open(entry)
        await poll_until(lambda: gated.held == 1)
        reading = asyncio.create_task(ledger.catch_up())
        await run_iterations(1)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + 3600.0)
        await run_iterations(10)
        assert not reading.done()
        gated.gate.set()
        await reading
        assert [event.request_id for event in await all_events(database)] == [entry.request_id]


async def test_readers_do_not_wait_while_the_tables_fail(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingDatabase.around(database)
    failing.fail_before_commit = 1_000_000
    async with journaling(failing, clock, cast.epoch_id, tmp_path / "j") as ledger:
        await ledger.open(pending(cast.bob))
        await poll_until(lambda: ledger.last_error is not None)
        with monkeypatch.context() as impatient:
            impatient.setattr(asyncio, "wait", None)
            await ledger.catch_up()
        reading = asyncio.create_task(ledger.catch_up())
        await run_iterations(10)
        assert reading.done()
        await reading
        failing.fail_before_commit = 0


async def test_a_settlement_that_cannot_be_journaled_waits_for_its_rows(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = pending(cast.bob)
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        await ledger.open(entry)
        with monkeypatch.context() as full:
            full.setattr(Journal, "append", mock.AsyncMock(side_effect=OSError("disk full")))
            await ledger.settle(posted(entry.request_id))
        database.catch_up = None
        assert [event.status for event in await all_events(database)] == ["posted"]
        assert ledger.unrecorded_usage_tokens == 0


async def test_readers_wait_only_briefly_for_rows_that_cannot_be_written(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CATCH_UP_S", 0.01)
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    async with journaling(gated, clock, cast.epoch_id, tmp_path / "j") as ledger:
        good, bad = pending(cast.bob), pending(cast.bob, tenant_id="nobody")
        await asyncio.gather(ledger.open(good), ledger.open(bad))
        await ledger.catch_up()
        gated.gate.set()
        monkeypatch.setattr(writer_module, "CATCH_UP_S", 60.0)
        await ledger.catch_up()
        assert [event.request_id for event in await all_events(database)] == [good.request_id]
        await ledger.settle(voided(good.request_id))


async def test_while_a_round_hangs_nothing_is_admitted_and_the_ledger_is_unhealthy(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    async with journaling(gated, clock, cast.epoch_id, tmp_path / "j") as ledger:
        entry = pending(cast.bob)
        await ledger.open(entry)
        monkeypatch.setattr(ledger, "_open_timeout_s", 0.05)  # from here on: the disk may take longer
        await poll_until(lambda: not ledger.healthy)
        with pytest.raises(Overloaded, match="nothing was started"):
            await ledger.open(pending(cast.bob))
        gated.gate.set()
        await poll_until(lambda: ledger.healthy)
        await ledger.settle(posted(entry.request_id))
    assert [event.status for event in await all_events(database)] == ["posted"]


async def test_failures_of_the_journal_are_logged_once_a_minute_with_the_reason_until_it_works_again(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.base.journal.RETRY_S", 0.01)
    running = pending(cast.bob)
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        with monkeypatch.context() as full, structlog.testing.capture_logs() as failures:
            full.setattr(os, "pwrite", _no_space)
            for pause_s in (0.0, LOG_INTERVAL_S, 0.0):
                clock.advance(pause_s)
                for _ in range(2):
                    with pytest.raises(Overloaded):
                        await ledger.open(pending(cast.bob))
        with structlog.testing.capture_logs() as successes:
            await poll_until(lambda: ledger.healthy)
            await ledger.open(running)
            await ledger.settle(posted(running.request_id))
    assert [(line["event"], line["failures"]) for line in failures] == [("ledger_journal_failed", number) for number in (1, 3)]
    assert all("no space left on device" in line["error"] for line in failures)
    assert [(line.get("after"), line.get("failures")) for line in successes] == [("ledger_journal_failed", 6)]


async def test_a_pause_of_the_process_refuses_no_request(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, pwrite, paused_s, is_over = asyncio.get_running_loop(), os.pwrite, [0.0], Event()
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + sum(paused_s))
    monkeypatch.setattr(os, "pwrite", lambda *arguments: is_over.wait() and pwrite(*arguments))
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j", open_timeout_s=60.0) as ledger:
        entry = pending(cast.bob)
        opening = asyncio.create_task(ledger.open(entry))
        await asyncio.sleep(0)
        paused_s.append(3600.0)
        await run_iterations(5)
        is_over.set()
        await opening
        await ledger.settle(posted(entry.request_id))
    assert [event.status for event in await all_events(database)] == ["posted"]


@pytest.mark.parametrize("field", ["prompt_tokens", "reserved_tokens"])
async def test_a_count_beyond_64_bits_is_refused_before_anything_starts(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, field: str
) -> None:
    huge: dict[str, Any] = {field: 2**63}
    async with journaling(database, clock, cast.epoch_id, tmp_path / "j") as ledger:
        with pytest.raises(InternalError, match="nothing was started"):
            await ledger.open(pending(cast.bob, **huge))
        assert ledger.healthy
    assert await all_events(database) == []
