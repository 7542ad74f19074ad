"""Signing in and out with a password, rate limits of sign-in attempts, and the colour scheme."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from appliance.base.errors import RateLimitExceeded
from appliance.console.login import WRONG_CREDENTIALS
from appliance.console.login_attempts import PER_ACCOUNT, PER_ADDRESS, LoginAttempts
from appliance.tenancy import members
from appliance.tenancy.audit import AuditFilter
from appliance.tenancy.members import PASSWORD_CHARS_MAX
from tests.support.cast import ALICE_PASSWORD, OWNER
from tests.support.clock import FakeClock
from tests.support.console_fixtures import ConsoleApp

EMAIL = "alice@example.com"


async def test_the_right_password_opens_a_session_and_redirects_to_the_requested_page(console: ConsoleApp) -> None:
    visitor = console.visitor()

    answer = await visitor.post("/login", email=" Alice@Example.com ", password=ALICE_PASSWORD, next="/requests?state=error")

    assert (answer.status_code, answer.headers["location"]) == (303, "/requests?state=error")
    assert (await visitor.get("/requests")).status_code == 200


async def test_the_session_cookie_is_http_only_and_same_site(console: ConsoleApp) -> None:
    answer = await console.visitor().post("/login", email=EMAIL, password=ALICE_PASSWORD)

    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("gatehouse_session=")
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert "Path=/" in cookie


async def test_over_https_the_session_cookie_is_secure_and_bound_to_the_host(console: ConsoleApp) -> None:
    visitor = console.visitor("https://gatehouse.test")

    answer = await visitor.post("/login", email=EMAIL, password=ALICE_PASSWORD)

    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-gatehouse=")
    assert "Secure" in cookie
    assert "Domain" not in cookie
    assert (await visitor.get("/tenants")).status_code == 200


@pytest.mark.parametrize(
    ("email", "password"),
    [(EMAIL, "wrong"), ("nobody@example.com", "wrong"), ("", ""), (EMAIL, ""), ("x" * 2000, "y"), (EMAIL, "y" * 2000)],
)
async def test_all_wrong_credentials_get_the_same_response(console: ConsoleApp, email: str, password: str) -> None:
    answer = await console.visitor().post("/login", email=email, password=password)

    assert answer.status_code == 401
    assert WRONG_CREDENTIALS in answer.text
    assert "set-cookie" not in answer.headers


async def test_after_a_failure_the_form_keeps_the_escaped_email_but_no_password(console: ConsoleApp) -> None:
    answer = await console.visitor().post("/login", email='"><script>x</script>', password="topsecret-typo")

    assert "<script>x" not in answer.text
    assert "&lt;script&gt;x" in answer.text
    assert "topsecret-typo" not in answer.text


async def test_a_password_reset_during_the_sign_in_opens_no_session(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    challenge = console.services.second_factors.challenge

    async def challenge_then_reset(member_id: str, **options: Any) -> str | None:
        stamp = await challenge(member_id, **options)
        await console.services.members.reset_password(EMAIL, "what the owner gave")
        return stamp

    monkeypatch.setattr(console.services.second_factors, "challenge", challenge_then_reset)
    answer = await console.visitor().post("/login", email=EMAIL, password=ALICE_PASSWORD)

    assert answer.status_code == 401
    assert WRONG_CREDENTIALS in answer.text
    assert "set-cookie" not in answer.headers


async def test_signing_in_replaces_the_session_of_the_browser(console: ConsoleApp) -> None:
    alice = await console.alice()
    before = alice.http.cookies["gatehouse_session"]

    await alice.post("/login", email=EMAIL, password=ALICE_PASSWORD)

    assert alice.http.cookies["gatehouse_session"] != before
    assert await console.services.sessions.resolve(before) is None


async def test_a_session_token_chosen_by_the_client_is_not_adopted(console: ConsoleApp) -> None:
    visitor = console.visitor()
    chosen = "c" * 43

    answer = await visitor.http.post(
        "/login",
        data={"email": EMAIL, "password": ALICE_PASSWORD},
        headers={"Cookie": f"gatehouse_session={chosen}"},
    )

    assert chosen not in answer.headers["set-cookie"]
    assert await console.services.sessions.resolve(chosen) is None


async def test_signing_out_ends_the_session_on_the_server(console: ConsoleApp) -> None:
    alice = await console.alice()
    token = alice.http.cookies["gatehouse_session"]

    answer = await alice.post("/logout")

    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert await console.services.sessions.resolve(token) is None
    assert "Signed out." in (await alice.get("/login")).text


async def test_the_sign_in_page_redirects_a_signed_in_member(console: ConsoleApp) -> None:
    answer = await (await console.alice()).get("/login?next=%2Fkeys")

    assert (answer.status_code, answer.headers["location"]) == (303, "/keys")


async def test_attempts_per_account_are_rate_limited_even_with_the_right_password(
    console: ConsoleApp, clock: FakeClock
) -> None:
    visitor = console.visitor()
    for _ in range(PER_ACCOUNT.burst):
        assert (await visitor.post("/login", email=EMAIL, password="wrong")).status_code == 401

    refused = await visitor.post("/login", email=EMAIL, password=ALICE_PASSWORD)

    assert (refused.status_code, refused.headers["retry-after"]) == (429, str(round(PER_ACCOUNT.refill_s)))
    clock.advance(PER_ACCOUNT.refill_s)
    assert (await visitor.post("/login", email=EMAIL, password=ALICE_PASSWORD)).status_code == 303


async def test_a_sign_in_beyond_those_that_wait_to_be_checked_is_told_to_wait(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "PASSWORD_CHECKS_MAX", 0)
    refused = await console.visitor().post("/login", email=EMAIL, password=ALICE_PASSWORD)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    assert "Too many people are signing in. Wait 5 s, then try again." in refused.text


async def test_a_sign_in_that_is_refused_unchecked_does_not_count_against_the_account(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor = console.visitor()
    with monkeypatch.context() as busy:
        busy.setattr(members, "PASSWORD_CHECKS_MAX", 0)
        for _ in range(PER_ACCOUNT.burst):
            await visitor.post("/login", email=EMAIL, password=ALICE_PASSWORD)
    assert (await visitor.post("/login", email=EMAIL, password=ALICE_PASSWORD)).status_code == 303


@pytest.mark.parametrize(("email", "password"), [("x" * 1001, "wrong"), (EMAIL, "y" * 1025)])
async def test_credentials_that_are_too_long_count_as_an_attempt(console: ConsoleApp, email: str, password: str) -> None:
    visitor = console.visitor()
    statuses = [
        (await visitor.post("/login", email=email, password=password)).status_code for _ in range(PER_ADDRESS.burst + 1)
    ]

    assert statuses == [401] * PER_ADDRESS.burst + [429]
    entries = await console.services.audit.page(200, None, AuditFilter(actions=frozenset({"session.refuse"})), access=OWNER)
    assert len(entries.data) == PER_ADDRESS.burst


async def test_a_password_of_the_maximum_length_signs_in(console: ConsoleApp) -> None:
    longest = "long password, ".ljust(PASSWORD_CHARS_MAX, "!")
    await console.services.members.reset_password(EMAIL, longest)

    assert (await console.visitor().post("/login", email=EMAIL, password=longest)).status_code == 303


def test_attempts_per_address_are_rate_limited_over_all_accounts(clock: FakeClock) -> None:
    attempts = LoginAttempts(clock)
    for number in range(PER_ADDRESS.burst):
        attempts.count(address="192.0.2.1", account=f"{number}@example.com")

    with pytest.raises(RateLimitExceeded) as refused:
        attempts.count(address="192.0.2.1", account="fresh@example.com")

    assert refused.value.retry_after_s == PER_ADDRESS.refill_s
    attempts.count(address="192.0.2.2", account="fresh@example.com")


@pytest.mark.parametrize(
    ("first", "second", "are_separate"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("::ffff:192.0.2.1", "192.0.2.1", False),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", True),
        ("unknown", "2001:db8:1:2::1", True),
    ],
)
def test_ipv6_addresses_of_one_network_count_as_one_address(
    clock: FakeClock, first: str, second: str, are_separate: bool
) -> None:
    attempts = LoginAttempts(clock)
    for _ in range(PER_ADDRESS.burst):
        attempts.count_address(address=first)

    with nullcontext() if are_separate else pytest.raises(RateLimitExceeded):
        attempts.count_address(address=second)


def test_a_successful_sign_in_resets_the_attempts_of_its_account(clock: FakeClock) -> None:
    attempts = LoginAttempts(clock)
    for _ in range(PER_ACCOUNT.burst):
        attempts.count(address="192.0.2.1", account=EMAIL)

    attempts.reset_account(account=EMAIL.upper())

    attempts.count(address="192.0.2.1", account=EMAIL)


def test_the_number_of_remembered_attempts_is_bounded(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.console.login_attempts.ENTRIES_MAX", 4)
    attempts = LoginAttempts(clock)

    for number in range(20):
        attempts.count(address=f"192.0.2.{number}", account=f"{number}@example.com")

    assert len(attempts._attempts) == 4


@pytest.mark.parametrize(("theme", "attribute"), [("dark", 'data-theme="dark"'), ("light", 'data-theme="light"')])
async def test_the_chosen_colour_scheme_is_rendered_by_the_server(console: ConsoleApp, theme: str, attribute: str) -> None:
    alice = await console.alice()

    answer = await alice.post("/theme", theme=theme, next="/keys")

    assert answer.headers["location"] == "/keys"
    assert attribute in (await alice.get("/keys")).text


async def test_an_unknown_colour_scheme_is_ignored(console: ConsoleApp) -> None:
    alice = await console.alice()

    await alice.post("/theme", theme='"><script>', next="//evil.test")

    page = (await alice.get("/keys")).text
    assert "data-theme" not in page


async def test_changing_the_colour_scheme_on_a_form_error_returns_to_the_page_of_the_form(console: ConsoleApp) -> None:
    alice = await console.alice()

    answer = await alice.post_with(
        {"referer": "http://gatehouse.example/account?from=mail"}, "/account/password", current="wrong"
    )

    assert answer.status_code == 422
    assert 'name="next" value="/account?from=mail"' in answer.text
