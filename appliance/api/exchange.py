"""One HTTP exchange seen from outside Litestar: its id, the headers of its answer, and what must happen when it ends.

The wrapper sits around the whole application, so that answers to unknown paths and after crashes carry the id too.
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
CLIENT_CLOSED_REQUEST = 499  # is sent to nobody; the log line says what happened
MS_PER_S = 1000

log = structlog.get_logger()


@dataclass(slots=True)
class Exchange:
    """What handlers may add to the answer. `headers` are called when the answer starts, `closers` at its end.

    `model` is the requested model, once that is known.
    """

    request_id: str
    started_s: float
    model: str | None = None
    headers: list[Callable[[], Mapping[str, str]]] = field(default_factory=list)
    closers: list[Callable[[], None]] = field(default_factory=list)
    status: int | None = None
    client_left: bool = False
    _listening: asyncio.Task[None] | None = None

    def cancel_on_disconnect(self, receive: Receive) -> None:
        """Cancel the current task, which answers, when the client leaves or has its whole answer, which a HEAD has at once.

        Call it when the whole body has been read: from then on nobody else may call `receive`.
        """
        answering = asyncio.current_task()
        assert answering is not None, "requests are answered by tasks"
        self._listening = asyncio.create_task(self._listen(receive, answering))

    def stop_listening(self) -> None:
        """End `cancel_on_disconnect`: the task has answered."""
        if self._listening is not None:
            self._listening.cancel()

    async def _listen(self, receive: Receive, answering: asyncio.Task[Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.client_left = True
        answering.cancel()

    @property
    def elapsed_ms(self) -> int:
        """Return milliseconds since the request arrived."""
        return round((time.perf_counter() - self.started_s) * MS_PER_S)


def exchange_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Exchange:
    """Return the exchange that `connection` belongs to."""
    exchange: Exchange = connection.scope["state"]["exchange"]
    return exchange


class WholeRequest(Request[Any, Any, Any]):
    """A request whose client may leave before its whole body has come: the client's error, which the framework calls ours."""

    async def body(self) -> bytes:
        """Return the whole body. Raises RequestTooLarge for JSON that would take too long to read, and what `stream` raises."""
        text = await self.uncounted_body()
        await check_structure(text)
        return text

    async def uncounted_body(self) -> bytes:
        """Return the whole body for `in_turn`, which checks its structure itself. Raises what `stream` raises."""
        return await super().body()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the body in pieces. Raises InvalidValue when its sender has gone."""
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
        # The appliance itself acts until the caller is known, who then takes over the request id and the address.
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
                message["headers"] = [*message["headers"], *_no_store(message["headers"]), *_header_lines(exchange)]
            await send(message)

        try:
            if _has_nul(scope):
                await _send_error(send_with_headers, InvalidValue("a URL must not contain the character U+0000"))
            else:
                await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            answering = asyncio.current_task()
            if not exchange.client_left or answering is None or answering.uncancel() > 0:  # then others have cancelled it, too
                raise
            exchange.status = exchange.status or CLIENT_CLOSED_REQUEST
        except Exception:  # HTTP edge: the last one that can still answer
            log.exception("request failed outside its handler", path=scope["path"])
            if exchange.status is None:
                internal = InternalError("an internal error occurred; look up the request id in the log")
                await _send_error(send_with_headers, internal)
        finally:
            exchange.stop_listening()
            for closer in exchange.closers:
                closer()
            _log_access(exchange, scope)


def _no_store(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the header that keeps an answer out of caches, unless the answer sets its own: a page is for one member, and some
    caches keep any address that ends in `.pdf`, even that of a draft, which changes."""
    is_said = any(name.lower() == b"cache-control" for name, _value in headers)
    return [] if is_said else [(b"cache-control", b"no-store")]


def _header_lines(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    headers = {"x-request-id": exchange.request_id}
    for source in exchange.headers:
        headers.update(source())
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _has_nul(scope: Scope) -> bool:
    """Return whether path or query contain U+0000, which no name here contains and PostgreSQL cannot even compare with."""
    return "\x00" in scope["path"] or b"%00" in scope["query_string"]


async def _send_error(send: Send, error: GatehouseError) -> None:
    body = encode_error(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _log_access(exchange: Exchange, scope: Scope) -> None:
    path = scope["path"]
    record = log.debug if path.startswith(QUIET_PATHS) else log.info
    record("request", method=scope.get("method"), path=path, status=exchange.status, duration_ms=exchange.elapsed_ms)
