"""First requests of owners of limits since the start: one read loads the owners of all requests that arrive together, and a
failed or abandoned read has no effect."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy.dialects import sqlite

from appliance.base.db import Database
from appliance.base.errors import InternalError
from appliance.base.journal import Journal
from appliance.metering.ledger import writer
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits import ledger_sums
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.allowance_loader import OWNERS_PER_READ, AllowanceLoader
from appliance.metering.limits.allowances import Allowance
from appliance.metering.limits.ledger_sums import RECENT_EVENTS_MAX, Span, billed_query, events_query
from appliance.metering.limits.owners import ALL_TENANTS, Owner
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.saved_levels import LevelSaver
from appliance.metering.limits.sums import PeriodSums
from appliance.metering.limits.windows import Moment
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal
from tests.support.cast import Cast
from tests.support.clock import START, FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import adjustment, admission_request, pending, posted, principal, voided
from tests.support.ledgers import FailingDatabase, euro_prices, num_running, utc_admission, utc_ledger, utc_sums
from tests.support.query_plans import query_plan
from tests.support.sql_statements import record_statements

STATEMENTS_MAX = 5
"""Statements of one read: levels, daily sums, the last posting, events; on PostgreSQL first SET TRANSACTION READ ONLY."""
LIMITED = Limits(tokens_per_minute=1000, requests_per_minute=10)


class SlowSums(EmptySums):
    """A ledger whose reads wait for `go_on`. `broken` are the owners that cannot be read."""

    def __init__(self) -> None:
        self.reads: list[list[Owner]] = []
        self.broken: set[Owner] = set()
        self.go_on = asyncio.Event()

    async def read(
        self, currencies: Mapping[Owner, str], at: Moment, ended: Callable[[], Collection[str]]
    ) -> dict[Owner, PeriodSums]:
        """Return empty sums once `go_on` is set."""
        self.reads.append(list(currencies))
        await self.go_on.wait()
        if self.broken & set(currencies):
            raise OSError("the disk is away")
        return await super().read(currencies, at, ended)


@pytest.fixture
def slow() -> SlowSums:
    return SlowSums()


@pytest.fixture
async def admission(clock: FakeClock, slow: SlowSums) -> AsyncIterator[Admission]:
    opened = utc_admission(clock, slow)
    yield opened
    slow.go_on.set()
    await opened.stop()
    loader = opened._loader
    assert (loader._task, list(loader._queued), loader._loading, loader._corrections) == (None, [], {}, [])


def request_of(who: Principal, policy: ModelPolicy | None = None, tokens: int = 10) -> AdmissionRequest:
    return admission_request(who, tokens, policy=policy)


def everywhere(who: Principal) -> AdmissionRequest:
    """Return a request to which limits of every kind of owner apply."""
    both = {"limits": LIMITED, "model_limits": {"demo": LIMITED}}
    limited = Principal(tenant=dataclasses.replace(who.tenant, **both), key=dataclasses.replace(who.key, **both))  # type: ignore[arg-type]
    return request_of(limited, ModelPolicy(model="demo", limits=LIMITED, limit_mode="enforce", updated_at=START))


def key_of(who: Principal, name: str) -> Principal:
    """Return another key of the same tenant."""
    return dataclasses.replace(who, key=dataclasses.replace(who.key, id=name))


async def begin(admission: Admission, *requests: AdmissionRequest) -> list[asyncio.Task[Reservation]]:
    """Start these requests and let them run until they wait."""
    tasks = [asyncio.create_task(admission.admit(request)) for request in requests]
    await turns()
    return tasks


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_all_owners_of_a_request_are_loaded_by_one_read(admission: Admission, slow: SlowSums) -> None:
    (first,) = await begin(admission, everywhere(principal()))
    slow.go_on.set()
    await first
    assert [[(owner.scope, owner.model) for owner in read] for read in slow.reads] == [
        [("tenant", None), ("key", None), ("model", "demo"), ("tenant", "demo"), ("key", "demo")]
    ]


async def test_requests_arriving_during_a_read_share_the_next_read(admission: Admission, slow: SlowSums) -> None:
    bob = principal()
    tasks = await begin(admission, *(request_of(key_of(bob, f"key {number}")) for number in range(20)))
    slow.go_on.set()
    await asyncio.gather(*tasks)
    assert [len(read) for read in slow.reads] == [21]

    slow.go_on.clear()
    first = await begin(admission, request_of(principal()))
    others = await begin(admission, *(request_of(principal()) for _ in range(3)))
    slow.go_on.set()
    await asyncio.gather(*first, *others)
    assert [len(read) for read in slow.reads] == [21, 2, 6]


async def test_one_read_runs_at_a_time(admission: Admission, slow: SlowSums) -> None:
    first = await begin(admission, request_of(principal()))
    others = [*await begin(admission, request_of(principal())), *await begin(admission, request_of(principal()))]
    assert [len(read) for read in slow.reads] == [2]
    slow.go_on.set()
    await asyncio.gather(*first, *others)
    assert [len(read) for read in slow.reads] == [2, 4]


async def test_a_correction_during_a_read_is_applied_only_to_that_read(admission: Admission, slow: SlowSums) -> None:
    bob, charlie = principal(), principal(Limits(tokens_per_day=100))
    (first,) = await begin(admission, request_of(bob))
    admission.correct(adjustment(charlie, completion_tokens=50))
    slow.go_on.set()
    await first
    assert (await admission.admit(request_of(charlie, tokens=100))).reserved_tokens == 100


async def test_a_read_is_bounded(admission: Admission, slow: SlowSums) -> None:
    tasks = await begin(admission, *(request_of(principal()) for _ in range(OWNERS_PER_READ)))
    slow.go_on.set()
    await asyncio.gather(*tasks)
    assert [len(read) for read in slow.reads] == [OWNERS_PER_READ] * 2


async def test_a_request_with_loaded_owners_does_not_wait(admission: Admission, slow: SlowSums) -> None:
    bob, charlie = principal(), principal()
    slow.go_on.set()
    await admission.admit(request_of(bob))
    slow.go_on.clear()
    await begin(admission, request_of(charlie))
    assert (await begin(admission, request_of(bob)))[0].done()


async def test_a_failed_read_admits_nothing_and_the_next_request_retries_it(admission: Admission, slow: SlowSums) -> None:
    bob = principal(Limits(concurrent_requests=1))
    slow.broken = {Owner("tenant", bob.tenant.id)}
    slow.go_on.set()
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            await admission.admit(request_of(bob))
    slow.broken.clear()
    await admission.admit(request_of(bob))


async def test_an_owner_that_cannot_be_read_does_not_affect_others(admission: Admission, slow: SlowSums) -> None:
    bob, charlie = principal(), principal()
    first = await begin(admission, request_of(principal()))
    slow.broken = {Owner("key", bob.key.id)}
    tasks = await begin(admission, request_of(bob), request_of(charlie), request_of(key_of(bob, "another key")))
    slow.go_on.set()
    answers = await asyncio.gather(*first, *tasks, return_exceptions=True)
    assert [isinstance(answer, Reservation) for answer in answers] == [True, False, True, True]
    assert isinstance(answers[1], OSError), "the error of the read"


async def test_a_request_cancelled_during_a_read_takes_nothing_and_does_not_affect_others(
    admission: Admission, slow: SlowSums
) -> None:
    bob = principal(Limits(concurrent_requests=1))
    gone, stays = await begin(admission, request_of(bob), request_of(bob))
    gone.cancel()
    await turns()
    assert gone.cancelled()
    slow.go_on.set()
    await stays
    assert num_running(admission, bob.tenant.id) == 1
    assert len(slow.reads) == 1


async def test_a_stop_waits_for_the_running_read(admission: Admission, slow: SlowSums) -> None:
    (first,) = await begin(admission, request_of(principal()))
    stopping = asyncio.create_task(admission.stop())
    await turns()
    assert not stopping.done()
    slow.go_on.set()
    await turns()
    assert (first.done(), stopping.done()) == (True, True)


async def test_ended_requests_are_kept_only_while_a_read_may_lack_them(admission: Admission, slow: SlowSums) -> None:
    bob = principal()
    slow.go_on.set()
    running = [await admission.admit(request_of(bob)) for _ in range(4)]
    slow.go_on.clear()
    ended = admission._loader._ended
    running[0].settle(10, request_id="recorded before")
    running[0].mark_recorded()
    assert list(ended) == []

    running[1].settle(10, request_id="recorded later")
    await begin(admission, request_of(principal()))
    for number in (2, 3):
        running[number].settle(10, request_id=f"recorded meanwhile {number}")
        running[number].mark_recorded()
    assert len(ended) == 3, "the running read may lack them"
    slow.go_on.set()
    await turns()
    assert list(ended) == ["recorded later"]
    running[1].mark_recorded()
    assert list(ended) == []
    assert admission._loader._recorded == []


async def test_an_unexpected_error_after_a_read_fails_all_its_waiters_and_the_next_read_works(
    admission: Admission, slow: SlowSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = principal()
    (first,) = await begin(admission, request_of(bob))
    (later,) = await begin(admission, request_of(principal()))
    with monkeypatch.context() as broken:
        broken.setattr(Allowance, "enter", lambda *_given: 1 // 0)
        slow.go_on.set()
        await turns()
        assert [isinstance(task.exception(), ZeroDivisionError) for task in (first, later) if task.done()] == [True, True]
    assert await admission.admit(request_of(bob))


async def test_an_unexpected_error_with_one_owner_does_not_affect_its_batch(
    admission: Admission, slow: SlowSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob, enter = principal(), Allowance.enter

    def broken(allowance: Allowance, at: Moment) -> None:
        if allowance.owner == Owner("key", bob.key.id):
            raise ZeroDivisionError
        enter(allowance, at)

    first = await begin(admission, request_of(principal()))
    tasks = await begin(admission, *(request_of(who) for who in (bob, principal(), key_of(bob, "another key"))))
    with monkeypatch.context() as bug:
        bug.setattr(Allowance, "enter", broken)
        slow.go_on.set()
        answers = await asyncio.gather(*first, *tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Reservation, ZeroDivisionError, Reservation, Reservation]
    assert await admission.admit(request_of(bob))


async def test_requests_arriving_while_a_failed_batch_is_read_one_by_one_are_read_after_it(
    admission: Admission, slow: SlowSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob, read, alone = principal(), slow.read, asyncio.Event()
    enter, reading, others = Allowance.enter, set[Owner](), list[set[Owner]]()

    async def counted(currencies: Mapping[Owner, str], *arguments: Any) -> dict[Owner, PeriodSums]:
        reading.update(currencies)
        others.append(reading - set(currencies))
        if list(currencies) == [Owner("tenant", bob.tenant.id)]:
            await alone.wait()
        reading.difference_update(currencies)
        return await read(currencies, *arguments)

    def broken(allowance: Allowance, at: Moment) -> None:
        if allowance.owner == Owner("key", bob.key.id):
            raise ZeroDivisionError
        enter(allowance, at)

    monkeypatch.setattr(slow, "read", counted)
    monkeypatch.setattr(Allowance, "enter", broken)
    slow.go_on.set()
    (refused,) = await begin(admission, request_of(bob))
    (later,) = await begin(admission, request_of(principal()))
    came_between = later.done()
    alone.set()
    await turns()
    assert (came_between, later.done()) == (False, True)
    assert isinstance(refused.exception(), ZeroDivisionError)
    assert others == [set(), set(), {Owner("tenant", bob.tenant.id)}, set()], "each failed owner alone, then the next batch"


@pytest.mark.parametrize("together", [False, True])
async def test_a_cancelled_read_fails_its_waiters_and_the_next_read_works(
    admission: Admission, slow: SlowSums, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    bob, read, ends = principal(), slow.read, [asyncio.CancelledError(), OSError("the disk is away")]

    async def cancelled(*arguments: Any) -> dict[Owner, PeriodSums]:
        if ends:
            raise ends.pop()
        return await read(*arguments)

    if together:
        ends.pop()
    monkeypatch.setattr(slow, "read", cancelled)
    slow.go_on.set()
    with pytest.raises(InternalError, match="was cancelled"):
        async with asyncio.timeout(5.0):
            await admission.admit(request_of(bob))
    assert admission._loader._task is None
    assert await admission.admit(request_of(bob))


async def test_after_a_cancelled_read_its_waiters_are_not_read(admission: Admission, slow: SlowSums) -> None:
    bob = principal()
    tasks = [*await begin(admission, request_of(bob)), *await begin(admission, request_of(principal()))]
    task = admission._loader._task
    assert task is not None
    task.cancel()
    await asyncio.wait(tasks)
    slow.go_on.set()
    await admission.admit(request_of(bob))
    assert [len(read) for read in slow.reads] == [2, 2]
    assert [type(task.exception()) for task in tasks] == [InternalError, InternalError]


async def test_an_owner_read_alone_is_not_read_again_when_that_fails(admission: Admission, slow: SlowSums) -> None:
    bob = principal()
    slow.go_on.set()
    await admission.admit(request_of(bob))
    slow.broken = {Owner("key", "another key")}
    with pytest.raises(OSError, match="disk"):
        await admission.admit(request_of(key_of(bob, "another key")))
    assert [len(read) for read in slow.reads] == [2, 1]


@pytest.mark.parametrize(
    ("error", "num_logs"), [(ZeroDivisionError(), 1), (OSError("the disk is away"), 0)], ids=["bug", "disk"]
)
async def test_an_unexpected_error_of_a_read_is_logged_with_its_owner_and_an_outage_is_not(
    admission: Admission, slow: SlowSums, monkeypatch: pytest.MonkeyPatch, error: Exception, num_logs: int
) -> None:
    bob = principal()
    slow.go_on.set()
    await admission.admit(request_of(bob))

    async def failing(*_given: Any) -> dict[Owner, PeriodSums]:
        raise error

    monkeypatch.setattr(slow, "read", failing)
    with structlog.testing.capture_logs() as logs, pytest.raises(type(error)):
        await admission.admit(request_of(key_of(bob, "another key")))
    assert [(line["event"], line["owner_id"]) for line in logs] == [("allowance_load_failed", "another key")] * num_logs


async def test_a_running_request_counts_once_when_the_first_load_of_its_owner_failed(
    admission: Admission, slow: SlowSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob, model = principal(), Owner("model", ALL_TENANTS, "demo")
    policy = ModelPolicy(model="demo", limits=Limits(concurrent_requests=4), limit_mode="enforce", updated_at=START)
    slow.go_on.set()
    running = await admission.admit(request_of(bob))
    with monkeypatch.context() as bug:
        bug.setattr(AllowanceLoader, "_count_ended", lambda *_given: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await admission.admit(request_of(bob, policy))
    assert [hold.allowance.owner.scope for hold in running.holds] == ["tenant", "key"]
    await admission.admit(request_of(bob, policy))
    assert [hold.allowance.owner.scope for hold in running.holds] == ["tenant", "key", "model"]
    assert admission._allowances[model].running == 2


@pytest.mark.parametrize(("fault", "is_logged"), [("a bug", True), ("the disk", False)])
async def test_an_unexpected_error_is_logged_even_if_nobody_waits_any_more(
    admission: Admission,
    slow: SlowSums,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    is_logged: bool,
) -> None:
    bob = principal()
    (gone,) = await begin(admission, request_of(bob))
    gone.cancel()
    await turns()
    if fault == "a bug":
        monkeypatch.setattr(Allowance, "enter", lambda *_given: 1 // 0)
    else:
        slow.broken = {Owner("tenant", bob.tenant.id), Owner("key", bob.key.id)}
    slow.go_on.set()
    await turns()
    assert ("ZeroDivisionError" in capfd.readouterr().out) == is_logged


async def test_a_failed_read_without_waiters_raises_nothing(admission: Admission, slow: SlowSums) -> None:
    bob = principal()
    slow.broken = {Owner("tenant", bob.tenant.id)}
    (gone,) = await begin(admission, request_of(bob))
    gone.cancel()
    slow.go_on.set()
    await turns()
    slow.broken.clear()
    await admission.admit(request_of(bob))


@pytest.mark.parametrize("fails", [False, True])
async def test_running_requests_count_towards_new_limits_whether_they_began_before_or_during_the_read(
    admission: Admission, slow: SlowSums, fails: bool
) -> None:
    bob, model = principal(), Owner("model", ALL_TENANTS, "demo")
    policy = ModelPolicy(model="demo", limits=Limits(concurrent_requests=4), limit_mode="enforce", updated_at=START)
    slow.go_on.set()
    begun_before = await admission.admit(request_of(bob))
    slow.go_on.clear()
    slow.broken = {model} if fails else set()
    (limited,) = await begin(admission, request_of(bob, policy))
    begun_during = await admission.admit(request_of(bob))
    slow.go_on.set()
    if fails:
        with pytest.raises(OSError, match="disk"):
            await limited
        assert {hold.allowance.owner.scope for each in (begun_before, begun_during) for hold in each.holds} == {"tenant", "key"}
        slow.broken.clear()
        await admission.admit(request_of(bob, policy))
    else:
        await limited
    assert admission._allowances[model].running == 3
    for reservation in (begun_before, begun_during):
        assert len(reservation.holds) == 3
        reservation.settle(10)
    assert admission._allowances[model].running == 1


def test_the_last_minute_before_a_start_is_in_use_of_limits_whose_levels_were_not_saved(clock: FakeClock) -> None:
    at = utc_admission(clock, EmptySums())._moment()
    allowance = Allowance(Owner("tenant", "bob"), "EUR", at)
    recent = tuple((at.now - timedelta(seconds=seconds), tokens) for seconds, tokens in ((2, 20), (1, 10)))
    allowance.restore(PeriodSums(tokens_today=0, cost_month_picos=0, recent=recent), at)
    allowance.configure(Limits(tokens_per_minute=120, requests_per_minute=12), "enforce", at)
    assert allowance.in_use(at) == {"tokens": 30 - 2 * 2, "requests": 2, "concurrency": 0}


def test_sums_read_across_midnight_belong_to_the_day_before(clock: FakeClock) -> None:
    calendar = utc_admission(clock, EmptySums())
    clock.advance(12 * 3600 - 1)
    evening = calendar._moment()
    allowance = Allowance(Owner("tenant", "bob"), "EUR", evening)
    clock.advance(2)
    morning = calendar._moment()
    allowance._windows.enter(morning)
    allowance.restore(PeriodSums(tokens_today=90, cost_month_picos=5), evening)
    today, month = allowance._windows.enter(morning)
    assert (today.used, month.window("EUR").used) == (0, 5)


async def test_a_first_request_needs_a_fixed_number_of_statements(database: Database, clock: FakeClock, cast: Cast) -> None:
    counts = []
    for requests in (
        [request_of(cast.bob.principal)],
        [everywhere(cast.bob.principal)],
        [everywhere(person.principal) for person in (cast.bob, cast.charlie)] + [request_of(principal()) for _ in range(20)],
    ):
        admission = utc_admission(clock, utc_sums(database))
        with record_statements() as statements:
            await asyncio.gather(*(admission.admit(request) for request in requests))
        counts.append(len(statements))
    assert counts == [counts[0]] * 3
    assert counts[0] <= STATEMENTS_MAX


async def test_a_batch_reads_the_same_as_single_reads_even_beyond_the_event_limit(
    database: Database, clock: FakeClock, cast: Cast, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        entry = pending((cast.bob, cast.charlie)[number % 3 == 0], model=("demo", "other")[number % 2], admitted_at=clock.now())
        await ledger.open(entry)
        await ledger.settle(posted(entry.request_id, completion=number))
        clock.advance(1)
    owners = {Owner("tenant", cast.bob.tenant.id, model): "EUR" for model in (None, "demo", "other")}
    owners |= {Owner("key", cast.charlie.key.id): "EUR", Owner("model", ALL_TENANTS, "demo"): "EUR"}
    sums, at = utc_sums(database), utc_admission(clock, EmptySums())._moment()
    alone = {owner: (await sums.read({owner: currency}, at))[owner] for owner, currency in owners.items()}
    assert await sums.read(owners, at) == alone
    assert [len(found.recent) for found in alone.values()] == [8, 4, 4, 4, 6]

    monkeypatch.setattr(ledger_sums, "RECENT_EVENTS_MAX", 5)
    cut = await sums.read(owners, at)
    assert {owner: found.recent for owner, found in cut.items()} == {owner: found.recent[-5:] for owner, found in alone.items()}


async def test_a_request_running_when_levels_were_saved_is_charged_only_beyond_its_reservation(
    database: Database, clock: FakeClock, cast: Cast, ledger: Ledger
) -> None:
    bob = dataclasses.replace(cast.bob.principal, tenant=dataclasses.replace(cast.bob.tenant, limits=LIMITED))
    before = utc_admission(clock, utc_sums(database))
    reservation = await before.admit(request_of(bob, tokens=100))
    entry = pending(cast.bob, admitted_at=clock.now(), reserved_tokens=100)
    await ledger.open(entry)
    clock.advance(0.001)
    await LevelSaver(database, before).save()
    clock.advance(0.001)
    reservation.settle(700)
    await ledger.settle(posted(entry.request_id, prompt=100, completion=600))

    after = utc_admission(clock, utc_sums(database))
    await after.dry_run(request_of(bob))
    assert after.snapshot(bob) == before.snapshot(bob)


async def test_a_read_reports_which_ended_requests_it_includes(
    database: Database, clock: FakeClock, cast: Cast, ledger: Ledger
) -> None:
    entries = [pending(cast.bob, admitted_at=clock.now()) for _ in range(3)]
    for entry in entries:
        await ledger.open(entry)
    written, _pending, refused = (entry.request_id for entry in entries)
    await ledger.settle(posted(written, prompt=5, completion=0))
    await ledger.settle(voided(refused))
    owner, at = Owner("tenant", cast.bob.tenant.id), utc_admission(clock, EmptySums())._moment()
    found = (await utc_sums(database).read({owner: "EUR"}, at, lambda: [each.request_id for each in entries]))[owner]
    assert (found.tokens_today, found.included) == (5, frozenset({written}))


async def test_costs_in_other_currencies_are_read_too(database: Database, clock: FakeClock, cast: Cast, ledger: Ledger) -> None:
    prices = euro_prices(database, clock)
    for currency, count in (("EUR", 5), ("USD", 7)):
        price = await prices.add(model="demo", currency=currency, prompt=0, cached_prompt=0, completion=1)
        entry = pending(cast.bob, price=price, admitted_at=clock.now())
        await ledger.open(entry)
        await ledger.settle(posted(entry.request_id, completion=count))
    owner, at = Owner("tenant", cast.bob.tenant.id), utc_admission(clock, EmptySums())._moment()
    found = (await utc_sums(database).read({owner: "EUR"}, at))[owner]
    assert (found.cost_month_picos, found.other_costs_picos) == (5, {"USD": 7})


@pytest.mark.parametrize("recorded", ["before the read", "meanwhile", "afterwards"])
async def test_a_request_that_ends_during_the_read_of_its_model_counts_once(
    database: Database, clock: FakeClock, cast: Cast, ledger: Ledger, recorded: str
) -> None:
    sums = utc_sums(database)
    admission = utc_admission(clock, sums)
    policy = ModelPolicy(model="demo", limits=Limits(tokens_per_day=1000), limit_mode="enforce", updated_at=START)
    entry = pending(cast.bob, admitted_at=clock.now())
    await ledger.open(entry)
    running = await admission.admit(request_of(cast.bob.principal))
    settled, read = posted(entry.request_id, prompt=600, completion=0), sums.read

    async def end() -> None:
        running.settle(600, request_id=entry.request_id)
        if recorded != "afterwards":
            await ledger.settle(settled)

    async def read_slowly(*arguments: Any) -> Mapping[Owner, PeriodSums]:
        if recorded == "meanwhile":
            await end()
        return await read(*arguments)

    sums.read = read_slowly  # type: ignore[method-assign, assignment]
    if recorded != "meanwhile":
        await end()
    await admission.admit(request_of(cast.bob.principal, policy))
    assert admission._allowances[Owner("model", ALL_TENANTS, "demo")]._windows.day.used == 600
    running.mark_recorded()
    assert not admission._loader._ended


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_settlement_only_in_the_journal_counts_while_the_tables_cannot_be_written(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CATCH_UP_S", 0.0)
    held, journal = FailingDatabase.around(database), Journal(tmp_path / "j")
    ledger, admission = utc_ledger(held, clock, cast.epoch_id, journal=journal), utc_admission(clock, utc_sums(held))
    await ledger.start()
    policy = ModelPolicy(model="demo", limits=Limits(tokens_per_day=1000), limit_mode="enforce", updated_at=START)
    entry = pending(cast.bob, admitted_at=clock.now())
    running = await admission.admit(request_of(cast.bob.principal))
    await ledger.open(entry)
    await ledger.catch_up()
    held.gate = asyncio.Event()
    running.settle(600, request_id=entry.request_id)
    await ledger.settle(posted(entry.request_id, prompt=600, completion=0), running.mark_recorded)
    await admission.admit(request_of(cast.bob.principal, policy))
    held.gate.set()
    await ledger.stop()
    await journal.close()
    assert admission._allowances[Owner("model", ALL_TENANTS, "demo")]._windows.day.used == 600
    assert not admission._loader._ended


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_ended_requests_are_found_by_their_index(database: Database) -> None:
    plan = await query_plan(database, billed_query(["a", "b"]))
    assert plan == ["SEARCH usage_events USING INDEX uq_usage_events_request_id (request_id=?)"]


SPANS = {
    Owner("tenant", "a"): Span(START, START - timedelta(hours=2)),
    Owner("tenant", "b", "demo"): Span(START - timedelta(days=1), START - timedelta(days=1, hours=2)),
    Owner("key", "c"): Span(START, START),
    Owner("model", ALL_TENANTS, "demo"): Span(START - timedelta(hours=1), START - timedelta(hours=3)),
}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("owners", [*([owner] for owner in SPANS), list(SPANS)[:3]], ids=lambda owners: owners[0].scope)
async def test_events_are_found_by_an_index_on_admission(database: Database, owners: list[Owner]) -> None:
    query = events_query({owner: SPANS[owner] for owner in owners})
    plan = await query_plan(database, query)
    columns = {"tenant": ("tenant_id_", "tenant_id=? AND "), "key": ("key_id_", "key_id=? AND "), "model": ("", "")}
    assert plan == [
        "SEARCH usage_events USING INDEX ix_usage_events_{}admitted_at ({}admitted_at>?)".format(*columns[owner.scope])
        for owner in owners
    ]
    compiled = str(query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))
    assert f"LIMIT {RECENT_EVENTS_MAX}" in " ".join(compiled.split())
