"""The error page for unknown paths. No guard runs for them, so the session is resolved when the response is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from litestar import Request, Response
from litestar.exceptions import MethodNotAllowedException, NotFoundException
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from appliance.console.error_pages import error_handler
from appliance.console.rendering import Html, Pages
from appliance.console.security import ConsoleRequest, resolve_session

if TYPE_CHECKING:
    from appliance.serving.services import Services

API_PREFIXES = ("/v1", "/admin", "/health", "/metrics", "/schema")
"""Paths with these prefixes always answer in JSON, also to browsers."""

ErrorHandler = Callable[[ConsoleRequest, Exception], Response[Any]]


def answer_unknown_path(services: Services, otherwise: ErrorHandler) -> ErrorHandler:
    """Return the handler of errors outside of all routes: a page for browsers, `otherwise` for programs and API paths."""
    show_page = error_handler(Pages(services))

    def answer(request: ConsoleRequest, error: Exception) -> Response[Any]:
        is_unknown_page = isinstance(error, NotFoundException | MethodNotAllowedException) and not _is_api_path(request)
        if not is_unknown_page or "text/html" not in request.headers.get("accept", ""):
            return otherwise(request, error)

        async def page() -> Html:
            try:
                await resolve_session(request, services)
            except Exception as failure:  # noqa: BLE001 - HTTP edge: logged with the reference that the page shows
                return show_page(request, failure)
            return show_page(request, error)

        return DeferredPage(page)

    return answer


def _is_api_path(request: ConsoleRequest) -> bool:
    path = request.scope["path"]
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in API_PREFIXES)


class DeferredPage(Response[str]):
    """A response that is rendered when it is sent, because error handlers cannot await the database."""

    def __init__(self, page: Callable[[], Awaitable[Html]]) -> None:
        super().__init__("")
        self._page = page

    def to_asgi_response(self, app: Any, request: Request[Any, Any, Any], **_options: Any) -> ASGIResponse:  # noqa: ARG002 - theirs
        return _DeferredAnswer(self._page, request)


class _DeferredAnswer(ASGIResponse):
    def __init__(self, page: Callable[[], Awaitable[Html]], request: Request[Any, Any, Any]) -> None:
        super().__init__()
        self._page, self._request = page, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = await self._page()
        await page.to_asgi_response(app=None, request=self._request)(scope, receive, send)
