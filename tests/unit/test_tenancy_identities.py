"""Links between members and identities of the OpenID Connect provider: which member a sign-in authenticates."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from sqlalchemy import select, update

from appliance.base.db import Database
from appliance.base.errors import InvalidCredentials, NotFound
from appliance.base.tables import audit_log, members
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.id_tokens import Identity
from appliance.tenancy.identities import Identities, unlink_by_email
from appliance.tenancy.members import Members
from tests.support.cast import OWNER, Cast
from tests.support.clock import FakeClock
from tests.support.oidc_provider import ISSUER

ALICE = Identity(issuer=ISSUER, subject="alice-7", email="alice@example.com")


@pytest.fixture
def identities(database: Database, clock: FakeClock) -> Identities:
    return Identities(database, clock)


async def test_the_first_sign_in_links_by_address_and_later_ones_match_the_subject(identities: Identities, cast: Cast) -> None:
    assert await identities.issuer_of(cast.alice.id) is None
    in_capitals = dataclasses.replace(ALICE, email=" Alice@EXAMPLE.com")
    assert await identities.member_of(in_capitals) == cast.alice
    assert await identities.issuer_of(cast.alice.id) == ISSUER

    for email in ("new.name@example.com", None):
        assert await identities.member_of(dataclasses.replace(ALICE, email=email)) == cast.alice


async def test_signing_in_does_not_create_a_member(database: Database, identities: Identities, cast: Cast) -> None:
    stranger = Identity(issuer=ISSUER, subject="charlie-8", email="charlie@example.com")
    unverified = dataclasses.replace(ALICE, email=None)

    for identity, words in ((stranger, "no member with your e-mail"), (unverified, "no verified e-mail")):
        with pytest.raises(InvalidCredentials, match=words):
            await identities.member_of(identity)
    async with database.reading() as connection:
        rows = (await connection.execute(select(members.c.email, members.c.oidc_subject))).all()
    assert [tuple(row) for row in rows] == [("alice@example.com", None)]


async def test_another_subject_with_the_address_of_a_linked_member_is_refused(identities: Identities, cast: Cast) -> None:
    await identities.member_of(ALICE)

    with pytest.raises(InvalidCredentials, match="another account"):
        await identities.member_of(dataclasses.replace(ALICE, subject="mallory-9"))


async def test_a_member_is_linked_again_to_another_configured_provider(identities: Identities, cast: Cast) -> None:
    await identities.member_of(ALICE)
    moved = dataclasses.replace(ALICE, issuer="https://new.example.com", subject="42")

    assert await identities.member_of(moved) == cast.alice
    assert await identities.issuer_of(cast.alice.id) == "https://new.example.com"


async def test_a_disabled_member_is_refused_whether_linked_or_not(
    database: Database, identities: Identities, cast: Cast, clock: FakeClock
) -> None:
    for link_first in (False, True):
        if link_first:
            await identities.member_of(ALICE)
        async with database.writing() as connection:
            await connection.execute(update(members).values(disabled_at=clock.now()))
        with pytest.raises(InvalidCredentials, match="no longer"):
            await identities.member_of(ALICE)
        assert await identities.issuer_of(cast.alice.id) == (ISSUER if link_first else None)
        async with database.writing() as connection:
            await connection.execute(update(members).values(disabled_at=None))


async def test_concurrent_first_sign_ins_link_once(database: Database, identities: Identities, cast: Cast) -> None:
    found = await asyncio.gather(*(identities.member_of(ALICE) for _ in range(6)))

    assert set(found) == {cast.alice}
    async with database.reading() as connection:
        actions = [row.action for row in await connection.execute(select(audit_log.c.action))]
    assert actions.count("member.link_provider") == 1


async def test_a_member_can_be_unlinked_and_linked_to_another_subject(
    database: Database, clock: FakeClock, identities: Identities, cast: Cast
) -> None:
    await identities.member_of(ALICE)

    assert await unlink_by_email(database, clock, " ALICE@example.com") == cast.alice
    await identities.unlink(cast.alice.id)  # idempotent

    assert await identities.issuer_of(cast.alice.id) is None
    assert await identities.member_of(dataclasses.replace(ALICE, subject="alice-8")) == cast.alice
    with pytest.raises(NotFound):
        await identities.unlink("mb_nobody")


async def test_unlinking_affects_one_member_and_is_audited(
    database: Database, clock: FakeClock, identities: Identities, cast: Cast
) -> None:
    people = Members(database, clock)
    dora = await people.create("dora@example.com", "long enough")
    for identity in (ALICE, dataclasses.replace(ALICE, subject="dora-9", email=dora.email)):
        await identities.member_of(identity)
    await identities.unlink(cast.alice.id)

    assert [await identities.issuer_of(member_id) for member_id in (cast.alice.id, dora.id)] == [None, ISSUER]
    (entry,) = (await AuditLog(database, clock).page(1, access=OWNER)).data
    assert (entry.action, entry.target_id) == ("member.unlink_provider", cast.alice.id)
    assert json.loads(entry.before or "") == {"email": ALICE.email, "oidc_issuer": ISSUER, "oidc_subject": ALICE.subject}
