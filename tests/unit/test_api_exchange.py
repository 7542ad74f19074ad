"""A client that leaves: whatever its request awaits, the task that answers is cancelled, and nothing else is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from appliance.api.exchange import ExchangeWrapper


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

    async def ask(self, app: Any) -> None:
        """Send one request to `app`."""
        scope: Any = {"type": "http", "method": "POST", "path": "/asked", "query_string": b"", "state": {}}
        await ExchangeWrapper(app)(scope, self.receive, self.send)


def watching(then: Any, closed: list[str]) -> Any:
    """Return an application that watches its client while it awaits what `then` returns, and notes its end in `closed`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["state"]["exchange"]
        exchange.closers.append(lambda: closed.append("closed"))
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
