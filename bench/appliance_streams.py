"""The whole appliance under concurrent streams: real gateway, real engine, real ledger, one client process.

Each round sends STREAMS chat requests of mixed lengths at once with the same key, waits for all of them, then compares the
delivered tokens with the reported usage and with the ledger. No figure is printed unless they agree.

    python -m bench.appliance_streams            prints one row and adds it to bench/results/
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.ports import free_port
from bench.rows import argument_parser, publish, row_header

MODEL = "gatehouse-demo"
STREAMS = 32
READY_TIMEOUT_S = 120.0
QUESTION = "Tell me about lists in Python. "


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one stream."""

    request_id: str
    completion_tokens: int
    ttft_s: float
    duration_s: float


@contextmanager
def appliance(data_dir: Path, **settings: str) -> Iterator[tuple[str, str, float]]:
    """Start an appliance on a free port; yield its address, an administrator token and the seconds until ready. `settings`:
    environment variables without `GATEHOUSE_`."""
    port = free_port()
    token = f"gha_{secrets.token_hex(16)}"
    command = [sys.executable, "-m", "appliance.cli.main", "serve", "--data-dir", str(data_dir), "--port", str(port)]
    started_s = time.perf_counter()
    environ = {f"GATEHOUSE_{name.upper()}": value for name, value in {"admin_token": token, **settings}.items()}
    process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process)
        yield url, token, time.perf_counter() - started_s
    finally:
        process.terminate()
        process.wait(30)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the appliance reports that it is ready. Raises RuntimeError if it has ended or takes too long."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the appliance ended with exit status {process.returncode}")
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"the appliance was not ready within {READY_TIMEOUT_S:.0f} s")


def make_key(url: str, token: str) -> str:
    """Create a tenant and return a new key of it."""
    with httpx.Client(base_url=f"{url}/admin/v1", headers={"authorization": f"Bearer {token}"}) as admin:
        tenant = admin.post("/tenants", json={"name": f"bench {secrets.token_hex(4)}"}).raise_for_status().json()
        key = admin.post(f"/tenants/{tenant['id']}/keys", json={"name": "bench"}).raise_for_status().json()
    return str(key["key"])


async def stream_one(client: httpx.AsyncClient, lengths: tuple[int, int]) -> Answer:
    """Stream one answer of fixed length. `lengths`: how often the prompt repeats the question, and the answer's tokens."""
    repeats, max_tokens = lengths
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION * repeats}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s = time.perf_counter()
    ttft_s, usage, request_id = 0.0, None, ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        request_id = answer.headers["x-request-id"]
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            if not ttft_s and any(choice["delta"].get("content") for choice in chunk["choices"]):
                ttft_s = time.perf_counter() - started_s
            usage = chunk.get("usage") or usage
    if usage is None or usage["completion_tokens"] != max_tokens:
        raise RuntimeError(f"{request_id} reported {usage} for {max_tokens} tokens")
    return Answer(request_id, usage["completion_tokens"], ttft_s, time.perf_counter() - started_s)


async def run_round(url: str, key: str, rng: random.Random) -> tuple[float, list[Answer]]:
    """Return wall-clock seconds and the answers of one round."""
    lengths = [(rng.randint(1, 8), rng.randint(20, 300)) for _ in range(STREAMS)]
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=600, limits=limits
    ) as client:
        started_s = time.perf_counter()
        answers = await asyncio.gather(*(stream_one(client, pair) for pair in lengths))
    return time.perf_counter() - started_s, list(answers)


def ledger_mismatches(url: str, token: str, delivered: Mapping[str, int]) -> list[str]:
    """Ids of requests whose output tokens in the ledger are not those `delivered`, by id. None of them may be running."""
    posted: dict[str, int] = {}
    query: dict[str, Any] = {"limit": 100}
    with httpx.Client(base_url=f"{url}/admin/v1", headers={"authorization": f"Bearer {token}"}) as admin:
        while True:
            page = admin.get("/ledger", params=query).raise_for_status().json()
            posted |= {row["request_id"]: row["completion_tokens"] for row in page["data"] if row["status"] == "posted"}
            if not page["has_more"]:
                return [request_id for request_id, tokens in delivered.items() if posted.get(request_id) != tokens]
            query["cursor"] = page["next_cursor"]


def count_tokens(answers: list[Answer]) -> int:
    return sum(answer.completion_tokens for answer in answers)


def measure(rounds: int) -> dict[str, Any]:
    """Return one row: medians over rounds, after a warm-up round."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, appliance(Path(folder)) as (url, token, ready_s):
        key = make_key(url, token)
        asyncio.run(run_round(url, key, rng))
        psutil.cpu_percent(None)
        timed = [asyncio.run(run_round(url, key, rng)) for _ in range(rounds)]
        busy_percent = psutil.cpu_percent(None)
        answers = [answer for _, round_answers in timed for answer in round_answers]
        if wrong := ledger_mismatches(url, token, {answer.request_id: answer.completion_tokens for answer in answers}):
            raise RuntimeError(f"the ledger disagrees about {len(wrong)} requests, {wrong[0]} among them")
    ttfts_s = sorted(answer.ttft_s for answer in answers)
    return {
        **row_header("appliance_streams"),
        "model": MODEL,
        "streams": STREAMS,
        "rounds": rounds,
        "ready_s": round(ready_s, 2),
        "tokens_per_s_median": round(statistics.median(count_tokens(some) / wall_s for wall_s, some in timed), 1),
        "ttft_ms_p50": round(1000 * statistics.median(ttfts_s), 1),
        "ttft_ms_p95": round(1000 * ttfts_s[int(0.95 * (len(ttfts_s) - 1))], 1),
        "ttft_ms_max": round(1000 * ttfts_s[-1], 1),
        "cpu_percent": busy_percent,
        "tokens_delivered": count_tokens(answers),
        "ledger_agrees": True,
    }


def main() -> None:
    """Measure, print the row, and add it to the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    options = parser.parse_args()
    row = measure(options.rounds)
    publish(row, options)


if __name__ == "__main__":
    main()
