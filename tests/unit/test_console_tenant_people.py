"""Members on a tenant's page: its managers and the appliance's owners add, change and remove them."""

from __future__ import annotations

import re

import pytest

from tests.support.cast import OWNER
from tests.support.console_fixtures import MEMBER_PASSWORD, ConsoleApp

_SHOWN = re.compile(r'id="member-password">([^<]+)<')


async def roles_in(console: ConsoleApp, tenant_id: str) -> dict[str, str]:
    """Return the role of each member of a tenant by e-mail address."""
    return {one.email: one.role.value for one in (await console.services.memberships.of_tenant(tenant_id, access=OWNER)).data}


async def test_an_owner_invites_a_new_member_whose_password_is_shown_once(console: ConsoleApp) -> None:
    browser, path = await console.alice(), f"/tenants/{console.cast.bob.tenant.id}"
    assert "Add a member to bob" in (await browser.fragment(f"{path}/members/new")).text
    answer = await browser.post_htmx(f"{path}/members", email="Dora@example.com", role="developer")
    (password,) = _SHOWN.findall(answer.text)
    assert f'href="{path}"' in answer.text
    page = (await browser.get(path)).text
    assert "dora@example.com" in page
    assert '<span class="badge warn">invited</span>' in page  # until she chooses a password
    assert password not in page
    assert (await console.visitor().post("/login", email="dora@example.com", password=password)).status_code == 303


async def test_a_manager_can_add_only_existing_members_of_the_appliance(console: ConsoleApp) -> None:
    browser, path = await console.member_of(console.cast.bob, "manager"), f"/tenants/{console.cast.bob.tenant.id}"
    answer = await browser.post_htmx(f"{path}/members", email="dora@example.com", role="developer")
    assert answer.status_code == 422
    assert "ask an owner of the appliance" in answer.text
    assert (await browser.post(f"{path}/members", email="vera@example.com", role="viewer")).status_code == 303


async def test_an_existing_member_is_added_once_without_a_new_password(console: ConsoleApp) -> None:
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
async def test_an_invalid_invitation_is_refused_and_adds_nobody(
    console: ConsoleApp, fields: dict[str, str], sentence: str
) -> None:
    alice, bob = await console.alice(), console.cast.bob.tenant
    before = await roles_in(console, bob.id)
    answer = await alice.post_htmx(f"/tenants/{bob.id}/members", **fields)
    assert answer.status_code == 422
    assert sentence in answer.text
    assert f'value="{fields["email"]}"' in answer.text
    assert await roles_in(console, bob.id) == before


async def test_a_manager_changes_a_role_and_ends_a_membership(console: ConsoleApp) -> None:
    browser, bob = await console.member_of(console.cast.bob, "manager"), console.cast.bob.tenant
    dora = await console.services.members.create("dora@example.com", MEMBER_PASSWORD, "member")
    await console.services.memberships.add(bob.id, dora.id, "viewer", access=OWNER)
    path = f"/tenants/{bob.id}/members/{dora.id}"
    assert "dora@example.com" in (await browser.fragment(path)).text
    assert (await browser.post(path, role="nothing")).status_code == 422
    assert (await browser.post(path, role="developer")).headers["location"] == f"/tenants/{bob.id}"
    assert (await roles_in(console, bob.id))[dora.email] == "developer"
    assert (await browser.post(f"{path}/remove")).headers["location"] == f"/tenants/{bob.id}"
    assert dora.email not in await roles_in(console, bob.id)
    assert (await browser.get(path)).status_code == 404


async def test_a_manager_who_leaves_the_tenant_is_redirected_to_the_list(console: ConsoleApp) -> None:
    browser, bob = await console.member_of(console.cast.bob, "manager"), console.cast.bob.tenant
    member = await console.services.members.get_by_email("manager@example.com")
    answer = await browser.post(f"/tenants/{bob.id}/members/{member.id}/remove")
    assert answer.headers["location"] == "/tenants"
    assert (await browser.get(f"/tenants/{bob.id}")).status_code == 404


@pytest.mark.parametrize("role", ["developer", "viewer"])
async def test_developers_and_viewers_can_only_read_the_members(console: ConsoleApp, role: str) -> None:
    browser, bob = await console.member_of(console.cast.bob, role), console.cast.bob.tenant
    member = await console.services.members.get_by_email(f"{role}@example.com")
    page = (await browser.get(f"/tenants/{bob.id}")).text
    assert member.email in page
    assert "Add member" not in page
    for path in ("members/new", f"members/{member.id}"):
        assert (await browser.get(f"/tenants/{bob.id}/{path}")).status_code == 403
    for path in ("members", f"members/{member.id}", f"members/{member.id}/remove"):
        answer = await browser.post(f"/tenants/{bob.id}/{path}", email="x@example.com", role="manager")
        assert answer.status_code == 403


async def test_a_manager_cannot_change_members_of_another_tenant(console: ConsoleApp) -> None:
    browser, charlie = await console.member_of(console.cast.bob, "manager"), console.cast.charlie.tenant
    dora = await console.services.members.create("dora@example.com", MEMBER_PASSWORD, "member")
    await console.services.memberships.add(charlie.id, dora.id, "viewer", access=OWNER)
    for tenant_id in (charlie.id, console.cast.bob.tenant.id):
        for path in (dora.id, f"{dora.id}/remove"):
            assert (await browser.post(f"/tenants/{tenant_id}/members/{path}", role="manager")).status_code == 404
    assert await roles_in(console, charlie.id) == {dora.email: "viewer"}
