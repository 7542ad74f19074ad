"""A tenant's members on its page: only its managers and the appliance's owners invite, change and remove them."""

from __future__ import annotations

import re

import pytest

from appliance.tenancy.access import WHOLE_APPLIANCE
from tests.support.console_fixtures import Browser, ConsoleApp

PASSWORD = "a long password of tests"
_SHOWN = re.compile(r'id="member-password">([^<]+)<')


async def manager_of(console: ConsoleApp, role: str = "manager") -> Browser:
    """Return the browser of somebody with a role in Bob's tenant, signed in."""
    member = await console.services.members.create(f"{role}@example.com", PASSWORD, "member")
    await console.services.memberships.add(console.cast.bob.tenant.id, member.id, role, access=WHOLE_APPLIANCE)
    return await console.visitor().sign_in(member.email, PASSWORD)


async def roles_in(console: ConsoleApp, tenant_id: str) -> dict[str, str]:
    """Return the roles in a tenant by address."""
    return {
        one.email: one.role.value
        for one in (await console.services.memberships.of_tenant(tenant_id, access=WHOLE_APPLIANCE)).data
    }


async def test_an_owner_lets_somebody_new_in_whose_password_is_shown_once(console: ConsoleApp) -> None:
    browser, path = await console.alice(), f"/tenants/{console.cast.bob.tenant.id}"
    assert "Add a person to bob" in (await browser.fragment(f"{path}/members/new")).text
    answer = await browser.post_htmx(f"{path}/members", email="Dora@example.com", role="developer")
    (password,) = _SHOWN.findall(answer.text)
    assert f'href="{path}"' in answer.text
    page = (await browser.get(path)).text
    assert "dora@example.com" in page
    assert '<span class="badge warn">invited</span>' in page  # until a password of her own
    assert password not in page
    assert (await console.visitor().post("/login", email="dora@example.com", password=password)).status_code == 303


async def test_a_manager_adds_whom_the_appliance_knows_and_nobody_else(console: ConsoleApp) -> None:
    browser, path = await manager_of(console), f"/tenants/{console.cast.bob.tenant.id}"
    answer = await browser.post_htmx(f"{path}/members", email="dora@example.com", role="developer")
    assert answer.status_code == 422
    assert "ask an owner of the appliance" in answer.text
    assert (await browser.post(f"{path}/members", email="vera@example.com", role="viewer")).status_code == 303


async def test_who_signs_in_already_is_added_without_a_new_password(console: ConsoleApp) -> None:
    alice, bob = await console.alice(), console.cast.bob.tenant
    answer = await alice.post(f"/tenants/{bob.id}/members", email="vera@example.com", role="viewer")
    assert answer.headers["location"] == f"/tenants/{bob.id}"
    assert (await roles_in(console, bob.id))["vera@example.com"] == "viewer"
    again = await alice.post(f"/tenants/{bob.id}/members", email="vera@example.com", role="viewer")
    assert again.status_code == 422
    assert "already belongs to the tenant" in again.text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"email": "", "role": "viewer"}, "Fill this in."),
        ({"email": "nobody", "role": "viewer"}, "Must be an e-mail address"),
        ({"email": "dora@example.com", "role": "owner"}, "Choose one of manager, developer, viewer."),
    ],
)
async def test_a_wrong_invitation_is_named_and_adds_nobody(console: ConsoleApp, fields: dict[str, str], sentence: str) -> None:
    alice, bob = await console.alice(), console.cast.bob.tenant
    before = await roles_in(console, bob.id)
    answer = await alice.post_htmx(f"/tenants/{bob.id}/members", **fields)
    assert answer.status_code == 422
    assert sentence in answer.text
    assert f'value="{fields["email"]}"' in answer.text
    assert await roles_in(console, bob.id) == before


async def test_a_role_is_changed_and_a_membership_ended(console: ConsoleApp) -> None:
    browser, bob = await manager_of(console), console.cast.bob.tenant
    dora = await console.services.members.create("dora@example.com", PASSWORD, "member")
    await console.services.memberships.add(bob.id, dora.id, "viewer", access=WHOLE_APPLIANCE)
    path = f"/tenants/{bob.id}/members/{dora.id}"
    assert "dora@example.com" in (await browser.fragment(path)).text
    assert (await browser.post(path, role="nothing")).status_code == 422
    assert (await browser.post(path, role="developer")).headers["location"] == f"/tenants/{bob.id}"
    assert (await roles_in(console, bob.id))[dora.email] == "developer"
    assert (await browser.post(f"{path}/remove")).headers["location"] == f"/tenants/{bob.id}"
    assert dora.email not in await roles_in(console, bob.id)
    assert (await browser.get(path)).status_code == 404


async def test_whoever_removes_himself_is_not_led_to_what_he_may_no_longer_see(console: ConsoleApp) -> None:
    browser, bob = await manager_of(console), console.cast.bob.tenant
    member = await console.services.members.get_by_email("manager@example.com")
    answer = await browser.post(f"/tenants/{bob.id}/members/{member.id}/remove")
    assert answer.headers["location"] == "/tenants"
    assert (await browser.get(f"/tenants/{bob.id}")).status_code == 404


@pytest.mark.parametrize("role", ["developer", "viewer"])
async def test_others_of_the_tenant_read_who_belongs_to_it_and_change_nobody(console: ConsoleApp, role: str) -> None:
    browser, bob = await manager_of(console, role), console.cast.bob.tenant
    member = await console.services.members.get_by_email(f"{role}@example.com")
    page = (await browser.get(f"/tenants/{bob.id}")).text
    assert member.email in page
    assert "Add person" not in page
    for path in ("members/new", f"members/{member.id}"):
        assert (await browser.get(f"/tenants/{bob.id}/{path}")).status_code == 403
    for path in ("members", f"members/{member.id}", f"members/{member.id}/remove"):
        answer = await browser.post(f"/tenants/{bob.id}/{path}", email="x@example.com", role="manager")
        assert answer.status_code == 403


async def test_a_manager_changes_nobody_of_another_tenant(console: ConsoleApp) -> None:
    browser, charlie = await manager_of(console), console.cast.charlie.tenant
    dora = await console.services.members.create("dora@example.com", PASSWORD, "member")
    await console.services.memberships.add(charlie.id, dora.id, "viewer", access=WHOLE_APPLIANCE)
    for tenant_id in (charlie.id, console.cast.bob.tenant.id):
        for path in (dora.id, f"{dora.id}/remove"):
            assert (await browser.post(f"/tenants/{tenant_id}/members/{path}", role="manager")).status_code == 404
    assert await roles_in(console, charlie.id) == {dora.email: "viewer"}
