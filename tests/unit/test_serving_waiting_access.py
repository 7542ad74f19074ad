"""A request that waits for its limits ends at once with the error that the next request of its key would get."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.base.errors import (
    AddressNotAllowed,
    ExpiredApiKey,
    GatehouseError,
    InvalidApiKey,
    ModelNotAllowed,
    RequestExceedsLimit,
    ScopeNotAllowed,
    TenantSuspended,
)
from appliance.metering.limits.rules import Rule
from appliance.serving.generation import Generation
from appliance.tenancy.keys import Keys
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import KeyChanges, Limits, TenantChanges
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tiers import Tiers
from tests.support.cast import OWNER, PEPPER, Cast, Person, change_tenant, make_person
from tests.support.clock import FakeClock
from tests.support.fake_engine import STALL
from tests.support.generations import MODEL, Serving, open_watching_serving
from tests.support.ledgers import num_running, num_waiting
from tests.support.polling import poll_until

pytestmark = pytest.mark.on_either_database

TEXT = "the quick brown fox"


@pytest.fixture
async def serving(database: Database, clock: FakeClock, cast: Cast, tmp_path: Path) -> AsyncIterator[Serving]:
    async with open_watching_serving(database, clock, tmp_path / "model", cast.epoch_id) as opened:
        yield opened


@pytest.fixture
async def dora(serving: Serving, database: Database, clock: FakeClock) -> Person:
    """A person whose requests wait for a minute, because one of another key of her tenant runs."""
    first = await make_person(database, clock, "dora", Limits(concurrent_requests=1))
    key, secret = await Keys(database, clock, PEPPER).create(first.tenant.id, name="second", access=OWNER)
    await Tiers(database, clock).update(first.tenant.tier, admission_wait_ms=60_000)
    await serving.start(first, [STALL, 5])
    return dataclasses.replace(first, key=key, secret=secret)


Change = Callable[[Keys, Tenants, Person, FakeClock], Coroutine[Any, Any, object]]


def key_change(**changes: Any) -> Change:
    return lambda keys, _tenants, who, _clock: keys.update(who.key.id, KeyChanges(**changes), access=OWNER)


def tenant_change(**changes: Any) -> Change:
    return lambda _keys, tenants, who, _clock: change_tenant(tenants, who, **changes)


def expiring(keys: Keys, _tenants: Tenants, who: Person, clock: FakeClock) -> Coroutine[Any, Any, object]:
    soon = clock.now() + timedelta(milliseconds=20)
    return keys.update(who.key.id, KeyChanges(expires_at=soon), access=OWNER)


CHANGES: dict[str, tuple[Change, type[GatehouseError]]] = {
    "key revoked": (lambda keys, _tenants, who, _clock: keys.revoke(who.key.id, access=OWNER), InvalidApiKey),
    "key will expire": (expiring, ExpiredApiKey),
    "network no longer allowed": (key_change(allowed_networks=("198.51.100.0/24",)), AddressNotAllowed),
    "scope removed": (key_change(scopes=("usage",)), ScopeNotAllowed),
    "model no longer allowed": (key_change(allowed_models=("other",)), ModelNotAllowed),
    "tenant suspended": (tenant_change(suspended=True), TenantSuspended),
    "tenant archived": (
        lambda _keys, tenants, who, _clock: tenants.archive(who.tenant.id, access=OWNER),
        TenantSuspended,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_waiting_request_that_lost_its_access_ends_at_once(
    serving: Serving, database: Database, clock: FakeClock, dora: Person, change: str
) -> None:
    waiting = asyncio.create_task(serving.start(dora, TEXT))
    await poll_until(lambda: num_waiting(serving.admission) == 1)
    make, error = CHANGES[change]
    await make(Keys(database, clock, PEPPER), Tenants(database, clock), dora, clock)
    with pytest.raises(error):
        await waiting
    assert num_waiting(serving.admission) == 0


async def test_a_request_whose_access_was_lost_before_it_waits_ends_too(
    serving: Serving, database: Database, clock: FakeClock, dora: Person
) -> None:
    await Keys(database, clock, PEPPER).revoke(dora.key.id, access=OWNER)
    await poll_until(lambda: not serving.generations._watch._check_due.is_set())
    with pytest.raises(InvalidApiKey):
        await serving.start(dora, TEXT)


async def test_a_waiting_request_ends_when_its_key_expires(
    serving: Serving, database: Database, clock: FakeClock, dora: Person
) -> None:
    terms = KeyChanges(expires_at=clock.now() + timedelta(milliseconds=20))
    key = await Keys(database, clock, PEPPER).update(dora.key.id, terms, access=OWNER)
    with pytest.raises(ExpiredApiKey):
        await serving.start(dataclasses.replace(dora, key=key), TEXT)


async def test_a_change_of_one_key_ends_no_waiting_request_of_another(
    serving: Serving, database: Database, clock: FakeClock, dora: Person, cast: Cast
) -> None:
    waiting = asyncio.create_task(serving.start(dora, TEXT))
    await poll_until(lambda: num_waiting(serving.admission) == 1)
    await Keys(database, clock, PEPPER).revoke(cast.bob.key.id, access=OWNER)
    await serving.generations._watch.check()
    assert num_waiting(serving.admission) == 1
    assert not waiting.done()
    waiting.cancel()


async def test_a_request_that_is_admitted_again_does_not_bring_back_the_limits_of_its_arrival(
    serving: Serving, database: Database, clock: FakeClock
) -> None:
    dora = await make_person(database, clock, "dora", Limits(concurrent_requests=2))
    await Tiers(database, clock).update(dora.tenant.tier, admission_wait_ms=60_000)
    running = [await serving.start(dora, [STALL, 5]) for _ in range(2)]
    waiting = [asyncio.create_task(serving.start(dora, [STALL, 5])) for _ in range(2)]
    await poll_until(lambda: num_waiting(serving.admission) == 2)
    lower = TenantChanges(limits={"concurrent_requests": 1})
    await Tenants(database, clock).update(dora.tenant.id, lower, access=OWNER)
    await serving.generations._watch.check()
    await serving.generations._prices.add(model=MODEL, currency="EUR", prompt=1, cached_prompt=1, completion=1)
    for generation in running:
        generation.end_early("disconnected")
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await poll_until(lambda: num_waiting(serving.admission) + sum(task.done() for task in waiting) == len(waiting))
    assert num_running(serving.admission, dora.tenant.id) == 1
    for task in waiting:
        task.cancel()


@pytest.mark.parametrize("change", [TenantChanges(currency="USD"), TenantChanges(tier="batch")], ids=["currency", "tier"])
async def test_a_request_is_admitted_on_the_terms_that_its_tenant_has_when_its_wait_ends(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast, change: TenantChanges
) -> None:
    for currency, percent in (("EUR", 50), ("USD", 100)):
        await serving.generations._prices.add(
            model=MODEL, currency=currency, prompt=1, cached_prompt=1, completion=1, tier_percents={"batch": percent}
        )
    dora = await make_person(database, clock, "dora")
    await Tiers(database, clock).update(dora.tenant.tier, admission_wait_ms=60_000)
    await ModelPolicies(database, clock).put(MODEL, Limits(concurrent_requests=1))
    running = await serving.start(cast.bob, [STALL, 5])
    waiting = asyncio.create_task(serving.start(dora, TEXT))
    await poll_until(lambda: num_waiting(serving.admission) == 1)
    changed = await Tenants(database, clock).update(dora.tenant.id, change, access=OWNER)
    await serving.generations._watch.check()
    running.end_early("disconnected")
    event = await serving.event(await waiting)
    terms = (event.currency, event.price_basis_points)
    assert terms == (("USD", 10_000) if changed.currency else ("EUR", 5_000))


async def test_a_request_that_is_admitted_again_keeps_its_place(serving: Serving, database: Database, clock: FakeClock) -> None:
    dora = await make_person(database, clock, "dora", Limits(concurrent_requests=1))
    await Tiers(database, clock).update(dora.tenant.tier, admission_wait_ms=60_000)
    running = await serving.start(dora, [STALL, 5])
    first = asyncio.create_task(serving.start(dora, [STALL, 5]))
    await poll_until(lambda: num_waiting(serving.admission) == 1)
    await serving.generations._prices.add(model=MODEL, currency="EUR", prompt=1, cached_prompt=1, completion=1)
    second = asyncio.create_task(serving.start(dora, [STALL, 5]))
    await poll_until(lambda: num_waiting(serving.admission) == 2)

    running.end_early("disconnected")
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    assert (first.done(), second.done()) == (True, False)
    assert (await serving.event(first.result())).price_id is not None
    second.cancel()


async def wait_unseen_by_the_watch(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> tuple[Person, Generation, asyncio.Task[Generation]]:
    """Return a person without usage, another person's request, and one of hers that waits for its end. What changes from then
    on is not read by the access watch."""
    dora = await make_person(database, clock, "dora")
    await Tiers(database, clock).update(dora.tenant.tier, admission_wait_ms=60_000)
    await ModelPolicies(database, clock).put(MODEL, Limits(concurrent_requests=1))
    running = await serving.start(cast.bob, [STALL, 5])
    waiting = asyncio.create_task(serving.start(dora, TEXT))
    await poll_until(lambda: num_waiting(serving.admission) == 1)
    monkeypatch.setattr(database.principal_changes, "listeners", [])
    return dora, running, waiting


async def test_no_request_is_admitted_in_a_currency_that_its_tenant_no_longer_has(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    dora, running, waiting = await wait_unseen_by_the_watch(serving, database, clock, cast, monkeypatch)
    await change_tenant(Tenants(database, clock), dora, currency="USD")
    running.end_early("disconnected")
    assert (await serving.event(await waiting)).currency == "USD"


async def test_no_request_is_admitted_with_a_key_that_is_revoked(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    dora, running, waiting = await wait_unseen_by_the_watch(serving, database, clock, cast, monkeypatch)
    await Keys(database, clock, PEPPER).revoke(dora.key.id, access=OWNER)
    running.end_early("disconnected")
    with pytest.raises(InvalidApiKey):
        await waiting
    assert num_running(serving.admission, dora.tenant.id) == 0


@pytest.mark.parametrize("owner", ["tenant", "key", "model"])
async def test_no_request_is_admitted_on_limits_that_were_lowered_while_usage_was_read(
    serving: Serving, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    roomy, narrow = {"tokens_per_minute": 1000}, {"tokens_per_minute": 1}
    dora, policies = await make_person(database, clock, "dora", Limits(**roomy)), serving.generations._policies
    await policies.put(MODEL, Limits(**roomy))
    is_read, may_return = asyncio.Event(), asyncio.Event()
    load = serving.admission._loader.ensure_loaded

    async def load_slowly(rules: Sequence[Rule]) -> None:
        await load(rules)
        is_read.set()
        await may_return.wait()

    monkeypatch.setattr(serving.admission._loader, "ensure_loaded", load_slowly)
    starting = asyncio.create_task(serving.start(dora, TEXT))
    await is_read.wait()
    changes: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "tenant": lambda: change_tenant(Tenants(database, clock), dora, limits=narrow),
        "key": lambda: Keys(database, clock, PEPPER).update(dora.key.id, KeyChanges(limits=narrow), access=OWNER),
        "model": lambda: policies.put(MODEL, Limits(**narrow)),
    }
    await changes[owner]()
    await serving.generations._watch.check()
    may_return.set()
    with pytest.raises(RequestExceedsLimit):
        await starting
