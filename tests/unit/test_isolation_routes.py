"""Every route of the application, found from its router, tried by those who must not get what it gives; on each database.

A route that is added is tried without being named here. Whoever adds one with a new name in its path says in
`make_populated_tenant` or `APPLIANCE_NAMES` what stands for it, so that it is tried with something that exists.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.support.api_app import ApiApp, open_api_app_on
from tests.support.tenant_isolation import (
    SAFE,
    PopulatedTenant,
    Route,
    dump_tables,
    make_populated_tenant,
    routes_of,
    session_headers,
)

TENANT_ROLES = ("manager", "developer", "viewer")
APPLIANCE_ROLES = ("owner", "admin", "billing", "viewer")
REMOTE = ("192.0.2.7", 1)

# What a role may do is decided before any row is read: one database will do.
on_one_database = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

# Whose rows a role gets is decided by its tenants alone (`Access.visible`), in the same SQL for every role: every role tries
# one database, and the other is tried by the role that is refused least and so asks it most. Only that one searches, on both.
SEARCHES_ON_EACH_DATABASE = "manager"
by_every_role_and_on_each_database = pytest.mark.parametrize(
    ("database_url", "role"),
    [
        *(("sqlite", role) for role in TENANT_ROLES),
        pytest.param("postgresql", SEARCHES_ON_EACH_DATABASE, marks=pytest.mark.postgres),
    ],
    indirect=["database_url"],
)

# For everybody: health, the description of the interface, how pages look, and signing in.
PUBLIC = ("/health", "/schema", "/static/", "/login", "/theme")
# A tenant's programs come here with their key.
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
# About whoever is signed in, and about nobody else.
OWN = ("/account", "/logout", "/theme", "/login", "/admin/v1/sessions")
# Names in paths that belong to the appliance and to no tenant.
APPLIANCE_NAMES = {"name": "standard", "model": "demo", "price_id": "price_x", "rate_limit_id": "rl-demo", "month": "2026-10"}
# Bodies that name something: the rest of what they need to be understood.
BODIES: dict[str, dict[str, object]] = {
    "/admin/v1/limits/check": {"model": "demo", "prompt_tokens": 1},
    "/admin/v1/webhooks": {"kind": "http", "target": "https://bob.example/hook"},
}
# Fields of forms that name something.
FORMS = {"/requests/cancel": ("request_id",), "/alerts": ("tenant_id",)}


@pytest.fixture
async def api(database_url: str, tmp_path: Path) -> AsyncIterator[ApiApp]:
    async with open_api_app_on(database_url, tmp_path) as opened:
        opened.client._transport.client = REMOTE  # type: ignore[attr-defined]
        opened.services.generations.draining = True  # live streams end with their first beat
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
    """Return the routes that need somebody who is known."""
    found = [route for route in routes_of(api.app) if not is_under(route.path, PUBLIC)]
    assert len(found) > 80
    return found


def is_inference(route: Route) -> bool:
    return is_under(route.path.removeprefix("/v1"), INFERENCE)


async def call(api: ApiApp, route: Route, headers: dict[str, str], values: dict[str, str], **query: str) -> httpx.Response:
    """Return the answer to a call that names `values`: in its path, and in the fields of its form."""
    path = route.filled(values)
    if route.method in SAFE:
        return await api.client.request(route.method, path, headers=headers, params=query)
    if "/v1" in route.path or route.path.startswith("/organization"):
        return await api.client.request(route.method, path, headers=headers, json={}, params=query)
    fields = {name: values[name] for name in FORMS.get(route.path, ()) if name in values}
    return await api.client.request(route.method, path, headers=headers, data={"nothing": "", **fields}, params=query)


def status_and_text(answer: httpx.Response, *given: str) -> tuple[int, str]:
    """Return what an answer says, without its request id and without the names that the question gave it."""
    text = answer.text
    for value in given:
        text = text.replace(value, "…")
    return answer.status_code, "" if "<html" in text else text


@on_one_database
async def test_nobody_gets_anything_without_saying_who_he_is(api: ApiApp, charlie: PopulatedTenant) -> None:
    before = await dump_tables(api.services)
    for route in routes(api):
        answer = await call(api, route, {"authorization": ""}, charlie.ids)

        to_login = answer.status_code == 303 and answer.headers["location"].startswith("/login")
        assert answer.status_code == 401 or to_login, (route, answer.status_code)
        assert not leaks(answer, charlie, given=charlie.ids.values()), route
    assert await dump_tables(api.services) == before


@on_one_database
async def test_every_name_in_a_path_stands_for_something_that_exists(api: ApiApp, charlie: PopulatedTenant) -> None:
    known = {*charlie.ids, *APPLIANCE_NAMES}
    unknown = [route for route in routes(api) if not set(route.parameters) <= known and not is_inference(route)]

    assert not unknown, "say in tests/support/tenant_isolation.py what Charlie has of this"


@by_every_role_and_on_each_database
async def test_what_is_charlies_is_not_there_for_those_of_bobs_tenant(
    api: ApiApp, bob: PopulatedTenant, charlie: PopulatedTenant, role: str
) -> None:
    headers = await session_headers(api.services, bob.people[role])
    before = await dump_tables(api.services)
    for route in routes(api):
        asked = {name: charlie.ids[name] for name in route.query if name in charlie.ids and route.method not in SAFE}
        if not (asked or set(route.parameters) & set(charlie.ids) or (route.path in FORMS and route.method not in SAFE)):
            continue
        answer = await call(api, route, headers, APPLIANCE_NAMES | charlie.ids, **asked)
        nothing = await call(
            api, route, headers, APPLIANCE_NAMES | charlie.missing, **{name: charlie.missing[name] for name in asked}
        )

        assert answer.status_code in (401, 403, 404), (route, answer.status_code, answer.text[:300])
        assert status_and_text(answer, *charlie.ids.values()) == status_and_text(nothing, *charlie.missing.values()), route
        assert not leaks(answer, charlie, given=charlie.ids.values()), route
        named = (*route.parameters, *FORMS.get(route.path, ()))
        own = {name: bob.ids[name] for name in ("tenant_id", "project_id") if name in named}
        if own:
            mixed = await call(api, route, headers, APPLIANCE_NAMES | charlie.ids | own, **asked)
            assert not leaks(mixed, charlie, given=charlie.ids.values()), route
    assert await dump_tables(api.services) == before


@by_every_role_and_on_each_database
async def test_a_forged_id_in_a_body_is_an_id_of_nothing(
    api: ApiApp, bob: PopulatedTenant, charlie: PopulatedTenant, role: str
) -> None:
    headers = await session_headers(api.services, bob.people[role])
    before = await dump_tables(api.services)
    for route in routes(api):
        for name in set(route.body) & set(charlie.ids):
            assert route.path in BODIES, f"say in BODIES what else {route.path} needs"
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
async def test_no_list_and_no_page_tells_bobs_people_of_charlie(
    api: ApiApp, bob: PopulatedTenant, charlie: PopulatedTenant, role: str
) -> None:
    headers = await session_headers(api.services, bob.people[role])
    answered = 0
    for route in routes(api):
        if route.method not in SAFE:
            continue
        asked = queries(route, charlie)
        for query in asked if role == SEARCHES_ON_EACH_DATABASE else asked[:1]:
            answer = await call(api, route, headers, APPLIANCE_NAMES | bob.ids, **query)

            unsupported = answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_parameter"
            assert unsupported or answer.status_code in (200, 303, 401, 403, 404), (route, query, answer.text[:300])
            assert not leaks(answer, charlie, given=query.values()), (route, query)
            answered += answer.status_code == 200
    assert answered > 20


async def test_a_key_that_may_read_usage_reads_that_of_its_tenant_alone(
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
async def test_what_a_role_may_change_in_its_own_tenant_is_a_table(api: ApiApp, bob: PopulatedTenant, role: str) -> None:
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
async def test_what_a_role_may_change_on_the_appliance_is_a_table(api: ApiApp, bob: PopulatedTenant, role: str) -> None:
    member = await api.services.members.create(f"{role}@box.example", "a password of tests", role)
    headers = await session_headers(api.services, member)
    before = await dump_tables(api.services)
    for route in changing(api):
        answer = await call(api, route, headers, {})

        assert (answer.status_code != 403) is may_on_appliance(role, route), (route, answer.status_code, answer.text[:200])
        assert answer.status_code < 500, (route, answer.text)
    assert await dump_tables(api.services) == before


@on_one_database
@pytest.mark.parametrize("role", APPLIANCE_ROLES)
async def test_every_role_on_the_appliance_reads_every_list_and_page(api: ApiApp, bob: PopulatedTenant, role: str) -> None:
    member = await api.services.members.create(f"{role}@box.example", "a password of tests", role)
    headers = await session_headers(api.services, member)
    forms = {route.path for route in changing(api) if not may_on_appliance(role, route)}  # they are for those who may send them
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
    """Return the routes that change something of somebody else."""
    return [
        route for route in routes(api) if route.method not in SAFE and not is_inference(route) and not is_under(route.path, OWN)
    ]


# Of each route that changes something: a part of its path, and which roles beside the owner may. The first that fits counts.
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
    """Return what to ask a route for: what it must be asked, and that with each thing of another tenant."""
    required = {"start_time": "1"} if "start_time" in route.query else {}
    if "/v1" in route.path or "/organization" in route.path:
        named = [name for name in route.query if name in of.ids]
        return [required, *({**required, name: of.ids[name]} for name in named)]
    tenant = of.ids["tenant"]  # a page takes it under one of these names
    views = [{"view": "requests"}, {"view": "overview"}] if route.path == "/console/events" else []
    return [required, {"q": of.person.tenant.name}, {"tenant": tenant, "tenant_id": tenant}, {"key": of.ids["key"]}, *views]


def leaks(answer: httpx.Response, of: PopulatedTenant, *, given: object) -> set[str]:
    """Return what of the tenant stands in the answer and was not in the question."""
    asked, text, url = set(given), answer.text.casefold(), str(answer.url)  # type: ignore[call-overload]
    return {mark for mark in of.marks - asked if mark.casefold() in text and mark not in url}


@on_one_database
async def test_charlies_own_people_do_read_it_all(api: ApiApp, charlie: PopulatedTenant) -> None:
    headers = await session_headers(api.services, charlie.people["manager"])
    found = set()
    for route in routes(api):
        if route.method in SAFE:
            (required,) = queries(route, charlie)[:1]
            answer = await call(api, route, headers, APPLIANCE_NAMES | charlie.ids, **required)
            if answer.status_code == 200:
                found |= leaks(answer, charlie, given=())

    # A mark that its owner cannot find shows nothing when a stranger does not find it.
    without_a_list = {charlie.ids[name] for name in ("session_id", "allowance_id", "webhook_id", "delivery_id")}
    assert charlie.marks - found <= without_a_list
