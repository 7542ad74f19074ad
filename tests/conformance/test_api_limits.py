"""Limits over HTTP with many clients: the ledger charges exactly the tokens that the fake engine has recorded itself."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engine_record import EngineRecord, Work
from tests.support.fake_engine import ENDLESS_SEED
from tests.support.polling import DEADLINE_S, block_until
from tests.support.served_model import make_hollow_model
from tests.support.server import Server, running_server

MODEL = "tiny"
CLIENTS = 200
STEP_S = 0.002
MESSAGES = [{"role": "user", "content": "the lazy dog"}]


@pytest.fixture(scope="module")
def engine_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the engine records its own token counts."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, engine_records: Path) -> Iterator[Server]:
    """An appliance with a fake engine."""
    model = make_hollow_model(tmp_path_factory.mktemp("models") / MODEL)
    options = {"fake_engine_step_s": STEP_S, "engine_records": engine_records, "max_num_seqs": 256, "max_waiting_requests": 512}
    with running_server(model, tmp_path_factory.mktemp("data"), **options) as server:
        yield server


def recorded_work(engine_records: Path) -> dict[str, Work]:
    """Return what the engine has recorded of each request."""
    records = map(EngineRecord.read, engine_records.iterdir())
    return {request_id: work for record in records for request_id, work in record.requests.items()}


def settled_events(server: Server, tenants: set[str]) -> dict[str, dict[str, Any]]:
    """Wait until no event of these tenants is pending; return the events by request id."""
    found: dict[str, dict[str, Any]] = {}

    def none_pending() -> bool:
        rows = server.list_all("/ledger")
        found.update((row["request_id"], row) for row in rows if row["tenant_id"] in tenants)
        return all(row["status"] != "pending" for row in found.values())

    block_until(none_pending, server.log)
    return found


def assert_tokens_match(events: dict[str, dict[str, Any]], engine_records: Path) -> None:
    """Assert that every event has the token counts recorded by the engine, and all together its sum."""
    works = recorded_work(engine_records)
    for request_id, event in events.items():
        work = works.get(request_id, Work(request_id, 1))
        assert event["completion_tokens"] == work.generated, event
        assert event["prompt_tokens"] == work.prompt_tokens, event
        assert (event["status"] == "posted") == (work.prompt_tokens > 0), event
    generated = sum(works[request_id].generated for request_id in events if request_id in works)
    assert sum(event["completion_tokens"] for event in events.values()) == generated


class Clients:
    """HTTP clients that send chat requests with the keys of several tenants."""

    def __init__(self, server: Server, client: httpx.AsyncClient) -> None:
        self._server = server
        self._client = client

    async def read(
        self, secret: str, *, chunks: int | None = None, begun: asyncio.Event | None = None, **fields: Any
    ) -> tuple[int, list[str]]:
        """Stream a chat; return the status and the data of its frames. The client disconnects after `chunks` frames. `begun` is
        set at the third frame, the first with text."""
        body = {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 20, **fields}
        headers = {"authorization": f"Bearer {secret}"}
        url, frames = f"{self._server.url}/v1/chat/completions", []
        async with self._client.stream("POST", url, json=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    frames.append(line.removeprefix("data: "))
                if begun is not None and len(frames) >= 3:
                    begun.set()
                if chunks is not None and len(frames) >= chunks:
                    break
            return answer.status_code, frames

    async def complete(self, secret: str, **fields: Any) -> httpx.Response:
        """Send a chat request without streaming and return the response."""
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, **fields}
        headers = {"authorization": f"Bearer {secret}"}
        return await self._client.post(f"{self._server.url}/v1/chat/completions", json=body, headers=headers)


async def metrics(server: Server) -> str:
    """Return the current metrics in text format."""
    return str((await asyncio.to_thread(httpx.get, f"{server.url}/metrics")).text)


async def until_metrics(server: Server, text: str) -> None:
    """Wait until the metrics contain `text`."""
    async with asyncio.timeout(DEADLINE_S):
        while text not in await metrics(server):
            pass


async def call_admin(server: Server, method: str, path: str, **options: Any) -> Any:
    """Call the administrators' API without blocking the event loop."""
    return await asyncio.to_thread(server.admin, method, path, **options)


@pytest.fixture
async def clients(server: Server) -> Any:
    limits = httpx.Limits(max_connections=CLIENTS + 10, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        yield Clients(server, client)


async def test_rate_limit_headers_report_the_tightest_limit(server: Server, clients: Clients) -> None:
    _, secret = server.new_key(
        tenant={
            "name": "headers",
            "limits": {"tokens_per_minute": 50_000, "requests_per_minute": 100},
            "model_limits": {MODEL: {"tokens_per_minute": 9000}},
        },
        limits={"tokens_per_minute": 20_000},
    )
    server.admin("PUT", f"/model-limits/{MODEL}", json={"limits": {"requests_per_minute": 30}})
    answer = await clients.complete(secret, max_tokens=4)
    server.admin("DELETE", f"/model-limits/{MODEL}")

    assert answer.headers["x-ratelimit-limit-tokens"] == "9000"
    assert 9000 - 300 < int(answer.headers["x-ratelimit-remaining-tokens"]) <= 9000
    assert answer.headers["x-ratelimit-limit-requests"] == "30"
    assert answer.headers["x-ratelimit-remaining-requests"] == "29"
    assert (await clients.complete(secret, max_tokens=4)).headers["x-ratelimit-limit-requests"] == "100"


async def test_tokens_charged_to_200_concurrent_clients_equal_those_of_the_engine(
    server: Server, engine_records: Path, clients: Clients
) -> None:
    rng = random.Random(4)
    server.admin("PATCH", "/tiers/standard", json={"admission_wait_ms": 1500})
    limits = [{}, {"tokens_per_minute": 4000}, {"concurrent_requests": 10}, {"tokens_per_day": 3000, "requests_per_minute": 40}]
    keys = [server.new_key(tenant={"name": f"crowd {place}", "limits": each}) for place, each in enumerate(limits)]

    async def send_random_request(index: int) -> int:
        _, secret = keys[index % len(keys)]
        match rng.randrange(4):
            case 0:
                return (await clients.complete(secret, max_tokens=rng.randrange(1, 60), n=rng.choice([1, 2]))).status_code
            case 1:
                return (await clients.read(secret, max_tokens=200, chunks=rng.randrange(1, 40)))[0]
            case 2:
                status, _ = await clients.read(secret, max_tokens=300, chunks=2)
                return status
            case _:
                return (await clients.read(secret, max_tokens=rng.randrange(1, 90)))[0]

    statuses = await asyncio.gather(*(send_random_request(index) for index in range(CLIENTS)))
    server.admin("PATCH", "/tiers/standard", json={"admission_wait_ms": 0})
    events = settled_events(server, {tenant_id for tenant_id, _ in keys})

    assert set(statuses) <= {200, 429}
    assert len(events) == statuses.count(200) >= CLIENTS // 3
    assert_tokens_match(events, engine_records)
    usage = server.admin("GET", "/usage", params=_all_days(server))["data"]
    tenants = {tenant_id for tenant_id, _ in keys}
    charged = sum(row["completion_tokens"] for row in usage if row["tenant_id"] in tenants)
    assert charged == sum(event["completion_tokens"] for event in events.values())


def _all_days(server: Server) -> dict[str, str]:
    """Return the query parameters that cover all days with events in the ledger: midnight may pass during the test."""
    days = [date.fromisoformat(row["admitted_at"][:10]) for row in server.list_all("/ledger")]
    end = max(days) + timedelta(days=1)
    return {"start": f"{min(days)}T00:00:00Z", "end": f"{end}T00:00:00Z", "bucket": "hour", "group_by": "tenant"}


async def test_a_disconnect_at_any_token_is_billed_with_the_engine_s_count(
    server: Server, engine_records: Path, clients: Clients
) -> None:
    tenant_id, secret = server.new_key()
    for chunks in range(1, 16):
        status, frames = await clients.read(secret, chunks=chunks, max_tokens=400, seed=ENDLESS_SEED)
        assert (status, len(frames)) == (200, chunks)
    events = settled_events(server, {tenant_id})

    assert {(event["finish_reason"], event["cause"]) for event in events.values()} == {("disconnected", "client")}
    assert_tokens_match(events, engine_records)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("revoke", "invalid_api_key"),
        ("suspend", "tenant_suspended"),
        ("archive", "tenant_suspended"),
        ("rotate", "expired_api_key"),
    ],
)
async def test_losing_access_ends_a_stream_with_an_error_event_and_is_billed(
    server: Server, engine_records: Path, clients: Clients, change: str, code: str
) -> None:
    tenant_id, secret = server.new_key()
    key_id = server.list_all(f"/tenants/{tenant_id}/keys")[0]["id"]
    begun = asyncio.Event()
    reading = asyncio.create_task(clients.read(secret, max_tokens=900, seed=ENDLESS_SEED, begun=begun))
    await begun.wait()
    match change:
        case "revoke":
            await call_admin(server, "DELETE", f"/keys/{key_id}")
        case "suspend":
            await call_admin(server, "PATCH", f"/tenants/{tenant_id}", json={"suspended": True})
        case "archive":
            await call_admin(server, "DELETE", f"/tenants/{tenant_id}")
        case _:
            await call_admin(server, "POST", f"/keys/{key_id}/rotate", json={"grace_s": 1})
    status, frames = await reading
    events = settled_events(server, {tenant_id})
    error = json.loads(frames[-1])["error"]

    assert status == 200
    assert "[DONE]" not in frames
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, code)
    (event,) = events.values()
    assert (event["finish_reason"], event["status"]) == ("aborted", "posted")
    assert 0 < event["completion_tokens"] < 900
    assert_tokens_match(events, engine_records)


async def test_a_hard_budget_ends_a_stream_with_an_error_event(server: Server, engine_records: Path, clients: Clients) -> None:
    server.admin("POST", "/prices", json={"model": MODEL, "prompt": 10**6, "cached_prompt": 10**6, "completion": 10**6})
    tenant_id, secret = server.new_key(tenant={"name": "spender", "limits": {"monthly_budget": 400}, "cut_at_budget": True})
    _, frames = await clients.read(secret, max_tokens=900)
    events = settled_events(server, {tenant_id})

    assert json.loads(frames[-1])["error"]["code"] == "budget_exceeded"
    (event,) = events.values()
    assert event["cause"] == "budget_exceeded"
    assert 400 <= event["prompt_tokens"] + event["completion_tokens"] < 500
    assert (await clients.complete(secret)).json()["error"]["type"] == "insufficient_quota"
    assert_tokens_match(events, engine_records)


async def test_a_refusal_has_retry_after_and_a_tier_with_an_admission_wait_waits_instead(
    server: Server, clients: Clients
) -> None:
    _, secret = server.new_key(tenant={"name": "waiting", "tier": "batch", "limits": {"requests_per_minute": 60}})
    crowd = await asyncio.gather(
        *(clients.complete(secret, max_tokens=1) for _ in range(90))
    )  # 60 per minute refill one per second
    refused = next(answer for answer in crowd if answer.status_code != 200)
    server.admin("PATCH", "/tiers/batch", json={"admission_wait_ms": 60_000})
    waited = await asyncio.gather(*(clients.complete(secret, max_tokens=1) for _ in range(3)))
    server.admin("PATCH", "/tiers/batch", json={"admission_wait_ms": 0})
    counts = await metrics(server)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(refused.headers["retry-after-ms"]) <= 1000
    assert refused.headers["retry-after"] == "1"
    assert [answer.status_code for answer in waited] == [200] * 3
    assert f'gatehouse_admission_waits_total{{model="{MODEL}",reason="admitted"}}' in counts
    await until_metrics(server, f'gatehouse_admission_waiting{{model="{MODEL}"}} 0.0')


async def test_a_client_that_disconnects_while_waiting_for_admission_is_not_charged(server: Server, clients: Clients) -> None:
    tenant_id, secret = server.new_key(tenant={"name": "disconnecting", "tier": "batch", "limits": {"concurrent_requests": 1}})
    server.admin("PATCH", "/tiers/batch", json={"admission_wait_ms": 20_000})
    begun = asyncio.Event()
    first = asyncio.create_task(clients.read(secret, max_tokens=900, seed=ENDLESS_SEED, begun=begun))
    await begun.wait()
    waiting = asyncio.create_task(clients.read(secret, max_tokens=5))
    await until_metrics(server, f'gatehouse_admission_waiting{{model="{MODEL}"}} 1.0')
    waiting.cancel()
    await until_metrics(server, 'reason="abandoned"} 1.0')
    first.cancel()
    await asyncio.gather(first, waiting, return_exceptions=True)
    server.admin("PATCH", "/tiers/batch", json={"admission_wait_ms": 0})

    assert len(settled_events(server, {tenant_id})) == 1


@pytest.mark.parametrize(("how", "status", "code"), [("abort", 503, "request_aborted"), ("revoke", 401, "invalid_api_key")])
async def test_a_request_ended_while_it_waits_gets_the_reason_and_leaves_no_record(
    server: Server, clients: Clients, how: str, status: int, code: str
) -> None:
    tenant_id, secret = server.new_key(
        tenant={"name": f"ended by {how}", "tier": "batch", "limits": {"concurrent_requests": 1}}
    )
    second = server.admin("POST", f"/tenants/{tenant_id}/keys", json={"name": "second"})
    server.admin("PATCH", "/tiers/batch", json={"admission_wait_ms": 60_000})
    begun = asyncio.Event()
    first = asyncio.create_task(clients.read(secret, max_tokens=900, seed=ENDLESS_SEED, begun=begun))
    await begun.wait()
    waiting = asyncio.create_task(clients.complete(second["key"]))
    (row,) = await waiting_rows(server, second["id"])
    if how == "abort":
        assert server.admin("DELETE", f"/requests/{row['id']}")["state"] == "finished"
    else:
        server.admin("DELETE", f"/keys/{second['id']}")
    answer = await waiting
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    server.admin("PATCH", "/tiers/batch", json={"admission_wait_ms": 0})

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert row["awaited_limit"] == "tenant_concurrency"
    assert row["id"] not in settled_events(server, {tenant_id})


async def waiting_rows(server: Server, key_id: str) -> list[dict[str, Any]]:
    """Wait until a request of the key waits for its limits; return its rows in the list of requests."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            rows = (await call_admin(server, "GET", f"/requests?key_id={key_id}"))["data"]
            if rows and rows[0]["awaited_limit"] is not None:
                return list(rows)


async def test_limits_in_shadow_mode_admit_every_request_and_are_counted(server: Server, clients: Clients) -> None:
    _, secret = server.new_key(tenant={"name": "shadow", "limits": {"requests_per_minute": 1}, "limit_mode": "shadow"})
    answers = [await clients.complete(secret, max_tokens=1) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200] * 3
    assert "x-ratelimit-limit-requests" in answers[0].headers
    assert 'gatehouse_shadow_refusals_total{reason="tenant_requests"} 2.0' in await metrics(server)
