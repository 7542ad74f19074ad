"""Second factor: signing in with a code, enrolment, recovery codes, disabling, and password resets in between."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Any

import pyotp
import pytest
from argon2 import PasswordHasher
from httpx import Response
from sqlalchemy import select, update

from appliance.base.sealing import Sealer
from appliance.base.tables import audit_log, members
from appliance.console.login_attempts import PER_MEMBER_CODES
from appliance.tenancy.second_factor import SEALING_PURPOSE, STEP_S
from appliance.tenancy.tickets import SIGN_IN_LIFE_S
from tests.support.cast import ALICE_PASSWORD
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp

EMAIL = "alice@example.com"
COOKIE, TICKET_COOKIE = "gatehouse_session", "gatehouse_code"
_TICKET = re.compile(r'name="ticket" value="([^"]+)"')
_SECRET = re.compile(r'<code class="wrap">([A-Z2-7 ]+)</code>')
_CODES = re.compile(r'id="recovery-codes"[^>]*>([^<]+)<')
_CSRF = re.compile(r'name="csrf_token" value="([^"]+)"')


@dataclass
class Authenticator:
    """An authenticator app, and the recovery codes on paper beside it."""

    totp: pyotp.TOTP
    recovery: list[str]
    clock: FakeClock

    def code(self) -> str:
        """Advance to the next time step and return its code."""
        self.clock.advance(STEP_S)
        return self.totp.at(self.clock.now())


async def enrolment_fields(browser: Browser, clock: FakeClock) -> tuple[pyotp.TOTP, dict[str, str]]:
    """Open the enrolment form; return the authenticator for its secret and valid form fields."""
    sheet = (await browser.fragment("/account/second-factor")).text
    totp = pyotp.TOTP(_SECRET.findall(sheet)[0].replace(" ", ""))
    ticket = html.unescape(_TICKET.findall(sheet)[0])
    return totp, {"ticket": ticket, "code": totp.at(clock.now()), "password": ALICE_PASSWORD}


async def enrol(browser: Browser, clock: FakeClock) -> Authenticator:
    """Enable the second factor in this browser, which gets a new session by that."""
    totp, fields = await enrolment_fields(browser, clock)
    answer = await browser.post("/account/second-factor", **fields)
    assert answer.status_code == 200, answer.text
    browser.csrf_token = _CSRF.findall((await browser.get("/account")).text)[0]
    return Authenticator(totp, _CODES.findall(answer.text)[0].split(), clock)


async def password_checked(console: ConsoleApp, target: str = "/keys") -> Browser:
    """Return a browser in which Alice's password was accepted and the code is still missing."""
    visitor = console.visitor()
    answer = await visitor.post("/login", email=EMAIL, password=ALICE_PASSWORD, next=target)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login/code")
    return visitor


def signed_in(answer: Response) -> bool:
    return COOKIE in answer.cookies


def reset_password_after(console: ConsoleApp, monkeypatch: pytest.MonkeyPatch, service: Any, method: str) -> None:
    """Let somebody reset Alice's password whenever `method` of `service` has returned."""
    original = getattr(service, method)

    async def call_then_reset(*args: Any, **options: Any) -> Any:
        result = await original(*args, **options)
        await console.services.members.reset_password(EMAIL, "another long password")
        return result

    monkeypatch.setattr(service, method, call_then_reset)


async def test_password_and_code_open_a_session(console: ConsoleApp, clock: FakeClock) -> None:
    app = await enrol(await console.alice(), clock)
    visitor = await password_checked(console, "/requests?state=error")

    answer = await visitor.post("/login/code", code=app.code())

    assert (answer.status_code, answer.headers["location"]) == (303, "/requests?state=error")
    session = await console.services.sessions.resolve(visitor.http.cookies[COOKIE])
    assert session is not None
    assert session.method == "password+totp"


async def test_the_password_alone_opens_no_session(console: ConsoleApp, clock: FakeClock) -> None:
    await enrol(await console.alice(), clock)
    before = len((await console.services.sessions.list()).data)

    visitor = await password_checked(console)

    assert set(visitor.http.cookies) == {TICKET_COOKIE}
    assert len((await console.services.sessions.list()).data) == before
    for path in ("/", "/keys", "/account", "/console/events"):
        assert (await visitor.get(path)).status_code == 303
    assert (await visitor.get("/login/code")).status_code == 200


async def test_the_ticket_cookie_is_http_only_and_removed_after_use(console: ConsoleApp, clock: FakeClock) -> None:
    app = await enrol(await console.alice(), clock)
    visitor = console.visitor("https://gatehouse.test")

    cookie = (await visitor.post("/login", email=EMAIL, password=ALICE_PASSWORD)).headers["set-cookie"]
    assert cookie.startswith("__Host-gatehouse-code=")
    assert all(word in cookie for word in ("HttpOnly", "Secure", "SameSite=lax", f"Max-Age={SIGN_IN_LIFE_S}"))

    await visitor.post("/login/code", code=app.code())
    assert "__Host-gatehouse-code" not in visitor.http.cookies
    assert (await visitor.get("/keys")).status_code == 200


async def test_a_code_entered_in_another_browser_opens_no_session(console: ConsoleApp, clock: FakeClock) -> None:
    app = await enrol(await console.alice(), clock)
    await password_checked(console)

    answer = await console.visitor().post("/login/code", code=app.code())

    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert not signed_in(answer)


async def test_an_expired_or_forged_ticket_redirects_to_the_sign_in_page(console: ConsoleApp, clock: FakeClock) -> None:
    app = await enrol(await console.alice(), clock)
    late, forger = await password_checked(console), await password_checked(console)
    forger.http.cookies.set(TICKET_COOKIE, forger.http.cookies[TICKET_COOKIE][:-6] + "AAAAAA", domain="gatehouse.test")
    assert (await forger.post("/login/code", code=app.code())).headers["location"] == "/login"
    clock.advance(SIGN_IN_LIFE_S)

    answer = await late.post("/login/code", code=app.code())

    assert answer.headers["location"] == "/login"
    assert "The sign-in expired" in (await late.get("/login")).text


async def test_a_password_reset_ends_sign_ins_that_wait_for_the_code(console: ConsoleApp, clock: FakeClock) -> None:
    app = await enrol(await console.alice(), clock)
    visitor = await password_checked(console)
    await console.services.members.reset_password(EMAIL, "another long password")

    assert (await visitor.post("/login/code", code=app.code())).status_code == 401


async def test_a_password_reset_during_the_code_check_opens_no_session(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await enrol(await console.alice(), clock)
    visitor = await password_checked(console)
    reset_password_after(console, monkeypatch, console.services.second_factors, "check")

    answer = await visitor.post("/login/code", code=app.code())

    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert not signed_in(answer)


async def test_a_password_reset_during_the_password_check_refuses_the_sign_in(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enrol(await console.alice(), clock)
    challenge = console.services.second_factors.challenge

    async def reset_then_challenge(*args: Any, **options: Any) -> str | None:
        await console.services.members.reset_password(EMAIL, "another long password")
        return await challenge(*args, **options)

    monkeypatch.setattr(console.services.second_factors, "challenge", reset_then_challenge)
    answer = await console.visitor().post("/login", email=EMAIL, password=ALICE_PASSWORD)

    assert answer.status_code == 401


async def test_a_wrong_code_is_refused_and_logged_without_the_code(console: ConsoleApp, clock: FakeClock) -> None:
    await enrol(await console.alice(), clock)
    visitor = await password_checked(console)

    answer = await visitor.post("/login/code", code="nonsense <b>")

    assert answer.status_code == 401
    assert "The code is wrong" in answer.text
    assert "nonsense" not in answer.text
    assert not signed_in(answer)
    async with console.services.db.reading() as connection:
        row = (await connection.execute(select(audit_log).order_by(audit_log.c.id.desc()))).first()
    assert row is not None
    assert (row.action, row.target_id, row.address) == ("session.refuse", EMAIL, "192.0.2.7")
    assert "code" in row.after


async def test_code_attempts_per_member_are_rate_limited_over_all_browsers(console: ConsoleApp, clock: FakeClock) -> None:
    app = await enrol(await console.alice(), clock)
    for _ in range(PER_MEMBER_CODES.burst):
        assert (await (await password_checked(console)).post("/login/code", code="000000")).status_code == 401
    visitor = await password_checked(console)

    refused = await visitor.post("/login/code", code=app.code())

    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) == PER_MEMBER_CODES.refill_s - STEP_S
    clock.advance(PER_MEMBER_CODES.refill_s)
    assert signed_in(await (await password_checked(console)).post("/login/code", code=app.code()))


async def test_a_recovery_code_replaces_a_code_once(console: ConsoleApp, clock: FakeClock) -> None:
    app = await enrol(await console.alice(), clock)

    assert signed_in(await (await password_checked(console)).post("/login/code", code=app.recovery[0]))
    assert (await (await password_checked(console)).post("/login/code", code=app.recovery[0])).status_code == 401


async def test_a_cross_site_code_is_refused(console: ConsoleApp, clock: FakeClock) -> None:
    app = await enrol(await console.alice(), clock)
    visitor = await password_checked(console)

    answer = await visitor.post_with({"Sec-Fetch-Site": "cross-site"}, "/login/code", code=app.code())

    assert answer.status_code == 403
    assert not signed_in(answer)


@pytest.mark.parametrize("wrong", ["code", "password", "ticket"])
async def test_enrolment_needs_a_valid_code_password_and_ticket(console: ConsoleApp, clock: FakeClock, wrong: str) -> None:
    alice = await console.alice()
    sheet = (await alice.fragment("/account/second-factor")).text
    totp = pyotp.TOTP(_SECRET.findall(sheet)[0].replace(" ", ""))
    fields = {"ticket": html.unescape(_TICKET.findall(sheet)[0]), "code": totp.at(clock.now()), "password": ALICE_PASSWORD}

    answer = await alice.post("/account/second-factor", **{**fields, wrong: "000000 wrong"})

    assert answer.status_code == 422
    assert "recovery codes</h2>" not in answer.text
    assert ALICE_PASSWORD not in answer.text
    assert await console.services.second_factors.challenge(console.cast.alice.id) is None
    same_secret = _SECRET.findall(answer.text) == _SECRET.findall(sheet)
    assert same_secret == (wrong != "ticket")


async def test_enrolment_renews_this_session_and_ends_all_others(console: ConsoleApp, clock: FakeClock) -> None:
    alice, other = await console.alice(), await console.alice()
    before = alice.http.cookies[COOKIE]

    app = await enrol(alice, clock)

    assert alice.http.cookies[COOKIE] != before
    assert await console.services.sessions.resolve(before) is None
    assert (await other.get("/account")).status_code == 303
    page = (await alice.get("/account")).text
    assert "10 of 10 recovery codes are left" in page
    assert len(app.recovery) == 10
    assert not any(code in page for code in app.recovery)


@pytest.mark.parametrize("proof", ["password", "code", "recovery"])
async def test_disabling_needs_the_password_a_code_or_a_recovery_code(
    console: ConsoleApp, clock: FakeClock, proof: str
) -> None:
    alice = await console.alice()
    app = await enrol(alice, clock)
    typed = {"password": ALICE_PASSWORD, "code": app.code(), "recovery": app.recovery[9]}[proof]
    before = alice.http.cookies[COOKIE]

    refused = await alice.post("/account/second-factor/disable", proof="neither of them")
    answer = await alice.post("/account/second-factor/disable", proof=typed)

    assert refused.status_code == 422
    assert (answer.status_code, answer.headers["location"]) == (303, "/account")
    assert alice.http.cookies[COOKIE] != before
    assert await console.services.second_factors.challenge(console.cast.alice.id) is None
    assert (await (await console.alice()).get("/account")).status_code == 200


async def test_new_recovery_codes_need_a_proof_and_replace_the_old_ones(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    app = await enrol(alice, clock)

    refused = await alice.post("/account/recovery-codes", proof="wrong")
    answer = await alice.post("/account/recovery-codes", proof=ALICE_PASSWORD)

    assert refused.status_code == 422
    fresh = _CODES.findall(answer.text)[0].split()
    assert not set(fresh) & set(app.recovery)
    assert (await (await password_checked(console)).post("/login/code", code=app.recovery[0])).status_code == 401
    assert signed_in(await (await password_checked(console)).post("/login/code", code=fresh[0]))


async def test_attempts_to_prove_identity_in_a_session_are_rate_limited(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    await enrol(alice, clock)

    pages = [await alice.post("/account/second-factor/disable", proof="000000") for _ in range(PER_MEMBER_CODES.burst + 1)]

    assert "Too many sign-in attempts" in pages[-1].text
    assert "Too many sign-in attempts" not in pages[-2].text


async def test_changes_of_the_second_factor_need_a_csrf_token(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    await enrol(alice, clock)
    alice.csrf_token = "forged"

    for path in ("/account/second-factor", "/account/second-factor/disable", "/account/recovery-codes"):
        assert (await alice.post(path, proof=ALICE_PASSWORD)).status_code == 403


async def test_the_qr_code_complies_with_the_content_security_policy(console: ConsoleApp) -> None:
    sheet = (await (await console.alice()).fragment("/account/second-factor")).text

    assert '<svg xmlns="http://www.w3.org/2000/svg"' in sheet
    assert "style=" not in sheet
    assert "<script" not in sheet


async def test_with_another_secret_key_the_page_names_cause_and_remedies(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await enrol(await console.alice(), clock)
    monkeypatch.setattr(console.services.second_factors, "_sealer", Sealer(b"q" * 32, SEALING_PURPOSE))
    answer = await (await password_checked(console)).post("/login/code", code=app.code())
    assert answer.status_code == 503
    for words in ("secret.key", "restore that file from a backup", "gatehouse admin reset-second-factor"):
        assert words in answer.text


async def test_a_password_reset_during_enrolment_enables_no_second_factor(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await console.alice()
    reset_password_after(console, monkeypatch, console.services.members, "prove_password")

    answer = await alice.post("/account/second-factor", **(await enrolment_fields(alice, clock))[1])

    assert not signed_in(answer)
    assert await console.services.second_factors.challenge(console.cast.alice.id) is None


async def test_a_password_reset_right_after_enrolment_opens_no_session(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await console.alice()
    reset_password_after(console, monkeypatch, console.services.second_factors, "enable")

    answer = await alice.post("/account/second-factor", **(await enrolment_fields(alice, clock))[1])

    assert (answer.status_code, answer.headers.get("location")) == (303, "/login")
    assert not signed_in(answer)


@pytest.mark.parametrize("proof", ["password", "code"])
@pytest.mark.parametrize("path", ["/account/second-factor/disable", "/account/recovery-codes"])
async def test_a_password_reset_during_the_proof_leaves_the_second_factor_unchanged(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, path: str, proof: str
) -> None:
    alice = await console.alice()
    app = await enrol(alice, clock)
    reset_password_after(console, monkeypatch, console.services.members, "prove_password")
    reset_password_after(console, monkeypatch, console.services.second_factors, "check")

    answer = await alice.post(path, proof=ALICE_PASSWORD if proof == "password" else app.code())

    assert not signed_in(answer)
    assert not _CODES.findall(answer.text)
    assert await console.services.second_factors.challenge(console.cast.alice.id) is not None


async def test_a_password_reset_right_after_disabling_opens_no_session(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await console.alice()
    app = await enrol(alice, clock)
    reset_password_after(console, monkeypatch, console.services.second_factors, "disable")

    answer = await alice.post("/account/second-factor/disable", proof=app.code())

    assert not signed_in(answer)


async def test_a_second_factor_enabled_during_the_password_check_is_required(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, factors = await console.alice(), console.services.second_factors
    challenge = factors.challenge

    async def challenge_then_enrol(*args: Any, **options: Any) -> str | None:
        stamp = await challenge(*args, **options)
        await enrol(alice, clock)
        return stamp

    monkeypatch.setattr(factors, "challenge", challenge_then_enrol)
    answer = await console.visitor().post("/login", email=EMAIL, password=ALICE_PASSWORD)

    assert answer.status_code == 401
    assert not signed_in(answer)


async def test_a_password_with_the_shape_of_a_recovery_code_is_accepted_as_password(
    console: ConsoleApp, clock: FakeClock
) -> None:
    alice = await console.alice()
    await enrol(alice, clock)
    password_hash = PasswordHasher().hash("sunshine22")
    async with console.services.db.writing() as connection:
        await connection.execute(update(members).where(members.c.email == EMAIL).values(password_hash=password_hash))

    answer = await alice.post("/account/second-factor/disable", proof="sunshine22")

    assert (answer.status_code, answer.headers["location"]) == (303, "/account")
