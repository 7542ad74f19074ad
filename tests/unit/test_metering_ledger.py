"""The ledger: durable before it acknowledges, settled once, in groups, and errors are reported."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest
import structlog
from sqlalchemy import Connection, Update, false, text
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, OperationalError, ProgrammingError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from appliance.base.db import Database
from appliance.base.errors import InternalError, Overloaded
from appliance.base.money import PRICE_MICROS_MAX
from appliance.base.prepared import Prepared
from appliance.metering.ledger import rows as ledger_rows
from appliance.metering.ledger.records import RequestRecord, Settlement, Usage
from appliance.metering.ledger.round import LedgerBroken, Round, is_bad_row
from appliance.metering.ledger.writer import RETRY_S_MIN
from appliance.metering.past_requests import PastRequests
from appliance.metering.prices import Price, PriceBook
from tests.support import factories
from tests.support.case_ids import case_id
from tests.support.cast import OWNER, Cast, make_cast
from tests.support.clock import FakeClock
from tests.support.databases import Cluster
from tests.support.factories import pending, posted, voided
from tests.support.ledgers import FailingDatabase, all_events, running_ledger, settle, utc_ledger
from tests.support.polling import poll_until


@pytest.fixture
async def price(database: Database, clock: FakeClock) -> Price:
    """A price in the table: 1 and 0.1 and 3 units per million tokens."""
    return await PriceBook(database, clock, currency="USD").add(
        model="demo", currency="USD", prompt=1_000_000, cached_prompt=100_000, completion=3_000_000
    )


async def test_a_request_is_pending_at_zero_cost_once_open_returns(database: Database, clock: FakeClock, cast: Cast) -> None:
    entry = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        (event,) = await all_events(database)
        await ledger.settle(voided(entry.request_id))
    assert (event.request_id, event.status, event.reserved_tokens) == (entry.request_id, "pending", 266)
    assert (event.prompt_tokens, event.completion_tokens, event.cost_picos, event.settled_at) == (0, 0, 0, None)


async def test_a_settled_request_costs_its_tokens_at_the_price_of_its_admission(
    database: Database, clock: FakeClock, cast: Cast, price: Price
) -> None:
    entry = pending(cast.bob, price=price)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        clock.advance(2)
        event = await settle(ledger, posted(entry.request_id, prompt=100, cached=60, completion=7))
    assert event.cost_picos == 40 * 1_000_000 + 60 * 100_000 + 7 * 3_000_000
    assert (event.status, event.finish_reason, event.currency, event.estimated) == ("posted", "stop", "USD", False)
    assert event.settled_at == clock.now()
    assert await all_events(database) == [event]


async def test_the_requests_row_is_finished_in_the_same_transaction(database: Database, clock: FakeClock, cast: Cast) -> None:
    entry = pending(cast.bob)
    record = RequestRecord(
        queue_s=0.5,
        ttft_s=1.25,
        inter_token_p50_s=0.02,
        decode_s=2.0,
        kv_blocks=3,
        error="a\x00b" * 400,
        tenant_open=12,
        admission_wait_s=3.25,
        awaited_limit="tenant_tokens",
        batch_size_mean=63.5,
    )
    settlement = msgspec.structs.replace(posted(entry.request_id, completion=5), record=record)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        await ledger.settle(settlement)
    row = await PastRequests(database).get(entry.request_id, access=OWNER)
    assert (row.queue_s, row.ttft_s, row.decode_s, row.kv_blocks, row.completion_tokens) == (0.5, 1.25, 2.0, 3, 5)
    assert (row.tokens_per_second, row.tenant_open) == (2.0, 12)
    assert (row.admission_wait_s, row.awaited_limit, row.batch_size_mean) == (3.25, "tenant_tokens", 63.5)
    assert row.error == ("ab" * 400)[:500]
    assert row.finished_at == clock.now()


async def test_settling_twice_with_the_same_figures_returns_the_same_event(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    entry = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        settlement = posted(entry.request_id)
        together = await asyncio.gather(settle(ledger, settlement), settle(ledger, settlement))
        clock.advance(5)
        again = await settle(ledger, settlement)
        assert ledger.unrecorded_usage_tokens == 0
    assert together[0] == together[1] == again
    assert len(await all_events(database)) == 1


async def test_settlements_are_batched_and_an_open_waits_for_none(database: Database, clock: FakeClock, cast: Cast) -> None:
    counting = FailingDatabase.around(database)
    entries = [pending(cast.bob) for _ in range(4)]
    async with running_ledger(counting, clock, cast.epoch_id, settle_pause_s=60.0) as ledger:
        await asyncio.gather(*(ledger.open(entry) for entry in entries[:3]))
        first = asyncio.create_task(ledger.settle(posted(entries[0].request_id)))
        await asyncio.sleep(0)
        before = counting.commits
        await ledger.open(entries[3])
        assert counting.commits == before + 1
        assert not first.done()
        others = [asyncio.create_task(ledger.settle(posted(entry.request_id))) for entry in entries[1:]]
        await asyncio.sleep(0)
        await ledger.stop()
        assert counting.commits == before + 2, "stopping waits for no pause"
    await asyncio.gather(first, *others)
    assert {event.status for event in await all_events(database)} == {"posted"}


async def test_settling_with_other_figures_raises(database: Database, clock: FakeClock, cast: Cast) -> None:
    entry = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        first = await settle(ledger, posted(entry.request_id, completion=5))
        more, recorded = posted(entry.request_id, completion=6), []
        same = msgspec.structs.replace(posted(entry.request_id, completion=5), finish_reason="disconnected")
        for other in (more, voided(entry.request_id), same):
            with pytest.raises(LedgerBroken, match="other figures"):
                await ledger.settle(other, lambda: recorded.append("refused"))
        assert len(recorded) == 3
        assert ledger.healthy
        assert ledger.unrecorded_usage_tokens == 16 + 15
    assert await all_events(database) == [first]


async def test_the_first_of_several_settlements_in_one_round_counts_and_different_ones_raise(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    gated, entry = FailingDatabase.around(database), pending(cast.bob)
    async with running_ledger(gated, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        gated.gate = asyncio.Event()
        blocking = asyncio.create_task(ledger.open(pending(cast.charlie)))
        await poll_until(lambda: gated.held == 1)
        settling = [asyncio.create_task(ledger.settle(posted(entry.request_id, completion=tokens))) for tokens in (5, 6, 5)]
        await poll_until(lambda: len(ledger._queue) == 3)
        gated.gate.set()
        answers = await asyncio.gather(*settling, return_exceptions=True)
        await blocking
        assert [type(answer) for answer in answers] == [type(None), LedgerBroken, type(None)]
        assert ledger.unrecorded_usage_tokens == 10 + 6
    events = {event.request_id: event for event in await all_events(database)}
    assert (events[entry.request_id].completion_tokens, gated.commits) == (5, 3)


async def test_the_first_void_decides_the_reason(database: Database, clock: FakeClock, cast: Cast) -> None:
    entry = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        first = await settle(ledger, voided(entry.request_id))
        await ledger.settle(msgspec.structs.replace(voided(entry.request_id), finish_reason="disconnected"))
    assert await all_events(database) == [first]


def test_a_cost_that_does_not_fit_its_column_raises() -> None:
    rate = dataclasses.replace(factories.price(), prompt=PRICE_MICROS_MAX).rate("standard")
    most = ledger_rows.COST_PICOS_MAX // PRICE_MICROS_MAX
    assert ledger_rows.cost_of(rate, Usage(prompt_tokens=most)) == most * PRICE_MICROS_MAX
    with pytest.raises(OverflowError, match="64 bits"):
        ledger_rows.cost_of(rate, Usage(prompt_tokens=most + 1))


async def test_an_entry_settled_by_another_writer_meanwhile_is_not_settled_twice(
    database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        settle = ledger_rows.SETTLE_EVENTS.statement
        assert isinstance(settle, Update)
        monkeypatch.setattr(ledger_rows, "SETTLE_EVENTS", Prepared(settle.where(false())))
        with pytest.raises(LedgerBroken, match="second writer"):
            await ledger.settle(posted(entry.request_id))
        assert ledger.unrecorded_usage_tokens == 15
    assert [event.status for event in await all_events(database)] == ["pending"]
    assert (await PastRequests(database).get(entry.request_id, access=OWNER)).finished_at is None


async def test_settling_an_unknown_request_raises(database: Database, clock: FakeClock, cast: Cast) -> None:
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        with pytest.raises(LedgerBroken, match="no event"):
            await ledger.settle(posted("req_unknown"))
        assert ledger.unrecorded_usage_tokens == 15


async def test_many_requests_are_committed_in_few_rounds(database: Database, clock: FakeClock, cast: Cast) -> None:
    counting = FailingDatabase.around(database)
    entries = [pending(cast.bob) for _ in range(200)]
    async with running_ledger(counting, clock, cast.epoch_id) as ledger:
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        assert counting.commits <= 3
        await asyncio.gather(*(ledger.settle(posted(entry.request_id)) for entry in entries))
        assert counting.commits <= 6
    events = await all_events(database)
    assert [event.request_id for event in events] == [entry.request_id for entry in entries]
    assert {event.status for event in events} == {"posted"}


async def test_a_bad_row_fails_alone(database: Database, clock: FakeClock, cast: Cast) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    good, bad = pending(cast.bob), pending(cast.bob, tenant_id="nobody")
    async with running_ledger(gated, clock, cast.epoch_id) as ledger:
        tasks = [asyncio.create_task(ledger.open(entry)) for entry in (good, bad, msgspec.structs.replace(good, model="twin"))]
        await asyncio.sleep(0)
        gated.gate.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert ledger.healthy
        event = await settle(ledger, posted(good.request_id))
    assert answers[0] is None
    assert isinstance(answers[1], InternalError)
    assert isinstance(answers[2], InternalError)
    assert event.model == "demo", "settled as what was written, not as what was refused"
    assert await all_events(database) == [event]


async def test_a_failed_commit_refuses_the_request_and_leaves_no_entry(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    failing = FailingDatabase.around(database)
    failing.fail_before_commit = 1
    async with running_ledger(failing, clock, cast.epoch_id) as ledger:
        with pytest.raises(Overloaded, match="nothing was started") as caught:
            await ledger.open(pending(cast.bob))
        assert caught.value.retry_after_s is not None
        assert not ledger.healthy
        assert "disk full" in str(ledger.last_error)
        await poll_until(lambda: ledger.healthy)
    assert await all_events(database) == []


async def test_an_entry_with_a_commit_of_unknown_outcome_does_not_stay_pending(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    failing = FailingDatabase.around(database)
    failing.fail_after_commit = 1
    async with running_ledger(failing, clock, cast.epoch_id) as ledger:
        with pytest.raises(Overloaded):
            await ledger.open(pending(cast.bob))
        await poll_until(lambda: ledger.healthy)
    (event,) = await all_events(database)
    assert (event.status, event.cost_picos) == ("voided", 0)


async def test_rounds_that_fail_again_and_again_are_logged_once_with_their_number_at_the_end(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    failing = FailingDatabase.around(database)
    entry = pending(cast.bob)
    with structlog.testing.capture_logs() as logs:
        async with running_ledger(failing, clock, cast.epoch_id) as ledger:
            await ledger.open(entry)
            failing.fail_before_commit = 3
            await ledger.settle(posted(entry.request_id))
            await poll_until(lambda: failing.fail_before_commit == 0 and ledger.healthy)
    assert [(line["event"], line.get("after"), line.get("retry_s"), line["failures"]) for line in logs] == [
        ("ledger_round_failed", None, RETRY_S_MIN, 1),
        ("works again", "ledger_round_failed", None, 3),
    ]


@pytest.mark.parametrize("where", ["fail_before_commit", "fail_after_commit"])
async def test_a_settlement_is_retried_until_it_is_written(
    database: Database, clock: FakeClock, cast: Cast, price: Price, where: str
) -> None:
    failing = FailingDatabase.around(database)
    entry = pending(cast.bob, price=price)
    async with running_ledger(failing, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        setattr(failing, where, 3)
        settling = asyncio.create_task(ledger.settle(posted(entry.request_id)))
        await poll_until(lambda: not ledger.healthy)
        await settling
        assert ledger.healthy
        assert ledger.unrecorded_usage_tokens == 0
    (event,) = await all_events(database)
    assert (event.status, event.cost_picos) == ("posted", 10 * 1_000_000 + 5 * 3_000_000)


async def test_a_cancelled_caller_does_not_stop_the_settlement(database: Database, clock: FakeClock, cast: Cast) -> None:
    gated = FailingDatabase.around(database)
    entry = pending(cast.bob)
    async with running_ledger(gated, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        gated.gate = asyncio.Event()
        settling = asyncio.create_task(ledger.settle(posted(entry.request_id)))
        await poll_until(lambda: gated.held == 1)
        settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling
        gated.gate.set()
    assert [event.status for event in await all_events(database)] == ["posted"]


@pytest.mark.parametrize(
    "error",
    [OperationalError("COMMIT", {}, Exception()), PoolTimeout("no connection is free"), OSError("no route to host")],
    ids=case_id,
)
async def test_a_round_that_fails_on_the_database_is_written_later(
    database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write, entry, failures = Round.write, pending(cast.bob), [error]

    async def failing(work: Round) -> None:
        if failures:
            raise failures.pop()
        await write(work)

    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        monkeypatch.setattr(Round, "write", failing)
        await ledger.settle(posted(entry.request_id))
        assert failures == []
        assert ledger.healthy
    assert [event.status for event in await all_events(database)] == ["posted"]


async def test_a_caller_cancelled_before_its_settlement_is_rejected_does_not_stop_the_writer(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    async with running_ledger(gated, clock, cast.epoch_id) as ledger:
        settling = asyncio.create_task(ledger.settle(posted("never opened")))
        await poll_until(lambda: gated.held == 1)
        settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling
        gated.gate.set()
        entry = pending(cast.bob)
        await ledger.open(entry)
        await ledger.settle(posted(entry.request_id))
        assert ledger.healthy
    assert [event.status for event in await all_events(database)] == ["posted"]


async def test_on_recorded_is_called_exactly_once_whatever_the_outcome(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    gated = FailingDatabase.around(database)
    entry = pending(cast.bob)
    recorded: list[str] = []
    async with running_ledger(gated, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        gated.gate = asyncio.Event()
        settling = asyncio.create_task(ledger.settle(posted(entry.request_id), lambda: recorded.append("written")))
        await poll_until(lambda: gated.held == 1)
        assert recorded == [], "the rows are not there yet"
        gated.gate.set()
        await settling
        assert recorded == ["written"]
        with pytest.raises(LedgerBroken):
            await ledger.settle(posted(entry.request_id, completion=99), lambda: recorded.append("refused"))
        assert recorded == ["written", "refused"]
        await ledger.settle(posted(entry.request_id), lambda: recorded.append("already written"))
    assert recorded == ["written", "refused", "already written"]


async def test_settled_and_voided_entries_are_not_kept_in_memory(database: Database, clock: FakeClock, cast: Cast) -> None:
    entries = [pending(cast.bob) for _ in range(4)]
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        assert len(ledger._opened) == 4
        await asyncio.gather(*(ledger.settle(posted(entry.request_id)) for entry in entries[:2]))
        await ledger.settle(voided(entries[2].request_id))
        assert list(ledger._opened) == [entries[3].request_id]
        with pytest.raises(LedgerBroken):
            await ledger.settle(posted(entries[0].request_id, completion=99))
        assert list(ledger._opened) == [entries[3].request_id]


_OF_TABLES_AWAY, _OF_ANOTHER_FAULT = Exception(), Exception()
_OF_TABLES_AWAY.sqlstate, _OF_ANOTHER_FAULT.sqlstate = "42P01", "42601"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "is_bad"),
    [
        (IntegrityError("INSERT", {}, Exception()), True),
        (DataError("INSERT", {}, Exception()), True),
        (ProgrammingError("INSERT", {}, Exception()), True),
        (ProgrammingError("INSERT", {}, _OF_ANOTHER_FAULT), True),
        (StatementError("a value that no column takes", "INSERT", {}, None), True),
        (ValueError("a text with NUL"), True),
        (OverflowError("a count of more than 64 bits"), True),
        (LedgerBroken("settled differently"), True),
        (ProgrammingError("INSERT", {}, _OF_TABLES_AWAY), False),
        (OperationalError("COMMIT", {}, Exception()), False),
        (InterfaceError("COMMIT", {}, Exception()), False),
        (OSError("disk full"), False),
    ],
    ids=case_id,
)
def test_errors_are_attributed_to_the_row_or_to_the_database(error: Exception, is_bad: bool) -> None:
    assert is_bad_row(error) == is_bad


@pytest.mark.parametrize("written_before", [False, True])
async def test_a_cancelled_open_leaves_nothing_pending(
    database: Database, clock: FakeClock, cast: Cast, written_before: bool
) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    async with running_ledger(gated, clock, cast.epoch_id) as ledger:
        opening = asyncio.create_task(ledger.open(pending(cast.bob)))
        await asyncio.sleep(0)
        if written_before:
            await poll_until(lambda: gated.held == 1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        gated.gate.set()
    assert all(event.status == "voided" for event in await all_events(database))


async def test_opens_cancelled_after_a_round_took_them_are_all_voided(database: Database, clock: FakeClock, cast: Cast) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    async with running_ledger(gated, clock, cast.epoch_id) as ledger:
        opening = [asyncio.create_task(ledger.open(pending(cast.bob))) for _ in range(3)]
        await poll_until(lambda: gated.held == 1)
        for task in opening:
            task.cancel()
        await asyncio.wait(opening)
        gated.gate.set()
    events = await all_events(database)
    assert [(event.status, event.finish_reason) for event in events] == [("voided", "refused")] * 3
    assert len({event.posting for event in events}) == 3


async def test_a_cancelled_open_is_not_written_after_its_void(database: Database, clock: FakeClock, cast: Cast) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    async with running_ledger(gated, clock, cast.epoch_id, settle_pause_s=0.0) as ledger:
        first = asyncio.create_task(ledger.open(pending(cast.bob)))
        await poll_until(lambda: gated.held == 1)
        opening = asyncio.create_task(ledger.open(pending(cast.bob)))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        gated.gate.set()  # after opens it is the turn of the rest, and so of the void
        await first
    assert len(await all_events(database)) == 1


@pytest.mark.parametrize("written_before", [False, True])
async def test_an_open_that_times_out_is_refused_and_leaves_nothing_pending(
    database: Database, clock: FakeClock, cast: Cast, written_before: bool
) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    ledger = utc_ledger(gated, clock, cast.epoch_id, open_timeout_s=0.05)
    await ledger.start()
    if not written_before:
        blocking = asyncio.create_task(ledger.settle(voided("another")))
        await poll_until(lambda: gated.held == 1)
    with pytest.raises(Overloaded, match="nothing was started"):
        await ledger.open(pending(cast.bob))
    gated.gate.set()
    await ledger.stop()
    if not written_before:
        with pytest.raises(LedgerBroken):
            await blocking
    assert all(event.status == "voided" for event in await all_events(database))


async def test_the_queue_of_opens_is_bounded(database: Database, clock: FakeClock, cast: Cast) -> None:
    gated = FailingDatabase.around(database)
    gated.gate = asyncio.Event()
    ledger = utc_ledger(gated, clock, cast.epoch_id, queued_opens_max=2)
    await ledger.start()
    opening = [asyncio.create_task(ledger.open(pending(cast.bob)))]
    await poll_until(lambda: gated.held == 1)
    opening += [asyncio.create_task(ledger.open(pending(cast.bob))) for _ in range(3)]
    _done, _waiting = await asyncio.wait(opening, return_when=asyncio.FIRST_EXCEPTION)
    with pytest.raises(Overloaded):
        await opening[-1]
    gated.gate.set()
    await asyncio.gather(*opening[:-1])
    await ledger.stop()
    assert len(await all_events(database)) == 3


async def test_the_latest_checkpoint_of_each_request_is_written(database: Database, clock: FakeClock, cast: Cast) -> None:
    entry, other = pending(cast.bob), pending(cast.charlie)
    async with running_ledger(database, clock, cast.epoch_id, checkpoint_interval_s=1.0) as ledger:
        await asyncio.gather(ledger.open(entry), ledger.open(other))
        for tokens in (1, 2):
            ledger.checkpoint({entry.request_id: Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=tokens)})
    events = {event.request_id: event for event in await all_events(database)}
    written = events[entry.request_id]
    assert (written.prompt_tokens, written.cached_tokens, written.completion_tokens) == (10, 4, 2)
    assert (written.status, written.cost_picos) == ("pending", 0)
    assert events[other.request_id].completion_tokens == 0


async def test_after_a_failed_checkpoint_the_ledger_is_unhealthy_until_a_write_succeeds(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    entry = pending(cast.bob)
    failing = FailingDatabase.around(database)
    async with running_ledger(failing, clock, cast.epoch_id, checkpoint_interval_s=60.0) as ledger:
        await ledger.open(entry)
        failing.fail_before_commit = 1
        ledger.checkpoint({entry.request_id: Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=1)})
        await poll_until(lambda: not ledger.healthy)
        await asyncio.sleep(3 * RETRY_S_MIN)
        assert not ledger.healthy
        clock.advance(60)
        await poll_until(lambda: ledger.healthy)
    assert [event.completion_tokens for event in await all_events(database)] == [1]


async def test_a_bad_checkpoint_affects_no_other_and_no_settlement(database: Database, clock: FakeClock, cast: Cast) -> None:
    gated, entries = FailingDatabase.around(database), [pending(cast.bob) for _ in range(4)]
    counts = dict(zip(sorted(entry.request_id for entry in entries), (1, 2**70, 2, 0), strict=True))
    settled = max(counts)
    async with running_ledger(gated, clock, cast.epoch_id) as ledger:
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        gated.gate = asyncio.Event()
        blocking = asyncio.create_task(ledger.open(pending(cast.charlie)))
        await poll_until(lambda: gated.held == 1)
        ledger.checkpoint(
            {
                request_id: Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=count)
                for request_id, count in counts.items()
                if count
            }
        )
        settling = asyncio.create_task(ledger.settle(posted(settled)))
        gated.gate.set()
        await asyncio.gather(blocking, settling)
        await poll_until(lambda: ledger._queue.is_empty)
        assert ledger.healthy
    events = {event.request_id: event for event in await all_events(database)}
    assert [events[request_id].completion_tokens for request_id in sorted(counts)] == [1, 0, 2, 5]
    assert events[settled].status == "posted"


async def test_a_database_failure_while_operations_are_written_one_by_one_loses_none(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    failing, entries = FailingDatabase.around(database), [pending(cast.bob) for _ in range(3)]
    async with running_ledger(failing, clock, cast.epoch_id) as ledger:
        await asyncio.gather(*(ledger.open(entry) for entry in entries))
        failing.gate = asyncio.Event()
        blocking = asyncio.create_task(ledger.open(pending(cast.charlie)))
        await poll_until(lambda: failing.held == 1)
        settling = [asyncio.create_task(ledger.settle(posted(entry.request_id))) for entry in entries[1:]]
        settling.append(asyncio.create_task(ledger.settle(posted(entries[0].request_id, completion=2**70))))
        await poll_until(lambda: len(ledger._queue) == 3)
        failing.gate.set()
        failing.gate = None
        await blocking
        failing.fail_before_commit = 1  # meets the first settlement that is tried alone
        answers = await asyncio.gather(*settling, return_exceptions=True)
        assert failing.fail_before_commit == 0
        assert ledger.unrecorded_usage_tokens == 10 + 2**70
    assert [type(answer) for answer in answers] == [type(None), type(None), LedgerBroken]
    events = {event.request_id: event.status for event in await all_events(database)}
    assert [events[entry.request_id] for entry in entries] == ["pending", "posted", "posted"]


async def test_a_late_checkpoint_does_not_touch_a_settled_event(database: Database, clock: FakeClock, cast: Cast) -> None:
    entry = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        event = await settle(ledger, posted(entry.request_id))
        ledger.checkpoint({entry.request_id: Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)})
    assert await all_events(database) == [event]


async def test_stopping_writes_what_is_queued(database: Database, clock: FakeClock, cast: Cast) -> None:
    gated = FailingDatabase.around(database)
    entry = pending(cast.bob)
    ledger = utc_ledger(gated, clock, cast.epoch_id)
    await ledger.start()
    await ledger.open(entry)
    gated.gate = asyncio.Event()
    settling = asyncio.create_task(ledger.settle(posted(entry.request_id)))
    await poll_until(lambda: gated.held == 1)
    stopping = asyncio.create_task(ledger.stop())
    await asyncio.sleep(0)
    gated.gate.set()
    await stopping
    await settling
    assert [event.status for event in await all_events(database)] == ["posted"]
    with pytest.raises(InternalError, match="not running"):
        await ledger.open(pending(cast.bob))


async def test_stopping_a_ledger_that_cannot_write_raises(database: Database, clock: FakeClock, cast: Cast) -> None:
    failing = FailingDatabase.around(database)
    entry = pending(cast.bob)
    ledger = utc_ledger(failing, clock, cast.epoch_id)
    await ledger.start()
    await ledger.open(entry)
    failing.fail_before_commit = 10**6
    settling = asyncio.create_task(ledger.settle(posted(entry.request_id)))
    await poll_until(lambda: not ledger.healthy)
    with pytest.raises(LedgerBroken, match="1 operations unwritten"):
        await ledger.stop(timeout_s=0.1)
    with pytest.raises(LedgerBroken):
        await settling
    assert ledger.unrecorded_usage_tokens == 15


async def test_a_writer_ended_by_an_unexpected_error_is_unhealthy_and_refuses(
    database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = utc_ledger(database, clock, cast.epoch_id)
    await ledger.start()

    def bug(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(ledger._queue, "take", bug)
    with pytest.raises(LedgerBroken, match="a bug"):
        await ledger.open(pending(cast.bob))
    assert not ledger.healthy
    with pytest.raises(LedgerBroken):
        await ledger.settle(posted("req_any"))
    assert ledger.unrecorded_usage_tokens == 15
    await ledger.stop()


def test_a_voided_request_cannot_have_usage() -> None:
    with pytest.raises(ValueError, match="no usage"):
        Settlement(request_id="req", status="voided", finish_reason="refused", usage=Usage(prompt_tokens=1))


@pytest.mark.postgres
async def test_postgresql_finds_pending_events_by_index_however_few_there_were_at_first(
    postgresql: Cluster, clock: FakeClock
) -> None:
    url = postgresql.acquire()
    database = Database.open(url)
    cast = await make_cast(database, clock)

    def checkpoint_often(connection: Connection) -> int:
        events = [pending(cast.bob) for _ in range(5)]
        new = [ledger_rows.event_row(event, cast.epoch_id, "EUR", clock.now().date()) for event in events]
        ledger_rows.insert(connection, events, new)
        parameters = [ledger_rows.checkpoint_parameters(event.request_id, Usage(prompt_tokens=1)) for event in events]
        for _ in range(10):  # the driver prepares the statement, and then the server keeps one plan for it
            ledger_rows.WRITE_CHECKPOINTS.execute(connection, parameters)
        scans = text("SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = 'usage_events'")
        return int(connection.execute(scans).scalar_one())

    assert await database.batch_write(checkpoint_often) == 0
    await database.close()
    postgresql.release(url)
