"""Every path of the administrators' API checks credentials and query parameters before its handler runs."""

from __future__ import annotations

import pytest

from tests.support.api_app import ApiApp


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/me", "/system", "/tenants/tn_x", "/keys/key_x", "/requests/req_x", "/invoices/inv_x")),
        ("POST", "/tenants"),
        ("PATCH", "/tenants/tn_x"),
        ("DELETE", "/requests/req_x"),
    ],
)
async def test_operations_without_query_parameters_refuse_them_by_name(api: ApiApp, method: str, path: str) -> None:
    error = (await api.call(method, f"{path}?expand=keys", status=400))["error"]

    assert (error["code"], error["param"]) == ("unknown_parameter", "expand")


async def test_a_mistyped_query_parameter_is_refused_with_the_closest_one(api: ApiApp) -> None:
    error = (await api.call("GET", "/ledger?tenantid=x", status=400))["error"]

    assert error["message"] == "unknown parameter: tenantid; did you mean 'tenant_id'?"


async def test_a_credential_of_the_other_api_is_refused_with_a_hint(api: ApiApp) -> None:
    tenant = await api.call("POST", "/tenants", status=201, json={"name": "Bob"})
    key = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "k"})

    async def refusal_message(path: str, secret: str) -> str:
        answer = await api.client.get(path, headers={"authorization": f"Bearer {secret}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        return str(answer.json()["error"]["message"])

    assert "administrator token, gha_" in await refusal_message("/admin/v1/me", key["key"])
    assert "send an API key, gh_" in await refusal_message("/v1/models", "gha_first")


async def test_credentials_are_checked_before_parameters(api: ApiApp) -> None:
    answer = await api.client.get("/admin/v1/system?expand=keys", headers={"authorization": "Bearer gha_unknown"})

    assert answer.status_code == 401


@pytest.mark.parametrize("path", ["/v1/models", "/admin/v1/tenants"])
@pytest.mark.parametrize("authorization", ["", "Bearer gha_unknown"])
async def test_a_refused_credential_is_told_the_scheme(api: ApiApp, path: str, authorization: str) -> None:
    answer = await api.client.get(path, headers={"authorization": authorization})
    assert (answer.status_code, answer.headers.get("www-authenticate")) == (401, 'Bearer realm="gatehouse"')


async def test_other_refusals_ask_for_no_credential(api: ApiApp) -> None:
    answer = await api.client.get("/admin/v1/tenants?expand=keys")
    assert (answer.status_code, answer.headers.get("www-authenticate")) == (400, None)
