"""The dry-run limit check returns what a real request would get, reserves nothing, and requires permission."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.tenancy.principals import Principal
from tests.support.api_app import ApiApp
from tests.support.case_ids import case_id
from tests.support.cast import OWNER
from tests.support.factories import admission_request


@pytest.fixture
def api(api: ApiApp) -> Iterator[ApiApp]:
    """The application with the model `demo`, which has no engine."""
    api.services.models._models["demo"] = cast(Any, SimpleNamespace(name="demo", max_model_len=1024, default_max_tokens=None))
    yield api
    api.services.models._models.clear()


async def tenant(api: ApiApp, name: str = "bob", **fields: Any) -> str:
    made: dict[str, Any] = await api.call("POST", "/tenants", status=201, json={"name": name, **fields})
    return str(made["id"])


async def check(api: ApiApp, tenant_id: str, *, status: int = 200, **fields: Any) -> Any:
    body = {"tenant_id": tenant_id, "model": "demo", "prompt_tokens": 10, "max_tokens": 10, **fields}
    return await api.call("POST", "/limits/check", status=status, json=body)


async def admit(api: ApiApp, tenant_id: str, key_id: str, tokens: int) -> None:
    services = api.services
    principal = Principal(
        tenant=await services.tenants.get(tenant_id, access=OWNER),
        key=await services.keys.get(key_id, access=OWNER),
    )
    policy = await services.model_policies.find("demo")
    request = admission_request(principal, tokens, policy=policy)
    await services.admission.admit(request)


async def test_every_limit_reports_its_decision_and_reserves_nothing(api: ApiApp) -> None:
    bob = await tenant(
        api,
        limits={"tokens_per_minute": 100, "concurrent_requests": 2},
        model_limits={"demo": {"requests_per_minute": 5}},
    )
    key = await api.call("POST", f"/tenants/{bob}/keys", status=201, json={"name": "k", "limits": {"tokens_per_day": 1000}})
    await api.call("PUT", "/model-limits/demo", json={"limits": {"tokens_per_minute": 50}})
    answers = [await check(api, bob, key_id=key["id"]) for _ in range(20)]

    assert answers[0] == answers[-1]
    decisions = {(d["scope"], d["model"], d["kind"]): d for d in answers[0]["decisions"]}
    assert set(decisions) == {
        ("tenant", None, "tokens"),
        ("tenant", None, "concurrency"),
        ("key", None, "tokens_per_day"),
        ("model", "demo", "tokens"),
        ("tenant", "demo", "requests"),
    }
    assert decisions["model", "demo", "tokens"] == {
        "scope": "model", "model": "demo", "kind": "tokens", "mode": "enforce", "allowed": True,
        "need": 20, "limit": 50, "level": 50, "wait_s": 0.0, "held": False, "estimated": False, "ahead": 0,
    }  # fmt: skip
    assert answers[0]["reserved_tokens"] == 20


async def test_the_need_of_a_budget_is_that_of_the_service_tier(api: ApiApp) -> None:
    price = {"model": "demo", "prompt": 1_000_000, "completion": 1_000_000, "batch_percent": 40}
    await api.call("POST", "/prices", status=201, json=price)
    bob = await tenant(api, limits={"monthly_budget": 1000})
    answers = [await check(api, bob, service_tier=tier) for tier in (None, "auto", "default", "flex")]

    assert [answer["decisions"][0]["need"] for answer in answers] == [20_000_000] * 3 + [8_000_000]
    error = (await check(api, bob, status=400, service_tier="priority"))["error"]
    assert (error["param"], error["code"]) == ("service_tier", "invalid_value")
    assert "auto, default, flex" in error["message"]


async def test_a_refusal_has_the_error_of_the_real_request(api: ApiApp) -> None:
    bob = await tenant(api, limits={"tokens_per_minute": 60})
    answer = await check(api, bob, prompt_tokens=100)

    assert (answer["allowed"], answer["would_wait"], answer["wait_s"]) == (False, False, None)
    assert (answer["error"]["status"], answer["error"]["code"]) == (429, "request_exceeds_limit")


async def test_with_an_admission_wait_of_the_tier_a_request_would_wait(api: ApiApp) -> None:
    bob = await tenant(api, limits={"requests_per_minute": 60, "concurrent_requests": 1})
    key = await api.call("POST", f"/tenants/{bob}/keys", status=201, json={"name": "k"})
    await admit(api, bob, key["id"], 1)
    impatient = await check(api, bob)
    await api.call("PATCH", "/tiers/standard", json={"admission_wait_ms": 2000})
    patient = await check(api, bob)
    await api.call("PATCH", f"/tenants/{bob}", json={"suspended": True})
    suspended = await check(api, bob)

    assert (impatient["would_wait"], impatient["error"]["retry_after_s"]) == (False, 1.0)
    assert (patient["allowed"], patient["would_wait"], patient["error"]) == (False, True, None)
    assert (patient["wait_s"], patient["admission_wait_ms"]) == (1.0, 2000)
    assert (suspended["would_wait"], suspended["wait_s"]) == (False, None)


async def test_a_limit_in_shadow_mode_denies_without_refusing(api: ApiApp) -> None:
    bob = await tenant(api, limits={"tokens_per_minute": 5}, limit_mode="shadow")
    answer = await check(api, bob)

    assert answer["decisions"][0]["allowed"] is False
    assert answer["decisions"][0]["mode"] == "shadow"
    assert (answer["allowed"], answer["would_wait"], answer["error"]) == (True, False, None)


async def test_an_unknown_model_is_reported(api: ApiApp) -> None:
    answer = await check(api, await tenant(api, limits={"tokens_per_minute": 5}), model="other")
    assert answer["error"]["code"] == "model_not_found"
    assert (answer["allowed"], answer["decisions"], answer["wait_s"], answer["reserved_tokens"]) == (False, [], None, 0)


@pytest.mark.parametrize("changes", [{}, {"allowed_models": ["demo"]}, {"suspended": True}], ids=case_id)
async def test_unknown_model_names_reach_neither_limits_nor_prices(
    api: ApiApp, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = await tenant(api)
    await api.call("PATCH", f"/tenants/{bob}", json=changes)
    for part, question in ((api.services.admission, "dry_run"), (api.services.prices, "current")):
        monkeypatch.setattr(part, question, None)
    for number in range(3):
        assert (await check(api, bob, model=f"made-up-{number}"))["error"]


async def test_each_refusal_has_status_code_and_message_of_the_real_request(api: ApiApp) -> None:
    bob = await tenant(api)
    key, reader = [
        await api.call("POST", f"/tenants/{bob}/keys", status=201, json={"name": "k", "scopes": [scope]})
        for scope in ("inference", "usage")
    ]

    async def refusal(**fields: Any) -> tuple[int, str, str]:
        error = (await check(api, bob, **fields))["error"]
        return error["status"], error["code"], error["message"]

    assert await refusal(key_id=reader["id"]) == (403, "scope_not_allowed", "this key lacks the scope inference")
    assert (await refusal(prompt_tokens=5000))[:2] == (400, "context_length_exceeded")
    assert (await refusal(prompt_tokens=1020, max_tokens=100))[:2] == (400, "context_length_exceeded")
    assert (await check(api, bob, key_id=key["id"], prompt_tokens=1020, max_tokens=4))["allowed"]

    await api.call("PATCH", f"/tenants/{bob}", json={"allowed_models": ["other"]})
    assert (await refusal())[:2] == (403, "model_not_allowed")
    await api.call("PATCH", f"/tenants/{bob}", json={"allowed_models": None, "suspended": True})
    assert await refusal(key_id=key["id"]) == (403, "tenant_suspended", "the tenant of this key is suspended")
    await api.call("DELETE", f"/keys/{key['id']}")
    assert await refusal(key_id=key["id"]) == (401, "invalid_api_key", "the API key is not known or was revoked")
    await api.call("DELETE", f"/tenants/{bob}")
    assert await refusal() == (403, "tenant_suspended", "the tenant of this key is archived")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("prompt_tokens", -1), ("max_tokens", 0), ("n", 0), ("prompt_tokens", 10**16), ("n", 1000), ("model", "")),
        *((name, "a\0b") for name in ("tenant_id", "key_id", "model")),
    ],
)
async def test_an_invalid_value_is_refused_by_name(api: ApiApp, field: str, value: object) -> None:
    body = {"tenant_id": await tenant(api), "model": "demo", "prompt_tokens": 10, field: value}
    error = (await api.call("POST", "/limits/check", status=400, json=body))["error"]

    assert (error["code"], error["param"]) == ("invalid_value", field)


async def test_a_key_of_another_tenant_is_not_found(api: ApiApp) -> None:
    bob, charlie = await tenant(api), await tenant(api, "charlie")
    key = await api.call("POST", f"/tenants/{charlie}/keys", status=201, json={"name": "k"})

    assert (await check(api, bob, status=404, key_id=key["id"]))["error"]["param"] == "key_id"
    assert (await check(api, "tn_nobody", status=404))["error"]["code"] == "not_found"
