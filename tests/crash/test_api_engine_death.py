"""Killing the engine during streams: streams get an error, records are settled, readiness fails, and it is restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.support.polling import block_until
from tests.support.served_model import make_hollow_model, make_served_model
from tests.support.server import Server, running_server

MODEL = "tiny"
STREAMS = 4
STEP_S = 0.02
LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the lazy dog"}],
    "max_tokens": 900,
    "extra_body": {"ignore_eos": True},
}


async def read_until_error(client: AsyncOpenAI, begun: asyncio.Semaphore) -> tuple[str, str | None, int]:
    """Read a stream to its error; return request id, error code and number of chunks."""
    stream = await client.chat.completions.create(**LONG, stream=True)
    chunks: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 3:
                begun.release()

    with pytest.raises(openai.APIError) as caught:
        await read()
    return chunks[0].id, caught.value.code, len(chunks)


async def kill_engine_under(server: Server) -> list[tuple[str, str | None, int]]:
    """Open streams, kill the engine once all have begun, and return what `read_until_error` returned for each."""
    pid = server.engine_pid()
    begun = asyncio.Semaphore(0)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=60) as client:
        reading = [asyncio.create_task(read_until_error(client, begun)) for _ in range(STREAMS)]
        for _ in reading:
            await begun.acquire()
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*reading)


def restarts(server: Server) -> int:
    """Return how often the engine was restarted."""
    processes = server.admin("GET", "/system")["processes"]
    return next(int(process["restarts"]) for process in processes if process["role"] == "engine")


@pytest.mark.parametrize(
    ("make_model", "step_s"),
    [pytest.param(make_hollow_model, STEP_S, id="stand-in"), pytest.param(make_served_model, None, id="real engine")],
)
def test_killing_the_engine_ends_streams_settles_records_and_restarts_it(
    tmp_path: Path, make_model: Callable[[Path], Path], step_s: float | None
) -> None:
    with running_server(make_model(tmp_path / MODEL), tmp_path / "data", fake_engine_step_s=step_s) as server:
        seen = asyncio.run(kill_engine_under(server))
        unready = server.ready()
        server.wait_until_ready()
        events = {event["request_id"]: event for event in server.list_all("/ledger")}
        block_until(lambda: restarts(server) == 1, server.log)  # the system page is a second old at most
        answer = server.chat({"model": MODEL, "messages": LONG["messages"], "max_tokens": 3})

    assert [code for _, code, _ in seen] == ["engine_unavailable"] * STREAMS
    assert unready.status_code == 503
    assert "engine" in unready.json()["parts"][f"engine {MODEL}"]
    for request_id, _, chunks in seen:
        assert events[request_id]["status"] == "posted"
        assert events[request_id]["finish_reason"] == "error"
        assert events[request_id]["completion_tokens"] >= chunks - 1
    assert answer.status_code == 200


def test_engines_exit_when_their_gateway_is_killed(tmp_path: Path) -> None:
    model = make_hollow_model(tmp_path / MODEL)
    with running_server(model, tmp_path / "data", fake_engine_step_s=STEP_S) as server:
        pid = server.engine_pid()
        server.kill()

    block_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
