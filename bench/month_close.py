"""Time to draft and to close a month of many tenants, and what requests notice of it, on SQLite and PostgreSQL.

Each tenant has four keys, three models whose prices change within the month, corrections, and some have a free allowance. The
month before is closed first, and has events that were posted later. Besides its time and CPU time, a row has the longest time
for which the event loop ran nothing else, and the longest wait for the posting counter, which every settlement of a request
takes. CPU time includes SQLite's work but not PostgreSQL's.

With `--through cli` the command line is measured instead of the console, while no appliance runs: it opens the database itself,
and its start is included.

    python -m bench.month_close [--tenants 500] [--events 100] [--database sqlite] [--through cli]
                             prints one row per database and adds it to bench/results/
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from sqlalchemy import insert

from appliance.app import Appliance, create_app
from appliance.base import counters
from appliance.base.db import Database
from appliance.base.ids import new_id
from appliance.base.interpreter import prepare_to_serve
from appliance.base.logging import configure_logging
from appliance.base.settings import load_settings
from appliance.base.tables import prices, usage_events
from appliance.cli.main import main as gatehouse
from appliance.metering.calendar import BillingCalendar, first_day
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.prices import Price
from appliance.serving.services import Services
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.browser_rules import session_cookie_name
from bench.million_rows import analyze, fresh_database
from bench.rows import argument_parser, publish, row_header
from tests.support.billing import Tokens
from tests.support.factories import price as made_price

KEYS, MODELS = 4, ("small", "medium", "large")
CORRECTED, LATE, FREE = 20, 50, 5
"""One event in CORRECTED is a correction, one in LATE is of the month before, and one tenant in FREE has an allowance."""
INSERT_ROWS = 20_000
PROBE_S = 0.001
LOCK_PROBE_S = 0.02
T = TypeVar("T")


@dataclass(slots=True)
class Watch:
    """What was measured while something ran: its seconds and CPU seconds, and the longest seconds of waiting in probes."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    loop_gap_s: float = 0.0
    lock_wait_s: float = 0.0

    def row(self) -> dict[str, float]:
        """Return the fields of the bench's row."""
        return {
            "s": round(self.seconds, 2),
            "cpu_s": round(self.cpu_s, 2),
            "loop_gap_ms": round(self.loop_gap_s * 1000, 1),
            "lock_wait_ms": round(self.lock_wait_s * 1000, 1),
        }


async def fill(services: Services, months: tuple[str, str], tenants: int, events: int) -> list[dict[str, Any]]:
    """Write the tenants, keys and prices, and the events of the first month, a tenth of all. Return the others, of the second
    month and some late ones of the first: they are to be written once the first month is closed."""
    owners = []
    for number in range(tenants):
        tenant = await services.tenants.create(name=f"tenant {number:04d}", access=WHOLE_APPLIANCE)
        for _ in range(KEYS):
            key, _secret = await services.keys.create(tenant.id, name="key", access=WHOLE_APPLIANCE)
            owners.append((tenant.id, key.id))
        if number % FREE == 0:
            await services.free_allowances.set(tenant.id, months[0], 1000, access=WHOLE_APPLIANCE)
    changes_on = [first_day(months[0]), first_day(months[1]) + timedelta(days=10), first_day(months[1]) + timedelta(days=20)]
    book: dict[str, list[tuple[date, Price]]] = {model: [] for model in MODELS}
    async with services.db.writing() as connection:
        for number, (model, begin) in enumerate((model, begin) for model in MODELS for begin in changes_on):
            price = made_price(100_000 * (number + 1))
            book[model].append((begin, price))
            names = ("id", "currency", "prompt", "cached_prompt", "completion", "rejected_draft")
            columns = {name: getattr(price, name) for name in names} | {"model": model, "batch_percent": 50}
            moment = datetime(begin.year, begin.month, begin.day, tzinfo=UTC)
            await connection.execute(insert(prices).values(**columns, effective_from=moment, created_at=moment))
    epoch_id = await begin_epoch(services.db, services.clock, "bench")
    rng = random.Random(1)
    early = tenants * events // 10
    rows = []
    for number in range(tenants * events):
        month = months[0 if number < early or number % LATE == 0 else 1]
        day = first_day(month) + timedelta(days=rng.randrange(28))
        is_correction = number >= early and number % CORRECTED == 1
        owner = owners[number * 7919 % len(owners)]
        rows.append(_event(rng, owner, book, epoch_id, day, is_correction=is_correction))
    await write_events(services.db, rows[:early])
    return rows[early:]


def _event(
    rng: random.Random,
    owner: tuple[str, str],
    book: dict[str, list[tuple[date, Price]]],
    epoch_id: str,
    day: date,
    *,
    is_correction: bool,
) -> dict[str, Any]:
    tenant_id, key_id = owner
    model = rng.choice(MODELS)
    price = next(price for begin, price in reversed(book[model]) if begin <= day)
    prompt = rng.randrange(1, 4000)
    tokens = Tokens(prompt=prompt, cached=rng.randrange(prompt), completion=rng.randrange(1, 800))
    if is_correction:
        tokens = Tokens(prompt=-1, completion=-1)
    noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
    return {
        "request_id": new_id("req"),
        "tenant_id": tenant_id,
        "key_id": key_id,
        "epoch_id": epoch_id,
        "model": model,
        "endpoint": "/v1/chat/completions",
        "kind": "adjustment" if is_correction else "usage",
        "status": "posted",
        "finish_reason": "stop",
        "reserved_tokens": 0,
        "prompt_tokens": tokens.prompt,
        "cached_tokens": tokens.cached,
        "completion_tokens": tokens.completion,
        "rejected_tokens": 0,
        "estimated": False,
        "price_id": price.id,
        "cost_picos": tokens.cost(price),
        "currency": "EUR",
        "billing_day": day,
        "posting": None,
        "note": f"a refund of {model}" if is_correction else None,
        "admitted_at": noon,
        "settled_at": noon + timedelta(seconds=2),
    }


async def write_events(database: Database, rows: list[dict[str, Any]]) -> None:
    """Write events in the order of their postings."""
    for begin in range(0, len(rows), INSERT_ROWS):
        part = rows[begin : begin + INSERT_ROWS]
        async with database.writing() as connection:
            first = await counters.take(connection, counters.POSTING, len(part))
            numbered = [row | {"posting": posting} for posting, row in enumerate(part, first)]
            await connection.execute(insert(usage_events), numbered)


async def watched(database: Database, work: Callable[[], Any]) -> Watch:
    """Await `work` and return what was measured meanwhile."""
    watch = Watch()
    probes = [asyncio.create_task(_probe_loop(watch)), asyncio.create_task(_probe_lock(watch, database))]
    await asyncio.sleep(LOCK_PROBE_S)
    began_s, worked_s = time.perf_counter(), time.process_time()
    await work()
    watch.seconds, watch.cpu_s = time.perf_counter() - began_s, time.process_time() - worked_s
    for probe in probes:
        probe.cancel()
        with suppress(asyncio.CancelledError):
            await probe
    return watch


async def _probe_loop(watch: Watch) -> None:
    last_s = time.perf_counter()
    while True:
        await asyncio.sleep(PROBE_S)
        now_s = time.perf_counter()
        watch.loop_gap_s, last_s = max(watch.loop_gap_s, now_s - last_s - PROBE_S), now_s


async def _probe_lock(watch: Watch, database: Database) -> None:
    while True:
        began_s = time.perf_counter()
        await database.batch_write(counters.take_sync, "bench", 1)
        watch.lock_wait_s = max(watch.lock_wait_s, time.perf_counter() - began_s)
        await asyncio.sleep(LOCK_PROBE_S)


class Console:
    """A signed-in member who drafts and closes months."""

    def __init__(self, client: httpx.AsyncClient, csrf_token: str) -> None:
        self._client = client
        self._csrf_token = csrf_token
        self._confirmed = ""

    async def draft(self, month: str) -> None:
        """Draft the month for all tenants."""
        await self._post("/invoices", tenant="all", month=month)

    async def confirm(self, month: str) -> None:
        """Open the form for closing the month, which has the value that confirms it."""
        answer = await self._client.get(f"/invoices/months/{month}/close")
        self._confirmed = answer.text.partition('name="confirmed" value="')[2].partition('"')[0]

    async def close(self, month: str) -> None:
        """Send the form that `confirm` opened: close all drafts of the month."""
        await self._post(f"/invoices/months/{month}/close", confirmed=self._confirmed)

    async def _post(self, path: str, **fields: str) -> None:
        answer = await self._client.post(path, data={"csrf_token": self._csrf_token, **fields})
        if answer.status_code != 303:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:2000]}")


@asynccontextmanager
async def running(url: str, folder: Path) -> AsyncIterator[Appliance]:
    """Yield an appliance without engines on the database at `url`."""
    settings = load_settings(options={"data_dir": folder, "database_url": url, "log_level": "error"}, environ={})
    configure_logging("error", json=False)
    appliance = Appliance(settings, engines=False)
    await appliance.start()
    try:
        yield appliance
    finally:
        await appliance.stop()


def last_months(appliance: Appliance) -> tuple[str, str]:
    """Return the last two months."""
    calendar = BillingCalendar()
    second = calendar.month_of(first_day(calendar.month_of(appliance.services.clock.now())) - timedelta(days=1))
    return calendar.month_of(first_day(second) - timedelta(days=1)), second


async def measure_console(url: str, folder: Path, tenants: int, events: int) -> dict[str, Any]:
    """Fill the database at `url`, draft and close two months in the console, and return what was measured of the second."""
    async with running(url, folder) as appliance:
        services, months = appliance.services, last_months(appliance)
        later_events = await fill(services, months, tenants, events)
        await analyze(services.db)
        member = await services.members.create("alice@example.com", "a password of the bench", "owner")
        token, session = await services.sessions.open(member.id, "bench", "127.0.0.1")
        prepare_to_serve()  # as `gatehouse serve` does
        transport = httpx.ASGITransport(app=cast(Any, create_app(appliance)))
        headers = {"cookie": f"{session_cookie_name(secure=False)}={token}", "sec-fetch-site": "same-origin"}
        async with httpx.AsyncClient(transport=transport, base_url="http://appliance", headers=headers, timeout=600) as client:
            console = Console(client, session.csrf_token)
            for month in months:
                if month == months[1]:
                    await write_events(services.db, later_events)
                    await analyze(services.db)
                drafting = await watched(services.db, partial(console.draft, month))
                confirming = await watched(services.db, partial(console.confirm, month))
                closing = await watched(services.db, partial(console.close, month))
        await check_closed(services, months[1])
    return {"draft": drafting.row(), "confirm": confirming.row(), "close": closing.row()}


def measure_cli(url: str, folder: Path, tenants: int, events: int) -> dict[str, Any]:
    """The same with `gatehouse invoices draft` and `close`; nothing else runs meanwhile."""

    async def with_services(work: Callable[[Services, tuple[str, str]], Coroutine[Any, Any, T]]) -> T:
        async with running(url, folder) as appliance:
            result = await work(appliance.services, last_months(appliance))
            await analyze(appliance.services.db)
            return result

    async def begin(services: Services, months: tuple[str, str]) -> tuple[tuple[str, str], list[dict[str, Any]]]:
        return months, await fill(services, months, tenants, events)

    async def go_on(services: Services, _months: tuple[str, str]) -> None:
        await write_events(services.db, later_events)

    async def check(services: Services, months: tuple[str, str]) -> None:
        await check_closed(services, months[1])

    months, later_events = asyncio.run(with_services(begin))
    row: dict[str, Any] = {}
    for month in months:
        if month == months[1]:
            asyncio.run(with_services(go_on))
        for verb in ("draft", "close"):
            row[verb] = run_command("invoices", verb, "--month", month, "--all", "--data-dir", str(folder), "--database", url)
    asyncio.run(with_services(check))
    return row


def run_command(*arguments: str) -> dict[str, float]:
    """Run a command in this process and return its time in seconds. Raises RuntimeError if it fails."""
    began_s, worked_s = time.perf_counter(), time.process_time()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors:
        status = gatehouse(arguments)
    if status != 0:
        raise RuntimeError(errors.getvalue())
    return {"s": round(time.perf_counter() - began_s, 2), "cpu_s": round(time.process_time() - worked_s, 2)}


async def check_closed(services: Services, month: str) -> None:
    """Raise RuntimeError if no invoice of the month is closed."""
    if not (await services.invoices.list(1, month=month, state="closed", access=WHOLE_APPLIANCE)).data:
        raise RuntimeError(f"{month} was not closed")


def main() -> None:
    """Measure and write the rows."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tenants", type=int, default=500)
    parser.add_argument("--events", type=int, default=100, help="events of each tenant")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append")
    parser.add_argument("--through", choices=("console", "cli"), default="console")
    options = parser.parse_args()
    for kind in options.database or ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory() as name, fresh_database(kind, Path(name)) as url:
            case = (url, Path(name), options.tenants, options.events)
            measured = measure_cli(*case) if options.through == "cli" else asyncio.run(measure_console(*case))
        size = {"tenants": options.tenants, "events": options.events * options.tenants}
        publish({**row_header("month_close"), "database": kind, "through": options.through, **size, **measured}, options)


if __name__ == "__main__":
    main()
