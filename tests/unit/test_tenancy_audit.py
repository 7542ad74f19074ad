"""The audit log: the content of entries, immutability, and a chain that reveals tampering."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import DatabaseError

from appliance.base.acting import SYSTEM, Actor, acting
from appliance.base.db import Database
from appliance.base.errors import InvalidValue
from appliance.base.tables import audit_log, tiers
from appliance.tenancy import audit
from appliance.tenancy.audit import AuditFilter, AuditLog, record
from appliance.tenancy.audit_chain import FIRST_HASH, AuditEntry, Verification, canonical_json, hash_of
from tests.support.cast import OWNER
from tests.support.clock import FakeClock
from tests.support.tampering import tamper

ALICE = Actor(kind="member", name="alice@example.com", id="mb_alice", request_id="req_1", address="10.0.0.7")


async def _write(database: Database, clock: FakeClock, count: int = 1, *, action: str = "tenant.update") -> None:
    for number in range(count):
        async with database.writing() as connection:
            await record(
                connection, clock, action, "tenant", f"tn_{number}", tenant_id=f"tn_{number}", after={"weight": number}
            )


async def _entries(database: Database) -> list[AuditEntry]:
    return (await AuditLog(database, FakeClock()).page(1000, access=OWNER)).data[::-1]


async def test_an_entry_has_actor_action_target_origin_and_changed_values(database: Database, clock: FakeClock) -> None:
    with acting(ALICE):
        async with database.writing() as connection:
            before, after = {"weight": 1, "name": "bob"}, {"weight": 2, "name": "bob"}
            await record(connection, clock, "tenant.update", "tenant", "tn_bob", tenant_id="tn_bob", before=before, after=after)
    (entry,) = await _entries(database)
    assert (entry.id, entry.at, entry.action) == (1, clock.now(), "tenant.update")
    assert (entry.actor_kind, entry.actor_id, entry.actor_name) == ("member", "mb_alice", "alice@example.com")
    assert (entry.request_id, entry.address) == ("req_1", "10.0.0.7")
    assert (entry.target_kind, entry.target_id, entry.tenant_id) == ("tenant", "tn_bob", "tn_bob")
    assert (entry.before, entry.after) == ('{"weight":1}', '{"weight":2}')


async def test_without_an_actor_the_appliance_is_recorded(database: Database, clock: FakeClock) -> None:
    await _write(database, clock)
    (entry,) = await _entries(database)
    assert (entry.actor_kind, entry.actor_name) == (SYSTEM.kind, SYSTEM.name)


async def test_an_update_that_changes_nothing_is_not_recorded(database: Database, clock: FakeClock) -> None:
    async with database.writing() as connection:
        await record(connection, clock, "tenant.update", "tenant", "tn_bob", before={"weight": 1}, after={"weight": 1})
    assert await _entries(database) == []


async def test_an_entry_of_a_failed_transaction_is_rolled_back(database: Database, clock: FakeClock) -> None:
    await _write(database, clock)

    async def fail_after_recording() -> None:
        async with database.writing() as connection:
            await record(connection, clock, "tenant.update", "tenant", "tn_bob", after={})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_after_recording()
    await _write(database, clock)
    assert [entry.id for entry in await _entries(database)] == [1, 2]
    assert (await AuditLog(database, clock).verify()).fault is None


async def test_secrets_are_recorded_as_changed_without_their_values(database: Database, clock: FakeClock) -> None:
    before = {"password_hash": "old", "totp_secret": None, "secret": "first", "tokens_per_minute": 5}
    after = {"password_hash": "new", "totp_secret": "JBSW", "secret": "first", "tokens_per_minute": 6}
    async with database.writing() as connection:
        await record(connection, clock, "member.update", "member", "mb_bob", before=before, after=after)
    (entry,) = await _entries(database)
    assert json.loads(entry.before or "") == {"password_hash": "(hidden)", "totp_secret": None, "tokens_per_minute": 5}
    assert json.loads(entry.after or "") == {"password_hash": "(hidden)", "totp_secret": "(hidden)", "tokens_per_minute": 6}


async def test_untrusted_text_is_truncated_and_stripped_of_control_characters(database: Database, clock: FakeClock) -> None:
    noisy = Actor(kind="member", name="a\x00b\nc\ud800" + "x" * 500, address="y" * 100, request_id="z" * 100)
    with acting(noisy):
        async with database.writing() as connection:
            await record(connection, clock, "session.refuse", "member", "\u202e" + "t" * 300, after={"note": "\ud800\x00"})
    (entry,) = await _entries(database)
    assert (len(entry.actor_name), entry.actor_name[:4]) == (320, "abcx")
    assert (len(entry.address or ""), len(entry.request_id or ""), entry.target_id) == (64, 40, "t" * 200)
    assert entry.after == '{"note":"\\ud800\\u0000"}'
    assert (await AuditLog(database, clock).verify()).fault is None


def test_canonical_json_has_one_form() -> None:
    value = {"b": 1, "a": [True, None, "ü"], "c": FakeClock().now() + timedelta(microseconds=7)}
    assert canonical_json(value) == '{"a":[true,null,"ü"],"b":1,"c":"2026-11-21T12:00:00.000007Z"}'


def test_the_hash_can_be_computed_as_documented() -> None:
    columns = {"id": 1, "action": "tenant.create", "hash": "not counted", "previous_hash": "not counted"}
    # printf '%064d{"action":"tenant.create","id":1}' 0 | sha256sum
    assert hash_of(columns, FIRST_HASH) == "2764985dc34708001b6798918742de93b67d594e2a802d0cb5e443bfa23c6842"


async def test_concurrent_writers_extend_one_chain(database_url: str, clock: FakeClock) -> None:
    """Through two `Database` objects, as in two processes: a lock within one of them would not be enough."""
    opened = [Database.open(database_url), Database.open(database_url)]
    await asyncio.gather(*(_write(one, clock, 15) for one in opened for _ in range(4)))
    verification = await AuditLog(opened[0], clock).verify()
    entries = await _entries(opened[1])
    for one in opened:
        await one.close()
    assert (verification.fault, verification.entries) == (None, 120)
    assert [entry.id for entry in entries] == list(range(1, 121))
    assert len({entry.previous_hash for entry in entries}) == 120


@pytest.mark.parametrize("statement", ["UPDATE audit_log SET action = 'x'", "DELETE FROM audit_log"])
async def test_the_database_refuses_to_update_or_delete_entries(database: Database, clock: FakeClock, statement: str) -> None:
    await _write(database, clock)
    with pytest.raises(DatabaseError, match="stays as it is"):
        async with database.writing() as connection:
            await connection.execute(text(statement))
    assert len(await _entries(database)) == 1


async def test_an_untampered_log_is_valid_at_any_length(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "BATCH_ROWS", 4)
    assert await AuditLog(database, clock).verify() == Verification(entries=0, hash=FIRST_HASH, fault=None)
    for entries in (3, 4, 8, 9):
        await _write(database, clock, entries - len(await _entries(database)))
        progress: list[float] = []
        verification = await AuditLog(database, clock).verify(on_progress=progress.append)
        assert (verification.fault, verification.entries) == (None, entries)
        assert progress == sorted(progress)
        assert progress[-1] == 1.0


TAMPERINGS = {
    "changed": ("UPDATE audit_log SET after = '{\"weight\":9}' WHERE id = 3", 3, "changed", "entry 3 was changed"),
    "an actor changed": ("UPDATE audit_log SET actor_name = 'mallory' WHERE id = 3", 3, "changed", "entry 3 was changed"),
    "one removed": ("DELETE FROM audit_log WHERE id = 3", 3, "removed", "entry 3 was removed"),
    "several removed": ("DELETE FROM audit_log WHERE id IN (3, 4)", 3, "removed", "entries 3 to 4 were removed"),
    "the first removed": ("DELETE FROM audit_log WHERE id = 1", 1, "removed", "entry 1 was removed"),
    "cut": ("DELETE FROM audit_log WHERE id > 4", 5, "cut", "entries 5 to 6 were cut off at the end"),
    "emptied": ("DELETE FROM audit_log", 1, "cut", "entries 1 to 6 were cut off at the end"),
    "cut with its head": ("UPDATE audit_head SET entries = 5", 6, "beyond_head", "entry 6 was added past the head"),
    "another head": ("UPDATE audit_head SET hash = 'x'", 6, "replaced", "entry 6, the last one, was replaced"),
    "moved to the front": ("UPDATE audit_log SET id = 0 WHERE id = 3", 0, "added", "entry 0 was added"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
async def test_tampering_is_reported_at_the_first_affected_entry(database: Database, clock: FakeClock, name: str) -> None:
    statement, entry_id, kind, words = TAMPERINGS[name]
    await _write(database, clock, 6)
    await tamper(database, statement)
    fault = (await AuditLog(database, clock).verify()).fault
    assert fault is not None
    assert (fault.entry_id, fault.kind) == (entry_id, kind)
    assert words in fault.text


async def test_an_entry_replaced_together_with_its_hash_is_detected_by_the_next_entry(
    database: Database, clock: FakeClock
) -> None:
    await _write(database, clock, 6)
    async with database.reading() as connection:
        row = dict((await connection.execute(select(audit_log).where(audit_log.c.id == 3))).mappings().one())
    forged = row | {"actor_name": "mallory"}
    await tamper(
        database,
        f"UPDATE audit_log SET actor_name = 'mallory', hash = '{hash_of(forged, row['previous_hash'])}' WHERE id = 3",
    )
    fault = (await AuditLog(database, clock).verify()).fault
    assert fault is not None
    assert (fault.entry_id, fault.kind) == (4, "replaced")


async def test_a_truncated_log_is_detected_even_if_new_entries_follow(database: Database, clock: FakeClock) -> None:
    await _write(database, clock, 6)
    await tamper(database, "DELETE FROM audit_log WHERE id > 4")
    await _write(database, clock, 2)
    fault = (await AuditLog(database, clock).verify()).fault
    assert fault is not None
    assert (fault.kind, fault.text) == ("removed", "entries 5 to 6 were removed")


async def test_a_rewritten_log_does_not_contain_the_expected_hash(database: Database, clock: FakeClock) -> None:
    await _write(database, clock, 3)
    noted_hash = (await AuditLog(database, clock).verify()).hash
    await _write(database, clock, 3)
    assert (await AuditLog(database, clock).verify(expect=noted_hash)).fault is None
    await tamper(database, "DELETE FROM audit_log", "DELETE FROM audit_head")
    clock.advance(1)
    await _write(database, clock, 6)
    assert (await AuditLog(database, clock).verify()).fault is None
    fault = (await AuditLog(database, clock).verify(expect=noted_hash)).fault
    assert fault is not None
    assert fault.kind == "not_expected"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # PostgreSQL's columns keep to their types
async def test_an_unreadable_entry_is_reported_as_changed(database: Database, clock: FakeClock) -> None:
    await _write(database, clock, 4)
    for statement in (
        "UPDATE audit_log SET actor_name = x'ff00' WHERE id = 3",
        "UPDATE audit_log SET at = 'yesterday' WHERE id = 2",
    ):
        await tamper(database, statement)
        fault = (await AuditLog(database, clock).verify()).fault
        assert fault is not None
        assert (fault.entry_id, fault.kind) == (3 if "id = 3" in statement else 2, "changed")


async def test_entries_are_listed_newest_first_and_filtered(database: Database, clock: FakeClock) -> None:
    start = clock.now()
    await _write(database, clock, 3)
    clock.advance(60)
    with acting(ALICE):
        await _write(database, clock, 2, action="key.create")
    log = AuditLog(database, clock)
    first = await log.page(2, access=OWNER)
    second = await log.page(2, first.next_cursor, access=OWNER)
    assert [entry.id for entry in (*first.data, *second.data)] == [5, 4, 3, 2]
    cases = [
        (AuditFilter(actions=["key.create"]), [5, 4]),
        (AuditFilter(actors=["alice@example.com", "nobody"]), [5, 4]),
        (AuditFilter(actors=["mb_alice"]), [5, 4]),
        (AuditFilter(targets=["tn_1"]), [5, 2]),
        (AuditFilter(tenant_ids=["tn_2"]), [3]),
        (AuditFilter(start=start + timedelta(seconds=60)), [5, 4]),
        (AuditFilter(end=start + timedelta(seconds=60)), [3, 2, 1]),
    ]
    for filters, expected in cases:
        assert [entry.id for entry in (await log.page(filters=filters, access=OWNER)).data] == expected, filters
    with pytest.raises(InvalidValue, match="cursor"):
        await log.page(2, "nonsense", access=OWNER)


async def test_a_change_and_its_entry_are_one_transaction(database: Database, clock: FakeClock) -> None:
    """The entry becomes visible only when the change is committed."""
    async with database.writing() as connection:
        await connection.execute(insert(tiers).values(name="standard", admission_wait_ms=0, updated_at=clock.now()))
        await record(connection, clock, "tier.update", "tier", "standard", after={"admission_wait_ms": 0})
        assert await _entries(database) == []
    assert len(await _entries(database)) == 1
