"""Signing in with a second factor and through a provider on another site, under the content security policy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pyotp
import pytest
import uvicorn
from playwright.async_api import Page, expect

from appliance.base.clock import SystemClock
from tests.browser.conftest import Site
from tests.support.accessibility import violations
from tests.support.cast import ALICE_PASSWORD
from tests.support.oidc_provider import FakeProvider

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

EMAIL = "alice@example.com"


async def enrol(page: Page) -> tuple[pyotp.TOTP, list[str]]:
    """Enable a second factor on the account page; return its TOTP generator and the recovery codes."""
    await page.goto("/account")
    await page.get_by_role("link", name="Set up").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_role("img", name="QR code for an authenticator app")).to_be_visible()
    secret = (await dialog.locator("code.wrap").inner_text()).replace(" ", "")
    await dialog.get_by_label("Code from the app").fill(pyotp.TOTP(secret).now())
    await dialog.get_by_label("Your password").fill(ALICE_PASSWORD)
    await dialog.get_by_role("button", name="Enable").click()
    await expect(page.locator("#recovery-codes")).to_be_visible()
    codes = (await page.locator("#recovery-codes").inner_text()).split()
    await page.keyboard.press("Escape")  # Escape does not close codes that are shown once
    await expect(page.locator("#recovery-codes")).to_be_visible()
    await page.get_by_role("link", name="I have stored them").click()
    await expect(page.get_by_text("10 of 10 recovery codes are left.")).to_be_visible()
    return pyotp.TOTP(secret), codes


async def password_checked(site: Site) -> Page:
    """Return a page in a new context where the password was accepted and the code is still missing."""
    page = await (await site.context()).new_page()
    await page.goto("/login?next=%2Fkeys")
    await page.get_by_label("E-mail").fill(EMAIL)
    await page.get_by_label("Password").fill(ALICE_PASSWORD)
    await page.get_by_role("button", name="Sign in").click()
    await page.wait_for_url(f"{site.url}/login/code")
    return page


async def test_a_second_factor_is_enabled_used_and_disabled(site: Site) -> None:
    alice = await site.alice()
    totp, codes = await enrol(alice)

    page = await password_checked(site)
    await expect(page.get_by_label("Code from your authenticator app")).to_be_focused()
    await page.keyboard.type(totp.at(SystemClock().now(), counter_offset=1))
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"{site.url}/keys")
    lost = await password_checked(site)
    await lost.get_by_label("Code from your authenticator app").fill(codes[0])
    await lost.get_by_role("button", name="Sign in").click()
    await lost.wait_for_url(f"{site.url}/keys")

    await alice.goto("/account")
    await expect(alice.get_by_role("row")).to_have_count(4)
    await alice.get_by_role("button", name="Sign out all others").click()
    await expect(alice.get_by_role("row")).to_have_count(2)
    await alice.get_by_role("link", name="Disable").click()
    await alice.get_by_label("Your password, or a code").fill(ALICE_PASSWORD)
    await alice.get_by_role("dialog").get_by_role("button", name="Disable").click()
    await expect(alice.get_by_role("link", name="Set up")).to_be_visible()
    await page.goto("/keys")
    assert page.url == f"{site.url}/login?next=%2Fkeys"


async def test_the_password_is_changed_on_the_account_page(site: Site) -> None:
    alice = await site.alice()
    await alice.goto("/account")
    await alice.get_by_label("Current password").fill(ALICE_PASSWORD)
    await alice.get_by_label("New password", exact=True).fill("a new long password")
    await alice.get_by_label("Repeat new password").fill("a new long password")
    await alice.get_by_role("button", name="Change password").click()
    await expect(alice.get_by_text("Password changed.")).to_be_visible()


@asynccontextmanager
async def served_provider(provider: FakeProvider, listener: socket.socket) -> AsyncIterator[None]:
    """Serve the provider's sign-in page on a socket."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        query = scope["query_string"].decode()
        answer = provider.handle(httpx.Request("GET", f"{provider.issuer}{scope['path']}?{query}"))
        headers = [(name.lower(), value) for name, value in answer.headers.raw]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": answer.content})

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def test_signing_in_through_a_provider_on_another_site(site: Site) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    issuer = f"http://localhost:{listener.getsockname()[1]}"
    provider = FakeProvider(SystemClock(), issuer=issuer, external_url=site.url)
    site.console.services.oidc = provider.client(name="Example ID")
    async with served_provider(provider, listener):
        page = await (await site.context()).new_page()
        await page.goto("/login?next=%2Fkeys")
        await page.get_by_role("link", name="Sign in with Example ID").click()
        await page.wait_for_url(f"{site.url}/keys")
        await page.goto("/account")
        await expect(page.get_by_role("cell", name="provider", exact=True)).to_be_visible()


async def test_account_dialogs_and_code_page_have_no_serious_violation(site: Site) -> None:
    alice = await site.alice(reduced_motion="reduce")
    found = {}
    await alice.goto("/account")
    found["off"] = await violations(alice)
    await alice.get_by_role("link", name="Set up").click()
    await expect(alice.get_by_role("dialog").get_by_label("Your password")).to_be_visible()
    found["set up"] = await violations(alice)
    await enrol(alice)
    found["on"] = await violations(alice)
    await alice.get_by_role("link", name="Disable").click()
    await expect(alice.get_by_label("Your password, or a code")).to_be_visible()
    found["disable"] = await violations(alice)
    found["code"] = await violations(await password_checked(site))

    assert {state: rules for state, rules in found.items() if rules} == {}


async def test_no_account_page_is_wider_than_a_phone(site: Site) -> None:
    await site.console.services.sessions.open(site.console.cast.alice.id, "x" * 400, "2001:db8:85a3:1234:5678:8a2e:370:7334")
    alice = await site.alice(viewport={"width": 390, "height": 800}, has_touch=True)
    for path in ("/account", "/account/second-factor", "/account/second-factor/disable", "/account/recovery-codes"):
        await alice.goto(path)
        assert await alice.evaluate("document.documentElement.scrollWidth") == 390, path
