"""However slowly several answers are read, each arrives complete and in order, and the buffer stays small."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from appliance.serving.chunk_queue import ChunkQueue
from appliance.serving.chunks import Chunk

ANSWERS = 4
QUEUE_MAX = 6
steps = st.lists(st.one_of(st.integers(0, ANSWERS - 1), st.just("read")), max_size=80)


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
