"""The administrators' API of members and memberships, and of tiers and limits of models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api_app import ApiApp
from tests.support.sql_statements import record_statements
from tests.support.tenant_isolation import session_headers

MEMBER_FIELDS = {"id", "email", "role", "disabled", "memberships", "created_at"}
MEMBERSHIP_FIELDS = {"tenant_id", "member_id", "email", "role", "disabled", "created_at"}
DORA = "dora@example.com"


@pytest.fixture
async def bob(api: ApiApp) -> str:
    """Return the id of Bob's tenant."""
    return str((await api.call("POST", "/tenants", status=201, json={"name": "bob"}))["id"])


async def as_member(api: ApiApp, email: str) -> dict[str, str]:
    return await session_headers(api.services, await api.services.members.get_by_email(email))


async def with_own_password(api: ApiApp, made: dict[str, Any]) -> dict[str, str]:
    """Return the headers of a new member who has chosen a password."""
    member = await api.services.members.get_by_email(made["email"])
    await api.services.members.change_password(member, made["password"], "a password of her own")
    return await as_member(api, made["email"])


async def test_a_member_is_created_changed_and_disabled(api: ApiApp) -> None:
    made = await api.call("POST", "/members", status=201, json={"email": DORA, "role": "viewer"})

    assert set(made) == MEMBER_FIELDS | {"password"}
    assert (await api.services.members.prove_password(DORA, made["password"])).member.id == made["id"]
    headers = await as_member(api, DORA)
    assert (await api.refusal("GET", "/me", 403, headers=headers))[0] == "password_change_needed"
    headers = await with_own_password(api, made)
    assert (await api.call("GET", "/me", headers=headers))["role"] == "viewer"
    changed = await api.call("PATCH", f"/members/{made['id']}", json={"role": "billing"})
    assert set(changed) == MEMBER_FIELDS
    assert (changed["role"], changed["disabled"]) == ("billing", False)
    assert (await api.call("GET", "/me", headers=headers))["role"] == "billing"
    assert (await api.call("PATCH", f"/members/{made['id']}", json={"disabled": True}))["disabled"]
    assert (await api.refusal("GET", "/me", 401, headers=headers))[0] == "invalid_api_key"
    assert not (await api.call("PATCH", f"/members/{made['id']}", json={"disabled": False}))["disabled"]
    assert (await api.refusal("GET", "/me", 401, headers=headers))[0] == "invalid_api_key"


async def test_a_new_password_ends_the_sessions_of_the_old_one(api: ApiApp) -> None:
    made = await api.call("POST", "/members", status=201, json={"email": DORA, "role": "viewer"})
    headers = await with_own_password(api, made)
    await api.call("GET", "/me", headers=headers)
    fresh = await api.call("POST", f"/members/{made['id']}/reset-password")

    assert fresh["password"] != made["password"]
    assert (await api.services.members.prove_password(DORA, fresh["password"])).member.id == made["id"]
    await api.call("GET", "/me", status=401, headers=headers)


async def test_the_last_owner_cannot_be_demoted_or_disabled(api: ApiApp) -> None:
    made = await api.call("POST", "/members", status=201, json={"email": DORA, "role": "owner"})
    for change in ({"role": "admin"}, {"disabled": True}):
        assert await api.refusal("PATCH", f"/members/{made['id']}", 409, json=change) == ("last_owner", "member_id")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/members", {"email": "nobody", "role": "viewer"}, "email"),
        ("/members", {"email": DORA, "role": "manager"}, "role"),
        ("/members", {"email": DORA}, "role"),
        ("/members", {"email": DORA, "role": "viewer", "password": "x"}, "password"),
        ("/tenants/{bob}/members", {"email": DORA, "role": "owner"}, "role"),
        ("/tenants/{bob}/members", {"email": "@", "role": "viewer"}, "email"),
    ],
    ids=str,
)
async def test_an_invalid_field_is_named(api: ApiApp, bob: str, path: str, body: dict[str, Any], param: str) -> None:
    assert (await api.refusal("POST", path.format(bob=bob), 400, json=body))[1] == param


async def test_a_manager_adds_changes_and_removes_members_of_the_own_tenant(api: ApiApp, bob: str) -> None:
    invited = await api.call("POST", f"/tenants/{bob}/members", status=201, json={"email": DORA, "role": "manager"})

    assert set(invited) == MEMBERSHIP_FIELDS | {"password"}
    headers = await with_own_password(api, invited)
    body = {"email": "emil@example.com", "role": "viewer"}
    assert (await api.refusal("POST", f"/tenants/{bob}/members", 403, json=body, headers=headers))[0] == "role_not_allowed"
    known = await api.call("POST", "/members", status=201, json={"email": "emil@example.com", "role": "member"})
    emil = await api.call("POST", f"/tenants/{bob}/members", status=201, json=body, headers=headers)
    assert emil["password"] is None
    emil["password"] = known["password"]
    assert await api.refusal("POST", f"/tenants/{bob}/members", 409, json=body, headers=headers) == ("name_taken", "email")
    path = f"/tenants/{bob}/members/{emil['member_id']}"
    assert (await api.call("PATCH", path, json={"role": "developer"}, headers=headers))["role"] == "developer"
    listed = (await api.call("GET", f"/tenants/{bob}/members", headers=headers))["data"]
    assert [(row["email"], row["role"]) for row in listed] == [(DORA, "manager"), ("emil@example.com", "developer")]
    assert set(await api.call("DELETE", path, headers=headers)) == MEMBERSHIP_FIELDS
    assert await api.refusal("DELETE", path, 404, headers=headers) == ("not_found", "member_id")
    emils = await with_own_password(api, emil)
    assert (await api.refusal("GET", "/tenants", 403, headers=emils))[0] == "role_not_allowed"
    assert await api.call("GET", "/me", headers=emils) == {
        "kind": "member",
        "id": emil["member_id"],
        "name": "emil@example.com",
        "role": "member",
        "memberships": [],
    }


async def test_a_member_is_listed_with_its_memberships(api: ApiApp, bob: str) -> None:
    invited = await api.call("POST", f"/tenants/{bob}/members", status=201, json={"email": DORA, "role": "manager"})
    member = await api.call("GET", f"/members/{invited['member_id']}")

    assert (member["role"], member["memberships"]) == ("member", [{"tenant_id": bob, "role": "manager"}])
    assert member in (await api.call("GET", "/members"))["data"]


async def test_a_member_of_two_tenants_has_the_role_of_each(api: ApiApp, bob: str) -> None:
    other = (await api.call("POST", "/tenants", status=201, json={"name": "emil"}))["id"]
    await api.call("POST", "/tenants", status=201, json={"name": "charlie"})
    made = await api.call("POST", f"/tenants/{bob}/members", status=201, json={"email": DORA, "role": "developer"})
    await api.call("POST", f"/tenants/{other}/members", status=201, json={"email": DORA, "role": "viewer"})
    headers = await with_own_password(api, made)

    assert [row["id"] for row in (await api.call("GET", "/tenants", headers=headers))["data"]] == [bob, other]
    key = await api.call("POST", f"/tenants/{bob}/keys", status=201, json={"name": "k"}, headers=headers)
    assert key["scopes"] == ["inference"]
    assert (await api.refusal("POST", f"/tenants/{other}/keys", 403, json={"name": "k"}, headers=headers))[
        0
    ] == "role_not_allowed"
    theirs = await api.call("POST", f"/tenants/{other}/keys", status=201, json={"name": "k"})
    assert (await api.call("GET", f"/keys/{theirs['id']}", headers=headers))["id"] == theirs["id"]
    assert (await api.refusal("DELETE", f"/keys/{theirs['id']}", 403, headers=headers))[0] == "role_not_allowed"


async def test_filtering_by_another_tenant_returns_the_same_as_by_an_unknown_one(api: ApiApp, bob: str) -> None:
    other = (await api.call("POST", "/tenants", status=201, json={"name": "charlie"}))["id"]
    made = await api.call("POST", f"/tenants/{bob}/members", status=201, json={"email": DORA, "role": "manager"})
    headers = await with_own_password(api, made)
    for path in ("/ledger", "/requests", "/usage", "/costs"):
        answers = [await api.call("GET", path, params={"tenant_id": each}, headers=headers) for each in (other, "tn_nothing")]
        assert answers[0] == answers[1] == {"data": [], "has_more": False, "next_cursor": None}


async def test_a_key_is_rotated_with_a_grace_period(api: ApiApp, bob: str) -> None:
    old = await api.call("POST", f"/tenants/{bob}/keys", status=201, json={"name": "k", "scopes": ["inference", "usage"]})
    fresh = await api.call("POST", f"/keys/{old['id']}/rotate", json={"grace_s": 600})

    for key in (old, fresh):
        answer = await api.client.get("/v1/models", headers={"authorization": f"Bearer {key['key']}"})
        assert answer.status_code == 200
    assert (await api.call("GET", f"/keys/{old['id']}"))["replaced_by"] == fresh["id"]
    assert fresh["scopes"] == ["inference", "usage"]
    for wrong in (-1, 10**9, "600"):
        assert await api.refusal("POST", f"/keys/{fresh['id']}/rotate", 400, json={"grace_s": wrong}) == (
            "invalid_value",
            "grace_s",
        )
    assert await api.refusal("POST", f"/keys/{fresh['id']}/rotate", 400, json={"grace": 1}) == ("unknown_parameter", "grace")


async def test_a_tenant_is_created_with_every_setting(api: ApiApp) -> None:
    settings = {
        "name": "dora",
        "model_limits": {"m": {"tokens_per_minute": 5}},
        "limit_mode": "shadow",
        "cut_at_budget": True,
        "currency": "USD",
        "billing": {"name": "Dora AG", "address": "Gasse 1\n8000 Zürich"},
        "alert_percents": [50, 100],
    }
    made = await api.call("POST", "/tenants", status=201, json=settings)

    limits = made.pop("model_limits")
    assert {name: made[name] for name in settings if name != "model_limits"} == {
        name: value for name, value in settings.items() if name != "model_limits"
    }
    assert {name: value for name, value in limits["m"].items() if value is not None} == {"tokens_per_minute": 5}
    cleared = await api.call(
        "PATCH",
        f"/tenants/{made['id']}",
        json={"model_limits": None, "currency": None, "billing": None, "alert_percents": None},
    )
    assert [cleared[name] for name in ("model_limits", "currency", "billing", "alert_percents")] == [{}, None, None, None]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model_limits": {"m": {"tokens_per_minute": -1}}}, "model_limits.m.tokens_per_minute"),
        ({"model_limits": {"m": {"tokens_per_minute": 10**16}}}, "model_limits.m.tokens_per_minute"),
        ({"limits": {"monthly_budget": 10**16}}, "limits.monthly_budget"),
        ({"billing": {"street": "x"}}, "billing.street"),
        ({"alert_percents": [0]}, "alert_percents"),
        ({"currency": "euro"}, "currency"),
        ({"limit_mode": "off"}, "limit_mode"),
    ],
    ids=str,
)
async def test_an_invalid_field_of_a_tenant_is_named(api: ApiApp, bob: str, body: dict[str, Any], param: str) -> None:
    error = (await api.call("PATCH", f"/tenants/{bob}", status=400, json=body))["error"]

    assert error["param"] == param
    assert param in error["message"]


async def test_a_tier_can_be_changed(api: ApiApp) -> None:
    assert (await api.call("PATCH", "/tiers/batch", json={"admission_wait_ms": 2500}))["admission_wait_ms"] == 2500
    tiers = (await api.call("GET", "/tiers"))["data"]
    assert [(tier["name"], tier["admission_wait_ms"]) for tier in tiers] == [
        ("interactive", 0),
        ("standard", 0),
        ("batch", 2500),
    ]
    assert await api.refusal("PATCH", "/tiers/batch", 400, json={"admission_wait_ms": 60_001}) == (
        "invalid_value",
        "admission_wait_ms",
    )
    assert (await api.refusal("PATCH", "/tiers/gold", 404, json={"admission_wait_ms": 1}))[0] == "not_found"


async def test_limits_of_a_model_are_set_and_removed(api: ApiApp) -> None:
    path = "/model-limits/org/large"
    made = await api.call("PUT", path, json={"limits": {"tokens_per_minute": 7}, "limit_mode": "shadow"})

    assert (made["model"], made["limits"]["tokens_per_minute"], made["limit_mode"]) == ("org/large", 7, "shadow")
    assert (await api.call("GET", "/model-limits"))["data"] == [made]
    assert await api.refusal("PUT", path, 400, json={"limits": {"tokens_per_minute": -7}}) == (
        "invalid_value",
        "limits.tokens_per_minute",
    )
    assert await api.call("DELETE", path) == made
    assert (await api.refusal("DELETE", path, 404))[0] == "not_found"


async def test_short_lists_are_paged_like_all_lists(api: ApiApp, bob: str) -> None:
    for model in ("b", "a", "c"):
        await api.call("PUT", f"/model-limits/{model}", json={"limits": {"tokens_per_minute": 7}})
    for month in ("2026-12", "2026-11"):
        body = {"first_month": month, "monthly_micros": 1}
        await api.call("POST", f"/tenants/{bob}/allowances", status=201, json=body)
    for path, name, names in (
        ("/tiers", "name", ["interactive", "standard", "batch"]),
        ("/model-limits", "model", ["a", "b", "c"]),
        (f"/tenants/{bob}/allowances", "first_month", ["2026-11", "2026-12"]),
    ):
        whole = await api.call("GET", path)
        first = await api.call("GET", path, params={"limit": 1})
        rest = await api.call("GET", path, params={"cursor": first["next_cursor"]})

        assert [row[name] for row in whole["data"]] == names
        assert (first["has_more"], rest["has_more"], rest["next_cursor"]) == (True, False, None)
        assert [*first["data"], *rest["data"]] == whole["data"]
        assert await api.refusal("GET", f"{path}?limit=0", 400) == ("invalid_value", "limit")


async def test_the_number_of_queries_of_a_list_does_not_depend_on_its_length(api: ApiApp, bob: str) -> None:
    paths = ("/members", f"/tenants/{bob}/members", "/tenants", f"/tenants/{bob}/keys", "/tiers", "/model-limits")
    counts: dict[str, list[int]] = {path: [] for path in paths}
    for many in (1, 5):
        for number in range(many):
            email = f"m{many}-{number}@example.com"
            await api.call("POST", f"/tenants/{bob}/members", status=201, json={"email": email, "role": "viewer"})
            await api.call("POST", "/tenants", status=201, json={"name": email})
            await api.call("POST", f"/tenants/{bob}/keys", status=201, json={"name": email})
        for path in paths:
            await api.call("GET", path)  # fills caches
            with record_statements() as statements:
                await api.call("GET", path)
            counts[path].append(len(statements))

    assert {path: found for path, found in counts.items() if not found[0] == found[1] <= 4} == {}
