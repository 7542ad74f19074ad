"""Structured output and several answers from the demo model with the official client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from appliance.serving.model_builder import DEMO_MODEL
from tests.support.server import Server, running_server

MODEL = DEMO_MODEL.name
HELLO: list[Any] = [{"role": "user", "content": "Hello, what is your name?"}]
EXPONENTIAL_SCHEMA = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{count}}}c"} for count in range(10, 40)]}
SCHEMAS: list[dict[str, Any]] = [
    *(
        {
            "type": "object",
            "properties": {f"field_{number}": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
            "required": [f"field_{number}", "ok"],
            "additionalProperties": False,
        }
        for number in range(8)
    ),
    *({"type": "array", "items": {"enum": ["red", "green", number]}, "minItems": 1, "maxItems": 3} for number in range(4)),
    *({"enum": [f"word {number}", number, None]} for number in range(4)),
]


FIELDS: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 200, "temperature": 1}


class Reply(BaseModel):
    """A response model as client programs define it."""

    mood: Literal["good", "bad"]
    score: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running appliance with the bundled model."""
    with running_server(DEMO_MODEL, tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture
async def client(demo_server: Server) -> AsyncIterator[AsyncOpenAI]:
    url = f"{demo_server.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=demo_server.api_key, max_retries=0, timeout=120) as opened:
        yield opened


def response_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def answer_text(client: AsyncOpenAI, **options: Any) -> str:
    answer = await client.chat.completions.create(**{**FIELDS, **options})
    return answer.choices[0].message.content or ""


async def test_a_schema_constrains_the_answer(client: AsyncOpenAI) -> None:
    for seed in range(3):
        jsonschema.validate(
            json.loads(await answer_text(client, response_format=response_format(SCHEMAS[0]), seed=seed)), SCHEMAS[0]
        )


async def test_a_pydantic_class_is_parsed_from_the_answer(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(**FIELDS, response_format=Reply, seed=1)

    assert isinstance(answer.choices[0].message.parsed, Reply)


async def test_a_pydantic_class_is_parsed_from_a_stream(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(**FIELDS, response_format=Reply, seed=1, n=2) as stream:
        answer = await stream.get_final_completion()

    assert [isinstance(choice.message.parsed, Reply) for choice in answer.choices] == [True, True]


async def test_an_answer_that_was_parsed_can_be_sent_back_as_history(client: AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(**FIELDS, response_format=Reply, seed=1)
    history: Any = parsed.choices[0].message.model_dump(warnings=False)
    assert "parsed" in history
    text = await answer_text(client, messages=[*HELLO, history, *HELLO], max_tokens=2, extra_body={"ignore_eos": True})

    assert text


@pytest.mark.parametrize("temperature", [0, 1])
async def test_structured_output_of_the_demo_model_ends_without_reaching_max_tokens(
    client: AsyncOpenAI, temperature: float
) -> None:
    answer = await client.chat.completions.parse(**{**FIELDS, "temperature": temperature}, response_format=Reply, n=4, seed=2)

    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


async def test_json_object_gives_a_json_object(client: AsyncOpenAI) -> None:
    text = await answer_text(client, response_format={"type": "json_object"}, seed=3)

    assert text.startswith("{")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,5}/'}, "<[a-z]{1,5}>"),
        ({"guided_json": {"const": "exactly"}}, '"exactly"'),
    ],
    ids=str,
)
async def test_guided_fields_constrain_the_answer(client: AsyncOpenAI, form: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, await answer_text(client, extra_body=form))


async def test_16_concurrent_streams_each_follow_their_own_schema(client: AsyncOpenAI) -> None:
    async def stream_text(schema: dict[str, Any]) -> str:
        text = ""
        stream = await client.chat.completions.create(**FIELDS, response_format=response_format(schema), seed=7, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    assert len({json.dumps(schema) for schema in SCHEMAS}) == 16
    texts = await asyncio.gather(*(stream_text(schema) for schema in SCHEMAS))
    for text, schema in zip(texts, SCHEMAS, strict=True):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}],
    ids=["type", "pattern", "reference"],
)
async def test_an_invalid_schema_is_a_bad_request_naming_the_field(
    client: AsyncOpenAI, schema: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**FIELDS, response_format=response_format(schema), stream=stream)

    assert (refused.value.code, refused.value.param) == ("invalid_value", "response_format")


async def test_a_schema_of_exponential_size_is_refused_while_other_requests_are_served(client: AsyncOpenAI) -> None:
    explosion = asyncio.ensure_future(
        client.chat.completions.create(**FIELDS, response_format=response_format(EXPONENTIAL_SCHEMA))
    )
    served = [await answer_text(client, max_tokens=8) for _ in range(4)]
    served_meanwhile = not explosion.done()
    with pytest.raises(openai.BadRequestError) as refused:
        await explosion

    assert (refused.value.code, refused.value.param) == ("invalid_value", "response_format")
    assert served_meanwhile
    assert all(served)


async def test_bad_words_are_not_generated(client: AsyncOpenAI) -> None:
    greedy = {"temperature": 0, "max_tokens": 12}
    text = await answer_text(client, **greedy)
    word = text.split()[1]
    other = await answer_text(client, **greedy, extra_body={"bad_words": [word]})

    assert word not in other.split()
    assert other.split()[0] == text.split()[0]


async def test_min_tokens_delays_the_end_of_an_answer(client: AsyncOpenAI) -> None:
    end = json.loads((DEMO_MODEL / "config.json").read_text("utf-8"))["eos_token_id"]
    fields = {**FIELDS, "logit_bias": {str(end): 100}}
    counts = []
    for least in (0, 7):
        answer = await client.chat.completions.create(**fields, extra_body={"min_tokens": least})
        assert answer.usage is not None
        counts.append(answer.usage.completion_tokens)

    assert counts == [1, 8]


async def test_of_three_answers_the_first_equals_that_of_a_single_request(demo_server: Server, client: AsyncOpenAI) -> None:
    fields = {**FIELDS, "max_tokens": 20, "seed": 5}
    raw = await client.chat.completions.with_raw_response.create(**fields, n=3)
    answer = raw.parse()
    (event,) = demo_server.admin("GET", "/ledger", params={"request_id": raw.headers["x-request-id"]})["data"]

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.choices[0].message.content == await answer_text(client, **fields)
    assert answer.usage is not None
    assert (event["prompt_tokens"], event["completion_tokens"]) == (
        answer.usage.prompt_tokens, answer.usage.completion_tokens,
    )  # fmt: skip


async def test_a_stream_of_two_answers_has_the_content_of_the_unstreamed_response(client: AsyncOpenAI) -> None:
    fields = {**FIELDS, "max_tokens": 24, "seed": 9, "n": 2}
    whole = await client.chat.completions.create(**fields)
    texts = ["", ""]
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    assert texts == [choice.message.content for choice in whole.choices]


async def test_several_answers_follow_one_schema(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**FIELDS, n=3, response_format=response_format(SCHEMAS[1]), seed=2)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS[1])
