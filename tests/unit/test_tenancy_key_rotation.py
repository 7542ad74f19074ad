"""Rotation of API keys: the successor, the grace period of the old key, and what is refused."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from appliance.base.db import Database
from appliance.base.errors import Conflict, ExpiredApiKey, InvalidApiKey, InvalidValue
from appliance.base.tables import tenants
from appliance.tenancy import audit
from appliance.tenancy.keys import GRACE_S_MAX, Keys
from appliance.tenancy.principals import KeyChanges
from appliance.tenancy.tenants import Tenants
from tests.support.cast import OWNER, PEPPER, Cast
from tests.support.clock import FakeClock
from tests.support.databases import transaction_is_blocked
from tests.support.polling import poll_until

LOCALHOST = "127.0.0.1"


@pytest.fixture
def keys(database: Database, clock: FakeClock) -> Keys:
    return Keys(database, clock, PEPPER)


async def test_rotation_creates_a_successor_and_refuses_the_old_key(keys: Keys, cast: Cast) -> None:
    limited = await keys.update(
        cast.bob.key.id, KeyChanges(limits={"tokens_per_minute": 5}, allowed_networks=["10.0.0.0/8"]), access=OWNER
    )
    successor, secret = await keys.rotate(cast.bob.key.id, access=OWNER)
    assert successor.id != limited.id
    assert (successor.name, successor.limits, successor.allowed_networks) == (
        limited.name,
        limited.limits,
        limited.allowed_networks,
    )
    with pytest.raises(InvalidApiKey):
        await keys.authenticate(cast.bob.secret, "10.1.1.1")
    assert (await keys.authenticate(secret, "10.1.1.1")).key.id == successor.id
    with pytest.raises(Conflict):
        await keys.rotate(cast.bob.key.id, access=OWNER)


async def test_a_key_is_rotated_while_a_new_name_of_its_tenant_is_being_recorded(
    keys: Keys, cast: Cast, clock: FakeClock, database: Database, database_url: str
) -> None:
    async with database.writing() as connection:
        await connection.execute(update(tenants).where(tenants.c.id == cast.bob.tenant.id).values(name="renamed"))
        rotating = asyncio.create_task(keys.rotate(cast.bob.key.id, access=OWNER))
        await poll_until(lambda: database.kind == "sqlite" or transaction_is_blocked(database_url))
        await audit.record(connection, clock, "tenant.update", "tenant", cast.bob.tenant.id)
    successor, _secret = await rotating
    assert successor.revoked_at is None


async def test_during_the_grace_period_both_secrets_are_valid(keys: Keys, cast: Cast, clock: FakeClock) -> None:
    successor, secret = await keys.rotate(cast.bob.key.id, grace_s=60, access=OWNER)
    old = await keys.get(cast.bob.key.id, access=OWNER)

    assert (old.replaced_by, old.revoked_at) == (successor.id, None)
    assert old.expires_at == clock.now() + timedelta(seconds=60)
    assert (successor.expires_at, successor.replaced_by) == (None, None)
    clock.advance(59.999)
    assert (await keys.authenticate(cast.bob.secret, LOCALHOST)).key.id == old.id
    assert (await keys.authenticate(secret, LOCALHOST)).key.id == successor.id
    clock.advance(0.001)
    with pytest.raises(ExpiredApiKey):
        await keys.authenticate(cast.bob.secret, LOCALHOST)
    assert (await keys.authenticate(secret, LOCALHOST)).key.id == successor.id


async def test_a_grace_period_does_not_extend_the_life_of_a_key(keys: Keys, cast: Cast, clock: FakeClock) -> None:
    end = clock.now() + timedelta(seconds=30)
    key, _ = await keys.create(cast.bob.tenant.id, "brief", KeyChanges(expires_at=end), access=OWNER)
    successor, _ = await keys.rotate(key.id, grace_s=60, access=OWNER)

    assert (await keys.get(key.id, access=OWNER)).expires_at == end
    assert successor.expires_at == end
    for changes in (KeyChanges(expires_at=None), KeyChanges(expires_at=end + timedelta(days=1))):
        with pytest.raises(Conflict) as refused:
            await keys.update(key.id, changes, access=OWNER)
        assert refused.value.param == "expires_at"
    assert (await keys.update(key.id, KeyChanges(name="old"), access=OWNER)).expires_at == end


async def test_a_key_in_its_grace_period_can_still_be_revoked(keys: Keys, cast: Cast) -> None:
    await keys.rotate(cast.bob.key.id, grace_s=60, access=OWNER)
    await keys.revoke(cast.bob.key.id, access=OWNER)

    with pytest.raises(InvalidApiKey):
        await keys.authenticate(cast.bob.secret, LOCALHOST)


async def test_of_two_concurrent_rotations_one_succeeds(keys: Keys, cast: Cast) -> None:
    answers = await asyncio.gather(
        keys.rotate(cast.bob.key.id, access=OWNER),
        keys.rotate(cast.bob.key.id, access=OWNER),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, Conflict) for answer in answers) == 1
    assert len((await keys.list(cast.bob.tenant.id, access=OWNER)).data) == 2


async def test_a_refused_rotation_states_its_reason(keys: Keys, cast: Cast, clock: FakeClock) -> None:
    soon = KeyChanges(expires_at=clock.now() + timedelta(seconds=9))
    brief, _ = await keys.create(cast.bob.tenant.id, "x", soon, access=OWNER)
    revoked, _ = await keys.create(cast.bob.tenant.id, name="x", access=OWNER)
    await keys.revoke(revoked.id, access=OWNER)
    successor, _ = await keys.rotate(cast.bob.key.id, grace_s=60, access=OWNER)
    clock.advance(9)
    for key, reason in (
        (brief, "an expired key"),
        (revoked, "a revoked key"),
        (cast.bob.key, f"rotated already; rotate its successor {successor.id}"),
    ):
        with pytest.raises(Conflict, match=reason):
            await keys.rotate(key.id, access=OWNER)


async def test_a_key_of_an_archived_tenant_cannot_be_rotated(
    keys: Keys, cast: Cast, database: Database, clock: FakeClock
) -> None:
    await Tenants(database, clock).archive(cast.bob.tenant.id, access=OWNER)
    with pytest.raises(Conflict, match="archived"):
        await keys.rotate(cast.bob.key.id, access=OWNER)
    assert len((await keys.list(cast.bob.tenant.id, access=OWNER)).data) == 1


@pytest.mark.parametrize("grace_s", [-1, GRACE_S_MAX + 1, 1.5, True])
async def test_an_invalid_grace_period_is_refused_with_its_bounds(keys: Keys, cast: Cast, grace_s: Any) -> None:
    with pytest.raises(InvalidValue, match=f"from 0 to {GRACE_S_MAX}") as refused:
        await keys.rotate(cast.bob.key.id, grace_s=grace_s, access=OWNER)

    assert refused.value.param == "grace_s"
    assert (await keys.get(cast.bob.key.id, access=OWNER)).replaced_by is None
