"""A body of known length that is sent in pieces, between which other tasks run. Millions of log-probabilities in one piece are
copied several times before the first byte is sent, and all streams of all tenants wait meanwhile. Knows no field."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

from litestar.response import Stream
from litestar.types import ASGIApp, Receive, Scope, Send

from appliance.api.error_responses import MEDIA_TYPE
from appliance.api.sse import until_disconnected

PIECE_BYTES = 64 * 1024


class PiecedBody(Stream):
    """An answer whose body is `parts` one after another, `length` bytes in all."""

    def __init__(self, parts: Iterable[bytes], length: int) -> None:
        super().__init__(iter(()), media_type=MEDIA_TYPE)
        self._parts = parts
        self._length = length

    def to_asgi_response(self, *_given: Any, **_options: Any) -> ASGIApp:  # type: ignore[override]
        """Return what sends the answer."""
        return self._send

    async def _send(self, _scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(self._length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        listening = asyncio.create_task(until_disconnected(receive))
        try:
            for piece in _pieces(self._parts):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
                if listening.done():  # the client has left
                    return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            listening.cancel()


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `parts` joined to pieces of about PIECE_BYTES."""
    gathered: list[bytes] = []
    size = 0
    for part in parts:
        gathered.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
