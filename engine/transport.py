"""Frames on the socket between gateway and engine: four bytes of length, then MessagePack. Knows no torch.

The gateway's end is an `AsyncFrameSocket`; the engine, which must not wait while requests run, uses `FrameSocket`.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Sequence
from functools import partial

import msgspec

from engine.protocol import FRAME_BYTES_MAX, EngineFrame, GatewayFrame, GenerationRequest

LENGTH = struct.Struct(">I")
READ_BYTES = 256 * 1024
READS_PER_ITERATION = 4
UNSENT_BYTES_MAX = FRAME_BYTES_MAX
"""Most bytes that the engine keeps for a gateway that does not read; beyond that it treats the gateway as dead."""


class TransportError(Exception):
    """Base class of errors on the socket."""


class PeerClosed(TransportError):
    """The other process closed the socket or died."""


class PeerStalled(TransportError):
    """The other process does not read what is sent."""


class FrameTooLarge(TransportError):
    """A frame exceeds `FRAME_BYTES_MAX`."""


class MalformedFrame(TransportError):
    """A frame violates the protocol."""


_encoder = msgspec.msgpack.Encoder()
_gateway_decoder = msgspec.msgpack.Decoder(GatewayFrame)
_engine_decoder = msgspec.msgpack.Decoder(EngineFrame)


def encode_frame(frame: GatewayFrame | EngineFrame) -> bytes:
    """Length and body, ready to send. Raises `FrameTooLarge`."""
    return _with_length(_encoder.encode(frame))


def encode_request(request: GenerationRequest) -> bytes:
    """One item for `encode_submits`. Raises `MalformedFrame` for a value that no frame can carry (an integer beyond 64
    bits)."""
    try:
        return _encoder.encode(request)
    except (OverflowError, TypeError, ValueError) as error:
        raise MalformedFrame(f"request {request.request_id} cannot be sent: {error}") from error


def encode_submits(requests: Sequence[bytes]) -> bytes:
    """A `GatewayFrame` that submits requests which `encode_request` has encoded. Raises `FrameTooLarge`."""
    return _with_length(_encoder.encode({"submit": [msgspec.Raw(request) for request in requests]}))


def decode_gateway_frame(body: bytes) -> GatewayFrame:
    """The frame in `body` (without its length). Raises `MalformedFrame`."""
    try:
        return _gateway_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise MalformedFrame(f"gateway frame: {error}") from error


def decode_engine_frame(body: bytes) -> EngineFrame:
    """The frame in `body` (without its length). Raises `MalformedFrame`."""
    try:
        return _engine_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise MalformedFrame(f"engine frame: {error}") from error


def _with_length(body: bytes) -> bytes:
    _check_length(len(body))
    return LENGTH.pack(len(body)) + body


def _check_length(length: int) -> None:
    if length > FRAME_BYTES_MAX:
        raise FrameTooLarge(f"a frame of {length} bytes exceeds {FRAME_BYTES_MAX}")


def _pop_frame(received: bytearray) -> bytes | None:
    """Remove the first frame from `received` and return its body; None while it is incomplete. Raises `FrameTooLarge`."""
    if len(received) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(received)
    _check_length(length)
    end = LENGTH.size + length
    if len(received) < end:
        return None
    body = bytes(received[LENGTH.size : end])
    del received[:end]
    return body


class AsyncFrameSocket:
    """A stream socket in the running event loop, open from creation until `close`. Reads everything that the peer has sent.

    An asyncio transport closes when a write fails, and drops what it has not read: the last frames of a killed peer. Here the
    two directions are independent.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._chunk = memoryview(bytearray(READ_BYTES))
        self._received = bytearray()
        self._unsent = bytearray()
        self._arrived = asyncio.Event()
        self._ended = self._closed = False
        self._loop.add_reader(connection, self._read)

    async def receive(self) -> bytes:
        """Body of the next frame. Raises `PeerClosed` after the last one that the peer has sent, and `FrameTooLarge`."""
        while (body := _pop_frame(self._received)) is None:
            if self._ended:
                raise PeerClosed("the socket was closed")
            self._arrived.clear()
            await self._arrived.wait()
        return body

    def send(self, frame: bytes) -> None:
        """Send what the socket accepts now, and the rest when it accepts more. Frames to a peer that has closed are lost."""
        self._unsent += frame
        self._write()

    def end(self) -> None:
        """Have `receive` raise `PeerClosed` after the frames that have arrived."""
        self._ended = True
        self._arrived.set()

    def close(self) -> None:
        """Close the socket; unsent frames are dropped."""
        self._closed = True
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()

    def _read(self) -> None:
        """Read everything available, in parts: one per turn of the loop, which a peer that keeps sending would block otherwise.

        Keeps reading without further calls: if the peer died with our data unread, uvloop calls once and never again.
        """
        if self._closed:
            return
        try:
            for _ in range(READS_PER_ITERATION):
                num_bytes = self._connection.recv_into(self._chunk)
                self._received += self._chunk[:num_bytes]
                if not num_bytes:
                    self._ended = True
                    break
            else:
                self._loop.call_soon(self._read)
        except BlockingIOError:
            pass
        except ConnectionError:  # the kernel delivers what the peer had sent first, then this
            self._ended = True
        if self._ended:
            self._loop.remove_reader(self._connection)
        self._arrived.set()

    def _write(self) -> None:
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # `receive` reports that the peer is gone, after everything it has sent
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._connection, self._write)
        else:
            self._loop.remove_writer(self._connection)


class FrameSocket:
    """A stream socket that sends and receives frames and never blocks for longer than requested."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._poll = select.poll()  # not `select.select`, which refuses file numbers of 1024 and more
        self._received = bytearray()
        self._unsent = bytearray()

    def receive(self, timeout_s: float) -> list[bytes]:
        """Bodies of all frames received, after waiting up to `timeout_s` for the first event."""
        self._poll.register(self._connection, select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN)
        found = self._poll.poll(timeout_s * 1000)
        events = found[0][1] if found else 0
        if events & select.POLLOUT:
            self.flush()
        if events & ~select.POLLOUT:
            self._read_all()
        return list(iter(partial(_pop_frame, self._received), None))

    def send(self, frame: EngineFrame | GatewayFrame) -> None:
        """Queue a frame and send what the socket accepts. Raises `PeerClosed` and `PeerStalled`."""
        self._unsent += encode_frame(frame)
        self.flush()
        if len(self._unsent) > UNSENT_BYTES_MAX:
            raise PeerStalled(f"{len(self._unsent)} bytes are unsent")

    def flush(self) -> None:
        """Send what the socket accepts now."""
        while self._unsent:
            try:
                sent = self._connection.send(self._unsent)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise PeerClosed("the socket was closed") from error
            del self._unsent[:sent]

    def drain(self, timeout_s: float) -> None:
        """Send the rest before the process ends, as far as `timeout_s` allows."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(self._unsent)
        except (TimeoutError, ConnectionError) as error:
            raise PeerStalled("the last frames could not be sent") from error
        self._unsent.clear()

    def close(self) -> None:
        """Close the socket; unsent frames are dropped."""
        self._connection.close()

    def _read_all(self) -> None:
        while True:
            try:
                data = self._connection.recv(READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise PeerClosed("the socket was closed") from error
            if not data:
                raise PeerClosed("the socket was closed")
            self._received += data
            if len(data) < READ_BYTES:
                return
