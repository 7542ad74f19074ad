"""Bills usage and drafts invoices for tests of the console's invoices."""

from __future__ import annotations

from datetime import timedelta

import httpx

from appliance.base.ids import new_id
from tests.support.cast import Person
from tests.support.clock import START, FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp
from tests.support.factories import pending, posted

MONTH = f"{START:%Y-%m}"


async def bill_usage(console: ConsoleApp, person: Person, *, completion: int = 100) -> None:
    """Post a request of 30 computed and 20 cached prompt tokens and `completion` of output: by default 1,230 micro-units."""
    prices = console.services.prices
    price = await prices.current("demo", START) or await prices.add(
        model="demo", currency="EUR", prompt=1_000_000, cached_prompt=0, completion=12_000_000, effective_from=START
    )
    entry = pending(person, request_id=new_id("req"), price=price)
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id, prompt=50, cached=20, completion=completion))


async def draft(console: ConsoleApp, browser: Browser, person: Person) -> str:
    """Draft the month's invoice of `person` and return its path."""
    answer = await browser.post("/invoices", tenant=person.tenant.id, month=MONTH)
    assert answer.status_code == 303, answer.text
    return str(answer.headers["location"])


async def close(browser: Browser, address: str) -> httpx.Response:
    """Confirm the form for closing the draft at `address`, with the total that it shows, and return the answer."""
    page = (await browser.get(f"{address}/close")).text
    shown = {name: page.partition(f'name="{name}" value="')[2].partition('"')[0] for name in ("total_micros", "currency")}
    return await browser.post(f"{address}/close", **shown)


def end_month(clock: FakeClock) -> None:
    """Advance the clock beyond the end of the month."""
    clock.advance(timedelta(days=40).total_seconds())
