"""`/admin/v1/audit`: who can read it, its filters, and its immutability."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.support.api_app import ApiApp
from tests.support.case_ids import case_id
from tests.support.cast import ALICE_PASSWORD, OWNER
from tests.support.tenant_isolation import session_headers

FIELDS = {
    "id", "at", "actor", "action", "target", "tenant_id", "before", "after", "request_id", "address", "previous_hash", "hash",
}  # fmt: skip


async def make(api: ApiApp, name: str) -> tuple[str, str]:
    """Return the ids of a new tenant and its key."""
    tenant = await api.call("POST", "/tenants", status=201, json={"name": name})
    key = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "first"})
    return tenant["id"], key["id"]


async def actions(api: ApiApp, **query: Any) -> list[str]:
    return [row["action"] for row in (await api.call("GET", "/audit", params=query))["data"]]


async def test_an_entry_has_all_its_fields_and_the_acting_token(api: ApiApp) -> None:
    headers = await api.as_role("admin")
    answer = await api.client.post("/admin/v1/tenants", json={"name": "bob"}, headers=headers)
    (row,) = (await api.call("GET", "/audit", params={"action": "tenant.create"}))["data"]
    assert set(row) == FIELDS
    assert (row["actor"]["kind"], row["actor"]["name"]) == ("token", "token of a admin")
    assert row["target"] == {"kind": "tenant", "id": answer.json()["id"]}
    assert (row["request_id"], row["address"]) == (answer.headers["x-request-id"], "127.0.0.1")
    assert (row["before"], row["after"]["name"]) == (None, "bob")


async def test_an_update_entry_has_only_the_changed_values(api: ApiApp) -> None:
    tenant_id, _ = await make(api, "bob")
    await api.call("PATCH", f"/tenants/{tenant_id}", json={"limits": {"tokens_per_minute": 5}, "weight": 1})
    (row,) = (await api.call("GET", "/audit", params={"action": "tenant.update"}))["data"]
    assert row["before"] == {"limits": {"tokens_per_minute": None}}
    assert row["after"] == {"limits": {"tokens_per_minute": 5}}


async def test_only_the_command_line_can_name_the_acting_user(api: ApiApp) -> None:
    operator = {"x-gatehouse-operator": "zo%C3%AB"}
    await api.call("POST", "/tenants", status=201, json={"name": "bob"}, headers={**api.client.headers, **operator})
    await api.call("POST", "/tenants", status=201, json={"name": "eve"}, headers={**await api.as_role("owner"), **operator})
    actors = [row["actor"] for row in (await api.call("GET", "/audit", params={"action": "tenant.create"}))["data"]]
    assert [actor["kind"] for actor in actors] == ["token", "cli"]
    assert actors[1]["name"] == "zoë"
    assert actors[0]["name"] != "zoë"


async def test_the_list_is_paged_and_filtered(api: ApiApp) -> None:
    bob, key = await make(api, "bob")
    charlie, _ = await make(api, "charlie")
    await api.call("DELETE", f"/keys/{key}")
    first = await api.call("GET", "/audit", params={"limit": 2})
    rest = await api.call("GET", "/audit", params={"limit": 100, "cursor": first["next_cursor"]})
    ids = [int(row["id"]) for row in (*first["data"], *rest["data"])]
    assert ids == sorted(ids, reverse=True)
    assert ids[-1] == 1
    assert await actions(api, target=key) == ["key.revoke", "key.create"]
    assert await actions(api, tenant_id=charlie) == ["key.create", "tenant.create"]
    assert await actions(api, tenant_id=bob, action="tenant.create") == ["tenant.create"]
    assert len(await actions(api, actor="command line")) == 5
    assert await actions(api, actor="nobody") == []
    moment = first["data"][0]["at"]
    assert await actions(api, start=moment) == ["key.revoke"]
    assert "key.revoke" not in await actions(api, end=moment)


@pytest.mark.parametrize(
    ("query", "param"),
    [({"start": "now"}, "start"), ({"cursor": "x"}, "cursor"), ({"limit": "0"}, "limit"), ({"who": "x"}, "who")],
    ids=case_id,
)
async def test_an_invalid_parameter_is_named(api: ApiApp, query: dict[str, str], param: str) -> None:
    assert (await api.call("GET", "/audit", status=400, params=query))["error"]["param"] == param


@pytest.mark.parametrize("role", ["owner", "admin", "billing", "viewer"])
async def test_every_role_of_the_appliance_can_read_it(api: ApiApp, role: str) -> None:
    assert (await api.client.get("/admin/v1/audit", headers=await api.as_role(role))).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_no_method_can_change_it(api: ApiApp, method: str) -> None:
    for path in ("/admin/v1/audit", "/admin/v1/audit/1"):
        assert (await api.client.request(method, path, json={})).status_code in (404, 405)


async def test_a_manager_can_read_entries_of_the_own_tenant_and_a_viewer_none(api: ApiApp) -> None:
    bob, _ = await make(api, "bob")
    charlie, _ = await make(api, "charlie")
    services = api.services
    seen: dict[str, Any] = {}
    for role in ("manager", "viewer"):
        member = await services.members.create(f"{role}@example.com", ALICE_PASSWORD, "member")
        await services.memberships.add(bob, member.id, role, access=OWNER)
        answer = await api.client.get("/admin/v1/audit", headers=await session_headers(services, member))
        seen[role] = (answer.status_code, answer.json())
    assert seen["viewer"][0] == 403
    status, page = seen["manager"]
    assert status == 200
    assert {row["tenant_id"] for row in page["data"]} == {bob}
    assert charlie not in json.dumps(page)


async def test_the_hash_of_an_entry_can_be_computed_from_its_fields(api: ApiApp) -> None:
    await make(api, "bob")
    rows = (await api.call("GET", "/audit", params={"limit": 100}))["data"][::-1]
    previous = "0" * 64
    for row in rows:
        hashed = {
            "id": int(row["id"]), "at": row["at"], "action": row["action"], "tenant_id": row["tenant_id"],
            "actor_kind": row["actor"]["kind"], "actor_id": row["actor"]["id"], "actor_name": row["actor"]["name"],
            "target_kind": row["target"]["kind"], "target_id": row["target"]["id"],
            "before": None if row["before"] is None else canonical_json(row["before"]),
            "after": None if row["after"] is None else canonical_json(row["after"]),
            "request_id": row["request_id"], "address": row["address"],
        }  # fmt: skip
        assert row["previous_hash"] == previous
        assert row["hash"] == hashlib.sha256((previous + canonical_json(hashed)).encode()).hexdigest()
        previous = row["hash"]


def canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
