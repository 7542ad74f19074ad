"""Every field of every request body with odd values: a success or a typed error, never a server error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from appliance.api.admin.tenants import KeyPatch, NewKeyBody, NewTenantBody, TenantPatch
from appliance.api.admin.usage import NewPriceBody
from appliance.api.schemas import ChatCompletionRequest
from tests.conformance.conftest import MODEL
from tests.support.server import ADMIN_TOKEN, Server

ODD_VALUES: list[Any] = [
    None, True, 0, -1, 2**63, -(2**63), 2**64, 10**22, 1e308, 1e-320, -0.5, "", "x" * 2000, "\x00", "\ud800", "é漢😀",
    [], [1], [None], [[]], [2**63], [10**22], {}, {"a": 1}, {"1": "x"}, {str(10**22): 1}, {"type": "text"},
    "9999-12-31T23:59:59-14:00", ["10.0.0.0/99"], {"tokens_per_minute": 10**30},
    [{"role": "user", "content": [{"type": "text", "text": None}]}],
]  # fmt: skip


def bodies_with_odd_values(kind: type[msgspec.Struct], base: dict[str, Any]) -> Iterator[bytes]:
    for name in kind.__struct_fields__:
        for value in ODD_VALUES:
            yield json.dumps({**base, name: value}).encode("utf-8", "surrogatepass")


def assert_no_server_error(client: httpx.Client, method: str, path: str, body: bytes) -> None:
    answer = client.request(method, path, content=body)
    assert answer.status_code < 500, f"{method} {path} {body!r}: {answer.text}"
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_odd_values_in_a_chat_body_cause_no_server_error(server: Server) -> None:
    base = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.api_key}"}, timeout=60) as client:
        for body in bodies_with_odd_values(ChatCompletionRequest, base):
            assert_no_server_error(client, "POST", "/v1/chat/completions", body)


@pytest.mark.parametrize(
    ("kind", "method", "path", "base"),
    [
        (NewTenantBody, "POST", "/tenants", {"name": "odd"}),
        (TenantPatch, "PATCH", "/tenants/{tenant}", {}),
        (NewKeyBody, "POST", "/tenants/{tenant}/keys", {"name": "odd"}),
        (KeyPatch, "PATCH", "/keys/{key}", {}),
        (NewPriceBody, "POST", "/prices", {"model": "odd", "prompt": 1, "completion": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_odd_values_in_an_administration_body_cause_no_server_error(
    server: Server, kind: type[msgspec.Struct], method: str, path: str, base: dict[str, Any]
) -> None:
    tenant_id, _ = server.new_key()
    (key,) = server.admin("GET", f"/tenants/{tenant_id}/keys")["data"]
    address = "/admin/v1" + path.format(tenant=tenant_id, key=key["id"])
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {ADMIN_TOKEN}"}, timeout=60) as client:
        for body in bodies_with_odd_values(kind, base):
            assert_no_server_error(client, method, address, body)
