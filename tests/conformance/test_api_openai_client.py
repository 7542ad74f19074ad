"""The official client against a real appliance: answers, streams, models, logprobs, and usage figures that agree."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.conformance.conftest import MODEL
from tests.support.server import Server

HELLO: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0, "extra_body": {"ignore_eos": True}}
STREAMS = 32


async def stream_text(client: AsyncOpenAI, **options: Any) -> tuple[str, list[Any]]:
    """Return the text of a stream and its chunks."""
    chunks = [chunk async for chunk in await client.chat.completions.create(**{**GREEDY, **options}, stream=True)]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


async def test_an_unstreamed_answer_has_text_finish_reason_and_usage(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**GREEDY, max_tokens=8)

    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


async def test_a_stream_has_the_content_of_the_unstreamed_answer(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**GREEDY, max_tokens=24)
    text, chunks = await stream_text(client, max_tokens=24)

    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_usage_is_the_last_chunk_and_only_sent_on_request(client: AsyncOpenAI) -> None:
    _, chunks = await stream_text(client, max_tokens=5, stream_options={"include_usage": True})

    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


async def test_continuous_usage_grows_with_the_stream(client: AsyncOpenAI) -> None:
    _, chunks = await stream_text(client, max_tokens=5, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in chunks]

    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_frames_end_with_two_line_feeds_and_the_last_one_is_done(server: Server) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "stream": True}
    answer = server.chat(body)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "\r" not in answer.text
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: ") for frame in frames[:-1])
    assert "usage" not in json.loads(frames[0].removeprefix("data: "))


async def test_the_same_seed_gives_the_same_answer(client: AsyncOpenAI) -> None:
    async def sampled(seed: int) -> str | None:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=24, temperature=1, seed=seed)
        return answer.choices[0].message.content

    assert await sampled(7) == await sampled(7)
    assert await sampled(7) != await sampled(8)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
async def test_seeds_are_signed_integers_of_64_bits(client: AsyncOpenAI, seed: int) -> None:
    answers = [
        await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=24, temperature=1, seed=seed)
        for _ in range(2)
    ]

    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


async def test_logprobs_contain_every_token_and_its_alternatives(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**GREEDY, max_tokens=4, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None

    assert len(logprobs.content) == 4
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in logprobs.content)
    spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert spelled.decode("utf-8", "replace") == answer.choices[0].message.content


async def test_the_end_token_is_counted_but_has_no_logprob(client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": True, "logit_bias": {"0": 100}, "extra_body": {"min_tokens": 4}}
    answer = await client.chat.completions.create(**{**GREEDY, **fields})
    text, chunks = await stream_text(client, **fields)
    whole = answer.choices[0].logprobs
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert whole is not None
    assert answer.usage is not None

    assert answer.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert whole.content == [entry for part in streamed for entry in part.content]
    assert len(whole.content or []) == answer.usage.completion_tokens - 1
    spelled = b"".join(bytes(entry.bytes or []) for entry in whole.content or [])
    assert spelled.decode("utf-8", "replace") == text == answer.choices[0].message.content


async def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: AsyncOpenAI) -> None:
    text = (await client.chat.completions.create(**GREEDY, max_tokens=40)).choices[0].message.content or ""
    stop = next(text[at : at + 2] for at in range(4, len(text)) if text[at : at + 2].isascii() and len(text[at : at + 2]) == 2)
    answer = await client.chat.completions.create(**GREEDY, max_tokens=40, stop=stop)

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]


async def test_an_answer_ended_by_a_stop_string_is_billed_the_same_each_time(client: AsyncOpenAI) -> None:
    text = (await client.chat.completions.create(**GREEDY, max_tokens=40)).choices[0].message.content or ""
    stop = next(text[at : at + 2] for at in range(4, len(text)) if text[at : at + 2].isascii() and len(text[at : at + 2]) == 2)
    answers = [await client.chat.completions.create(**GREEDY, max_tokens=40, stop=stop) for _ in range(4)]
    answers += await asyncio.gather(*(client.chat.completions.create(**GREEDY, max_tokens=40, stop=stop) for _ in range(4)))

    assert len({answer.usage.completion_tokens for answer in answers if answer.usage}) == 1


async def test_without_max_tokens_the_output_may_fill_the_context(client: AsyncOpenAI) -> None:
    text = "fox " * 400
    answer = await client.chat.completions.create(**{**GREEDY, "messages": [{"role": "user", "content": text}]})

    assert answer.usage is not None
    assert answer.usage.total_tokens == 1024


async def test_models_are_listed_with_their_context_length(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]

    assert [model.id for model in models] == [MODEL]
    assert (await client.models.retrieve(MODEL)).model_dump()["max_model_len"] == 1024


async def test_paths_without_v1_and_the_x_api_key_header_work(server: Server) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key=server.api_key, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
    async with httpx.AsyncClient() as plain:
        answer = await plain.get(f"{server.url}/models", headers={"x-api-key": server.api_key or ""})
    assert answer.status_code == 200


async def test_usage_of_stream_ledger_and_request_record_agree(server: Server, client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        **GREEDY, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in raw.parse()]
    usage = chunks[-1].usage
    assert usage is not None
    request_id = raw.headers["x-request-id"]
    (event,) = server.admin("GET", "/ledger", params={"request_id": request_id})["data"]
    row = server.admin("GET", f"/requests/{request_id}")

    assert chunks[0].id == request_id
    assert event["status"] == "posted"
    for source in (event, row):
        assert source["prompt_tokens"] == usage.prompt_tokens
        assert source["completion_tokens"] == usage.completion_tokens == 9
        assert source["finish_reason"] == "length"
    assert row["state"] == "finished"
    assert row["ttft_s"] > 0
    assert row["explanation"]


async def test_every_answer_has_request_id_timing_and_rate_limit_headers(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(**GREEDY, max_tokens=2)

    assert raw.headers["x-request-id"].startswith("req_")
    assert int(raw.headers["openai-processing-ms"]) >= 0
    for kind in ("requests", "tokens"):
        for figure in ("limit", "remaining", "reset"):
            assert raw.headers[f"x-ratelimit-{figure}-{kind}"]


async def test_text_parts_are_joined_by_line_feeds(client: AsyncOpenAI) -> None:
    parts: list[Any] = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "brown fox"}]
    in_parts = await client.chat.completions.create(
        **{**GREEDY, "messages": [{"role": "user", "content": parts}]}, max_tokens=8
    )
    joined: list[Any] = [{"role": "user", "content": "the quick\nbrown fox"}]
    whole = await client.chat.completions.create(**{**GREEDY, "messages": joined}, max_tokens=8)

    assert in_parts.choices[0].message.content == whole.choices[0].message.content


async def test_ignored_fields_do_not_change_the_answer(client: AsyncOpenAI) -> None:
    ignored: dict[str, Any] = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low"}
    plain = await client.chat.completions.create(**GREEDY, max_tokens=4)
    answer = await client.chat.completions.create(**GREEDY, max_tokens=4, **ignored)

    assert answer.choices[0].message.content == plain.choices[0].message.content


async def test_reasoning_effort_none_sets_enable_thinking_in_the_chat_template(client: AsyncOpenAI) -> None:
    async def prompt_tokens(**options: Any) -> int:
        answer = await client.chat.completions.create(**GREEDY, max_tokens=1, **options)
        return int(answer.usage.prompt_tokens)

    # Told so, the template of this model adds a token at the end.
    assert await prompt_tokens(reasoning_effort="none") == await prompt_tokens() + 1


async def test_32_concurrent_streams_of_mixed_lengths_finish_and_are_recorded(server: Server, client: AsyncOpenAI) -> None:
    async def one(index: int) -> tuple[str, int, int]:
        messages = [{"role": "user", "content": "fox " * (1 + 7 * index)}]
        options = {"max_tokens": 4 + 3 * index, "stream_options": {"include_usage": True}, "messages": messages}
        _, chunks = await stream_text(client, **options)
        assert chunks[-2].choices[0].finish_reason == "length"
        return chunks[0].id, 4 + 3 * index, chunks[-1].usage.completion_tokens

    results = await asyncio.gather(*(one(index) for index in range(STREAMS)))
    recorded = {event["request_id"]: event for event in server.list_all("/ledger")}

    for request_id, requested, reported in results:
        assert reported == requested == recorded[request_id]["completion_tokens"]
        assert recorded[request_id]["status"] == "posted"
