"""The console of members who belong to one tenant only, and of members with a temporary password."""

from __future__ import annotations

import re

import pytest

from appliance.console import live_stream
from appliance.console.context import Console
from appliance.tenancy.browser_rules import PLAIN_COOKIE
from tests.support.cast import OWNER
from tests.support.clock import FakeClock
from tests.support.console_fixtures import MEMBER_PASSWORD, ConsoleApp

TEMPORARY_PASSWORD = "made-by-somebody-else"


@pytest.mark.parametrize("role", ["manager", "developer", "viewer"])
async def test_a_member_of_one_tenant_sees_only_that_tenant(console: ConsoleApp, role: str) -> None:
    browser = await console.member_of(console.cast.bob, role)
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
async def test_managers_and_developers_can_create_and_revoke_keys_but_viewers_cannot(
    console: ConsoleApp, role: str, may: bool
) -> None:
    browser = await console.member_of(console.cast.bob, role)
    tenant = f"/tenants/{console.cast.bob.tenant.id}"
    key = f"/keys/{console.cast.bob.key.id}"

    for path, words in ((tenant, "New key"), (tenant, "/rotate"), (key, "/revoke"), (key, ">Save<"), ("/keys", "/rotate")):
        assert (words in (await browser.get(path)).text) is may, (path, words)
    for words in ("New tenant", "Archive", "Suspend"):
        assert words not in (await browser.get(tenant)).text + (await browser.get("/tenants")).text
    assert (await browser.post(f"{tenant}/keys", name="ci")).status_code == (200 if may else 403)
    assert (await browser.post(f"{key}/revoke")).status_code == (303 if may else 403)
    assert (await browser.post(f"{tenant}/suspend")).status_code == 403


async def test_requests_of_another_tenant_are_hidden_and_cannot_be_cancelled(console: ConsoleApp) -> None:
    browser = await console.member_of(console.cast.bob, "developer")
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


async def test_a_viewer_of_a_tenant_cannot_cancel_requests(console: ConsoleApp) -> None:
    browser = await console.member_of(console.cast.bob, "viewer")
    console.engine_side.add(console.cast.bob, "req_bobs")

    assert "Cancel" not in (await browser.get("/requests")).text
    assert (await browser.post("/requests/cancel", request_id="req_bobs")).status_code == 403


async def test_one_sample_is_rendered_once_per_set_of_permissions(console: ConsoleApp, clock: FakeClock) -> None:
    console_state = Console(console.services)
    alice, bobs = await console.alice(), await console.member_of(console.cast.bob, "viewer")
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
    assert len(console_state.frames) == 1, "frames of the previous sample are dropped"


async def test_losing_the_role_ends_the_live_stream_at_the_next_sample(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_stream, "SESSION_CHECK_TICKS", 1)
    dora = await console.services.members.create("dora@example.com", MEMBER_PASSWORD, "viewer")
    browser = await console.visitor().sign_in(dora.email, MEMBER_PASSWORD)
    stream = live_stream._frames(Console(console.services), "overview", token=browser.http.cookies[PLAIN_COOKIE])
    await anext(stream)
    await console.services.members.change(dora.id, role="member")
    await console.services.sampler.sample()

    assert await anext(stream) == b"event: signed-out\ndata: sign in again\n\n"
    await stream.aclose()


async def test_a_temporary_password_gives_access_only_to_changing_it(console: ConsoleApp) -> None:
    member = await console.services.members.create("dora@example.com", TEMPORARY_PASSWORD, "member", temporary=True)
    await console.services.memberships.add(console.cast.bob.tenant.id, member.id, "manager", access=OWNER)
    browser = console.visitor()
    assert (await browser.post("/login", email=member.email, password=TEMPORARY_PASSWORD)).status_code == 303

    for path in ("/", "/tenants", f"/tenants/{console.cast.bob.tenant.id}", "/console/events"):
        answer = await browser.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/account"), path
    page = await browser.get("/account")
    assert "This password is temporary" in page.text
    assert not [words for words in ("Second factor", "Signed-in devices") if words in page.text]
    browser.csrf_token = re.findall(r'name="csrf_token" value="([^"]+)"', page.text)[0]
    assert (await browser.post(f"/keys/{console.cast.bob.key.id}/revoke")).headers["location"] == "/account"
    same = {"current": TEMPORARY_PASSWORD, "password": TEMPORARY_PASSWORD, "again": TEMPORARY_PASSWORD}
    assert (await browser.post("/account/password", **same)).status_code == 422
    own = {"current": TEMPORARY_PASSWORD, "password": MEMBER_PASSWORD, "again": MEMBER_PASSWORD}
    assert (await browser.post("/account/password", **own)).status_code == 303
    assert (await browser.get("/tenants")).status_code == 200
    assert (await console.services.keys.get(console.cast.bob.key.id, access=OWNER)).revoked_at is None
