"""Members and their sessions, administrator tokens, and roles."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from datetime import timedelta

import argon2
import pytest
from sqlalchemy import select, update

from appliance.base.db import Database
from appliance.base.errors import InvalidApiKey, InvalidCredentials, InvalidValue, NameTaken, NotFound, RateLimitExceeded
from appliance.base.tables import admin_tokens, members, sessions
from appliance.tenancy import members as members_module
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.members import Members
from appliance.tenancy.roles import ALLOWED, ALLOWED_IN_TENANT, Action, Role, TenantRole, not_allowed
from appliance.tenancy.sessions import Sessions
from tests.support.case_ids import case_id
from tests.support.cast import ALICE_PASSWORD, OWNER, Cast
from tests.support.clock import FakeClock

ALICE = "alice@example.com"


@pytest.fixture
def people(database: Database, clock: FakeClock) -> Members:
    return Members(database, clock)


@pytest.fixture
def session_store(database: Database, clock: FakeClock) -> Sessions:
    return Sessions(database, clock, idle_s=600, absolute_s=3600)


@pytest.fixture
def tokens(database: Database, clock: FakeClock) -> AdminTokens:
    return AdminTokens(database, clock)


async def test_the_number_of_passwords_that_wait_to_be_checked_is_bounded(
    people: Members, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "PASSWORD_CHECKS_MAX", 3)
    checks = [asyncio.create_task(people.prove_password(f"{number}@example.com", "a password")) for number in range(5)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    assert [type(result) for result in results] == [InvalidCredentials] * 3 + [RateLimitExceeded] * 2
    assert (await people.prove_password(ALICE, ALICE_PASSWORD)).member == cast.alice


async def test_the_address_of_a_sign_in_is_not_case_sensitive(people: Members, cast: Cast) -> None:
    assert (await people.prove_password(" Alice@Example.COM ", ALICE_PASSWORD)).member == cast.alice
    assert await people.get_by_email(ALICE) == cast.alice


@pytest.mark.parametrize(
    ("email", "password"),
    [(ALICE, ALICE_PASSWORD + "x"), (ALICE, ""), (ALICE, "x" * 5000), ("bob@example.com", ALICE_PASSWORD), ("\x00", "\ud800")],
)
async def test_wrong_addresses_and_passwords_are_refused_with_the_same_message(
    people: Members, cast: Cast, email: str, password: str
) -> None:
    with pytest.raises(InvalidCredentials, match=r"^e-mail address or password is wrong$"):
        await people.prove_password(email, password)


async def test_an_unknown_address_takes_as_much_work_as_a_known_one(
    people: Members, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[str] = []
    matches = people._matches

    async def counted(password_hash: str, password: str) -> bool:
        verified.append(password_hash)
        return await matches(password_hash, password)

    monkeypatch.setattr(people, "_matches", counted)
    for email in (ALICE, "nobody@example.com", "nobody.else@example.com"):
        with pytest.raises(InvalidCredentials):
            await people.prove_password(email, "wrong password")
    assert len(verified) == 3
    assert verified[1] == verified[2], "a hash for each unknown address would take twice as long"
    assert all(password_hash.startswith("$argon2id$") for password_hash in verified)


async def test_a_disabled_member_cannot_sign_in(database: Database, clock: FakeClock, people: Members, cast: Cast) -> None:
    async with database.writing() as connection:
        await connection.execute(update(members).values(disabled_at=clock.now()))
    with pytest.raises(InvalidCredentials):
        await people.prove_password(ALICE, ALICE_PASSWORD)


async def test_a_password_is_stored_only_as_an_argon2_hash(database: Database, cast: Cast) -> None:
    async with database.reading() as connection:
        row = (await connection.execute(select(members))).one()
    assert row.password_hash.startswith("$argon2id$")
    assert ALICE_PASSWORD not in repr(row)


async def test_password_hashes_use_the_low_memory_parameters_of_rfc_9106_in_one_thread(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "PasswordHasher", argon2.PasswordHasher)
    await Members(database, clock).create(ALICE, ALICE_PASSWORD)
    async with database.reading() as connection:
        password_hash = (await connection.execute(select(members.c.password_hash))).scalar_one()
    assert password_hash.startswith("$argon2id$v=19$m=65536,t=3,p=1$")


async def test_a_hash_with_other_parameters_is_replaced_by_the_first_right_password(
    people: Members, session_store: Sessions, database: Database, cast: Cast
) -> None:
    async def stored() -> str:
        async with database.reading() as connection:
            return str((await connection.execute(select(members.c.password_hash))).scalar_one())

    former = argon2.PasswordHasher(time_cost=1, memory_cost=32, parallelism=4).hash(ALICE_PASSWORD)
    async with database.writing() as connection:
        await connection.execute(update(members).values(password_hash=former))
    token, _ = await session_store.open(cast.alice.id, "browser", "127.0.0.1")
    with pytest.raises(InvalidCredentials):
        await people.prove_password(ALICE, "a wrong password")
    assert await stored() == former

    proven = await people.prove_password(ALICE, ALICE_PASSWORD)

    renewed = await stored()
    assert "p=1$" in renewed
    assert proven.password_hash == renewed
    assert (await people.prove_password(ALICE, ALICE_PASSWORD)).password_hash == renewed
    assert await session_store.resolve(token) is not None


async def test_a_new_password_ends_every_session(people: Members, session_store: Sessions, cast: Cast) -> None:
    token, _session = await session_store.open(cast.alice.id, "browser", "127.0.0.1")
    await people.reset_password(ALICE, "another long password")
    assert await session_store.resolve(token) is None
    with pytest.raises(InvalidCredentials):
        await people.prove_password(ALICE, ALICE_PASSWORD)
    await people.prove_password(ALICE, "another long password")
    with pytest.raises(NotFound):
        await people.reset_password("nobody@example.com", "another long password")


@pytest.mark.parametrize("wrong", ["short", "x" * 1025, "\ud800" * 10, ALICE_PASSWORD])
async def test_an_invalid_or_unchanged_new_password_is_refused(people: Members, cast: Cast, wrong: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        await people.change_password(cast.alice, ALICE_PASSWORD, wrong)
    assert refused.value.param == "password"
    await people.prove_password(ALICE, ALICE_PASSWORD)


async def test_changing_a_password_affects_one_member_and_is_audited(
    database: Database, clock: FakeClock, people: Members, session_store: Sessions, cast: Cast
) -> None:
    dora = await people.create("dora@example.com", "dora's long password")
    doras, alices = [(await session_store.open(member.id, "browser", "127.0.0.1"))[0] for member in (dora, cast.alice)]
    for change, facts in ((people.change_password(dora, "dora's long password", "another of hers"), {}),
                          (people.reset_password(dora.email, "a third password"), {"password_temporary": False})):  # fmt: skip
        await change
        entry = (await AuditLog(database, clock).page(1, access=OWNER)).data[0]
        assert (entry.target_id, json.loads(entry.after or "")) == (dora.id, {"email": dora.email, **facts})

    assert await session_store.resolve(doras) is None
    assert await session_store.resolve(alices) is not None
    await people.prove_password(ALICE, ALICE_PASSWORD)


async def test_a_proven_password_opens_no_session_once_the_member_is_disabled(
    people: Members, session_store: Sessions, cast: Cast
) -> None:
    dora = await people.create("dora@example.com", "dora's long password")
    proven = await people.prove_password(dora.email, "dora's long password")
    await people.change(dora.id, disabled=True)
    with pytest.raises(InvalidCredentials):
        await session_store.open(dora.id, "browser", "127.0.0.1", proof=proven.still_valid)


async def test_members_are_paged_and_a_change_of_one_is_audited(
    database: Database, clock: FakeClock, people: Members, cast: Cast
) -> None:
    made = [cast.alice, *[await people.create(f"{name}@example.com", "long enough") for name in ("dora", "erin")]]
    first = await people.list(2)
    assert [*first.data, *(await people.list(2, first.next_cursor)).data] == made

    changed = await people.change(made[1].id, role="admin")
    assert await people.get(made[1].id) == changed == dataclasses.replace(made[1], role=Role.ADMIN)
    assert await people.get(made[2].id) == made[2]
    entry = (await AuditLog(database, clock).page(1, access=OWNER)).data[0]
    assert (entry.action, entry.target_id) == ("member.change", made[1].id)
    assert [json.loads(facts or "") for facts in (entry.before, entry.after)] == [{"role": "viewer"}, {"role": "admin"}]


async def test_a_password_change_under_way_does_not_overwrite_a_reset(
    people: Members, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = people._hash

    async def hash_after_reset(password: str) -> str:
        monkeypatch.setattr(people, "_hash", hashed)
        await people.reset_password(ALICE, "password set by the owner")
        return await hashed(password)

    monkeypatch.setattr(people, "_hash", hash_after_reset)
    with pytest.raises(InvalidCredentials):
        await people.change_password(cast.alice, ALICE_PASSWORD, "password chosen by a thief")

    assert (await people.prove_password(ALICE, "password set by the owner")).member == cast.alice


async def test_a_proven_password_opens_no_session_once_it_was_reset(
    database: Database, people: Members, session_store: Sessions, cast: Cast
) -> None:
    proven = await people.prove_password(ALICE, ALICE_PASSWORD)
    await people.reset_password(ALICE, "password set by the owner")

    with pytest.raises(InvalidCredentials):
        await session_store.open(cast.alice.id, "browser", "127.0.0.1", proof=proven.still_valid)

    async with database.reading() as connection:
        assert (await connection.execute(select(sessions))).first() is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"email": "alice"}, "email"),
        ({"email": "a@b@c"}, "email"),
        ({"email": "a b@c"}, "email"),
        ({"email": "a\x00@c"}, "email"),
        ({"email": "a@" + "c" * 320}, "email"),
        ({"password": "short"}, "password"),
        ({"password": "x" * 1025}, "password"),
        ({"password": "\ud800" * 10}, "password"),
        ({"role": "king"}, "role"),
    ],
    ids=case_id,
)
async def test_an_invalid_field_of_a_member_is_named(people: Members, changes: dict[str, str], param: str) -> None:
    fields = {"email": "x@y", "password": "long enough", "role": "viewer"} | changes
    with pytest.raises(InvalidValue) as refused:
        await people.create(fields["email"], fields["password"], fields["role"])
    assert refused.value.param == param


async def test_an_address_belongs_to_one_member(people: Members, cast: Cast) -> None:
    with pytest.raises(NameTaken):
        await people.create("ALICE@example.com", "long enough", "viewer")
    assert [member.email for member in (await people.list()).data] == [ALICE]


async def test_a_session_is_found_only_by_its_token(
    database: Database, session_store: Sessions, cast: Cast, clock: FakeClock
) -> None:
    token, session = await session_store.open(cast.alice.id, "a\nbrowser" * 100, "127.0.0.1")
    assert await session_store.resolve(token) == session
    assert session.member == cast.alice
    assert len(session.csrf_token) >= 40
    assert session.user_agent == ("abrowser" * 100)[:400]
    for wrong in ("", token[:-1], token + "x", "x" * 1000, "\ud800"):
        assert await session_store.resolve(wrong) is None
    async with database.reading() as connection:
        assert token not in repr((await connection.execute(select(sessions))).all())


async def test_each_sign_in_has_its_own_session_and_csrf_tokens(session_store: Sessions, cast: Cast) -> None:
    opened = [await session_store.open(cast.alice.id, "browser", "127.0.0.1") for _ in range(3)]
    assert len({token for token, _ in opened}) == len({session.csrf_token for _, session in opened}) == 3


async def test_an_idle_session_ends_and_an_active_one_ends_at_its_absolute_limit(
    session_store: Sessions, cast: Cast, clock: FakeClock
) -> None:
    idle, _ = await session_store.open(cast.alice.id, "browser", "127.0.0.1")
    used, session = await session_store.open(cast.alice.id, "browser", "127.0.0.1")
    for _ in range(6):
        clock.advance(599)
        assert await session_store.resolve(used) is not None
    assert await session_store.resolve(idle) is None
    clock.advance(5)
    assert clock.now() < session.expires_at
    assert await session_store.resolve(used) is not None
    clock.advance(1)
    assert await session_store.resolve(used) is None


async def test_live_sessions_are_listed_in_total_or_of_one_member(
    people: Members, session_store: Sessions, cast: Cast, clock: FakeClock
) -> None:
    dora = await people.create("dora@example.com", "long enough", "viewer")
    opened = []
    for member in (cast.alice, dora, dora):
        opened.append((await session_store.open(member.id, "browser", "127.0.0.1"))[1].id)
        clock.advance(100)

    async def listed(member_id: str | None = None) -> list[str]:
        return [session.id for session in (await session_store.list(member_id)).data]

    assert [await listed(), await listed(dora.id)] == [opened[::-1], opened[:0:-1]]
    seen = await session_store.last_seen_of([dora.id])
    assert seen == {dora.id: clock.now() - timedelta(seconds=100)}
    clock.advance(400)  # the second has just been idle for too long
    assert await listed() == opened[:1:-1]


async def test_a_session_ends_exactly_at_its_idle_limit(session_store: Sessions, cast: Cast, clock: FakeClock) -> None:
    (token, _), (other, _) = [await session_store.open(cast.alice.id, "browser", "127.0.0.1") for _ in range(2)]
    clock.advance(599.999999)
    assert await session_store.resolve(token) is not None
    clock.advance(0.000001)
    assert await session_store.resolve(other) is None


async def test_a_session_of_a_disabled_member_is_not_accepted(
    database: Database, session_store: Sessions, cast: Cast, clock: FakeClock
) -> None:
    token, _ = await session_store.open(cast.alice.id, "browser", "127.0.0.1")
    async with database.writing() as connection:  # without ending the session, as `Members` would
        await connection.execute(update(members).where(members.c.id == cast.alice.id).values(disabled_at=clock.now()))
    assert await session_store.resolve(token) is None
    assert (await session_store.list()).data == []


async def test_the_time_of_last_use_is_written_once_a_minute(
    database: Database, session_store: Sessions, cast: Cast, clock: FakeClock
) -> None:
    token, opened = await session_store.open(cast.alice.id, "browser", "127.0.0.1")
    seen = []
    for _ in range(4):
        clock.advance(30)
        await session_store.resolve(token)
        async with database.reading() as connection:
            seen.append((await connection.execute(select(sessions.c.last_seen_at))).scalar_one())
    assert [(moment - opened.last_seen_at).total_seconds() for moment in seen] == [0, 60, 60, 120]


async def test_one_or_all_sessions_can_be_closed(session_store: Sessions, cast: Cast) -> None:
    first, second, third = [(await session_store.open(cast.alice.id, "browser", "127.0.0.1"))[0] for _ in range(3)]
    await session_store.close(first)
    await session_store.close("no token")
    assert await session_store.resolve(first) is None
    assert await session_store.resolve(second) is not None
    await session_store.close_all(cast.alice.id)
    assert await session_store.resolve(second) is await session_store.resolve(third) is None


async def test_ended_sessions_are_deleted_at_the_next_sign_in(
    database: Database, session_store: Sessions, cast: Cast, clock: FakeClock
) -> None:
    for _ in range(3):
        await session_store.open(cast.alice.id, "browser", "127.0.0.1")
        clock.advance(601)
    async with database.reading() as connection:
        assert len((await connection.execute(select(sessions))).all()) == 1


async def test_an_administrator_token_is_not_stored_and_refused_once_revoked(database: Database, tokens: AdminTokens) -> None:
    token, secret = await tokens.create("script", "billing")
    assert secret.startswith("gha_")
    assert await tokens.authenticate(secret) == token
    async with database.reading() as connection:
        assert secret not in repr((await connection.execute(select(admin_tokens))).all())
    revoked = await tokens.revoke(token.id)
    assert await tokens.revoke(token.id) == revoked
    for wrong in (secret, "", "gha_x", "\ud800", "x" * 5000):
        with pytest.raises(InvalidApiKey):
            await tokens.authenticate(wrong)
    with pytest.raises(NotFound):
        await tokens.revoke("nothing")
    with pytest.raises(InvalidValue):
        await tokens.create("script", "king")
    with pytest.raises(InvalidValue, match="owner, admin, billing, viewer"):
        await tokens.create("script", "member")


async def test_revoking_affects_one_token_and_lists_can_exclude_it(tokens: AdminTokens) -> None:
    made = [await tokens.create(name, "viewer") for name in ("a", "b", "c")]
    ids = [token.id for token, _secret in made]
    await tokens.revoke(ids[1])
    assert [(await tokens.get(token_id)).revoked_at is None for token_id in ids] == [True, False, True]
    for token, secret in made[::2]:
        assert await tokens.authenticate(secret) == token

    async def listed(**filters: bool) -> list[list[str]]:
        pages: list[list[str]] = []
        cursor = None
        while not pages or cursor is not None:
            page = await tokens.list(2, cursor, **filters)
            pages, cursor = [*pages, [token.id for token in page.data]], page.next_cursor
        return pages

    assert await listed() == [ids[:2], ids[2:]]
    assert await listed(newest_first=True) == [ids[:0:-1], ids[:1]]
    assert await listed(include_revoked=False) == [ids[::2]]


async def test_the_operators_token_is_created_once(tokens: AdminTokens) -> None:
    made = await asyncio.gather(*(tokens.ensure("operator's secret", "first", "owner") for _ in range(3)))
    assert len({token.id for token in made}) == 1
    assert (await tokens.authenticate("operator's secret")).role is Role.OWNER
    assert len((await tokens.list()).data) == 1


def test_each_role_has_its_permissions() -> None:
    reads = {"read", "invoices", "audit", "read_appliance"}
    tenant_writes = {"keys", "abort", "tenant_members", "webhooks"}
    assert {role: {action.value for action in actions} for role, actions in ALLOWED.items()} == {
        Role.OWNER: reads | tenant_writes | {"write", "billing", "members"},
        Role.ADMIN: reads | tenant_writes | {"write", "billing"},
        Role.BILLING: reads | {"billing"},
        Role.VIEWER: reads,
        Role.MEMBER: set(),
    }
    assert {role: {action.value for action in actions} for role, actions in ALLOWED_IN_TENANT.items()} == {
        TenantRole.MANAGER: {"read", "invoices", "audit"} | tenant_writes,
        TenantRole.DEVELOPER: {"read", "keys", "abort"},
        TenantRole.VIEWER: {"read"},
    }


@pytest.mark.parametrize("action", Action)
def test_a_refusal_states_in_words_what_a_role_may_not_do(action: Action) -> None:
    refused = not_allowed("member", action).message
    assert refused.startswith("the role member may not ")
    assert "_" not in refused
