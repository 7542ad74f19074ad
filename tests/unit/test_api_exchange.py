"""An exchange from outside the application: a client that leaves cancels the task that answers it and nothing else, a bug is
answered, and the log has a line for each."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import structlog

from appliance.api.exchange import Exchange, ExchangeWrapper


class Client:
    """A client that sends nothing more and leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        """Return the end of the connection."""
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Note what was sent; like uvicorn, take the end of the answer for the end of the exchange."""
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.left.set()

    async def ask(self, app: Any, path: str = "/asked") -> None:
        """Send one request to `app`."""
        scope: Any = {"type": "http", "method": "POST", "path": path, "query_string": b"", "state": {}}
        await ExchangeWrapper(app)(scope, self.receive, self.send)


def watching(then: Any, closed: list[str]) -> Any:
    """Return an application that watches its client while it awaits what `then` returns, and notes its end in `closed`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["state"]["exchange"]
        exchange.on_end.append(lambda: closed.append("closed"))
        exchange.cancel_on_disconnect(receive)
        await then(send)

    return app


async def never(_send: Any) -> None:
    await asyncio.Event().wait()


async def test_a_client_that_leaves_cancels_what_its_request_awaits_and_nobody_is_answered() -> None:
    client, closed = Client(), list[str]()
    with structlog.testing.capture_logs() as logs:
        asking = asyncio.create_task(client.ask(watching(never, closed)))
        await asyncio.sleep(0)
        client.left.set()
        await asking
    assert (client.sent, closed) == ([], ["closed"])
    assert [(line["event"], line["status"]) for line in logs] == [("request", 499)]


async def test_a_stream_that_has_begun_keeps_its_status_when_its_client_leaves() -> None:
    async def begin(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await never(send)

    client = Client()
    with structlog.testing.capture_logs() as logs:
        asking = asyncio.create_task(client.ask(watching(begin, [])))
        await asyncio.sleep(0)
        client.left.set()
        await asking
    assert [line["status"] for line in logs] == [200]


async def test_the_end_of_an_answer_cancels_nothing() -> None:
    async def answer(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask_and_go_on() -> str:
        await client.ask(watching(answer, []))
        for _ in range(3):
            await asyncio.sleep(0)
        return "went on"

    client = Client()
    assert await asyncio.create_task(ask_and_go_on()) == "went on"


@pytest.mark.parametrize("has_left", [False, True], ids=["its client is there", "its client has left"])
async def test_a_task_that_the_appliance_cancels_ends_as_cancelled(has_left: bool) -> None:
    client, closed = Client(), list[str]()
    asking = asyncio.create_task(client.ask(watching(never, closed)))
    await asyncio.sleep(0)
    if has_left:
        client.left.set()
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    assert closed == ["closed"]


async def crash(_scope: Any, _receive: Any, _send: Any) -> None:
    raise ZeroDivisionError


async def begin_and_crash(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ZeroDivisionError


async def test_a_crash_outside_the_handlers_is_answered_with_the_id_under_which_it_is_logged() -> None:
    client = Client()
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        await client.ask(crash)
    start, body = client.sent
    assert (start["status"], json.loads(body["body"])["error"]["code"], body["more_body"]) == (500, "internal_error", False)
    assert dict(start["headers"])[b"x-request-id"].decode() == logs[0]["request_id"]
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("request failed outside its handler", "error"),
        ("request", "info"),
    ]


async def test_a_crash_after_an_answer_has_begun_sends_nothing_more() -> None:
    client = Client()
    await client.ask(begin_and_crash)
    assert [message["type"] for message in client.sent] == ["http.response.start"]


async def test_the_log_of_a_request_has_nothing_of_the_one_before_it_on_the_connection() -> None:
    client = Client()
    structlog.contextvars.bind_contextvars(tenant_id="of the request before")
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        await client.ask(crash)
    assert all("tenant_id" not in line for line in logs)


@pytest.mark.parametrize(("path", "level"), [("/asked", "info"), ("/health", "debug"), ("/static/a.css", "debug")])
async def test_what_is_asked_all_the_time_is_logged_for_debugging_alone(path: str, level: str) -> None:
    async def answer(_scope: Any, _receive: Any, _send: Any) -> None:
        pass

    with structlog.testing.capture_logs() as logs:
        await Client().ask(answer, path)
    assert [line["log_level"] for line in logs] == [level]


def test_the_time_of_a_request_is_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 12.5)
    assert Exchange(request_id="r", started_s=10.0).elapsed_ms == 2500


async def test_what_is_no_request_passes_through_as_it_is() -> None:
    passed: list[Any] = []

    async def app(*given: Any) -> None:
        passed.append(given)

    scope: Any = {"type": "lifespan"}
    client = Client()
    await ExchangeWrapper(app)(scope, client.receive, client.send)
    assert passed == [({"type": "lifespan"}, client.receive, client.send)]
