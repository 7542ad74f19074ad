"""A request that waits for room in its limits is live: it is listed with what it waits for, and can be aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from appliance.base.acting import SYSTEM
from appliance.base.db import Database
from appliance.base.errors import Draining, NotFound, RequestAborted, RoleNotAllowed
from appliance.metering.ledger.records import PendingEvent
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.allowances import Allowance
from appliance.metering.past_requests import PastRequests
from appliance.serving.explanation import explain_live
from appliance.serving.generation import Generation
from appliance.tenancy.access import Access
from appliance.tenancy.principals import Limits
from appliance.tenancy.roles import Role, TenantRole
from appliance.tenancy.tiers import Tiers
from tests.support.cast import OWNER, Cast, Person, make_person
from tests.support.clock import FakeClock
from tests.support.fake_engine import STALL
from tests.support.generations import Serving
from tests.support.ledgers import num_running, num_waiting
from tests.support.polling import poll_until

pytestmark = pytest.mark.on_either_database

TEXT = "the quick brown fox"


async def begin_waiting(serving: Serving, person: Person) -> asyncio.Task[Generation]:
    """Start a request that waits for room in its limits."""
    number = num_waiting(serving.admission)
    task = asyncio.create_task(serving.start(person, TEXT))
    await poll_until(lambda: num_waiting(serving.admission) == number + 1)
    return task


@asynccontextmanager
async def waiting_requests(
    serving: Serving, database: Database, clock: FakeClock, number: int
) -> AsyncIterator[tuple[Person, Generation, list[asyncio.Task[Generation]]]]:
    """Yield a person, her running request, and `number` more that wait for it to end."""
    dora = await make_person(database, clock, "dora", Limits(concurrent_requests=1))
    await Tiers(database, clock).update(dora.tenant.tier, admission_wait_ms=60_000)
    running = await serving.start(dora, [STALL, 5])
    tasks = [await begin_waiting(serving, dora) for _ in range(number)]
    yield dora, running, tasks
    running.end_early("disconnected")
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Generation):
            await result.outcome


async def test_a_waiting_request_is_listed_as_queued_with_the_limit_that_it_waits_for(
    serving: Serving, database: Database, clock: FakeClock
) -> None:
    async with waiting_requests(serving, database, clock, 2) as (dora, running, _):
        clock.advance(3)
        live = list(serving.generations.live(access=OWNER).values())
        first = live[1]

        assert live[0] is running.live
        assert [request.id for request in live[1:]] == sorted(request.id for request in live[1:])
        assert (first.state, first.admitted_at, first.tenant_id) == ("queued", None, dora.tenant.id)
        assert (first.awaited_limit, first.admission_wait_s) == ("tenant_concurrency", 3.0)
        assert first.prompt_tokens == len(serving.ids(TEXT))
        assert explain_live(first) == "Waiting for room in its tenant's concurrent requests, 3.0 s so far."
        assert serving.generations.find(first.id, access=OWNER) == first


async def test_an_admitted_request_no_longer_waits(serving: Serving, database: Database, clock: FakeClock) -> None:
    async with waiting_requests(serving, database, clock, 1) as (_, running, (task,)):
        (waiting,) = serving.generations.unrecorded(access=OWNER)
        running.end_early("disconnected")
        generation = await task

        assert generation.request_id == waiting.id
        assert serving.generations.unrecorded(access=OWNER) == []


async def test_an_abort_ends_the_wait_reserves_nothing_and_lets_the_others_go_on(
    serving: Serving, database: Database, clock: FakeClock
) -> None:
    async with waiting_requests(serving, database, clock, 2) as (dora, running, (first, second)):
        aborted, other = serving.generations.unrecorded(access=OWNER)
        clock.advance(2)
        ended = await serving.generations.abort_and_wait(aborted.id, access=OWNER)
        with pytest.raises(RequestAborted):
            await first

        assert (ended.id, ended.state, ended.finish_reason) == (aborted.id, "finished", "aborted")
        assert explain_live(ended) == "Ended while it waited for room in its tenant's concurrent requests, 2.0 s."
        assert [request.id for request in serving.generations.unrecorded(access=OWNER)] == [other.id]
        assert num_running(serving.admission, dora.tenant.id) == 1
        with pytest.raises(NotFound):
            serving.generations.abort(aborted.id, access=OWNER)
        with pytest.raises(NotFound):
            await PastRequests(database).get(aborted.id, access=OWNER)
        running.end_early("disconnected")
        assert (await second).request_id == other.id


async def test_a_waiting_request_of_another_tenant_is_neither_seen_nor_aborted(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast
) -> None:
    async with waiting_requests(serving, database, clock, 1) as (dora, _, (task,)):
        stranger = Access(role=Role.MEMBER, actor=SYSTEM, tenants={cast.charlie.tenant.id: TenantRole.MANAGER})
        viewer = Access(role=Role.MEMBER, actor=SYSTEM, tenants={dora.tenant.id: TenantRole.VIEWER})
        (waiting,) = serving.generations.unrecorded(access=viewer)

        assert serving.generations.unrecorded(access=stranger) == []
        assert waiting.id not in serving.generations.live(access=stranger)
        assert serving.generations.find(waiting.id, access=stranger) is None
        with pytest.raises(NotFound):
            serving.generations.abort(waiting.id, access=stranger)
        with pytest.raises(RoleNotAllowed):
            serving.generations.abort(waiting.id, access=viewer)
        assert not task.done()


async def test_a_request_is_listed_in_every_turn_of_the_event_loop_from_its_wait_to_its_generation(
    serving: Serving, database: Database, clock: FakeClock
) -> None:
    async with waiting_requests(serving, database, clock, 1) as (_, running, (task,)):
        (waiting,) = serving.generations.unrecorded(access=OWNER)
        running.end_early("disconnected")
        seen = []
        while not task.done():
            found = serving.generations.find(waiting.id, access=OWNER)
            seen.append((found is not None, waiting.id in serving.generations.live(access=OWNER)))
            await asyncio.sleep(0)

        assert set(seen) == {(True, True)}


async def test_an_abort_between_the_end_of_the_wait_and_the_generation_ends_the_request(
    serving: Serving, database: Database, clock: FakeClock
) -> None:
    async with waiting_requests(serving, database, clock, 1) as (dora, running, (task,)):
        (waiting,) = serving.generations.unrecorded(access=OWNER)
        running.end_early("disconnected")
        while num_waiting(serving.admission):  # noqa: ASYNC110 - each turn of the event loop counts
            await asyncio.sleep(0)
        assert not task.done()
        ended = serving.generations.abort(waiting.id, access=OWNER)
        with pytest.raises(RequestAborted):
            await task

        assert (ended.state, ended.finish_reason) == ("finished", "aborted")
        assert num_running(serving.admission, dora.tenant.id) == 0
        assert waiting.id not in serving.generations.live(access=OWNER)


async def test_a_request_can_be_aborted_before_it_is_decided_whether_it_must_wait(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(*_args: object, **_options: object) -> None:
        asked.set()
        await answer.wait()

    monkeypatch.setattr(serving.generations._prices, "current", slow)
    task = asyncio.create_task(serving.start(cast.bob, TEXT))
    await asked.wait()
    (live,) = serving.generations.live(access=OWNER).values()
    serving.generations.abort(live.id, access=OWNER)
    with pytest.raises(RequestAborted):
        await task

    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_a_disconnect_goes_before_an_abort_in_the_same_turn_of_the_event_loop(
    serving: Serving, database: Database, clock: FakeClock
) -> None:
    async with waiting_requests(serving, database, clock, 1) as (_, _running, (task,)):
        (waiting,) = serving.generations.unrecorded(access=OWNER)
        task.cancel()
        serving.generations.abort(waiting.id, access=OWNER)
        with pytest.raises(asyncio.CancelledError):
            await task

        assert waiting.id not in serving.generations.live(access=OWNER)


async def test_live_requests_are_in_the_order_of_their_arrival_whether_admitted_or_not(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast
) -> None:
    async with waiting_requests(serving, database, clock, 1) as (_, running, (task,)):
        (waiting,) = serving.generations.unrecorded(access=OWNER)
        later = await serving.start(cast.bob, [STALL, 5])
        order = [running.request_id, waiting.id, later.request_id]

        assert list(serving.generations.live(access=OWNER)) == order
        running.end_early("disconnected")
        await task
        await running.outcome
        assert list(serving.generations.live(access=OWNER)) == order[1:]
        later.end_early("disconnected")


async def test_a_drain_also_ends_a_request_that_does_not_wait_yet(
    serving: Serving, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting_requests(serving, database, clock, 0) as (dora, _, _):
        load, asked, loaded = serving.admission._allowances_of, asyncio.Event(), asyncio.Event()

        async def slow(request: AdmissionRequest) -> list[Allowance]:
            asked.set()
            await loaded.wait()
            return await load(request)

        monkeypatch.setattr(serving.admission, "_allowances_of", slow)
        task = asyncio.create_task(serving.start(dora, TEXT))
        await asked.wait()
        assert not await serving.generations.drain(0.01)
        loaded.set()
        with pytest.raises(Draining):
            await task
        assert num_waiting(serving.admission) == 0


async def test_a_request_is_unrecorded_until_its_usage_event_is_committed(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, asked, writable = serving.ledger.open, asyncio.Event(), asyncio.Event()

    async def slow(event: PendingEvent) -> None:
        asked.set()
        await writable.wait()
        await commit(event)

    monkeypatch.setattr(serving.ledger, "open", slow)
    task = asyncio.create_task(serving.start(cast.bob, TEXT))
    await asked.wait()
    (unrecorded,) = serving.generations.unrecorded(access=OWNER)
    stranger = Access(role=Role.MEMBER, actor=SYSTEM, tenants={cast.charlie.tenant.id: TenantRole.MANAGER})

    assert unrecorded.admitted_at is not None
    assert serving.generations.unrecorded(access=stranger) == []
    writable.set()
    assert (await task).live is unrecorded
    assert serving.generations.unrecorded(access=OWNER) == []
