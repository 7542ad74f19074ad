"""Signing in through an OpenID Connect provider: the redirect, the callback, and every invalid callback."""

from __future__ import annotations

from urllib.parse import urlsplit

import pyotp
import pytest

from appliance.console.login_attempts import PER_ADDRESS
from appliance.tenancy.second_factor import STEP_S
from appliance.tenancy.tickets import PROVIDER_SIGN_IN_LIFE_S
from tests.support.cast import ALICE_PASSWORD
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp
from tests.support.oidc_provider import FakeProvider

COOKIE, TICKET_COOKIE = "gatehouse_session", "gatehouse_oidc"


@pytest.fixture
def provider(console: ConsoleApp, clock: FakeClock) -> FakeProvider:
    """The provider with which the console is configured."""
    fake = FakeProvider(clock)
    console.services.oidc = fake.client(name="Example ID")
    return fake


async def callback_url(browser: Browser, provider: FakeProvider, target: str = "/keys") -> str:
    """Start in this browser, sign in at the provider, and return the callback URL to which it redirects."""
    answer = await browser.get(f"/login/oidc?next={target}")
    assert answer.status_code == 303, answer.text
    assert urlsplit(answer.headers["location"]).netloc == "id.example.com"
    return provider.sign_in(answer.headers["location"])


async def test_a_member_signs_in_through_the_provider(console: ConsoleApp, provider: FakeProvider) -> None:
    visitor = console.visitor()
    assert 'href="/login/oidc?next=%2Fkeys">Sign in with Example ID</a>' in (await visitor.get("/login?next=%2Fkeys")).text

    answer = await visitor.get(await callback_url(visitor, provider))

    assert (answer.status_code, answer.headers["location"]) == (303, "/keys")
    session = await console.services.sessions.resolve(visitor.http.cookies[COOKIE])
    assert session is not None
    assert (session.member.id, session.method) == (console.cast.alice.id, "oidc")
    assert TICKET_COOKIE not in visitor.http.cookies
    assert "You can also sign in with Example ID." in (await visitor.get("/account")).text


async def test_a_password_stays_valid_beside_the_provider_until_the_operator_resets_it(
    console: ConsoleApp, provider: FakeProvider
) -> None:
    visitor = console.visitor()
    await visitor.get(await callback_url(visitor, provider))
    assert "This password keeps working" in (await visitor.get("/account")).text
    await console.visitor().sign_in("alice@example.com", ALICE_PASSWORD)

    await console.services.members.reset_password("alice@example.com", "another long password")

    refused = await console.visitor().post("/login", email="alice@example.com", password=ALICE_PASSWORD)
    assert refused.status_code == 401
    assert (await visitor.get("/keys")).headers["location"].startswith("/login"), "signed out"
    assert (await visitor.get(await callback_url(visitor, provider))).headers["location"] == "/keys"
    assert (await visitor.get("/keys")).status_code == 200, "no new password is demanded"


async def test_without_a_provider_there_is_no_button_and_no_route(console: ConsoleApp) -> None:
    assert "Sign in with" not in (await console.visitor().get("/login")).text
    for path in ("/login/oidc", "/login/oidc/callback"):
        assert (await console.visitor().get(path)).status_code == 404


async def test_a_callback_from_another_browser_is_refused(console: ConsoleApp, provider: FakeProvider) -> None:
    mallory, alice = console.visitor(), console.visitor()
    planted = await callback_url(mallory, provider)

    for browser in (alice, alice):
        answer = await browser.get(planted)
        assert answer.status_code == 400
        assert COOKIE not in browser.http.cookies
        await callback_url(alice, provider)  # she has begun one of her own: its state is another


async def test_a_callback_is_accepted_only_once_even_with_a_copied_cookie(console: ConsoleApp, provider: FakeProvider) -> None:
    visitor, thief = console.visitor(), console.visitor()
    callback = await callback_url(visitor, provider)
    thief.http.cookies.set(TICKET_COOKIE, visitor.http.cookies[TICKET_COOKIE], domain="gatehouse.test")
    assert (await visitor.get(callback)).status_code == 303

    answer = await thief.get(callback)

    assert answer.status_code == 400
    assert "already used" in answer.text
    assert provider.requests.count("POST /token") == 1


@pytest.mark.parametrize("respelt", ["{}!", "{}==", "*{}", "{}%0A"])
async def test_a_callback_is_accepted_only_once_however_its_cookie_is_encoded(
    console: ConsoleApp, provider: FakeProvider, respelt: str
) -> None:
    visitor, thief = console.visitor(), console.visitor()
    callback = await callback_url(visitor, provider)
    thief.http.cookies.set(
        TICKET_COOKIE, respelt.format(visitor.http.cookies[TICKET_COOKIE].strip('"')), domain="gatehouse.test"
    )
    assert (await visitor.get(callback)).status_code == 303

    assert (await thief.get(callback)).status_code == 400
    assert provider.requests.count("POST /token") == 1


async def test_a_late_callback_is_refused(console: ConsoleApp, provider: FakeProvider, clock: FakeClock) -> None:
    visitor = console.visitor()
    callback = await callback_url(visitor, provider)
    clock.advance(PROVIDER_SIGN_IN_LIFE_S)

    assert (await visitor.get(callback)).status_code == 400


@pytest.mark.parametrize("query", ["", "?state=x", "?code=x&state=", "?code=x&state=%ff", "?error=access_denied&state=x"])
async def test_a_callback_without_a_started_sign_in_is_refused(console: ConsoleApp, provider: FakeProvider, query: str) -> None:
    answer = await console.visitor().get(f"/login/oidc/callback{query}")

    assert answer.status_code == 400
    assert "Start again" in answer.text


async def test_an_error_of_the_provider_is_reported_and_passwords_still_work(
    console: ConsoleApp, provider: FakeProvider
) -> None:
    visitor = console.visitor()
    callback = await callback_url(visitor, provider)
    state = callback.partition("state=")[2].partition("&")[0]

    answer = await visitor.get(f"/login/oidc/callback?error=%3Cscript%3E&state={state}")

    assert answer.status_code == 403
    assert "Example ID did not sign you in." in answer.text
    assert "<script>" not in answer.text.replace("<script defer", "")
    await visitor.sign_in("alice@example.com", ALICE_PASSWORD)


@pytest.mark.parametrize("claims", [{"nonce": "x"}, {"aud": "x"}, {"exp": 1}, {"iss": "https://evil.example.com"}])
async def test_an_invalid_id_token_opens_no_session(
    console: ConsoleApp, provider: FakeProvider, claims: dict[str, object]
) -> None:
    visitor = console.visitor()
    provider.claims = claims

    answer = await visitor.get(await callback_url(visitor, provider))

    assert answer.status_code == 403
    assert "this appliance does not accept that sign-in" in answer.text
    assert COOKIE not in visitor.http.cookies


async def test_a_valid_token_of_an_unknown_person_is_refused_with_advice(console: ConsoleApp, provider: FakeProvider) -> None:
    provider.person = {"sub": "charlie-8", "email": "charlie@example.com", "email_verified": True}
    visitor = console.visitor()

    answer = await visitor.get(await callback_url(visitor, provider))

    assert answer.status_code == 403
    assert "ask an owner of this appliance to invite you" in answer.text
    assert COOKIE not in visitor.http.cookies


@pytest.mark.parametrize("when", ["redirect", "callback"])
async def test_while_the_provider_is_unreachable_a_page_says_so_and_passwords_work(
    console: ConsoleApp, provider: FakeProvider, when: str
) -> None:
    visitor = console.visitor()
    callback = await callback_url(visitor, provider) if when == "callback" else "/login/oidc?next=%2Fkeys"
    if when == "redirect":
        console.services.oidc = provider.client(name="Example ID")
    provider.failure_status = 0

    answer = await visitor.get(callback)

    assert answer.status_code == 503
    assert "Example ID does not respond. Sign in with your password" in answer.text
    assert 'name="next" value="/keys"' in answer.text
    await visitor.sign_in("alice@example.com", ALICE_PASSWORD)


async def test_a_member_with_a_second_factor_must_enter_the_code_after_the_provider(
    console: ConsoleApp, provider: FakeProvider, clock: FakeClock
) -> None:
    factors, alice = console.services.second_factors, console.cast.alice
    enrolment = factors.begin(alice)
    totp = pyotp.TOTP(enrolment.secret)
    await factors.enable(alice, enrolment, totp.at(clock.now()))
    clock.advance(STEP_S)
    visitor = console.visitor()

    answer = await visitor.get(await callback_url(visitor, provider))

    assert answer.headers["location"] == "/login/code"
    assert COOKIE not in visitor.http.cookies
    answer = await visitor.post("/login/code", code=totp.at(clock.now()))
    assert answer.headers["location"] == "/keys"
    session = await console.services.sessions.resolve(visitor.http.cookies[COOKIE])
    assert session is not None
    assert session.method == "oidc+totp"


async def test_signing_in_through_the_provider_replaces_the_session_of_the_browser(
    console: ConsoleApp, provider: FakeProvider
) -> None:
    alice = await console.alice()
    before = alice.http.cookies[COOKIE]

    await alice.get(await callback_url(alice, provider))

    assert alice.http.cookies[COOKIE] != before
    assert await console.services.sessions.resolve(before) is None


async def test_a_sign_in_at_another_host_is_redirected_once_to_the_external_url(
    console: ConsoleApp, provider: FakeProvider
) -> None:
    elsewhere = console.visitor("http://127.0.0.1:8000")

    answer = await elsewhere.get("/login/oidc?next=%2Fkeys%3Fa%3D1")

    moved = "http://gatehouse.test/login/oidc?moved=1&next=%2Fkeys%3Fa%3D1"
    assert (answer.status_code, answer.headers["location"]) == (303, moved)
    again = await elsewhere.get("/login/oidc?moved=1&next=%2Fkeys")  # a proxy that changes the host
    assert urlsplit(again.headers["location"]).netloc == "id.example.com"


@pytest.mark.parametrize("target", ["//evil.test", "https://evil.test/", "/\\evil.test"])
async def test_the_redirect_after_the_callback_stays_on_this_site(
    console: ConsoleApp, provider: FakeProvider, target: str
) -> None:
    visitor = console.visitor()

    answer = await visitor.get(await callback_url(visitor, provider, target))

    assert answer.headers["location"] == "/"


async def test_a_target_that_is_too_long_for_the_cookie_is_dropped(console: ConsoleApp, provider: FakeProvider) -> None:
    visitor = console.visitor()
    callback = await callback_url(visitor, provider, "/requests%3Fq=" + "%C3%A4" * 2000)

    assert len(visitor.http.cookies[TICKET_COOKIE]) < 4000
    assert (await visitor.get(callback)).headers["location"] == "/"


async def test_provider_sign_ins_per_address_are_rate_limited(console: ConsoleApp, provider: FakeProvider) -> None:
    statuses = [(await console.visitor().get("/login/oidc")).status_code for _ in range(PER_ADDRESS.burst + 1)]

    assert statuses == [303] * PER_ADDRESS.burst + [429]
