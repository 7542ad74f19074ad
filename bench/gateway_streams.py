"""The gateway's cost per streamed token: the whole HTTP application with many streams and a stand-in engine.

The engine runs in a process of its own: every `--step-ms` each live request gets a token, as from a GPU with a small
model. The clients are a third process that discards what it reads. A round is `--streams` concurrent requests of `--tokens`
tokens, from the first byte sent to the last one read. Its figure is the CPU time of the gateway's process, admission and
settlement included, divided by the tokens of the round. If the gateway is slower than the engine, tokens reach the client
several at a time: `tokens_per_frame` says how many.

    python -m bench.gateway_streams                     prints a row and adds it to bench/results/
    python -m bench.gateway_streams --beside DIR        alternates with the gateway of another checkout, as ABBA
    python -m bench.gateway_streams --profile FILE      one round under cProfile, which slows the gateway; no row
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from appliance.app import Started, serve
from appliance.base.interpreter import prepare_to_serve
from appliance.base.logging import configure_logging
from appliance.base.settings import Settings, load_settings
from appliance.serving import model_builder
from appliance.serving.model_folder import ModelFolder
from bench import rows
from engine.protocol import EngineFrame
from tests.support.fake_engine import FakeEngine
from tests.support.served_model import make_hollow_model

HERE = Path(__file__).resolve().parents[1]
"""This checkout. With --beside, this file also runs with the packages of the other one, `bench` included, so it imports from
`bench` only what older checkouts have too."""
MODEL = "tiny"
ADMIN_TOKEN = "gha_token-of-the-bench"
STATUS_S = 0.25
READY_WAIT_S = 120.0
END_OF_BODY = b"0\r\n\r\n"
CONTENT = b'"content":"'


class SteppingEngine(FakeEngine):
    """Sends each live request a token every `step_s`, without catching up on late steps, and a status every STATUS_S."""

    async def _step_forever(self) -> None:
        next_status_s = 0.0
        while True:
            began_s = time.monotonic()
            events = [made for live in list(self._live.values()) if (made := self._advance(live)) is not None]
            if began_s >= next_status_s:
                next_status_s = began_s + STATUS_S
                self.send(EngineFrame(events=events, status=self._status()))
            elif events:
                self.send(EngineFrame(events=events))
            await asyncio.sleep(max(0.0, began_s + self._step_s - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of one round."""

    wall_s: float
    gateway_cpu_s: float
    num_frames: int

    def tokens_per_frame(self, num_tokens: int) -> float | None:
        """Return how many of its `num_tokens` came in a frame on average, None if none had text, as an answer of one token."""
        return round(num_tokens / self.num_frames, 2) if self.num_frames else None


class Client(asyncio.Protocol):
    """One request on one connection, whose answer is discarded. `num_frames` counts frames with text."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._head = b""
        self.num_frames = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the request at once."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count frames and check for the end."""
        if len(self._head) < len(b"HTTP/1.1 200"):
            self._head += data[:12]
            if not self._head.startswith(b"HTTP/1.1 200"[: len(self._head)]):
                self._fail(RuntimeError(repr(data)))
        self.num_frames += data.count(CONTENT)
        if data.endswith(END_OF_BODY) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report a connection that ended before its answer did."""
        self._fail(exc or RuntimeError("the gateway closed the connection"))

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def run_round(gateway: Gateway, streams: int, tokens: int) -> Round:
    """Request `streams` answers of `tokens` tokens at once; return the measurements."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    request = _request("POST", "/v1/chat/completions", gateway.key, json.dumps(body).encode())
    loop = asyncio.get_running_loop()
    process = psutil.Process(gateway.pid)
    before_s, began_s = cpu_s(process), time.perf_counter()
    opened = [await loop.create_connection(lambda: Client(request), "127.0.0.1", gateway.port) for _ in range(streams)]
    await asyncio.gather(*(client.done for _, client in opened))
    wall_s = time.perf_counter() - began_s
    await asyncio.sleep(0.3)  # the last settlements belong to the round
    result = Round(wall_s, cpu_s(process) - before_s, sum(client.num_frames - 1 for _, client in opened))
    for transport, _ in opened:
        transport.close()
    return result


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    port: int
    pid: int
    key: str


@contextmanager
def gateway(tree: Path, folder: Path, step_s: float, profile: Path | None = None) -> Iterator[Gateway]:
    """Yield a gateway that runs the code of `tree`."""
    folder.mkdir()
    make_hollow_model(folder / MODEL)
    command = [sys.executable, __file__, "--gateway", str(folder), str(step_s), *([str(profile)] if profile else [])]
    with started_gateway(command, tree, folder / "gateway.log", {"PYTHONPATH": str(tree)}) as (port, pid):
        yield Gateway(port, pid, uvloop.run(_make_key(port)))


@contextmanager
def started_gateway(
    command: Sequence[str], tree: Path, log_path: Path, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[int, int]]:
    """Run in `tree` a command that prints its port as `serve_gateway` does; yield port and process id. Raises RuntimeError."""
    with log_path.open("a") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=tree, env={**os.environ, **(variables or {})}
        )
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline() or "0")
            if not port:
                raise RuntimeError(log_path.read_text()[-3000:])
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(60)


async def _make_key(port: int) -> str:
    """Wait until the engine is ready, create a tenant, and return its key. Raises RuntimeError after READY_WAIT_S."""
    give_up_s = time.monotonic() + READY_WAIT_S
    while (answer := await _call(port, "GET", "/health/ready"))[0] != 200:
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"the gateway was not ready after {READY_WAIT_S:.0f} s: {answer[1]}")
        await asyncio.sleep(0.05)
    _, tenant = await _call(port, "POST", "/admin/v1/tenants", {"name": "bench"})
    _, key = await _call(port, "POST", f"/admin/v1/tenants/{tenant['id']}/keys", {"name": "bench"})
    return str(key["key"])


async def _call(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(method, path, ADMIN_TOKEN, b"" if body is None else json.dumps(body).encode(), close=True))
    head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split(b" ", 2)[1]), json.loads(content)


def _request(method: str, path: str, key: str, content: bytes, *, close: bool = False) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
    )
    return head.encode() + (b"connection: close\r\n" if close else b"") + b"\r\n" + content


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def serve_gateway(
    folder: Path,
    make_engine_command: Callable[[int], list[str]],
    profile: str | None,
    on_start: Callable[[Started], None] = lambda _: None,
) -> None:
    """Serve until terminated; the first line of the output is the port. `make_engine_command` returns the command of an engine
    that serves on a file descriptor. `profile`: path of cProfile's output."""

    def engine_command(folder: ModelFolder, settings: Settings, fd: int, *, on_gpu: bool = False) -> list[str]:  # noqa: ARG001
        return make_engine_command(fd)

    def announce(started: Started) -> None:
        prepare_to_serve()  # as `gatehouse serve` does
        on_start(started)
        sys.stdout.write(f"{started.port}\n")
        sys.stdout.flush()

    model_builder.engine_command = engine_command
    configure_logging("warning", json=False)
    options = {
        "data_dir": str(folder / "data"),
        "port": 0,
        "models": [str(folder / MODEL)],
        "device": "cpu",
        "admin_token": ADMIN_TOKEN,
        "admin_password": "a password of the bench",
    }
    settings = load_settings(options=options, environ={})
    if profile is None:
        uvloop.run(serve(settings, on_listening=announce))
        return
    profiler = cProfile.Profile()
    try:
        profiler.runcall(uvloop.run, serve(settings, on_listening=announce))
    finally:
        profiler.dump_stats(profile)


def serve_engine(kind: type[FakeEngine], fd: int, step_s: float) -> None:
    """Run the engine on a file descriptor until the gateway closes it."""

    async def run() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
        await kind(reader, writer, step_s=step_s).run()

    prepare_to_serve()  # as an engine does
    uvloop.run(run())


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all rounds and return the row."""
    trees = [HERE] if options.beside is None else [HERE, options.beside.resolve()]
    rounds_by_tree: list[list[Round]] = [[] for _ in trees]
    with ExitStack() as stack:
        gateways = [
            stack.enter_context(gateway(tree, folder / str(index), options.step_ms / 1000)) for index, tree in enumerate(trees)
        ]
        for started in gateways:
            uvloop.run(run_round(started, options.streams, 20))  # warms up
        for number in range(options.rounds):
            order = range(len(trees)) if number % 2 == 0 else reversed(range(len(trees)))
            for index in order:
                rounds_by_tree[index].append(uvloop.run(run_round(gateways[index], options.streams, options.tokens)))
    num_tokens = options.streams * options.tokens
    costs = [[round(1e6 * result.gateway_cpu_s / num_tokens, 1) for result in rounds] for rounds in rounds_by_tree]
    row = {
        **rows.row_header("gateway_streams"),
        "streams": options.streams,
        "tokens": options.tokens,
        "step_ms": options.step_ms,
        "cpu_us_per_token": costs,
        "cpu_us_per_token_median": [statistics.median(samples) for samples in costs],
        "tokens_per_s": [[round(num_tokens / result.wall_s) for result in rounds] for rounds in rounds_by_tree],
        "tokens_per_frame": [[result.tokens_per_frame(num_tokens) for result in rounds] for rounds in rounds_by_tree],
    }
    if len(trees) > 1:
        ratios = [other / own for own, other in zip(*costs, strict=True)]
        row["beside"] = rows.revision(trees[1])
        row["times_cheaper"] = [round(ratio, 3) for ratio in ratios]
        row["times_cheaper_median"] = round(statistics.median(ratios), 3)
    return row


def main() -> None:
    """Measure, print the row and save it; or run the gateway or its engine."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.argv[1:2] == ["--engine"]:
        serve_engine(SteppingEngine, int(sys.argv[2]), float(sys.argv[3]))
        return
    if sys.argv[1:2] == ["--gateway"]:
        os.environ.pop("GATEHOUSE_DATABASE_URL", None)
        folder, step_s, profile = Path(sys.argv[2]), sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else None
        serve_gateway(folder, lambda fd: [sys.executable, __file__, "--engine", str(fd), step_s], profile)
        return
    parser = rows.argument_parser(__doc__)
    parser.add_argument("--streams", type=int, default=256, help="requests at once")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--step-ms", type=float, default=12.0, help="milliseconds between two tokens of a stream")
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds")
    parser.add_argument("--beside", type=Path, help="another checkout, whose gateway is measured alternately with this one's")
    parser.add_argument("--profile", type=Path, help="path of cProfile's output; runs one round, saves no row")
    options = parser.parse_args()
    prepare_to_serve()  # so that no garbage collection is measured as the gateway's
    with tempfile.TemporaryDirectory() as name:
        if options.profile is not None:
            with gateway(HERE, Path(name) / "0", options.step_ms / 1000, options.profile) as started:
                print(uvloop.run(run_round(started, options.streams, options.tokens)))
            return
        row = measure(options, Path(name))
    rows.publish(row, options)


if __name__ == "__main__":
    main()
