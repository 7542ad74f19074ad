"""Several answers and structured output with the official client; a fake engine repeats its prompt."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.conformance.conftest import MODEL
from tests.support.served_model import make_hollow_model
from tests.support.server import Server, running_server

HELLO: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
IMPOSSIBLE: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "impossible"}}}


@pytest.fixture(scope="module")
def repeating_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An appliance with a fake engine."""
    folder = tmp_path_factory.mktemp("repeating")
    with running_server(make_hollow_model(folder / MODEL), folder / "data", fake_engine_step_s=0.0) as running:
        yield running


@pytest.fixture
async def client(repeating_server: Server) -> AsyncIterator[AsyncOpenAI]:
    url = f"{repeating_server.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=repeating_server.api_key, max_retries=0, timeout=60) as opened:
        yield opened


async def test_n_answers_are_n_choices_billed_as_one_request(repeating_server: Server, client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=6, n=3, logprobs=True)
    answer = raw.parse()
    events = repeating_server.admin("GET", "/ledger", params={"request_id": raw.headers["x-request-id"]})["data"]

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[1].message.content != answer.choices[2].message.content
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert all(choice.logprobs and len(choice.logprobs.content or []) == 6 for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 18
    assert [(event["prompt_tokens"], event["completion_tokens"]) for event in events] == [(answer.usage.prompt_tokens, 18)]


async def test_a_stream_of_two_answers_has_the_content_of_the_unstreamed_response(client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "n": 2}
    whole = await client.chat.completions.create(**fields)
    texts = ["", ""]
    ends: list[tuple[int, str]] = []
    async for chunk in await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [(choice.index, choice.finish_reason)] if choice.finish_reason else []
        usage = chunk.usage

    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ends) == [(0, "length"), (1, "length")]
    assert usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_the_engine_refuses_is_a_bad_request_naming_the_field(client: AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=HELLO, response_format=IMPOSSIBLE, stream=stream)

    assert (refused.value.code, refused.value.param) == ("invalid_value", "response_format")


async def test_too_many_answers_are_refused_with_the_limit(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=HELLO, n=1000)

    assert refused.value.param == "n"
    assert "128" in refused.value.message


def test_a_refused_schema_is_not_billed(repeating_server: Server) -> None:
    body = {"model": MODEL, "messages": HELLO, "guided_json": {"const": "impossible"}}
    answer = repeating_server.chat(body)
    request_id = answer.headers["x-request-id"]
    (event,) = repeating_server.admin("GET", "/ledger", params={"request_id": request_id})["data"]

    assert answer.status_code == 400
    assert json.loads(answer.text)["error"]["param"] == "guided_json"
    assert (event["status"], event["finish_reason"], event["cost_picos"]) == ("voided", "refused", 0)
