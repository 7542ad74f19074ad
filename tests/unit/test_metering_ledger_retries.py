"""What the ledger keeps after a failed round, when it retries, and what happens to the rest when it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from appliance.base.db import Database
from appliance.base.errors import Overloaded
from appliance.base.journal import Journal
from appliance.metering.ledger.round import LedgerBroken
from appliance.metering.ledger.writer import RETRY_S_MAX, RETRY_S_MIN
from tests.support.cast import Cast
from tests.support.clock import FakeClock
from tests.support.factories import pending, posted
from tests.support.ledgers import FailingDatabase, all_events, running_ledger, utc_ledger
from tests.support.polling import poll_until

pytestmark = pytest.mark.on_either_database


async def test_retry_delays_grow_to_a_bound_and_end_after_a_success(
    database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, pauses_s = asyncio.sleep, list[float]()

    async def hurried(delay_s: float) -> None:
        if delay_s >= RETRY_S_MIN:
            pauses_s.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", hurried)
    failing, entries = FailingDatabase.around(database), [pending(cast.bob) for _ in range(3)]
    growing_s = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, RETRY_S_MAX, RETRY_S_MAX]
    async with running_ledger(failing, clock, cast.epoch_id) as ledger:
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        for entry, failures in zip(entries, (len(growing_s), 0, 1), strict=True):
            failing.fail_before_commit = failures
            await ledger.settle(posted(entry.request_id))
    assert pauses_s == [*growing_s, RETRY_S_MIN]


async def test_after_a_failed_round_the_first_of_several_settlements_still_counts(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    failing, entry = FailingDatabase.around(database), pending(cast.bob)
    async with running_ledger(failing, clock, cast.epoch_id, settle_pause_s=60.0) as ledger:
        await ledger.open(entry)
        settling = [asyncio.create_task(ledger.settle(posted(entry.request_id, completion=count))) for count in (5, 6, 7)]
        await poll_until(lambda: len(ledger._queue) == 3)
        failing.fail_before_commit = 1
        await ledger.stop()
        results = await asyncio.gather(*settling, return_exceptions=True)
    assert failing.fail_before_commit == 0
    assert [type(each) for each in results] == [type(None), LedgerBroken, LedgerBroken]
    assert [event.completion_tokens for event in await all_events(database)] == [5]


async def test_unwritten_settlements_of_a_timed_out_stop_are_counted_once_and_not_written_later(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    gated, entries = FailingDatabase.around(database), [pending(cast.bob) for _ in range(2)]
    ledger = utc_ledger(gated, clock, cast.epoch_id)
    await ledger.stop()  # nothing has begun, so nothing is left
    await ledger.start()
    await asyncio.gather(*(ledger.open(entry) for entry in entries))
    gated.gate = asyncio.Event()
    settling = []
    for entry in entries:  # one in a round that hangs, and one that waits for its turn
        settling.append(asyncio.create_task(ledger.settle(posted(entry.request_id))))
        await poll_until(lambda: gated.held == 1)
    await poll_until(lambda: len(ledger._queue) == 1)
    with pytest.raises(LedgerBroken, match="2 operations unwritten"):
        await ledger.stop(timeout_s=0.05)
    gated.gate.set()
    assert not any(task.get_name() == "ledger" for task in asyncio.all_tasks())
    await ledger.stop()
    assert [type(result) for result in await asyncio.gather(*settling, return_exceptions=True)] == [LedgerBroken] * 2
    assert (ledger.healthy, ledger.unrecorded_usage_tokens) == (False, 2 * 15)
    assert [event.status for event in await all_events(database)] == ["pending"] * 2


async def test_the_unwritten_void_of_a_hanging_open_counts_no_tokens(database: Database, clock: FakeClock, cast: Cast) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    ledger = utc_ledger(gated, clock, cast.epoch_id, open_timeout_s=0.05)
    await ledger.start()
    with pytest.raises(Overloaded, match="nothing was started"):
        await ledger.open(pending(cast.bob))
    with pytest.raises(LedgerBroken, match="unwritten"):
        await ledger.stop(timeout_s=0.05)
    assert (ledger.unrecorded_usage_tokens, await all_events(database)) == (0, [])


async def test_callers_get_an_error_when_the_writer_ends_unexpectedly(
    database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = utc_ledger(database, clock, cast.epoch_id)
    await ledger.start()
    monkeypatch.setattr(ledger._queue, "take", None)
    waiting = [ledger.open(pending(cast.bob)), ledger.open(pending(cast.bob)), ledger.settle(posted("req_any"))]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in results] == [LedgerBroken] * 3
    assert ledger.unrecorded_usage_tokens == 15
    await ledger.stop()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_on_recorded_is_called_when_only_the_next_start_will_write_the_rows(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    failing, recorded = FailingDatabase.around(database), list[str]()
    journal = Journal(tmp_path / "j")
    ledger = utc_ledger(failing, clock, cast.epoch_id, journal=journal)
    await ledger.start()
    entry = pending(cast.bob)
    await ledger.open(entry)
    failing.fail_before_commit = 1_000_000
    await ledger.settle(posted(entry.request_id), lambda: recorded.append("not by this process"))
    with pytest.raises(LedgerBroken, match="unwritten"):
        await ledger.stop(timeout_s=0.05)
    assert (recorded, ledger.unrecorded_usage_tokens) == (["not by this process"], 0)
    await journal.close()
