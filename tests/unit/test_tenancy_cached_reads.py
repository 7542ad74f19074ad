"""Keys, tiers and model policies are read once for all who need them at once, only after a change that concerns them, and never
served from a read that began before a change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database
from appliance.base.errors import InvalidApiKey
from appliance.tenancy.keys import Keys
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import KeyChanges, Limits
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tiers import Tiers
from tests.support.cast import OWNER, PEPPER, Cast, change_tenant
from tests.support.clock import FakeClock
from tests.support.ledgers import euro_prices

pytestmark = pytest.mark.on_either_database

LOCALHOST = "127.0.0.1"
CALLERS = 20


class Readings:
    """Counts the reads of a database. While `may_return` is not set, they have read but do not return yet."""

    def __init__(self, database: Database) -> None:
        self.count = 0
        self.has_read = asyncio.Event()
        self.may_return = asyncio.Event()
        self.may_return.set()
        self._reading = database.reading

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[AsyncConnection]:
        self.count += 1
        async with self._reading() as connection:
            yield connection
        self.has_read.set()
        await self.may_return.wait()


@pytest.fixture
def readings(database: Database, monkeypatch: pytest.MonkeyPatch) -> Readings:
    readings = Readings(database)
    monkeypatch.setattr(database, "reading", readings)
    return readings


@pytest.fixture
def keys(database: Database, clock: FakeClock) -> Keys:
    return Keys(database, clock, PEPPER)


async def test_requests_of_one_key_at_once_cost_one_read(keys: Keys, cast: Cast, readings: Readings) -> None:
    principals = await asyncio.gather(*(keys.authenticate(cast.bob.secret, LOCALHOST) for _ in range(CALLERS)))
    assert {principal.key.id for principal in principals} == {cast.bob.key.id}
    assert readings.count == 1


async def test_requests_of_one_revoked_key_at_once_are_all_refused_by_one_read(
    keys: Keys, cast: Cast, readings: Readings
) -> None:
    await keys.revoke(cast.bob.key.id, access=OWNER)
    calls = (keys.authenticate(cast.bob.secret, LOCALHOST) for _ in range(CALLERS))
    refused = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in refused} == {InvalidApiKey}
    assert readings.count == 1


async def test_tiers_policies_and_prices_cost_one_read_each(database: Database, clock: FakeClock, readings: Readings) -> None:
    policies, tiers, prices = ModelPolicies(database, clock), Tiers(database, clock), euro_prices(database, clock)
    await asyncio.gather(*(policies.find("demo") for _ in range(CALLERS)))
    await asyncio.gather(*(tiers.get("batch") for _ in range(CALLERS)))
    await asyncio.gather(*(prices.current("demo", clock.now()) for _ in range(CALLERS)))
    assert readings.count == 3


async def test_a_read_that_began_before_a_revocation_serves_no_request_that_came_after_it(
    keys: Keys, cast: Cast, readings: Readings
) -> None:
    readings.may_return.clear()
    before = asyncio.create_task(keys.authenticate(cast.bob.secret, LOCALHOST))
    await readings.has_read.wait()
    await keys.revoke(cast.bob.key.id, access=OWNER)

    after = asyncio.create_task(keys.authenticate(cast.bob.secret, LOCALHOST))
    readings.may_return.set()
    with pytest.raises(InvalidApiKey):
        await after
    await before
    with pytest.raises(InvalidApiKey):  # nor does what that read has left behind
        await keys.authenticate(cast.bob.secret, LOCALHOST)


async def test_a_client_that_leaves_while_its_key_is_read_costs_the_others_nothing(
    keys: Keys, cast: Cast, readings: Readings
) -> None:
    readings.may_return.clear()
    first, second = (asyncio.create_task(keys.authenticate(cast.bob.secret, LOCALHOST)) for _ in range(2))
    await readings.has_read.wait()
    first.cancel()
    await asyncio.wait({first})
    readings.may_return.set()
    assert (await second).key.id == cast.bob.key.id
    assert readings.count == 1


async def test_a_change_that_does_not_concern_a_key_costs_it_no_read(
    database: Database, clock: FakeClock, keys: Keys, cast: Cast, readings: Readings
) -> None:
    tenants, policies, tiers = Tenants(database, clock), ModelPolicies(database, clock), Tiers(database, clock)
    bob, charlie = cast.bob, cast.charlie
    changes: list[Callable[[], Awaitable[object]]] = [
        lambda: keys.update(charlie.key.id, KeyChanges(name="ci"), access=OWNER),
        lambda: keys.create(bob.tenant.id, name="another", access=OWNER),
        lambda: keys.rotate(charlie.key.id, access=OWNER),
        lambda: change_tenant(tenants, charlie, weight=2),
        lambda: tenants.archive(charlie.tenant.id, access=OWNER),
        lambda: tenants.create(name="dora", access=OWNER),
        lambda: policies.put("demo", Limits(requests_per_minute=1)),
        lambda: tiers.update("batch", admission_wait_ms=1),
    ]
    await keys.authenticate(bob.secret, LOCALHOST)
    for change in changes:
        await change()
        read_before = readings.count
        await keys.authenticate(bob.secret, LOCALHOST)
        assert readings.count == read_before


async def test_every_change_of_a_key_or_its_tenant_is_in_its_next_principal(
    database: Database, clock: FakeClock, keys: Keys, cast: Cast
) -> None:
    tenants, bob = Tenants(database, clock), cast.bob
    seen = [await keys.authenticate(bob.secret, LOCALHOST)]
    changes: list[Callable[[], Awaitable[object]]] = [
        lambda: keys.update(bob.key.id, KeyChanges(name="ci"), access=OWNER),
        lambda: change_tenant(tenants, bob, weight=2),
        lambda: tenants.limit_model(bob.tenant.id, "demo", {"requests_per_minute": 1}, access=OWNER),
        lambda: keys.rotate(bob.key.id, grace_s=60, access=OWNER),
    ]
    for change in changes:
        await change()
        seen.append(await keys.authenticate(bob.secret, LOCALHOST))
        assert seen[-1] != seen[-2]


async def test_a_changed_tier_or_policy_applies_from_the_next_look_up(database: Database, clock: FakeClock) -> None:
    policies, tiers = ModelPolicies(database, clock), Tiers(database, clock)
    assert (await policies.find("demo"), (await tiers.get("batch")).admission_wait_ms) == (None, 0)
    policy = await policies.put("demo", Limits(requests_per_minute=1))
    await tiers.update("batch", admission_wait_ms=1)
    assert (await policies.find("demo"), (await tiers.get("batch")).admission_wait_ms) == (policy, 1)
