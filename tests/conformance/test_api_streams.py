"""Requests that end early: by a disconnect or an administrator, billed for the tokens generated; and lists of live requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.conformance.conftest import MODEL
from tests.support.polling import DEADLINE_S, block_until
from tests.support.served_model import make_hollow_model
from tests.support.server import Server, running_server

LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the lazy dog"}],
    "max_tokens": 900,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An appliance with a slow fake engine, so that long answers are still running when a test acts."""
    folder = tmp_path_factory.mktemp("slow")
    with running_server(make_hollow_model(folder / MODEL), folder / "data", fake_engine_step_s=0.02) as running:
        yield running


def settled_event(server: Server, request_id: str) -> dict[str, Any]:
    """Wait until a request is settled; return its ledger event."""
    events: list[dict[str, Any]] = []

    def settled() -> bool:
        events[:] = server.admin("GET", "/ledger", params={"request_id": request_id})["data"]
        return bool(events) and events[0]["status"] != "pending"

    block_until(settled, lambda: f"{events}\n{server.log()}")
    return events[0]


def used_blocks(server: Server) -> int:
    return int(server.admin("GET", "/system")["engine"][0]["kv_blocks"]["used"])


def test_a_disconnect_frees_kv_blocks_and_bills_the_generated_tokens(server: Server) -> None:
    for _ in range(10):
        with server.stream_chat(LONG) as answer:
            request_id = answer.headers["x-request-id"]
            lines = answer.iter_lines()
            for _ in range(20):
                next(lines)
        event = settled_event(server, request_id)
        if event["finish_reason"] != "length":  # the answer may be complete before the client disconnects
            break

    assert event["finish_reason"] == "disconnected"
    assert event["status"] == "posted"
    assert 1 <= event["completion_tokens"] < 900
    block_until(lambda: used_blocks(server) == 0, server.log)


async def test_a_disconnect_before_an_unstreamed_answer_ends_the_request(slow_server: Server) -> None:
    headers = {"authorization": f"Bearer {slow_server.api_key}"}

    async def requests() -> set[str]:
        return {row["id"] for row in await asyncio.to_thread(slow_server.list_all, "/requests")}

    known, new = await requests(), set[str]()
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(headers=headers, timeout=DEADLINE_S) as client:
        asking = asyncio.create_task(client.post(f"{slow_server.url}/v1/chat/completions", json=LONG))
        while not new:
            new = await requests() - known
        asking.cancel()
        await asyncio.wait({asking})

    event = settled_event(slow_server, *new)
    assert event["finish_reason"] == "disconnected"
    assert event["completion_tokens"] < 900


async def test_an_administrator_can_end_a_live_request(slow_server: Server) -> None:
    async with AsyncOpenAI(base_url=f"{slow_server.url}/v1", api_key=slow_server.api_key, max_retries=0) as client:
        options = {name: value for name, value in LONG.items() if name != "ignore_eos"}
        stream = await client.chat.completions.create(**options, extra_body={"ignore_eos": True}, stream=True)
        first = await anext(aiter(stream))
        row = slow_server.admin("GET", f"/requests/{first.id}")
        ended = slow_server.admin("DELETE", f"/requests/{first.id}")
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass

    assert row["state"] in ("queued", "prefill", "decode")
    assert (ended["state"], ended["finish_reason"]) == ("finished", "aborted")
    assert caught.value.code == "request_aborted"
    assert settled_event(slow_server, first.id)["finish_reason"] == "aborted"


def test_live_requests_are_listed_first_and_once(slow_server: Server) -> None:
    with slow_server.stream_chat(LONG) as answer:
        request_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()  # held: when the iterator goes, the connection is closed
        next(lines)
        rows = slow_server.admin("GET", "/requests")["data"]

        next(lines)
    assert rows[0]["id"] == request_id
    assert [row["id"] for row in rows].count(request_id) == 1
    assert rows[0]["finish_reason"] is None


def test_each_answer_of_a_request_counts_in_the_size_of_its_batch(slow_server: Server) -> None:
    with slow_server.stream_chat({**LONG, "n": 3}) as answer:
        request_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        next(lines)
        block_until(lambda: slow_server.admin("GET", f"/requests/{request_id}")["batch_size_mean"] is not None)
    settled_event(slow_server, request_id)
    row = slow_server.admin("GET", f"/requests/{request_id}")

    assert round(row["batch_size_mean"]) == 3
    assert (row["admission_wait_s"], row["awaited_limit"]) == (0.0, None)


def test_several_answers_are_one_live_request_counted_for_their_tenant(slow_server: Server) -> None:
    _, secret = slow_server.new_key(tenant={"name": "tenant of three", "tier": "interactive", "weight": 3})

    def holder() -> list[dict[str, Any]]:
        engines = slow_server.admin("GET", "/system")["engine"]
        return [tenant for tenant in engines[0]["tenants"] if tenant["name"] == "tenant of three"]

    with slow_server.stream_chat({**LONG, "n": 3}, key=secret) as answer:
        request_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        next(lines)
        block_until(lambda: any(tenant["requests_running"] == 3 for tenant in holder()), slow_server.log)
        (tenant,) = holder()
        row = slow_server.admin("GET", f"/requests/{request_id}")
        metrics = httpx.get(f"{slow_server.url}/metrics", timeout=10).text
        next(lines)

    event = settled_event(slow_server, request_id)
    assert (tenant["requests_waiting"], tenant["kv_blocks"]) == (0, 3)
    assert (row["state"], row["kv_blocks"]) == ("decode", 3)
    assert f'gatehouse_tenant_kv_blocks{{model="{MODEL}",tenant="tenant of three"}} 3.0' in metrics
    assert (event["finish_reason"], event["status"]) == ("disconnected", "posted")
    block_until(lambda: not holder(), slow_server.log)
