"""A console on a socket and Chromium; any console error or violation of the content security policy fails the test."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import uvicorn
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Error, Page, Playwright, async_playwright, expect

from appliance.base.clock import SystemClock
from appliance.serving.live_requests import LiveRequest
from tests.support.cast import ALICE_PASSWORD
from tests.support.console_fixtures import ConsoleApp, open_console
from tests.support.factories import pending
from tests.support.required_parts import is_required

SAMPLE_INTERVAL_S = 0.15
DEADLINE_MS = 60_000
LAUNCHES_MAX = 3
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Browser]:
    """One Chromium for all tests, each with profiles of its own; skips without one, unless GATEHOUSE_REQUIRE names browser."""
    if shutil.which(CHROMIUM) is None:
        reason = f"no Chromium at {CHROMIUM}"
        pytest.fail(reason) if is_required("browser") else pytest.skip(reason)
    expect.set_options(timeout=DEADLINE_MS)  # the default of 5 s is independent of the context
    async with async_playwright() as playwright:
        browser = await _launch(playwright)
        yield browser
        await browser.close()


async def _launch(playwright: Playwright) -> Browser:
    """Return a Chromium that has rendered a page: about one in a hundred crashes before its first one."""
    for _ in range(LAUNCHES_MAX - 1):
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            page = await browser.new_page()
            await page.goto("data:text/html,<title>drawn</title>")
            await page.close()
        except Error:
            await browser.close()
        else:
            return browser
    return await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)


@dataclass(kw_only=True)
class Site:
    """A served console and the browser. `complaints` are the browser's warnings and errors."""

    url: str
    console: ConsoleApp
    chromium: Browser
    complaints: list[str] = field(default_factory=list)

    async def context(self, **options: object) -> BrowserContext:
        """Return a new browser context whose warnings and errors are collected."""
        context = await self.chromium.new_context(base_url=self.url, **options)  # type: ignore[arg-type]
        context.set_default_timeout(DEADLINE_MS)
        context.on("console", self._collect)
        context.on("weberror", lambda error: self.complaints.append(str(error.error)))
        return context

    async def alice(self, **options: object) -> Page:
        """Return a page of Alice's, signed in through the form."""
        page = await (await self.context(**options)).new_page()
        await page.goto("/login")
        await page.get_by_label("E-mail").fill("alice@example.com")
        await page.get_by_label("Password").fill(ALICE_PASSWORD)
        await page.get_by_role("button", name="Sign in").click()
        await page.wait_for_url(f"{self.url}/")
        return page

    async def running_request(self) -> LiveRequest:
        """Start a request of Bob's and return it."""
        entry = pending(self.console.cast.bob, admitted_at=self.console.services.clock.now())
        await self.console.services.ledger.open(entry)
        return self.console.engine_side.add(self.console.cast.bob, entry.request_id)

    def _collect(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")


@pytest_asyncio.fixture(loop_scope="session")
async def site(
    migrated_sqlite_file: Path, tmp_path: Path, chromium: Browser, request: pytest.FixtureRequest
) -> AsyncIterator[Site]:
    """A served console that samples several times a second. Fails if the browser has reported warnings or errors.

    The parameter, if there is one, is the billing time zone.
    """
    zone: str = getattr(request, "param", "UTC")
    async with open_console(
        migrated_sqlite_file, tmp_path, SystemClock(), interval_s=SAMPLE_INTERVAL_S, time_zone=zone
    ) as console:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(console.app, log_level="warning", ws="none", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        site = Site(url=f"http://127.0.0.1:{listener.getsockname()[1]}", console=console, chromium=chromium)
        try:
            yield site
        finally:
            for context in chromium.contexts:
                await context.close()
            server.should_exit = True
            await serving
    assert site.complaints == []
