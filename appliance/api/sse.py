"""Server-sent events as ready bytes. Only reads what the generation produces; a slow reader does not slow the generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import structlog
from litestar.response import Stream
from litestar.types import ASGIApp, Receive, Scope, Send

from appliance.api.chat_answers import PING, ChunkFramer
from appliance.api.error_responses import encode_error
from appliance.base.errors import GatehouseError, InternalError
from appliance.serving.chunks import Chunk
from appliance.serving.generation import Generation

EVENT_STREAM = "text/event-stream"
PING_AFTER_S = 15.0
LOGPROBS_PER_TURN = 8  # tokens encoded in one turn of the loop; a single chunk may have more (`serving.chunk_queue`)
HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = structlog.get_logger()


class LastFrame(bytes):
    """The last frame: the end of the answer is sent with it, not in a packet of its own."""


class EventStream(Stream):
    """An answer that sends frames as they come, and stops when the client has left.

    Litestar itself uses a task group with two tasks and their cancel scopes, which cost more than tokenising a prompt. Here the
    answering task sends, and only one further task listens for the client leaving.
    """

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(frames, media_type=EVENT_STREAM)
        self._frames = frames

    def to_asgi_response(self, *_given: Any, **_options: Any) -> ASGIApp:  # type: ignore[override]
        """Return what sends the answer."""
        return self._send

    async def _send(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        sending = asyncio.current_task()
        assert sending is not None, "answers are sent by tasks"
        listening = asyncio.create_task(until_disconnected(receive))
        listening.add_done_callback(stop := lambda _listening: sending.cancel())
        is_last = False
        try:
            async for frame in self._frames:
                is_last = isinstance(frame, LastFrame)
                await send({"type": "http.response.body", "body": frame, "more_body": not is_last})
            if not is_last:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not listening.done() or sending.uncancel() > 0:
                raise
            listening.result()  # None: the client has left
        finally:
            listening.remove_done_callback(stop)
            listening.cancel()


async def until_disconnected(receive: Receive) -> None:
    """Return when the client has left, or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
                pieces = _pieces(ready)
                for piece in pieces:
                    if len(pieces) > 1:
                        await _yield_to_others()
                    yield b"".join([framer.text(chunk) for chunk in piece])
            elif not chunks.ended:
                yield PING
        outcome = await generation.outcome
        yield LastFrame(framer.last(outcome)) if outcome.error is None else _error_frame(outcome.error)
    except Exception:  # HTTP edge: a stream that merely stops would be taken for a complete answer
        log.exception("stream failed", request_id=generation.request_id)
        yield _error_frame(InternalError("the answer could not be sent"))


def _pieces(ready: Sequence[Chunk]) -> list[list[Chunk]]:
    """Cut what is ready into pieces that are encoded at once: one, unless there are many log-probabilities."""
    pieces: list[list[Chunk]] = [[]]
    num_tokens = 0
    for chunk in ready:
        num_tokens += len(chunk.logprobs)
        if num_tokens > LOGPROBS_PER_TURN and pieces[-1]:
            pieces.append([])
            num_tokens = len(chunk.logprobs)
        pieces[-1].append(chunk)
    return pieces


async def _yield_to_others() -> None:
    """Let other tasks run before a piece of a backlog is encoded, for two turns of the loop: when the client leaves, this task
    wakes before the listening one, which cancels it a turn later. So nothing is encoded for a client that has left."""
    for _ in range(2):
        await asyncio.sleep(0)


def _error_frame(error: GatehouseError) -> LastFrame:
    return LastFrame(b"data: " + encode_error(error) + b"\n\n")
