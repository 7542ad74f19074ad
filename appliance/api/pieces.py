"""Response bodies that are sent in pieces, between which other tasks run. Knows nothing of their content.

In one piece, millions of log-probabilities would be copied several times before the first byte is sent, while all streams of
all tenants wait.
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
    """A piece that is known to be the last one, so that the end of the response needs no packet of its own."""


class PiecewiseResponse(Stream):
    """A response whose `pieces` are sent as they are produced.

    Litestar would use a task group with two tasks and their cancel scopes, which costs more than tokenising a prompt. Here the
    current task sends; `Exchange.cancel_on_disconnect` cancels it when the client leaves.
    """

    def __init__(self, pieces: AsyncIterator[bytes], headers: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__(pieces)
        self._pieces = pieces
        self._headers = headers

    def to_asgi_response(self, *_given: Any, **_options: Any) -> ASGIApp:  # type: ignore[override]
        """Return the ASGI application that sends the response."""
        return self._send

    async def _send(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        is_last = False
        async for piece in self._pieces:
            is_last = isinstance(piece, LastPiece)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        if not is_last:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def long_json_response(parts: Iterable[bytes], length: int) -> PiecewiseResponse:
    """Return a JSON response whose body is the concatenation of `parts`, `length` bytes in total."""
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(length).encode())]
    return PiecewiseResponse(_in_pieces(parts), headers)


async def _in_pieces(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield `parts` joined into pieces of about PIECE_BYTES, and let other tasks run after each."""
    pending: list[bytes] = []
    size = 0
    for part in parts:
        pending.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(pending)
            await asyncio.sleep(0)
            pending, size = [], 0
    if pending:
        yield b"".join(pending)
