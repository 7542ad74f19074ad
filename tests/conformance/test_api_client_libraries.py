"""Requests as client libraries send them, and errors that help their users.

The libraries are not installed; each case names the library whose request it copies.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.conformance.conftest import MODEL
from tests.support.server import Server

HELLO: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
PERSON = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}

REQUESTS_BY_LIBRARY: dict[str, dict[str, Any]] = {
    "Vercel AI SDK, settings of its OpenAI provider": {
        "messages": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2, "user": "u", "parallel_tool_calls": True, "store": True,
        "metadata": {"a": "b"}, "service_tier": "auto", "stop": ["zzz"], "seed": 3,
    },
    "openai for node, fields that are null": {
        "stop": None, "seed": None, "logit_bias": None, "response_format": None, "tools": None, "tool_choice": None,
        "user": None, "n": None, "stream_options": None, "reasoning_effort": None, "modalities": None,
        "prediction": None, "functions": None,
    },
    "our own answer sent back as history": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "jumps", "refusal": None, "annotations": [], "tool_calls": None, "audio": None},
            {"role": "user", "name": "bob", "content": "over"},
        ],
    },
    "openai for python, an answer of its method parse sent back": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": '{"ok": true}', "refusal": None, "tool_calls": None, "parsed": {"ok": True}},
            {"role": "user", "content": "over"},
        ],
    },
    "LiteLLM 1.106, an answer sent back": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "jumps", "function_call": None, "provider_specific_fields": {"refusal": None}},
            {"role": "user", "content": "over"},
        ],
    },
    "avante.nvim, an answer without reasoning sent back": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "jumps", "reasoning_content": ""},
            {"role": "user", "content": "over"},
        ],
    },
    "developer role": {"messages": [{"role": "developer", "content": "Be terse."}, *HELLO], "tools": [], "tool_choice": "none"},
    "lm-eval 0.4.9, local-chat-completions": {
        "messages": [{"role": "user", "content": "Hi", "type": "text"}],
        "max_tokens": 8, "temperature": 0, "stop": ["\n\n", "Q:"], "seed": 1234,
    },
    "vllm bench serve, openai-chat": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_tokens": None, "max_completion_tokens": 4, "ignore_eos": True, "temperature": 0.0, "repetition_penalty": 1.0,
    },
}  # fmt: skip


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {server.api_key}"}
    return httpx.post(server.url + path, headers=headers, json={"model": MODEL, **body}, timeout=60)


@pytest.mark.parametrize("name", REQUESTS_BY_LIBRARY)
@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_client_libraries_are_answered(server: Server, name: str, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = post(server, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, **REQUESTS_BY_LIBRARY[name], **options})

    assert answer.status_code == 200, answer.text
    assert '"completion_tokens"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n") is stream


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"json": PERSON}, r'\{.*"ok" ?: ?(true|false).*\}'),
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
    ],
    ids=str,
)
def test_structured_outputs_of_vllm_constrain_the_answer(server: Server, form: dict[str, Any], pattern: str) -> None:
    answer = post(server, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 300, "seed": 1, "structured_outputs": form})

    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["message"]["content"], re.DOTALL)


def test_a_message_with_reasoning_is_refused(server: Server) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "jumps", "reasoning_content": "It is a fox."}, *HELLO]
    answer = post(server, "/v1/chat/completions", {"messages": messages})

    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert answer.json()["error"]["param"] == "messages[1].reasoning_content"


def test_a_message_of_an_unsupported_type_is_refused(server: Server) -> None:
    answer = post(server, "/v1/chat/completions", {"messages": [{**HELLO[0], "type": "function_call_output"}]})

    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert answer.json()["error"]["param"] == "messages[0].type"


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "/v1/responses/resp_1", "/v1/completions", "/v1/embeddings"])
def test_a_planned_endpoint_says_so_and_names_the_one_that_exists(server: Server, path: str) -> None:
    answer = post(server, path, {"input": "Hi"})

    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "not_found"
    assert error["message"] == (
        f"{path} is planned for a later version; this version generates text at POST /v1/chat/completions only"
    )


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/images/generations", "/v1/vector_stores", "/v1/realtime/calls"])
def test_an_unsupported_endpoint_names_the_one_that_exists(server: Server, path: str) -> None:
    answer = post(server, path, {"input": "Hi"})

    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "not_found"
    assert error["message"] == f"{path} is not supported; this version generates text at POST /v1/chat/completions only"


@pytest.mark.parametrize("base", ["/v1/v1", "/v1/chat/completions", "/api/v1"])
def test_a_wrong_base_url_gets_the_right_one_as_advice(server: Server, base: str) -> None:
    answer = post(server, f"{base}/chat/completions", {"messages": HELLO})

    assert answer.status_code == 404
    assert f"no such path: POST {base}/chat/completions; use a base URL that ends in /v1" in answer.json()["error"]["message"]
