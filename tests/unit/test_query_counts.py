"""Every page and list needs the same number of statements, however many tenants, keys and requests exist."""

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
"""More than the longest page asked for has rows; a question for each tenant, key or row shows with six of them as with more."""
DAY = timedelta(days=1)
STATEMENTS_MAX = 25
"""No page has more to say than this many questions to the database."""
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
"""Questions that a route without its query does not ask."""
STREAMS = ("/events", "/console/events")
ELSEWHERE = ("/static", "/login/oidc")
BOX_NAMES = {"name": "standard", "model": "demo"}
SENT: ContextVar[list[str] | None] = ContextVar("SENT", default=None)
"""What the answer that is being made has asked so far; what the appliance writes by itself every few seconds is not its."""


@pytest.fixture
async def api(database_url: str, tmp_path: Path) -> AsyncIterator[ApiApp]:
    async with open_api_app_on(database_url, tmp_path) as opened:
        await opened.services.sampler.sample()
        yield opened


@pytest.fixture(autouse=True)
def noted() -> Iterator[None]:
    """Every statement goes to the answer it was sent for."""

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        sent = SENT.get()
        if sent is not None:
            sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield
    event.remove(Engine, "before_cursor_execute", note)


@contextmanager
def statements() -> Iterator[list[str]]:
    """Yield a list of what is sent to any database meanwhile, by this task and by those it begins."""
    sent: list[str] = []
    before = SENT.set(sent)
    try:
        yield sent
    finally:
        SENT.reset(before)


def reads(api: ApiApp) -> list[Route]:
    """The pages and answers that somebody who may read everything can ask for."""
    gets = [route for route in routes_of(api.app) if route.method == "GET"]
    return [route for route in gets if not route.path.endswith(STREAMS) and not route.path.startswith(ELSEWHERE)]


async def counts(api: ApiApp, owner: Member, of: PopulatedTenant) -> dict[str, int]:
    """Return how many statements each answer took; of lists as many rows as there are."""
    headers, found = await session_headers(api.services, owner), {}
    for route in reads(api):
        with statements() as sent:
            answer = await api.client.get(route.filled({**BOX_NAMES, **of.ids}), headers=headers)
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


async def use(api: ApiApp, people: Sequence[PopulatedTenant]) -> None:
    """Let the keys of these tenants have been used all day: EVENTS events with their requests and sums."""
    now = api.services.clock.now()
    async with api.services.db.writing() as connection:
        one = dict(
            (await connection.execute(select(usage_events).where(usage_events.c.kind == "usage").limit(1))).mappings().one()
        )
        past = dict((await connection.execute(select(requests).limit(1))).mappings().one())
        shared = {column: value for column, value in one.items() if column not in ("id", "posting")}
        used: list[dict[str, Any]] = []
        asked: list[dict[str, Any]] = []
        for number in range(EVENTS):
            person = people[number % len(people)].person
            own = {"tenant_id": person.tenant.id, "key_id": person.key.id, "admitted_at": now - number * DAY / EVENTS}
            used.append(shared | own | {"request_id": f"req_more_{number}"})
            asked.append(past | own | {"id": f"req_more_{number}"})
        await connection.execute(insert(usage_events), used)
        await connection.execute(insert(requests), asked)
    await rollups.rebuild(api.services.db, api.services.reports.calendar)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # they are the same statements on the other
async def test_no_answer_asks_the_database_more_often_when_there_is_more_to_show(api: ApiApp) -> None:
    owner = await api.services.members.create("alice@example.com", "a password of tests", "owner")
    first = await make_populated_tenant(api.services, "tenant-0")
    few = await counts(api, owner, first)
    await use(api, [first, *[await make_populated_tenant(api.services, f"tenant-{number}") for number in range(FEW, MANY)]])
    many = await counts(api, owner, first)

    assert len(few) > 60
    assert few["/usage"] > 1
    assert {path: (few[path], many[path]) for path in few if many[path] > few[path]} == {}
    assert {path: count for path, count in many.items() if count > STATEMENTS_MAX} == {}
