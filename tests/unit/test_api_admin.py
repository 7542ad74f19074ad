"""The administrators' API: response shapes, invalid input, and roles."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from appliance.api.admin import system
from appliance.api.admin.system import CREDENTIAL_CHECKED_EVERY_TICKS
from appliance.api.queries import parse_timestamp
from appliance.metering.ledger import rows
from appliance.serving.live_requests import LiveRequest
from appliance.tenancy.browser_rules import PLAIN_COOKIE, SECURE_COOKIE
from appliance.tenancy.pages import Page, read_every_page
from tests.support.api_app import ApiApp
from tests.support.case_ids import case_id
from tests.support.cast import OWNER, Person, make_cast
from tests.support.clock import START
from tests.support.console_fixtures import EngineSide
from tests.support.factories import pending

TENANT_FIELDS = {"id", "name", "tier", "weight", "limits", "allowed_models", "suspended", "archived", "created_at"}
KEY_FIELDS = {
    "id", "tenant_id", "name", "prefix", "scopes", "expires_at", "allowed_models", "allowed_networks", "revoked_at",
    "last_used_at", "created_at",
}  # fmt: skip
LIMIT_FIELDS = {"tokens_per_minute", "requests_per_minute", "concurrent_requests", "tokens_per_day", "monthly_budget"}
PRICE_FIELDS = {"id", "model", "effective_from", "currency", "prompt", "cached_prompt", "completion", "batch_percent"}
SYSTEM_FIELDS = {"version", "processes", "engine", "gpus", "gpu_error", "host", "database"}
PAGE_FIELDS = {"data", "has_more", "next_cursor"}

WRITES = [
    ("POST", "/tenants"), ("PATCH", "/tenants/tn_x"), ("DELETE", "/tenants/tn_x"), ("POST", "/tenants/tn_x/keys"),
    ("POST", "/keys/key_x/rotate"), ("PATCH", "/keys/key_x"), ("DELETE", "/keys/key_x"), ("DELETE", "/requests/req_x"),
]  # fmt: skip
READS = ["/tenants", "/usage", "/costs", "/ledger", "/prices", "/requests", "/system"]


async def new_tenant(api: ApiApp, **fields: Any) -> dict[str, Any]:
    tenant: dict[str, Any] = await api.call("POST", "/tenants", status=201, json={"name": "Bob & Söhne", **fields})
    return tenant


async def test_a_tenant_is_created_read_changed_and_archived(api: ApiApp) -> None:
    tenant = await new_tenant(api, limits={"tokens_per_minute": 1000}, tier="batch", weight=3)
    path = f"/tenants/{tenant['id']}"

    assert set(tenant) >= TENANT_FIELDS
    assert set(tenant["limits"]) == LIMIT_FIELDS
    assert tenant["created_at"].endswith("Z")
    changed = await api.call("PATCH", path, json={"limits": {"requests_per_minute": 5}, "suspended": True})
    assert (changed["limits"]["tokens_per_minute"], changed["limits"]["requests_per_minute"]) == (1000, 5)
    assert changed["suspended"]
    assert (await api.call("PATCH", path, json={"limits": {"tokens_per_minute": None}}))["limits"]["tokens_per_minute"] is None
    assert (await api.call("DELETE", path))["archived"]
    assert (await api.call("GET", path))["archived"]
    assert tenant["id"] not in [row["id"] for row in (await api.call("GET", "/tenants"))["data"]]
    listed = (await api.call("GET", "/tenants", params={"include_archived": "true"}))["data"]
    assert tenant["id"] in [row["id"] for row in listed]


async def test_the_secret_of_a_key_is_shown_only_at_creation(api: ApiApp) -> None:
    tenant = await new_tenant(api)
    made = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "first"})
    (listed,) = (await api.call("GET", f"/tenants/{tenant['id']}/keys"))["data"]

    assert set(made) >= KEY_FIELDS | {"key"}
    assert made["key"].startswith(made["prefix"])
    assert "key" not in listed
    assert made["key"] not in str(listed)


async def test_a_rotated_key_is_replaced_and_a_revoked_one_is_refused(api: ApiApp) -> None:
    tenant = await new_tenant(api)
    made = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "first"})
    fresh = await api.call("POST", f"/keys/{made['id']}/rotate")

    def models(secret: str) -> Any:
        return api.client.get("/v1/models", headers={"authorization": f"Bearer {secret}"})

    assert fresh["key"] != made["key"]
    assert (await models(made["key"])).status_code == 401
    assert (await models(fresh["key"])).status_code == 200
    assert (await api.call("DELETE", f"/keys/{fresh['id']}"))["revoked_at"] is not None
    assert (await models(fresh["key"])).status_code == 401


async def test_a_keys_expiry_and_limits_can_be_changed(api: ApiApp) -> None:
    tenant = await new_tenant(api)
    made = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "k"})
    changes = {
        "expires_at": "2999-01-01T00:00:00+01:00",
        "limits": {"concurrent_requests": 2},
        "allowed_networks": ["10.0.0.0/8"],
    }
    changed = await api.call("PATCH", f"/keys/{made['id']}", json=changes)

    assert changed["expires_at"] == "2998-12-31T23:00:00.000Z"
    assert changed["limits"]["concurrent_requests"] == 2
    assert changed["allowed_networks"] == ["10.0.0.0/8"]
    renamed = await api.call("PATCH", f"/keys/{made['id']}", json={"name": "another"})
    assert (renamed["name"], renamed["expires_at"]) == ("another", changed["expires_at"])
    assert (await api.call("PATCH", f"/keys/{made['id']}", json={"expires_at": None}))["expires_at"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "another"),
        ("scopes", ["inference"]),
        ("expires_at", "2999-01-01T00:00:00.000Z"),
        ("allowed_models", ["m"]),
        ("allowed_networks", ["10.0.0.0/8"]),
        ("limits", {"tokens_per_minute": 7}),
    ],
    ids=case_id,
)
async def test_each_field_of_a_key_can_be_changed_alone(api: ApiApp, name: str, value: Any) -> None:
    tenant = await new_tenant(api)
    made = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "k"})
    del made["key"]
    changed = await api.call("PATCH", f"/keys/{made['id']}", json={name: value})

    assert changed == {**made, name: {**made["limits"], **value} if name == "limits" else value}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "another"),
        ("tier", "batch"),
        ("weight", 5),
        ("limits", {"tokens_per_minute": 7}),
        ("allowed_models", ["m"]),
        ("suspended", True),
    ],
    ids=case_id,
)
async def test_each_field_of_a_tenant_can_be_changed_alone(api: ApiApp, name: str, value: Any) -> None:
    tenant = await new_tenant(api)
    changed = await api.call("PATCH", f"/tenants/{tenant['id']}", json={name: value})

    assert changed == {**tenant, name: {**tenant["limits"], **value} if name == "limits" else value}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"name": "x", "limits": {"tokens_per_hour": 1}}, "unknown_parameter", "limits.tokens_per_hour"),
        ({"name": "x", "colour": "red"}, "unknown_parameter", "colour"),
        ({}, "invalid_value", "name"),
        ({"name": "x", "weight": "heavy"}, "invalid_value", "weight"),
        ({"name": "x", "tier": "golden"}, "invalid_value", "tier"),
        ({"name": "x", "limits": {"tokens_per_minute": -1}}, "invalid_value", "limits.tokens_per_minute"),
    ],
    ids=str,
)
async def test_an_invalid_field_is_named(api: ApiApp, body: dict[str, Any], code: str, param: str) -> None:
    assert await api.refusal("POST", "/tenants", 400, json=body) == (code, param)


async def test_an_update_with_an_unknown_field_is_refused_entirely(api: ApiApp) -> None:
    tenant = await new_tenant(api)
    path = f"/tenants/{tenant['id']}"

    assert await api.refusal("PATCH", path, 400, json={"name": "new", "nme": "x"}) == ("unknown_parameter", "nme")
    assert (await api.call("GET", path))["name"] == tenant["name"]


async def test_a_name_in_use_is_a_conflict(api: ApiApp) -> None:
    await new_tenant(api)

    assert (await api.refusal("POST", "/tenants", 409, json={"name": "Bob & Söhne"}))[0] == "name_taken"


@pytest.mark.parametrize("path", ["/tenants/tn_x", "/tenants/tn_x/keys", "/requests/req_x"])
async def test_unknown_ids_are_not_found(api: ApiApp, path: str) -> None:
    assert (await api.refusal("GET", path, 404))[0] == "not_found"


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 50])
async def test_requests_that_wait_for_their_limits_come_first_in_the_list(
    api: ApiApp, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    people = await make_cast(api.services.db, api.services.clock)
    bob, other = people.bob, people.charlie
    entries = [pending(bob, request_id=f"req_{number}", admitted_at=START + timedelta(seconds=number)) for number in range(2)]
    events = [rows.event_row(entry, people.epoch_id, "EUR", START.date()) for entry in entries]
    await api.services.db.batch_write(rows.insert, entries, events)
    side = EngineSide(api.services.clock)
    waiting = [side.add(who, f"req_w{number}", state="queued") for number, who in enumerate((bob, other, bob))]
    for live in waiting:
        live.admitted_at, live.awaited_limit = None, "tenant_tokens"
    monkeypatch.setattr(api.services.generations, "unrecorded", lambda **_access: waiting)

    def listed(**filters: str) -> Any:
        return read_every_page(lambda _, cursor: page_of_requests(cursor, **filters))

    async def page_of_requests(cursor: str | None, **filters: str) -> Page[Any]:
        query = {"limit": limit, **filters, **({"cursor": cursor} if cursor else {})}
        page = await api.call("GET", "/requests", params=query)
        assert len(page["data"]) <= limit
        return Page(data=page["data"], next_cursor=page["next_cursor"])

    found = await listed()
    assert [row["id"] for row in found] == ["req_w2", "req_w1", "req_w0", "req_1", "req_0"]
    assert [row["admitted_at"] is None for row in found] == [True, True, True, False, False]
    assert [row["awaited_limit"] for row in found] == ["tenant_tokens"] * 3 + [None] * 2
    assert [row["id"] for row in await listed(tenant_id=other.tenant.id)] == ["req_w1"]
    assert [row["id"] for row in await listed(key_id=bob.key.id)] == ["req_w2", "req_w0", "req_1", "req_0"]
    assert await listed(model="none") == []


async def test_every_waiting_request_is_on_one_page_though_their_ids_are_not_in_the_order_of_the_queue(
    api: ApiApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id is given before the prompt is tokenised, which takes longer for some, and is random within a millisecond."""
    bob = (await make_cast(api.services.db, api.services.clock)).bob
    side = EngineSide(api.services.clock)
    waiting = [side.add(bob, request_id, state="queued") for request_id in ("req_b", "req_c", "req_a")]
    for live in waiting:
        live.admitted_at = None
    monkeypatch.setattr(api.services.generations, "unrecorded", lambda **_access: waiting)

    async def page_of_requests(_limit: int, cursor: str | None) -> Page[Any]:
        page = await api.call("GET", "/requests", params={"limit": 1, **({"cursor": cursor} if cursor else {})})
        return Page(data=page["data"], next_cursor=page["next_cursor"])

    assert [row["id"] for row in await read_every_page(page_of_requests)] == ["req_c", "req_b", "req_a"]


@pytest.mark.parametrize("limit", [1, 2, 50])
async def test_an_admitted_request_is_listed_once_also_while_its_usage_event_is_being_committed(
    api: ApiApp, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    people = await make_cast(api.services.db, api.services.clock)
    at = {f"req_{number}": START + timedelta(seconds=number) for number in range(3)}
    entries = [pending(people.bob, request_id=name, admitted_at=at[name]) for name in ("req_0", "req_2")]
    events = [rows.event_row(entry, people.epoch_id, "EUR", START.date()) for entry in entries]
    await api.services.db.batch_write(rows.insert, entries, events)
    unrecorded = [EngineSide(api.services.clock).add(people.bob, name) for name in ("req_1", "req_2")]
    for live in unrecorded:
        live.admitted_at = at[live.id]
    monkeypatch.setattr(api.services.generations, "unrecorded", lambda **_access: unrecorded)

    async def page_of_requests(_limit: int, cursor: str | None) -> Page[Any]:
        page = await api.call("GET", "/requests", params={"limit": limit, **({"cursor": cursor} if cursor else {})})
        return Page(data=page["data"], next_cursor=page["next_cursor"])

    assert [row["id"] for row in await read_every_page(page_of_requests)] == ["req_2", "req_1", "req_0"]


@pytest.mark.parametrize(("state", "aborts"), [("decode", 1), ("finished", 0)])
async def test_an_abort_is_audited_only_if_the_request_was_running(
    api: ApiApp, monkeypatch: pytest.MonkeyPatch, state: str, aborts: int
) -> None:
    tenant = await new_tenant(api)
    person = Person(
        tenant=await api.services.tenants.get(tenant["id"], access=OWNER),
        key=(await api.services.keys.create(tenant["id"], name="key", access=OWNER))[0],
        secret="",
    )
    live = EngineSide(api.services.clock).add(person, "req_live", state=state)

    async def abort_and_wait(_id: str, **_access: Any) -> LiveRequest:
        return live

    monkeypatch.setattr(api.services.generations, "find", lambda _id, **_access: live)
    monkeypatch.setattr(api.services.generations, "abort_and_wait", abort_and_wait)
    assert (await api.call("DELETE", "/requests/req_live"))["id"] == "req_live"
    entries = await api.call("GET", "/audit", params={"action": "request.abort"})
    assert len(entries["data"]) == aborts


async def test_lists_are_paged_by_cursor(api: ApiApp) -> None:
    made = [(await new_tenant(api, name=f"tenant {number}"))["id"] for number in range(5)]
    seen: list[str] = []
    cursor = None
    while True:
        page = await api.call("GET", "/tenants", params={"limit": 2, **({"cursor": cursor} if cursor else {})})
        assert set(page) == PAGE_FIELDS
        seen += [row["id"] for row in page["data"]]
        cursor = page["next_cursor"]
        if not page["has_more"]:
            break

    assert cursor is None
    assert seen[-5:] == made
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=x", "limit"), ("limit=99999", "limit"), ("cursor=zzz", "cursor")]
)
async def test_an_invalid_limit_or_cursor_is_named(api: ApiApp, query: str, param: str) -> None:
    assert await api.refusal("GET", f"/tenants?{query}", 400) == ("invalid_value", param)


@pytest.mark.parametrize("path", ["/tenants/%00", "/ledger?tenant_id=a%00", "/requests/%00"])
async def test_a_nul_character_in_a_parameter_is_refused(api: ApiApp, path: str) -> None:
    assert (await api.refusal("GET", path, 400))[0] == "invalid_value"


async def test_an_unknown_query_parameter_is_named(api: ApiApp) -> None:
    assert await api.refusal("GET", "/ledger?tenant=x", 400) == ("unknown_parameter", "tenant")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("ledger?tenant_id=a&tenant_id=b", "tenant_id"),
        ("ledger?status=posted&status=voided", "status"),
        ("usage?bucket=day&bucket=hour", "bucket"),
        ("requests?model=a&model=a", "model"),
        ("audit?limit=1&limit=2", "limit"),
    ],
)
async def test_a_repeated_parameter_of_one_value_is_named(api: ApiApp, query: str, param: str) -> None:
    assert await api.refusal("GET", f"/{query}", 400) == ("invalid_value", param)


@pytest.mark.parametrize(
    "query", ["usage?group_by=tenant&group_by=key&key_id=a&key_id=b&model=a&model=b", "audit?actor=a&actor=b"]
)
async def test_a_parameter_of_several_values_can_be_repeated(api: ApiApp, query: str) -> None:
    await api.call("GET", f"/{query}")


@pytest.mark.parametrize(
    "query",
    [
        *("start=yesterday", "start=2026-01-01T00:00:00", "end=0001-01-01T00:00:00%2B14:00", "bucket=week"),
        *("group_by=colour", "group_by=", "group_by=model,"),
    ],
)
async def test_an_invalid_parameter_of_a_report_is_named(api: ApiApp, query: str) -> None:
    assert await api.refusal("GET", f"/usage?{query}", 400) == ("invalid_value", query.partition("=")[0])


@pytest.mark.parametrize(
    "text",
    ["2026-01-31T12:00:00Z", "2026-01-31t12:00:00.000z", "2026-01-31 12:00:00Z", "2026-01-31T13:00:00+01:00",
     "2026-01-31t13:00:00 01:00"],
)  # fmt: skip
def test_a_time_is_accepted_in_every_form_of_rfc_3339(text: str) -> None:
    assert parse_timestamp(text, "start") == datetime(2026, 1, 31, 12, tzinfo=UTC)


async def test_a_price_has_the_appliances_currency_by_default(api: ApiApp) -> None:
    price = await api.call("POST", "/prices", status=201, json={"model": "m", "prompt": 10, "completion": 30})

    assert set(price) >= PRICE_FIELDS
    assert (price["currency"], price["cached_prompt"], price["batch_percent"]) == ("EUR", 10, 100)
    assert (await api.call("GET", "/prices"))["data"] == [price]


async def test_an_empty_currency_of_a_price_is_refused(api: ApiApp) -> None:
    body = {"model": "m", "prompt": 10, "completion": 30, "currency": ""}

    assert await api.refusal("POST", "/prices", 400, json=body) == ("invalid_value", "currency")


async def test_the_system_lists_processes_gpus_and_database(api: ApiApp) -> None:
    system = await api.call("GET", "/system")

    assert set(system) >= SYSTEM_FIELDS
    assert [process["role"] for process in system["processes"]] == ["gateway"]
    assert system["database"] == {"kind": "sqlite", "ok": True}
    assert system["gpus"] or system["gpu_error"]


async def test_the_event_stream_begins_with_the_latest_reading(api: ApiApp) -> None:
    api.services.generations.draining = True  # ends the stream after its first event, so that it can be read completely
    await api.services.sampler.sample()
    answer = await api.client.get("/admin/v1/events")

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.startswith("event: system\ndata: {")
    assert "\r" not in answer.text


async def test_the_event_stream_ends_soon_after_its_token_is_revoked(api: ApiApp) -> None:
    token, secret = await api.services.admin_tokens.create("a program", "viewer")
    reading = asyncio.create_task(
        api.client.get("/admin/v1/events", headers={"authorization": f"Bearer {secret}"})  # returns when the stream ends
    )
    async with asyncio.timeout(60):
        while not api.services.sampler._subscribers:  # noqa: ASYNC110 - the sampler has no event for it
            await asyncio.sleep(0)
        await api.services.admin_tokens.revoke(token.id)
        while not reading.done():
            await api.services.sampler.sample()
            await asyncio.sleep(0)

    assert 1 <= (await reading).text.count("event: system") <= 2 * CREDENTIAL_CHECKED_EVERY_TICKS


@pytest.mark.parametrize("body", [b'{"name": "\\ud800"}', b'{"name": "\\ud800\\u0041"}', b'{"name": "\xff"}', b"\xff"])
async def test_a_body_that_is_not_utf8_is_refused_with_that_reason(api: ApiApp, body: bytes) -> None:
    answer = await api.call("POST", "/tenants", status=400, content=body)

    assert "not valid UTF-8 JSON" in answer["error"]["message"]
    assert "truncated" not in answer["error"]["message"]
    assert "position" not in answer["error"]["message"]


async def test_event_streams_of_programs_do_not_use_up_those_of_the_console(
    api: ApiApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "STREAMS_MAX", 0)

    assert (await api.refusal("GET", "/events", 503))[0] == "overloaded"
    live_page = api.services.sampler.subscribe()
    await anext(live_page)
    await live_page.aclose()


@pytest.mark.parametrize("path", READS)
async def test_reading_requires_a_valid_token(api: ApiApp, path: str) -> None:
    for headers in ({"authorization": ""}, {"authorization": "Bearer gha_wrong"}):
        assert (await api.refusal("GET", path, 401, headers=headers))[0] == "invalid_api_key"


async def test_an_api_key_is_not_accepted_as_an_administrator_token(api: ApiApp) -> None:
    tenant = await new_tenant(api)
    made = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "k"})
    headers = {"authorization": f"Bearer {made['key']}"}

    for path in READS:
        await api.refusal("GET", path, 401, headers=headers)


@pytest.mark.parametrize("role", ["viewer", "billing"])
async def test_read_only_roles_can_read_everything_and_change_nothing(api: ApiApp, role: str) -> None:
    headers = await api.as_role(role)
    for path in READS:
        await api.call("GET", path, headers=headers)
    for method, path in WRITES:
        assert (await api.refusal(method, path, 403, headers=headers))[0] == "role_not_allowed"


async def test_a_future_price_can_be_withdrawn(api: ApiApp) -> None:
    body = {"model": "m", "prompt": 10, "completion": 30}
    now = await api.call("POST", "/prices", status=201, json=body)
    later = await api.call("POST", "/prices", status=201, json={**body, "effective_from": "2190-01-01T00:00:00Z"})
    await api.call("DELETE", f"/prices/{later['id']}", status=403, headers=await api.as_role("viewer"))
    assert await api.call("DELETE", f"/prices/{later['id']}") == later
    refused = await api.call("DELETE", f"/prices/{now['id']}", status=409)
    assert refused["error"]["code"] == "price_begun"
    await api.call("DELETE", f"/prices/{later['id']}", status=404)
    assert (await api.call("GET", "/prices"))["data"] == [now]


async def test_only_roles_with_billing_can_add_prices(api: ApiApp) -> None:
    body = {"model": "m", "prompt": 1, "completion": 1}

    await api.call("POST", "/prices", status=403, json=body, headers=await api.as_role("viewer"))
    await api.call("POST", "/prices", status=201, json=body, headers=await api.as_role("billing"))


async def test_a_session_can_write_only_with_its_csrf_token_from_the_same_site(api: ApiApp) -> None:
    member = await api.services.members.create("alice@example.com", "a password of tests", "owner")
    token, session = await api.services.sessions.open(member.id, "test", "127.0.0.1")
    cookie = {"authorization": "", "cookie": f"{PLAIN_COOKIE}={token}"}
    own = {**cookie, "x-csrf-token": session.csrf_token}

    await api.call("GET", "/tenants", headers=cookie)
    await api.call("POST", "/tenants", status=403, json={"name": "a"}, headers=cookie)
    await api.call("POST", "/tenants", status=403, json={"name": "a"}, headers={**own, "sec-fetch-site": "cross-site"})
    await api.call("POST", "/tenants", status=201, json={"name": "a"}, headers={**own, "sec-fetch-site": "same-origin"})


@pytest.mark.parametrize(("scheme", "expected"), [("http", [200, 401]), ("https", [401, 200])])
async def test_only_the_session_cookie_of_the_scheme_in_use_is_accepted(api: ApiApp, scheme: str, expected: list[int]) -> None:
    member = await api.services.members.create("alice@example.com", "a password of tests", "owner")
    token, _ = await api.services.sessions.open(member.id, "test", "127.0.0.1")
    address = f"{scheme}://appliance.test/admin/v1/tenants"
    plain, secure = [{"authorization": "", "cookie": f"{name}={token}"} for name in (PLAIN_COOKIE, SECURE_COOKIE)]

    statuses = [(await api.client.get(address, headers=headers)).status_code for headers in (plain, secure)]
    assert statuses == expected
