"""The gateway's end of one engine's socket: sends frames, receives frames, and routes each event to its request.

Lives as long as one engine process. Submits and aborts of one iteration of the event loop are batched into frames.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping

from appliance.base.errors import EngineUnavailable
from appliance.serving.event_route import EventReceiver, EventRoute
from engine.protocol import EngineFrame, EngineInfo, EngineStatus, GatewayFrame, GenerationRequest
from engine.transport import (
    AsyncFrameSocket,
    PeerClosed,
    TransportError,
    decode_engine_frame,
    encode_frame,
    encode_request,
    encode_submits,
)

SUBMIT_BYTES_MAX = 16 * 1024 * 1024  # of a frame with several requests; FRAME_BYTES_MAX allows a single larger one
FINAL_EVENT_WAIT_S = 10.0  # an engine answers an abort in its next frame; only one that hangs or is faulty takes longer


class EngineClient:
    """Submits and aborts requests; `run` is the only reader of the socket. `fatal` is the error that the engine reported
    before it exited, if any, and `may_pass` whether another start may succeed; `is_bug` as in `EngineFrame`."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_frame: Callable[[EngineFrame], None] = lambda _frame: None,
        on_discarded: Callable[[int], None] = lambda _tokens: None,
        restart_eta_s: Callable[[], float | None] = lambda: None,
        final_event_wait_s: float | None = None,
    ) -> None:
        """`restart_eta_s` is called once the process has ended and estimates the seconds until its successor is ready.
        `on_discarded` is called with the number of tokens that arrived for a request that is no longer open."""
        self._socket = AsyncFrameSocket(connection)
        self._on_frame = on_frame
        self._on_discarded = on_discarded
        self._restart_eta_s = restart_eta_s
        self._final_event_wait_s = FINAL_EVENT_WAIT_S if final_event_wait_s is None else final_event_wait_s
        self._routes: dict[str, EventRoute] = {}
        self._submits: dict[str, bytes] = {}
        self._aborts: list[str] = []
        self._answer_aborts: list[tuple[str, int]] = []
        self._is_flush_scheduled = False
        self._closed_reason: str | None = None
        self.info: EngineInfo | None = None
        self.status: EngineStatus | None = None
        self.load_fraction: float | None = None
        self.fatal: str | None = None
        self.may_pass = False
        self.is_bug = False

    @property
    def open_requests(self) -> int:
        """Return the number of requests that have not had their final event."""
        return len(self._routes)

    def submit(self, request: GenerationRequest, receiver: EventReceiver) -> None:
        """Send `request` with the next frame; its events go to `receiver`. Raises EngineUnavailable when the engine is gone.

        It is encoded here, so that the TransportError of a request that cannot be sent reaches its own caller only.
        """
        if self._closed_reason is not None:
            raise EngineUnavailable(self._closed_reason, retry_after_s=self._restart_eta_s())
        encoded = encode_request(request)
        self._routes[request.request_id] = EventRoute(request.request_id, request.sampling.num_answers, receiver)
        self._submits[request.request_id] = encoded
        self._schedule_flush()

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a request with all its answers. An id that is not open is ignored.

        Its final events still arrive. If they do not within `final_event_wait_s`, the request fails with EngineUnavailable.
        """
        route = self._routes.get(request_id)
        if route is not None and route.open_answers and self._closed_reason is None:
            self._aborts.append(request_id)
            self._schedule_flush()
            self._set_end_timeout(request_id, None)

    def abort_answer(self, request_id: str, index: int) -> None:
        """Ask the engine to end one answer of a request, as `abort` does; the others continue."""
        route = self._routes.get(request_id)
        if route is not None and index in route.open_answers and self._closed_reason is None:
            self._answer_aborts.append((request_id, index))
            self._schedule_flush()
            self._set_end_timeout(request_id, index)

    def shut_down(self) -> None:
        """Ask the engine to shut down."""
        if self._closed_reason is None:
            self._flush()
            self._write(GatewayFrame(shutdown=True))

    def hang_up(self) -> None:
        """End `run` as if the engine had closed its end, which it cannot while it waits in the kernel."""
        self._socket.end()

    async def run(self) -> None:
        """Read frames until the engine closes its end. All open requests then fail with EngineUnavailable."""
        reason = "the engine process ended"
        try:
            while True:
                self._receive(decode_engine_frame(await self._socket.receive()))
        except PeerClosed:
            pass
        except TransportError as error:
            reason = f"the engine sent a frame that cannot be read: {error}"
        finally:
            self._close(self.fatal or reason)

    def _receive(self, frame: EngineFrame) -> None:
        if frame.load_fraction is not None:
            self.load_fraction = frame.load_fraction
        if frame.ready is not None:
            self.info = frame.ready
        if frame.status is not None:
            self.status = frame.status
        if frame.fatal is not None:
            self.fatal, self.may_pass, self.is_bug = frame.fatal, frame.may_pass, frame.is_bug
        for event in frame.events:
            route = self._routes.get(event.request_id)
            if route is None:
                self._on_discarded(len(event.token_ids))
                continue
            route.put(event)
            if not route.open_answers:
                del self._routes[event.request_id]
        for request_id, index, token_id in frame.decoded:
            route = self._routes.get(request_id)
            if route is None:
                self._on_discarded(1)
            else:
                route.put_token(index, token_id)
        self._on_frame(frame)

    def _schedule_flush(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send pending submits and aborts. Aborts go into a frame of their own behind the submits, so none precedes its own."""
        self._is_flush_scheduled = False
        if self._closed_reason is not None:
            return
        unsent, self._submits = self._submits, {}
        aborts, self._aborts = self._aborts, []
        answer_aborts, self._answer_aborts = self._answer_aborts, []
        try:
            for batch in _batches(unsent):
                self._socket.send(encode_submits([unsent[request_id] for request_id in batch]))
                for request_id in batch:
                    del unsent[request_id]
        finally:  # an error in this event-loop callback reaches no caller, so the unsent requests are failed here
            for request_id in unsent:
                self._fail(request_id, "the request could not be sent to the engine")
        if aborts or answer_aborts:
            self._write(GatewayFrame(abort=aborts, abort_answers=answer_aborts))

    def _write(self, frame: GatewayFrame) -> None:
        self._socket.send(encode_frame(frame))

    def _set_end_timeout(self, request_id: str, index: int | None) -> None:
        """Fail the request unless answer `index` (all answers, if None) has ended within `final_event_wait_s`."""
        asyncio.get_running_loop().call_later(self._final_event_wait_s, self._fail_if_open, request_id, index)

    def _fail_if_open(self, request_id: str, index: int | None) -> None:
        route = self._routes.get(request_id)
        if route is not None and (index is None or index in route.open_answers):
            self._fail(request_id, "the engine did not end the request")

    def _fail(self, request_id: str, reason: str) -> None:
        """End a request whose final event will not arrive. Does nothing if it has ended."""
        route = self._routes.pop(request_id, None)
        if route is not None:
            route.receiver.fail(EngineUnavailable(reason))

    def _close(self, reason: str) -> None:
        self._closed_reason = reason
        routes, self._routes = self._routes, {}
        for route in routes.values():
            route.receiver.fail(EngineUnavailable(reason, retry_after_s=self._restart_eta_s()))
        self._socket.close()


def _batches(submits: Mapping[str, bytes]) -> list[list[str]]:
    """Split the request ids in order into batches for one frame each: at most SUBMIT_BYTES_MAX, or a single larger request."""
    batches: list[list[str]] = []
    bytes_left = 0
    for request_id, encoded in submits.items():
        if not batches or len(encoded) > bytes_left:
            batches.append([])
            bytes_left = SUBMIT_BYTES_MAX
        batches[-1].append(request_id)
        bytes_left -= len(encoded)
    return batches
