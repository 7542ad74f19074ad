"""Verification of the responses of an OpenID Connect provider."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from appliance.base.settings import load_settings
from appliance.tenancy.id_tokens import LEEWAY_S, SUBJECT_CHARS_MAX, TOKEN_CHARS_MAX, Identity, TokenRefused
from appliance.tenancy.oidc import (
    ANSWER_BYTES_MAX,
    CACHE_S,
    KEY_REFRESH_INTERVAL_S,
    PAUSE_AFTER_FAILURE_S,
    OidcProvider,
    ProviderUnavailable,
    provider_from_settings,
)
from tests.support.case_ids import case_id
from tests.support.clock import FakeClock
from tests.support.oidc_provider import CLIENT_ID, ISSUER, TOKEN_LIFE_S, FakeProvider, ec_key, rsa_key

ALICE = Identity(issuer=ISSUER, subject="alice-7", email="alice@example.com")


@pytest.fixture
def fake(clock: FakeClock) -> FakeProvider:
    return FakeProvider(clock)


async def identify(fake: FakeProvider, client: OidcProvider | None = None, **changes: str) -> Identity:
    """Complete one sign-in with the provider; `changes` replace parts of its response."""
    client = client or fake.client()
    begun = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "verifier")}
    back = parse_qs(urlsplit(fake.sign_in(await client.authorization_url(**begun))).query)
    assert back["state"] == [begun["state"]]
    sent = {"code": back["code"][0], "nonce": begun["nonce"], "verifier": begun["verifier"], "response_issuer": back["iss"][0]}
    return await client.identify(**{**sent, **changes})


async def test_a_valid_response_identifies_the_member(fake: FakeProvider) -> None:
    assert await identify(fake) == ALICE


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"nonce": "another sign-in"}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"aud": "another client"}, "audience"),
        ({"aud": [CLIENT_ID, "another client"]}, "several audiences"),
        ({"aud": [CLIENT_ID, "another client"], "azp": "another client"}, "authorized party"),
        ({"azp": "another client"}, "authorized party"),
        ({"aud": None}, "audience"),
        ({"iss": "https://evil.example.com"}, "another issuer"),
        ({"iss": None}, "another issuer"),
        ({"exp": 0}, "expired"),
        ({"exp": None}, "no valid exp or iat"),
        ({"exp": "tomorrow"}, "no valid exp or iat"),
        ({"exp": True}, "no valid exp or iat"),
        ({"exp": float("nan")}, "no valid exp or iat"),
        ({"exp": float("inf")}, "no valid exp or iat"),
        ({"exp": -(10**400)}, "expired"),
        ({"iat": 10**400}, "from the future"),
        ({"iat": None}, "no valid exp or iat"),
        ({"iat": 2**40}, "from the future"),
        ({"nbf": 2**40}, "from the future"),
        ({"sub": ""}, "no valid subject"),
        ({"sub": None}, "no valid subject"),
        ({"sub": 7}, "no valid subject"),
        ({"sub": "x" * 256}, "no valid subject"),
        ({"sub": "alice-7\u200b"}, "no valid subject"),
        ({"picture": "x" * TOKEN_CHARS_MAX}, "no ID token"),
    ],
    ids=case_id,
)
async def test_an_id_token_with_an_invalid_claim_is_refused(fake: FakeProvider, claims: dict[str, Any], reason: str) -> None:
    fake.claims = claims

    with pytest.raises(TokenRefused, match=reason):
        await identify(fake)


@pytest.mark.parametrize("token", [None, 7, {}])
async def test_a_response_without_an_id_token_is_refused(fake: FakeProvider, token: object) -> None:
    fake.tokens = {"id_token": token}

    with pytest.raises(TokenRefused, match="no ID token"):
        await identify(fake)


@pytest.mark.parametrize("subject", ["7", "x" * SUBJECT_CHARS_MAX])
async def test_subjects_of_the_lengths_in_the_standard_are_accepted(fake: FakeProvider, subject: str) -> None:
    fake.claims = {"sub": subject}

    assert await identify(fake) == dataclasses.replace(ALICE, subject=subject)


@pytest.mark.parametrize("forgery", ["unsigned", "shared_secret", "foreign_key"])
async def test_an_id_token_not_signed_by_a_key_of_the_provider_is_refused(fake: FakeProvider, forgery: Any) -> None:
    fake.forgery = forgery

    with pytest.raises(TokenRefused):
        await identify(fake)


@pytest.mark.parametrize(
    "claims", [{"aud": [CLIENT_ID]}, {"aud": [CLIENT_ID, "other"], "azp": CLIENT_ID}, {"azp": CLIENT_ID}], ids=case_id
)
async def test_an_id_token_for_several_audiences_requires_us_as_authorized_party(
    fake: FakeProvider, claims: dict[str, Any]
) -> None:
    fake.claims = claims

    assert await identify(fake) == ALICE


@pytest.mark.parametrize(("late_s", "good"), [(TOKEN_LIFE_S + LEEWAY_S - 1, True), (TOKEN_LIFE_S + LEEWAY_S, False)])
async def test_an_id_token_is_accepted_until_a_minute_after_its_expiry(
    fake: FakeProvider, clock: FakeClock, late_s: int, good: bool
) -> None:
    now = int(clock.now().timestamp())
    fake.claims = {"iat": now - late_s, "exp": now - late_s + TOKEN_LIFE_S}

    if good:
        assert await identify(fake) == ALICE
    else:
        with pytest.raises(TokenRefused, match="expired"):
            await identify(fake)


@pytest.mark.parametrize("name", ["iat", "nbf"])
async def test_an_id_token_may_be_issued_a_minute_in_the_future(fake: FakeProvider, clock: FakeClock, name: str) -> None:
    latest = int(clock.now().timestamp()) + LEEWAY_S
    fake.claims = {name: latest + 0.0}  # a number, which JSON may write with a point
    assert await identify(fake) == ALICE

    fake.claims = {name: latest + 1}
    with pytest.raises(TokenRefused, match="from the future"):
        await identify(fake)


async def test_only_a_verified_email_address_is_used(fake: FakeProvider) -> None:
    for email_verified in (False, None, "false", 1, "yes"):
        fake.claims = {"email_verified": email_verified}
        assert (await identify(fake)).email is None
    fake.claims = {"email": ["alice@example.com"]}
    assert (await identify(fake)).email is None
    fake.claims = {"email_verified": "true"}  # as some providers write it
    assert (await identify(fake)).email == ALICE.email


async def test_an_address_missing_in_the_id_token_is_read_from_the_user_info(fake: FakeProvider) -> None:
    fake.email_in_token = False
    assert await identify(fake) == ALICE

    fake.user_info = {"sub": "charlie-8"}
    with pytest.raises(TokenRefused, match="another subject"):
        await identify(fake)


@pytest.mark.parametrize(
    ("metadata", "tokens"),
    [
        ({"userinfo_endpoint": None}, {}),
        ({"userinfo_endpoint": "http://id.example.com/userinfo"}, {}),
        ({}, {"access_token": None}),
        ({}, {"access_token": 7}),
    ],
    ids=["no endpoint", "plain http", "no access token", "access token not a string"],
)
async def test_the_user_info_is_requested_only_with_a_token_over_https(
    fake: FakeProvider, metadata: dict[str, Any], tokens: dict[str, Any]
) -> None:
    fake.email_in_token, fake.metadata, fake.tokens = False, metadata, tokens

    assert (await identify(fake)).email is None
    assert "GET /userinfo" not in fake.requests


async def test_a_code_is_refused_without_its_verifier(fake: FakeProvider) -> None:
    with pytest.raises(TokenRefused, match="refused the code"):
        await identify(fake, verifier="v" * 43)


async def test_a_code_is_accepted_once(fake: FakeProvider) -> None:
    client = fake.client()
    begun = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "verifier")}
    code = parse_qs(urlsplit(fake.sign_in(await client.authorization_url(**begun))).query)["code"][0]
    sent = {"code": code, "nonce": begun["nonce"], "verifier": begun["verifier"]}
    await client.identify(**sent)

    with pytest.raises(TokenRefused):
        await client.identify(**sent)


async def test_a_code_from_another_issuer_is_refused(fake: FakeProvider) -> None:
    with pytest.raises(TokenRefused, match="another issuer"):
        await identify(fake, response_issuer="https://evil.example.com")


@pytest.mark.parametrize("methods", [["client_secret_post"], ["client_secret_basic", "client_secret_post"]])
async def test_the_client_secret_is_sent_by_a_supported_method(fake: FakeProvider, methods: list[str]) -> None:
    fake.metadata = {"token_endpoint_auth_methods_supported": methods}

    assert await identify(fake) == ALICE


async def test_a_client_without_a_secret_uses_pkce_only(fake: FakeProvider) -> None:
    assert await identify(fake, fake.client(secret=None)) == ALICE


async def test_an_id_token_without_a_key_id_is_verified_with_each_key(fake: FakeProvider) -> None:
    fake.rotate(ec_key("second"), keep_old=True)
    fake.includes_key_id = False

    assert await identify(fake) == ALICE


async def test_the_discovery_document_is_fetched_once_an_hour(fake: FakeProvider, clock: FakeClock) -> None:
    client = fake.client()
    for passed_s, times in ((0.0, 1), (CACHE_S - 1, 1), (1.0, 2)):
        clock.advance(passed_s)
        await identify(fake, client)
        assert fake.requests.count("GET /.well-known/openid-configuration") == times


async def test_new_keys_of_the_provider_are_fetched_on_demand(fake: FakeProvider, clock: FakeClock) -> None:
    client = fake.client()
    await identify(fake, client)
    for number, name in enumerate(("second", "third"), start=2):
        fake.rotate(ec_key(name))
        assert await identify(fake, client) == ALICE
        assert fake.requests.count("GET /keys") == number
        clock.advance(KEY_REFRESH_INTERVAL_S)


@pytest.mark.parametrize("broken", [{"kty": "EC", "crv": "P-999"}, {"kty": "RSA", "n": 7, "e": None}, {"kty": []}, None])
async def test_a_malformed_key_of_the_provider_is_ignored(fake: FakeProvider, broken: dict[str, Any] | None) -> None:
    fake.broken_keys = [None if broken is None else {"kid": "first", **broken}]

    assert await identify(fake) == ALICE


async def test_unknown_keys_do_not_trigger_repeated_fetches(fake: FakeProvider, clock: FakeClock) -> None:
    client = fake.client()
    await identify(fake, client)
    fake.forgery = "foreign_key"
    for _ in range(5):
        clock.advance(KEY_REFRESH_INTERVAL_S / 10)
        with pytest.raises(TokenRefused):
            await identify(fake, client)

    assert fake.requests.count("GET /keys") == 2


async def test_a_key_removed_by_the_provider_is_no_longer_trusted(fake: FakeProvider, clock: FakeClock) -> None:
    client = fake.client()
    await identify(fake, client)
    fake.rotate(rsa_key("second"))
    clock.advance(CACHE_S)
    await identify(fake, client)
    fake._signing_key = rsa_key("first")

    with pytest.raises(TokenRefused):
        await identify(fake, client)


@pytest.mark.parametrize("failure_status", [0, 404, 500, 200, 302])
async def test_an_unavailable_provider_is_not_contacted_again_during_a_pause(
    fake: FakeProvider, clock: FakeClock, failure_status: int
) -> None:
    client = fake.client()
    fake.failure_status = failure_status
    for _ in range(3):
        with pytest.raises(ProviderUnavailable):
            await client.authorization_url(state="s", nonce="n", verifier="v" * 43)
    assert len(fake.requests) == 1

    fake.failure_status = None
    clock.advance(PAUSE_AFTER_FAILURE_S)
    assert await identify(fake, client) == ALICE


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
    ids=case_id,
)
async def test_an_invalid_discovery_document_is_refused(fake: FakeProvider, metadata: dict[str, Any]) -> None:
    fake.metadata = metadata

    with pytest.raises(ProviderUnavailable):
        await identify(fake)


async def test_an_issuer_with_a_trailing_slash_is_accepted(fake: FakeProvider) -> None:
    fake.metadata = {"issuer": f"{ISSUER}/"}
    fake.claims = {"iss": f"{ISSUER}/"}

    found = await identify(fake, response_issuer=f"{ISSUER}/")

    assert found == dataclasses.replace(ALICE, issuer=f"{ISSUER}/")


def test_the_provider_is_configured_by_settings(clock: FakeClock, tmp_path: Any) -> None:
    options = {"data_dir": tmp_path, "external_url": "https://llm.example.com/", "oidc_issuer": ISSUER, "oidc_client_id": "g"}
    assert provider_from_settings(load_settings(options={"data_dir": tmp_path}, environ={}), clock) is None

    provider = provider_from_settings(load_settings(options=options, environ={"GATEHOUSE_OIDC_NAME": "Example ID"}), clock)

    assert provider is not None
    assert provider.client.redirect_uri == "https://llm.example.com/login/oidc/callback"
    assert provider.client.label == "Example ID"
    assert dataclasses.replace(provider.client, name=None).label == "id.example.com"
