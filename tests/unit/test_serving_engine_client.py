"""The gateway's end of the engine socket: one frame per loop iteration, routing of events, and a result for every request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from appliance.base.errors import EngineUnavailable
from appliance.serving.engine_client import EngineClient
from appliance.serving.event_route import EventRoute
from engine.protocol import EngineFrame, FinishReason, GenerationRequest, InvalidOption, SamplingParams, TokenEvent
from engine.transport import TransportError, encode_frame
from tests.support.fake_engine import STALL, FakeEngine, connected_pair, make_event
from tests.support.polling import DEADLINE_S
from tests.support.received_events import ReceivedEvents, submit_to

FRAMES_AT_ONCE = 50  # as many as a socket buffers

HUGE = (2**63, -(2**63), 2**64, 10**22, -(10**22))
NUMBERS: dict[str, Any] = {
    **{name: lambda value: value for name in ("n", "best_of", "temperature", "top_p", "top_k", "min_p", "typical_p")},
    **{name: lambda value: value for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "seed")},
    **{name: lambda value: value for name in ("max_tokens", "min_tokens", "logprobs", "prompt_logprobs")},
    "stop_token_ids": lambda value: [value],
    "logit_bias": lambda value: {value: 1.0},
}


def make_request(request_id: str, prompt: list[int], max_tokens: int = 4, **options: Any) -> GenerationRequest:
    sampling = SamplingParams(**{"max_tokens": max_tokens, "seed": 1, **options})
    return GenerationRequest(request_id=request_id, tenant_id="bob", prompt_token_ids=prompt, sampling=sampling)


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[EngineClient, FakeEngine, asyncio.Task[None]]]:
    ours, theirs = await connected_pair()
    client, engine = EngineClient(ours, **options), FakeEngine(*theirs)
    engine_task = asyncio.create_task(engine.run())
    client_task = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client, engine, engine_task
    finally:
        engine_task.cancel()
        await asyncio.wait({engine_task, client_task})


async def all_events(received: ReceivedEvents) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events += await received.take()
    return events


async def test_each_request_gets_its_own_events_and_one_end() -> None:
    async with connected() as (client, _, _):
        streams = [submit_to(client, make_request(f"req_{index}", [10 + index, 20 + index])) for index in range(3)]
        for index, stream in enumerate(streams):
            events = await all_events(stream)

            assert [token for one in events for token in one.token_ids] == [10 + index, 20 + index] * 2
            assert [one.finish_reason for one in events if one.finish_reason] == [FinishReason.LENGTH]
        assert client.open_requests == 0


async def test_submits_of_one_loop_iteration_are_sent_as_one_frame() -> None:
    async with connected() as (client, engine, _):
        streams = [submit_to(client, make_request(f"req_{index}", [5])) for index in range(8)]
        for stream in streams:
            await all_events(stream)

        assert [len(frame.submit) for frame in engine.frames] == [8]


async def test_an_abort_in_the_same_iteration_still_ends_the_request() -> None:
    async with connected() as (client, _, _):
        stream = submit_to(client, make_request("req_1", [STALL]))
        client.abort("req_1")

        assert (await all_events(stream))[-1].finish_reason is FinishReason.ABORTED


async def test_an_abort_of_an_unknown_request_sends_nothing() -> None:
    async with connected() as (client, engine, _):
        client.abort("req_unknown")
        await all_events(submit_to(client, make_request("req_1", [5])))

        assert [frame.abort for frame in engine.frames] == [[]]


async def test_when_the_engine_exits_every_open_stream_fails() -> None:
    async with connected() as (client, _, engine_task):
        streams = [submit_to(client, make_request(f"req_{index}", [STALL])) for index in range(3)]
        await asyncio.sleep(0)
        engine_task.cancel()
        for stream in streams:
            with pytest.raises(EngineUnavailable):
                await stream.take()
        with pytest.raises(EngineUnavailable):
            submit_to(client, make_request("req_late", [5]))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_everything_a_killed_engine_sent_is_received_despite_our_writes(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        client, request = EngineClient(ours), make_request("req_1", [STALL])
        client_task = asyncio.create_task(client.run())
        stream = submit_to(client, request)
        await asyncio.sleep(0)
        for number in range(1, FRAMES_AT_ONCE + 1):
            theirs.sendall(encode_frame(EngineFrame(events=[make_event(request, [number], number)])))
        theirs.close()  # with unread data of ours, as when the process is killed
        client.shut_down()  # writes at once, to a closed socket
        async with asyncio.timeout(DEADLINE_S):
            await client_task

        events = await stream.take()
        assert [token for one in events for token in one.token_ids] == list(range(1, FRAMES_AT_ONCE + 1))
        with pytest.raises(EngineUnavailable):
            await stream.take()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


async def test_the_next_token_of_an_answer_changes_no_other_field() -> None:
    received = ReceivedEvents()
    route = EventRoute("req_1", 2, received)
    first = make_event(make_request("req_1", [5]), [5], 3, index=1)
    route.put(first)
    route.put_token(1, 6)
    route.put_token(1, 7)

    expected = [first, replace(first, token_ids=[6], num_output_tokens=4), replace(first, token_ids=[7], num_output_tokens=5)]
    assert await received.take() == expected
    assert route.open_answers == {0, 1}


async def test_an_answer_cannot_continue_before_its_first_event() -> None:
    async with connected() as (client, engine, _):
        stream = submit_to(client, make_request("req_1", [STALL]))
        engine._writer.write(encode_frame(EngineFrame(decoded=[("req_1", 0, 5)])))
        with pytest.raises(EngineUnavailable, match="without a first event"):
            await stream.take()


async def test_tokens_of_unknown_requests_are_counted() -> None:
    discarded: list[int] = []
    async with connected(on_discarded=discarded.append) as (client, engine, _):
        engine._writer.write(encode_frame(EngineFrame(decoded=[("req_gone", 0, 5), ("req_gone", 0, 6)])))
        await all_events(submit_to(client, make_request("req_1", [5])))
        assert discarded == [1, 1]


async def test_one_answer_of_several_can_be_aborted() -> None:
    async with connected() as (client, _, _):
        stream = submit_to(client, make_request("req_1", [STALL], n=2))
        client.abort_answer("req_1", 1)
        client.abort_answer("req_1", 7)
        (ended,) = await all_events(stream)

        assert (ended.index, ended.finish_reason) == (1, FinishReason.ABORTED)
        assert (client._routes["req_1"].open_answers, client.open_requests) == ({0}, 1)
        client.abort("req_1")
        assert (await all_events(stream))[-1].index == 0
        assert client.open_requests == 0


async def test_an_answer_that_the_engine_does_not_end_fails_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(final_event_wait_s=0.01) as (client, engine, _):
        monkeypatch.setattr(engine, "_receive", engine.frames.append)
        stream = submit_to(client, make_request("req_1", [STALL], n=2))
        client.abort_answer("req_1", 1)
        with pytest.raises(EngineUnavailable, match="did not end"):
            await stream.take()


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_limit_whose_error_names_it(name: str, value: int) -> None:
    with pytest.raises(InvalidOption) as refused:
        SamplingParams(**{"max_tokens": None, name: NUMBERS[name](value)})

    assert name in (refused.value.param, "max_tokens", "min_tokens")


@pytest.mark.parametrize("value", [10**22, -(10**22)])
@pytest.mark.parametrize("name", NUMBERS)
async def test_a_request_that_cannot_be_sent_fails_alone(name: str, value: int) -> None:
    async with connected() as (client, _, _):
        bad = make_request("req_bad", [5])
        object.__setattr__(bad.sampling, name, NUMBERS[name](value))  # bypasses the check of its limit
        before = submit_to(client, make_request("req_before", [5]))
        with pytest.raises(TransportError, match="req_bad"):
            submit_to(client, bad)
        after = submit_to(client, make_request("req_after", [6]))

        assert (await all_events(before))[-1].finish_reason is FinishReason.LENGTH
        assert (await all_events(after))[-1].finish_reason is FinishReason.LENGTH
        assert client.open_requests == 0


async def test_a_failed_write_fails_each_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (client, _, _):
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))

        def broken(_frame: bytes) -> None:
            raise RuntimeError("the transport is broken")

        monkeypatch.setattr(client._socket, "send", broken)
        streams = [submit_to(client, make_request(f"req_{index}", [5])) for index in range(3)]
        for stream in streams:
            with pytest.raises(EngineUnavailable, match="could not be sent"):
                await stream.take()

        assert client.open_requests == 0
        assert len(errors) == 1


async def test_an_abort_that_the_engine_never_answers_fails_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(final_event_wait_s=0.01) as (client, engine, _):
        monkeypatch.setattr(engine, "_receive", engine.frames.append)
        stream = submit_to(client, make_request("req_1", [STALL]))
        client.abort("req_1")
        with pytest.raises(EngineUnavailable, match="did not end"):
            await stream.take()

        assert client.open_requests == 0
