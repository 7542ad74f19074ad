"""An HTTP connection that limits what a peer can cost us: size and duration of a request head, silence within a body, and the
time for which it takes nothing of a response.
               first byte               head ends                  body ends
  between ────────────────────► head ──────────────────► body ────────────────────► between
keep-alive limit (uvicorn's)    HEAD_DEADLINE_S in all,  BODY_IDLE_S between bytes,
HEAD_DEADLINE_S when new        HEAD_BYTES_MAX           total: `max_body_bytes` in the application
In every phase a peer that takes nothing of a response from one check to the next (SENDING_CHECK_S) is disconnected.
"""

from __future__ import annotations

import asyncio
import fcntl
import resource
import struct
import termios
from contextlib import suppress
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
SENDING_CHECK_S = 150.0  # two checks: 150 to 300 s. Longer than proxies wait, so that a client may pause to think
LINE_OVERHEAD_BYTES = 4  # colon, space and line end of a header

log = structlog.get_logger()


class HeadCoalescingTransport:
    """A transport that sends a response head together with the first write after it, in one packet instead of two.

    If nothing follows in the same iteration of the event loop, the head is sent in the next one.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._written_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """Return how much of what was written has reached the peer's machine, which takes no more than its reader leaves room
        for, and more only once there is room for a sixteenth of its buffer. The kernel's own queue is counted as unsent: it
        holds megabytes, and makes room for more only in large steps."""
        unsent_bytes = self._transport.get_write_buffer_size()
        queued = bytearray(4)
        with suppress(OSError, ValueError, AttributeError):  # no socket, closed, or of a kind that does not tell
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
            unsent_bytes += struct.unpack("i", queued)[0]
        return self._written_bytes - unsent_bytes

    def write(self, data: bytes) -> None:
        """Send `data`, preceded by the head if one is held back."""
        self._written_bytes += len(data)
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

    _phase = "between"
    _head_bytes = 0  # raw bytes received of an incomplete head
    _parsed_bytes = 0  # bytes of the head that the parser has reported
    _num_heads = 0
    _deadline: asyncio.TimerHandle | None = None
    _sending_check: asyncio.TimerHandle | None = None
    _taken_bytes: int | None = None  # at the last check; None if nothing was to be sent then
    _running: RequestResponseCycle | None = None  # uvicorn's `cycle` is the newest request's, which may still be queued

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = UpgradeIgnoringParser(self, self._head_without_upgrade)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, unless the remaining file descriptors are reserved for the appliance itself."""
        super().connection_made(transport)
        if len(self.connections) > _connections_max():
            transport.abort()
            return
        self.transport = HeadCoalescingTransport(transport, self.loop)  # type: ignore[assignment]
        self._set_deadline(HEAD_DEADLINE_S)
        self._check_sending()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clear the deadlines and notify the running request, which uvicorn does not if another request is queued behind it."""
        self._clear_deadline()
        if self._sending_check is not None:
            self._sending_check.cancel()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse `data`, then set the deadline for what the peer still has to send."""
        initial_phase, num_heads = self._phase, self._num_heads
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._phase == "head" and self._num_heads == num_heads and initial_phase != "body":
            # The parser does not report an incomplete header, so its bytes are counted here.
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse_head()
                return
        self._renew_deadline()

    def on_message_begin(self) -> None:
        """Reset the counts."""
        self._phase = "head"
        self._head_bytes = self._parsed_bytes = 0
        self._clear_deadline()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, including trailers after a chunked body."""
        self._count(len(name) + len(value) + LINE_OVERHEAD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, which reads the body; not yet if the head will be parsed again without its Upgrade header."""
        if self._has_ignored_upgrade():
            return
        self._phase = "body"
        self._num_heads += 1
        self._clear_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Clear the deadline: the peer owes nothing until its next request."""
        if self._has_ignored_upgrade():
            return
        self._phase = "between"
        self._clear_deadline()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run the application, for HTTP/1.0 clients without chunked encoding."""
        self._running = cycle
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - our own message says more
        """Respond to a request that the parser rejected, perhaps because our own byte count stopped it."""
        if self._parsed_bytes > HEAD_BYTES_MAX:
            self._refuse_head()
        else:
            self._refuse("400 Bad Request", InvalidValue("this is not an HTTP/1.1 request"))

    def _has_ignored_upgrade(self) -> bool:
        """Return whether the parser will stop after this head because of an Upgrade header, which we ignore."""
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _value in self.headers)

    def _head_without_upgrade(self) -> bytes | None:
        """Return the head after which the parser stopped, without its Upgrade header; None if it has none."""
        if not self._has_ignored_upgrade():
            return None
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > HEAD_BYTES_MAX:
            raise ValueError("the head is too large")  # stops the parser, and uvicorn then calls `send_400_response`

    def _refuse_head(self) -> None:
        too_large = RequestTooLarge(f"the request line and headers have more than {HEAD_BYTES_MAX} bytes")
        self._refuse("431 Request Header Fields Too Large", too_large)

    def _refuse(self, status: str, error: GatehouseError) -> None:
        """Respond with `error` to a request that cannot be read, and close the connection; without a response if that would be
        taken for the response to an earlier request, or for a part of it."""
        if not self._may_respond():
            self.transport.close()
            return
        body = encode_error(error)
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"cache-control: no-store\r\nx-request-id: {new_id('req')}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _may_respond(self) -> bool:
        """Return whether the next bytes sent would be the response to the request that is being read."""
        running = self._running
        if running is not None and self._phase == "body":
            return running is self.cycle and not running.response_started
        return running is None or running.response_complete

    def _check_sending(self) -> None:
        """Abort the connection if the peer has taken nothing since the last check, although there was something to be sent. A
        closed one is checked too: it waits until all is sent."""
        is_sending = self.transport.get_write_buffer_size() > 0
        taken_bytes = self.transport.taken_bytes if is_sending else None  # type: ignore[attr-defined]
        if is_sending and taken_bytes == self._taken_bytes:
            log.info("connection ended: the client reads nothing of the response", address=self.client and self.client[0])
            self.transport.abort()
            return
        self._taken_bytes = taken_bytes
        self._sending_check = self.loop.call_later(SENDING_CHECK_S, self._check_sending)

    def _renew_deadline(self) -> None:
        """Set the single deadline of a head, or renew that of a body. A peer that waits for its response has no deadline."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._phase == "body":
            self._set_deadline(BODY_IDLE_S)
        elif self._deadline is None and (self._phase == "head" or (is_idle and self.timeout_keep_alive_task is None)):
            self._set_deadline(HEAD_DEADLINE_S)

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        """Close the connection, unless we have paused reading and so cannot tell whether the peer is silent."""
        self._deadline = None
        if self.flow.read_paused:
            self._set_deadline(BODY_IDLE_S)
        elif not self.transport.is_closing():
            self.transport.close()


def _without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return `app` for a client without chunked encoding: a response of unknown length ends with the connection (RFC 9112,
    section 6.3). uvicorn checks such a response against an expected length, which is therefore set for each piece."""

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
    """Raise the soft limit of open files to the hard limit: each connection is a file, and the default is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        log.warning("cannot raise the limit of open files", limit=soft, reason=str(error))


def _connections_max() -> int:
    """Return three quarters of the open-files limit: the rest is for the database, the engines and their sockets."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft * 3 // 4
