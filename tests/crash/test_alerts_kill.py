"""An appliance killed between sending an alert and recording it sends the same message again after the restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from appliance.metering.alerts.signature import signature
from tests.support.alerts import Receiver, receiving
from tests.support.polling import poll_until
from tests.support.served_model import make_hollow_model
from tests.support.server import Server, start_server

MODEL = "tiny"
STEP_S = 0.005
UNIT = 10**6
HANGS, TAKES = b"", b"HTTP/1.1 204 No Content\r\n\r\n"


def spend_the_budget(server: Server, port: int) -> tuple[str, str]:
    """Add a webhook on `port`, and exhaust a tenant's budget with one request. Return the webhook's id and secret."""
    webhook = server.admin("POST", "/webhooks", json={"kind": "webhook", "target": f"http://127.0.0.1:{port}/alerts"})
    price = {"model": MODEL, "currency": "EUR", "prompt": 0, "cached_prompt": 0, "completion": 10**12}
    server.admin("POST", "/prices", json=price)
    _, key = server.new_key(tenant={"name": "bob", "limits": {"monthly_budget": 3 * UNIT}})
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "fox"}],
        "ignore_eos": True,
    }
    answer = server.chat(body, key=key)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    return webhook["id"], webhook["secret"]


def message_ids(receiver: Receiver) -> list[str]:
    return [headers["webhook-id"] for _, headers, _ in receiver.requests]


async def test_a_message_being_sent_at_a_kill_is_sent_again_with_the_same_id(tmp_path: Path) -> None:
    model = make_hollow_model(tmp_path / MODEL)
    options: dict[str, Any] = {"fake_engine_step_s": STEP_S, "webhook_networks": "127.0.0.0/8"}
    async with receiving(HANGS) as receiver:
        server = await asyncio.to_thread(start_server, model, tmp_path / "data", **options)
        try:
            await asyncio.to_thread(server.wait_until_ready)
            webhook_id, secret = await asyncio.to_thread(spend_the_budget, server, receiver.port)
            await poll_until(lambda: len(receiver.requests) == 1)
            await asyncio.to_thread(server.kill)
        finally:
            server.kill()
        receiver.answers = [TAKES]
        server = await asyncio.to_thread(start_server, model, tmp_path / "data", **options)
        try:
            await poll_until(lambda: len(receiver.requests) == 3)
            await asyncio.to_thread(server.wait_until_ready)
            sent = await asyncio.to_thread(server.list_all, f"/webhooks/{webhook_id}/deliveries")
            assert await asyncio.to_thread(server.stop) == 0
        finally:
            server.kill()

    first, *again = message_ids(receiver)
    assert set(again) == {delivery["id"] for delivery in sent}
    assert again.count(first) == 1
    told = sorted((receiver.json(index)["type"], receiver.json(index)["data"]["percent"]) for index in (1, 2))
    assert told == [("budget.threshold", 80), ("budget.threshold", 100)]
    for _, headers, body in receiver.requests:
        signed = signature(secret, headers["webhook-id"], int(headers["webhook-timestamp"]), body)
        assert headers["webhook-signature"] == signed
    assert {delivery["attempts"] for delivery in sent if delivery["id"] == first} == {2}
