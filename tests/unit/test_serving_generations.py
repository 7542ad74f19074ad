"""All generations: which requests are accepted at which price, how long they may wait, and who may see and end them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.base.errors import Draining, EngineUnavailable, NotFound, Overloaded, RoleNotAllowed
from appliance.metering.ledger.records import PendingEvent, Settlement, Usage
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.limit_waits import LimitWait
from appliance.metering.limits.reservations import Reservation
from appliance.tenancy.keys import Keys
from appliance.tenancy.principals import KeyChanges, Limits
from appliance.tenancy.roles import Action, TenantRole
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tiers import Tiers
from engine.protocol import EngineFrame, RequestProgress
from tests.support.cast import OWNER, PEPPER, Cast, change_tenant, make_person, member_of
from tests.support.clock import FakeClock
from tests.support.engine_messages import engine_status
from tests.support.fake_engine import STALL
from tests.support.generations import MODEL, InProcessEngine, Serving, open_serving, text_of
from tests.support.ledgers import euro_prices, num_running, num_waiting
from tests.support.polling import poll_until

pytestmark = pytest.mark.on_either_database

TEXT = "the quick brown fox"


async def test_a_member_sees_and_ends_live_requests_of_its_own_tenant_only(serving: Serving, cast: Cast) -> None:
    generations, bob, charlie = serving.generations, cast.bob.tenant.id, cast.charlie.tenant.id
    bobs, charlies = [await serving.start(person, [STALL, 5]) for person in (cast.bob, cast.charlie)]
    manager, viewer = member_of(bob, TenantRole.MANAGER), member_of(bob, TenantRole.VIEWER)

    assert list(generations.live(access=OWNER).values()) == [bobs.live, charlies.live]
    assert generations.tenant_names == {bob: "bob", charlie: "charlie"}
    for access in (manager, viewer):
        assert list(generations.live(access=access).values()) == [bobs.live]
        assert generations.find(bobs.request_id, access=access) is bobs.live
        assert generations.find(charlies.request_id, access=access) is None
        with pytest.raises(NotFound):
            generations.abort(charlies.request_id, access=access)
    with pytest.raises(RoleNotAllowed):
        generations.abort(bobs.request_id, access=viewer)
    with pytest.raises(RoleNotAllowed):
        generations.find(bobs.request_id, access=viewer, action=Action.ABORT)
    assert not bobs.outcome.done()

    ended = await generations.abort_and_wait(bobs.request_id, access=manager)
    assert (ended, ended.state, ended.finish_reason) == (bobs.live, "finished", "aborted")
    with pytest.raises(NotFound):
        generations.abort("req_unknown", access=OWNER)
    assert not charlies.outcome.done()
    charlies.end_early("disconnected")


async def test_draining_refuses_requests_that_wait_for_admission(
    serving: Serving, database: Database, clock: FakeClock
) -> None:
    dora = await make_person(database, clock, "dora", Limits(concurrent_requests=1))
    await Tiers(database, clock).update(dora.tenant.tier, admission_wait_ms=60_000)
    running = await serving.start(dora, [STALL, 5])
    waiting = asyncio.create_task(serving.start(dora, TEXT))
    await poll_until(lambda: num_waiting(serving.admission) > 0)
    assert not await serving.generations.drain(0.01)
    async with asyncio.timeout(10):
        for late in (waiting, serving.start(dora, TEXT)):
            with pytest.raises(Draining):
                await late
    running.end_early("disconnected")


async def test_a_drain_waits_for_the_last_of_several(serving: Serving, cast: Cast) -> None:
    serving.engine.allow_steps(0)
    first, last = await serving.start(cast.charlie, TEXT), await serving.start(cast.bob, [STALL, 5])
    serving.engine.allow_steps(1000)
    await first.outcome
    await poll_until(lambda: len(serving.generations.live(access=OWNER)) == 1)
    assert not await serving.generations.drain(0.02)
    last.end_early("disconnected")
    assert await serving.generations.drain(5.0)


async def test_a_request_waits_for_admission_as_long_as_its_tier_allows(
    serving: Serving, cast: Cast, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, waits_s = serving.admission.admit, list[float]()

    async def noting(request: AdmissionRequest, wait_s: float, wait: LimitWait) -> Reservation:
        waits_s.append(wait_s)
        return await admit(request, wait_s, wait)

    monkeypatch.setattr(serving.admission, "admit", noting)
    await Tiers(database, clock).update(cast.bob.tenant.tier, admission_wait_ms=1500)
    await text_of(await serving.start(cast.bob, TEXT))
    assert waits_s == [1.5]


@pytest.mark.parametrize(("seats", "places"), [(64, 1 + 64), (None, 1)], ids=["seats known", "seats unknown"])
async def test_the_seats_of_the_engine_add_to_the_requests_that_may_be_open(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    seats: int | None, places: int,
) -> None:  # fmt: skip
    if seats is None:
        monkeypatch.setattr(InProcessEngine, "info", None)
    async with open_serving(
        database, clock, tmp_path / "model", cast.epoch_id, seats=seats or 8, max_waiting_requests=1
    ) as serving:
        generations = [await serving.start(cast.bob, [STALL, 5], n=num) for num in (places - 1, 1) if num]
        with pytest.raises(Overloaded, match="queue is full"):
            await serving.start(cast.bob, TEXT)
        for generation in generations:
            generation.end_early("disconnected")


async def test_refusing_unpriced_models_does_not_affect_priced_ones(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    price = await euro_prices(database, clock).add(model=MODEL, currency="EUR", prompt=1, cached_prompt=1, completion=2)
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id, refuse_unpriced=True) as serving:
        generation = await serving.start(cast.bob, TEXT)
        await generation.outcome
        event, count = await serving.event(generation), len(serving.ids(TEXT))
        assert "gatehouse_unpriced_requests_total{" not in (await serving.metrics.render()).decode()
    assert (event.price_id, event.cost_picos) == (price.id, count * 1 + count * 2)


async def test_a_request_pays_the_price_in_force_at_its_admission(
    serving: Serving, cast: Cast, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, asked_at = serving.admission.admit, list[int | None]()

    async def after_a_wait(request: AdmissionRequest, wait_s: float, wait: LimitWait) -> Reservation:
        asked_at.append(None if request.price is None else request.price.completion)
        clock.advance(10)
        return await admit(request, wait_s, wait)

    terms: dict[str, Any] = {"model": MODEL, "currency": "EUR", "prompt": 0, "cached_prompt": 0}
    prices = euro_prices(database, clock)
    await prices.add(**terms, completion=7)
    dearer = await prices.add(**terms, completion=9, effective_from=clock.now() + timedelta(seconds=5))
    monkeypatch.setattr(serving.admission, "admit", after_a_wait)
    generation = await serving.start(cast.bob, [STALL, 5])
    assert asked_at == [7, 9]
    assert num_running(serving.admission, cast.bob.tenant.id) == 1
    generation.end_early("disconnected")
    await generation.outcome
    assert (await serving.event(generation)).price_id == dearer.id


async def test_a_request_whose_engine_died_while_it_waited_reserves_nothing(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = serving.admission.admit

    async def after_a_wait(request: AdmissionRequest, wait_s: float, wait: LimitWait) -> Reservation:
        serving.client.unavailable = "restarting"
        return await admit(request, wait_s, wait)

    monkeypatch.setattr(serving.admission, "admit", after_a_wait)
    with pytest.raises(EngineUnavailable):
        await serving.start(cast.bob, TEXT)
    assert num_running(serving.admission, cast.bob.tenant.id) == 0
    assert (await serving.reports.ledger_page(access=OWNER)).data == []


async def test_refusals_of_a_limit_in_shadow_mode_are_counted(serving: Serving, database: Database, clock: FakeClock) -> None:
    dora = await make_person(database, clock, "dora", Limits(concurrent_requests=1))
    await change_tenant(Tenants(database, clock), dora, limit_mode="shadow")
    for _ in range(2):
        await text_of(await serving.start(dora, TEXT))
        running = await serving.start(dora, [STALL, 5])
        await text_of(await serving.start(dora, TEXT))
        running.end_early("disconnected")
        await running.outcome
    assert '{reason="tenant_concurrency"} 2.0' in (await serving.metrics.render()).decode()


async def test_the_expiry_of_a_key_ends_its_running_requests(
    serving: Serving, database: Database, cast: Cast, clock: FakeClock
) -> None:
    expiring = KeyChanges(expires_at=clock.now() + timedelta(hours=1))
    await Keys(database, clock, PEPPER).update(cast.bob.key.id, expiring, access=OWNER)
    generation = await serving.start(cast.bob, [STALL, 5])
    timer = generation._expiry._timer
    assert timer is not None
    assert 3500 < timer.when() - asyncio.get_running_loop().time() <= 3600
    timer._run()
    error = (await generation.outcome).error
    assert error is not None
    assert error.code == "expired_api_key"


async def test_a_request_whose_caller_is_cancelled_while_its_record_is_written_ends_unbilled(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, requested, disk = serving.ledger.open, asyncio.Event(), asyncio.Event()

    async def slowly(entry: PendingEvent) -> None:
        requested.set()
        await disk.wait()
        await written(entry)

    monkeypatch.setattr(serving.ledger, "open", slowly)
    starting = asyncio.create_task(serving.start(cast.bob, TEXT))
    await requested.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    disk.set()
    assert await serving.generations.drain(5.0)
    (event,) = (await serving.reports.ledger_page(access=OWNER)).data
    assert (event.status, event.finish_reason, event.cause) == ("voided", "disconnected", "client")
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_an_ended_but_unsettled_request_is_neither_revived_nor_checkpointed(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, disk, checkpoints = serving.ledger.settle, asyncio.Event(), list[dict[str, Usage]]()

    async def slowly(settlement: Settlement, on_recorded: Callable[[], object]) -> None:
        await disk.wait()
        await settle(settlement, on_recorded)

    monkeypatch.setattr(serving.ledger, "settle", slowly)
    monkeypatch.setattr(serving.ledger, "checkpoint", checkpoints.append)
    generation = await serving.start(cast.bob, TEXT)
    await poll_until(lambda: generation.live.state == "finished")
    late = [
        RequestProgress(
            request_id=request_id, state="decode", queue_position=None, kv_blocks=7, num_computed_tokens=1,
            num_output_tokens=1, num_preemptions=0,
        )
        for request_id in ("req_unknown", generation.request_id)
    ]  # fmt: skip
    for requests in (None, late):
        serving.generations.note_frame(EngineFrame(status=engine_status(requests=requests)))
    await serving.generations.checkpoint()
    assert (generation.live.state, generation.live.kv_blocks, checkpoints) == ("finished", 0, [])
    disk.set()
    assert await serving.generations.drain(5.0)


async def test_a_request_is_checkpointed_from_its_first_token_on(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints: list[dict[str, Usage]] = []
    monkeypatch.setattr(serving.ledger, "checkpoint", checkpoints.append)
    serving.engine.allow_steps(1)
    generation = await serving.start(cast.bob, TEXT)
    await poll_until(lambda: generation.live.completion_tokens == 1)
    await serving.generations.checkpoint()
    assert checkpoints == [{generation.request_id: Usage(prompt_tokens=len(serving.ids(TEXT)), completion_tokens=1)}]
    generation.end_early("disconnected")
