"""However slowly several answers are read, each arrives complete and in order, and buffers stay small."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.serving import event_queue
from appliance.serving.chunk_queue import ChunkQueue
from appliance.serving.chunks import Chunk
from appliance.serving.event_queue import EventQueue
from engine.protocol import FinishReason, TokenEvent

ANSWERS = 4
QUEUE_MAX = 6
steps = st.lists(st.one_of(st.integers(0, ANSWERS - 1), st.just("read")), max_size=80)


@pytest.fixture(autouse=True)
def small_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "EVENTS_MAX", QUEUE_MAX)


@given(steps=steps)
def test_events_arrive_whole_and_in_order(steps: list[int | str]) -> None:
    async def live() -> None:
        queue = EventQueue("req_1", ANSWERS)
        sent: dict[int, list[int]] = {index: [] for index in range(ANSWERS)}
        events: list[TokenEvent] = []
        for number, step in enumerate([*steps, *range(ANSWERS)]):
            if isinstance(step, str):
                events += await queue.take() if queue._events else []
                continue
            sent[step].append(number)
            is_last = number >= len(steps)
            queue.put(
                TokenEvent(
                    request_id="req_1", index=step, token_ids=[number], num_output_tokens=len(sent[step]),
                    num_prompt_tokens_computed=1, finish_reason=FinishReason.STOP if is_last else None,
                )
            )  # fmt: skip
            assert len(queue._events) < QUEUE_MAX + ANSWERS
        events += await queue.take()
        assert queue.open_answers == set()
        for index in range(ANSWERS):
            mine = [event for event in events if event.index == index]
            assert [token for event in mine for token in event.token_ids] == sent[index]
            assert [event.num_output_tokens for event in mine] == sorted(event.num_output_tokens for event in mine)
            assert [event.finish_reason is not None for event in mine] == [False] * (len(mine) - 1) + [True]

    asyncio.run(live())


@given(steps=steps, limit=st.integers(1, QUEUE_MAX))
def test_chunks_arrive_whole_and_in_order(steps: list[int | str], limit: int) -> None:
    async def live() -> None:
        queue = ChunkQueue(limit)
        sent = dict.fromkeys(range(ANSWERS), "")
        read = dict.fromkeys(range(ANSWERS), "")
        for number, step in enumerate([*steps, "read"]):
            if isinstance(step, str):
                for chunk in await queue.take(0.0):
                    read[chunk.index] += chunk.text
                continue
            text = f"{number} "
            sent[step] += text
            queue.put(Chunk(index=step, text=text, completion_tokens=number, cached_tokens=0))
            assert len(queue._chunks) < limit + ANSWERS
        queue.close()
        assert queue.ended
        assert read == sent

    asyncio.run(live())
