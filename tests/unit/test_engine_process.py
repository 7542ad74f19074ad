"""The engine process: frames over a socket pair, shutdown, signals, fatal errors, and the end of either side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import EngineFrame, EngineInfo, FinishReason, GatewayFrame, GenerationRequest, SamplingParams, TokenEvent
from engine.transport import AsyncFrameSocket, PeerClosed, decode_engine_frame, encode_frame
from tests.support import forked_processes
from tests.support.tiny_models import saved_model

DEADLINE_S = 300  # a hang: starts have to wait for a processor
OPTIONS = {"device": "cpu", "threads": 1, "kv_cache_bytes": 2_000_000}


class EngineProcess:
    """A running `engine.main` and our end of its socket."""

    def __init__(self, process: BaseProcess, connection: socket.socket) -> None:
        self.process = process
        self._connection = connection
        self._socket = AsyncFrameSocket(connection)
        self.last_frame = EngineFrame()

    def send(self, frame: GatewayFrame) -> None:
        self._socket.send(encode_frame(frame))

    def send_bytes(self, data: bytes) -> None:
        self._socket.send(data)

    async def frame(self) -> EngineFrame:
        self.last_frame = decode_engine_frame(await asyncio.wait_for(self._socket.receive(), DEADLINE_S))
        return self.last_frame

    async def ready(self) -> EngineInfo:
        while (info := (await self.frame()).ready) is None:
            pass
        return info

    async def events(self, request_id: str) -> AsyncIterator[TokenEvent]:
        """Events of one request, to its last."""
        while True:
            for event in (await self.frame()).events:
                if event.request_id == request_id:
                    yield event
                    if event.finish_reason is not None:
                        return

    async def exit_status(self) -> int:
        return await asyncio.to_thread(forked_processes.wait_for_exit, self.process, DEADLINE_S)

    def hang_up(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        forked_processes.wait_for_exit(self.process, DEADLINE_S)


@contextlib.asynccontextmanager
async def engine_process(model: Path, **changes: Any) -> AsyncIterator[EngineProcess]:
    ours, theirs = socket.socketpair()
    options = {**OPTIONS, "model": str(model), **changes}
    with theirs:
        process = forked_processes.start("tests.support.engine_for_tests", "run", theirs, json.dumps(options))
    engine = EngineProcess(process, ours)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def model() -> Path:
    return saved_model("llama", max_position_embeddings=4096).directory  # 4000 tokens are not over before they are aborted


def request(request_id: str, *, max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(request_id=request_id, tenant_id="alice", prompt_token_ids=[5, 6, 7], sampling=sampling)


async def test_a_request_streams_to_its_end_and_an_abort_frees_blocks_with_exact_counts(model: Path) -> None:
    async with engine_process(model) as engine:
        info = await engine.ready()
        assert (info.architecture, info.device, info.max_model_len) == ("LlamaForCausalLM", "cpu", 4096)

        engine.send(GatewayFrame(submit=[request("short", max_tokens=12)]))
        events = [event async for event in engine.events("short")]
        assert sum(len(event.token_ids) for event in events) == events[-1].num_output_tokens == 12
        assert events[-1].finish_reason is FinishReason.LENGTH

        engine.send(GatewayFrame(submit=[request("long", max_tokens=4000)]))
        received = 0
        async for event in engine.events("long"):
            received += len(event.token_ids)
            if received == 3:
                engine.send(GatewayFrame(abort=["long", "never known"]))
            if event.finish_reason is not None:
                assert event.finish_reason is FinishReason.ABORTED
                assert event.num_output_tokens == received < 4000
                assert event.num_prompt_tokens_computed == 3
        status = engine.last_frame.status
        assert status is not None
        assert status.kv_blocks_used == 0
        assert status.generation_tokens_total == 12 + received
        assert status.prompt_tokens_total == 6


async def test_every_decoding_stream_gets_tokens_in_every_frame_with_events(model: Path) -> None:
    async with engine_process(model, max_num_seqs=32) as engine:
        await engine.ready()
        lengths = {f"stream {i}": 5 + (7 * i) % 40 for i in range(32)}
        engine.send(GatewayFrame(submit=[request(name, max_tokens=length) for name, length in lengths.items()]))
        delivered = dict.fromkeys(lengths, 0)
        ended: set[str] = set()
        while len(ended) < len(lengths):
            events = {event.request_id: event for event in (await engine.frame()).events}
            started = {name for name, count in delivered.items() if count and name not in ended}
            assert not events or started <= set(events), "a step left out a request that decodes"
            for name, event in events.items():
                delivered[name] += len(event.token_ids)
                assert delivered[name] == event.num_output_tokens
                ended |= {name} if event.finish_reason else set()
        assert delivered == lengths
        status = engine.last_frame.status
        assert status is not None
        assert (status.generation_tokens_total, status.kv_blocks_used) == (sum(lengths.values()), 0)


async def test_an_invalid_request_gets_an_error_and_others_are_served(model: Path) -> None:
    async with engine_process(model) as engine:
        await engine.ready()
        sampling = SamplingParams(seed=1)
        bad = GenerationRequest(request_id="bad", tenant_id="bob", prompt_token_ids=[5, 9999], sampling=sampling)
        engine.send(GatewayFrame(submit=[bad, request("good", max_tokens=2)]))
        last_events: dict[str, TokenEvent] = {}
        while len(last_events) < 2:
            last_events |= {event.request_id: event for event in (await engine.frame()).events if event.finish_reason}
        assert last_events["bad"].finish_reason is FinishReason.ERROR
        assert "outside" in (last_events["bad"].error or "")
        assert last_events["good"].num_output_tokens == 2


async def test_shutdown_aborts_live_requests_and_the_process_exits_with_status_0(model: Path) -> None:
    async with engine_process(model) as engine:
        await engine.ready()
        engine.send(GatewayFrame(submit=[request("open", max_tokens=4000)]))
        engine.send(GatewayFrame(shutdown=True))
        events = [event async for event in engine.events("open")]
        assert events[-1].finish_reason is FinishReason.ABORTED
        with pytest.raises(PeerClosed):
            await engine.ready()
        assert await engine.exit_status() == 0


async def test_sigint_is_ignored_by_the_engine_process(model: Path) -> None:
    async with engine_process(model) as engine:
        await engine.ready()
        forked_processes.send_signal(engine.process, signal.SIGINT)
        engine.send(GatewayFrame(submit=[request("after", max_tokens=3)]))
        events = [event async for event in engine.events("after")]
        assert events[-1].num_output_tokens == 3


async def test_a_malformed_frame_ends_the_process_with_status_1(model: Path) -> None:
    async with engine_process(model) as engine:
        await engine.ready()
        engine.send_bytes(b"\x00\x00\x00\x01\xc1")
        assert await engine.exit_status() == 1


async def test_the_process_exits_when_the_gateway_closes_the_socket(model: Path) -> None:
    async with engine_process(model) as engine:
        await engine.ready()
        engine.send(GatewayFrame(submit=[request("open", max_tokens=4000)]))
        engine.hang_up()
        assert await engine.exit_status() == 0


async def test_a_directory_without_a_model_is_reported_in_a_fatal_frame(tmp_path: Path) -> None:
    async with engine_process(tmp_path) as engine:
        while (reason := (await engine.frame()).fatal) is None:
            pass
        assert "config.json" in reason
        assert await engine.exit_status() == 1


def test_a_failed_start_closes_the_socket(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    options = json.dumps({**OPTIONS, "model": str(tmp_path / "no-model")})
    command = [sys.executable, "-W", "always::ResourceWarning", "-m", "engine.main"]
    command += ["--fd", str(theirs.fileno()), "--options", options]
    with ours, theirs:
        engine = subprocess.run(
            command, cwd=forked_processes.REPOSITORY, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False
        )
    assert engine.returncode == 1
    assert "the engine stops" in engine.stderr
    assert "ResourceWarning" not in engine.stderr


ABORTS_WHEN_FINALISED = """
import os, sys, types
build = sys.modules["engine.build"] = types.ModuleType("engine.build")  # the real one takes seconds to import torch
build.build_engine = lambda *_, **__: Engine()
from engine import main
from engine.errors import EngineBroken
class Engine:
    info = types.SimpleNamespace(model="m", kernels="k", num_kv_blocks=1)
    def __del__(self):
        os.abort()  # as torch does with page-locked memory, where the device is lost
    def status(self):
        raise EngineBroken("the device is lost")
sys.exit(main.main(sys.argv[1:]))
"""


def test_nothing_is_finalised_after_a_failure_because_it_might_abort_the_process() -> None:
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-c",
        ABORTS_WHEN_FINALISED,
        "--fd",
        str(theirs.fileno()),
        "--options",
        json.dumps({"model": "x"}),
    ]
    with ours, theirs:
        engine = subprocess.run(
            command, cwd=forked_processes.REPOSITORY, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False
        )
    assert engine.returncode == 1
    assert "the engine stops: the device is lost" in engine.stderr
