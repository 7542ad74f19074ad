"""Members of the appliance in the console: inviting, changing roles, disabling, and resetting passwords and second factors."""

from __future__ import annotations

import re

import pyotp
import pytest

from tests.support.cast import OWNER
from tests.support.clock import FakeClock
from tests.support.console_fixtures import MEMBER_PASSWORD, Browser, ConsoleApp

_PASSWORD = re.compile(r'id="member-password">([^<]+)<')


async def invite(console: ConsoleApp, browser: Browser, email: str = "dora@example.com", role: str = "billing") -> str:
    """Invite a member through the form and return the password that is shown."""
    answer = await browser.post_htmx("/members", email=email, role=role)
    assert answer.status_code == 200, answer.text
    (password,) = _PASSWORD.findall(answer.text)
    return str(password)


async def test_an_invited_member_signs_in_with_the_shown_password_and_must_change_it(console: ConsoleApp) -> None:
    alice = await console.alice()
    password = await invite(console, alice)
    assert password not in (await alice.get("/members")).text
    dora = console.visitor()
    assert (await dora.post("/login", email="dora@example.com", password=password)).status_code == 303
    assert (await dora.get("/tenants")).headers["location"] == "/account"
    member = await console.services.members.get_by_email("dora@example.com")
    assert (member.role, member.password_temporary) == ("billing", True)


async def test_the_list_shows_role_second_factor_state_tenants_and_last_activity(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    await invite(console, alice)
    bob = await console.services.members.create("bob@example.com", MEMBER_PASSWORD, "member")
    await console.services.memberships.add(console.cast.bob.tenant.id, bob.id, "manager", access=OWNER)
    factors = console.services.second_factors
    assert await factors.enabled_of([bob.id]) == frozenset()
    await console.vera()
    clock.advance(120)
    page = (await alice.get("/members")).text
    for text in ("dora@example.com", "invited", "billing", "manager of bob", "2 m ago", "Second factor"):
        assert text in page
    await console.services.members.change(bob.id, disabled=True)
    assert "disabled" in (await alice.get("/members")).text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"email": "", "role": "viewer"}, "Fill this in."),
        ({"email": "nobody", "role": "viewer"}, "Must be an e-mail address"),
        ({"email": "vera@example.com", "role": "viewer"}, "There is a member vera@example.com already."),
        ({"email": "dora@example.com", "role": "king"}, "Choose one of"),
    ],
)
async def test_an_invalid_invitation_is_refused_and_the_form_keeps_its_input(
    console: ConsoleApp, fields: dict[str, str], sentence: str
) -> None:
    alice = await console.alice()
    before = (await console.services.members.list()).data
    answer = await alice.post_htmx("/members", **fields)
    assert answer.status_code == 422
    assert sentence in answer.text
    assert f'value="{fields["email"]}"' in answer.text
    assert (await console.services.members.list()).data == before


async def test_a_member_with_an_appliance_role_is_listed_with_all_tenants_and_extra_roles(console: ConsoleApp) -> None:
    vera = await console.services.members.create("viewer@example.com", MEMBER_PASSWORD, "viewer")
    await console.services.memberships.add(console.cast.bob.tenant.id, vera.id, "manager", access=OWNER)

    page = (await (await console.alice()).get("/members")).text

    assert 'title="all, manager of bob"' in page


async def test_a_member_s_role_can_be_changed_and_the_account_disabled_and_enabled(console: ConsoleApp) -> None:
    alice, vera = await console.alice(), await console.vera()
    member = await console.services.members.get_by_email("vera@example.com")
    path = f"/members/{member.id}"
    assert "vera@example.com" in (await alice.fragment(path)).text
    assert (await alice.post(path, role="admin")).headers["location"] == "/members"
    assert (await vera.get("/tenants/new")).status_code == 200
    await alice.post(path, role="admin", disabled="yes")
    assert (await vera.get("/tenants")).headers["location"].startswith("/login")
    await alice.post(path, role="admin")
    assert not (await console.services.members.get(member.id)).disabled


@pytest.mark.parametrize("change", [{"role": "viewer"}, {"role": "owner", "disabled": "yes"}])
async def test_the_last_owner_cannot_be_demoted_or_disabled(console: ConsoleApp, change: dict[str, str]) -> None:
    alice = await console.alice()
    owner = await console.services.members.get_by_email("alice@example.com")
    answer = await alice.post(f"/members/{owner.id}", **change)
    assert answer.status_code == 422
    assert "last owner" in answer.text
    assert await console.services.members.get(owner.id) == owner


async def test_resetting_a_password_ends_sessions_and_shows_a_new_one_once(console: ConsoleApp) -> None:
    alice, vera = await console.alice(), await console.vera()
    member = await console.services.members.get_by_email("vera@example.com")
    path = f"/members/{member.id}/password"
    assert "all devices are signed out" in (await alice.fragment(path)).text
    (password,) = _PASSWORD.findall((await alice.post_htmx(path)).text)
    assert (await vera.get("/tenants")).headers["location"].startswith("/login")
    assert (await console.visitor().post("/login", email=member.email, password=password)).status_code == 303


async def test_an_owner_can_reset_a_second_factor(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    member = await console.services.members.get_by_email("vera@example.com")
    factors = console.services.second_factors
    enrolment = factors.begin(member)
    await factors.enable(member, enrolment, pyotp.TOTP(enrolment.secret).at(clock.now()))
    assert await factors.enabled_of([member.id]) == {member.id}
    path = f"/members/{member.id}/second-factor"
    assert f'href="{path}"' in (await alice.get(f"/members/{member.id}")).text
    assert "lost phone" in (await alice.get(path)).text
    assert (await alice.post(path)).headers["location"] == "/members"
    assert await factors.enabled_of([member.id]) == frozenset()


async def test_a_viewer_can_only_read_the_list_of_members(console: ConsoleApp) -> None:
    vera = await console.vera()
    member = await console.services.members.get_by_email("alice@example.com")
    page = (await vera.get("/members")).text
    assert "alice@example.com" in page
    assert "Invite" not in page
    for path in ("/members/new", f"/members/{member.id}", f"/members/{member.id}/password"):
        assert (await vera.get(path)).status_code == 403, path
    for path in ("/members", f"/members/{member.id}", f"/members/{member.id}/password", f"/members/{member.id}/second-factor"):
        assert (await vera.post(path, role="viewer", email="x@example.com")).status_code == 403, path
