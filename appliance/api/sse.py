"""Server-sent events of a generation, encoded. A slow reader does not slow the generation down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import structlog

from appliance.api.chat_responses import PING, ChunkFramer
from appliance.api.error_responses import encode_error
from appliance.api.pieces import LastPiece, PiecewiseResponse
from appliance.base.errors import GatehouseError, InternalError
from appliance.serving.chunks import Chunk
from appliance.serving.generation import Generation

EVENT_STREAM = "text/event-stream"
PING_AFTER_S = 15.0
LOGPROBS_PER_TURN = 8  # tokens encoded per event-loop iteration; a single chunk may have more (`serving.chunk_queue`)
HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = structlog.get_logger()


class EventStream(PiecewiseResponse):
    """A response that sends `frames` as they are produced."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(frames, HEADERS)


async def chat_frames(
    generation: Generation, framer: ChunkFramer, *, ping_after_s: float = PING_AFTER_S
) -> AsyncIterator[bytes]:
    """Yield the frames of a chat stream. A stream that fails ends with an error frame and without `[DONE]`."""
    chunks = generation.chunks
    try:
        yield framer.first()
        while not chunks.ended:
            ready = await chunks.take(ping_after_s)
            if len(ready) == 1:
                yield framer.text(ready[0])
            elif ready:
                batches = _split(ready)
                for batch in batches:
                    if len(batches) > 1:
                        await asyncio.sleep(0)  # lets other tasks run, and ends here if the client has left
                    yield b"".join([framer.text(chunk) for chunk in batch])
            elif not chunks.ended:
                yield PING
        outcome = await generation.outcome
        yield LastPiece(framer.last(outcome)) if outcome.error is None else _error_frame(outcome.error)
    except Exception:  # HTTP edge: a stream that just stopped would look like a complete response
        log.exception("stream failed", request_id=generation.request_id)
        yield _error_frame(InternalError("the response could not be sent"))


def _split(ready: Sequence[Chunk]) -> list[list[Chunk]]:
    """Split `ready` into batches that are encoded at once: a single one, unless there are many log-probabilities."""
    batches: list[list[Chunk]] = [[]]
    num_tokens = 0
    for chunk in ready:
        num_tokens += len(chunk.logprobs)
        if num_tokens > LOGPROBS_PER_TURN and batches[-1]:
            batches.append([])
            num_tokens = len(chunk.logprobs)
        batches[-1].append(chunk)
    return batches


def _error_frame(error: GatehouseError) -> LastPiece:
    return LastPiece(b"data: " + encode_error(error) + b"\n\n")
