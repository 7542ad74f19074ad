"""Each change of tenants, keys, members, tokens and prices has one audit entry with actor, target, old and new values."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from sqlalchemy import select

from appliance.base.acting import Actor, acting
from appliance.base.db import Database
from appliance.base.errors import GatehouseError, InvalidValue, NameTaken
from appliance.base.tables import audit_log
from appliance.metering.ledger.epochs import begin_epoch
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.audit_chain import AuditEntry
from appliance.tenancy.keys import Keys
from appliance.tenancy.members import Members
from appliance.tenancy.principals import KeyChanges, TenantChanges
from appliance.tenancy.sessions import Sessions
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tiers import ADMISSION_WAIT_MS_DEFAULT, Tiers
from tests.support.cast import OWNER, PEPPER, Cast
from tests.support.clock import FakeClock
from tests.support.factories import pending
from tests.support.ledgers import euro_prices, running_ledger, utc_recover

ALICE = Actor(kind="member", name="alice@example.com", id="mb_alice", request_id="req_1", address="10.0.0.7")


async def entries(database: Database) -> list[AuditEntry]:
    """Return the entries of Alice's actions, oldest first."""
    page = await AuditLog(database, FakeClock()).page(1000, access=OWNER)
    return [entry for entry in page.data[::-1] if entry.actor_name == ALICE.name]


async def audited_changes(database: Database) -> list[tuple[str, str | None, Any, Any]]:
    """Return (action, tenant, before, after) of Alice's actions."""
    return [
        (entry.action, entry.tenant_id, json.loads(entry.before or "null"), json.loads(entry.after or "null"))
        for entry in await entries(database)
    ]


async def test_changes_of_a_tenant_are_audited(database: Database, clock: FakeClock, cast: Cast) -> None:
    tenants = Tenants(database, clock)
    with acting(ALICE):
        made = await tenants.create("dora", TenantChanges(tier="batch"), access=OWNER)
        await tenants.update(made.id, TenantChanges(weight=3, limits={"tokens_per_minute": 500}), access=OWNER)
        await tenants.update(made.id, TenantChanges(weight=3), access=OWNER)
        await tenants.limit_model(made.id, "demo", {"requests_per_minute": 2}, access=OWNER)
        await tenants.archive(made.id, access=OWNER)
        await tenants.archive(made.id, access=OWNER)
    created, changed, limited, archived = await audited_changes(database)
    assert created[:3] == ("tenant.create", made.id, None)
    assert (created[3]["name"], created[3]["tier"], created[3]["limits"]["tokens_per_minute"]) == ("dora", "batch", None)
    before, after = {"limits": {"tokens_per_minute": None}, "weight": 1}, {"limits": {"tokens_per_minute": 500}, "weight": 3}
    assert changed == ("tenant.update", made.id, before, after)
    assert limited[3]["model_limits"]["demo"]["requests_per_minute"] == 2
    assert (archived[0], archived[2]["archived"], archived[3]["archived"]) == ("tenant.archive", False, True)


async def test_a_changed_tier_is_audited_with_its_former_wait(database: Database, clock: FakeClock) -> None:
    tiers = Tiers(database, clock)
    with acting(ALICE):
        for wait_ms in (1500, 200):
            await tiers.update("standard", admission_wait_ms=wait_ms)
    assert await audited_changes(database) == [
        ("tier.update", None, {"admission_wait_ms": before}, {"admission_wait_ms": after})
        for before, after in ((ADMISSION_WAIT_MS_DEFAULT, 1500), (1500, 200))
    ]


async def test_changes_of_a_key_are_audited(database: Database, clock: FakeClock, cast: Cast) -> None:
    keys = Keys(database, clock, PEPPER)
    with acting(ALICE):
        made, secret = await keys.create(cast.bob.tenant.id, name="ci", access=OWNER)
        await keys.update(made.id, KeyChanges(name="nightly"), access=OWNER)
        fresh, fresh_secret = await keys.rotate(made.id, grace_s=60, access=OWNER)
        await keys.revoke(fresh.id, access=OWNER)
        await keys.revoke(fresh.id, access=OWNER)
    rows = await audited_changes(database)
    assert [row[0] for row in rows] == ["key.create", "key.update", "key.rotate", "key.create", "key.revoke"]
    assert {row[1] for row in rows} == {cast.bob.tenant.id}
    assert rows[1][2:] == ({"name": "ci"}, {"name": "nightly"})
    assert rows[2][3]["replaced_by"] == fresh.id
    assert [entry.target_id for entry in await entries(database)] == [made.id, made.id, made.id, fresh.id, fresh.id]
    assert rows[4][2] == {"revoked_at": None}
    await assert_not_in_log(database, secret, fresh_secret, secret.rpartition("_")[2])


async def test_changes_of_members_and_sessions_are_audited(database: Database, clock: FakeClock) -> None:
    members, sessions = Members(database, clock), Sessions(database, clock)
    with acting(ALICE):
        made = await members.create("dora@example.com", "dora's long password", "viewer")
        token, _ = await sessions.open(made.id, "Firefox", "10.0.0.9")
        await sessions.record_refusal("dora@example.com", "password")
        await members.reset_password("dora@example.com", "dora's other password", temporary=True)
        token_again, _ = await sessions.open(made.id, "Firefox", "10.0.0.9")
        await sessions.close(token_again)
        await sessions.close(token_again)
    actions = [row[0] for row in await audited_changes(database)]
    assert [action for action in actions if not action.startswith("session.")] == ["member.create", "member.reset_password"]
    (reset,) = (row[3] for row in await audited_changes(database) if row[0] == "member.reset_password")
    assert reset == {"email": "dora@example.com", "password_temporary": True}
    assert actions.count("session.open") == 2
    assert (actions.count("session.refuse"), actions[-1]) == (1, "session.close")
    await assert_not_in_log(database, "dora's long password", "dora's other password", token, token_again, "$argon2")


async def test_a_password_in_the_wrong_field_is_not_written(database: Database, clock: FakeClock) -> None:
    with acting(ALICE):
        await Sessions(database, clock).record_refusal("dora's long password", "password")
    assert [row[0] for row in await audited_changes(database)] == ["session.refuse"]
    await assert_not_in_log(database, "dora's long password")


async def test_changes_of_administrator_tokens_and_prices_are_audited(database: Database, clock: FakeClock) -> None:
    tokens = AdminTokens(database, clock)
    with acting(ALICE):
        made, secret = await tokens.create("ci", "admin")
        await tokens.revoke(made.id)
        await tokens.revoke(made.id)
        prices = euro_prices(database, clock)
        price = await prices.add(model="demo", currency="EUR", prompt=5, cached_prompt=1, completion=9)
        moment = price.effective_from.replace(year=2190)
        typo = await prices.add(model="demo", currency="EUR", prompt=6, cached_prompt=1, completion=9, effective_from=moment)
        await prices.withdraw(typo.id)
    rows = await audited_changes(database)
    assert [row[0] for row in rows] == ["token.create", "token.revoke", "price.create", "price.create", "price.withdraw"]
    assert (rows[0][3]["name"], rows[0][3]["role"]) == ("ci", "admin")
    assert (rows[2][3]["id"], rows[2][3]["prompt"]) == (price.id, 5)
    await assert_not_in_log(database, secret)


async def test_the_entry_of_a_price_has_all_its_terms(database: Database, clock: FakeClock) -> None:
    prices = euro_prices(database, clock)
    terms: dict[str, Any] = {
        "model": "demo", "currency": "EUR", "prompt": 5, "cached_prompt": 1, "completion": 9, "rejected_draft": 2,
        "batch_percent": 50, "tier_percents": {"batch": 70},
    }  # fmt: skip
    with acting(ALICE):
        made = await prices.add(effective_from=clock.now().replace(year=2190), **terms)
        await prices.withdraw(made.id)
    created, withdrawn = await audited_changes(database)
    expected = {**terms, "effective_from": "2190-11-21T12:00:00.000000Z"}
    assert (created[2], withdrawn[3]) == (None, None)
    for facts in (created[3], withdrawn[2]):
        assert {name: facts[name] for name in expected} == expected


async def test_recovery_at_a_start_is_audited_as_the_appliance(database: Database, clock: FakeClock, cast: Cast) -> None:
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(pending(cast.bob))
    epoch = await begin_epoch(database, clock, "next")
    await utc_recover(database, clock, epoch)
    await utc_recover(database, clock, epoch)
    found = [
        entry for entry in (await AuditLog(database, clock).page(100, access=OWNER)).data if entry.action == "ledger.recover"
    ]
    assert [(entry.actor_kind, entry.target_id, entry.after) for entry in found] == [("system", epoch, '{"events":1}')]


async def test_refused_changes_leave_no_entry(database: Database, clock: FakeClock, cast: Cast) -> None:
    tenants, keys = Tenants(database, clock), Keys(database, clock, PEPPER)
    refused: list[tuple[type[GatehouseError], Any]] = [
        (NameTaken, lambda: tenants.create(name="bob", access=OWNER)),
        (NameTaken, lambda: tenants.update(cast.bob.tenant.id, TenantChanges(name="charlie"), access=OWNER)),
        (InvalidValue, lambda: tenants.update(cast.bob.tenant.id, TenantChanges(weight=-1), access=OWNER)),
        (InvalidValue, lambda: keys.rotate(cast.bob.key.id, grace_s=-1, access=OWNER)),
    ]
    with acting(ALICE):
        for error, call in refused:
            with pytest.raises(error):
                await call()
    assert await entries(database) == []
    assert (await AuditLog(database, clock).verify()).fault is None


async def test_concurrent_changes_extend_one_chain_without_deadlock(database: Database, clock: FakeClock, cast: Cast) -> None:
    tenants, keys = Tenants(database, clock), Keys(database, clock, PEPPER)

    async def change(number: int) -> None:
        await tenants.update(cast.bob.tenant.id, TenantChanges(weight=number + 2), access=OWNER)
        key, _ = await keys.create(cast.bob.tenant.id, name=f"key {number}", access=OWNER)
        await keys.rotate(key.id, access=OWNER)

    with acting(ALICE):
        await asyncio.gather(*(change(number) for number in range(12)))
    verification = await AuditLog(database, clock).verify()
    assert verification.fault is None
    weights = [row for row in await audited_changes(database) if row[0] == "tenant.update"]
    assert all(one[3]["weight"] == other[2]["weight"] for one, other in itertools.pairwise(weights))


async def assert_not_in_log(database: Database, *secrets: str) -> None:
    """Assert that none of `secrets` occurs anywhere in the log."""
    async with database.reading() as connection:
        rows = (await connection.execute(select(audit_log))).all()
    text = repr(rows)
    assert rows
    assert not [secret for secret in secrets if secret in text]
