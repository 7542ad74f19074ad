"""The account page: changing the password, and listing and ending sessions."""

from __future__ import annotations

import re

import pytest

from appliance.console.login_attempts import PER_ACCOUNT
from appliance.tenancy.devices import device_of
from appliance.tenancy.members import PASSWORD_CHARS_MIN
from tests.support.cast import ALICE_PASSWORD
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp

EMAIL = "alice@example.com"
COOKIE = "gatehouse_session"
NEW = "a new long password"
FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
IPHONE = "Mozilla/5.0 (iPhone; CPU iPhone OS 19_0 like Mac OS X) AppleWebKit/605.1.15 Version/19.0 Mobile/15E148 Safari/604.1"


async def sign_in_from(console: ConsoleApp, agent: str) -> Browser:
    """Return a browser with this user agent in which Alice is signed in."""
    visitor = console.visitor()
    visitor.http.headers["user-agent"] = agent
    return await visitor.sign_in(EMAIL, ALICE_PASSWORD)


async def change_password(browser: Browser, **fields: str) -> int:
    given = {"current": ALICE_PASSWORD, "password": NEW, "again": NEW} | fields
    return (await browser.post("/account/password", **given)).status_code


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (FIREFOX, "Firefox on Linux"),
        (IPHONE, "Safari on iPhone"),
        ("Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/140.0.0.0 Safari/537.36 Edg/140.0.0.0", "Edge on Windows"),
        ("Mozilla/5.0 (Linux; Android 15) AppleWebKit/537.36 Chrome/140.0 Mobile Safari/537.36", "Chrome on Android"),
        (
            "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 Version/18.0 Safari/605.1.15",
            "Safari on macOS",
        ),
        ("Mozilla/5.0 (X11; CrOS x86_64 1) AppleWebKit/537.36 Chrome/140.0 Safari/537.36 OPR/100", "Opera on ChromeOS"),
        ("curl/8.5.0", "curl"),
        ("x" * 400, "x" * 40),
        ("", "Unknown device"),
        ("(;/)", "Unknown device"),
    ],
)
def test_a_user_agent_is_described_as_browser_and_system(agent: str, words: str) -> None:
    assert device_of(agent) == words


async def test_changing_the_password_ends_every_session_but_that_of_this_browser(console: ConsoleApp) -> None:
    alice, other = await console.alice(), await console.alice()
    before = alice.http.cookies[COOKIE]

    assert await change_password(alice) == 303

    assert alice.http.cookies[COOKIE] != before
    assert "Password changed." in (await alice.get("/account")).text
    assert (await other.get("/account")).status_code == 303
    assert await console.services.sessions.resolve(before) is None
    await console.visitor().sign_in(EMAIL, NEW)


@pytest.mark.parametrize(
    "fields", [{"current": "wrong"}, {"password": "short", "again": "short"}, {"again": "different"}, {"current": ""}]
)
async def test_the_password_stays_when_something_is_wrong(console: ConsoleApp, fields: dict[str, str]) -> None:
    alice, other = await console.alice(), await console.alice()

    assert await change_password(alice, **fields) == 422

    assert (await other.get("/account")).status_code == 200
    await console.visitor().sign_in(EMAIL, ALICE_PASSWORD)


async def test_no_password_is_sent_back(console: ConsoleApp) -> None:
    answer = await (await console.alice()).post("/account/password", current="typo typo", password=NEW, again="else")

    assert "typo typo" not in answer.text
    assert NEW not in answer.text


async def test_password_managers_find_the_account_beside_the_new_password(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get("/account")).text
    assert '<input name="username" value="alice@example.com" autocomplete="username" readonly hidden>' in page


async def test_guessing_the_password_in_a_stolen_session_is_slowed_down(console: ConsoleApp) -> None:
    alice = await console.alice()
    for _ in range(PER_ACCOUNT.burst):
        assert await change_password(alice, current="wrong") == 422

    answer = await alice.post("/account/password", current=ALICE_PASSWORD, password=NEW, again=NEW)

    assert "Too many sign-in attempts" in answer.text


async def test_every_session_is_listed_by_device_and_the_current_one_is_marked(console: ConsoleApp, clock: FakeClock) -> None:
    await sign_in_from(console, FIREFOX)
    clock.advance(120)
    phone = await sign_in_from(console, IPHONE)

    page = (await phone.get("/account")).text

    rows = re.findall(r"<tr>\s*<th scope=\"row\">(.*?)</tr>", page, re.DOTALL)
    assert len(rows) == 2
    assert "Safari on iPhone" in rows[0]
    assert "this device" in rows[0]
    assert "Firefox on Linux" in rows[1]
    assert "this device" not in rows[1]
    assert "192.0.2.7" in rows[1]


async def test_one_session_or_all_others_can_be_ended(console: ConsoleApp) -> None:
    alice, first, second = await console.alice(), await sign_in_from(console, FIREFOX), await sign_in_from(console, IPHONE)
    page = (await alice.get("/account")).text
    session = await console.services.sessions.resolve(first.http.cookies[COOKIE])
    assert session is not None
    assert f"/account/sessions/{session.id}/end" in page

    await alice.post(f"/account/sessions/{session.id}/end")
    assert [(await each.get("/account")).status_code for each in (alice, first, second)] == [200, 303, 200]

    await alice.post("/account/sessions/end-others")
    assert [(await each.get("/account")).status_code for each in (alice, first, second)] == [200, 303, 303]


async def test_a_session_of_another_member_cannot_be_ended(console: ConsoleApp) -> None:
    alice, vera = await console.alice(), await console.vera()
    session = await console.services.sessions.resolve(alice.http.cookies[COOKIE])
    assert session is not None

    answer = await vera.post(f"/account/sessions/{session.id}/end")

    assert answer.status_code == 404
    assert (await alice.get("/account")).status_code == 200
    assert session.id not in (await vera.get("/account")).text


async def test_the_account_page_needs_a_session_and_its_forms_a_csrf_token(console: ConsoleApp) -> None:
    for path in ("/account", "/account/second-factor", "/account/second-factor/disable", "/account/recovery-codes"):
        assert (await console.visitor().get(path)).status_code == 303
    alice = await console.alice()
    alice.csrf_token = "forged"
    for path in ("/account/password", "/account/sessions/end-others"):
        assert (await alice.post(path)).status_code == 403


async def test_a_user_agent_is_escaped(console: ConsoleApp) -> None:
    alice = await sign_in_from(console, "<script>alert(1)</script>")

    assert "<script>alert" not in (await alice.get("/account")).text


async def test_the_page_states_the_minimum_password_length(console: ConsoleApp) -> None:
    page = await (await console.alice()).get("/account")

    assert f"At least {PASSWORD_CHARS_MIN} characters; without a second factor choose 15 or more." in page.text
