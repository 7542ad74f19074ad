"""A minimal HTTP/1.1 client that generates load from a process sharing the gateway's cores. Sends JSON, and reads responses
with a content length and chunked event streams; anything else from a server is an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


class ConnectionLost(Exception):
    """The server closed the connection."""


@dataclass(slots=True)
class ResponseHead:
    """Status and headers of a response; header names are in lower case."""

    status: int
    headers: dict[str, str]


class RawHttpClient:
    """One connection to 127.0.0.1, used for one request after another. Raises ConnectionLost if the server closes it."""

    def __init__(self, port: int, authorization: str) -> None:
        self._port = port
        self._authorization = authorization
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, method: str, path: str, body: Any = None) -> ResponseHead:
        """Send a request and return the head of the response; read its body before the next request, or `abort`."""
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._authorization}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        try:
            if self._writer is None:
                self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            self._writer.write(head.encode() + content)
            return _head(await self._read.readuntil(b"\r\n\r\n"))
        except (OSError, asyncio.IncompleteReadError) as error:
            self.abort()
            raise ConnectionLost(str(error)) from error

    async def content(self, head: ResponseHead) -> bytes:
        """Return the body of a response, chunked or with a content length."""
        try:
            if "content-length" in head.headers:
                return await self._read.readexactly(int(head.headers["content-length"]))
            return b"".join([part async for part in self._chunks()])
        except (OSError, asyncio.IncompleteReadError) as error:
            self.abort()
            raise ConnectionLost(str(error)) from error

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event of a chunked response."""
        remainder = b""
        try:
            async for part in self._chunks():
                *frames, remainder = (remainder + part).split(b"\n\n")
                for frame in frames:
                    if frame.startswith(b"data: "):
                        yield frame[6:]
        except (OSError, asyncio.IncompleteReadError) as error:
            self.abort()
            raise ConnectionLost(str(error)) from error

    def abort(self) -> None:
        """Close the connection at once; the next request opens a new one."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._reader = self._writer = None

    @property
    def _read(self) -> asyncio.StreamReader:
        if self._reader is None:
            raise ConnectionLost("the connection is closed")
        return self._reader

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._read.readuntil(b"\r\n"), 16):
            yield (await self._read.readexactly(size + 2))[:-2]
        await self._read.readuntil(b"\r\n")


def _head(lines: bytes) -> ResponseHead:
    first, *remainder = lines.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in remainder if line)
    return ResponseHead(int(first.split(" ", 2)[1]), {name.lower(): value for name, value in headers.items()})
