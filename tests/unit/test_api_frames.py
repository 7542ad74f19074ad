"""Frames of streams: comments while idle, errors, long responses in pieces, and headers in the formats of OpenAI's API."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.api import sse
from appliance.api.chat_responses import DONE, PING, ChunkFramer, CompletionBuilder
from appliance.api.exchange import ExchangeWrapper
from appliance.api.pieces import PIECE_BYTES, LastPiece, PiecewiseResponse, long_json_response
from appliance.api.rate_limit_headers import UNLIMITED, duration, rate_limit_headers
from appliance.api.sse import EventStream, chat_frames
from appliance.metering.ledger.records import Usage
from appliance.metering.limits.rate_limits import RateLimit, RateLimitState
from appliance.serving.chunk_queue import LOGPROBS_MERGED_MAX, ChunkQueue
from appliance.serving.chunks import Chunk, NamedLogprob
from appliance.serving.endings import Outcome
from tests.support.cast import Cast
from tests.support.fake_engine import STALL
from tests.support.generations import Serving
from tests.support.loop_iterations import count_iterations

pytestmark = pytest.mark.on_either_database


def framer(**options: Any) -> ChunkFramer:
    defaults = {"num_answers": 1, "logprobs": False, "include_usage": False, "continuous_usage": False}
    return ChunkFramer(request_id="req_1", created=1, model="tiny", prompt_tokens=2, **{**defaults, **options})


async def send_until_disconnect(answer: PiecewiseResponse, receive: Any, send: Any) -> None:
    """Send `answer` as a route does once it has read the request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["exchange"].cancel_on_disconnect(receive)
        await answer.to_asgi_response()(scope, receive, send)

    scope: Any = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "state": {}}
    await ExchangeWrapper(app)(scope, receive, send)


def payload(frame: bytes) -> dict[str, Any]:
    assert frame.endswith(b"\n\n")
    decoded: dict[str, Any] = json.loads(frame.removeprefix(b"data: "))
    return decoded


async def test_an_idle_stream_sends_comments(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [STALL, 5])
    frames = chat_frames(generation, framer(), ping_after_s=0.01)
    await anext(frames)

    assert await anext(frames) == PING
    generation.end_early("disconnected")
    await generation.outcome
    await frames.aclose()  # type: ignore[attr-defined]


async def test_a_failed_stream_ends_with_an_error_event_and_without_done(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, "the quick fox", max_tokens=1000)
    frames = chat_frames(generation, framer())
    await anext(frames)
    serving.engine_task.cancel()
    sent = [frame async for frame in frames]

    assert payload(sent[-1])["error"]["code"] == "engine_unavailable"
    assert not any(DONE in frame for frame in sent)


async def test_a_bug_while_sending_is_an_error_event_in_the_stream(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = await serving.start(cast.bob, "the quick fox")
    broken = framer()
    monkeypatch.setattr(broken, "text", None)
    sent = [frame async for frame in chat_frames(generation, broken)]

    assert payload(sent[-1])["error"]["code"] == "internal_error"
    assert not any(DONE in frame for frame in sent)


async def test_a_complete_stream_ends_with_done(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, "the quick fox")
    sent = b"".join([frame async for frame in chat_frames(generation, framer(include_usage=True))])
    chunks = parsed(sent)

    assert sent.endswith(DONE)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "the quick fox"
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def parsed(sent: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a complete stream."""
    return [json.loads(part.removeprefix(b"data: ")) for part in sent.removesuffix(DONE).split(b"\n\n") if part]


async def test_a_stream_of_several_answers_has_their_indices_and_ends_each_once(serving: Serving, cast: Cast) -> None:
    prompt = [*serving.ids("fox"), *serving.ids("a") * 30]
    generation = await serving.start(cast.bob, prompt, n=2, stop=["fox"], max_tokens=len(prompt) - 1)
    options = {"num_answers": 2, "include_usage": True, "continuous_usage": True}
    chunks = parsed(b"".join([frame async for frame in chat_frames(generation, framer(**options))]))
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]

    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    assert all(choice["delta"]["role"] == "assistant" for choice in choices[:2])
    ends = {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    assert ends == {0: "stop", 1: "length"}
    assert len([choice for choice in choices if choice["finish_reason"]]) == 2
    contents = [
        "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index) for index in (0, 1)
    ]
    assert contents == ["", serving.text(prompt[1:])]
    assert counts == sorted(counts)
    assert counts[-1] == (await generation.outcome).usage.completion_tokens == len(serving.ids("fox")) + len(prompt) - 1


def test_the_log_probability_of_a_last_token_without_text_is_sent() -> None:
    half = NamedLogprob(token="\ufffd", token_bytes=b"\xe2", logprob=-1.0)
    joined = Chunk(text="", completion_tokens=1, cached_tokens=0, logprobs=[half], finish_reason="length")
    (choice,) = payload(framer(num_answers=2, logprobs=True).text(joined))["choices"]

    assert (choice["delta"], choice["finish_reason"]) == ({}, "length")
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xE2]]


def test_log_probabilities_of_a_response_are_not_tracked_by_the_garbage_collector() -> None:
    answer = CompletionBuilder(2, logprobs=True)
    top = tuple(NamedLogprob(token=text, token_bytes=text.encode(), logprob=-1.0) for text in ("é", "b"))
    tracked = len(gc.get_objects())
    for position in range(1000):
        entry = NamedLogprob(token="é", token_bytes="é".encode(), logprob=-0.5, top=tuple(top))
        assert not gc.is_tracked(entry)
        answer.add(Chunk(text="é", completion_tokens=position, cached_tokens=0, logprobs=[entry], index=position % 2))
    assert len(gc.get_objects()) - tracked < 100

    usage = Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=1000)
    outcome = Outcome(finish_reason="length", usage=usage, finish_reasons=("length", "stop"))
    parts, length = answer.body(request_id="req_1", created=1, model="tiny", outcome=outcome)
    text = b"".join(parts)
    assert len(text) == length
    body = json.loads(text)
    names = {"é": [0xC3, 0xA9], "b": [0x62]}
    top_logprobs = [{"token": text, "logprob": -1.0, "bytes": numbers} for text, numbers in names.items()]
    expected = {"token": "é", "logprob": -0.5, "bytes": names["é"], "top_logprobs": top_logprobs}
    assert [choice["logprobs"] for choice in body["choices"]] == [{"content": [expected] * 500, "refusal": None}] * 2
    assert [choice["message"]["content"] for choice in body["choices"]] == ["é" * 500] * 2


@pytest.mark.parametrize(("logprobs", "texts"), [(False, ["a\0", ""]), (True, ["a\0", ""]), (True, ["", ""])])
def test_the_stated_length_of_a_response_is_that_of_its_parts(logprobs: bool, texts: list[str]) -> None:
    answer = CompletionBuilder(2, logprobs=logprobs)
    for index, text in enumerate(texts):
        entries = [NamedLogprob(token="\0", token_bytes=b"\0", logprob=-0.5)] * len(text)
        answer.add(Chunk(text=text, completion_tokens=1, cached_tokens=0, logprobs=entries, index=index))
    usage = Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=1)
    outcome = Outcome(finish_reason="length", usage=usage, finish_reasons=("length", "stop"))
    parts, length = answer.body(request_id="req_1", created=1, model="tiny", outcome=outcome)
    whole = b"".join(parts)
    assert len(whole) == length
    choices = json.loads(whole)["choices"]
    assert [choice["message"]["content"] for choice in choices] == texts
    num_logprobs = [choice["logprobs"] and len(choice["logprobs"]["content"]) for choice in choices]
    assert num_logprobs == ([len(text) for text in texts] if logprobs else [None, None])


async def test_a_long_response_is_sent_in_pieces_between_which_other_tasks_run() -> None:
    parts = [b"a" * 3000] * 2000
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async with count_iterations() as turns:
        answer: Any = long_json_response(parts, sum(map(len, parts))).to_asgi_response()
        await answer({}, asyncio.Event().wait, send)
    bodies = [message["body"] for message in sent[1:]]
    assert dict(sent[0]["headers"])[b"content-length"] == b"6000000"
    assert b"".join(bodies) == b"".join(parts)
    assert max(map(len, bodies)) < PIECE_BYTES + 3000
    assert turns.count >= len(bodies) - 2 > 80, "the last message is empty"
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]


async def test_a_long_response_is_not_built_further_after_a_disconnect() -> None:
    left = asyncio.Event()
    built: list[int] = []

    def parts() -> Iterator[bytes]:
        for number in range(100):
            built.append(number)
            yield b"a" * PIECE_BYTES

    async def send(message: Any) -> None:
        if message.get("body"):
            left.set()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    await send_until_disconnect(long_json_response(parts(), 100 * PIECE_BYTES), receive, send)
    assert len(built) < 5


def named(tokens: int) -> Chunk:
    entry = NamedLogprob(token="a", token_bytes=b"a", logprob=-0.5)
    return Chunk(text="a" * tokens, completion_tokens=tokens, cached_tokens=0, logprobs=[entry] * tokens)


def test_chunks_for_a_slow_reader_are_merged_up_to_a_limit_of_log_probabilities() -> None:
    queue = ChunkQueue(4)
    for _ in range(1000):
        queue.put(named(1))
    queue.close()
    pieces = asyncio.run(queue.take(1.0))

    assert max(len(piece.logprobs) for piece in pieces) == LOGPROBS_MERGED_MAX
    assert sum(len(piece.logprobs) for piece in pieces) == 1000
    assert len(pieces) < 50


async def test_the_backlog_of_a_disconnected_client_is_not_encoded(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [STALL, 5])
    encoded: list[Chunk] = []
    recording_framer = framer(logprobs=True)
    text = recording_framer.text
    recording_framer.text = lambda chunk: encoded.append(chunk) or text(chunk)  # type: ignore[method-assign, func-returns-value]
    blocked, left = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            blocked.set()
            await left.wait()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    sending = asyncio.create_task(send_until_disconnect(EventStream(chat_frames(generation, recording_framer)), receive, send))
    await blocked.wait()
    for _ in range(10):
        generation.chunks.put(named(20))
    left.set()  # wakes the sender
    await sending
    generation.end_early("disconnected")
    await generation.outcome

    assert encoded == []


def test_a_backlog_is_split_by_its_number_of_log_probabilities() -> None:
    ready = [named(size) for size in (3, 5, 1, 20, 0, 8)]
    sizes = [[len(chunk.logprobs) for chunk in piece] for piece in sse._split(ready)]
    assert sizes == [[3, 5], [1], [20], [0, 8]]
    assert len(sse._split([named(0)] * 1000)) == 1


async def test_other_tasks_run_between_the_pieces_of_a_backlog(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [STALL, 5])
    frames = chat_frames(generation, framer(logprobs=True))
    await anext(frames)
    for _ in range(5):
        generation.chunks.put(named(20))
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    first = await anext(frames)

    assert turns == [1]
    assert len(payload(first)["choices"][0]["logprobs"]["content"]) == 20
    generation.end_early("disconnected")
    await generation.outcome
    await frames.aclose()  # type: ignore[attr-defined]


async def test_every_frame_has_the_service_tier_if_the_request_named_one(serving: Serving, cast: Cast) -> None:
    frames: dict[str | None, list[dict[str, Any]]] = {}
    for tier in ("flex", None):
        generation = await serving.start(cast.bob, "the quick fox")
        sent = b"".join([frame async for frame in chat_frames(generation, framer(service_tier=tier, include_usage=True))])
        frames[tier] = parsed(sent)

    assert {frame["service_tier"] for frame in frames["flex"]} == {"flex"}
    assert frames["flex"][-1]["usage"] is not None
    assert [{**frame, "service_tier": "flex"} for frame in frames[None]] == frames["flex"]
    assert not any("service_tier" in frame for frame in frames[None])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.25, "250ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (360, "6m0s"), (3661, "1h1m1s"), (59.9996, "1m0s")],
)
def test_durations_are_formatted_as_in_openais_api(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_rate_limit_headers_are_always_complete() -> None:
    headers = rate_limit_headers(RateLimitState(requests=RateLimit(limit=10, remaining=3, reset_s=42.0), tokens=None))

    assert len(headers) == 6
    assert headers["x-ratelimit-remaining-requests"] == "3"
    assert headers["x-ratelimit-reset-requests"] == "42s"
    assert headers["x-ratelimit-limit-tokens"] == str(UNLIMITED)


async def test_the_end_of_a_response_is_sent_with_its_last_frame(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, "the quick fox")
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    app = EventStream(chat_frames(generation, framer())).to_asgi_response()
    scope: Any = {}
    await app(scope, receive, send)

    bodies = [message for message in sent if message["type"] == "http.response.body"]
    assert DONE in bodies[-1]["body"]
    assert [body["more_body"] for body in bodies] == [*[True] * (len(bodies) - 1), False]
    assert isinstance(bodies[-1]["body"], LastPiece)
