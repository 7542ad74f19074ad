"""An exchange around the application: a disconnect cancels only its task, bugs are answered, each request is logged."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import structlog

from appliance.api.exchange import PATH_CHARS_LOGGED, Exchange, ExchangeWrapper


class Client:
    """A client that sends one request and disconnects when the test sets `left`."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        """Return the end of the connection."""
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Record a message; as in uvicorn, the end of the response is the end of the exchange."""
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.left.set()

    async def request(self, app: Any, path: str = "/path") -> None:
        """Send one request to `app`."""
        scope: Any = {"type": "http", "method": "POST", "path": path, "query_string": b"", "state": {}}
        await ExchangeWrapper(app)(scope, self.receive, self.send)


def watching(then: Any, closed: list[str]) -> Any:
    """Return an application that awaits `then`, is cancelled when its client disconnects, and records its end in `closed`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["state"]["exchange"]
        exchange.on_end.append(lambda: closed.append("closed"))
        exchange.cancel_on_disconnect(receive)
        await then(send)

    return app


async def never(_send: Any) -> None:
    await asyncio.Event().wait()


async def test_a_disconnect_cancels_the_task_of_the_request() -> None:
    client, closed = Client(), list[str]()
    with structlog.testing.capture_logs() as logs:
        requesting = asyncio.create_task(client.request(watching(never, closed)))
        await asyncio.sleep(0)
        client.left.set()
        await requesting
    assert (client.sent, closed) == ([], ["closed"])
    assert [(line["event"], line["status"]) for line in logs] == [("request", 499)]


async def test_a_stream_that_has_begun_keeps_its_status_at_a_disconnect() -> None:
    async def begin(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await never(send)

    client = Client()
    with structlog.testing.capture_logs() as logs:
        requesting = asyncio.create_task(client.request(watching(begin, [])))
        await asyncio.sleep(0)
        client.left.set()
        await requesting
    assert [line["status"] for line in logs] == [200]


async def test_the_end_of_a_response_cancels_nothing() -> None:
    async def answer(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def request_and_continue() -> str:
        await client.request(watching(answer, []))
        for _ in range(3):
            await asyncio.sleep(0)
        return "continued"

    client = Client()
    assert await asyncio.create_task(request_and_continue()) == "continued"


@pytest.mark.parametrize("has_left", [False, True], ids=["connected", "disconnected"])
async def test_a_task_cancelled_by_the_appliance_ends_as_cancelled(has_left: bool) -> None:
    client, closed = Client(), list[str]()
    requesting = asyncio.create_task(client.request(watching(never, closed)))
    await asyncio.sleep(0)
    if has_left:
        client.left.set()
        await asyncio.sleep(0)
    requesting.cancel()
    await asyncio.wait({requesting})
    assert requesting.cancelled()
    assert closed == ["closed"]


async def crash(_scope: Any, _receive: Any, _send: Any) -> None:
    raise ZeroDivisionError


async def begin_and_crash(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ZeroDivisionError


async def test_a_crash_outside_the_handlers_is_a_500_with_the_logged_request_id() -> None:
    client = Client()
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        await client.request(crash)
    start, body = client.sent
    assert (start["status"], json.loads(body["body"])["error"]["code"], body["more_body"]) == (500, "internal_error", False)
    assert dict(start["headers"])[b"x-request-id"].decode() == logs[0]["request_id"]
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("request failed outside its handler", "error"),
        ("request", "info"),
    ]


async def test_a_crash_after_the_response_has_begun_sends_nothing_more() -> None:
    client = Client()
    await client.request(begin_and_crash)
    assert [message["type"] for message in client.sent] == ["http.response.start"]


async def test_log_context_of_an_earlier_request_on_the_connection_is_cleared() -> None:
    client = Client()
    structlog.contextvars.bind_contextvars(tenant_id="tenant of the previous request")
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        await client.request(crash)
    assert all("tenant_id" not in line for line in logs)


@pytest.mark.parametrize(("path", "level"), [("/path", "info"), ("/health", "debug"), ("/static/a.css", "debug")])
async def test_frequent_paths_are_logged_at_debug_level(path: str, level: str) -> None:
    async def answer(_scope: Any, _receive: Any, _send: Any) -> None:
        pass

    with structlog.testing.capture_logs() as logs:
        await Client().request(answer, path)
    assert [line["log_level"] for line in logs] == [level]


async def test_only_the_beginning_of_a_long_path_is_logged() -> None:
    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    with structlog.testing.capture_logs() as logs:
        await Client().request(answer, "/" + "x" * 60_000)
    assert logs[0]["path"] == "/" + "x" * (PATH_CHARS_LOGGED - 1)


def test_the_duration_of_a_request_is_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 12.5)
    assert Exchange(request_id="r", started_s=10.0).elapsed_ms == 2500


async def test_other_asgi_scopes_pass_through_unchanged() -> None:
    passed: list[Any] = []

    async def app(*given: Any) -> None:
        passed.append(given)

    scope: Any = {"type": "lifespan"}
    client = Client()
    await ExchangeWrapper(app)(scope, client.receive, client.send)
    assert passed == [({"type": "lifespan"}, client.receive, client.send)]
