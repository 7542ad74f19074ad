"""Errors over HTTP: status, code and shape of each, and the exception that the official client raises."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.conformance.conftest import MODEL
from tests.support.polling import block_until
from tests.support.server import Server

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


async def error_of_chat(server: Server, secret: str | None, **options: Any) -> openai.APIStatusError:
    """Send a chat request with these fields and return the exception of the official client."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 2, **options})
    return caught.value


def request(server: Server, method: str, path: str, **options: Any) -> httpx.Response:
    """Send a request with the first key and return the response."""
    headers = {"authorization": f"Bearer {server.api_key}", **options.pop("headers", {})}
    return httpx.request(method, server.url + path, headers=headers, timeout=30, **options)


def assert_error(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Assert status, code and shape of an error response; return its fields."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    assert answer.headers["x-request-id"].startswith("req_")
    return error


@pytest.mark.parametrize("secret", ["gh_aaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaa", "nonsense", "gh_é"])
async def test_an_invalid_key_is_refused_with_invalid_api_key(server: Server, secret: str) -> None:
    if not secret.isascii():
        assert_error(
            request(server, "POST", CHAT, headers={"authorization": f"Bearer {secret}".encode()}), 401, "invalid_api_key"
        )
        return
    error = await error_of_chat(server, secret)

    assert isinstance(error, openai.AuthenticationError)
    assert error.code == "invalid_api_key"
    assert error.type == "authentication_error"
    assert error.request_id is not None


async def test_a_missing_key_is_refused_with_invalid_api_key(server: Server) -> None:
    assert_error(httpx.post(server.url + CHAT, json={}), 401, "invalid_api_key")  # noqa: ASYNC210


async def test_an_expired_key_is_refused(server: Server) -> None:
    tenant_id, secret = server.new_key()
    (key,) = server.admin("GET", f"/tenants/{tenant_id}/keys")["data"]
    server.admin("POST", f"/keys/{key['id']}/rotate", json={"grace_s": 1})

    def ask() -> httpx.Response:
        return request(server, "GET", "/v1/models", headers={"authorization": f"Bearer {secret}"})

    block_until(lambda: ask().status_code != 200, server.log)
    assert_error(ask(), 401, "expired_api_key")


async def test_a_revoked_key_is_refused_immediately(server: Server) -> None:
    tenant_id, secret = server.new_key()
    (key,) = server.admin("GET", f"/tenants/{tenant_id}/keys")["data"]
    assert request(server, "GET", "/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code == 200
    server.admin("DELETE", f"/keys/{key['id']}")

    assert (await error_of_chat(server, secret)).code == "invalid_api_key"


async def test_a_suspended_tenant_is_refused(server: Server) -> None:
    tenant_id, secret = server.new_key()
    server.admin("PATCH", f"/tenants/{tenant_id}", json={"suspended": True})
    error = await error_of_chat(server, secret)

    assert isinstance(error, openai.PermissionDeniedError)
    assert error.code == "tenant_suspended"


async def test_a_model_that_the_key_may_not_use_is_refused(server: Server) -> None:
    _, secret = server.new_key(allowed_models=["another"])
    error = await error_of_chat(server, secret)

    assert isinstance(error, openai.PermissionDeniedError)
    assert error.code == "model_not_allowed"
    assert error.param == "model"


async def test_a_client_address_outside_the_allowed_networks_is_refused(server: Server) -> None:
    _, secret = server.new_key(allowed_networks=["203.0.113.0/24"])

    assert (await error_of_chat(server, secret)).code == "ip_not_allowed"


async def test_an_unknown_model_is_refused_as_not_found(server: Server) -> None:
    error = await error_of_chat(server, server.api_key, model="nobody")

    assert isinstance(error, openai.NotFoundError)
    assert error.code == "model_not_found"


async def test_a_prompt_beyond_the_context_is_refused(server: Server) -> None:
    error = await error_of_chat(server, server.api_key, messages=[{"role": "user", "content": "fox " * 3000}])

    assert isinstance(error, openai.BadRequestError)
    assert error.code == "context_length_exceeded"


async def test_max_tokens_beyond_the_context_is_refused(server: Server) -> None:
    error = await error_of_chat(server, server.api_key, max_tokens=None, max_completion_tokens=5000)

    assert error.code == "context_length_exceeded"
    assert error.param == "max_completion_tokens"
    assert "this model's maximum context length is 1024 tokens" in error.message


@pytest.mark.parametrize("words", [1100, 3000, 20_000])
async def test_the_message_about_a_long_prompt_is_recognised_by_client_libraries(server: Server, words: int) -> None:
    # By these words LangChain raises ContextOverflowError, and LiteLLM ContextWindowExceededError and falls back.
    error = await error_of_chat(server, server.api_key, messages=[{"role": "user", "content": "fox " * words}])

    assert "prompt is too long" in error.message
    assert "this model's maximum context length is 1024 tokens" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type"),
    ],
    ids=str,
)
def test_unsupported_fields_are_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = request(server, "POST", CHAT, json={"model": MODEL, "messages": HELLO, **fields})

    assert assert_error(answer, 400, "unsupported_parameter")["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["word"] * 2000}, "bad_words"),
        ({"typical_p": 0}, "typical_p"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "x" * 300_000}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    ids=str,
)
def test_values_outside_their_limits_are_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = request(server, "POST", CHAT, json={"model": MODEL, "messages": HELLO, **fields})

    error = assert_error(answer, 400, "invalid_value")
    assert error["param"] == param
    assert re.search(rf"\b{re.escape(param)}\b", error["message"]), error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temprature": 1}, "temprature"), ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage")],
    ids=str,
)
def test_unknown_fields_are_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = request(server, "POST", CHAT, json={"model": MODEL, "messages": HELLO, **fields})

    assert assert_error(answer, 400, "unknown_parameter")["param"] == param


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"\xff\xfe", b"null", b"[" * 100_000], ids=repr)
def test_a_malformed_body_is_refused_as_an_invalid_value(server: Server, body: bytes) -> None:
    assert_error(request(server, "POST", CHAT, content=body), 400, "invalid_value")


def test_a_missing_field_is_refused_by_name(server: Server) -> None:
    assert assert_error(request(server, "POST", CHAT, json={"model": MODEL}), 400, "invalid_value")["param"] == "messages"


def test_a_body_over_the_size_limit_is_refused(server: Server) -> None:
    assert_error(request(server, "POST", CHAT, content=b" " * (10 * 1024 * 1024 + 1)), 413, "request_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)],
)
def test_unknown_paths_and_methods_have_the_error_shape(server: Server, method: str, path: str, status: int) -> None:
    for accept in ("*/*", "text/html,*/*;q=0.8"):  # browsers get the same response as API clients
        answer = request(server, method, path, headers={"accept": accept})
        assert_error(answer, status, "not_found" if status == 404 else "method_not_allowed")


async def test_a_request_over_the_requests_per_minute_is_refused(server: Server) -> None:
    _, secret = server.new_key(tenant={"limits": {"requests_per_minute": 1}})
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0) as client:
        await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    error = await error_of_chat(server, secret)

    assert isinstance(error, openai.RateLimitError)
    assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
    assert 1 <= int(error.response.headers["retry-after"]) <= 60
    assert error.response.headers["x-ratelimit-limit-requests"] == "1"
    assert error.response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_request_larger_than_the_tokens_per_minute_is_refused_without_retry(server: Server) -> None:
    _, secret = server.new_key(limits={"tokens_per_minute": 5})
    error = await error_of_chat(server, secret, max_tokens=100)

    assert isinstance(error, openai.RateLimitError)
    assert (error.code, error.type) == ("request_exceeds_limit", "tokens")
    assert error.response.headers["x-should-retry"] == "false"


async def test_a_request_over_the_concurrent_requests_is_refused(server: Server) -> None:
    _, secret = server.new_key(limits={"concurrent_requests": 1})
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        error = await error_of_chat(server, secret)
        await stream.close()

    assert error.code == "rate_limit_exceeded"
    assert 1 <= int(error.response.headers["retry-after"]) <= 60, "an estimate of when the stream ends"
    assert "about" in error.message


async def test_a_request_over_the_monthly_budget_is_refused(server: Server) -> None:
    server.admin("POST", "/prices", json={"model": MODEL, "prompt": 10**9, "completion": 10**9})
    _, secret = server.new_key(tenant={"limits": {"monthly_budget": 1}})
    error = await error_of_chat(server, secret)

    assert (error.code, error.type) == ("budget_exceeded", "insufficient_quota")
    assert error.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("limits", [{"tokens_per_minute": 5}, {"requests_per_minute": 0}, {"concurrent_requests": 0}])
async def test_a_request_that_can_never_be_admitted_is_not_retried_by_the_client(
    server: Server, limits: dict[str, int]
) -> None:
    _, secret = server.new_key(limits=limits)
    sent: list[Any] = []

    async def record(sent_request: Any) -> None:
        sent.append(sent_request)

    http_client = openai.DefaultAsyncHttpxClient(event_hooks={"request": [record]})
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=secret, http_client=http_client) as client:
        assert client.max_retries > 0
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=100)
    assert len(sent) == 1


async def test_refused_requests_are_not_in_the_ledger(server: Server) -> None:
    tenant_id, secret = server.new_key(limits={"tokens_per_minute": 5})
    await error_of_chat(server, secret, max_tokens=100)
    await error_of_chat(server, secret, model="nobody")
    await error_of_chat(server, secret, temperature=9)

    assert server.admin("GET", "/ledger", params={"tenant_id": tenant_id})["data"] == []


async def test_listing_models_is_never_rate_limited(server: Server) -> None:
    _, secret = server.new_key(tenant={"limits": {"requests_per_minute": 0}})

    assert request(server, "GET", "/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code == 200
    assert (await error_of_chat(server, secret)).code == "request_exceeds_limit"


def test_a_model_that_a_key_may_not_use_is_hidden_from_it(server: Server) -> None:
    _, secret = server.new_key(allowed_models=["another"])
    headers = {"authorization": f"Bearer {secret}"}

    assert request(server, "GET", "/v1/models", headers=headers).json()["data"] == []
    assert_error(request(server, "GET", f"/v1/models/{MODEL}", headers=headers), 404, "model_not_found")


async def test_a_request_header_over_the_size_limit_is_refused(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: a\r\nx: " + b"x" * 65_520)
    await writer.drain()

    assert (await reader.readline()).startswith(b"HTTP/1.1 431")
    writer.close()
