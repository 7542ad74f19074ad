"""API keys: shown once, verified by digest, and refused from the next call on after a change."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database
from appliance.base.errors import (
    AddressNotAllowed,
    Conflict,
    ExpiredApiKey,
    GatehouseError,
    InvalidApiKey,
    InvalidValue,
    ModelNotAllowed,
    NotFound,
    ScopeNotAllowed,
    TenantSuspended,
)
from appliance.base.tables import api_keys
from appliance.tenancy import keys as keys_module
from appliance.tenancy.fields import LIST_ITEMS_MAX
from appliance.tenancy.keys import Keys
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.networks import parse_networks
from appliance.tenancy.principals import ApiKey, KeyChanges, Limits, Tenant
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tiers import Tiers
from tests.support.case_ids import case_id
from tests.support.cast import OWNER, PEPPER, Cast, change_tenant
from tests.support.clock import FakeClock

LOCALHOST = "127.0.0.1"


@pytest.fixture
def keys(database: Database, clock: FakeClock) -> Keys:
    return Keys(database, clock, PEPPER)


def fail_after_commit(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every COMMIT succeed in the database and raise an error in the appliance."""
    transaction = database._transaction

    @asynccontextmanager
    async def failing_after_commit() -> AsyncIterator[AsyncConnection]:
        async with transaction() as connection:
            yield connection
        raise ConnectionResetError("after COMMIT")

    monkeypatch.setattr(database, "_transaction", failing_after_commit)


async def test_a_key_has_a_prefix_and_a_secret_that_is_not_stored(database: Database, keys: Keys, cast: Cast) -> None:
    key, secret = await keys.create(cast.bob.tenant.id, name="ci", access=OWNER)
    assert re.fullmatch(r"gh_[a-z2-7]{8}_[a-z2-7]{26}", secret)
    assert secret.startswith(key.prefix + "_")
    async with database.reading() as connection:
        row = (await connection.execute(select(api_keys).where(api_keys.c.id == key.id))).one()
    assert secret[-26:] not in repr(row)
    assert secret not in repr(key)


async def test_a_key_authenticates_its_tenant(keys: Keys, cast: Cast) -> None:
    for person in (cast.bob, cast.charlie):
        principal = await keys.authenticate(person.secret, LOCALHOST)
        assert (principal.tenant.id, principal.key.id) == (person.tenant.id, person.key.id)


async def test_every_kind_of_wrong_secret_is_refused(keys: Keys, cast: Cast) -> None:
    good = cast.bob.secret
    wrong = ["", "x", good[:-1], good + "a", good.upper(), good[:-1] + ("a" if good[-1] != "a" else "b"), "gh_" + "a" * 35]
    swapped = cast.bob.key.prefix + cast.charlie.secret[len(cast.charlie.key.prefix) :]
    unknown = f"gh_{'a' * 8}_{'a' * 26}"
    for secret in [*wrong, swapped, unknown, good + "\n", "gh_é"]:
        with pytest.raises(InvalidApiKey):
            await keys.authenticate(secret, LOCALHOST)


async def test_another_pepper_refuses_every_key(database: Database, clock: FakeClock, cast: Cast) -> None:
    with pytest.raises(InvalidApiKey):
        await Keys(database, clock, b"q" * 32).authenticate(cast.bob.secret, LOCALHOST)


async def test_a_cached_key_is_not_read_again_until_something_changes(keys: Keys, cast: Cast, database: Database) -> None:
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    async with database.writing() as connection:  # without invalidating the cache
        await connection.execute(update(api_keys).values(name="changed"))
    assert (await keys.authenticate(cast.bob.secret, LOCALHOST)).key.name == "bob's key"
    database.principal_changes.bump()
    assert (await keys.authenticate(cast.bob.secret, LOCALHOST)).key.name == "changed"


async def test_a_principal_has_the_change_count_at_which_it_was_read(keys: Keys, database: Database, cast: Cast) -> None:
    before = await keys.authenticate(cast.bob.secret, LOCALHOST)
    database.principal_changes.bump()
    after = await keys.authenticate(cast.bob.secret, LOCALHOST)

    assert before.change_count != database.principal_changes.value == after.change_count
    assert before == after


async def test_a_revoked_key_is_refused_by_the_next_call(keys: Keys, cast: Cast, clock: FakeClock) -> None:
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    revoked = await keys.revoke(cast.bob.key.id, access=OWNER)
    assert revoked.revoked_at == clock.now()
    with pytest.raises(InvalidApiKey):
        await keys.authenticate(cast.bob.secret, LOCALHOST)
    clock.advance(5)
    assert await keys.revoke(cast.bob.key.id, access=OWNER) == revoked
    await keys.authenticate(cast.charlie.secret, LOCALHOST)


async def test_a_revoked_key_is_refused_although_the_commit_raised_an_error(
    database: Database, keys: Keys, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    fail_after_commit(database, monkeypatch)
    with pytest.raises(ConnectionResetError):
        await keys.revoke(cast.bob.key.id, access=OWNER)

    with pytest.raises(InvalidApiKey):
        await keys.authenticate(cast.bob.secret, LOCALHOST)


async def test_every_change_is_counted_although_its_commit_raised_an_error(
    database: Database, keys: Keys, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants, policies, tiers = Tenants(database, clock), ModelPolicies(database, clock), Tiers(database, clock)
    bob, successor = cast.bob, cast.charlie
    changes: list[Callable[[], Awaitable[object]]] = [
        lambda: policies.put("demo", Limits(requests_per_minute=1)),
        lambda: policies.remove("demo"),
        lambda: tiers.update("batch", admission_wait_ms=1),
        lambda: tenants.create(name="dora", access=OWNER),
        lambda: change_tenant(tenants, bob, weight=2),
        lambda: tenants.limit_model(bob.tenant.id, "demo", {"requests_per_minute": 1}, access=OWNER),
        lambda: tenants.archive(bob.tenant.id, access=OWNER),
        lambda: keys.create(successor.tenant.id, name="ci", access=OWNER),
        lambda: keys.update(successor.key.id, KeyChanges(name="ci 2"), access=OWNER),
        lambda: keys.rotate(successor.key.id, access=OWNER),
        lambda: keys.revoke(bob.key.id, access=OWNER),
    ]
    fail_after_commit(database, monkeypatch)
    counts = [database.principal_changes.value]
    for change in changes:
        with pytest.raises(ConnectionResetError):
            await change()
        counts.append(database.principal_changes.value)

    assert counts == sorted(set(counts))


async def test_a_key_read_during_its_revocation_is_not_cached(keys: Keys, cast: Cast) -> None:
    for _ in range(5):
        key, secret = await keys.create(cast.bob.tenant.id, name="short-lived", access=OWNER)
        await asyncio.gather(
            *(keys.authenticate(secret, LOCALHOST) for _ in range(4)),
            keys.revoke(key.id, access=OWNER),
            return_exceptions=True,
        )
        with pytest.raises(InvalidApiKey):
            await keys.authenticate(secret, LOCALHOST)


async def test_a_key_expires_exactly_at_its_expiry(keys: Keys, cast: Cast, clock: FakeClock) -> None:
    _key, secret = await keys.create(
        cast.bob.tenant.id, "brief", KeyChanges(expires_at=clock.now() + timedelta(seconds=10)), access=OWNER
    )
    clock.advance(9.999999)
    await keys.authenticate(secret, LOCALHOST)
    clock.advance(0.000001)
    with pytest.raises(ExpiredApiKey):
        await keys.authenticate(secret, LOCALHOST)


async def test_keys_of_a_suspended_or_archived_tenant_are_refused_at_once(
    database: Database, clock: FakeClock, keys: Keys, cast: Cast
) -> None:
    tenants = Tenants(database, clock)
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    await change_tenant(tenants, cast.bob, suspended=True)
    with pytest.raises(TenantSuspended):
        await keys.authenticate(cast.bob.secret, LOCALHOST)
    await change_tenant(tenants, cast.bob, suspended=False)
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    await tenants.archive(cast.bob.tenant.id, access=OWNER)
    with pytest.raises(TenantSuspended):
        await keys.authenticate(cast.bob.secret, LOCALHOST)
    with pytest.raises(Conflict):
        await keys.create(cast.bob.tenant.id, name="late", access=OWNER)


async def test_a_principal_with_an_ended_key_or_tenant_is_not_usable(cast: Cast, clock: FakeClock) -> None:
    now, person = clock.now(), cast.bob.principal
    person.check_usable(now)
    key, tenant = person.key, person.tenant
    ended: list[tuple[dict[str, ApiKey | Tenant], type[GatehouseError], str]] = [
        ({"key": dataclasses.replace(key, revoked_at=now)}, InvalidApiKey, "revoked"),
        ({"key": dataclasses.replace(key, expires_at=now)}, ExpiredApiKey, "expired"),
        ({"tenant": dataclasses.replace(tenant, suspended=True)}, TenantSuspended, "is suspended$"),
        ({"tenant": dataclasses.replace(tenant, archived=True)}, TenantSuspended, "is archived$"),
    ]
    for change, error, reason in ended:
        with pytest.raises(error, match=reason):
            dataclasses.replace(person, **change).check_usable(now)  # type: ignore[arg-type]  # each under its own name


async def test_changed_limits_are_in_the_next_principal(database: Database, clock: FakeClock, keys: Keys, cast: Cast) -> None:
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    await change_tenant(Tenants(database, clock), cast.bob, limits={"tokens_per_minute": 3})
    await keys.update(cast.bob.key.id, KeyChanges(limits={"requests_per_minute": 4}), access=OWNER)
    principal = await keys.authenticate(cast.bob.secret, LOCALHOST)
    assert principal.tenant.limits == Limits(tokens_per_minute=3)
    assert principal.key.limits == Limits(requests_per_minute=4)


def test_the_networks_of_a_key_are_parsed_once_for_all_its_requests() -> None:
    networks = [f"2001:db8:{number:x}::/48" for number in range(LIST_ITEMS_MAX)]
    assert parse_networks(tuple(networks)) is parse_networks(tuple(networks))


@pytest.mark.parametrize(
    ("networks", "address", "allowed"),
    [
        (["10.0.0.0/8"], "10.255.0.1", True),
        (["10.0.0.0/8"], "11.0.0.1", False),
        (["10.0.0.0/8"], "::ffff:10.0.0.1", True),
        (["::ffff:10.0.0.0/104"], "10.255.0.1", True),
        (["::ffff:10.0.0.0/104"], "11.0.0.1", False),
        (["192.0.2.7"], "192.0.2.7", True),
        (["2001:db8::/32", "10.0.0.0/8"], "2001:db8::5", True),
        (["2001:db8::/32"], "10.0.0.1", False),
        (["0.0.0.0/0"], "not an address", False),
        ([], "10.0.0.1", False),
    ],
)
async def test_a_key_is_accepted_only_from_its_allowed_networks(
    keys: Keys, cast: Cast, networks: list[str], address: str, allowed: bool
) -> None:
    await keys.update(cast.bob.key.id, KeyChanges(allowed_networks=networks), access=OWNER)
    if allowed:
        await keys.authenticate(cast.bob.secret, address)
        return
    with pytest.raises(AddressNotAllowed):
        await keys.authenticate(cast.bob.secret, address)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"name": "\x07"}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["everything"]}, "scopes"),
        ({"allowed_networks": ["10.0.0.1/8"]}, "allowed_networks"),
        ({"allowed_networks": ["example.com"]}, "allowed_networks"),
        ({"allowed_networks": [10]}, "allowed_networks"),
        ({"allowed_networks": "10.0.0.0/8"}, "allowed_networks"),
        ({"allowed_networks": ""}, "allowed_networks"),
        ({"allowed_networks": [f"10.0.{n // 256}.{n % 256}" for n in range(LIST_ITEMS_MAX + 1)]}, "allowed_networks"),
        ({"allowed_models": "demo"}, "allowed_models"),
        ({"expires_at": FakeClock().now()}, "expires_at"),
        ({"expires_at": (FakeClock().now() + timedelta(days=1)).replace(tzinfo=None)}, "expires_at"),
    ],
    ids=case_id,
)
async def test_an_invalid_field_is_named_in_create_and_update(
    keys: Keys, cast: Cast, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        await keys.create(cast.bob.tenant.id, changes.get("name", "new"), KeyChanges(**changes), access=OWNER)
    assert refused.value.param == param
    with pytest.raises(InvalidValue) as refused:
        await keys.update(cast.bob.key.id, KeyChanges(**changes), access=OWNER)
    assert refused.value.param == param
    assert await keys.get(cast.bob.key.id, access=OWNER) == cast.bob.key


async def test_a_revoked_key_cannot_be_changed(keys: Keys, cast: Cast) -> None:
    await keys.revoke(cast.bob.key.id, access=OWNER)
    with pytest.raises(Conflict, match="revoked"):
        await keys.update(cast.bob.key.id, KeyChanges(name="again"), access=OWNER)
    assert (await keys.get(cast.bob.key.id, access=OWNER)).name == "bob's key"


async def test_unknown_tenants_and_keys_are_not_found(keys: Keys) -> None:
    for call in (
        keys.create("nobody", name="x", access=OWNER),
        keys.get("nothing", access=OWNER),
        keys.revoke("nothing", access=OWNER),
        keys.rotate("nothing", access=OWNER),
    ):
        with pytest.raises(NotFound):
            await call
    with pytest.raises(NotFound):
        await keys.update("nothing", KeyChanges(name="x"), access=OWNER)


async def test_the_list_of_a_tenant_has_only_its_own_keys(keys: Keys, cast: Cast) -> None:
    for number in range(4):
        await keys.create(cast.bob.tenant.id, name=f"bob {number}", access=OWNER)
    first = await keys.list(cast.bob.tenant.id, 3, access=OWNER)
    second = await keys.list(cast.bob.tenant.id, 3, first.next_cursor, access=OWNER)
    assert len(first.data + second.data) == 5
    assert {key.tenant_id for key in first.data + second.data} == {cast.bob.tenant.id}
    assert len((await keys.list(None, access=OWNER)).data) == 6
    key_ids = [cast.charlie.key.id, first.data[1].id, "nothing"]
    assert {key.id for key in await keys.named(key_ids, access=OWNER)} == set(key_ids[:2])


async def test_keys_are_filtered_by_state_and_found_by_name_prefix_or_secret(
    database: Database, keys: Keys, cast: Cast, clock: FakeClock
) -> None:
    bob, made = cast.bob, {}
    for name, expires_at in (("spare", None), ("Night_shift", clock.now() + timedelta(seconds=9)), ("rotated", None)):
        made[name] = await keys.create(bob.tenant.id, name, KeyChanges(expires_at=expires_at), access=OWNER)
    await keys.revoke(made["spare"][0].id, access=OWNER)
    await keys.rotate(made["rotated"][0].id, grace_s=60, access=OWNER)
    clock.advance(61)

    async def listed(**filters: Any) -> list[str]:
        return [key.name for key in (await keys.list(bob.tenant.id, access=OWNER, **filters)).data]

    assert await listed() == [bob.key.name, "spare", "Night_shift", "rotated", "rotated"]
    assert await listed(include_revoked=False) == [bob.key.name, "Night_shift", "rotated", "rotated"]
    assert await listed(include_ended=False) == [bob.key.name, "Night_shift", "rotated"]
    assert await listed(text="t_S") == ["Night_shift"]
    assert await listed(text="%") == []
    for text in (made["spare"][0].prefix, made["spare"][0].prefix[4:], made["spare"][1]):
        assert await listed(text=text) == ["spare"]
    await Tenants(database, clock).archive(bob.tenant.id, access=OWNER)
    assert await listed(include_ended=False) == []


async def test_times_of_use_are_written_in_batches_and_never_go_back(keys: Keys, cast: Cast, clock: FakeClock) -> None:
    await keys.flush_last_used()
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    assert (await keys.get(cast.bob.key.id, access=OWNER)).last_used_at is None
    await keys.flush_last_used()
    used_at = clock.now()
    assert (await keys.get(cast.bob.key.id, access=OWNER)).last_used_at == used_at
    assert (await keys.get(cast.charlie.key.id, access=OWNER)).last_used_at is None
    clock.jump_wall(-3600)
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    await keys.flush_last_used()
    assert (await keys.get(cast.bob.key.id, access=OWNER)).last_used_at == used_at
    clock.jump_wall(7200)
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    await keys.flush_last_used()
    assert (await keys.get(cast.bob.key.id, access=OWNER)).last_used_at == clock.now() > used_at


async def test_a_time_of_use_that_could_not_be_written_is_written_later(
    database: Database, keys: Keys, cast: Cast, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keys.authenticate(cast.bob.secret, LOCALHOST)
    used_at, writing = clock.now(), database.writing

    @asynccontextmanager
    async def fails() -> AsyncIterator[AsyncConnection]:
        clock.advance(9)
        await keys.authenticate(cast.charlie.secret, LOCALHOST)
        async with writing() as connection:
            yield connection
            raise ConnectionResetError

    with monkeypatch.context() as outage:
        outage.setattr(database, "writing", fails)
        with pytest.raises(ConnectionResetError):
            await keys.flush_last_used()
    await keys.flush_last_used()
    times = [(await keys.get(each.key.id, access=OWNER)).last_used_at for each in (cast.bob, cast.charlie)]
    assert times == [used_at, clock.now()]


async def test_the_cache_of_keys_is_bounded(keys: Keys, cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "CACHED_KEYS_MAX", 1)
    for person in (cast.bob, cast.charlie, cast.bob):
        assert (await keys.authenticate(person.secret, LOCALHOST)).key.id == person.key.id
        assert len(keys._cache) == 1


async def test_models_and_scopes_are_checked_at_tenant_and_key(
    database: Database, clock: FakeClock, keys: Keys, cast: Cast
) -> None:
    await change_tenant(Tenants(database, clock), cast.bob, allowed_models=["a", "b"])
    await keys.update(cast.bob.key.id, KeyChanges(allowed_models=["b", "c"]), access=OWNER)
    principal = await keys.authenticate(cast.bob.secret, LOCALHOST)
    principal.check_model("b")
    principal.check_scope("inference")
    for model in ("a", "c", "d"):
        with pytest.raises(ModelNotAllowed):
            principal.check_model(model)
    with pytest.raises(ScopeNotAllowed):
        principal.check_scope("admin")


async def test_active_keys_are_limited_per_tenant(
    keys: Keys, cast: Cast, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "KEYS_OF_TENANT_MAX", 2)
    brief, _ = await keys.create(
        cast.bob.tenant.id, "brief", KeyChanges(expires_at=clock.now() + timedelta(seconds=1)), access=OWNER
    )
    for work in (
        keys.create(cast.bob.tenant.id, name="third", access=OWNER),
        keys.rotate(brief.id, grace_s=60, access=OWNER),
    ):
        with pytest.raises(InvalidValue, match="at most 2 active keys"):
            await work
    await keys.rotate(cast.bob.key.id, access=OWNER)
    clock.advance(1)
    await keys.create(cast.bob.tenant.id, name="third", access=OWNER)
    await keys.create(cast.charlie.tenant.id, name="of another tenant", access=OWNER)
