"""HEAD and OPTIONS, for which no route has a handler. Knows the methods of the routes but no handler.

HEAD is GET without the body (RFC 9110, section 9.3.2), for every path that supports GET.
"""

from __future__ import annotations

from collections.abc import Iterable

from litestar.datastructures import MutableScopeHeaders
from litestar.enums import ScopeType
from litestar.routes import BaseRoute, HTTPRoute
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from appliance.base.allowed_methods import allow_header


class HeadLikeGet:
    """ASGI wrapper that passes HEAD to the application as GET and drops the body of the response."""

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
            # The response ends here, so that an endless stream sees a disconnect at once.
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(as_get, receive, send_head)


class CompleteOptions:
    """ASGI wrapper that completes `allow` in responses to OPTIONS: the framework lists only the methods of a path's first
    handler."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        http_routes = [route for route in routes if isinstance(route, HTTPRoute)]
        self._allow_by_path = {route.path_format: allow_header(route.methods) for route in http_routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; anything but OPTIONS passes through."""
        if scope["type"] != ScopeType.HTTP or scope["method"] != "OPTIONS":
            await self._app(scope, receive, send)
            return

        async def send_complete(message: Message) -> None:
            allowed = self._allow_by_path.get(scope.get("path_template", ""))  # None for an unknown path
            if message["type"] == "http.response.start" and allowed is not None:
                MutableScopeHeaders(message)["allow"] = allowed
            await send(message)

        await self._app(scope, receive, send_complete)
