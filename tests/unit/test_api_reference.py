"""The API reference describes itself, and lists for each operation the credentials and the errors of its state."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.support.api_app import ApiApp
from tests.support.case_ids import case_id
from tests.support.tenant_isolation import session_headers

PASSWORD = "a password of tests"
WEBHOOK = {"kind": "webhook", "target": "https://hooks.example.com/alerts"}
REQUEST = {"tenant_id": "tn_unknown", "model": "tiny", "prompt_tokens": 1}


class Objects(NamedTuple):
    """Ids of objects in states that do not allow changes."""

    archived: str
    key: str
    active: str
    rotated: str
    price: str
    webhook: str
    delivery: str


@pytest.mark.parametrize(
    ("method", "path", "json", "status"),
    [
        ("POST", "/admin/v1/tenants/{archived}/keys", {"name": "new"}, 409),
        ("PATCH", "/admin/v1/keys/{key}", {"name": "new"}, 409),
        ("POST", "/admin/v1/keys/{key}/rotate", {}, 409),
        ("DELETE", "/admin/v1/prices/{price}", None, 409),
        ("POST", "/admin/v1/webhooks", {**WEBHOOK, "tenant_id": "{archived}"}, 409),
        ("POST", "/admin/v1/webhooks/{webhook}/test", None, 409),
        ("POST", "/v1/organization/projects/{archived}/rate_limits/rl-*", {"max_requests_per_1_minute": 1}, 409),
        ("POST", "/admin/v1/webhooks/{webhook}/deliveries/{delivery}/retry", None, 409),
        ("POST", "/v1/organization/projects/{active}/api_keys/{rotated}", {"expires_in_seconds": 60}, 409),
        ("POST", "/admin/v1/limits/check", REQUEST, 404),
    ],
    ids=case_id,
)
async def test_the_reference_lists_conflicts_that_operations_return(
    api: ApiApp, api_document: Any, method: str, path: str, json: dict[str, Any] | None, status: int
) -> None:
    objects = (await create_objects(api))._asdict()
    body = json and {name: value.format(**objects) if isinstance(value, str) else value for name, value in json.items()}
    response = await api.client.request(method, path.format(**objects), json=body)
    assert response.status_code == status, response.text
    assert str(status) in documented_responses(api_document, method, path)


def test_the_reference_describes_itself_and_each_group_of_operations(api_document: Any) -> None:
    described = {tag["name"] for tag in api_document["tags"] if tag["description"]}

    assert "`x-request-id`" in api_document["info"]["description"]
    assert described == {
        tag for operations in api_document["paths"].values() for operation in operations.values() for tag in operation["tags"]
    }


async def test_usage_reports_are_documented_as_readable_with_an_api_key(api: ApiApp, api_document: Any) -> None:
    tenant = await api.call("POST", "/tenants", status=201, json={"name": "alice"})
    key = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "reports", "scopes": ["usage"]})
    headers = {"authorization": f"Bearer {key['key']}"}
    paths = api_document["paths"]

    for path in ("/v1/organization/usage/completions", "/v1/organization/usage/embeddings", "/v1/organization/costs"):
        response = await api.client.get(path, headers=headers, params={"start_time": 1})
        assert response.status_code == 200, response.text
        assert paths[path]["get"]["security"] == [{"administrator": []}, {"api_key": []}, {"api_key_header": []}]
    assert paths["/v1/organization/projects"]["get"]["security"] == [{"administrator": []}]


async def test_an_optional_body_is_documented_as_optional(api: ApiApp, api_document: Any) -> None:
    active = await api.call("POST", "/tenants", status=201, json={"name": "active"})
    key = await api.call("POST", f"/tenants/{active['id']}/keys", status=201, json={"name": "rotated"})
    webhook = await api.call("POST", "/webhooks", status=201, json=WEBHOOK)
    paths = api_document["paths"]

    await api.call("POST", f"/keys/{key['id']}/rotate")
    await api.call("POST", f"/webhooks/{webhook['id']}/rotate")
    for path in ("/admin/v1/keys/{key_id}/rotate", "/admin/v1/webhooks/{webhook_id}/rotate"):
        assert paths[path]["post"]["requestBody"]["required"] is False
    assert paths["/admin/v1/tenants"]["post"]["requestBody"]["required"] is True


async def test_sessions_of_another_member_are_a_documented_404(api: ApiApp, api_document: Any) -> None:
    create = api.services.members.create
    alice, bob = await create("alice@example.com", PASSWORD, "owner"), await create("bob@example.com", PASSWORD, "member")
    headers = await session_headers(api.services, bob)
    for method in ("GET", "DELETE"):
        await api.call(method, "/sessions", status=404, params={"member_id": alice.id}, headers=headers)
        assert "404" in documented_responses(api_document, method, "/admin/v1/sessions")


async def test_webhooks_of_another_tenant_are_a_documented_404(api: ApiApp, api_document: Any) -> None:
    own, other = [await api.call("POST", "/tenants", status=201, json={"name": name}) for name in ("own", "other")]
    bob = await api.services.members.create("bob@example.com", PASSWORD, "member")
    await api.call("POST", f"/tenants/{own['id']}/members", status=201, json={"email": bob.email, "role": "manager"})
    headers = await session_headers(api.services, bob)
    await api.call("GET", "/webhooks", params={"tenant_id": own["id"]}, headers=headers)
    await api.call("GET", "/webhooks", status=404, params={"tenant_id": other["id"]}, headers=headers)
    assert "404" in documented_responses(api_document, "GET", "/admin/v1/webhooks")


def test_metrics_are_documented_with_optional_credentials(api_document: Any) -> None:
    paths = api_document["paths"]

    assert paths["/metrics"]["get"]["security"] == [{}, {"administrator": []}]
    assert paths["/health/live"]["get"]["security"] == []


def test_no_description_contains_the_indentation_of_its_docstring(api_document: Any) -> None:
    schemas = api_document["components"]["schemas"]
    assert [name for name, schema in schemas.items() if "\n " in schema["description"]] == []


async def create_objects(api: ApiApp) -> Objects:
    archived = await api.call("POST", "/tenants", status=201, json={"name": "archived"})
    key = await api.call("POST", f"/tenants/{archived['id']}/keys", status=201, json={"name": "revoked"})
    price = await api.call("POST", "/prices", status=201, json={"model": "tiny", "prompt": 1, "completion": 1})
    active = await api.call("POST", "/tenants", status=201, json={"name": "active"})
    rotated = await api.call("POST", f"/tenants/{active['id']}/keys", status=201, json={"name": "rotated"})
    await api.call("POST", f"/keys/{rotated['id']}/rotate", json={"grace_s": 600})
    webhook = await api.call("POST", "/webhooks", status=201, json=WEBHOOK)
    delivery = await api.call("POST", f"/webhooks/{webhook['id']}/test", status=201)
    await api.call("PATCH", f"/webhooks/{webhook['id']}", json={"disabled": True})
    await api.call("DELETE", f"/keys/{key['id']}")
    await api.call("DELETE", f"/tenants/{archived['id']}")
    return Objects(
        archived=archived["id"],
        key=key["id"],
        active=active["id"],
        rotated=rotated["id"],
        price=price["id"],
        webhook=webhook["id"],
        delivery=delivery["id"],
    )


def documented_responses(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    """Return the responses of the operation whose path has the same segments as `path`, apart from parameters."""
    segments = path.split("/")
    for template, operations in document["paths"].items():
        others = template.split("/")
        pairs = zip(segments, others, strict=False)
        fits = len(segments) == len(others) and all(own == other or "{" in other for own, other in pairs)
        if fits and method.lower() in operations:
            responses: dict[str, Any] = operations[method.lower()]["responses"]
            return responses
    raise AssertionError(f"no operation {method} {path}")
