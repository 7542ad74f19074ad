"""One HTTP connection with limits on what a peer can make us hold: bytes of a head, time for a head, silence in a body.

               first byte               head ends                  body ends
  between ────────────────────► head ──────────────────► body ────────────────────► between
keep-alive limit (uvicorn's)    HEAD_DEADLINE_S in all,  BODY_IDLE_S between bytes,
HEAD_DEADLINE_S when new        HEAD_BYTES_MAX           total: `max_body_bytes` in the application
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from appliance.api.error_responses import encode_error
from appliance.api.http_parser import UpgradeIgnoringParser
from appliance.base.errors import GatehouseError, InvalidValue, RequestTooLarge
from appliance.base.ids import new_id

HEAD_BYTES_MAX = 64 * 1024
HEAD_DEADLINE_S = 30.0
BODY_IDLE_S = 60.0
LINE_OVERHEAD_BYTES = 4  # colon, space and line end of a header

log = structlog.get_logger()


class HeadWithBody:
    """A transport that sends the head of an answer together with what is written right after it: one packet instead of two.

    A head that nothing follows in the same turn of the event loop is sent in the next turn.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        """Send `data`, after the head if one is held back."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self._send_head)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close once all has been sent."""
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's protocol with the limits it lacks: on heads and on silence."""

    _part = "between"
    _head_bytes = 0  # raw bytes received of a head that is not complete
    _named_bytes = 0  # bytes of the head that the parser has handed over
    _num_heads = 0
    _deadline: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # uvicorn's `cycle` is that of the newest request, which may stand in line

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = UpgradeIgnoringParser(self, self._head_without_offer)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept, unless the appliance itself needs the file descriptors that are left."""
        super().connection_made(transport)
        if len(self.connections) > _connections_max():
            transport.abort()
            return
        self.transport = HeadWithBody(transport, self.loop)  # type: ignore[assignment]
        self._set_deadline(HEAD_DEADLINE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline, and tell the request that is answered, which uvicorn does not if another one stands in line."""
        self._clear_deadline()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse `data`, then set the deadline of what the peer still has to send."""
        began_in, num_heads = self._part, self._num_heads
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._part == "head" and self._num_heads == num_heads and began_in != "body":
            # The parser keeps an unfinished header to itself, so its bytes are counted here.
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse_head()
                return
        self._renew_deadline()

    def on_message_begin(self) -> None:
        """Reset the counts."""
        self._part = "head"
        self._head_bytes = self._named_bytes = 0
        self._clear_deadline()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, also one that follows a chunked body."""
        self._count(len(name) + len(value) + LINE_OVERHEAD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, which reads the body; not yet for a head that will be parsed again without its offer."""
        if self._offers_another_protocol():
            return
        self._part = "body"
        self._num_heads += 1
        self._clear_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Clear the deadline: the peer owes nothing until its next request."""
        if self._offers_another_protocol():
            return
        self._part = "between"
        self._clear_deadline()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run the application, for a client of HTTP/1.0 in a form that it can read."""
        self._running = cycle
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - it says less than ours
        """Answer a request that the parser refused, perhaps because our own count of bytes stopped it."""
        if self._named_bytes > HEAD_BYTES_MAX:
            self._refuse_head()
        else:
            self._refuse("400 Bad Request", InvalidValue("this is not an HTTP/1.1 request"))

    def _offers_another_protocol(self) -> bool:
        """Return whether the parser will stop after this head because of an offer that we ignore."""
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _value in self.headers)

    def _head_without_offer(self) -> bytes | None:
        """Return the head after which the parser stopped, without its offer; None when it has none."""
        if not self._offers_another_protocol():
            return None
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, num_bytes: int) -> None:
        self._named_bytes += num_bytes
        if self._named_bytes > HEAD_BYTES_MAX:
            raise ValueError("the head is too large")  # stops the parser, and uvicorn then calls `send_400_response`

    def _refuse_head(self) -> None:
        too_large = RequestTooLarge(f"the request line and headers have more than {HEAD_BYTES_MAX} bytes")
        self._refuse("431 Request Header Fields Too Large", too_large)

    def _refuse(self, status: str, error: GatehouseError) -> None:
        """Answer with `error` a request that never reaches the application, and hang up."""
        body = encode_error(error)
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {new_id('req')}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _renew_deadline(self) -> None:
        """Give a head its one deadline and a body a new one; a peer that waits for its answer owes nothing."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._part == "body":
            self._set_deadline(BODY_IDLE_S)
        elif self._deadline is None and (self._part == "head" or (is_answered and self.timeout_keep_alive_task is None)):
            self._set_deadline(HEAD_DEADLINE_S)

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        """Hang up, unless we have paused reading: then the peer is not silent."""
        self._deadline = None
        if self.flow.read_paused:
            self._set_deadline(BODY_IDLE_S)
        elif not self.transport.is_closing():
            self.transport.close()


def _without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return `app` for a client that knows no chunks: an answer of unknown length ends with the connection (RFC 9112,
    section 6.3). Without chunks uvicorn checks an answer against its announced length, so each piece announces its own."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        has_length = False

        async def send_plain(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _value in message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return run


def raise_open_files_limit() -> None:
    """Let this process open as many files as the system allows: each connection is one, and the default is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        log.warning("the limit of open files stays as it is", limit=soft, reason=str(error))


def _connections_max() -> int:
    """Return three quarters of the files that may be open: the rest is for the database, the engines and their sockets."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft * 3 // 4
