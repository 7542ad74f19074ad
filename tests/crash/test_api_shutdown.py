"""Draining and shutdown, refused starts, and losing or reacquiring the claim of the database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from appliance.api.http_server import CannotStart
from appliance.app import serve
from appliance.base.data_folder import CONTROL_FILE
from appliance.base.database_claim import LOCK_KEY
from appliance.base.settings import load_settings
from appliance.serving.model_folder import NotAModel
from tests.support.databases import Cluster
from tests.support.polling import block_until
from tests.support.served_model import make_hollow_model
from tests.support.server import Server, running_server

MODEL = "tiny"
STEP_S = 0.02


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_hollow_model(tmp_path / MODEL)


def body(max_tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "the lazy dog"}], "max_tokens": max_tokens}


async def stream_through_a_signal(server: Server) -> tuple[httpx.Response, str]:
    """Send SIGTERM during a stream; return the response to a later request, and the whole stream."""
    headers = {"authorization": f"Bearer {server.api_key}"}
    url, streamed = f"{server.url}/v1/chat/completions", {**body(150), "stream": True}
    async with httpx.AsyncClient(timeout=30, headers=headers) as client, client.stream("POST", url, json=streamed) as answer:
        lines = answer.aiter_lines()
        text = await anext(lines)
        server.send_signal(signal.SIGTERM)
        while (refused := await client.post(url, json=body(3))).status_code == 200:
            pass
        async for line in lines:
            text += line
    return refused, text


def test_draining_refuses_new_requests_and_finishes_running_ones(tmp_path: Path, model: Path) -> None:
    with running_server(model, tmp_path / "data", fake_engine_step_s=STEP_S) as server:
        assert (tmp_path / "data" / CONTROL_FILE).exists()
        refused, text = asyncio.run(stream_through_a_signal(server))

        assert server.wait_for_exit() == 0
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) >= 1
    assert text.endswith("data: [DONE]")
    assert not (tmp_path / "data" / CONTROL_FILE).exists()


def causes(data_dir: Path) -> list[tuple[str, str]]:
    """Return status and cause of the requests in the ledger of a stopped appliance."""
    with contextlib.closing(sqlite3.connect(data_dir / "gatehouse.db")) as database:
        return database.execute("SELECT finish_reason, cause FROM usage_events").fetchall()


def test_a_second_signal_ends_immediately_and_requests_are_recorded_as_shut_down(tmp_path: Path, model: Path) -> None:
    with running_server(model, tmp_path / "data", fake_engine_step_s=1.0) as server, server.stream_chat(body(900)) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.send_signal(signal.SIGINT)
        block_until(lambda: server.ready().json()["parts"]["gateway"] == "draining")
        server.send_signal(signal.SIGINT)

        assert server.wait_for_exit() == 0
    assert causes(tmp_path / "data") == [("aborted", "shutdown")]


def test_a_request_that_outlives_the_drain_ends_with_a_retryable_error(tmp_path: Path, model: Path) -> None:
    with running_server(model, tmp_path / "data", fake_engine_step_s=STEP_S, drain_timeout_s=0.2) as server:
        with server.stream_chat(body(900)) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            *_, last = filter(None, lines)

        assert server.wait_for_exit() == 0
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert causes(tmp_path / "data") == [("aborted", "shutdown")]


def test_a_second_appliance_on_the_same_data_is_refused(tmp_path: Path, model: Path) -> None:
    with running_server(model, tmp_path / "data", fake_engine_step_s=STEP_S):
        settings = load_settings(options={"data_dir": tmp_path / "data", "port": 0, "models": (str(model),)}, environ={})
        with pytest.raises(CannotStart, match="another Gatehouse already runs"):
            asyncio.run(serve(settings))


def test_a_port_in_use_is_reported_on_one_line(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = load_settings(options={"data_dir": tmp_path / "data", "port": port, "models": (str(model),)}, environ={})
        with pytest.raises(CannotStart, match=f"port {port} on 127.0.0.1 is in use"):
            asyncio.run(serve(settings))
    assert not (tmp_path / "data" / "gatehouse.db").exists()


def test_a_path_that_is_no_model_is_reported_before_files_are_created(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    settings = load_settings(options={"data_dir": tmp_path / "data", "models": (str(tmp_path / "empty"),)}, environ={})
    with pytest.raises(NotAModel, match=r"no config\.json, no tokenizer\.json, no model\.safetensors"):
        asyncio.run(serve(settings))
    assert not (tmp_path / "data").exists()


def test_an_unreachable_database_is_reported_on_one_line(tmp_path: Path, model: Path) -> None:
    url = f"postgresql://nobody@/nothing?host={tmp_path}"
    options = {"data_dir": tmp_path / "data", "port": 0, "models": (str(model),), "database_url": url}
    with pytest.raises(CannotStart, match="the database cannot be used") as caught:
        asyncio.run(serve(load_settings(options=options, environ={})))

    assert "\n" not in str(caught.value)


@pytest.mark.postgres
def test_the_appliance_serves_over_postgresql(tmp_path: Path, model: Path, postgresql: Cluster) -> None:
    url = postgresql.create()
    with running_server(model, tmp_path / "data", fake_engine_step_s=0.0, database_url=url) as server:
        answer = server.chat(body(5))
        (event,) = server.list_all("/ledger")

        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == event["completion_tokens"] == 5
        assert server.admin("GET", "/system")["database"]["kind"] == "postgresql"
        assert server.stop() == 0
    postgresql.drop(url)


def take_claim(url: str, waiting: psycopg.Connection[Any]) -> None:
    """Terminate the connection that claims the database and let `waiting` claim it next."""
    with ThreadPoolExecutor(1) as thread, psycopg.connect(url, autocommit=True) as connection:
        taken = thread.submit(waiting.execute, "SELECT pg_advisory_lock(%s)", (LOCK_KEY,))
        locks = "FROM pg_locks WHERE locktype = 'advisory'"
        block_until(lambda: connection.execute(f"SELECT {locks} AND NOT granted").fetchone() is not None)
        connection.execute(f"SELECT pg_terminate_backend(pid) {locks} AND granted")
        taken.result(60)


@pytest.mark.postgres
def test_losing_the_database_to_another_appliance_ends_requests_and_exits_with_the_reason(
    tmp_path: Path, model: Path, postgresql: Cluster
) -> None:
    url = postgresql.create()
    with running_server(model, tmp_path / "data", fake_engine_step_s=STEP_S, database_url=url) as server:
        with server.stream_chat(body(900)) as answer:
            lines = answer.iter_lines()
            next(lines)
            with psycopg.connect(url, autocommit=True) as other:
                take_claim(url, other)
                *_, last = filter(None, lines)

        assert server.wait_for_exit() == 1
        log = server.log()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert "another Gatehouse claimed the database" in log
    postgresql.drop(url)


@pytest.mark.postgres
def test_an_appliance_continues_after_reclaiming_its_database(tmp_path: Path, model: Path, postgresql: Cluster) -> None:
    url = postgresql.create()
    with running_server(model, tmp_path / "data", fake_engine_step_s=0.0, database_url=url) as server:
        with psycopg.connect(url) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        block_until(lambda: "database claimed again" in server.log(), server.log)
        server.wait_until_ready()
        answer = server.chat(body(5))

        assert answer.status_code == 200
        assert server.stop() == 0
    postgresql.drop(url)
