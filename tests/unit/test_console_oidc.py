"""Signing in through a provider: the redirect there, the callback, and every invalid callback."""

from __future__ import annotations

import pyotp
import pytest

from appliance.console.login_attempts import PER_ADDRESS
from appliance.tenancy.second_factor import STEP_S
from appliance.tenancy.tickets import PROVIDER_SIGN_IN_LIFE_S
from tests.support.cast import ALICE_PASSWORD
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp
from tests.support.oidc_provider import FakeProvider, host_of

COOKIE, STEP = "gatehouse_session", "gatehouse_oidc"


@pytest.fixture
def fake(console: ConsoleApp, clock: FakeClock) -> FakeProvider:
    provider = FakeProvider(clock)
    console.services.oidc = provider.client(name="Example ID")
    return provider


async def way_back(browser: Browser, fake: FakeProvider, target: str = "/keys") -> str:
    """Begin in this browser, sign in at the provider, and return where that sends the browser."""
    answer = await browser.get(f"/login/oidc?next={target}")
    assert answer.status_code == 303, answer.text
    assert host_of(answer.headers["location"]) == "id.example.com"
    return fake.sign_in(answer.headers["location"])


async def test_a_member_signs_in_through_the_provider(console: ConsoleApp, fake: FakeProvider) -> None:
    visitor = console.visitor()
    assert 'href="/login/oidc?next=%2Fkeys">Sign in with Example ID</a>' in (await visitor.get("/login?next=%2Fkeys")).text

    answer = await visitor.get(await way_back(visitor, fake))

    assert (answer.status_code, answer.headers["location"]) == (303, "/keys")
    session = await console.services.sessions.resolve(visitor.http.cookies[COOKIE])
    assert session is not None
    assert (session.member.id, session.method) == (console.cast.alice.id, "oidc")
    assert STEP not in visitor.http.cookies
    assert "You can also sign in with Example ID." in (await visitor.get("/account")).text


async def test_a_password_goes_on_working_beside_the_provider_until_the_operator_replaces_it(
    console: ConsoleApp, fake: FakeProvider
) -> None:
    visitor = console.visitor()
    await visitor.get(await way_back(visitor, fake))
    assert "This password keeps working" in (await visitor.get("/account")).text
    await console.visitor().sign_in("alice@example.com", ALICE_PASSWORD)

    await console.services.members.reset_password("alice@example.com", "one that nobody was told")

    refused = await console.visitor().post("/login", email="alice@example.com", password=ALICE_PASSWORD)
    assert refused.status_code == 401
    assert (await visitor.get("/keys")).headers["location"].startswith("/login"), "signed out"
    assert (await visitor.get(await way_back(visitor, fake))).headers["location"] == "/keys"
    assert (await visitor.get("/keys")).status_code == 200, "and nothing asks for another password"


async def test_without_a_provider_there_is_no_button_and_no_way(console: ConsoleApp) -> None:
    assert "Sign in with" not in (await console.visitor().get("/login")).text
    for path in ("/login/oidc", "/login/oidc/callback"):
        assert (await console.visitor().get(path)).status_code == 404


async def test_a_way_back_that_another_browser_began_is_refused(console: ConsoleApp, fake: FakeProvider) -> None:
    mallory, alice = console.visitor(), console.visitor()
    planted = await way_back(mallory, fake)

    for browser in (alice, alice):
        answer = await browser.get(planted)
        assert answer.status_code == 400
        assert COOKIE not in browser.http.cookies
        await way_back(alice, fake)  # she has begun one of her own: its state is another


async def test_a_way_back_serves_once_also_with_the_old_cookie(console: ConsoleApp, fake: FakeProvider) -> None:
    visitor, thief = console.visitor(), console.visitor()
    back = await way_back(visitor, fake)
    thief.http.cookies.set(STEP, visitor.http.cookies[STEP], domain="gatehouse.test")
    assert (await visitor.get(back)).status_code == 303

    answer = await thief.get(back)

    assert answer.status_code == 400
    assert "already used" in answer.text
    assert fake.requests.count("POST /token") == 1


@pytest.mark.parametrize("respelt", ["{}!", "{}==", "*{}", "{}%0A"])
async def test_a_way_back_serves_once_however_its_cookie_is_spelt(
    console: ConsoleApp, fake: FakeProvider, respelt: str
) -> None:
    visitor, thief = console.visitor(), console.visitor()
    back = await way_back(visitor, fake)
    thief.http.cookies.set(STEP, respelt.format(visitor.http.cookies[STEP].strip('"')), domain="gatehouse.test")
    assert (await visitor.get(back)).status_code == 303

    assert (await thief.get(back)).status_code == 400
    assert fake.requests.count("POST /token") == 1


async def test_a_way_back_that_took_too_long_is_refused(console: ConsoleApp, fake: FakeProvider, clock: FakeClock) -> None:
    visitor = console.visitor()
    back = await way_back(visitor, fake)
    clock.advance(PROVIDER_SIGN_IN_LIFE_S)

    assert (await visitor.get(back)).status_code == 400


@pytest.mark.parametrize("query", ["", "?state=x", "?code=x&state=", "?code=x&state=%ff", "?error=access_denied&state=x"])
async def test_a_way_back_that_nobody_began_is_refused(console: ConsoleApp, fake: FakeProvider, query: str) -> None:
    answer = await console.visitor().get(f"/login/oidc/callback{query}")

    assert answer.status_code == 400
    assert "Start again" in answer.text


async def test_a_provider_that_signs_nobody_in_leaves_the_password(console: ConsoleApp, fake: FakeProvider) -> None:
    visitor = console.visitor()
    back = await way_back(visitor, fake)
    state = back.partition("state=")[2].partition("&")[0]

    answer = await visitor.get(f"/login/oidc/callback?error=%3Cscript%3E&state={state}")

    assert answer.status_code == 403
    assert "Example ID did not sign you in." in answer.text
    assert "<script>" not in answer.text.replace("<script defer", "")
    await visitor.sign_in("alice@example.com", ALICE_PASSWORD)


@pytest.mark.parametrize("claims", [{"nonce": "x"}, {"aud": "x"}, {"exp": 1}, {"iss": "https://evil.example.com"}])
async def test_a_token_that_is_not_believed_opens_nothing(
    console: ConsoleApp, fake: FakeProvider, claims: dict[str, object]
) -> None:
    visitor = console.visitor()
    fake.claims = claims

    answer = await visitor.get(await way_back(visitor, fake))

    assert answer.status_code == 403
    assert "this appliance does not accept that sign-in" in answer.text
    assert COOKIE not in visitor.http.cookies


async def test_a_stranger_with_a_good_token_is_told_to_ask_an_owner(console: ConsoleApp, fake: FakeProvider) -> None:
    fake.person = {"sub": "charlie-8", "email": "charlie@example.com", "email_verified": True}
    visitor = console.visitor()

    answer = await visitor.get(await way_back(visitor, fake))

    assert answer.status_code == 403
    assert "ask an owner of this appliance to invite you" in answer.text
    assert COOKIE not in visitor.http.cookies


@pytest.mark.parametrize("when", ["there", "back"])
async def test_when_the_provider_is_away_a_page_says_so_and_the_password_works(
    console: ConsoleApp, fake: FakeProvider, when: str
) -> None:
    visitor = console.visitor()
    back = await way_back(visitor, fake) if when == "back" else "/login/oidc?next=%2Fkeys"
    if when == "there":
        console.services.oidc = fake.client(name="Example ID")
    fake.failure_status = 0

    answer = await visitor.get(back)

    assert answer.status_code == 503
    assert "Example ID does not respond. Sign in with your password" in answer.text
    assert 'name="next" value="/keys"' in answer.text
    await visitor.sign_in("alice@example.com", ALICE_PASSWORD)


async def test_a_member_with_a_second_factor_is_asked_for_it_here_too(
    console: ConsoleApp, fake: FakeProvider, clock: FakeClock
) -> None:
    factors, alice = console.services.second_factors, console.cast.alice
    enrolment = factors.begin(alice)
    totp = pyotp.TOTP(enrolment.secret)
    await factors.enable(alice, enrolment, totp.at(clock.now()))
    clock.advance(STEP_S)
    visitor = console.visitor()

    answer = await visitor.get(await way_back(visitor, fake))

    assert answer.headers["location"] == "/login/code"
    assert COOKIE not in visitor.http.cookies
    answer = await visitor.post("/login/code", code=totp.at(clock.now()))
    assert answer.headers["location"] == "/keys"
    session = await console.services.sessions.resolve(visitor.http.cookies[COOKIE])
    assert session is not None
    assert session.method == "oidc+totp"


async def test_signing_in_through_the_provider_makes_a_new_session_and_ends_the_old_one(
    console: ConsoleApp, fake: FakeProvider
) -> None:
    alice = await console.alice()
    before = alice.http.cookies[COOKIE]

    await alice.get(await way_back(alice, fake))

    assert alice.http.cookies[COOKIE] != before
    assert await console.services.sessions.resolve(before) is None


async def test_the_way_begins_at_the_external_address_once(console: ConsoleApp, fake: FakeProvider) -> None:
    elsewhere = console.visitor("http://127.0.0.1:8000")

    answer = await elsewhere.get("/login/oidc?next=%2Fkeys%3Fa%3D1")

    moved = "http://gatehouse.test/login/oidc?moved=1&next=%2Fkeys%3Fa%3D1"
    assert (answer.status_code, answer.headers["location"]) == (303, moved)
    again = await elsewhere.get("/login/oidc?moved=1&next=%2Fkeys")  # a proxy that changes the host
    assert host_of(again.headers["location"]) == "id.example.com"


@pytest.mark.parametrize("target", ["//evil.test", "https://evil.test/", "/\\evil.test"])
async def test_no_way_leads_to_another_site(console: ConsoleApp, fake: FakeProvider, target: str) -> None:
    visitor = console.visitor()

    answer = await visitor.get(await way_back(visitor, fake, target))

    assert answer.headers["location"] == "/"


async def test_a_way_that_is_too_long_for_a_cookie_leads_to_the_overview(console: ConsoleApp, fake: FakeProvider) -> None:
    visitor = console.visitor()
    back = await way_back(visitor, fake, "/requests%3Fq=" + "%C3%A4" * 2000)

    assert len(visitor.http.cookies[STEP]) < 4000
    assert (await visitor.get(back)).headers["location"] == "/"


async def test_one_address_cannot_make_us_ask_the_provider_all_day(console: ConsoleApp, fake: FakeProvider) -> None:
    statuses = [(await console.visitor().get("/login/oidc")).status_code for _ in range(PER_ADDRESS.burst + 1)]

    assert statuses == [303] * PER_ADDRESS.burst + [429]
