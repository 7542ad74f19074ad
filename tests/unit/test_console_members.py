"""The console of a member of one tenant only, and of a member with an initial password."""

from __future__ import annotations

import re

import pytest

from appliance.console import live_stream
from appliance.console.context import Console
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.browser_rules import PLAIN_COOKIE
from appliance.tenancy.members import Member
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp

PASSWORD = "a long password of tests"
FROM_OTHERS = "made-by-somebody-else"


async def member_of(console: ConsoleApp, tenant_id: str, role: str) -> Member:
    """Return a new member with a password of his own."""
    member = await console.services.members.create(f"{role}@example.com", PASSWORD, "member")
    await console.services.memberships.add(tenant_id, member.id, role, access=WHOLE_APPLIANCE)
    return member


async def browser_of(console: ConsoleApp, role: str) -> Browser:
    """Return the browser of a new member of Bob's tenant, signed in."""
    member = await member_of(console, console.cast.bob.tenant.id, role)
    return await console.visitor().sign_in(member.email, PASSWORD)


@pytest.mark.parametrize("role", ["manager", "developer", "viewer"])
async def test_who_belongs_to_a_tenant_sees_it_and_nothing_else(console: ConsoleApp, role: str) -> None:
    browser = await browser_of(console, role)
    bob, charlie = console.cast.bob, console.cast.charlie

    overview = await browser.get("/")
    assert (overview.status_code, overview.headers["location"]) == (303, "/tenants")
    for path in ("/tenants", "/keys", "/requests", f"/tenants/{bob.tenant.id}", f"/keys/{bob.key.id}"):
        page = await browser.get(path)
        assert (page.status_code, "bob" in page.text, "charlie" in page.text) == (200, True, False), path
        assert "Overview" not in page.text
    for path in (f"/tenants/{charlie.tenant.id}", f"/keys/{charlie.key.id}", f"/keys/{charlie.key.id}/rotate"):
        refused = await browser.get(path)
        assert refused.status_code in (403, 404), path
        assert '<a class="button" href="/requests">Requests</a>' in refused.text  # there is no overview to go back to
    assert (await browser.get("/console/events?view=overview")).status_code == 403


@pytest.mark.parametrize(("role", "may"), [("manager", True), ("developer", True), ("viewer", False)])
async def test_who_may_make_keys_is_offered_it(console: ConsoleApp, role: str, may: bool) -> None:
    browser = await browser_of(console, role)
    tenant = f"/tenants/{console.cast.bob.tenant.id}"
    key = f"/keys/{console.cast.bob.key.id}"

    for path, words in ((tenant, "New key"), (tenant, "/rotate"), (key, "/revoke"), (key, ">Save<"), ("/keys", "/rotate")):
        assert (words in (await browser.get(path)).text) is may, (path, words)
    for words in ("New tenant", "Archive", "Suspend"):
        assert words not in (await browser.get(tenant)).text + (await browser.get("/tenants")).text
    assert (await browser.post(f"{tenant}/keys", name="ci")).status_code == (200 if may else 403)
    assert (await browser.post(f"{key}/revoke")).status_code == (303 if may else 403)
    assert (await browser.post(f"{tenant}/suspend")).status_code == 403


async def test_a_request_of_another_tenant_is_neither_seen_nor_cancelled(console: ConsoleApp) -> None:
    browser = await browser_of(console, "developer")
    console.engine_side.add(console.cast.bob, "req_bobs")
    console.engine_side.add(console.cast.charlie, "req_charlies")

    page = (await browser.get("/requests")).text
    assert ("req_bobs" in page, "req_charlies" in page, "charlie" in page) == (True, False, False)
    refused = await browser.post("/requests/cancel", request_id="req_charlies")
    missing = await browser.post("/requests/cancel", request_id="req_nothing")
    assert refused.status_code == missing.status_code == 404
    assert console.engine_side.aborted == []
    assert (await browser.post("/requests/cancel", request_id="req_bobs")).status_code == 303
    assert console.engine_side.aborted == ["req_bobs"]


async def test_a_viewer_of_a_tenant_cancels_nothing(console: ConsoleApp) -> None:
    browser = await browser_of(console, "viewer")
    console.engine_side.add(console.cast.bob, "req_bobs")

    assert "Cancel" not in (await browser.get("/requests")).text
    assert (await browser.post("/requests/cancel", request_id="req_bobs")).status_code == 403


async def test_one_sample_is_rendered_for_each_that_may_see_different_things(console: ConsoleApp, clock: FakeClock) -> None:
    console_state = Console(console.services)
    alice, bobs = await console.alice(), await browser_of(console, "viewer")
    console.engine_side.add(console.cast.bob, "req_bobs")
    console.engine_side.add(console.cast.charlie, "req_charlies")
    seen = []
    for browser in (alice, bobs, alice, bobs):
        token = browser.http.cookies[PLAIN_COOKIE]
        stream = live_stream._frames(console_state, "requests", token=token)
        frame = (await anext(stream)).decode()
        await stream.aclose()
        seen.append(("req_bobs" in frame, "req_charlies" in frame))

    assert seen == [(True, True), (True, False)] * 2
    assert len(console_state.frames) == 2
    clock.advance(1)
    await console.services.sampler.sample()
    stream = live_stream._frames(console_state, "requests", token=token)
    await anext(stream)
    await stream.aclose()
    assert len(console_state.frames) == 1, "the frames of the sample before are let go"


async def test_a_role_that_ends_ends_the_live_page_at_the_next_look(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_stream, "SESSION_CHECK_TICKS", 1)
    dora = await console.services.members.create("dora@example.com", PASSWORD, "viewer")
    browser = await console.visitor().sign_in(dora.email, PASSWORD)
    stream = live_stream._frames(Console(console.services), "overview", token=browser.http.cookies[PLAIN_COOKIE])
    await anext(stream)
    await console.services.members.change(dora.id, role="member")
    await console.services.sampler.sample()

    assert await anext(stream) == b"event: signed-out\ndata: sign in again\n\n"
    await stream.aclose()


async def test_a_password_made_by_somebody_else_is_good_for_choosing_another(console: ConsoleApp) -> None:
    member = await console.services.members.create("dora@example.com", FROM_OTHERS, "member", temporary=True)
    await console.services.memberships.add(console.cast.bob.tenant.id, member.id, "manager", access=WHOLE_APPLIANCE)
    browser = console.visitor()
    assert (await browser.post("/login", email=member.email, password=FROM_OTHERS)).status_code == 303

    for path in ("/", "/tenants", f"/tenants/{console.cast.bob.tenant.id}", "/console/events"):
        answer = await browser.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/account"), path
    page = await browser.get("/account")
    assert "This password is temporary" in page.text
    assert not [words for words in ("Second factor", "Signed-in devices") if words in page.text]
    browser.csrf_token = re.findall(r'name="csrf_token" value="([^"]+)"', page.text)[0]
    assert (await browser.post(f"/keys/{console.cast.bob.key.id}/revoke")).headers["location"] == "/account"
    same = {"current": FROM_OTHERS, "password": FROM_OTHERS, "again": FROM_OTHERS}
    assert (await browser.post("/account/password", **same)).status_code == 422
    own = {"current": FROM_OTHERS, "password": PASSWORD, "again": PASSWORD}
    assert (await browser.post("/account/password", **own)).status_code == 303
    assert (await browser.get("/tenants")).status_code == 200
    assert (await console.services.keys.get(console.cast.bob.key.id, access=WHOLE_APPLIANCE)).revoked_at is None
