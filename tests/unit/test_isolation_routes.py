"""Tenant isolation on every route, found from the application's router, for every role and on each database.

New routes are tested without being named here. A new path parameter needs an existing value in `make_populated_tenant` or
`APPLIANCE_NAMES`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from appliance.base.tables import metadata
from appliance.serving.services import Services
from tests.support.api_app import ApiApp, open_api_app_on
from tests.support.tenant_isolation import (
    PopulatedTenant,
    Route,
    make_populated_tenant,
    routes_of,
    session_headers,
)

TENANT_ROLES = ("manager", "developer", "viewer")
APPLIANCE_ROLES = ("owner", "admin", "billing", "viewer")
SAFE = ("GET", "HEAD", "OPTIONS")
REMOTE = ("192.0.2.7", 1)

# What a role may do is decided before any row is read, so one database is enough.
on_one_database = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

# Which rows a role gets depends only on its tenants (`Access.visible`), in the same SQL for every role: every role is tested on
# SQLite, and the role that is refused least, and therefore reads most, on PostgreSQL too. Only that role searches, on both.
SEARCHES_ON_EACH_DATABASE = "manager"
by_every_role_and_on_each_database = pytest.mark.parametrize(
    ("database_url", "role"),
    [
        *(("sqlite", role) for role in TENANT_ROLES),
        pytest.param("postgresql", SEARCHES_ON_EACH_DATABASE, marks=pytest.mark.postgres),
    ],
    indirect=["database_url"],
)

# Public: health, the API description, static files, and signing in.
PUBLIC = ("/health", "/schema", "/static/", "/login", "/theme")
# Inference, used with API keys.
INFERENCE = (
    "/chat/completions",
    "/models",
    "/completions",
    "/embeddings",
    "/responses",
    "/messages",
    "/tokenize",
    "/detokenize",
)
# Routes that concern only the signed-in member.
OWN = ("/account", "/logout", "/theme", "/login", "/admin/v1/sessions")
# Path parameters that belong to the appliance and to no tenant.
APPLIANCE_NAMES = {"name": "standard", "model": "demo", "price_id": "price_x", "rate_limit_id": "rl-demo", "month": "2026-10"}
# Bodies with ids: their other required fields.
BODIES: dict[str, dict[str, object]] = {
    "/admin/v1/limits/check": {"model": "demo", "prompt_tokens": 1},
    "/admin/v1/webhooks": {"kind": "http", "target": "https://bob.example/hook"},
}
# Fields of forms with ids.
FORMS = {"/requests/cancel": ("request_id",), "/alerts": ("tenant_id",)}


async def dump_tables(services: Services) -> dict[str, list[str]]:
    """Return every row of every table."""
    async with services.db.reading() as connection:
        tables = metadata.sorted_tables
        return {table.name: sorted(repr(row) for row in await connection.execute(select(table))) for table in tables}


@pytest.fixture
async def api(database_url: str, tmp_path: Path) -> AsyncIterator[ApiApp]:
    async with open_api_app_on(database_url, tmp_path) as opened:
        opened.client._transport.client = REMOTE  # type: ignore[attr-defined]
        opened.services.generations.draining = True  # ends live streams after their first event
        await opened.services.sampler.sample()
        yield opened


@pytest.fixture
async def bob(api: ApiApp) -> PopulatedTenant:
    return await make_populated_tenant(api.services, "bob")


@pytest.fixture
async def charlie(api: ApiApp) -> PopulatedTenant:
    return await make_populated_tenant(api.services, "charlie")


def is_under(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)


def routes(api: ApiApp) -> list[Route]:
    """Return the routes that require credentials."""
    found = [route for route in routes_of(api.app) if not is_under(route.path, PUBLIC)]
    assert len(found) > 80
    return found


def is_inference(route: Route) -> bool:
    return is_under(route.path.removeprefix("/v1"), INFERENCE)


async def call(api: ApiApp, route: Route, headers: dict[str, str], values: dict[str, str], **query: str) -> httpx.Response:
    """Return the response to a call with `values` in its path and in the fields of its form."""
    path = route.filled(values)
    if route.method in SAFE:
        return await api.client.request(route.method, path, headers=headers, params=query)
    if "/v1" in route.path or route.path.startswith("/organization"):
        return await api.client.request(route.method, path, headers=headers, json={}, params=query)
    fields = {name: values[name] for name in FORMS.get(route.path, ()) if name in values}
    return await api.client.request(route.method, path, headers=headers, data={"nothing": "", **fields}, params=query)


def status_and_text(answer: httpx.Response, *given: str) -> tuple[int, str]:
    """Return status and text of a response, without the values that the request contained."""
    text = answer.text
    for value in given:
        text = text.replace(value, "…")
    return answer.status_code, "" if "<html" in text else text


@on_one_database
async def test_every_route_refuses_requests_without_credentials(api: ApiApp, charlie: PopulatedTenant) -> None:
    before = await dump_tables(api.services)
    for route in routes(api):
        answer = await call(api, route, {"authorization": ""}, charlie.ids)

        to_login = answer.status_code == 303 and answer.headers["location"].startswith("/login")
        assert answer.status_code == 401 or to_login, (route, answer.status_code)
        assert not leaks(answer, charlie, given=charlie.ids.values()), route
    assert await dump_tables(api.services) == before


@on_one_database
async def test_every_path_parameter_has_an_existing_value_here(api: ApiApp, charlie: PopulatedTenant) -> None:
    known = {*charlie.ids, *APPLIANCE_NAMES}
    unknown = [route for route in routes(api) if not set(route.parameters) <= known and not is_inference(route)]

    assert not unknown, "add a value to tests/support/tenant_isolation.py"


@by_every_role_and_on_each_database
async def test_ids_of_another_tenant_are_not_found_by_any_route(
    api: ApiApp, bob: PopulatedTenant, charlie: PopulatedTenant, role: str
) -> None:
    headers = await session_headers(api.services, bob.people[role])
    before = await dump_tables(api.services)
    for route in routes(api):
        query = {name: charlie.ids[name] for name in route.query if name in charlie.ids and route.method not in SAFE}
        if not (query or set(route.parameters) & set(charlie.ids) or (route.path in FORMS and route.method not in SAFE)):
            continue
        answer = await call(api, route, headers, APPLIANCE_NAMES | charlie.ids, **query)
        nothing = await call(
            api, route, headers, APPLIANCE_NAMES | charlie.missing, **{name: charlie.missing[name] for name in query}
        )

        assert answer.status_code in (401, 403, 404), (route, answer.status_code, answer.text[:300])
        assert status_and_text(answer, *charlie.ids.values()) == status_and_text(nothing, *charlie.missing.values()), route
        assert not leaks(answer, charlie, given=charlie.ids.values()), route
        named = (*route.parameters, *FORMS.get(route.path, ()))
        own = {name: bob.ids[name] for name in ("tenant_id", "project_id") if name in named}
        if own:
            mixed = await call(api, route, headers, APPLIANCE_NAMES | charlie.ids | own, **query)
            assert not leaks(mixed, charlie, given=charlie.ids.values()), route
    assert await dump_tables(api.services) == before


@by_every_role_and_on_each_database
async def test_ids_of_another_tenant_in_a_body_are_not_found(
    api: ApiApp, bob: PopulatedTenant, charlie: PopulatedTenant, role: str
) -> None:
    headers = await session_headers(api.services, bob.people[role])
    before = await dump_tables(api.services)
    for route in routes(api):
        for name in set(route.body) & set(charlie.ids):
            assert route.path in BODIES, f"add the other fields of {route.path} to BODIES"
            answers = []
            for value in (charlie.ids[name], charlie.missing[name]):
                own = {each: bob.ids[each] for each in route.body if each == "tenant_id"}
                body = BODIES[route.path] | own | {name: value}
                answers.append(await api.client.request(route.method, route.path, headers=headers, json=body))

            assert answers[0].status_code in (403, 404), (route, name, answers[0].text)
            assert answers[0].json() == answers[1].json(), (route, name)
            assert not leaks(answers[0], charlie, given=[charlie.ids[name]])
    assert await dump_tables(api.services) == before


@by_every_role_and_on_each_database
async def test_lists_and_pages_show_nothing_of_another_tenant(
    api: ApiApp, bob: PopulatedTenant, charlie: PopulatedTenant, role: str
) -> None:
    headers = await session_headers(api.services, bob.people[role])
    answered = 0
    for route in routes(api):
        if route.method not in SAFE:
            continue
        searches = queries(route, charlie)
        for query in searches if role == SEARCHES_ON_EACH_DATABASE else searches[:1]:
            answer = await call(api, route, headers, APPLIANCE_NAMES | bob.ids, **query)

            unsupported = answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_parameter"
            assert unsupported or answer.status_code in (200, 303, 401, 403, 404), (route, query, answer.text[:300])
            assert not leaks(answer, charlie, given=query.values()), (route, query)
            answered += answer.status_code == 200
    assert answered > 20


async def test_a_key_with_the_usage_scope_reads_only_usage_of_its_tenant(
    api: ApiApp, bob: PopulatedTenant, charlie: PopulatedTenant
) -> None:
    headers = {"authorization": f"Bearer {bob.person.secret}"}
    answered = []
    for route in routes(api):
        if is_inference(route):
            continue
        for query in queries(route, charlie) if route.method in SAFE else [{}]:
            answer = await call(api, route, headers, APPLIANCE_NAMES | charlie.ids, **query)

            assert not leaks(answer, charlie, given=[*charlie.ids.values(), *query.values()]), (route, query)
            if answer.status_code == 200:
                answered.append(route.path)
    assert answered
    assert all("/organization/" in path for path in answered), answered


@on_one_database
@pytest.mark.parametrize("role", TENANT_ROLES)
async def test_each_tenant_role_can_change_exactly_what_the_table_allows(api: ApiApp, bob: PopulatedTenant, role: str) -> None:
    headers = await session_headers(api.services, bob.people[role])
    own = {name: bob.ids[name] for name in ("tenant_id", "project_id")}
    for route in changing(api):
        answer = await call(api, route, headers, APPLIANCE_NAMES | own)

        assert (answer.status_code not in (401, 403)) is may_in_tenant(role, route), (
            route,
            answer.status_code,
            answer.text[:200],
        )


@on_one_database
@pytest.mark.parametrize("role", APPLIANCE_ROLES)
async def test_each_appliance_role_can_change_exactly_what_the_table_allows(
    api: ApiApp, bob: PopulatedTenant, role: str
) -> None:
    member = await api.services.members.create(f"{role}@appliance.example", "a password of tests", role)
    headers = await session_headers(api.services, member)
    before = await dump_tables(api.services)
    for route in changing(api):
        answer = await call(api, route, headers, {})

        assert (answer.status_code != 403) is may_on_appliance(role, route), (route, answer.status_code, answer.text[:200])
        assert answer.status_code < 500, (route, answer.text)
    assert await dump_tables(api.services) == before


@on_one_database
@pytest.mark.parametrize("role", APPLIANCE_ROLES)
async def test_every_appliance_role_can_read_every_list_and_page(api: ApiApp, bob: PopulatedTenant, role: str) -> None:
    member = await api.services.members.create(f"{role}@appliance.example", "a password of tests", role)
    headers = await session_headers(api.services, member)
    forms = {
        route.path for route in changing(api) if not may_on_appliance(role, route)
    }  # forms are shown only to roles that may submit them
    read = set()
    owners_only = ("/organization/admin_api_keys", "/v1/organization/admin_api_keys")
    for route in routes(api):
        is_form = route.path.removesuffix("/new") in forms and "/v1" not in route.path
        if route.method not in SAFE or is_inference(route) or is_under(route.path, owners_only):
            continue
        (required,) = queries(route, bob)[:1]
        answer = await call(api, route, headers, APPLIANCE_NAMES | bob.ids, **required)

        refused = is_form and answer.status_code == 403
        assert refused or answer.status_code in (200, 303, 404, 409), (route, answer.status_code, answer.text[:200])
        read |= {route.path} if answer.status_code == 200 else set()
    assert read >= {"/", "/tenants", "/tenants/{tenant_id:str}", "/keys", "/keys/{key_id:str}", "/requests"}


@on_one_database
async def test_a_session_with_a_temporary_password_opens_only_what_replaces_it(api: ApiApp, bob: PopulatedTenant) -> None:
    member = await api.services.members.create("dora@box.example", "a password of tests", "owner", temporary=True)
    headers = await session_headers(api.services, member)
    before = await dump_tables(api.services)
    opened = set()
    for route in routes(api):
        if is_inference(route) or route.path == "/logout":
            continue
        answer = await call(api, route, headers, APPLIANCE_NAMES | bob.ids)
        if not is_sent_to_change_the_password(answer):
            opened.add((route.method, route.path))
    assert opened == {("GET", "/account"), ("POST", "/account/password")}
    assert await dump_tables(api.services) == before
    answer = await api.client.post("/logout", headers=headers)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert await dump_tables(api.services) != before


def is_sent_to_change_the_password(answer: httpx.Response) -> bool:
    if answer.status_code == 403:
        return bool(answer.json()["error"]["code"] == "password_change_needed")
    if (answer.status_code, answer.headers.get("location")) != (303, "/account"):
        return False
    return "password-needed" in answer.headers.get("set-cookie", "")


def changing(api: ApiApp) -> list[Route]:
    """Return the routes that change more than the signed-in member's own account."""
    return [
        route for route in routes(api) if route.method not in SAFE and not is_inference(route) and not is_under(route.path, OWN)
    ]


# For changing routes: a part of the path, and the roles besides the owner that may use it. The first match counts.
RULES: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (part, frozenset(roles.split()))
    for part, roles in (
        ("/admin_api_keys", ""),
        ("/v1/members", ""),
        ("/limits/check", "admin billing viewer manager developer tenant-viewer"),
        ("{tenant_id}/members", "admin manager"),
        ("/members", ""),
        ("/keys", "admin manager developer"),
        ("/api_keys", "admin manager developer"),
        ("/requests", "admin manager developer"),
        ("/webhooks", "admin manager"),
        ("/alerts", "admin manager"),
        ("/deliveries", "admin manager"),
        ("/prices", "admin billing"),
        ("/invoices", "admin billing"),
        ("/allowances", "admin billing"),
        ("/corrections", "admin billing"),
        ("/seller", "admin billing"),
        ("/economics", "admin billing"),
        ("", "admin"),
    )
)


def allowed_roles(route: Route) -> frozenset[str]:
    return next(roles for part, roles in RULES if part in route.template)


def may_on_appliance(role: str, route: Route) -> bool:
    return role == "owner" or role in allowed_roles(route)


def may_in_tenant(role: str, route: Route) -> bool:
    return ("tenant-viewer" if role == "viewer" else role) in allowed_roles(route)


def queries(route: Route, of: PopulatedTenant) -> list[dict[str, str]]:
    """Return queries for a route: the required parameters alone, and together with each id of another tenant."""
    required = {"start_time": "1"} if "start_time" in route.query else {}
    if "/v1" in route.path or "/organization" in route.path:
        named = [name for name in route.query if name in of.ids]
        return [required, *({**required, name: of.ids[name]} for name in named)]
    tenant = of.ids["tenant"]  # pages use one of these names
    views = [{"view": "requests"}, {"view": "overview"}] if route.path == "/console/events" else []
    return [required, {"q": of.person.tenant.name}, {"tenant": tenant, "tenant_id": tenant}, {"key": of.ids["key"]}, *views]


def leaks(answer: httpx.Response, of: PopulatedTenant, *, given: object) -> set[str]:
    """Return the marks of the tenant that are in the response and were not in the request."""
    requested, text, url = set(given), answer.text.casefold(), str(answer.url)  # type: ignore[call-overload]
    return {mark for mark in of.marks - requested if mark.casefold() in text and mark not in url}


@on_one_database
async def test_members_of_a_tenant_find_everything_of_their_own(api: ApiApp, charlie: PopulatedTenant) -> None:
    headers = await session_headers(api.services, charlie.people["manager"])
    found = set()
    for route in routes(api):
        if route.method in SAFE:
            (required,) = queries(route, charlie)[:1]
            answer = await call(api, route, headers, APPLIANCE_NAMES | charlie.ids, **required)
            if answer.status_code == 200:
                found |= leaks(answer, charlie, given=())

    # Otherwise the absence of these marks for strangers would prove nothing.
    without_a_list = {charlie.ids[name] for name in ("session_id", "allowance_id", "webhook_id", "delivery_id")}
    assert charlie.marks - found <= without_a_list
