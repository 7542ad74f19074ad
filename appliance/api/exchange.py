"""State of one HTTP exchange, kept outside Litestar: request id, response headers, and what must happen when it ends.

The wrapper surrounds the whole application, so that responses to unknown paths and after crashes carry the request id too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from litestar import Request
from litestar.connection import ASGIConnection
from litestar.enums import ScopeType
from litestar.exceptions import InternalServerException
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from appliance.api.error_responses import encode_error
from appliance.api.json_structure import check_structure
from appliance.base.acting import SYSTEM, acting
from appliance.base.errors import GatehouseError, InternalError, InvalidValue
from appliance.base.ids import new_id

QUIET_PATHS = ("/health", "/metrics", "/static")
PATH_CHARS_LOGGED = 1000  # a path may have 64 KiB, from anybody
CLIENT_CLOSED_REQUEST = 499  # never sent, only logged
MS_PER_S = 1000

log = structlog.get_logger()


@dataclass(slots=True)
class Exchange:
    """One request and what handlers add to its response. `header_sources` are called when the response starts, `on_end` when it
    has ended. `model`: the requested model, once it is known."""

    request_id: str
    started_s: float
    model: str | None = None
    header_sources: list[Callable[[], Mapping[str, str]]] = field(default_factory=list)
    on_end: list[Callable[[], None]] = field(default_factory=list)
    status: int | None = None
    client_left: bool = False
    _disconnect_listener: asyncio.Task[None] | None = None

    def cancel_on_disconnect(self, receive: Receive) -> None:
        """Cancel the current task when the client disconnects or has received the whole response (for HEAD, at once).

        Call this only after the whole body has been read: from then on nothing else may call `receive`.
        """
        task = asyncio.current_task()
        assert task is not None, "requests are served by tasks"
        self._disconnect_listener = asyncio.create_task(self._cancel_at_disconnect(receive, task))

    def stop_listening(self) -> None:
        """Undo `cancel_on_disconnect`, once the task has responded."""
        if self._disconnect_listener is not None:
            self._disconnect_listener.cancel()

    async def _cancel_at_disconnect(self, receive: Receive, task: asyncio.Task[Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.client_left = True
        task.cancel()

    @property
    def elapsed_ms(self) -> int:
        """Return the milliseconds since the request arrived."""
        return round((time.perf_counter() - self.started_s) * MS_PER_S)


def exchange_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Exchange:
    """Return the exchange that `connection` belongs to."""
    exchange: Exchange = connection.scope["state"]["exchange"]
    return exchange


class CheckedRequest(Request[Any, Any, Any]):
    """A request that checks its body: a disconnect before its end is the client's error (the framework treats it as ours), and
    JSON with too much structure is refused."""

    async def body(self) -> bytes:
        """Return the whole body. Raises RequestTooLarge for JSON that takes too long to decode, and what `stream` raises."""
        text = await self.unchecked_body()
        await check_structure(text)
        return text

    async def unchecked_body(self) -> bytes:
        """Return the whole body without `check_structure`, which `read_in_turn` does later. Raises what `stream` raises."""
        return await super().body()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the body in pieces. Raises InvalidValue if the client disconnects before its end."""
        try:
            async for piece in super().stream():
                yield piece
        except InternalServerException as error:
            raise InvalidValue("the client disconnected before the body was complete") from error


class ExchangeWrapper:
    """ASGI wrapper that makes an Exchange for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; anything but HTTP passes through."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        exchange = Exchange(request_id=new_id("req"), started_s=time.perf_counter())
        scope["state"]["exchange"] = exchange
        # The appliance is the actor until the caller is authenticated; the caller's actor keeps the request id and the address.
        client = scope.get("client")
        actor = dataclasses.replace(SYSTEM, request_id=exchange.request_id, address=client[0] if client else None)
        # The task belongs to this request, but its context may still be that of the previous request on the connection.
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)
        with acting(actor):
            await self._serve(exchange, scope, receive, send)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *_no_store(message["headers"]), *_added_headers(exchange)]
            await send(message)

        try:
            if _has_nul(scope):
                await _send_error(send_with_headers, InvalidValue("a URL must not contain the character U+0000"))
            else:
                await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not exchange.client_left or task is None or task.uncancel() > 0:  # above 0: something else cancelled it as well
                raise
            exchange.status = exchange.status or CLIENT_CLOSED_REQUEST
        except Exception:  # HTTP edge: the last place that can still respond
            log.exception("request failed outside its handler", path=scope["path"])
            if exchange.status is None:
                internal = InternalError("an internal error occurred; look up the request id in the log")
                await _send_error(send_with_headers, internal)
        finally:
            exchange.stop_listening()
            for callback in exchange.on_end:
                callback()
            _log_access(exchange, scope)


def _no_store(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return `cache-control: no-store` unless the response sets its own: pages are for one member, and some caches keep every
    URL that ends in `.pdf`, even that of a draft, which changes."""
    has_own = any(name.lower() == b"cache-control" for name, _value in headers)
    return [] if has_own else [(b"cache-control", b"no-store")]


def _added_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    headers = {"x-request-id": exchange.request_id}
    for source in exchange.header_sources:
        headers.update(source())
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _has_nul(scope: Scope) -> bool:
    """Return whether path or query contain U+0000. No name here contains it, and PostgreSQL refuses even to compare with it."""
    return "\x00" in scope["path"] or b"%00" in scope["query_string"]


async def _send_error(send: Send, error: GatehouseError) -> None:
    body = encode_error(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _log_access(exchange: Exchange, scope: Scope) -> None:
    path = scope["path"]
    record = log.debug if path.startswith(QUIET_PATHS) else log.info
    record(
        "request",
        method=scope.get("method"),
        path=path[:PATH_CHARS_LOGGED],
        status=exchange.status,
        duration_ms=exchange.elapsed_ms,
    )
