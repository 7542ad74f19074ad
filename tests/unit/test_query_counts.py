"""The number of statements of every page and list does not depend on how many tenants, keys and requests exist."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, select

from appliance.base.tables import requests, usage_events
from appliance.metering.ledger import rollups
from appliance.tenancy.members import Member
from tests.support.api_app import ApiApp, open_api_app_on
from tests.support.tenant_isolation import PopulatedTenant, Route, make_populated_tenant, routes_of, session_headers

FEW, MANY = 1, 6
EVENTS = 240
"""More than the longest page has rows. A statement per tenant, key or row shows with MANY of them as with more."""
DAY = timedelta(days=1)
STATEMENTS_MAX = 25
"""The most statements that any page may need."""
REPORTS = (
    "/admin/v1/usage?bucket=hour&group_by=tenant,key,model&limit=200&start={start}",
    "/admin/v1/usage?bucket=minute&limit=3&start={start}",
    "/admin/v1/usage?bucket=minute&group_by=tenant&model=demo&start={start}",
    "/v1/organization/usage/completions?bucket_width=1m&limit=1440&start_time={unix}&group_by=api_key_id",
    "/v1/organization/costs?start_time={unix}&group_by=line_item",
    "/admin/v1/ledger?limit=200&order=desc",
    "/admin/v1/requests?limit=200",
    "/usage?group=key&period=today",
)
"""Reports that routes return only with these queries."""
STREAMS = ("/events", "/console/events")
WITHOUT_DATABASE = ("/static", "/login/oidc")
APPLIANCE_NAMES = {"name": "standard", "model": "demo"}
SENT: ContextVar[list[str] | None] = ContextVar("SENT", default=None)
"""The statements of the current response. Periodic writes of the appliance's own tasks do not count."""


@pytest.fixture
async def api(database_url: str, tmp_path: Path) -> AsyncIterator[ApiApp]:
    async with open_api_app_on(database_url, tmp_path) as opened:
        await opened.services.sampler.sample()
        yield opened


@pytest.fixture(autouse=True)
def _statements_by_response() -> Iterator[None]:
    """Assign every statement to the response that it is executed for."""

    def record(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        sent = SENT.get()
        if sent is not None:
            sent.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    yield
    event.remove(Engine, "before_cursor_execute", record)


@contextmanager
def statements() -> Iterator[list[str]]:
    """Yield a list of the statements executed in the block by this task and tasks that it starts."""
    sent: list[str] = []
    before = SENT.set(sent)
    try:
        yield sent
    finally:
        SENT.reset(before)


def reads(api: ApiApp) -> list[Route]:
    """Return the pages and API responses that an owner can read."""
    gets = [route for route in routes_of(api.app) if route.method == "GET"]
    return [route for route in gets if not route.path.endswith(STREAMS) and not route.path.startswith(WITHOUT_DATABASE)]


async def counts(api: ApiApp, owner: Member, of: PopulatedTenant) -> dict[str, int]:
    """Return the number of statements of each page and API response."""
    headers, found = await session_headers(api.services, owner), {}
    for route in reads(api):
        with statements() as sent:
            answer = await api.client.get(route.filled({**APPLIANCE_NAMES, **of.ids}), headers=headers)
        assert answer.status_code != 500, (route, answer.text)
        found[route.path] = len(sent)
    start = api.services.clock.now() - timedelta(hours=12)
    for report in REPORTS:
        path = report.format(start=start.isoformat().replace("+00:00", "Z"), unix=int(start.timestamp()))
        with statements() as sent:
            answer = await api.client.get(path, headers=headers)
        assert answer.status_code == 200, (path, answer.text)
        found[report] = len(sent)
    return found


async def record_usage(api: ApiApp, people: Sequence[PopulatedTenant]) -> None:
    """Insert EVENTS events of the last day, with requests and sums, spread over the keys of these tenants."""
    now = api.services.clock.now()
    async with api.services.db.writing() as connection:
        one = dict(
            (await connection.execute(select(usage_events).where(usage_events.c.kind == "usage").limit(1))).mappings().one()
        )
        past = dict((await connection.execute(select(requests).limit(1))).mappings().one())
        shared = {column: value for column, value in one.items() if column not in ("id", "posting")}
        event_rows: list[dict[str, Any]] = []
        request_rows: list[dict[str, Any]] = []
        for number in range(EVENTS):
            person = people[number % len(people)].person
            own = {"tenant_id": person.tenant.id, "key_id": person.key.id, "admitted_at": now - number * DAY / EVENTS}
            event_rows.append(shared | own | {"request_id": f"req_more_{number}"})
            request_rows.append(past | own | {"id": f"req_more_{number}"})
        await connection.execute(insert(usage_events), event_rows)
        await connection.execute(insert(requests), request_rows)
    await rollups.rebuild(api.services.db, api.services.reports.calendar)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # PostgreSQL gets the same statements
async def test_the_number_of_statements_does_not_depend_on_the_amount_of_data(api: ApiApp) -> None:
    owner = await api.services.members.create("alice@example.com", "a password of tests", "owner")
    first = await make_populated_tenant(api.services, "tenant-0")
    few = await counts(api, owner, first)
    await record_usage(
        api, [first, *[await make_populated_tenant(api.services, f"tenant-{number}") for number in range(FEW, MANY)]]
    )
    many = await counts(api, owner, first)

    assert len(few) > 60
    assert few["/usage"] > 1
    assert {path: (few[path], many[path]) for path in few if many[path] > few[path]} == {}
    assert {path: count for path, count in many.items() if count > STATEMENTS_MAX} == {}
