"""Killing the appliance under load: after the restart every admitted request is in the ledger once and settled."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.support.fake_engine import ENDLESS_SEED
from tests.support.served_model import make_hollow_model
from tests.support.server import Server, running_server, start_server

MODEL = "tiny"
STREAMS = 16
STEP_S = 0.02
MESSAGES = [{"role": "user", "content": "the lazy dog"}]


async def stream_until_cut(
    client: httpx.AsyncClient, server: Server, seen: list[str], begun: asyncio.Semaphore, index: int
) -> None:
    """Read one stream after another until the appliance is gone; append the id of every admitted request to `seen`."""
    headers = {"authorization": f"Bearer {server.api_key}"}
    with suppress(httpx.TransportError):
        while True:
            body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3 + 40 * (index % 4), "stream": True}
            if index == 1:
                body["seed"] = ENDLESS_SEED  # so that a request is in flight at the kill, however late this process reads
            async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status_code == 200
                seen.append(answer.headers["x-request-id"])
                async for _ in answer.aiter_lines():
                    begun.release()


async def load_and_kill(server: Server) -> list[str]:
    """Put load on the appliance, kill it while it streams, and return the ids of all admitted requests."""
    seen: list[str] = []
    begun = asyncio.Semaphore(0)
    async with httpx.AsyncClient(timeout=30) as client:
        readers = [asyncio.create_task(stream_until_cut(client, server, seen, begun, index)) for index in range(STREAMS)]
        for _ in range(STREAMS * 60):
            await begun.acquire()
        server.process.kill()
        await asyncio.gather(*readers)
    return seen


def test_after_a_kill_under_load_every_admitted_request_is_settled_once(tmp_path: Path) -> None:
    model = make_hollow_model(tmp_path / MODEL)
    server = start_server(model, tmp_path / "data", fake_engine_step_s=STEP_S)
    try:
        server.wait_until_ready()
        seen = asyncio.run(load_and_kill(server))
    finally:
        server.kill()
    with running_server(model, tmp_path / "data", fake_engine_step_s=STEP_S) as again:
        events = again.list_all("/ledger")
        rows = again.list_all("/requests")
        status = again.stop()

    counts = Counter(event["request_id"] for event in events)
    assert set(counts.values()) == {1}
    assert set(seen) <= set(counts)
    assert {event["status"] for event in events} <= {"posted", "voided", "recovered"}
    recovered = [event for event in events if event["status"] == "recovered"]
    assert recovered
    assert all(event["estimated"] and event["finish_reason"] == "error" for event in recovered)
    assert {row["id"] for row in rows} == set(counts)
    assert all(row["finished_at"] is not None for row in rows)
    assert status == 0
