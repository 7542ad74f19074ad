"""All generations: which requests are accepted at which price, how long they may wait, and who may see and end them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from appliance.base.acting import SYSTEM
from appliance.base.db import Database
from appliance.base.errors import Draining, EngineUnavailable, NotFound, Overloaded, RoleNotAllowed
from appliance.metering.ledger.records import PendingEntry, Settlement, Usage
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.reservations import Reservation
from appliance.tenancy.access import WHOLE_APPLIANCE, Access
from appliance.tenancy.principals import Limits
from appliance.tenancy.roles import Action, Role, TenantRole
from appliance.tenancy.tiers import Tiers
from engine.protocol import EngineFrame, RequestProgress
from tests.support.cast import Cast, make_person
from tests.support.clock import FakeClock
from tests.support.fake_engine import STALL, engine_status
from tests.support.generations import MODEL, InProcessEngine, Serving, serving, text_of
from tests.support.ledgers import euro_prices, num_running, poll_until

pytestmark = pytest.mark.on_either_database

TEXT = "the quick brown fox"


@pytest.fixture
async def box(database: Database, clock: FakeClock, cast: Cast, tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(database, clock, tmp_path / "model", cast.epoch_id) as opened:
        yield opened


def member_of(tenant_id: str, role: TenantRole) -> Access:
    return Access(role=Role.MEMBER, actor=SYSTEM, tenants={tenant_id: role})


async def test_a_member_sees_and_ends_live_requests_of_its_own_tenant_only(box: Serving, cast: Cast) -> None:
    generations, bob, charlie = box.generations, cast.bob.tenant.id, cast.charlie.tenant.id
    bobs, charlies = [await box.start(person, [STALL, 5]) for person in (cast.bob, cast.charlie)]
    manager, viewer = member_of(bob, TenantRole.MANAGER), member_of(bob, TenantRole.VIEWER)

    assert list(generations.live(access=WHOLE_APPLIANCE).values()) == [bobs.live, charlies.live]
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
        generations.abort("req_unknown", access=WHOLE_APPLIANCE)
    assert not charlies.outcome.done()
    charlies.end_early("disconnected")


async def test_draining_refuses_requests_that_wait_for_admission(box: Serving, database: Database, clock: FakeClock) -> None:
    dora = await make_person(database, clock, "dora", Limits(concurrent_requests=1))
    await Tiers(database, clock).update(dora.tenant.tier, admission_wait_ms=60_000)
    running = await box.start(dora, [STALL, 5])
    waiting = asyncio.create_task(box.start(dora, TEXT))
    await poll_until(lambda: bool(box.admission.waiting))
    assert not await box.generations.drain(0.01)
    async with asyncio.timeout(10):
        for late in (waiting, box.start(dora, TEXT)):
            with pytest.raises(Draining):
                await late
    running.end_early("disconnected")


async def test_a_drain_waits_for_the_last_of_several(box: Serving, cast: Cast) -> None:
    box.engine.allow_steps(0)
    first, last = await box.start(cast.charlie, TEXT), await box.start(cast.bob, [STALL, 5])
    box.engine.allow_steps(1000)
    await first.outcome
    await poll_until(lambda: len(box.generations.live(access=WHOLE_APPLIANCE)) == 1)
    assert not await box.generations.drain(0.02)
    last.end_early("disconnected")
    assert await box.generations.drain(5.0)


async def test_a_request_waits_for_admission_as_long_as_its_tier_allows(
    box: Serving, cast: Cast, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, waits_s = box.admission.admit, list[float]()

    async def noting(request: AdmissionRequest, wait_s: float) -> Reservation:
        waits_s.append(wait_s)
        return await admit(request, wait_s)

    monkeypatch.setattr(box.admission, "admit", noting)
    await Tiers(database, clock).update(cast.bob.tenant.tier, admission_wait_ms=1500)
    await text_of(await box.start(cast.bob, TEXT))
    assert waits_s == [1.5]


@pytest.mark.parametrize(("seats", "places"), [(64, 1 + 64), (None, 1)], ids=["told", "not told"])
async def test_the_seats_of_the_engine_add_to_the_requests_that_may_be_open(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    seats: int | None, places: int,
) -> None:  # fmt: skip
    if seats is None:
        monkeypatch.setattr(InProcessEngine, "info", None)
    async with serving(database, clock, tmp_path / "model", cast.epoch_id, seats=seats or 8, max_waiting_requests=1) as box:
        generations = [await box.start(cast.bob, [STALL, 5], n=num) for num in (places - 1, 1) if num]
        with pytest.raises(Overloaded, match="queue is full"):
            await box.start(cast.bob, TEXT)
        for generation in generations:
            generation.end_early("disconnected")


async def test_refusing_unpriced_models_does_not_affect_priced_ones(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    price = await euro_prices(database, clock).add(model=MODEL, currency="EUR", prompt=1, cached_prompt=1, completion=2)
    async with serving(database, clock, tmp_path / "model", cast.epoch_id, refuse_unpriced=True) as box:
        generation = await box.start(cast.bob, TEXT)
        await generation.outcome
        event, count = await box.event(generation), len(box.ids(TEXT))
        assert "gatehouse_unpriced_requests_total{" not in box.metrics.render().decode()
    assert (event.price_id, event.cost_picos) == (price.id, count * 1 + count * 2)


async def test_a_request_pays_the_price_in_force_at_its_admission(
    box: Serving, cast: Cast, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, asked_at = box.admission.admit, list[int | None]()

    async def after_a_wait(request: AdmissionRequest, wait_s: float) -> Reservation:
        asked_at.append(None if request.price is None else request.price.completion)
        clock.advance(10)
        return await admit(request, wait_s)

    terms: dict[str, Any] = {"model": MODEL, "currency": "EUR", "prompt": 0, "cached_prompt": 0}
    prices = euro_prices(database, clock)
    await prices.add(**terms, completion=7)
    dearer = await prices.add(**terms, completion=9, effective_from=clock.now() + timedelta(seconds=5))
    monkeypatch.setattr(box.admission, "admit", after_a_wait)
    generation = await box.start(cast.bob, [STALL, 5])
    assert asked_at == [7, 9]
    assert num_running(box.admission, cast.bob.tenant.id) == 1
    generation.end_early("disconnected")
    await generation.outcome
    assert (await box.event(generation)).price_id == dearer.id


async def test_a_request_whose_engine_died_while_it_waited_reserves_nothing(
    box: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = box.admission.admit

    async def after_a_wait(request: AdmissionRequest, wait_s: float) -> Reservation:
        box.client.unavailable = "restarting"
        return await admit(request, wait_s)

    monkeypatch.setattr(box.admission, "admit", after_a_wait)
    with pytest.raises(EngineUnavailable):
        await box.start(cast.bob, TEXT)
    assert num_running(box.admission, cast.bob.tenant.id) == 0
    assert (await box.reports.ledger_page(access=WHOLE_APPLIANCE)).data == []


async def test_refusals_of_a_limit_in_shadow_mode_are_counted(box: Serving, database: Database, clock: FakeClock) -> None:
    dora = await make_person(database, clock, "dora", Limits(concurrent_requests=1))
    dora = dataclasses.replace(dora, tenant=dataclasses.replace(dora.tenant, limit_mode="shadow"))
    for _ in range(2):
        await text_of(await box.start(dora, TEXT))
        running = await box.start(dora, [STALL, 5])
        await text_of(await box.start(dora, TEXT))
        running.end_early("disconnected")
        await running.outcome
    assert '{reason="tenant_concurrency"} 2.0' in box.metrics.render().decode()


async def test_the_expiry_of_a_key_ends_its_running_requests(box: Serving, cast: Cast, clock: FakeClock) -> None:
    key = dataclasses.replace(cast.bob.key, expires_at=clock.now() + timedelta(milliseconds=20))
    generation = await box.start(dataclasses.replace(cast.bob, key=key), [STALL, 5])
    error = (await generation.outcome).error
    assert error is not None
    assert error.code == "expired_api_key"


async def test_a_request_whose_caller_is_cancelled_while_its_record_is_written_ends_unbilled(
    box: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, requested, disk = box.ledger.open, asyncio.Event(), asyncio.Event()

    async def slowly(entry: PendingEntry) -> None:
        requested.set()
        await disk.wait()
        await written(entry)

    monkeypatch.setattr(box.ledger, "open", slowly)
    starting = asyncio.create_task(box.start(cast.bob, TEXT))
    await requested.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    disk.set()
    assert await box.generations.drain(5.0)
    (event,) = (await box.reports.ledger_page(access=WHOLE_APPLIANCE)).data
    assert (event.status, event.finish_reason, event.cause) == ("voided", "disconnected", "client")
    assert num_running(box.admission, cast.bob.tenant.id) == 0


async def test_an_ended_but_unsettled_request_is_neither_revived_nor_checkpointed(
    box: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, disk, checkpoints = box.ledger.settle, asyncio.Event(), list[dict[str, Usage]]()

    async def slowly(settlement: Settlement, on_recorded: Callable[[], object]) -> None:
        await disk.wait()
        await settle(settlement, on_recorded)

    monkeypatch.setattr(box.ledger, "settle", slowly)
    monkeypatch.setattr(box.ledger, "checkpoint", checkpoints.append)
    generation = await box.start(cast.bob, TEXT)
    await poll_until(lambda: generation.live.state == "finished")
    late = [
        RequestProgress(
            request_id=request_id, state="decode", queue_position=None, kv_blocks=7, num_computed_tokens=1,
            num_output_tokens=1, num_preemptions=0,
        )
        for request_id in ("req_unknown", generation.request_id)
    ]  # fmt: skip
    for requests in (None, late):
        box.generations.note_frame(EngineFrame(status=engine_status(requests=requests)))
    box.generations.checkpoint()
    assert (generation.live.state, generation.live.kv_blocks, checkpoints) == ("finished", 0, [])
    disk.set()
    assert await box.generations.drain(5.0)


async def test_a_request_is_checkpointed_from_its_first_token_on(
    box: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints: list[dict[str, Usage]] = []
    monkeypatch.setattr(box.ledger, "checkpoint", checkpoints.append)
    box.engine.allow_steps(1)
    generation = await box.start(cast.bob, TEXT)
    await poll_until(lambda: generation.live.completion_tokens == 1)
    box.generations.checkpoint()
    assert checkpoints == [{generation.request_id: Usage(prompt_tokens=len(box.ids(TEXT)), completion_tokens=1)}]
    generation.end_early("disconnected")
