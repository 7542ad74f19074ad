"""The gateway's end of one engine's socket: frames out, frames in, and which request each event belongs to.

Lives as long as one engine process. Everything that was asked for within one turn of the event loop leaves as one frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from appliance.base.errors import EngineUnavailable
from appliance.serving.event_stream import EventStream
from engine.protocol import EngineFrame, EngineInfo, EngineStatus, GatewayFrame, GenerationRequest
from engine.transport import PeerClosed, TransportError, decode_engine_frame, encode_frame, read_frame

PROMPT_TOKENS_PER_FRAME_MAX = 2_000_000  # at five bytes a token, a frame stays far below FRAME_BYTES_MAX


class EngineClient:
    """Submits and aborts requests; `run` is the one reader task. `fatal` holds the engine's last words, if it had any."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        on_frame: Callable[[EngineFrame], None] = lambda _frame: None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_frame = on_frame
        self._streams: dict[str, EventStream] = {}
        self._submits: list[GenerationRequest] = []
        self._aborts: list[str] = []
        self._flush_planned = False
        self._closed_reason: str | None = None
        self.info: EngineInfo | None = None
        self.status: EngineStatus | None = None
        self.load_fraction: float | None = None
        self.fatal: str | None = None

    @property
    def open_requests(self) -> int:
        """Return how many requests wait for their final event."""
        return len(self._streams)

    def submit(self, request: GenerationRequest) -> EventStream:
        """Send `request` with the next frame. Raises EngineUnavailable when the engine is gone."""
        if self._closed_reason is not None:
            raise EngineUnavailable(self._closed_reason)
        stream = EventStream(request.request_id)
        self._streams[request.request_id] = stream
        self._submits.append(request)
        self._plan_flush()
        return stream

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a request; its final event still comes. An id that is not open is ignored."""
        if request_id in self._streams and self._closed_reason is None:
            self._aborts.append(request_id)
            self._plan_flush()

    def shut_down(self) -> None:
        """Ask the engine for an orderly exit."""
        if self._closed_reason is None:
            self._flush()
            self._write(GatewayFrame(shutdown=True))

    async def run(self) -> None:
        """Read frames until the engine closes its end. Every open stream then ends in EngineUnavailable."""
        reason = "the engine process ended"
        try:
            while True:
                self._receive(decode_engine_frame(await read_frame(self._reader)))
        except PeerClosed:
            pass
        except TransportError as error:
            reason = f"the engine sent a frame that cannot be read: {error}"
        finally:
            await self._close(self.fatal or reason)

    def _receive(self, frame: EngineFrame) -> None:
        if frame.load_fraction is not None:
            self.load_fraction = frame.load_fraction
        if frame.ready is not None:
            self.info = frame.ready
        if frame.status is not None:
            self.status = frame.status
        if frame.fatal is not None:
            self.fatal = frame.fatal
        for event in frame.events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.finish_reason is not None:
                del self._streams[event.request_id]
            stream.put(event)
        self._on_frame(frame)

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Write what was asked for. An abort never overtakes its own submit, nor does it share a frame with it."""
        self._flush_planned = False
        if self._closed_reason is not None:
            return
        submits, self._submits = self._submits, []
        aborts, self._aborts = self._aborts, []
        for batch in _batches(submits):
            self._write(GatewayFrame(submit=batch))
        if aborts:
            self._write(GatewayFrame(abort=aborts))

    def _write(self, frame: GatewayFrame) -> None:
        self._writer.write(encode_frame(frame))

    async def _close(self, reason: str) -> None:
        self._closed_reason = reason
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(reason)
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def _batches(submits: list[GenerationRequest]) -> list[list[GenerationRequest]]:
    """Split `submits` in order: no frame carries more than PROMPT_TOKENS_PER_FRAME_MAX prompt tokens, or one request."""
    batches: list[list[GenerationRequest]] = []
    room = 0
    for request in submits:
        tokens = len(request.prompt_token_ids)
        if not batches or tokens > room:
            batches.append([])
            room = PROMPT_TOKENS_PER_FRAME_MAX
        batches[-1].append(request)
        room -= tokens
    return batches
