"""Every page and every list costs the same number of statements, however many tenants, keys and requests there are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from appliance.tenancy.members import Member
from tests.support.api_box import ApiBox, open_api_box
from tests.support.cast import quick_hasher
from tests.support.strangers import Route, Tenancy, make_tenancy, routes_of, signed_in

FEW, MANY = 1, 50
STATEMENTS_MAX = 25
"""No page has more to say than this many questions to the database."""
STREAMS = ("/events", "/console/events")
ELSEWHERE = ("/static", "/login/oidc")
BOX_NAMES = {"name": "standard", "model": "demo"}
SENT: ContextVar[list[str] | None] = ContextVar("SENT", default=None)
"""What the answer that is being made has asked so far; what the appliance writes by itself every few seconds is not its."""


@pytest.fixture
async def box(migrated_sqlite_file: Path, tmp_path: Path) -> AsyncIterator[ApiBox]:
    async with open_api_box(migrated_sqlite_file, tmp_path) as opened:
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


def reads(box: ApiBox) -> list[Route]:
    """The pages and answers that somebody who may read everything can ask for."""
    gets = [route for route in routes_of(box.app) if route.method == "GET"]
    return [route for route in gets if not route.path.endswith(STREAMS) and not route.path.startswith(ELSEWHERE)]


async def counts(box: ApiBox, owner: Member, of: Tenancy) -> dict[str, int]:
    """Return how many statements each answer took; of lists as many rows as there are."""
    headers, found = await signed_in(box.services, owner), {}
    for route in reads(box):
        with statements() as sent:
            answer = await box.client.get(route.filled({**BOX_NAMES, **of.ids}), headers=headers)
        assert answer.status_code != 500, (route, answer.text)
        found[route.path] = len(sent)
    return found


async def test_no_answer_asks_the_database_more_often_when_there_is_more_to_show(box: ApiBox) -> None:
    box.services.members._hasher = quick_hasher()
    owner = await box.services.members.create("alice@example.com", "a password of tests", "owner")
    first = await make_tenancy(box.services, "tenant-0")
    few = await counts(box, owner, first)
    for number in range(FEW, MANY):
        await make_tenancy(box.services, f"tenant-{number}")
    many = await counts(box, owner, first)

    assert len(few) > 60
    assert few["/usage"] > 1
    assert {path: (few[path], many[path]) for path in few if many[path] > few[path]} == {}
    assert {path: count for path, count in many.items() if count > STATEMENTS_MAX} == {}
