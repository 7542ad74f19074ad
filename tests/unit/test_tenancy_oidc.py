"""The provider's word: what is believed of it, and which member it opens the door for."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import select, update

from appliance.base.db import Database
from appliance.base.errors import InvalidCredentials, NotFound
from appliance.base.settings import load_settings
from appliance.base.tables import audit_log, members
from appliance.tenancy.access import WHOLE_BOX
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.id_tokens import LEEWAY_S, Identity, TokenRefused
from appliance.tenancy.identities import Identities, unlink_by_email
from appliance.tenancy.members import Members
from appliance.tenancy.oidc import (
    ANSWER_BYTES_MAX,
    KEPT_S,
    KEYS_ASKED_AGAIN_S,
    PAUSE_AFTER_FAILURE_S,
    OidcProvider,
    ProviderUnavailable,
    provider_of,
)
from tests.support.cast import Cast, quick_hasher
from tests.support.clock import FakeClock
from tests.support.oidc_provider import CLIENT_ID, ISSUER, TOKEN_LIFE_S, FakeProvider, ec_key, rsa_key

ALICE = Identity(issuer=ISSUER, subject="alice-7", email="alice@example.com")


@pytest.fixture
def fake(clock: FakeClock) -> FakeProvider:
    return FakeProvider(clock)


async def identify(fake: FakeProvider, ours: OidcProvider | None = None, **changes: str) -> Identity:
    """Go to the provider and back once; `changes` are what comes back instead."""
    ours = ours or fake.client()
    begun = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "verifier")}
    back = parse_qs(urlsplit(fake.sign_in(await ours.authorization_url(**begun))).query)
    assert back["state"] == [begun["state"]]
    sent = {"code": back["code"][0], "nonce": begun["nonce"], "verifier": begun["verifier"], "sent_by": back["iss"][0]}
    return await ours.identify(**{**sent, **changes})


async def test_an_honest_provider_says_who_it_is(fake: FakeProvider) -> None:
    assert await identify(fake) == ALICE


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"nonce": "another sign-in"}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"aud": "another client"}, "audience"),
        ({"aud": [CLIENT_ID, "another client"]}, "several"),
        ({"aud": [CLIENT_ID, "another client"], "azp": "another client"}, "authorized party"),
        ({"azp": "another client"}, "authorized party"),
        ({"aud": None}, "audience"),
        ({"iss": "https://evil.example.com"}, "another issuer"),
        ({"iss": None}, "another issuer"),
        ({"exp": 0}, "expired"),
        ({"exp": None}, "when it was issued"),
        ({"exp": "tomorrow"}, "when it was issued"),
        ({"exp": True}, "when it was issued"),
        ({"exp": float("nan")}, "when it was issued"),
        ({"exp": float("inf")}, "when it was issued"),
        ({"exp": -(10**400)}, "expired"),
        ({"iat": 10**400}, "from the future"),
        ({"iat": None}, "when it was issued"),
        ({"iat": 2**40}, "from the future"),
        ({"nbf": 2**40}, "from the future"),
        ({"sub": ""}, "no subject"),
        ({"sub": None}, "no subject"),
        ({"sub": 7}, "no subject"),
        ({"sub": "x" * 256}, "no subject"),
    ],
)
async def test_a_token_with_a_wrong_claim_is_refused(fake: FakeProvider, claims: dict[str, Any], reason: str) -> None:
    fake.claims = claims

    with pytest.raises(TokenRefused, match=reason):
        await identify(fake)


@pytest.mark.parametrize("cheat", ["unsigned", "shared_secret", "foreign_key"])
async def test_a_token_that_the_provider_s_key_has_not_signed_is_refused(fake: FakeProvider, cheat: Any) -> None:
    fake.cheat = cheat

    with pytest.raises(TokenRefused):
        await identify(fake)


@pytest.mark.parametrize("claims", [{"aud": [CLIENT_ID]}, {"aud": [CLIENT_ID, "other"], "azp": CLIENT_ID}, {"azp": CLIENT_ID}])
async def test_a_token_for_several_is_good_when_we_asked_for_it(fake: FakeProvider, claims: dict[str, Any]) -> None:
    fake.claims = claims

    assert await identify(fake) == ALICE


@pytest.mark.parametrize(("late_s", "good"), [(TOKEN_LIFE_S + LEEWAY_S - 1, True), (TOKEN_LIFE_S + LEEWAY_S, False)])
async def test_clocks_may_differ_by_a_minute(fake: FakeProvider, clock: FakeClock, late_s: int, good: bool) -> None:
    now = int(clock.now().timestamp())
    fake.claims = {"iat": now - late_s, "exp": now - late_s + TOKEN_LIFE_S}

    if good:
        assert await identify(fake) == ALICE
    else:
        with pytest.raises(TokenRefused, match="expired"):
            await identify(fake)


async def test_only_a_verified_address_counts(fake: FakeProvider) -> None:
    for told in (False, None, "false", 1, "yes"):
        fake.claims = {"email_verified": told}
        assert (await identify(fake)).email is None
    fake.claims = {"email_verified": "true"}  # as one large provider writes it
    assert (await identify(fake)).email == ALICE.email


async def test_an_address_that_is_not_in_the_token_is_asked_for(fake: FakeProvider) -> None:
    fake.email_in_token = False
    assert await identify(fake) == ALICE

    fake.user_info = {"sub": "charlie-8"}
    with pytest.raises(TokenRefused, match="another subject"):
        await identify(fake)


async def test_a_code_is_worthless_without_the_verifier_of_its_browser(fake: FakeProvider) -> None:
    with pytest.raises(TokenRefused, match="refused the code"):
        await identify(fake, verifier="v" * 43)


async def test_a_code_is_good_once(fake: FakeProvider) -> None:
    ours = fake.client()
    begun = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "verifier")}
    code = parse_qs(urlsplit(fake.sign_in(await ours.authorization_url(**begun))).query)["code"][0]
    sent = {"code": code, "nonce": begun["nonce"], "verifier": begun["verifier"]}
    await ours.identify(**sent)

    with pytest.raises(TokenRefused):
        await ours.identify(**sent)


async def test_a_code_that_another_issuer_sent_is_not_taken_to_this_one(fake: FakeProvider) -> None:
    with pytest.raises(TokenRefused, match="another issuer"):
        await identify(fake, sent_by="https://evil.example.com")


@pytest.mark.parametrize("methods", [["client_secret_post"], ["client_secret_basic", "client_secret_post"]])
async def test_the_client_s_secret_goes_where_the_provider_takes_it(fake: FakeProvider, methods: list[str]) -> None:
    fake.metadata = {"token_endpoint_auth_methods_supported": methods}

    assert await identify(fake) == ALICE


async def test_a_client_without_a_secret_is_protected_by_pkce_alone(fake: FakeProvider) -> None:
    assert await identify(fake, fake.client(secret=None)) == ALICE


async def test_new_keys_of_the_provider_are_fetched_when_they_are_needed(fake: FakeProvider, clock: FakeClock) -> None:
    ours = fake.client()
    await identify(fake, ours)
    for number, name in enumerate(("second", "third"), start=2):
        fake.rotate(ec_key(name))
        assert await identify(fake, ours) == ALICE
        assert fake.requests.count("GET /keys") == number
        clock.advance(KEYS_ASKED_AGAIN_S)


@pytest.mark.parametrize("broken", [{"kty": "EC", "crv": "P-999"}, {"kty": "RSA", "n": 7, "e": None}, {"kty": []}])
async def test_a_broken_key_beside_the_good_one_does_no_harm(fake: FakeProvider, broken: dict[str, Any]) -> None:
    fake.broken_keys = [{"kid": "first", **broken}]

    assert await identify(fake) == ALICE


async def test_unknown_keys_do_not_make_us_ask_all_the_time(fake: FakeProvider, clock: FakeClock) -> None:
    ours = fake.client()
    await identify(fake, ours)
    fake.cheat = "foreign_key"
    for _ in range(5):
        clock.advance(KEYS_ASKED_AGAIN_S / 10)
        with pytest.raises(TokenRefused):
            await identify(fake, ours)

    assert fake.requests.count("GET /keys") == 2


async def test_a_key_that_the_provider_shows_no_more_counts_no_more(fake: FakeProvider, clock: FakeClock) -> None:
    ours = fake.client()
    await identify(fake, ours)
    fake.rotate(rsa_key("second"))
    clock.advance(KEPT_S)
    await identify(fake, ours)
    fake._signing = rsa_key("first")

    with pytest.raises(TokenRefused):
        await identify(fake, ours)


@pytest.mark.parametrize("down", [0, 404, 500, 200, 302])
async def test_a_provider_that_is_away_says_so_and_is_left_alone_for_a_moment(
    fake: FakeProvider, clock: FakeClock, down: int
) -> None:
    ours = fake.client()
    fake.down = down
    for _ in range(3):
        with pytest.raises(ProviderUnavailable):
            await ours.authorization_url(state="s", nonce="n", verifier="v" * 43)
    assert len(fake.requests) == 1

    fake.down = None
    clock.advance(PAUSE_AFTER_FAILURE_S)
    assert await identify(fake, ours) == ALICE


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "https://evil.example.com"},
        {"issuer": None},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"token_endpoint": "http://id.example.com/token"},
        {"jwks_uri": None},
        {"jwks_uri": "https://["},
        {"padding": "x" * ANSWER_BYTES_MAX},
    ],
)
async def test_a_description_that_cannot_be_the_provider_s_is_not_used(fake: FakeProvider, metadata: dict[str, Any]) -> None:
    fake.metadata = metadata

    with pytest.raises(ProviderUnavailable):
        await identify(fake)


async def test_an_issuer_that_writes_a_slash_at_its_end_is_the_same_one(fake: FakeProvider) -> None:
    fake.metadata = {"issuer": f"{ISSUER}/"}
    fake.claims = {"iss": f"{ISSUER}/"}

    found = await identify(fake, sent_by=f"{ISSUER}/")

    assert found == dataclasses.replace(ALICE, issuer=f"{ISSUER}/")


def test_the_settings_name_the_provider(clock: FakeClock, tmp_path: Any) -> None:
    options = {"data_dir": tmp_path, "external_url": "https://llm.example.com/", "oidc_issuer": ISSUER, "oidc_client_id": "g"}
    assert provider_of(load_settings(options={"data_dir": tmp_path}, environ={}), clock) is None

    provider = provider_of(load_settings(options=options, environ={"GATEHOUSE_OIDC_NAME": "Example ID"}), clock)

    assert provider is not None
    assert provider.client.redirect_uri == "https://llm.example.com/login/oidc/callback"
    assert provider.client.label == "Example ID"
    assert dataclasses.replace(provider.client, name=None).label == "id.example.com"


@pytest.fixture
def identities(database: Database, clock: FakeClock) -> Identities:
    return Identities(database, clock)


async def test_the_first_sign_in_links_by_address_and_later_ones_go_by_subject(identities: Identities, cast: Cast) -> None:
    assert await identities.issuer_of(cast.alice.id) is None
    shouted = dataclasses.replace(ALICE, email=" Alice@EXAMPLE.com")
    assert await identities.member_of(shouted) == cast.alice
    assert await identities.issuer_of(cast.alice.id) == ISSUER

    for email in ("new.name@example.com", None):
        assert await identities.member_of(dataclasses.replace(ALICE, email=email)) == cast.alice


async def test_nobody_becomes_a_member_by_signing_in(database: Database, identities: Identities, cast: Cast) -> None:
    stranger = Identity(issuer=ISSUER, subject="charlie-8", email="charlie@example.com")
    unverified = dataclasses.replace(ALICE, email=None)

    for identity, words in ((stranger, "no member with your e-mail"), (unverified, "no verified e-mail")):
        with pytest.raises(InvalidCredentials, match=words):
            await identities.member_of(identity)
    async with database.reading() as connection:
        rows = (await connection.execute(select(members.c.email, members.c.oidc_subject))).all()
    assert [tuple(row) for row in rows] == [("alice@example.com", None)]


async def test_an_address_that_was_given_to_somebody_else_opens_nothing(identities: Identities, cast: Cast) -> None:
    await identities.member_of(ALICE)

    with pytest.raises(InvalidCredentials, match="another account"):
        await identities.member_of(dataclasses.replace(ALICE, subject="mallory-9"))


async def test_another_provider_of_the_operator_links_anew(identities: Identities, cast: Cast) -> None:
    await identities.member_of(ALICE)
    moved = dataclasses.replace(ALICE, issuer="https://new.example.com", subject="42")

    assert await identities.member_of(moved) == cast.alice
    assert await identities.issuer_of(cast.alice.id) == "https://new.example.com"


async def test_a_disabled_member_is_refused_linked_or_not(
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


async def test_two_first_sign_ins_at_once_link_once(database: Database, identities: Identities, cast: Cast) -> None:
    found = await asyncio.gather(*(identities.member_of(ALICE) for _ in range(6)))

    assert set(found) == {cast.alice}
    async with database.reading() as connection:
        actions = [row.action for row in await connection.execute(select(audit_log.c.action))]
    assert actions.count("member.link_provider") == 1


async def test_a_link_can_be_forgotten(database: Database, clock: FakeClock, identities: Identities, cast: Cast) -> None:
    await identities.member_of(ALICE)

    assert await unlink_by_email(database, clock, " ALICE@example.com") == cast.alice
    await identities.unlink(cast.alice.id)  # idempotent

    assert await identities.issuer_of(cast.alice.id) is None
    assert await identities.member_of(dataclasses.replace(ALICE, subject="alice-8")) == cast.alice
    with pytest.raises(NotFound):
        await identities.unlink("mb_nobody")


async def test_a_link_that_is_forgotten_is_one_members_alone_and_an_entry_says_which(
    database: Database, clock: FakeClock, identities: Identities, cast: Cast
) -> None:
    people = Members(database, clock, hasher=quick_hasher())
    dora = await people.create("dora@example.com", "long enough")
    for identity in (ALICE, dataclasses.replace(ALICE, subject="dora-9", email=dora.email)):
        await identities.member_of(identity)
    await identities.unlink(cast.alice.id)

    assert [await identities.issuer_of(member_id) for member_id in (cast.alice.id, dora.id)] == [None, ISSUER]
    (entry,) = (await AuditLog(database, clock).page(1, access=WHOLE_BOX)).data
    assert (entry.action, entry.target_id) == ("member.unlink_provider", cast.alice.id)
    assert json.loads(entry.before or "") == {"email": ALICE.email, "oidc_issuer": ISSUER, "oidc_subject": ALICE.subject}
