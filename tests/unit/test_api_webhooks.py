"""Webhooks in the administrators' API: life cycle, test messages, roles, and invalid input."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.base.tables import outbox
from appliance.metering.alerts.outbox import TENANT_EVENTS
from appliance.metering.alerts.send_limits import TESTS_PER_HOUR_MAX
from tests.support.alerts import TARGET
from tests.support.api_app import ApiApp
from tests.support.cast import OWNER
from tests.support.tenant_isolation import session_headers

NEW = {"kind": "webhook", "target": TARGET}


async def member_headers(api: ApiApp, tenant_id: str, role: str) -> dict[str, str]:
    """Return the headers of a new member of a tenant."""
    member = await api.services.members.create(f"{role}@{tenant_id}.example", "a password of tests", "member")
    await api.services.memberships.add(tenant_id, member.id, role, access=OWNER)
    return await session_headers(api.services, member)


async def tenant(api: ApiApp, name: str) -> str:
    return (await api.services.tenants.create(name=name, access=OWNER)).id


async def test_a_webhook_is_created_changed_rotated_disabled_and_deleted(api: ApiApp) -> None:
    bob = await tenant(api, "bob")
    made = await api.call("POST", "/webhooks", status=201, json={**NEW, "tenant_id": bob})
    assert made.pop("secret").startswith("whsec_")
    path = f"/webhooks/{made['id']}"
    assert made["events"] == list(TENANT_EVENTS)
    assert await api.call("GET", path) == made
    assert (await api.call("GET", "/webhooks"))["data"] == [made]
    changed = await api.call("PATCH", path, json={"events": ["invoice.closed"]})
    assert changed == {**made, "events": ["invoice.closed"]}
    rotated = await api.call("POST", f"{path}/rotate", json={"grace_s": 60})
    assert rotated["secret"].startswith("whsec_")
    assert rotated["previous_secret_until"] is not None
    assert (await api.call("POST", f"{path}/rotate"))["previous_secret_until"] > rotated["previous_secret_until"]
    assert (await api.call("PATCH", path, json={"disabled": True}))["disabled"]
    await api.call("POST", f"{path}/test", status=409)
    await api.call("PATCH", path, json={"disabled": False})
    assert (await api.call("DELETE", path))["id"] == made["id"]
    await api.call("GET", path, status=404)
    assert (await api.call("GET", "/webhooks"))["data"] == []


async def test_a_test_message_is_listed_and_can_be_retried(api: ApiApp) -> None:
    made = await api.call("POST", "/webhooks", status=201, json=NEW)
    path = f"/webhooks/{made['id']}"
    sent = await api.call("POST", f"{path}/test", status=201)
    assert (sent["event"], sent["state"], sent["attempts"]) == ("webhook.test", "pending", 0)
    assert sent["payload"]["type"] == "webhook.test"
    assert (await api.call("GET", f"{path}/deliveries"))["data"] == [sent]
    (claimed,) = await api.services.alerts.outbox.claim(1)
    await api.services.alerts.outbox.mark_failed(claimed, "the receiver answered 500", None)
    failed = await api.call("GET", f"{path}/deliveries/{sent['id']}")
    assert (failed["state"], failed["last_error"]) == ("failed", "the receiver answered 500")
    assert [row["id"] for row in (await api.call("GET", f"{path}/deliveries?state=failed"))["data"]] == [sent["id"]]
    assert (await api.call("GET", f"{path}/deliveries?state=delivered"))["data"] == []
    again = await api.call("POST", f"{path}/deliveries/{sent['id']}/retry")
    assert (again["id"], again["state"]) == (sent["id"], "pending")


async def test_too_many_test_messages_are_refused_with_retry_after(api: ApiApp) -> None:
    made = await api.call("POST", "/webhooks", status=201, json=NEW)
    for _ in range(TESTS_PER_HOUR_MAX):
        await api.call("POST", f"/webhooks/{made['id']}/test", status=201)
    answer = await api.client.post(f"/admin/v1/webhooks/{made['id']}/test")
    assert answer.status_code == 429
    assert 3500 < float(answer.headers["retry-after"]) <= 3600


async def test_a_manager_manages_only_webhooks_of_the_own_tenant(api: ApiApp) -> None:
    bob, charlie = await tenant(api, "bob"), await tenant(api, "charlie")
    manager = await member_headers(api, bob, "manager")
    own = await api.call("POST", "/webhooks", status=201, headers=manager, json={**NEW, "tenant_id": bob})
    others = [
        await api.call("POST", "/webhooks", status=201, json={**NEW, "tenant_id": charlie}),
        await api.call("POST", "/webhooks", status=201, json=NEW),
    ]
    assert [row["id"] for row in (await api.call("GET", "/webhooks", headers=manager))["data"]] == [own["id"]]
    await api.call("GET", f"/webhooks?tenant_id={charlie}", headers=manager, status=404)
    await api.call("POST", "/webhooks", headers=manager, status=404, json={**NEW, "tenant_id": charlie})
    await api.call("POST", "/webhooks", headers=manager, status=403, json=NEW)
    for other in others:
        sent = await api.call("POST", f"/webhooks/{other['id']}/test", status=201)
        for method, path, body in _routes(other["id"], sent["id"]):
            await api.call(method, path, headers=manager, status=404, json=body)
    sent = await api.call("POST", f"/webhooks/{own['id']}/test", headers=manager, status=201)
    # A delivery is not found under another webhook's id.
    await api.call("POST", f"/webhooks/{others[0]['id']}/deliveries/{sent['id']}/retry", status=404)
    for method, path, body in _routes(own["id"], sent["id"]):
        answer = await api.client.request(method, f"/admin/v1{path}", headers=manager, json=body)
        assert answer.is_success, (method, path, answer.text)


@pytest.mark.parametrize("role", ["owner", "admin", "billing", "viewer", "developer"])
async def test_owners_and_admins_manage_webhooks_and_other_roles_read_them(api: ApiApp, role: str) -> None:
    bob = await tenant(api, "bob")
    own = await api.call("POST", "/webhooks", status=201, json={**NEW, "tenant_id": bob})
    sent = await api.call("POST", f"/webhooks/{own['id']}/test", status=201)
    headers = await member_headers(api, bob, role) if role == "developer" else await api.as_role(role)
    for method, path, body in [("GET", "/webhooks", None), *_routes(own["id"], sent["id"])]:
        answer = await api.client.request(method, f"/admin/v1{path}", headers=headers, json=body)
        allowed = role in ("owner", "admin") or (method == "GET" and role != "developer")
        assert answer.is_success if allowed else answer.status_code == 403, (method, path, answer.text)


async def test_readers_see_urls_without_their_path(api: ApiApp) -> None:
    own = await api.call("POST", "/webhooks", status=201, json=NEW)
    viewer = await api.as_role("viewer")
    for path in ("/webhooks", f"/webhooks/{own['id']}", f"/webhooks/{own['id']}/deliveries"):
        assert "/in" not in json.dumps(await api.call("GET", path, headers=viewer))
    assert (await api.call("GET", f"/webhooks/{own['id']}", headers=viewer))["target"] == "https://alerts.example.com"


def _routes(webhook_id: str, delivery_id: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    """Return every route of one webhook; the last one removes it."""
    path = f"/webhooks/{webhook_id}"
    return [
        ("GET", path, None),
        ("PATCH", path, {"disabled": False}),
        ("POST", f"{path}/rotate", {"grace_s": 0}),
        ("POST", f"{path}/test", None),
        ("GET", f"{path}/deliveries", None),
        ("GET", f"{path}/deliveries/{delivery_id}", None),
        ("POST", f"{path}/deliveries/{delivery_id}/retry", None),
        ("DELETE", path, None),
    ]


INVALID_WEBHOOKS: list[tuple[dict[str, Any], str]] = [
    ({}, "kind"),
    ({"kind": "webhook"}, "target"),
    ({**NEW, "kind": "pager"}, "kind"),
    ({**NEW, "kind": 5}, "kind"),
    ({**NEW, "kind": None}, "kind"),
    ({**NEW, "url": "x"}, "url"),
    ({**NEW, "secret": "whsec_mine"}, "secret"),
    ({**NEW, "target": ""}, "target"),
    ({**NEW, "target": "x" * 100_000}, "target"),
    ({**NEW, "target": "file:///etc/passwd"}, "target"),
    ({**NEW, "target": "https://127.0.0.1:8000/admin/v1/tenants"}, "target"),
    ({**NEW, "target": "https://[::ffff:169.254.169.254]/"}, "target"),
    ({**NEW, "target": "http://example.com/"}, "target"),
    ({**NEW, "target": "https://a:b@example.com/"}, "target"),
    ({**NEW, "target": "https://example.com/\r\nx-injected: 1"}, "target"),
    ({**NEW, "target": "https://example.com/\u0000"}, "target"),
    ({**NEW, "target": ["https://example.com"]}, "target"),
    ({**NEW, "tenant_id": "tn_unknown"}, "tenant_id"),
    ({**NEW, "tenant_id": ""}, "tenant_id"),
    ({**NEW, "tenant_id": "x\u0000"}, "tenant_id"),
    ({**NEW, "tenant_id": 7}, "tenant_id"),
    ({**NEW, "events": []}, "events"),
    ({**NEW, "events": {}}, "events"),
    ({**NEW, "events": "invoice.closed"}, "events"),
    ({**NEW, "events": ["invoice.opened"]}, "events"),
    ({**NEW, "events": ["webhook.test"]}, "events"),
    ({**NEW, "events": ["invoice.closed"] * 10_000}, "events"),
    ({**NEW, "events": [1]}, "events[0]"),
    ({"kind": "email", "target": "ops@example.com"}, "kind"),  # there is no mail server
]
INVALID_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "email"}, "kind"),
    ({"tenant_id": None}, "tenant_id"),
    ({"target": None}, "target"),
    ({"target": "nowhere"}, "target"),
    ({"events": None}, "events"),
    ({"events": ["invoice.closed", "invoice.opened"]}, "events"),
    ({"disabled": None}, "disabled"),
    ({"disabled": "yes"}, "disabled"),
    ({"disabled": 1}, "disabled"),
]
NOT_OBJECTS = [b"null", b"[]", b'"x"', b"{", b"\xff", b'{"kind": "\\ud800"}', b"[" * 100_000]


async def test_an_invalid_webhook_is_refused_by_field(api: ApiApp) -> None:
    for body, param in INVALID_WEBHOOKS:
        answer = await api.client.post("/admin/v1/webhooks", json=body)
        assert answer.status_code in (400, 404), (body, answer.text)
        assert answer.json()["error"]["param"] == param, (body, answer.text)
    assert (await api.call("GET", "/webhooks"))["data"] == []


async def test_a_body_that_is_not_an_object_is_refused(api: ApiApp) -> None:
    made = await api.call("POST", "/webhooks", status=201, json=NEW)
    own = f"/webhooks/{made['id']}"
    for content in NOT_OBJECTS:
        for method, path in (("POST", "/webhooks"), ("PATCH", own), ("POST", f"{own}/rotate")):
            answer = await api.client.request(method, f"/admin/v1{path}", content=content)
            assert answer.status_code == 400, (method, path, content[:20], answer.text)
    for method, path in (("POST", "/webhooks"), ("PATCH", own)):
        assert (await api.client.request(method, f"/admin/v1{path}")).status_code == 400


async def test_an_invalid_update_changes_nothing(api: ApiApp) -> None:
    made = await api.call("POST", "/webhooks", status=201, json=NEW)
    path = f"/webhooks/{made.pop('id')}"
    for body, param in INVALID_CHANGES:
        refused = await api.call("PATCH", path, status=400, json=body)
        assert refused["error"]["param"] == param, body
    kept = await api.call("GET", path)
    assert {name: kept[name] for name in made if name != "secret"} == {
        name: value for name, value in made.items() if name != "secret"
    }


async def test_an_invalid_grace_period_is_refused(api: ApiApp) -> None:
    made = await api.call("POST", "/webhooks", status=201, json=NEW)
    invalid: list[object] = [-1, 7 * 86400 + 1, 10**30, 1.5, "60", None, True, []]
    for grace_s in invalid:
        refused = await api.call("POST", f"/webhooks/{made['id']}/rotate", status=400, json={"grace_s": grace_s})
        assert refused["error"]["param"] == "grace_s", grace_s


async def test_an_unknown_webhook_is_not_found_on_any_route(api: ApiApp) -> None:
    for name in ("wh_unknown", "x" * 3000, "%00", "%ff", "'%20OR%201=1", "..%2f", "%E2%80%A8"):
        for method, path, body in _routes(name, name):
            answer = await api.client.request(method, f"/admin/v1{path}", json=body)
            assert answer.status_code in (400, 404, 405), (method, path[:50], answer.text)


async def test_an_invalid_query_is_refused(api: ApiApp) -> None:
    made = await api.call("POST", "/webhooks", status=201, json=NEW)
    path = f"/webhooks/{made['id']}/deliveries"
    for query in ("limit=0", "limit=-1", "limit=1001", "limit=x", "cursor=x", "cursor=", "unknown=1"):
        for listed in ("/webhooks", path):
            refused = await api.call("GET", f"{listed}?{query}", status=400)
            assert refused["error"]["param"] == query.partition("=")[0], (listed, query)
    for query in ("state=lost", "state=", "cursor=%00", "state=%00"):
        await api.call("GET", f"{path}?{query}", status=400)


async def test_only_the_response_to_the_creation_has_the_secret(api: ApiApp) -> None:
    made = await api.call("POST", "/webhooks", status=201, json=NEW)
    await api.call("POST", f"/webhooks/{made['id']}/test", status=201)
    path = f"/webhooks/{made['id']}"
    for answer in (
        await api.call("GET", "/webhooks"),
        await api.call("GET", path),
        await api.call("GET", f"{path}/deliveries"),
    ):
        assert "secret" not in json.dumps(answer).replace("previous_secret_until", "")
    assert "whsec_" not in str(await _rows(api))


async def _rows(api: ApiApp) -> list[object]:
    async with api.services.db.reading() as connection:
        return list((await connection.execute(outbox.select())).all())
