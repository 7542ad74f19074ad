"""HEAD is GET without the body (RFC 9110, section 9.3.2), for every path that answers GET. Knows no path."""

from __future__ import annotations

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send


class HeadLikeGet:
    """ASGI wrapper that lets the application see GET where HEAD was asked, and keeps the bodies of its answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; anything but HEAD passes through."""
        if scope["type"] != ScopeType.HTTP or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get: Scope = {**scope, "method": "GET"}

        async def send_head(message: Message) -> None:
            if message["type"] != "http.response.start":
                return
            await send(message)
            # The answer ends here, so that what would stream for ever hears at once that nobody listens.
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(as_get, receive, send_head)
