"""`gatehouse db check`: a sound ledger passes, and each promise that is broken by hand is found and named."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import delete, insert, update

from appliance.base import tables
from appliance.base.db import Database
from appliance.base.ids import new_id
from appliance.cli import invariants
from tests.support.cast import Cast
from tests.support.clock import FakeClock
from tests.support.tampering import unkeep

PRICE = {"prompt": 1_500_000, "cached_prompt": 150_000, "completion": 6_000_000}


@pytest.fixture
async def ledger(database: Database, cast: Cast, clock: FakeClock) -> str:
    """One posted, one voided and one pending event of Bob's; return the id of the posted request."""
    price_id = new_id("price")
    price = {"id": price_id, "model": "demo", "effective_from": clock.now(), "currency": "EUR", "batch_percent": 100}
    shared = {
        "tenant_id": cast.bob.tenant.id,
        "key_id": cast.bob.key.id,
        "model": "demo",
        "endpoint": "/v1/chat/completions",
        "admitted_at": clock.now(),
    }
    billing_day = clock.now().date()
    event = {
        **shared,
        "epoch_id": cast.epoch_id,
        "kind": "usage",
        "reserved_tokens": 100,
        "prompt_tokens": 30,
        "cached_tokens": 16,
        "completion_tokens": 7,
        "estimated": False,
        "price_id": price_id,
        "currency": "EUR",
        "status": "posted",
        "finish_reason": "stop",
        "settled_at": clock.now(),
        "billing_day": billing_day,
        "posting": 1,
        "cost_picos": 14 * 1_500_000 + 16 * 150_000 + 7 * 6_000_000,
    }
    voided = {"status": "voided", "finish_reason": "refused", "cost_picos": 0, "completion_tokens": 0, "posting": 2}
    pending = {"status": "pending", "finish_reason": None, "cost_picos": 0, "settled_at": None, "posting": None}
    request = {
        "stream": True,
        "prompt_tokens": 30,
        "cached_tokens": 16,
        "completion_tokens": 7,
        "kv_blocks": 3,
        "preemptions": 0,
    }
    async with database.writing() as connection:
        await connection.execute(insert(tables.prices).values(**price, **PRICE, created_at=clock.now()))
        variants: list[dict[str, Any]] = [{}, voided, pending]
        for number, changes in enumerate(variants):
            await connection.execute(insert(tables.usage_events).values(**{**event, "request_id": f"req_{number}", **changes}))
        await connection.execute(insert(tables.requests).values(**shared, **request, id="req_0"))
    return "req_0"


async def change(database: Database, request_id: str, **values: Any) -> None:
    async with database.writing() as connection:
        events = tables.usage_events
        await unkeep(connection)
        await connection.execute(update(events).where(events.c.request_id == request_id).values(**values))


async def states(url: str, *, running: bool = True) -> dict[str, str]:
    return {finding.name: finding.state for finding in await invariants.check(url, running=running)}


async def broken(url: str) -> set[str]:
    return {name for name, state in (await states(url)).items() if state == "broken"}


async def test_a_sound_ledger_passes(database_url: str, ledger: str) -> None:
    found = await states(database_url)
    assert found == dict.fromkeys(("tables", "once", "pending", "settled", "counts", "cost", "sums"), "holds")


async def test_a_cost_that_is_one_pico_off_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, ledger, cost_picos=tables.usage_events.c.cost_picos + 1)
    assert await broken(database_url) == {"cost"}


async def test_a_voided_event_that_costs_something_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, "req_1", cost_picos=5)
    assert await broken(database_url) == {"cost"}


async def test_an_event_without_a_price_costs_nothing(database: Database, database_url: str, ledger: str) -> None:
    await change(database, ledger, price_id=None, cost_picos=0)
    assert await broken(database_url) == set()


async def test_counts_that_differ_from_the_request_are_found(database: Database, database_url: str, ledger: str) -> None:
    async with database.writing() as connection:
        await connection.execute(update(tables.requests).values(completion_tokens=8))
    assert await broken(database_url) == {"counts"}


async def test_more_cached_than_prompt_tokens_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, ledger, cached_tokens=31)
    assert "counts" in await broken(database_url)


async def test_a_settled_event_without_an_end_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, ledger, settled_at=None)
    assert await broken(database_url) == {"settled"}


async def test_a_pending_event_of_a_dead_process_is_found(
    database: Database, database_url: str, ledger: str, cast: Cast
) -> None:
    async with database.writing() as connection:
        later = {"id": new_id("ep"), "version": "test", "pid": 1}
        await connection.execute(insert(tables.epochs).values(**later, started_at=FakeClock().now().replace(year=2030)))
    assert await broken(database_url) == {"pending"}


async def test_after_a_kill_the_pending_events_wait_for_the_next_start(database_url: str, ledger: str) -> None:
    assert (await states(database_url, running=False))["pending"] == "note"


async def test_a_request_without_its_own_row_is_no_fault(database: Database, database_url: str, ledger: str) -> None:
    async with database.writing() as connection:
        await connection.execute(delete(tables.requests))
    assert await broken(database_url) == set()


async def test_a_batch_boundary_hides_nothing(
    database: Database, database_url: str, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariants, "BATCH_ROWS", 1)
    assert await broken(database_url) == set()
    await change(database, "req_1", cost_picos=5)
    assert await broken(database_url) == {"cost"}
