"""Signing in, signing out, and protection against guessing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from appliance.base.errors import RateLimitExceeded
from appliance.console.login import WRONG_CREDENTIALS
from appliance.console.login_attempts import PER_ACCOUNT, PER_ADDRESS, LoginAttempts
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.audit import AuditFilter
from appliance.tenancy.members import PASSWORD_CHARS_MAX
from tests.support.cast import ALICE_PASSWORD
from tests.support.clock import FakeClock
from tests.support.console_fixtures import ConsoleApp

EMAIL = "alice@example.com"


async def test_the_right_password_opens_a_session_and_leads_to_the_page_that_was_asked_for(console: ConsoleApp) -> None:
    visitor = console.visitor()

    answer = await visitor.post("/login", email=" Alice@Example.com ", password=ALICE_PASSWORD, next="/requests?state=error")

    assert (answer.status_code, answer.headers["location"]) == (303, "/requests?state=error")
    assert (await visitor.get("/requests")).status_code == 200


async def test_the_session_cookie_cannot_be_read_by_scripts_or_sent_by_other_sites(console: ConsoleApp) -> None:
    answer = await console.visitor().post("/login", email=EMAIL, password=ALICE_PASSWORD)

    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("gatehouse_session=")
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert "Path=/" in cookie


async def test_over_https_the_cookie_is_secure_and_bound_to_the_host(console: ConsoleApp) -> None:
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
async def test_every_wrong_pair_gets_the_same_answer(console: ConsoleApp, email: str, password: str) -> None:
    answer = await console.visitor().post("/login", email=email, password=password)

    assert answer.status_code == 401
    assert WRONG_CREDENTIALS in answer.text
    assert "set-cookie" not in answer.headers


async def test_what_was_typed_comes_back_without_the_password_and_escaped(console: ConsoleApp) -> None:
    answer = await console.visitor().post("/login", email='"><script>x</script>', password="topsecret-typo")

    assert "<script>x" not in answer.text
    assert "&lt;script&gt;x" in answer.text
    assert "topsecret-typo" not in answer.text


async def test_a_password_that_is_reset_after_it_was_checked_opens_no_session(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    challenge = console.services.second_factors.challenge

    async def after_a_reset(member_id: str, **options: Any) -> str | None:
        stamp = await challenge(member_id, **options)
        await console.services.members.reset_password(EMAIL, "what the owner gave")
        return stamp

    monkeypatch.setattr(console.services.second_factors, "challenge", after_a_reset)
    answer = await console.visitor().post("/login", email=EMAIL, password=ALICE_PASSWORD)

    assert answer.status_code == 401
    assert WRONG_CREDENTIALS in answer.text
    assert "set-cookie" not in answer.headers


async def test_signing_in_makes_a_new_session_and_ends_the_old_one(console: ConsoleApp) -> None:
    alice = await console.alice()
    before = alice.http.cookies["gatehouse_session"]

    await alice.post("/login", email=EMAIL, password=ALICE_PASSWORD)

    assert alice.http.cookies["gatehouse_session"] != before
    assert await console.services.sessions.resolve(before) is None


async def test_a_session_id_that_the_visitor_chose_is_not_taken_over(console: ConsoleApp) -> None:
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


async def test_whoever_is_signed_in_does_not_see_the_form(console: ConsoleApp) -> None:
    answer = await (await console.alice()).get("/login?next=%2Fkeys")

    assert (answer.status_code, answer.headers["location"]) == (303, "/keys")


async def test_guessing_one_account_is_slowed_down_and_the_right_password_does_not_help(
    console: ConsoleApp, clock: FakeClock
) -> None:
    visitor = console.visitor()
    for _ in range(PER_ACCOUNT.burst):
        assert (await visitor.post("/login", email=EMAIL, password="wrong")).status_code == 401

    refused = await visitor.post("/login", email=EMAIL, password=ALICE_PASSWORD)

    assert (refused.status_code, refused.headers["retry-after"]) == (429, str(round(PER_ACCOUNT.refill_s)))
    clock.advance(PER_ACCOUNT.refill_s)
    assert (await visitor.post("/login", email=EMAIL, password=ALICE_PASSWORD)).status_code == 303


@pytest.mark.parametrize(("email", "password"), [("x" * 1001, "wrong"), (EMAIL, "y" * 1025)])
async def test_what_is_too_long_to_be_right_counts_as_an_attempt(console: ConsoleApp, email: str, password: str) -> None:
    visitor = console.visitor()
    statuses = [
        (await visitor.post("/login", email=email, password=password)).status_code for _ in range(PER_ADDRESS.burst + 1)
    ]

    assert statuses == [401] * PER_ADDRESS.burst + [429]
    entries = await console.services.audit.page(
        200, None, AuditFilter(actions=frozenset({"session.refuse"})), access=WHOLE_APPLIANCE
    )
    assert len(entries.data) == PER_ADDRESS.burst


async def test_the_longest_password_that_may_be_chosen_signs_in(console: ConsoleApp) -> None:
    longest = "long password, ".ljust(PASSWORD_CHARS_MAX, "!")
    await console.services.members.reset_password(EMAIL, longest)

    assert (await console.visitor().post("/login", email=EMAIL, password=longest)).status_code == 303


def test_one_address_cannot_try_many_accounts(clock: FakeClock) -> None:
    attempts = LoginAttempts(clock)
    for number in range(PER_ADDRESS.burst):
        attempts.count(address="192.0.2.1", account=f"{number}@example.com")

    with pytest.raises(RateLimitExceeded) as refused:
        attempts.count(address="192.0.2.1", account="fresh@example.com")

    assert refused.value.retry_after_s == PER_ADDRESS.refill_s
    attempts.count(address="192.0.2.2", account="fresh@example.com")


@pytest.mark.parametrize(
    ("tried_from", "and_from", "is_other"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("::ffff:192.0.2.1", "192.0.2.1", False),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", True),
        ("unknown", "2001:db8:1:2::1", True),
    ],
)
def test_the_addresses_of_one_sender_count_as_one(clock: FakeClock, tried_from: str, and_from: str, is_other: bool) -> None:
    attempts = LoginAttempts(clock)
    for _ in range(PER_ADDRESS.burst):
        attempts.count_address(address=tried_from)

    with nullcontext() if is_other else pytest.raises(RateLimitExceeded):
        attempts.count_address(address=and_from)


def test_a_proven_password_forgives_the_account_s_attempts(clock: FakeClock) -> None:
    attempts = LoginAttempts(clock)
    for _ in range(PER_ACCOUNT.burst):
        attempts.count(address="192.0.2.1", account=EMAIL)

    attempts.reset_account(account=EMAIL.upper())

    attempts.count(address="192.0.2.1", account=EMAIL)


def test_attempts_are_remembered_of_a_bounded_number_of_visitors(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.console.login_attempts.ENTRIES_MAX", 4)
    attempts = LoginAttempts(clock)

    for number in range(20):
        attempts.count(address=f"192.0.2.{number}", account=f"{number}@example.com")

    assert len(attempts._attempts) == 4


@pytest.mark.parametrize(("theme", "attribute"), [("dark", 'data-theme="dark"'), ("light", 'data-theme="light"')])
async def test_the_chosen_colours_are_in_the_page_from_the_server(console: ConsoleApp, theme: str, attribute: str) -> None:
    alice = await console.alice()

    answer = await alice.post("/theme", theme=theme, next="/keys")

    assert answer.headers["location"] == "/keys"
    assert attribute in (await alice.get("/keys")).text


async def test_colours_that_do_not_exist_change_nothing(console: ConsoleApp) -> None:
    alice = await console.alice()

    await alice.post("/theme", theme='"><script>', next="//evil.test")

    page = (await alice.get("/keys")).text
    assert "data-theme" not in page


async def test_colours_chosen_beside_a_form_with_an_error_show_the_page_of_the_form_again(console: ConsoleApp) -> None:
    alice = await console.alice()

    answer = await alice.post_with({"referer": "http://box/account?from=mail"}, "/account/password", current="wrong")

    assert answer.status_code == 422
    assert 'name="next" value="/account?from=mail"' in answer.text
