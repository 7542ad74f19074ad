"""Clients of several tenants that read, disconnect or are aborted, and what each of them observed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.raw_http import ConnectionLost, RawHttpClient

MODEL = "tiny"
TEXTS = ("the lazy dog", "the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs")
MANNERS = ("stream", "stream", "stream", "whole", "whole", "leave", "abort", "two answers")
BATCH_SHARE = 0.25
PAUSE_S = 0.02
DRAINING = "draining"


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a client observed of one request with a response. `usage` and `ended` are set if it read the end."""

    request_id: str
    tenant: str
    manner: str
    status: int
    batch: bool = False
    chunks: int = 0
    ended: bool = False
    error: str | None = None
    usage: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Load:
    """`clients_per_key` concurrent clients for each of `keys`."""

    port: int
    keys: Mapping[str, str]
    admin_token: str
    rng: random.Random
    clients_per_key: int = 4
    seen: list[Seen] = field(default_factory=list)
    stopped: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        """Start all clients."""
        for tenant, secret in self.keys.items():
            for _ in range(self.clients_per_key):
                rng = random.Random(self.rng.random())
                self._tasks.append(asyncio.create_task(self._work(tenant, secret, rng)))

    async def finish(self) -> Sequence[Seen]:
        """Send no new requests, wait for all clients, and return what they observed."""
        self.stopped = True
        await asyncio.gather(*self._tasks)
        return self.seen

    async def _work(self, tenant: str, secret: str, rng: random.Random) -> None:
        wire, admin = RawHttpClient(self.port, secret), RawHttpClient(self.port, self.admin_token)
        try:
            while not self.stopped and not (self.seen and self.seen[-1].error == DRAINING):
                if not await self._send_request(wire, admin, tenant, rng):
                    await asyncio.sleep(PAUSE_S)
        except ConnectionLost:
            return
        finally:
            wire.abort()
            admin.abort()

    async def _send_request(self, wire: RawHttpClient, admin: RawHttpClient, tenant: str, rng: random.Random) -> bool:
        """Send one request; return whether it was admitted."""
        manner = rng.choice(MANNERS)
        body = _body(manner, rng)
        head = await wire.send("POST", "/v1/chat/completions", body)
        assert "x-request-id" in head.headers, (head, await wire.content(head))
        request_id, batch = head.headers["x-request-id"], "service_tier" in body
        seen = Seen(request_id=request_id, tenant=tenant, manner=manner, status=head.status, batch=batch)
        self.seen.append(seen)
        if "content-length" in head.headers:
            _record_response(seen, json.loads(await wire.content(head)))
            return seen.status == 200
        until = rng.randint(0, 30) if manner in ("leave", "abort") else None
        async for data in wire.events():
            _record_event(seen, data)
            if seen.chunks == until and manner == "leave":
                wire.abort()
                return True
            if seen.chunks == until:
                until = None
                await admin.content(await admin.send("DELETE", f"/admin/v1/requests/{seen.request_id}"))
        return True


def _body(manner: str, rng: random.Random) -> dict[str, Any]:
    long = rng.random() < 0.4
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": rng.choice(TEXTS)}],
        "max_tokens": rng.randint(40, 400) if long else rng.randint(1, 20),
        "n": 2 if manner == "two answers" else 1,
        "ignore_eos": True,
        **({"service_tier": "flex"} if rng.random() < BATCH_SHARE else {}),
        **({} if manner == "whole" else {"stream": True, "stream_options": {"include_usage": True}}),
    }


def _record_response(seen: Seen, answer: dict[str, Any]) -> None:
    seen.ended = True
    seen.usage = answer.get("usage")
    seen.error = answer["error"]["code"] if "error" in answer else None


def _record_event(seen: Seen, data: bytes) -> None:
    if data == b"[DONE]":
        seen.ended = True
        return
    event = json.loads(data)
    if "error" in event:
        seen.ended, seen.error = True, event["error"]["code"]
    seen.usage = event.get("usage") or seen.usage
    seen.chunks += any(choice["delta"].get("content") for choice in event.get("choices", ()))
