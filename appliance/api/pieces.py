"""Answers that are sent in pieces, between which other tasks run. Knows no field.

Millions of log-probabilities in one piece are copied several times before the first byte is sent, and all streams of all
tenants wait meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from litestar.response import Stream
from litestar.types import ASGIApp, Receive, Scope, Send

from appliance.api.error_responses import MEDIA_TYPE

PIECE_BYTES = 64 * 1024


class LastPiece(bytes):
    """A piece that is known to be the last one: the end of the answer is sent with it, not in a packet of its own."""


class PiecedBody(Stream):
    """An answer whose `pieces` are sent as they come.

    Litestar itself uses a task group with two tasks and their cancel scopes, which cost more than tokenising a prompt. Here the
    answering task sends; `Exchange.cancel_on_disconnect` ends it when the client leaves.
    """

    def __init__(self, pieces: AsyncIterator[bytes], headers: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__(pieces)
        self._pieces = pieces
        self._headers = headers

    def to_asgi_response(self, *_given: Any, **_options: Any) -> ASGIApp:  # type: ignore[override]
        """Return what sends the answer."""
        return self._send

    async def _send(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        is_last = False
        async for piece in self._pieces:
            is_last = isinstance(piece, LastPiece)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        if not is_last:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def long_body(parts: Iterable[bytes], length: int) -> PiecedBody:
    """Return a JSON answer of `length` bytes whose body is `parts` one after another."""
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(length).encode())]
    return PiecedBody(_in_pieces(parts), headers)


async def _in_pieces(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield `parts` joined to pieces of about PIECE_BYTES, and let other tasks run after each."""
    gathered: list[bytes] = []
    size = 0
    for part in parts:
        gathered.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(gathered)
            await asyncio.sleep(0)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
