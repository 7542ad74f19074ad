"""Limits of an HTTP connection: oversized heads and silent peers are closed, and correct use stays open."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from appliance.api import http_connection
from appliance.api.http_connection import (
    BODY_IDLE_S,
    HEAD_BYTES_MAX,
    HEAD_DEADLINE_S,
    SENDING_CHECK_S,
    HeadCoalescingTransport,
    LimitedConnection,
    raise_open_files_limit,
)

GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n"


class RecordingTransport(asyncio.Transport):
    """Records what is sent to the peer, and whether the connection was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.sent = b""
        self.closed = False
        self.num_unsent = 0

    def get_write_buffer_size(self) -> int:
        """Return how much of what was written is still to be sent, as the test says."""
        return self.num_unsent

    def write(self, data: Any) -> None:
        """Record the data."""
        self.writes.append(bytes(data))
        self.sent += bytes(data)

    def close(self) -> None:
        """Record that the connection was closed."""
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        """Return whether it was closed."""
        return self.closed

    def pause_reading(self) -> None:
        """Do nothing."""

    resume_reading = pause_reading


class Timers:
    """Timers of the event loop that run when the test advances them; everything else is the real loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pending: list[tuple[float, Callable[..., None], asyncio.TimerHandle]] = []
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        """Delegate to the real loop."""
        return getattr(self._loop, name)

    def call_later(self, delay_s: float, callback: Callable[..., None]) -> asyncio.TimerHandle:
        """Schedule the callback for `advance`."""
        handle = asyncio.TimerHandle(self.now_s + delay_s, callback, (), self._loop)
        self.pending.append((self.now_s + delay_s, callback, handle))
        return handle

    def advance(self, seconds: float) -> None:
        """Run the callbacks that are due."""
        self.now_s += seconds
        due = [timer for timer in self.pending if timer[0] <= self.now_s]
        self.pending = [timer for timer in self.pending if timer[0] > self.now_s]
        for _at, callback, handle in due:
            if not handle.cancelled():
                callback()


async def answer(_scope: Any, receive: Any, send: Any) -> None:
    """Read the whole body, then answer."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def opened(app: Any = answer) -> tuple[LimitedConnection, RecordingTransport, Timers]:
    """Return a connection just accepted."""
    config = uvicorn.Config(app, http=LimitedConnection, ws="none", lifespan="off", log_config=None, timeout_keep_alive=75)
    config.load()
    wire, timers = RecordingTransport(), Timers()
    connection = LimitedConnection(config, ServerState(), {}, cast("asyncio.AbstractEventLoop", timers))
    connection.connection_made(wire)
    return connection, wire, timers


async def answered(wire: RecordingTransport) -> None:
    """Wait until the application has answered once."""
    async with asyncio.timeout(60):
        while b"HTTP/1.1 200" not in wire.sent:  # noqa: ASYNC110 - a transport has no event
            await asyncio.sleep(0)


HUGE = b"x" * (HEAD_BYTES_MAX + 1)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\nlong: " + HUGE,
        b"GET / HTTP/1.1\r\nhost: a\r\nlong: " + HUGE + b"\r\n\r\n",
        b"GET /" + HUGE + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (HEAD_BYTES_MAX // 6 + 1) + b"\r\n",
    ],
)
@pytest.mark.parametrize("piece", [1000, 10**6])
async def test_a_head_beyond_the_limit_is_a_431_and_closes_the_connection(head: bytes, piece: int) -> None:
    connection, wire, _timers = await opened()
    for start in range(0, len(head), piece):
        if not wire.closed:
            connection.data_received(head[start : start + piece])

    assert wire.sent.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"request_too_large"' in wire.sent
    assert b"\r\nx-request-id: req_" in wire.sent
    assert wire.sent.count(b"HTTP/1.1") == 1
    assert wire.closed


@pytest.mark.parametrize(
    "bad", [b"\x16\x03\x01", b"GET /" + HUGE, POST.replace(b"10", b"-1")], ids=["binary", "long", "length"]
)
async def test_an_invalid_request_behind_one_that_is_served_closes_the_connection_without_a_response(bad: bytes) -> None:
    async def never_answer(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    connection, wire, _timers = await opened(never_answer)
    connection.data_received(GET + bad)
    assert (wire.sent, wire.closed) == (b"", True)
    connection.connection_lost(None)
    await asyncio.wait(connection.tasks)


async def test_an_invalid_request_behind_a_running_stream_ends_it_without_another_head() -> None:
    connection, wire, _timers = await streaming()
    connection.data_received(b"\x16\x03\x01")
    assert (wire.sent.count(b"HTTP/1.1"), wire.closed) == (1, True)
    connection.connection_lost(None)
    await asyncio.wait(connection.tasks)


async def test_an_invalid_chunk_behind_an_early_response_closes_the_connection_without_another_response() -> None:
    async def answer_unread(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    connection, wire, _timers = await opened(answer_unread)
    connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    await answered(wire)
    connection.data_received(b"zz\r\n")
    assert (wire.sent.count(b"HTTP/1.1"), wire.closed) == (1, True)
    connection.connection_lost(None)


async def test_an_invalid_chunk_of_a_body_is_a_400() -> None:
    connection, wire, _timers = await opened()
    connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
    assert wire.sent.startswith(b"HTTP/1.1 400 ")
    connection.connection_lost(None)
    await asyncio.wait(connection.tasks)


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\nhost: a\n\n", b"\x16\x03\x01\x02\x00", POST.replace(b"10", b"-1")])
async def test_an_invalid_request_is_a_400_in_the_common_error_shape(start: bytes) -> None:
    connection, wire, _timers = await opened()
    connection.data_received(start)

    head, _, body = wire.sent.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nx-request-id: req_" in head
    assert b"\r\ncache-control: no-store\r\n" in head
    assert b"\r\ncontent-length: %d\r\n" % len(body) in head + b"\r\n"
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_value")
    assert wire.closed


UPGRADE_OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("piece", [1, 10**6])
@pytest.mark.parametrize(
    "body", [b"content-length: 5\r\n\r\nhello", b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"]
)
async def test_an_offered_protocol_upgrade_is_ignored(body: bytes, piece: int) -> None:
    bodies: list[bytes] = []

    async def record_body(scope: Any, receive: Any, send: Any) -> None:
        received, more = b"", True
        while more:
            message = await receive()
            received, more = received + message["body"], message["more_body"]
        bodies.append(scope["path"].encode() + b" " + received)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    connection, wire, _timers = await opened(record_body)
    for path in (b"/first", b"/second"):
        wire.sent = b""
        request = b"POST %s HTTP/1.1\r\nhost: a\r\n" % path + UPGRADE_OFFER + body
        for start in range(0, len(request), piece):
            connection.data_received(request[start : start + piece])
        await answered(wire)
    assert bodies == [b"/first hello", b"/second hello"]
    assert not wire.closed


async def test_many_pipelined_requests_with_upgrade_offers_are_answered_in_order() -> None:
    paths: list[str] = []

    async def record_path(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await answer(scope, receive, send)

    connection, wire, _timers = await opened(record_path)
    connection.data_received(
        b"".join(b"GET /%d HTTP/1.1\r\nhost: a\r\n" % number + UPGRADE_OFFER + b"\r\n" for number in range(1200))
    )
    async with asyncio.timeout(60):
        while wire.sent.count(b"HTTP/1.1 200") < 1200:  # noqa: ASYNC110 - a transport has no event
            await asyncio.sleep(0)
    assert paths == [f"/{number}" for number in range(1200)]


async def test_the_limit_applies_to_each_head_without_bodies() -> None:
    connection, wire, _timers = await opened()
    head = b"POST / HTTP/1.1\r\nhost: a\r\nlong: " + b"x" * 40_000 + b"\r\ncontent-length: 200000\r\n\r\n"
    for _ in range(3):
        wire.sent = b""
        connection.data_received(head + b"b" * 100_000)
        connection.data_received(b"b" * 100_000)
        await answered(wire)

    assert not wire.closed


async def test_an_incomplete_head_closes_the_connection_after_its_deadline() -> None:
    connection, wire, timers = await opened()
    connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n")
    timers.advance(HEAD_DEADLINE_S - 1)
    connection.data_received(b"a: b\r\n")
    assert not wire.closed
    timers.advance(1)

    assert wire.closed


async def test_a_silent_connection_is_closed_after_the_deadline() -> None:
    _connection, wire, timers = await opened()
    timers.advance(HEAD_DEADLINE_S)

    assert wire.closed


async def test_empty_lines_between_requests_do_not_keep_a_connection_open() -> None:
    connection, wire, timers = await opened()
    connection.data_received(GET)
    await answered(wire)
    connection.data_received(b"\r\n")
    timers.advance(HEAD_DEADLINE_S)

    assert wire.closed


async def test_a_slow_body_is_accepted_and_a_stalled_one_closes_the_connection() -> None:
    connection, wire, timers = await opened()
    connection.data_received(POST)
    for _ in range(5):
        timers.advance(BODY_IDLE_S - 1)
        connection.data_received(b"b")
    assert not wire.closed
    timers.advance(BODY_IDLE_S)

    assert wire.closed


async def test_a_body_paused_by_flow_control_does_not_time_out() -> None:
    connection, wire, timers = await opened()
    connection.data_received(POST)
    connection.flow.pause_reading()
    timers.advance(10 * BODY_IDLE_S)

    assert not wire.closed


async def test_a_slow_response_does_not_time_out() -> None:
    may_end = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await may_end.wait()
        await answer(scope, receive, send)

    connection, wire, timers = await opened(slow)
    connection.data_received(POST + b"b" * 10)
    timers.advance(3600)
    assert not wire.closed
    may_end.set()
    await answered(wire)


async def endless(_scope: Any, receive: Any, send: Any) -> None:
    """Answer with a stream that does not end before the client has left."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"data", "more_body": True})
    await receive()


async def streaming() -> tuple[LimitedConnection, RecordingTransport, Timers]:
    """Return a connection on which `endless` has begun to answer."""
    connection, wire, timers = await opened(endless)
    connection.data_received(GET)
    await answered(wire)
    return connection, wire, timers


async def test_a_peer_that_takes_nothing_between_two_checks_is_disconnected() -> None:
    _connection, wire, timers = await streaming()
    wire.num_unsent = len(wire.sent)
    timers.advance(SENDING_CHECK_S)
    assert not wire.closed
    timers.advance(SENDING_CHECK_S)
    assert wire.closed


async def test_a_peer_that_takes_a_byte_between_two_checks_stays_connected() -> None:
    _connection, wire, timers = await streaming()
    wire.num_unsent = len(wire.sent)
    for _ in range(5):
        timers.advance(SENDING_CHECK_S)
        wire.num_unsent -= 1
    assert not wire.closed


async def test_a_peer_that_takes_as_much_as_is_written_stays_connected() -> None:
    connection, wire, timers = await streaming()
    wire.num_unsent = len(wire.sent)
    for _ in range(5):
        timers.advance(SENDING_CHECK_S)
        connection.transport.write(b"data")
    assert not wire.closed


async def test_a_peer_that_is_owed_nothing_stays_connected_however_long_the_answer_takes() -> None:
    _connection, wire, timers = await streaming()
    for _ in range(5):
        timers.advance(SENDING_CHECK_S)
    assert not wire.closed


async def test_a_closed_connection_whose_peer_takes_nothing_of_the_rest_is_ended() -> None:
    connection, wire, timers = await streaming()
    wire.num_unsent = len(wire.sent)
    timers.advance(SENDING_CHECK_S)
    connection.transport.close()
    wire.closed = False  # it waits until the rest is sent
    timers.advance(SENDING_CHECK_S)
    assert wire.closed


async def test_a_lost_connection_is_not_checked_any_more() -> None:
    connection, _wire, timers = await streaming()
    connection.connection_lost(None)
    assert all(handle.cancelled() for _at, _callback, handle in timers.pending)


async def test_what_the_peers_machine_takes_counts_though_the_transport_has_as_much_left_to_send() -> None:
    loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
    theirs.setblocking(False)
    transport, _protocol = await loop.create_connection(asyncio.Protocol, sock=ours)
    with closing(theirs), closing(HeadCoalescingTransport(transport, loop)) as sending:
        sending.write(bytes(4_000_000))
        left, taken = transport.get_write_buffer_size(), sending.taken_bytes
        assert left > 0
        theirs.recv(200_000)
        assert transport.get_write_buffer_size() == left
        assert sending.taken_bytes > taken
        transport.abort()


async def test_a_peer_that_shuts_down_its_sending_side_counts_as_disconnected() -> None:
    messages: asyncio.Queue[str] = asyncio.Queue()

    async def wait_for_disconnect(_scope: Any, receive: Any, _send: Any) -> None:
        while (kind := (await receive())["type"]) != "http.disconnect":
            messages.put_nowait(kind)
        messages.put_nowait(kind)

    config = uvicorn.Config(wait_for_disconnect, http=LimitedConnection, ws="none", lifespan="off", log_config=None)
    ours, theirs = socket.socketpair()
    with closing(theirs):
        await asyncio.get_running_loop().connect_accepted_socket(lambda: LimitedConnection(config, ServerState(), {}), ours)
        theirs.sendall(GET)
        assert await messages.get() == "http.request"
        theirs.shutdown(socket.SHUT_WR)
        assert await messages.get() == "http.disconnect"


async def test_a_disconnect_with_a_pipelined_request_also_ends_the_first() -> None:
    received: list[str] = []

    async def receive_twice(_scope: Any, receive: Any, _send: Any) -> None:
        received.extend([(await receive())["type"], (await receive())["type"]])

    connection, _wire, _timers = await opened(receive_twice)
    connection.data_received(GET + GET)
    connection.connection_lost(None)
    async with asyncio.timeout(60):
        await asyncio.wait(connection.tasks)
    assert received == ["http.disconnect", "http.disconnect"]


async def test_connections_beyond_the_limit_of_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_connections_max", lambda: 0)
    _connection, wire, _timers = await opened()

    assert wire.closed


def test_the_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        raise_open_files_limit()

        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_head_is_sent_together_with_a_body_that_follows_at_once() -> None:
    async def send_two_parts(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"hello", "more_body": True})
        await send({"type": "http.response.body", "body": b"there"})

    connection, wire, _timers = await opened(send_two_parts)
    connection.data_received(GET)
    await answered(wire)

    assert [write[-5:] for write in wire.writes] == [b"hello", b"there"]
    assert wire.writes[0].startswith(b"HTTP/1.1 200 ")


async def test_a_head_is_sent_before_a_delayed_body() -> None:
    body = asyncio.Event()

    async def send_delayed_body(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await body.wait()
        await send({"type": "http.response.body", "body": b"hello"})

    connection, wire, _timers = await opened(send_delayed_body)
    connection.data_received(GET)
    await answered(wire)
    assert wire.sent.endswith(b"\r\n\r\n")
    body.set()
    async with asyncio.timeout(60):
        while not wire.sent.endswith(b"hello"):  # noqa: ASYNC110 - a transport has no event
            await asyncio.sleep(0)

    assert wire.writes[1:] == [b"hello"]


async def test_a_head_without_a_body_is_sent_before_the_connection_is_closed() -> None:
    async def send_no_body(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b""})

    connection, wire, _timers = await opened(send_no_body)
    connection.data_received(GET)
    await until_closed(wire)

    assert wire.sent.startswith(b"HTTP/1.1 204 ")
    assert wire.sent.endswith(b"\r\n\r\n")


async def stream(_scope: Any, _receive: Any, send: Any) -> None:
    """Answer with a stream of unknown length."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for piece in (b"data: 1\n\n", b"data: 2\n\n"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def until_closed(wire: RecordingTransport) -> None:
    """Wait until the connection is closed."""
    async with asyncio.timeout(60):
        while not wire.closed:  # noqa: ASYNC110 - a transport has no event
            await asyncio.sleep(0)


async def test_an_http_1_0_stream_is_not_chunked_and_ends_with_the_connection() -> None:
    connection, wire, _timers = await opened(stream)
    connection.data_received(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    await until_closed(wire)
    head, _, body = wire.sent.partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"data: 1\n\ndata: 2\n\n"


async def test_an_http_1_0_response_of_known_length_has_its_content_length() -> None:
    connection, wire, _timers = await opened()
    connection.data_received(b"GET / HTTP/1.0\r\n\r\n")
    await until_closed(wire)

    assert b"content-length: 0" in wire.sent
    assert wire.sent.endswith(b"\r\n\r\n")


async def test_an_http_1_1_stream_is_chunked() -> None:
    connection, wire, _timers = await opened(stream)
    connection.data_received(GET)
    async with asyncio.timeout(60):
        while not wire.sent.endswith(b"0\r\n\r\n"):  # noqa: ASYNC110 - a transport has no event
            await asyncio.sleep(0)

    assert b"transfer-encoding: chunked" in wire.sent
    assert not wire.closed
