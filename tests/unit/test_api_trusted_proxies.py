"""Behind a proxy: which forwarded addresses are trusted, and their effect on keys, the audit log and local access."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from appliance.api.http_server import server_config
from appliance.base.settings import SettingsError, load_settings
from appliance.tenancy.browser_rules import SECURE_COOKIE
from tests.support.api_app import ApiApp

PROXY, FRONT_PROXY = "10.0.0.5", "10.0.1.9"
OFFICE, ELSEWHERE = "192.0.2.7", "203.0.113.4"


def peer_of(api: ApiApp, peer: str, trusted: str | None) -> httpx.AsyncClient:
    """Return a client at the address `peer` of a server with this setting."""
    settings = load_settings(options={"data_dir": Path("/nowhere"), "trusted_proxies": trusted}, environ={})
    config = server_config(cast(Any, api.app), settings.trusted_proxies)
    config.load()
    transport = httpx.ASGITransport(app=cast(Any, config.loaded_app), client=(peer, 40000))
    return httpx.AsyncClient(transport=transport, base_url="http://appliance.test")


async def office_key_headers(api: ApiApp) -> dict[str, str]:
    """Return headers with a key that is valid only from OFFICE."""
    tenant = await api.call("POST", "/tenants", status=201, json={"name": "acme"})
    body = {"name": "office", "allowed_networks": [OFFICE]}
    made = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json=body)
    return {"authorization": f"Bearer {made['key']}"}


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded_for", "admitted"),
    [
        pytest.param(None, OFFICE, None, True, id="no proxy"),
        pytest.param(None, PROXY, OFFICE, False, id="no peer is trusted by default"),
        pytest.param(None, "127.0.0.1", OFFICE, False, id="loopback is not trusted by default"),
        pytest.param(PROXY, ELSEWHERE, OFFICE, False, id="a peer that is not a proxy"),
        pytest.param(PROXY, PROXY, OFFICE, True, id="a trusted address"),
        pytest.param(PROXY, PROXY, f"{OFFICE}:51000", True, id="with the sender's port"),
        pytest.param(PROXY, PROXY, ELSEWHERE, False, id="a proxy that names another sender"),
        pytest.param(PROXY, PROXY, None, False, id="a proxy that names no sender"),
        pytest.param("10.0.0.0/24", PROXY, OFFICE, True, id="a trusted network"),
        pytest.param("10.0.0.0/24", f"::ffff:{PROXY}", OFFICE, True, id="an IPv4 proxy on an IPv6 socket"),
        pytest.param("2001:db8::/64", "2001:db8::1", OFFICE, True, id="an IPv6 proxy"),
        pytest.param(f"{PROXY}, {FRONT_PROXY}", PROXY, f"{OFFICE}, {FRONT_PROXY}", True, id="a chain of proxies"),
        pytest.param(PROXY, PROXY, f"{OFFICE}, {FRONT_PROXY}", False, id="a chain with an untrusted proxy"),
        pytest.param(PROXY, PROXY, f"{OFFICE}, {ELSEWHERE}", False, id="a forged left-most entry"),
        pytest.param(PROXY, PROXY, "who knows", False, id="not an address"),
    ],
)
async def test_allowed_networks_apply_to_the_address_from_a_trusted_proxy(
    api: ApiApp, trusted: str | None, peer: str, forwarded_for: str | None, admitted: bool
) -> None:
    headers = await office_key_headers(api)
    if forwarded_for is not None:
        headers["x-forwarded-for"] = forwarded_for

    async with peer_of(api, peer, trusted) as client:
        answer = await client.get("/v1/models", headers=headers)

    assert answer.status_code == (200 if admitted else 403), answer.text


@pytest.mark.parametrize(("trusted", "expected"), [(None, PROXY), (PROXY, OFFICE)])
async def test_the_audit_log_has_the_address_from_a_trusted_proxy(api: ApiApp, trusted: str | None, expected: str) -> None:
    headers = {**await api.as_role("owner"), "x-forwarded-for": OFFICE}
    async with peer_of(api, PROXY, trusted) as client:
        made = await client.post("/admin/v1/tenants", json={"name": "acme"}, headers=headers)
    assert made.status_code == 201, made.text

    assert (await api.call("GET", "/audit"))["data"][0]["address"] == expected


@pytest.mark.parametrize(("trusted", "expected"), [(None, PROXY), (PROXY, OFFICE)])
async def test_a_sign_in_counts_for_the_address_from_a_trusted_proxy(api: ApiApp, trusted: str | None, expected: str) -> None:
    async with peer_of(api, PROXY, trusted) as client:
        form = {"email": "nobody@example.com", "password": "a password of tests"}
        refused = await client.post("/login", data=form, headers={"x-forwarded-for": OFFICE})
    assert refused.status_code == 401, refused.text

    assert (await api.call("GET", "/audit"))["data"][0]["address"] == expected


@pytest.mark.parametrize("trusted", [None, "127.0.0.1"])
@pytest.mark.parametrize("headers", [{"x-forwarded-for": "127.0.0.1"}, {"x-forwarded-for": ""}, {"x-forwarded-proto": "https"}])
async def test_a_forwarded_request_is_never_local(api: ApiApp, trusted: str | None, headers: dict[str, str]) -> None:
    async with peer_of(api, "127.0.0.1", trusted) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/metrics", headers=headers)).status_code == 401


@pytest.mark.parametrize(("trusted", "status"), [(None, 401), (PROXY, 200)])
async def test_only_a_trusted_proxy_can_state_https(api: ApiApp, trusted: str | None, status: int) -> None:
    member = await api.services.members.create("alice@example.com", "a password of tests", "owner")
    token, _ = await api.services.sessions.open(member.id, "a browser", OFFICE, method="password")
    headers = {"cookie": f"{SECURE_COOKIE}={token}", "x-forwarded-for": OFFICE, "x-forwarded-proto": "https"}

    async with peer_of(api, PROXY, trusted) as client:
        assert (await client.get("/admin/v1/sessions", headers=headers)).status_code == status


def test_trusted_proxies_can_be_set_by_variable_and_file(tmp_path: Path) -> None:
    def found(**others: Any) -> list[str]:
        settings = load_settings(options={"data_dir": tmp_path}, environ=others)
        return [str(network) for network in settings.trusted_proxies]

    assert found() == []
    assert found(GATEHOUSE_TRUSTED_PROXIES="127.0.0.1, 10.0.0.0/24") == ["127.0.0.1/32", "10.0.0.0/24"]
    (tmp_path / "gatehouse.toml").write_text("trusted_proxies = ['::1']")
    assert found() == ["::1/128"]


@pytest.mark.parametrize("value", ["*", "proxy.example.com", "10.0.0.5/24", "", "0.0.0.0/0", "::/0", "10.0.0.5,,10.0.0.6"])
def test_an_invalid_list_of_trusted_proxies_stops_the_start(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError, match=r"GATEHOUSE_TRUSTED_PROXIES must (be a list of networks|list only proxies)"):
        load_settings(options={"data_dir": tmp_path}, environ={"GATEHOUSE_TRUSTED_PROXIES": value})
