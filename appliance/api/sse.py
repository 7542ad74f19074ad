"""Server-sent events as ready bytes. Only reads what the generation feeds; how fast it is read changes nothing there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import structlog
from litestar.response import Stream

from appliance.api.chat_answers import PING, ChunkFramer
from appliance.api.error_responses import encode_error
from appliance.base.errors import GatehouseError, InternalError
from appliance.serving.generation import Generation

EVENT_STREAM = "text/event-stream"
PING_AFTER_S = 15.0
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

log = structlog.get_logger()


def event_stream(frames: AsyncIterator[bytes], headers: Mapping[str, str] | None = None) -> Stream:
    """Return an answer that sends `frames` as they come."""
    return Stream(frames, media_type=EVENT_STREAM, headers={**HEADERS, **(headers or {})})


async def chat_frames(
    generation: Generation, framer: ChunkFramer, *, ping_after_s: float = PING_AFTER_S
) -> AsyncIterator[bytes]:
    """Yield the frames of a chat stream. One that cannot go on ends with an error frame and without `[DONE]`."""
    try:
        async for frame in _frames(generation, framer, ping_after_s):
            yield frame
    except Exception:  # HTTP edge: a stream that merely stops would be taken for a complete answer
        log.exception("stream failed", request_id=generation.request_id)
        yield _error_frame(InternalError("the answer could not be sent"))


async def _frames(generation: Generation, framer: ChunkFramer, ping_after_s: float) -> AsyncIterator[bytes]:
    yield framer.first()
    chunks = generation.chunks
    while not chunks.ended:
        ready = await chunks.take(ping_after_s)
        if ready:
            yield b"".join(framer.text(chunk) for chunk in ready)
        elif not chunks.ended:
            yield PING
    outcome = await generation.outcome
    yield framer.last(outcome) if outcome.error is None else _error_frame(outcome.error)


def _error_frame(error: GatehouseError) -> bytes:
    return b"data: " + encode_error(error) + b"\n\n"
